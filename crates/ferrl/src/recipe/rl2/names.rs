//! The options of RL2's trainers in all its versions, and Ferrl's counterparts.

/// RL2's rewards see the stop string: it decodes completions from their ids.
pub(super) const STOP: &str = "rollout.train_sampling_params.stop";

/// Tables that have had several names.
pub(super) const TABLES: &[(&str, &str)] = &[
    ("data.train", "train_data"),
    ("data.test", "test_data"),
    ("rollout.train", "train_data"),
    ("rollout.test", "test_data"),
    ("train_data.experience", "train_data"),
    ("test_data.experience", "test_data"),
    ("train_data.sampling_params", "rollout.train_sampling_params"),
    ("test_data.sampling_params", "rollout.test_sampling_params"),
    ("actor.kl", "kl"),
];

/// Options whose key here has another name.
pub(super) const RENAMED: &[(&str, &str)] = &[
    ("actor.cp_size", "parallel.sp_size"),
    ("actor.ddp_size", "parallel.ddp_size"),
    ("actor.dtype", "model.dtype"),
    ("actor.enable_gradient_checkpointing", "model.recompute"),
    ("actor.gradient_checkpointing", "model.recompute"),
    ("actor.lr", "optim.lr"),
    ("actor.max_grad_norm", "optim.max_grad_norm"),
    ("actor.max_length_per_device", PER_DEVICE),
    ("actor.model_name", "model.path"),
    ("actor.optimizer.clip_grad", "optim.max_grad_norm"),
    ("actor.optimizer.lr", "optim.lr"),
    ("actor.optimizer.weight_decay", "optim.weight_decay"),
    ("actor.rollout.env_path", "env.path"),
    ("actor.rollout.max_turns", "rollout.max_turns"),
    ("actor.scheduler.lr_decay_style", "optim.schedule"),
    ("actor.scheduler.name", "optim.schedule"),
    ("actor.scheduler.warmup_ratio", "optim.warmup"),
    ("actor.scheduler", "optim.schedule"),
    ("actor.sp_size", "parallel.sp_size"),
    ("actor.tf_config.context_parallel_size", "parallel.sp_size"),
    ("actor.tf_config.tensor_model_parallel_size", "parallel.tp_size"),
    ("actor.tp_size", "parallel.tp_size"),
    ("actor.warmup_ratio", "optim.warmup"),
    ("actor.weight_decay", "optim.weight_decay"),
    ("cp_size", "parallel.sp_size"),
    ("critic.model_name", "critic.path"),
    ("critic.optimizer.lr", "critic.lr"),
    ("data.batch_size", "train.batch"),
    ("data.path", "data.train"),
    ("data.prompts_per_rollout", "rollout.prompts"),
    ("data.responses_per_prompt", "rollout.samples"),
    ("data.test_data_path", "eval.data"),
    ("data.test_ratio", "eval.split"),
    ("data.train_data_path", "data.train"),
    ("ddp_size", "parallel.ddp_size"),
    ("max_length_per_device", PER_DEVICE),
    ("max_new_tokens", "rollout.max_new_tokens"),
    ("ref_actor.offload_model", "reference.offload"),
    ("rollout.apply_chat_template", "data.apply_chat_template"),
    ("rollout.env_path", "env.path"),
    ("rollout.gem_env.apply_chat_template", "data.apply_chat_template"),
    ("rollout.gem_env.env_id", "env.gem"),
    ("rollout.gem_env.num_env", "env.concurrency"),
    ("rollout.responses_per_prompt", "rollout.samples"),
    ("rollout.server_args.tp_size", "rollout.tp_size"),
    ("rollout.test_prompts_per_rollout", "eval.prompts"),
    ("rollout.test_sampling_params.temperature", "eval.temperature"),
    ("rollout.train_prompts_per_rollout", "rollout.prompts"),
    ("rollout.train_sampling_params.max_new_tokens", "rollout.max_new_tokens"),
    ("rollout.train_sampling_params.no_stop_trim", "rollout.include_stop"),
    (STOP, "rollout.stop"),
    ("rollout.train_sampling_params.temperature", "rollout.temperature"),
    ("rollout.train_sampling_params.top_k", "rollout.top_k"),
    ("rollout.train_sampling_params.top_p", "rollout.top_p"),
    ("sp_size", "parallel.sp_size"),
    ("test_data.path", "eval.data"),
    ("test_data.prompts_per_rollout", "eval.prompts"),
    ("test_data.response_per_prompt", "eval.samples"),
    ("test_data.responses_per_prompt", "eval.samples"),
    ("tp_size", "parallel.tp_size"),
    ("train_data.apply_chat_template", "data.apply_chat_template"),
    ("train_data.batch_size", "train.batch"),
    ("train_data.chosen_key", "data.columns.chosen"),
    ("train_data.max_length", "data.max_length"),
    ("train_data.max_new_tokens", "rollout.max_new_tokens"),
    ("train_data.max_turns", "rollout.max_turns"),
    ("train_data.messages_key", "data.columns.messages"),
    ("train_data.path", "data.train"),
    ("train_data.prompt_key", "data.columns.prompt"),
    ("train_data.prompts_per_rollout", "rollout.prompts"),
    ("train_data.rejected_key", "data.columns.rejected"),
    ("train_data.response_key", "data.columns.response"),
    ("train_data.responses_per_prompt", "rollout.samples"),
    ("trainer.experiment_name", "name"),
    ("trainer.n_epochs", "train.epochs"),
    ("trainer.save_freq", "checkpoint.every"),
    ("trainer.test_freq", "eval.every"),
    ("trainer.total_steps", "train.steps"),
];

/// RL2 limits the tokens of a micro-batch per rank; this key limits those of all its `sp_size * tp_size` ranks.
pub(super) const PER_DEVICE: &str = "train.micro_batch_tokens";

const MODEL: &str = "sampler, trainer, reference and tokenizer use one model directory";
const LAYOUT: &str = "policy, critic and reference are split over the ranks in the same way";
const UPDATES: &str = "policy and critic are updated together, from the same micro-batches";
const COLUMNS: &str = "training and evaluation data have the same columns";
const TESTS: &str = "evaluations sample like rollouts, at their own temperature";

/// Options that must equal another key, and why.
pub(super) const SAME: &[(&str, &str, &str)] = &[
    ("actor.adv_estimator", "adv.estimator", "advantages are computed once"),
    (
        "actor.temperature",
        "rollout.temperature",
        "log-probabilities are computed at the temperature of sampling",
    ),
    ("actor.tokenizer_name", "model.path", MODEL),
    ("critic.avg_level", "actor.avg_level", UPDATES),
    ("adv.responses_per_prompt", "rollout.samples", "a group is the completions of a prompt"),
    ("critic.cp_size", "parallel.sp_size", LAYOUT),
    ("critic.ddp_size", "parallel.ddp_size", LAYOUT),
    ("critic.dtype", "model.dtype", "all models compute in one type"),
    ("critic.enable_gradient_checkpointing", "model.recompute", UPDATES),
    ("critic.gradient_checkpointing", "model.recompute", UPDATES),
    ("critic.max_grad_norm", "optim.max_grad_norm", UPDATES),
    ("critic.max_length_per_device", PER_DEVICE, UPDATES),
    ("critic.optimizer.clip_grad", "optim.max_grad_norm", UPDATES),
    ("critic.optimizer.weight_decay", "optim.weight_decay", UPDATES),
    ("critic.scheduler.lr_decay_style", "optim.schedule", UPDATES),
    ("critic.scheduler.name", "optim.schedule", UPDATES),
    ("critic.scheduler.warmup_ratio", "optim.warmup", UPDATES),
    ("critic.scheduler", "optim.schedule", UPDATES),
    ("critic.sp_size", "parallel.sp_size", LAYOUT),
    ("critic.tp_size", "parallel.tp_size", LAYOUT),
    ("critic.update_per_rollout", "actor.update_per_rollout", UPDATES),
    ("critic.warmup_ratio", "optim.warmup", UPDATES),
    ("critic.weight_decay", "optim.weight_decay", UPDATES),
    ("ref_actor.cp_size", "parallel.sp_size", LAYOUT),
    ("ref_actor.ddp_size", "parallel.ddp_size", LAYOUT),
    ("ref_actor.model_name", "model.path", "the reference is the initial policy"),
    ("ref_actor.sp_size", "parallel.sp_size", LAYOUT),
    (
        "ref_actor.temperature",
        "rollout.temperature",
        "log-probabilities are computed at the temperature of sampling",
    ),
    ("ref_actor.tokenizer_name", "model.path", MODEL),
    ("ref_actor.tp_size", "parallel.tp_size", LAYOUT),
    ("rollout.gem_env.gamma", "adv.gamma", "returns have one discount factor"),
    ("rollout.model_name", "model.path", MODEL),
    ("rollout.server_args.model_path", "model.path", MODEL),
    ("rollout.test_sampling_params.max_new_tokens", "rollout.max_new_tokens", TESTS),
    ("rollout.test_sampling_params.no_stop_trim", "rollout.include_stop", TESTS),
    ("rollout.test_sampling_params.stop", "rollout.stop", TESTS),
    ("rollout.tokenizer_name", "model.path", MODEL),
    ("test_data.apply_chat_template", "data.apply_chat_template", TESTS),
    ("test_data.chosen_key", "data.columns.chosen", COLUMNS),
    ("test_data.max_length", "data.max_length", TESTS),
    ("test_data.max_new_tokens", "rollout.max_new_tokens", TESTS),
    ("test_data.max_turns", "rollout.max_turns", TESTS),
    ("test_data.messages_key", "data.columns.messages", COLUMNS),
    ("test_data.prompt_key", "data.columns.prompt", COLUMNS),
    ("test_data.rejected_key", "data.columns.rejected", COLUMNS),
    ("test_data.response_key", "data.columns.response", COLUMNS),
];

const KERNELS: &str = "kernels are Ferrl's own";
const OFFLOAD: &str =
    "parameters stay on the device; optim.offload = \"moments\" moves the optimizer state to the host";
const NO_GRADIENT: &str = "passes without gradients also use train.micro_batch_tokens";
const CACHE: &str = "the KV cache has the size rollout.cache_mib";
const TRACKER: &str = "`ferrl sync RUN --to wandb --project NAME` exports a run";

/// Options without a key here that do not affect what is learned, with what Ferrl does instead. They are accepted with a note.
pub(super) const NOTED: &[(&str, &str)] = &[
    ("actor.max_inference_length_per_device", NO_GRADIENT),
    ("actor.offload_model", OFFLOAD),
    ("actor.offload_optimizer", OFFLOAD),
    ("actor.use_liger_kernel", KERNELS),
    ("critic.max_inference_length_per_device", NO_GRADIENT),
    ("critic.offload_model", OFFLOAD),
    ("critic.offload_optimizer", OFFLOAD),
    ("critic.use_liger_kernel", KERNELS),
    ("ref_actor.max_inference_length_per_device", NO_GRADIENT),
    ("ref_actor.max_length_per_device", NO_GRADIENT),
    ("ref_actor.use_liger_kernel", KERNELS),
    ("rollout.base_port", "completions are sampled in the same process: there is no server"),
    ("rollout.dtype", "sampler and trainer compute in one type, model.dtype"),
    ("rollout.gem_env.async_env", "environments run beside decoding"),
    ("rollout.gem_env.dump_experience_every", "every completion is in rollouts/ of the run folder"),
    ("rollout.gem_env.max_model_len", "sequences may be as long as the model allows"),
    ("rollout.gem_env.seed", "episodes are seeded by `seed`"),
    ("rollout.gpu_memory_utilization", CACHE),
    ("rollout.server_args.dtype", "sampler and trainer compute in one type, model.dtype"),
    ("rollout.server_args.mem_fraction_static", CACHE),
    ("rollout.use_gem_env", "env.gem names the environment"),
    (
        "train_data.mask_offpolicy_data",
        "tokens of unfinished completions (rollout.partial_tokens) keep the log-probability of the policy that sampled them",
    ),
    ("trainer.disable_wandb", TRACKER),
    ("trainer.project", TRACKER),
    ("trainer.save_dir", "run folders lie under `--runs DIR`"),
    ("trainer.use_wandb", TRACKER),
];

/// Options for features that are no settings here, with the feature and Ferrl's counterpart. Switched off, they are accepted.
pub(super) const REFUSED: &[(&str, &str, &str)] = &[
    ("actor.apply_len_norm", "log-probabilities divided by length are SimPO's", "algo=simpo"),
    (
        "rollout.gem_env.prompt_template",
        "an environment's text is a prompt as it is, or a user's message with data.apply_chat_template = true",
        "leave it out, or data.template over the column prompt",
    ),
    (
        "rollout.gem_env.rollout_batch_size",
        "a step has a number of episodes, not of turns",
        "rollout.prompts=128 rollout.samples=1",
    ),
    (
        "rollout.gem_env.wrappers",
        "an episode's text holds its earlier observations and actions; as messages with data.apply_chat_template = true",
        "leave it out",
    ),
    (
        "rollout.partial_rollout",
        "partial rollouts have a number of tokens per step",
        "rollout.partial_tokens=512",
    ),
    ("trainer.eval_only", "evaluation is a separate command", "ferrl eval MODEL --data FILE"),
    (
        "trainer.load_ckpt_from",
        "a run is resumed by its name",
        "--resume with the run's --name; model.path=DIR starts from the weights of a directory",
    ),
];

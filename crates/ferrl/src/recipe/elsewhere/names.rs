//! Settings of TRL, transformers, PEFT, verl, OpenRLHF and VinePPO, each with its key here or with what to use instead.
//!
//! A name is the end of a dotted key: `critic.optim.lr` is more specific than `lr`. One that ends in `_` is the beginning of a
//! last part, and one that ends in `.` a table of which nothing more specific is listed.

/// Keys or advice, each with the names of other libraries that it replaces.
pub(super) type NameTable = &'static [(&'static str, &'static str)];

/// Keys here, and the settings with the same meaning and the same unit.
pub(super) const KEYS: NameTable = &[
    ("name", "run_name wandb_run_name wandb.run_name"),
    ("parallel.sp_size", "context_parallel_size ring_attn_size ulysses_sequence_parallel_size"),
    ("parallel.tp_size", "ds_tensor_parallel_size ds.tensor_parallel_size"),
    ("model.path", "actor_rollout_ref.model.path base_model model_name_or_path pretrain sft_model_path"),
    ("model.dtype", "actor_rollout_ref.rollout.dtype param_dtype torch_dtype"),
    ("model.recompute", "enable_gradient_checkpointing gradient_checkpointing gradient_checkpointing_enable"),
    ("model.router_aux_loss_coef", "aux_loss_coef"),
    ("adapter.r", "lora.rank lora_r lora_rank"),
    ("adapter.alpha", "lora.alpha lora_alpha"),
    ("adapter.init", "init_lora_weights"),
    ("adapter.modules_to_save", "lora_modules_to_save"),
    ("adapter.target_modules", "lora.target_modules lora_target_modules target_modules"),
    ("adapter.use_rslora", "use_rslora"),
    ("critic.lr", "critic.adam.lr critic.optim.lr critic_learning_rate"),
    ("critic.path", "critic.model.path critic.model_name_or_path critic_pretrain"),
    ("reference.offload", "ref.fsdp_config.param_offload ref_offload"),
    ("reward.0.offload", "reward_model.model.fsdp_config.param_offload"),
    ("data.train", "dataset dataset_name prompt_data prompt_dataset train_file train_files"),
    ("data.weights", "dataset_probs prompt_data_probs prompt_probs"),
    ("data.template", "input_template"),
    ("data.columns.prompt", "input_key prompt_key"),
    ("data.columns.response", "output_key response_key"),
    ("data.columns.messages", "messages_key"),
    ("data.columns.chosen", "chosen_key"),
    ("data.columns.rejected", "rejected_key"),
    ("data.columns.text", "dataset_text_field"),
    ("data.max_length", "max_len max_seq_length"),
    ("data.shuffle", "shuffle_dataset"),
    ("rollout.prompts", "gen_batch_size rollout.batch_size rollout_batch_size"),
    ("rollout.samples", "group_size n n_samples_per_prompt num_generations rloo_k rollout_n"),
    ("rollout.max_new_tokens", "generate_max_len max_completion_length max_response_length response_length"),
    ("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
    ("rollout.top_k", "actor_rollout_ref.rollout.top_k"),
    ("rollout.top_p", "actor_rollout_ref.rollout.top_p"),
    ("rollout.release_cache", "enable_sleep free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode"),
    ("rollout.max_turns", "max_assistant_turns max_user_turns"),
    (
        "rollout.max_lag",
        "async_steps max_head_offpolicyness max_off_policy_steps max_offpolicy_steps max_staleness \
         max_staleness_steps max_trajectory_age_steps",
    ),
    ("rollout.tp_size", "tensor_model_parallel_size vllm.tensor_parallel_size vllm_tensor_parallel_size"),
    ("env.path", "agent_func_path agent_path"),
    ("env.max_calls", "max_tool_calling_iterations"),
    ("optim.lr", "actor_learning_rate learning_rate lr"),
    ("optim.beta1", "adam_beta1"),
    ("optim.beta2", "adam_beta2"),
    ("optim.eps", "adam_epsilon"),
    ("optim.weight_decay", "actor.optim.weight_decay critic.optim.weight_decay l2"),
    ("optim.max_grad_norm", "clip_grad grad_clip max_norm"),
    ("optim.schedule", "lr_decay_style lr_scheduler lr_scheduler_type warmup_style"),
    ("optim.warmup", "lr_warmup_ratio lr_warmup_steps_ratio warmup_ratio"),
    ("optim.min_ratio", "min_lr_ratio"),
    ("optim.ema", "ema_beta"),
    ("train.steps", "max_steps total_steps total_training_steps"),
    ("train.epochs", "num_episodes num_train_epochs total_epochs"),
    ("eval.every", "eval.steps eval_steps test_freq"),
    ("eval.at_start", "eval_on_start val_before_train"),
    ("eval.data", "eval.dataset eval_dataset test_files val_files"),
    (
        "eval.samples",
        "eval.n eval.n_samples_per_prompt eval_n_samples_per_prompt num_generations_eval val_kwargs.n",
    ),
    ("eval.temperature", "eval_temperature val_kwargs.temperature"),
    ("checkpoint.every", "save_freq save_steps"),
    ("checkpoint.keep", "ckpt.max_num max_actor_ckpt_to_keep max_ckpt_num save_total_limit"),
    ("checkpoint.metric", "metric_for_best_model"),
    ("checkpoint.use_best", "load_best_model_at_end"),
    ("algo.clip_low", "clip_ratio_low"),
    ("algo.clip_high", "clip_ratio_high"),
    ("algo.dual_clip", "clip_ratio_c delta"),
    ("algo.entropy_coef", "entropy_coeff entropy_loss_coef"),
    ("algo.epochs", "num_iterations num_ppo_epochs ppo_epochs"),
    ("algo.mask_truncated", "mask_truncated_completions"),
    ("algo.filter_equal", "dynamic_filtering dynamic_filtering_enable filter_groups.enable"),
    ("algo.refills", "max_num_gen_batches"),
    ("algo.skip_ratio", "ratio_threshold"),
    ("algo.scores.scale", "use_score_scaling"),
    ("algo.scores.centre", "use_score_norm"),
    ("algo.scores.clip", "score_clip"),
    ("algo.vine.max_steps", "max_step_for_value_estimation"),
    ("algo.kl.coef", "algo.beta init_coef init_kl_coef kl_coef"),
    ("algo.kl.target", "kl_target target_kl"),
    ("algo.kl.horizon", "kl_ctrl.horizon kl_horizon"),
    ("algo.kl.estimator", "kl_estimator"),
    ("algo.kl.unbiased", "use_bias_correction_kl"),
    ("algo.advantage.gamma", "algorithm.gamma"),
    ("algo.advantage.lambda", "lam lambd"),
    ("algo.critic.coef", "vf_coef"),
    ("algo.critic.clip", "cliprange_value value_clip"),
    ("algo.critic_warmup", "freezing_actor_steps trainer.critic_warmup"),
    ("algo.correction.cap", "tis_imp_ratio_cap vllm_importance_sampling_cap vllm_is_truncated_threshold"),
];

/// What to use instead of settings without a single key of the same meaning.
pub(super) const ADVICE: NameTable = &[
    (
        "train.batch for supervised rows, rollout.prompts for sampled completions: sizes of the whole step",
        "batch_size per_device_train_batch_size train_batch_size",
    ),
    ("rollout.prompts for sampled completions, train.batch for supervised rows", "data.train_batch_size"),
    ("eval.prompts is the number of prompts of an evaluation", "per_device_eval_batch_size val_batch_size"),
    (
        "train.micro_batch_tokens limits the tokens of a micro-batch; train.batch is the whole batch",
        "gradient_accumulation_steps",
    ),
    (
        "train.micro_batch_tokens limits the tokens of a micro-batch; it changes no gradient",
        "dynamic_batch_enable log_prob_micro_batch_size_ max_tokens_per_gpu micro_batch_size micro_batch_size_per_gpu \
         micro_rollout_batch_size micro_train_batch_size ppo_max_token_len_per_gpu ppo_micro_batch_size \
         ppo_micro_batch_size_per_gpu train_max_tokens_per_gpu use_dynamic_batch \
         use_dynamic_bsz",
    ),
    (
        "algo.minibatches is the number of updates per pass over a rollout: all its completions divided by those \
         of one update",
        "generation_batch_size mini_batch_size num_mini_batches ppo_mini_batch_size",
    ),
    ("algo.minibatches splits the completions of a step into several updates", "steps_per_generation"),
    ("train.epochs for supervised rows; algo.epochs is the number of passes over each rollout", "max_epochs"),
    ("algo.clip_high; for cispo TRL's epsilon_high is 1 + algo.clip_high", "epsilon_high"),
    ("algo.clip_low and algo.clip_high: set both", "clip_ratio cliprange eps_clip eps_clip_low_high epsilon"),
    ("algo.beta of preference methods, algo.kl.coef of policy gradients", "beta"),
    (
        "algo.name chooses the loss, such as \"ipo\" or \"gspo\"; `ferrl algorithms` lists them",
        "ipo loss_mode loss_type policy_loss_type",
    ),
    (
        "algo.name: \"ppo\" (gae), \"grpo\" (group_norm), \"dr_grpo\", \"rloo\", \"reinforce\", \"reinforce_pp\" \
         or \"reinforce_pp_baseline\" (reinforce_baseline)",
        "adv_estimator advantage.estimator advantage_estimator",
    ),
    ("algo.label_smoothing of dpo", "label_smoothing"),
    ("algo.sft_coef of dpo and simpo", "cpo_alpha nll_loss_coef rpo_alpha"),
    ("algo.gamma of simpo", "gamma_beta_ratio simpo_gamma"),
    ("algo.desirable_weight and algo.undesirable_weight of kto", "desirable_weight undesirable_weight"),
    ("algo.centre of rm", "center_rewards_coefficient"),
    (
        "algo.aggregate: \"token\" (token-mean), \"sequence\" (seq-mean-token-mean) or \"constant\" \
         (seq-mean-token-sum-norm)",
        "loss_agg_mode",
    ),
    (
        "algo.name = \"grpo\" divides by the standard deviation, \"dr_grpo\" does not",
        "norm_adv_by_std_in_grpo no_advantage_std_norm scale_rewards",
    ),
    ("algo.name = \"gdpo\" normalises each reward separately", "multi_objective_aggregation"),
    ("algo.ratio = \"mean\" is GSPO's ratio per sequence", "importance_sampling_level"),
    (
        "algo.correction.kind = \"truncate\" or \"mask\" with algo.correction.cap; sampler and trainer agree bit \
         by bit, so on-policy weights are 1",
        "enable_vllm_is_correction is_correction_ rollout_is rollout_is_threshold \
         vllm_importance_sampling_correction vllm_importance_sampling_mode",
    ),
    ("algo.kl.coef with algo.kl.place = \"loss\"", "kl.use_loss kl_loss_coef use_kl_loss"),
    ("algo.kl.place = \"reward\"", "use_kl_in_reward"),
    (
        "algo.kl.estimator: \"k1\" (kl), \"abs\", \"k2\" (mse), \"k3\" (low_var_kl) or \"full\"",
        "kl_loss_type kl_penalty kl_penalty_loss_type",
    ),
    (
        "algo.kl.target sets the KL of the adaptive controller; unset keeps algo.kl.coef fixed",
        "adap_kl_ctrl kl_ctrl.type",
    ),
    ("algo.advantage.normalise = \"whiten\"", "normalize_advantages whiten_advantages whiten_rewards"),
    ("algo.advantage.normalise = \"scale\"", "grayen_advantages"),
    ("algo.scores.scale = true divides scores by their running standard deviation", "normalize_reward"),
    ("algo.scores.clip is the largest size of a score", "reward.clip_range reward_clip_range"),
    (
        "algo.overlong is the fraction of the length in which the reward falls by up to 1",
        "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer_len \
         overlong_penalty_factor",
    ),
    (
        "reward.0.truncated = \"wrong\", the default, gives truncated completions no reward",
        "missing_eos_penalty",
    ),
    ("the weight of each [[reward]]", "reward_weights"),
    (
        "[[reward]] with python = \"my_reward.py\" and function = \"name\"",
        "custom_reward_function.name custom_reward_function.path reward_funcs reward_manager",
    ),
    (
        "[[reward]] with model = \"DIR\"",
        "reward.model_name_or_path reward_model.enable reward_model.model.path reward_model_name_or_path \
         reward_model_path reward_pretrain",
    ),
    (
        "a reward service is called from a Python function: [[reward]] with python = \"my_reward.py\"",
        "remote_rm_url reward.remote_url sandbox_fusion.url",
    ),
    ("python = \"my_reward.py\" in [[reward]]", "file"),
    ("the column that the verifier reads: options = { column = \"answer\" } in [[reward]]", "label_key"),
    (
        "one [[reward]] for all rows; a Python function gets every column and can choose by it",
        "reward_fn_key",
    ),
    (
        "only the assistant's turns are trained already; \"weight\": 0 leaves a message out",
        "assistant_only_loss multiturn multiturn.enable",
    ),
    (
        "only completions are trained already; rows with `text` are trained whole",
        "completion_only_loss pretrain_mode",
    ),
    (
        "prompts are never truncated: data.overlong = \"drop\" leaves out those longer than data.max_length",
        "filter_overlong_prompts max_prompt_length prompt_length prompt_max_len",
    ),
    (
        "sequences lose their end beyond data.max_length; data.overlong says what happens to prompts",
        "truncation truncation_mode",
    ),
    (
        "a split stands before the file or data set: data.train = \"train@org/name\"",
        "dataset_config dataset_test_split dataset_train_split eval_split prompt_split train_split",
    ),
    (
        "a range of rows stands before the file: data.train = \"train[:1000]@p.jsonl\"",
        "max_samples train_max_samples",
    ),
    (
        "leave it out: rows are read and tokenized in the same process",
        "data.tokenizer dataloader_ dataset_kwargs dataset_num_proc dataset_streaming remove_unused_columns \
         return_raw_chat",
    ),
    ("seed is the seed of everything", "data_seed full_determinism"),
    (
        "the model's directory holds its chat template and tokens",
        "chat_template_kwargs chat_template_path apply_chat_template_kwargs eos_token pad_token",
    ),
    ("rollout.stop is a list of texts that end a completion", "stop_token stop_token_id"),
    (
        "every token is sampled by the policy: rollout.temperature, rollout.top_k and rollout.top_p",
        "do_sample generation_kwargs min_p repetition_penalty",
    ),
    (
        "rollout.cache_mib is the size of the KV cache",
        "gpu_memory_utilization max_num_batched_tokens max_num_seqs vllm_gpu_memory_utilization",
    ),
    ("model.dtype = \"bf16\"", "bf16 tf32"),
    ("model.dtype = \"bf16\"; f16 is not supported", "fp16"),
    (
        "adapter.base = \"nf4\" trains an adapter on a 4-bit base (QLoRA); 8-bit weights are not supported",
        "bnb_ load_in_",
    ),
    (
        "adapters have the section [adapter]: adapter.r, adapter.alpha, adapter.target_modules",
        "lora lora. peft peft.",
    ),
    (
        "no dropout: adapters are trained without it; weight_decay of [optim] regularises them",
        "disable_dropout dropout lora_dropout",
    ),
    ("only plain LoRA is supported; adapter.use_rslora scales by alpha over the root of r", "use_dora"),
    ("an [adapter] section trains an adapter; adapter.r and adapter.alpha are 32 by default", "use_peft"),
    ("optim.warmup is a fraction of the steps: 10 of 1000 is 0.01", "lr_warmup_steps warmup_steps"),
    ("optim.min_ratio is the final learning rate as a fraction of the peak", "lr_scheduler_kwargs min_lr"),
    ("optim.beta1 and optim.beta2", "adam_betas betas"),
    ("optim.offload = \"moments\"", "adam_offload optimizer_offload"),
    ("optim.ema = 0.992 keeps a moving average of the weights", "enable_ema"),
    (
        "the base of an adapter and models without gradients move to the host: adapter.base, reference.offload",
        "activation_offloading offload_policy param_offload",
    ),
    ("eval.every = 50 evaluates every 50 steps", "eval_strategy evaluation_strategy"),
    ("checkpoint.every = 100 saves every 100 steps; the end of a stage is always saved", "save_strategy"),
    ("checkpoint.lower_is_better is its opposite", "greater_is_better"),
    ("`ferrl eval MODEL --data FILE`", "eval_only val_only"),
    (
        "every step is written to metrics.jsonl",
        "disable_tqdm include_num_input_tokens_seen logging_first_step logging_steps logging_strategy",
    ),
    (
        "all completions are in rollouts/ of the run folder, and in its report",
        "log_completions log_val_generations num_completions_to_print rollout_data_dir validation_data_dir",
    ),
    (
        "metrics.jsonl holds every metric; `ferrl report` shows them, `ferrl sync --to wandb` exports them",
        "logger project_name report_to use_tensorboard use_wandb wandb_ logger.",
    ),
    ("keys of services stay in their own environment variables: Ferrl stores none", "hub_token wandb.key"),
    (
        "name is the run's name; `ferrl train RECIPE --runs DIR` sets the folder of all runs",
        "ckpt.output_dir ckpt.path ckpt_path default_local_dir logging_dir output_dir overwrite_output_dir save_path",
    ),
    (
        "`ferrl train RECIPE --resume` resumes a run; model.path = \"DIR\" starts from the weights of a directory",
        "load_checkpoint resume_from_checkpoint resume_from_path resume_mode",
    ),
    (
        "leave it out: Ferrl uploads nothing; the model of a run is a Hugging Face directory",
        "default_hdfs_dir hub_ push_to_hub",
    ),
    ("every checkpoint has the model as a Hugging Face directory", "save_contents save_hf save_hf_ckpt"),
    (
        "`ferrl launch -n 8 -- train RECIPE` starts 8 ranks; threads = 8 sets the threads of each",
        "actor_num_gpus_per_node actor_num_nodes n_gpus_per_node nnodes num_gpus_per_node num_nodes num_processes",
    ),
    (
        "parallel.ddp_size = 1 splits weights, gradients and moments over all ranks (ZeRO-3, FSDP); 0 splits \
         nothing",
        "deepspeed fsdp fsdp_config fsdp_size zero_stage",
    ),
    (
        "train.micro_batch_tokens and the order of sequences decide how work is split: ranks change no bit",
        "average_tokens_across_devices balance_batch ddp_find_unused_parameters ds3_gather_for_generation",
    ),
    (
        "sequences are always packed without padding; train.micro_batch_tokens limits the tokens of a pack",
        "eval_packing group_by_length packing packing_samples packing_strategy padding_free use_remove_padding",
    ),
    (
        "leave it out: attention and other kernels are Ferrl's own",
        "attn_implementation flash_attn torch_compile use_fused_kernels use_liger use_liger_kernel \
         use_torch_compile",
    ),
    ("leave it out: Ferrl runs no code of a model repository", "external_lib trust_remote_code"),
    ("model.path = \"DIR\", the snapshot of that revision in the Hugging Face cache", "model_revision"),
    (
        "tools are named in env.tools, environments in [env]",
        "interaction_config_path multi_turn.enable tool_config_path",
    ),
    ("every call format is read: Search-R1's, Hermes' and Llama 3's", "multi_turn.format"),
    ("rollout.max_lag = 1 samples a step ahead", "async_train staleness_threshold"),
    (
        "leave it out: reference.offload = true moves the reference to the host between uses",
        "precompute_ref_log_probs",
    ),
    ("algo = \"simpo\" and algo = \"orpo\" need no reference", "reference_free"),
    (
        "the reference is the initial policy of a stage: a further [[stage]] starts from the model of the last one",
        "ref_model_mixup_alpha ref_model_sync_steps ref_pretrain sync_ref_model",
    ),
    ("train.steps or train.epochs", "total_episodes"),
    (
        "leave it out: completions are always sampled in the same process, on the same weights",
        "chunked_prefill colocate_ enable_chunked_prefill enable_prefix_caching enforce_eager hybrid_engine \
         load_format use_transformers_paged use_vllm vllm. vllm_",
    ),
    (
        "leave it out: Ferrl has no such feature",
        "cast_lm_head_to_fp32 custom_cls.name custom_cls.path dynamic_filtering_reward_range \
         f_divergence_type ld_alpha margin_loss neftune_noise_alpha ptx_coef top_entropy_quantile use_weighting",
    ),
    (
        "leave it out: no pipeline or expert parallelism; parallel.ddp_size = 1 (ZeRO-3) saves as much memory",
        "expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_size \
         virtual_pipeline_model_parallel_size",
    ),
    ("images are not supported", "image_key video_key"),
    (
        "leave it out: Ferrl has no such setting; `ferrl recipe names` lists those of other libraries that it has",
        "actor_rollout_ref. algorithm. ckpt. custom_reward_function. ds. global_profiler. \
         compute_fp32_loss gradient_checkpointing_kwargs lora_task_type model_init_kwargs ray_init. ray_kwargs. reward_model.",
    ),
];

//! Settings of TRL, transformers, PEFT and verl: the key of each here, or what to use instead.

/// Another library's setting and its key here.
const KEYS: &[(&str, &str)] = &[
    ("adam_beta1", "optim.beta1"),
    ("adam_beta2", "optim.beta2"),
    ("adam_epsilon", "optim.eps"),
    ("batch_size", "train.batch"),
    ("beta", "algo.kl.coef"),
    ("clip_ratio", "algo.clip_low"),
    ("cliprange", "algo.clip_low"),
    ("dataset_name", "data.train"),
    ("epsilon", "algo.clip_low"),
    ("epsilon_high", "algo.clip_high"),
    ("eval_steps", "eval.every"),
    ("gradient_checkpointing", "model.recompute"),
    ("kl_coef", "algo.kl.coef"),
    ("learning_rate", "optim.lr"),
    ("init_lora_weights", "adapter.init"),
    ("lora_alpha", "adapter.alpha"),
    ("lora_r", "adapter.r"),
    ("lora_rank", "adapter.r"),
    ("lora_target_modules", "adapter.target_modules"),
    ("lora_modules_to_save", "adapter.modules_to_save"),
    ("logging_dir", "name"),
    ("lr", "optim.lr"),
    ("lr_scheduler_type", "optim.schedule"),
    ("mask_truncated_completions", "algo.mask_truncated"),
    ("max_completion_length", "rollout.max_new_tokens"),
    ("max_prompt_length", "data.max_length"),
    ("max_seq_length", "data.max_length"),
    ("max_steps", "train.steps"),
    ("metric_for_best_model", "checkpoint.metric"),
    ("mini_batch_size", "algo.minibatches"),
    ("model_name_or_path", "model.path"),
    ("n", "rollout.samples"),
    ("num_generations", "rollout.samples"),
    ("num_iterations", "algo.epochs"),
    ("num_ppo_epochs", "algo.epochs"),
    ("num_train_epochs", "train.epochs"),
    ("output_dir", "name"),
    ("ppo_epochs", "algo.epochs"),
    ("run_name", "name"),
    ("save_steps", "checkpoint.every"),
    ("save_total_limit", "checkpoint.keep"),
    ("torch_dtype", "model.dtype"),
    ("target_modules", "adapter.target_modules"),
    ("train_batch_size", "train.batch"),
    ("use_bias_correction_kl", "algo.kl.unbiased"),
    ("use_rslora", "adapter.use_rslora"),
    ("warmup_ratio", "optim.warmup"),
];

/// Another library's setting (a prefix if it ends in `_`), and what to use instead.
const ADVICE: &[(&str, &str)] = &[
    (
        "assistant_only_loss",
        "only the assistant's turns are trained already; \"weight\": 0 leaves a message out",
    ),
    ("beta", "algo.beta of preference methods, algo.kl.coef of policy gradients"),
    ("bf16", "model.dtype = \"bf16\""),
    ("center_rewards_coefficient", "algo.centre of the reward model"),
    ("completion_only_loss", "only completions are trained already; rows with `text` are trained whole"),
    ("cpo_alpha", "algo.sft_coef of simpo"),
    ("dataset_text_field", "data.columns.text = \"the column's name\""),
    ("delta", "algo.dual_clip of policy gradients"),
    ("eval_strategy", "eval.every = 50 evaluates every 50 steps"),
    ("file", "python = \"my_reward.py\" in [[reward]]"),
    ("fp16", "model.dtype = \"bf16\"; f16 is not supported"),
    (
        "gradient_accumulation_steps",
        "train.micro_batch_tokens limits the tokens of a micro-batch; train.batch is the whole batch",
    ),
    ("importance_sampling_level", "algo.ratio = \"token\", or \"mean\" for one ratio per completion"),
    (
        "load_in_",
        "adapter.base = \"nf4\" trains an adapter on a 4-bit base (QLoRA); 8-bit weights are not supported",
    ),
    ("logging_steps", "every step is written to metrics.jsonl"),
    ("dropout", "no dropout: adapters are trained without it; weight_decay of [optim] regularises them"),
    ("lora", "adapters have the section [adapter]: adapter.r, adapter.alpha, adapter.target_modules"),
    ("lora_dropout", "no dropout: adapters are trained without it; weight_decay of [optim] regularises them"),
    (
        "loss_type",
        "algo.name chooses the loss; of grpo, algo.aggregate is \"sequence\" for \"grpo\", \"token\" for \"dapo\" and \"bnpo\"",
    ),
    (
        "num_processes",
        "`ferrl launch -n 8 -- train RECIPE` starts 8 ranks; threads = 8 sets the threads of each",
    ),
    (
        "packing",
        "sequences are always packed without padding; train.micro_batch_tokens limits the tokens of a pack",
    ),
    ("peft", "adapters have the section [adapter]: adapter.r, adapter.alpha, adapter.target_modules"),
    ("per_device_eval_batch_size", "eval.prompts is the number of prompts of an evaluation"),
    (
        "per_device_train_batch_size",
        "train.batch for supervised rows, rollout.prompts for sampled completions: sizes of the whole step",
    ),
    (
        "report_to",
        "metrics.jsonl holds every metric; `ferrl report` shows them, `ferrl sync --to wandb` exports them",
    ),
    ("reward_funcs", "[[reward]] with python = \"my_reward.py\" and function = \"name\""),
    ("reward_weights", "weight of each [[reward]]"),
    ("scale_rewards", "algo.name = \"grpo\" divides by the standard deviation, \"dr_grpo\" does not"),
    ("simpo_gamma", "algo.gamma of simpo"),
    ("steps_per_generation", "algo.minibatches splits the completions of a step into several updates"),
    ("use_dora", "only plain LoRA is supported; adapter.use_rslora scales by alpha over the root of r"),
    ("use_peft", "an [adapter] section trains an adapter; adapter.r and adapter.alpha are 32 by default"),
    ("use_vllm", "completions are always sampled in the same process"),
    ("vllm_", "completions are always sampled in the same process"),
    ("warmup_steps", "optim.warmup is a fraction of the steps: 10 of 1000 is 0.01"),
];

/// The manual's page: every setting with its key here, or what to use instead.
pub fn names_markdown() -> String {
    let mut rows: Vec<(&str, String)> = KEYS.iter().map(|(name, key)| (*name, format!("`{key}`"))).collect();
    rows.retain(|(name, _)| ADVICE.iter().all(|(other, _)| other != name));
    let whole = |name: &str| if name.ends_with('_') { format!("{name}...") } else { name.to_string() };
    rows.extend(ADVICE.iter().map(|(name, advice)| (*name, advice.to_string())));
    rows.sort();
    let rows = rows.iter().map(|(name, here)| format!("| `{}` | {here} |\n", whole(name)));
    format!(
        "# Coming from TRL, transformers, PEFT or verl\n\n\
         TRL's trainers are algorithms in Ferrl (`algo.name`; [all of them](algorithms.md)), and a config is a [recipe](recipes.md). The \
         columns of a data set [keep their names](data.md), and reward functions have TRL's signature ([rewards](rewards.md)). A key of \
         these libraries in a recipe is an error that names Ferrl's key:\n\n\
         | TRL, transformers, PEFT, verl | Ferrl |\n|---|---|\n{}",
        rows.collect::<String>()
    )
}

/// The key here of the last name in a path.
pub(super) fn key(path: &[String]) -> Option<&'static str> {
    let leaf = path.last()?;
    KEYS.iter().find(|(name, _)| name == leaf).map(|(_, key)| *key)
}

/// What to use instead of a setting without a single key here.
pub(super) fn advice(path: &[String]) -> Option<&'static str> {
    let says = |part: &str| {
        let is = |name: &str| part == name || (name.ends_with('_') && part.starts_with(name));
        ADVICE.iter().find(|(name, _)| is(name)).map(|(_, advice)| *advice)
    };
    // The advice on `lora` holds for all settings below it.
    says(path.last()?).or_else(|| path.first().filter(|p| *p == "lora" || *p == "peft").and_then(|p| says(p)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_table_exists() {
        for (name, key) in KEYS {
            let path: Vec<String> = key.split('.').map(String::from).collect();
            assert!(super::super::keys::find(&path).is_some(), "{name}: {key}");
        }
        let path = |text: &str| text.split('.').map(String::from).collect::<Vec<_>>();
        assert!(advice(&path("lora.r")).unwrap().contains("adapters"));
        assert!(advice(&path("train.per_device_train_batch_size")).unwrap().contains("rollout.prompts"));
        assert!(advice(&path("load_in_4bit")).is_some());
        assert_eq!(key(&path("actor.n")), Some("rollout.samples"));
        assert_eq!(advice(&path("optim.lr")), None);
    }
}

//! All settings of a recipe, with defaults. The doc comments are the manual's text.

use super::{AdapterSettings, EnvSettings, Parallel, read_settings};
use crate::credit::StepSplit;
use crate::reward::{DecisionOptions, Implicit, Judgement};
use ferrl_engine::{Error, Result, nearest};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

with_defaults! {
/// A whole recipe, or one stage of it.
pub struct Recipe {
    /// Name of the run folder; the recipe file's name by default.
    pub name: Option<String> = None,
    /// Base recipe: a file relative to this one, whose settings this one overrides.
    pub base: Option<String> = None,
    /// Random seed. [0, 9223372036854775807]
    pub seed: u64 = 0,
    /// Device: `cpu`, `cuda` or `cuda:N`; `auto` uses a GPU if there is one.
    pub device: String = "auto".into(),
    /// Maximum device memory, such as `24GiB`: on a card including its context, on the CPU of all buffers. Allocations beyond it fail, as
    /// on a device of that size. All of the device's memory by default.
    pub device_memory: Option<String> = None,
    /// CPU threads; 0 uses all cores. [0, 1024]
    pub threads: usize = 0,
    /// Bitwise equal log-probabilities in sampling and training. `false` may be slightly faster, on GPUs only; a run is
    /// reproducible bit by bit with either.
    pub exact: bool = true,
    /// The policy: the model that is trained.
    pub model: ModelSettings = ModelSettings::default(),
    /// Low-rank adapter (LoRA) that is trained instead of the weights; without this section all weights are trained.
    pub adapter: Option<AdapterSettings> = None,
    /// The critic, for algorithms that have one.
    pub critic: CriticSettings = CriticSettings::default(),
    /// The reference model (the initial policy of the stage), for algorithms with KL regularisation or a log-ratio to it.
    pub reference: Reference = Reference::default(),
    /// The teacher model, for algorithms that distill one.
    pub teacher: Teacher = Teacher::default(),
    /// Training data.
    pub data: DataSettings = DataSettings::default(),
    /// The algorithm: `name` and its settings.
    pub algo: Map<String, Value> = Map::new(),
    /// Rollouts: sampling of completions, for algorithms that sample.
    pub rollout: Rollout = Rollout::default(),
    /// Search in place of independent completions, in rollouts and evaluations.
    pub search: SearchSettings = SearchSettings::default(),
    /// An environment of multi-turn episodes that is not a generated task.
    pub env: EnvSettings = EnvSettings::default(),
    /// Rewards of sampled completions; several form a weighted sum.
    pub reward: Vec<RewardSettings> = Vec::new(),
    /// Optimizer and learning-rate schedule.
    pub optim: Optim = Optim::default(),
    /// Steps, epochs and batch sizes.
    pub train: Train = Train::default(),
    /// Evaluation during training.
    pub eval: Eval = Eval::default(),
    /// Checkpoints.
    pub checkpoint: Checkpoint = Checkpoint::default(),
    /// Parallelism: weights and sequences split over ranks.
    pub parallel: Parallel = Parallel::default(),
    /// Stages, run in order; each starts from the model of the previous one and may override any key above.
    pub stage: Vec<Map<String, Value>> = Vec::new(),
}
}

/// The policy: a model directory, or a new model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// A Hugging Face directory, `org/name` in the Hugging Face cache, or `stage:NAME` for the model of an earlier stage.
    pub path: Option<String>,
    /// A randomly initialised model instead of `path`.
    pub init: Option<InitSettings>,
    /// Compute type: `f32` or `bf16`; master weights are f32.
    pub dtype: Option<String>,
    /// Activation checkpointing: recompute layers in backward to save memory.
    pub recompute: bool,
    /// Frozen parameters: tensors whose names contain one of these.
    pub frozen: Vec<String>,
    /// Train the routers of a mixture of experts; they are frozen by default.
    pub train_router: bool,
    /// Coefficient of the routers' load-balance loss (auxiliary loss); 0 disables it. [0, 1]
    pub router_aux_loss_coef: f64,
}

with_defaults! {
/// A randomly initialised model and its tokenizer.
pub struct InitSettings {
    /// Model family; `ferrl doctor` lists them.
    pub family: String = ferrl_engine::model::FAMILIES[0].name().into(),
    /// Hidden size. [1, 131072]
    pub hidden: usize = 128,
    /// Layers. [1, 1024]
    pub layers: usize = 4,
    /// Attention heads; hidden / 64 by default. [1, 4096]
    pub heads: Option<usize> = None,
    /// Key and value heads (grouped-query attention); `heads` by default. [1, 4096]
    pub kv_heads: Option<usize> = None,
    /// Intermediate size of the feed-forward network. [1, 1048576]
    pub ffn: Option<usize> = None,
    /// Experts per layer, in families that have them; 8 by default. [1, 4096]
    pub experts: Option<usize> = None,
    /// Experts per token; 2 by default. [1, 4096]
    pub experts_per_token: Option<usize> = None,
    /// Intermediate size of an expert; `ffn / experts_per_token` by default. [1, 1048576]
    pub expert_ffn: Option<usize> = None,
    /// Tokenizer: `char` (one token per character of the data) or `bpe`.
    pub tokenizer: String = "char".into(),
    /// Vocabulary size of a `bpe` tokenizer. [1, 16777216]
    pub vocab: usize = 4096,
    /// Maximum sequence length. [1, 16777216]
    pub max_positions: usize = 1024,
}
}

/// The critic, for algorithms that have one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CriticSettings {
    /// A value head on the policy's trunk instead of a separate model.
    pub shared: bool,
    /// Model that initialises the critic: a directory or `stage:NAME`; the policy by default.
    pub path: Option<String>,
    /// Learning rate of the critic; five times the policy's by default. [1e-12, 10]
    pub lr: Option<f64>,
}

/// The teacher model, for algorithms that distill one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Teacher {
    /// A Hugging Face directory with the policy's tokenizer, or `stage:NAME` for the model of an earlier stage.
    pub path: Option<String>,
    /// Offload the teacher to host memory during rollouts (GPUs).
    pub offload: bool,
}

/// The reference: the initial policy of the stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reference {
    /// Offload the reference to host memory while it is not used (GPUs).
    pub offload: bool,
}

with_defaults! {
/// Training data.
pub struct DataSettings {
    /// Files, directories, globs, `split@path`, `org/name` in the Hugging Face cache, and generated tasks such as
    /// `task:countdown`, mixed.
    pub train: Vec<String> = Vec::new(),
    /// Sampling weight of each source: how often its rows occur in an epoch. A generated task of weight 1 adds as many examples as
    /// all files have rows. (0, 1000]
    pub weights: Vec<f64> = Vec::new(),
    /// Settings of the generated task; with several tasks a table for each, under its name.
    pub task: Map<String, Value> = Map::new(),
    /// Column mapping: new name = name in the files.
    pub columns: Map<String, Value> = Map::new(),
    /// Prompt template over the row's columns.
    pub template: Option<String> = None,
    /// System message.
    pub system: Option<String> = None,
    /// Prefill: the beginning of every completion.
    pub prefill: Option<String> = None,
    /// Few-shot examples before every prompt, each with a prompt and a response (or the columns of a row).
    pub examples: Vec<Map<String, Value>> = Vec::new(),
    /// Separator of few-shot examples where the prompt is raw text.
    pub separator: String = "\n\n".into(),
    /// Apply the model's chat template to text prompts too, as a user message. By default only messages are rendered with it.
    pub apply_chat_template: Option<bool> = None,
    /// Date for chat templates (`strftime_now`), such as `2026-01-31`; the day the run started by default.
    pub date: Option<String> = None,
    /// Maximum tokens: longer sequences are truncated; a longer prompt to sample from is refused or dropped (`overlong`).
    /// [1, 16777216]
    pub max_length: usize = 2048,
    /// What happens to a row whose response is truncated entirely, or whose prompt is too long: `error` or `drop`.
    pub overlong: String = "error".into(),
    /// Shuffle the rows in every epoch.
    pub shuffle: bool = true,
    /// Sample rows with replacement: an epoch is as many draws as there are rows, so that some occur twice and others not at all.
    pub replacement: bool = false,
    /// What happens to training rows that overlap with evaluation rows (the same prompt, or 13 consecutive words): `warn`, `drop`
    /// (they are not trained on), `error` or `off`.
    pub overlap: String = "warn".into(),
}
}

with_defaults! {
/// Sampling of completions.
pub struct Rollout {
    /// Prompts per step. [1, 1000000]
    pub prompts: usize = 32,
    /// Completions per prompt (group size). [1, 65536]
    pub samples: usize = 8,
    /// Maximum tokens of a completion. [1, 1048576]
    pub max_new_tokens: usize = 256,
    /// Sampling temperature. [0.0001, 100]
    pub temperature: f64 = 1.0,
    /// Top-k sampling; 0 disables it. [0, 16777216]
    pub top_k: usize = 0,
    /// Nucleus (top-p) sampling; 1 disables it. (0, 1]
    pub top_p: f64 = 1.0,
    /// Stop strings; removed from the completion, as in vLLM and SGLang.
    pub stop: Vec<String> = Vec::new(),
    /// Keep the stop string at the end of the completion (vLLM's `include_stop_str_in_output`).
    pub include_stop: bool = false,
    /// Allow top-k and top-p sampling, whose log-probabilities are not the policy's.
    pub allow_off_policy: bool = false,
    /// Size of the KV cache in MiB. [1, 16777216]
    pub cache_mib: usize = 256,
    /// Free the KV cache during training (as vLLM's sleep mode), so that activations can use its memory. Costs an allocation and the
    /// capture of CUDA graphs in every step.
    pub release_cache: bool = false,
    /// Maximum number of actions per episode, for tasks with several turns. [1, 65535]
    pub max_turns: usize = 100,
    /// Off-policy lag: completions may be sampled up to this many steps before they are trained on; 0 is on-policy.
    /// [0, 100]
    pub max_lag: usize = 0,
    /// Partial rollouts: maximum tokens of a completion per step; unfinished completions continue in the next step. 0 disables them.
    /// [0, 1048576]
    pub partial_tokens: usize = 0,
    /// Tensor parallelism of sampling; 0 is `parallel.tp_size`. [0, 1000000]
    pub tp_size: usize = 0,
}
}

with_defaults! {
/// Search in place of independent completions.
pub struct SearchSettings {
    /// Search strategy; `ferrl search --list` lists them. Unset disables search.
    pub strategy: Option<String> = None,
    /// Options of the strategy and its expander.
    pub options: Map<String, Value> = Map::new(),
    /// Scorer of the search: `reward` (the recipe's rewards), `step_oracle` (its verifier, after every step), `logp` (the model's
    /// own probabilities), or a reward model: a directory, or `stage:NAME` for the model of an earlier stage.
    pub scorer: String = "reward".into(),
    /// Options of the reward model, as in `[[reward]]`.
    pub scorer_options: Map<String, Value> = Map::new(),
    /// Token budget per prompt: the search ends after the round that reaches it; by default the strategy decides.
    /// [1, 1000000000000]
    pub budget: Option<u64> = None,
    /// Train on trees: every path is a completion, and with `algo.advantage.baseline = "steps"` each step has the advantage of its
    /// node. `rollout.samples` is not used.
    pub train: bool = false,
    /// Also evaluate with search: `eval/search` is the accuracy of its results, with `scorer = "reward"` an upper bound.
    pub eval: bool = false,
}
}

/// A reward; several form a weighted sum.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewardSettings {
    /// Name of a built-in verifier.
    pub verifier: Option<String>,
    /// Options of the verifier or reward model; for a language model `kind = "generative"`, `"implicit"` or `"decision"`.
    pub options: Map<String, Value>,
    /// A Python file with a function `reward(prompts, completions, **columns)`.
    pub python: Option<PathBuf>,
    /// Name of the Python function.
    pub function: Option<String>,
    /// Reward model: a directory, or `stage:NAME` for the model of an earlier stage.
    pub model: Option<String>,
    /// Offload the reward model to host memory while it is not used (GPUs).
    pub offload: bool,
    /// Weight, 1 by default; 0 only logs the reward. [-1000000, 1000000]
    pub weight: Option<f64>,
    /// Reward of truncated completions: `wrong` (0, the default) or `score` (the verifier's score of the truncated text).
    /// Python functions and reward models always score them; with `wrong` they never count as right.
    pub truncated: Option<String>,
    /// Process rewards: how a completion is split into steps, each rewarded on its last token. The source is a Python function that
    /// returns a list per completion, a verifier that finds the first wrong step, or a reward model.
    pub steps: Option<StepSplit>,
    /// Tokens of a step with `steps = "tokens"`, 16 by default. [1, 1048576]
    pub step_tokens: Option<usize>,
}

/// Values of `search.scorer` other than models.
const SCORERS: [&str; 3] = ["reward", "step_oracle", "logp"];

impl SearchSettings {
    /// The folder of the reward model, if the scorer is one.
    pub fn model(&self) -> Option<&str> {
        Some(self.scorer.as_str()).filter(|name| self.strategy.is_some() && !SCORERS.contains(name))
    }
    /// That model as a reward, with its options.
    pub fn model_reward(&self) -> Option<RewardSettings> {
        let model = Some(self.model()?.to_string());
        Some(RewardSettings { model, options: self.scorer_options.clone(), ..Default::default() })
    }
    /// Why the scorer's model cannot be opened: one word that is no folder was meant as a name.
    pub(crate) fn not_opened(&self, error: Error) -> Error {
        let name = self.scorer.as_str();
        if name.contains(std::path::MAIN_SEPARATOR) || std::path::Path::new(name).exists() {
            return error.at("search.scorer");
        }
        let near = if name == "oracle" { Some(SCORERS[0]) } else { nearest(name, SCORERS) };
        let what = format!(
            "{name:?} is neither a scorer nor a folder, expected one of {}, or the folder of a reward model",
            SCORERS.join(", ")
        );
        Error::model(what)
            .at("search.scorer")
            .fix(format!("search.scorer = {:?}", near.unwrap_or(SCORERS[0])))
    }
    /// Whether the scorer can score prefixes.
    pub fn judges_steps(&self) -> bool {
        self.scorer != SCORERS[0]
    }
    /// Replaces the model folders that the scorer and its options name.
    pub(crate) fn place_models<E>(
        &mut self,
        place: impl Fn(&str) -> std::result::Result<String, E>,
    ) -> std::result::Result<(), E> {
        let Some(scorer) = self.model().map(&place).transpose()? else { return Ok(()) };
        self.scorer = scorer;
        for (_, value) in
            self.scorer_options.iter_mut().filter(|(key, _)| OPTION_MODELS.contains(&key.as_str()))
        {
            if let Some(path) = value.as_str().filter(|path| !path.is_empty()) {
                *value = place(path)?.into();
            }
        }
        Ok(())
    }
}

/// Kinds of rewards by a language model.
pub const MODEL_KINDS: [&str; 3] = ["generative", "implicit", "decision"];

/// Options of `[[reward]]` that name a model.
pub(crate) const OPTION_MODELS: [&str; 2] = ["extractor", "reference"];

const STEP_TOKENS: usize = 16;

impl RewardSettings {
    /// The directories of all models of the reward.
    pub fn model_paths(&self) -> impl Iterator<Item = &str> {
        self.model.as_deref().into_iter().chain(self.models().map(|(_, path)| path))
    }
    /// Other models that the options name, by their keys: the extractor of `decision`, the reference of `implicit`.
    pub fn models(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let named = OPTION_MODELS.iter().filter(|_| self.model_kind().is_some());
        named.filter_map(|key| Some((*key, self.options.get(*key)?.as_str()?)))
    }
    pub(crate) fn models_mut(&mut self) -> impl Iterator<Item = &mut Value> {
        let own = self.model_kind().is_some();
        let named = move |(key, value): &(&String, &mut Value)| {
            own && OPTION_MODELS.contains(&key.as_str()) && value.as_str().is_some_and(|v| !v.is_empty())
        };
        self.options.iter_mut().filter(named).map(|(_, value)| value)
    }

    /// With process rewards: how completions are split into steps, and the tokens per step.
    pub fn steps(&self) -> Option<(StepSplit, usize)> {
        self.steps.map(|split| (split, self.step_tokens.unwrap_or(STEP_TOKENS)))
    }

    /// Kind of the reward model: `generative` (a verdict), `implicit` (a log-ratio), `decision` (a forecaster with an extractor); `None`
    /// for a score head.
    pub fn model_kind(&self) -> Option<&'static str> {
        let kind = self.options.get("kind").filter(|_| self.model.is_some())?;
        MODEL_KINDS.iter().copied().find(|known| kind == known)
    }

    /// Refuses options that do not fit the model, before it is loaded. `scores`: the model has a score head; `option`: prefix of an
    /// option in fixes, such as `--judge `.
    pub fn check_model(&self, scores: bool, option: &str) -> Result<()> {
        let usage = |what: String, fix: String| Err(Error::usage(what).fix(fix));
        let table = option.trim_end_matches(['.', ' ']);
        match self.model_kind() {
            Some("generative") => drop(read_settings::<Judgement>(table, &self.options)?),
            Some("implicit") => drop(read_settings::<Implicit>(table, &self.options)?),
            Some("decision") => drop(read_settings::<DecisionOptions>(table, &self.options)?),
            _ => {}
        }
        let given = |key: &str| self.options.get(key).and_then(Value::as_str).is_some_and(|v| !v.is_empty());
        match (self.model_kind(), self.options.get("kind")) {
            (None, Some(kind)) => {
                let word = kind.as_str().map_or_else(|| kind.to_string(), String::from);
                let near = nearest(&word, MODEL_KINDS).unwrap_or(MODEL_KINDS[0]);
                let what = format!("unknown kind {word:?}, expected one of {}", MODEL_KINDS.join(", "));
                usage(what, format!("{option}kind={near}"))
            }
            (None, None) if !scores => {
                let what = "a language model has no score head".into();
                usage(
                    what,
                    format!("{option}kind=generative, which makes it a judge; or a model with a score head"),
                )
            }
            (None, None) => match self.options.keys().next() {
                Some(key) => usage(
                    format!("a model with a score head has no options, got {key:?}"),
                    format!("no {option}{key}; with {option}kind=generative a language model has options"),
                ),
                None => Ok(()),
            },
            (Some("implicit"), _) if !given("reference") => usage(
                "an implicit reward needs a reference model".into(),
                format!("{option}reference=DIR, the model that training started from"),
            ),
            (Some("decision"), _) if !given("extractor") => usage(
                "a decision reward needs a model that extracts answers".into(),
                format!("{option}extractor=DIR, a language model that lists the answers of a paragraph"),
            ),
            _ => Ok(()),
        }
    }
}

with_defaults! {
/// Optimizer and learning-rate schedule.
pub struct Optim {
    /// Peak learning rate. [1e-12, 10]
    pub lr: f64 = 1e-5,
    /// Optimizer: `adamw`, `adamw8` (8-bit AdamW for the layers' matrices: 10 bytes a weight in training instead of 16) or
    /// `sgd`.
    pub name: String = "adamw".into(),
    /// Optimizer state to offload to host memory: `none` or `moments` (8 bytes a weight less on the GPU with `adamw`, the same bits,
    /// slower updates). No effect on the CPU.
    pub offload: String = "none".into(),
    /// Decay rate of the first moment; momentum of SGD. [0, 1)
    pub beta1: f64 = 0.9,
    /// Decay rate of the second moment. [0, 1)
    pub beta2: f64 = 0.999,
    /// Epsilon in the denominator of Adam. [1e-30, 1]
    pub eps: f64 = 1e-8,
    /// Decoupled weight decay of matrices; norms and biases have none. [0, 1000]
    pub weight_decay: f64 = 0.01,
    /// Gradient clipping: maximum norm of the gradient; 0 disables it. [0, 1000000]
    pub max_grad_norm: f64 = 1.0,
    /// Learning-rate schedule: `constant`, `linear` or `cosine`.
    pub schedule: String = "constant".into(),
    /// Warm-up, as a fraction of the steps. [0, 1]
    pub warmup: f64 = 0.0,
    /// Final learning rate, as a fraction of the peak. [0, 1]
    pub min_ratio: f64 = 0.0,
    /// EMA decay of the weights: the result of the stage is their exponential moving average, started after the first update; steps and
    /// evaluations use the current weights. Unset disables the EMA. (0, 0.999999]
    pub ema: Option<f64> = None,
}
}

with_defaults! {
/// Steps, epochs and batch sizes.
pub struct Train {
    /// Number of steps; overrides `epochs`. [1, 1000000000]
    pub steps: Option<u64> = None,
    /// Epochs over the data. (0, 1000000]
    pub epochs: f64 = 1.0,
    /// Examples (or pairs) per update, for algorithms that do not sample. [1, 1000000]
    pub batch: usize = 64,
    /// Maximum tokens of a micro-batch; does not change the gradients. [1, 16777216]
    pub micro_batch_tokens: usize = 8192,
}
}

with_defaults! {
/// Evaluation while training.
pub struct Eval {
    /// Steps between evaluations; 0 disables them. [0, 1000000000]
    pub every: u64 = 0,
    /// Evaluate before the first step too.
    pub at_start: bool = false,
    /// Held-out data, as in `data.train`; by default the held-out part of a generated task.
    pub data: Vec<String> = Vec::new(),
    /// Fraction of `data.train` to hold out instead: drawn by the seed, never trained on. [0, 1)
    pub split: f64 = 0.0,
    /// Prompts (or examples) per evaluation. [0, 10000000]
    pub prompts: usize = 200,
    /// Completions per prompt. [1, 65536]
    pub samples: usize = 1,
    /// Sampling temperature; the rollout's by default. [0, 100]
    pub temperature: Option<f64> = None,
}
}

with_defaults! {
/// Checkpoints.
pub struct Checkpoint {
    /// Steps between checkpoints; with 0 only `minutes` counts. The end of a stage is always saved. [0, 1000000000]
    pub every: u64 = 0,
    /// Minutes between checkpoints, written at the end of a step; 0 disables them. [0, 100000]
    pub minutes: f64 = 10.0,
    /// Number of latest checkpoints to keep. [1, 1000]
    pub keep: usize = 2,
    /// Number of best checkpoints by `metric` to keep as well. [0, 1000]
    pub keep_best: usize = 0,
    /// Metric that ranks checkpoints, such as `eval/pass@1`, measured at each evaluation; larger is better unless
    /// `lower_is_better`.
    pub metric: Option<String> = None,
    /// Whether a smaller metric is better.
    pub lower_is_better: bool = false,
    /// Use the best checkpoint by `metric` as the stage's result instead of the last.
    pub use_best: bool = false,
    /// Early stopping: evaluations without a new best `metric` before the stage ends; 0 disables it.
    /// [0, 1000000]
    pub patience: usize = 0,
}
}

//! Everything a recipe may say, with defaults. The doc comments are the manual's text.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// A whole recipe, or one stage of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// Name of the run folder; the recipe file's name where absent.
    pub name: Option<String>,
    /// Another recipe beside this one, over which this one is laid: it says only what differs.
    pub base: Option<String>,
    /// Decides every random choice. [0, 9223372036854775807]
    pub seed: u64,
    /// Device: `cpu`, `cuda` or `cuda:N`; `auto` uses a GPU if there is one.
    pub device: String,
    /// Threads; 0 takes all cores. [0, 1024]
    pub threads: usize,
    /// Tokens have the same log-probability, to the bit, when they are sampled and when they are trained on. `false` is for
    /// cards alone, where it may be a little faster; the same recipe still gives the same bits every time.
    pub exact: bool,
    /// The model that is trained.
    pub model: Model,
    /// The critic, for algorithms that have one.
    pub critic: Critic,
    /// The model that is imitated, for algorithms that have one.
    pub teacher: Teacher,
    /// What is learned from.
    pub data: Data,
    /// How it is learned: `name` and the algorithm's own settings.
    pub algo: Map<String, Value>,
    /// How answers are sampled, for algorithms that sample.
    pub rollout: Rollout,
    /// How answers are rewarded.
    pub reward: Vec<Reward>,
    /// From gradients to weights.
    pub optim: Optim,
    /// How long, and in which portions.
    pub train: Train,
    /// Evaluation while training.
    pub eval: Eval,
    /// What is kept.
    pub checkpoint: Checkpoint,
    /// Stages run one after the other; each starts from the model the one before left and may override any of the above.
    pub stage: Vec<Map<String, Value>>,
}

/// The model that is trained: a directory, or a new one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// A Hugging Face directory, `org/name` in the Hugging Face cache, or `stage:NAME` for what an earlier stage left.
    pub path: Option<String>,
    /// A random model instead, made at the start of the run.
    pub init: Option<Init>,
    /// `f32` or `bf16`: storage of activations; weights are kept in f32.
    pub dtype: Option<String>,
    /// Compute layers again in backward, to save memory.
    pub recompute: bool,
    /// Tensors whose names contain one of these are not trained.
    pub frozen: Vec<String>,
}

/// A random model and its tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Init {
    /// One of the families of `ferrl doctor`.
    pub family: String,
    /// Width. [1, 131072]
    pub hidden: usize,
    /// Depth. [1, 1024]
    pub layers: usize,
    /// Query heads; hidden / 64 where absent. [1, 4096]
    pub heads: Option<usize>,
    /// Key and value heads. [1, 4096]
    pub kv_heads: Option<usize>,
    /// Inner width of the feed-forward network. [1, 1048576]
    pub ffn: Option<usize>,
    /// `char` (every character of the data is a token) or `bpe`.
    pub tokenizer: String,
    /// Tokens of a `bpe` tokenizer. [1, 16777216]
    pub vocab: usize,
    /// Longest sequence. [1, 16777216]
    pub max_positions: usize,
}

impl Default for Init {
    fn default() -> Self {
        Init {
            family: ferrl_engine::model::FAMILIES[0].name().into(),
            hidden: 128,
            layers: 4,
            heads: None,
            kv_heads: None,
            ffn: None,
            tokenizer: "char".into(),
            vocab: 4096,
            max_positions: 1024,
        }
    }
}

/// The critic, for algorithms that have one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Critic {
    /// Share the policy's trunk and give it a value head, instead of a model of its own.
    pub shared: bool,
    /// Where its own weights start, a directory or `stage:NAME`; the policy's where absent.
    pub path: Option<String>,
    /// Its own learning rate; five times the policy's where absent. [1e-12, 10]
    pub lr: Option<f64>,
}

/// The model that is imitated, for algorithms that have one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Teacher {
    /// A Hugging Face directory with the policy's tokenizer, or `stage:NAME` for what an earlier stage left.
    pub path: Option<String>,
}

/// What is learned from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Files, directories, globs, `split@path`, `org/name` in the Hugging Face cache, and generated tasks such as
    /// `task:countdown`, mixed.
    pub train: Vec<String>,
    /// Weight of each source: how often its rows are seen in an epoch. A task of weight 1 gives as many examples as all files
    /// have rows. (0, 1000]
    pub weights: Vec<f64>,
    /// Settings of a generated task; under its name where there are several.
    pub task: Map<String, Value>,
    /// New column name = the name it has in the files.
    pub columns: Map<String, Value>,
    /// The prompt, as a template over the row's columns.
    pub template: Option<String>,
    /// A system message in front.
    pub system: Option<String>,
    /// The beginning of every answer.
    pub prefill: Option<String>,
    /// Worked examples before every prompt, each with a prompt and a response (or the columns of a row).
    pub examples: Vec<Map<String, Value>>,
    /// What stands between worked examples where the prompt is raw text.
    pub separator: String,
    /// Put text prompts into the model's chat template as a user's message. Absent: messages are rendered, text is not.
    pub apply_chat_template: Option<bool>,
    /// The day that chat templates are told (`strftime_now`), such as `2026-01-31`; the day the run began where absent.
    pub date: Option<String>,
    /// Longer sequences are cut to this many tokens; a longer prompt to sample from is refused or left out (`overlong`).
    /// [1, 16777216]
    pub max_length: usize,
    /// What becomes of a row whose response is cut off entirely, or whose prompt is too long: `error` or `drop`.
    pub overlong: String,
    /// A new order in every epoch.
    pub shuffle: bool,
}

impl Default for Data {
    fn default() -> Self {
        Data {
            train: Vec::new(),
            weights: Vec::new(),
            task: Map::new(),
            columns: Map::new(),
            template: None,
            system: None,
            prefill: None,
            examples: Vec::new(),
            separator: "\n\n".into(),
            apply_chat_template: None,
            date: None,
            max_length: 2048,
            overlong: "error".into(),
            shuffle: true,
        }
    }
}

/// How answers are sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rollout {
    /// Prompts of one step. [1, 1000000]
    pub prompts: usize,
    /// Answers to each. [1, 65536]
    pub samples: usize,
    /// Longest answer. [1, 1048576]
    pub max_new_tokens: usize,
    /// Divides the logits. [0.0001, 100]
    pub temperature: f64,
    /// Only the likeliest; 0 is off. [0, 16777216]
    pub top_k: usize,
    /// Only the likeliest that make up this share; 1 is off. (0, 1]
    pub top_p: f64,
    /// Text that ends a completion; it is cut from what rewards see, as vLLM and SGLang do.
    pub stop: Vec<String>,
    /// Keep the stop text at the end of what rewards see (vLLM's `include_stop_str_in_output`).
    pub include_stop: bool,
    /// Allow truncated sampling though its log-probabilities are not the policy's.
    pub allow_off_policy: bool,
    /// Memory of the cache. [1, 16777216]
    pub cache_mib: usize,
    /// Answers may be sampled this many steps before they are learned from; 0 samples each step with its own weights.
    /// [0, 100]
    pub max_lag: usize,
}

impl Default for Rollout {
    fn default() -> Self {
        Rollout {
            prompts: 32,
            samples: 8,
            max_new_tokens: 256,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            stop: Vec::new(),
            include_stop: false,
            allow_off_policy: false,
            cache_mib: 256,
            max_lag: 0,
        }
    }
}

/// One source of reward; several are added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reward {
    /// A built-in verifier.
    pub verifier: Option<String>,
    /// Its settings.
    pub options: Map<String, Value>,
    /// A Python file with a function `reward(prompts, completions, **columns)`.
    pub python: Option<PathBuf>,
    /// The function's name.
    pub function: Option<String>,
    /// A reward model: a directory, or `stage:NAME` for what an earlier stage left.
    pub model: Option<String>,
    /// Its factor, 1 where absent; 0 only logs what it says. [-1000000, 1000000]
    pub weight: Option<f64>,
    /// What a completion gets that the length limit cut off: `wrong` (nothing, the default) or `score` (the verifier's score
    /// of the text as it stands). Python functions and reward models always see it; with `wrong` it never counts as right.
    pub truncated: Option<String>,
}

/// From gradients to weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Optim {
    /// Learning rate at its peak. [1e-12, 10]
    pub lr: f64,
    /// `adamw` or `sgd`.
    pub name: String,
    /// Decay of the first moment (or SGD's momentum). [0, 1)
    pub beta1: f64,
    /// Decay of the second moment. [0, 1)
    pub beta2: f64,
    /// Added to the root of the second moment. [1e-30, 1]
    pub eps: f64,
    /// Pulls matrices to zero; norms and biases are left alone. [0, 1000]
    pub weight_decay: f64,
    /// Longer gradients are scaled down to this; 0 is off. [0, 1000000]
    pub max_grad_norm: f64,
    /// `constant`, `linear` or `cosine`.
    pub schedule: String,
    /// Share of the steps that warm up. [0, 1]
    pub warmup: f64,
    /// Where the rate ends, as a share of the peak. [0, 1]
    pub min_ratio: f64,
    /// Share of the old average kept at each step, where an average of the weights is wanted. (0, 0.999999]
    pub ema: Option<f64>,
}

impl Default for Optim {
    fn default() -> Self {
        Optim {
            lr: 1e-5,
            name: "adamw".into(),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            schedule: "constant".into(),
            warmup: 0.0,
            min_ratio: 0.0,
            ema: None,
        }
    }
}

/// How long, and in which portions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Train {
    /// Steps; `epochs` decide where absent. [1, 1000000000]
    pub steps: Option<u64>,
    /// Passes over the data. (0, 1000000]
    pub epochs: f64,
    /// Examples (or pairs) of one update, for algorithms that do not sample. [1, 1000000]
    pub batch: usize,
    /// Tokens computed at once; does not change what is learned. [1, 16777216]
    pub micro_batch_tokens: usize,
}

impl Default for Train {
    fn default() -> Self {
        Train { steps: None, epochs: 1.0, batch: 64, micro_batch_tokens: 8192 }
    }
}

/// Evaluation while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Eval {
    /// Every so many steps; 0 is never. [0, 1000000000]
    pub every: u64,
    /// Also before the first step.
    pub at_start: bool,
    /// Held-out data, as in `data.train`; a generated task's own held-out part where empty.
    pub data: Vec<String>,
    /// Share of `data.train` that is held out instead: drawn by the seed, never trained on. [0, 1)
    pub split: f64,
    /// Prompts (or examples) to use. [0, 10000000]
    pub prompts: usize,
    /// Answers to each prompt. [1, 65536]
    pub samples: usize,
    /// Sampling temperature; the rollout's where absent. [0, 100]
    pub temperature: Option<f64>,
}

impl Default for Eval {
    fn default() -> Self {
        Eval {
            every: 0,
            at_start: false,
            data: Vec::new(),
            split: 0.0,
            prompts: 200,
            samples: 1,
            temperature: None,
        }
    }
}

/// What is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Checkpoint {
    /// Every so many steps; 0 leaves it to `minutes`. The end of a stage is always saved. [0, 1000000000]
    pub every: u64,
    /// Also when so many minutes have passed since the last, at the end of the step; 0 switches it off. [0, 100000]
    pub minutes: f64,
    /// How many of the latest to keep. [1, 1000]
    pub keep: usize,
    /// How many of the best by `metric` to keep beside them. [0, 1000]
    pub keep_best: usize,
    /// What best means, such as `eval/pass@1`, measured at each evaluation; the largest is best unless
    /// `lower_is_better`.
    pub metric: Option<String>,
    /// Whether a smaller metric is better.
    pub lower_is_better: bool,
    /// Hand on the best checkpoint by `metric` instead of the last.
    pub use_best: bool,
    /// End the stage after so many evaluations in a row without a new best `metric`; 0 goes on to the last step.
    /// [0, 1000000]
    pub patience: usize,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Checkpoint {
            every: 0,
            minutes: 10.0,
            keep: 2,
            keep_best: 0,
            metric: None,
            lower_is_better: false,
            use_best: false,
            patience: 0,
        }
    }
}

impl Default for Recipe {
    fn default() -> Self {
        Recipe {
            name: None,
            base: None,
            seed: 0,
            device: "auto".into(),
            threads: 0,
            exact: true,
            model: Model::default(),
            critic: Critic::default(),
            teacher: Teacher::default(),
            data: Data::default(),
            algo: Map::new(),
            rollout: Rollout::default(),
            reward: Vec::new(),
            optim: Optim::default(),
            train: Train::default(),
            eval: Eval::default(),
            checkpoint: Checkpoint::default(),
            stage: Vec::new(),
        }
    }
}

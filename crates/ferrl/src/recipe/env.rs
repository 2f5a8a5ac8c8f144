//! The `env` section: an environment that is not a generated task.

use serde_json::{Map, Value};

with_defaults! {
/// The environment of episodes.
pub struct EnvSettings {
    /// A Python file with `step(state, action, extra_info)` as in RL2, or `FILE.py:CLASS` with gymnasium's `reset` and `step`.
    pub path: Option<String> = None,
    /// An environment of GEM, such as `game:GuessTheNumber-v0-easy`; the package gem-llm must be installed.
    pub gem: Option<String> = None,
    /// A task of reasoning-gym, such as `letter_counting`; the package reasoning-gym must be installed.
    pub reasoning_gym: Option<String> = None,
    /// Address of an OpenEnv server, such as `http://127.0.0.1:8000`; several, separated by commas, share the episodes.
    pub url: Option<String> = None,
    /// Tools that the policy may call, of `ferrl env tools`; prompts and rewards are the recipe's.
    pub tools: Vec<String> = Vec::new(),
    /// Maximum number of tool calls per episode. [1, 65535]
    pub max_calls: usize = 4,
    /// Arguments of the environment's class, of `gem.make`, or of `create_dataset`; with tools, a table for each.
    pub options: Map<String, Value> = Map::new(),
    /// Worker processes. [1, 256]
    pub workers: usize = 2,
    /// Maximum seconds per call. [0.001, 1000000]
    pub timeout: f64 = 30.0,
    /// Maximum seconds to load the environment. [0.001, 1000000]
    pub start_timeout: f64 = 120.0,
    /// Maximum resident memory of a worker process in MiB. [1, 16777216]
    pub memory_mib: u64 = 4096,
    /// Maximum number of concurrent environments. [1, 65536]
    pub concurrency: usize = crate::episode::CONCURRENCY,
    /// The Python interpreter.
    pub python: String = "python3".into(),
}
}

impl EnvSettings {
    /// The keys that name an environment, each with its value.
    pub fn named(&self) -> Vec<(&'static str, &str)> {
        let all = [
            ("path", &self.path),
            ("gem", &self.gem),
            ("reasoning_gym", &self.reasoning_gym),
            ("url", &self.url),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?))).collect()
    }

    /// Whether the environment rewards episodes; with tools the recipe does.
    pub fn rewards(&self) -> bool {
        !self.named().is_empty()
    }

    /// Whether it makes episodes without rows: all do but a file of functions.
    pub fn makes_episodes(&self) -> bool {
        let functions = |(key, value): &(&str, &str)| *key == "path" && value.ends_with(".py");
        self.named().first().is_some_and(|named| !functions(named))
    }
}

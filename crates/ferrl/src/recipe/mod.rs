//! Recipes: a typed TOML file describes a whole run.
//!
//! [`Recipe::load`] reads a file and the command line's overrides and returns a [`Resolved`]; [`Resolved::check`] refuses
//! settings that cannot work. Unknown keys and wrong types are errors of loading, with place and the most similar name.

mod adapter;
mod algorithm;
mod check;
mod difference;
mod elsewhere;
mod env;
mod environment;
mod in_run;
mod json_schema;
mod keys;
mod listing;
mod load;
mod manual;
mod optim;
mod options;
mod overrides;
mod parallel;
mod range;
mod rl2;
mod schema;
mod settings;
mod size;
mod tree;
mod types;
mod warn;

pub use adapter::{AdapterSettings, BiasChoice, INITS};
pub use check::{DTYPES, OVERLAP, OVERLONG, SCHEDULES, TOKENIZERS};
pub use difference::{Difference, SAME_BITS, changes_no_bit, differences};
pub use elsewhere::{flag, names_markdown};
pub use env::EnvSettings;
pub use in_run::in_run;
pub use json_schema::json_schema;
pub use keys::{Key, algorithm_keys, keys, keys_markdown, policy_keys};
pub use listing::{
    option_keys, task_keys, tasks_json, tasks_text, verifiers_json, verifiers_markdown, verifiers_text,
};
pub use load::{Resolved, StageRecipe};
pub use manual::{algorithms_markdown, explained, keys_that_matter, metrics_explained};
pub use optim::OPTIMIZERS;
pub use parallel::Parallel;
pub use range::Range;
pub use schema::KeyKind;
pub use settings::*;
pub use size::{bytes, device_bytes};
pub(crate) use types::{read_settings, unknown_key};
pub use warn::warn;

use ferrl_engine::Error;
use ferrl_kernels::DType;

pub const DEFAULT_ALGORITHM: &str = crate::algo::DEFAULT.name;

/// The value that unsets a setting.
pub const OFF: &str = "off";

impl Recipe {
    pub fn algorithm_name(&self) -> &str {
        self.algo.get("name").and_then(|n| n.as_str()).unwrap_or(DEFAULT_ALGORITHM)
    }

    /// The compute type; f32 by default.
    pub fn dtype(&self) -> ferrl_engine::Result<DType> {
        let Some(name) = self.model.dtype.as_deref() else { return Ok(DType::F32) };
        DType::compute(name).ok_or_else(|| {
            Error::usage(format!("unknown dtype {name:?}, expected one of {}", DTYPES.join(", ")))
                .at("model.dtype")
                .fix("model.dtype = \"bf16\"")
        })
    }

    pub fn algorithm(&self) -> ferrl_engine::Result<Box<dyn crate::algo::Algorithm>> {
        let mut values = self.algo.clone();
        values.shift_remove("name");
        (crate::algo::find(self.algorithm_name())?.build)(serde_json::Value::Object(values))
    }
}

//! The `adapter` section: a low-rank adapter is trained instead of all weights.

use ferrl_engine::model::adapter::{self, AdapterOptions, Modules};
use ferrl_engine::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Which biases are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BiasChoice {
    /// None.
    #[default]
    None,
    /// All of the model's.
    All,
    /// Those of adapted modules.
    LoraOnly,
}

with_defaults! {
/// A low-rank adapter (LoRA), trained instead of the weights. The names are those of PEFT's `LoraConfig`.
pub struct AdapterSettings {
    /// Rank. [1, 65536]
    pub r: usize = 32,
    /// Numerator of the scale: the adapter's product is multiplied by `alpha / r`. (0, 1000000]
    pub alpha: f64 = 32.0,
    /// Modules to adapt: `all-linear` (all linear layers but the head), names such as `q_proj`, or a regular expression
    /// over whole module names.
    pub target_modules: Vec<String> = vec![ALL.into()],
    /// Modules to exclude from adaptation: names, or a regular expression.
    pub exclude_modules: Vec<String> = Vec::new(),
    /// Ranks of single modules: a name or regular expression = a rank.
    pub rank_pattern: Map<String, Value> = Map::new(),
    /// Alphas of single modules: a name or regular expression = an alpha.
    pub alpha_pattern: Map<String, Value> = Map::new(),
    /// Indices of the layers to adapt; empty adapts all. [0, 100000]
    pub layers_to_transform: Vec<usize> = Vec::new(),
    /// Rank-stabilised LoRA: the scale is `alpha / sqrt(r)`.
    pub use_rslora: bool = false,
    /// Modules to train fully and save with the adapter, such as `lm_head`; value and score heads always are.
    pub modules_to_save: Vec<String> = Vec::new(),
    /// Biases to train.
    pub bias: BiasChoice = BiasChoice::None,
    /// Initialisation of A: `kaiming` (PEFT's default) or `gaussian`. B starts at zero.
    pub init: String = "kaiming".into(),
    /// Storage of the base weights: `device`; `host`, offloaded to host memory and read once per update; or `nf4`, 4-bit NF4 on the
    /// device (QLoRA, 4.5 bits a weight), quantised on loading. The policy is then the quantised model.
    pub base: String = "device".into(),
}
}

/// Every linear layer but the head.
const ALL: &str = "all-linear";

/// Storage of the base weights.
pub const BASES: &[&str] = &["device", "host", "nf4"];

/// Initialisations of `A`.
pub const INITS: &[&str] = &["kaiming", "gaussian"];

impl AdapterSettings {
    /// The engine's options.
    pub fn options(&self) -> Result<AdapterOptions> {
        Ok(AdapterOptions {
            r: self.r,
            alpha: self.alpha,
            target_modules: modules("adapter.target_modules", &self.target_modules)?
                .unwrap_or(Modules::AllLinear),
            exclude_modules: modules("adapter.exclude_modules", &self.exclude_modules)?,
            rank_pattern: pairs("adapter.rank_pattern", &self.rank_pattern, |v| {
                v.as_u64().filter(|r| (1..=65536).contains(r)).map(|r| r as usize)
            })?,
            alpha_pattern: pairs("adapter.alpha_pattern", &self.alpha_pattern, |v| {
                v.as_f64().filter(|a| a.is_finite() && *a > 0.0)
            })?,
            layers_to_transform: (!self.layers_to_transform.is_empty())
                .then(|| self.layers_to_transform.clone()),
            use_rslora: self.use_rslora,
            modules_to_save: self.modules_to_save.clone(),
            bias: match self.bias {
                BiasChoice::None => adapter::Bias::None,
                BiasChoice::All => adapter::Bias::All,
                BiasChoice::LoraOnly => adapter::Bias::LoraOnly,
            },
            init: match self.init.as_str() {
                "gaussian" => adapter::Init::Gaussian,
                _ => adapter::Init::Kaiming,
            },
            base: match self.base.as_str() {
                "host" => adapter::BaseHome::Host,
                "nf4" => adapter::BaseHome::Nf4,
                _ => adapter::BaseHome::Device,
            },
        })
    }
}

/// A list of names, `all-linear`, or one regular expression.
fn modules(key: &str, list: &[String]) -> Result<Option<Modules>> {
    let plain = |name: &String| name.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    match list {
        [] => Ok(None),
        [one] if one == ALL => Ok(Some(Modules::AllLinear)),
        [one] if !plain(one) => Ok(Some(Modules::Matching(one.clone()))),
        names => match names.iter().find(|name| *name == ALL || !plain(name)) {
            None => Ok(Some(Modules::Named(names.to_vec()))),
            Some(name) => Err(Error::usage(format!("{name:?} among several names"))
                .at(key)
                .fix(format!("names alone, or {key} = {name:?} alone"))),
        },
    }
}

fn pairs<T>(
    key: &str,
    map: &Map<String, Value>,
    value: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(String, T)>> {
    let one = |(name, v): (&String, &Value)| {
        let wrong = || Error::usage(format!("{name:?} is {v}, expected a number above 0")).at(key);
        Ok((name.clone(), value(v).ok_or_else(wrong)?))
    };
    map.iter().map(one).collect()
}

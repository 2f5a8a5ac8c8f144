//! Low-rank adapters (LoRA, Hu et al., 2021, arXiv 2106.09685): what is adapted, and how.
//!
//! `W = round(base + s B A)` with `s = alpha / r`. The base stays as it is; `A` and `B` are parameters of the model, listed
//! after those of its configuration, and the form that products read is rebuilt from all three after each update
//! (`lora.rs`). So forward, decoding, cache and log-probabilities know nothing of adapters.
//!
//! The settings mean what they mean in PEFT's `LoraConfig`. A module is a tensor of the model's files without its
//! `.weight`: query, key and value have adapters of their own although the decoder holds them in one matrix.

pub(crate) mod base;
mod choices;
mod lora;
mod modules;

pub use base::BaseHome;
pub(in crate::model) use lora::adapted_weights;
pub use lora::{Adapter, AdapterRounding, Values, frozen_params};
pub use modules::{LoraModule, SavedTensor, adapter_weights, lora_modules, saved_tensors};

use crate::model::ModelConfig;
use crate::{Error, Result};
use std::collections::HashMap;

/// The settings of an adapter, under PEFT's names.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterOptions {
    /// Rank.
    pub r: usize,
    /// Numerator of the scale: `alpha / r`.
    pub alpha: f64,
    /// Modules that are adapted.
    pub target_modules: Modules,
    /// Modules that are not, although `target_modules` names them.
    pub exclude_modules: Option<Modules>,
    /// Other ranks, by a regular expression over the end of a module's name.
    pub rank_pattern: Vec<(String, usize)>,
    /// Other alphas, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Layers that are adapted; all, where not given.
    pub layers_to_transform: Option<Vec<usize>>,
    /// The scale is `alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Modules that are trained whole, and saved with the adapter.
    pub modules_to_save: Vec<String>,
    /// Biases that are trained.
    pub bias: Bias,
    /// First values of `A`.
    pub init: Init,
    /// Where the weights under it live; no setting of PEFT.
    pub base: BaseHome,
}

impl Default for AdapterOptions {
    fn default() -> Self {
        AdapterOptions {
            r: 32,
            alpha: 32.0,
            target_modules: Modules::AllLinear,
            exclude_modules: None,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            layers_to_transform: None,
            use_rslora: false,
            modules_to_save: Vec::new(),
            bias: Bias::None,
            init: Init::Kaiming,
            base: BaseHome::Device,
        }
    }
}

/// A choice of modules.
#[derive(Clone, Debug, PartialEq)]
pub enum Modules {
    /// Every linear layer but the head.
    AllLinear,
    /// Those whose whole name matches a regular expression.
    Matching(String),
    /// Those whose name is one of these, or ends with a dot and one of these.
    Named(Vec<String>),
}

/// Which biases are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// None.
    None,
    /// All of the model's.
    All,
    /// Those of adapted modules.
    LoraOnly,
}

/// First values of `A`; `B` begins at zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// Uniform within one over the root of the inputs: PEFT's default.
    Kaiming,
    /// Normal with standard deviation `1 / r`.
    Gaussian,
}

impl AdapterOptions {
    /// Refuses settings that name what the model does not have, or that PEFT could not load; of a recipe, where a name without effect
    /// is a typo.
    pub fn check_names(&self, config: &ModelConfig) -> Result<()> {
        modules::check_names(self, config)
    }

    /// Refuses options that adapt other modules, or in another way.
    pub fn same(&self, wanted: &AdapterOptions, config: &ModelConfig) -> Result<()> {
        let differs = |what: String| {
            Err(Error::usage(format!("the adapter there and the recipe's differ: {what}")).fix(
                "the same settings in [adapter], or `ferrl export DIR --merge --out DIR` and a new adapter on the result",
            ))
        };
        // PEFT's files do not say what base an adapter was trained on.
        if self.base == BaseHome::Nf4 && wanted.base != BaseHome::Nf4 {
            return differs("it was trained on weights as NF4: adapter.base = \"nf4\"".into());
        }
        let (own, other) = (lora_modules(config, self)?, lora_modules(config, wanted)?);
        let by_name =
            |all: &[LoraModule]| all.iter().map(|m| (m.name.clone(), m.clone())).collect::<HashMap<_, _>>();
        let (owned, others) = (by_name(&own), by_name(&other));
        for m in &own {
            match others.get(&m.name) {
                None => return differs(format!("{} is adapted there alone", m.name)),
                Some(o) if o.r != m.r => {
                    return differs(format!("{} has rank {} there, {} here", m.name, m.r, o.r));
                }
                Some(o) if o.scale != m.scale => {
                    let what =
                        format!("{} is scaled by {} there, {} here (alpha / r)", m.name, m.scale, o.scale);
                    return differs(what);
                }
                Some(_) => {}
            }
        }
        if let Some(o) = other.iter().find(|o| !owned.contains_key(&o.name)) {
            return differs(format!("{} is adapted here alone", o.name));
        }
        let (own, other) = (saved_tensors(config, self)?, saved_tensors(config, wanted)?);
        if let Some(t) = own.iter().find(|t| !other.contains(t)) {
            return differs(format!("{} is trained whole there alone", t.name));
        }
        Ok(())
    }
}

/// Whether a module has that name, or ends with a dot and it.
pub(crate) fn ends_with(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

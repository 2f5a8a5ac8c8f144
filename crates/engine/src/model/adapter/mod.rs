//! Low-rank adapters (LoRA, Hu et al., 2021, arXiv 2106.09685): what is adapted, and how.
//!
//! `W = round(base + s B A)` with `s = alpha / r`. The base is frozen; `A` and `B` are parameters of the model, listed after
//! those of its configuration, and the merged weight is rebuilt after each update (`lora.rs`). So forward, decoding, KV cache
//! and log-probabilities know nothing of adapters.
//!
//! The settings mean what they mean in PEFT's `LoraConfig`. A module is named as its tensor in the checkpoint, without
//! `.weight`: q_proj, k_proj and v_proj have separate adapters although the decoder fuses them into one matrix.

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
    pub target_modules: Modules,
    /// Modules excluded from `target_modules`.
    pub exclude_modules: Option<Modules>,
    /// Rank by module: regular expressions matched against the end of its name.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alpha by module, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Indices of the adapted layers; `None` is all.
    pub layers_to_transform: Option<Vec<usize>>,
    /// rsLoRA: the scale is `alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Modules trained in full and saved with the adapter.
    pub modules_to_save: Vec<String>,
    /// Which biases are trained.
    pub bias: Bias,
    /// Initialisation of `A`.
    pub init: Init,
    /// Storage of the base weights (not a PEFT setting).
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

#[derive(Clone, Debug, PartialEq)]
pub enum Modules {
    /// Every linear layer except the head.
    AllLinear,
    /// Modules whose full name matches a regular expression.
    Matching(String),
    /// Modules whose name equals one of these, or ends with `.` and one of these.
    Named(Vec<String>),
}

/// Which biases are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    None,
    /// All biases of the model.
    All,
    /// Biases of adapted modules.
    LoraOnly,
}

/// Initialisation of `A`; `B` starts at zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// Uniform in `+-1/sqrt(in_features)`: PEFT's default.
    Kaiming,
    /// Normal with standard deviation `1 / r`.
    Gaussian,
}

impl AdapterOptions {
    /// Refuses names that the model does not have, or that PEFT could not load. Called for recipes, where a name without effect
    /// is a typo.
    pub fn check_names(&self, config: &ModelConfig) -> Result<()> {
        modules::check_names(self, config)
    }

    /// Refuses an adapter of experts that PEFT could not load, or would scale differently.
    pub(crate) fn check_experts(&self, config: &ModelConfig) -> Result<()> {
        modules::check_experts(self, config, &lora_modules(config, self)?)
    }

    /// Rank and alpha of modules of these names, whichever modules the options adapt.
    pub(crate) fn ranks<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<Vec<(usize, f64)>> {
        let all = AdapterOptions {
            target_modules: Modules::AllLinear,
            exclude_modules: None,
            modules_to_save: Vec::new(),
            ..self.clone()
        };
        let choices = choices::ModuleChoices::new(&all)?;
        Ok(names.map(|name| choices.rank_and_alpha(name)).collect())
    }

    /// Refuses options that adapt other modules, or with another rank or scale.
    pub fn same(&self, wanted: &AdapterOptions, config: &ModelConfig) -> Result<()> {
        let differs = |what: String| {
            Err(Error::usage(format!("the model's adapter and the recipe's differ: {what}")).fix(
                "the same settings in [adapter], or `ferrl export DIR --merge --out DIR` and a new adapter on the result",
            ))
        };
        // PEFT's files do not say which base format an adapter was trained on.
        if self.base == BaseHome::Nf4 && wanted.base != BaseHome::Nf4 {
            return differs("it was trained on an NF4 base: adapter.base = \"nf4\"".into());
        }
        let (own, other) = (lora_modules(config, self)?, lora_modules(config, wanted)?);
        let by_name =
            |all: &[LoraModule]| all.iter().map(|m| (m.name.clone(), m.clone())).collect::<HashMap<_, _>>();
        let (owned, others) = (by_name(&own), by_name(&other));
        for m in &own {
            match others.get(&m.name) {
                None => return differs(format!("{} is adapted only in the model", m.name)),
                Some(o) if o.r != m.r => {
                    return differs(format!(
                        "{} has rank {} in the model, {} in the recipe",
                        m.name, m.r, o.r
                    ));
                }
                Some(o) if o.scale != m.scale => {
                    let what = format!(
                        "{}: alpha / r is {} in the model, {} in the recipe",
                        m.name, m.scale, o.scale
                    );
                    return differs(what);
                }
                Some(_) => {}
            }
        }
        if let Some(o) = other.iter().find(|o| !owned.contains_key(&o.name)) {
            return differs(format!("{} is adapted only in the recipe", o.name));
        }
        let (own, other) = (saved_tensors(config, self)?, saved_tensors(config, wanted)?);
        if let Some(t) = own.iter().find(|t| !other.contains(t)) {
            return differs(format!("{} is trained in full only in the model", t.name));
        }
        Ok(())
    }
}

/// Whether a module's name equals `name` or ends with `.name`.
pub(crate) fn ends_with(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

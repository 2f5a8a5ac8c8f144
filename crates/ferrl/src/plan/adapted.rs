//! What an adapter adapts of a model, counted once: advice compares a hundred plans of one model, which may have tens of
//! thousands of adapted modules.

use ferrl_engine::model::adapter::{AdapterOptions, BaseHome, adapter_weights, frozen_params, lora_modules};
use ferrl_engine::model::{ModelConfig, ParamShape};
use std::cell::RefCell;
use std::rc::Rc;

/// An adapter on a model.
#[derive(Default)]
pub(super) struct Adapted {
    /// Adapted modules.
    pub modules: usize,
    /// Weights of A and B, and all that are trained; `None` where the settings do not fit the model.
    pub counts: Option<(usize, usize)>,
    /// Adapted weights.
    pub weights: Vec<ParamShape>,
    /// Those that are neither adapted nor trained.
    pub frozen: Vec<ParamShape>,
}

/// Models that are remembered: policy and critic, with two adapters each.
const KNOWN: usize = 4;

thread_local! {
    static LATEST: RefCell<Vec<(ModelConfig, AdapterOptions, Rc<Adapted>)>> = const { RefCell::new(Vec::new()) };
}

/// What an adapter with these options adapts; where its base lives does not matter.
pub(super) fn adapted(c: &ModelConfig, options: &AdapterOptions) -> Rc<Adapted> {
    let options = AdapterOptions { base: BaseHome::Device, ..options.clone() };
    LATEST.with_borrow_mut(|latest| {
        if let Some((_, _, found)) = latest.iter().find(|(of, with, _)| of == c && *with == options) {
            return found.clone();
        }
        let found = Rc::new(count(c, &options));
        latest.truncate(KNOWN - 1);
        latest.insert(0, (c.clone(), options, found.clone()));
        found
    })
}

fn count(c: &ModelConfig, options: &AdapterOptions) -> Adapted {
    let modules = lora_modules(c, options).unwrap_or_default();
    let mut weights: Vec<usize> = modules.iter().map(|m| m.param).collect();
    weights.dedup();
    let params = c.params();
    let frozen = frozen_params(c, options).unwrap_or_default();
    Adapted {
        modules: modules.len(),
        counts: adapter_weights(c, options).ok(),
        weights: weights.into_iter().map(|i| params[i]).collect(),
        frozen: frozen.into_iter().map(|i| params[i]).collect(),
    }
}

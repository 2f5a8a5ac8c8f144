//! `[optim]` as the engine's options, and the bytes of its moments.

use super::settings::Optim;
use crate::fixes::unknown;
use ferrl_engine::Result;
use ferrl_engine::model::ParamShape;
use ferrl_engine::train::{OptimizerOptions, Rule, StateKind, is_coded};

/// Choices of offloading.
pub const OFFLOADS: &[&str] = &["none", "moments"];

pub const OPTIMIZERS: &[&str] = &["adamw", "adamw8", "sgd"];

impl Optim {
    /// The engine's options, for a model with these frozen tensors.
    pub fn options(&self, frozen: Vec<String>) -> Result<OptimizerOptions> {
        let rule = match self.name.as_str() {
            "adamw" | "adamw8" => Rule::AdamW { beta1: self.beta1, beta2: self.beta2, eps: self.eps },
            "sgd" => Rule::Sgd { momentum: self.beta1 },
            other => {
                let fix = |near: &str| format!("optim.name = {near:?}");
                return Err(unknown("optimizer", other, OPTIMIZERS.iter().copied(), fix).at("optim.name"));
            }
        };
        Ok(OptimizerOptions {
            rule,
            coded: self.name == "adamw8",
            offload: self.offloads(),
            weight_decay: self.weight_decay,
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm as f32),
            ema: self.ema.map(|e| e as f32),
            frozen,
        })
    }

    /// Whether moments are in host memory.
    pub fn offloads(&self) -> bool {
        self.offload == "moments"
    }

    /// Whether the first steps are scaled by the gradient's own size.
    pub fn is_adam(&self) -> bool {
        self.name != "sgd"
    }

    pub fn moments(&self) -> usize {
        match self.is_adam() {
            true => 2,
            false => usize::from(self.beta1 > 0.0),
        }
    }

    /// Bytes of the moments of a fully trained parameter.
    pub fn moment_bytes(&self, shape: &ParamShape) -> usize {
        let coded = self.name == "adamw8" && is_coded(shape, &[]);
        let bytes = |kind: StateKind| kind.range(&(0..shape.len())).len() * kind.dtype(coded).size();
        let kinds: &[StateKind] = match (self.moments(), coded) {
            (0, _) => &[],
            (1, _) => &[StateKind::First],
            (_, false) => &[StateKind::First, StateKind::Second],
            (_, true) => {
                &[StateKind::First, StateKind::Second, StateKind::FirstAbsmax, StateKind::SecondAbsmax]
            }
        };
        kinds.iter().map(|&kind| bytes(kind)).sum()
    }

    /// Storage of the moments, as text.
    pub fn stored(&self) -> String {
        match self.name.as_str() {
            "adamw8" => "adamw8: 8-bit, in f32 outside matrices of layers".into(),
            name => format!("{name} in f32"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::checkpoint::InitOptions;

    /// Per weight of a model whose layers are nearly all of it: 8 bytes, or 2 and a share of two magnitudes a block.
    #[test]
    fn bytes_of_moments() {
        let mut init = InitOptions::new("llama");
        (init.vocab, init.hidden, init.layers, init.ffn) = (16, 512, 4, Some(2048));
        let (config, _) = init.build().expect("a model");
        let per_weight = |name: &str| {
            let optim = Optim { name: name.into(), ..Optim::default() };
            let bytes: usize = config.params().iter().map(|p| optim.moment_bytes(p)).sum();
            bytes as f64 / config.params().iter().map(|p| p.len()).sum::<usize>() as f64
        };
        assert_eq!((per_weight("adamw"), per_weight("sgd")), (8.0, 4.0));
        let eight = per_weight("adamw8");
        assert!(eight > 2.0 + 8.0 / 256.0 && eight < 2.1, "{eight}");
    }
}

//! The feed-forward network of a layer, forward above backward: dense, or a mixture of experts (`experts.rs`).

use super::config;
use super::experts::{ExpertActivations, MixtureOfExperts};
use super::gradient::Grads;
use super::linear::Linear;
use super::norm::NormLayer;
use super::param::Slot;
use super::residual::{Added, Residual, ResidualGrad};
use super::router::ExpertLoad;
use super::tensor::Columns;
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Activation, Segments};

/// A layer's network; chosen in `layout.rs`.
pub(super) enum Network {
    Dense(FeedForward),
    Experts(MixtureOfExperts),
}

/// Activations stored for backward.
pub(super) enum NetworkActivations {
    Dense(FfnActivations),
    Experts(ExpertActivations),
}

impl Network {
    /// The norm of its input, if any.
    pub fn norm(&self) -> Option<NormLayer> {
        match self {
            Network::Dense(ffn) => ffn.norm,
            Network::Experts(experts) => experts.norm,
        }
    }

    /// Adds the network's output to the residual stream. Returns attention's addition to the stream and the network's
    /// activations; `None` where fused kernels did not store them.
    pub fn forward(&self, m: &Model, x: &mut Residual) -> Result<Option<(Added, NetworkActivations)>> {
        Ok(match self {
            Network::Dense(ffn) => ffn.forward(m, x)?.map(|(added, a)| (added, NetworkActivations::Dense(a))),
            Network::Experts(experts) => {
                experts.forward(m, x)?.map(|(added, a)| (added, NetworkActivations::Experts(a)))
            }
        })
    }

    /// Maps the gradient of the stream after the network to that before it; `x + delta` is the stream before it.
    pub fn backward(
        &self,
        m: &Model,
        (x, delta, segments): (&Buffer, &Buffer, &Segments),
        a: NetworkActivations,
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        match (self, a) {
            (Network::Dense(ffn), NetworkActivations::Dense(a)) => {
                ffn.backward(m, (x, delta), a, flow, grads)
            }
            (Network::Experts(experts), NetworkActivations::Experts(a)) => {
                experts.backward(m, (x, delta, segments), a, flow, grads)
            }
            _ => unreachable!("activations of the same layer"),
        }
    }
}

impl NetworkActivations {
    /// Inputs of the activation.
    pub fn up(&self) -> &[Buffer] {
        match self {
            NetworkActivations::Dense(a) => std::slice::from_ref(&a.up),
            NetworkActivations::Experts(a) => &a.up,
        }
    }

    /// Expert load of a batch.
    pub fn load(&self, segments: &Segments) -> Option<ExpertLoad> {
        match self {
            NetworkActivations::Dense(_) => None,
            NetworkActivations::Experts(a) => Some(a.all.as_deref().unwrap_or(&a.routing).load(segments)),
        }
    }
}

/// `x += post_norm(down(activation(up(norm(x)))))`; gated activations have gate and up in one matrix.
pub(super) struct FeedForward {
    pub norm: Option<NormLayer>,
    pub post_norm: Option<NormLayer>,
    pub up: Linear,
    pub down: Linear,
    pub activation: Activation,
}

/// Activations stored for backward.
pub(super) struct FfnActivations {
    pub up: Buffer,           // (T, F or 2F)
    pub down: Option<Buffer>, // before the post norm
}

impl FeedForward {
    pub fn forward(&self, m: &Model, x: &mut Residual) -> Result<Option<(Added, FfnActivations)>> {
        let rows = x.x.len() / m.config.hidden;
        let mut act = m.activations(rows * m.own_ffn())?;
        let kept = x.activation(m, (self.norm, self.up), self.activation, &mut act)?;
        let act = self.gathered(m, act)?;
        let down = x.add(m, self.down, &act, self.post_norm)?;
        Ok(kept.map(|(added, up)| (added, FfnActivations { up, down })))
    }

    /// All-gathers the features of the down projection's input.
    fn gathered(&self, m: &Model, act: Buffer) -> Result<Buffer> {
        if !m.is_shared(self.down.weight) {
            return Ok(act);
        }
        m.all_gathered_columns(Columns::Input(Slot::Down), &act, m.config.ffn)
    }

    pub fn backward(
        &self,
        m: &Model,
        (x, delta): (&Buffer, &Buffer),
        mut a: FfnActivations,
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (width, rows) = (m.own_ffn(), x.len() / m.config.hidden);
        let ddown = flow.before_norm(m, self.post_norm, a.down.take(), grads)?;
        let ddown = ddown.as_ref().unwrap_or(flow.output());
        let mut dact = m.activations(rows * width)?;
        self.down.backward_input(m, ddown, &mut dact)?;
        // In place: recomputes the activation's output, and overwrites `dact` with the gradient of its input.
        m.backend.activation_recompute(self.activation, width, &mut a.up, &mut dact)?;
        let (act, dup) = (self.gathered(m, dact)?, a.up);
        self.down.backward_weight(m, ddown, &act, grads)?;
        drop(act);
        let mut dh = m.activations(x.len())?;
        self.up.backward_input(m, &dup, &mut dh)?;
        let h = flow.norm_backward(m, self.norm, (x, Some(delta)), &dh, grads)?;
        self.up.backward_weight(m, &dup, &h, grads)
    }
}

impl config::FfnActivation {
    /// The backend's value for it.
    pub(super) fn op(self) -> Activation {
        match self {
            config::FfnActivation::SiluGated => Activation::SiluGated,
            config::FfnActivation::GeluGated => Activation::GeluGated,
            config::FfnActivation::Gelu => Activation::Gelu,
        }
    }
}

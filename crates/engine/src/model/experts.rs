//! A mixture of experts in the place of a layer's feed-forward network, forward above backward.
//!
//! Tokens are sorted by expert; each expert's network runs over its own rows. A GEMM row has the same bits in any batch, and a
//! token's experts are summed in index order, so a token's output does not depend on the batch.
//!
//! Under context parallelism, ranks compute the experts of their own tokens. Sums over tokens need all of them: the load of a
//! sequence, and weight gradients, for which an expert's rows are all-gathered.

use super::config::Experts;
use super::gradient::Grads;
use super::linear::Linear;
use super::norm::NormLayer;
use super::residual::{Added, Residual, ResidualGrad};
use super::router::{ExpertGroup, Routing};
use super::weights::Model;
use crate::Result;
use ferrl_kernels::backend::{Activation, RowMix, Segments};
use ferrl_kernels::{Buffer, DType};

/// `x += post_norm(sum over a token's experts of weight * down(activation(up(norm(x)))))`.
pub(super) struct MixtureOfExperts {
    pub norm: Option<NormLayer>,
    pub post_norm: Option<NormLayer>,
    pub router: Linear,
    pub experts: Vec<Expert>,
    pub activation: Activation,
    pub options: Experts,
}

/// One expert's network.
pub(super) struct Expert {
    pub up: Linear,
    pub down: Linear,
}

/// Activations stored for backward.
pub(super) struct ExpertActivations {
    pub routing: Routing,
    /// Routing of the tokens of all ranks, under context parallelism.
    pub all: Option<Box<Routing>>,
    /// For each expert that has tokens, `(its tokens, 2 * width)`.
    pub up: Vec<Buffer>,
    /// `(T * per_token, H)`: expert outputs, sorted by expert.
    outputs: Buffer,
    /// Weighted sum before the post norm.
    mixed: Option<Buffer>,
}

/// Indices and weights of a weighted sum over sorted rows.
struct MixIndices {
    rows: Buffer,
    weights: Buffer,
}

impl MixIndices {
    fn operand(&self, m: &Model, per_row: usize) -> RowMix<'_> {
        RowMix { rows: &self.rows, weights: &self.weights, per_row, width: m.config.hidden }
    }
}

impl MixtureOfExperts {
    pub fn forward(&self, m: &Model, x: &mut Residual) -> Result<Option<(Added, ExpertActivations)>> {
        let (h, added) = x.normed(m, self.norm)?;
        let (routing, all) = self.route(m, &h)?;
        let groups = groups(&routing, &all);
        let mut outputs = m.activations(routing.chosen.len() * m.config.hidden)?;
        let mut up = Vec::with_capacity(groups.len());
        for group in &groups {
            up.push(self.expert(m, &h, group, &mut outputs)?);
        }
        let mut y = m.activations(h.len())?;
        let mix = MixIndices {
            rows: m.backend.indices(&routing.sorted_rows())?,
            weights: m.upload(&routing.weights)?,
        };
        m.backend.mix_rows(mix.operand(m, self.options.per_token), &outputs, &mut y)?;
        let mixed = x.add_output(m, y, self.post_norm)?;
        Ok(added.map(|added| (added, ExpertActivations { routing, all, up, outputs, mixed })))
    }

    /// Router logits are f32 GEMMs whatever the compute type.
    fn route(&self, m: &Model, h: &Buffer) -> Result<(Routing, Option<Box<Routing>>)> {
        let mut logits = m.f32s(h.len() / m.config.hidden * self.options.count)?;
        match in_f32(m, h)? {
            Some(wide) => self.router.forward(m, &wide, &mut logits)?,
            None => self.router.forward(m, h, &mut logits)?,
        }
        let routing = |logits: &Buffer| Ok(Routing::of(&m.read_f32s(logits)?, &self.options));
        let all = m
            .place_in_context()
            .map(|_| m.all_gather_rows(&logits, self.options.count).and_then(|all| routing(&all)));
        Ok((routing(&logits)?, all.transpose()?.map(Box::new)))
    }

    /// Computes an expert's rows of `outputs`; returns the input of its activation.
    fn expert(&self, m: &Model, h: &Buffer, group: &ExpertGroup, outputs: &mut Buffer) -> Result<Buffer> {
        let (b, rows, hidden) = (&*m.backend, group.tokens.len(), m.config.hidden);
        let Expert { up, down } = &self.experts[group.expert];
        if rows == 0 {
            return m.activations(0);
        }
        let x = gathered(m, h, group)?;
        let mut inner = m.activations(rows * m.weight(up.weight).n)?;
        up.forward(m, &x, &mut inner)?;
        let mut act = m.activations(rows * self.options.width)?;
        b.activation(self.activation, self.options.width, &inner, &mut act)?;
        let mut y = m.activations(rows * hidden)?;
        down.forward(m, &act, &mut y)?;
        b.copy(&y, 0, outputs, group.start * hidden, y.len())?;
        Ok(inner)
    }

    pub fn backward(
        &self,
        m: &Model,
        (x, delta, segments): (&Buffer, &Buffer, &Segments),
        mut a: ExpertActivations,
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, k) = (&*m.backend, self.options.per_token);
        let dmixed = flow.before_norm(m, self.post_norm, a.mixed.take(), grads)?;
        let dmixed = dmixed.as_ref().unwrap_or(flow.output());
        let places = b.indices(&a.routing.sorted_rows())?;
        let mix = MixIndices { rows: places, weights: m.upload(&a.routing.weights)? };
        let (mut doutputs, mut dweights) =
            (m.activations(a.outputs.len())?, m.f32s(a.routing.weights.len())?);
        b.mix_rows_backward(mix.operand(m, k), &a.outputs, dmixed, &mut doutputs, &mut dweights)?;
        // Gradients of the experts' inputs overwrite their outputs.
        let (groups, mut dinputs, mut dups) = (groups(&a.routing, &a.all), a.outputs, Vec::new());
        for (group, up) in groups.iter().zip(a.up) {
            dups.push(self.expert_backward(m, (group, up), &doutputs, &mut dinputs, grads)?);
        }
        drop(doutputs);
        let dlogits = match &a.all {
            Some(all) => {
                let dweights = m.all_gather_rows(&dweights, k)?;
                let dlogits = all.backward(&m.read_f32s(&dweights)?, segments, m.balance);
                m.own_rows(&m.upload(&dlogits)?, self.options.count)?
            }
            None => m.upload(&a.routing.backward(&m.read_f32s(&dweights)?, segments, m.balance))?,
        };
        let mut dsum = m.f32s(x.len())?;
        self.router.backward_input(m, &dlogits, &mut dsum)?;
        let ones = MixIndices { weights: m.upload(&vec![1.0; a.routing.weights.len()])?, rows: mix.rows };
        let mut dexperts = m.f32s(x.len())?;
        b.mix_rows(ones.operand(m, k), &dinputs, &mut dexperts)?;
        b.axpy(1.0, &dexperts, &mut dsum)?;
        let dh = rounded(m, dsum)?;
        let h = flow.norm_backward(m, self.norm, (x, Some(delta)), &dh, grads)?;
        for (group, dup) in groups.iter().zip(&dups) {
            self.experts[group.expert].up.backward_weight(m, dup, &gathered(m, &h, group)?, grads)?;
        }
        let wide = in_f32(m, &h)?;
        self.router.backward_weight(m, &dlogits, wide.as_ref().unwrap_or(&h), grads)
    }

    /// Adds to the gradient of an expert's down projection and writes the gradient of its input; returns that of `up`.
    fn expert_backward(
        &self,
        m: &Model,
        (group, mut up): (&ExpertGroup, Buffer),
        doutputs: &Buffer,
        dinputs: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<Buffer> {
        let (b, rows, hidden) = (&*m.backend, group.tokens.len(), m.config.hidden);
        let (expert, at) = (&self.experts[group.expert], group.start * hidden);
        if rows == 0 {
            expert.down.backward_weight(m, &m.activations(0)?, &up, grads)?;
            return Ok(up);
        }
        let mut dy = m.activations(rows * hidden)?;
        b.copy(doutputs, at, &mut dy, 0, rows * hidden)?;
        let mut dact = m.activations(rows * self.options.width)?;
        expert.down.backward_input(m, &dy, &mut dact)?;
        b.activation_recompute(self.activation, self.options.width, &mut up, &mut dact)?;
        let (act, dup) = (dact, up);
        expert.down.backward_weight(m, &dy, &act, grads)?;
        let mut dx = dy;
        expert.up.backward_input(m, &dup, &mut dx)?;
        b.copy(&dx, 0, dinputs, at, rows * hidden)?;
        Ok(dup)
    }
}

/// Experts that have tokens on any rank, with the tokens of this rank.
fn groups(own: &Routing, all: &Option<Box<Routing>>) -> Vec<ExpertGroup> {
    own.groups(|expert| all.as_ref().is_some_and(|all| all.is_chosen(expert)))
}

/// The rows of an expert's tokens.
fn gathered(m: &Model, h: &Buffer, group: &ExpertGroup) -> Result<Buffer> {
    let mut x = m.activations(group.tokens.len() * m.config.hidden)?;
    if group.tokens.is_empty() {
        return Ok(x);
    }
    m.backend.gather_rows(h, &m.backend.indices(&group.tokens)?, m.config.hidden, &mut x)?;
    Ok(x)
}

/// Conversion to f32; `None` if it is f32 already.
fn in_f32(m: &Model, h: &Buffer) -> Result<Option<Buffer>> {
    if h.dtype() == DType::F32 {
        return Ok(None);
    }
    let mut wide = m.f32s(h.len())?;
    m.backend.copy(h, 0, &mut wide, 0, h.len())?;
    Ok(Some(wide))
}

/// Conversion to the compute type.
fn rounded(m: &Model, x: Buffer) -> Result<Buffer> {
    if m.dtype == x.dtype() {
        return Ok(x);
    }
    let mut y = m.activations(x.len())?;
    m.backend.copy(&x, 0, &mut y, 0, x.len())?;
    Ok(y)
}

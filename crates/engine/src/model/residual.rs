//! The residual stream, forward and backward.
//!
//! Forward defers the last addition to the stream: the next norm performs it in the same kernel. Decode steps may fuse further
//! where the device supports it (`Backend::decode_rows`): the norm into the prologue of the GEMM that reads it, the addition
//! into the epilogue of the GEMM that computes it. All variants have the same bits; only this file distinguishes them.

use super::decoder::{Keep, PastKv};
use super::gradient::{Grads, Taken};
use super::linear::{Linear, Rotated};
use super::norm::NormLayer;
use super::param::Slot;
use super::tensor::Columns;
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Activation, NormGrads, NormInput, NormRecompute, PagedRows};

/// The residual stream of T tokens.
pub(super) struct Residual {
    /// `(T, H)` f32
    pub x: Buffer,
    /// `(T, H)`: deferred addition
    pending: Option<Buffer>,
    /// Whether norms and additions are fused into the GEMMs.
    fused: bool,
}

/// The stream before an addition, and what was added.
pub(super) struct Added {
    pub x: Buffer,
    pub delta: Buffer,
}

impl Residual {
    /// The stream of a forward pass over `rows` tokens; `keep` and `context` decide whether it is fused.
    pub fn new(m: &Model, x: Buffer, context: &PastKv<'_>, keep: Keep) -> Self {
        let (c, rows) = (&m.config, x.len() / m.config.hidden);
        let decodes = matches!(context, PastKv::Paged(..)) && keep == Keep::Nothing;
        let known = c.pre_norms && !c.post_norms && c.residual_scale == 1.0;
        let fused =
            decodes && known && m.team().is_none() && rows <= m.backend.decode_rows(c.hidden.max(c.ffn));
        Residual { x, pending: None, fused }
    }

    /// The stream at the input of a layer that is recomputed for backward.
    pub fn recomputed(x: Buffer) -> Self {
        Residual { x, pending: None, fused: false }
    }

    /// `norm(stream)` (the stream itself without a norm), and the deferred addition that it performed.
    pub fn normed(&mut self, m: &Model, norm: Option<NormLayer>) -> Result<(Buffer, Option<Added>)> {
        let mut y = m.activations(self.x.len())?;
        let Some(delta) = self.pending.take() else {
            input(m, norm, &self.x, &mut y)?;
            return Ok((y, None));
        };
        let mut sum = m.f32s(self.x.len())?;
        input_of_sum(m, norm, (&self.x, &delta), [&mut sum, &mut y])?;
        let x = std::mem::replace(&mut self.x, sum);
        Ok((y, Some(Added { x, delta })))
    }

    /// `rope(qkv(norm(stream)))`.
    pub fn qkv(
        &mut self,
        m: &Model,
        (norm, linear): (Option<NormLayer>, Linear),
        heads: Rotated<'_>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        match (cache, norm) {
            (Some(cache), Some(norm)) if self.fused => {
                linear.forward_normed_qkv(m, (norm, &self.x), heads, cache, qkv)
            }
            (cache, norm) => {
                let (h, _) = self.normed(m, norm)?;
                linear.forward_qkv(m, &h, heads, cache, qkv)
            }
        }
    }

    /// `act = activation(linear(norm(stream)))`. If unfused, also returns what backward needs: the last addition to the stream
    /// and the input of the activation.
    pub fn activation(
        &mut self,
        m: &Model,
        (norm, linear): (Option<NormLayer>, Linear),
        op: Activation,
        act: &mut Buffer,
    ) -> Result<Option<(Added, Buffer)>> {
        if let (true, Some(norm)) = (self.fused, norm) {
            linear.forward_normed_activation(m, (norm, &self.x), op, act)?;
            return Ok(None);
        }
        let (h, added) = self.normed(m, norm)?;
        let width = m.own_width(Columns::Output(Slot::Up), m.config.up_width());
        let mut up = m.activations(h.len() / m.config.hidden * width)?;
        linear.forward(m, &h, &mut up)?;
        m.backend.activation(op, m.own_ffn(), &up, act)?;
        Ok(added.map(|added| (added, up)))
    }

    /// `stream += residual_scale * post_norm(linear(x))`; returns the post norm's input, if there is a post norm.
    pub fn add(
        &mut self,
        m: &Model,
        linear: Linear,
        x: &Buffer,
        post_norm: Option<NormLayer>,
    ) -> Result<Option<Buffer>> {
        if self.fused {
            linear.forward_add(m, x, &mut self.x)?;
            return Ok(None);
        }
        let mut y = m.activations(self.x.len())?;
        linear.forward(m, x, &mut y)?;
        self.add_output(m, y, post_norm)
    }

    /// The same for a sublayer output that is already computed.
    pub fn add_output(
        &mut self,
        m: &Model,
        y: Buffer,
        post_norm: Option<NormLayer>,
    ) -> Result<Option<Buffer>> {
        if self.fused {
            m.backend.axpy(1.0, &y, &mut self.x)?;
            return Ok(None);
        }
        let Some(norm) = post_norm else {
            self.pending = Some(scaled(m, y)?);
            return Ok(None);
        };
        let mut normed = m.activations(y.len())?;
        norm.forward(m, &y, &mut normed)?;
        self.pending = Some(scaled(m, normed)?);
        Ok(Some(y))
    }
}

/// Input of a sublayer: `norm(stream)`, or the stream in the compute type.
pub(super) fn input(m: &Model, norm: Option<NormLayer>, x: &Buffer, y: &mut Buffer) -> Result<()> {
    match norm {
        Some(norm) => norm.forward(m, x, y),
        None => m.backend.copy(x, 0, y, 0, x.len()),
    }
}

/// `sum = x + delta`, and the sublayer input computed from it.
pub(super) fn input_of_sum(
    m: &Model,
    norm: Option<NormLayer>,
    (x, delta): (&Buffer, &Buffer),
    [sum, y]: [&mut Buffer; 2],
) -> Result<()> {
    if let Some(norm) = norm {
        return norm.forward_sum(m, (x, delta), sum, y);
    }
    m.backend.copy(x, 0, sum, 0, x.len())?;
    m.backend.axpy(1.0, delta, sum)?;
    m.backend.copy(sum, 0, y, 0, sum.len())
}

/// `residual_scale * y`, in the compute type.
fn scaled(m: &Model, y: Buffer) -> Result<Buffer> {
    if m.config.residual_scale == 1.0 { Ok(y) } else { scaled_copy(m, &y) }
}

fn scaled_copy(m: &Model, y: &Buffer) -> Result<Buffer> {
    let mut out = m.activations(y.len())?;
    m.backend.fill(&mut out, 0.0)?;
    m.backend.axpy(m.config.residual_scale, y, &mut out)?;
    Ok(out)
}

pub(super) struct ResidualGrad {
    /// `(T, H)` f32
    pub dx: Buffer,
    /// `dx` in the compute type, if GEMMs read it.
    rounded: Option<Buffer>,
}

impl ResidualGrad {
    /// From the gradient `dh` of the final norm's output.
    pub fn new(m: &Model, norm: NormLayer, dh: &Buffer, x: &Buffer, grads: Grads<'_>) -> Result<Self> {
        let mut dx = m.f32s(x.len())?;
        norm.backward(m, dh, x, &mut dx, grads)?;
        let mut rounded = None;
        let reads_stream = !m.config.post_norms && m.config.residual_scale == 1.0;
        if m.dtype != dx.dtype() && reads_stream {
            let mut copy = m.activations(dx.len())?;
            m.backend.copy(&dx, 0, &mut copy, 0, dx.len())?;
            rounded = Some(copy);
        }
        Ok(ResidualGrad { dx, rounded })
    }

    /// The gradient of a sublayer's output before its post norm (whose input was `y`) and before the residual scale; `None` if
    /// the model has neither: the gradient is then [`ResidualGrad::output`].
    pub fn before_norm(
        &self,
        m: &Model,
        norm: Option<NormLayer>,
        y: Option<Buffer>,
        grads: Grads<'_>,
    ) -> Result<Option<Buffer>> {
        let factor = m.config.residual_scale != 1.0;
        let dy = if factor { Some(scaled_copy(m, &self.dx)?) } else { None };
        let (Some(norm), Some(y)) = (norm, y) else { return Ok(dy) };
        let mut d = m.activations(self.dx.len())?;
        norm.backward(m, dy.as_ref().unwrap_or(&self.dx), &y, &mut d, grads)?;
        Ok(Some(d))
    }

    /// The gradient of a sublayer's addition to the stream.
    pub fn output(&self) -> &Buffer {
        self.rounded.as_ref().unwrap_or(&self.dx)
    }

    /// Adds the gradient `dy` of a sublayer's input, computed from `x + delta`; returns that input, recomputed.
    pub fn norm_backward(
        &mut self,
        m: &Model,
        norm: Option<NormLayer>,
        (x, delta): (&Buffer, Option<&Buffer>),
        dy: &Buffer,
        grads: Grads<'_>,
    ) -> Result<Buffer> {
        let b = &*m.backend;
        let mut y = m.activations(x.len())?;
        let Some(norm) = norm else {
            match delta {
                Some(delta) => input_of_sum(m, None, (x, delta), [&mut m.f32s(x.len())?, &mut y])?,
                None => input(m, None, x, &mut y)?,
            }
            b.axpy(1.0, dy, &mut self.dx)?;
            if let Some(rounded) = &mut self.rounded {
                b.copy(&self.dx, 0, rounded, 0, self.dx.len())?;
            }
            return Ok(y);
        };
        let (dx, rounded) = (&mut self.dx, self.rounded.as_mut());
        if m.place_in_context().is_some() {
            let here = NormRecompute { dy, y: &mut y, dx, rounded, grads: NormGrads::default() };
            b.norm_recompute(norm.operand(m), NormInput { x, delta }, here)?;
            sum_norm(m, norm, (x, delta), dy, grads)?;
            return Ok(y);
        }
        Taken::with(norm.weight, norm.bias, grads, |taken| {
            let backward = NormRecompute { dy, y: &mut y, dx, rounded, grads: taken.norm_grads(b)? };
            b.norm_recompute(norm.operand(m), NormInput { x, delta }, backward)
        })?;
        Ok(y)
    }
}

/// Adds to a norm's parameter gradients, over the rows of all ranks that share tokens.
fn sum_norm(
    m: &Model,
    norm: NormLayer,
    (x, delta): (&Buffer, Option<&Buffer>),
    dy: &Buffer,
    grads: Grads<'_>,
) -> Result<()> {
    let (b, hidden) = (&*m.backend, m.config.hidden);
    let (x, dy) = (m.all_gather_rows(x, hidden)?, m.all_gather_rows(dy, hidden)?);
    let delta = delta.map(|delta| m.all_gather_rows(delta, hidden)).transpose()?;
    let (mut y, mut dx) = (m.activations(x.len())?, m.f32s(x.len())?);
    b.fill(&mut dx, 0.0)?;
    Taken::with(norm.weight, norm.bias, grads, |taken| {
        let of = NormInput { x: &x, delta: delta.as_ref() };
        let all =
            NormRecompute { dy: &dy, y: &mut y, dx: &mut dx, rounded: None, grads: taken.norm_grads(b)? };
        b.norm_recompute(norm.operand(m), of, all)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::checkpoint::InitOptions;
    use crate::model::{FAMILIES, Options};
    use ferrl_kernels::DType;
    use ferrl_kernels::backend::PagedSequence;

    /// Hidden states of three tokens, decoded one after the other.
    fn decode(m: &Model, fused: bool) -> Vec<Vec<f32>> {
        let heads = m.layout.layers[0].attention.op.heads;
        let cache = || m.activations(m.backend.cache_len(heads, 1)).unwrap();
        let mut caches: Vec<Buffer> = (0..m.config.layers).map(|_| cache()).collect();
        let step = |position: usize| {
            let sequence = PagedSequence { row: 0, count: 1, position, blocks: vec![0] };
            let rows = PagedRows { sequences: vec![sequence] };
            let t = m.tokens(&[3], &[position as u32]).unwrap();
            let values: Vec<f32> = (0..m.config.hidden).map(|i| (i + position) as f32 / 8.0 - 3.0).collect();
            let mut x = Residual { x: m.upload(&values).unwrap(), pending: None, fused };
            let mut context = PastKv::Paged(&rows, &mut caches);
            for layer in &m.layout.layers {
                layer.attention.forward(m, &t, &mut x, &mut context).unwrap();
                assert_eq!(layer.ffn.forward(m, &mut x).unwrap().is_none(), fused);
            }
            m.read_f32s(&x.normed(m, Some(m.layout.final_norm)).unwrap().0).unwrap()
        };
        (0..3).map(step).collect()
    }

    /// The fused path of a decode step, composed of plain operations.
    #[test]
    fn norms_and_additions_inside_of_products_have_the_same_bits() {
        let mut compared = 0;
        for family in FAMILIES {
            let mut init = InitOptions::new(family.name());
            (init.vocab, init.hidden, init.layers, init.std) = (20, 64, 2, 0.3);
            for dtype in [DType::F32, DType::Bf16] {
                let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
                let model = Model::random(backend, &init, Options { dtype, ..Default::default() }).unwrap();
                let c = &model.config;
                if c.pre_norms && !c.post_norms && c.residual_scale == 1.0 {
                    assert_eq!(decode(&model, true), decode(&model, false), "{}", family.name());
                    compared += 1;
                }
            }
        }
        assert!(compared > 2);
    }
}

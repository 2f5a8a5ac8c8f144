//! Self-attention of a layer, forward above backward.

use super::config::{LayerRope, QkNorm};
use super::decoder::{Context, Tokens};
use super::gradient::{Grads, added_to};
use super::linear::Linear;
use super::norm::NormLayer;
use super::residual::{Residual, ResidualGrad};
use super::weights::{Model, RotaryTables, Turns};
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Attention, AttentionSaved, HeadNorm, Rotation, Segments};

/// `x += post_norm(out(attention(rotate(qk_norm(qkv(norm(x)))))))`.
pub(super) struct SelfAttention {
    pub layer: usize,
    /// Which rotation it has.
    pub rope: LayerRope,
    pub norm: Option<NormLayer>,
    pub post_norm: Option<NormLayer>,
    /// Scales of the queries' and the keys' norms.
    pub qk_norm: Option<(usize, usize)>,
    pub qkv: Linear,
    pub out: Linear,
    pub op: Attention,
}

/// What backward needs.
pub(super) struct AttentionActivations {
    pub raw: Option<Buffer>,  // queries, keys and values before the heads' norms
    pub qkv: Buffer,          // rotated
    pub att: Buffer,          // (T, heads * head_dim)
    pub lse: Buffer,          // (T, heads) f32
    pub proj: Option<Buffer>, // before the post norm
}

impl SelfAttention {
    /// Adds attention's output to the stream.
    pub fn forward(
        &self,
        m: &Model,
        t: &Tokens,
        x: &mut Residual,
        context: &mut Context<'_>,
    ) -> Result<AttentionActivations> {
        let (b, c, heads) = (&*m.backend, &m.config, self.op.heads);
        let mut qkv = m.activations(t.rows * c.qkv_width())?;
        let raw = match self.qk_norm {
            Some(norms) => Some(self.normed_heads(m, (t, context), x, norms, &mut qkv)?),
            None => {
                let tables = m.rotary(t.reach)?;
                let cache = match &mut *context {
                    Context::Packed(_) => None,
                    Context::Paged(rows, caches) => Some((*rows, &mut caches[self.layer])),
                };
                let rotation = self.rotation(tables.as_deref(), t);
                x.qkv(m, (self.norm, self.qkv), (heads, rotation), cache, &mut qkv)?;
                None
            }
        };
        let mut att = m.activations(t.rows * c.attention_width())?;
        let lse = match context {
            Context::Packed(segments) => {
                let mut lse = m.f32s(t.rows * c.heads)?;
                b.attention(self.op, &qkv, segments, &mut att, &mut lse)?;
                lse
            }
            Context::Paged(rows, caches) => {
                b.attention_paged(self.op, &qkv, rows, &caches[self.layer], &mut att)?;
                m.f32s(0)?
            }
        };
        let proj = x.add(m, self.out, &att, self.post_norm)?;
        Ok(AttentionActivations { raw, qkv, att, lse, proj })
    }

    fn head_norm<'a>(&self, m: &'a Model, (q, k): (usize, usize)) -> HeadNorm<'a> {
        let (q_weight, k_weight) = (m.master(q), m.master(k));
        let whole = m.config.qk_norm == Some(QkNorm::Whole);
        HeadNorm { op: m.head_norm_op(), heads: self.op.heads, whole, q_weight, k_weight }
    }

    /// Queries, keys and values, normalised before they are rotated; returns them before that norm.
    fn normed_heads(
        &self,
        m: &Model,
        (t, context): (&Tokens, &mut Context<'_>),
        x: &mut Residual,
        norms: (usize, usize),
        qkv: &mut Buffer,
    ) -> Result<Buffer> {
        let (b, heads) = (&*m.backend, self.op.heads);
        let (h, _) = x.normed(m, self.norm)?;
        let mut raw = m.activations(qkv.len())?;
        self.qkv.forward(m, &h, &mut raw)?;
        b.head_norm(self.head_norm(m, norms), &raw, qkv)?;
        self.rotate(m, t, false, qkv)?;
        if let Context::Paged(rows, caches) = context {
            b.cache_write(heads, qkv, rows, &mut caches[self.layer])?;
        }
        Ok(raw)
    }

    /// From the gradient of the stream after attention to that before it; `x` was the stream before it.
    pub fn backward(
        &self,
        m: &Model,
        (t, segments): (&Tokens, &Segments),
        (x, mut a): (&Buffer, AttentionActivations),
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, heads) = (&*m.backend, self.op.heads);
        let dproj = flow.before_norm(m, self.post_norm, a.proj.take(), grads)?;
        let dproj = dproj.as_ref().unwrap_or(flow.output());
        let mut datt = m.activations(a.att.len())?;
        self.out.backward_weight(m, dproj, &a.att, grads)?;
        self.out.backward_input(m, dproj, &mut datt)?;
        let mut dqkv = m.activations(a.qkv.len())?;
        let saved = AttentionSaved { qkv: &a.qkv, out: &a.att, lse: &a.lse };
        b.attention_backward(self.op, saved, &datt, segments, &mut dqkv)?;
        let mut rest = self.qkv;
        if let (Some(norms), Some(raw)) = (self.qk_norm, &a.raw) {
            self.rotate(m, t, true, &mut dqkv)?;
            let [sum_q, sum_k] = grads.get_disjoint_mut([norms.0, norms.1]).expect("two parameters");
            let sums = [added_to(b, sum_q)?, added_to(b, sum_k)?];
            b.head_norm_backward(self.head_norm(m, norms), raw, &mut dqkv, sums)?;
        } else {
            let tables = m.rotary(t.reach)?;
            rest =
                rest.backward_rotation(m, (heads, self.rotation(tables.as_deref(), t)), &mut dqkv, grads)?;
        }
        let mut dh = m.activations(x.len())?;
        self.qkv.backward_input(m, &dqkv, &mut dh)?;
        let h = flow.norm_backward(m, self.norm, (x, None), &dh, grads)?;
        rest.backward_weight(m, &dqkv, &h, grads)
    }

    /// How queries and keys are rotated, where they are.
    fn rotation<'a>(&self, tables: Option<&'a RotaryTables>, t: &'a Tokens) -> Option<Rotation<'a>> {
        let Turns { dim, cos, sin } = tables?.of(self.rope)?;
        Some(Rotation { dim: *dim, cos, sin, positions: &t.positions })
    }

    fn rotate(&self, m: &Model, t: &Tokens, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        let tables = m.rotary(t.reach)?;
        let Some(rotation) = self.rotation(tables.as_deref(), t) else { return Ok(()) };
        m.backend.rotary(self.op.heads, rotation, inverse, qkv)
    }
}

//! Self-attention of a layer, forward above backward.

use super::config::{LayerRope, QkNorm};
use super::decoder::{PastKv, Tokens};
use super::gradient::{Grads, added_to};
use super::linear::Linear;
use super::norm::NormLayer;
use super::param::Slot;
use super::residual::{Residual, ResidualGrad};
use super::tensor::Columns;
use super::weights::{Model, RotaryTable, RotaryTables};
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Attention, AttentionSaved, HeadNorm, Heads, Rotation, Segments};

/// `x += post_norm(out(attention(rotate(qk_norm(qkv(norm(x)))))))`.
pub(super) struct SelfAttention {
    pub layer: usize,
    pub rope: LayerRope,
    pub norm: Option<NormLayer>,
    pub post_norm: Option<NormLayer>,
    /// Norms of queries and of keys.
    pub qk_norm: Option<(usize, usize)>,
    pub qkv: Linear,
    pub out: Linear,
    pub op: Attention,
}

/// Activations stored for backward.
pub(super) struct AttentionActivations {
    pub raw: Option<Buffer>,  // before the QK norm
    pub qkv: Buffer,          // after RoPE
    pub att: Buffer,          // output, (T, heads * head_dim)
    pub lse: Buffer,          // (T, heads) f32
    pub proj: Option<Buffer>, // before the post norm
}

impl SelfAttention {
    /// Adds attention's output to the residual stream.
    pub fn forward(
        &self,
        m: &Model,
        t: &Tokens,
        x: &mut Residual,
        context: &mut PastKv<'_>,
    ) -> Result<AttentionActivations> {
        let op = self.own_op(m);
        let mut qkv = m.activations(t.rows * op.heads.qkv_width())?;
        let raw = match self.qk_norm {
            Some(norms) => Some(self.normed_heads(m, (t, context), x, norms, &mut qkv)?),
            None => {
                let tables = m.rotary(t.reach)?;
                let cache = match &mut *context {
                    PastKv::Packed(_) => None,
                    PastKv::Paged(rows, caches) => Some((*rows, &mut caches[self.layer])),
                };
                let rotation = self.rotation(tables.as_deref(), t);
                x.qkv(m, (self.norm, self.qkv), (op.heads, rotation), cache, &mut qkv)?;
                None
            }
        };
        let (qkv, att, lse) = self.attend(m, op, qkv, context)?;
        let all = self.gathered(m, &att)?;
        let proj = x.add(m, self.out, all.as_ref().unwrap_or(&att), self.post_norm)?;
        Ok(AttentionActivations { raw, qkv, att, lse, proj })
    }

    /// Attention proper, also under context parallelism (by heads or by query rows). Returns the `qkv` that backward reads, the
    /// output and the log-sum-exp.
    fn attend(
        &self,
        m: &Model,
        op: Attention,
        mut qkv: Buffer,
        context: &mut PastKv<'_>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let exchanged = m.exchanged_op(op);
        if exchanged.is_some() {
            qkv = m.rows_to_columns(Columns::Output(Slot::Qkv), &qkv, op.heads.qkv_width())?;
        }
        let op = exchanged.unwrap_or(op);
        let rows = qkv.len() / op.heads.qkv_width();
        match context {
            PastKv::Packed(segments) if m.shares_queries() => {
                let (att, lse) = m.attention_by_rows(op, &qkv, segments)?;
                Ok((qkv, att, lse))
            }
            PastKv::Packed(segments) => {
                let mut att = m.activations(rows * op.heads.out_width())?;
                let mut lse = m.f32s(rows * op.heads.heads)?;
                m.backend.attention(op, &qkv, segments, &mut att, &mut lse)?;
                Ok((qkv, att, lse))
            }
            PastKv::Paged(paged, caches) => {
                let mut att = m.activations(rows * op.heads.out_width())?;
                m.backend.attention_paged(op, &qkv, paged, &caches[self.layer], &mut att)?;
                Ok((qkv, att, m.f32s(0)?))
            }
        }
    }

    /// The operation restricted to this rank's heads.
    fn own_op(&self, m: &Model) -> Attention {
        Attention { heads: m.own_heads(self.op.heads), ..self.op }
    }

    /// All-gathers the heads of this rank's tokens; `None` without tensor parallelism.
    fn gathered(&self, m: &Model, att: &Buffer) -> Result<Option<Buffer>> {
        let (columns, width) = (Columns::Input(Slot::AttnOut), m.config.attention_width());
        let mut rows = None;
        if m.place_in_context().is_some() && !m.shares_queries() {
            rows = Some(m.columns_to_rows(columns, att)?);
        }
        if m.is_shared(self.out.weight) {
            rows = Some(m.all_gathered_columns(columns, rows.as_ref().unwrap_or(att), width)?);
        }
        Ok(rows)
    }

    /// All-gathers the columns of `qkv`.
    fn gathered_qkv(&self, m: &Model, qkv: &Buffer) -> Result<Buffer> {
        m.all_gathered_columns(Columns::Output(Slot::Qkv), qkv, m.config.qkv_width())
    }

    fn head_norm<'a>(&self, m: &'a Model, heads: Heads, (q, k): (usize, usize)) -> HeadNorm<'a> {
        let (q_weight, k_weight) = (m.master(q), m.master(k));
        let whole = m.config.qk_norm == Some(QkNorm::Whole);
        HeadNorm { op: m.head_norm_op(), heads, whole, q_weight, k_weight }
    }

    /// Applies the QK norm before RoPE; returns the unnormalised `qkv`.
    fn normed_heads(
        &self,
        m: &Model,
        (t, context): (&Tokens, &mut PastKv<'_>),
        x: &mut Residual,
        norms: (usize, usize),
        qkv: &mut Buffer,
    ) -> Result<Buffer> {
        let (b, heads) = (&*m.backend, m.own_heads(self.op.heads));
        let (h, _) = x.normed(m, self.norm)?;
        let mut raw = m.activations(qkv.len())?;
        self.qkv.forward(m, &h, &mut raw)?;
        if m.is_shared(self.qkv.weight) && m.config.qk_norm == Some(QkNorm::Whole) {
            let all = self.gathered_qkv(m, &raw)?;
            let mut normed = m.activations(all.len())?;
            b.head_norm(self.head_norm(m, self.op.heads, norms), &all, &mut normed)?;
            *qkv = m.own_columns(Columns::Output(Slot::Qkv), &normed, m.config.qkv_width())?;
        } else {
            b.head_norm(self.head_norm(m, heads, norms), &raw, qkv)?;
        }
        self.rotate(m, t, false, qkv)?;
        if let PastKv::Paged(rows, caches) = context {
            b.cache_write(heads, qkv, rows, &mut caches[self.layer])?;
        }
        Ok(raw)
    }

    /// Maps the gradient of the residual stream after attention to that before it; `x` is the stream before it.
    pub fn backward(
        &self,
        m: &Model,
        (t, segments): (&Tokens, &Segments),
        (x, mut a): (&Buffer, AttentionActivations),
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, op) = (&*m.backend, self.own_op(m));
        let dproj = flow.before_norm(m, self.post_norm, a.proj.take(), grads)?;
        let dproj = dproj.as_ref().unwrap_or(flow.output());
        let width = op.heads.out_width();
        let mut datt = m.activations(t.rows * width)?;
        let all = self.gathered(m, &a.att)?;
        self.out.backward_weight(m, dproj, all.as_ref().unwrap_or(&a.att), grads)?;
        drop(all);
        self.out.backward_input(m, dproj, &mut datt)?;
        let mut dqkv = self.attend_backward(m, op, &a, datt, segments)?;
        let mut rest = self.qkv;
        if let (Some(norms), Some(raw)) = (self.qk_norm, &a.raw) {
            self.rotate(m, t, true, &mut dqkv)?;
            let mut all = None; // QK norm gradients sum over the heads of all ranks
            if m.is_shared(self.qkv.weight) {
                (all, dqkv) = (Some(self.gathered_qkv(m, raw)?), self.gathered_qkv(m, &dqkv)?);
            }
            let shares_tokens = m.place_in_context().is_some();
            if shares_tokens {
                let raw = all.as_ref().unwrap_or(raw);
                let wide = m.config.qkv_width(); // and over all tokens
                (all, dqkv) = (Some(m.all_gather_rows(raw, wide)?), m.all_gather_rows(&dqkv, wide)?);
            }
            let raw = all.as_ref().unwrap_or(raw);
            let [sum_q, sum_k] = grads.get_disjoint_mut([norms.0, norms.1]).expect("two parameters");
            let sums = [added_to(b, sum_q)?, added_to(b, sum_k)?];
            b.head_norm_backward(self.head_norm(m, self.op.heads, norms), raw, &mut dqkv, sums)?;
            if shares_tokens {
                dqkv = m.own_rows(&dqkv, m.config.qkv_width())?;
            }
        } else {
            let tables = m.rotary(t.reach)?;
            rest =
                rest.backward_rotation(m, (op.heads, self.rotation(tables.as_deref(), t)), &mut dqkv, grads)?;
        }
        let mut dh = m.activations(x.len())?;
        self.qkv.backward_input(m, &dqkv, &mut dh)?;
        let h = flow.norm_backward(m, self.norm, (x, None), &dh, grads)?;
        rest.backward_weight(m, &dqkv, &h, grads)
    }

    /// Backward of [`SelfAttention::attend`]: gradient of this rank's rows of `qkv`.
    fn attend_backward(
        &self,
        m: &Model,
        op: Attention,
        a: &AttentionActivations,
        mut datt: Buffer,
        segments: &Segments,
    ) -> Result<Buffer> {
        let saved = AttentionSaved { qkv: &a.qkv, out: &a.att, lse: &a.lse };
        if m.shares_queries() {
            return m.attention_by_rows_backward(op, saved, &datt, segments);
        }
        let exchanged = m.exchanged_op(op);
        if exchanged.is_some() {
            datt = m.rows_to_columns(Columns::Input(Slot::AttnOut), &datt, op.heads.out_width())?;
        }
        let mut dqkv = m.activations(a.qkv.len())?;
        m.backend.attention_backward(exchanged.unwrap_or(op), saved, &datt, segments, &mut dqkv)?;
        match exchanged {
            Some(_) => m.columns_to_rows(Columns::Output(Slot::Qkv), &dqkv),
            None => Ok(dqkv),
        }
    }

    /// RoPE of this layer, if it has any.
    fn rotation<'a>(&self, tables: Option<&'a RotaryTables>, t: &'a Tokens) -> Option<Rotation<'a>> {
        let RotaryTable { dim, cos, sin } = tables?.of(self.rope)?;
        Some(Rotation { dim: *dim, cos, sin, positions: &t.positions })
    }

    fn rotate(&self, m: &Model, t: &Tokens, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        let tables = m.rotary(t.reach)?;
        let Some(rotation) = self.rotation(tables.as_deref(), t) else { return Ok(()) };
        m.backend.rotary(m.own_heads(self.op.heads), rotation, inverse, qkv)
    }
}

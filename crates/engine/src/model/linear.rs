//! Linear layers: the one place where the engine multiplies by a weight.
//!
//! Every GEMM of a layer goes through these methods, plain or fused with its prologue and epilogue. So tensor parallelism (an
//! all-gather around the GEMM) or a quantised weight (another `Weight` of the backend) changes this file only; cases that the
//! fused operations do not cover fall back to the plain ones. A LoRA adapter is already merged into the weight read here; its
//! gradients are accumulated in `backward_weight`.

use super::gradient::{Grads, Taken};
use super::norm::NormLayer;
use super::param::Slot;
use super::tensor::Columns;
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Activation, Affine, Heads, LinearGrads, PagedRows, QkvLayer, Rotation};

/// Head counts of queries, keys and values, and the RoPE of queries and keys.
pub(super) type Rotated<'a> = (Heads, Option<Rotation<'a>>);

/// `y = x W^T + b`, by parameter indices.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub weight: usize,
    pub bias: Option<usize>,
    /// Whether the output's gradient has been rotated back; the bias gradient is then summed in the rotation's order.
    pub rotated: bool,
}

impl Linear {
    /// The backend's operand.
    pub fn operand(self, m: &Model) -> Affine<'_> {
        Affine { weight: m.weight(self.weight), bias: self.bias.map(|i| m.master(i)) }
    }

    /// `y = x W^T + b`.
    pub fn forward(self, m: &Model, x: &Buffer, y: &mut Buffer) -> Result<()> {
        let Affine { weight, bias } = self.operand(m);
        if !self.is_gathered(m) {
            return m.backend.linear(x, weight, bias, y);
        }
        let mut own = m.backend.alloc(y.dtype(), x.len() / weight.k * weight.n)?;
        m.backend.linear(x, weight, bias, &mut own)?;
        m.all_gather_columns(Columns::Output(self.slot(m)), &own, y)
    }

    fn slot(self, m: &Model) -> Slot {
        m.params[self.weight].shape.id.slot
    }

    /// Whether it is tensor-parallel and its output must be all-gathered.
    fn is_gathered(self, m: &Model) -> bool {
        m.is_shared(self.weight) && self.slot(m).writes_residual()
    }

    /// `to += x W^T + b`.
    pub fn forward_add(self, m: &Model, x: &Buffer, to: &mut Buffer) -> Result<()> {
        m.backend.linear_add(x, self.operand(m), to)
    }

    fn qkv<'a>(self, m: &'a Model, (heads, rotation): Rotated<'a>) -> QkvLayer<'a> {
        QkvLayer { linear: self.operand(m), heads, rotation }
    }

    /// Projects `x` to queries, keys and values and applies RoPE; with a cache, keys and values are also written to it.
    pub fn forward_qkv(
        self,
        m: &Model,
        x: &Buffer,
        heads: Rotated<'_>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        m.backend.linear_qkv(x, self.qkv(m, heads), cache, qkv)
    }

    /// [`Linear::forward_qkv`] of `norm(x)`, as one operation.
    pub fn forward_normed_qkv(
        self,
        m: &Model,
        (norm, x): (NormLayer, &Buffer),
        heads: Rotated<'_>,
        cache: (&PagedRows, &mut Buffer),
        qkv: &mut Buffer,
    ) -> Result<()> {
        m.backend.normed_qkv(norm.operand(m), x, self.qkv(m, heads), cache, qkv)
    }

    /// `y = activation(norm(x) W^T + b)`, as one operation.
    pub fn forward_normed_activation(
        self,
        m: &Model,
        (norm, x): (NormLayer, &Buffer),
        activation: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        m.backend.normed_activation(norm.operand(m), x, self.operand(m), activation, y)
    }

    /// `dx = dy W`.
    pub fn backward_input(self, m: &Model, dy: &Buffer, dx: &mut Buffer) -> Result<()> {
        if !m.is_shared(self.weight) {
            return m.backend.linear_dx(dy, m.weight(self.weight), dx);
        }
        let (slot, transposed) = (self.slot(m), m.transposed(self.weight));
        if self.is_gathered(m) {
            return m.backend.linear(dy, transposed, None, dx); // only this rank needs the gradient of these inputs
        }
        let (rows, gathered) = (dx.len() / m.config.hidden, Columns::Output(slot));
        // The QK norm's backward has all-gathered it already.
        let all = match slot == Slot::Qkv && m.config.qk_norm.is_some() {
            true => None,
            false => Some(m.all_gathered_columns(gathered, dy, transposed.k)?),
        };
        let mut own = m.backend.alloc(dx.dtype(), rows * transposed.n)?;
        m.backend.linear(all.as_ref().unwrap_or(dy), transposed, None, &mut own)?;
        m.all_gather_columns(Columns::Input(slot), &own, dx)
    }

    /// Adds `dy^T x` to the weight's gradient and the column sums of `dy` to the bias's.
    pub fn backward_weight(self, m: &Model, dy: &Buffer, x: &Buffer, grads: Grads<'_>) -> Result<()> {
        let rows = x.len() / m.weight(self.weight).k;
        let all = m.params[self.weight].shape.rows;
        if m.team().is_some() && m.is_base(self.weight) {
            self.backward_adapter(m, dy, x, grads)?;
            if grads[self.weight].is_none() && self.bias.is_none_or(|bias| grads[bias].is_none()) {
                return Ok(()); // an adapter's base is frozen
            }
        }
        let own = match dy.len() == rows * m.weight(self.weight).n {
            true => None,
            false => Some(m.own_columns(Columns::Output(self.slot(m)), dy, all)?),
        };
        let dy = own.as_ref().unwrap_or(dy);
        if m.place_in_context().is_some() && m.splits_gradient(self.weight) {
            // All tokens, for this rank's output features.
            let (n, width) = (m.weight(self.weight).n, m.weight(self.weight).k);
            let dy = m.rows_to_columns(Columns::Output(self.slot(m)), dy, n)?;
            let x = m.all_gather_rows(x, width)?;
            return self.add_weight(m, (&dy, &x), x.len() / width, grads);
        }
        let routed = matches!(self.slot(m), Slot::Router | Slot::ExpertUp(_) | Slot::ExpertDown(_));
        if m.place_in_context().is_some() && routed {
            let (dy, x) = self.of_all_tokens(m, dy, x)?;
            return self.add_weight(m, (&dy, &x), x.len() / m.weight(self.weight).k, grads);
        }
        if let Some(adapter) = m.adapter.as_ref().filter(|_| m.team().is_none()) {
            adapter.backward(m, self.weight, (dy, x), grads)?;
        }
        self.add_weight(m, (dy, x), rows, grads)
    }

    /// Adapter gradients in a team: sums over all output features and all tokens, computed by every member.
    fn backward_adapter(self, m: &Model, dy: &Buffer, x: &Buffer, grads: Grads<'_>) -> Result<()> {
        let (slot, all) = (self.slot(m), m.params[self.weight].shape.rows);
        let normed = slot == Slot::Qkv && m.config.qk_norm.is_some();
        let wide = match m.is_shared(self.weight) && !slot.writes_residual() && !normed {
            true => Some(m.all_gathered_columns(Columns::Output(slot), dy, all)?),
            false => None,
        };
        let dy = wide.as_ref().unwrap_or(dy);
        let rows = match m.place_in_context() {
            Some(_) => Some(self.of_all_tokens(m, dy, x)?),
            None => None,
        };
        let (dy, x) = rows.as_ref().map_or((dy, x), |(dy, x)| (dy, x));
        m.adapter.as_ref().map_or(Ok(()), |adapter| adapter.backward(m, self.weight, (dy, x), grads))
    }

    /// All-gathers the rows of an output gradient that has all features, and of the input.
    fn of_all_tokens(self, m: &Model, dy: &Buffer, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let (n, k) = (m.params[self.weight].shape.rows, m.weight(self.weight).k);
        let rows = x.len() / k;
        let most = match self.slot(m) {
            // Members may have any number of an expert's tokens.
            Slot::ExpertUp(_) | Slot::ExpertDown(_) => m.max_rows(rows)?,
            _ => rows + 1,
        };
        Ok((m.all_gather_uneven_rows(dy, n, most)?, m.all_gather_uneven_rows(x, k, most)?))
    }

    fn add_weight(self, m: &Model, (dy, x): (&Buffer, &Buffer), rows: usize, grads: Grads<'_>) -> Result<()> {
        let b = &*m.backend;
        Taken::with(self.weight, self.bias, grads, |taken| {
            let (add, [weight, mut bias]) = taken.sums(b)?;
            if let Some(bias) = bias.take_if(|_| self.rotated) {
                b.rotated_bias(m.config.head_dim, dy, rows, add, bias)?;
            }
            b.linear_dw(dy, x, rows, LinearGrads { weight, bias, add })
        })
    }

    /// Backward of the RoPE in [`Linear::forward_qkv`], in place, which also sums the bias gradient. Returns the layer without
    /// its bias, for the gradients that remain.
    pub fn backward_rotation(
        self,
        m: &Model,
        (heads, rotation): Rotated<'_>,
        dqkv: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<Linear> {
        if m.place_in_context().is_some() {
            m.backend.qkv_backward(heads, rotation, dqkv, false, None)?; // the bias gradient is summed over all tokens later
            return Ok(Linear { rotated: rotation.is_some_and(|r| r.dim == heads.head_dim), ..self });
        }
        let mut bias = self.bias.and_then(|i| grads[i].as_mut());
        let add = bias.as_ref().is_some_and(|sum| !sum.is_empty());
        let dbias = bias.as_mut().map(|sum| sum.written());
        m.backend.qkv_backward(heads, rotation, dqkv, add, dbias)?;
        Ok(Linear { bias: None, ..self })
    }
}

//! Linear layers: the one place where the engine multiplies by a weight.
//!
//! Every product of a layer goes through these methods, plain or fused with what surrounds it. So tensor parallelism (a
//! gather of activations around the product) or a quantised weight (another `Weight` from the backend) changes this file alone: a form that
//! the fused operations do not cover calls the plain ones. A low-rank adapter is part of the weight that is read here; its
//! gradients are summed in `backward_weight`.

use super::gradient::{Grads, Taken};
use super::norm::NormLayer;
use super::param::Slot;
use super::tensor::Columns;
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Activation, Affine, Heads, LinearGrads, PagedRows, QkvLayer, Rotation};

/// Heads of queries, keys and values, and how queries and keys are rotated.
pub(super) type Rotated<'a> = (Heads, Option<Rotation<'a>>);

/// `y = x W^T + b`, by the indices of its parameters.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub weight: usize,
    pub bias: Option<usize>,
}

impl Linear {
    /// What the backend multiplies with.
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
        m.all_columns(Columns::Output(self.slot(m)), &own, y)
    }

    fn slot(self, m: &Model) -> Slot {
        m.params[self.weight].shape.id.slot
    }

    /// Whether ranks share the layer and each needs all of its output.
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

    /// The same of `norm(x)`, in one operation.
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

    /// `y = activation(norm(x) W^T + b)`, in one operation.
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
        let (slot, turned) = (self.slot(m), m.turned(self.weight));
        if self.is_gathered(m) {
            return m.backend.linear(dy, turned, None, dx); // of this rank's inputs, which no other needs
        }
        let (rows, gathered) = (dx.len() / m.config.hidden, Columns::Output(slot));
        let all = match dy.len() == rows * turned.k {
            true => None,
            false => Some(m.with_all_columns(gathered, dy, turned.k)?),
        };
        let mut own = m.backend.alloc(dx.dtype(), rows * turned.n)?;
        m.backend.linear(all.as_ref().unwrap_or(dy), turned, None, &mut own)?;
        m.all_columns(Columns::Input(slot), &own, dx)
    }

    /// Adds `dy^T x` to the weight's gradient, and the sum of `dy` to the bias's.
    pub fn backward_weight(self, m: &Model, dy: &Buffer, x: &Buffer, grads: Grads<'_>) -> Result<()> {
        let rows = x.len() / m.weight(self.weight).k;
        let all = m.params[self.weight].shape.rows;
        let own = match dy.len() == rows * m.weight(self.weight).n {
            true => None,
            false => Some(m.own_columns(Columns::Output(self.slot(m)), dy, all)?),
        };
        let dy = own.as_ref().unwrap_or(dy);
        if m.place_in_context().is_some() && m.is_cut(self.weight) {
            // All tokens of some output features.
            let dy = m.rows_for_columns(Columns::Output(self.slot(m)), dy, all)?;
            let (x, width) = (m.all_rows(x)?, m.weight(self.weight).k);
            return self.add_weight(m, (&dy, &x), x.len() / width, grads);
        }
        if let Some(adapter) = &m.adapter {
            adapter.backward(m, self.weight, (dy, x), grads)?;
        }
        self.add_weight(m, (dy, x), rows, grads)
    }

    fn add_weight(self, m: &Model, (dy, x): (&Buffer, &Buffer), rows: usize, grads: Grads<'_>) -> Result<()> {
        let b = &*m.backend;
        Taken::with(self.weight, self.bias, grads, |taken| {
            let (add, [weight, bias]) = taken.sums(b)?;
            b.linear_dw(dy, x, rows, LinearGrads { weight, bias, add })
        })
    }

    /// The backward of the rotation in [`Linear::forward_qkv`], in place, which also sums the bias's gradient. Returns
    /// the layer without its bias, whose gradients are still to be computed.
    pub fn backward_rotation(
        self,
        m: &Model,
        (heads, rotation): Rotated<'_>,
        dqkv: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<Linear> {
        if m.place_in_context().is_some() {
            m.backend.qkv_backward(heads, rotation, dqkv, false, None)?; // the bias is summed over all tokens later
            return Ok(self);
        }
        let mut bias = self.bias.and_then(|i| grads[i].as_mut());
        let add = bias.as_ref().is_some_and(|sum| !sum.is_empty());
        let dbias = bias.as_mut().map(|sum| sum.written());
        m.backend.qkv_backward(heads, rotation, dqkv, add, dbias)?;
        Ok(Linear { bias: None, ..self })
    }
}

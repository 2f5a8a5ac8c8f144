//! Norms of the residual stream and of sublayer outputs.

use super::config::NormKind;
use super::gradient::{Grads, Taken};
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Norm, Normed, Target};

/// A norm over the hidden width, by parameter indices.
#[derive(Clone, Copy)]
pub(super) struct NormLayer {
    pub weight: usize,
    pub bias: Option<usize>,
}

impl NormLayer {
    /// The backend's operand.
    pub fn operand(self, m: &Model) -> Normed<'_> {
        Normed { op: m.norm_op(), weight: m.master(self.weight), bias: self.bias.map(|i| m.master(i)) }
    }

    /// `y = norm(x)`.
    pub fn forward(self, m: &Model, x: &Buffer, y: &mut Buffer) -> Result<()> {
        m.backend.norm(self.operand(m), x, y)
    }

    /// `sum = x + delta`, `y = norm(sum)`.
    pub fn forward_sum(
        self,
        m: &Model,
        (x, delta): (&Buffer, &Buffer),
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        m.backend.add_norm(self.operand(m), x, delta, sum, y)
    }

    /// Writes `dx` and adds to the parameters' gradients.
    pub fn backward(
        self,
        m: &Model,
        dy: &Buffer,
        x: &Buffer,
        dx: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let b = &*m.backend;
        if m.place_in_context().is_some() {
            let hidden = m.config.hidden;
            let (dy, x) = (m.all_gather_rows(dy, hidden)?, m.all_gather_rows(x, hidden)?);
            let mut all = b.alloc(dx.dtype(), x.len())?;
            self.backward_here(m, &dy, &x, &mut all, grads)?;
            *dx = m.own_rows(&all, m.config.hidden)?;
            return Ok(());
        }
        self.backward_here(m, dy, x, dx, grads)
    }

    /// The same for this rank's rows only.
    fn backward_here(
        self,
        m: &Model,
        dy: &Buffer,
        x: &Buffer,
        dx: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let b = &*m.backend;
        Taken::with(self.weight, self.bias, grads, |taken| {
            let dx = Target { to: dx, add: false };
            b.norm_backward(self.operand(m), dy, x, dx, taken.norm_grads(b)?)
        })
    }
}

impl Model {
    pub(super) fn norm_op(&self) -> Norm {
        let n = self.config.norm;
        Norm {
            centred: n.kind == NormKind::Layer,
            plus_one: n.kind == NormKind::RmsPlusOne,
            eps: n.eps,
            width: self.config.hidden,
        }
    }

    /// QK norm of one head, or of whole rows; the backend takes the width from the operand.
    pub(super) fn head_norm_op(&self) -> Norm {
        Norm { width: self.config.head_dim, ..self.norm_op() }
    }
}

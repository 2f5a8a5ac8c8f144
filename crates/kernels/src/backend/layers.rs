//! Row-wise layers: embeddings, norms, linear layers, activations.

use super::VectorOps;
use crate::operands::*;
use crate::{Buffer, DType, Result, Weight, composed, shapes};

/// Token and position embeddings.
pub trait EmbeddingOps: VectorOps {
    /// `out[i] = scale * table[ids[i]]`, in f32; `+=` with `add`.
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        shapes::embed(self.as_info(), ids, table, out)?;
        composed::embed(self, ids, table, scale, add, out)
    }
    /// `dtable[ids[i]] += scale * dout[i]`, in row order per id.
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        shapes::embed_backward(self.as_info(), ids, dout, dtable)?;
        composed::embed_backward(self, ids, dout, scale, dtable)
    }
}

/// RMSNorm and LayerNorm.
pub trait NormOps: VectorOps {
    /// `y = norm(x) * weight + bias`
    fn norm(&self, norm: Normed<'_>, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// `sum = x + delta` (f32), `y = norm(sum) * weight + bias`
    fn add_norm(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        delta: &Buffer,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::add_norm(self.as_info(), norm, x, delta, [sum, y])?;
        composed::add_norm(self, norm, x, delta, [sum, y])
    }
    /// Gradients of the input and of the parameters.
    fn norm_backward(
        &self,
        norm: Normed<'_>,
        dy: &Buffer,
        x: &Buffer,
        dx: Target<'_>,
        grads: NormGrads<'_>,
    ) -> Result<()>;
    /// `norm` or `add_norm`, recomputed, fused with `norm_backward`; the same bits.
    fn norm_recompute(&self, norm: Normed<'_>, of: NormInput<'_>, backward: NormRecompute<'_>) -> Result<()> {
        shapes::norm_recompute(self.as_info(), norm, of, &backward)?;
        let NormInput { x, delta } = of;
        let NormRecompute { dy, y, dx, rounded, grads } = backward;
        match delta {
            Some(delta) => {
                let mut sum = self.alloc(DType::F32, x.len())?;
                self.add_norm(norm, x, delta, &mut sum, y)?;
                self.norm_backward(norm, dy, &sum, Target { to: &mut *dx, add: true }, grads)?;
            }
            None => {
                self.norm(norm, x, y)?;
                self.norm_backward(norm, dy, x, Target { to: &mut *dx, add: true }, grads)?;
            }
        }
        match rounded {
            Some(rounded) => self.copy(dx, 0, rounded, 0, dx.len()),
            None => Ok(()),
        }
    }
}

/// QK norm: RMSNorm or LayerNorm of queries and keys.
pub trait HeadNormOps: NormOps {
    /// Normalises the query heads with `q_weight` and the key heads with `k_weight`; values are copied.
    fn head_norm(&self, norm: HeadNorm<'_>, qkv: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::head_norm(self.as_info(), norm, qkv, out)?;
        composed::head_norm(self, norm, qkv, out)
    }
    /// In place: `dqkv` holds the gradient of the output and becomes that of the input. Adds to the gradients of `q_weight` and
    /// `k_weight`.
    fn head_norm_backward(
        &self,
        norm: HeadNorm<'_>,
        qkv: &Buffer,
        dqkv: &mut Buffer,
        dweights: [Option<&mut Buffer>; 2],
    ) -> Result<()> {
        let sums = dweights.each_ref().map(|d| d.as_deref());
        shapes::head_norm_backward(self.as_info(), norm, qkv, dqkv, sums)?;
        composed::head_norm_backward(self, norm, qkv, dqkv, dweights)
    }
}

/// Linear layers and their weights.
pub trait LinearOps: VectorOps {
    /// Allocates an `[n, k]` weight for rows of type `compute`; `backward` if `linear_dx` will read it, too. The backend
    /// chooses the storage format.
    fn weight(&self, n: usize, k: usize, compute: DType, backward: bool) -> Result<Weight>;
    /// The f32 master of a weight, on devices that store both in the same memory: changing one changes the other.
    fn master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self.as_info(), weight).map(|()| None)
    }
    /// Whether a bf16 weight can be its own master ([`LinearOps::rounded_master`]).
    fn rounds_masters(&self) -> bool {
        false
    }
    /// The weight itself viewed as master of a model that is not trained, where the device supports it: writes round, and no
    /// extra bits are stored.
    fn rounded_master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self.as_info(), weight).map(|()| None)
    }
    /// Derives the weight from the f32 master.
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()>;
    /// `y = x · wᵀ + bias`
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()>;
    /// `dx = dy · w`
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()>;
    /// Gradients of weight `dyᵀ · x` and bias `Σ dy`.
    fn linear_dw(&self, dy: &Buffer, x: &Buffer, tokens: usize, grads: LinearGrads<'_>) -> Result<()>;
}

/// Activations of a feed-forward network.
pub trait ActivationOps: VectorOps {
    /// `x` is `[rows, 2 * width]` for gated activations (a row's gates, then its ups), else `[rows, width]`.
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// Writes `dx`.
    fn activation_backward(
        &self,
        op: Activation,
        width: usize,
        x: &Buffer,
        dy: &Buffer,
        dx: &mut Buffer,
    ) -> Result<()>;
    /// Recomputes `activation` into `dy` and overwrites `x` with the gradient of the input; the same bits.
    fn activation_recompute(
        &self,
        op: Activation,
        width: usize,
        x: &mut Buffer,
        dy: &mut Buffer,
    ) -> Result<()> {
        shapes::activation_recompute(self.as_info(), op, width, x, dy)?;
        let (mut y, mut dx) = (self.alloc(dy.dtype(), dy.len())?, self.alloc(x.dtype(), x.len())?);
        self.activation(op, width, x, &mut y)?;
        self.activation_backward(op, width, x, dy, &mut dx)?;
        (*dy, *x) = (y, dx);
        Ok(())
    }
}

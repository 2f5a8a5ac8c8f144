//! Layers that see one row at a time: embeddings, norms, linear layers, activations.

use super::VectorOps;
use crate::buffer::{Buffer, DType, Weight};
use crate::composed;
use crate::error::Result;
use crate::operands::*;
use crate::shapes;

/// Token and position embeddings.
pub trait EmbeddingOps: VectorOps {
    /// `out[i] = scale * table[ids[i]]`, in f32; `+=` with `add`.
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        shapes::embed(self.as_home(), ids, table, out)?;
        composed::embed(self, ids, table, scale, add, out)
    }
    /// `dtable[ids[i]] += scale * dout[i]`, in row order for each id.
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        shapes::embed_backward(self.as_home(), ids, dout, dtable)?;
        composed::embed_backward(self, ids, dout, scale, dtable)
    }
}

/// RMSNorm and LayerNorm.
pub trait NormOps: VectorOps {
    /// `y = norm(x) * weight + bias`
    fn norm(
        &self,
        op: Norm,
        x: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        y: &mut Buffer,
    ) -> Result<()>;
    /// `sum = x + delta` (f32), `y = norm(sum) * weight + bias`
    fn add_norm(
        &self,
        op: Norm,
        x: &Buffer,
        delta: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::add_norm(self.as_home(), op, x, delta, weight, bias, [sum, y])?;
        composed::add_norm(self, op, x, delta, weight, bias, [sum, y])
    }
    /// Writes `dx`, or adds to it with `add`.
    fn norm_backward(
        &self,
        op: Norm,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        add: bool,
        dx: &mut Buffer,
        grads: NormGrads<'_>,
    ) -> Result<()>;
    /// `norm` or `add_norm` again into `y`, and `norm_backward` with `dx` added to: the same bits, perhaps sooner.
    /// `rounded`, where given, takes a copy of `dx` in the compute type.
    fn norm_again(
        &self,
        op: Norm,
        of: NormInput<'_>,
        dy: &Buffer,
        y: &mut Buffer,
        dx: &mut Buffer,
        rounded: Option<&mut Buffer>,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        shapes::norm_again(self.as_home(), op, of, dy, [y, dx], rounded.as_deref(), &grads)?;
        let NormInput { x, delta, weight, bias } = of;
        match delta {
            Some(delta) => {
                let mut sum = self.alloc(DType::F32, x.len())?;
                self.add_norm(op, x, delta, weight, bias, &mut sum, y)?;
                self.norm_backward(op, dy, &sum, weight, true, dx, grads)?;
            }
            None => {
                self.norm(op, x, weight, bias, y)?;
                self.norm_backward(op, dy, x, weight, true, dx, grads)?;
            }
        }
        match rounded {
            Some(rounded) => self.copy(dx, 0, rounded, 0, dx.len()),
            None => Ok(()),
        }
    }
}

/// RMSNorm or LayerNorm of each query and key head.
pub trait HeadNormOps: NormOps {
    /// Normalises each query head with `q_weight` and each key head with `k_weight`; values are copied.
    fn head_norm(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let weights = [q_weight, k_weight];
        shapes::head_norm(self.as_home(), op, heads, qkv, weights, out)?;
        composed::head_norm(self, op, heads, qkv, weights, out)
    }
    /// `dqkv` holds the gradient of the output and becomes that of the input.
    fn head_norm_backward(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        dqkv: &mut Buffer,
        dq_weight: Option<&mut Buffer>,
        dk_weight: Option<&mut Buffer>,
    ) -> Result<()> {
        let (weights, dweights) = ([q_weight, k_weight], [dq_weight.as_deref(), dk_weight.as_deref()]);
        shapes::head_norm_backward(self.as_home(), op, heads, qkv, weights, dqkv, dweights)?;
        composed::head_norm_backward(self, op, heads, qkv, weights, dqkv, [dq_weight, dk_weight])
    }
}

/// Linear layers, and the form of a weight that their products read.
pub trait LinearOps: VectorOps {
    /// Room for the derived form of an `[n, k]` matrix; with `backward` also what `linear_dx` needs.
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight>;
    /// Room for the f32 master of a weight, where the device holds both in the memory of one; to change the one is to change
    /// the other then.
    fn master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self.as_home(), weight).map(|()| None)
    }
    /// Derives it from the f32 master.
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()>;
    /// `y = x · wᵀ + bias`
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()>;
    /// `dx = dy · w`
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()>;
    /// `dw = dyᵀ · x`, `dbias = Σ dy`; `+=` with `add`, each whole sum in one addition.
    fn linear_dw(
        &self,
        dy: &Buffer,
        x: &Buffer,
        tokens: usize,
        add: bool,
        dw: Option<&mut Buffer>,
        dbias: Option<&mut Buffer>,
    ) -> Result<()>;
}

/// Activations of a feed-forward network.
pub trait ActivationOps: VectorOps {
    /// `x` is `[rows, 2 * width]` for the gated ones (all gates of a row, then all ups), else `[rows, width]`.
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
    /// `activation` and `activation_backward` in place, the same bits, perhaps sooner: `dy` becomes what `activation` gave
    /// and `x` the gradient by it.
    fn activation_again(&self, op: Activation, width: usize, x: &mut Buffer, dy: &mut Buffer) -> Result<()> {
        shapes::activation_again(self.as_home(), op, width, x, dy)?;
        let (mut y, mut dx) = (self.alloc(dy.dtype(), dy.len())?, self.alloc(x.dtype(), x.len())?);
        self.activation(op, width, x, &mut y)?;
        self.activation_backward(op, width, x, dy, &mut dx)?;
        (*dy, *x) = (y, dx);
        Ok(())
    }
}

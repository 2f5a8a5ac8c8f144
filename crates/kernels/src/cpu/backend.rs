//! The contract of [`Backend`], operation by operation, each in the file of its name.

use super::{Cpu, activation, attention, embed, head_norm, linear, logp, norm, optim, peak, rotary, vector};
use crate::backend::{
    Activation, AdamWParam, Attention, Backend, Heads, LogpGrads, LogpHead, LogpStats, Norm, NormGrads,
    NormInput, PagedRows, Segments, Sgd,
};
use crate::buffer::{Buffer, DType, Weight};
use crate::error::Result;

/// Sets what a sum is then added to.
fn clear<const N: usize>(cpu: &Cpu, sums: [Option<&mut Buffer>; N]) -> Result<()> {
    sums.into_iter().flatten().try_for_each(|sum| vector::fill(cpu, sum, 0.0))
}

/// The gradients of a norm's weight and bias, to be added to.
fn ready<'a>(cpu: &Cpu, mut grads: NormGrads<'a>) -> Result<[Option<&'a mut Buffer>; 2]> {
    if !grads.add {
        clear(cpu, [grads.weight.as_deref_mut(), grads.bias.as_deref_mut()])?;
    }
    Ok([grads.weight, grads.bias])
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        format!("cpu, {}, {} threads", self.level.name(), self.pool.threads())
    }
    fn memory(&self) -> (usize, usize) {
        self.arena.usage()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        peak::measure(self.level, dtype) * self.pool.threads() as f64
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.arena.buffer(dtype, len)
    }
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()> {
        vector::fill(self, dst, value)
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        vector::write(self, dst, at, src)
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        vector::read(self, src, at, dst)
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        vector::indices(self, values)
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        vector::copy(self, src, from, dst, to, len)
    }
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        vector::axpy(self, a, x, y)
    }
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64> {
        vector::dot(self, x, y)
    }
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        vector::first_non_finite(self, x)
    }
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        vector::gather_rows(self, src, rows, width, dst)
    }
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        vector::scatter_rows(self, src, rows, width, dst)
    }
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        embed::embed(self, ids, table, scale, add, out)
    }
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        embed::embed_backward(self, ids, dout, scale, dtable)
    }
    fn norm(
        &self,
        op: Norm,
        x: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        y: &mut Buffer,
    ) -> Result<()> {
        norm::norm(self, op, x, weight, bias, y)
    }
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
        norm::add_norm(self, op, x, delta, weight, bias, sum, y)
    }
    fn norm_backward(
        &self,
        op: Norm,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        add: bool,
        dx: &mut Buffer,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        let [dweight, dbias] = ready(self, grads)?;
        norm::norm_backward(self, op, dy, x, weight, add, dx, dweight, dbias)
    }
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
        let [dweight, dbias] = ready(self, grads)?;
        norm::norm_again(self, op, of, dy, y, dx, rounded, dweight, dbias)
    }
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight> {
        linear::weight(self, n, k, dtype, backward)
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        linear::load_weight(self, master, weight)
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        linear::linear(self, x, w, bias, y)
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        linear::linear_dx(self, dy, w, dx)
    }
    fn linear_dw(
        &self,
        dy: &Buffer,
        x: &Buffer,
        tokens: usize,
        add: bool,
        mut dw: Option<&mut Buffer>,
        mut dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        if !add {
            clear(self, [dw.as_deref_mut(), dbias.as_deref_mut()])?;
        }
        linear::linear_dw(self, dy, x, tokens, dw, dbias)
    }
    fn head_norm(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        head_norm::head_norm(self, op, heads, qkv, q_weight, k_weight, out)
    }
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
        head_norm::head_norm_backward(self, op, heads, qkv, q_weight, k_weight, dqkv, dq_weight, dk_weight)
    }
    fn rotary(
        &self,
        heads: Heads,
        rotary_dim: usize,
        cos: &Buffer,
        sin: &Buffer,
        positions: &Buffer,
        inverse: bool,
        qkv: &mut Buffer,
    ) -> Result<()> {
        rotary::rotary(self, heads, rotary_dim, cos, sin, positions, inverse, qkv)
    }
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        attention::attention(self, op, qkv, segments, out, lse)
    }
    fn attention_backward(
        &self,
        op: Attention,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        attention::attention_backward(self, op, qkv, out, lse, dout, segments, dqkv)
    }
    fn block_tokens(&self) -> usize {
        attention::block_tokens()
    }
    fn cache_len(&self, heads: Heads, blocks: usize) -> usize {
        attention::cache_len(heads, blocks)
    }
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        attention::cache_write(self, heads, qkv, rows, cache)
    }
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        for layer in layers {
            pairs.iter().try_for_each(|&(from, to)| attention::cache_copy(self, heads, from, to, layer))?;
        }
        Ok(())
    }
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        attention::attention_paged(self, op, qkv, rows, cache, out)
    }
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        activation::activation(self, op, width, x, y)
    }
    fn activation_backward(
        &self,
        op: Activation,
        width: usize,
        x: &Buffer,
        dy: &Buffer,
        dx: &mut Buffer,
    ) -> Result<()> {
        activation::activation_backward(self, op, width, x, dy, dx)
    }
    fn activation_again(&self, op: Activation, width: usize, x: &mut Buffer, dy: &mut Buffer) -> Result<()> {
        activation::activation_again(self, op, width, x, dy)
    }
    fn logp(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()> {
        logp::logp(self, op, x, w, targets, others, stats)
    }
    fn logp_backward(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        dx: &mut Buffer,
        add: bool,
        mut dw: Option<&mut Buffer>,
    ) -> Result<()> {
        if !add {
            clear(self, [dw.as_deref_mut()])?;
        }
        logp::logp_backward(self, op, x, w, targets, others, stats, grads, dx, dw)
    }
    fn logp_known(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        dx: &mut Buffer,
        add: bool,
        mut dw: Option<&mut Buffer>,
    ) -> Result<()> {
        if !add {
            clear(self, [dw.as_deref_mut()])?;
        }
        logp::logp_known(self, op, x, w, targets, dlogp, stats, dx, dw)
    }
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        logp::logits(self, op, x, w, logits, lse)
    }
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        logp::sample(self, logits, lse, uniform)
    }
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        logp::argmax(self, logits, rows)
    }
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        logp::kl(self, op, p, q, kl)
    }
    fn kl_backward(
        &self,
        op: LogpHead,
        p: (&Buffer, &Weight),
        q: (&Buffer, &Weight),
        dkl: &Buffer,
        dx: &mut Buffer,
        dw: Option<&mut Buffer>,
    ) -> Result<()> {
        logp::kl_backward(self, op, p, q, dkl, dx, dw)
    }
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        for p in params {
            for range in p.ranges {
                optim::adamw(self, p.op, range.clone(), p.param, p.grad, p.first, p.second)?;
            }
            if let Some(weight) = p.derived.as_deref_mut() {
                linear::load_weight(self, p.param, weight)?;
            }
        }
        Ok(())
    }
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()> {
        optim::sgd(self, op, range, param, grad, velocity)
    }
}

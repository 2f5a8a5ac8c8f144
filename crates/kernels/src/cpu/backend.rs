//! The contract of [`Backend`], operation by operation, each in the file of its name.

use super::memory::{memory_of, u32s};
use super::{Cpu, activation, attention, embed, head_norm, linear, logp, norm, optim, peak, rotary, vector};
use crate::backend::{
    Activation, AdamWParam, Affine, Ask, Attention, Backend, Choices, Heads, LogpGrads, LogpHead, LogpStats,
    Norm, NormGrads, NormInput, Normed, PagedRows, Segments, Sgd, Turns,
};
use crate::buffer::{Buffer, DType, Weight};
use crate::composed;
use crate::error::Result;
use crate::shapes::{self, Home};

impl Home for Cpu {
    fn holds(&self, buffer: &Buffer) -> bool {
        memory_of(buffer).is_some_and(|m| m.has_room(buffer.len(), buffer.dtype().size()))
    }
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool {
        linear::holds(weight, backward)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        u32s(buffer)
    }
    fn block(&self, heads: Heads) -> (usize, usize) {
        (attention::block_tokens(), attention::cache_len(heads, 1))
    }
}

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
        shapes::fill(self, dst)?;
        vector::fill(self, dst, value)
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        shapes::write(self, dst, at, src.len())?;
        vector::write(self, dst, at, src)
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        shapes::read(self, src, at, dst.len())?;
        vector::read(self, src, at, dst)
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        vector::indices(self, values)
    }
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        shapes::set_indices(self, dst, values.len())?;
        vector::set_indices(dst, values);
        Ok(())
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        shapes::copy(self, (src, from), (dst, to), len)?;
        vector::copy(self, src, from, dst, to, len)
    }
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::axpy(self, x, y)?;
        vector::axpy(self, a, x, y)
    }
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64> {
        shapes::dot(self, x, y)?;
        vector::dot(self, x, y)
    }
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        shapes::first_non_finite(self, x)?;
        vector::first_non_finite(self, x)
    }
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::gather_rows(self, src, rows, width, dst)?;
        vector::gather_rows(self, src, rows, width, dst)
    }
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        let from = shapes::scatter_rows(self, src, rows, width, dst)?;
        vector::scatter_rows(self, src, &from, width, dst)
    }
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        shapes::embed(self, ids, table, out)?;
        embed::embed(self, ids, table, scale, add, out)
    }
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        shapes::embed_backward(self, ids, dout, dtable)?;
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
        shapes::norm(self, op, x, weight, bias, y)?;
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
        shapes::add_norm(self, op, x, delta, weight, bias, [sum, y])?;
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
        shapes::norm_backward(self, op, dy, x, weight, dx, &grads)?;
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
        shapes::norm_again(self, op, of, dy, [y, dx], rounded.as_deref(), &grads)?;
        let [dweight, dbias] = ready(self, grads)?;
        norm::norm_again(self, op, of, dy, y, dx, rounded, dweight, dbias)
    }
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight> {
        shapes::weight(self, n, k, dtype)?;
        linear::weight(self, n, k, dtype, backward)
    }
    fn master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self, weight).map(|()| None)
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        shapes::load_weight(self, master, weight)?;
        linear::load_weight(self, master, weight)
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        shapes::linear(self, x, w, bias, y)?;
        linear::linear(self, x, w, bias, y)
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        shapes::linear_dx(self, dy, w, dx)?;
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
        shapes::linear_dw(self, dy, x, tokens, dw.as_deref(), dbias.as_deref())?;
        if !add {
            clear(self, [dw.as_deref_mut(), dbias.as_deref_mut()])?;
        }
        if tokens == 0 {
            return Ok(());
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
        shapes::head_norm(self, op, heads, qkv, [q_weight, k_weight], out)?;
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
        let dweights = [dq_weight.as_deref(), dk_weight.as_deref()];
        shapes::head_norm_backward(self, op, heads, qkv, [q_weight, k_weight], dqkv, dweights)?;
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
        let turns = Turns { dim: rotary_dim, cos, sin, positions };
        shapes::rotary(self, heads, turns, qkv)?;
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
        shapes::attention(self, &op, qkv, segments, [out, lse])?;
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
        shapes::attention_backward(self, &op, qkv, [out, lse, dout], segments, dqkv)?;
        attention::attention_backward(self, op, qkv, out, lse, dout, segments, dqkv)
    }
    fn block_tokens(&self) -> usize {
        attention::block_tokens()
    }
    fn cache_len(&self, heads: Heads, blocks: usize) -> usize {
        attention::cache_len(heads, blocks)
    }
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        shapes::cache_write(self, heads, qkv, rows, cache)?;
        attention::cache_write(self, heads, qkv, rows, cache)
    }
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        shapes::cache_copies(self, heads, pairs, layers)?;
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
        shapes::attention_paged(self, &op, qkv, rows, cache, out)?;
        attention::attention_paged(self, op, qkv, rows, cache, out)
    }
    fn linear_qkv(
        &self,
        x: &Buffer,
        layer: Affine<'_>,
        heads: Heads,
        turns: Option<Turns<'_>>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = cache.as_ref().map(|(rows, cache)| (*rows, &**cache));
        shapes::linear_qkv(self, x, layer, heads, turns, to, qkv)?;
        composed::linear_qkv(self, x, layer, heads, turns, cache, qkv)
    }
    fn qkv_backward(
        &self,
        heads: Heads,
        turns: Option<Turns<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::qkv_backward(self, heads, turns, dqkv, dbias.as_deref())?;
        composed::qkv_backward(self, heads, turns, dqkv, add, dbias)
    }
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::activation(self, op, width, x, y)?;
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
        shapes::activation_backward(self, op, width, x, dy, dx)?;
        activation::activation_backward(self, op, width, x, dy, dx)
    }
    fn activation_again(&self, op: Activation, width: usize, x: &mut Buffer, dy: &mut Buffer) -> Result<()> {
        shapes::activation_again(self, op, width, x, dy)?;
        activation::activation_again(self, op, width, x, dy)
    }
    fn normed_qkv(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        heads: Heads,
        turns: Option<Turns<'_>>,
        rows: &PagedRows,
        cache: &mut Buffer,
        qkv: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_qkv(self, norm, x, layer, heads, turns, (rows, cache), qkv)?;
        composed::normed_qkv(self, norm, x, layer, heads, turns, rows, cache, qkv)
    }
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        shapes::linear_add(self, x, layer, to)?;
        composed::linear_add(self, x, layer, to)
    }
    fn normed_activation(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        op: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_activation(self, norm, x, layer, op, y)?;
        composed::normed_activation(self, norm, x, layer, op, y)
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
        let listed = others.as_ref().map(|(ids, out)| (*ids, &**out));
        shapes::logp(self, x, w, targets, listed, stats)?;
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
        shapes::logp_backward(self, x, w, targets, others, stats, grads, dx, dw.as_deref())?;
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
        shapes::logp_known(self, x, w, targets, dlogp, stats, dx, dw.as_deref())?;
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
        shapes::logits(self, x, w, [logits, lse])?;
        logp::logits(self, op, x, w, logits, lse)
    }
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        shapes::sample(self, logits, lse, uniform)?;
        logp::sample(self, logits, lse, uniform)
    }
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self, logits, rows)?;
        logp::argmax(self, logits, rows)
    }
    fn choose(&self, logits: &Buffer, lse: &Buffer, asks: &[Ask]) -> Result<Choices> {
        shapes::choose(self, logits, lse, asks.iter().map(|ask| ask.draw))?;
        Ok(Choices::new(Box::new(composed::choose(self, logits, lse, asks)?)))
    }
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self, p, q, kl)?;
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
        shapes::kl_backward(self, p, q, dkl, dx, dw.as_deref())?;
        logp::kl_backward(self, op, p, q, dkl, dx, dw)
    }
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        shapes::adamw(self, params)?;
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
        shapes::sgd(self, op, &range, param, grad, velocity.as_deref())?;
        optim::sgd(self, op, range, param, grad, velocity)
    }
}

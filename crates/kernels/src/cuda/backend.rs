//! The contract of [`Backend`], operation by operation, each in the file of its name.

use super::{
    Cuda, activation, attention, embed, few, halves, head_norm, kl, linear, logp, memory, norm, optim, peak,
    record, rotary, sample, vector,
};
use crate::backend::{
    Activation, AdamWParam, Affine, Ask, Attention, Backend, Choice, Choices, Heads, LogpGrads, LogpHead,
    LogpStats, Norm, NormGrads, NormInput, Normed, PagedRows, Recording, Segments, Sgd, Turns,
};
use crate::buffer::{Buffer, DType, Weight};
use crate::composed;
use crate::error::Result;
use crate::shapes::{self, Home};
use crate::usage::{Purpose, Report};
use std::sync::atomic::Ordering;

impl Home for Cuda {
    fn holds(&self, buffer: &Buffer) -> bool {
        memory::holds(&self.arena, buffer)
    }
    // One form serves forward and backward.
    fn holds_weight(&self, weight: &Weight, _backward: bool) -> bool {
        linear::holds(&self.arena, weight)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        memory::u32s(buffer)
    }
    fn block(&self, heads: Heads) -> (usize, usize) {
        (attention::block_tokens(), attention::cache_len(heads, 1))
    }
}

impl Backend for Cuda {
    fn describe(&self) -> String {
        self.describe_card()
    }
    fn memory(&self) -> (usize, usize) {
        self.arena.usage()
    }
    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        self.arena.set_purpose(purpose)
    }
    fn memory_report(&self) -> Option<Report> {
        Some(self.arena.report())
    }
    fn is_exact(&self) -> bool {
        self.exact()
    }
    fn set_exact(&self, exact: bool) -> Result<()> {
        self.exact.store(exact, Ordering::Relaxed);
        Ok(())
    }
    fn wait(&self) -> Result<()> {
        self.synchronize()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        peak::measure(self, dtype)
    }
    fn busy_tokens(&self) -> usize {
        16384
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
        memory::set_indices(self, dst, values)
    }
    fn records(&self) -> bool {
        !self.trace.waits()
    }
    fn record(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        record::record(self, body)
    }
    fn replay(&self, recording: &Recording) -> Result<()> {
        record::replay(self, recording)
    }
    fn stage_rows(&self, rows: &PagedRows, batch: usize) -> Result<u64> {
        attention::stage(self, rows, batch)
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
    fn dots(&self, pairs: &[(&Buffer, &Buffer)]) -> Result<Vec<f64>> {
        pairs.iter().try_for_each(|(x, y)| shapes::dot(self, x, y))?;
        vector::dots(self, pairs)
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
        norm::norm_backward(self, op, dy, x, weight, add, dx, grads)
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
        norm::norm_again(self, op, of, dy, y, dx, rounded, grads)
    }
    fn weight(&self, n: usize, k: usize, dtype: DType, _backward: bool) -> Result<Weight> {
        shapes::weight(self, n, k, dtype)?;
        linear::weight(self, n, k, dtype)
    }
    fn master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self, weight)?;
        halves::master(self, weight)
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
        dw: Option<&mut Buffer>,
        dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::linear_dw(self, dy, x, tokens, dw.as_deref(), dbias.as_deref())?;
        linear::linear_dw(self, dy, x, tokens, add, dw, dbias)
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
        attention::cache_copies(self, heads, pairs, layers)
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
        match rotary::linear_qkv(self, x, layer, heads, turns, to, qkv)? {
            true => Ok(()),
            false => composed::linear_qkv(self, x, layer, heads, turns, cache, qkv),
        }
    }
    fn qkv_backward(
        &self,
        heads: Heads,
        turns: Option<Turns<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        mut dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::qkv_backward(self, heads, turns, dqkv, dbias.as_deref())?;
        match rotary::qkv_backward(self, heads, turns, dqkv, add, dbias.as_deref_mut())? {
            true => Ok(()),
            false => composed::qkv_backward(self, heads, turns, dqkv, add, dbias),
        }
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
    fn few_rows(&self, widest: usize) -> usize {
        few::worth(self, widest)
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
        match few::normed_qkv(self, norm, x, layer, heads, turns, rows, cache, qkv)? {
            true => Ok(()),
            false => composed::normed_qkv(self, norm, x, layer, heads, turns, rows, cache, qkv),
        }
    }
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        shapes::linear_add(self, x, layer, to)?;
        match few::linear_add(self, x, layer, to)? {
            true => Ok(()),
            false => composed::linear_add(self, x, layer, to),
        }
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
        match few::normed_activation(self, norm, x, layer, op, y)? {
            true => Ok(()),
            false => composed::normed_activation(self, norm, x, layer, op, y),
        }
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
        dw: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::logp_backward(self, x, w, targets, others, stats, grads, dx, dw.as_deref())?;
        logp::logp_backward(self, op, x, w, targets, others, stats, grads, dx, add, dw)
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
        dw: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::logp_known(self, x, w, targets, dlogp, stats, dx, dw.as_deref())?;
        logp::logp_known(self, op, x, w, targets, dlogp, stats, dx, add, dw)
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
        sample::sample(self, logits, lse, uniform)
    }
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self, logits, rows)?;
        sample::argmax(self, logits, rows)
    }
    fn choose(&self, logits: &Buffer, lse: &Buffer, asks: &[Ask]) -> Result<Choices> {
        shapes::choose(self, logits, lse, asks.iter().map(|ask| ask.draw))?;
        sample::choose(self, logits, lse, asks)
    }
    fn chosen(&self, choices: &Choices) -> Result<Vec<Choice>> {
        sample::chosen(choices)
    }
    fn feed(&self, choices: &[&Choices], from: &[(usize, u32)], ids: &mut Buffer) -> Result<()> {
        let rows = choices.iter().map(|c| sample::rows(c)).collect::<Result<Vec<usize>>>()?;
        shapes::feed(self, &rows, from, ids)?;
        sample::feed(self, choices, from, ids)
    }
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self, p, q, kl)?;
        kl::kl(self, op, p, q, kl)
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
        kl::kl_backward(self, op, p, q, dkl, dx, dw)
    }
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        shapes::adamw(self, params)?;
        optim::adamw(self, params)
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

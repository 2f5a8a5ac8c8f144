//! Linear layers: packed weights, and the three GEMMs of forward and backward.

use super::Cpu;
use super::matmul::pack::{Packed, PackedShape, TokenRows, pack_tokens, pack_weight};
use super::matmul::tile::Element;
use super::matmul::{self, DwChain, Out};
use super::memory::{Memory, Plain, Slice, SliceMut, f32s, f32s_mut, floats, floats_mut};
use super::pool::Disjoint;
use super::simd::{LANES, bf16_per_unit, multiversion, widen};
use super::vector::clear;
use crate::backend::{LinearGrads, LinearOps, LowRankOps};
use crate::{Buffer, DType, Result, Weight, shapes};

/// A weight packed for the register tile.
struct Packs {
    /// Elements per unit of bf16, at the instruction set it is packed for.
    bf16_per_unit: usize,
    /// For `y = x · wᵀ`.
    forward: Memory,
    /// For `dx = dy · w`.
    backward: Option<Memory>,
}

fn packs(w: &Weight) -> &Packs {
    w.data().downcast_ref().expect("a weight of the CPU backend")
}

/// The packed weight for `x · wᵀ`.
pub fn forward_pack<E: Element<Unit: Plain>>(w: &Weight) -> Packed<'_, E> {
    let (shape, per_unit) = (PackedShape { n: w.n, k: w.k }, per_unit(w));
    Packed::new(shape, per_unit, packs(w).forward.slice(shape.storage(per_unit)))
}

/// The packed weight for `dy · w`.
pub fn backward_pack<E: Element<Unit: Plain>>(w: &Weight) -> Packed<'_, E> {
    let (shape, per_unit) = (PackedShape { n: w.k, k: w.n }, per_unit(w));
    let pack = packs(w).backward.as_ref().expect("the weight was made for training");
    Packed::new(shape, per_unit, pack.slice(shape.storage(per_unit)))
}

/// Elements per four-byte unit.
fn per_unit(w: &Weight) -> usize {
    if w.compute == DType::Bf16 { packs(w).bf16_per_unit } else { 1 }
}

/// Whether the weight belongs to this backend and its memory fits its shape; with `backward`, for `linear_dx`, too.
pub(super) fn holds(w: &Weight, backward: bool) -> bool {
    let Some(packs) = w.data().downcast_ref::<Packs>() else { return false };
    let units = |n, k| PackedShape { n, k }.storage(per_unit(w));
    let back = || packs.backward.as_ref().is_some_and(|m| m.has_room(units(w.k, w.n), 4));
    w.compute.is_float() && packs.forward.has_room(units(w.n, w.k), 4) && (!backward || back())
}

impl LowRankOps for Cpu {}

impl LinearOps for Cpu {
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight> {
        shapes::weight(self, n, k, dtype)?;
        let bf16_per_unit = bf16_per_unit(self.level);
        let per_unit = if dtype == DType::Bf16 { bf16_per_unit } else { 1 };
        let room = |shape: PackedShape| self.arena.take_lasting(4 * shape.storage(per_unit));
        let forward = room(PackedShape { n, k })?;
        let backward = if backward { Some(room(PackedShape { n: k, k: n })?) } else { None };
        Ok(Weight::new(n, k, dtype, Box::new(Packs { bf16_per_unit, forward, backward })))
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        shapes::load_weight(self, master, weight)?;
        let (n, k, dtype) = (weight.n, weight.k, weight.compute);
        let packs: &mut Packs = weight.data_mut().downcast_mut().expect("a weight of the CPU backend");
        match dtype {
            DType::Bf16 => pack_both::<u16>(self, f32s(master), n, k, packs),
            _ => pack_both::<f32>(self, f32s(master), n, k, packs),
        }
        Ok(())
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        shapes::linear(self, x, w, bias, y)?;
        assert!(x.dtype() == w.compute && y.len() == x.len() / w.k * w.n);
        let bias = bias.map(f32s);
        match floats(x) {
            Slice::F32(x) => matmul::linear(self.level, &self.pool, x, forward_pack(w), bias, out(y)),
            Slice::Bf16(x) => matmul::linear(self.level, &self.pool, x, forward_pack(w), bias, out(y)),
        }
        Ok(())
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        shapes::linear_dx(self, dy, w, dx)?;
        assert!(dy.dtype() == w.compute && dx.len() == dy.len() / w.n * w.k);
        match floats(dy) {
            Slice::F32(dy) => matmul::linear(self.level, &self.pool, dy, backward_pack(w), None, out(dx)),
            Slice::Bf16(dy) => matmul::linear(self.level, &self.pool, dy, backward_pack(w), None, out(dx)),
        }
        Ok(())
    }
    fn linear_dw(&self, dy: &Buffer, x: &Buffer, tokens: usize, mut grads: LinearGrads<'_>) -> Result<()> {
        shapes::linear_dw(self, dy, x, tokens, &grads)?;
        if !grads.add {
            clear(self, [grads.weight.as_deref_mut(), grads.bias.as_deref_mut()])?;
        }
        if tokens == 0 {
            return Ok(());
        }
        assert_eq!(dy.dtype(), x.dtype());
        if let Some(dw) = grads.weight {
            match (floats(dy), floats(x)) {
                (Slice::F32(dy), Slice::F32(x)) => accumulate(self, dy, x, tokens, f32s_mut(dw))?,
                (Slice::Bf16(dy), Slice::Bf16(x)) => accumulate(self, dy, x, tokens, f32s_mut(dw))?,
                _ => unreachable!("asserted above"),
            }
        }
        if let Some(dbias) = grads.bias {
            let sums = Disjoint::new(f32s_mut(dbias));
            let n = dy.len() / tokens;
            self.pool.ranges(n.div_ceil(LANES), 4, |r| {
                for at in r.map(|i| i * LANES) {
                    let lanes = (n - at).min(LANES);
                    // SAFETY: each task has its own columns.
                    let sums = unsafe { sums.part(at, lanes) };
                    match floats(dy) {
                        Slice::F32(dy) => sum_columns(self.level, dy, n, at, sums),
                        Slice::Bf16(dy) => sum_columns_bf16(dy, n, at, sums),
                    }
                }
            });
        }
        Ok(())
    }
}

fn pack_both<E: TokenRows<Unit: Plain>>(cpu: &Cpu, master: &[f32], n: usize, k: usize, packs: &mut Packs) {
    let (there, back) = (PackedShape { n, k }, PackedShape { n: k, k: n });
    let per_unit = E::per_unit_at(cpu.level);
    let forward = packs.forward.slice_mut(there.storage(per_unit));
    let backward = packs.backward.as_mut().map(|b| b.slice_mut(back.storage(per_unit)));
    pack_weight::<E>(cpu.level, &cpu.pool, master, there, forward, backward);
}

fn out(y: &mut Buffer) -> Out<'_> {
    match floats_mut(y) {
        SliceMut::F32(y) => Out::F32(y),
        SliceMut::Bf16(y) => Out::Bf16(y),
    }
}

fn accumulate<E: TokenRows<Unit: Plain>>(
    cpu: &Cpu,
    dy: &[E],
    x: &[E],
    tokens: usize,
    dw: &mut [f32],
) -> Result<()> {
    let shape = PackedShape { n: x.len() / tokens, k: tokens };
    let per_unit = E::per_unit_at(cpu.level);
    let mut packed = cpu.arena.take(4 * shape.storage(per_unit))?;
    let packed = packed.slice_mut(shape.storage(per_unit));
    pack_tokens(cpu.level, &cpu.pool, x, shape, packed);
    matmul::accumulate_dw(cpu.level, &cpu.pool, dy, Packed::new(shape, per_unit, packed), DwChain::WHOLE, dw);
    Ok(())
}

multiversion! {
    /// Adds the sums of columns `at..` over all rows, in row order, to `sums`.
    fn sum_columns<S>(s, dy: &[f32], n: usize, at: usize, sums: &mut [f32]) {
        let lanes = sums.len();
        let mut total = s.splat(0.0);
        for row in dy.chunks_exact(n) {
            // SAFETY: `lanes` columns are left from `at`.
            total = s.add(total, unsafe { s.load_first(lanes, row[at..].as_ptr(), 0.0) });
        }
        // SAFETY: `sums` holds `lanes` elements.
        unsafe { s.store_first(lanes, sums.as_mut_ptr(), s.add(s.load_first(lanes, sums.as_ptr(), 0.0), total)) }
    }
}

fn sum_columns_bf16(dy: &[u16], n: usize, at: usize, sums: &mut [f32]) {
    let mut total = [0f32; LANES];
    for row in dy.chunks_exact(n) {
        for (t, x) in total.iter_mut().zip(&row[at..at + sums.len()]) {
            *t += widen(*x);
        }
    }
    sums.iter_mut().zip(total).for_each(|(s, t)| *s += t);
}

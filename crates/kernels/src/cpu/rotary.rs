//! RoPE, in place on the queries and keys of `qkv` rows.

use super::Cpu;
use super::element::Stored;
use super::memory::{SliceMut, f32s, floats_mut, u32s};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use crate::backend::{Heads, RopeOps, Rotation};
use crate::{Buffer, Result, shapes};

/// Minimum elements per task.
const TASK: usize = 16 * 1024;

impl RopeOps for Cpu {
    fn rotary(&self, heads: Heads, rotation: Rotation<'_>, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        shapes::rotary(self, heads, rotation, qkv)?;
        let Rotation { dim, cos, sin, positions } = rotation;
        assert!(dim.is_multiple_of(2) && dim <= heads.head_dim);
        assert!(cos.len() == sin.len() && qkv.len() == positions.len() * heads.qkv_width());
        if dim == 0 {
            return Ok(());
        }
        let angles = Angles { heads, half: dim / 2, cos: f32s(cos), sin: f32s(sin), inverse };
        match floats_mut(qkv) {
            SliceMut::F32(x) => all_rows(self, angles, u32s(positions), x),
            SliceMut::Bf16(x) => all_rows(self, angles, u32s(positions), x),
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Angles<'a> {
    heads: Heads,
    half: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    inverse: bool,
}

fn all_rows<T: Stored>(cpu: &Cpu, angles: Angles<'_>, positions: &[u32], x: &mut [T]) {
    let width = angles.heads.qkv_width();
    let x = Disjoint::new(x);
    cpu.pool.ranges(positions.len(), TASK.div_ceil(width), |rows| {
        // SAFETY: ranges of rows do not overlap.
        let part = unsafe { x.part(rows.start * width, rows.len() * width) };
        rotate(cpu.level, angles, &positions[rows], part);
    });
}

multiversion! {
    fn rotate<S, type T: Stored>(s, angles: Angles<'_>, positions: &[u32], x: &mut [T]) {
        let Angles { heads, half, .. } = angles;
        let sign = s.splat(if angles.inverse { -1.0 } else { 1.0 });
        assert!(x.len() == positions.len() * heads.qkv_width() && 2 * half <= heads.head_dim);
        for row in 0..positions.len() {
            let at = positions[row] as usize * half;
            let (cos, sin) = (&angles.cos[at..at + half], &angles.sin[at..at + half]);
            for i in (0..half).step_by(LANES) {
                let n = (half - i).min(LANES);
                // SAFETY: n elements are left in the rows of the tables and in either half of a head.
                unsafe {
                    let c = f32::get(s, n, cos.as_ptr().add(i));
                    let d = s.mul(sign, f32::get(s, n, sin.as_ptr().add(i)));
                    let e = s.sub(s.splat(0.0), d);
                    for head in 0..heads.heads + heads.kv_heads {
                        let low = x.as_mut_ptr().add(row * heads.qkv_width() + head * heads.head_dim + i);
                        let high = low.add(half);
                        let (a, b) = (T::get(s, n, low), T::get(s, n, high));
                        T::put(s, n, low, s.fma(a, c, s.mul(b, e)));
                        T::put(s, n, high, s.fma(b, c, s.mul(a, d)));
                    }
                }
            }
        }
    }
}

//! Activations of the feed-forward network.

use super::Cpu;
use super::element::{Stored, get, put};
use super::math::sigmoid;
use super::memory::{SliceMut, floats_mut};
use super::pool::Disjoint;
use super::simd::{LANES, Simd, multiversion};
use super::vector::{row_count, rows_of_task, typed};
use crate::backend::{Activation, ActivationOps};
use crate::shapes::input_width;
use crate::{Buffer, Result, shapes};

/// `2 sqrt(2 / pi)`: `(1 + tanh(u)) / 2 = sigmoid(2 u)`, which keeps its precision far left of zero.
const TWO_ROOT: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Clamp of `|x|`: beyond it the activation is flat in f32, and the cubic must not overflow.
const FLAT: f32 = 32.0;

/// An activation `x * gate(x)` whose gate is a sigmoid.
trait GateCurve: Copy + Send + Sync + 'static {
    /// The factor of `x`.
    fn gate<S: Simd>(s: S, x: S::V) -> S::V;
    /// `x` times the derivative of the sigmoid's argument.
    fn slope<S: Simd>(s: S, x: S::V) -> S::V;
}

#[derive(Clone, Copy)]
struct Silu;

impl GateCurve for Silu {
    #[inline(always)]
    fn gate<S: Simd>(s: S, x: S::V) -> S::V {
        sigmoid(s, x)
    }
    #[inline(always)]
    fn slope<S: Simd>(_: S, x: S::V) -> S::V {
        x
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Gelu {
    #[inline(always)]
    fn bounded<S: Simd>(s: S, x: S::V) -> S::V {
        s.min(s.splat(FLAT), s.max(s.splat(-FLAT), x))
    }
}

impl GateCurve for Gelu {
    #[inline(always)]
    fn gate<S: Simd>(s: S, x: S::V) -> S::V {
        let x = Self::bounded(s, x);
        let bend = s.fma(s.mul(x, x), s.splat(CUBIC), s.splat(1.0));
        sigmoid(s, s.mul(s.mul(x, s.splat(TWO_ROOT)), bend))
    }
    #[inline(always)]
    fn slope<S: Simd>(s: S, x: S::V) -> S::V {
        let x = Self::bounded(s, x);
        let bend = s.fma(s.mul(x, x), s.splat(3.0 * CUBIC), s.splat(1.0));
        s.mul(s.mul(x, s.splat(TWO_ROOT)), bend)
    }
}

/// Value and derivative of an activation.
#[inline(always)]
fn both<S: Simd, C: GateCurve>(s: S, x: S::V) -> (S::V, S::V) {
    let gate = C::gate(s, x);
    let fall = s.sub(s.splat(1.0), gate);
    let derivative = s.fma(s.mul(gate, fall), C::slope(s, x), gate);
    (s.mul(x, gate), derivative)
}

impl ActivationOps for Cpu {
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::activation(self, op, width, x, y)?;
        let (rows, inputs) = (row_count(y.len(), width), input_width(op, width));
        assert_eq!(x.len(), rows * inputs);
        typed!([ref x, mut y] {
            let y = Disjoint::new(y);
            self.pool.ranges(rows, rows_of_task(inputs), |r| {
                // SAFETY: tasks have disjoint rows.
                let y = unsafe { y.part(r.start * width, r.len() * width) };
                let x = &x[r.start * inputs..r.end * inputs];
                match op {
                    Activation::SiluGated => gated::<_, _, Silu>(self.level, width, x, y),
                    Activation::GeluGated => gated::<_, _, Gelu>(self.level, width, x, y),
                    Activation::Gelu => plain::<_, _, Gelu>(self.level, x, y),
                }
            })
        });
        Ok(())
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
        let (rows, inputs) = (row_count(dy.len(), width), input_width(op, width));
        assert!(x.len() == rows * inputs && dx.len() == x.len());
        typed!([ref x, ref dy, mut dx] {
            let dx = Disjoint::new(dx);
            self.pool.ranges(rows, rows_of_task(inputs), |r| {
                // SAFETY: tasks have disjoint rows.
                let dx = unsafe { dx.part(r.start * inputs, r.len() * inputs) };
                let (x, dy) = (&x[r.start * inputs..r.end * inputs], &dy[r.start * width..r.end * width]);
                match op {
                    Activation::SiluGated => gated_backward::<_, _, _, Silu>(self.level, width, x, dy, dx),
                    Activation::GeluGated => gated_backward::<_, _, _, Gelu>(self.level, width, x, dy, dx),
                    Activation::Gelu => plain_backward::<_, _, _, Gelu>(self.level, x, dy, dx),
                }
            })
        });
        Ok(())
    }
    fn activation_recompute(
        &self,
        op: Activation,
        width: usize,
        x: &mut Buffer,
        dy: &mut Buffer,
    ) -> Result<()> {
        shapes::activation_recompute(self, op, width, x, dy)?;
        assert_eq!(x.len(), row_count(dy.len(), width) * input_width(op, width));
        match (floats_mut(x), floats_mut(dy)) {
            (SliceMut::F32(x), SliceMut::F32(dy)) => recompute(self, op, width, x, dy),
            (SliceMut::Bf16(x), SliceMut::Bf16(dy)) => recompute(self, op, width, x, dy),
            _ => panic!("an activation and its gradient have one type"),
        }
        Ok(())
    }
}

multiversion! {
    fn gated<S, type T: Stored, type U: Stored, type C: GateCurve>(s, width: usize, x: &[T], y: &mut [U]) {
        for r in 0..y.len() / width {
            let (gates, ups) = x[2 * r * width..][..2 * width].split_at(width);
            let y = &mut y[r * width..][..width];
            for i in (0..width).step_by(LANES) {
                let g = get(s, gates, i);
                put(s, y, i, s.mul(s.mul(g, C::gate(s, g)), get(s, ups, i)));
            }
        }
    }
}

multiversion! {
    fn plain<S, type T: Stored, type U: Stored, type C: GateCurve>(s, x: &[T], y: &mut [U]) {
        for i in (0..x.len()).step_by(LANES) {
            let v = get(s, x, i);
            put(s, y, i, s.mul(v, C::gate(s, v)));
        }
    }
}

multiversion! {
    fn gated_backward<S, type T: Stored, type D: Stored, type U: Stored, type C: GateCurve>(s, width: usize, x: &[T], dy: &[D], dx: &mut [U]) {
        for r in 0..dy.len() / width {
            let (gates, ups) = x[2 * r * width..][..2 * width].split_at(width);
            let (dgates, dups) = dx[2 * r * width..][..2 * width].split_at_mut(width);
            let dy = &dy[r * width..][..width];
            for i in (0..width).step_by(LANES) {
                let d = get(s, dy, i);
                let (value, derivative) = both::<S, C>(s, get(s, gates, i));
                put(s, dgates, i, s.mul(s.mul(d, get(s, ups, i)), derivative));
                put(s, dups, i, s.mul(d, value));
            }
        }
    }
}

multiversion! {
    fn plain_backward<S, type T: Stored, type D: Stored, type U: Stored, type C: GateCurve>(s, x: &[T], dy: &[D], dx: &mut [U]) {
        for i in (0..x.len()).step_by(LANES) {
            let (_, derivative) = both::<S, C>(s, get(s, x, i));
            put(s, dx, i, s.mul(get(s, dy, i), derivative));
        }
    }
}

fn recompute<T: Stored>(cpu: &Cpu, op: Activation, width: usize, x: &mut [T], dy: &mut [T]) {
    let (rows, inputs) = (row_count(dy.len(), width), input_width(op, width));
    let (x, dy) = (Disjoint::new(x), Disjoint::new(dy));
    cpu.pool.ranges(rows, rows_of_task(inputs), |r| {
        // SAFETY: tasks have disjoint rows.
        let x = unsafe { x.part(r.start * inputs, r.len() * inputs) };
        // SAFETY: as above.
        let dy = unsafe { dy.part(r.start * width, r.len() * width) };
        match op {
            Activation::SiluGated => gated_recompute::<_, Silu>(cpu.level, width, x, dy),
            Activation::GeluGated => gated_recompute::<_, Gelu>(cpu.level, width, x, dy),
            Activation::Gelu => plain_recompute::<_, Gelu>(cpu.level, x, dy),
        }
    })
}

multiversion! {
    fn gated_recompute<S, type T: Stored, type C: GateCurve>(s, width: usize, x: &mut [T], dy: &mut [T]) {
        for r in 0..dy.len() / width {
            let (gates, ups) = x[2 * r * width..][..2 * width].split_at_mut(width);
            let dy = &mut dy[r * width..][..width];
            for i in (0..width).step_by(LANES) {
                let (d, up) = (get(s, dy, i), get(s, ups, i));
                let (value, derivative) = both::<S, C>(s, get(s, gates, i));
                put(s, dy, i, s.mul(value, up));
                put(s, gates, i, s.mul(s.mul(d, up), derivative));
                put(s, ups, i, s.mul(d, value));
            }
        }
    }
}

multiversion! {
    fn plain_recompute<S, type T: Stored, type C: GateCurve>(s, x: &mut [T], dy: &mut [T]) {
        for i in (0..x.len()).step_by(LANES) {
            let (d, (value, derivative)) = (get(s, dy, i), both::<S, C>(s, get(s, x, i)));
            put(s, dy, i, value);
            put(s, x, i, s.mul(d, derivative));
        }
    }
}

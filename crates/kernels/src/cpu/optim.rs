//! AdamW (f32 and 8-bit) and SGD steps.

use super::Cpu;
use super::element::{get, put};
use super::memory::{f32s, f32s_mut, u8s_mut};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{PIECE, part};
use crate::backend::{AdamW, AdamWParam, LinearOps, OptimizerOps, Sgd};
use crate::codes::{BLOCK, CodeTable, SIGNED, UNSIGNED, inverse};
use crate::{Buffer, Result, shapes};
use std::ops::Range;

/// AdamW factors that are constant over a step.
#[derive(Clone, Copy)]
struct AdamFactors {
    grad_scale: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    root_correction: f32,
    eps: f32,
    step_size: f32,
}

impl AdamFactors {
    fn of(op: AdamW) -> Self {
        let (lr, beta1, beta2) = (op.lr, op.beta1, op.beta2);
        AdamFactors {
            grad_scale: op.grad_scale,
            keep: (1.0 - lr * op.weight_decay) as f32,
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            root_correction: (1.0 - power(beta2, op.step)).sqrt() as f32,
            eps: op.eps as f32,
            step_size: (lr / (1.0 - power(beta1, op.step))) as f32,
        }
    }
}

/// `x^n` by repeated squaring, the same on every system.
fn power(mut x: f64, mut n: u64) -> f64 {
    let mut result = 1.0;
    while n > 0 {
        if n & 1 == 1 {
            result *= x;
        }
        x *= x;
        n >>= 1;
    }
    result
}

/// Runs `f` on disjoint pieces of `range`.
fn pieces(cpu: &Cpu, range: Range<usize>, f: impl Fn(Range<usize>) + Sync) {
    cpu.pool.ranges(range.len(), PIECE, |r| f(range.start + r.start..range.start + r.end));
}

/// Steps elements `range` of a parameter and its moments.
fn adamw_range(cpu: &Cpu, of: &mut AdamWParam<'_>, range: Range<usize>) -> Result<()> {
    let AdamWParam { op, param, grad, first, second, .. } = of;
    assert!(op.step > 0, "AdamW's steps are counted from 1");
    let n = param.len();
    assert!(range.end <= n && grad.len() == n && first.len() == n && second.len() == n);
    let (factors, grad) = (AdamFactors::of(*op), f32s(grad));
    let param = Disjoint::new(f32s_mut(param));
    let (first, second) = (Disjoint::new(f32s_mut(first)), Disjoint::new(f32s_mut(second)));
    pieces(cpu, range, |r| {
        // SAFETY: pieces do not overlap.
        let (w, m, v) = unsafe { (part(&param, &r), part(&first, &r), part(&second, &r)) };
        adamw_piece(cpu.level, factors, w, &grad[r], m, v);
    });
    Ok(())
}

/// The same with 8-bit moments; the range consists of whole blocks.
fn adamw8_range(cpu: &Cpu, of: &mut AdamWParam<'_>, range: Range<usize>) {
    let (factors, grad) = (AdamFactors::of(of.op), f32s(of.grad));
    let Some([absmax1, absmax2]) = &mut of.absmax else { panic!("codes come with their magnitudes") };
    let param = Disjoint::new(f32s_mut(of.param));
    let (first, second) = (Disjoint::new(u8s_mut(of.first)), Disjoint::new(u8s_mut(of.second)));
    let (absmax1, absmax2) = (Disjoint::new(f32s_mut(absmax1)), Disjoint::new(f32s_mut(absmax2)));
    pieces(cpu, range, |piece| {
        for start in piece.clone().step_by(BLOCK) {
            let (r, at) = (start..(start + BLOCK).min(piece.end), start / BLOCK);
            // SAFETY: pieces consist of whole blocks and do not overlap.
            let (w, codes) = unsafe { (part(&param, &r), [part(&first, &r), part(&second, &r)]) };
            // SAFETY: as above; each block has its own element.
            let absmax = unsafe { [part(&absmax1, &(at..at + 1)), part(&absmax2, &(at..at + 1))] };
            let (mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK]);
            let (m, v) = (&mut m[..r.len()], &mut v[..r.len()]);
            let [codes1, codes2] = codes;
            m.iter_mut().zip(&*codes1).for_each(|(x, &c)| *x = SIGNED.values[c as usize] * absmax[0][0]);
            v.iter_mut().zip(&*codes2).for_each(|(x, &c)| *x = UNSIGNED.values[c as usize] * absmax[1][0]);
            adamw_piece(cpu.level, factors, w, &grad[r], m, v);
            absmax[0][0] = encode(&SIGNED, m, codes1);
            absmax[1][0] = encode(&UNSIGNED, v, codes2);
            // Rounded to zero, it would make a later step divide by almost nothing.
            codes2.iter_mut().zip(&*v).for_each(|(c, &x)| *c = (*c).max(u8::from(x > 0.0)));
        }
    });
}

/// Quantises a block; returns its absmax.
fn encode(table: &CodeTable, values: &[f32], codes: &mut [u8]) -> f32 {
    let absmax = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let factor = inverse(absmax);
    codes.iter_mut().zip(values).for_each(|(c, &x)| *c = table.code(x * factor));
    absmax
}

multiversion! {
    fn adamw_piece<S>(s, f: AdamFactors, param: &mut [f32], grad: &[f32], first: &mut [f32], second: &mut [f32]) {
        let (scale, keep, step) = (s.splat(f.grad_scale), s.splat(f.keep), s.splat(-f.step_size));
        let (beta1, rest1) = (s.splat(f.beta1), s.splat(f.rest1));
        let (beta2, rest2) = (s.splat(f.beta2), s.splat(f.rest2));
        let (correction, eps) = (s.splat(f.root_correction), s.splat(f.eps));
        for i in (0..grad.len()).step_by(LANES) {
            let g = s.mul(scale, get(s, grad, i));
            let m = s.fma(beta1, get(s, first, i), s.mul(rest1, g));
            let v = s.fma(beta2, get(s, second, i), s.mul(rest2, s.mul(g, g)));
            let w = s.mul(keep, get(s, param, i));
            let denominator = s.add(s.div(s.sqrt(v), correction), eps);
            put(s, first, i, m);
            put(s, second, i, v);
            put(s, param, i, s.fma(step, s.div(m, denominator), w));
        }
    }
}

impl OptimizerOps for Cpu {
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        shapes::adamw(self, params)?;
        for p in params {
            for range in p.ranges {
                match p.absmax {
                    Some(_) => adamw8_range(self, p, range.clone()),
                    None => adamw_range(self, p, range.clone())?,
                }
            }
            if let Some(weight) = p.derived.as_deref_mut() {
                self.load_weight(p.param, weight)?;
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
        let n = param.len();
        assert!(range.end <= n && grad.len() == n && velocity.as_ref().is_none_or(|v| v.len() == n));
        assert!(op.momentum == 0.0 || velocity.is_some(), "momentum needs a velocity");
        let (grad, param) = (f32s(grad), Disjoint::new(f32s_mut(param)));
        let velocity = velocity.filter(|_| op.momentum != 0.0).map(|v| Disjoint::new(f32s_mut(v)));
        pieces(self, range, |r| {
            // SAFETY: pieces do not overlap.
            let (w, v) = unsafe { (part(&param, &r), velocity.as_ref().map(|v| part(v, &r))) };
            sgd_piece(self.level, op, w, &grad[r], v);
        });
        Ok(())
    }
}

multiversion! {
    fn sgd_piece<S>(s, op: Sgd, param: &mut [f32], grad: &[f32], velocity: Option<&mut [f32]>) {
        let (scale, decay) = (s.splat(op.grad_scale), s.splat(op.weight_decay as f32));
        let (momentum, step) = (s.splat(op.momentum as f32), s.splat(-op.lr as f32));
        match velocity {
            Some(velocity) => {
                for i in (0..grad.len()).step_by(LANES) {
                    let w = get(s, param, i);
                    let g = s.fma(decay, w, s.mul(scale, get(s, grad, i)));
                    let v = s.fma(momentum, get(s, velocity, i), g);
                    put(s, velocity, i, v);
                    put(s, param, i, s.fma(step, v, w));
                }
            }
            None => {
                for i in (0..grad.len()).step_by(LANES) {
                    let w = get(s, param, i);
                    let g = s.fma(decay, w, s.mul(scale, get(s, grad, i)));
                    put(s, param, i, s.fma(step, g, w));
                }
            }
        }
    }
}

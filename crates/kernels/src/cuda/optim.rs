//! Updates of parameters from their gradients.

use super::context::Cuda;
use super::halves::Whole;
use super::launch::args;
use super::linear::form;
use super::memory::{element, halves, letter};
use crate::backend::{AdamW, Sgd};
use crate::buffer::{Buffer, DType, Weight};
use crate::error::Result;
use std::ops::Range;

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

fn all_f32(buffers: &[&Buffer], len: usize) -> bool {
    buffers.iter().all(|b| b.dtype() == DType::F32 && b.len() == len)
}

/// Elements `range` of a parameter, of its state, and of the form derived from it where there is one.
pub fn adamw(
    cuda: &Cuda,
    op: AdamW,
    range: Range<usize>,
    param: &mut Buffer,
    grad: &Buffer,
    first: &mut Buffer,
    second: &mut Buffer,
    derived: Option<&mut Weight>,
) -> Result<()> {
    assert!(op.step > 0, "AdamW's steps are counted from 1");
    let n = param.len();
    assert!(range.end <= n && all_f32(&[param, grad, first, second], n));
    let at = range.start;
    let dtype = derived.as_ref().map_or(DType::F32, |w| w.dtype);
    let derived = derived.map_or(0, |w| {
        assert_eq!(w.n * w.k, n);
        form(w) + (at * dtype.size()) as u64
    });
    // In halves, the upper ones are what is derived.
    let (name, [whole_or_lower, derived]) = match halves(param, at) {
        Some(halves) => ("adamw_halves".into(), halves),
        None => (format!("adamw_{}", letter(dtype)), [element(param, at), derived]),
    };
    let args = args![
        whole_or_lower,
        element(grad, at),
        element(first, at),
        element(second, at),
        derived,
        range.len(),
        op.grad_scale,
        (1.0 - op.lr * op.weight_decay) as f32,
        op.beta1 as f32,
        (1.0 - op.beta1) as f32,
        op.beta2 as f32,
        (1.0 - op.beta2) as f32,
        (1.0 - power(op.beta2, op.step)).sqrt() as f32,
        op.eps as f32,
        (op.lr / (1.0 - power(op.beta1, op.step))) as f32
    ];
    cuda.launch_flat("optim", &name, range.len().div_ceil(8), &args)
}

/// Elements `range` of a parameter and of its velocity (absent without momentum).
pub fn sgd(
    cuda: &Cuda,
    op: Sgd,
    range: Range<usize>,
    param: &mut Buffer,
    grad: &Buffer,
    velocity: Option<&mut Buffer>,
) -> Result<()> {
    let n = param.len();
    assert!(range.end <= n && all_f32(&[param, grad], n));
    assert!(op.momentum == 0.0 || velocity.is_some(), "momentum needs a velocity");
    let velocity = velocity.filter(|_| op.momentum != 0.0);
    let velocity = velocity.map_or(0, |v| {
        assert!(all_f32(&[v], n));
        element(v, range.start)
    });
    let whole = Whole::of(cuda, param, range.start, range.len())?;
    let args = args![
        whole.ptr(),
        element(grad, range.start),
        velocity,
        range.len(),
        op.grad_scale,
        op.weight_decay as f32,
        op.momentum as f32,
        op.lr as f32
    ];
    cuda.launch_flat("optim", "sgd", range.len(), &args)?;
    whole.put_back(cuda, param, range.start, range.len())
}

//! The middle of a feed-forward network.

use super::context::Cuda;
use super::launch::args;
use super::memory::kernel;
use super::vector::row_count;
use crate::backend::Activation;
use crate::buffer::Buffer;
use crate::error::Result;

fn name(op: Activation) -> &'static str {
    match op {
        Activation::SiluGated => "silu_gated",
        Activation::GeluGated => "gelu_gated",
        Activation::Gelu => "gelu",
    }
}

/// Elements of a row of `x`, for rows of `width` of `y`.
fn input_width(op: Activation, width: usize) -> usize {
    if op == Activation::Gelu { width } else { 2 * width }
}

/// Threads for so many elements of `y`.
fn threads(op: Activation, width: usize, elements: usize) -> usize {
    if op != Activation::Gelu && width.is_multiple_of(4) { elements / 4 } else { elements }
}

/// `x` is `[rows, 2 * width]` for the gated ones (all gates of a row, then all ups), else `[rows, width]`.
pub fn activation(cuda: &Cuda, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
    let rows = row_count(y.len(), width);
    assert_eq!(x.len(), rows * input_width(op, width));
    let args = args![x, &*y, rows, width as u32];
    cuda.launch_flat("activation", &kernel(name(op), &[x, y]), threads(op, width, y.len()), &args)
}

/// Writes `dx`.
pub fn activation_backward(
    cuda: &Cuda,
    op: Activation,
    width: usize,
    x: &Buffer,
    dy: &Buffer,
    dx: &mut Buffer,
) -> Result<()> {
    let rows = row_count(dy.len(), width);
    assert!(x.len() == rows * input_width(op, width) && dx.len() == x.len());
    let args = args![x, dy, &*dx, rows, width as u32];
    let kernel = kernel(&format!("{}_backward", name(op)), &[x, dy, dx]);
    cuda.launch_flat("activation", &kernel, threads(op, width, dy.len()), &args)
}

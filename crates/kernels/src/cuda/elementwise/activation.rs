//! Activations of the feed-forward network.

use crate::backend::{Activation, ActivationOps};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::row_count;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::kernel;
use crate::shapes::input_width;
use crate::{Buffer, Result, shapes};

fn name(op: Activation) -> &'static str {
    match op {
        Activation::SiluGated => "silu_gated",
        Activation::GeluGated => "gelu_gated",
        Activation::Gelu => "gelu",
    }
}

/// Gated: a block per range of a row, eight elements per thread; else one element per thread.
fn grid(op: Activation, rows: usize, width: usize) -> Grid {
    match op {
        Activation::Gelu => Grid::new((rows * width).div_ceil(256), 256),
        _ => Grid::plane(rows, width.div_ceil(8 * 128), 128),
    }
}

impl ActivationOps for Cuda {
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::activation(self, op, width, x, y)?;
        let rows = row_count(y.len(), width);
        assert_eq!(x.len(), rows * input_width(op, width));
        let args = args![x, &*y, rows, width as u32];
        self.launch("activation", &kernel(name(op), &[x, y]), grid(op, rows, width).early(), &args)
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
        let rows = row_count(dy.len(), width);
        assert!(x.len() == rows * input_width(op, width) && dx.len() == x.len());
        let args = args![x, dy, &*dx, rows, width as u32];
        let kernel = kernel(&format!("{}_backward", name(op)), &[x, dy, dx]);
        self.launch("activation", &kernel, grid(op, rows, width), &args)
    }
    fn activation_recompute(
        &self,
        op: Activation,
        width: usize,
        x: &mut Buffer,
        dy: &mut Buffer,
    ) -> Result<()> {
        shapes::activation_recompute(self, op, width, x, dy)?;
        let rows = row_count(dy.len(), width);
        assert_eq!(x.len(), rows * input_width(op, width));
        assert_eq!(x.dtype(), dy.dtype(), "an activation and its gradient have one type");
        let kernel = kernel(&format!("{}_recompute", name(op)), &[x]);
        self.launch("activation", &kernel, grid(op, rows, width), &args![&*x, &*dy, rows, width as u32])
    }
}

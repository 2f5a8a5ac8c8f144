//! RMSNorm and LayerNorm of rows.

pub(crate) mod head_norm;

use crate::backend::{MemoryOps, Norm, NormGrads, NormInput, NormOps, NormRecompute, Normed, Target};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{CHUNK, Chunks, add_chunks, row_count};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel};
use crate::{Buffer, DType, Result, shapes};

/// Threads per block with a row, or per team of a block.
const THREADS: u32 = 128;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("THREADS", THREADS as usize), ("TEAM", THREADS as usize)];

/// One block per row.
fn grid(rows: usize) -> Grid {
    Grid::new(rows, THREADS)
}

/// Added to a weight before use (1 for Gemma's convention).
pub(crate) fn offset(op: Norm) -> f32 {
    if op.plus_one { 1.0 } else { 0.0 }
}

fn check(norm: Normed<'_>) {
    let fits = |b: &Buffer| b.dtype() == DType::F32 && b.len() == norm.op.width;
    assert!(fits(norm.weight) && norm.bias.is_none_or(fits));
}

impl NormOps for Cuda {
    fn norm(&self, norm: Normed<'_>, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::norm(self, norm, x, y)?;
        check(norm);
        let Normed { op, weight, bias } = norm;
        assert_eq!(x.len(), y.len());
        let rows = row_count(x.len(), op.width);
        let args = args![x, weight, bias, &*y, op.width as u32, op.centred, offset(op), op.eps];
        self.launch("norm", &kernel("norm", &[x, y]), grid(rows).early(), &args)
    }
    fn add_norm(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        delta: &Buffer,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::add_norm(self, norm, x, delta, [sum, y])?;
        check(norm);
        let Normed { op, weight, bias } = norm;
        assert!(x.len() == delta.len() && x.len() == sum.len() && x.len() == y.len());
        let rows = row_count(x.len(), op.width);
        let args =
            args![x, delta, weight, bias, f32_ptr(sum), &*y, op.width as u32, op.centred, offset(op), op.eps];
        self.launch("norm", &kernel("add_norm", &[x, delta, y]), grid(rows).early(), &args)
    }
    fn norm_backward(
        &self,
        norm: Normed<'_>,
        dy: &Buffer,
        x: &Buffer,
        dx: Target<'_>,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        let Target { to: dx, add } = dx;
        shapes::norm_backward(self, norm, dy, x, dx, &grads)?;
        check(norm);
        let Normed { op, weight, .. } = norm;
        assert!(x.len() == dy.len() && x.len() == dx.len());
        let (rows, width) = (row_count(x.len(), op.width), op.width);
        if fits_registers(op, x, dx) {
            let of = NormInput { x, delta: None };
            return in_registers(self, norm, of, dy, NormOutputs { dx, add, y: None, rounded: None }, grads);
        }
        let sums = grads.weight.is_some() || grads.bias.is_some();
        let stats = if sums { Some(self.arena.take(rows * 8)?) } else { None };
        let at = stats.as_ref().map_or(0, |s| s.ptr());
        let args = args![dy, x, weight, &*dx, width as u32, op.centred, offset(op), op.eps, add, at];
        self.launch("norm", &kernel("norm_backward", &[dy, x, dx]), grid(rows), &args)?;
        if !sums {
            return Ok(());
        }
        let chunks = rows.div_ceil(CHUNK);
        let partial = self.arena.take(2 * chunks * width * 4)?;
        let (first, second) = (partial.ptr(), partial.ptr() + (chunks * width * 4) as u64);
        let of = |wanted: bool, at: u64| if wanted { at } else { 0 };
        let args = args![
            dy,
            x,
            at,
            rows as u32,
            width as u32,
            CHUNK as u32,
            of(grads.weight.is_some(), first),
            of(grads.bias.is_some(), second)
        ];
        let grid = Grid::plane(width.div_ceil(128), chunks, 128);
        self.launch("norm", &kernel("norm_sums", &[dy, x]), grid, &args)?;
        for (from, to) in [(first, grads.weight), (second, grads.bias)] {
            if let Some(to) = to {
                assert_eq!(to.len(), width);
                let sums = Chunks { at: from, stride: width, count: chunks, width };
                add_chunks(self, sums, (f32_ptr(to), grads.add))?;
            }
        }
        Ok(())
    }
    fn norm_recompute(&self, norm: Normed<'_>, of: NormInput<'_>, backward: NormRecompute<'_>) -> Result<()> {
        shapes::norm_recompute(self, norm, of, &backward)?;
        check(norm);
        let NormInput { x, delta } = of;
        let NormRecompute { dy, y, dx, rounded, grads } = backward;
        assert!(x.len() == dy.len() && x.len() == dx.len());
        if fits_registers(norm.op, x, dx) && y.dtype() == dy.dtype() {
            let outputs = NormOutputs { dx, add: true, y: Some(&*y), rounded: rounded.as_deref() };
            return in_registers(self, norm, of, dy, outputs, grads);
        }
        let mut sum = delta.map(|_| self.arena.buffer(DType::F32, x.len())).transpose()?;
        match (delta, &mut sum) {
            (Some(delta), Some(sum)) => self.add_norm(norm, x, delta, sum, y)?,
            _ => self.norm(norm, x, y)?,
        }
        let dx_sum = Target { to: &mut *dx, add: true };
        self.norm_backward(norm, dy, sum.as_ref().unwrap_or(x), dx_sum, grads)?;
        rounded.map_or(Ok(()), |rounded| self.copy(dx, 0, rounded, 0, dx.len()))
    }
}

/// Maximum width of the backward that keeps rows in registers.
const WIDEST: usize = 2048;

/// Whether the one-pass backward applies.
fn fits_registers(op: Norm, x: &Buffer, dx: &Buffer) -> bool {
    let stream = x.dtype() == DType::F32 && dx.dtype() == DType::F32;
    stream && op.width.is_multiple_of(4) && op.width <= WIDEST
}

/// Outputs of the one-pass backward; `dx` is accumulated with `add`.
struct NormOutputs<'a> {
    dx: &'a Buffer,
    add: bool,
    y: Option<&'a Buffer>,
    rounded: Option<&'a Buffer>,
}

/// One-pass backward of the residual stream's norms, with the recomputed output and a rounded `dx` if requested.
fn in_registers(
    cuda: &Cuda,
    norm: Normed<'_>,
    of: NormInput<'_>,
    dy: &Buffer,
    outputs: NormOutputs<'_>,
    grads: NormGrads<'_>,
) -> Result<()> {
    let (op, NormOutputs { dx, add, y, rounded }) = (norm.op, outputs);
    let (rows, width) = (row_count(of.x.len(), op.width), op.width);
    let typed = [of.delta, y, rounded];
    assert!(typed.iter().flatten().all(|b| b.dtype() == dy.dtype() && b.len() == dy.len()));
    // One block per multiprocessor, with as many teams as its registers hold rows for.
    let vectors = width.div_ceil(4 * THREADS as usize);
    let teams = [8, 5, 4, 3][vectors - 1];
    let blocks = rows.div_ceil(teams).min(cuda.card.processors as usize);
    let with_bias = grads.bias.is_some();
    let wanted = grads.weight.is_some() || with_bias;
    let sums = if wanted { Some(cuda.arena.take(blocks * 2 * width * 4)?) } else { None };
    let at = sums.as_ref().map_or(0, |s| s.ptr());
    let mut all = args![dy, of.x, of.delta, norm.weight, norm.bias, dx, y, rounded].to_vec();
    all.extend(args![rows as u32, width as u32, offset(op), op.eps, add, at]);
    let (centred, bias) = (u32::from(op.centred), u32::from(with_bias));
    let defines = format!("VECTORS={vectors} TEAMS={teams} CENTRED={centred} BIAS={bias}");
    let shared = if wanted { (1 + usize::from(with_bias)) * teams * width * 4 } else { 0 };
    let grid = Grid::new(blocks, THREADS * teams as u32).with_shared(shared);
    cuda.launch_variant("norm_backward", &defines, &kernel("rows_backward", &[dy]), grid, &all)?;
    for (from, to) in [(0, grads.weight), (width, grads.bias)] {
        if let Some(to) = to {
            assert_eq!(to.len(), width);
            let sums = Chunks { at: at + (from * 4) as u64, stride: 2 * width, count: blocks, width };
            add_chunks(cuda, sums, (f32_ptr(to), grads.add))?;
        }
    }
    Ok(())
}

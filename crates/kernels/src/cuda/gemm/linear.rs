//! Linear layers: the GEMM weight, and the three GEMMs of forward and backward.

use crate::backend::{LinearGrads, LinearOps, MemoryOps};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{Chunks, add_chunks, convert, sum_columns};
use crate::cuda::gemm::rows::{RowInvariance, RowsKey, rows};
use crate::cuda::gemm::{Gemm, stream};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{CardArena, CardMemory, f32_ptr, kernel, letter, ptr};
use crate::cuda::optim::split_master::{self, Whole};
use crate::{Buffer, DType, Result, Weight, shapes};
use std::sync::Arc;

/// GEMM weight: `[n, k]`, row-major.
pub(crate) struct WeightForm(pub(crate) Arc<CardMemory>);

/// Address and storage type of a weight's `[n, k]` elements; the type is the compute type.
pub(crate) fn stored(w: &Weight) -> (u64, DType) {
    (form(w), w.compute)
}

/// Address of a weight's elements.
pub fn form(w: &Weight) -> u64 {
    w.data().downcast_ref::<WeightForm>().expect("a weight of the CUDA backend").0.ptr()
}

/// Whether a weight belongs to this arena and its memory fits its shape.
pub(crate) fn holds(arena: &CardArena, w: &Weight) -> bool {
    let form = w.data().downcast_ref::<WeightForm>();
    w.compute.is_float() && form.is_some_and(|f| f.0.is_room(arena, w.n * w.k, w.compute.size()))
}

impl LinearOps for Cuda {
    // One copy serves forward and backward.
    fn weight(&self, n: usize, k: usize, dtype: DType, _backward: bool) -> Result<Weight> {
        shapes::weight(self, n, k, dtype)?;
        let memory = self.arena.take(n * k * dtype.size())?;
        Ok(Weight::new(n, k, dtype, Box::new(WeightForm(Arc::new(memory)))))
    }
    fn master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self, weight)?;
        split_master::master(self, weight)
    }
    fn rounds_masters(&self) -> bool {
        true
    }
    fn rounded_master(&self, weight: &Weight) -> Result<Option<Buffer>> {
        shapes::master(self, weight)?;
        Ok(split_master::rounded_master(weight))
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        shapes::load_weight(self, master, weight)?;
        assert_eq!(master.len(), weight.n * weight.k);
        if split_master::is_of(master, weight) {
            return Ok(());
        }
        let whole = Whole::of(self, master, 0, master.len())?;
        convert(self, (whole.ptr(), DType::F32), stored(weight), master.len())
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        shapes::linear(self, x, w, bias, y)?;
        assert!(x.dtype() == w.compute && y.len() == x.len() / w.k * w.n);
        assert!(bias.is_none_or(|b| b.dtype() == DType::F32 && b.len() == w.n));
        let shape = ForwardShape::of(x.len() / w.k, w);
        forward(self, shape, ptr(x), stored(w), bias, (ptr(y), y.dtype()))
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        shapes::linear_dx(self, dy, w, dx)?;
        assert!(dy.dtype() == w.compute && dx.len() == dy.len() / w.n * w.k);
        let m = dy.len() / w.n;
        input_gradient(self, [m, w.n, w.k], (ptr(dy), w.n), stored(w), (ptr(dx), dx.dtype()))
    }
    fn linear_dw(&self, dy: &Buffer, x: &Buffer, tokens: usize, grads: LinearGrads<'_>) -> Result<()> {
        shapes::linear_dw(self, dy, x, tokens, &grads)?;
        let LinearGrads { weight: dw, bias: dbias, add } = grads;
        assert_eq!(dy.dtype(), x.dtype());
        if tokens == 0 {
            return match add {
                true => Ok(()),
                false => dw.into_iter().chain(dbias).try_for_each(|d| self.fill(d, 0.0)),
            };
        }
        let (n, k) = (dy.len() / tokens, x.len() / tokens);
        if let Some(dw) = dw {
            assert_eq!(dw.len(), n * k);
            let x = (ptr(x), k);
            weight_gradient(self, [tokens, n, k], (ptr(dy), n), x, dy.dtype(), (f32_ptr(dw), add))?;
        }
        if let Some(dbias) = dbias {
            assert_eq!(dbias.len(), n);
            sum_columns(self, &kernel("column_sums", &[dy]), ptr(dy), [tokens, n], (f32_ptr(dbias), add))?;
        }
        Ok(())
    }
}

/// Which kernel computes a product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ProductKernel {
    /// Our own, without tensor cores.
    Plain,
    /// cuBLASLt on tensor cores, with split-k into `parts`, which are added in order.
    TensorCores { parts: usize },
}

impl ProductKernel {
    /// For a weight `[n, k]`: tensor cores need rows aligned to 16 bytes.
    fn of(dtype: DType, sizes: [usize; 2]) -> ProductKernel {
        let served = dtype == DType::Bf16 && sizes.iter().all(|s| s % 8 == 0);
        if served { ProductKernel::TensorCores { parts: 1 } } else { ProductKernel::Plain }
    }
    /// For an input gradient with a long reduction over n features.
    fn of_long_input_gradient(processors: usize, dtype: DType, [m, n, k]: [usize; 3]) -> ProductKernel {
        let possible = |parts: usize| n.is_multiple_of(8 * parts) && n / parts >= 4096;
        match ProductKernel::of(dtype, [n, k]) {
            ProductKernel::Plain => ProductKernel::Plain,
            _ => ProductKernel::TensorCores { parts: cuts(processors, [m, k], possible) },
        }
    }
    /// For a weight gradient over m rows.
    fn of_weight_gradient(processors: usize, dtype: DType, [m, n, k]: [usize; 3]) -> ProductKernel {
        match ProductKernel::of(dtype, [n, k]) {
            ProductKernel::TensorCores { .. } if m > 0 => {
                ProductKernel::TensorCores { parts: cuts(processors, [n, k], |parts| m / parts >= 1024) }
            }
            _ => ProductKernel::Plain,
        }
    }
}

/// Operand of the plain kernel: address, row stride and column stride in elements.
#[derive(Clone, Copy)]
struct Operand(u64, usize, usize);

/// Output of the plain kernel: address, storage, and whether to accumulate.
struct PlainResult {
    c: u64,
    out: DType,
    add: bool,
}

/// `C[m, n] = A[m, k] · B[n, k]ᵀ`, by the plain kernel.
fn plain(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    [a, b]: [Operand; 2],
    dtype: DType,
    bias: Option<&Buffer>,
    PlainResult { c, out, add }: PlainResult,
) -> Result<()> {
    let name = format!("product_{}{}", letter(dtype), letter(out));
    let grid = Grid::plane(n.div_ceil(64), m.div_ceil(64), 256);
    let args = args![a.0, a.1, a.2, b.0, b.1, b.2, bias, c, m as u32, n as u32, k as u32, add];
    cuda.launch("linear", &name, grid, &args)
}

/// Shape of a forward GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardShape {
    /// Rows, output features, input features.
    pub sizes: [usize; 3],
    /// Output features of the full weight that this one is a shard of, or `n`.
    pub whole: usize,
}

impl ForwardShape {
    /// With all output features of a weight.
    pub fn of(m: usize, w: &Weight) -> Self {
        ForwardShape { sizes: [m, w.n, w.k], whole: w.whole }
    }
}

/// `y[m, n] = x[m, k] · w[n, k]ᵀ`; a row has the same bits for any `m`, and a shard of a weight those of the full weight.
/// Addresses are of dense matrices.
pub fn forward(
    cuda: &Cuda,
    ForwardShape { sizes: [m, n, k], whole }: ForwardShape,
    x: u64,
    (w, dtype): (u64, DType),
    bias: Option<&Buffer>,
    (y, out): (u64, DType),
) -> Result<()> {
    // The sum must not be rounded before the bias is added; cuBLASLt cannot add an f32 bias to a bf16 result.
    let sums = if bias.is_some() { DType::F32 } else { out };
    let how = row_invariance(cuda, RowsKey { n, k, out: sums, whole }, dtype)?;
    if matches!(how, RowInvariance::Plain) {
        let operands = [Operand(x, k, 1), Operand(w, k, 1)];
        return plain(cuda, [m, n, k], operands, dtype, bias, PlainResult { c: y, out, add: false });
    }
    let library = |g: &Gemm| by_library(cuda, &how, g);
    let product = |g: &Gemm| if stream::product(cuda, g, whole, &library)? { Ok(()) } else { library(g) };
    let Some(bias) = bias else {
        return product(&Gemm::forward([m, n, k], x, w, (y, out)));
    };
    let room = if out == DType::F32 { None } else { Some(cuda.arena.take(m * n * 4)?) };
    let at = room.as_ref().map_or(y, CardMemory::ptr);
    product(&Gemm::forward([m, n, k], x, w, (at, sums)))?;
    let name = format!("add_bias_{}", letter(out));
    let threads = if n % 4 == 0 { m * n / 4 } else { m * n };
    cuda.launch_flat("linear", &name, threads, &args![at, bias, y, m * n, n as u32])
}

/// The same without bias, and by no kernel that was selected for giving these bits: the reference for such kernels.
pub(crate) fn reference_forward(
    cuda: &Cuda,
    ForwardShape { sizes: [m, n, k], whole }: ForwardShape,
    x: u64,
    (w, dtype): (u64, DType),
    (y, out): (u64, DType),
) -> Result<()> {
    match row_invariance(cuda, RowsKey { n, k, out, whole }, dtype)? {
        RowInvariance::Plain => {
            let operands = [Operand(x, k, 1), Operand(w, k, 1)];
            plain(cuda, [m, n, k], operands, dtype, None, PlainResult { c: y, out, add: false })
        }
        how => by_library(cuda, &how, &Gemm::forward([m, n, k], x, w, (y, out))),
    }
}

fn row_invariance(cuda: &Cuda, key: RowsKey, dtype: DType) -> Result<RowInvariance> {
    match ProductKernel::of(dtype, [key.whole, key.k]) {
        ProductKernel::TensorCores { .. } => rows(cuda, key),
        ProductKernel::Plain => Ok(RowInvariance::Plain),
    }
}

fn by_library(cuda: &Cuda, how: &RowInvariance, g: &Gemm) -> Result<()> {
    match how {
        RowInvariance::Checked(checked) => cuda.products.gemm_checked(cuda, g, checked),
        _ => cuda.products.gemm(cuda, g),
    }
}

/// `dx[m, k] = dy[m, n] · w[n, k]`; `ld` is the row stride of `dy`.
fn input_gradient(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    (dy, ld): (u64, usize),
    (w, dtype): (u64, DType),
    (dx, out): (u64, DType),
) -> Result<()> {
    if ProductKernel::of(dtype, [n, k]) != ProductKernel::Plain {
        let product = Gemm { lda: ld, ..Gemm::input_gradient([m, n, k], dy, w, (dx, out)) };
        return cuda.products.gemm(cuda, &product);
    }
    let operands = [Operand(dy, ld, 1), Operand(w, 1, k)];
    plain(cuda, [m, k, n], operands, dtype, None, PlainResult { c: dx, out, add: false })
}

/// Number of split-k parts for a product with too few tiles for the GPU: parts are computed concurrently and added in order. A
/// function of shape and GPU only.
fn cuts(processors: usize, [m, n]: [usize; 2], possible: impl Fn(usize) -> bool) -> usize {
    let tiles = m.div_ceil(128) * n.div_ceil(128);
    if 2 * tiles >= 3 * processors {
        return 1;
    }
    // Utilisation in per cent; a multiprocessor is busy only with two tiles at a time.
    let used = |parts: usize| {
        let hundredths = 100 * tiles * parts / (tiles * parts).next_multiple_of(processors);
        if tiles * parts < 2 * processors { hundredths / 2 } else { hundredths }
    };
    let better = |best: usize, parts: usize| if used(parts) > used(best) + 4 { parts } else { best };
    [2, 4, 8].into_iter().filter(|&parts| possible(parts)).fold(1, better)
}

/// The same for long reductions, which may use split-k.
pub fn long_input_gradient(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    dy: (u64, usize),
    (w, dtype): (u64, DType),
    to: (u64, DType),
) -> Result<()> {
    let processors = cuda.card.processors as usize;
    let parts = match ProductKernel::of_long_input_gradient(processors, dtype, [m, n, k]) {
        ProductKernel::TensorCores { parts } if parts > 1 => parts,
        _ => return input_gradient(cuda, [m, n, k], dy, (w, dtype), to),
    };
    let (each, sums) = (n / parts, cuda.arena.take(parts * m * k * 4)?);
    let one = Gemm::input_gradient([m, each, k], dy.0, w, (sums.ptr(), DType::F32));
    let strides = [each, each * k, m * k];
    cuda.products.gemm(cuda, &Gemm { lda: dy.1, batch: parts, strides, ..one })?;
    let name = format!("join_{}", letter(to.1));
    cuda.launch_flat("linear", &name, (m * k).div_ceil(4), &args![&sums, m * k, parts as u32, to.0])
}

/// `dx[m, columns] = dy[m, n] · back[columns, n]ᵀ`: some of the `k` columns of [`long_input_gradient`], with the same split-k.
pub(crate) fn long_input_gradient_columns(
    cuda: &Cuda,
    ([m, n, columns], k): ([usize; 3], usize),
    dy: u64,
    (back, dtype): (u64, DType),
    (dx, out): (u64, DType),
) -> Result<()> {
    if ProductKernel::of(dtype, [n, columns]) == ProductKernel::Plain {
        let operands = [Operand(dy, n, 1), Operand(back, n, 1)];
        return plain(cuda, [m, columns, n], operands, dtype, None, PlainResult { c: dx, out, add: false });
    }
    let processors = cuda.card.processors as usize;
    let parts = match ProductKernel::of_long_input_gradient(processors, dtype, [m, n, k]) {
        ProductKernel::TensorCores { parts } if parts > 1 => parts,
        _ => return cuda.products.gemm(cuda, &Gemm::forward([m, columns, n], dy, back, (dx, out))),
    };
    let (each, sums) = (n / parts, cuda.arena.take(parts * m * columns * 4)?);
    let one = Gemm::forward([m, columns, each], dy, back, (sums.ptr(), DType::F32));
    let strides = [each, each, m * columns];
    cuda.products.gemm(cuda, &Gemm { lda: n, ldb: n, batch: parts, strides, ..one })?;
    let name = format!("join_{}", letter(out));
    let count = m * columns;
    cuda.launch_flat("linear", &name, count.div_ceil(4), &args![&sums, count, parts as u32, dx])
}

/// `y[m, n] = x[m, k] · w[n, k]ᵀ` with few features, with split-k; `ld` is the row stride of `x`.
pub(crate) fn cut_forward(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    (x, ld): (u64, usize),
    (w, dtype): (u64, DType),
    (y, out): (u64, DType),
) -> Result<()> {
    if ProductKernel::of(dtype, [n, k]) == ProductKernel::Plain {
        let operands = [Operand(x, ld, 1), Operand(w, k, 1)];
        return plain(cuda, [m, n, k], operands, dtype, None, PlainResult { c: y, out, add: false });
    }
    let possible = |parts: usize| k.is_multiple_of(8 * parts) && k / parts >= 512 && (m * n) % 4 == 0;
    let parts = cuts(cuda.card.processors as usize, [m, n], possible);
    if parts == 1 {
        return cuda.products.gemm(cuda, &Gemm { lda: ld, ..Gemm::forward([m, n, k], x, w, (y, out)) });
    }
    let (each, sums) = (k / parts, cuda.arena.take(parts * m * n * 4)?);
    let one = Gemm::forward([m, n, each], x, w, (sums.ptr(), DType::F32));
    let strides = [each, each, m * n];
    cuda.products.gemm(cuda, &Gemm { lda: ld, ldb: k, batch: parts, strides, ..one })?;
    let name = format!("join_{}", letter(out));
    cuda.launch_flat("linear", &name, (m * n).div_ceil(4), &args![&sums, m * n, parts as u32, y])
}

/// `dw[n, k] = dy[m, n]ᵀ · x[m, k]`; `+=` with `add`, each total added once; the last two numbers are the row strides of `dy`
/// and `x`.
pub fn weight_gradient(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    dy: (u64, usize),
    x: (u64, usize),
    dtype: DType,
    (dw, add): (u64, bool),
) -> Result<()> {
    let processors = cuda.card.processors as usize;
    if let ProductKernel::TensorCores { parts } =
        ProductKernel::of_weight_gradient(processors, dtype, [m, n, k])
    {
        return in_parts(cuda, [m, n, k], dy, x, (dw, add), parts);
    }
    let operands = [Operand(dy.0, 1, dy.1), Operand(x.0, 1, x.1)];
    plain(cuda, [n, k, m], operands, dtype, None, PlainResult { c: dw, out: DType::F32, add })
}

/// A weight gradient on tensor cores, with split-k if the weight is small.
fn in_parts(
    cuda: &Cuda,
    [m, n, k]: [usize; 3],
    (dy, ld): (u64, usize),
    (x, ldx): (u64, usize),
    (dw, add): (u64, bool),
    parts: usize,
) -> Result<()> {
    let (each, beta) = (m / parts / 64 * 64, if add { 1.0 } else { 0.0 });
    if parts == 1 {
        let whole = Gemm { lda: ld, ldb: ldx, beta, ..Gemm::weight_gradient([m, n, k], dy, x, dw) };
        return cuda.products.gemm(cuda, &whole);
    }
    let rest = m - parts * each;
    let count = parts + usize::from(rest > 0);
    let sums = cuda.arena.take(count * n * k * 4)?;
    let whole =
        Gemm { lda: ld, ldb: ldx, beta: 0.0, ..Gemm::weight_gradient([each, n, k], dy, x, sums.ptr()) };
    let strides = [each * ld, each * ldx, n * k];
    cuda.products.gemm(cuda, &Gemm { batch: parts, strides, ..whole })?;
    if rest > 0 {
        let (done, at) = (parts * each, sums.ptr() + (parts * n * k * 4) as u64);
        let (dy, x) = (dy + (done * ld * 2) as u64, x + (done * ldx * 2) as u64);
        let last = Gemm { lda: ld, ldb: ldx, beta: 0.0, ..Gemm::weight_gradient([rest, n, k], dy, x, at) };
        cuda.products.gemm(cuda, &last)?;
    }
    add_chunks(cuda, Chunks { at: sums.ptr(), stride: n * k, count, width: n * k }, (dw, add))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;

    #[test]
    fn kernels_of_products_by_shape_and_card() {
        let bf16 = DType::Bf16;
        assert_eq!(ProductKernel::of(bf16, [896, 4864]), ProductKernel::TensorCores { parts: 1 });
        assert_eq!(
            ProductKernel::of(bf16, [897, 4864]),
            ProductKernel::Plain,
            "rows that start between units of 16 bytes"
        );
        assert_eq!(ProductKernel::of(DType::F32, [896, 4864]), ProductKernel::Plain);
        // A small weight has too few tiles for the GPU, so its reduction over many rows uses split-k; a large one has enough.
        let weight = |m, n, k| ProductKernel::of_weight_gradient(H200, bf16, [m, n, k]);
        assert!(matches!(weight(16384, 896, 896), ProductKernel::TensorCores { parts: 2.. }));
        assert_eq!(weight(16384, 4864, 4864), ProductKernel::TensorCores { parts: 1 });
        assert_eq!(
            weight(1024, 896, 896),
            ProductKernel::TensorCores { parts: 1 },
            "parts of 1024 rows at least"
        );
        assert_eq!(weight(0, 896, 896), ProductKernel::Plain, "zeros are written by the plain kernel");
        // The head: a reduction over the vocabulary.
        let input = |m, n, k| ProductKernel::of_long_input_gradient(H200, bf16, [m, n, k]);
        assert!(matches!(input(832, 151_936, 896), ProductKernel::TensorCores { parts: 2.. }));
        assert_eq!(input(832, 4096, 896), ProductKernel::TensorCores { parts: 1 }, "short sums are whole");
    }
}

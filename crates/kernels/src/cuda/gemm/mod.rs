//! bf16 GEMM on tensor cores, through cuBLASLt.
//!
//! Forward GEMMs exclude split-k: without it, nearly every cuBLASLt algorithm gives a row the same bits whatever the number of
//! rows. Which ones do is established by testing them (`rows`). In inexact mode the heuristic's choice is used.

pub(crate) mod linear;
pub(crate) mod low_rank;
pub(crate) mod multicast;
pub(crate) mod rows;
pub(crate) mod stream;
pub(crate) mod tune;

use crate::cuda::context::Cuda;
use crate::cuda::gemm::rows::{CheckedAlgorithms, RowInvariance, RowsKey};
use crate::cuda::gemm::tune::{Tuned, fastest};
use crate::cuda::handles::CudaContext;
use crate::cuda::libraries::{self, Library};
use crate::cuda::memory::{CardArena, CardMemory};
use crate::{DType, Error, Result, lock};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as AlgoAttribute, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t, cudaDataType,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Maximum number of cached plans, so that ever new batch sizes do not exhaust memory.
const PLANS: usize = 4096;
/// All of cuBLASLt's split-k reduction schemes.
const ANY_SCHEME: u32 = 7;
/// Number of algorithms to request from the heuristic.
const CANDIDATES: usize = 16;

/// `C = op(A) · op(B) + beta * C`, row-major, A and B in bf16: C is `[m, n]`, op(A) `[m, k]`, op(B) `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the reduction.
    pub k: usize,
    /// Address of A.
    pub a: u64,
    /// Whether A is stored `[k, m]`.
    pub a_transposed: bool,
    /// Row stride of A as stored.
    pub lda: usize,
    /// Address of B.
    pub b: u64,
    /// Whether B is stored `[n, k]`, as weights are.
    pub b_transposed: bool,
    /// Row stride of B as stored.
    pub ldb: usize,
    /// Address of C.
    pub c: u64,
    /// Row stride of C.
    pub ldc: usize,
    /// Type of C.
    pub out: DType,
    /// 1 accumulates into C, 0 overwrites it.
    pub beta: f32,
    /// Number of GEMMs in the batch (strided batched GEMM).
    pub batch: usize,
    /// Batch strides of A, B and C.
    pub strides: [usize; 3],
}

impl Gemm {
    /// For users: transposition and sizes.
    pub(crate) fn name(&self) -> String {
        let trans = |t: bool| if t { "t" } else { "n" };
        let batch = if self.batch > 1 { format!(" x{}", self.batch) } else { String::new() };
        let (a, b) = (trans(self.a_transposed), trans(self.b_transposed));
        format!("{a}{b} {}x{}x{}{batch}", self.m, self.n, self.k)
    }
    /// `x[m, k] · w[n, k]ᵀ`, all dense.
    pub fn forward([m, n, k]: [usize; 3], x: u64, w: u64, (y, out): (u64, DType)) -> Self {
        Gemm {
            m,
            n,
            k,
            a: x,
            a_transposed: false,
            lda: k,
            b: w,
            b_transposed: true,
            ldb: k,
            c: y,
            ldc: n,
            out,
            beta: 0.0,
            batch: 1,
            strides: [0; 3],
        }
    }
    /// `dy[m, n] · w[n, k]`, all dense: the gradient `[m, k]` of the input.
    pub fn input_gradient([m, n, k]: [usize; 3], dy: u64, w: u64, (dx, out): (u64, DType)) -> Self {
        Gemm {
            m,
            n: k,
            k: n,
            a: dy,
            a_transposed: false,
            lda: n,
            b: w,
            b_transposed: false,
            ldb: k,
            c: dx,
            ldc: k,
            out,
            beta: 0.0,
            batch: 1,
            strides: [0; 3],
        }
    }
    /// `dw[n, k] += dy[m, n]ᵀ · x[m, k]`, all dense, in f32.
    pub fn weight_gradient([m, n, k]: [usize; 3], dy: u64, x: u64, dw: u64) -> Self {
        Gemm {
            m: n,
            n: k,
            k: m,
            a: dy,
            a_transposed: true,
            lda: n,
            b: x,
            b_transposed: false,
            ldb: k,
            c: dw,
            ldc: k,
            out: DType::F32,
            beta: 1.0,
            batch: 1,
            strides: [0; 3],
        }
    }
}

/// Cache key of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct GemmKey {
    sizes: [usize; 6],
    transposed: [bool; 2],
    aligned: [u32; 3],
    out: DType,
    batch: usize,
    strides: [usize; 3],
    algo: Option<[u64; 8]>,
    /// Whether split-k is excluded.
    whole: bool,
}

impl GemmKey {
    fn of(g: &Gemm, whole: bool, algo: Option<&cublasLtMatmulAlgo_t>) -> Self {
        GemmKey {
            sizes: [g.m, g.n, g.k, g.lda, g.ldb, g.ldc],
            transposed: [g.a_transposed, g.b_transposed],
            aligned: [alignment(g.a), alignment(g.b), alignment(g.c)],
            out: g.out,
            batch: g.batch,
            strides: g.strides,
            algo: algo.map(|a| a.data),
            whole,
        }
    }
}

/// Owns a matrix layout descriptor.
struct MatrixLayout(cublasLtMatrixLayout_t);

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: made by `layouts`.
        unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// Owns a GEMM descriptor.
struct Desc(cublasLtMatmulDesc_t);

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: made by `Desc::of`.
        unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// Owns the heuristic's preferences.
struct Preference(cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `Preference::of`.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// Descriptors and algorithm of one shape. Reference-counted, so it survives eviction while in use.
struct GemmPlan {
    desc: Desc,
    layouts: [MatrixLayout; 3],
    algo: cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are only read once they are made.
unsafe impl Send for GemmPlan {}
// SAFETY: as above.
unsafe impl Sync for GemmPlan {}

/// cuBLASLt handle, workspace, and cached plans.
pub struct Products {
    handle: cublasLtHandle_t,
    context: Arc<CudaContext>,
    workspace: CardMemory,
    plans: Mutex<HashMap<GemmKey, Arc<GemmPlan>>>,
    /// The fastest algorithm per class of shapes.
    pub(crate) tuned: Mutex<Tuned>,
    /// How row invariance is achieved, per weight shape.
    pub(crate) rows: Mutex<HashMap<RowsKey, RowInvariance>>,
}

// SAFETY: cuBLASLt handles may be used from several threads; plans are behind a lock.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

fn check(status: cublasStatus_t, what: impl FnOnce() -> String) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        _ => Err(Error::device(format!("cuBLASLt failed in {}: {status:?}", what()))),
    }
}

fn data_type(dtype: DType) -> cudaDataType {
    if dtype == DType::Bf16 { cudaDataType::CUDA_R_16BF } else { cudaDataType::CUDA_R_32F }
}

/// Alignment of an address in bytes, up to 256.
pub(crate) fn alignment(at: u64) -> u32 {
    1 << at.trailing_zeros().min(8)
}

impl Products {
    pub(crate) fn new(context: &Arc<CudaContext>, arena: &CardArena) -> Result<Self> {
        libraries::open(Library::Products)?;
        let workspace = arena.take(WORKSPACE)?;
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live variable; the context is current.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, || "starting".into())?;
        Ok(Products {
            handle,
            context: context.clone(),
            workspace,
            plans: Mutex::default(),
            tuned: Mutex::default(),
            rows: Mutex::default(),
        })
    }

    /// cuBLASLt's version.
    pub(crate) fn version(&self) -> String {
        // SAFETY: asks a loaded library for a number.
        let v = unsafe { sys::cublasLtGetVersion() };
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Launches a GEMM, by the fastest algorithm if it is large enough to tune.
    pub fn gemm(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        let algo = fastest(cuda, g, None)?;
        self.gemm_by(cuda, g, algo.as_ref())
    }

    /// The same, restricted to algorithms with row-invariant bits.
    pub(crate) fn gemm_checked(&self, cuda: &Cuda, g: &Gemm, checked: &CheckedAlgorithms) -> Result<()> {
        if g.m == 0 || g.n == 0 {
            return Ok(());
        }
        let algo = fastest(cuda, g, Some(checked))?;
        self.gemm_by(cuda, g, algo.as_ref())
    }

    /// Launches a GEMM by the given algorithm, or by the heuristic's.
    pub(crate) fn gemm_by(&self, cuda: &Cuda, g: &Gemm, algo: Option<&cublasLtMatmulAlgo_t>) -> Result<()> {
        if g.m == 0 || g.n == 0 {
            return Ok(());
        }
        cuda.bind()?;
        let plan = self.plan(g, cuda.exact(), algo)?;
        cuda.profile.time(cuda.stream, || format!("gemm {}", g.name()), || self.start(cuda, g, &plan))
    }

    /// The same without profiling, to try algorithms.
    pub(crate) fn attempt(&self, cuda: &Cuda, g: &Gemm, algo: &cublasLtMatmulAlgo_t) -> Result<()> {
        cuda.bind()?;
        let plan = self.plan(g, cuda.exact(), Some(algo))?;
        self.start(cuda, g, &plan)
    }

    /// Whether an algorithm supports a GEMM.
    pub(crate) fn serves(&self, cuda: &Cuda, g: &Gemm, algo: &cublasLtMatmulAlgo_t) -> bool {
        self.plan(g, cuda.exact(), Some(algo)).is_ok()
    }

    fn start(&self, cuda: &Cuda, g: &Gemm, plan: &GemmPlan) -> Result<()> {
        let (alpha, beta) = (1f32, g.beta);
        cuda.trace.product(g);
        // SAFETY: the plan's descriptors fit the matrices, whose addresses callers guarantee; scalars are on the host.
        let done = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.desc.0,
                (&raw const alpha).cast(),
                g.b as *const c_void,
                plan.layouts[0].0,
                g.a as *const c_void,
                plan.layouts[1].0,
                (&raw const beta).cast(),
                g.c as *const c_void,
                plan.layouts[2].0,
                g.c as *mut c_void,
                plan.layouts[2].0,
                &plan.algo,
                self.workspace.ptr() as *mut c_void,
                WORKSPACE,
                cuda.stream.cast(),
            )
        };
        match done {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => cuda.started(),
            failed => Err(cuda.failure(format!("cuBLASLt failed in the product {}: {failed:?}", g.name()))),
        }
    }

    /// The heuristic's algorithms for a GEMM, best first; without split-k in exact mode.
    pub(crate) fn offers(&self, cuda: &Cuda, g: &Gemm) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        cuda.bind()?;
        let key = GemmKey::of(g, cuda.exact(), None);
        self.advice(g, &key, &Desc::of(g)?, &layouts(g)?)
    }

    fn plan(&self, g: &Gemm, whole: bool, algo: Option<&cublasLtMatmulAlgo_t>) -> Result<Arc<GemmPlan>> {
        let key = GemmKey::of(g, whole, algo);
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        if plans.len() >= PLANS {
            plans.clear();
        }
        let plan = Arc::new(self.make(g, &key, algo)?);
        plans.insert(key, plan.clone());
        Ok(plan)
    }

    fn make(&self, g: &Gemm, key: &GemmKey, algo: Option<&cublasLtMatmulAlgo_t>) -> Result<GemmPlan> {
        let (desc, layouts) = (Desc::of(g)?, layouts(g)?);
        let algo = match algo {
            Some(algo) => {
                self.check_algo(g, &desc, &layouts, algo)?;
                *algo
            }
            None => self.advice(g, key, &desc, &layouts)?[0],
        };
        Ok(GemmPlan { desc, layouts, algo })
    }

    /// Errors unless the algorithm supports the GEMM within the workspace.
    fn check_algo(
        &self,
        g: &Gemm,
        desc: &Desc,
        layouts: &[MatrixLayout; 3],
        algo: &cublasLtMatmulAlgo_t,
    ) -> Result<()> {
        let [a, b, c] = layouts.each_ref().map(|l| l.0);
        // SAFETY: live descriptors; the result is a plain structure that the library writes.
        let (done, fits) = unsafe {
            let mut found: cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let done = sys::cublasLtMatmulAlgoCheck(self.handle, desc.0, a, b, c, c, algo, &mut found);
            (done, found.workspaceSize <= WORKSPACE)
        };
        check(if fits { done } else { cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED }, || planning(g))
    }

    /// The heuristic's results, best first; never empty.
    fn advice(
        &self,
        g: &Gemm,
        key: &GemmKey,
        desc: &Desc,
        layouts: &[MatrixLayout; 3],
    ) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        let preference = Preference::of(g, key)?;
        let [a, b, c] = layouts.each_ref().map(|l| l.0);
        // SAFETY: live descriptors; results are plain structures, of which the library writes the first `count`.
        let (done, found) = unsafe {
            let mut found: [cublasLtMatmulHeuristicResult_t; CANDIDATES] = std::mem::zeroed();
            let (mut count, most) = (0, CANDIDATES as i32);
            let to = found.as_mut_ptr();
            let done = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle, desc.0, a, b, c, c, preference.0, most, to, &mut count,
            );
            (done, found.into_iter().take(count.max(0) as usize).map(|f| f.algo).collect::<Vec<_>>())
        };
        check(done, || planning(g))?;
        let offers: Vec<_> = found.into_iter().filter(|algo| !key.whole || whole_sums(algo)).collect();
        if offers.is_empty() {
            let sums = if key.whole { " with whole sums" } else { "" };
            return Err(Error::device(format!("cuBLASLt offers no algorithm{sums} for {}", planning(g))));
        }
        Ok(offers)
    }
}

fn planning(g: &Gemm) -> String {
    format!("planning the product {}x{}x{}", g.m, g.n, g.k)
}

/// Layouts of cuBLASLt's first and second operand and result. It is column-major, so a row-major matrix is its transpose:
/// C' = op(B)' · op(A)'.
fn layouts(g: &Gemm) -> Result<[MatrixLayout; 3]> {
    let layout = |dtype: DType, rows: usize, cols: usize, ld: usize, stride: usize| -> Result<MatrixLayout> {
        let mut layout = std::ptr::null_mut();
        let (rows, cols, ld) = (rows as u64, cols as u64, ld as i64);
        // SAFETY: a live variable.
        let made = unsafe { sys::cublasLtMatrixLayoutCreate(&mut layout, data_type(dtype), rows, cols, ld) };
        check(made, || planning(g))?;
        let layout = MatrixLayout(layout);
        if g.batch > 1 {
            let (count, stride) = (g.batch as i32, stride as i64);
            // SAFETY: a live descriptor, and attributes of the sizes the library asks for.
            unsafe {
                let of = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                let set = sys::cublasLtMatrixLayoutSetAttribute(layout.0, of, (&raw const count).cast(), 4);
                check(set, || planning(g))?;
                let of = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                let set = sys::cublasLtMatrixLayoutSetAttribute(layout.0, of, (&raw const stride).cast(), 8);
                check(set, || planning(g))?;
            }
        }
        Ok(layout)
    };
    let (bf16, [a, b, c]) = (DType::Bf16, g.strides);
    let first = if g.b_transposed { (g.k, g.n) } else { (g.n, g.k) };
    let second = if g.a_transposed { (g.m, g.k) } else { (g.k, g.m) };
    Ok([
        layout(bf16, first.0, first.1, g.ldb, b)?,
        layout(bf16, second.0, second.1, g.lda, a)?,
        layout(g.out, g.n, g.m, g.ldc, c)?,
    ])
}

impl Desc {
    fn of(g: &Gemm) -> Result<Self> {
        let mut desc = std::ptr::null_mut();
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: a live variable.
        let made = unsafe { sys::cublasLtMatmulDescCreate(&mut desc, compute, cudaDataType::CUDA_R_32F) };
        check(made, || planning(g))?;
        let desc = Desc(desc);
        let transpositions = [
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, g.b_transposed),
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, g.a_transposed),
        ];
        for (attribute, trans) in transpositions {
            let value = u32::from(trans); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
            // SAFETY: a live descriptor, and an attribute of the size the library asks for.
            let set = unsafe {
                sys::cublasLtMatmulDescSetAttribute(desc.0, attribute, (&raw const value).cast(), 4)
            };
            check(set, || planning(g))?;
        }
        Ok(desc)
    }
}

impl Preference {
    fn of(g: &Gemm, key: &GemmKey) -> Result<Self> {
        let mut preference: cublasLtMatmulPreference_t = std::ptr::null_mut();
        // SAFETY: a live variable.
        check(unsafe { sys::cublasLtMatmulPreferenceCreate(&mut preference) }, || planning(g))?;
        let preference = Preference(preference);
        let bytes = WORKSPACE as u64;
        let most = PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: a live descriptor, and an attribute of the size the library asks for.
        let set = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(preference.0, most, (&raw const bytes).cast(), 8)
        };
        check(set, || planning(g))?;
        // Mask 0 excludes split-k. Every scheme reduces in a fixed order.
        let schemes = if key.whole { 0u32 } else { ANY_SCHEME };
        let settings = [
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.aligned[1]),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.aligned[0]),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.aligned[2]),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.aligned[2]),
        ];
        for (attribute, value) in settings {
            let value = (&raw const value).cast();
            // SAFETY: as above.
            let set = unsafe { sys::cublasLtMatmulPreferenceSetAttribute(preference.0, attribute, value, 4) };
            check(set, || planning(g))?;
        }
        Ok(preference)
    }
}

/// Whether an algorithm does not split k.
fn whole_sums(algo: &cublasLtMatmulAlgo_t) -> bool {
    let number = |attribute: AlgoAttribute| {
        let (mut value, mut written) = (0u32, 0);
        // SAFETY: live variables of the size that is said.
        let done = unsafe {
            let to = (&raw mut value).cast();
            sys::cublasLtMatmulAlgoConfigGetAttribute(algo, attribute, to, 4, &mut written)
        };
        if done == cublasStatus_t::CUBLAS_STATUS_SUCCESS { value } else { 0 }
    };
    number(AlgoAttribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1
        && number(AlgoAttribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == 0
}

impl Drop for Products {
    fn drop(&mut self) {
        lock(&self.plans).clear();
        if self.context.bind().is_ok() {
            // SAFETY: created by `new`; nothing uses it any more.
            unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

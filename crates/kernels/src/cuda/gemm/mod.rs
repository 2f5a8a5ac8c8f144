//! Matrix products of bf16 on tensor cores, through cuBLASLt.
//!
//! Sums over k may not be split between blocks in forward products: without that, nearly every algorithm cuBLASLt offers
//! gives the same bits for a row whatever the number of rows. Which do is found out by trying them (`rows`). A card that need
//! not be exact takes whatever algorithm is advised.

pub(crate) mod linear;
pub(crate) mod low_rank;
pub(crate) mod multicast;
pub(crate) mod rows;
pub(crate) mod stream;
pub(crate) mod tune;

use crate::buffer::DType;
use crate::cuda::context::Cuda;
use crate::cuda::gemm::rows::{CheckedAlgorithms, RowInvariance, RowsKey};
use crate::cuda::gemm::tune::{Tuned, fastest};
use crate::cuda::handles::CudaContext;
use crate::cuda::libraries::{self, Library};
use crate::cuda::memory::{CardArena, CardMemory};
use crate::error::{Error, Result};
use crate::lock;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as AlgoAttribute, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t, cudaDataType,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// What NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Plans that are kept; batches of ever new sizes must not pile up.
const PLANS: usize = 4096;
/// cuBLASLt's ways to join sums that were cut, all of them.
const ANY_SCHEME: u32 = 7;
/// Algorithms the library is asked for.
const CANDIDATES: usize = 16;

/// `C = op(A) · op(B) + beta * C`, row-major, A and B in bf16: C is `[m, n]`, op(A) `[m, k]`, op(B) `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Address of A.
    pub a: u64,
    /// A is stored `[k, m]`.
    pub a_transposed: bool,
    /// Elements from one stored row of A to the next.
    pub lda: usize,
    /// Address of B.
    pub b: u64,
    /// B is stored `[n, k]`, as a weight is.
    pub b_transposed: bool,
    /// Elements from one stored row of B to the next.
    pub ldb: usize,
    /// Address of C.
    pub c: u64,
    /// Elements from one row of C to the next.
    pub ldc: usize,
    /// Storage of C.
    pub out: DType,
    /// 1 adds to C, 0 writes it.
    pub beta: f32,
    /// Batch of products; each operand's next one is `strides` elements further.
    pub batch: usize,
    /// From one A, B and C of a batch to the next.
    pub strides: [usize; 3],
}

impl Gemm {
    /// For people: which operands are transposed, and the sizes.
    pub(crate) fn name(&self) -> String {
        let turned = |t: bool| if t { "t" } else { "n" };
        let batch = if self.batch > 1 { format!(" x{}", self.batch) } else { String::new() };
        let (a, b) = (turned(self.a_transposed), turned(self.b_transposed));
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

/// What a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct GemmKey {
    sizes: [usize; 6],
    transposed: [bool; 2],
    aligned: [u32; 3],
    out: DType,
    batch: usize,
    strides: [usize; 3],
    algo: Option<[u64; 8]>,
    /// Whether each sum is left to one block.
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

/// How a matrix lies in memory.
struct MatrixLayout(cublasLtMatrixLayout_t);

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: made by `layouts`.
        unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What a product does.
struct Desc(cublasLtMatmulDesc_t);

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: made by `Desc::of`.
        unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// What an algorithm must be.
struct Wish(cublasLtMatmulPreference_t);

impl Drop for Wish {
    fn drop(&mut self) {
        // SAFETY: made by `Wish::of`.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// Descriptors and the algorithm of one shape. Shared: who uses it holds it, whatever becomes of the table meanwhile.
struct GemmPlan {
    desc: Desc,
    layouts: [MatrixLayout; 3],
    algo: cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are only read once they are made.
unsafe impl Send for GemmPlan {}
// SAFETY: as above.
unsafe impl Sync for GemmPlan {}

/// cuBLASLt, its workspace, and the plans made so far.
pub struct Products {
    handle: cublasLtHandle_t,
    context: Arc<CudaContext>,
    workspace: CardMemory,
    plans: Mutex<HashMap<GemmKey, Arc<GemmPlan>>>,
    /// The fastest algorithms that were found.
    pub(crate) tuned: Mutex<Tuned>,
    /// How rows get the same bits for any m.
    pub(crate) rows: Mutex<HashMap<RowsKey, RowInvariance>>,
}

// SAFETY: cuBLASLt's handle may be used from several threads; plans are behind a lock.
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

/// Bytes an address is a multiple of, up to 256.
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

    /// The library's version.
    pub(crate) fn version(&self) -> String {
        // SAFETY: asks a loaded library for a number.
        let v = unsafe { sys::cublasLtGetVersion() };
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Starts a product, by the fastest algorithm where it is worth looking for.
    pub fn gemm(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        let algo = fastest(cuda, g, None)?;
        self.gemm_by(cuda, g, algo.as_ref())
    }

    /// The same among algorithms that give a row the same bits whatever the number of rows.
    pub(crate) fn gemm_checked(&self, cuda: &Cuda, g: &Gemm, checked: &CheckedAlgorithms) -> Result<()> {
        if g.m == 0 || g.n == 0 {
            return Ok(());
        }
        let algo = fastest(cuda, g, Some(checked))?;
        self.gemm_by(cuda, g, algo.as_ref())
    }

    /// Starts a product by an algorithm, or by the one that is advised.
    pub(crate) fn gemm_by(&self, cuda: &Cuda, g: &Gemm, algo: Option<&cublasLtMatmulAlgo_t>) -> Result<()> {
        if g.m == 0 || g.n == 0 {
            return Ok(());
        }
        cuda.bind()?;
        let plan = self.plan(g, cuda.exact(), algo)?;
        cuda.profile.time(cuda.stream, || format!("gemm {}", g.name()), || self.start(cuda, g, &plan))
    }

    /// The same without a profile, to try algorithms.
    pub(crate) fn attempt(&self, cuda: &Cuda, g: &Gemm, algo: &cublasLtMatmulAlgo_t) -> Result<()> {
        cuda.bind()?;
        let plan = self.plan(g, cuda.exact(), Some(algo))?;
        self.start(cuda, g, &plan)
    }

    /// Whether an algorithm serves a product.
    pub(crate) fn serves(&self, cuda: &Cuda, g: &Gemm, algo: &cublasLtMatmulAlgo_t) -> bool {
        self.plan(g, cuda.exact(), Some(algo)).is_ok()
    }

    fn start(&self, cuda: &Cuda, g: &Gemm, plan: &GemmPlan) -> Result<()> {
        let (alpha, beta) = (1f32, g.beta);
        cuda.trace.product(g);
        // SAFETY: the plan's descriptors fit the matrices, whose addresses callers vouch for; scalars are on the host.
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

    /// The algorithms that are offered for a product, the best first; with whole sums where the card is exact.
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

    /// An error unless the algorithm serves the product within the workspace.
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

    /// What the library advises, the best first; never nothing.
    fn advice(
        &self,
        g: &Gemm,
        key: &GemmKey,
        desc: &Desc,
        layouts: &[MatrixLayout; 3],
    ) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        let wish = Wish::of(g, key)?;
        let [a, b, c] = layouts.each_ref().map(|l| l.0);
        // SAFETY: live descriptors; results are plain structures, of which the library writes the first `count`.
        let (done, found) = unsafe {
            let mut found: [cublasLtMatmulHeuristicResult_t; CANDIDATES] = std::mem::zeroed();
            let (mut count, most) = (0, CANDIDATES as i32);
            let to = found.as_mut_ptr();
            let done = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc.0,
                a,
                b,
                c,
                c,
                wish.0,
                most,
                to,
                &mut count,
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

/// Of the library's first and second operand and its result. It counts columns first: a row-major matrix is its transpose
/// there, so C' = op(B)' · op(A)'.
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
        let turns = [
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, g.b_transposed),
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, g.a_transposed),
        ];
        for (attribute, turned) in turns {
            let value = u32::from(turned); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
            // SAFETY: a live descriptor, and an attribute of the size the library asks for.
            let set = unsafe {
                sys::cublasLtMatmulDescSetAttribute(desc.0, attribute, (&raw const value).cast(), 4)
            };
            check(set, || planning(g))?;
        }
        Ok(desc)
    }
}

impl Wish {
    fn of(g: &Gemm, key: &GemmKey) -> Result<Self> {
        let mut wish: cublasLtMatmulPreference_t = std::ptr::null_mut();
        // SAFETY: a live variable.
        check(unsafe { sys::cublasLtMatmulPreferenceCreate(&mut wish) }, || planning(g))?;
        let wish = Wish(wish);
        let bytes = WORKSPACE as u64;
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: a live descriptor, and an attribute of the size the library asks for.
        let set =
            unsafe { sys::cublasLtMatmulPreferenceSetAttribute(wish.0, most, (&raw const bytes).cast(), 8) };
        check(set, || planning(g))?;
        // Without a scheme to join sums that were cut, none may be. Every scheme joins them in a fixed order.
        let schemes = if key.whole { 0u32 } else { ANY_SCHEME };
        let settings = [
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.aligned[1]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.aligned[0]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.aligned[2]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.aligned[2]),
        ];
        for (attribute, value) in settings {
            let value = (&raw const value).cast();
            // SAFETY: as above.
            let set = unsafe { sys::cublasLtMatmulPreferenceSetAttribute(wish.0, attribute, value, 4) };
            check(set, || planning(g))?;
        }
        Ok(wish)
    }
}

/// Whether an algorithm leaves each sum over k to one block, from the first element to the last.
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
            // SAFETY: made by `new`; nothing uses it any more.
            unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

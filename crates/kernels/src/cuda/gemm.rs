//! Matrix products of bf16 on tensor cores, through cuBLASLt.
//!
//! Sums over k may not be split between blocks in forward products: without that, every algorithm cuBLASLt offers gives
//! the same bits for a row whatever the number of rows (checked for each shape at first use, see `linear`).

use super::context::Cuda;
use super::libraries::{self, Library};
use super::memory::{Arena, Memory};
use crate::buffer::DType;
use crate::error::{Error, Result};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasStatus_t, cudaDataType,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

/// What NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Plans that are kept; batches of ever new sizes must not pile up.
const PLANS: usize = 4096;

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
    /// Sums over k may be cut and joined in a fixed order: fast, right for gradients of weights, not row-invariant.
    pub split: bool,
}

impl Gemm {
    /// `x[m, k] · w[n, k]ᵀ`, all dense.
    pub fn forward(m: usize, n: usize, k: usize, x: u64, w: u64, y: u64, out: DType) -> Self {
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
            split: false,
        }
    }
    /// `dy[m, n] · w[n, k]`, all dense: the gradient `[m, k]` of the input.
    pub fn input_gradient(m: usize, n: usize, k: usize, dy: u64, w: u64, dx: u64, out: DType) -> Self {
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
            split: false,
        }
    }
    /// `dw[n, k] += dy[m, n]ᵀ · x[m, k]`, all dense, in f32.
    pub fn weight_gradient(m: usize, n: usize, k: usize, dy: u64, x: u64, dw: u64) -> Self {
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
            split: true,
        }
    }
}

/// What a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 6],
    transposed: [bool; 2],
    aligned: [u32; 3],
    out: DType,
    split: bool,
}

/// Descriptors and the algorithm of one shape.
#[derive(Clone, Copy)]
struct Plan {
    desc: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    algo: cublasLtMatmulAlgo_t,
}

/// cuBLASLt, its workspace, and the plans made so far.
pub struct Products {
    handle: cublasLtHandle_t,
    workspace: Memory,
    plans: Mutex<HashMap<Key, Plan>>,
    /// Whether rows of an (n, k, storage) have the same bits for any m.
    pub(super) invariant: Mutex<HashMap<(usize, usize, DType), bool>>,
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
fn alignment(at: u64) -> u32 {
    1 << at.trailing_zeros().min(8)
}

impl Products {
    pub(super) fn new(arena: &Arena) -> Result<Self> {
        libraries::open(Library::Products)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live variable; the context is current.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, || "starting".into())?;
        Ok(Products {
            handle,
            workspace: arena.take(WORKSPACE)?,
            plans: Mutex::default(),
            invariant: Mutex::default(),
        })
    }

    /// The library's version.
    pub(super) fn version(&self) -> String {
        // SAFETY: asks a loaded library for a number.
        let v = unsafe { sys::cublasLtGetVersion() };
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Starts a product.
    pub fn gemm(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        if g.m == 0 || g.n == 0 {
            return Ok(());
        }
        cuda.bind()?;
        let plan = self.plan(g)?;
        let (alpha, beta) = (1f32, g.beta);
        // SAFETY: the plan's descriptors fit the matrices, whose addresses callers vouch for; scalars are on the host.
        let start = || {
            let done = unsafe {
                sys::cublasLtMatmul(
                    self.handle,
                    plan.desc,
                    (&raw const alpha).cast(),
                    g.b as *const c_void,
                    plan.layouts[0],
                    g.a as *const c_void,
                    plan.layouts[1],
                    (&raw const beta).cast(),
                    g.c as *const c_void,
                    plan.layouts[2],
                    g.c as *mut c_void,
                    plan.layouts[2],
                    &plan.algo,
                    self.workspace.ptr() as *mut c_void,
                    WORKSPACE,
                    cuda.stream.cast(),
                )
            };
            check(done, || format!("the product {}x{}x{}", g.m, g.n, g.k))
        };
        let turned = |t: bool| if t { "t" } else { "n" };
        let name =
            || format!("gemm {}{} {}x{}x{}", turned(g.a_transposed), turned(g.b_transposed), g.m, g.n, g.k);
        cuda.profile.time(cuda.stream, name, start)
    }

    fn plan(&self, g: &Gemm) -> Result<Plan> {
        let key = Key {
            sizes: [g.m, g.n, g.k, g.lda, g.ldb, g.ldc],
            transposed: [g.a_transposed, g.b_transposed],
            aligned: [alignment(g.a), alignment(g.b), alignment(g.c)],
            out: g.out,
            split: g.split,
        };
        let mut plans = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(plan) = plans.get(&key) {
            return Ok(*plan);
        }
        if plans.len() >= PLANS {
            for (_, plan) in plans.drain() {
                plan.destroy();
            }
        }
        // SAFETY: descriptors are made here and live as long as the plan.
        let plan = unsafe { self.make(g, &key) }?;
        plans.insert(key, plan);
        Ok(plan)
    }

    /// # Safety
    /// The library is loaded.
    unsafe fn make(&self, g: &Gemm, key: &Key) -> Result<Plan> {
        // The library counts columns first: a row-major matrix is its transpose there, so C' = op(B)' · op(A)'.
        let what = || format!("planning the product {}x{}x{}", g.m, g.n, g.k);
        let layout = |dtype: DType, rows: usize, cols: usize, ld: usize| -> Result<cublasLtMatrixLayout_t> {
            let mut layout = std::ptr::null_mut();
            // SAFETY: a live variable.
            let done = unsafe {
                sys::cublasLtMatrixLayoutCreate(
                    &mut layout,
                    data_type(dtype),
                    rows as u64,
                    cols as u64,
                    ld as i64,
                )
            };
            check(done, what)?;
            Ok(layout)
        };
        let bf16 = DType::Bf16;
        let first =
            if g.b_transposed { layout(bf16, g.k, g.n, g.ldb)? } else { layout(bf16, g.n, g.k, g.ldb)? };
        let second =
            if g.a_transposed { layout(bf16, g.m, g.k, g.lda)? } else { layout(bf16, g.k, g.m, g.lda)? };
        let layouts = [first, second, layout(g.out, g.n, g.m, g.ldc)?];
        let mut desc = std::ptr::null_mut();
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: live variables; attributes have the sizes the library asks for.
        unsafe {
            check(sys::cublasLtMatmulDescCreate(&mut desc, compute, cudaDataType::CUDA_R_32F), what)?;
            let turns = [
                (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, g.b_transposed),
                (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, g.a_transposed),
            ];
            for (attribute, turned) in turns {
                let value = u32::from(turned); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
                let value = (&raw const value).cast();
                check(sys::cublasLtMatmulDescSetAttribute(desc, attribute, value, 4), what)?;
            }
            let mut wish: cublasLtMatmulPreference_t = std::ptr::null_mut();
            check(sys::cublasLtMatmulPreferenceCreate(&mut wish), what)?;
            let bytes = WORKSPACE as u64;
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            check(sys::cublasLtMatmulPreferenceSetAttribute(wish, most, (&raw const bytes).cast(), 8), what)?;
            // 0 allows no cut of the sums, 2 parts in f32 that are added in order by a kernel of their own.
            let schemes: u32 = if g.split { 2 } else { 0 };
            let settings = [
                (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.aligned[1]),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.aligned[0]),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.aligned[2]),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.aligned[2]),
            ];
            for (attribute, value) in settings {
                let value = (&raw const value).cast();
                check(sys::cublasLtMatmulPreferenceSetAttribute(wish, attribute, value, 4), what)?;
            }
            let mut best: [cublasLtMatmulHeuristicResult_t; 1] = std::mem::zeroed();
            let mut count = 0;
            let done = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc,
                layouts[0],
                layouts[1],
                layouts[2],
                layouts[2],
                wish,
                1,
                best.as_mut_ptr(),
                &mut count,
            );
            sys::cublasLtMatmulPreferenceDestroy(wish);
            check(done, what)?;
            if count == 0 {
                return Err(Error::device(format!("cuBLASLt offers no algorithm for {}", what())));
            }
            Ok(Plan { desc, layouts, algo: best[0].algo })
        }
    }
}

impl Plan {
    fn destroy(self) {
        // SAFETY: made by `make`, and no longer in the table.
        unsafe {
            sys::cublasLtMatmulDescDestroy(self.desc);
            for layout in self.layouts {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        for (_, plan) in self.plans.lock().unwrap_or_else(|e| e.into_inner()).drain() {
            plan.destroy();
        }
        // SAFETY: made by `new`; nothing uses it any more.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

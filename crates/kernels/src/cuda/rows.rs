//! How a row of a forward product gets the same bits whatever the number of rows beside it.
//!
//! For each shape of weight that is met, products with few and many rows are compared to the bit before the first is
//! used. Where the algorithms that are advised disagree, two are fixed that agree; where none do, or the library does
//! not serve the shape, a kernel of our own multiplies.

use super::context::Cuda;
use super::gemm::Gemm;
use super::launch::args;
use super::memory::Memory;
use crate::buffer::DType;
use crate::error::Result;
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;

/// Numbers of rows whose bits are compared, as far as their results take no more than [`MOST`] numbers.
const ROWS: [usize; 7] = [1, 7, 64, 256, 1024, 4096, 16384];
/// What every row is compared with: rows repeat after so many.
const PERIOD: usize = 256;
/// As many as the logits that a head computes at a time.
const MOST: usize = 1 << 28;
/// Rows that still count as few.
const FEW: usize = 512;

/// How the rows of a forward product get the same bits whatever their number.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// Whatever algorithm the library advises for a number of rows.
    Any,
    /// One algorithm for few rows, one for many.
    Two([cublasLtMatmulAlgo_t; 2]),
    /// Not through this library.
    Plain,
}

impl Rows {
    /// The algorithm to name for that many rows.
    pub(super) fn algo(&self, m: usize) -> Option<&cublasLtMatmulAlgo_t> {
        match self {
            Rows::Two([few, many]) => Some(if m <= FEW { few } else { many }),
            _ => None,
        }
    }
}

/// How the rows of an `[n, k]` weight's products are made; found once for each shape.
pub(super) fn rows(cuda: &Cuda, n: usize, k: usize, out: DType) -> Result<Rows> {
    if !cuda.exact() {
        return Ok(Rows::Any);
    }
    let key = (n, k, out);
    if let Some(known) = cuda.products.rows.lock().unwrap_or_else(|e| e.into_inner()).get(&key) {
        return Ok(*known);
    }
    let how = find(cuda, n, k, out)?;
    let name = match how {
        Rows::Any => "any algorithm",
        Rows::Two(_) => "two algorithms",
        Rows::Plain => "the plain kernel",
    };
    cuda.profile.note(|| format!("rows of {n}x{k} into {}: the same bits by {name}", out.name()));
    cuda.products.rows.lock().unwrap_or_else(|e| e.into_inner()).insert(key, how);
    Ok(how)
}

fn find(cuda: &Cuda, n: usize, k: usize, out: DType) -> Result<Rows> {
    let trial = Trial::new(cuda, [n, k], out)?;
    let Ok(many) = cuda.products.offers(cuda, &trial.product(trial.most, trial.result.ptr())) else {
        return Ok(Rows::Plain);
    };
    if trial.agree(Rows::Any)? {
        return Ok(Rows::Any);
    }
    // Many rows have the algorithm that is advised for them, few the best that gives the same bits.
    let mut few = Vec::new();
    for rows in [PERIOD, 64] {
        few.extend(cuda.products.offers(cuda, &trial.product(rows, trial.result.ptr())).unwrap_or_default());
    }
    few.push(many[0]);
    for algo in few {
        let how = Rows::Two([algo, many[0]]);
        if trial.agree(how)? {
            return Ok(how);
        }
    }
    Ok(Rows::Plain)
}

/// Operands full of noise, the rows of the first repeating, and room for results.
struct Trial<'a> {
    cuda: &'a Cuda,
    shape: [usize; 2],
    out: DType,
    /// The most rows.
    most: usize,
    x: Memory,
    w: Memory,
    /// The rows that all others are compared with.
    reference: Memory,
    result: Memory,
    found: Memory,
}

impl<'a> Trial<'a> {
    /// With as many rows as there is room for.
    fn new(cuda: &'a Cuda, shape: [usize; 2], out: DType) -> Result<Self> {
        let mut most = (MOST / shape[0] / 64 * 64).clamp(PERIOD, ROWS[ROWS.len() - 1]);
        loop {
            match Trial::with(cuda, shape, out, most) {
                Err(_) if most > PERIOD => most = (most / 2).max(PERIOD),
                done => return done,
            }
        }
    }

    fn with(cuda: &'a Cuda, [n, k]: [usize; 2], out: DType, most: usize) -> Result<Self> {
        let (x, w) = (cuda.arena.take(most * k * 2)?, cuda.arena.take(n * k * 2)?);
        for (seed, memory, len, period) in [(1u32, &x, most * k, PERIOD * k), (2, &w, n * k, n * k)] {
            cuda.launch_flat("rows", "noise_again", len, &args![memory, len, period, seed])?;
        }
        let room = |rows: usize| cuda.arena.take(rows * n * out.size());
        let (reference, result, found) = (room(PERIOD)?, room(most)?, cuda.arena.take(4)?);
        Ok(Trial { cuda, shape: [n, k], out, most, x, w, reference, result, found })
    }

    fn product(&self, rows: usize, to: u64) -> Gemm {
        let [n, k] = self.shape;
        Gemm::forward(rows, n, k, self.x.ptr(), self.w.ptr(), to, self.out)
    }

    /// Whether every number of rows gives each row the same bits.
    fn agree(&self, how: Rows) -> Result<bool> {
        let cuda = self.cuda;
        // An algorithm may not serve every number of rows.
        let start = |rows: usize, to: &Memory| {
            cuda.products.gemm_by(cuda, &self.product(rows, to.ptr()), how.algo(rows)).is_ok()
        };
        cuda.upload(self.found.ptr(), &[0u32])?;
        if !start(PERIOD, &self.reference) {
            return Ok(false);
        }
        for rows in ROWS.into_iter().filter(|&r| r < self.most).chain([self.most]) {
            if !start(rows, &self.result) {
                return Ok(false);
            }
            let words = |rows: usize| rows * self.shape[0] * self.out.size() / 4;
            let arguments = args![&self.result, &self.reference, words(rows), words(PERIOD), &self.found];
            cuda.launch_flat("rows", "differ_again", words(rows), &arguments)?;
        }
        let mut differ = [1u32];
        cuda.download(self.found.ptr(), &mut differ)?;
        Ok(differ[0] == 0)
    }
}

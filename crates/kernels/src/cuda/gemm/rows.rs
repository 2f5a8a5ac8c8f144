//! Row invariance: how a row of a forward GEMM gets the same bits whatever the number of rows.
//!
//! For each weight shape, one cuBLASLt algorithm is found whose rows do not depend on their number: the anchor. Another algorithm
//! is used for some number of rows only if it is found to give the anchor's bits there. Without an anchor, or if cuBLASLt does
//! not support the shape, our own kernel is used.
//!
//! A shard of a weight (some of its output features) must have the bits of the full weight: its algorithms are those that give
//! the bits of the full weight's anchor, tested on the first features of the same test weight. If there is none, the GEMM is
//! refused.
//!
//! The test compares sums that cancel: rows (x, -x) times weights (w, w), with numbers of many magnitudes. Only accumulated
//! rounding errors remain, so that a different order of additions shows in the leading digits of the result, also after
//! rounding to bf16. (Of sums that do not cancel but differ, one in thousands still differs after rounding; GEMMs of one row
//! passed such a test although their bits differed.)

use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::convert;
use crate::cuda::gemm::linear::{ForwardShape, reference_forward};
use crate::cuda::gemm::{Gemm, alignment};
use crate::cuda::launch::args;
use crate::cuda::memory::CardMemory;
use crate::{DType, Error, Result, lock};
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t as Algo;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

/// Numbers of rows to test, as far as their results do not exceed [`MAX_RESULTS`] elements.
const ROWS: [usize; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384];
/// Number of distinct rows of the reference; rows repeat after that.
const PERIOD: usize = 256;
/// Batches of fewer rows than this are tested at several offsets, so that many different rows are tested alone. Rows this far
/// apart are aligned to 256 bytes.
const APART: usize = 16;
/// Maximum results per test: as many as the logits that a head computes at a time.
const MAX_RESULTS: usize = 1 << 28;
/// Maximum rows, and results, of a test after the anchor was found; at least [`PERIOD`] rows.
const MAX_LATER_ROWS: usize = 1024;
const MAX_LATER_RESULTS: usize = 1 << 25;
/// Number of algorithms to test as anchors, and per number of rows.
const ANCHORS: usize = 4;
const CANDIDATES: usize = 4;
/// Maximum number of cached choices, so that ever new batch sizes do not exhaust memory.
const KEPT: usize = 4096;
/// Up to this number of rows, each count is tested separately: libraries have special cases for few rows.
const EACH: usize = 4;

/// How a weight's forward GEMMs achieve row invariance.
#[derive(Clone)]
pub(crate) enum RowInvariance {
    /// Not required: the heuristic's choice.
    Any,
    /// By tested algorithms.
    Checked(Arc<CheckedAlgorithms>),
    /// By our own kernel.
    Plain,
}

/// cuBLASLt algorithms that give each row of an `[n, k]` weight's GEMMs the same bits.
pub(crate) struct CheckedAlgorithms {
    shape: [usize; 2],
    out: DType,
    /// Output features of the full weight that this one is a shard of, or its own.
    whole: usize,
    /// Algorithms known to be correct for any number of rows; the first is the anchor.
    checked: Vec<Algo>,
    known: Mutex<KnownAlgos>,
}

#[derive(Default)]
struct KnownAlgos {
    /// Whether an algorithm has the anchor's bits, by its data and the number of rows (0: more than [`EACH`]).
    verdicts: HashMap<([u64; 8], usize), bool>,
    /// The algorithm for a number of rows, by the alignment of operands and result.
    chosen: HashMap<(usize, [u32; 3]), Algo>,
}

/// Cache key: an `[n, k]` weight, which is a shard of one with `whole` output features or all of it, and the type of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowsKey {
    pub n: usize,
    pub k: usize,
    pub out: DType,
    pub whole: usize,
}

/// How row invariance is achieved for a weight; determined once per shape.
pub(crate) fn rows(cuda: &Cuda, key: RowsKey) -> Result<RowInvariance> {
    if !cuda.exact() {
        return Ok(RowInvariance::Any);
    }
    let RowsKey { n, k, out, whole } = key;
    if let Some(known) = lock(&cuda.products.rows).get(&key) {
        return Ok(known.clone());
    }
    let _trials = cuda.profile.trials();
    let how = if n < whole {
        match rows(cuda, RowsKey { n: whole, ..key })? {
            RowInvariance::Checked(all) => RowInvariance::Checked(Arc::new(find_part(cuda, key, &all)?)),
            other => other,
        }
    } else {
        match find(cuda, n, k, out)? {
            Some(checked) => RowInvariance::Checked(Arc::new(checked)),
            None => RowInvariance::Plain,
        }
    };
    cuda.profile.note(|| {
        let name = match &how {
            RowInvariance::Checked(c) => format!("{} of the library's algorithms", c.checked.len()),
            _ => "the plain kernel".into(),
        };
        let of = if n < whole { format!(" of {whole}x{k}") } else { String::new() };
        format!("rows of {n}x{k}{of} into {}: the same bits by {name}", out.name())
    });
    lock(&cuda.products.rows).insert(key, how.clone());
    Ok(how)
}

impl CheckedAlgorithms {
    /// From the tested algorithms, the anchor first.
    fn new(trial: &Trial<'_>, whole: usize, checked: Vec<Algo>) -> Self {
        let verdicts = (0..=EACH).map(|rows| ((checked[0].data, rows), true)).collect();
        let known = Mutex::new(KnownAlgos { verdicts, chosen: HashMap::new() });
        CheckedAlgorithms { shape: trial.shape, out: trial.out, whole, checked, known }
    }

    /// Output features of the full weight, if this is a shard.
    pub(crate) fn part_of(&self) -> Option<usize> {
        Some(self.whole).filter(|&whole| whole > self.shape[0])
    }

    fn known(&self) -> MutexGuard<'_, KnownAlgos> {
        lock(&self.known)
    }

    /// The algorithm for a GEMM with this weight.
    pub(crate) fn algo(&self, cuda: &Cuda, g: &Gemm) -> Result<Algo> {
        let key = (g.m, [g.a, g.b, g.c].map(alignment));
        if let Some(&algo) = self.known().chosen.get(&key) {
            return Ok(algo);
        }
        let checked = self.checked.iter().find(|algo| cuda.products.serves(cuda, g, algo));
        let checked = *checked.unwrap_or(&self.checked[0]);
        // No tests while a graph is captured; the next call can.
        if cuda.capturing.load(Ordering::Relaxed) {
            return Ok(checked);
        }
        let advised = cuda.products.offers(cuda, g).unwrap_or_default();
        let mut found = checked;
        for algo in advised.iter().take(CANDIDATES) {
            if self.accepts(cuda, algo, g.m)? {
                found = *algo;
                break;
            }
        }
        let mut known = self.known();
        if known.chosen.len() >= KEPT {
            known.chosen.clear();
        }
        known.chosen.insert(key, found);
        Ok(found)
    }

    /// Whether an algorithm gives the anchor's bits for this number of rows; tested once.
    pub(crate) fn accepts(&self, cuda: &Cuda, algo: &Algo, rows: usize) -> Result<bool> {
        let key = (algo.data, if rows <= EACH { rows } else { 0 });
        if let Some(&verdict) = self.known().verdicts.get(&key) {
            return Ok(verdict);
        }
        if cuda.capturing.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let _trials = cuda.profile.trials();
        let most = (MAX_LATER_RESULTS / self.shape[0]).clamp(PERIOD, MAX_LATER_ROWS);
        // Without memory for a test the algorithm is not used this time, and tested later.
        let Ok(trial) = Trial::with(cuda, self.shape, self.out, rows.clamp(PERIOD, most)) else {
            return Ok(false);
        };
        let verdict = trial.refer_to(&self.checked[0])? && trial.agrees(algo, rows.min(most))?;
        self.known().verdicts.insert(key, verdict);
        Ok(verdict)
    }
}

/// The anchor, and further algorithms for row counts that it does not support; `None` if there is no anchor.
fn find(cuda: &Cuda, n: usize, k: usize, out: DType) -> Result<Option<CheckedAlgorithms>> {
    let trial = Trial::new(cuda, [n, k], out)?;
    for anchor in trial.candidates(Vec::new()) {
        if !trial.refer_to(&anchor)? {
            continue;
        }
        if let Some(checked) = trial.anchored(&anchor)? {
            return Ok(Some(CheckedAlgorithms::new(&trial, n, checked)));
        }
    }
    Ok(None)
}

/// Algorithms that give a shard the bits of the full weight.
fn find_part(cuda: &Cuda, key: RowsKey, all: &CheckedAlgorithms) -> Result<CheckedAlgorithms> {
    let RowsKey { n, k, out, whole } = key;
    let trial = Trial::new(cuda, [n, k], out)?;
    if n.is_multiple_of(8) {
        trial.refer_to_whole(whole, &all.checked[0])?;
        // The full weight's own algorithms are tested first.
        for algo in trial.candidates(all.checked.clone()) {
            if let Some(checked) = trial.anchored(&algo)? {
                return Ok(CheckedAlgorithms::new(&trial, whole, checked));
            }
        }
    }
    let what = format!("cuBLASLt has no algorithm that multiplies {n} of {whole} features (sums of {k}, ");
    let what = what + out.name() + ") with the bits that all of them get together";
    Err(Error::device(what).fix("another number of ranks that share a weight, or f32"))
}

/// Largest number of rows up to which our own kernel gives every number of rows the sums of [`reference_forward`], into type
/// `out`, with rows at several offsets. `launch(rows, x, weights, to)` launches the kernel, whose sums are f32, and returns
/// whether it supports this number of rows.
pub(crate) fn agreeing(
    cuda: &Cuda,
    RowsKey { n, k, out, whole }: RowsKey,
    most: usize,
    launch: impl Fn(usize, u64, u64, u64) -> Result<bool>,
) -> Result<usize> {
    let _trials = cuda.profile.trials();
    let trial = Trial::with(cuda, [n, k], out, PERIOD)?;
    let (want, shape) = (trial.reference.ptr(), ForwardShape { sizes: [PERIOD, n, k], whole });
    reference_forward(cuda, shape, trial.x.ptr(), (trial.w.ptr(), DType::Bf16), (want, out))?;
    let (sums, rounded) = (cuda.arena.take(most * n * 4)?, cuda.arena.take(most * n * 4)?);
    let found = cuda.uploaded(&vec![0u32; most])?;
    let mut tried = 0;
    'numbers: for rows in 1..=most {
        for first in (0..PERIOD).step_by(2 * APART) {
            let x = trial.x.ptr() + (first * k * 2) as u64;
            if !launch(rows, x, trial.w.ptr(), sums.ptr())? {
                break 'numbers;
            }
            convert(cuda, (sums.ptr(), DType::F32), (rounded.ptr(), out), rows * n)?;
            let (want, words) = (want + trial.bytes(first) as u64, trial.bytes(rows) / 4);
            let arguments = args![want, &rounded, words, found.ptr() + (4 * (rows - 1)) as u64];
            cuda.launch_flat("linear", "differ", words, &arguments)?;
        }
        tried = rows;
    }
    let mut differ = vec![1u32; most];
    cuda.download(found.ptr(), &mut differ)?;
    Ok(differ[..tried].iter().take_while(|&&word| word == 0).count())
}

/// Whether our own kernel gives `rows` rows, at several offsets, the results of [`reference_forward`], in type `out`.
/// `launch(x, weights, to)` launches it.
pub(crate) fn agrees(
    cuda: &Cuda,
    RowsKey { n, k, out, whole }: RowsKey,
    rows: usize,
    launch: impl Fn(u64, u64, u64) -> Result<()>,
) -> Result<bool> {
    let trial = Trial::with(cuda, [n, k], out, PERIOD)?;
    let (want, shape) = (trial.reference.ptr(), ForwardShape { sizes: [PERIOD, n, k], whole });
    reference_forward(cuda, shape, trial.x.ptr(), (trial.w.ptr(), DType::Bf16), (want, out))?;
    let found = cuda.uploaded(&[0u32])?;
    for first in (0..=PERIOD - rows).step_by(rows.next_multiple_of(APART)) {
        launch(trial.x.ptr() + (first * k * 2) as u64, trial.w.ptr(), trial.result.ptr())?;
        let (want, words) = (want + trial.bytes(first) as u64, trial.bytes(rows) / 4);
        cuda.launch_flat("linear", "differ", words, &args![want, &trial.result, words, &found])?;
    }
    let mut differ = [1u32];
    cuda.download(found.ptr(), &mut differ)?;
    Ok(differ[0] == 0)
}

/// Test operands whose sums cancel, the rows of the first repeating, and buffers for results.
struct Trial<'a> {
    cuda: &'a Cuda,
    shape: [usize; 2],
    out: DType,
    /// Maximum rows.
    most: usize,
    x: CardMemory,
    w: CardMemory,
    /// The reference rows.
    reference: CardMemory,
    result: CardMemory,
    /// A flag per number of rows: whether any bit differed.
    found: CardMemory,
}

impl<'a> Trial<'a> {
    /// With as many rows as memory allows.
    fn new(cuda: &'a Cuda, shape: [usize; 2], out: DType) -> Result<Self> {
        let mut most = (MAX_RESULTS / shape[0] / 64 * 64).clamp(PERIOD, ROWS[ROWS.len() - 1]);
        loop {
            match Trial::with(cuda, shape, out, most) {
                Err(_) if most > PERIOD => most = (most / 2).max(PERIOD),
                done => return done,
            }
        }
    }

    /// With `most` rows.
    fn with(cuda: &'a Cuda, [n, k]: [usize; 2], out: DType, most: usize) -> Result<Self> {
        let (x, w) = (cuda.arena.take(most * k * 2)?, cuda.arena.take(n * k * 2)?);
        for (seed, memory, len, period) in [(1u32, &x, most * k, PERIOD * k), (2, &w, n * k, n * k)] {
            // Only the rows are negated in their second half.
            let arguments = args![memory, len, period, k, seed, seed == 1];
            cuda.launch_flat("rows", "cancelling", len, &arguments)?;
        }
        let room = |rows: usize| cuda.arena.take(rows * n * out.size());
        let (reference, result) = (room(PERIOD)?, room(most)?);
        let found = cuda.uploaded(&[0u32; ROWS.len()])?;
        Ok(Trial { cuda, shape: [n, k], out, most, x, w, reference, result, found })
    }

    /// GEMM of rows from `first` on, into an address.
    fn product(&self, first: usize, rows: usize, to: u64) -> Gemm {
        let ([n, k], x) = (self.shape, self.x.ptr() + (first * self.shape[1] * 2) as u64);
        Gemm::forward([rows, n, k], x, self.w.ptr(), (to, self.out))
    }

    fn offers(&self, rows: usize) -> Vec<Algo> {
        let product = self.product(0, rows, self.result.ptr());
        self.cuda.products.offers(self.cuda, &product).unwrap_or_default()
    }

    /// Launches it; an algorithm may not support every number of rows.
    fn start(&self, first: usize, rows: usize, to: u64, algo: &Algo) -> bool {
        let product = self.product(first, rows, to);
        self.cuda.products.gemm_by(self.cuda, &product, Some(algo)).is_ok()
    }

    /// Computes the reference rows by this algorithm.
    fn refer_to(&self, anchor: &Algo) -> Result<bool> {
        Ok(self.start(0, PERIOD, self.reference.ptr(), anchor))
    }

    /// Computes the reference rows by the full weight, of which this one has the first features.
    fn refer_to_whole(&self, whole: usize, anchor: &Algo) -> Result<()> {
        let ([n, k], size) = (self.shape, self.out.size());
        let all = Trial::with(self.cuda, [whole, k], self.out, PERIOD)?;
        self.cuda.products.gemm_by(self.cuda, &all.product(0, PERIOD, all.result.ptr()), Some(anchor))?;
        for row in 0..PERIOD {
            let from = all.result.ptr() + (row * whole * size) as u64;
            let to = self.reference.ptr() + (row * n * size) as u64;
            convert(self.cuda, (from, self.out), (to, self.out), n)?;
        }
        Ok(())
    }

    /// These algorithms, then the heuristic's candidates for an anchor.
    fn candidates(&self, mut all: Vec<Algo>) -> Vec<Algo> {
        for rows in [self.most, PERIOD, 64] {
            for algo in self.offers(rows).into_iter().take(ANCHORS) {
                if all.iter().all(|known| known.data != algo.data) {
                    all.push(algo);
                }
            }
        }
        all
    }

    /// Bytes of `rows` result rows.
    fn bytes(&self, rows: usize) -> usize {
        rows * self.shape[0] * self.out.size()
    }

    /// Compares every row of a GEMM of `rows` rows with the reference, and sets flag `slot` if any differs; `false` if the
    /// algorithm does not support it.
    fn compare(&self, slot: usize, rows: usize, algo: &Algo) -> Result<bool> {
        let (cuda, n) = (self.cuda, self.shape[0]);
        let mut met = rows;
        if rows < APART {
            // Rows that a launch does not overwrite must compare equal.
            let (from, to) = ((self.reference.ptr(), self.out), (self.result.ptr(), self.out));
            convert(cuda, from, to, PERIOD * n)?;
            for first in (0..PERIOD).step_by(APART) {
                let to = self.result.ptr() + self.bytes(first) as u64;
                if !self.start(first, rows, to, algo) {
                    return Ok(false);
                }
            }
            met = PERIOD;
        } else if !self.start(0, rows, self.result.ptr(), algo) {
            return Ok(false);
        }
        let words = |rows: usize| self.bytes(rows) / 4;
        let found = self.found.ptr() + (slot * 4) as u64;
        let arguments = args![&self.result, &self.reference, words(met), words(PERIOD), found];
        cuda.launch_flat("rows", "differ_periodic", words(met), &arguments)?;
        Ok(true)
    }

    /// Reads and clears the flags.
    fn differing(&self) -> Result<[bool; ROWS.len()]> {
        let mut words = [1u32; ROWS.len()];
        self.cuda.download(self.found.ptr(), &mut words)?;
        self.cuda.upload(self.found.ptr(), &[0u32; ROWS.len()])?;
        Ok(words.map(|word| word != 0))
    }

    /// Whether a GEMM of `rows` rows has the bits of the reference.
    fn agrees(&self, algo: &Algo, rows: usize) -> Result<bool> {
        let served = self.compare(0, rows, algo)?;
        Ok(!self.differing()?[0] && served)
    }

    /// Algorithms that together give every number of rows the bits of the reference, this one first; `None` if there are none.
    fn anchored(&self, anchor: &Algo) -> Result<Option<Vec<Algo>>> {
        let sizes = || ROWS.into_iter().filter(|&rows| rows < self.most).chain([self.most]).enumerate();
        let mut served = [false; ROWS.len()];
        for (slot, rows) in sizes() {
            served[slot] = self.compare(slot, rows, anchor)?;
        }
        let differing = self.differing()?;
        if served.iter().zip(&differing).any(|(&served, &differs)| served && differs) {
            return Ok(None);
        }
        // Row counts that it does not support need another algorithm with its bits.
        let mut checked = vec![*anchor];
        for (_, rows) in sizes().filter(|&(slot, _)| !served[slot]) {
            let mut found = false;
            for algo in self.offers(rows) {
                if self.agrees(&algo, rows)? {
                    checked.push(algo);
                    found = true;
                    break;
                }
            }
            if !found {
                return Ok(None);
            }
        }
        Ok(Some(checked))
    }
}

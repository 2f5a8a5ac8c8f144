//! Tuning: the fastest algorithm for a large GEMM, found by timing cuBLASLt's candidates.
//!
//! The heuristic's choice is sometimes a fifth slower than the best. Timing must not decide bits: only algorithms that give the
//! bits of the heuristic's choice are considered, so a run is the same whichever wins. Tuning uses the GEMM's own operands if
//! its result is overwritten, not accumulated. Where rows must be invariant (`rows`), the reference and all candidates must be
//! tested algorithms.

use crate::cuda::context::Cuda;
use crate::cuda::gemm::Gemm;
use crate::cuda::gemm::rows::CheckedAlgorithms;
use crate::cuda::launch::{Grid, args};
use crate::{DType, Result, lock};
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Multiply-adds of the smallest GEMM that is tuned: 21 rows of a 7B model's smallest weight.
const LARGE: usize = 1 << 28;
/// Number of algorithms to time.
const TRIES: usize = 12;
/// Launches per timed graph, and replays of it.
const TIMES: usize = 4;
const REPLAYS: usize = 3;
/// Required speed-up over the heuristic's choice, in per cent.
const GAIN: f64 = 1.0;

/// GEMMs that share a tuned algorithm: sizes rounded up to an eighth of a power of two, transposition, type of the result,
/// alignment, batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ShapeClass {
    /// Whether rows must be invariant.
    checked: bool,
    /// For a shard of a weight, the output features of the full weight.
    part_of: Option<usize>,
    sizes: [usize; 3],
    transposed: [bool; 2],
    out: DType,
    aligned: bool,
    batch: usize,
}

impl ShapeClass {
    fn of(g: &Gemm, checked: Option<&CheckedAlgorithms>) -> Self {
        let rounded = |n: usize| n.next_multiple_of((n.next_power_of_two() / 16).max(1));
        ShapeClass {
            checked: checked.is_some(),
            part_of: checked.and_then(CheckedAlgorithms::part_of),
            sizes: [g.m, g.n, g.k].map(rounded),
            transposed: [g.a_transposed, g.b_transposed],
            out: g.out,
            aligned: [g.a, g.b, g.c].iter().all(|at| at % 256 == 0),
            batch: g.batch,
        }
    }
}

/// Tuned algorithms; `None` is the heuristic's choice.
pub(crate) type Tuned = HashMap<ShapeClass, Option<cublasLtMatmulAlgo_t>>;

/// The algorithm for a GEMM if not the heuristic's; one of the tested ones if rows must be invariant.
pub(crate) fn fastest(
    cuda: &Cuda,
    g: &Gemm,
    checked: Option<&CheckedAlgorithms>,
) -> Result<Option<cublasLtMatmulAlgo_t>> {
    let advised = checked.map(|checked| checked.algo(cuda, g)).transpose()?;
    if g.m * g.n * g.k * g.batch < LARGE {
        return Ok(advised);
    }
    let kind = ShapeClass::of(g, checked);
    let known = lock(&cuda.products.tuned).get(&kind).copied();
    if let Some(known) = known {
        // An algorithm tuned at another size may not support this one.
        let Some(algo) = known.filter(|algo| cuda.products.serves(cuda, g, algo)) else { return Ok(advised) };
        // A shard must have the bits of the full weight, which must be tested for this size.
        let part = checked.filter(|checked| checked.part_of().is_some());
        let right = part.map_or(Ok(true), |checked| checked.accepts(cuda, &algo, g.m))?;
        return Ok(if right { Some(algo) } else { advised });
    }
    if g.beta != 0.0 || cuda.capturing.load(Ordering::Relaxed) {
        return Ok(advised);
    }
    let Some(found) = search(cuda, g, advised, checked)? else { return Ok(advised) };
    lock(&cuda.products.tuned).insert(kind, found);
    Ok(found.or(advised))
}

/// Times the candidates. `None` if the operands cannot distinguish their bits, e.g. zeros.
fn search(
    cuda: &Cuda,
    g: &Gemm,
    advised: Option<cublasLtMatmulAlgo_t>,
    checked: Option<&CheckedAlgorithms>,
) -> Result<Option<Option<cublasLtMatmulAlgo_t>>> {
    let _trials = cuda.profile.trials();
    let mut offers = cuda.products.offers(cuda, g)?;
    // The reference comes first: its bits count.
    if let Some(first) = advised {
        offers.retain(|algo| algo.data != first.data);
        offers.insert(0, first);
    }
    let (mut first, mut best) = (None, None);
    for (i, algo) in offers.iter().take(TRIES).enumerate() {
        if cuda.products.attempt(cuda, g, algo).is_err() {
            continue;
        }
        let [bits, filled] = digest(cuda, g)?;
        match first {
            None if i > 0 || 2 * (filled as usize) < words(g) => return Ok(None),
            None => {}
            Some((same, _)) if same != bits => continue,
            Some(_) => {}
        }
        if let Some(checked) = checked.filter(|_| i > 0)
            && !checked.accepts(cuda, algo, g.m)?
        {
            continue;
        }
        let time = time(cuda, TIMES, |_| cuda.products.attempt(cuda, g, algo))?;
        let advised = first.get_or_insert((bits, time)).1;
        let limit = best.map_or(advised * (1.0 - GAIN / 100.0), |(time, _)| time);
        if i > 0 && time < limit {
            best = Some((time, *algo));
        }
    }
    let Some((_, advised)) = first else { return Ok(None) };
    cuda.profile.note(|| {
        let found = best.map_or(advised, |(time, _)| time);
        let work = 2.0 * (g.m * g.n * g.k * g.batch) as f64 * 1e-12;
        format!("{}: {:.0} TFLOP/s as advised, {:.0} as found", g.name(), work / advised, work / found)
    });
    // The result is that of the last candidate: recompute it with the reference algorithm.
    if let Some(algo) = offers.first() {
        cuda.products.attempt(cuda, g, algo)?;
    }
    Ok(Some(best.map(|(_, algo)| algo)))
}

/// Seconds per launch of `times` launches on the GPU alone: captured and replayed as one graph, because launching a short GEMM
/// takes longer than the GEMM. The work must have run once before.
pub(crate) fn time(cuda: &Cuda, times: usize, work: impl Fn(usize) -> Result<()>) -> Result<f64> {
    let graph = crate::cuda::graph::capture(cuda, &mut || (0..times).try_for_each(&work))?;
    graph.launch(cuda)?;
    cuda.synchronize()?;
    let start = Instant::now();
    for _ in 0..REPLAYS {
        graph.launch(cuda)?;
    }
    cuda.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / (REPLAYS * times) as f64)
}

/// Four-byte words of a result.
fn words(g: &Gemm) -> usize {
    g.batch * g.m * g.n * g.out.size() / 4
}

/// A checksum of the result that changes with any word, and the number of non-zero words.
fn digest(cuda: &Cuda, g: &Gemm) -> Result<[u64; 2]> {
    let room = cuda.uploaded(&[0u64; 2])?;
    let blocks = words(g).div_ceil(256).min(16 * cuda.card.processors as usize);
    cuda.launch("linear", "digest", Grid::new(blocks, 256), &args![g.c, words(g), &room])?;
    let mut sums = [0u64; 2];
    cuda.download(room.ptr(), &mut sums)?;
    Ok(sums)
}

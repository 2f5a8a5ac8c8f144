//! The fastest algorithm for a large product, found by trying what cuBLASLt offers.
//!
//! The library's advice is by a model of the card and at times a fifth from the best. What a clock decides must not
//! decide bits: only algorithms that give the bits of the advised one are taken, so a run is the same whichever wins. It is
//! tried on the product's own operands where its result is written, not added. Where rows must not depend on their number
//! (`rows`), the advised one is one that was found to do that, and so must be every other.

use crate::buffer::DType;
use crate::cuda::context::Cuda;
use crate::cuda::gemm::Gemm;
use crate::cuda::gemm::rows::CheckedAlgorithms;
use crate::cuda::launch::{Grid, args};
use crate::error::Result;
use crate::lock;
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Multiply-adds of the smallest product that is worth it: 21 rows of a 7B model's smallest weight.
const LARGE: usize = 1 << 28;
/// Algorithms that are tried.
const TRIES: usize = 12;
/// Launches of a timed graph, and times it is replayed.
const TIMES: usize = 4;
const REPLAYS: usize = 3;
/// How much faster than the advised one another must be, in hundredths.
const GAIN: f64 = 1.0;

/// What products have in common that share an algorithm: sizes rounded up to an eighth of a power of two, transposition,
/// storage of the result, alignment, batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ShapeClass {
    /// Whether rows must not depend on their number.
    checked: bool,
    /// Of a part of a weight the output features of the whole.
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

/// What was found; `None` is the advised algorithm.
pub(crate) type Tuned = HashMap<ShapeClass, Option<cublasLtMatmulAlgo_t>>;

/// The algorithm to name for a product, if not the library's advice; one of the checked ones where there are such.
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
        // One that was found for another size may not serve this one.
        let Some(algo) = known.filter(|algo| cuda.products.serves(cuda, g, algo)) else { return Ok(advised) };
        // A part of a weight must have the bits of the whole, which another part's size says nothing of.
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

/// Times the candidates. Returns `None` if the operands cannot tell them apart: with zeros every sum is the same.
fn search(
    cuda: &Cuda,
    g: &Gemm,
    advised: Option<cublasLtMatmulAlgo_t>,
    checked: Option<&CheckedAlgorithms>,
) -> Result<Option<Option<cublasLtMatmulAlgo_t>>> {
    let _trials = cuda.profile.trials();
    let mut offers = cuda.products.offers(cuda, g)?;
    // What was tried before comes first: its bits are the ones.
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
    // The result stays as the last that was tried has left it: only the advised one's bits may.
    if let Some(algo) = offers.first() {
        cuda.products.attempt(cuda, g, algo)?;
    }
    Ok(Some(best.map(|(_, algo)| algo)))
}

/// Seconds of one of `times` pieces of work on the GPU alone: they are captured and launched as one graph, because launching
/// a short product takes longer than the product. The work must have run once before.
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

/// Words of four bytes of a result.
fn words(g: &Gemm) -> usize {
    g.batch * g.m * g.n * g.out.size() / 4
}

/// A sum over all words of the result that changes with any of them, and the number of words that are not zero.
fn digest(cuda: &Cuda, g: &Gemm) -> Result<[u64; 2]> {
    let room = cuda.uploaded(&[0u64; 2])?;
    let blocks = words(g).div_ceil(256).min(16 * cuda.card.processors as usize);
    cuda.launch("linear", "digest", Grid::new(blocks, 256), &args![g.c, words(g), &room])?;
    let mut sums = [0u64; 2];
    cuda.download(room.ptr(), &mut sums)?;
    Ok(sums)
}

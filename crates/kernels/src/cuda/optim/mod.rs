//! AdamW (f32 and 8-bit) and SGD steps.

pub(crate) mod split_master;

use crate::backend::{AdamW, AdamWParam, OptimizerOps, Sgd};
use crate::codes::{BLOCK, CodeTable, SIGNED, UNSIGNED};
use crate::cuda::context::Cuda;
use crate::cuda::gemm::linear::stored;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{element, split_parts};
use crate::cuda::optim::split_master::{Whole, is_of};
use crate::{Buffer, DType, Result, shapes};

/// `x^n` by repeated squaring, the same on every system.
fn power(mut x: f64, mut n: u64) -> f64 {
    let mut result = 1.0;
    while n > 0 {
        if n & 1 == 1 {
            result *= x;
        }
        x *= x;
        n >>= 1;
    }
    result
}

fn all_f32(buffers: &[&Buffer], len: usize) -> bool {
    buffers.iter().all(|b| b.dtype() == DType::F32 && b.len() == len)
}

/// Storage of a range, as in optim.cu.
const WHOLE: u32 = 0;
const COPIED: u32 = 1;
const SPLIT: u32 = 2;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] =
    &[("WHOLE", WHOLE as usize), ("COPIED", COPIED as usize), ("SPLIT", SPLIT as usize), ("CODES", BLOCK)];
/// Elements of a range per block: one 8-bit block per warp.
const CHUNK: usize = 2048;
/// Threads per block.
const THREADS: u32 = 256;
const _: () = assert!(CHUNK == BLOCK * THREADS as usize / 32);
/// The same for 8-bit moments: larger, because a block first loads the code tables.
const CODED_CHUNK: usize = 8 * CHUNK;

/// AdamW's factors of a step, in the order of `AdamW` in optim.cu.
fn factors(op: AdamW) -> [f32; 9] {
    assert!(op.step > 0, "AdamW's steps are counted from 1");
    [
        op.grad_scale,
        (1.0 - op.lr * op.weight_decay) as f32,
        op.beta1 as f32,
        (1.0 - op.beta1) as f32,
        op.beta2 as f32,
        (1.0 - op.beta2) as f32,
        (1.0 - power(op.beta2, op.step)).sqrt() as f32,
        op.eps as f32,
        (op.lr / (1.0 - power(op.beta1, op.step))) as f32,
    ]
}

/// Ranges of parameters for one launch, as `Stretch` in optim.cu.
struct Stretches {
    words: Vec<u64>,
    count: u32,
    chunks: usize,
    /// Elements per chunk.
    chunk: usize,
}

impl Stretches {
    fn in_chunks_of(chunk: usize) -> Self {
        Stretches { words: Vec::new(), count: 0, chunks: 0, chunk }
    }

    /// Adds the ranges of a parameter.
    fn add(&mut self, p: &AdamWParam<'_>) {
        let n = p.param.len();
        let format = if p.absmax.is_some() { DType::U8 } else { DType::F32 };
        assert!(all_f32(&[p.param, p.grad], n) && p.derived.as_ref().is_none_or(|w| w.n * w.k == n));
        assert!([&p.first, &p.second].iter().all(|b| b.dtype() == format && b.len() == n));
        let own = p.derived.as_ref().is_none_or(|w| split_parts(p.param, 0).is_none() || is_of(p.param, w));
        let kept = split_parts(p.param, 0).is_none_or(|[lower, _]| lower != 0);
        assert!(own && kept, "a split master is updated with both halves, and with its own weight");
        let storage = match (split_parts(p.param, 0), &p.derived) {
            (Some(_), _) => SPLIT,
            (None, Some(w)) if stored(w).1 == DType::Bf16 => COPIED,
            _ => WHOLE,
        };
        let mut numbers: Vec<u32> = factors(p.op).iter().map(|x| x.to_bits()).collect();
        numbers.push(storage);
        for range in p.ranges {
            assert!(range.end <= n);
            let copy = p.derived.as_ref().map_or(0, |w| {
                let (at, storage) = stored(w);
                at + (range.start * storage.size()) as u64
            });
            let [param, derived] =
                split_parts(p.param, range.start).unwrap_or_else(|| [element(p.param, range.start), copy]);
            let absmax = p.absmax.as_ref().map(|pair| {
                assert!(
                    range.start.is_multiple_of(BLOCK) && all_f32(&[&*pair[0], &*pair[1]], n.div_ceil(BLOCK))
                );
                [element(pair[0], range.start / BLOCK), element(pair[1], range.start / BLOCK)]
            });
            self.words.push(param);
            self.words.extend([p.grad, p.first, p.second].map(|b| element(b, range.start)));
            self.words.extend([derived, range.len() as u64, self.chunks as u64]);
            self.words.extend(absmax.unwrap_or_default());
            self.words.extend(numbers.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
            (self.count, self.chunks) = (self.count + 1, self.chunks + range.len().div_ceil(self.chunk));
        }
    }
}

/// The code tables of first and second moments, as `CodeTable` in optim.cu.
fn code_tables() -> Vec<f32> {
    let table = |t: &CodeTable| [&t.values[..], &t.tree()].concat();
    [table(&SIGNED), table(&UNSIGNED)].concat()
}

impl OptimizerOps for Cuda {
    // All ranges in one kernel, and one more for 8-bit moments: most ranges are small, and a launch for each would take longer
    // than some of them (multi-tensor apply).
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        shapes::adamw(self, params)?;
        let (mut whole, mut coded) = (Stretches::in_chunks_of(CHUNK), Stretches::in_chunks_of(CODED_CHUNK));
        for p in params.iter() {
            if p.absmax.is_some() { &mut coded } else { &mut whole }.add(p);
        }
        if whole.chunks > 0 {
            let table = self.uploaded(&whole.words)?;
            let args = args![&table, whole.count, whole.chunk as u32];
            self.launch("optim", "adamw", Grid::new(whole.chunks, THREADS), &args)?;
        }
        if coded.chunks > 0 {
            let (table, codes) = (self.uploaded(&coded.words)?, self.uploaded(&code_tables())?);
            let args = args![&table, coded.count, coded.chunk as u32, &codes];
            self.launch("optim", "adamw8", Grid::new(coded.chunks, THREADS), &args)?;
        }
        Ok(())
    }
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::sgd(self, op, &range, param, grad, velocity.as_deref())?;
        let n = param.len();
        assert!(range.end <= n && all_f32(&[param, grad], n));
        assert!(op.momentum == 0.0 || velocity.is_some(), "momentum needs a velocity");
        let velocity = velocity.filter(|_| op.momentum != 0.0);
        let velocity = velocity.map_or(0, |v| {
            assert!(all_f32(&[v], n));
            element(v, range.start)
        });
        let whole = Whole::of(self, param, range.start, range.len())?;
        let args = args![
            whole.ptr(),
            element(grad, range.start),
            velocity,
            range.len(),
            op.grad_scale,
            op.weight_decay as f32,
            op.momentum as f32,
            op.lr as f32
        ];
        self.launch_flat("optim", "sgd", range.len(), &args)?;
        whole.put_back(self, param, range.start, range.len())
    }
}

//! Updates of parameters from their gradients.

pub(crate) mod split_master;

use crate::backend::{AdamW, AdamWParam, OptimizerOps, Sgd};
use crate::buffer::{Buffer, DType};
use crate::cuda::context::Cuda;
use crate::cuda::gemm::linear::stored;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{element, split_parts};
use crate::cuda::optim::split_master::{Whole, is_of};
use crate::error::Result;
use crate::shapes;

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

/// How a stretch is stored, as in optim.cu.
const WHOLE: u32 = 0;
const COPIED: u32 = 1;
const SPLIT: u32 = 2;
/// Sizes that the kernels share, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] =
    &[("WHOLE", WHOLE as usize), ("COPIED", COPIED as usize), ("SPLIT", SPLIT as usize)];
/// Elements of a stretch that a block has.
const CHUNK: usize = 2048;

/// What a step multiplies with, in the order of `AdamW` in optim.cu.
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

impl OptimizerOps for Cuda {
    // All stretches by one kernel: most are small, and starting one for each would take longer
    // than some of them.
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        shapes::adamw(self, params)?;
        let (mut table, mut count, mut chunks) = (Vec::<u64>::new(), 0u32, 0);
        for p in params {
            let (n, state) = (p.param.len(), [&*p.param, p.grad, &*p.first, &*p.second]);
            assert!(all_f32(&state, n) && p.derived.as_ref().is_none_or(|w| w.n * w.k == n));
            let own =
                p.derived.as_ref().is_none_or(|w| split_parts(p.param, 0).is_none() || is_of(p.param, w));
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
                let [param, derived] = split_parts(p.param, range.start)
                    .unwrap_or_else(|| [element(p.param, range.start), copy]);
                table.push(param);
                table.extend([p.grad, p.first, p.second].map(|b| element(b, range.start)));
                table.extend([derived, range.len() as u64, chunks as u64]);
                table.extend(numbers.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
                (count, chunks) = (count + 1, chunks + range.len().div_ceil(CHUNK));
            }
        }
        if chunks == 0 {
            return Ok(());
        }
        let table = self.uploaded(&table)?;
        self.launch("optim", "adamw", Grid::new(chunks, 256), &args![&table, count, CHUNK as u32])
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

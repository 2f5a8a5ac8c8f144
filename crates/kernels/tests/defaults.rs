//! A device with the required methods alone: everything else is composed of them, and is what the CPU computes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_kernels::backend::*;
use ferrl_kernels::check::{CASES, Check, CheckOutcome, download, random, random_ids, upload, weight};
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Buffer, DType, Result, Weight};

struct Plain(Cpu);

impl DeviceInfo for Plain {
    fn as_info(&self) -> &dyn DeviceInfo {
        self
    }
    fn holds(&self, buffer: &Buffer) -> bool {
        self.0.holds(buffer)
    }
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool {
        self.0.holds_weight(weight, backward)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        self.0.ids(buffer)
    }
    fn block_tokens(&self) -> usize {
        self.0.block_tokens()
    }
    fn block_len(&self, heads: Heads) -> usize {
        self.0.block_len(heads)
    }
}

impl MemoryOps for Plain {
    fn memory(&self) -> (usize, usize) {
        self.0.memory()
    }
    fn set_memory_limit(&self, bytes: Option<usize>) {
        self.0.set_memory_limit(bytes);
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.alloc(dtype, len)
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        self.0.write(dst, at, src)
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        self.0.read(src, at, dst)
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        self.0.indices(values)
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        self.0.copy(src, from, dst, to, len)
    }
}
impl VectorOps for Plain {
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.0.axpy(a, x, y)
    }
}
impl EmbeddingOps for Plain {}
impl ExpertOps for Plain {}
impl LowRankOps for Plain {}
impl NormOps for Plain {
    fn norm(&self, norm: Normed<'_>, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.0.norm(norm, x, y)
    }
    fn norm_backward(
        &self,
        norm: Normed<'_>,
        dy: &Buffer,
        x: &Buffer,
        dx: Target<'_>,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        self.0.norm_backward(norm, dy, x, dx, grads)
    }
}
impl HeadNormOps for Plain {}
impl LinearOps for Plain {
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight> {
        self.0.weight(n, k, dtype, backward)
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        self.0.load_weight(master, weight)
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        self.0.linear(x, w, bias, y)
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        self.0.linear_dx(dy, w, dx)
    }
    fn linear_dw(&self, dy: &Buffer, x: &Buffer, tokens: usize, grads: LinearGrads<'_>) -> Result<()> {
        self.0.linear_dw(dy, x, tokens, grads)
    }
}
impl ActivationOps for Plain {
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.0.activation(op, width, x, y)
    }
    fn activation_backward(
        &self,
        op: Activation,
        width: usize,
        x: &Buffer,
        dy: &Buffer,
        dx: &mut Buffer,
    ) -> Result<()> {
        self.0.activation_backward(op, width, x, dy, dx)
    }
}
impl AttentionOps for Plain {
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        self.0.attention(op, qkv, segments, out, lse)
    }
    fn attention_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        self.0.attention_backward(op, saved, dout, segments, dqkv)
    }
}
impl CacheOps for Plain {
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        self.0.cache_write(heads, qkv, rows, cache)
    }
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        self.0.attention_paged(op, qkv, rows, cache, out)
    }
}
impl RopeOps for Plain {
    fn rotary(&self, heads: Heads, rotation: Rotation<'_>, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        self.0.rotary(heads, rotation, inverse, qkv)
    }
}
impl DecodeOps for Plain {}
impl HeadOps for Plain {}
impl DivergenceOps for Plain {}
impl VocabOps for Plain {}
impl SampleOps for Plain {}
impl OptimizerOps for Plain {
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        self.0.adamw(params)
    }
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()> {
        self.0.sgd(op, range, param, grad, velocity)
    }
}
impl GraphOps for Plain {}
impl Backend for Plain {
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        self.0.peak_gflops(dtype)
    }
}

/// Both devices on which a test runs, and what it found to differ.
fn compare(run: impl Fn(&mut Check<'_>) -> Result<()>) {
    let (cpu, plain) = (Cpu::new(Some(2)).unwrap(), Plain(Cpu::new(Some(2)).unwrap()));
    let mut wrong = Vec::new();
    let mut each = |o: &CheckOutcome| {
        if !o.is_right() {
            wrong.push(format!("{}: {} of {}", o.name, o.worst, o.limit));
        }
    };
    run(&mut Check::new(&cpu, &plain, &mut each)).unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn composed_operations_refuse_wrong_operands_and_are_what_the_cpu_computes() {
    compare(|check| {
        let covered = CASES.iter().filter(|(name, _)| ["operands", "rows"].contains(name));
        covered.into_iter().try_for_each(|(name, case)| case(check).map_err(|e| e.at(name)))
    });
}

/// Logits, log-probabilities, KL, tokens and gradients of a small head.
fn head(b: &dyn Backend, dtype: DType, op: LogpHead) -> Result<Vec<Vec<f32>>> {
    let (rows, vocab, k) = (70, 301, 24);
    let hidden = |seed| upload(b, dtype, &random(seed, rows * k));
    let w = weight(b, dtype, vocab, k, &random(2, vocab * k))?;
    let v = weight(b, dtype, vocab, k, &random(3, vocab * k))?;
    let zeros = |n| upload(b, DType::F32, &vec![0.0; n]);
    let (x, y) = (hidden(4)?, hidden(5)?);
    let (targets, ids) = (random_ids(6, rows, vocab), random_ids(7, 2 * rows, vocab));
    let (targets, ids, mut others) = (b.indices(&targets)?, b.indices(&ids)?, zeros(2 * rows)?);
    let mut stats = LogpStats { logp: zeros(rows)?, entropy: zeros(rows)?, lse: zeros(rows)? };
    b.logp(HeadInput { op, x: &x, w: &w, targets: &targets }, Some((&ids, &mut others)), &mut stats)?;
    let [dlogp, dentropy, dkl] = [8, 9, 10].map(|seed| upload(b, DType::F32, &random(seed, rows)));
    let (dlogp, dentropy, dothers) = (dlogp?, dentropy?, upload(b, DType::F32, &random(11, 2 * rows))?);
    let grads = LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: Some(&dothers) };
    let (mut dx, mut dw) = (zeros(rows * k)?, upload(b, DType::F32, &random(12, vocab * k))?);
    b.logp_backward(
        HeadInput { op, x: &x, w: &w, targets: &targets },
        Some(&ids),
        &stats,
        &grads,
        HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: false },
    )?;
    let (mut kl, mut kl_dx, mut kl_dw) = (zeros(rows)?, zeros(rows * k)?, zeros(vocab * k)?);
    b.kl(op, (&x, &w), (&y, &v), &mut kl)?;
    b.kl_backward(
        op,
        (&x, &w),
        (&y, &v),
        &dkl?,
        HeadGrads { dx: &mut kl_dx, dw: Some(&mut kl_dw), add: true },
    )?;
    let (mut logits, mut lse) = (zeros(rows * vocab)?, zeros(rows)?);
    b.logits(op, &x, &w, &mut logits, &mut lse)?;
    let draws: Vec<f32> = (0..rows).map(|i| (i as f32 + 0.5) / rows as f32).collect();
    let tokens = [b.sample(&logits, &lse, &draws)?, b.argmax(&logits, rows)?].concat();
    let LogpStats { logp, entropy, lse: sums } = &stats;
    let all = [logp, entropy, sums, &others, &dx, &dw, &kl, &kl_dx, &kl_dw, &logits, &lse];
    let mut results = all.iter().map(|b_| download(b, b_)).collect::<Result<Vec<_>>>()?;
    results.push(tokens.iter().map(|&t| t as f32).collect());
    Ok(results)
}

#[test]
fn the_composed_head_is_what_the_cpu_computes() {
    compare(|check| {
        for (dtype, limit) in [(DType::F32, 1e-4), (DType::Bf16, 2e-2)] {
            for softcap in [None, Some(3.0)] {
                let op = LogpHead { temperature: 0.7, softcap };
                let (want, got) = (head(check.cpu, dtype, op)?, head(check.card, dtype, op)?);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    check.close(format!("result {i}, {} {softcap:?}", dtype.name()), got, want, limit);
                }
            }
        }
        Ok(())
    });
}

/// Output, log-sum-exp and gradients of some rows of two sequences.
fn attention_shard(b: &dyn Backend, dtype: DType) -> Result<Vec<Vec<f32>>> {
    let heads = Heads { heads: 4, kv_heads: 2, head_dim: 8 };
    let op = Attention { heads, scale: 0.4, softcap: None, window: Some(20) };
    let (segments, ranges) = (Segments::of([3, 50]), [1..5, 40..49]);
    let (shard, rows) = (RowShard { segments: &segments, ranges: &ranges }, segments.rows());
    let values = |seed, width: usize, rows: usize| upload(b, dtype, &random(seed, rows * width));
    let (q, kv) = (values(1, heads.out_width(), shard.rows())?, values(2, heads.kv_width(), rows)?);
    let mut out = values(3, heads.out_width(), shard.rows())?;
    let mut lse = b.alloc(DType::F32, shard.rows() * heads.heads)?;
    b.attention_shard(op, shard, (&q, &kv), &mut out, &mut lse)?;
    let (qkv, dout) = (values(4, heads.qkv_width(), rows)?, values(5, heads.out_width(), rows)?);
    let (mut all, mut all_lse) =
        (values(6, heads.out_width(), rows)?, b.alloc(DType::F32, rows * heads.heads)?);
    b.attention(op, &qkv, &segments, &mut all, &mut all_lse)?;
    let mut dqkv = values(7, heads.qkv_width(), shard.rows())?;
    let saved = AttentionSaved { qkv: &qkv, out: &all, lse: &all_lse };
    b.attention_shard_backward(op, saved, &dout, shard, &mut dqkv)?;
    [&out, &lse, &dqkv].into_iter().map(|x| download(b, x)).collect()
}

#[test]
fn composed_attention_of_a_shard_is_what_the_cpu_computes() {
    compare(|check| {
        for dtype in [DType::F32, DType::Bf16] {
            let (want, got) = (attention_shard(check.cpu, dtype)?, attention_shard(check.card, dtype)?);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                check.close(format!("result {i}, {}", dtype.name()), got, want, 0.0);
            }
        }
        Ok(())
    });
}

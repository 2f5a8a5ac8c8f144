//! Attention and rotary against f64, and attention's promise: a row is the same bits in training, prefill and
//! decoding, whatever is computed beside it.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_kernels::backend::*;
use ferrl_kernels::cpu::{Cpu, Level, narrow, widen};
use ferrl_kernels::{Buffer, DType};

// ---- helpers --------------------------------------------------------------------------------------------

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() % 20001) as f32 / 10000.0 - 1.0).collect()
    }
}

fn put(cpu: &Cpu, b: &mut Buffer, at: usize, x: &[f32]) {
    cpu.write(b, at, x).unwrap();
}

fn buffer(cpu: &Cpu, dtype: DType, x: &[f32]) -> Buffer {
    let mut b = cpu.alloc(dtype, x.len()).unwrap();
    put(cpu, &mut b, 0, x);
    b
}

fn values(cpu: &Cpu, b: &Buffer) -> Vec<f32> {
    let mut x = vec![0.0; b.len()];
    cpu.read(b, 0, &mut x).unwrap();
    x
}

fn indices(cpu: &Cpu, x: &[u32]) -> Buffer {
    cpu.indices(x).unwrap()
}

fn nan(cpu: &Cpu, dtype: DType, len: usize) -> Buffer {
    buffer(cpu, dtype, &vec![f32::NAN; len])
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}

fn rounded(dtype: DType, x: Vec<f32>) -> Vec<f32> {
    if dtype == DType::F32 { x } else { x.into_iter().map(|x| widen(narrow(x))).collect() }
}

fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((*g as f64 - w).abs() <= tolerance * (1.0 + w.abs()), "{what} at {i}: {g}, not {w}");
    }
}

fn cpus() -> Vec<Cpu> {
    Level::available()
        .into_iter()
        .flat_map(|l| (1..=3).map(move |t| Cpu::with_level(t, l).unwrap()))
        .collect()
}

fn random_op(random: &mut Random, head_dim: usize) -> Attention {
    let kv_heads = 1 + random.below(3);
    // Now and then more heads to a key head than a task has rows.
    let heads = kv_heads * if random.below(20) == 0 { 60 } else { 1 + random.below(8) };
    Attention {
        heads: Heads { heads, kv_heads, head_dim },
        scale: 4.0 / (head_dim as f32).sqrt(),
        softcap: random.one_of(&[None, Some(3.0), None]),
        window: random.one_of(&[None, Some(1), Some(7), Some(32), Some(50), Some(1000)]),
    }
}

/// Output and log-sum-exp.
fn forward(cpu: &Cpu, op: Attention, dtype: DType, qkv: &[f32], lengths: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let segments = Segments::of(lengths.iter().copied());
    let mut out = nan(cpu, dtype, segments.rows() * op.heads.out_width());
    let mut lse = nan(cpu, DType::F32, segments.rows() * op.heads.heads);
    // What memory that is handed out again may hold.
    drop(nan(cpu, dtype, cpu.cache_len(op.heads, lengths.iter().map(|l| l.div_ceil(32)).sum())));
    cpu.attention(op, &buffer(cpu, dtype, qkv), &segments, &mut out, &mut lse).unwrap();
    (values(cpu, &out), values(cpu, &lse))
}

#[expect(clippy::too_many_arguments, reason = "the operands of a kernel, one by one")]
fn backward(
    cpu: &Cpu,
    op: Attention,
    dtype: DType,
    qkv: &[f32],
    (out, lse): &(Vec<f32>, Vec<f32>),
    dout: &[f32],
    lengths: &[usize],
) -> Vec<f32> {
    let segments = Segments::of(lengths.iter().copied());
    let mut dqkv = nan(cpu, dtype, qkv.len());
    let [q, o, d] = [qkv, out, dout].map(|x| buffer(cpu, dtype, x));
    let l = buffer(cpu, DType::F32, lse);
    cpu.attention_backward(op, AttentionSaved { qkv: &q, out: &o, lse: &l }, &d, &segments, &mut dqkv)
        .unwrap();
    values(cpu, &dqkv)
}

// ---- against f64 ----------------------------------------------------------------------------------------

struct Exact {
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

/// One sequence, forward and backward.
fn exact(op: Attention, qkv: &[f64], dout: &[f64]) -> Exact {
    let Heads { heads, kv_heads, head_dim: d } = op.heads;
    let (width, ow) = (op.heads.qkv_width(), op.heads.out_width());
    let n = qkv.len() / width;
    let mut e = Exact { out: vec![0.0; n * ow], lse: vec![0.0; n * heads], dqkv: vec![0.0; n * width] };
    for i in 0..n {
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let (q, k0, v0) = (i * width + h * d, (heads + kv) * d, (heads + kv_heads + kv) * d);
            let first = op.window.map_or(0, |w| (i + 1).saturating_sub(w));
            let score = |j: usize| {
                let dot: f64 = (0..d).map(|c| qkv[q + c] * qkv[j * width + k0 + c]).sum();
                let z = dot * op.scale as f64;
                op.softcap.map_or(z, |c| c as f64 * (z / c as f64).tanh())
            };
            let s: Vec<f64> = (first..=i).map(score).collect();
            let m = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let lse = m + s.iter().map(|s| (s - m).exp()).sum::<f64>().ln();
            e.lse[i * heads + h] = lse;
            let o = i * ow + h * d;
            for (j, s) in (first..=i).zip(&s) {
                (0..d).for_each(|c| e.out[o + c] += (s - lse).exp() * qkv[j * width + v0 + c]);
            }
            let delta: f64 = (0..d).map(|c| dout[o + c] * e.out[o + c]).sum();
            for (j, s) in (first..=i).zip(&s) {
                let p = (s - lse).exp();
                let dp: f64 = (0..d).map(|c| dout[o + c] * qkv[j * width + v0 + c]).sum();
                let slope = op.softcap.map_or(1.0, |c| 1.0 - (s / c as f64).powi(2));
                let ds = p * (dp - delta) * slope * op.scale as f64;
                for c in 0..d {
                    e.dqkv[j * width + v0 + c] += p * dout[o + c];
                    e.dqkv[q + c] += ds * qkv[j * width + k0 + c];
                    e.dqkv[j * width + k0 + c] += ds * qkv[q + c];
                }
            }
        }
    }
    e
}

#[test]
fn the_reference_gradient_is_the_derivative() {
    let mut random = Random(5);
    for (softcap, window) in [(None, None), (Some(1.5), None), (None, Some(3)), (Some(2.0), Some(4))] {
        let heads = Heads { heads: 4, kv_heads: 2, head_dim: 3 };
        let op = Attention { heads, scale: 0.9, softcap, window };
        let qkv = wide(&random.values(7 * heads.qkv_width()));
        let dout = wide(&random.values(7 * heads.out_width()));
        let loss = |x: &[f64]| exact(op, x, &dout).out.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>();
        let grad = exact(op, &qkv, &dout).dqkv;
        for i in 0..qkv.len() {
            let (mut up, mut down) = (qkv.clone(), qkv.clone());
            up[i] += 1e-5;
            down[i] -= 1e-5;
            let slope = (loss(&up) - loss(&down)) / 2e-5;
            assert!((slope - grad[i]).abs() < 1e-8, "{i}: {slope} {}", grad[i]);
        }
    }
}

#[test]
fn forward_and_backward_agree_with_f64() {
    let mut random = Random(11);
    let cpus: Vec<Cpu> = Level::available().into_iter().map(|l| Cpu::with_level(2, l).unwrap()).collect();
    for head_dim in [8, 16, 20, 33, 64, 96, 128] {
        for dtype in [DType::F32, DType::Bf16] {
            let op = random_op(&mut random, head_dim);
            let lengths = [1, 33 + random.below(60), 0, 2 + random.below(40)];
            let segments = Segments::of(lengths);
            let (width, ow, heads) = (op.heads.qkv_width(), op.heads.out_width(), op.heads.heads);
            let qkv = rounded(dtype, random.values(segments.rows() * width));
            let dout = rounded(dtype, random.values(segments.rows() * ow));
            for cpu in &cpus {
                let kept = forward(cpu, op, dtype, &qkv, &lengths);
                let dqkv = backward(cpu, op, dtype, &qkv, &kept, &dout, &lengths);
                let (fine, coarse) = if dtype == DType::F32 { (3e-6, 3e-5) } else { (4e-3, 3e-2) };
                for r in segments.iter() {
                    let part = |x: &[f32], w: usize| x[r.start * w..r.end * w].to_vec();
                    let e = exact(op, &wide(&part(&qkv, width)), &wide(&part(&dout, ow)));
                    assert_close(&part(&kept.0, ow), &e.out, fine, "out");
                    assert_close(&part(&kept.1, heads), &e.lse, 3e-6, "lse");
                    assert_close(
                        &part(&dqkv, width),
                        &e.dqkv,
                        coarse,
                        &format!("dqkv {op:?} {:?}", cpu.level()),
                    );
                }
            }
        }
    }
}

#[test]
fn backward_of_long_sequences_agrees_with_f64() {
    let mut random = Random(12);
    let cpu = Cpu::with_level(2, Level::available().pop().unwrap()).unwrap();
    for (len, window) in [(1100, None), (1600, Some(300)), (1030, Some(31))] {
        let heads = Heads { heads: 3, kv_heads: 1, head_dim: 8 };
        let op = Attention { heads, scale: 1.0, softcap: None, window };
        let lengths = [5, len, 40];
        let segments = Segments::of(lengths);
        let (width, ow) = (heads.qkv_width(), heads.out_width());
        let qkv = random.values(segments.rows() * width);
        let dout = random.values(segments.rows() * ow);
        let kept = forward(&cpu, op, DType::F32, &qkv, &lengths);
        let dqkv = backward(&cpu, op, DType::F32, &qkv, &kept, &dout, &lengths);
        for r in segments.iter() {
            let part = |x: &[f32], w: usize| wide(&x[r.start * w..r.end * w]);
            let e = exact(op, &part(&qkv, width), &part(&dout, ow));
            assert_close(&dqkv[r.start * width..r.end * width], &e.dqkv, 3e-5, "dqkv");
        }
    }
}

// ---- the promise ----------------------------------------------------------------------------------------

/// Feeds the sequences to a cache in random chunks (or token by token), side by side, in shuffled blocks of
/// a cache full of NaNs, some of which move on the way.
#[expect(clippy::too_many_arguments, reason = "the operands of a kernel, one by one")]
fn paged(
    cpu: &Cpu,
    op: Attention,
    dtype: DType,
    qkv: &[f32],
    lengths: &[usize],
    random: &mut Random,
    decode: bool,
) -> Vec<f32> {
    let (width, ow, block) = (op.heads.qkv_width(), op.heads.out_width(), cpu.cache_len(op.heads, 1));
    let segments = Segments::of(lengths.iter().copied());
    let needed: Vec<usize> = lengths.iter().map(|l| l.div_ceil(cpu.block_tokens())).collect();
    let total = needed.iter().sum::<usize>() + 3;
    let mut free: Vec<u32> = (0..total as u32).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, random.below(i + 1));
    }
    let mut blocks: Vec<Vec<u32>> = needed.iter().map(|n| free.drain(..*n).collect()).collect();
    let mut cache = nan(cpu, dtype, cpu.cache_len(op.heads, total));
    let mut done = vec![0; lengths.len()];
    let mut result = vec![f32::NAN; segments.rows() * ow];
    while done.iter().zip(lengths).any(|(d, l)| d < l) {
        let mut rows = PagedRows::default();
        let (mut x, mut row) = (Vec::new(), 0);
        let mut batch = Vec::new();
        for s in 0..lengths.len() {
            let left = lengths[s] - done[s];
            if left == 0 || random.below(4) == 0 {
                continue;
            }
            if done[s] > 0 && random.below(3) == 0 {
                // The newest block moves elsewhere, as a fork would have it.
                let newest = &mut blocks[s][(done[s] - 1) / cpu.block_tokens()];
                let to = free.remove(random.below(free.len()));
                cpu.cache_copies(op.heads, &[(*newest, to)], std::slice::from_mut(&mut cache)).unwrap();
                put(cpu, &mut cache, *newest as usize * block, &vec![f32::NAN; block]);
                free.push(std::mem::replace(newest, to));
            }
            let most = if decode { 1 } else { left.min(random.one_of(&[1, 40, 1000])) };
            let count = 1 + random.below(most);
            let from = segments.starts[s] + done[s];
            x.extend_from_slice(&qkv[from * width..(from + count) * width]);
            rows.sequences.push(PagedSequence { row, count, position: done[s], blocks: blocks[s].clone() });
            batch.push((s, row, from, count));
            row += count;
        }
        let x = buffer(cpu, dtype, &x);
        let mut out = nan(cpu, dtype, row * ow);
        cpu.cache_write(op.heads, &x, &rows, &mut cache).unwrap();
        cpu.attention_paged(op, &x, &rows, &cache, &mut out).unwrap();
        let out = values(cpu, &out);
        for (s, row, from, count) in batch {
            result[from * ow..(from + count) * ow].copy_from_slice(&out[row * ow..(row + count) * ow]);
            done[s] += count;
        }
    }
    result
}

#[test]
fn training_prefill_and_decoding_give_the_same_bits() {
    let mut random = Random(3);
    let cpus = cpus();
    for round in 0..42 {
        let head_dim = [8, 16, 20, 33, 64, 96, 128][round % 7];
        for dtype in [DType::F32, DType::Bf16] {
            let op = random_op(&mut random, head_dim);
            let lengths: Vec<usize> = (0..1 + random.below(4)).map(|_| 1 + random.below(100)).collect();
            let (width, ow, h) = (op.heads.qkv_width(), op.heads.out_width(), op.heads.heads);
            let segments = Segments::of(lengths.iter().copied());
            let qkv = random.values(segments.rows() * width);
            for level in Level::available().into_iter().filter(|l| *l != Level::PORTABLE || round % 4 == 0) {
                let what = format!("{op:?} {lengths:?} {dtype:?} {level:?}");
                let at =
                    |threads| cpus.iter().find(|c| c.level() == level && c.threads() == threads).unwrap();
                let cpu = at(1 + random.below(3));
                let (want, lse) = forward(cpu, op, dtype, &qkv, &lengths);
                assert!(want.iter().chain(&lse).all(|x| x.is_finite()), "{what}");
                let s = random.below(lengths.len());
                let r = segments.starts[s]..segments.starts[s + 1];
                let cpu = at(1 + random.below(3));
                let alone = forward(cpu, op, dtype, &qkv[r.start * width..r.end * width], &lengths[s..s + 1]);
                assert_eq!(bits(&alone.0), bits(&want[r.start * ow..r.end * ow]), "alone {what}");
                assert_eq!(bits(&alone.1), bits(&lse[r.start * h..r.end * h]), "alone {what}");
                let got = paged(cpu, op, dtype, &qkv, &lengths, &mut random, false);
                assert_eq!(bits(&got), bits(&want), "in chunks {what}");
                if random.below(4) == 0 {
                    let got = paged(cpu, op, dtype, &qkv, &lengths, &mut random, true);
                    assert_eq!(bits(&got), bits(&want), "token by token {what}");
                }
            }
        }
    }
}

#[test]
fn extreme_scores_and_zeros_give_the_same_bits() {
    let mut random = Random(23);
    for level in Level::available() {
        let cpu = Cpu::with_level(1, level).unwrap();
        for head_dim in [8, 33] {
            let heads = Heads { heads: 6, kv_heads: 2, head_dim };
            let op = Attention { heads, scale: 1.0, softcap: None, window: Some(45) };
            let mut qkv = random.values(90 * heads.qkv_width());
            // Weights of exactly 0 and 1, values of either zero, products that underflow.
            for x in &mut qkv {
                *x *= random.one_of(&[1.0, 1.0, 1.0, 60.0, 60.0, 0.0, -0.0, 1e-42, 1e-44, 1e-30]);
            }
            let (want, _) = forward(&cpu, op, DType::F32, &qkv, &[70, 20]);
            for decode in [false, true] {
                let got = paged(&cpu, op, DType::F32, &qkv, &[70, 20], &mut random, decode);
                assert_eq!(bits(&got), bits(&want));
            }
        }
    }
}

#[test]
fn gradients_do_not_depend_on_threads_and_little_on_the_level() {
    let mut random = Random(7);
    let cpus = cpus();
    let heads = Heads { heads: 4, kv_heads: 2, head_dim: 20 };
    let op = Attention { heads, scale: 0.3, softcap: Some(5.0), window: Some(600) };
    for dtype in [DType::F32, DType::Bf16] {
        for lengths in [vec![3, 70, 40, 1, 129], vec![1100]] {
            let tokens: usize = lengths.iter().sum();
            let qkv = rounded(dtype, random.values(tokens * heads.qkv_width()));
            let dout = rounded(dtype, random.values(tokens * heads.out_width()));
            let mut portable: Option<Vec<f64>> = None;
            for per_level in cpus.chunks(3) {
                let mut first: Option<Vec<u32>> = None;
                for cpu in per_level {
                    let kept = forward(cpu, op, dtype, &qkv, &lengths);
                    let got = backward(cpu, op, dtype, &qkv, &kept, &dout, &lengths);
                    assert_eq!(&bits(&got), first.get_or_insert(bits(&got)));
                    let tolerance = if dtype == DType::F32 { 2e-5 } else { 2e-2 };
                    assert_close(&got, portable.get_or_insert(wide(&got)), tolerance, cpu.level().name());
                }
            }
        }
    }
}

// ---- rotary ---------------------------------------------------------------------------------------------

#[test]
fn rotary_agrees_with_f64_and_turns_back() {
    let mut random = Random(9);
    let cpus = cpus();
    for (head_dim, rotary_dim) in [(8, 8), (20, 10), (64, 64), (96, 32), (128, 128), (33, 6)] {
        for dtype in [DType::F32, DType::Bf16] {
            let heads = Heads { heads: 3, kv_heads: 2, head_dim };
            let (half, width, rows) = (rotary_dim / 2, heads.qkv_width(), 150);
            let angle = |i: usize| (i / half) as f64 * 0.7f64.powi((i % half) as i32);
            let cos: Vec<f32> = (0..50 * half).map(|i| angle(i).cos() as f32).collect();
            let sin: Vec<f32> = (0..50 * half).map(|i| angle(i).sin() as f32).collect();
            let positions: Vec<u32> = (0..rows).map(|_| random.below(50) as u32).collect();
            let before = rounded(dtype, random.values(rows * width));
            let mut want = wide(&before);
            for (row, p) in want.chunks_mut(width).zip(&positions) {
                for head in row.chunks_mut(head_dim).take(heads.heads + heads.kv_heads) {
                    for i in 0..half {
                        let (a, b, t) = (head[i], head[i + half], *p as usize * half + i);
                        let (c, s) = (cos[t] as f64, sin[t] as f64);
                        (head[i], head[i + half]) = (a * c - b * s, b * c + a * s);
                    }
                }
            }
            for cpu in &cpus {
                let [c, s] = [&cos, &sin].map(|x| buffer(cpu, DType::F32, x));
                let p = indices(cpu, &positions);
                let mut x = buffer(cpu, dtype, &before);
                let (fine, coarse) = if dtype == DType::F32 { (2e-7, 1e-6) } else { (4e-3, 2e-2) };
                cpu.rotary(
                    heads,
                    Rotation { dim: rotary_dim, cos: &c, sin: &s, positions: &p },
                    false,
                    &mut x,
                )
                .unwrap();
                assert_close(&values(cpu, &x), &want, fine, "turned");
                cpu.rotary(
                    heads,
                    Rotation { dim: rotary_dim, cos: &c, sin: &s, positions: &p },
                    true,
                    &mut x,
                )
                .unwrap();
                assert_close(&values(cpu, &x), &wide(&before), coarse, "turned back");
            }
        }
    }
}

// ---- shards of the rows ---------------------------------------------------------------------------------

/// Ascending ranges of rows, such as a rank of a context-parallel group has; some of them span sequences.
fn random_ranges(random: &mut Random, rows: usize) -> Vec<std::ops::Range<usize>> {
    let mut cuts: Vec<usize> = (0..2 * (1 + random.below(4))).map(|_| random.below(rows + 1)).collect();
    cuts.sort_unstable();
    cuts.chunks_exact(2).map(|cut| cut[0]..cut[1]).collect()
}

/// The rows of these ranges.
fn of_ranges(x: &[f32], width: usize, ranges: &[std::ops::Range<usize>]) -> Vec<f32> {
    ranges.iter().flat_map(|r| &x[r.start * width..r.end * width]).copied().collect()
}

#[test]
fn a_shard_of_the_rows_has_the_bits_of_all_rows() {
    let mut random = Random(11);
    let cpus = cpus();
    for round in 0..28 {
        let (head_dim, dtype) = ([8, 33, 64, 128][round % 4], [DType::F32, DType::Bf16][round % 2]);
        let mut op = random_op(&mut random, head_dim);
        let mut lengths: Vec<usize> = (0..1 + random.below(4)).map(|_| 1 + random.below(150)).collect();
        if round % 7 == 0 {
            // Long enough for several spans of queries, whose sums are added.
            (op.heads.heads, op.heads.kv_heads) = (2, 1);
            lengths.push(1024 + random.below(600));
        }
        let (heads, segments) = (op.heads, Segments::of(lengths.iter().copied()));
        let (width, ow, kvw) = (heads.qkv_width(), heads.out_width(), heads.kv_width());
        let qkv = rounded(dtype, random.values(segments.rows() * width));
        let dout = rounded(dtype, random.values(segments.rows() * ow));
        let level = random.one_of(&Level::available());
        let cpu =
            |threads: usize| cpus.iter().find(|c| c.level() == level && c.threads() == threads).unwrap();
        let (one, other) = (cpu(1), cpu(1 + random.below(3)));
        let all = forward(one, op, dtype, &qkv, &lengths);
        let want = backward(one, op, dtype, &qkv, &all, &dout, &lengths);
        let ranges = random_ranges(&mut random, segments.rows());
        let what = format!("{op:?} {lengths:?} {ranges:?} {dtype:?} {level:?}");
        let shard = RowShard { segments: &segments, ranges: &ranges };

        let columns = |from: usize, to: usize| -> Vec<f32> {
            qkv.chunks_exact(width).flat_map(|row| &row[from..to]).copied().collect()
        };
        let q = buffer(other, dtype, &of_ranges(&columns(0, ow), ow, &ranges));
        let kv = buffer(other, dtype, &columns(ow, ow + kvw));
        let mut out = nan(other, dtype, shard.rows() * ow);
        let mut lse = nan(other, DType::F32, shard.rows() * heads.heads);
        other.attention_shard(op, shard, (&q, &kv), &mut out, &mut lse).unwrap();
        assert_eq!(bits(&values(other, &out)), bits(&of_ranges(&all.0, ow, &ranges)), "out {what}");
        assert_eq!(bits(&values(other, &lse)), bits(&of_ranges(&all.1, heads.heads, &ranges)), "lse {what}");

        let [q, o, d] = [&qkv, &all.0, &dout].map(|x| buffer(other, dtype, x));
        let l = buffer(other, DType::F32, &all.1);
        let mut dqkv = nan(other, dtype, shard.rows() * width);
        let saved = AttentionSaved { qkv: &q, out: &o, lse: &l };
        other.attention_shard_backward(op, saved, &d, shard, &mut dqkv).unwrap();
        assert_eq!(bits(&values(other, &dqkv)), bits(&of_ranges(&want, width, &ranges)), "dqkv {what}");
    }
}

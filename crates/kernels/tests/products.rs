//! Matrix products and what is built on them: linear layers, the logp head, the divergence of two models.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod suite;

use ferrl_kernels::backend::*;
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Buffer, DType, Weight};
use suite::*;

fn weight(cpu: &Cpu, dtype: DType, n: usize, k: usize, values: &[f32]) -> Weight {
    let mut w = cpu.weight(n, k, dtype, true).unwrap();
    cpu.load_weight(&upload(cpu, DType::F32, values), &mut w).unwrap();
    w
}

fn zeros(cpu: &Cpu, n: usize) -> Buffer {
    upload(cpu, DType::F32, &vec![0.0; n])
}

/// `a · b` for row-major `a` of `[m, k]` and a function giving `b[k][n]`.
fn product(a: &[f64], k: usize, n: usize, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let row = |r: &[f64]| -> Vec<f64> { (0..n).map(|j| (0..k).map(|i| r[i] * b(i, j)).sum()).collect() };
    a.chunks(k).flat_map(row).collect()
}

// ---- linear ---------------------------------------------------------------------------------------------------

struct LinearOp {
    rows: usize,
    n: usize,
    k: usize,
}

impl LinearOp {
    fn inputs(&self, dtype: DType) -> [Vec<f32>; 4] {
        let scale = |v: Vec<f32>| v.into_iter().map(|x| x * 0.3).collect::<Vec<f32>>();
        let w = stored(dtype, &scale(random(2, self.n * self.k)));
        let x = stored(dtype, &scale(random(1, self.rows * self.k)));
        let dy = stored(dtype, &scale(random(3, self.rows * self.n)));
        [x, w, dy, random(4, self.n)]
    }
}

impl Op for LinearOp {
    fn name(&self) -> String {
        format!("linear {}x{}x{}", self.rows, self.n, self.k)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let [x, w, dy, bias] = self.inputs(dtype);
        let w = weight(cpu, dtype, self.n, self.k, &w);
        let x = upload(cpu, dtype, &pick(&x, self.k, picks));
        let dy = upload(cpu, dtype, &pick(&dy, self.n, picks));
        let bias = upload(cpu, DType::F32, &bias);
        let (mut y, mut dx) = (unwritten(cpu, dtype, dy.len()), unwritten(cpu, dtype, x.len()));
        let mut plain = unwritten(cpu, DType::F32, dy.len());
        cpu.linear(&x, &w, Some(&bias), &mut y).unwrap();
        cpu.linear(&x, &w, None, &mut plain).unwrap();
        cpu.linear_dx(&dy, &w, &mut dx).unwrap();
        vec![download(cpu, &y), download(cpu, &plain), download(cpu, &dx)]
    }
    fn sums(&self, cpu: &Cpu, dtype: DType) -> Vec<Vec<f32>> {
        let [x, _, dy, bias] = self.inputs(dtype);
        let (mut dw, mut db) = (zeros(cpu, self.n * self.k), upload(cpu, DType::F32, &bias));
        let (x, dy) = (upload(cpu, dtype, &x), upload(cpu, dtype, &dy));
        cpu.linear_dw(
            &dy,
            &x,
            self.rows,
            LinearGrads { weight: Some(&mut dw), bias: Some(&mut db), add: true },
        )
        .unwrap();
        cpu.linear_dw(&dy, &x, self.rows, LinearGrads { weight: Some(&mut dw), bias: None, add: true })
            .unwrap();
        vec![download(cpu, &dw), download(cpu, &db)]
    }
    fn exact(&self, dtype: DType) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let [x, w, dy, bias] = self.inputs(dtype).map(|v| wide(&v));
        let (rows, n, k) = (self.rows, self.n, self.k);
        let plain = product(&x, k, n, |i, j| w[j * k + i]);
        let y = plain.iter().enumerate().map(|(i, y)| y + bias[i % n]).collect();
        let dx = product(&dy, n, k, |i, j| w[i * k + j]);
        let dyt: Vec<f64> =
            (0..n).flat_map(|j| (0..rows).map(|r| dy[r * n + j]).collect::<Vec<_>>()).collect();
        let dw = product(&dyt, rows, k, |i, j| 2.0 * x[i * k + j]);
        let db = (0..n).map(|j| bias[j] + (0..rows).map(|r| dy[r * n + j]).sum::<f64>()).collect();
        (vec![y, plain, dx], vec![dw, db])
    }
}

#[test]
fn linear_layers_keep_the_contract() {
    // Around the tile (14 rows, 32 columns), odd k for bf16 pairs, and k beyond one block.
    for (rows, n, k) in
        [(1, 1, 1), (3, 33, 7), (15, 64, 31), (29, 5, 40), (9, 130, 33), (130, 40, 70), (17, 35, 601)]
    {
        check(&LinearOp { rows, n, k });
    }
}

#[test]
fn one_row_is_the_same_bits_among_two_thousand() {
    let (n, k, m) = (64, 300, 2048);
    for_each_cpu(|cpu| {
        for dtype in [DType::F32, DType::Bf16] {
            let w = weight(cpu, dtype, n, k, &random(1, n * k));
            let x = random(2, m * k);
            let run = |rows: usize| {
                let mut y = unwritten(cpu, DType::F32, rows * n);
                cpu.linear(&upload(cpu, dtype, &x[..rows * k]), &w, None, &mut y).unwrap();
                download(cpu, &y)
            };
            let all = run(m);
            for rows in [1, 2, 3, 13, 14, 15, 100, 1000] {
                assert_same_bits(&format!("{rows} rows {dtype:?}"), &run(rows), &all[..rows * n]);
            }
        }
    });
}

// ---- logp head ------------------------------------------------------------------------------------------------

struct LogpOp {
    head: LogpHead,
    rows: usize,
    vocab: usize,
    hidden: usize,
    others: usize,
}

struct LogpInputs {
    x: Vec<f32>,
    w: Vec<f32>,
    targets: Vec<u32>,
    others: Vec<u32>,
    flow: [Vec<f32>; 3],
}

impl LogpOp {
    fn inputs(&self, dtype: DType) -> LogpInputs {
        let vocab = self.vocab as u32;
        LogpInputs {
            x: stored(dtype, &random(1, self.rows * self.hidden)),
            w: stored(dtype, &random(2, self.vocab * self.hidden)),
            targets: random_ids(3, self.rows, vocab),
            others: random_ids(4, self.rows * self.others, vocab),
            flow: [random(5, self.rows), random(6, self.rows), random(7, self.rows * self.others)],
        }
    }
    fn stats(&self, cpu: &Cpu, rows: usize) -> LogpStats {
        let f = || unwritten(cpu, DType::F32, rows);
        LogpStats { logp: f(), entropy: f(), lse: f() }
    }
    /// For each row: logp of the target, entropy, logp of the others.
    fn exact_rows(&self, i: &LogpInputs, x: &[f64], w: &[f64]) -> [Vec<f64>; 3] {
        let mut out = [Vec::new(), Vec::new(), Vec::new()];
        for (r, x) in x.chunks(self.hidden).enumerate() {
            let logits: Vec<f64> = w
                .chunks(self.hidden)
                .map(|w| {
                    let l = inner(x, w);
                    let l = self.head.softcap.map_or(l, |c| c as f64 * (l / c as f64).tanh());
                    l / self.head.temperature as f64
                })
                .collect();
            let m = logits.iter().fold(f64::MIN, |a, &b| a.max(b));
            let lse = m + logits.iter().map(|l| (l - m).exp()).sum::<f64>().ln();
            out[0].push(logits[i.targets[r] as usize] - lse);
            out[1].push(-logits.iter().map(|l| (l - lse).exp() * (l - lse)).sum::<f64>());
            for j in 0..self.others {
                out[2].push(logits[i.others[r * self.others + j] as usize] - lse);
            }
        }
        out
    }
    fn loss(&self, i: &LogpInputs, x: &[f64], w: &[f64]) -> f64 {
        let stats = self.exact_rows(i, x, w);
        stats.iter().zip(&i.flow).map(|(s, f)| inner(s, &wide(f))).sum()
    }
}

impl Op for LogpOp {
    fn name(&self) -> String {
        format!("logp {:?} {}x{}x{}", self.head, self.rows, self.vocab, self.hidden)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let i = self.inputs(dtype);
        let w = weight(cpu, dtype, self.vocab, self.hidden, &i.w);
        let x = upload(cpu, dtype, &pick(&i.x, self.hidden, picks));
        let targets = cpu.indices(&pick(&i.targets, 1, picks)).unwrap();
        let others = cpu.indices(&pick(&i.others, self.others, picks)).unwrap();
        let mut stats = self.stats(cpu, picks.len());
        let mut logp_others = unwritten(cpu, DType::F32, picks.len() * self.others);
        let also = (self.others > 0).then_some((&others, &mut logp_others));
        cpu.logp(HeadInput { op: self.head, x: &x, w: &w, targets: &targets }, also, &mut stats).unwrap();
        // Decoding must see the same numbers.
        let mut logits = unwritten(cpu, DType::F32, picks.len() * self.vocab);
        let mut lse = unwritten(cpu, DType::F32, picks.len());
        cpu.logits(self.head, &x, &w, &mut logits, &mut lse).unwrap();
        assert_same_bits("lse of logits", &download(cpu, &lse), &download(cpu, &stats.lse));
        let (all, lse) = (download(cpu, &logits), download(cpu, &lse));
        let again: Vec<f32> = picks
            .iter()
            .enumerate()
            .map(|(r, &p)| all[r * self.vocab + i.targets[p] as usize] - lse[r])
            .collect();
        assert_same_bits("logp from logits", &again, &download(cpu, &stats.logp));
        vec![download(cpu, &stats.logp), download(cpu, &stats.entropy), download(cpu, &logp_others)]
    }
    fn sums(&self, cpu: &Cpu, dtype: DType) -> Vec<Vec<f32>> {
        let i = self.inputs(dtype);
        let w = weight(cpu, dtype, self.vocab, self.hidden, &i.w);
        let x = upload(cpu, dtype, &i.x);
        let (targets, others) = (cpu.indices(&i.targets).unwrap(), cpu.indices(&i.others).unwrap());
        let mut stats = self.stats(cpu, self.rows);
        cpu.logp(HeadInput { op: self.head, x: &x, w: &w, targets: &targets }, None, &mut stats).unwrap();
        let [dlogp, dentropy, dothers] = i.flow.each_ref().map(|f| upload(cpu, DType::F32, f));
        let some = self.others > 0;
        let flow = LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: some.then_some(&dothers) };
        let (mut dx, mut dw) = (unwritten(cpu, DType::F32, i.x.len()), zeros(cpu, i.w.len()));
        let listed = some.then_some(&others);
        cpu.logp_backward(
            HeadInput { op: self.head, x: &x, w: &w, targets: &targets },
            listed,
            &stats,
            &flow,
            HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
        )
        .unwrap();
        vec![download(cpu, &dx), download(cpu, &dw)]
    }
    fn exact(&self, dtype: DType) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let i = self.inputs(dtype);
        let (x, w) = (wide(&i.x), wide(&i.w));
        let dx = differences(&x, |x| self.loss(&i, x, &w));
        let dw = differences(&w, |w| self.loss(&i, &x, w));
        (self.exact_rows(&i, &x, &w).to_vec(), vec![dx, dw])
    }
    fn slack(&self, dtype: DType) -> f64 {
        // In bf16 the gradient of every logit is rounded to 8 bits.
        if dtype == DType::Bf16 { 1e-2 } else { 3e-5 }
    }
}

#[test]
fn the_logp_head_keeps_the_contract() {
    let plain = LogpHead { temperature: 1.0, softcap: None };
    let capped = LogpHead { temperature: 0.7, softcap: Some(3.0) };
    check(&LogpOp { head: plain, rows: 3, vocab: 300, hidden: 5, others: 2 });
    check(&LogpOp { head: capped, rows: 5, vocab: 31, hidden: 8, others: 0 });
    check(&LogpOp { head: capped, rows: 2, vocab: 520, hidden: 3, others: 1 });
}

#[test]
fn known_gradients_in_one_pass_are_the_bits_of_two() {
    let head = LogpHead { temperature: 0.8, softcap: Some(5.0) };
    // One part, two parts of unequal length, and a vocabulary too large to keep the logits of enough rows.
    for (rows, vocab, hidden) in [(37, 300, 9), (601, 8192, 3), (260, 16_400, 2)] {
        let op = LogpOp { head, rows, vocab, hidden, others: 0 };
        for_each_cpu(|cpu| {
            for dtype in [DType::F32, DType::Bf16] {
                let i = op.inputs(dtype);
                let w = weight(cpu, dtype, vocab, hidden, &i.w);
                let (x, dlogp) = (upload(cpu, dtype, &i.x), upload(cpu, DType::F32, &i.flow[0]));
                let targets = cpu.indices(&i.targets).unwrap();
                let results = [false, true].map(|once| {
                    let mut stats = op.stats(cpu, rows);
                    let (mut dx, mut dw) = (unwritten(cpu, dtype, x.len()), upload(cpu, DType::F32, &i.w));
                    if once {
                        let dw = Some(&mut dw);
                        cpu.logp_one_pass(
                            HeadInput { op: head, x: &x, w: &w, targets: &targets },
                            &dlogp,
                            &mut stats,
                            HeadGrads { dx: &mut dx, dw, add: true },
                        )
                        .unwrap();
                    } else {
                        let flow = LogpGrads { logp: &dlogp, entropy: None, others: None };
                        let dw = Some(&mut dw);
                        cpu.logp(HeadInput { op: head, x: &x, w: &w, targets: &targets }, None, &mut stats)
                            .unwrap();
                        cpu.logp_backward(
                            HeadInput { op: head, x: &x, w: &w, targets: &targets },
                            None,
                            &stats,
                            &flow,
                            HeadGrads { dx: &mut dx, dw, add: true },
                        )
                        .unwrap();
                    }
                    [&stats.logp, &stats.entropy, &stats.lse, &dx, &dw].map(|b| download(cpu, b))
                });
                let names = ["logp", "entropy", "lse", "dx", "dw"];
                for (name, (two, one)) in names.iter().zip(results[0].iter().zip(&results[1])) {
                    assert_same_bits(&format!("{name} of {}, {dtype:?}", op.name()), one, two);
                }
            }
        });
    }
}

#[test]
fn sampling_inverts_the_cumulative_distribution() {
    for_each_cpu(|cpu| {
        let (vocab, rows) = (777, 40);
        let logits = random(9, rows * vocab);
        let lse: Vec<f32> = logits
            .chunks(vocab)
            .map(|r| r.iter().map(|&l| (l as f64).exp()).sum::<f64>().ln() as f32)
            .collect();
        let uniform: Vec<f32> = (0..rows).map(|r| r as f32 / rows as f32).collect();
        let (l, s) = (upload(cpu, DType::F32, &logits), upload(cpu, DType::F32, &lse));
        let got = cpu.sample(&l, &s, &uniform).unwrap();
        let largest = cpu.argmax(&l, rows).unwrap();
        for r in 0..rows {
            let row = &logits[r * vocab..][..vocab];
            let below = |n: usize| row[..n].iter().map(|&l| (l as f64 - lse[r] as f64).exp()).sum::<f64>();
            let (t, u) = (got[r] as usize, uniform[r] as f64);
            assert!(below(t) <= u + 1e-5 && below(t + 1) >= u - 1e-5, "row {r}");
            assert!(row.iter().all(|&l| l <= row[largest[r] as usize]));
        }
        // A uniform of nearly one, and a row whose mass is all on one token.
        let mut sharp = vec![-1e4f32; vocab];
        sharp[5] = 0.0;
        let (l, s) = (upload(cpu, DType::F32, &sharp), upload(cpu, DType::F32, &[0.0]));
        assert_eq!(cpu.sample(&l, &s, &[0.999_999_94]).unwrap(), [5]);
    });
}

#[test]
fn divergence_of_two_models_and_its_gradient() {
    let (rows, vocab, hidden, q_hidden) = (4, 300, 5, 7);
    let head = LogpHead { temperature: 1.3, softcap: Some(4.0) };
    let dkl = random(11, rows);
    for_each_cpu(|cpu| {
        for dtype in [DType::F32, DType::Bf16] {
            let px = stored(dtype, &random(1, rows * hidden));
            let pw = stored(dtype, &random(2, vocab * hidden));
            let qx = stored(dtype, &random(3, rows * q_hidden));
            let qw = stored(dtype, &random(4, vocab * q_hidden));
            let p = (upload(cpu, dtype, &px), weight(cpu, dtype, vocab, hidden, &pw));
            let q = (upload(cpu, dtype, &qx), weight(cpu, dtype, vocab, q_hidden, &qw));
            let mut kl = unwritten(cpu, DType::F32, rows);
            cpu.kl(head, (&p.0, &p.1), (&q.0, &q.1), &mut kl).unwrap();
            let (mut dx, mut dw) = (unwritten(cpu, DType::F32, px.len()), zeros(cpu, pw.len()));
            let flow = upload(cpu, DType::F32, &dkl);
            cpu.kl_backward(
                head,
                (&p.0, &p.1),
                (&q.0, &q.1),
                &flow,
                HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
            )
            .unwrap();

            let logps = |x: &[f64], w: &[f64], hidden: usize| -> Vec<f64> {
                let one = LogpOp { head, rows: 1, vocab: w.len() / hidden, hidden, others: w.len() / hidden };
                let all: Vec<u32> = (0..one.vocab as u32).collect();
                let i = LogpInputs { others: all, targets: vec![0], ..one.inputs(DType::F32) };
                x.chunks(hidden).flat_map(|x| one.exact_rows(&i, x, w)[2].clone()).collect()
            };
            let q_logp = logps(&wide(&qx), &wide(&qw), q_hidden);
            let exact = |x: &[f64], w: &[f64]| -> Vec<f64> {
                let p_logp = logps(x, w, hidden);
                let term = |(p, q): (&f64, &f64)| p.exp() * (p - q);
                let terms: Vec<f64> = p_logp.iter().zip(&q_logp).map(term).collect();
                terms.chunks(vocab).map(|t| t.iter().sum()).collect()
            };
            let (x, w) = (wide(&px), wide(&pw));
            assert_close("kl", &download(cpu, &kl), &exact(&x, &w), 1e-4, 1e-5);
            let flow = wide(&dkl);
            let slack = if dtype == DType::Bf16 { 1e-2 } else { 3e-5 };
            let want = differences(&x, |x| inner(&exact(x, &w), &flow));
            assert_close("kl dx", &download(cpu, &dx), &want, 1e-4, slack);
            // The head's gradient of a few tokens.
            let got = download(cpu, &dw);
            for token in [0, 17, 299] {
                let at = token * hidden..(token + 1) * hidden;
                let want = differences(&w[at.clone()], |part| {
                    let mut w = w.clone();
                    w[at.clone()].copy_from_slice(part);
                    inner(&exact(&x, &w), &flow)
                });
                assert_close("kl dw", &got[at.clone()], &want, 1e-4, slack);
            }
        }
    });
}

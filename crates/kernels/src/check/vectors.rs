//! Vectors, gather and scatter, embeddings and optimizer steps.

use super::units::{Results, RowCase, adamw, by_row, pick, run_case, scaled, sums};
use super::{Check, download, nan_filled, random, random_ids, upload, weight};
use crate::backend::{AdamW, AdamWParam, Backend, RowMix, Sgd};
use crate::codes::{BLOCK, decode_nf4, encode_nf4};
use crate::{Buffer, DType, Result};

pub fn all(check: &mut Check<'_>) -> Result<()> {
    cases().iter().try_for_each(|case| run_case(check, &**case))
}

fn cases() -> Vec<Box<dyn RowCase>> {
    vec![
        Box::new(Vectors { n: 1 }),
        Box::new(Vectors { n: 50_007 }),
        Box::new(VectorRows { width: 33, rows: 70 }),
        Box::new(VectorRows { width: 896, rows: 40 }),
        Box::new(MixCase { width: 33, rows: 70, per_row: 3 }),
        Box::new(MixCase { width: 2048, rows: 40, per_row: 8 }),
        Box::new(Embed { width: 17, rows: 150, vocab: 30 }),
        Box::new(Embed { width: 896, rows: 300, vocab: 5000 }),
        Box::new(Updates { n: 50_007 }),
        Box::new(CodedUpdates { n: 50_007 }),
        Box::new(CodedUpdates { n: 4096 }),
        Box::new(HostUpdates { n: 50_007 }),
        Box::new(Nf4 { n: 50_007, block: 64 }),
        Box::new(Nf4 { n: 4096, block: 4096 }),
    ]
}

struct Vectors {
    n: usize,
}

impl RowCase for Vectors {
    fn name(&self) -> String {
        format!("vectors of {}", self.n)
    }
    fn rows(&self) -> usize {
        1
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let n = self.n;
        let x = upload(b, dtype, &random(1, n))?;
        let mut y = upload(b, DType::F32, &random(2, n))?;
        b.axpy(0.7, &x, &mut y)?;
        let mut z = upload(b, dtype, &random(3, n))?;
        b.axpy(-0.3, &y, &mut z)?;
        let (from, len) = (n / 5, n - n / 4 - n / 5);
        let mut copied = upload(b, dtype, &random(4, n))?;
        b.copy(&y, from, &mut copied, n / 7, len)?;
        b.write(&mut copied, n / 2, &[3.5])?;
        let mut part = vec![0.0; n - n / 3];
        b.read(&copied, n / 3, &mut part)?;
        let dots = [b.dot(&x, &x)?, b.dot(&x, &y)?, b.dot(&y, &y)?].map(|d| d as f32).to_vec();
        let apart = b.add_chunks(&b.chunk_dots(&x, &y)?)?;
        assert_eq!(apart.to_bits(), b.dot(&x, &y)?.to_bits(), "a dot product is the sum of its chunks");
        let mut found = vec![b.first_non_finite(&x)?];
        let mut bad = upload(b, dtype, &random(5, n))?;
        for at in [n - 1, n / 2, n / 9] {
            b.write(&mut bad, at, &[if at % 2 == 0 { f32::NAN } else { f32::NEG_INFINITY }])?;
            found.push(b.first_non_finite(&bad)?);
        }
        let found = found.iter().map(|f| f.map_or(-1.0, |i| i as f32)).collect();
        let forward = [("axpy", y), ("axpy into storage", z), ("copy", copied)];
        let mut results = Results::default();
        for (name, buffer) in &forward {
            results.rows.push((name, vec![download(b, buffer)?; picks.len()]));
        }
        results.rows.push(("read", vec![part; picks.len()]));
        results.rows.push(("first not finite", vec![found; picks.len()]));
        results.sums.push(("dot", dots));
        Ok(results)
    }
}

struct VectorRows {
    width: usize,
    rows: usize,
}

impl RowCase for VectorRows {
    fn name(&self) -> String {
        format!("gather, scatter {} x {}", self.rows, self.width)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let x = upload(b, dtype, &random(1, self.rows * self.width))?;
        let ids: Vec<u32> = picks.iter().map(|&r| r as u32).collect();
        let mut y = nan_filled(b, dtype, picks.len() * self.width)?;
        b.gather_rows(&x, &b.indices(&ids)?, self.width, &mut y)?;
        let places: Vec<u32> = (0..picks.len()).map(|i| (2 * i + 1) as u32).collect();
        let mut spread = nan_filled(b, DType::F32, 2 * picks.len() * self.width)?;
        b.scatter_rows(&y, &b.indices(&places)?, self.width, &mut spread)?;
        let spread = by_row(b, &spread, 2 * self.width)?;
        let (from, pitch) = (self.width / 3, self.width + 3);
        let mut columns = upload(b, dtype, &vec![0.0; picks.len() * pitch])?;
        b.copy_block((&y, from, self.width), (&mut columns, 2, pitch), [picks.len(), self.width - from])?;
        let columns = by_row(b, &columns, pitch)?;
        Ok(Results {
            rows: vec![
                ("gather", by_row(b, &y, self.width)?),
                ("scatter", spread),
                ("some columns", columns),
            ],
            sums: Vec::new(),
        })
    }
}

struct MixCase {
    width: usize,
    rows: usize,
    per_row: usize,
}

impl RowCase for MixCase {
    fn name(&self) -> String {
        format!("sums of {} rows, {} x {}", self.per_row, self.rows, self.width)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn terms(&self, _what: &str) -> f32 {
        (self.width as f32).sqrt()
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (k, width) = (self.per_row, self.width);
        let some = |seed, per: usize| pick(&random(seed, self.rows * per), per, picks);
        // Sorted by expert: the last row of each sum comes first.
        let place = |i: usize| ((k - 1 - i % k) * picks.len() + i / k) as u32;
        let places: Vec<u32> = (0..k * picks.len()).map(place).collect();
        let (given, mut sorted) = (some(1, k * width), vec![0.0; k * width * picks.len()]);
        for (i, &to) in places.iter().enumerate() {
            sorted[to as usize * width..][..width].copy_from_slice(&given[i * width..][..width]);
        }
        let (src, rows) = (upload(b, dtype, &sorted)?, b.indices(&places)?);
        let (weights, dout) = (upload(b, DType::F32, &some(2, k))?, upload(b, dtype, &some(3, width))?);
        let mix = RowMix { rows: &rows, weights: &weights, per_row: k, width };
        let (mut out, mut wide) = (nan_filled(b, dtype, dout.len())?, nan_filled(b, DType::F32, dout.len())?);
        b.mix_rows(mix, &src, &mut out)?;
        b.mix_rows(mix, &src, &mut wide)?;
        let (mut dsrc, mut dweights) =
            (nan_filled(b, dtype, src.len())?, nan_filled(b, DType::F32, places.len())?);
        b.mix_rows_backward(mix, &src, &dout, &mut dsrc, &mut dweights)?;
        let by_place = by_row(b, &dsrc, width)?;
        let terms: Vec<Vec<f32>> = places.iter().map(|&at| by_place[at as usize].clone()).collect();
        Ok(Results {
            rows: vec![
                ("sum", by_row(b, &out, width)?),
                ("sum in f32", by_row(b, &wide, width)?),
                ("dsrc", terms.chunks(k).map(<[Vec<f32>]>::concat).collect()),
                ("dweights", by_row(b, &dweights, k)?),
            ],
            sums: Vec::new(),
        })
    }
}

struct Embed {
    width: usize,
    rows: usize,
    vocab: usize,
}

impl RowCase for Embed {
    fn name(&self) -> String {
        format!("embed {} x {} of {}", self.rows, self.width, self.vocab)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (width, rows) = (self.width, picks.len());
        // One id has many rows.
        let ids = random_ids(1, self.rows, self.vocab)
            .iter()
            .map(|&id| if id % 5 == 0 { 3 } else { id })
            .collect::<Vec<_>>();
        let ids = b.indices(&pick(&ids, 1, picks))?;
        let table = upload(b, DType::F32, &random(2, self.vocab * width))?;
        let mut set = nan_filled(b, DType::F32, rows * width)?;
        let mut added = upload(b, DType::F32, &pick(&random(3, self.rows * width), width, picks))?;
        b.embed(&ids, &table, 1.7, false, &mut set)?;
        b.embed(&ids, &table, 0.3, true, &mut added)?;
        let dout = upload(b, dtype, &pick(&random(4, self.rows * width), width, picks))?;
        let mut dtable = upload(b, DType::F32, &random(5, self.vocab * width))?;
        b.embed_backward(&ids, &dout, 0.5, &mut dtable)?;
        Ok(Results {
            rows: vec![("embed", by_row(b, &set, width)?), ("embed, added", by_row(b, &added, width)?)],
            sums: vec![("dtable", download(b, &dtable)?)],
        })
    }
}

struct Updates {
    n: usize,
}

impl RowCase for Updates {
    fn name(&self) -> String {
        format!("AdamW, SGD of {}", self.n)
    }
    fn rows(&self) -> usize {
        1
    }
    fn run(&self, b: &dyn Backend, dtype: DType, _: &[usize]) -> Result<Results> {
        let n = self.n;
        // A GEMM with rows of one element reads the derived weight back.
        let (mut form, one) = (weight(b, dtype, n, 1, &scaled(1, n, 1.0))?, upload(b, dtype, &[1.0])?);
        let state = |seed: u32, factor: f32| upload(b, DType::F32, &scaled(seed, n, factor));
        let (mut w, mut m, mut v, mut u) = (state(1, 1.0)?, state(0, 0.0)?, state(0, 0.0)?, state(0, 0.0)?);
        let (mut plain, mut heavy) = (state(1, 1.0)?, state(1, 1.0)?);
        let (mut light, mut light_m, mut light_v) = (state(2, 1.0)?, state(0, 0.0)?, state(0, 0.0)?);
        for step in 1..=3u64 {
            let grad = state(10 + step as u32, 1.0)?;
            let op = AdamW { lr: 1e-2 / step as f64, ..adamw(step) };
            // In two ranges with a derived weight, and a second parameter as a whole.
            let (parts, whole) = ([3..n / 3, n / 3..n - 5], 0..n);
            let gentle = AdamW { lr: 0.02, weight_decay: 0.0, ..op };
            b.adamw(&mut [
                AdamWParam {
                    op,
                    ranges: &parts,
                    param: &mut w,
                    grad: &grad,
                    first: &mut m,
                    second: &mut v,
                    absmax: None,
                    derived: Some(&mut form),
                },
                AdamWParam {
                    op: gentle,
                    ranges: &[whole],
                    param: &mut light,
                    grad: &grad,
                    first: &mut light_m,
                    second: &mut light_v,
                    absmax: None,
                    derived: None,
                },
            ])?;
            let op = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 2.0 };
            b.sgd(op, 2..n, &mut heavy, &grad, Some(&mut u))?;
            b.sgd(Sgd { momentum: 0.0, ..op }, 2..n, &mut plain, &grad, None)?;
        }
        let mut derived = nan_filled(b, DType::F32, n)?;
        b.linear(&one, &form, None, &mut derived)?;
        let all = [
            ("AdamW", &w),
            ("derived", &derived),
            ("first", &m),
            ("second", &v),
            ("AdamW beside it", &light),
            ("SGD", &plain),
            ("momentum", &heavy),
        ];
        sums(b, &all)
    }
}

/// 8-bit AdamW.
struct CodedUpdates {
    n: usize,
}

impl RowCase for CodedUpdates {
    fn name(&self) -> String {
        format!("8-bit AdamW of {}", self.n)
    }
    fn rows(&self) -> usize {
        1
    }
    fn run(&self, b: &dyn Backend, dtype: DType, _: &[usize]) -> Result<Results> {
        let (n, blocks) = (self.n, self.n.div_ceil(BLOCK));
        let (mut form, one) = (weight(b, dtype, n, 1, &scaled(1, n, 1.0))?, upload(b, dtype, &[1.0])?);
        let mut w = upload(b, DType::F32, &scaled(1, n, 1.0))?;
        let zeros = |dtype: DType, len: usize| upload(b, dtype, &vec![0.0; len]);
        let (mut m, mut v) = (zeros(DType::U8, n)?, zeros(DType::U8, n)?);
        let (mut m_absmax, mut v_absmax) = (zeros(DType::F32, blocks)?, zeros(DType::F32, blocks)?);
        for step in 1..=3u64 {
            // Numbers of many sizes, and a block with zero gradient.
            let mut grad = scaled(10 + step as u32, n, 1.0);
            grad.iter_mut().for_each(|x| *x *= x.abs() * x.abs() * x.abs());
            grad[2 * BLOCK..3 * BLOCK].fill(0.0);
            let grad = upload(b, DType::F32, &grad)?;
            b.adamw(&mut [AdamWParam {
                op: adamw(step),
                ranges: &[0..4 * BLOCK, 5 * BLOCK..n],
                param: &mut w,
                grad: &grad,
                first: &mut m,
                second: &mut v,
                absmax: Some([&mut m_absmax, &mut v_absmax]),
                derived: Some(&mut form),
            }])?;
        }
        let mut derived = nan_filled(b, DType::F32, n)?;
        b.linear(&one, &form, None, &mut derived)?;
        let all = [
            ("weights", &w),
            ("derived", &derived),
            ("first", &m),
            ("second", &v),
            ("first's absmax", &m_absmax),
            ("second's absmax", &v_absmax),
        ];
        sums(b, &all)
    }
}

/// AdamW with moments in host memory: as if they were on the device.
struct HostUpdates {
    n: usize,
}

impl RowCase for HostUpdates {
    fn name(&self) -> String {
        format!("AdamW of {}, moments on the host", self.n)
    }
    fn rows(&self) -> usize {
        1
    }
    fn run(&self, b: &dyn Backend, _: DType, _: &[usize]) -> Result<Results> {
        let (n, blocks) = (self.n, self.n.div_ceil(BLOCK));
        let mut results = Results::default();
        for coded in [false, true] {
            let mut left: Vec<Vec<f32>> = Vec::new();
            for host in [false, true] {
                let room = |dtype: DType, len: usize| -> Result<Buffer> {
                    let mut room = if host { b.alloc_host(dtype, len)? } else { b.alloc(dtype, len)? };
                    b.fill(&mut room, 0.0)?;
                    Ok(room)
                };
                let format = if coded { DType::U8 } else { DType::F32 };
                let (mut m, mut v) = (room(format, n)?, room(format, n)?);
                let (mut m_absmax, mut v_absmax) = (room(DType::F32, blocks)?, room(DType::F32, blocks)?);
                let mut w = upload(b, DType::F32, &scaled(1, n, 1.0))?;
                for step in 1..=3u64 {
                    let grad = upload(b, DType::F32, &scaled(10 + step as u32, n, 1.0))?;
                    b.adamw(&mut [AdamWParam {
                        op: adamw(step),
                        ranges: std::slice::from_ref(&(0..n)),
                        param: &mut w,
                        grad: &grad,
                        first: &mut m,
                        second: &mut v,
                        absmax: coded.then_some([&mut m_absmax, &mut v_absmax]),
                        derived: None,
                    }])?;
                }
                let mut part = vec![0.0; n - 7];
                b.read(&m, 7, &mut part)?;
                b.write(&mut v, 3, &part[..5])?;
                left.push([download(b, &w)?, part, download(b, &v)?].concat());
            }
            let differ = left[0].iter().zip(&left[1]).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
            results
                .sums
                .push((if coded { "8-bit, differing" } else { "f32, differing" }, vec![differ as f32]));
            results.sums.push((if coded { "8-bit" } else { "f32" }, left.swap_remove(1)));
        }
        Ok(results)
    }
}

/// NF4 round trip of normal numbers.
struct Nf4 {
    n: usize,
    block: usize,
}

impl RowCase for Nf4 {
    fn name(&self) -> String {
        format!("NF4 of {} in blocks of {}", self.n, self.block)
    }
    fn rows(&self) -> usize {
        1
    }
    fn run(&self, b: &dyn Backend, _: DType, _: &[usize]) -> Result<Results> {
        let (codes, absmax) = encode_nf4(&scaled(1, self.n, 0.02), self.block);
        let numbers: Vec<f32> = codes.iter().map(|&c| f32::from(c)).collect();
        let (on_card, of_blocks) = (upload(b, DType::U8, &numbers)?, upload(b, DType::F32, &absmax)?);
        let mut out = nan_filled(b, DType::F32, self.n)?;
        b.decode_nf4(&on_card, &of_blocks, self.block, &mut out)?;
        let (got, mut want) = (download(b, &out)?, vec![0.0; self.n]);
        decode_nf4(&codes, &absmax, self.block, 0, &mut want);
        let differ = got.iter().zip(&want).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
        Ok(Results { rows: Vec::new(), sums: vec![("numbers", got), ("differing", vec![differ as f32])] })
    }
}

//! Row-wise operations: norms, RoPE and activations.

use super::units::{Results, RowCase, by_row, differing, pick, run_case, scaled};
use super::{Check, download, nan_filled, random, random_ids, upload};
use crate::backend::{
    Activation, Backend, HeadNorm, Heads, Norm, NormGrads, NormInput, NormRecompute, Normed, Rotation, Target,
};
use crate::{Buffer, DType, Result};

pub fn all(check: &mut Check<'_>) -> Result<()> {
    cases().iter().try_for_each(|case| run_case(check, &**case))
}

fn cases() -> Vec<Box<dyn RowCase>> {
    let mut all: Vec<Box<dyn RowCase>> = Vec::new();
    for (width, rows) in [(1, 70), (17, 5), (100, 170), (896, 150), (1536, 20)] {
        for (centred, plus_one, add) in [(false, false, false), (false, true, true), (true, false, false)] {
            all.push(Box::new(NormCase { op: Norm { centred, plus_one, eps: 1e-5, width }, rows, add }));
        }
    }
    for (head_dim, rows) in [(15, 3), (33, 67), (64, 40), (128, 33)] {
        for (heads, kv_heads, plus_one) in [(1, 1, true), (4, 2, false)] {
            let op = Norm { centred: false, plus_one, eps: 1e-5, width: head_dim };
            for whole in [false, true] {
                all.push(Box::new(HeadNormCase {
                    op,
                    heads: Heads { heads, kv_heads, head_dim },
                    rows,
                    whole,
                }));
            }
        }
    }
    for (head_dim, rotary_dim) in [(20, 10), (64, 64), (96, 32), (128, 128)] {
        all.push(Box::new(RotaryCase { heads: Heads { heads: 3, kv_heads: 2, head_dim }, rotary_dim }));
    }
    for op in [Activation::SiluGated, Activation::GeluGated, Activation::Gelu] {
        for (width, rows) in [(1, 9), (33, 40), (4864, 12)] {
            all.push(Box::new(ActivationCase { op, width, rows }));
        }
    }
    all
}

struct NormCase {
    op: Norm,
    rows: usize,
    add: bool,
}

impl RowCase for NormCase {
    fn name(&self) -> String {
        let kind = match (self.op.centred, self.op.plus_one) {
            (true, _) => "LayerNorm",
            (false, true) => "RMSNorm + 1",
            (false, false) => "RMSNorm",
        };
        format!("{kind} {} x {}", self.rows, self.op.width)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    /// LayerNorm of a single element: the gradient is zero times `1 / sqrt(eps)`.
    fn terms(&self, what: &str) -> f32 {
        let alone = self.op.centred && self.op.width == 1 && what.starts_with("dx");
        if alone { 1.0 / self.op.eps.sqrt() } else { 0.0 }
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (op, width) = (self.op, self.op.width);
        let input = |seed, dtype| upload(b, dtype, &pick(&random(seed, self.rows * width), width, picks));
        // The residual stream is f32; a layer's input has the compute type.
        let (x, delta, dy) = (input(1, DType::F32)?, input(2, dtype)?, input(3, dtype)?);
        let weight = upload(b, DType::F32, &random(4, width))?;
        let bias = if op.centred { Some(upload(b, DType::F32, &random(5, width))?) } else { None };
        let n = x.len();
        let mut y = nan_filled(b, dtype, n)?;
        b.norm(Normed { op, weight: &weight, bias: bias.as_ref() }, &x, &mut y)?;
        let (mut sum, mut z) = (nan_filled(b, DType::F32, n)?, nan_filled(b, dtype, n)?);
        b.add_norm(Normed { op, weight: &weight, bias: bias.as_ref() }, &x, &delta, &mut sum, &mut z)?;
        let mut dx = if self.add { input(6, DType::F32)? } else { nan_filled(b, DType::F32, n)? };
        let vector = |seed| upload(b, DType::F32, &random(seed, width));
        let (mut dweight, mut dbias) = (vector(7)?, vector(8)?);
        let grads = NormGrads { weight: Some(&mut dweight), bias: Some(&mut dbias), add: true };
        b.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut dx, add: self.add },
            grads,
        )?;
        let mut plain = nan_filled(b, dtype, n)?;
        b.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &delta,
            Target { to: &mut plain, add: false },
            NormGrads::default(),
        )?;
        let mut results = Results {
            rows: vec![
                ("norm", by_row(b, &y, width)?),
                ("sum", by_row(b, &sum, width)?),
                ("norm of the sum", by_row(b, &z, width)?),
                ("dx", by_row(b, &dx, width)?),
                ("dx in storage", by_row(b, &plain, width)?),
            ],
            sums: vec![("dweight", download(b, &dweight)?), ("dbias", download(b, &dbias)?)],
        };
        let norm = Normed { op, weight: &weight, bias: bias.as_ref() };
        for (what, delta, forward) in
            [("norm recomputed", None, &y), ("norm of the sum recomputed", Some(&delta), &z)]
        {
            let start = (input(6, DType::F32)?, vector(7)?, vector(8)?);
            recomputed(b, (what, norm), (NormInput { x: &x, delta }, &dy, forward), start, &mut results)?;
        }
        Ok(results)
    }
}

/// Fused forward and backward: same bits as the forward alone.
fn recomputed(
    b: &dyn Backend,
    (what, norm): (&'static str, Normed<'_>),
    (input, dy, forward): (NormInput<'_>, &Buffer, &Buffer),
    (mut dx, mut dweight, mut dbias): (Buffer, Buffer, Buffer),
    results: &mut Results,
) -> Result<()> {
    let (dtype, width, add) = (forward.dtype(), norm.op.width, input.delta.is_some());
    let (mut y, mut rounded) = (nan_filled(b, dtype, dx.len())?, nan_filled(b, dtype, dx.len())?);
    let grads = NormGrads { weight: Some(&mut dweight), bias: norm.bias.map(|_| &mut dbias), add };
    let backward = NormRecompute { dy, y: &mut y, dx: &mut dx, rounded: Some(&mut rounded), grads };
    b.norm_recompute(norm, input, backward)?;
    results.rows.push((what, by_row(b, &dx, width)?));
    results.rows.push((what, by_row(b, &rounded, width)?));
    results.sums.push((what, differing(b, &y, forward)?));
    results.sums.push((what, download(b, &dweight)?));
    results.sums.push((what, download(b, &dbias)?));
    Ok(())
}

struct HeadNormCase {
    op: Norm,
    heads: Heads,
    rows: usize,
    whole: bool,
}

impl RowCase for HeadNormCase {
    fn name(&self) -> String {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let how = if self.whole { ", all together" } else { "" };
        format!("head norm {} x {heads}/{kv_heads} x {head_dim}{how}", self.rows)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (op, heads, width) = (self.op, self.heads, self.heads.qkv_width());
        let input = |seed| upload(b, dtype, &pick(&random(seed, self.rows * width), width, picks));
        let widths = [heads.heads, heads.kv_heads].map(|n| if self.whole { n * op.width } else { op.width });
        let [vector_q, vector_k] = widths.map(|n| move |seed| upload(b, DType::F32, &random(seed, n)));
        let (x, mut d, q, k) = (input(1)?, input(2)?, vector_q(3)?, vector_k(4)?);
        let norm = HeadNorm { op, heads, whole: self.whole, q_weight: &q, k_weight: &k };
        let mut y = nan_filled(b, dtype, x.len())?;
        b.head_norm(norm, &x, &mut y)?;
        let (mut dq, mut dk) = (vector_q(5)?, vector_k(6)?);
        b.head_norm_backward(norm, &x, &mut d, [Some(&mut dq), Some(&mut dk)])?;
        Ok(Results {
            rows: vec![("head norm", by_row(b, &y, width)?), ("dqkv", by_row(b, &d, width)?)],
            sums: vec![("dq_weight", download(b, &dq)?), ("dk_weight", download(b, &dk)?)],
        })
    }
}

struct RotaryCase {
    heads: Heads,
    rotary_dim: usize,
}

impl RowCase for RotaryCase {
    fn name(&self) -> String {
        format!("rotary {} of {}", self.rotary_dim, self.heads.head_dim)
    }
    fn rows(&self) -> usize {
        150
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (half, width, known) = (self.rotary_dim / 2, self.heads.qkv_width(), 40);
        let angles: Vec<f32> =
            (0..known * half).map(|i| (i / half) as f32 * 0.7 / (1 + i % half) as f32).collect();
        let table = |f: fn(f64) -> f64| angles.iter().map(|&a| f(f64::from(a)) as f32).collect::<Vec<f32>>();
        let (cos, sin) = (upload(b, DType::F32, &table(f64::cos))?, upload(b, DType::F32, &table(f64::sin))?);
        let positions = b.indices(&pick(&random_ids(1, 150, known), 1, picks))?;
        let mut x = upload(b, dtype, &pick(&random(2, 150 * width), width, picks))?;
        b.rotary(
            self.heads,
            Rotation { dim: self.rotary_dim, cos: &cos, sin: &sin, positions: &positions },
            false,
            &mut x,
        )?;
        let turned = by_row(b, &x, width)?;
        // With the column sums, accumulated and overwritten.
        let rope = Rotation { dim: self.rotary_dim, cos: &cos, sin: &sin, positions: &positions };
        let mut results = Results { rows: vec![("turned", turned)], sums: Vec::new() };
        for add in [false, true] {
            let mut dbias = upload(b, DType::F32, &random(3, width))?;
            let mut d = upload(b, dtype, &download(b, &x)?)?;
            b.qkv_backward(self.heads, Some(rope), &mut d, add, Some(&mut dbias))?;
            results.rows.push(("turned back and summed", by_row(b, &d, width)?));
            results.sums.push(("sums of columns", download(b, &dbias)?));
        }
        b.rotary(
            self.heads,
            Rotation { dim: self.rotary_dim, cos: &cos, sin: &sin, positions: &positions },
            true,
            &mut x,
        )?;
        results.rows.push(("turned back", by_row(b, &x, width)?));
        Ok(results)
    }
}

/// Column sums of already rotated rows equal those of the fused rotation.
pub fn rotated_bias(check: &mut Check<'_>) -> Result<()> {
    for (head_dim, tokens) in [(20, 70), (64, 150), (64, 1100)] {
        let heads = Heads { heads: 3, kv_heads: 2, head_dim };
        let (b, half, width, known) = (check.card, head_dim / 2, heads.qkv_width(), 40);
        let [cos, sin] = [4, 5].map(|seed| upload(b, DType::F32, &random(seed, known * half)));
        let (cos, sin, positions) = (cos?, sin?, b.indices(&random_ids(1, tokens, known))?);
        let rotation = Rotation { dim: head_dim, cos: &cos, sin: &sin, positions: &positions };
        for dtype in [DType::F32, DType::Bf16] {
            let mut dqkv = upload(b, dtype, &random(2, tokens * width))?;
            let [mut want, mut got] = [3, 3].map(|seed| upload(b, DType::F32, &random(seed, width)));
            let (want, got) = (want.as_mut().map_err(|e| e.clone())?, got.as_mut().map_err(|e| e.clone())?);
            b.qkv_backward(heads, Some(rotation), &mut dqkv, true, Some(want))?;
            b.rotated_bias(head_dim, &dqkv, tokens, true, got)?;
            let name = format!("heads of {head_dim} {} in {tokens} rows: bias", dtype.name());
            check.same(name, &download(b, got)?, &download(b, want)?);
        }
    }
    Ok(())
}

struct ActivationCase {
    op: Activation,
    width: usize,
    rows: usize,
}

impl RowCase for ActivationCase {
    fn name(&self) -> String {
        format!("{:?} {} x {}", self.op, self.rows, self.width)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (op, width) = (self.op, self.width);
        let inputs = if op == Activation::Gelu { width } else { 2 * width };
        let x = upload(b, dtype, &pick(&scaled(1, self.rows * inputs, 3.0), inputs, picks))?;
        let dy = upload(b, dtype, &pick(&random(2, self.rows * width), width, picks))?;
        let (mut y, mut dx) = (nan_filled(b, dtype, dy.len())?, nan_filled(b, dtype, x.len())?);
        b.activation(op, width, &x, &mut y)?;
        b.activation_backward(op, width, &x, &dy, &mut dx)?;
        let (mut turned, mut value) = (x, dy);
        b.activation_recompute(op, width, &mut turned, &mut value)?;
        Ok(Results {
            rows: vec![("activation", by_row(b, &y, width)?), ("dx", by_row(b, &dx, inputs)?)],
            sums: vec![
                ("activation again", differing(b, &value, &y)?),
                ("dx again", differing(b, &turned, &dx)?),
            ],
        })
    }
}

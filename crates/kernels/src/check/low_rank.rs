//! LoRA merges, and the gradients of the factors.

use super::{Check, download, nan_filled, random, upload, weight};
use crate::backend::{Backend, ColumnsOf, LinearGrads, LowRank, LowRankGrad};
use crate::{Buffer, DType, Result, Weight};

/// Rows and columns of a weight, and two updates of some of its rows: first row, rows, rank.
const SHAPES: [([usize; 2], [[usize; 3]; 2]); 3] = [
    ([200, 1040], [[8, 120, 16], [136, 64, 40]]),
    ([96, 2056], [[0, 32, 3], [40, 56, 8]]),
    ([33, 70], [[1, 20, 5], [25, 8, 2]]),
];
/// Rows of a batch: few, and enough for split-k.
const TOKENS: [usize; 2] = [37, 2200];

pub fn all(check: &mut Check<'_>) -> Result<()> {
    for ([n, k], parts) in SHAPES {
        for (dtype, base) in [
            (DType::F32, DType::F32),
            (DType::Bf16, DType::Bf16),
            (DType::Bf16, DType::F32),
            (DType::F32, DType::Bf16),
        ] {
            merged(check, [n, k], &parts, (dtype, base))?;
        }
        for dtype in [DType::F32, DType::Bf16] {
            for tokens in TOKENS {
                gradients(check, [n, k], (parts[1], tokens), dtype)?;
            }
        }
    }
    Ok(())
}

/// Close to the CPU's sums, and their bits once rounded.
fn merged(
    check: &mut Check<'_>,
    [n, k]: [usize; 2],
    parts: &[[usize; 3]],
    (dtype, base): (DType, DType),
) -> Result<()> {
    let sums = |b: &dyn Backend| -> Result<[Vec<f32>; 3]> {
        let base = upload(b, base, &random(1, n * k))?;
        let factor = |seed: usize, n: usize| upload(b, DType::F32, &random(seed as u32, n));
        let factors =
            parts.iter().map(|&[row, rows, r]| Ok((factor(row + 2, r * k)?, factor(row + 3, r * rows)?)));
        let factors = factors.collect::<Result<Vec<_>>>()?;
        let parts = parts.iter().zip(&factors).map(|(&[row, _, r], (a, b))| LowRank { row, a, b, r });
        let parts: Vec<LowRank<'_>> = parts.collect();
        let (mut sum, mut own) = (nan_filled(b, DType::F32, n * k)?, b.weight(n, k, dtype, false)?);
        b.adapted(&base, &parts, &mut sum)?;
        b.load_adapted(&base, &parts, &mut own)?;
        let mut rounded = b.weight(n, k, dtype, false)?;
        b.load_weight(&sum, &mut rounded)?;
        Ok([download(b, &sum)?, read(b, &own)?, read(b, &rounded)?])
    };
    let name = |what: &str| format!("low rank {n} x {k} {} on {}: {what}", dtype.name(), base.name());
    let ([got, own, rounded], [want, ..]) = (sums(check.card)?, sums(check.cpu)?);
    check.close(name("sums"), &got, &want, 2e-5);
    check.same(name("rounded"), &own, &rounded);
    Ok(())
}

/// Reads a GEMM weight by multiplying it with the identity.
fn read(b: &dyn Backend, w: &Weight) -> Result<Vec<f32>> {
    let identity: Vec<f32> = (0..w.k * w.k).map(|i| f32::from(u8::from(i % (w.k + 1) == 0))).collect();
    let (x, mut y) = (upload(b, w.compute, &identity)?, nan_filled(b, DType::F32, w.k * w.n)?);
    b.linear(&x, w, None, &mut y)?;
    download(b, &y)
}

/// Close to the CPU's, same bits when repeated.
fn gradients(
    check: &mut Check<'_>,
    [n, k]: [usize; 2],
    ([row, rows, r], tokens): ([usize; 3], usize),
    dtype: DType,
) -> Result<()> {
    let both = |b: &dyn Backend| -> Result<Vec<Vec<f32>>> {
        let (x, dy) = (upload(b, dtype, &random(5, tokens * k))?, upload(b, dtype, &random(6, tokens * n))?);
        let x = ColumnsOf { of: &x, from: 0, width: k };
        let dy = ColumnsOf { of: &dy, from: row, width: rows };
        let mut all = Vec::new();
        for (x, y) in [(x, dy), (dy, x)] {
            let w = weight(b, dtype, r, x.width, &random(7, r * x.width))?;
            let mut dw: Buffer = upload(b, DType::F32, &random(8, r * y.width))?;
            for add in [false, true] {
                let of = LowRankGrad { x, w: &w, y, tokens };
                b.low_rank_dw(of, LinearGrads { weight: Some(&mut dw), bias: None, add })?;
            }
            all.push(download(b, &dw)?);
        }
        Ok(all)
    };
    let (want, got, again) = (both(check.cpu)?, both(check.card)?, both(check.card)?);
    let limit = if dtype == DType::Bf16 { 2e-2 } else { 1e-4 };
    for (i, factor) in ["b", "a"].into_iter().enumerate() {
        let name =
            |what: &str| format!("low rank {n} x {k}, {tokens} rows, {}: d{factor}{what}", dtype.name());
        check.close(name(""), &got[i], &want[i], limit);
        check.same(name(" again"), &got[i], &again[i]);
    }
    Ok(())
}

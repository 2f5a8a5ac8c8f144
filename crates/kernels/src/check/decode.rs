//! Decode GEMM: for every number of rows from 1 to 64, and some beyond, each row has the bits it has among many.

use super::{Check, download, nan_filled, random, upload, weight};
use crate::{DType, Result};

/// Features and reduction length: a long k, more features than blocks, a partial last tile. Small, because CPUs without vector
/// instructions run them, too.
const SHAPES: [(usize, usize); 3] = [(40, 18944), (1040, 1024), (88, 8960)];
/// From 8 MiB on, where weights stream on a GPU (cuda/gemm/stream.rs), and beyond its caches.
const ON_CARDS: [(usize, usize); 6] =
    [(256, 18944), (4128, 1024), (472, 8960), (672, 18944), (12320, 1024), (1416, 8960)];
/// Rows of the reference batch.
const MANY: usize = 300;
const ROWS: [usize; 13] = [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 48, 64, 65];

pub fn all(check: &mut Check<'_>) -> Result<()> {
    let b = check.card;
    let larger = if b.runs_async() { &ON_CARDS[..] } else { &[] };
    for &(n, k) in SHAPES.iter().chain(larger) {
        let by = 1.0 / (k as f32).sqrt();
        let values: Vec<f32> = random(1, n * k).iter().map(|x| x * by).collect();
        let w = weight(b, DType::Bf16, n, k, &values)?;
        let x = random(2, MANY * k);
        for out in [DType::F32, DType::Bf16] {
            let product = |rows: usize| -> Result<Vec<f32>> {
                let (x, mut y) = (upload(b, DType::Bf16, &x[..rows * k])?, nan_filled(b, out, rows * n)?);
                b.linear(&x, &w, None, &mut y)?;
                download(b, &y)
            };
            let many = product(MANY)?;
            for rows in ROWS {
                let name = format!("decode product {rows} x {n} x {k} into {}", out.name());
                check.same(name, &product(rows)?, &many[..rows * n]);
            }
        }
    }
    Ok(())
}

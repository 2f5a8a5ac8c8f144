//! LoRA merges from GEMMs and copies.

use crate::backend::{ColumnsOf, LinearGrads, LinearOps, LowRank, LowRankGrad, LowRankOps};
use crate::{Buffer, DType, Result, Weight};

pub fn adapted<B: LowRankOps + ?Sized>(
    b: &B,
    base: &Buffer,
    parts: &[LowRank<'_>],
    out: &mut Buffer,
) -> Result<()> {
    b.copy(base, 0, out, 0, base.len())?;
    for part in parts {
        let k = part.a.len() / part.r;
        let (start, len) = (part.row * k, part.rows().len() * k);
        let product = |sum: &mut Buffer| {
            let grads = LinearGrads { weight: Some(sum), bias: None, add: true };
            b.linear_dw(part.b, part.a, part.r, grads)
        };
        if len == out.len() {
            product(out)?;
            continue;
        }
        let mut own = b.alloc(DType::F32, len)?;
        b.copy(out, start, &mut own, 0, len)?;
        product(&mut own)?;
        b.copy(&own, 0, out, start, len)?;
    }
    Ok(())
}

pub fn load_adapted<B: LowRankOps + ?Sized>(
    b: &B,
    base: &Buffer,
    parts: &[LowRank<'_>],
    weight: &mut Weight,
) -> Result<()> {
    let mut whole = b.alloc(DType::F32, base.len())?;
    b.adapted(base, parts, &mut whole)?;
    b.load_weight(&whole, weight)
}

pub fn low_rank_dw<B: LinearOps + ?Sized>(b: &B, of: LowRankGrad<'_>, grads: LinearGrads<'_>) -> Result<()> {
    let (x, y) = (columns(b, of.x, of.tokens)?, columns(b, of.y, of.tokens)?);
    let (x, y) = (x.as_ref().unwrap_or(of.x.of), y.as_ref().unwrap_or(of.y.of));
    let mut u = b.alloc(x.dtype(), of.tokens * of.w.n)?;
    b.linear(x, of.w, None, &mut u)?;
    b.linear_dw(&u, y, of.tokens, grads)
}

/// A column range as a contiguous buffer; `None` if it is all columns.
fn columns<B: LinearOps + ?Sized>(b: &B, c: ColumnsOf<'_>, tokens: usize) -> Result<Option<Buffer>> {
    let all = c.of.len() / tokens.max(1);
    if c.width == all || tokens == 0 {
        return Ok(None);
    }
    // Copied in pieces whose width divides the row, the offset and the range.
    let width = gcd(gcd(all, c.from), c.width);
    let (across, from, to) = (all / width, c.from / width, (c.from + c.width) / width);
    let rows: Vec<u32> = (0..tokens).flat_map(|t| (from..to).map(move |c| (t * across + c) as u32)).collect();
    let mut own = b.alloc(c.of.dtype(), tokens * c.width)?;
    b.gather_rows(c.of, &b.indices(&rows)?, width, &mut own)?;
    Ok(Some(own))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

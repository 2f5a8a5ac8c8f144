//! The vocabulary-parallel head.

use super::heads::{others, stats};
use super::{Dev, Op};
use crate::backend::{LogpGrads, LogpStats, PartGrads, PartInput, PartSide, TileStats, VocabPart};
use crate::{Buffer, DType, Result};

/// Returns the number of rows of hidden states.
fn scored(op: Op<'_>, x: &Buffer, part: VocabPart<'_>) -> Result<usize> {
    let VocabPart { w, first, from, to } = part;
    op.weight("the head", w, false)?;
    let rows = op.factor("x", x, w.k, w)?;
    let inside = first <= from && from < to && to - first <= w.n;
    op.expect(inside, || format!("tokens {from}..{to} of a head with {} from {first} on", w.n))?;
    let tile = op.dev.vocab_tile();
    let tiles = (from - first).is_multiple_of(tile);
    let whole = (to - from).is_multiple_of(tile) || to - first == w.n;
    op.expect(tiles && whole, || format!("tokens {from}..{to} are not tiles of {tile}"))?;
    op.times(rows, w.n)?;
    Ok(rows)
}

pub(crate) fn tile_stats(dev: Dev<'_>, x: &Buffer, part: VocabPart<'_>, to: &TileStats<'_>) -> Result<()> {
    let op = Op::new(dev, "tile_stats");
    let rows = scored(op, x, part)?;
    op.f32s("tiles", to.tiles, 3 * rows * part.tiles(dev.vocab_tile()))?;
    if let Some((ids, found)) = &to.found {
        let whole = rows > 0 && ids.len().is_multiple_of(rows) || ids.is_empty();
        op.expect(whole, || format!("{} tokens are wanted of {rows} rows", ids.len()))?;
        op.typed("ids", ids, DType::U32, ids.len())?;
        op.f32s("found", found, ids.len())?;
    }
    op.some_f32s("logits", to.logits.as_deref(), rows * part.width())
}

pub(crate) fn fold_tiles(dev: Dev<'_>, tiles: &Buffer, [lse, entropy]: [&Buffer; 2]) -> Result<()> {
    let (op, rows) = (Op::new(dev, "fold_tiles"), lse.len());
    op.f32s("lse", lse, rows)?;
    op.f32s("entropy", entropy, rows)?;
    let whole = if rows == 0 { tiles.is_empty() } else { tiles.len().is_multiple_of(3 * rows) };
    op.expect(whole, || format!("{} numbers of tiles for {rows} rows", tiles.len()))?;
    op.f32s("tiles", tiles, tiles.len())
}

/// Requires a weight with exactly the part's rows.
fn gradients(
    op: Op<'_>,
    part: Option<(VocabPart<'_>, &Buffer)>,
    rows: usize,
    to: &PartGrads<'_>,
) -> Result<()> {
    op.weight("the columns of the head", to.back, false)?;
    op.floats("dx", to.dx, op.times(rows, to.back.n)?)?;
    let Some((part, x)) = part else { return op.some_f32s("dw", to.dw.as_deref(), 0) };
    op.expect(scored(op, x, part)? == rows, || format!("x has other rows than the {rows} of dx"))?;
    let own = part.first == part.from && part.width() == part.w.n && part.to <= to.back.k;
    op.expect(own, || "a weight of other tokens than the part's".into())?;
    op.expect(to.back.compute == part.w.compute, || "columns of a head of another type".into())?;
    op.some_f32s("dw", to.dw.as_deref(), part.w.n * part.w.k)
}

pub(crate) fn part_backward(
    dev: Dev<'_>,
    head: PartInput<'_>,
    listed: Option<&Buffer>,
    s: &LogpStats,
    grads: &LogpGrads<'_>,
    to: &PartGrads<'_>,
) -> Result<()> {
    let (op, rows) = (Op::new(dev, "part_backward"), head.targets.len());
    let vocab = to.back.k;
    op.below("targets", head.targets, rows, vocab)?;
    stats(op, s, rows)?;
    op.f32s("dlogp", grads.logp, rows)?;
    op.some_f32s("dentropy", grads.entropy, rows)?;
    match (listed, grads.others) {
        (None, None) => {}
        (Some(ids), Some(d)) => others(op, ids, ("dothers", d), rows, vocab)?,
        _ => return Err(op.error("other tokens without their gradient, or a gradient without them".into())),
    }
    gradients(op, head.part.map(|part| (part, head.x)), rows, to)
}

fn compared(op: Op<'_>, [p, q]: [PartSide<'_>; 2]) -> Result<usize> {
    let rows = scored(op, p.x, p.part)?;
    op.expect(scored(op, q.x, q.part)? == rows, || "the two have other numbers of rows".into())?;
    let same = (p.part.from, p.part.to) == (q.part.from, q.part.to) && p.x.dtype() == q.x.dtype();
    op.expect(same, || "the two have other tokens, or another type".into())?;
    op.f32s("lse of p", p.lse, rows)?;
    op.f32s("lse of q", q.lse, rows)?;
    Ok(rows)
}

pub(crate) fn kl_tiles(dev: Dev<'_>, p: PartSide<'_>, q: PartSide<'_>, sums: &Buffer) -> Result<()> {
    let op = Op::new(dev, "kl_tiles");
    let rows = compared(op, [p, q])?;
    op.f32s("sums", sums, rows * p.part.tiles(dev.vocab_tile()))
}

pub(crate) fn fold_kl(dev: Dev<'_>, tiles: &Buffer, kl: &Buffer) -> Result<()> {
    let (op, rows) = (Op::new(dev, "fold_kl"), kl.len());
    op.f32s("kl", kl, rows)?;
    let whole = if rows == 0 { tiles.is_empty() } else { tiles.len().is_multiple_of(rows) };
    op.expect(whole, || format!("{} sums of tiles for {rows} rows", tiles.len()))?;
    op.f32s("tiles", tiles, tiles.len())
}

pub(crate) fn kl_part_backward(
    dev: Dev<'_>,
    sides: Option<[PartSide<'_>; 2]>,
    [kl, dkl]: [&Buffer; 2],
    to: &PartGrads<'_>,
) -> Result<()> {
    let (op, rows) = (Op::new(dev, "kl_part_backward"), kl.len());
    op.f32s("kl", kl, rows)?;
    op.f32s("dkl", dkl, rows)?;
    if let Some(sides) = sides {
        op.expect(compared(op, sides)? == rows, || "the two have other numbers of rows than kl".into())?;
    }
    gradients(op, sides.map(|[p, _]| (p.part, p.x)), rows, to)
}

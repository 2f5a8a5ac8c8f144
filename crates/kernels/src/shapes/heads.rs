//! The head: log-probabilities, logits, sampling, KL divergence.

use super::{Dev, Op};
use crate::backend::{HeadGrads, HeadInput, LogpGrads, LogpStats};
use crate::{Buffer, DType, Result, Weight};

/// Maximum number of additional tokens per row.
const OTHERS: usize = 32;

/// Checks hidden states, head and targets; returns the number of rows.
fn targeted(op: Op<'_>, head: HeadInput<'_>, backward: bool) -> Result<usize> {
    let rows = scored(op, "x", head.x, head.w, backward)?;
    op.below("targets", head.targets, rows, head.w.n)?;
    Ok(rows)
}

/// Checks hidden states and head; returns the number of rows.
fn scored(op: Op<'_>, name: &str, x: &Buffer, w: &Weight, backward: bool) -> Result<usize> {
    op.weight("the head", w, backward)?;
    let rows = op.factor(name, x, w.k, w)?;
    op.times(rows, w.n)?;
    Ok(rows)
}

pub(super) fn stats(op: Op<'_>, s: &LogpStats, rows: usize) -> Result<()> {
    op.f32s("logp", &s.logp, rows)?;
    op.f32s("entropy", &s.entropy, rows)?;
    op.f32s("lse", &s.lse, rows)
}

pub(super) fn others(
    op: Op<'_>,
    ids: &Buffer,
    (name, out): (&str, &Buffer),
    rows: usize,
    vocab: usize,
) -> Result<()> {
    let each = ids.len() / rows.max(1);
    op.expect(each <= OTHERS, || format!("{each} additional tokens per row, expected at most {OTHERS}"))?;
    op.below("others", ids, rows * each, vocab)?;
    op.f32s(name, out, ids.len())
}

pub(crate) fn logp(
    dev: Dev<'_>,
    head: HeadInput<'_>,
    listed: Option<(&Buffer, &Buffer)>,
    s: &LogpStats,
) -> Result<()> {
    let op = Op::new(dev, "logp");
    let rows = targeted(op, head, false)?;
    listed.map_or(Ok(()), |(ids, out)| others(op, ids, ("logp of others", out), rows, head.w.n))?;
    stats(op, s, rows)
}

fn gradients(op: Op<'_>, w: &Weight, rows: usize, to: &HeadGrads<'_>) -> Result<()> {
    op.floats("dx", to.dx, op.times(rows, w.k)?)?;
    op.some_f32s("dw", to.dw.as_deref(), w.n * w.k)
}

pub(crate) fn logp_backward(
    dev: Dev<'_>,
    head: HeadInput<'_>,
    listed: Option<&Buffer>,
    s: &LogpStats,
    grads: &LogpGrads<'_>,
    to: &HeadGrads<'_>,
) -> Result<()> {
    let op = Op::new(dev, "logp_backward");
    let rows = targeted(op, head, true)?;
    stats(op, s, rows)?;
    op.f32s("dlogp", grads.logp, rows)?;
    op.some_f32s("dentropy", grads.entropy, rows)?;
    match (listed, grads.others) {
        (None, None) => {}
        (Some(ids), Some(d)) => others(op, ids, ("dothers", d), rows, head.w.n)?,
        _ => return Err(op.error("other tokens without their gradient, or a gradient without them".into())),
    }
    gradients(op, head.w, rows, to)
}

pub(crate) fn logp_one_pass(
    dev: Dev<'_>,
    head: HeadInput<'_>,
    dlogp: &Buffer,
    s: &LogpStats,
    to: &HeadGrads<'_>,
) -> Result<()> {
    let op = Op::new(dev, "logp_one_pass");
    let rows = targeted(op, head, true)?;
    op.f32s("dlogp", dlogp, rows)?;
    stats(op, s, rows)?;
    gradients(op, head.w, rows, to)
}

pub(crate) fn logits(dev: Dev<'_>, x: &Buffer, w: &Weight, [logits, lse]: [&Buffer; 2]) -> Result<()> {
    let op = Op::new(dev, "logits");
    let rows = scored(op, "x", x, w, false)?;
    op.f32s("logits", logits, rows * w.n)?;
    op.f32s("lse", lse, rows)
}

/// Returns the number of vocabulary entries.
fn chosen_from(op: Op<'_>, logits: &Buffer, rows: usize) -> Result<usize> {
    let vocab = logits.len() / rows.max(1);
    op.f32s("logits", logits, rows * vocab)?;
    op.expect(rows == 0 || vocab > 0, || "logits of no token".into())?;
    Ok(vocab)
}

pub(crate) fn sample(dev: Dev<'_>, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<usize> {
    let op = Op::new(dev, "sample");
    op.f32s("lse", lse, uniform.len())?;
    drawn(op, uniform.iter().copied())?;
    chosen_from(op, logits, uniform.len())
}

pub(crate) fn argmax(dev: Dev<'_>, logits: &Buffer, rows: usize) -> Result<usize> {
    chosen_from(Op::new(dev, "argmax"), logits, rows)
}

pub(crate) fn choose(
    dev: Dev<'_>,
    logits: &Buffer,
    lse: &Buffer,
    draws: impl ExactSizeIterator<Item = Option<f32>>,
) -> Result<usize> {
    let (op, rows) = (Op::new(dev, "choose"), draws.len());
    op.f32s("lse", lse, rows)?;
    drawn(op, draws.flatten())?;
    chosen_from(op, logits, rows)
}

fn drawn(op: Op<'_>, mut draws: impl Iterator<Item = f32>) -> Result<()> {
    let bad = draws.find(|draw| !(0.0..=1.0).contains(draw));
    bad.map_or(Ok(()), |draw| Err(op.error(format!("a draw of {draw}, expected 0 to 1"))))
}

/// `choices` has the number of rows of each.
pub(crate) fn feed(dev: Dev<'_>, choices: &[usize], from: &[(usize, u32)], ids: &Buffer) -> Result<()> {
    let op = Op::new(dev, "feed");
    op.typed("ids", ids, DType::U32, ids.len())?;
    let (n, room) = (from.len(), ids.len());
    op.expect(n <= room, || format!("ids have {room} elements, {n} are put there"))?;
    let known =
        |&(choice, row): &(usize, u32)| choices.get(choice).is_some_and(|&rows| (row as usize) < rows);
    op.expect(from.iter().all(known), || "a row that nothing was chosen for".into())
}

type KlOperands<'a> = (&'a Buffer, &'a Weight);

/// Returns the number of rows.
fn compared(op: Op<'_>, p: KlOperands<'_>, q: KlOperands<'_>, backward: bool) -> Result<usize> {
    let (rows, others) = (scored(op, "p", p.0, p.1, backward)?, scored(op, "q", q.0, q.1, false)?);
    op.expect(rows == others, || format!("{rows} rows of p, {others} of q"))?;
    let (a, b) = (p.1.n, q.1.n);
    op.expect(a == b && p.1.compute == q.1.compute, || {
        format!("heads of {a} and {b} tokens, or of two types")
    })?;
    Ok(rows)
}

pub(crate) fn kl(dev: Dev<'_>, p: KlOperands<'_>, q: KlOperands<'_>, kl: &Buffer) -> Result<()> {
    let op = Op::new(dev, "kl");
    let rows = compared(op, p, q, false)?;
    op.f32s("kl", kl, rows)
}

pub(crate) fn kl_backward(
    dev: Dev<'_>,
    p: KlOperands<'_>,
    q: KlOperands<'_>,
    dkl: &Buffer,
    to: &HeadGrads<'_>,
) -> Result<()> {
    let op = Op::new(dev, "kl_backward");
    let rows = compared(op, p, q, true)?;
    op.f32s("dkl", dkl, rows)?;
    gradients(op, p.1, rows, to)
}

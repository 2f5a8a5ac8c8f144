//! Larger operations made of others: what every backend can do, and what those that do better must equal.

use crate::backend::{
    Activation, Affine, Ask, Choice, DecodeOps, Heads, Normed, PagedRows, RopeOps, SampleOps, Turns,
};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::truncate::Kept;

/// See [`RopeOps::linear_qkv`].
pub fn linear_qkv<B: RopeOps + ?Sized>(
    b: &B,
    x: &Buffer,
    layer: Affine<'_>,
    heads: Heads,
    turns: Option<Turns<'_>>,
    cache: Option<(&PagedRows, &mut Buffer)>,
    qkv: &mut Buffer,
) -> Result<()> {
    b.linear(x, layer.weight, layer.bias, qkv)?;
    if let Some(t) = turns {
        b.rotary(heads, t.dim, t.cos, t.sin, t.positions, false, qkv)?;
    }
    cache.map_or(Ok(()), |(rows, cache)| b.cache_write(heads, qkv, rows, cache))
}

/// See [`RopeOps::qkv_backward`].
pub fn qkv_backward<B: RopeOps + ?Sized>(
    b: &B,
    heads: Heads,
    turns: Option<Turns<'_>>,
    dqkv: &mut Buffer,
    add: bool,
    dbias: Option<&mut Buffer>,
) -> Result<()> {
    if let Some(t) = turns {
        b.rotary(heads, t.dim, t.cos, t.sin, t.positions, true, dqkv)?;
    }
    // Without a weight it does not matter what the rows were multiplied with.
    dbias.map_or(Ok(()), |dbias| {
        b.linear_dw(dqkv, dqkv, dqkv.len() / heads.qkv_width(), add, None, Some(dbias))
    })
}

/// See [`DecodeOps::normed_qkv`].
pub fn normed_qkv<B: DecodeOps + ?Sized>(
    b: &B,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    heads: Heads,
    turns: Option<Turns<'_>>,
    rows: &PagedRows,
    cache: &mut Buffer,
    qkv: &mut Buffer,
) -> Result<()> {
    let mut h = b.alloc(layer.weight.dtype, x.len())?;
    b.norm(norm.op, x, norm.weight, norm.bias, &mut h)?;
    linear_qkv(b, &h, layer, heads, turns, Some((rows, cache)), qkv)
}

/// See [`DecodeOps::linear_add`].
pub fn linear_add<B: DecodeOps + ?Sized>(
    b: &B,
    x: &Buffer,
    layer: Affine<'_>,
    to: &mut Buffer,
) -> Result<()> {
    let mut y = b.alloc(x.dtype(), to.len())?;
    b.linear(x, layer.weight, layer.bias, &mut y)?;
    b.axpy(1.0, &y, to)
}

/// See [`DecodeOps::normed_activation`].
pub fn normed_activation<B: DecodeOps + ?Sized>(
    b: &B,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    op: Activation,
    y: &mut Buffer,
) -> Result<()> {
    let rows = x.len() / norm.op.width;
    let mut up = b.alloc(y.dtype(), rows * layer.weight.n)?;
    let mut h = b.alloc(layer.weight.dtype, x.len())?;
    b.norm(norm.op, x, norm.weight, norm.bias, &mut h)?;
    b.linear(&h, layer.weight, layer.bias, &mut up)?;
    b.activation(op, y.len() / rows.max(1), &up, y)
}

/// See [`SampleOps::choose`].
pub fn choose<B: SampleOps + ?Sized>(
    b: &B,
    logits: &Buffer,
    lse: &Buffer,
    asks: &[Ask],
) -> Result<Vec<Choice>> {
    let rows = asks.len();
    let vocab = logits.len() / rows.max(1);
    let draws: Vec<f32> = asks.iter().map(|a| a.draw.unwrap_or(0.0)).collect();
    let drawn = asks.iter().any(|a| a.draw.is_some() && !a.truncates());
    let sampled = if drawn { b.sample(logits, lse, &draws)? } else { Vec::new() };
    let greedy = asks.iter().any(|a| a.draw.is_none());
    let largest = if greedy { b.argmax(logits, rows)? } else { Vec::new() };
    let mut sums = vec![0.0; rows];
    b.read(lse, 0, &mut sums)?;
    let (mut values, mut kept) = (Vec::new(), Kept::default());
    let mut choice = |row: usize| {
        let (ask, lse) = (&asks[row], sums[row]);
        let logit = |token: u32| -> Result<f32> {
            let mut logit = [0.0];
            b.read(logits, row * vocab + token as usize, &mut logit)?;
            Ok(logit[0])
        };
        if ask.truncates() {
            values.resize(vocab, 0.0);
            b.read(logits, row * vocab, &mut values)?;
            let (token, kept) = kept.choose(&values, ask);
            return Ok(Choice { token, logit: values[token as usize], lse, kept });
        }
        let token = if ask.draw.is_some() { sampled[row] } else { largest[row] };
        let logit = logit(token)?;
        Ok(Choice { token, logit, lse, kept: if ask.draw.is_some() { logit - lse } else { 0.0 } })
    };
    (0..rows).map(&mut choice).collect()
}

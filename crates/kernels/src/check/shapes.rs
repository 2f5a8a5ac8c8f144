//! Invalid operands: every operation refuses them, on every device, before it computes anything.
//!
//! Each case builds its operands through a [`Maker`] and calls one operation. It is run once with valid operands, which must
//! succeed, and then with each operand in turn one element too short, or of a wrong type, which must be an error: accesses
//! beyond a buffer would hit other memory.

use super::{Check, random};
use crate::backend::*;
use crate::{Buffer, DType, Result, Weight};
use std::cell::Cell;

/// How an operand is invalid.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    /// One element less.
    Short(usize),
    /// Indices instead of numbers, or numbers instead of indices.
    Mistyped(usize),
}

/// Makes operands, of which one may be invalid.
struct Maker<'a> {
    b: &'a dyn Backend,
    dtype: DType,
    wrong: Wrong,
    made: Cell<usize>,
}

impl Maker<'_> {
    fn floats(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let number = self.made.replace(self.made.get() + 1);
        let len = if self.wrong == Wrong::Short(number) { len - 1 } else { len };
        if self.wrong == Wrong::Mistyped(number) {
            return self.b.indices(&vec![0; len]);
        }
        super::upload(self.b, dtype, &random(number as u32, len))
    }
    /// Of the compute type.
    fn x(&self, len: usize) -> Result<Buffer> {
        self.floats(self.dtype, len)
    }
    fn f32s(&self, len: usize) -> Result<Buffer> {
        self.floats(DType::F32, len)
    }
    fn ids(&self, ids: &[u32]) -> Result<Buffer> {
        let number = self.made.replace(self.made.get() + 1);
        let len = if self.wrong == Wrong::Short(number) { ids.len() - 1 } else { ids.len() };
        if self.wrong == Wrong::Mistyped(number) {
            return super::upload(self.b, DType::F32, &vec![0.0; len]);
        }
        self.b.indices(&ids[..len])
    }
    /// Never invalid: its shape is part of it.
    fn weight(&self, n: usize, k: usize) -> Result<Weight> {
        super::weight(self.b, self.dtype, n, k, &random(99, n * k))
    }
    fn stats(&self, rows: usize) -> Result<LogpStats> {
        Ok(LogpStats { logp: self.f32s(rows)?, entropy: self.f32s(rows)?, lse: self.f32s(rows)? })
    }
}

/// An operation, by its name in [`Backend`].
type Case = (&'static str, fn(&Maker<'_>) -> Result<()>);

const NORM: Norm = Norm { centred: true, plus_one: false, eps: 1e-5, width: 24 };
const HEADS: Heads = Heads { heads: 4, kv_heads: 2, head_dim: 8 };
const HEAD_NORM: Norm = Norm { centred: false, plus_one: false, eps: 1e-5, width: 8 };
const ATTENTION: Attention = Attention { heads: HEADS, scale: 0.3, softcap: None, window: None };
const HEAD: LogpHead = LogpHead { temperature: 0.7, softcap: None };
/// Row widths of qkv, and of attention's output.
const QKV: usize = (4 + 2 * 2) * 8;
const OUT: usize = 4 * 8;
/// Rows of most operands, and positions in the RoPE tables.
const ROWS: usize = 6;
const REACH: usize = 9;
/// Vocabulary size, and target tokens.
const VOCAB: usize = 40;
const TARGETS: [u32; ROWS] = [0, 39, 7, 8, 9, 20];
const POSITIONS: [u32; ROWS] = [0, 1, 2, 8, 3, 4];

/// One new token of each of six sequences; the cache's last block is used.
fn places(b: &dyn Backend) -> PagedRows {
    let at = b.block_tokens();
    let sequence = |i: usize| PagedSequence {
        row: i,
        count: 1,
        position: at + i,
        blocks: vec![i as u32, (ROWS + i) as u32],
    };
    PagedRows { sequences: (0..ROWS).map(sequence).collect() }
}

fn cache(m: &Maker<'_>) -> Result<Buffer> {
    m.x(m.b.cache_len(HEADS, 2 * ROWS))
}

/// All-gather for a single rank.
fn gathered(m: &Maker<'_>, own: &Buffer) -> Result<Buffer> {
    let mut all = m.b.alloc(own.dtype(), own.len())?;
    m.b.copy(own, 0, &mut all, 0, own.len())?;
    Ok(all)
}

fn with_rope(m: &Maker<'_>, f: impl FnOnce(Rotation<'_>) -> Result<()>) -> Result<()> {
    let (cos, sin) = (m.f32s(REACH * 4)?, m.f32s(REACH * 4)?);
    let positions = m.ids(&POSITIONS)?;
    f(Rotation { dim: 8, cos: &cos, sin: &sin, positions: &positions })
}

const CASES: &[Case] = &[
    ("write", |m| m.b.write(&mut m.x(20)?, 12, &[1.0; 8])),
    ("write_bf16", |m| m.b.write_bf16(&mut m.x(20)?, 12, &[1; 16])),
    ("read", |m| m.b.read(&m.x(20)?, 12, &mut [0.0; 8])),
    ("set_indices", |m| m.b.set_indices(&mut m.ids(&[1, 2, 3])?, &[4, 5, 6])),
    ("copy", |m| m.b.copy(&m.x(20)?, 12, &mut m.f32s(30)?, 22, 8)),
    ("copy_block", |m| m.b.copy_block((&m.x(27)?, 2, 7), (&mut m.x(38)?, 1, 11), [4, 4])),
    ("axpy", |m| m.b.axpy(0.5, &m.x(70)?, &mut m.f32s(70)?)),
    ("axpy_from", |m| {
        let mut y = m.b.alloc(DType::F32, 8)?; // says how many elements are added
        m.b.axpy_from(0.5, &m.x(20)?, 12, &mut y)
    }),
    ("dot", |m| m.b.dot(&m.x(70)?, &m.x(70)?).map(drop)),
    ("chunk_dots", |m| m.b.chunk_dots(&m.x(70)?, &m.x(70)?).map(drop)),
    ("dots", |m| m.b.dots(&[(&m.f32s(70)?, &m.f32s(70)?), (&m.f32s(5)?, &m.f32s(5)?)]).map(drop)),
    ("decode_nf4", |m| m.b.decode_nf4(&m.floats(DType::U8, 151)?, &m.f32s(5)?, 64, &mut m.f32s(301)?)),
    ("gather_rows", |m| m.b.gather_rows(&m.x(7 * 5)?, &m.ids(&[6, 0, 6])?, 5, &mut m.x(3 * 5)?)),
    ("scatter_rows", |m| m.b.scatter_rows(&m.x(3 * 5)?, &m.ids(&[6, 0, 2])?, 5, &mut m.x(7 * 5)?)),
    ("mix_rows", |m| {
        let (src, rows, weights) = (m.x(7 * 5)?, m.ids(&[6, 0, 6, 2])?, m.f32s(4)?);
        let mix = RowMix { rows: &rows, weights: &weights, per_row: 2, width: 5 };
        m.b.mix_rows(mix, &src, &mut m.x(2 * 5)?)
    }),
    ("mix_rows_backward", |m| {
        let (src, rows, weights) = (m.x(4 * 5)?, m.ids(&[3, 0, 1, 2])?, m.f32s(4)?);
        let mix = RowMix { rows: &rows, weights: &weights, per_row: 2, width: 5 };
        let (dout, mut dsrc, mut dweights) = (m.x(2 * 5)?, m.x(4 * 5)?, m.f32s(4)?);
        m.b.mix_rows_backward(mix, &src, &dout, &mut dsrc, &mut dweights)
    }),
    ("embed", |m| m.b.embed(&m.ids(&[6, 0, 3])?, &m.f32s(7 * 5)?, 1.0, false, &mut m.f32s(3 * 5)?)),
    ("embed_backward", |m| m.b.embed_backward(&m.ids(&[6, 0, 3])?, &m.x(3 * 5)?, 1.0, &mut m.f32s(7 * 5)?)),
    ("norm", |m| {
        let n = ROWS * 24;
        m.b.norm(Normed { op: NORM, weight: &m.f32s(24)?, bias: Some(&m.f32s(24)?) }, &m.x(n)?, &mut m.x(n)?)
    }),
    ("add_norm", |m| {
        let n = ROWS * 24;
        let (x, delta, weight, bias) = (m.f32s(n)?, m.x(n)?, m.f32s(24)?, m.f32s(24)?);
        m.b.add_norm(
            Normed { op: NORM, weight: &weight, bias: Some(&bias) },
            &x,
            &delta,
            &mut m.f32s(n)?,
            &mut m.x(n)?,
        )
    }),
    ("norm_backward", |m| {
        let n = ROWS * 24;
        let (dy, x, weight, mut dx) = (m.x(n)?, m.x(n)?, m.f32s(24)?, m.x(n)?);
        let (mut dw, mut db) = (m.f32s(24)?, m.f32s(24)?);
        let grads = NormGrads { weight: Some(&mut dw), bias: Some(&mut db), add: false };
        m.b.norm_backward(
            Normed { op: NORM, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut dx, add: false },
            grads,
        )
    }),
    ("norm_recompute", |m| {
        let n = ROWS * 24;
        let (x, delta, weight, bias, dy) = (m.f32s(n)?, m.x(n)?, m.f32s(24)?, m.f32s(24)?, m.x(n)?);
        let (mut y, mut dx, mut rounded) = (m.x(n)?, m.f32s(n)?, m.x(n)?);
        let (mut dw, mut db) = (m.f32s(24)?, m.f32s(24)?);
        let (norm, of) = (
            Normed { op: NORM, weight: &weight, bias: Some(&bias) },
            NormInput { x: &x, delta: Some(&delta) },
        );
        let grads = NormGrads { weight: Some(&mut dw), bias: Some(&mut db), add: true };
        let (y, dx, rounded) = (&mut y, &mut dx, Some(&mut rounded));
        m.b.norm_recompute(norm, of, NormRecompute { dy: &dy, y, dx, rounded, grads })
    }),
    ("load_weight", |m| m.b.load_weight(&m.f32s(24 * 33)?, &mut m.weight(24, 33)?)),
    ("linear", |m| {
        let w = m.weight(33, 24)?;
        m.b.linear(&m.x(ROWS * 24)?, &w, Some(&m.f32s(33)?), &mut m.x(ROWS * 33)?)
    }),
    ("linear_dx", |m| m.b.linear_dx(&m.x(ROWS * 33)?, &m.weight(33, 24)?, &mut m.x(ROWS * 24)?)),
    ("linear_dw", |m| {
        let (dy, x) = (m.x(ROWS * 33)?, m.x(ROWS * 24)?);
        let (mut dw, mut db) = (m.f32s(33 * 24)?, m.f32s(33)?);
        m.b.linear_dw(&dy, &x, ROWS, LinearGrads { weight: Some(&mut dw), bias: Some(&mut db), add: true })
    }),
    ("adapted", |m| {
        let (base, a, b) = (m.x(33 * 24)?, m.f32s(3 * 24)?, m.f32s(3 * 20)?);
        m.b.adapted(&base, &[LowRank { row: 13, a: &a, b: &b, r: 3 }], &mut m.f32s(33 * 24)?)
    }),
    ("load_adapted", |m| {
        let (base, a, b) = (m.x(33 * 24)?, m.f32s(3 * 24)?, m.f32s(3 * 20)?);
        m.b.load_adapted(&base, &[LowRank { row: 13, a: &a, b: &b, r: 3 }], &mut m.weight(33, 24)?)
    }),
    ("low_rank_dw", |m| {
        let (x, y, w) = (m.x(ROWS * 40)?, m.x(ROWS * 24)?, m.weight(3, 20)?);
        let (x, y) = (ColumnsOf { of: &x, from: 20, width: 20 }, ColumnsOf { of: &y, from: 0, width: 24 });
        let mut dw = m.f32s(3 * 24)?;
        let of = LowRankGrad { x, w: &w, y, tokens: ROWS };
        m.b.low_rank_dw(of, LinearGrads { weight: Some(&mut dw), bias: None, add: true })
    }),
    ("head_norm", |m| {
        m.b.head_norm(
            HeadNorm {
                op: HEAD_NORM,
                heads: HEADS,
                whole: false,
                q_weight: &m.f32s(8)?,
                k_weight: &m.f32s(8)?,
            },
            &m.x(ROWS * QKV)?,
            &mut m.x(ROWS * QKV)?,
        )
    }),
    ("head_norm_backward", |m| {
        let (qkv, q, k, mut d) = (m.x(ROWS * QKV)?, m.f32s(8)?, m.f32s(8)?, m.x(ROWS * QKV)?);
        let (mut dq, mut dk) = (m.f32s(8)?, m.f32s(8)?);
        m.b.head_norm_backward(
            HeadNorm { op: HEAD_NORM, heads: HEADS, whole: false, q_weight: &q, k_weight: &k },
            &qkv,
            &mut d,
            [Some(&mut dq), Some(&mut dk)],
        )
    }),
    ("rotary", |m| {
        let mut qkv = m.x(ROWS * QKV)?;
        with_rope(m, |t| m.b.rotary(HEADS, t, false, &mut qkv))
    }),
    ("attention", |m| {
        let (qkv, segments) = (m.x(ROWS * QKV)?, Segments::of([2, 4]));
        m.b.attention(ATTENTION, &qkv, &segments, &mut m.x(ROWS * OUT)?, &mut m.f32s(ROWS * 4)?)
    }),
    ("attention_backward", |m| {
        let (qkv, out, lse) = (m.x(ROWS * QKV)?, m.x(ROWS * OUT)?, m.f32s(ROWS * 4)?);
        let (dout, segments, mut dqkv) = (m.x(ROWS * OUT)?, Segments::of([2, 4]), m.x(ROWS * QKV)?);
        m.b.attention_backward(
            ATTENTION,
            AttentionSaved { qkv: &qkv, out: &out, lse: &lse },
            &dout,
            &segments,
            &mut dqkv,
        )
    }),
    ("attention_shard", |m| {
        let (q, kv, segments) = (m.x(3 * OUT)?, m.x(ROWS * (QKV - OUT))?, Segments::of([2, 4]));
        let shard = RowShard { segments: &segments, ranges: &[1..3, 5..6] };
        m.b.attention_shard(ATTENTION, shard, (&q, &kv), &mut m.x(3 * OUT)?, &mut m.f32s(3 * 4)?)
    }),
    ("attention_shard_backward", |m| {
        let (qkv, out, lse) = (m.x(ROWS * QKV)?, m.x(ROWS * OUT)?, m.f32s(ROWS * 4)?);
        let (dout, segments, mut dqkv) = (m.x(ROWS * OUT)?, Segments::of([2, 4]), m.x(3 * QKV)?);
        m.b.attention_shard_backward(
            ATTENTION,
            AttentionSaved { qkv: &qkv, out: &out, lse: &lse },
            &dout,
            RowShard { segments: &segments, ranges: &[1..3, 5..6] },
            &mut dqkv,
        )
    }),
    ("cache_write", |m| m.b.cache_write(HEADS, &m.x(ROWS * QKV)?, &places(m.b), &mut cache(m)?)),
    ("cache_copies", |m| m.b.cache_copies(HEADS, &[(0, 3), (1, 11)], &mut [cache(m)?, cache(m)?])),
    ("attention_paged", |m| {
        let (qkv, cache) = (m.x(ROWS * QKV)?, cache(m)?);
        m.b.attention_paged(ATTENTION, &qkv, &places(m.b), &cache, &mut m.x(ROWS * OUT)?)
    }),
    ("linear_qkv", |m| {
        let (x, w, bias) = (m.x(ROWS * 24)?, m.weight(QKV, 24)?, m.f32s(QKV)?);
        let (layer, rows) = (Affine { weight: &w, bias: Some(&bias) }, places(m.b));
        let (mut cache, mut qkv) = (cache(m)?, m.x(ROWS * QKV)?);
        with_rope(m, |t| {
            m.b.linear_qkv(
                &x,
                QkvLayer { linear: layer, heads: HEADS, rotation: Some(t) },
                Some((&rows, &mut cache)),
                &mut qkv,
            )
        })
    }),
    ("qkv_backward", |m| {
        let (mut dqkv, mut db) = (m.x(ROWS * QKV)?, m.f32s(QKV)?);
        with_rope(m, |t| m.b.qkv_backward(HEADS, Some(t), &mut dqkv, true, Some(&mut db)))
    }),
    ("rotated_bias", |m| m.b.rotated_bias(8, &m.x(ROWS * QKV)?, ROWS, true, &mut m.f32s(QKV)?)),
    ("activation", |m| m.b.activation(Activation::SiluGated, 20, &m.x(ROWS * 40)?, &mut m.x(ROWS * 20)?)),
    ("activation_backward", |m| {
        let (x, dy, mut dx) = (m.x(ROWS * 40)?, m.x(ROWS * 20)?, m.x(ROWS * 40)?);
        m.b.activation_backward(Activation::GeluGated, 20, &x, &dy, &mut dx)
    }),
    ("activation_recompute", |m| {
        m.b.activation_recompute(Activation::Gelu, 20, &mut m.x(ROWS * 20)?, &mut m.x(ROWS * 20)?)
    }),
    ("normed_qkv", |m| {
        let (weight, shift, x) = (m.f32s(24)?, m.f32s(24)?, m.f32s(ROWS * 24)?);
        let (w, bias, rows) = (m.weight(QKV, 24)?, m.f32s(QKV)?, places(m.b));
        let norm = Normed { op: NORM, weight: &weight, bias: Some(&shift) };
        let (layer, mut cache, mut qkv) =
            (Affine { weight: &w, bias: Some(&bias) }, cache(m)?, m.x(ROWS * QKV)?);
        with_rope(m, |t| {
            m.b.normed_qkv(
                norm,
                &x,
                QkvLayer { linear: layer, heads: HEADS, rotation: Some(t) },
                (&rows, &mut cache),
                &mut qkv,
            )
        })
    }),
    ("linear_add", |m| {
        let (x, w, bias) = (m.x(ROWS * 24)?, m.weight(33, 24)?, m.f32s(33)?);
        m.b.linear_add(&x, Affine { weight: &w, bias: Some(&bias) }, &mut m.f32s(ROWS * 33)?)
    }),
    ("normed_activation", |m| {
        let (weight, shift, x) = (m.f32s(24)?, m.f32s(24)?, m.f32s(ROWS * 24)?);
        let (w, bias) = (m.weight(40, 24)?, m.f32s(40)?);
        let norm = Normed { op: NORM, weight: &weight, bias: Some(&shift) };
        let layer = Affine { weight: &w, bias: Some(&bias) };
        m.b.normed_activation(norm, &x, layer, Activation::SiluGated, &mut m.x(ROWS * 20)?)
    }),
    ("logp", |m| {
        let (x, w, targets) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.ids(&TARGETS)?);
        let (listed, mut out) = (m.ids(&[TARGETS, TARGETS].concat())?, m.f32s(2 * ROWS)?);
        m.b.logp(
            HeadInput { op: HEAD, x: &x, w: &w, targets: &targets },
            Some((&listed, &mut out)),
            &mut m.stats(ROWS)?,
        )
    }),
    ("logp_backward", |m| {
        let (x, w, targets) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.ids(&TARGETS)?);
        let (listed, dlisted) = (m.ids(&[TARGETS, TARGETS].concat())?, m.f32s(2 * ROWS)?);
        let (stats, dlogp, dentropy) = (m.stats(ROWS)?, m.f32s(ROWS)?, m.f32s(ROWS)?);
        let grads = LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: Some(&dlisted) };
        let (mut dx, mut dw) = (m.x(ROWS * 24)?, m.f32s(VOCAB * 24)?);
        m.b.logp_backward(
            HeadInput { op: HEAD, x: &x, w: &w, targets: &targets },
            Some(&listed),
            &stats,
            &grads,
            HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
        )
    }),
    ("tile_stats", |m| {
        let (x, w, ids) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.ids(&TARGETS)?);
        let (mut tiles, mut found, mut logits) = (m.f32s(3 * ROWS)?, m.f32s(ROWS)?, m.f32s(ROWS * VOCAB)?);
        let to = TileStats { tiles: &mut tiles, found: Some((&ids, &mut found)), logits: Some(&mut logits) };
        m.b.tile_stats(HEAD, &x, VocabPart { w: &w, first: 256, from: 256, to: 256 + VOCAB }, to)
    }),
    ("fold_tiles", |m| m.b.fold_tiles(&m.f32s(3 * 7 * ROWS)?, &mut m.f32s(ROWS)?, &mut m.f32s(ROWS)?)),
    ("part_backward", |m| {
        let (x, w, targets) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.ids(&TARGETS)?);
        let (listed, dlisted) = (m.ids(&[TARGETS, TARGETS].concat())?, m.f32s(2 * ROWS)?);
        let (stats, dlogp, dentropy) = (m.stats(ROWS)?, m.f32s(ROWS)?, m.f32s(ROWS)?);
        let grads = LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: Some(&dlisted) };
        let (mut dx, mut dw, back) = (m.x(ROWS * 11)?, m.f32s(VOCAB * 24)?, m.weight(11, VOCAB)?);
        let part = Some(VocabPart { w: &w, first: 0, from: 0, to: VOCAB });
        let gather = &mut |own: &Buffer, _: usize| gathered(m, own);
        let to = PartGrads { dx: &mut dx, dw: Some(&mut dw), add: true, back: &back, gather };
        let head = PartInput { op: HEAD, x: &x, part, targets: &targets };
        m.b.part_backward(head, Some(&listed), &stats, &grads, to)
    }),
    ("kl_tiles", |m| {
        let (x, w, y, v) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.x(ROWS * 16)?, m.weight(VOCAB, 16)?);
        let (p, q) = (m.f32s(ROWS)?, m.f32s(ROWS)?);
        let part = |w| VocabPart { w, first: 0, from: 0, to: VOCAB };
        let (p, q) =
            (PartSide { x: &x, part: part(&w), lse: &p }, PartSide { x: &y, part: part(&v), lse: &q });
        m.b.kl_tiles(HEAD, p, q, &mut m.f32s(ROWS)?)
    }),
    ("fold_kl", |m| m.b.fold_kl(&m.f32s(7 * ROWS)?, &mut m.f32s(ROWS)?)),
    ("kl_part_backward", |m| {
        let (x, w, y, v) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.x(ROWS * 16)?, m.weight(VOCAB, 16)?);
        let (p, q, kl, dkl) = (m.f32s(ROWS)?, m.f32s(ROWS)?, m.f32s(ROWS)?, m.f32s(ROWS)?);
        let part = |w| VocabPart { w, first: 0, from: 0, to: VOCAB };
        let (p, q) =
            (PartSide { x: &x, part: part(&w), lse: &p }, PartSide { x: &y, part: part(&v), lse: &q });
        let (mut dx, mut dw, back) = (m.x(ROWS * 11)?, m.f32s(VOCAB * 24)?, m.weight(11, VOCAB)?);
        let gather = &mut |own: &Buffer, _: usize| gathered(m, own);
        let to = PartGrads { dx: &mut dx, dw: Some(&mut dw), add: true, back: &back, gather };
        m.b.kl_part_backward(HEAD, Some([p, q]), (&kl, &dkl), to)
    }),
    ("sample_part", |m| {
        let mut draws = [Draw::default(); ROWS];
        m.b.sample_part((&m.f32s(ROWS * VOCAB)?, 0), &m.f32s(ROWS)?, &[0.5; ROWS], &mut draws)
    }),
    ("logp_one_pass", |m| {
        let (x, w, targets) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?, m.ids(&TARGETS)?);
        let (dlogp, mut stats) = (m.f32s(ROWS)?, m.stats(ROWS)?);
        let (mut dx, mut dw) = (m.x(ROWS * 24)?, m.f32s(VOCAB * 24)?);
        m.b.logp_one_pass(
            HeadInput { op: HEAD, x: &x, w: &w, targets: &targets },
            &dlogp,
            &mut stats,
            HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
        )
    }),
    ("logits", |m| {
        let (x, w) = (m.x(ROWS * 24)?, m.weight(VOCAB, 24)?);
        m.b.logits(HEAD, &x, &w, &mut m.f32s(ROWS * VOCAB)?, &mut m.f32s(ROWS)?)
    }),
    ("sample", |m| m.b.sample(&m.f32s(ROWS * VOCAB)?, &m.f32s(ROWS)?, &[0.5; ROWS]).map(drop)),
    ("argmax", |m| m.b.argmax(&m.f32s(ROWS * VOCAB)?, ROWS).map(drop)),
    ("choose", |m| {
        let specs = [SampleSpec { top_k: 3, ..SampleSpec::plain(Some(0.5)) }; ROWS];
        m.b.choose(&m.f32s(ROWS * VOCAB)?, &m.f32s(ROWS)?, &specs).map(drop)
    }),
    ("feed", |m| {
        let (logits, lse) = (m.f32s(ROWS * VOCAB)?, m.f32s(ROWS)?);
        let choices = m.b.choose(&logits, &lse, &[SampleSpec::plain(None); ROWS])?;
        m.b.feed(&[&choices], &[(0, 5), (0, 0), (0, 1)], &mut m.ids(&[0; 3])?)
    }),
    ("kl", |m| {
        let (p, q) = (m.x(ROWS * 24)?, m.x(ROWS * 24)?);
        let (w, v) = (m.weight(VOCAB, 24)?, m.weight(VOCAB, 24)?);
        m.b.kl(HEAD, (&p, &w), (&q, &v), &mut m.f32s(ROWS)?)
    }),
    ("kl_backward", |m| {
        let (p, q, dkl) = (m.x(ROWS * 24)?, m.x(ROWS * 24)?, m.f32s(ROWS)?);
        let (w, v) = (m.weight(VOCAB, 24)?, m.weight(VOCAB, 24)?);
        let (mut dx, mut dw) = (m.x(ROWS * 24)?, m.f32s(VOCAB * 24)?);
        m.b.kl_backward(
            HEAD,
            (&p, &w),
            (&q, &v),
            &dkl,
            HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
        )
    }),
    ("adamw", |m| {
        let op = AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step: 1,
            grad_scale: 1.0,
        };
        let (mut weight, mut param, grad) = (m.weight(4, 10)?, m.f32s(40)?, m.f32s(40)?);
        let (mut first, mut second) = (m.f32s(40)?, m.f32s(40)?);
        m.b.fill(&mut second, 0.5)?;
        m.b.adamw(&mut [AdamWParam {
            op,
            ranges: &[0..7, 9..40],
            param: &mut param,
            grad: &grad,
            first: &mut first,
            second: &mut second,
            absmax: None,
            derived: Some(&mut weight),
        }])
    }),
    ("adamw", |m| {
        let op = AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step: 1,
            grad_scale: 1.0,
        };
        let (mut weight, mut param, grad) = (m.weight(30, 30)?, m.f32s(900)?, m.f32s(900)?);
        let (mut first, mut second) = (m.floats(DType::U8, 900)?, m.floats(DType::U8, 900)?);
        let (mut of_first, mut of_second) = (m.f32s(4)?, m.f32s(4)?);
        m.b.adamw(&mut [AdamWParam {
            op,
            ranges: &[0..256, 512..900],
            param: &mut param,
            grad: &grad,
            first: &mut first,
            second: &mut second,
            absmax: Some([&mut of_first, &mut of_second]),
            derived: Some(&mut weight),
        }])
    }),
    ("sgd", |m| {
        let op = Sgd { lr: 1e-3, momentum: 0.9, weight_decay: 0.0, grad_scale: 1.0 };
        m.b.sgd(op, 3..40, &mut m.f32s(40)?, &m.f32s(40)?, Some(&mut m.f32s(40)?))
    }),
];

pub fn all(check: &mut Check<'_>) -> Result<()> {
    for dtype in [DType::F32, DType::Bf16] {
        for (name, case) in CASES {
            let run = |wrong: Wrong| {
                let maker = Maker { b: check.card, dtype, wrong, made: Cell::new(0) };
                (case(&maker), maker.made.get())
            };
            let (done, operands) = run(Wrong::Nothing);
            done.map_err(|e| e.at(format!("{name}, {} operands", dtype.name())))?;
            let mut taken = 0;
            for i in 0..operands {
                taken += usize::from(run(Wrong::Short(i)).0.is_ok());
                taken += usize::from(run(Wrong::Mistyped(i)).0.is_ok());
            }
            check.report(format!("{name} {}: wrong operands are refused", dtype.name()), taken as f64, 0.0);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations without operands that could be too short: whose length is asked of the buffer itself, or that have none.
    const WHOLE: &[&str] = &[
        "describe", "instruction_set", "memory", "set_purpose", "memory_report", "books", "trim",
        "set_memory_limit", "is_exact", "set_exact", "wait", "peak_gflops", "busy_tokens", "alloc",
        "alloc_host", "fill", "indices", "runs_async", "captures", "repeat", "first_non_finite",
        "add_chunks", "weight", "master", "rounds_masters", "merges_in_copies", "rounded_master", "as_info",
        "as_card", "holds", "holds_weight", "ids", "block_tokens", "block_len", "vocab_tile",
        "draws_by_parts", "cache_len", "decode_rows", "chosen",
    ];

    /// A new operation has a case here, or a reason why it needs none.
    #[test]
    fn every_operation_is_walked() {
        let text = concat!(
            include_str!("../backend/mod.rs"),
            include_str!("../backend/memory.rs"),
            include_str!("../backend/layers.rs"),
            include_str!("../backend/attention.rs"),
            include_str!("../backend/experts.rs"),
            include_str!("../backend/low_rank.rs"),
            include_str!("../backend/head.rs"),
            include_str!("../backend/vocab.rs"),
            include_str!("../backend/optimizer.rs"),
            include_str!("../backend/graph.rs")
        );
        let methods = text.lines().filter_map(|line| line.strip_prefix("    fn "));
        let mut count = 0;
        for name in methods.filter_map(|rest| rest.split(['(', '<']).next()) {
            let walked = CASES.iter().any(|(case, _)| *case == name);
            assert!(walked != WHOLE.contains(&name), "{name}: in one of the two lists");
            count += 1;
        }
        let twice = CASES.windows(2).filter(|pair| pair[0].0 == pair[1].0).count();
        assert_eq!(count, CASES.len() - twice + WHOLE.len(), "no case without an operation");
    }
}

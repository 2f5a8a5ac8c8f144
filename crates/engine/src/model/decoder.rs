//! The decoder: forward above backward, calls in mirror order.
//!
//! Shapes: T tokens of all sequences end to end, H hidden, F feed-forward width. The residual stream is f32; what
//! linear layers read and write has the model's compute type.

use super::config::{Activation, NormKind};
use super::gradient::{Grads, Taken, added_to};
use super::weights::{Affine, LayerLayout, Model};
use crate::Result;
use ferrl_kernels::backend::{self, Attention, Heads, NormInput, PagedRows, Segments};
use ferrl_kernels::{Buffer, DType};

/// Where keys and values of earlier tokens are.
pub enum Context<'a> {
    /// All tokens of every sequence are in this batch.
    Packed(&'a Segments),
    /// Earlier tokens are in the cache, one buffer a layer.
    Paged(&'a PagedRows, &'a mut [Buffer]),
}

/// What forward leaves for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: there will be no backward.
    Nothing,
    /// Each layer's input; the rest is computed again in backward, bit for bit.
    Inputs,
    /// Everything.
    All,
}

/// Token ids with their positions, and the sequences they belong to.
pub struct Tokens {
    /// One id per row.
    pub ids: Buffer,
    /// One position per row.
    pub positions: Buffer,
    /// Number of rows.
    pub rows: usize,
    /// One more than the largest position.
    pub reach: usize,
}

/// One layer's activations.
struct Layer {
    x: Buffer,               // (T, H) f32: residual stream at the layer's start
    inner: Option<Interior>, // absent under `Keep::Inputs`
}

/// The residual stream between attention and network is `x + delta`; it and both norms are computed again in backward,
/// where they cost next to nothing.
struct Interior {
    qkv_raw: Option<Buffer>,  // before the heads' norms
    qkv: Buffer,              // rotated
    att: Buffer,              // (T, heads * head_dim)
    lse: Buffer,              // (T, heads) f32
    att_proj: Option<Buffer>, // before the post norm
    delta: Buffer,            // (T, H): what attention adds to the residual stream
    up: Buffer,               // (T, F or 2F)
    down: Option<Buffer>,     // before the post norm
}

/// A layer's activations, and what comes out of it: the residual stream before the network, what the network adds.
struct Passed {
    interior: Interior,
    x_mid: Buffer,
    delta: Buffer,
}

/// Activations of a whole forward pass.
pub struct Activations {
    layers: Vec<Layer>,
    x_final: Buffer, // (T, H) f32
}

/// The gradient of the residual stream.
struct Flow {
    dx: Buffer,              // (T, H) f32
    rounded: Option<Buffer>, // the same in the compute type, where products read it
}

impl Flow {
    /// What flows into a sublayer without a norm at its end.
    fn plain(&self) -> &Buffer {
        self.rounded.as_ref().unwrap_or(&self.dx)
    }
}

impl Model {
    /// Uploads a batch of tokens. This is the one way in for ids and positions: a device does not look at them again.
    pub fn tokens(&self, ids: &[u32], positions: &[u32]) -> Result<Tokens> {
        assert_eq!(ids.len(), positions.len());
        let reach = positions.iter().max().map_or(0, |&p| p as usize + 1);
        self.config.check_ids(ids)?;
        self.config.check_length(reach)?;
        let (ids_there, positions) = (self.backend.indices(ids)?, self.backend.indices(positions)?);
        Ok(Tokens { ids: ids_there, positions, rows: ids.len(), reach })
    }

    /// Hidden states after the final norm, `(T, H)` in the compute type, and what backward needs.
    pub fn forward(&self, t: &Tokens, mut context: Context<'_>, keep: Keep) -> Result<(Buffer, Activations)> {
        let b = &*self.backend;
        let mut x = self.f32s(t.rows * self.config.hidden)?;
        b.embed(&t.ids, self.master(self.layout.embed), self.config.embedding_scale, false, &mut x)?;
        if let Some(table) = self.layout.position {
            b.embed(&t.positions, self.master(table), 1.0, true, &mut x)?;
        }
        let mut layers = Vec::new();
        let mut h = self.activations(x.len())?;
        if let (Context::Paged(rows, caches), Keep::Nothing, true) =
            (&mut context, keep, self.has_few(t.rows))
        {
            self.forward_few(t, rows, caches, &mut x)?;
            self.norm(self.layout.final_norm, &x, &mut h)?;
            return Ok((h, Activations { layers, x_final: x }));
        }
        self.norm(self.norm_after(None), &x, &mut h)?;
        for l in 0..self.config.layers {
            let Passed { interior, x_mid, delta } = self.layer(l, t, &x, h, &mut context, keep)?;
            // x = x_mid + delta, and the norm that comes next: the next layer's, or the final one.
            let mut next = self.f32s(x.len())?;
            h = self.activations(x.len())?;
            self.add_norm(self.norm_after(Some(l)), &x_mid, &delta, &mut next, &mut h)?;
            let inner = (keep == Keep::All).then_some(interior);
            let previous = std::mem::replace(&mut x, next);
            if keep != Keep::Nothing {
                layers.push(Layer { x: previous, inner });
            }
        }
        Ok((h, Activations { layers, x_final: x }))
    }

    /// The norm of the residual stream after a layer, or before the first.
    fn norm_after(&self, layer: Option<usize>) -> Affine {
        let next = layer.map_or(0, |l| l + 1);
        self.layout.layers.get(next).map_or(self.layout.final_norm, |p| p.attn_norm)
    }

    /// One layer, from its input `x` and that normed, `h`.
    fn layer(
        &self,
        l: usize,
        t: &Tokens,
        x: &Buffer,
        h: Buffer,
        context: &mut Context<'_>,
        keep: Keep,
    ) -> Result<Passed> {
        let (b, p, c) = (&*self.backend, &self.layout.layers[l], &self.config);
        let op = self.attention(l);
        let mut qkv = self.activations(t.rows * c.qkv_width())?;
        let mut qkv_raw = None;
        let mut att = self.activations(t.rows * c.attention_width())?;
        let mut lse = self.f32s(t.rows * c.heads)?;
        if let Some((q, k)) = p.qk_norm {
            let mut raw = self.activations(qkv.len())?;
            self.linear(p.qkv, &h, &mut raw)?;
            b.head_norm(self.head_norm(), op.heads, &raw, self.master(q), self.master(k), &mut qkv)?;
            qkv_raw = Some(raw);
            self.rotate(t, op.heads, false, &mut qkv)?;
            if let Context::Paged(rows, caches) = &mut *context {
                b.cache_write(op.heads, &qkv, rows, &mut caches[l])?;
            }
        } else {
            let (layer, tables) = (self.affine(p.qkv), self.rotary(t.reach)?);
            let cache = match &mut *context {
                Context::Packed(_) => None,
                Context::Paged(rows, caches) => Some((*rows, &mut caches[l])),
            };
            b.linear_qkv(&h, layer, op.heads, self.turns(tables.as_deref(), t), cache, &mut qkv)?;
        }
        drop(h);
        match context {
            Context::Packed(segments) => b.attention(op, &qkv, segments, &mut att, &mut lse)?,
            Context::Paged(rows, caches) => b.attention_paged(op, &qkv, rows, &caches[l], &mut att)?,
        }
        let mut proj = self.activations(x.len())?;
        self.linear(p.attn_out, &att, &mut proj)?;
        let (att_proj, att_delta) = self.post_norm(p.attn_post_norm, proj)?;

        let mut x_mid = self.f32s(x.len())?;
        let mut h_mid = self.activations(x.len())?;
        self.add_norm(p.mlp_norm, x, &att_delta, &mut x_mid, &mut h_mid)?;
        let mut up = self.activations(t.rows * c.up_width())?;
        self.linear(p.up, &h_mid, &mut up)?;
        let mut act = self.activations(t.rows * c.ffn)?;
        b.activation(activation(c.activation), c.ffn, &up, &mut act)?;
        let mut down = self.activations(x.len())?;
        self.linear(p.down, &act, &mut down)?;
        let (down, delta) = self.post_norm(p.mlp_post_norm, down)?;
        let kept = |b: Option<Buffer>| b.filter(|_| keep != Keep::Nothing);
        let (qkv_raw, att_proj, down) = (kept(qkv_raw), kept(att_proj), kept(down));
        let interior = Interior { qkv_raw, qkv, att, lse, att_proj, delta: att_delta, up, down };
        Ok(Passed { interior, x_mid, delta })
    }

    /// From d loss / d hidden states to the gradients of every parameter below them.
    pub fn backward(
        &self,
        t: &Tokens,
        segments: &Segments,
        kept: Activations,
        dh: &Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let b = &*self.backend;
        let mut dx = self.f32s(kept.x_final.len())?;
        self.norm_backward(self.layout.final_norm, dh, &kept.x_final, false, &mut dx, grads)?;
        drop(kept.x_final);
        let mut rounded = None;
        if self.dtype != dx.dtype() && !self.config.post_norms {
            let mut copy = self.activations(dx.len())?;
            b.copy(&dx, 0, &mut copy, 0, dx.len())?;
            rounded = Some(copy);
        }
        let mut flow = Flow { dx, rounded };
        for (l, layer) in kept.layers.into_iter().enumerate().rev() {
            let interior = match layer.inner {
                Some(interior) => interior,
                None => {
                    let mut h = self.activations(layer.x.len())?;
                    self.norm(self.layout.layers[l].attn_norm, &layer.x, &mut h)?;
                    self.layer(l, t, &layer.x, h, &mut Context::Packed(segments), Keep::All)?.interior
                }
            };
            self.layer_backward(l, t, segments, &layer.x, interior, &mut flow, grads)?;
        }
        if let Some(slot) = self.layout.position.and_then(|table| grads[table].as_mut()) {
            b.embed_backward(&t.positions, &flow.dx, 1.0, slot.added_to(b)?)?;
        }
        if let Some(slot) = &mut grads[self.layout.embed] {
            b.embed_backward(&t.ids, &flow.dx, self.config.embedding_scale, slot.added_to(b)?)?;
        }
        Ok(())
    }

    /// `flow` is the gradient of the residual stream, after the layer on entry and before it on return.
    fn layer_backward(
        &self,
        l: usize,
        t: &Tokens,
        segments: &Segments,
        x: &Buffer,
        mut a: Interior,
        flow: &mut Flow,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, c) = (&*self.backend, &self.config);
        let p: &LayerLayout = &self.layout.layers[l];
        let op = self.attention(l);
        let ddown = self.post_norm_backward(p.mlp_post_norm, &flow.dx, a.down.take(), grads)?;
        let ddown = ddown.as_ref().unwrap_or(flow.plain());
        let mut dact = self.activations(t.rows * c.ffn)?;
        b.linear_dx(ddown, self.weight(p.down.weight), &mut dact)?;
        // In place: what the activation gave, and the gradient of what it was given.
        b.activation_again(activation(c.activation), c.ffn, &mut a.up, &mut dact)?;
        let (act, dup) = (dact, a.up);
        self.linear_backward(p.down, ddown, &act, grads)?;
        drop(act);
        let mut dh_mid = self.activations(x.len())?;
        b.linear_dx(&dup, self.weight(p.up.weight), &mut dh_mid)?;
        let h_mid = self.norm_again(p.mlp_norm, x, Some(&a.delta), &dh_mid, flow, grads)?;
        self.linear_backward(p.up, &dup, &h_mid, grads)?;
        drop((dup, dh_mid, h_mid));

        let dproj = self.post_norm_backward(p.attn_post_norm, &flow.dx, a.att_proj.take(), grads)?;
        let mut datt = self.activations(a.att.len())?;
        let dproj = dproj.as_ref().unwrap_or(flow.plain());
        self.linear_backward(p.attn_out, dproj, &a.att, grads)?;
        b.linear_dx(dproj, self.weight(p.attn_out.weight), &mut datt)?;
        let mut dqkv = self.activations(a.qkv.len())?;
        b.attention_backward(op, &a.qkv, &a.att, &a.lse, &datt, segments, &mut dqkv)?;
        // What the product's own backward is left with: without the bias, where that was summed on the way.
        let mut rest = p.qkv;
        if let (Some((q, k)), Some(raw)) = (p.qk_norm, &a.qkv_raw) {
            self.rotate(t, op.heads, true, &mut dqkv)?;
            let (wq, wk) = (self.master(q), self.master(k));
            let [slot_q, slot_k] = grads.get_disjoint_mut([q, k]).expect("two parameters");
            let (dwq, dwk) = (added_to(b, slot_q)?, added_to(b, slot_k)?);
            b.head_norm_backward(self.head_norm(), op.heads, raw, wq, wk, &mut dqkv, dwq, dwk)?;
        } else {
            let tables = self.rotary(t.reach)?;
            let turns = self.turns(tables.as_deref(), t);
            let mut bias = rest.bias.take().and_then(|i| grads[i].as_mut());
            let add = bias.as_ref().is_some_and(|slot| !slot.is_empty());
            let dbias = bias.as_mut().map(|slot| slot.written());
            b.qkv_backward(op.heads, turns, &mut dqkv, add, dbias)?;
        }
        let mut dh = self.activations(x.len())?;
        b.linear_dx(&dqkv, self.weight(p.qkv.weight), &mut dh)?;
        let h = self.norm_again(p.attn_norm, x, None, &dh, flow, grads)?;
        self.linear_backward(rest, &dqkv, &h, grads)
    }

    /// Runs forward again and names the first activation that holds a NaN or infinity.
    pub fn first_bad_activation(&self, t: &Tokens, segments: &Segments) -> Result<Option<String>> {
        let (h, kept) = self.forward(t, Context::Packed(segments), Keep::All)?;
        for (l, layer) in kept.layers.iter().enumerate() {
            let Some(a) = &layer.inner else { continue };
            let (p, n) = (&self.layout.layers[l], layer.x.len());
            let (mut h, mut x_mid, mut h_mid) = (self.activations(n)?, self.f32s(n)?, self.activations(n)?);
            self.norm(p.attn_norm, &layer.x, &mut h)?;
            self.add_norm(p.mlp_norm, &layer.x, &a.delta, &mut x_mid, &mut h_mid)?;
            let steps = [
                ("input", &layer.x),
                ("attention norm", &h),
                ("queries, keys and values", &a.qkv),
                ("attention", &a.att),
                ("residual after attention", &x_mid),
                ("feed-forward norm", &h_mid),
                ("up projection", &a.up),
            ];
            for (name, buffer) in steps {
                if self.backend.first_non_finite(buffer)?.is_some() {
                    return Ok(Some(format!("{name} of layer {l}")));
                }
            }
        }
        Ok(self.backend.first_non_finite(&h)?.map(|_| "the final norm".into()))
    }

    // ---- pieces, forward and backward side by side ----------------------------------------------------------

    fn linear(&self, p: Affine, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.backend.linear(x, self.weight(p.weight), p.bias.map(|i| self.master(i)), y)
    }

    /// Adds to the gradients of the weight and the bias.
    pub(super) fn linear_backward(&self, p: Affine, dy: &Buffer, x: &Buffer, grads: Grads<'_>) -> Result<()> {
        let (b, w) = (&*self.backend, self.weight(p.weight));
        Taken::with(p, grads, |taken| {
            let (add, [to, bias_to]) = taken.sums(b)?;
            b.linear_dw(dy, x, dy.len() / w.n, add, to, bias_to)
        })
    }

    fn norm(&self, p: Affine, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.backend.norm(self.norm_op(), x, self.master(p.weight), p.bias.map(|i| self.master(i)), y)
    }

    /// `sum = x + delta`, and its norm.
    fn add_norm(
        &self,
        p: Affine,
        x: &Buffer,
        delta: &Buffer,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        let bias = p.bias.map(|i| self.master(i));
        self.backend.add_norm(self.norm_op(), x, delta, self.master(p.weight), bias, sum, y)
    }

    fn norm_backward(
        &self,
        p: Affine,
        dy: &Buffer,
        x: &Buffer,
        add: bool,
        dx: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, w) = (&*self.backend, self.master(p.weight));
        Taken::with(p, grads, |taken| {
            b.norm_backward(self.norm_op(), dy, x, w, add, dx, taken.norm_grads(b)?)
        })
    }

    /// What a norm of the residual stream gave, again; its backward goes into `flow`.
    fn norm_again(
        &self,
        p: Affine,
        x: &Buffer,
        delta: Option<&Buffer>,
        dy: &Buffer,
        flow: &mut Flow,
        grads: Grads<'_>,
    ) -> Result<Buffer> {
        let b = &*self.backend;
        let mut y = self.activations(x.len())?;
        let of = NormInput { x, delta, weight: self.master(p.weight), bias: p.bias.map(|i| self.master(i)) };
        let (dx, rounded) = (&mut flow.dx, flow.rounded.as_mut());
        Taken::with(p, grads, |taken| {
            b.norm_again(self.norm_op(), of, dy, &mut y, dx, rounded, taken.norm_grads(b)?)
        })?;
        Ok(y)
    }

    /// Normalises a sublayer's output where the model does; returns (what backward needs, output).
    fn post_norm(&self, p: Option<Affine>, y: Buffer) -> Result<(Option<Buffer>, Buffer)> {
        let Some(p) = p else { return Ok((None, y)) };
        let mut normed = self.activations(y.len())?;
        self.norm(p, &y, &mut normed)?;
        Ok((Some(y), normed))
    }

    /// The gradient before a sublayer's norm, in the compute type, from that of the residual stream; `None` where there
    /// is no such norm.
    fn post_norm_backward(
        &self,
        p: Option<Affine>,
        dx: &Buffer,
        y: Option<Buffer>,
        grads: Grads<'_>,
    ) -> Result<Option<Buffer>> {
        let (Some(p), Some(y)) = (p, y) else { return Ok(None) };
        let mut d = self.activations(dx.len())?;
        self.norm_backward(p, dx, &y, false, &mut d, grads)?;
        Ok(Some(d))
    }

    pub(super) fn rotate(&self, t: &Tokens, heads: Heads, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        let super::config::Position::Rotary(rope) = &self.config.position else { return Ok(()) };
        let Some(tables) = self.rotary(t.reach)? else { return Ok(()) };
        self.backend.rotary(heads, rope.rotary_dim, &tables.cos, &tables.sin, &t.positions, inverse, qkv)
    }

    pub(super) fn attention(&self, l: usize) -> Attention {
        let c = &self.config;
        Attention {
            heads: Heads { heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim },
            scale: c.attention_scale,
            softcap: c.attention_softcap,
            window: c.windows[l],
        }
    }

    pub(super) fn norm_op(&self) -> backend::Norm {
        let n = self.config.norm;
        backend::Norm {
            centred: n.kind == NormKind::Layer,
            plus_one: n.kind == NormKind::RmsPlusOne,
            eps: n.eps,
            width: self.config.hidden,
        }
    }

    pub(super) fn head_norm(&self) -> backend::Norm {
        backend::Norm { width: self.config.head_dim, ..self.norm_op() }
    }

    pub(crate) fn f32s(&self, len: usize) -> Result<Buffer> {
        self.backend.alloc(DType::F32, len)
    }

    pub(crate) fn activations(&self, len: usize) -> Result<Buffer> {
        self.backend.alloc(self.dtype, len)
    }
}

pub(super) fn activation(a: Activation) -> backend::Activation {
    match a {
        Activation::SiluGated => backend::Activation::SiluGated,
        Activation::GeluGated => backend::Activation::GeluGated,
        Activation::Gelu => backend::Activation::Gelu,
    }
}

//! The decoder: forward above backward, calls in mirror order.
//!
//! Shapes: T tokens of all sequences end to end, H hidden, F feed-forward width. The residual stream is f32; what
//! linear layers read and write has the model's compute type.

use super::config::{Activation, NormKind};
use super::weights::{Affine, LayerLayout, Model};
use crate::Result;
use ferrl_kernels::backend::{self, Attention, Heads, PagedRows, Segments};
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

struct Interior {
    h: Buffer,                // (T, H) normed
    qkv_raw: Option<Buffer>,  // before the heads' norms
    qkv: Buffer,              // rotated
    att: Buffer,              // (T, heads * head_dim)
    lse: Buffer,              // (T, heads) f32
    att_proj: Option<Buffer>, // before the post norm
    x_mid: Buffer,            // (T, H) f32: residual stream between attention and network
    h_mid: Buffer,            // (T, H) normed
    up: Buffer,               // (T, F or 2F)
    down: Option<Buffer>,     // before the post norm
}

/// Activations of a whole forward pass.
pub struct Activations {
    layers: Vec<Layer>,
    x_final: Buffer, // (T, H) f32
}

/// Where gradients of parameters are added; `None` is frozen.
pub type Grads<'a> = &'a mut [Option<Buffer>];

impl Model {
    /// Uploads a batch of tokens.
    pub fn tokens(&self, ids: &[u32], positions: &[u32]) -> Result<Tokens> {
        assert_eq!(ids.len(), positions.len());
        Ok(Tokens {
            ids: self.backend.indices(ids)?,
            positions: self.backend.indices(positions)?,
            rows: ids.len(),
            reach: positions.iter().max().map_or(0, |&p| p as usize + 1),
        })
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
            let (interior, delta) = self.layer(l, t, &x, h, &mut context, keep)?;
            // x = x_mid + delta, and the norm that comes next: the next layer's, or the final one.
            let mut next = self.f32s(x.len())?;
            h = self.activations(x.len())?;
            self.add_norm(self.norm_after(Some(l)), &interior.x_mid, &delta, &mut next, &mut h)?;
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

    /// One layer, from its input `x` and that normed, `h`: its activations, and what it adds to the residual stream
    /// after `x_mid`.
    fn layer(
        &self,
        l: usize,
        t: &Tokens,
        x: &Buffer,
        h: Buffer,
        context: &mut Context<'_>,
        keep: Keep,
    ) -> Result<(Interior, Buffer)> {
        let (b, p, c) = (&*self.backend, &self.layout.layers[l], &self.config);
        let op = self.attention(l);
        let mut qkv = self.activations(t.rows * c.qkv_width())?;
        let mut qkv_raw = None;
        let mut att = self.activations(t.rows * c.attention_width())?;
        let mut lse = self.f32s(t.rows * c.heads)?;
        if let (None, Context::Paged(rows, caches)) = (p.qk_norm, &mut *context) {
            let (layer, tables) = (self.affine(p.qkv), self.rotary(t.reach)?);
            let turns = self.turns(tables.as_deref(), t);
            b.linear_qkv(&h, layer, op.heads, turns, rows, &mut caches[l], &mut qkv)?;
        } else {
            self.linear(p.qkv, &h, &mut qkv)?;
            if let Some((q, k)) = p.qk_norm {
                let mut normed = self.activations(qkv.len())?;
                b.head_norm(self.head_norm(), op.heads, &qkv, self.master(q), self.master(k), &mut normed)?;
                qkv_raw = Some(std::mem::replace(&mut qkv, normed));
            }
            self.rotate(t, op.heads, false, &mut qkv)?;
            if let Context::Paged(rows, caches) = &mut *context {
                b.cache_write(op.heads, &qkv, rows, &mut caches[l])?;
            }
        }
        match context {
            Context::Packed(segments) => b.attention(op, &qkv, segments, &mut att, &mut lse)?,
            Context::Paged(rows, caches) => b.attention_paged(op, &qkv, rows, &caches[l], &mut att)?,
        }
        let mut proj = self.activations(x.len())?;
        self.linear(p.attn_out, &att, &mut proj)?;
        let (att_proj, delta) = self.post_norm(p.attn_post_norm, proj)?;

        let mut x_mid = self.f32s(x.len())?;
        let mut h_mid = self.activations(x.len())?;
        self.add_norm(p.mlp_norm, x, &delta, &mut x_mid, &mut h_mid)?;
        let mut up = self.activations(t.rows * c.up_width())?;
        self.linear(p.up, &h_mid, &mut up)?;
        let mut act = self.activations(t.rows * c.ffn)?;
        b.activation(activation(c.activation), c.ffn, &up, &mut act)?;
        let mut down = self.activations(x.len())?;
        self.linear(p.down, &act, &mut down)?;
        let (down, delta) = self.post_norm(p.mlp_post_norm, down)?;
        let kept = |b: Option<Buffer>| b.filter(|_| keep != Keep::Nothing);
        let (qkv_raw, att_proj, down) = (kept(qkv_raw), kept(att_proj), kept(down));
        Ok((Interior { h, qkv_raw, qkv, att, lse, att_proj, x_mid, h_mid, up, down }, delta))
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
        for (l, layer) in kept.layers.into_iter().enumerate().rev() {
            let interior = match layer.inner {
                Some(interior) => interior,
                None => {
                    let mut h = self.activations(layer.x.len())?;
                    self.norm(self.layout.layers[l].attn_norm, &layer.x, &mut h)?;
                    self.layer(l, t, &layer.x, h, &mut Context::Packed(segments), Keep::All)?.0
                }
            };
            self.layer_backward(l, t, segments, &layer.x, interior, &mut dx, grads)?;
        }
        if let Some(grad) = self.layout.position.and_then(|table| grads[table].as_mut()) {
            b.embed_backward(&t.positions, &dx, 1.0, grad)?;
        }
        if let Some(grad) = &mut grads[self.layout.embed] {
            b.embed_backward(&t.ids, &dx, self.config.embedding_scale, grad)?;
        }
        Ok(())
    }

    /// `dx` is the gradient of the residual stream, after the layer on entry and before it on return.
    fn layer_backward(
        &self,
        l: usize,
        t: &Tokens,
        segments: &Segments,
        x: &Buffer,
        a: Interior,
        dx: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, c) = (&*self.backend, &self.config);
        let p: &LayerLayout = &self.layout.layers[l];
        let op = self.attention(l);
        let ddown = self.post_norm_backward(p.mlp_post_norm, dx, a.down.as_ref(), grads)?;
        let ddown = ddown.as_ref().unwrap_or(dx);
        let mut dact = self.activations(t.rows * c.ffn)?;
        b.linear_dx(ddown, self.weight(p.down.weight), &mut dact)?;
        let (mut act, mut dup) = (self.activations(dact.len())?, self.activations(a.up.len())?);
        b.activation_again(activation(c.activation), c.ffn, &a.up, &dact, &mut act, &mut dup)?;
        self.linear_backward(p.down, ddown, &act, None, grads)?;
        let mut dh_mid = self.activations(x.len())?;
        self.linear_backward(p.up, &dup, &a.h_mid, Some(&mut dh_mid), grads)?;
        self.norm_backward(p.mlp_norm, &dh_mid, &a.x_mid, true, dx, grads)?;

        let dproj = self.post_norm_backward(p.attn_post_norm, dx, a.att_proj.as_ref(), grads)?;
        let mut datt = self.activations(a.att.len())?;
        let dproj = dproj.as_ref().unwrap_or(dx);
        self.linear_backward(p.attn_out, dproj, &a.att, Some(&mut datt), grads)?;
        let mut dqkv = self.activations(a.qkv.len())?;
        b.attention_backward(op, &a.qkv, &a.att, &a.lse, &datt, segments, &mut dqkv)?;
        self.rotate(t, op.heads, true, &mut dqkv)?;
        if let (Some((q, k)), Some(raw)) = (p.qk_norm, &a.qkv_raw) {
            let (mut dq, mut dk) = (grads[q].take(), grads[k].take());
            let (wq, wk) = (self.master(q), self.master(k));
            b.head_norm_backward(
                self.head_norm(),
                op.heads,
                raw,
                wq,
                wk,
                &mut dqkv,
                dq.as_mut(),
                dk.as_mut(),
            )?;
            (grads[q], grads[k]) = (dq, dk);
        }
        let mut dh = self.activations(x.len())?;
        self.linear_backward(p.qkv, &dqkv, &a.h, Some(&mut dh), grads)?;
        self.norm_backward(p.attn_norm, &dh, x, true, dx, grads)
    }

    /// Runs forward again and names the first activation that holds a NaN or infinity.
    pub fn first_bad_activation(&self, t: &Tokens, segments: &Segments) -> Result<Option<String>> {
        let (h, kept) = self.forward(t, Context::Packed(segments), Keep::All)?;
        for (l, layer) in kept.layers.iter().enumerate() {
            let Some(a) = &layer.inner else { continue };
            let steps = [
                ("input", &layer.x),
                ("attention norm", &a.h),
                ("queries, keys and values", &a.qkv),
                ("attention", &a.att),
                ("residual after attention", &a.x_mid),
                ("feed-forward norm", &a.h_mid),
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

    /// Adds to the weight's and bias's gradients; writes `dx` where it is wanted.
    pub(super) fn linear_backward(
        &self,
        p: Affine,
        dy: &Buffer,
        x: &Buffer,
        dx: Option<&mut Buffer>,
        grads: Grads<'_>,
    ) -> Result<()> {
        let w = self.weight(p.weight);
        let mut dw = grads[p.weight].take();
        let mut db = p.bias.and_then(|i| grads[i].take());
        self.backend.linear_dw(dy, x, dy.len() / w.n, dw.as_mut(), db.as_mut())?;
        grads[p.weight] = dw;
        if let Some(i) = p.bias {
            grads[i] = db;
        }
        match dx {
            Some(dx) => self.backend.linear_dx(dy, w, dx),
            None => Ok(()),
        }
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
        let mut dw = grads[p.weight].take();
        let mut db = p.bias.and_then(|i| grads[i].take());
        let w = self.master(p.weight);
        self.backend.norm_backward(self.norm_op(), dy, x, w, add, dx, dw.as_mut(), db.as_mut())?;
        grads[p.weight] = dw;
        if let Some(i) = p.bias {
            grads[i] = db;
        }
        Ok(())
    }

    /// Normalises a sublayer's output where the model does; returns (what backward needs, output).
    fn post_norm(&self, p: Option<Affine>, y: Buffer) -> Result<(Option<Buffer>, Buffer)> {
        let Some(p) = p else { return Ok((None, y)) };
        let mut normed = self.activations(y.len())?;
        self.norm(p, &y, &mut normed)?;
        Ok((Some(y), normed))
    }

    /// The gradient of a sublayer's output, in the compute type, from that of the residual stream; `None` where it is
    /// `dx` itself.
    fn post_norm_backward(
        &self,
        p: Option<Affine>,
        dx: &Buffer,
        y: Option<&Buffer>,
        grads: Grads<'_>,
    ) -> Result<Option<Buffer>> {
        if p.is_none() && self.dtype == dx.dtype() {
            return Ok(None);
        }
        let mut d = self.activations(dx.len())?;
        match (p, y) {
            (Some(p), Some(y)) => self.norm_backward(p, dx, y, false, &mut d, grads)?,
            _ => self.backend.copy(dx, 0, &mut d, 0, dx.len())?,
        }
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

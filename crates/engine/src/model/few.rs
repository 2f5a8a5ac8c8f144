//! The forward pass of a few new tokens, where the device has larger operations for them (`Backend::few_rows`): the same
//! bits as [`Model::forward`], the residual stream in place.

use super::config::Position;
use super::decoder::{Tokens, activation};
use super::weights::{Affine, Model, RotaryTables};
use crate::Result;
use ferrl_kernels::backend::{self, Normed, PagedRows, Turns};
use ferrl_kernels::{Buffer, Weight};

impl Model {
    /// Whether the larger operations cover this model, and are worth it for so many rows.
    pub(super) fn has_few(&self, rows: usize) -> bool {
        let post = |p: &super::weights::LayerLayout| p.attn_post_norm.is_some() || p.mlp_post_norm.is_some();
        rows <= self.backend.few_rows(self.config.hidden.max(self.config.ffn))
            && !self.layout.layers.iter().any(post)
    }

    /// From the embedded tokens `x` to the residual stream after the last layer.
    pub(super) fn forward_few(
        &self,
        t: &Tokens,
        rows: &PagedRows,
        caches: &mut [Buffer],
        x: &mut Buffer,
    ) -> Result<()> {
        let (b, c) = (&*self.backend, &self.config);
        let tables = self.rotary(t.reach)?;
        let turns = self.turns(tables.as_deref(), t);
        for (l, (p, cache)) in self.layout.layers.iter().zip(caches).enumerate() {
            let op = self.attention(l);
            let mut qkv = self.activations(t.rows * c.qkv_width())?;
            let (norm, layer) = (self.normed(p.attn_norm), self.affine(p.qkv));
            match p.qk_norm {
                None => b.normed_qkv(norm, x, layer, op.heads, turns, rows, cache, &mut qkv)?,
                Some((q, k)) => {
                    let (mut h, mut raw) = (self.activations(x.len())?, self.activations(qkv.len())?);
                    b.norm(norm.op, x, norm.weight, norm.bias, &mut h)?;
                    b.linear(&h, layer.weight, layer.bias, &mut raw)?;
                    let (q, k) = (self.master(q), self.master(k));
                    b.head_norm(self.head_norm(), op.heads, &raw, q, k, &mut qkv)?;
                    self.rotate(t, op.heads, false, &mut qkv)?;
                    b.cache_write(op.heads, &qkv, rows, cache)?;
                }
            }
            let mut att = self.activations(t.rows * c.attention_width())?;
            b.attention_paged(op, &qkv, rows, cache, &mut att)?;
            b.linear_add(&att, self.affine(p.attn_out), x)?;
            let mut act = self.activations(t.rows * c.ffn)?;
            let (norm, layer) = (self.normed(p.mlp_norm), self.affine(p.up));
            b.normed_activation(norm, x, layer, activation(c.activation), &mut act)?;
            b.linear_add(&act, self.affine(p.down), x)?;
        }
        Ok(())
    }

    /// How the tokens are turned, where the model does.
    pub(super) fn turns<'a>(&self, tables: Option<&'a RotaryTables>, t: &'a Tokens) -> Option<Turns<'a>> {
        let (Position::Rotary(rope), Some(tables)) = (&self.config.position, tables) else { return None };
        let RotaryTables { cos, sin, .. } = tables;
        Some(Turns { dim: rope.rotary_dim, cos, sin, positions: &t.positions })
    }

    fn normed(&self, p: Affine) -> Normed<'_> {
        let (weight, bias) = self.parts(p);
        Normed { op: self.norm_op(), weight, bias }
    }

    pub(super) fn affine(&self, p: Affine) -> backend::Affine<'_> {
        let weight: &Weight = self.weight(p.weight);
        backend::Affine { weight, bias: self.parts(p).1 }
    }

    fn parts(&self, p: Affine) -> (&Buffer, Option<&Buffer>) {
        (self.master(p.weight), p.bias.map(|i| self.master(i)))
    }
}

//! The decoder. Each forward is followed by its backward, which makes the same calls in reverse.
//!
//! Shapes: T tokens (all sequences concatenated), H hidden, F feed-forward width. The residual stream is f32; inputs and
//! outputs of linear layers have the model's compute type.

use super::attention::AttentionActivations;
use super::ffn::NetworkActivations;
use super::gradient::Grads;
use super::layout::Layer;
use super::residual::{Added, Residual, ResidualGrad, input, input_of_sum};
use super::router::ExpertLoad;
use super::weights::Model;
use crate::Result;
use ferrl_kernels::backend::{PagedRows, Segments};
use ferrl_kernels::{Buffer, DType};

/// Where the keys and values of earlier tokens are.
pub enum PastKv<'a> {
    /// Packed sequences: every token is in this batch.
    Packed(&'a Segments),
    /// In the paged KV cache, one buffer per layer.
    Paged(&'a PagedRows, &'a mut [Buffer]),
}

/// What forward stores for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: there will be no backward.
    Nothing,
    /// Each layer's input; the rest is recomputed in backward, bit for bit (activation checkpointing).
    Inputs,
    All,
}

/// Token ids with their positions.
pub struct Tokens {
    /// One id per row.
    pub ids: Buffer,
    /// One position per row.
    pub positions: Buffer,
    pub rows: usize,
    /// Largest position + 1.
    pub reach: usize,
    /// Host copies of ids and positions, for ranks that compute as a team.
    pub(super) list: Option<(Vec<u32>, Vec<u32>)>,
}

/// A model whose layers are used in order. Under ZeRO-3, [`Layers::at`] gathers a layer's weights.
pub trait Layers {
    /// The model; parameters outside the layers are always present.
    fn model(&self) -> &Model;
    /// The model with the weights of `layer` present.
    fn at(&mut self, layer: usize) -> Result<&Model>;
    /// Called before a layer's backward: allocates its gradients.
    fn backward_begins(&mut self, _layer: usize, _grads: Grads<'_>) -> Result<()> {
        Ok(())
    }
    /// Called after it: the layer's gradients are complete.
    fn backward_ends(&mut self, _layer: usize, _grads: Grads<'_>) -> Result<()> {
        Ok(())
    }
}

/// A model that is not sharded.
impl Layers for &Model {
    fn model(&self) -> &Model {
        self
    }
    fn at(&mut self, _layer: usize) -> Result<&Model> {
        Ok(self)
    }
}

struct LayerActivations {
    x: Buffer,               // (T, H) f32: residual stream at the layer's start
    inner: Option<Interior>, // absent under `Keep::Inputs`
    load: Option<ExpertLoad>,
}

/// The residual stream between attention and network is `x + delta`. Backward recomputes it and both norms, which is cheap.
struct Interior {
    attention: AttentionActivations,
    delta: Buffer, // (T, H): what attention added to the residual stream
    ffn: NetworkActivations,
}

pub struct Activations {
    layers: Vec<LayerActivations>,
    x_final: Buffer, // (T, H) f32
}

impl Activations {
    /// Expert load of each MoE layer.
    pub fn loads(&self) -> impl Iterator<Item = &ExpertLoad> {
        self.layers.iter().filter_map(|layer| layer.load.as_ref())
    }
}

impl Model {
    /// Uploads a batch of tokens. Only this function validates ids and positions; devices do not check them again.
    pub fn tokens(&self, ids: &[u32], positions: &[u32]) -> Result<Tokens> {
        assert_eq!(ids.len(), positions.len());
        let reach = positions.iter().max().map_or(0, |&p| p as usize + 1);
        self.config.check_ids(ids)?;
        self.config.check_length(reach)?;
        self.check_reach(reach)?;
        let listed = positions;
        let (ids_there, positions) = (self.backend.indices(ids)?, self.backend.indices(positions)?);
        let list = self.team().map(|_| (ids.to_vec(), listed.to_vec()));
        Ok(Tokens { ids: ids_there, positions, rows: ids.len(), reach, list })
    }

    /// Hidden states after the final norm, `(T, H)` in the compute type, and what backward needs.
    pub fn forward(&self, t: &Tokens, context: PastKv<'_>, keep: Keep) -> Result<(Buffer, Activations)> {
        let mut whole = self;
        forward(&mut whole, t, context, keep)
    }

    /// Token and position embeddings of this rank's tokens `t`; `all` are those of the whole team.
    fn embed_tokens(&self, all: &Tokens, t: &Tokens) -> Result<Buffer> {
        let b = &*self.backend;
        let mut x = self.f32s(t.rows * self.config.hidden)?;
        match self.team() {
            Some(team) => self.embed_together(team, all, &mut x)?,
            None => {
                let table = self.master(self.layout.embed);
                b.embed(&t.ids, table, self.config.embedding_scale, false, &mut x)?;
            }
        }
        if let Some(table) = self.layout.position {
            b.embed(&t.positions, self.master(table), 1.0, true, &mut x)?;
        }
        Ok(x)
    }

    fn embed_tokens_backward(&self, t: &Tokens, dx: &Buffer, grads: Grads<'_>) -> Result<()> {
        let b = &*self.backend;
        if let Some(sum) = self.layout.position.and_then(|table| grads[table].as_mut()) {
            b.embed_backward(&t.positions, dx, 1.0, sum.added_to(b)?)?;
        }
        if self.team().is_some() {
            return self.embed_backward_together(t, dx, grads);
        }
        if let Some(sum) = &mut grads[self.layout.embed] {
            b.embed_backward(&t.ids, dx, self.config.embedding_scale, sum.added_to(b)?)?;
        }
        Ok(())
    }

    /// Reruns forward and names the first activation that contains a NaN or infinity.
    pub fn first_bad_activation(&self, t: &Tokens, segments: &Segments) -> Result<Option<String>> {
        let (h, kept) = self.forward(t, PastKv::Packed(segments), Keep::All)?;
        for (l, (p, LayerActivations { x, inner, .. })) in
            self.layout.layers.iter().zip(&kept.layers).enumerate()
        {
            let Some(a) = inner else { continue };
            let n = x.len();
            let (mut h, mut x_mid, mut h_mid) = (self.activations(n)?, self.f32s(n)?, self.activations(n)?);
            input(self, p.attention.norm, x, &mut h)?;
            input_of_sum(self, p.ffn.norm(), (x, &a.delta), [&mut x_mid, &mut h_mid])?;
            let steps = [
                ("input", x),
                ("attention norm", &h),
                ("queries, keys and values", &a.attention.qkv),
                ("attention", &a.attention.att),
                ("residual after attention", &x_mid),
                ("feed-forward norm", &h_mid),
            ];
            let up = a.ffn.up().iter().map(|up| ("up projection", up));
            for (name, buffer) in steps.into_iter().chain(up) {
                if self.backend.first_non_finite(buffer)?.is_some() {
                    return Ok(Some(format!("{name} of layer {l}")));
                }
            }
        }
        Ok(self.backend.first_non_finite(&h)?.map(|_| "the final norm".into()))
    }

    pub(crate) fn f32s(&self, len: usize) -> Result<Buffer> {
        self.backend.alloc(DType::F32, len)
    }

    pub(crate) fn activations(&self, len: usize) -> Result<Buffer> {
        self.backend.alloc(self.dtype, len)
    }
}

/// Hidden states after the final norm, `(T, H)` in the compute type, and what backward needs.
pub fn forward(
    layers: &mut dyn Layers,
    t: &Tokens,
    mut context: PastKv<'_>,
    keep: Keep,
) -> Result<(Buffer, Activations)> {
    let m = layers.model();
    let (all, own) = (t, m.own_tokens(t)?);
    let t = own.as_ref().unwrap_or(t);
    let mut x = Residual::new(m, m.embed_tokens(all, t)?, &context, keep);
    let mut kept = Vec::new();
    for l in 0..m.config.layers {
        let m = layers.at(l)?;
        kept.extend(m.layout.layers[l].forward(m, t, &mut x, &mut context, keep)?);
    }
    let m = layers.model();
    let (mut h, _) = x.normed(m, Some(m.layout.final_norm))?;
    if own.is_some() {
        h = m.all_gather_rows(&h, m.config.hidden)?; // every rank computes the heads
    }
    Ok((h, Activations { layers: kept, x_final: x.x }))
}

/// Propagates the gradient of the hidden states to every parameter below them.
pub fn backward(
    layers: &mut dyn Layers,
    (t, segments): (&Tokens, &Segments),
    kept: Activations,
    dh: &Buffer,
    grads: Grads<'_>,
) -> Result<()> {
    let m = layers.model();
    let (all, own) = (t, m.own_tokens(t)?);
    let t = own.as_ref().unwrap_or(t);
    let own_dh = own.as_ref().map(|_| m.own_rows(dh, m.config.hidden)).transpose()?;
    let dh = own_dh.as_ref().unwrap_or(dh);
    let mut flow = ResidualGrad::new(m, m.layout.final_norm, dh, &kept.x_final, grads)?;
    drop(kept.x_final);
    for (l, kept) in kept.layers.into_iter().enumerate().rev() {
        layers.backward_begins(l, grads)?;
        let m = layers.at(l)?;
        m.layout.layers[l].backward(m, (t, segments), kept, &mut flow, grads)?;
        layers.backward_ends(l, grads)?;
    }
    let m = layers.model();
    if own.is_some() {
        flow.dx = m.all_gather_rows(&flow.dx, m.config.hidden)?;
    }
    m.embed_tokens_backward(all, &flow.dx, grads)
}

impl Layer {
    /// Attention, then the network; returns what backward needs.
    fn forward(
        &self,
        m: &Model,
        t: &Tokens,
        x: &mut Residual,
        context: &mut PastKv<'_>,
        keep: Keep,
    ) -> Result<Option<LayerActivations>> {
        let attention = self.attention.forward(m, t, x, context)?;
        let attention = (keep == Keep::All).then_some(attention);
        let computed = self.ffn.forward(m, x)?;
        let Some((Added { x, delta }, ffn)) = computed.filter(|_| keep != Keep::Nothing) else {
            return Ok(None);
        };
        let load = match context {
            PastKv::Packed(segments) => ffn.load(segments),
            PastKv::Paged(..) => None,
        };
        let inner = attention.map(|attention| Interior { attention, delta, ffn });
        Ok(Some(LayerActivations { x, inner, load }))
    }

    /// `flow` is the gradient of the residual stream, after the layer on entry and before it on return.
    fn backward(
        &self,
        m: &Model,
        (t, segments): (&Tokens, &Segments),
        kept: LayerActivations,
        flow: &mut ResidualGrad,
        grads: Grads<'_>,
    ) -> Result<()> {
        let LayerActivations { x, inner, .. } = match kept.inner {
            Some(_) => kept,
            None => {
                let (mut x, mut context) = (Residual::recomputed(kept.x), PastKv::Packed(segments));
                self.forward(m, t, &mut x, &mut context, Keep::All)?.expect("kept")
            }
        };
        let Interior { attention, delta, ffn } = inner.expect("all of a layer was kept");
        self.ffn.backward(m, (&x, &delta, segments), ffn, flow, grads)?;
        drop(delta);
        self.attention.backward(m, (t, segments), (&x, attention), flow, grads)
    }
}

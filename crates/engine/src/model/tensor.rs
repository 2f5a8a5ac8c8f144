//! Tensor parallelism: the ranks of a team compute each layer together.
//!
//! Each member has some output features of every matrix: heads of q, k and v, features of the feed-forward network, columns of
//! the residual stream. Activations are all-gathered between GEMMs, so that no dot product is split: forward has the bits of
//! one rank. So has backward: the gradient of a GEMM's input sums over all output features; each member computes some of its
//! columns from the all-gathered output gradient, with those columns of the weight, which it stores beside its rows.
//! Every member computes norms and value heads; embedding and language-model head are vocabulary-parallel (`vocab.rs`). A
//! member's weights are derived from the masters, which are sharded as without a team (`shard.rs`).

use super::config::ModelConfig;
use super::exchange::Members;
use super::param::{ParamId, ParamKind, ParamShape, Slot};
use super::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::backend::Heads;
use ferrl_kernels::comm::{Block, part};
use ferrl_kernels::{Buffer, DType, Purpose, Ranks, Weight};
use std::ops::Range;

/// Ranks that compute with a model together: groups of `tp` share the features of every layer (tensor parallelism), and `sp`
/// such groups share the tokens of every micro-batch (context parallelism). Every exchange involves all ranks of the team in
/// step, so that an error on one reaches the others wherever they are.
#[derive(Clone)]
pub struct Team {
    ranks: Ranks,
    tp: usize,
    sp: usize,
    /// Whether gradients are computed.
    backward: bool,
}

/// Ranges of features, concatenated.
pub(crate) type Ranges = Vec<Range<usize>>;

/// All of `count` features.
fn whole(count: usize) -> Ranges {
    std::iter::once(0..count).collect()
}

pub(super) fn width(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

impl Team {
    /// This rank's team among all ranks; `backward` if it computes gradients. `None` for a team of one.
    pub fn new(all: &Ranks, tp: usize, sp: usize, backward: bool) -> Option<Self> {
        (tp * sp > 1).then(|| Team { ranks: all.team(tp * sp), tp, sp, backward })
    }

    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// `(tp, sp)`.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.tp, self.sp)
    }

    /// This rank's index in its feature group and in its token group.
    fn place(&self) -> (usize, usize) {
        (self.ranks.rank() % self.tp, self.ranks.rank() / self.tp)
    }

    fn sharing_features(&self) -> Members<'_> {
        let (own, context) = self.place();
        let first = context * self.tp;
        Members { team: self, ranks: (first..first + self.tp).collect(), own }
    }

    pub(super) fn sharing_tokens(&self) -> Members<'_> {
        let (first, own) = self.place();
        Members { team: self, ranks: (0..self.sp).map(|i| first + i * self.tp).collect(), own }
    }

    /// All of its ranks.
    pub(super) fn everyone(&self) -> Members<'_> {
        Members { team: self, ranks: (0..self.ranks.size()).collect(), own: self.ranks.rank() }
    }
}

impl ModelConfig {
    /// Refuses a `tp` that does not give every member whole heads.
    pub fn check_team(&self, tp: usize) -> Result<()> {
        if self.shares_heads(tp, 1) {
            return Ok(());
        }
        let most = self.kv_heads.min(self.heads);
        let fits = (1..=most).filter(|n| self.shares_heads(*n, 1));
        let fits: Vec<String> = fits.map(|n| n.to_string()).collect();
        Err(Error::usage(format!(
            "{tp} ranks cannot share {} query and {} key heads equally",
            self.heads, self.kv_heads
        ))
        .fix(format!("one of {}", fits.join(", "))))
    }

    /// Whether attention is shared by heads; otherwise each token group computes some query rows of all of its heads.
    pub fn shares_heads(&self, tp: usize, sp: usize) -> bool {
        self.kv_heads.is_multiple_of(tp * sp) && self.heads.is_multiple_of(tp * sp)
    }

    /// Output features of a linear layer that a member of `size` computes; `None` if every member computes all.
    fn outputs(&self, slot: Slot, (member, size): (usize, usize)) -> Option<Ranges> {
        let ffn = part(self.ffn, member, size);
        let shifted = |r: &Range<usize>, by: usize| r.start + by..r.end + by;
        match slot {
            Slot::Qkv => {
                let (query, key) = (self.attention_width(), self.kv_heads * self.head_dim);
                // Whole heads, if there are enough of them.
                let (own, kv) = (part(query, member, size), part(key, member, size));
                Some(vec![own, shifted(&kv, query), shifted(&kv, query + key)])
            }
            Slot::Up if self.activation.is_gated() => Some(vec![ffn.clone(), shifted(&ffn, self.ffn)]),
            Slot::Up => Some(vec![ffn]),
            Slot::AttnOut | Slot::Down => Some(vec![part(self.hidden, member, size)]),
            _ => None,
        }
    }

    /// Input features whose gradient a member computes.
    fn inputs(&self, slot: Slot, (member, size): (usize, usize)) -> Range<usize> {
        match slot {
            Slot::AttnOut => part(self.attention_width(), member, size),
            Slot::Down => part(self.ffn, member, size),
            _ => part(self.hidden, member, size),
        }
    }
}

/// How the columns of an activation are sharded.
#[derive(Clone, Copy)]
pub(super) enum Columns {
    /// As the output of a linear layer.
    Output(Slot),
    /// As the input of a linear layer, or its gradient.
    Input(Slot),
}

impl Columns {
    fn of(self, config: &ModelConfig, at: (usize, usize)) -> Ranges {
        match self {
            Columns::Output(slot) => config.outputs(slot, at).expect("a layer that members share"),
            Columns::Input(slot) => vec![config.inputs(slot, at)],
        }
    }
}

impl Model {
    /// The team this rank computes with, if any.
    pub fn team(&self) -> Option<&Team> {
        self.team.as_ref()
    }

    /// Sets the team to compute with (`None`: alone), from the next [`Model::gather_all`] of all members on. Collective: connects
    /// the ranks' devices.
    pub fn set_team(&mut self, team: Option<Team>) -> Result<()> {
        if derivation_key(&team) == derivation_key(&self.team) {
            return Ok(());
        }
        if let Some(team) = &team {
            self.config.check_team(team.tp)?;
            team.ranks.in_step(|| team.ranks.connect(&self.backend))?;
        }
        if self.split.is_some() || self.team.is_some() || team.is_some() {
            self.drop_derived();
        }
        self.team = team;
        if self.team.is_none() && self.split.is_none() {
            for i in 0..self.params.len() {
                self.restore_derived(i)?;
            }
            self.merge()?;
        }
        Ok(())
    }

    fn drop_derived(&mut self) {
        // A single rank's weights are stored inside the masters there, and remain valid for when it computes alone again.
        let within = self.split.is_none() && self.team.is_none() && self.holds_weights_in_masters();
        for param in &mut self.params {
            if within {
                param.single_rank = param.derived.take();
            }
            (param.whole, param.derived, param.transposed) = (None, None, None);
        }
    }

    fn holds_weights_in_masters(&self) -> bool {
        self.dtype == DType::Bf16 && self.backend.rounds_masters()
    }

    /// Rebuilds the GEMM weight of a full parameter after it was dropped.
    fn restore_derived(&mut self, i: usize) -> Result<()> {
        let _weights = Purpose::Weights.on(&self.backend);
        if let Some(single_rank) = self.params[i].single_rank.take() {
            self.params[i].derived = Some(single_rank);
            return Ok(());
        }
        let Param { shape, derived, .. } = &self.params[i];
        if derived.is_some() || !self.config.is_multiplied(shape.id) {
            return Ok(());
        }
        let mut weight = self.backend.weight(shape.rows, shape.cols, self.dtype, self.training)?;
        if !self.is_base(i) {
            self.backend.load_weight(&self.params[i].master, &mut weight)?;
        }
        self.params[i].derived = Some(weight);
        Ok(())
    }

    /// `(index, size)` of this rank in the group that shares features; `None` without tensor parallelism.
    fn place_in_layer(&self) -> Option<(usize, usize)> {
        self.team.as_ref().filter(|team| team.tp > 1).map(|team| (team.place().0, team.tp))
    }

    /// `(index, size)` of this rank in the group that shares tokens; `None` without context parallelism.
    pub(super) fn place_in_context(&self) -> Option<(usize, usize)> {
        self.team.as_ref().filter(|team| team.sp > 1).map(|team| (team.place().1, team.sp))
    }

    /// Heads that this rank computes.
    pub(crate) fn own_heads(&self, heads: Heads) -> Heads {
        let size = self.place_in_layer().map_or(1, |(_, size)| size);
        Heads { heads: heads.heads / size, kv_heads: heads.kv_heads / size, ..heads }
    }

    /// Number of columns, of `all`, that this rank has.
    pub(super) fn own_width(&self, columns: Columns, all: usize) -> usize {
        self.place_in_layer().map_or(all, |at| width(&self.columns(columns, at)))
    }

    /// Features of the feed-forward network that this rank computes.
    pub(super) fn own_ffn(&self) -> usize {
        self.own_width(Columns::Input(Slot::Down), self.config.ffn)
    }

    fn columns(&self, columns: Columns, at: (usize, usize)) -> Ranges {
        columns.of(&self.config, at)
    }

    /// How the ranks that share tokens divide the columns of this rank's feature group.
    pub(super) fn context_columns(&self, columns: Columns) -> Vec<Ranges> {
        let own = self.own_config(self.place_in_layer().unwrap_or((0, 1)));
        let sp = self.team.as_ref().map_or(1, |team| team.sp);
        (0..sp).map(|member| columns.of(&own, (member, sp))).collect()
    }

    /// The configuration of a tensor-parallel member's part of the model.
    fn own_config(&self, (member, size): (usize, usize)) -> ModelConfig {
        let c = &self.config;
        let of = |n: usize| part(n, member, size).len();
        ModelConfig {
            heads: c.heads / size,
            kv_heads: c.kv_heads / size,
            ffn: of(c.ffn),
            hidden: of(c.hidden),
            ..c.clone()
        }
    }

    /// Whether the parameter's layer is tensor-parallel.
    pub(super) fn is_shared(&self, param: usize) -> bool {
        let id = self.params[param].shape.id;
        let kind = matches!(id.kind, ParamKind::Weight | ParamKind::Bias);
        self.place_in_layer().is_some() && kind && self.config.outputs(id.slot, (0, 1)).is_some()
    }

    /// Whether each member computes the gradient of some output features only.
    pub(crate) fn splits_gradient(&self, param: usize) -> bool {
        let ParamId { slot, kind, .. } = self.params[param].shape.id;
        let features = slot.is_vocabulary() || self.config.outputs(slot, (0, 1)).is_some();
        // Adapters are small: every member computes their gradients in full.
        self.team.is_some() && features && matches!(kind, ParamKind::Weight | ParamKind::Bias)
    }

    /// All-gather of an activation's columns into `to`. Collective.
    pub(super) fn all_gather_columns(&self, columns: Columns, own: &Buffer, to: &mut Buffer) -> Result<()> {
        let Some((member, size)) = self.place_in_layer() else {
            return self.backend.copy(own, 0, to, 0, own.len());
        };
        let among = self.team.as_ref().expect("asked above").sharing_features();
        let cuts: Vec<Ranges> = (0..size).map(|m| self.columns(columns, (m, size))).collect();
        let rows = own.len() / width(&cuts[member]).max(1);
        self.exchange_columns(&among, &among.ranks, (&cuts, rows), own, Some(to))
    }

    /// The same into a new buffer with `all` columns.
    pub(super) fn all_gathered_columns(&self, columns: Columns, own: &Buffer, all: usize) -> Result<Buffer> {
        let rows = own.len() / self.own_width(columns, all).max(1);
        let mut to = self.backend.alloc(own.dtype(), rows * all)?;
        self.all_gather_columns(columns, own, &mut to)?;
        Ok(to)
    }

    /// This rank's columns of a full activation.
    pub(super) fn own_columns(&self, columns: Columns, of: &Buffer, all: usize) -> Result<Buffer> {
        let cut = self.place_in_layer().map(|at| self.columns(columns, at)).unwrap_or_else(|| whole(all));
        let own = Block { rows: 0..of.len() / all, width: all, columns: cut };
        let mut to = self.backend.alloc(of.dtype(), own.len())?;
        own.pack(&*self.backend, of, &mut to, 0)?;
        Ok(to)
    }

    /// Flat ranges of the weights whose gradient a member computes, in its storage order. A gradient that every member computes
    /// is divided evenly among them.
    pub(crate) fn gradient_ranges(&self, param: usize, member: usize) -> Ranges {
        let shape = &self.params[param].shape;
        let Some(Team { tp, sp, .. }) = self.team else { return whole(shape.len()) };
        if !self.splits_gradient(param) {
            return vec![part(shape.len(), member, tp * sp)];
        }
        if shape.id.slot.is_vocabulary() {
            return vec![elements(shape, &self.vocab_of((member, tp * sp)))];
        }
        let (layer, context) = ((member % tp, tp), (member / tp, sp));
        let Some(rows) = self.config.outputs(shape.id.slot, layer) else {
            return vec![part(shape.len(), member, tp * sp)];
        };
        let cut = Columns::Output(shape.id.slot).of(&self.own_config(layer), context);
        let mut before = 0;
        let moved = rows.iter().zip(cut).map(|(rows, cut)| {
            let start = rows.start + cut.start - before;
            before += rows.len();
            elements(shape, &(start..start + cut.len()))
        });
        moved.collect()
    }

    /// Length of the gradient that this rank computes for a parameter.
    pub(crate) fn gradient_len(&self, param: usize) -> usize {
        match &self.team {
            Some(team) if self.splits_gradient(param) => {
                width(&self.gradient_ranges(param, team.ranks.rank()))
            }
            _ => self.params[param].shape.len(),
        }
    }

    /// Derives this member's GEMM weights from all weights of a parameter; `false` if it computes with all of them.
    pub(super) fn materialize_own(&mut self, param: usize, values: &[f32]) -> Result<bool> {
        if self.splits_gradient(param) && self.params[param].shape.id.slot.is_vocabulary() {
            return self.materialize_vocabulary(param, values).map(|()| true);
        }
        let (Some(at), true) = (self.place_in_layer(), self.is_shared(param)) else { return Ok(false) };
        let _weights = Purpose::Weights.on(&self.backend);
        let shape = self.params[param].shape;
        let rows = self.columns(Columns::Output(shape.id.slot), at);
        let own: Vec<f32> = rows.iter().flat_map(|r| &values[elements(&shape, r)]).copied().collect();
        if shape.id.kind == ParamKind::Bias {
            self.params[param].whole = Some(self.upload(&own)?);
            return Ok(true);
        }
        let columns = self.config.inputs(shape.id.slot, at);
        let mut derived = self.packed_weight(param, [width(&rows), shape.cols], &own)?;
        derived.whole = shape.rows;
        let transposed = self.transposed_columns(param, columns, values)?;
        (self.params[param].derived, self.params[param].transposed) = (Some(derived), transposed);
        Ok(true)
    }

    /// The transpose of some columns of a weight, if gradients are computed: computes those columns of `dx = dy W`.
    pub(super) fn transposed_columns(
        &self,
        param: usize,
        columns: Range<usize>,
        values: &[f32],
    ) -> Result<Option<Weight>> {
        let shape = self.params[param].shape;
        let back = self.team.as_ref().is_some_and(|team| team.backward) && self.training;
        if !back || columns.is_empty() {
            return Ok(None);
        }
        let mut transposed = vec![0.0; columns.len() * shape.rows];
        // Some rows at a time, so that a cache line is read once for all of its columns.
        for first in (0..shape.rows).step_by(16) {
            let rows = first..(first + 16).min(shape.rows);
            for (to, c) in transposed.chunks_exact_mut(shape.rows).zip(columns.clone()) {
                let from = values[rows.start * shape.cols + c..].iter().step_by(shape.cols);
                to[rows.clone()].iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
        self.packed_weight(param, [columns.len(), shape.rows], &transposed).map(Some)
    }

    /// A GEMM weight with these values, rounded as on one rank.
    pub(super) fn packed_weight(&self, param: usize, [n, k]: [usize; 2], values: &[f32]) -> Result<Weight> {
        let mut weight = self.backend.weight(n, k, self.dtype, false)?;
        // A device that stores weights inside their masters has its own rounding; weights under an adapter have no master there.
        let within = if self.is_base(param) { None } else { self.backend.rounded_master(&weight)? };
        match within {
            Some(mut rounded) => self.backend.write(&mut rounded, 0, values)?,
            None => self.backend.load_weight(&self.upload(values)?, &mut weight)?,
        }
        Ok(weight)
    }

    /// This rank's part of a shared layer's transposed weight.
    pub(super) fn transposed(&self, param: usize) -> &Weight {
        self.params[param].transposed.as_ref().expect("a shared layer of a model that is trained")
    }
}

/// What a rank's derived weights depend on.
fn derivation_key(team: &Option<Team>) -> Option<(usize, usize, usize, bool)> {
    team.as_ref().map(|t| (t.ranks.rank(), t.tp, t.sp, t.backward))
}

/// The weights of some output features.
pub(super) fn elements(shape: &ParamShape, rows: &Range<usize>) -> Range<usize> {
    let ParamId { kind, .. } = shape.id;
    let each = if kind == ParamKind::Bias { 1 } else { shape.cols };
    rows.start * each..rows.end * each
}

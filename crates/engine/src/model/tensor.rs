//! Tensor parallelism: the ranks of a team compute every layer together.
//!
//! Each member has some output features of every matrix: heads of queries, keys and values, features of the feed-forward
//! network, columns of the residual stream. Activations are gathered between the products, so that no sum is cut: forward
//! gives the bits of one rank. So does backward. The gradient of a product's input is a sum over all output features; each
//! member computes some columns of it from the gathered gradient of the output, with those columns of the weight, which it has
//! beside its rows.
//!
//! Norms, embeddings and heads are computed by every member. What a member computes with is derived from the masters, which lie
//! over the ranks as they do without a team (`shard.rs`).

use super::config::Config;
use super::context::other_batch;
use super::param::{Kind, ParamId, ParamShape, Slot};
use super::shard::{read_f32s, write_f32s};
use super::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::backend::Heads;
use ferrl_kernels::comm::part;
use ferrl_kernels::{Buffer, DType, Purpose, Ranks, Weight};
use std::ops::Range;

/// Ranks that compute layers together.
#[derive(Clone)]
pub struct Team {
    ranks: Ranks,
    share: Share,
    /// Whether gradients are computed as well.
    backward: bool,
}

/// What the ranks of a team divide among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Features of every layer (tensor parallelism).
    Features,
    /// Tokens of every micro-batch (context parallelism).
    Tokens,
}

/// Features in a row, of which there may be several.
pub(crate) type Ranges = Vec<Range<usize>>;

pub(super) fn width(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

impl Team {
    /// These ranks; `backward` where they compute gradients too. `None` for a rank alone.
    pub fn new(ranks: &Ranks, share: Share, backward: bool) -> Option<Self> {
        (!ranks.is_alone()).then(|| Team { ranks: ranks.clone(), share, backward })
    }

    /// What they divide.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Its ranks.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }
}

impl Config {
    /// Refuses ranks that cannot share this model's work so.
    pub fn check_team(&self, share: Share, size: usize) -> Result<()> {
        if share == Share::Tokens && self.experts.is_some() {
            let what = "context parallelism of a mixture of experts is not built yet";
            return Err(Error::usage(what).fix("parallel.tp_size, or parallel.ddp_size = 1 (ZeRO-3)"));
        }
        if self.kv_heads.is_multiple_of(size) && self.heads.is_multiple_of(size) {
            return Ok(());
        }
        let most = self.kv_heads.min(self.heads);
        let fits = (1..=most).filter(|n| self.kv_heads.is_multiple_of(*n) && self.heads.is_multiple_of(*n));
        let fits: Vec<String> = fits.map(|n| n.to_string()).collect();
        Err(Error::usage(format!(
            "{size} ranks cannot share {} query and {} key heads equally",
            self.heads, self.kv_heads
        ))
        .fix(format!("one of {}", fits.join(", "))))
    }

    /// Output features of a linear layer that a member of `size` computes; `None` where each computes all of them.
    fn outputs(&self, slot: Slot, (member, size): (usize, usize)) -> Option<Ranges> {
        let ffn = part(self.ffn, member, size);
        let shifted = |r: &Range<usize>, by: usize| r.start + by..r.end + by;
        match slot {
            Slot::Qkv => {
                let kv = self.head_columns(self.kv_heads, (member, size));
                let (query, key) = (self.attention_width(), self.kv_heads * self.head_dim);
                let own = self.head_columns(self.heads, (member, size));
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
            Slot::AttnOut => self.head_columns(self.heads, (member, size)),
            Slot::Down => part(self.ffn, member, size),
            _ => part(self.hidden, member, size),
        }
    }

    fn head_columns(&self, heads: usize, (member, size): (usize, usize)) -> Range<usize> {
        let heads = part(heads, member, size);
        heads.start * self.head_dim..heads.end * self.head_dim
    }
}

/// Which columns of an activation each member has.
#[derive(Clone, Copy)]
pub(super) enum Columns {
    /// The output of a linear layer.
    Output(Slot),
    /// The gradient of its input, or the input itself.
    Input(Slot),
}

impl Model {
    /// The ranks that compute with this one.
    pub fn team(&self) -> Option<&Team> {
        self.team.as_ref()
    }

    /// Computes with these ranks from now on, once all of them have called [`Model::gather_all`]; alone with `None`.
    pub fn set_team(&mut self, team: Option<Team>) -> Result<()> {
        if forms(&team) == forms(&self.team) {
            return Ok(());
        }
        if let Some(team) = &team {
            self.config.check_team(team.share, team.ranks.size())?;
        }
        if self.split.is_some() || self.team.is_some() || team.is_some() {
            self.forget_forms();
        }
        self.team = team;
        if self.team.is_none() && self.split.is_none() {
            for i in 0..self.params.len() {
                self.rederive(i)?;
            }
        }
        Ok(())
    }

    fn forget_forms(&mut self) {
        for param in &mut self.params {
            (param.whole, param.derived, param.turned) = (None, None, None);
        }
    }

    /// The form that products read of a parameter that this rank has all of, where it was given back.
    fn rederive(&mut self, i: usize) -> Result<()> {
        let _weights = Purpose::Weights.on(&self.backend);
        let Param { shape, derived, .. } = &self.params[i];
        if derived.is_some() || !self.config.is_multiplied(shape.id) {
            return Ok(());
        }
        let mut weight = self.backend.weight(shape.rows, shape.cols, self.dtype, self.training)?;
        self.backend.load_weight(&self.params[i].master, &mut weight)?;
        self.params[i].derived = Some(weight);
        Ok(())
    }

    fn place_in_team(&self) -> Option<(usize, usize)> {
        self.team.as_ref().map(|team| (team.ranks.rank(), team.ranks.size()))
    }

    /// The same where the team shares features.
    fn place_in_layer(&self) -> Option<(usize, usize)> {
        self.place_in_team().filter(|_| self.team.as_ref().is_some_and(|team| team.share == Share::Features))
    }

    /// Heads that this rank computes.
    pub(crate) fn own_heads(&self, heads: Heads) -> Heads {
        let size = self.place_in_layer().map_or(1, |(_, size)| size);
        Heads { heads: heads.heads / size, kv_heads: heads.kv_heads / size, ..heads }
    }

    /// Columns of an activation that this rank has, of `all`.
    pub(super) fn own_width(&self, columns: Columns, all: usize) -> usize {
        self.place_in_layer().map_or(all, |at| width(&self.columns(columns, at)))
    }

    /// Features of the feed-forward network that this rank computes.
    pub(super) fn own_ffn(&self) -> usize {
        self.own_width(Columns::Input(Slot::Down), self.config.ffn)
    }

    pub(super) fn columns(&self, columns: Columns, at: (usize, usize)) -> Ranges {
        match columns {
            Columns::Output(slot) => self.config.outputs(slot, at).expect("a layer that members share"),
            Columns::Input(slot) => vec![self.config.inputs(slot, at)],
        }
    }

    /// Whether the members of this rank's team share the features of the layer.
    pub(super) fn is_shared(&self, param: usize) -> bool {
        self.place_in_layer().is_some() && self.is_cut(param)
    }

    /// Whether each member computes the gradient of some output features alone.
    pub(crate) fn is_cut(&self, param: usize) -> bool {
        self.place_in_team()
            .is_some_and(|at| self.config.outputs(self.params[param].shape.id.slot, at).is_some())
    }

    /// All columns of an activation, of which each member has some, into `to`. All members call it together.
    pub(super) fn all_columns(&self, columns: Columns, own: &Buffer, to: &mut Buffer) -> Result<()> {
        let Some((member, size)) = self.place_in_layer() else {
            return self.backend.copy(own, 0, to, 0, own.len());
        };
        let team = &self.team.as_ref().expect("asked above").ranks;
        let cuts: Vec<Ranges> = (0..size).map(|m| self.columns(columns, (m, size))).collect();
        let rows = own.len() / width(&cuts[member]).max(1);
        let all = to.len() / rows.max(1);
        let mut values = vec![0.0; to.len()];
        let bytes = packed(own.dtype(), &self.read_f32s(own)?);
        for (arrived, cut) in team.all_gather(&bytes)?.iter().zip(&cuts) {
            let theirs = unpack(own.dtype(), arrived)?;
            if theirs.len() != rows * width(cut) {
                return Err(other_batch());
            }
            let mut rest = &theirs[..];
            for row in values.chunks_mut(all.max(1)) {
                for range in cut {
                    let (here, after) = rest.split_at(range.len());
                    row[range.clone()].copy_from_slice(here);
                    rest = after;
                }
            }
        }
        self.backend.write(to, 0, &values)
    }

    /// The same into a new buffer, of `all` columns.
    pub(super) fn with_all_columns(&self, columns: Columns, own: &Buffer, all: usize) -> Result<Buffer> {
        let rows = own.len() / self.own_width(columns, all).max(1);
        let mut to = self.backend.alloc(own.dtype(), rows * all)?;
        self.all_columns(columns, own, &mut to)?;
        Ok(to)
    }

    /// This rank's columns of an activation that has all of them.
    pub(super) fn own_columns(&self, columns: Columns, of: &Buffer, all: usize) -> Result<Buffer> {
        let cut = self.place_in_layer().map(|at| self.columns(columns, at)).unwrap_or(vec![0..all]);
        let values = self.read_f32s(of)?;
        let rows = values.chunks_exact(all);
        let own: Vec<f32> = rows.flat_map(|row| cut.iter().flat_map(|r| &row[r.clone()])).copied().collect();
        let mut to = self.backend.alloc(of.dtype(), own.len())?;
        self.backend.write(&mut to, 0, &own)?;
        Ok(to)
    }

    /// The weights, in a row, whose gradient a member of this rank's team computes, in the order in which it holds them. What
    /// every member computes is divided among them.
    pub(crate) fn computed(&self, param: usize, member: usize) -> Ranges {
        let Some((_, size)) = self.place_in_team() else { return vec![0..self.params[param].shape.len()] };
        let shape = &self.params[param].shape;
        match self.config.outputs(shape.id.slot, (member, size)) {
            Some(rows) => rows.iter().map(|r| elements(shape, r)).collect(),
            None => vec![part(shape.len(), member, size)],
        }
    }

    /// Length of the gradient that this rank computes of a parameter, and whether all of it counts as [`Model::computed`].
    pub(crate) fn computed_len(&self, param: usize) -> usize {
        match self.place_in_team() {
            Some((member, _)) if self.is_cut(param) => width(&self.computed(param, member)),
            _ => self.params[param].shape.len(),
        }
    }

    /// The forms that this member computes with, from all weights of a parameter; `false` where it computes with all of them.
    pub(super) fn make_own_readable(&mut self, param: usize, values: &[f32]) -> Result<bool> {
        let (Some(at), true) = (self.place_in_team(), self.is_shared(param)) else { return Ok(false) };
        let _weights = Purpose::Weights.on(&self.backend);
        let shape = self.params[param].shape;
        let rows = self.columns(Columns::Output(shape.id.slot), at);
        let own: Vec<f32> = rows.iter().flat_map(|r| &values[elements(&shape, r)]).copied().collect();
        if shape.id.kind == Kind::Bias {
            self.params[param].whole = Some(self.upload(&own)?);
            return Ok(true);
        }
        let columns = self.config.inputs(shape.id.slot, at);
        let derived = self.packed_weight(width(&rows), shape.cols, &own)?;
        let back = self.team.as_ref().is_some_and(|team| team.backward) && self.training;
        // Rows of the transposed weight: what `dy W` multiplies with for some columns of its result.
        let turned = || -> Vec<f32> {
            columns.clone().flat_map(|c| values[c..].iter().step_by(shape.cols)).copied().collect()
        };
        let turned =
            if back { Some(self.packed_weight(columns.len(), shape.rows, &turned())?) } else { None };
        (self.params[param].derived, self.params[param].turned) = (Some(derived), turned);
        Ok(true)
    }

    fn packed_weight(&self, n: usize, k: usize, values: &[f32]) -> Result<Weight> {
        let mut weight = self.backend.weight(n, k, self.dtype, false)?;
        self.backend.load_weight(&self.upload(values)?, &mut weight)?;
        Ok(weight)
    }

    /// Some rows of a shared layer's transposed weight.
    pub(super) fn turned(&self, param: usize) -> &Weight {
        self.params[param].turned.as_ref().expect("a shared layer of a model that is trained")
    }
}

/// What the forms that a rank computes with depend on.
fn forms(team: &Option<Team>) -> Option<(usize, usize, Share, bool)> {
    team.as_ref().map(|t| (t.ranks.rank(), t.ranks.size(), t.share, t.backward))
}

/// The weights of some output features.
fn elements(shape: &ParamShape, rows: &Range<usize>) -> Range<usize> {
    let ParamId { kind, .. } = shape.id;
    let each = if kind == Kind::Bias { 1 } else { shape.cols };
    rows.start * each..rows.end * each
}

/// An activation as bytes that travel, no more of them than it has.
pub(super) fn packed(dtype: DType, values: &[f32]) -> Vec<u8> {
    if dtype == DType::Bf16 {
        return values.iter().flat_map(|&x| ferrl_kernels::narrow(x).to_le_bytes()).collect();
    }
    let mut bytes = vec![0; 4 * values.len()];
    write_f32s(values, &mut bytes);
    bytes
}

/// The way back.
pub(super) fn unpack(dtype: DType, bytes: &[u8]) -> Result<Vec<f32>> {
    if dtype == DType::Bf16 {
        let (pairs, []) = bytes.as_chunks::<2>() else { return Err(other_batch()) };
        return Ok(pairs.iter().map(|b| f32::from_bits((u16::from_le_bytes(*b) as u32) << 16)).collect());
    }
    let mut values = vec![0.0; bytes.len() / 4];
    read_f32s(bytes, &mut values);
    Ok(values)
}

//! Vocabulary parallelism: all ranks of a team, whatever else they share, split embedding and language-model head by
//! vocabulary rows.
//!
//! Shards are whole tiles of the head. Forward, a member computes its tiles; the three statistics of each tile are exchanged and
//! combined in tile order. The gradient of the hidden states sums over the vocabulary: each member computes some of its columns
//! from the all-gathered gradient of the logits, with those columns of the head. So every result has the bits of one rank.
//! Embedding rows are sent by their owners.

use super::config::ModelConfig;
use super::context::other_batch;
use super::decoder::Tokens;
use super::exchange::{Parcels, contiguous};
use super::gradient::{Gradient, Grads, added_to};
use super::heads::{RowStats, Scored};
use super::shard::{read_f32s, write_f32s};
use super::tensor::{Ranges, Team, elements, width};
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::{
    LogpGrads, LogpHead, LogpStats, PartGrads, PartInput, PartSide, TileStats, VocabPart,
};
use ferrl_kernels::comm::{ParcelPiece, part};
use ferrl_kernels::{Buffer, DType, Purpose};
use std::ops::Range;

/// Statistics of the head's rows over the whole vocabulary.
pub(crate) struct Folded {
    pub lse: Buffer,
    pub entropy: Buffer,
    /// Scaled logits of the requested tokens.
    pub found: Vec<f32>,
}

impl ModelConfig {
    /// The vocabulary rows of a member: whole tiles; may be empty.
    fn vocab_of(&self, (member, size): (usize, usize), tile: usize) -> Range<usize> {
        let tiles = part(self.vocab.div_ceil(tile), member, size);
        tiles.start * tile..(tiles.end * tile).min(self.vocab)
    }
}

impl Team {
    /// This rank's index in the whole team, and the team's size.
    pub(crate) fn member(&self) -> (usize, usize) {
        (self.ranks().rank(), self.ranks().size())
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    write_f32s(values, &mut bytes);
    bytes
}

/// Removes the first `count` numbers.
fn take(bytes: &mut &[u8], count: usize) -> Result<Vec<f32>> {
    let (here, after) = bytes.split_at_checked(4 * count).ok_or_else(other_batch)?;
    let mut values = vec![0.0; count];
    read_f32s(here, &mut values);
    *bytes = after;
    Ok(values)
}

impl Model {
    /// The vocabulary rows of a team's member, in the device's tiles.
    pub(crate) fn vocab_of(&self, at: (usize, usize)) -> Range<usize> {
        self.config.vocab_of(at, self.backend.vocab_tile())
    }

    /// Their number of tiles.
    fn vocab_tiles_of(&self, at: (usize, usize)) -> usize {
        self.vocab_of(at).len().div_ceil(self.backend.vocab_tile())
    }

    /// Derives this rank's rows of embedding or head, and its columns of the head.
    pub(super) fn materialize_vocabulary(&mut self, param: usize, values: &[f32]) -> Result<()> {
        let Some(at) = self.team().map(Team::member) else { return Ok(()) };
        let _weights = Purpose::Weights.on(&self.backend);
        let shape = self.params[param].shape;
        let tokens = self.vocab_of(at);
        let own = &values[elements(&shape, &tokens)];
        if param == self.layout.embed || tokens.is_empty() {
            self.params[param].whole = Some(self.upload(own)?);
        }
        if !self.config.is_multiplied(shape.id) {
            return Ok(());
        }
        if !tokens.is_empty() {
            let mut derived = self.packed_weight(param, [tokens.len(), shape.cols], own)?;
            derived.whole = shape.rows;
            self.params[param].derived = Some(derived);
        }
        let mut transposed = self.transposed_columns(param, part(self.config.hidden, at.0, at.1), values)?;
        transposed.iter_mut().for_each(|transposed| transposed.whole = shape.cols);
        self.params[param].transposed = transposed;
        Ok(())
    }

    /// Embeddings of this rank's tokens, sent by the members that own the rows.
    pub(super) fn embed_together(&self, team: &Team, all: &Tokens, x: &mut Buffer) -> Result<()> {
        let (b, (member, size), (tp, sp)) = (&*self.backend, team.member(), team.sizes());
        let (ids, _) =
            all.list.as_ref().ok_or_else(|| Error::usage("these tokens were uploaded without a team"))?;
        let wanted = |place: usize| &ids[part(ids.len(), place, sp)];
        let (own, hidden) = (self.vocab_of((member, size)), self.config.hidden);
        let mut rows_for = Vec::with_capacity(sp);
        for place in 0..sp {
            let here = wanted(place).iter().filter(|id| own.contains(&(**id as usize)));
            let here: Vec<u32> = here.map(|id| id - own.start as u32).collect();
            let mut rows = self.f32s(here.len() * hidden)?;
            if !here.is_empty() {
                let (table, scale) = (self.master(self.layout.embed), self.config.embedding_scale);
                b.embed(&b.indices(&here)?, table, scale, false, &mut rows)?;
            }
            rows_for.push(rows);
        }
        let among = team.everyone();
        let parcel = |to: usize| {
            let rows = &rows_for[to / tp];
            vec![(rows, contiguous(rows.len()))]
        };
        let parcels = Parcels::Each((0..size).map(parcel).collect());
        // Rows arrive by member, then by token.
        let from = |id: u32| (0..size).position(|m| self.vocab_of((m, size)).contains(&(id as usize)));
        let owners: Vec<usize> = wanted(member / tp).iter().map(|&id| from(id).unwrap_or_default()).collect();
        let count = |from: usize| owners.iter().filter(|owner| **owner == from).count();
        let mut next: Vec<usize> = (0..size).map(|from| (0..from).map(count).sum()).collect();
        let mut places = Vec::with_capacity(owners.len());
        for &owner in &owners {
            places.push(next[owner] as u32);
            next[owner] += 1;
        }
        let expected = |from: usize| vec![ParcelPiece::f32s(count(from) * hidden)];
        let mut inbox = self.exchange(&among, &[], parcels, expected)?;
        let arrived = self.concat_pieces(&mut inbox, &among, DType::F32, |from| count(from) * hidden)?;
        among.ranks.iter().try_for_each(|&from| inbox.end(from))?;
        if !places.is_empty() {
            b.gather_rows(&arrived, &b.indices(&places)?, hidden, x)?;
        }
        Ok(())
    }

    /// Adds the gradient of this rank's vocabulary rows; `dx` is the gradient of all embeddings of the micro-batch.
    pub(super) fn embed_backward_together(&self, t: &Tokens, dx: &Buffer, grads: Grads<'_>) -> Result<()> {
        let (b, hidden) = (&*self.backend, self.config.hidden);
        let Some((team, sum)) = self.team().zip(grads[self.layout.embed].as_mut()) else { return Ok(()) };
        let (ids, _) =
            t.list.as_ref().ok_or_else(|| Error::usage("these tokens were uploaded without a team"))?;
        let own = self.vocab_of(team.member());
        let rows: Vec<u32> =
            (0..ids.len() as u32).filter(|&row| own.contains(&(ids[row as usize] as usize))).collect();
        let sum = sum.added_to(b)?;
        if rows.is_empty() {
            return Ok(());
        }
        let tokens: Vec<u32> = rows.iter().map(|&row| ids[row as usize] - own.start as u32).collect();
        let mut pick_rows = b.alloc(dx.dtype(), rows.len() * hidden)?;
        b.gather_rows(dx, &b.indices(&rows)?, hidden, &mut pick_rows)?;
        b.embed_backward(&b.indices(&tokens)?, &pick_rows, self.config.embedding_scale, sum)
    }

    /// The head's rows for a range of tokens; `None` for an empty range.
    fn head_part(&self, tokens: &Range<usize>) -> Result<Option<VocabPart<'_>>> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let first = if self.team().is_some() { tokens.start } else { 0 };
        Ok(Some(VocabPart { w: self.lm_head()?, first, from: tokens.start, to: tokens.end }))
    }

    /// Statistics of rows over the whole vocabulary, each member computing its tiles, and the scaled logits of the requested
    /// tokens (equally many per row). `logits` receives the logits of this rank's tokens. Collective.
    pub(crate) fn fold_together(
        &self,
        team: &Team,
        (op, x): (LogpHead, &Buffer),
        ids: &[u32],
        logits: Option<&mut Buffer>,
    ) -> Result<Folded> {
        let (b, (member, size)) = (&*self.backend, team.member());
        let (rows, per_row) =
            (x.len() / self.config.hidden, ids.len() / (x.len() / self.config.hidden).max(1));
        let tokens = self.vocab_of((member, size));
        let tiles_of = |m: usize| self.vocab_tiles_of((m, size));
        let (mut tiles, mut found) = (self.f32s(3 * rows * tiles_of(member))?, self.f32s(ids.len())?);
        if let Some(part) = self.head_part(&tokens)?.filter(|_| rows > 0) {
            let wanted = b.indices(ids)?;
            b.tile_stats(
                op,
                x,
                part,
                TileStats { tiles: &mut tiles, found: Some((&wanted, &mut found)), logits },
            )?;
        }
        // Each member combines the tiles of some rows.
        let cut = |m: usize| {
            let before: usize = (0..m).map(tiles_of).sum();
            let numbers = 3 * before..3 * (before + tiles_of(m));
            vec![numbers]
        };
        let (cuts, rows_of): (Vec<Ranges>, _) =
            ((0..size).map(cut).collect(), |m: usize| part(rows, m, size));
        let all = self.exchange_columns_for_rows(&team.everyone(), (&cuts, rows), &tiles)?;
        let own = rows_of(member).len();
        let (mut lse, mut entropy) = (self.f32s(own)?, self.f32s(own)?);
        b.fold_tiles(&all, &mut lse, &mut entropy)?;
        // The host needs these few numbers: sent as messages.
        let mut numbers = [self.read_f32s(&lse)?, self.read_f32s(&entropy)?].concat();
        let inside = |of: &Range<usize>, id: u32| of.contains(&(id as usize));
        let logits_here = self.read_f32s(&found)?;
        numbers.extend((0..ids.len()).filter(|&i| inside(&tokens, ids[i])).map(|i| logits_here[i]));
        let (mut lse, mut entropy) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        let mut found = vec![0.0; per_row * rows];
        for (from, bytes) in team.ranks().all_gather(&bytes_of(&numbers))?.iter().enumerate() {
            let (theirs, mut rest) = (self.vocab_of((from, size)), &bytes[..]);
            lse.extend(take(&mut rest, rows_of(from).len())?);
            entropy.extend(take(&mut rest, rows_of(from).len())?);
            let at: Vec<usize> = (0..found.len()).filter(|&i| inside(&theirs, ids[i])).collect();
            let values = take(&mut rest, at.len())?;
            at.into_iter().zip(values).for_each(|(i, logit)| found[i] = logit);
        }
        Ok(Folded { lse: self.upload(&lse)?, entropy: self.upload(&entropy)?, found })
    }

    /// Gathers all logits to the first rank. Collective.
    pub(crate) fn logits_on_first(&self, team: &Team, own: &Buffer, rows: usize) -> Result<Option<Buffer>> {
        let (member, size) = team.member();
        let cuts: Vec<Ranges> = (0..size).map(|m| vec![self.vocab_of((m, size))]).collect();
        let mut whole = if member == 0 { Some(self.f32s(rows * self.config.vocab)?) } else { None };
        self.exchange_columns(&team.everyone(), &[0], (&cuts, rows), own, whole.as_mut())?;
        Ok(whole)
    }

    /// [`Model::score`] in a team. Collective.
    pub(super) fn score_together(
        &self,
        team: &Team,
        h: &Buffer,
        (rows, targets): (&[u32], &[u32]),
        others: &[u32],
        temperature: f32,
    ) -> Result<(Scored, RowStats)> {
        let (b, op, count) = (&*self.backend, self.logp_head(temperature), rows.len());
        self.check_lm_head()?;
        let (x, extra) = (self.select_rows(h, rows)?, others.len() / count.max(1));
        let wanted: Vec<u32> = (0..count)
            .flat_map(|r| {
                std::iter::once(targets[r]).chain(others[r * extra..(r + 1) * extra].iter().copied())
            })
            .collect();
        let Folded { lse, entropy, found } = self.fold_together(team, (op, &x), &wanted, None)?;
        let sums = self.read_f32s(&lse)?;
        let mut result = RowStats { entropy: self.read_f32s(&entropy)?, ..RowStats::default() };
        for (found, lse) in found.chunks_exact(1 + extra).zip(sums) {
            result.logp.push(found[0] - lse);
            result.others.extend(found[1..].iter().map(|logit| logit - lse));
        }
        let stats = LogpStats { logp: self.upload(&result.logp)?, entropy, lse };
        let others = if others.is_empty() { None } else { Some(b.indices(others)?) };
        let (rows, targets) = (b.indices(rows)?, b.indices(targets)?);
        Ok((Scored { rows, targets, others, x, op, stats, count }, result))
    }

    /// [`Model::score_backward`] in a team. Collective.
    pub(super) fn score_backward_together(
        &self,
        team: &Team,
        (s, others): (&Scored, Option<&Buffer>),
        flow: &LogpGrads<'_>,
        dh: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let head = self.layout.head.expect("scored rows come from a language-model head").weight;
        let part = self.head_part(&self.vocab_of(team.member()))?;
        let input = PartInput { op: s.op, x: &s.x, part, targets: &s.targets };
        let dw = grads[head].as_mut();
        let add = dw.as_ref().is_some_and(|slot| !slot.is_empty());
        let dw = dw.map(Gradient::written);
        let mut dx = self.activations(s.x.len())?;
        self.by_columns(team, &mut dx, |own, gather| {
            let to = PartGrads { dx: own, dw, add, back: self.transposed(head), gather };
            self.backend.part_backward(input, others, &s.stats, flow, to)
        })?;
        self.backend.scatter_rows(&dx, &s.rows, self.config.hidden, dh)
    }

    /// Calls `f` with this rank's columns of the gradient of the hidden states and with the all-gather of the logits' gradients,
    /// then all-gathers the columns.
    fn by_columns(
        &self,
        team: &Team,
        dx: &mut Buffer,
        f: impl FnOnce(&mut Buffer, &mut dyn FnMut(&Buffer, usize) -> Result<Buffer>) -> Result<()>,
    ) -> Result<()> {
        let (member, size) = team.member();
        let rows = dx.len() / self.config.hidden;
        let columns: Vec<Ranges> = (0..size).map(|m| vec![part(self.config.hidden, m, size)]).collect();
        let tokens: Vec<Ranges> = (0..size).map(|m| vec![self.vocab_of((m, size))]).collect();
        let among = team.everyone();
        let mut own = self.activations(rows * width(&columns[member]))?;
        f(&mut own, &mut |own, rows| {
            let mut all = self.backend.alloc(own.dtype(), rows * self.config.vocab)?;
            self.exchange_columns(&among, &among.ranks, (&tokens, rows), own, Some(&mut all))?;
            Ok(all)
        })?;
        self.exchange_columns(&among, &among.ranks, (&columns, rows), &own, Some(dx))
    }

    /// KL(this || other) in a team, if at least one of the models belongs to it. Collective.
    pub(super) fn kl_together(
        &self,
        team: &Team,
        x: &Buffer,
        (other, y): (&Model, &Buffer),
        temperature: f32,
    ) -> Result<Vec<f32>> {
        let op = self.logp_head(temperature);
        let (p, q) =
            (self.fold_together(team, (op, x), &[], None)?, other.fold_together(team, (op, y), &[], None)?);
        self.kl_between(team, op, (x, &p.lse), (other, y, &q.lse))
    }

    fn kl_between(
        &self,
        team: &Team,
        op: LogpHead,
        (x, p_lse): (&Buffer, &Buffer),
        (other, y, q_lse): (&Model, &Buffer, &Buffer),
    ) -> Result<Vec<f32>> {
        let ((_, size), rows) = (team.member(), p_lse.len());
        let tokens = self.vocab_of(team.member());
        let mut sums = self.f32s(rows * self.vocab_tiles_of(team.member()))?;
        if let Some((p, q)) = self.head_part(&tokens)?.zip(other.head_part(&tokens)?).filter(|_| rows > 0) {
            let (p, q) = (PartSide { x, part: p, lse: p_lse }, PartSide { x: y, part: q, lse: q_lse });
            self.backend.kl_tiles(op, p, q, &mut sums)?;
        }
        let cut = |m: usize| {
            let before: usize = (0..m).map(|m| self.vocab_tiles_of((m, size))).sum();
            let tiles = before..before + self.vocab_tiles_of((m, size));
            vec![tiles]
        };
        let cuts: Vec<Ranges> = (0..size).map(cut).collect();
        let (among, tiles) = (team.everyone(), cuts.iter().map(|cut| width(cut)).sum::<usize>());
        let mut all = self.f32s(rows * tiles)?;
        self.exchange_columns(&among, &among.ranks, (&cuts, rows), &sums, Some(&mut all))?;
        let mut kl = self.f32s(rows)?;
        self.backend.fold_kl(&all, &mut kl)?;
        self.read_f32s(&kl)
    }

    /// Writes the gradient of [`Model::kl`] with respect to the hidden states `x` and adds the head's. Collective.
    pub(super) fn kl_backward_together(
        &self,
        team: &Team,
        (x, dx): (&Buffer, &mut Buffer),
        dkl: &[f32],
        (other, y, temperature): (&Model, &Buffer, f32),
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, op) = (&*self.backend, self.logp_head(temperature));
        let head = self.layout.head.expect("a KL comes from a language-model head").weight;
        let (p, q) =
            (self.fold_together(team, (op, x), &[], None)?, other.fold_together(team, (op, y), &[], None)?);
        let kl = self.upload(&self.kl_between(team, op, (x, &p.lse), (other, y, &q.lse))?)?;
        let (dkl, tokens) = (self.upload(dkl)?, self.vocab_of(team.member()));
        let sides = self.head_part(&tokens)?.zip(other.head_part(&tokens)?);
        let side = |part, x, lse| PartSide { x, part, lse };
        let sides = sides.map(|(ours, theirs)| [side(ours, x, &p.lse), side(theirs, y, &q.lse)]);
        let dw = added_to(b, &mut grads[head])?;
        self.by_columns(team, dx, |own, gather| {
            let to = PartGrads { dx: own, dw, add: true, back: self.transposed(head), gather };
            b.kl_part_backward(op, sides, (&kl, &dkl), to)
        })
    }
}

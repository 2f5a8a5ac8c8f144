//! Context parallelism: the ranks of a team share the tokens of every micro-batch.
//!
//! Each member has some rows of the residual stream and computes with all weights. Around attention rows are exchanged for
//! heads (as in DeepSpeed-Ulysses): a member computes some heads of all rows. Where there are too few heads, members share the
//! query rows of attention (`zigzag.rs`). Sums over tokens are not cut either: for the
//! gradient of a weight, a member gets all rows of what it multiplies and computes some output features; norms and value heads
//! get all rows on every member, embedding and language-model head are shared by tokens of the vocabulary (`vocab.rs`). So
//! gradients have the bits of one rank, too.

use super::decoder::Tokens;
use super::exchange::{Members, Parcels, stretch};
use super::tensor::{Columns, Ranges, Team, width};
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::Attention;
use ferrl_kernels::comm::{Block, part};

impl Model {
    /// This rank's part of a micro-batch; `None` where it has all of it.
    pub(super) fn own_tokens(&self, t: &Tokens) -> Result<Option<Tokens>> {
        let Some((member, size)) = self.place_in_context() else { return Ok(None) };
        let (ids, positions) = t.list.as_ref().ok_or_else(|| Error::usage("tokens of another layout"))?;
        let own = part(t.rows, member, size);
        let tokens = self.tokens(&ids[own.clone()], &positions[own])?;
        Ok(Some(Tokens { reach: t.reach, ..tokens }))
    }

    /// All rows of an activation, of which each member has some; a row has `wide` elements. All members call it together.
    pub(super) fn all_rows(&self, own: &Buffer, wide: usize) -> Result<Buffer> {
        // Parts differ by one row at most.
        self.joined_rows(own, wide, own.len() / wide + 1)
    }

    /// The same where each has any number of rows up to `most`.
    pub(super) fn joined_rows(&self, own: &Buffer, wide: usize, most: usize) -> Result<Buffer> {
        let Some(team) = self.team().filter(|_| self.place_in_context().is_some()) else {
            let mut copy = self.backend.alloc(own.dtype(), own.len())?;
            self.backend.copy(own, 0, &mut copy, 0, own.len())?;
            return Ok(copy);
        };
        let among = team.sharing_tokens();
        let parcels = Parcels::Same(&among.ranks, vec![(own, stretch(own.len()))]);
        self.join_rows(&among, parcels, (own.dtype(), own.len() / wide, most, wide))
    }

    /// The largest number that a member has.
    pub(super) fn most_rows(&self, own: usize) -> Result<usize> {
        let Some(team) = self.team() else { return Ok(own) };
        let all = team.ranks().all_gather(&(own as u64).to_le_bytes())?;
        let counts =
            all.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
        counts.max().map(|most| most as usize).ok_or_else(other_batch)
    }

    /// This rank's rows of an activation that has all of them, of so many columns.
    pub(super) fn own_rows(&self, of: &Buffer, columns: usize) -> Result<Buffer> {
        let rows = of.len() / columns;
        let own = self.place_in_context().map_or(0..rows, |(member, size)| part(rows, member, size));
        let mut to = self.backend.alloc(of.dtype(), own.len() * columns)?;
        self.backend.copy(of, own.start * columns, &mut to, 0, own.len() * columns)?;
        Ok(to)
    }

    /// From this rank's rows of all columns (that it and those have that share tokens with it) to all rows of its columns. All
    /// members call it together.
    pub(super) fn rows_for_columns(&self, columns: Columns, own: &Buffer, all: usize) -> Result<Buffer> {
        let (among, cuts) = self.cuts(columns)?;
        let rows = own.len() / all;
        let block = |cut: &Ranges| vec![(own, Block { rows: 0..rows, width: all, columns: cut.clone() })];
        let parcels = Parcels::Each(cuts.iter().map(block).collect());
        self.join_rows(&among, parcels, (own.dtype(), rows, rows + 1, width(&cuts[among.own])))
    }

    /// The way back.
    pub(super) fn columns_for_rows(&self, columns: Columns, own: &Buffer) -> Result<Buffer> {
        let (among, cuts) = self.cuts(columns)?;
        let rows = own.len() / width(&cuts[among.own]);
        self.rows_of_columns(&among, (&cuts, rows), own)
    }

    /// The ranks that share tokens with this one, and the columns of each.
    fn cuts(&self, columns: Columns) -> Result<(Members<'_>, Vec<Ranges>)> {
        Ok((self.sharing_tokens()?, self.context_columns(columns)))
    }

    /// The ranks that share tokens with this one.
    pub(super) fn sharing_tokens(&self) -> Result<Members<'_>> {
        self.team().map(Team::sharing_tokens).ok_or_else(|| Error::usage("no team shares tokens"))
    }

    /// The heads of which this rank computes attention over all tokens; `None` where members do not exchange rows for heads.
    pub(super) fn exchanged_op(&self, op: Attention) -> Option<Attention> {
        let (_, size) = self.place_in_context().filter(|_| !self.shares_queries())?;
        let mut heads = op.heads;
        (heads.heads, heads.kv_heads) = (heads.heads / size, heads.kv_heads / size);
        Some(Attention { heads, ..op })
    }
}

pub(super) fn other_batch() -> Error {
    Error::rank("another rank computes with another batch").fix("report it")
}

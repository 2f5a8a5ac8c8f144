//! Context parallelism: the ranks of a team share the tokens of every micro-batch.
//!
//! Each member has some rows of the residual stream and all weights. Around attention, an all-to-all exchanges rows for heads
//! (DeepSpeed-Ulysses): a member then computes some heads of all rows. With fewer key heads than ranks, members share the
//! query rows instead (`zigzag.rs`). Sums over tokens are never split into partial sums: for a weight's gradient, a member
//! all-gathers the rows and computes some output features; norms and value heads run over all rows on every member;
//! embedding and language-model head are vocabulary-parallel (`vocab.rs`). So gradients, too, have the bits of one rank.

use super::decoder::Tokens;
use super::exchange::{Members, Parcels, contiguous};
use super::tensor::{Columns, Ranges, Team, width};
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::Attention;
use ferrl_kernels::comm::{Block, part};

impl Model {
    /// This rank's tokens of a micro-batch; `None` if tokens are not shared.
    pub(super) fn own_tokens(&self, t: &Tokens) -> Result<Option<Tokens>> {
        let Some((member, size)) = self.place_in_context() else { return Ok(None) };
        let (ids, positions) =
            t.list.as_ref().ok_or_else(|| Error::usage("these tokens were uploaded without a team"))?;
        let own = part(t.rows, member, size);
        let tokens = self.tokens(&ids[own.clone()], &positions[own])?;
        Ok(Some(Tokens { reach: t.reach, ..tokens }))
    }

    /// All-gather of an activation's rows; a row has `wide` elements. Collective.
    pub(super) fn all_gather_rows(&self, own: &Buffer, wide: usize) -> Result<Buffer> {
        // Shards differ by one row at most.
        self.all_gather_uneven_rows(own, wide, own.len() / wide + 1)
    }

    /// The same where each member has any number of rows up to `most`.
    pub(super) fn all_gather_uneven_rows(&self, own: &Buffer, wide: usize, most: usize) -> Result<Buffer> {
        let Some(team) = self.team().filter(|_| self.place_in_context().is_some()) else {
            let mut copy = self.backend.alloc(own.dtype(), own.len())?;
            self.backend.copy(own, 0, &mut copy, 0, own.len())?;
            return Ok(copy);
        };
        let among = team.sharing_tokens();
        let parcels = Parcels::Same(&among.ranks, vec![(own, contiguous(own.len()))]);
        self.exchange_rows(&among, parcels, (own.dtype(), own.len() / wide, most, wide))
    }

    /// Maximum of `own` over the members. Collective.
    pub(super) fn max_rows(&self, own: usize) -> Result<usize> {
        let Some(team) = self.team() else { return Ok(own) };
        let all = team.ranks().all_gather(&(own as u64).to_le_bytes())?;
        let counts =
            all.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
        counts.max().map(|most| most as usize).ok_or_else(other_batch)
    }

    /// This rank's rows of a full activation with `columns` columns.
    pub(super) fn own_rows(&self, of: &Buffer, columns: usize) -> Result<Buffer> {
        let rows = of.len() / columns;
        let own = self.place_in_context().map_or(0..rows, |(member, size)| part(rows, member, size));
        let mut to = self.backend.alloc(of.dtype(), own.len() * columns)?;
        self.backend.copy(of, own.start * columns, &mut to, 0, own.len() * columns)?;
        Ok(to)
    }

    /// All-to-all: from this rank's rows of all columns to all rows of its columns (its share of those that the ranks sharing
    /// tokens with it have). Collective.
    pub(super) fn rows_to_columns(&self, columns: Columns, own: &Buffer, all: usize) -> Result<Buffer> {
        let (among, cuts) = self.cuts(columns)?;
        let rows = own.len() / all;
        let block = |cut: &Ranges| vec![(own, Block { rows: 0..rows, width: all, columns: cut.clone() })];
        let parcels = Parcels::Each(cuts.iter().map(block).collect());
        self.exchange_rows(&among, parcels, (own.dtype(), rows, rows + 1, width(&cuts[among.own])))
    }

    /// The inverse all-to-all.
    pub(super) fn columns_to_rows(&self, columns: Columns, own: &Buffer) -> Result<Buffer> {
        let (among, cuts) = self.cuts(columns)?;
        let rows = own.len() / width(&cuts[among.own]);
        self.exchange_columns_for_rows(&among, (&cuts, rows), own)
    }

    /// The ranks that share tokens with this one, and each one's columns.
    fn cuts(&self, columns: Columns) -> Result<(Members<'_>, Vec<Ranges>)> {
        Ok((self.sharing_tokens()?, self.context_columns(columns)))
    }

    pub(super) fn sharing_tokens(&self) -> Result<Members<'_>> {
        self.team().map(Team::sharing_tokens).ok_or_else(|| Error::usage("no team shares tokens"))
    }

    /// The attention of this rank's heads over all tokens; `None` unless members exchange rows for heads.
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

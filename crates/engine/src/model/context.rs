//! Context parallelism: the ranks of a team share the tokens of every micro-batch.
//!
//! Each member has some rows of the residual stream and computes with all weights. Around attention rows are exchanged for
//! heads (as in DeepSpeed-Ulysses): a member computes some heads of all rows. Where there are too few heads, members share the
//! query rows of attention (`zigzag.rs`). Sums over tokens are not cut either: for the
//! gradient of a weight, a member gets all rows of what it multiplies and computes some output features; norms and value heads
//! get all rows on every member, embedding and language-model head are shared by tokens of the vocabulary (`vocab.rs`). So
//! gradients have the bits of one rank, too.

use super::decoder::Tokens;
use super::tensor::{Columns, Ranges, packed, unpack, width};
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::Attention;
use ferrl_kernels::comm::part;
use ferrl_kernels::{Buffer, DType};

impl Model {
    /// This rank's part of a micro-batch; `None` where it has all of it.
    pub(super) fn own_tokens(&self, t: &Tokens) -> Result<Option<Tokens>> {
        let Some((member, size)) = self.place_in_context() else { return Ok(None) };
        let (ids, positions) = t.list.as_ref().ok_or_else(|| Error::usage("tokens of another layout"))?;
        let own = part(t.rows, member, size);
        let tokens = self.tokens(&ids[own.clone()], &positions[own])?;
        Ok(Some(Tokens { reach: t.reach, ..tokens }))
    }

    /// All rows of an activation, of which each member has some. All members call it together.
    pub(super) fn all_rows(&self, own: &Buffer) -> Result<Buffer> {
        let Some((_, size)) = self.place_in_context() else {
            let mut copy = self.backend.alloc(own.dtype(), own.len())?;
            self.backend.copy(own, 0, &mut copy, 0, own.len())?;
            return Ok(copy);
        };
        let bytes = packed(own.dtype(), &self.read_f32s(own)?);
        let arrived = self.exchanged(&vec![bytes.as_slice(); size])?;
        drop(bytes);
        self.joined(own.dtype(), arrived)
    }

    /// What members sent, one behind the other.
    fn joined(&self, dtype: DType, arrived: Vec<Vec<u8>>) -> Result<Buffer> {
        let count = arrived.iter().map(|bytes| bytes.len() / dtype.size()).sum();
        let (mut to, mut at) = (self.backend.alloc(dtype, count)?, 0);
        for bytes in arrived {
            let values = unpack(dtype, &bytes)?;
            self.backend.write(&mut to, at, &values)?;
            at += values.len();
        }
        Ok(to)
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
        let (_, cuts) = self.cuts(columns)?;
        let (dtype, values) = (own.dtype(), self.read_f32s(own)?);
        let picked = |cut: &Ranges| -> Vec<f32> {
            let rows = values.chunks_exact(all);
            rows.flat_map(|row| cut.iter().flat_map(|r| &row[r.clone()])).copied().collect()
        };
        let parts: Vec<Vec<u8>> = cuts.iter().map(|cut| packed(dtype, &picked(cut))).collect();
        drop(values);
        let arrived = self.exchanged(&slices(&parts))?;
        drop(parts);
        self.joined(dtype, arrived)
    }

    /// The way back.
    pub(super) fn columns_for_rows(&self, columns: Columns, own: &Buffer, all: usize) -> Result<Buffer> {
        let (member, cuts) = self.cuts(columns)?;
        let (dtype, values) = (own.dtype(), self.read_f32s(own)?);
        let (size, wide) = (cuts.len(), width(&cuts[member]));
        let rows = values.len() / wide;
        let rows_of = |to: usize| part(rows, to, size);
        let parts: Vec<Vec<u8>> = (0..size)
            .map(|to| packed(dtype, &values[rows_of(to).start * wide..rows_of(to).end * wide]))
            .collect();
        let mut whole = vec![0.0; rows_of(member).len() * all];
        for (bytes, cut) in self.exchanged(&slices(&parts))?.iter().zip(&cuts) {
            let theirs = unpack(dtype, bytes)?;
            let mut rest = &theirs[..];
            for row in whole.chunks_exact_mut(all) {
                for range in cut {
                    let (here, after) = rest.split_at_checked(range.len()).ok_or_else(other_batch)?;
                    row[range.clone()].copy_from_slice(here);
                    rest = after;
                }
            }
        }
        self.stored(dtype, &whole)
    }

    /// This rank's place and the columns of every member.
    fn cuts(&self, columns: Columns) -> Result<(usize, Vec<Ranges>)> {
        let (member, _) = self.place_in_context().ok_or_else(|| Error::usage("no team shares tokens"))?;
        Ok((member, self.context_columns(columns)))
    }

    /// Part `i` to the `i`-th member; what each of them sent.
    pub(super) fn exchanged(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let team = self.team().ok_or_else(|| Error::usage("no team shares tokens"))?;
        team.exchange_tokens(parts)
    }

    pub(super) fn stored(&self, dtype: DType, values: &[f32]) -> Result<Buffer> {
        let mut to = self.backend.alloc(dtype, values.len())?;
        self.backend.write(&mut to, 0, values)?;
        Ok(to)
    }

    /// The heads of which this rank computes attention over all tokens; `None` where members do not exchange rows for heads.
    pub(super) fn exchanged_op(&self, op: Attention) -> Option<Attention> {
        let (_, size) = self.place_in_context().filter(|_| !self.shares_queries())?;
        let mut heads = op.heads;
        (heads.heads, heads.kv_heads) = (heads.heads / size, heads.kv_heads / size);
        Some(Attention { heads, ..op })
    }
}

pub(super) fn slices(parts: &[Vec<u8>]) -> Vec<&[u8]> {
    parts.iter().map(Vec::as_slice).collect()
}

pub(super) fn other_batch() -> Error {
    Error::rank("another rank computes with another batch").fix("report it")
}

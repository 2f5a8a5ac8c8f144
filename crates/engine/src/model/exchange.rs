//! Messages between the ranks of a team during forward and backward: blocks of activations and gradients, as parcels (device
//! to device where the ranks are connected so).
//!
//! Sizes follow from the layout and from this rank's number of rows. Shards of shared rows differ by one row at most; each
//! member sends its count along.

use super::context::other_batch;
use super::tensor::{Ranges, Team, width};
use super::weights::Model;
use crate::Result;
use ferrl_kernels::comm::{Block, Inbox, Outbox, ParcelContents, ParcelPiece, Route, part};
use ferrl_kernels::{Buffer, DType};

/// A subgroup of a team, as rank numbers within the team; the other subgroups make the same exchange at the same time.
pub(super) struct Members<'a> {
    pub team: &'a Team,
    pub ranks: Vec<usize>,
    /// This rank's index in `ranks`.
    pub own: usize,
}

/// What this rank sends.
pub(super) enum Parcels<'a> {
    /// The same blocks to each of these ranks.
    Same(&'a [usize], Vec<(&'a Buffer, Block)>),
    /// Different blocks to each member.
    Each(Vec<Vec<(&'a Buffer, Block)>>),
}

/// `len` contiguous elements.
pub(super) fn contiguous(len: usize) -> Block {
    Block::rows(0..1, len)
}

/// A piece of an activation in its own type.
pub(super) fn piece(dtype: DType, len: usize) -> ParcelPiece {
    ParcelPiece { len, format: dtype }
}

fn contents(note: &[u8], blocks: &[(&Buffer, Block)]) -> ParcelContents {
    let pieces = blocks.iter().map(|(from, block)| piece(from.dtype(), block.len())).collect();
    ParcelContents { note: note.to_vec(), pieces }
}

impl Model {
    /// Sends blocks to the members; `expected(i)` are the largest pieces that member `i` sends to this rank.
    pub(super) fn exchange(
        &self,
        among: &Members<'_>,
        note: &[u8],
        parcels: Parcels<'_>,
        expected: impl Fn(usize) -> Vec<ParcelPiece>,
    ) -> Result<Inbox> {
        let (ranks, b) = (among.team.ranks(), &self.backend);
        let mut coming = vec![Vec::new(); ranks.size()];
        among.ranks.iter().enumerate().for_each(|(i, &rank)| coming[rank] = expected(i));
        let (route, slots) = match parcels {
            Parcels::Same(to, blocks) => (Route::Same(to.to_vec()), vec![blocks]),
            Parcels::Each(blocks) => {
                let mut slots: Vec<_> = (0..ranks.size()).map(|_| Vec::new()).collect();
                among.ranks.iter().zip(blocks).for_each(|(&to, blocks)| slots[to] = blocks);
                (Route::Each, slots)
            }
        };
        let all = slots.iter().map(|blocks| contents(note, blocks)).collect();
        let mut outbox = Outbox::new(ranks, b, route, all)?;
        for (slot, blocks) in slots.iter().enumerate() {
            blocks.iter().try_for_each(|(from, block)| outbox.push_block(slot, from, block))?;
        }
        ranks.exchange_parcels(outbox, &coming)
    }

    /// All-gather along columns to the members `to`: into a buffer of `rows` rows.
    pub(super) fn exchange_columns(
        &self,
        among: &Members<'_>,
        to: &[usize],
        (cuts, rows): (&[Ranges], usize),
        own: &Buffer,
        into: Option<&mut Buffer>,
    ) -> Result<()> {
        let (dtype, here) = (own.dtype(), among.ranks[among.own]);
        let expected = |i: usize| match into {
            Some(_) if i != among.own => vec![piece(dtype, rows * width(&cuts[i]))],
            _ => Vec::new(),
        };
        let others: Vec<usize> = to.iter().copied().filter(|&rank| rank != here).collect();
        let blocks = vec![(own, contiguous(own.len()))];
        let mut inbox = self.exchange(among, &[], Parcels::Same(&others, blocks), expected)?;
        let Some(into) = into else { return Ok(()) };
        let all = cuts.iter().map(|cut| width(cut)).sum();
        for (&from, cut) in among.ranks.iter().zip(cuts) {
            let block = Block { rows: 0..rows, width: all, columns: cut.clone() };
            match from == here {
                true => block.unpack(&*self.backend, (own, 0), into)?,
                false => inbox.write_block(from, into, &block)?,
            }
            inbox.end(from)?;
        }
        Ok(())
    }

    /// All-to-all: from all rows of this member's columns to its rows of all columns.
    pub(super) fn exchange_columns_for_rows(
        &self,
        among: &Members<'_>,
        (cuts, rows): (&[Ranges], usize),
        own: &Buffer,
    ) -> Result<Buffer> {
        let (dtype, size, wide) = (own.dtype(), among.ranks.len(), width(&cuts[among.own]));
        let here = part(rows, among.own, size).len();
        let all = cuts.iter().map(|cut| width(cut)).sum();
        let block = |to: usize| vec![(own, Block::rows(part(rows, to, size), wide))];
        let parcels = Parcels::Each((0..size).map(block).collect());
        let mut inbox = self.exchange(among, &[], parcels, |i| vec![piece(dtype, here * width(&cuts[i]))])?;
        let mut whole = self.backend.alloc(dtype, here * all)?;
        for (&from, cut) in among.ranks.iter().zip(cuts) {
            inbox.write_block(
                from,
                &mut whole,
                &Block { rows: 0..here, width: all, columns: cut.clone() },
            )?;
            inbox.end(from)?;
        }
        Ok(whole)
    }

    /// All-gather along rows; a member sends up to `most` rows of `wide` elements.
    pub(super) fn exchange_rows(
        &self,
        among: &Members<'_>,
        parcels: Parcels<'_>,
        (dtype, rows, most, wide): (DType, usize, usize, usize),
    ) -> Result<Buffer> {
        let note = (rows as u64).to_le_bytes();
        let mut inbox = self.exchange(among, &note, parcels, |_| vec![piece(dtype, most * wide)])?;
        let mut lengths = Vec::with_capacity(among.ranks.len());
        for &from in &among.ranks {
            let note = inbox.note(from, note.len())?;
            let theirs = note.try_into().map_or(usize::MAX, |bytes| u64::from_le_bytes(bytes) as usize);
            if theirs > most {
                return Err(other_batch());
            }
            lengths.push(theirs * wide);
        }
        let (mut to, mut at) = (self.backend.alloc(dtype, lengths.iter().sum())?, 0);
        for (&from, len) in among.ranks.iter().zip(lengths) {
            inbox.write(from, piece(dtype, len), &mut to, at)?;
            inbox.end(from)?;
            at += len;
        }
        Ok(to)
    }

    /// Gathers rows by index.
    pub(super) fn pick_rows(
        &self,
        of: &Buffer,
        rows: impl Iterator<Item = u32>,
        wide: usize,
    ) -> Result<Buffer> {
        let rows: Vec<u32> = rows.collect();
        let mut to = self.backend.alloc(of.dtype(), rows.len() * wide)?;
        if !rows.is_empty() {
            self.backend.gather_rows(of, &self.backend.indices(&rows)?, wide, &mut to)?;
        }
        Ok(to)
    }

    /// Concatenates the next piece of each member; member `i` sends `len(i)` elements.
    pub(super) fn concat_pieces(
        &self,
        inbox: &mut Inbox,
        among: &Members<'_>,
        dtype: DType,
        len: impl Fn(usize) -> usize,
    ) -> Result<Buffer> {
        let lengths: Vec<usize> = (0..among.ranks.len()).map(len).collect();
        let (mut to, mut at) = (self.backend.alloc(dtype, lengths.iter().sum())?, 0);
        for (&from, len) in among.ranks.iter().zip(lengths) {
            inbox.write(from, piece(dtype, len), &mut to, at)?;
            at += len;
        }
        Ok(to)
    }
}

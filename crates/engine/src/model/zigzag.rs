//! Context parallelism with more ranks than key heads: ranks share the query rows of attention.
//!
//! Every member all-gathers keys and values and computes some query rows of all heads (as in Llama 3's training). Under the
//! causal mask later rows cost more, so a member has two chunks of every sequence, one from the front and its mirror image from
//! the back (zigzag). These differ from its contiguous rows of the residual stream: queries are sent to the member that
//! computes with them, and outputs are sent back.
//!
//! Partial softmaxes are never merged, so forward has the bits of one rank. So has backward: a member receives what it needs of
//! all rows and computes the gradients of its chunks' queries, keys and values, each as one undivided sum.

use super::context::other_batch;
use super::exchange::{Parcels, piece};
use super::tensor::{Ranges, Team, width};
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Attention, AttentionSaved, RowShard, Segments};
use ferrl_kernels::comm::{Block, part};
use std::ops::Range;

/// Assignment of a micro-batch's rows to members.
struct RowPlan<'a> {
    segments: &'a Segments,
    member: usize,
    size: usize,
}

impl RowPlan<'_> {
    /// A member's rows of the residual stream.
    fn stream(&self, member: usize) -> Range<usize> {
        part(self.segments.rows(), member, self.size)
    }

    /// A member's query rows of attention.
    fn zigzag(&self, member: usize) -> Ranges {
        let chunks = [member, 2 * self.size - 1 - member];
        let of = |rows: Range<usize>| {
            chunks.map(|chunk| {
                let own = part(rows.len(), chunk, 2 * self.size);
                rows.start + own.start..rows.start + own.end
            })
        };
        self.segments.iter().flat_map(of).filter(|rows| !rows.is_empty()).collect()
    }

    /// Rows that `from` has of the stream and `to` of attention.
    fn shared(&self, from: usize, to: usize) -> Ranges {
        let stream = self.stream(from);
        let common = |rows: Range<usize>| rows.start.max(stream.start)..rows.end.min(stream.end);
        self.zigzag(to).into_iter().map(common).filter(|rows| !rows.is_empty()).collect()
    }
}

impl Model {
    /// Whether attention is shared by query rows rather than heads.
    pub(super) fn shares_queries(&self) -> bool {
        let sizes = self.team().map(Team::sizes);
        sizes.is_some_and(|(tp, sp)| sp > 1 && !self.config.shares_heads(tp, sp))
    }

    fn row_plan<'a>(&self, segments: &'a Segments) -> Result<RowPlan<'a>> {
        let (member, size) = self.place_in_context().ok_or_else(|| Error::usage("no team shares tokens"))?;
        Ok(RowPlan { segments, member, size })
    }

    /// Attention output and log-sum-exp for this rank's rows of the stream. Collective.
    pub(super) fn attention_by_rows(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
    ) -> Result<(Buffer, Buffer)> {
        let (plan, queries) = (self.row_plan(segments)?, op.heads.out_width());
        let (q, kv) = self.queries_for_rows(op, &plan, qkv)?;
        let ranges = plan.zigzag(plan.member);
        let shard = RowShard { segments, ranges: &ranges };
        let mut att = self.activations(shard.rows() * queries)?;
        let mut lse = self.f32s(shard.rows() * op.heads.heads)?;
        self.backend.attention_shard(op, shard, (&q, &kv), &mut att, &mut lse)?;
        drop((q, kv));
        let [att, lse] = self.to_stream(&plan, [(&att, queries), (&lse, op.heads.heads)])?;
        Ok((att, lse))
    }

    /// Gradients of this rank's rows of `qkv`, from its rows of the operands. Collective.
    pub(super) fn attention_by_rows_backward(
        &self,
        op: Attention,
        own: AttentionSaved<'_>,
        datt: &Buffer,
        segments: &Segments,
    ) -> Result<Buffer> {
        let (plan, width) = (self.row_plan(segments)?, op.heads.qkv_width());
        let ranges = plan.zigzag(plan.member);
        let shard = RowShard { segments, ranges: &ranges };
        let (queries, heads) = (op.heads.out_width(), op.heads.heads);
        let (qkv, out) = (self.all_gather_rows(own.qkv, width)?, self.all_gather_rows(own.out, queries)?);
        let (lse, dout) = (self.all_gather_rows(own.lse, heads)?, self.all_gather_rows(datt, queries)?);
        let mut dqkv = self.activations(shard.rows() * width)?;
        let saved = AttentionSaved { qkv: &qkv, out: &out, lse: &lse };
        self.backend.attention_shard_backward(op, saved, &dout, shard, &mut dqkv)?;
        drop((qkv, out, lse, dout));
        let [dqkv] = self.to_stream(&plan, [(&dqkv, width)])?;
        Ok(dqkv)
    }

    /// From this rank's rows of `qkv` to the queries of its attention rows, and the keys and values of all rows.
    fn queries_for_rows(&self, op: Attention, plan: &RowPlan<'_>, qkv: &Buffer) -> Result<(Buffer, Buffer)> {
        let (dtype, among) = (qkv.dtype(), self.sharing_tokens()?);
        let (wide, queries, kv_width) = (op.heads.qkv_width(), op.heads.out_width(), op.heads.kv_width());
        let stream = plan.stream(plan.member);
        let of = |columns| Block { rows: 0..stream.len(), width: wide, columns: vec![columns] };
        let mut q = self.backend.alloc(dtype, stream.len() * queries)?;
        of(0..queries).pack(&*self.backend, qkv, &mut q, 0)?;
        // Grouped by receiving member.
        let to_members = (0..plan.size).flat_map(|to| plan.shared(plan.member, to)).flatten();
        let q = self.pick_rows(&q, to_members.map(|row| (row - stream.start) as u32), queries)?;
        let counts = |from: usize, to: usize| width(&plan.shared(from, to));
        let parcel = |to: usize| {
            let before: usize = (0..to).map(|member| counts(plan.member, member)).sum();
            let rows = before..before + counts(plan.member, to);
            vec![(qkv, of(queries..wide)), (&q, Block::rows(rows, queries))]
        };
        let lengths = |from: usize| [plan.stream(from).len() * kv_width, counts(from, plan.member) * queries];
        let parcels = Parcels::Each((0..plan.size).map(parcel).collect());
        let mut inbox =
            self.exchange(&among, &[], parcels, |from| lengths(from).map(|len| piece(dtype, len)).into())?;
        let kv = self.concat_pieces(&mut inbox, &among, dtype, |from| lengths(from)[0])?;
        let q = self.concat_pieces(&mut inbox, &among, dtype, |from| lengths(from)[1])?;
        among.ranks.iter().try_for_each(|&from| inbox.end(from))?;
        Ok((q, kv))
    }

    /// From this rank's attention rows to its stream rows, for several buffers given with their row width.
    fn to_stream<const N: usize>(
        &self,
        plan: &RowPlan<'_>,
        own: [(&Buffer, usize); N],
    ) -> Result<[Buffer; N]> {
        let among = self.sharing_tokens()?;
        let counts = |from: usize, to: usize| width(&plan.shared(to, from));
        let parcel = |to: usize| {
            let before: usize = (0..to).map(|member| counts(plan.member, member)).sum();
            let rows = before..before + counts(plan.member, to);
            own.iter().map(|&(buffer, wide)| (buffer, Block::rows(rows.clone(), wide))).collect()
        };
        let parcels = Parcels::Each((0..plan.size).map(parcel).collect());
        let expected = |from: usize| {
            own.iter().map(|&(b, wide)| piece(b.dtype(), counts(from, plan.member) * wide)).collect()
        };
        let mut inbox = self.exchange(&among, &[], parcels, expected)?;
        // Position of each stream row among the received rows, which are grouped by sender.
        let stream = plan.stream(plan.member);
        let arrived = (0..plan.size).flat_map(|from| plan.shared(plan.member, from)).flatten();
        let mut places = vec![0; stream.len()];
        arrived.zip(0..).for_each(|(row, place)| places[row - stream.start] = place);
        let mut buffers = Vec::with_capacity(N);
        for (buffer, wide) in own {
            let len = |from: usize| counts(from, plan.member) * wide;
            let all = self.concat_pieces(&mut inbox, &among, buffer.dtype(), len)?;
            buffers.push(self.pick_rows(&all, places.iter().copied(), wide)?);
        }
        among.ranks.iter().try_for_each(|&from| inbox.end(from))?;
        buffers.try_into().map_err(|_| other_batch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_computed_by_one_member_and_each_has_about_the_same_work() {
        let segments = Segments::of([1, 64, 3, 400]);
        for size in [2, 3, 4, 8] {
            let plan = |member| RowPlan { segments: &segments, member, size };
            let mut seen = vec![0; segments.rows()];
            let mut work = vec![0; size];
            for (member, work) in work.iter_mut().enumerate() {
                for row in plan(member).zigzag(member).into_iter().flatten() {
                    seen[row] += 1;
                    let start = segments.starts.iter().rev().find(|start| **start <= row).unwrap();
                    *work += row - start + 1;
                }
                let home: usize = (0..size).map(|from| width(&plan(member).shared(from, member))).sum();
                assert_eq!(home, width(&plan(member).zigzag(member)));
            }
            assert!(seen.iter().all(|n| *n == 1), "{size} members");
            let (least, most) = (work.iter().min().unwrap(), work.iter().max().unwrap());
            assert!((most - least) * 20 < *most, "{work:?}");
        }
    }
}

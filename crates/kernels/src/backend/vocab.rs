//! A head whose vocabulary several ranks share: each computes some tiles, their numbers are exchanged and folded in tile order.

use super::{HeadOps, SampleOps};
use crate::buffer::Buffer;
use crate::composed;
use crate::error::Result;
use crate::operands::*;
use crate::shapes;

/// The language-model head by parts of its vocabulary. All parts together give the bits of [`HeadOps`],
/// [`DivergenceOps`](super::DivergenceOps) and [`SampleOps`].
pub trait VocabOps: HeadOps + SampleOps {
    /// Numbers of every tile of a part, and the scaled logits that are wanted.
    fn tile_stats(&self, op: LogpHead, x: &Buffer, part: VocabPart<'_>, to: TileStats<'_>) -> Result<()> {
        shapes::tile_stats(self.as_home(), x, part, &to)?;
        composed::tile_stats(self, op, x, part, to)
    }
    /// From the numbers of all tiles of the vocabulary, `[rows, tiles, 3]`, to what they make up.
    fn fold_tiles(&self, tiles: &Buffer, lse: &mut Buffer, entropy: &mut Buffer) -> Result<()> {
        shapes::fold_tiles(self.as_home(), tiles, [lse, entropy])?;
        composed::fold_tiles(self, tiles, lse, entropy)
    }
    /// Gradients of hidden states and of a part's weight, from those of the row's numbers.
    fn part_backward(
        &self,
        head: PartInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::part_backward(self.as_home(), head, others, stats, grads, &to)?;
        composed::part_backward(self, head, others, (stats, grads), to)
    }
    /// The sum over each tile of `p (log p - log q)`, `[rows, tiles]` f32.
    fn kl_tiles(&self, op: LogpHead, p: PartSide<'_>, q: PartSide<'_>, sums: &mut Buffer) -> Result<()> {
        shapes::kl_tiles(self.as_home(), p, q, sums)?;
        composed::kl_tiles(self, op, p, q, sums)
    }
    /// From the sums of all tiles of the vocabulary, `[rows, tiles]`, to KL(p || q).
    fn fold_kl(&self, tiles: &Buffer, kl: &mut Buffer) -> Result<()> {
        shapes::fold_kl(self.as_home(), tiles, kl)?;
        composed::fold_kl(self, tiles, kl)
    }
    /// Gradient of the KL with respect to `p`, which is `kl` in each row; no `sides` where this rank has no tokens.
    fn kl_part_backward(
        &self,
        op: LogpHead,
        sides: Option<[PartSide<'_>; 2]>,
        (kl, dkl): (&Buffer, &Buffer),
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::kl_part_backward(self.as_home(), sides, [kl, dkl], &to)?;
        composed::kl_part_backward(self, op, sides, (kl, dkl), to)
    }
    /// Whether draws that go through the parts one after the other choose the tokens that [`SampleOps::sample`] chooses; elsewhere the
    /// logits of a row are put together first.
    fn draws_by_parts(&self) -> bool {
        true
    }
    /// Continues draws through the logits of a part, whose tokens are counted from `first`: see [`SampleOps::sample`].
    fn sample_part(
        &self,
        (logits, first): (&Buffer, usize),
        lse: &Buffer,
        uniform: &[f32],
        draws: &mut [Draw],
    ) -> Result<()> {
        shapes::sample(self.as_home(), logits, lse, uniform)?;
        composed::sample_part(self, (logits, first), lse, uniform, draws)
    }
}

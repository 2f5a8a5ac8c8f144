//! The vocabulary-parallel head: each rank computes some tiles; tile statistics are exchanged and combined in tile order.

use super::{HeadOps, SampleOps};
use crate::operands::*;
use crate::{Buffer, Result, composed, shapes};

/// The language-model head on parts of the vocabulary. All parts together give the bits of [`HeadOps`],
/// [`DivergenceOps`](super::DivergenceOps) and [`SampleOps`].
pub trait VocabOps: HeadOps + SampleOps {
    /// Statistics of every tile of a part, and requested scaled logits.
    fn tile_stats(&self, op: LogpHead, x: &Buffer, part: VocabPart<'_>, to: TileStats<'_>) -> Result<()> {
        shapes::tile_stats(self.as_info(), x, part, &to)?;
        composed::tile_stats(self, op, x, part, to)
    }
    /// Combines the statistics of all tiles of the vocabulary, `[rows, tiles, 3]`.
    fn fold_tiles(&self, tiles: &Buffer, lse: &mut Buffer, entropy: &mut Buffer) -> Result<()> {
        shapes::fold_tiles(self.as_info(), tiles, [lse, entropy])?;
        composed::fold_tiles(self, tiles, lse, entropy)
    }
    /// Gradients of hidden states and of a part's weight from those of the row statistics.
    fn part_backward(
        &self,
        head: PartInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::part_backward(self.as_info(), head, others, stats, grads, &to)?;
        composed::part_backward(self, head, others, (stats, grads), to)
    }
    /// Per tile, the sum of `p (log p - log q)`: `[rows, tiles]` f32.
    fn kl_tiles(&self, op: LogpHead, p: PartSide<'_>, q: PartSide<'_>, sums: &mut Buffer) -> Result<()> {
        shapes::kl_tiles(self.as_info(), p, q, sums)?;
        composed::kl_tiles(self, op, p, q, sums)
    }
    /// KL(p || q) from the sums of all tiles of the vocabulary, `[rows, tiles]`.
    fn fold_kl(&self, tiles: &Buffer, kl: &mut Buffer) -> Result<()> {
        shapes::fold_kl(self.as_info(), tiles, kl)?;
        composed::fold_kl(self, tiles, kl)
    }
    /// Gradient of the KL with respect to `p`, given each row's `kl`; `sides` is `None` on a rank without tokens.
    fn kl_part_backward(
        &self,
        op: LogpHead,
        sides: Option<[PartSide<'_>; 2]>,
        (kl, dkl): (&Buffer, &Buffer),
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::kl_part_backward(self.as_info(), sides, [kl, dkl], &to)?;
        composed::kl_part_backward(self, op, sides, (kl, dkl), to)
    }
    /// Whether sampling part by part chooses the same tokens as [`SampleOps::sample`]; otherwise the logits of a row must be
    /// gathered first.
    fn draws_by_parts(&self) -> bool {
        true
    }
    /// Continues sampling through the logits of a part whose first token is `first`: see [`SampleOps::sample`].
    fn sample_part(
        &self,
        (logits, first): (&Buffer, usize),
        lse: &Buffer,
        uniform: &[f32],
        draws: &mut [Draw],
    ) -> Result<()> {
        shapes::sample(self.as_info(), logits, lse, uniform)?;
        composed::sample_part(self, (logits, first), lse, uniform, draws)
    }
}

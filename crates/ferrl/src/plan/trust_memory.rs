//! Memory of a rank in an update by trust region, where weights are split or shared: passes without gradients, over weights that
//! are moved to and fro.

use super::memory::{self, MemoryPart};
use super::rank_memory::{RankTable, part};

impl RankTable<'_> {
    /// Beside `weights` as passes read them and `flight`: conjugate gradients, which have the vectors of a backward with the
    /// weights as they were in the place of the gradient; and the search along the step, which has two vectors and the policy before
    /// it, whole on every rank.
    pub(super) fn trust_phases(&self, weights: &MemoryPart, flight: &MemoryPart) -> Vec<Vec<MemoryPart>> {
        let i = self.i;
        if i.updates.trust_region.is_none() {
            return Vec::new();
        }
        let trained = i.trained(&i.config);
        let critic = self.vectors() - i.vectors() * trained;
        let tokens = i.micro_tokens().div_ceil(self.l.sp);
        let work = memory::forward_work(&i.config, tokens, self.e);
        let vectors = |count: usize| {
            let what = format!("{count} vectors of the weights' shape, {}", self.over());
            part("gradients", self.split(4 * (count * trained + critic)), what)
        };
        let old = part("reference", i.resident(&i.config) as usize, "the policy before the step, whole");
        // The KL reads the hidden states of both.
        let both = work + 2 * tokens * i.config.hidden * self.e;
        let conjugate =
            vec![weights.clone(), flight.clone(), vectors(i.vectors()), part("activations", work, "passes")];
        let search =
            vec![weights.clone(), flight.clone(), vectors(2), old, part("activations", both, "passes")];
        let with_cache = |phase: Vec<MemoryPart>| phase.into_iter().chain(self.idle_cache()).collect();
        [conjugate, search].map(with_cache).into()
    }
}

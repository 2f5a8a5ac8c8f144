//! Memory of a rank in an update by trust region: products with the Fisher matrix, of a fraction of the sequences, and passes
//! without gradients over weights that are moved to and fro.

use super::memory::{self, MemoryPart};
use super::rank_memory::{RankTable, TrainingPass, part};

impl RankTable<'_> {
    /// Beside `weights` as passes read them and `flight`: the backward of conjugate gradients, as `training` counts it; their passes
    /// without gradients, which have the weights as they were in the place of the gradient that is summed; and the search along
    /// the step, which has a vector, the weights as they were and the policy before the step, whole on every rank.
    pub(super) fn trust_phases(
        &self,
        weights: &MemoryPart,
        flight: &MemoryPart,
        training: impl Fn(TrainingPass) -> Vec<MemoryPart>,
    ) -> Vec<Vec<MemoryPart>> {
        let i = self.i;
        let Some(region) = i.updates.trust_region else { return Vec::new() };
        let fraction = (region.fisher_share * i.micro_tokens() as f64).ceil() as usize;
        let sp = self.l.sp;
        let work = |tokens: usize| memory::forward_work(&i.config, tokens.div_ceil(sp), self.e);
        // Whole weights keep their gradient's memory.
        let slots = usize::from(!self.l.splits());
        let vectors = |count: usize| {
            let what = format!("{} vectors of the weights' shape, {}", count + slots, self.over());
            part("gradients", self.split(4 * self.numbers(count + slots)), what)
        };
        let old = part("reference", i.resident(&i.config) as usize, "the policy before the step, whole");
        // The KL reads the hidden states of both.
        let both = work(i.micro_tokens()) + 2 * i.micro_tokens().div_ceil(sp) * i.config.hidden * self.e;
        let passes = |bytes: usize| part("activations", bytes, "passes");
        let conjugate = vec![weights.clone(), flight.clone(), vectors(i.vectors()), passes(work(fraction))];
        let search = vec![weights.clone(), flight.clone(), vectors(2), old, passes(both)];
        let with_cache = |phase: Vec<MemoryPart>| phase.into_iter().chain(self.idle_cache()).collect();
        let products = training(TrainingPass { tokens: fraction, vectors: i.vectors() });
        [conjugate, search].map(with_cache).into_iter().chain([products]).collect()
    }
}

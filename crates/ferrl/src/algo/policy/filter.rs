//! Filters of groups and completions, and the soft overlong penalty.

use super::Policy;
use crate::experience::{Experience, Metrics, Sequence};
use crate::refill::rewards_differ;
use std::collections::BTreeMap;

impl Policy {
    /// Removes groups whose rewards are all equal.
    pub(super) fn drop_equal_groups(&self, e: &mut Experience, metrics: &mut Metrics) {
        let mut groups: BTreeMap<usize, Vec<&Sequence>> = BTreeMap::new();
        for s in &e.sequences {
            groups.entry(s.group).or_default().push(s);
        }
        let dropped: Vec<usize> = groups
            .iter()
            .filter(|(_, g)| !rewards_differ(g, self.advantage.parts))
            .map(|(&g, _)| g)
            .collect();
        metrics.add("dynamic_filtering_ratio", dropped.len() as f64 / groups.len().max(1) as f64);
        e.sequences.retain(|s| dropped.binary_search(&s.group).is_err());
    }

    /// Soft overlong penalty (Yu et al., 2025): 0 up to `length * (1 - overlong)` tokens, then growing linearly to 1 at
    /// `length`.
    pub(super) fn penalise_overlong(&self, e: &mut Experience, metrics: &mut Metrics) {
        let limit = self.length as f64;
        let free = limit * (1.0 - self.overlong);
        for members in e.trajectories() {
            let tokens = e.sequences[members[0]].trajectory_tokens as f64;
            let penalty = ((tokens - free) / (limit - free)).clamp(0.0, 1.0) as f32;
            metrics.add("rewards/overlong/mean", -penalty as f64);
            members.iter().for_each(|&s| e.sequences[s].sources.push((1.0, Some(-penalty))));
            let last = members.iter().rev().find_map(|&s| Some((s, e.sequences[s].actions().last()?)));
            if let Some((s, i)) = last {
                e.sequences[s].reward[i] -= penalty;
            }
        }
    }

    /// Removes truncated completions from the loss, after they have counted in baselines.
    pub(super) fn drop_truncated(&self, e: &mut Experience, metrics: &mut Metrics) {
        let before = e.sequences.len();
        e.sequences.retain(|s| !s.truncated);
        if before > 0 {
            metrics.add("truncated_filtering_ratio", 1.0 - e.sequences.len() as f64 / before as f64);
        }
    }
}

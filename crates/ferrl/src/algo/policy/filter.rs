//! What is not learned from, and what is marked down for its length.

use super::Policy;
use crate::experience::{Experience, Metrics, Sequence};
use std::collections::BTreeMap;

impl Policy {
    /// Whether the answers of a group got different rewards; a lone answer has nothing to differ from. With
    /// `advantage.parts` one source that tells them apart is enough, even where the sums are equal.
    pub(super) fn differs(&self, group: &[&Sequence]) -> bool {
        let mut answers: BTreeMap<usize, Vec<Option<f64>>> = BTreeMap::new();
        for s in group {
            let own = answers.entry(s.trajectory).or_insert_with(|| vec![Some(0.0)]);
            own[0] = own[0].map(|sum| sum + s.total_reward());
            if self.advantage.parts && own.len() == 1 {
                own.extend(s.sources.iter().map(|&(_, reward)| reward.map(f64::from)));
            }
        }
        // With parts the sum says nothing: equal sums may hide a trade.
        let from = usize::from(self.advantage.parts && !group.iter().all(|s| s.sources.is_empty()));
        let mut rewards = answers.values().map(|a| &a[from..]);
        let first = rewards.next();
        answers.len() < 2 || rewards.any(|r| Some(r) != first)
    }

    /// Leaves out groups that teach nothing.
    pub(super) fn drop_equal_groups(&self, e: &mut Experience, metrics: &mut Metrics) {
        let mut groups: BTreeMap<usize, Vec<&Sequence>> = BTreeMap::new();
        for s in &e.sequences {
            groups.entry(s.group).or_default().push(s);
        }
        let dropped: Vec<usize> = groups.iter().filter(|(_, g)| !self.differs(g)).map(|(&g, _)| g).collect();
        metrics.add("dynamic_filtering_ratio", dropped.len() as f64 / groups.len().max(1) as f64);
        e.sequences.retain(|s| dropped.binary_search(&s.group).is_err());
    }

    /// Soft punishment of length (Yu et al., 2025): none up to `length * (1 - overlong)` tokens, from there on growing
    /// evenly to 1 at the limit.
    pub(super) fn punish_overlong(&self, e: &mut Experience, metrics: &mut Metrics) {
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

    /// Leaves out answers that were cut off, after the others have been compared with them.
    pub(super) fn drop_truncated(&self, e: &mut Experience, metrics: &mut Metrics) {
        let before = e.sequences.len();
        e.sequences.retain(|s| !s.truncated);
        if before > 0 {
            metrics.add("truncated_filtering_ratio", 1.0 - e.sequences.len() as f64 / before as f64);
        }
    }
}

//! Dynamic sampling: more prompts in place of those whose completions have no learning signal.
//!
//! What a step learns from is a function of the prompts' order alone: whole groups are taken in that order until enough of
//! them have a signal; groups sampled beyond the last of them are dropped.

use crate::experience::{Experience, Sequence};
use std::collections::BTreeMap;

/// How often more prompts are drawn, and what counts as a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refill {
    /// Further rounds, at most.
    pub rounds: usize,
    /// Whether rewards are compared source by source.
    pub per_source: bool,
}

/// Whether the completions of a group got different rewards; a lone completion counts as different. With `per_source`
/// one source that differs is enough: equal sums may hide a trade between sources.
pub fn rewards_differ(group: &[&Sequence], per_source: bool) -> bool {
    let mut completions: BTreeMap<usize, Vec<Option<f64>>> = BTreeMap::new();
    for s in group {
        let own = completions.entry(s.trajectory).or_insert_with(|| vec![Some(0.0)]);
        own[0] = own[0].map(|sum| sum + s.total_reward());
        if per_source && own.len() == 1 {
            own.extend(s.sources.iter().map(|&(_, reward)| reward.map(f64::from)));
        }
    }
    let from = usize::from(per_source && !group.iter().all(|s| s.sources.is_empty()));
    let mut rewards = completions.values().map(|c| &c[from..]);
    let first = rewards.next();
    completions.len() < 2 || rewards.any(|r| Some(r) != first)
}

impl Refill {
    /// For each group in order, whether it has a signal.
    fn signals(&self, e: &Experience) -> Vec<(usize, bool)> {
        let mut groups: BTreeMap<usize, Vec<&Sequence>> = BTreeMap::new();
        for s in &e.sequences {
            groups.entry(s.group).or_default().push(s);
        }
        groups
            .into_iter()
            .map(|(group, members)| (group, rewards_differ(&members, self.per_source)))
            .collect()
    }

    /// How many more prompts to draw so that `wanted` groups have a signal; `None` where they do. The missing number
    /// over the fraction with a signal so far.
    pub fn missing(&self, e: &Experience, wanted: usize) -> Option<usize> {
        let groups = self.signals(e);
        let useful = groups.iter().filter(|g| g.1).count();
        let fraction = useful.max(1) as f64 / groups.len().max(1) as f64;
        (useful < wanted).then(|| (((wanted - useful) as f64 / fraction).ceil() as usize).clamp(1, wanted))
    }

    /// Removes everything after the group that completes the `wanted` ones.
    pub fn cut(&self, e: &mut Experience, wanted: usize) {
        let last = self.signals(e).into_iter().filter(|g| g.1).nth(wanted.saturating_sub(1));
        if let Some((last, _)) = last {
            e.sequences.retain(|s| s.group <= last);
        }
    }
}

//! Process supervision of a group (Shao et al., DeepSeekMath, 2024, arXiv 2402.03300, section 4.1.3).
//!
//! The rewards of all steps of all completions to a prompt are normalised together, `r~ = (r - mean) / (std + eps)`, the
//! division with `divide_by_std`. A token's advantage is the sum of the normalised rewards of its own step and those after
//! it. A completion without rewards of steps is one step; a source's reward of the whole completion and a KL penalty in the reward
//! belong to the step of their token.

use super::Policy;
use crate::algo::math::advantage::EPSILON;
use crate::algo::math::mean_std;
use crate::experience::{Experience, Sequence};
use std::collections::BTreeMap;
use std::ops::Range;

/// A step: index of its sequence, range of the sequence's actions, reward.
type RewardedStep = (usize, Range<usize>, f64);

impl Policy {
    /// Sets each token's advantage to the sum of the normalised rewards of its step and the steps after it.
    pub(super) fn process_advantages(&self, e: &mut Experience) {
        let mut groups: BTreeMap<usize, Vec<Vec<RewardedStep>>> = BTreeMap::new();
        for members in e.trajectories() {
            let of = |&s: &usize| steps_of(&e.sequences[s]).into_iter().map(move |(at, r)| (s, at, r));
            let steps = members.iter().flat_map(of).collect();
            groups.entry(e.sequences[members[0]].group).or_default().push(steps);
        }
        for trajectories in groups.into_values() {
            let rewards: Vec<f64> = trajectories.iter().flatten().map(|step| step.2).collect();
            let (mean, std) = mean_std(&rewards);
            let scale = if self.advantage.divide_by_std { 1.0 / (std + EPSILON) } else { 1.0 };
            for steps in trajectories {
                let mut from_here = 0.0;
                for (s, at, reward) in steps.into_iter().rev() {
                    from_here = (reward - mean) * scale + self.advantage.gamma * from_here;
                    let actions: Vec<usize> = e.sequences[s].actions().collect();
                    actions[at].iter().for_each(|&i| e.sequences[s].advantage[i] = from_here as f32);
                }
            }
        }
    }
}

/// The steps of a sequence, as ranges of its actions, each with the sum of the rewards in it.
fn steps_of(s: &Sequence) -> Vec<(Range<usize>, f64)> {
    let at: Vec<usize> = s.actions().collect();
    let mut ends: Vec<usize> = s.steps.iter().map(|end| at.partition_point(|i| i <= end)).collect();
    ends.push(at.len());
    ends.dedup();
    let mut from = 0;
    let step = |end: usize| {
        let range = from..end;
        from = end;
        let reward = at[range.clone()].iter().map(|&i| f64::from(s.reward[i])).sum();
        (range, reward)
    };
    ends.into_iter().map(step).filter(|(range, _)| !range.is_empty()).collect()
}

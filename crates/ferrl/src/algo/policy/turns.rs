//! Return batch normalisation, ReBN (Liu et al., GEM: A Gym for Agentic LLMs, 2025, arXiv 2510.01051).
//!
//! A turn's return is `G_t = r_t + gamma G_(t+1)`, discounted once per turn. Every token of the turn has the advantage
//! `G_t - mean`, divided by `std + 1e-9` with `divide_by_std`; mean and standard deviation are over all turns of the rollout, not
//! weighted by length. A turn is a contiguous run of sampled tokens of one sequence.

use super::Policy;
use crate::algo::math::mean_std;
use crate::experience::{Experience, Sequence};
use std::ops::Range;

/// Added to the standard deviation of the returns, as in GEM.
const EPSILON: f64 = 1e-9;

impl Policy {
    /// Advantages of turns: returns normalised over all turns of the rollout.
    pub(super) fn turn_advantages(&self, e: &mut Experience) {
        let mut turns: Vec<(usize, Range<usize>, f64)> = Vec::new();
        for members in e.trajectories() {
            let mut from_here = 0.0;
            for s in members.into_iter().rev() {
                let sequence = &e.sequences[s];
                for turn in turns_of(sequence).into_iter().rev() {
                    let own: f64 = sequence.reward[turn.clone()].iter().map(|&r| f64::from(r)).sum();
                    from_here = own + self.advantage.gamma * from_here;
                    turns.push((s, turn, from_here));
                }
            }
        }
        let returns: Vec<f64> = turns.iter().map(|t| t.2).collect();
        let (mean, std) = mean_std(&returns);
        let scale = if self.advantage.divide_by_std { 1.0 / (std + EPSILON) } else { 1.0 };
        for (s, turn, from_here) in turns {
            e.sequences[s].advantage[turn].fill(((from_here - mean) * scale) as f32);
        }
    }
}

/// The runs of positions that predict sampled tokens, in order.
fn turns_of(s: &Sequence) -> Vec<Range<usize>> {
    let mut turns: Vec<Range<usize>> = Vec::new();
    for i in s.actions() {
        match turns.last_mut() {
            Some(turn) if turn.end == i => turn.end += 1,
            _ => turns.push(i..i + 1),
        }
    }
    turns
}

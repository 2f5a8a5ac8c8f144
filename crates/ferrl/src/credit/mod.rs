//! Credit of the steps of a completion, from Monte-Carlo values of the states between them (VinePPO; Kazemnejad et al.,
//! 2024, arXiv 2410.01679).
//!
//! A completion of `n` steps passes the states `s_0` (the prompt) to `s_n` (its end). `V(s_i)` is the mean reward of
//! continuations that the policy samples from `s_i`; `V(s_n) = 0`. The only reward is the completion's, at its last step.
//! States beyond the cap are back-filled from the end, `V(s_i) = r_i + V(s_(i+1))`, which makes the advantage of their
//! steps 0. The advantage of step `i` is `r_i + V(s_(i+1)) - V(s_i)`; the advantages of a completion add up to its reward
//! minus the value of its prompt.

mod episodes;
pub mod rows;
pub(crate) mod split;
mod vine;

pub use split::StepSplit;
pub use vine::Vine;
pub(crate) use vine::{Continuations, credit};

use serde::{Deserialize, Serialize};

/// The steps of a completion with everything that their advantages were computed from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCredit {
    /// Texts of the steps; they join to the completion.
    pub steps: Vec<String>,
    /// The completion's reward.
    pub score: f64,
    /// Rewards of the continuations of each estimated state, the prompt first.
    pub rollouts: Vec<Vec<f64>>,
    /// Maximum number of states after the prompt whose value is estimated.
    pub max_steps: usize,
    /// Value of every state, the prompt's first and that of the end (0) last.
    pub values: Vec<f64>,
    /// Advantage of every step.
    pub advantages: Vec<f64>,
}

/// States whose values are estimated: the prompt and at most `max_steps` more, never the end.
pub fn estimated_states(steps: usize, max_steps: usize) -> usize {
    steps.min(max_steps.saturating_add(1))
}

/// The value of a state: the mean reward of its continuations, 0 without any.
pub fn mean(rewards: &[f64]) -> f64 {
    match rewards.len() {
        0 => 0.0,
        n => rewards.iter().sum::<f64>() / n as f64,
    }
}

/// Values of all `steps + 1` states and advantages of the steps, from the estimated values of the first states.
pub fn advantages(steps: usize, score: f64, estimated: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let reward = |i: usize| if i + 1 == steps { score } else { 0.0 };
    let known = estimated.len().min(steps);
    let mut values = vec![0.0; steps + 1];
    values[..known].copy_from_slice(&estimated[..known]);
    for i in (known..steps).rev() {
        values[i] = reward(i) + values[i + 1];
    }
    let advantages = (0..steps).map(|i| reward(i) + values[i + 1] - values[i]).collect();
    (values, advantages)
}

/// Rewards of steps from the value of each prefix: what a step adds to it. They add up to the value of the last.
pub fn gains(values: &[f64]) -> Vec<f64> {
    let mut before = 0.0;
    let gain = |&value: &f64| {
        let gain = value - before;
        before = value;
        gain
    };
    values.iter().map(gain).collect()
}

/// Adaptive number of continuations: `start` at first, then `add` more while the 95 % confidence interval of the mean is wider than
/// `threshold` and there are fewer than `max`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Continuations at first.
    pub start: usize,
    /// Continuations added at a time.
    pub add: usize,
    /// Maximum number of continuations.
    pub max: usize,
    /// Target width of the interval.
    pub threshold: f64,
}

impl Interval {
    /// Whether more continuations are needed.
    pub fn wants_more(&self, rewards: &[f64]) -> bool {
        interval_width(rewards) > self.threshold && rewards.len() < self.max
    }

    /// How many of these rewards, drawn in their order, would have been used.
    pub fn used(&self, rewards: &[f64]) -> usize {
        let mut used = self.start.min(rewards.len());
        while used < rewards.len() && self.wants_more(&rewards[..used]) {
            used = (used + self.add.max(1)).min(rewards.len());
        }
        used
    }
}

/// Width of the 95 % confidence interval of the mean of 0/1 rewards: `2 * 1.96 * sqrt(p (1 - p) / n)`. Rewards outside
/// 0 to 1 have no such interval: 0.
pub fn interval_width(rewards: &[f64]) -> f64 {
    if rewards.is_empty() {
        return 0.0;
    }
    let p = mean(rewards);
    2.0 * (1.96 * (p * (1.0 - p) / rewards.len() as f64).max(0.0).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advantages_telescope_to_the_reward_minus_the_value_of_the_prompt() {
        for steps in 1..12usize {
            for cap in [0, 1, 3, 25] {
                let states = estimated_states(steps, cap);
                assert_eq!(states, 1 + (steps - 1).min(cap));
                let estimated: Vec<f64> = (0..states).map(|i| ((i * 7 + steps) % 10) as f64 / 9.0).collect();
                for score in [0.0, 1.0, 0.3] {
                    let (values, a) = advantages(steps, score, &estimated);
                    assert_eq!((values.len(), a.len()), (steps + 1, steps));
                    assert_eq!(values[steps], 0.0);
                    assert!((a.iter().sum::<f64>() - (score - values[0])).abs() < 1e-12);
                    // A back-filled state is worth what the completion got, so its step has no advantage.
                    assert!(a[states..].iter().all(|a| *a == 0.0));
                }
            }
        }
    }

    #[test]
    fn the_papers_example_by_hand() {
        // Three steps, estimates 0.5, 0.25, 1; the completion is right.
        let (values, a) = advantages(3, 1.0, &[0.5, 0.25, 1.0]);
        assert_eq!((values, a), (vec![0.5, 0.25, 1.0, 0.0], vec![-0.25, 0.75, 0.0]));
        // A cap of one state after the prompt: the third is back-filled with the reward.
        let (values, a) = advantages(3, 1.0, &[0.5, 0.25]);
        assert_eq!((values, a), (vec![0.5, 0.25, 1.0, 0.0], vec![-0.25, 0.75, 0.0]));
    }

    #[test]
    fn gains_of_values_add_up_to_the_last() {
        assert_eq!(gains(&[0.5, 0.25, 1.0]), [0.5, -0.25, 0.75]);
        assert!(gains(&[]).is_empty());
    }

    #[test]
    fn a_confidence_interval_stops_at_ten_where_all_agree_and_at_thirty_otherwise() {
        let rule = Interval { start: 10, add: 4, max: 30, threshold: 0.05 };
        assert_eq!(rule.used(&[1.0; 30]), 10);
        assert_eq!(rule.used(&[0.0; 40]), 10);
        let mixed: Vec<f64> = (0..40).map(|i| f64::from(i % 3 == 0)).collect();
        assert_eq!(rule.used(&mixed), 30);
        let loose = |threshold| Interval { threshold, ..rule };
        assert_eq!(loose(0.61).used(&mixed), 10, "4 of 10 right: 0.607");
        assert_eq!(loose(0.60).used(&mixed), 14, "5 of 14 right: 0.502");
        assert!((interval_width(&mixed[..10]) - 2.0 * 1.96 * (0.4f64 * 0.6 / 10.0).sqrt()).abs() < 1e-15);
        assert_eq!(interval_width(&[2.0, 3.0]), 0.0);
    }
}

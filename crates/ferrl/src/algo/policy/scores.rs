//! Scaling and clipping of a completion's reward before anything is computed from it, as TRL's PPO and VinePPO do.

use crate::algo::math::moments::Moments;
use crate::experience::Experience;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Scaling and clipping of rewards by moments over all rollouts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scores {
    /// Divide by the running standard deviation.
    pub scale: bool,
    /// Subtract the running mean first.
    pub centre: bool,
    /// Clip the result to the range from minus this to this. (0, 1000000]
    pub clip: Option<f64>,
}

impl Scores {
    /// Scales and clips the reward of every completion; a standard deviation of 0 does not divide.
    pub fn apply(&self, e: &mut Experience, moments: &mut Moments) {
        if *self == Scores::default() {
            return;
        }
        let trajectories = e.trajectories();
        let sum = |e: &Experience, t: &[usize]| t.iter().map(|&s| e.sequences[s].total_reward()).sum::<f64>();
        let totals: Vec<f64> = trajectories.iter().map(|t| sum(e, t)).collect();
        if self.scale {
            moments.update(&totals);
        }
        let factor = match moments.std() {
            std if self.scale && std > 0.0 => 1.0 / std,
            _ => 1.0,
        };
        for (t, total) in trajectories.iter().zip(totals) {
            let centred = if self.centre { total - moments.mean } else { total };
            let wanted = self.clip.map_or(centred * factor, |clip| (centred * factor).clamp(-clip, clip));
            for &s in t {
                e.sequences[s].reward.iter_mut().for_each(|r| *r *= factor as f32);
            }
            // Rewards of turns are scaled too; the difference made by centring and clipping is added at the end.
            let last = t.iter().rev().find_map(|&s| Some((s, e.sequences[s].actions().last()?)));
            if let Some((s, i)) = last {
                e.sequences[s].reward[i] = 0.0;
                e.sequences[s].reward[i] = (wanted - sum(e, t)) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experience::Sequence;

    fn rollout(rewards: &[f32]) -> Experience {
        let one = |(trajectory, &r): (usize, &f32)| {
            let (ids, trained) = (vec![0; 4], vec![false, true, true, true]);
            Sequence { ids, trained, trajectory, ..Default::default() }.rewarded(r)
        };
        Experience { sequences: rewards.iter().enumerate().map(one).collect() }
    }

    fn totals(e: &Experience) -> Vec<f64> {
        e.sequences.iter().map(Sequence::total_reward).collect()
    }

    #[test]
    fn scores_are_scaled_by_everything_seen_so_far() {
        let scores = Scores { scale: true, centre: true, clip: Some(1.0) };
        let (mut moments, mut first) = (Moments::default(), rollout(&[1.0, 3.0]));
        scores.apply(&mut first, &mut moments);
        let half = 0.5f64.sqrt();
        assert!(totals(&first).iter().zip([-half, half]).all(|(a, b)| (a - b).abs() < 1e-6));
        let mut second = rollout(&[2.0, 10.0]);
        scores.apply(&mut second, &mut moments);
        assert_eq!((moments.count, moments.mean), (4.0, 4.0));
        let std = (50.0f64 / 3.0).sqrt();
        assert!((totals(&second)[0] - (2.0 - 4.0) / std).abs() < 1e-6);
        assert_eq!(totals(&second)[1], 1.0, "clipped");
    }

    #[test]
    fn equal_scores_are_not_divided_and_the_default_changes_nothing() {
        let (mut moments, mut e) = (Moments::default(), rollout(&[2.0, 2.0]));
        Scores::default().apply(&mut e, &mut moments);
        assert_eq!((totals(&e), moments), (vec![2.0, 2.0], Moments::default()));
        Scores { scale: true, ..Default::default() }.apply(&mut e, &mut moments);
        assert_eq!(totals(&e), [2.0, 2.0]);
        Scores { clip: Some(0.5), ..Default::default() }.apply(&mut e, &mut moments);
        assert_eq!(totals(&e), [0.5, 0.5]);
    }
}

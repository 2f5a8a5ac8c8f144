//! From rewards to advantages, over all data of a step.

use super::{Baseline, KlPlacement, Policy};
use crate::algo::math::advantage::{EPSILON, Normalise, centre, gae};
use crate::algo::math::mean_std;
use crate::experience::{Experience, Metrics};
use std::collections::BTreeMap;

impl Policy {
    /// Fills `advantage`, `target_value` and `correction` with the current KL coefficient; `moving` is the moving-average
    /// baseline.
    pub fn prepare(&self, e: &mut Experience, kl_coef: f64, moving: &mut Option<f64>) -> Metrics {
        let mut metrics = Metrics::default();
        if self.filter_equal {
            self.drop_equal_groups(e, &mut metrics);
        }
        if self.overlong > 0.0 {
            self.penalise_overlong(e, &mut metrics);
        }
        for s in &mut e.sequences {
            let n = s.ids.len();
            if s.old_logp.is_empty() {
                s.old_logp = s.sampled_logp.clone();
            }
            let at: Vec<usize> = s.actions().collect();
            let pick = |c: &[f32]| at.iter().map(|&i| c[i]).collect::<Vec<f32>>();
            let weights = self.correction.weights(&pick(&s.old_logp), &pick(&s.sampled_logp));
            s.correction = vec![0.0; n];
            s.advantage = vec![0.0; n];
            s.target_value = vec![0.0; n];
            let importance = s.importance.unwrap_or(1.0);
            at.iter().zip(weights).for_each(|(&i, w)| s.correction[i] = w * importance);
            if self.uses_reference() {
                let mut total = 0.0;
                let estimates = self.kl.estimates(&pick(&s.old_logp), &pick(&s.ref_logp)).0;
                for (&i, kl) in at.iter().zip(estimates) {
                    total += kl;
                    if self.kl.place == KlPlacement::Reward {
                        s.reward[i] -= (kl_coef * kl) as f32;
                    }
                }
                metrics.add_weighted("kl", total / at.len().max(1) as f64, at.len() as f64);
                metrics.add("objective/kl", total);
            }
        }
        match self.advantage.baseline {
            Baseline::Critic => self.critic_advantages(e),
            Baseline::Steps => e.sequences.iter_mut().for_each(|s| s.advantage.copy_from_slice(&s.credit)),
            Baseline::Process => self.process_advantages(e),
            Baseline::Turns => self.turn_advantages(e),
            _ if self.advantage.parts => self.part_advantages(e),
            _ => self.return_advantages(e, moving),
        }
        if self.uses_reference() && self.kl.place == KlPlacement::Advantage {
            for s in &mut e.sequences {
                let at: Vec<usize> = s.actions().collect();
                let pick = |c: &[f32]| at.iter().map(|&i| c[i]).collect::<Vec<f32>>();
                let estimates = self.kl.estimates(&pick(&s.old_logp), &pick(&s.ref_logp)).0;
                at.iter().zip(estimates).for_each(|(&i, kl)| s.advantage[i] -= (kl_coef * kl) as f32);
            }
        }
        self.normalise(e);
        if self.mask_truncated {
            self.drop_truncated(e, &mut metrics);
        }
        metrics
    }

    /// Advantages of returns: `(return - baseline) * scale`.
    fn return_advantages(&self, e: &mut Experience, moving: &mut Option<f64>) {
        let trajectories = e.trajectories();
        let returns: Vec<f64> =
            trajectories.iter().map(|t| t.iter().map(|&s| e.sequences[s].total_reward()).sum()).collect();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let by_group = matches!(self.advantage.baseline, Baseline::Group | Baseline::Others);
        for (i, t) in trajectories.iter().enumerate() {
            let group = if by_group { e.sequences[t[0]].group } else { 0 };
            groups.entry(group).or_default().push(i);
        }
        let before = *moving;
        if self.advantage.baseline == Baseline::Moving && !returns.is_empty() {
            let (mean, keep) = (mean_std(&returns).0, self.advantage.decay);
            *moving = Some(before.map_or(mean, |b| keep * b + (1.0 - keep) * mean));
        }
        for members in groups.into_values() {
            let own: Vec<f64> = members.iter().map(|&i| returns[i]).collect();
            let (mean, std) = mean_std(&own);
            let (n, sum) = (own.len() as f64, own.iter().sum::<f64>());
            let scale = if self.advantage.divide_by_std { 1.0 / (std + EPSILON) } else { 1.0 };
            for (&i, &whole) in members.iter().zip(&own) {
                let baseline = match self.advantage.baseline {
                    Baseline::Others if n > 1.0 => (sum - whole) / (n - 1.0),
                    Baseline::Moving => before.unwrap_or(mean),
                    Baseline::None => 0.0,
                    _ => mean,
                };
                self.credit(e, &trajectories[i], |from_here| {
                    let gain = if self.advantage.to_go { from_here } else { whole };
                    (gain - baseline) * scale
                });
            }
        }
    }

    /// Sets the advantage of each action of a trajectory to a function of the discounted rewards from it on.
    fn credit(&self, e: &mut Experience, members: &[usize], advantage: impl Fn(f64) -> f64) {
        let mut from_here = 0.0;
        for &s in members.iter().rev() {
            let s = &mut e.sequences[s];
            for i in s.actions().collect::<Vec<_>>().into_iter().rev() {
                from_here = s.reward[i] as f64 + self.advantage.gamma * from_here;
                s.advantage[i] = advantage(from_here) as f32;
            }
        }
    }

    /// The weighted sum of rewards, each normalised by its mean (and standard deviation) in the group.
    fn part_advantages(&self, e: &mut Experience) {
        let trajectories = e.trajectories();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, t) in trajectories.iter().enumerate() {
            groups.entry(e.sequences[t[0]].group).or_default().push(i);
        }
        let parts: Vec<Vec<(f64, Option<f64>)>> = trajectories.iter().map(|t| parts(e, t)).collect();
        for members in groups.into_values() {
            let mut total = vec![0.0; members.len()];
            for part in 0..parts[members[0]].len() {
                // A completion without a reward of this source is not part of its statistics.
                let own: Vec<Option<f64>> = members.iter().map(|&i| parts[i][part].1).collect();
                let given: Vec<f64> = own.iter().copied().flatten().collect();
                let weight = parts[members[0]][part].0;
                let centred = centre(&given, self.advantage.divide_by_std);
                let scored = total.iter_mut().zip(&own).filter(|(_, own)| own.is_some());
                scored.zip(centred).for_each(|((t, _), c)| *t += weight * c);
            }
            for (&i, a) in members.iter().zip(total) {
                self.credit(e, &trajectories[i], |_| a);
            }
        }
    }

    /// Generalised advantage estimation over the actions of each trajectory, all its sequences in order.
    fn critic_advantages(&self, e: &mut Experience) {
        for members in e.trajectories() {
            let at: Vec<(usize, usize)> = members
                .iter()
                .flat_map(|&s| e.sequences[s].actions().map(move |i| (s, i)).collect::<Vec<_>>())
                .collect();
            let rewards: Vec<f32> = at.iter().map(|&(s, i)| e.sequences[s].reward[i]).collect();
            let values: Vec<f32> = at.iter().map(|&(s, i)| e.sequences[s].old_value[i]).collect();
            let last = &e.sequences[members[members.len() - 1]];
            let after = if last.bootstrap { last.old_value.last().copied().unwrap_or(0.0) } else { 0.0 };
            let advantages = gae(&rewards, &values, after, self.advantage.gamma, self.advantage.lambda);
            for ((&(s, i), a), v) in at.iter().zip(advantages).zip(values) {
                e.sequences[s].advantage[i] = a;
                e.sequences[s].target_value[i] = a + v;
            }
        }
    }

    fn normalise(&self, e: &mut Experience) {
        let at: Vec<(usize, usize)> = (0..e.sequences.len())
            .flat_map(|s| e.sequences[s].actions().map(move |i| (s, i)).collect::<Vec<_>>())
            .collect();
        let mut all: Vec<f64> = at.iter().map(|&(s, i)| e.sequences[s].advantage[i] as f64).collect();
        match self.advantage.normalise {
            Normalise::Answers => {
                let mean = |t: &Vec<usize>| {
                    let sum: f64 = t.iter().map(|&s| e.sequences[s].sum(&e.sequences[s].advantage)).sum();
                    sum / e.sequences[t[0]].trajectory_tokens.max(1) as f64
                };
                let answers: Vec<f64> = e.trajectories().iter().map(mean).collect();
                let (mean, std) = mean_std(&answers);
                all.iter_mut().for_each(|a| *a = (*a - mean) / (std + EPSILON));
            }
            over_tokens => over_tokens.apply(&mut all),
        }
        at.iter().zip(all).for_each(|(&(s, i), a)| e.sequences[s].advantage[i] = a as f32);
    }
}

/// Weight and reward of each source; a reward without sources counts as one source.
fn parts(e: &Experience, trajectory: &[usize]) -> Vec<(f64, Option<f64>)> {
    let sources = &e.sequences[trajectory[0]].sources;
    if sources.is_empty() {
        return vec![(1.0, Some(trajectory.iter().map(|&s| e.sequences[s].total_reward()).sum()))];
    }
    sources.iter().map(|&(weight, reward)| (weight as f64, reward.map(f64::from))).collect()
}

//! What the policy-gradient methods share: KL placement, advantages, the token loss, the critic's loss.
//!
//! Each method's file says which settings make it and what it changes; the arithmetic is here, once.

use super::math::advantage::{Normalise, centre, gae};
use super::math::aggregate::Aggregate;
use super::math::correction::Correction;
use super::math::kl::Estimator;
use super::math::{mean_std, surrogate};
use crate::experience::{Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::train::{ByRole, Role, StatGrads, Stats};
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Settings of a policy-gradient method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Probability ratios are clipped below `1 - clip_low`.
    pub clip_low: f64,
    /// Probability ratios are clipped above `1 + clip_high`.
    pub clip_high: f64,
    /// How token losses are averaged.
    pub aggregate: Aggregate,
    /// The fixed length of `aggregate = "constant"`; a recipe fills in its generation limit.
    pub length: usize,
    /// Weight of the entropy bonus.
    pub entropy_coef: f64,
    /// The penalty for leaving the reference.
    pub kl: Kl,
    /// How advantages come from rewards.
    pub advantage: Advantage,
    /// Importance weights for tokens of an older policy.
    pub correction: Correction,
    /// The critic's loss.
    pub critic: Critic,
    /// Passes over each rollout.
    pub epochs: usize,
    /// Updates in each pass.
    pub minibatches: usize,
    /// An update whose mean probability ratio exceeds this is skipped.
    pub skip_ratio: Option<f64>,
    /// Updates at the start that train the critic alone.
    pub critic_warmup: u64,
    /// Leave out groups whose rewards are all equal; a step where all are makes no update.
    pub filter_equal: bool,
}

/// The penalty for leaving the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Kl {
    /// Its weight; 0 needs no reference.
    pub coef: f64,
    /// Where it is felt.
    pub place: Place,
    /// How it is estimated.
    pub estimator: Estimator,
    /// Steer the weight so that the KL per trajectory stays near this.
    pub target: Option<f64>,
    /// Trajectories over which the steering acts.
    pub horizon: f64,
}

/// Where the KL penalty is felt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// Subtracted from each token's reward.
    Reward,
    /// Added to each token's loss.
    Loss,
    /// Subtracted from each token's advantage.
    Advantage,
}

/// How advantages come from rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Advantage {
    /// What the return is compared with.
    pub baseline: Baseline,
    /// Divide by the deviation of the group (or batch) too.
    pub divide_by_std: bool,
    /// Normalisation over all action tokens of the rollout, afterwards.
    pub normalise: Normalise,
    /// Discount.
    pub gamma: f64,
    /// Trace decay of the critic's advantages.
    pub lambda: f64,
}

/// What a return is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Baseline {
    /// The mean of the answers to the same prompt.
    Group,
    /// The mean of all answers of the rollout.
    Batch,
    /// The critic, by generalised advantage estimation.
    Critic,
}

/// The critic's loss: `coef * max((V - R)^2, (clip(V) - R)^2)`, halved or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Critic {
    /// Its weight.
    pub coef: f64,
    /// The value may move this far from what it was; `None` lets it.
    pub clip: Option<f64>,
    /// Half the square (OpenAI, TRL) or the square (RL2).
    pub half: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            clip_low: 0.2,
            clip_high: 0.2,
            aggregate: Aggregate::Token,
            length: 0,
            entropy_coef: 0.0,
            kl: Kl::default(),
            advantage: Advantage::default(),
            correction: Correction::default(),
            critic: Critic::default(),
            epochs: 1,
            minibatches: 1,
            skip_ratio: None,
            critic_warmup: 0,
            filter_equal: false,
        }
    }
}

impl Default for Kl {
    fn default() -> Self {
        Kl { coef: 0.0, place: Place::Loss, estimator: Estimator::K3, target: None, horizon: 10_000.0 }
    }
}

impl Default for Advantage {
    fn default() -> Self {
        Advantage {
            baseline: Baseline::Group,
            divide_by_std: false,
            normalise: Normalise::None,
            gamma: 1.0,
            lambda: 1.0,
        }
    }
}

impl Default for Critic {
    fn default() -> Self {
        Critic { coef: 1.0, clip: Some(0.5), half: false }
    }
}

impl Policy {
    /// Refuses settings that cannot learn.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str, fix: &str| Err(Error::usage(what).at("algo").fix(fix));
        if !(self.clip_low > 0.0 && self.clip_low <= 1.0 && self.clip_high > 0.0) {
            return bad(
                "clip_low must lie in (0, 1] and clip_high above 0",
                "clip_low = 0.2, clip_high = 0.2",
            );
        }
        if self.epochs == 0 || self.minibatches == 0 {
            return bad("epochs and minibatches must be at least 1", "epochs = 1");
        }
        if self.kl.coef < 0.0 || self.kl.horizon <= 0.0 {
            return bad("kl.coef must not be negative and kl.horizon above 0", "kl.coef = 0.001");
        }
        if self.kl.target.is_some() && self.kl.coef == 0.0 {
            return bad("kl.target steers kl.coef, which is 0", "a kl.coef to start from, such as 0.05");
        }
        if self.aggregate == Aggregate::Constant && self.length == 0 {
            return bad("aggregate = \"constant\" needs a length", "length = the generation limit");
        }
        if self.skip_ratio.is_some() && self.epochs * self.minibatches == 1 {
            return bad(
                "skip_ratio has nothing to skip with one update per rollout",
                "epochs = 2, or no skip_ratio",
            );
        }
        Ok(())
    }

    /// Whether a frozen reference is needed.
    pub fn uses_reference(&self) -> bool {
        self.kl.coef > 0.0
    }

    /// Fills `advantage`, `target_value` and `correction`, with the KL weight in force.
    pub fn prepare(&self, e: &mut Experience, kl_coef: f64) -> Metrics {
        let mut metrics = Metrics::default();
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
            at.iter().zip(weights).for_each(|(&i, w)| s.correction[i] = w);
            if self.uses_reference() {
                let mut total = 0.0;
                for &i in &at {
                    let kl = self.kl.estimator.value(s.old_logp[i], s.ref_logp[i]);
                    total += kl;
                    if self.kl.place == Place::Reward {
                        s.reward[i] -= (kl_coef * kl) as f32;
                    }
                }
                metrics.add_weighted("kl", total / at.len().max(1) as f64, at.len() as f64);
                metrics.add("objective/kl", total);
            }
        }
        match self.advantage.baseline {
            Baseline::Critic => self.critic_advantages(e),
            _ => self.return_advantages(e),
        }
        if self.uses_reference() && self.kl.place == Place::Advantage {
            for s in &mut e.sequences {
                for i in s.actions().collect::<Vec<_>>() {
                    s.advantage[i] -=
                        (kl_coef * self.kl.estimator.value(s.old_logp[i], s.ref_logp[i])) as f32;
                }
            }
        }
        self.normalise(e);
        metrics
    }

    /// A trajectory's whole return against the mean of its group or of the batch, the same for all its tokens.
    fn return_advantages(&self, e: &mut Experience) {
        let trajectories = e.trajectories();
        let returns: Vec<f64> =
            trajectories.iter().map(|t| t.iter().map(|&s| e.sequences[s].total_reward()).sum()).collect();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, t) in trajectories.iter().enumerate() {
            let group = if self.advantage.baseline == Baseline::Group { e.sequences[t[0]].group } else { 0 };
            groups.entry(group).or_default().push(i);
        }
        for members in groups.into_values() {
            let own: Vec<f64> = members.iter().map(|&i| returns[i]).collect();
            for (&i, a) in members.iter().zip(centre(&own, self.advantage.divide_by_std)) {
                for &s in &trajectories[i] {
                    let s = &mut e.sequences[s];
                    s.actions().collect::<Vec<_>>().into_iter().for_each(|p| s.advantage[p] = a as f32);
                }
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
            let advantages = gae(&rewards, &values, self.advantage.gamma, self.advantage.lambda);
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
        self.advantage.normalise.apply(&mut all);
        at.iter().zip(all).for_each(|(&(s, i), a)| e.sequences[s].advantage[i] = a as f32);
    }

    /// The clipped surrogate with entropy bonus and KL, and the critic's loss where there is one.
    pub fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>, kl_coef: f64) -> Loss {
        let policy = stats.get(Role::Policy).expect("the policy was computed");
        let n = batch.len();
        let mut grads = Loss::zeros(n);
        if self.entropy_coef != 0.0 {
            grads.entropy = vec![0.0; n];
        }
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for (row, s) in batch.rows() {
            let w = self.aggregate.weight(s, &batch.counts, self.length);
            for i in s.actions() {
                let (logp, entropy) = (policy.logp[row + i], policy.entropy[row + i] as f64);
                let t =
                    surrogate::clipped(logp, s.old_logp[i], s.advantage[i], self.clip_low, self.clip_high);
                let c = s.correction[i] as f64;
                let (mut loss, mut slope) = (c * t.loss, c * t.slope);
                if kl_coef > 0.0 && self.kl.place == Place::Loss {
                    loss += kl_coef * self.kl.estimator.value(logp, s.ref_logp[i]);
                    slope += kl_coef * self.kl.estimator.slope(logp, s.ref_logp[i]);
                }
                value += w * (loss - self.entropy_coef * entropy);
                grads.logp[row + i] = (w * slope) as f32;
                if self.entropy_coef != 0.0 {
                    grads.entropy[row + i] = (-w * self.entropy_coef) as f32;
                }
                metrics.add("entropy", entropy);
                metrics.add("policy/ratio", t.ratio);
                metrics.add("clip_ratio/low_mean", f64::from(t.clipped_low));
                metrics.add("clip_ratio/high_mean", f64::from(t.clipped_high));
                metrics.add("clip_ratio/region_mean", f64::from(t.clipped_low || t.clipped_high));
            }
        }
        let mut by_role = ByRole::default();
        if self.advantage.baseline == Baseline::Critic {
            let own = stats.get(Role::Critic);
            let (loss, dvalue) = self.critic_loss(batch, &own.unwrap_or(policy).value, &mut metrics);
            value += loss;
            if own.is_some() {
                let critic = StatGrads { value: dvalue, ..Default::default() };
                by_role.set(Role::Critic, critic);
            } else {
                grads.value = dvalue;
            }
        }
        by_role.set(Role::Policy, grads);
        Loss { value, grads: by_role, metrics }
    }

    fn critic_loss(&self, batch: &MicroBatch<'_>, values: &[f32], metrics: &mut Metrics) -> (f64, Vec<f32>) {
        let mut grads = vec![0.0; batch.len()];
        let mut total = 0.0;
        let scale = self.critic.coef * if self.critic.half { 0.5 } else { 1.0 };
        for (row, s) in batch.rows() {
            let w = scale * self.aggregate.weight(s, &batch.counts, self.length);
            for i in s.actions() {
                let (v, old, target) =
                    (values[row + i] as f64, s.old_value[i] as f64, s.target_value[i] as f64);
                let free = v - target;
                let held = self.critic.clip.map_or(v, |c| v.clamp(old - c, old + c)) - target;
                let clipped = held * held > free * free;
                let error = if clipped { held } else { free };
                total += w * error * error;
                // Where the clipped error is the larger, it does not depend on the value.
                grads[row + i] = if clipped { 0.0 } else { (2.0 * w * free) as f32 };
                metrics.add("value/clip_ratio", f64::from(clipped));
                metrics.add("value/error", free * free);
            }
        }
        (total, grads)
    }
}

/// The KL weight, steered towards a target where there is one (Ziegler et al., 2019, arXiv 1909.08593).
#[derive(Clone, Debug, PartialEq)]
pub struct KlWeight {
    /// In force now.
    pub coef: f64,
}

impl KlWeight {
    /// After a rollout with this mean KL per trajectory.
    pub fn steer(&mut self, settings: &Kl, kl: f64, trajectories: f64) {
        if let Some(target) = settings.target {
            let error = (kl / target - 1.0).clamp(-0.2, 0.2);
            self.coef *= 1.0 + error * trajectories / settings.horizon;
        }
    }
}

/// Leaves out groups of several answers whose rewards are all equal: nothing can be learned from comparing them.
pub fn drop_equal_groups(e: &mut Experience, metrics: &mut Metrics) {
    let mut groups: BTreeMap<usize, BTreeMap<usize, f64>> = BTreeMap::new();
    for s in &e.sequences {
        *groups.entry(s.group).or_default().entry(s.trajectory).or_default() += s.total_reward();
    }
    let equal = |rewards: &BTreeMap<usize, f64>| {
        let mut values = rewards.values();
        let first = values.next().copied().unwrap_or(0.0);
        rewards.len() > 1 && values.all(|&r| r == first)
    };
    let dropped: Vec<usize> = groups.iter().filter(|(_, r)| equal(r)).map(|(&g, _)| g).collect();
    metrics.add("dynamic_filtering_ratio", dropped.len() as f64 / groups.len().max(1) as f64);
    e.sequences.retain(|s| dropped.binary_search(&s.group).is_err());
}

/// Marks of a rollout's rewards, under TRL's names.
pub fn reward_metrics(e: &Experience, metrics: &mut Metrics) {
    let trajectories = e.trajectories();
    let mut groups: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for t in &trajectories {
        let total: f64 = t.iter().map(|&s| e.sequences[s].total_reward()).sum();
        groups.entry(e.sequences[t[0]].group).or_default().push(total);
        metrics.add("reward", total);
        for (name, part) in &e.sequences[t[0]].components {
            metrics.add(&format!("rewards/{name}/mean"), *part as f64);
        }
    }
    for rewards in groups.values() {
        let (_, std) = mean_std(rewards);
        metrics.add("reward_std", std);
        metrics.add("frac_reward_zero_std", f64::from(std == 0.0));
    }
}

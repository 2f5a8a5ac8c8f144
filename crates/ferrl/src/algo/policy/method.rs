//! A method made of the shared settings alone.

use super::{Baseline, Kl, Place, Policy};
use crate::algo::math::mean_std;
use crate::algo::{Algorithm, Needs, settings};
use crate::experience::{Experience, Loss, Metrics, MicroBatch, Sequence};
use ferrl_engine::train::{ByRole, Stats};
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A method whose loss is the shared token loss: its defaults, overridden by the recipe.
pub fn method(name: &'static str, defaults: Policy, values: Value) -> Result<Box<dyn Algorithm>> {
    let policy: Policy = settings(name, merged(json!(defaults), values))?;
    policy.check()?;
    Ok(Box::new(Method::new(policy)))
}

/// Defaults, overridden by a recipe's values.
pub fn merged(mut base: Value, over: Value) -> Value {
    overlay(&mut base, over);
    base
}

fn overlay(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                overlay(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (base, over) => *base = over,
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

/// Policy gradient with the shared token loss.
pub struct Method {
    policy: Policy,
    kl: KlWeight,
    /// The moving baseline, once there was a rollout.
    moving: Option<f64>,
}

impl Method {
    /// With settings that were checked.
    pub fn new(policy: Policy) -> Self {
        let kl = KlWeight { coef: policy.kl.coef };
        Method { policy, kl, moving: None }
    }
}

impl Algorithm for Method {
    fn needs(&self) -> Needs {
        let p = &self.policy;
        let compares = matches!(p.advantage.baseline, Baseline::Group | Baseline::Others);
        Needs {
            reference: p.uses_reference(),
            critic: p.advantage.baseline == Baseline::Critic,
            group: if compares { 2 } else { 1 },
            ..Default::default()
        }
    }

    fn prepare(&mut self, experience: &mut Experience) -> Result<Metrics> {
        let mut metrics = Metrics::default();
        reward_metrics(experience, &mut metrics);
        metrics.join(self.policy.prepare(experience, self.kl.coef, &mut self.moving));
        if let Some(kl) = metrics.get("objective/kl") {
            self.kl.steer(&self.policy.kl, kl, experience.trajectories().len() as f64);
            metrics.add("kl_coef", self.kl.coef);
        }
        Ok(metrics)
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        self.policy.loss(batch, stats, self.kl.coef)
    }

    fn passes(&self) -> (usize, usize) {
        (self.policy.epochs, self.policy.minibatches)
    }

    fn policy_frozen_steps(&self) -> u64 {
        self.policy.critic_warmup
    }

    fn learns_nothing(&self, experience: &Experience) -> bool {
        let p = &self.policy;
        let by_loss = self.kl.coef > 0.0 && p.kl.place == Place::Loss;
        let other_terms = by_loss || p.entropy_coef != 0.0 || p.advantage.baseline == Baseline::Critic;
        let zero = |s: &Sequence| s.advantage.iter().all(|a| *a == 0.0);
        !other_terms && experience.sequences.iter().all(zero)
    }

    fn skip_ratio(&self) -> Option<f64> {
        self.policy.skip_ratio
    }

    fn refills(&self) -> usize {
        self.policy.refills
    }

    fn teaches(&self, group: &[&Sequence]) -> bool {
        !self.policy.filter_equal || self.policy.differs(group)
    }

    fn state(&self) -> Value {
        json!({ "kl_coef_bits": self.kl.coef.to_bits(), "moving_bits": self.moving.map(f64::to_bits) })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let bits = state["kl_coef_bits"].as_u64();
        let bits = bits.ok_or_else(|| Error::data("the algorithm's state has no kl_coef_bits"))?;
        self.kl.coef = f64::from_bits(bits);
        self.moving = state["moving_bits"].as_u64().map(f64::from_bits);
        Ok(())
    }
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

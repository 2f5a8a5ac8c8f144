//! Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347) with a critic, as used for language models by
//! Ouyang et al. (2022, arXiv 2203.02155).
//!
//! Reward per token: `-β k1(old, ref)`, plus the task's reward at the last token. Advantages by generalised advantage
//! estimation, whitened over all action tokens. Loss: the token mean of `-min(ρ A, clip(ρ) A)`, and for the critic the
//! token mean of `max((V - R)^2, (clip(V, V_old ± c) - R)^2)`.
//!
//! Differences from the paper:
//! 1. γ = λ = 1 by default: the task's reward comes at the end.
//! 2. The critic's square is not halved unless `critic.half = true`.
//! 3. One pass over each rollout by default; `epochs` and `minibatches` give the original's several.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Baseline, Kl, KlWeight, Place, Policy, drop_equal_groups, reward_metrics};
use super::{Algorithm, Entry, Needs, Wants, settings};
use crate::experience::{Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::train::{ByRole, Stats};
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "ppo",
    about: "proximal policy optimisation with a critic",
    paper: "Schulman et al., Proximal Policy Optimization Algorithms, 2017, arXiv 1707.06347",
    wants: Wants::Rollouts,
    defaults: || json!(defaults()),
    build,
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.05, place: Place::Reward, estimator: Estimator::K1, ..Default::default() };
    let advantage =
        Advantage { baseline: Baseline::Critic, normalise: Normalise::Whiten, ..Default::default() };
    Policy { kl, advantage, ..Default::default() }
}

fn build(values: Value) -> Result<Box<dyn Algorithm>> {
    gradient_method("ppo", defaults(), values)
}

/// A method whose loss is the shared token loss: its defaults, overridden by the recipe.
pub(super) fn gradient_method(
    name: &'static str,
    defaults: Policy,
    values: Value,
) -> Result<Box<dyn Algorithm>> {
    let mut merged = serde_json::to_value(&defaults).expect("settings are plain values");
    overlay(&mut merged, values);
    let policy: Policy = settings(name, merged)?;
    policy.check()?;
    let kl = KlWeight { coef: policy.kl.coef };
    Ok(Box::new(GradientMethod { policy, kl }))
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

/// Policy gradient with the shared token loss.
struct GradientMethod {
    policy: Policy,
    kl: KlWeight,
}

impl Algorithm for GradientMethod {
    fn needs(&self) -> Needs {
        let p = &self.policy;
        let group = if p.advantage.baseline == Baseline::Group { 2 } else { 1 };
        Needs {
            reference: p.uses_reference(),
            critic: p.advantage.baseline == Baseline::Critic,
            group,
            ..Default::default()
        }
    }

    fn prepare(&mut self, experience: &mut Experience) -> Result<Metrics> {
        let mut metrics = Metrics::default();
        reward_metrics(experience, &mut metrics);
        if self.policy.filter_equal {
            drop_equal_groups(experience, &mut metrics);
        }
        metrics.join(self.policy.prepare(experience, self.kl.coef));
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

    fn skip_ratio(&self) -> Option<f64> {
        self.policy.skip_ratio
    }

    fn state(&self) -> Value {
        json!({ "kl_coef_bits": self.kl.coef.to_bits() })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let bits = state["kl_coef_bits"].as_u64();
        let bits = bits.ok_or_else(|| Error::data("the algorithm's state has no kl_coef_bits"))?;
        self.kl.coef = f64::from_bits(bits);
        Ok(())
    }
}

//! A policy-gradient method that consists of the shared settings alone.

use super::{Baseline, Kl, Policy};
use crate::algo::math::kl::Estimator;
use crate::algo::math::mean_std;
use crate::algo::math::moments::Moments;
use crate::algo::{Algorithm, Needs, Prepared, Refusal, UpdatePlan, no_step_values, settings};
use crate::credit::Vine;
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::train::Stats;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// With one completion per prompt and a baseline within the group.
pub const NOTHING_TO_COMPARE: Refusal = Refusal {
    key: "rollout.samples",
    why: "needs several completions per prompt: the baseline is their mean",
    fix: "rollout.samples = 8, or algo.advantage.baseline = \"batch\"",
};
const NOTHING_TO_FILTER: Refusal = Refusal {
    key: "algo.filter_equal",
    why: "drops groups whose rewards are all equal, which groups of one completion always are",
    fix: "rollout.samples = 8, or algo.filter_equal = false",
};
const OWN_MEAN: Refusal = Refusal {
    key: "algo.advantage.baseline",
    why: "subtracts the mean of the batch, so that with one completion every advantage is 0",
    fix: "rollout.prompts = 32",
};
const RANDOM_REFERENCE: Refusal = Refusal {
    key: "algo.kl.coef",
    why: "has a KL penalty, which would regularise the policy towards a random model (model.init)",
    fix: "algo.kl.coef = 0, or an SFT stage before this one",
};

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

/// The KL coefficient, adapted towards a target KL if one is set (Ziegler et al., 2019, arXiv 1909.08593).
#[derive(Clone, Debug, PartialEq)]
pub struct KlWeight {
    pub coef: f64,
}

impl KlWeight {
    /// Adapts the coefficient after a rollout with this mean KL per trajectory.
    pub fn adapt(&mut self, settings: &Kl, kl: f64, trajectories: f64) {
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
    /// The moving-average baseline, after the first rollout.
    moving: Option<f64>,
    /// Moments of the rewards so far, for scaling.
    moments: Moments,
}

impl Method {
    /// A method with checked settings.
    pub fn new(policy: Policy) -> Self {
        let kl = KlWeight { coef: policy.kl.coef };
        Method { policy, kl, moving: None, moments: Moments::default() }
    }
}

impl Algorithm for Method {
    fn needs(&self) -> Needs {
        let p = &self.policy;
        let compares = matches!(p.advantage.baseline, Baseline::Group | Baseline::Others | Baseline::Process);
        Needs {
            reference: p.uses_reference(),
            full_kl: p.uses_reference() && p.kl.estimator == Estimator::Full,
            critic: p.advantage.baseline == Baseline::Critic,
            group: if compares { 2 } else { 1 },
            one_per_prompt: match compares {
                true => Some(NOTHING_TO_COMPARE),
                false => p.filter_equal.then_some(NOTHING_TO_FILTER),
            },
            one_per_step: matches!(p.advantage.baseline, Baseline::Batch | Baseline::Turns)
                .then_some(OWN_MEAN),
            random_reference: p.uses_reference().then_some(RANDOM_REFERENCE),
            ..Default::default()
        }
    }

    fn prepare(&mut self, experience: &mut Experience) -> Result<Prepared> {
        let mut metrics = Metrics::default();
        if self.vine().is_some() && experience.sequences.iter().any(|s| s.credit.len() != s.ids.len()) {
            return Err(no_step_values(
                "values of steps need sampled completions, but the rows contain theirs",
            ));
        }
        reward_metrics(experience, &mut metrics);
        self.policy.scores.apply(experience, &mut self.moments);
        metrics.join(self.policy.prepare(experience, self.kl.coef, &mut self.moving));
        if let Some(kl) = metrics.get("objective/kl") {
            self.kl.adapt(&self.policy.kl, kl, experience.trajectories().len() as f64);
            metrics.add("kl_coef", self.kl.coef);
        }
        Ok(Prepared { metrics, no_signal: self.policy.no_signal(experience, self.kl.coef) })
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        self.policy.loss(batch, stats, self.kl.coef)
    }

    fn updates(&self) -> UpdatePlan {
        self.policy.updates()
    }

    fn vine(&self) -> Option<&Vine> {
        (self.policy.advantage.baseline == Baseline::Steps).then_some(&self.policy.vine)
    }

    fn state(&self) -> Value {
        let mut state =
            json!({ "kl_coef_bits": self.kl.coef.to_bits(), "moving_bits": self.moving.map(f64::to_bits) });
        if self.moments != Moments::default() {
            let Moments { count, mean, square } = self.moments;
            state["moments_bits"] = json!([count, mean, square].map(f64::to_bits));
        }
        state
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let bits = state["kl_coef_bits"].as_u64();
        let bits = bits.ok_or_else(|| Error::data("the algorithm's state has no kl_coef_bits"))?;
        self.kl.coef = f64::from_bits(bits);
        self.moving = state["moving_bits"].as_u64().map(f64::from_bits);
        let moment = |i: usize| state["moments_bits"][i].as_u64().map_or(0.0, f64::from_bits);
        self.moments = Moments { count: moment(0), mean: moment(1), square: moment(2) };
        Ok(())
    }
}

/// Metrics of a rollout's rewards, with TRL's names.
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

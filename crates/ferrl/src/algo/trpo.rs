//! TRPO, trust region policy optimisation (Schulman et al., 2015, arXiv 1502.05477).
//!
//! Maximise `E[ρ A]` while the mean of `KL(old || new)` stays within `delta`: `x = (F + damping I)^-1 g` by conjugate
//! gradients, with `g` the gradient of the surrogate and `F` the Fisher matrix; a line search shortens the step
//! `sqrt(2 delta / x·(F + damping I)x) x` until the surrogate has improved and the KL is within `delta`.
//!
//! Differences from the paper:
//! 1. `F v = J^T (J v) / n`, with `J` the gradients of the sampled tokens' log-probabilities (the empirical Fisher matrix). `J v` is a
//!    central difference, `J^T u` one backward pass; there are no second derivatives. Only in f32.
//! 2. The bound is on the mean over tokens of the KL over the whole vocabulary, not on an estimate of it.
//! 3. `F` uses the fraction `fisher_share` of the completions, spread evenly over the rollout.
//! 4. Advantages are GRPO's by default; `advantage.baseline = "critic"` is the paper's. The critic is a separate model, trained by
//!    the optimizer, `critic_updates` times on each rollout.
//! 5. The policy does not use the learning rate of `optim`: `delta` determines the size of a step.

use super::math::aggregate::Aggregate;
use super::math::kl::Estimator;
use super::math::surrogate::Surrogate;
use super::metrics::{CRITIC, EQUAL, REFERENCE, REWARDED, SURROGATE, TRUST};
use super::policy::{Advantage, Baseline, Critic, Kl, Method, Policy, merged};
use super::{Algorithm, Entry, Feed, Needs, Prepared, UpdatePlan, schema_for, settings};
use crate::credit::Vine;
use crate::experience::{ByRole, Experience, Loss, MicroBatch};
use crate::trust_region::TrustRegion;
use ferrl_engine::train::Stats;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "trpo",
    about: "trust region policy optimisation: natural gradient steps within a bound on the KL",
    paper: "Schulman et al., Trust Region Policy Optimization, 2015, arXiv 1502.05477",
    source: include_str!("trpo.rs"),
    feed: Feed::Rollouts,
    metrics: &[REWARDED, SURROGATE, REFERENCE, CRITIC, EQUAL, TRUST],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build,
};

with_defaults! {
struct Options {
    /// Trust region: maximum mean KL per token of an update. (0, 100]
    delta: f64 = 0.01,
    /// Damping: added to the diagonal of the Fisher matrix. (0, 1000]
    damping: f64 = 0.1,
    /// Conjugate-gradient iterations. [1, 1000]
    cg_steps: usize = 10,
    /// Fraction of the completions used to estimate the Fisher matrix. (0, 1]
    fisher_share: f64 = 0.25,
    /// Line search: factor that shortens a rejected step. (0, 1)
    shrink: f64 = 0.8,
    /// Line search: maximum number of steps before the update is skipped. [1, 1000]
    tries: usize = 10,
    /// Updates of the critic on each rollout, if there is a critic. [1, 1000]
    critic_updates: usize = 10,
    /// Aggregation of token losses.
    aggregate: Aggregate = Aggregate::Token,
    /// Fixed length of `aggregate = "constant"`; `rollout.max_new_tokens` by default. [0, 1048576]
    length: usize = 0,
    /// Entropy bonus coefficient. [-10, 10]
    entropy_coef: f64 = 0.0,
    /// KL penalty towards the reference.
    kl: Kl = Kl::default(),
    /// Advantage estimation.
    advantage: Advantage = Advantage { divide_by_std: true, ..Default::default() },
    /// Value loss of the critic.
    critic: Critic = Critic::default(),
    /// Drop groups whose rewards are all equal.
    filter_equal: bool = false,
}
}

fn build(values: Value) -> Result<Box<dyn Algorithm>> {
    let o: Options = settings("trpo", merged(json!(Options::default()), values))?;
    let region = TrustRegion {
        delta: o.delta,
        damping: o.damping,
        cg_steps: o.cg_steps,
        fisher_share: o.fisher_share,
        shrink: o.shrink,
        tries: o.tries,
        critic_updates: if o.advantage.baseline == Baseline::Critic { o.critic_updates } else { 0 },
    };
    let policy = Policy {
        surrogate: Surrogate::Ratio,
        aggregate: o.aggregate,
        length: o.length,
        entropy_coef: o.entropy_coef,
        kl: o.kl,
        advantage: o.advantage,
        critic: o.critic,
        filter_equal: o.filter_equal,
        ..Default::default()
    };
    policy.check()?;
    if policy.kl.estimator == Estimator::Full {
        return Err(Error::usage("the line search needs a KL estimate by sampled tokens")
            .at("algo (trpo).kl.estimator")
            .fix("algo.kl.estimator = \"k3\""));
    }
    Ok(Box::new(Trpo { method: Method::new(policy), region }))
}

struct Trpo {
    method: Method,
    region: TrustRegion,
}

impl Algorithm for Trpo {
    fn needs(&self) -> Needs {
        Needs { f32: true, ..self.method.needs() }
    }
    fn prepare(&mut self, experience: &mut Experience) -> Result<Prepared> {
        self.method.prepare(experience)
    }
    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        self.method.loss(batch, stats)
    }
    fn updates(&self) -> UpdatePlan {
        UpdatePlan { trust_region: Some(self.region), ..self.method.updates() }
    }
    fn vine(&self) -> Option<&Vine> {
        self.method.vine()
    }
    fn state(&self) -> Value {
        self.method.state()
    }
    fn restore(&mut self, state: &Value) -> Result<()> {
        self.method.restore(state)
    }
}

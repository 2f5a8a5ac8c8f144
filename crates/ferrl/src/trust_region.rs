//! TRPO's update: the direction by conjugate gradients on Fisher-vector products, the length by a line search within a bound on
//! the KL.
//!
//! `F v = J^T (J v) / n` over the sampled tokens, with `J` the gradients of their log-probabilities by the weights. `J v` is
//! a central difference of log-probabilities along `v`, `J^T u` one backward with `u` as the gradient of the
//! log-probabilities. The engine hands out vectors of the weights' shape without saying what is in them.

use crate::batch::tokens;
use crate::experience::{ByRole, Metrics, MicroBatch, Role};
use crate::ranks::{Teams, each};
use crate::train::{LossParts, Stage};
use ferrl_engine::model::Model;
use ferrl_engine::train::{Batch, ModelTrainer, ParamVector, StatGrads, Stats, kl};
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;

/// How far an update may go, and how it is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrustRegion {
    /// The most that the mean KL per token may be afterwards.
    pub delta: f64,
    /// Added to the Fisher matrix's diagonal.
    pub damping: f64,
    /// Iterations of the conjugate gradients.
    pub cg_steps: usize,
    /// Fraction of the sequences that the Fisher matrix is estimated with.
    pub fisher_share: f64,
    /// A step that fails is shortened by this factor.
    pub shrink: f64,
    /// Steps tried before the update is given up.
    pub tries: usize,
    /// Updates of the critic; 0 without one.
    pub critic_updates: usize,
}

/// The root mean square of log-probability changes that a central difference aims at: far above rounding, far below
/// curvature.
const WANTED_CHANGE: f64 = 1e-2;
/// Changes that are good enough.
const USABLE_CHANGE: std::ops::Range<f64> = 2e-3..5e-2;
/// How often the length of the difference is adjusted for one product.
const ADJUSTMENTS: usize = 4;

/// The Fisher matrix of the sampled tokens of some batches, damped, as something that multiplies vectors.
pub struct Fisher<'a> {
    batches: &'a [Batch],
    ranks: &'a Ranks,
    damping: f64,
    /// How far the weights are moved for a difference, in the vector's norm; kept from product to product.
    reach: f64,
}

impl<'a> Fisher<'a> {
    /// Over the scored tokens of the batches, which these ranks share.
    pub fn new(batches: &'a [Batch], ranks: &'a Ranks, damping: f64) -> Self {
        Fisher { batches, ranks, damping, reach: 1e-2 }
    }

    /// `(F + damping I) v`
    pub fn times(&mut self, t: &mut ModelTrainer, v: &ParamVector) -> Result<ParamVector> {
        let along = self.along(t, v)?;
        let count = self.batches.iter().map(scored).sum::<usize>().max(1);
        t.zero_grads();
        t.prepare()?;
        let teams = Teams::of(self.ranks, &t.model);
        for (i, (batch, along)) in self.batches.iter().zip(along).enumerate() {
            if teams.owns(i) {
                let logp = along.iter().map(|d| (d / count as f64) as f32).collect();
                let grads = StatGrads { logp, ..Default::default() };
                teams.in_step(|| t.forward(batch).and_then(|_| t.backward(batch, &grads)))?;
            }
            if teams.ends_round(i, self.batches.len()) {
                idle(t, &teams, i)?;
                t.add_round(self.ranks)?;
            }
        }
        t.gather_gradient(self.ranks)?;
        let mut product = t.take_gradient()?;
        t.axpy(self.damping as f32, v, &mut product)?;
        Ok(product)
    }

    /// `J v`: how each token's log-probability changes along `v`.
    fn along(&mut self, t: &mut ModelTrainer, v: &ParamVector) -> Result<Vec<Vec<f64>>> {
        let norm = t.dot(v, v)?.sqrt();
        if norm == 0.0 {
            return Ok(self.batches.iter().map(|b| vec![0.0; b.tokens()]).collect());
        }
        for attempt in 0.. {
            let eps = self.reach / norm;
            let (up, down) = (self.logps(t, eps, v)?, self.logps(t, -eps, v)?);
            let half = |(u, d): (&f32, &f32)| 0.5 * (*u as f64 - *d as f64);
            let change: Vec<Vec<f64>> =
                up.iter().zip(&down).map(|(u, d)| u.iter().zip(d).map(half).collect()).collect();
            let count = self.batches.iter().map(scored).sum::<usize>().max(1) as f64;
            let rms = (change.iter().flatten().map(|c| c * c).sum::<f64>() / count).sqrt();
            if USABLE_CHANGE.contains(&rms) || attempt == ADJUSTMENTS {
                return Ok(change.into_iter().map(|c| c.into_iter().map(|x| x / eps).collect()).collect());
            }
            self.reach *= (WANTED_CHANGE / rms.max(1e-12)).clamp(1e-2, 1e2);
        }
        unreachable!("the last attempt returns")
    }

    fn logps(&self, t: &mut ModelTrainer, eps: f64, v: &ParamVector) -> Result<Vec<Vec<f32>>> {
        t.perturbed(eps as f32, v, |t| {
            each(&Teams::of(self.ranks, &t.model), self.batches, |b| Ok(t.stats(b)?.logp))
        })
    }
}

/// The passes of a batch, for a rank that has none in the round that batch `i` ends.
fn idle(t: &mut ModelTrainer, teams: &Teams<'_>, i: usize) -> Result<()> {
    if teams.sits_out(i) {
        t.idle_forward()?;
        t.idle_backward()?;
    }
    Ok(())
}

fn scored(batch: &Batch) -> usize {
    let of = |s: &ferrl_engine::train::BatchSequence| s.scored.iter().skip(1).filter(|&&s| s).count();
    batch.sequences.iter().map(of).sum()
}

/// `x` with `(F + damping I) x = b`, nearly, and `x · (F + damping I) x`.
pub fn conjugate_gradients(
    t: &mut ModelTrainer,
    fisher: &mut Fisher<'_>,
    b: &ParamVector,
    steps: usize,
) -> Result<(ParamVector, f64)> {
    let (mut x, mut r, mut p) = (t.vector()?, t.vector()?, t.vector()?);
    t.axpy(1.0, b, &mut r)?;
    t.axpy(1.0, b, &mut p)?;
    let start = t.dot(&r, &r)?;
    let mut rr = start;
    for _ in 0..steps {
        // Enough: differences do not carry more digits than this.
        if rr <= 1e-8 * start {
            break;
        }
        let product = fisher.times(t, &p)?;
        let curvature = t.dot(&p, &product)?;
        if curvature <= 0.0 {
            break;
        }
        let a = rr / curvature;
        t.axpy(a as f32, &p, &mut x)?;
        t.axpy(-a as f32, &product, &mut r)?;
        drop(product);
        let next = t.dot(&r, &r)?;
        let mut turned = t.vector()?;
        t.axpy(1.0, &r, &mut turned)?;
        t.axpy((next / rr) as f32, &p, &mut turned)?;
        (p, rr) = (turned, next);
    }
    // What is left of b is r, so the product of x needs no further pass.
    let curvature = t.dot(&x, b)? - t.dot(&x, &r)?;
    Ok((x, curvature))
}

/// Statistics of each batch, where this rank computed them.
type KnownStats = Vec<Option<ByRole<Stats>>>;

/// One update of a stage's policy, and of its critic if it has one.
pub fn update(stage: &mut Stage, batches: &[MicroBatch<'_>], region: TrustRegion) -> Result<Metrics> {
    let mut metrics = Metrics::default();
    let one = batches.first().map_or(1.0, MicroBatch::temperature);
    if batches.iter().any(|b| b.temperature() != one) {
        return Err(Error::data("a trust region compares completions that were sampled at one temperature")
            .fix("give the stage either rows with completions or prompts to sample from, not both"));
    }
    stage.policy.temperature = one;
    let (before, stats) = gradients(stage, batches, &mut metrics)?;
    metrics.add("loss", before);
    let gradient = stage.policy.take_gradient()?;
    critic_updates(stage, batches, &stats, region.critic_updates, &mut metrics)?;
    let norm = stage.policy.dot(&gradient, &gradient)?.sqrt();
    metrics.add("grad_norm", norm);
    if !norm.is_finite() {
        return Err(Error::numerics("the gradient is not finite; the weights were not changed")
            .fix("look at the rewards and advantages of this step"));
    }
    if norm == 0.0 {
        metrics.add("updates/skipped", 1.0);
        return Ok(metrics);
    }
    let mut downhill = stage.policy.vector()?;
    stage.policy.axpy(-1.0, &gradient, &mut downhill)?;
    drop(gradient); // each of these vectors is as large as all weights
    let sample = spread(batches, region.fisher_share);
    let ranks = stage.ranks.clone();
    let mut fisher = Fisher::new(&sample, &ranks, region.damping);
    let (x, curvature) = conjugate_gradients(&mut stage.policy, &mut fisher, &downhill, region.cg_steps)?;
    drop(downhill);
    if curvature <= 0.0 {
        metrics.add("updates/skipped", 1.0);
        return Ok(metrics);
    }
    let longest = (2.0 * region.delta / curvature).sqrt();
    stage.policy.model.backend.trim(); // what the vectors had would lie beside the copy
    let old = stage.policy.model.frozen_copy()?;
    let mut step = longest;
    for attempt in 1..=region.tries {
        let (after, divergence) = measure(stage, batches, &stats, &old, step, &x)?;
        if after < before && divergence <= region.delta {
            stage.policy.shift(step as f32, &x)?;
            metrics.add("trust/kl", divergence);
            metrics.add("trust/improvement", before - after);
            metrics.add("trust/tries", attempt as f64);
            metrics.add("trust/step", step / longest);
            return Ok(metrics);
        }
        step *= region.shrink;
    }
    metrics.add("updates/skipped", 1.0);
    Ok(metrics)
}

/// The loss, its gradients (added up in policy and critic), and the statistics it was computed from, of this rank's batches.
fn gradients(
    stage: &mut Stage,
    batches: &[MicroBatch<'_>],
    metrics: &mut Metrics,
) -> Result<(f64, KnownStats)> {
    let (mut parts, mut all) = (LossParts::default(), Vec::new());
    let ranks = stage.ranks.clone();
    let teams = Teams::of(&ranks, &stage.policy.model);
    stage.policy.zero_grads();
    for (i, batch) in batches.iter().enumerate() {
        let mut known = None;
        if teams.owns(i) {
            known = Some(teams.in_step(|| {
                let (stats, mut seen) = (stage.forward_only(batch)?, Metrics::default());
                stage.compare_logps(batch, &stats, &mut seen)?;
                let loss = stage.algo.loss(batch, &stats);
                stage.backward(batch, &loss.grads)?;
                parts.add(seen, loss);
                Ok(stats)
            })?);
        }
        all.push(known);
        stage.add_round(i, batches.len())?;
    }
    Ok((parts.sum(&teams, metrics)?, all))
}

/// The critic's updates; the gradient of the first is there already.
fn critic_updates(
    stage: &mut Stage,
    batches: &[MicroBatch<'_>],
    stats: &[Option<ByRole<Stats>>],
    count: usize,
    metrics: &mut Metrics,
) -> Result<()> {
    let (rate, ranks) = (stage.schedules.1.at(stage.step), &stage.ranks);
    let Some(critic) = &mut stage.critic else { return Ok(()) };
    let teams = Teams::of(ranks, &stage.policy.model);
    for n in 0..count {
        critic.prepare()?;
        for (i, (batch, stats)) in batches.iter().zip(stats).enumerate().filter(|_| n > 0) {
            if let Some(stats) = stats {
                teams.in_step(|| {
                    let (tokens, mut now) = (tokens(batch.sequences.iter().copied()), stats.clone());
                    now.set(Role::Critic, critic.forward(&tokens)?);
                    let loss = stage.algo.loss(batch, &now);
                    let missing = || Error::numerics("the loss gives no gradient for the critic");
                    critic.backward(&tokens, loss.grads.get(Role::Critic).ok_or_else(missing)?)
                })?;
            }
            if teams.ends_round(i, batches.len()) {
                idle(critic, &teams, i)?;
                critic.add_round(ranks)?;
            }
        }
        critic.gather_gradient(ranks)?;
        metrics.add("critic/grad_norm", critic.update(rate)?.grad_norm);
    }
    Ok(())
}

/// The loss and the mean KL(old || new) with the weights moved by `step` times `x`; the critic stays out of it.
fn measure(
    stage: &mut Stage,
    batches: &[MicroBatch<'_>],
    stats: &[Option<ByRole<Stats>>],
    old: &Model,
    step: f64,
    x: &ParamVector,
) -> Result<(f64, f64)> {
    let (algo, ranks) = (&stage.algo, &stage.ranks);
    let batches: Vec<_> = batches.iter().zip(stats).collect();
    stage.policy.perturbed(step as f32, x, |t| {
        let parts = each(&Teams::of(ranks, &t.model), &batches, |(batch, stats)| {
            let (tokens, mut now) =
                (tokens(batch.sequences.iter().copied()), (*stats).clone().unwrap_or_default());
            now.set(Role::Policy, t.stats(&tokens)?);
            let value = algo.loss(batch, &now).value;
            let divergence = kl(old, &t.model, &tokens, t.temperature)?;
            let sum = divergence.iter().map(|&d| d as f64).sum::<f64>();
            Ok((value, sum, scored(&tokens) as f64))
        })?;
        let (mut value, mut sum, mut count) = (0.0, 0.0, 0.0);
        for part in parts {
            (value, sum, count) = (value + part.0, sum + part.1, count + part.2);
        }
        Ok((value, sum / count.max(1.0)))
    })
}

/// A fraction of the sequences, evenly from all of them, cut as the batches are.
fn spread(batches: &[MicroBatch<'_>], share: f64) -> Vec<Batch> {
    let (mut seen, mut out) = (0usize, Vec::new());
    for batch in batches {
        let mut some = tokens(batch.sequences.iter().copied());
        some.sequences.retain(|_| {
            seen += 1;
            (seen as f64 * share).floor() > ((seen - 1) as f64 * share).floor()
        });
        if !some.sequences.is_empty() {
            out.push(some);
        }
    }
    out
}

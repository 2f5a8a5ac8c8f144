//! Settings and formulas shared by the policy-gradient methods.
//!
//! Each method's file has its defaults for these settings.

mod advantages;
mod filter;
mod loss;
mod method;
mod process;
mod scores;
mod turns;

pub(super) use method::{Method, NOTHING_TO_COMPARE, merged, method, reward_metrics};

pub use scores::Scores;

use super::UpdatePlan;
use super::math::advantage::Normalise;
use super::math::aggregate::Aggregate;
use super::math::correction::Correction;
use super::math::kl::Estimator;
use super::math::surrogate::{Ratio, Surrogate};
use crate::credit::{StepSplit, Vine};
use crate::experience::Experience;
use crate::refill::Refill;
use ferrl_engine::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

with_defaults! {
/// Settings of a policy-gradient method.
pub struct Policy {
    /// Surrogate objective.
    pub surrogate: Surrogate = Surrogate::Clip,
    /// Probability ratio: per token or per sequence.
    pub ratio: Ratio = Ratio::Token,
    /// Lower clip range: ratios are clipped below `1 - clip_low`. (0, 1]
    pub clip_low: f64 = 0.2,
    /// Upper clip range: ratios are clipped above `1 + clip_high`. (0, 1000]
    pub clip_high: f64 = 0.2,
    /// Dual-clip PPO: upper bound of the ratio where the advantage is negative. (1, 1000]
    pub dual_clip: Option<f64> = None,
    /// Weight of the squared log-ratio of `surrogate = "kimi"`. (0, 1000]
    pub tau: f64 = TAU,
    /// Aggregation of token losses.
    pub aggregate: Aggregate = Aggregate::Token,
    /// Fixed length of `aggregate = "constant"` and of `overlong`; `rollout.max_new_tokens` by default.
    /// [0, 1048576]
    pub length: usize = 0,
    /// Soft overlong penalty: completions in this last fraction of `length` lose up to 1 of their reward; 0 disables it. [0, 1]
    pub overlong: f64 = 0.0,
    /// Mask truncated completions: they count in baselines but not in the loss.
    pub mask_truncated: bool = false,
    /// Entropy bonus coefficient. [-10, 10]
    pub entropy_coef: f64 = 0.0,
    /// KL penalty towards the reference.
    pub kl: Kl = Kl::default(),
    /// Scaling and clipping of rewards by running moments.
    pub scores: Scores = Scores::default(),
    /// Advantage estimation.
    pub advantage: Advantage = Advantage::default(),
    /// Monte-Carlo values of steps, for `advantage.baseline = "steps"`.
    pub vine: Vine = Vine::default(),
    /// Importance-sampling correction for tokens sampled by an older policy.
    pub correction: Correction = Correction::default(),
    /// Value loss of the critic.
    pub critic: Critic = Critic::default(),
    /// Passes over each rollout (PPO epochs). [1, 1000]
    pub epochs: usize = 1,
    /// Updates per pass. [1, 1000000]
    pub minibatches: usize = 1,
    /// Skip an update whose mean probability ratio exceeds this. (1, 1000]
    pub skip_ratio: Option<f64> = None,
    /// Critic warm-up, as in verl and OpenRLHF: initial steps that train only the critic; with `critic.shared` only its value head, at
    /// `critic.lr`. [0, 1000000000]
    pub critic_warmup: u64 = 0,
    /// Drop groups whose rewards are all equal; a step without other groups makes no update.
    pub filter_equal: bool = false,
    /// Dynamic sampling: rounds of further prompts in place of the groups that `filter_equal` drops. [0, 1000]
    pub refills: usize = 0,
}
}

with_defaults! {
/// KL penalty towards the reference.
pub struct Kl {
    /// KL coefficient; 0 needs no reference. [0, 1000]
    pub coef: f64 = 0.0,
    /// Where the penalty is applied.
    pub place: KlPlacement = KlPlacement::Loss,
    /// KL estimator.
    pub estimator: Estimator = Estimator::K3,
    /// Clip each token's estimate to the range from 0 to this; VinePPO uses 10. (0, 1000000]
    pub clip: Option<f64> = None,
    /// For a KL in the loss: sum over a completion's tokens and mean over completions, instead of `aggregate`.
    pub sum: bool = false,
    /// For a KL in the loss: multiply each token's estimate by its probability ratio, so that the gradient of k3 is that of the reverse
    /// KL (TRL's `use_bias_correction_kl`; DeepSeek-V3.2).
    pub unbiased: bool = false,
    /// Target KL per trajectory of the adaptive KL controller; unset keeps `coef` fixed. (0, 1000000]
    pub target: Option<f64> = None,
    /// Horizon of the adaptive KL controller, in trajectories. (0, 1000000000]
    pub horizon: f64 = 10_000.0,
}
}

/// Where the KL penalty is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KlPlacement {
    /// Subtracted from each token's reward.
    Reward,
    /// Added to each token's loss.
    Loss,
    /// Subtracted from each token's advantage.
    Advantage,
}

with_defaults! {
/// Advantage estimation.
pub struct Advantage {
    /// Baseline that is subtracted from the return.
    pub baseline: Baseline = Baseline::Group,
    /// Divide by the standard deviation of the group (or batch).
    pub divide_by_std: bool = false,
    /// Normalise each reward separately, then add them by weight (GDPO).
    pub parts: bool = false,
    /// Reward-to-go: a token's return is the sum of the rewards after it instead of all rewards.
    pub to_go: bool = false,
    /// Normalisation over the whole rollout.
    pub normalise: Normalise = Normalise::None,
    /// Decay of the moving average with `baseline = "moving"`. [0, 1]
    pub decay: f64 = 0.9,
    /// Discount factor: per token for the critic and for `to_go`, per turn with `baseline = "turns"`, per step with `"process"`.
    /// [0, 1]
    pub gamma: f64 = 1.0,
    /// GAE lambda. [0, 1]
    pub lambda: f64 = 1.0,
}
}

/// Baseline that is subtracted from a return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Baseline {
    /// The mean over the completions to the same prompt.
    Group,
    /// The mean over the other completions to the same prompt (leave-one-out).
    Others,
    /// The mean over all completions of the rollout.
    Batch,
    /// Return batch normalisation (ReBN): the return of each turn minus the mean over all turns of the rollout, with `divide_by_std`
    /// divided by their standard deviation (Liu et al., 2025, arXiv 2510.01051).
    Turns,
    /// A moving average over previous rollouts.
    Moving,
    /// No baseline.
    None,
    /// The critic, with generalised advantage estimation (GAE).
    Critic,
    /// Monte-Carlo values of the states between steps, from continuations sampled by the policy (`vine`).
    Steps,
    /// Process supervision: rewards of steps (`reward.0.steps`) are normalised over all steps of the group; a token's advantage is the
    /// sum from its step on.
    Process,
}

with_defaults! {
/// The critic's loss: `coef * max((V - R)^2, (clip(V) - R)^2)`, halved or not.
pub struct Critic {
    /// Value loss coefficient. [0, 1000]
    pub coef: f64 = 1.0,
    /// Value clip range: maximum change of the value; `"off"` disables it. (0, 1000000]
    pub clip: Option<f64> = Some(0.5),
    /// Multiply the squared error by 1/2 (OpenAI, TRL); off as in RL2.
    pub half: bool = false,
}
}

/// Default weight of Kimi's surrogate.
const TAU: f64 = 0.1;

impl Kl {
    /// The KL estimates of the tokens of one sequence and the derivative of their sum with respect to each log-probability; k3 in
    /// place of the exact KL, which the forward pass computes.
    fn estimates(&self, logps: &[f32], refs: &[f32]) -> (Vec<f64>, Vec<f64>) {
        self.estimator.sequence(logps, refs, self.clip)
    }
}

/// Whether the rule is violated, what is wrong, and a fix.
type SettingRule = (bool, &'static str, &'static str);

impl Policy {
    /// Refuses settings that contradict each other or have no effect; ranges are checked when settings are read.
    pub fn check(&self) -> Result<()> {
        let rules = [
            self.surrogate_rules(),
            self.update_rules(),
            self.kl_rules(),
            self.length_rules(),
            self.advantage_rules(),
            self.step_rules(),
        ];
        match rules.into_iter().flatten().find(|r| r.0) {
            Some((_, what, fix)) => Err(Error::usage(what).at("algo").fix(fix)),
            None => Ok(()),
        }
    }

    fn surrogate_rules(&self) -> Vec<SettingRule> {
        vec![
            (
                self.dual_clip.is_some_and(|d| d <= 1.0 + self.clip_high),
                "dual_clip must be above 1 + clip_high",
                "algo.dual_clip = 4.0",
            ),
            (
                self.dual_clip.is_some() && self.surrogate != Surrogate::Clip,
                "dual_clip bounds the clipped surrogate only",
                "algo.surrogate = \"clip\", or no algo.dual_clip",
            ),
            (
                self.surrogate != Surrogate::Kimi && self.tau != TAU,
                "algo.tau weighs the squared log-ratio of algo.surrogate = \"kimi\"",
                "algo.surrogate = \"kimi\", or no algo.tau",
            ),
            (
                self.surrogate == Surrogate::Logp && self.ratio != Ratio::Token,
                "algo.surrogate = \"logp\" has no ratio",
                "algo.ratio = \"token\"",
            ),
        ]
    }

    fn update_rules(&self) -> Vec<SettingRule> {
        let a = &self.advantage;
        let compares = matches!(a.baseline, Baseline::Group | Baseline::Others | Baseline::Process);
        vec![
            (
                self.critic_warmup > 0 && a.baseline != Baseline::Critic,
                "critic_warmup trains only the critic, and this baseline has none: nothing would be trained",
                "algo.critic_warmup = 0, or algo.advantage.baseline = \"critic\"",
            ),
            (
                self.skip_ratio.is_some() && self.epochs * self.minibatches == 1,
                "skip_ratio has nothing to skip with one update per rollout",
                "algo.epochs = 2, or no algo.skip_ratio",
            ),
            (
                self.refills > 0 && !(self.filter_equal && compares),
                "refills replace groups that filter_equal drops",
                "algo.filter_equal = true and a baseline within the group",
            ),
        ]
    }

    fn kl_rules(&self) -> Vec<SettingRule> {
        let (kl, full) = (&self.kl, self.kl.estimator == Estimator::Full);
        let by_token = !full && kl.estimator != Estimator::K3Sequence;
        vec![
            (
                kl.unbiased && (kl.coef == 0.0 || kl.place != KlPlacement::Loss || !by_token),
                "kl.unbiased multiplies each token's estimate of a KL in the loss by the probability ratio",
                "algo.kl.coef above 0, algo.kl.place = \"loss\" and algo.kl.estimator = \"k3\", or no algo.kl.unbiased",
            ),
            (
                kl.target.is_some() && kl.coef == 0.0,
                "kl.target adapts kl.coef, which is 0",
                "an initial kl.coef, such as 0.05",
            ),
            (
                kl.place != KlPlacement::Loss && (full || kl.sum),
                "algo.kl.estimator = \"full\" and kl.sum belong to a KL in the loss",
                "algo.kl.place = \"loss\"",
            ),
            (
                full && kl.clip.is_some(),
                "kl.clip bounds an estimate, and algo.kl.estimator = \"full\" is exact",
                "no algo.kl.clip, or algo.kl.estimator = \"k3\"",
            ),
        ]
    }

    fn length_rules(&self) -> Vec<SettingRule> {
        let has_length = self.aggregate == Aggregate::Constant || self.overlong > 0.0;
        vec![(
            has_length && self.length == 0,
            "algo.aggregate = \"constant\" and algo.overlong need a length",
            "algo.length = 256, the maximum completion length",
        )]
    }

    fn advantage_rules(&self) -> Vec<SettingRule> {
        let a = &self.advantage;
        let apart = a.baseline == Baseline::Group && !a.to_go && self.kl.place != KlPlacement::Reward;
        vec![
            (
                a.to_go && a.baseline == Baseline::Critic,
                "GAE already sums the rewards after each token",
                "algo.advantage.to_go = false",
            ),
            (
                a.parts && self.scores != Scores::default(),
                "advantage.parts normalises each reward by itself, and algo.scores scales their sum",
                "algo.advantage.parts = false, or no algo.scores",
            ),
            (
                self.scores.centre && !self.scores.scale,
                "scores.centre subtracts the mean of the scores that scores.scale divides",
                "algo.scores.scale = true",
            ),
            (
                a.to_go && a.baseline == Baseline::Turns,
                "returns of turns already sum the rewards from each turn on",
                "algo.advantage.to_go = false",
            ),
            (
                a.to_go && a.baseline == Baseline::Process,
                "process supervision already sums the rewards from each step on",
                "algo.advantage.to_go = false",
            ),
            (
                a.parts && !apart,
                "advantage.parts normalises rewards of whole completions within the group, without a KL in the reward",
                "algo.advantage.baseline = \"group\", algo.advantage.to_go = false, algo.kl.place = \"loss\"",
            ),
        ]
    }

    fn step_rules(&self) -> Vec<SettingRule> {
        let (a, v) = (&self.advantage, &self.vine);
        let steps = a.baseline == Baseline::Steps;
        let shaped =
            a.divide_by_std || a.parts || a.to_go || self.overlong > 0.0 || self.scores != Scores::default();
        vec![
            (
                !steps && *v != Vine::default(),
                "algo.vine estimates the values of steps, which this baseline does not use",
                "algo.advantage.baseline = \"steps\"",
            ),
            (
                steps && (shaped || self.kl.place == KlPlacement::Reward && self.uses_reference()),
                "Monte-Carlo values of steps use the rewards of whole completions alone",
                "algo.kl.place = \"loss\", and none of algo.overlong, algo.scores, algo.advantage.divide_by_std, \
                 algo.advantage.parts and algo.advantage.to_go",
            ),
            (
                v.split != StepSplit::Tokens && v.step_tokens != Vine::default().step_tokens,
                "vine.step_tokens is the length of a step that is counted in tokens",
                "algo.vine.split = \"tokens\"",
            ),
            (
                v.interval.is_some() && v.max_samples < v.samples,
                "vine.max_samples is below vine.samples: no continuation would be added",
                "algo.vine.max_samples = 30",
            ),
            (
                v.interval.is_none()
                    && (v.add, v.max_samples) != (Vine::default().add, Vine::default().max_samples),
                "vine.add and vine.max_samples belong to vine.interval",
                "algo.vine.interval = 0.05",
            ),
        ]
    }

    /// How the updates of a step are made.
    pub fn updates(&self) -> UpdatePlan {
        let refill = Refill { rounds: self.refills, per_source: self.advantage.parts };
        UpdatePlan {
            epochs: self.epochs,
            minibatches: self.minibatches,
            policy_frozen_steps: self.critic_warmup,
            skip_ratio: self.skip_ratio,
            refill: (self.refills > 0).then_some(refill),
            ..Default::default()
        }
    }

    /// Whether every gradient of prepared experience is zero: no advantage differs from 0 and the loss has no other
    /// term.
    pub fn no_signal(&self, e: &Experience, kl_coef: f64) -> bool {
        let kl_in_loss = kl_coef > 0.0 && self.kl.place == KlPlacement::Loss;
        let other_terms =
            kl_in_loss || self.entropy_coef != 0.0 || self.advantage.baseline == Baseline::Critic;
        !other_terms && e.sequences.iter().all(|s| s.advantage.iter().all(|a| *a == 0.0))
    }

    /// Whether a frozen reference is needed.
    pub fn uses_reference(&self) -> bool {
        self.kl.coef > 0.0
    }
}

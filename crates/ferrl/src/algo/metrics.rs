//! What runs write to `metrics.jsonl` and TensorBoard at each step, and what it means: the one list from which the manual
//! is made. An algorithm's [`Entry`](super::Entry) names its groups; what the loop itself writes is here too. Tests
//! refuse a number that is written and not listed, and one that is listed and never written.
//!
//! A word in capitals stands for a name: `rewards/NAME/mean`.

/// A number that is written at each step: a mean over what the step saw, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// As in `metrics.jsonl`.
    pub name: &'static str,
    /// What it says.
    pub about: &'static str,
}

/// One line of a list.
pub(super) const fn metric(name: &'static str, about: &'static str) -> Metric {
    Metric { name, about }
}

impl Metric {
    /// Whether this is the metric of that name.
    pub fn covers(&self, written: &str) -> bool {
        let capital = |c: char| c.is_ascii_uppercase();
        let Some(start) = self.name.find(capital) else { return self.name == written };
        let (before, rest) = self.name.split_at(start);
        let stands_for =
            written.strip_prefix(before).and_then(|w| w.strip_suffix(rest.trim_start_matches(capital)));
        stands_for.is_some_and(|w| !w.is_empty())
    }
}

/// Written by every stage.
pub const STEP: &[Metric] = &[
    metric("loss", "Loss of an update; a step without an update has none."),
    metric("grad_norm", "Gradient norm of the policy, before clipping."),
    metric("learning_rate", "Learning rate of the policy; absent where a line search sets the step size."),
    metric("critic/grad_norm", "Gradient norm of the critic, where it is a separate model."),
    metric(
        "updates/skipped",
        "1 for an update that was not made: nothing could be learned (every advantage is 0, or every completion was left \
         out), the policy had moved too far, or no step was better.",
    ),
    metric("num_tokens", "Tokens learned from since the run began, prompts included, as TRL counts them."),
    metric("timing/tokens_per_second", "Tokens of the step over its seconds."),
    metric("data/truncated", "Fraction of the given sequences that were cut to `data.max_length`."),
    metric("micro_batches", "Micro-batches per update."),
    metric(
        "micro_batches/balance",
        "Tokens of the mean micro-batch over those of the largest; 1 is balanced.",
    ),
    metric("step_time", "Seconds of the step, evaluation and checkpoints left out."),
    metric("timing/PHASE", "Seconds of one phase: data, rollout, reward, annotate, train."),
];

/// Written where completions are sampled, or come with their rewards.
pub const SAMPLED: &[Metric] = &[
    metric("score", "Score of a completion by the first verifier, before weights; 1 is right."),
    metric("completions/mean_length", "Tokens of a completion."),
    metric("completions/min_length", "Tokens of the shortest."),
    metric("completions/max_length", "Tokens of the longest."),
    metric(
        "completions/mean_terminated_length",
        "Tokens of a completion that ended by itself, where there are any.",
    ),
    metric("completions/min_terminated_length", "Tokens of the shortest of these."),
    metric("completions/max_terminated_length", "Tokens of the longest of these."),
    metric("completions/clipped_ratio", "Fraction of completions truncated by the length limit."),
    metric("completions/total_tokens", "Tokens of all completions of the step."),
    metric(
        "rollouts/lost",
        "Completions without a reward, because a function failed or gave none; they are not learned from, and no mean \
         counts them.",
    ),
    metric(
        "sampling/sampling_logp_difference/mean",
        "Absolute difference of trainer and sampler log-probabilities at the same policy version: 0 on an exact device.",
    ),
    metric("sampling/sampling_logp_difference/max", "The largest of these: 0."),
    metric(
        "sampling/lag",
        "Updates between the policy that sampled a token and the one that learns from it.",
    ),
];

/// Written at each evaluation.
pub const EVALUATED: &[Metric] = &[
    metric(
        "eval/pass@1",
        "Fraction of held-out prompts answered right with one sample; the mean over samples where there are several.",
    ),
    metric("eval/pass@N", "Fraction of held-out prompts with a right completion among `eval.samples`."),
    metric(
        "eval/majority@N",
        "Fraction of held-out prompts whose most frequent answer is right (majority vote).",
    ),
    metric("eval/greedy", "Fraction of held-out prompts answered right at temperature 0."),
    metric("eval/reward", "Reward of a completion."),
    metric("eval/mean_length", "Tokens of a completion."),
    metric("eval/clipped_ratio", "Fraction of completions truncated by the length limit."),
    metric(
        "eval/lost",
        "Completions that could not be graded, where there were any; they count neither as right nor as wrong.",
    ),
    metric("eval/loss", "The loss on held-out rows, for stages that learn from rows."),
    metric("eval/accuracy", "`rewards/accuracies` on them."),
    metric("eval/margin", "`rewards/margins` on them."),
    metric("eval/METRIC", "Any other metric of the algorithm on them."),
    metric(
        "eval_start/METRIC",
        "The same for the model the stage starts from; in the row of the first step.",
    ),
];

/// How rewards are spread.
pub(super) const REWARDED: &[Metric] = &[
    metric("reward", "Reward of a completion: the weighted sum of its rewards, before any penalty."),
    metric("reward_std", "Standard deviation of the rewards within a group, averaged over prompts."),
    metric("frac_reward_zero_std", "Fraction of prompts whose completions all have the same reward."),
    metric("rewards/NAME/mean", "One named part of the rewards."),
];

/// The shared token loss.
pub(super) const SURROGATE: &[Metric] = &[
    ENTROPY,
    metric("policy/ratio", "Probability ratio of new to old policy, per token or sequence."),
    metric("clip_ratio/low_mean", "Fraction of tokens clipped at the lower bound."),
    metric("clip_ratio/high_mean", "Fraction of tokens clipped at the upper bound."),
    metric("clip_ratio/region_mean", "Fraction of tokens clipped at either bound."),
];

/// The entropy that every method on tokens reports.
pub(super) const ENTROPY: Metric = metric("entropy", "Entropy of the policy per token, in nats.");

/// The distance to the reference, where `kl.coef` is above 0.
pub(super) const REFERENCE: &[Metric] = &[
    metric("kl", "The KL estimate to the reference per token, with `kl.coef` above 0."),
    metric("objective/kl", "Its sum over a completion, the controlled variable of `kl.target`."),
    metric("kl_coef", "KL coefficient after this step."),
];

/// The critic's loss, where `advantage.baseline = "critic"`.
pub(super) const CRITIC: &[Metric] = &[
    metric("value/error", "Squared error of the critic, with `advantage.baseline = \"critic\"`."),
    metric("value/clip_ratio", "Fraction of tokens whose value is clipped by `critic.clip`."),
];

/// Groups without a learning signal.
pub(super) const EQUAL: &[Metric] =
    &[metric("dynamic_filtering_ratio", "Fraction of prompts dropped by `filter_equal`.")];

/// Completions that are too long.
pub(super) const OVERLONG: &[Metric] = &[
    metric("rewards/overlong/mean", "Soft overlong penalty (`overlong`)."),
    metric("truncated_filtering_ratio", "Fraction of completions masked by `mask_truncated`."),
];

/// All that the shared settings of the policy-gradient methods write.
pub(super) const POLICY: &[&[Metric]] = &[REWARDED, SURROGATE, REFERENCE, CRITIC, EQUAL, OVERLONG];

/// The search that takes the optimizer's place.
pub const TRUST: &[Metric] = &[
    metric("trust/kl", "Mean KL per token between the policy before and after the step."),
    metric("trust/improvement", "Decrease of the loss."),
    metric("trust/tries", "Line-search steps tried."),
    metric("trust/step", "Step size, as a fraction of the longest step."),
];

/// Pairs of a better and a worse completion.
pub(super) const PAIRED: &[Metric] = &[
    metric(
        "rewards/chosen",
        "Implicit reward of the chosen completion: the scale (beta or tau) times its log-probability, as the loss takes it: \
         less the reference's where there is one, per token where the formula has a mean.",
    ),
    metric("rewards/rejected", "The same of the rejected one."),
    metric("rewards/margins", "The difference of the two."),
    metric("rewards/accuracies", "Fraction of pairs in which the chosen completion has the larger reward."),
    metric("logps/chosen", "Log-probability of the chosen completion, summed over its tokens."),
    metric("logps/rejected", "The same of the rejected one."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capitals_stand_for_names() {
        let part = metric("rewards/NAME/mean", "");
        assert!(part.covers("rewards/format/mean"));
        assert!(!part.covers("rewards//mean") && !part.covers("rewards/format") && !part.covers("reward"));
        assert!(metric("eval/pass@N", "").covers("eval/pass@8") && !metric("kl", "").covers("kl_coef"));
    }
}

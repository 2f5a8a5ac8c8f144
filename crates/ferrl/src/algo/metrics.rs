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
    metric("loss", "The loss of an update, before it; a step without an update has none."),
    metric("grad_norm", "Length of the policy's gradient, before it is clipped."),
    metric("learning_rate", "The policy's, at this step; absent where a search decides how far a step goes."),
    metric("critic/grad_norm", "Length of the critic's gradient, where it has weights of its own."),
    metric(
        "updates/skipped",
        "1 for an update that was not made: nothing could be learned (every advantage is 0, or every completion was left \
         out), the policy had moved too far, or no step was better.",
    ),
    metric("num_tokens", "Tokens learned from since the run began, prompts included, as TRL counts them."),
    metric("timing/tokens_per_second", "Tokens of the step over its seconds."),
    metric("data/truncated", "Fraction of the given sequences that were cut to `data.max_length`."),
    metric("micro_batches", "Parts an update was cut into."),
    metric("micro_batches/balance", "How full the mean part is compared with the fullest; 1 is even."),
    metric("step_time", "Seconds of the step, evaluation and checkpoints left out."),
    metric("timing/PHASE", "Seconds of one phase: data, rollout, reward, annotate, train."),
];

/// Written where answers are sampled, or come with their rewards.
pub const SAMPLED: &[Metric] = &[
    metric("score", "What the sources of reward say of an answer, before weights; 1 is right."),
    metric("completions/mean_length", "Tokens of a completion."),
    metric("completions/min_length", "Tokens of the shortest."),
    metric("completions/max_length", "Tokens of the longest."),
    metric(
        "completions/mean_terminated_length",
        "Tokens of a completion that ended by itself, where there are any.",
    ),
    metric("completions/min_terminated_length", "Tokens of the shortest of these."),
    metric("completions/max_terminated_length", "Tokens of the longest of these."),
    metric("completions/clipped_ratio", "Fraction of completions that the length limit cut off."),
    metric("completions/total_tokens", "Tokens of all completions of the step."),
    metric(
        "rollouts/lost",
        "Completions without a reward, because a function failed or gave none; they are not learned from, and no mean \
         counts them.",
    ),
    metric(
        "sampling/sampling_logp_difference/mean",
        "How far the trainer's log-probability of a token is from the sampler's, for tokens that this policy sampled: 0.",
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
        "Share of held-out questions answered right, sampled once each, or the mean over samples.",
    ),
    metric("eval/pass@N", "Share of them with a right answer among `eval.samples`."),
    metric("eval/majority@N", "Share of them whose most frequent answer is right."),
    metric("eval/greedy", "Share of them answered right at temperature 0."),
    metric("eval/reward", "Reward of an answer."),
    metric("eval/mean_length", "Tokens of an answer."),
    metric("eval/clipped_ratio", "Share of answers that the length limit cut off."),
    metric(
        "eval/lost",
        "Completions that could not be graded, where there were any; they count neither as right nor as wrong.",
    ),
    metric("eval/loss", "The loss on held-out rows, for stages that learn from rows."),
    metric("eval/accuracy", "`rewards/accuracies` on them."),
    metric("eval/margin", "`rewards/margins` on them."),
    metric("eval/METRIC", "Any other metric of the algorithm on them."),
    metric("eval_start/METRIC", "The same of the stage's first model; in the line of the first step."),
];

/// How rewards are spread.
pub(super) const REWARDED: &[Metric] = &[
    metric("reward", "Reward of an answer: the weighted sum of its sources, before any penalty."),
    metric("reward_std", "Deviation of the rewards of one prompt's answers, a mean over prompts."),
    metric("frac_reward_zero_std", "Share of prompts whose answers all got the same reward."),
    metric("rewards/NAME/mean", "One named part of the rewards."),
];

/// The shared token loss.
pub(super) const SURROGATE: &[Metric] = &[
    ENTROPY,
    metric("policy/ratio", "Probability of a token (or answer) now over that when it was sampled."),
    metric("clip_ratio/low_mean", "Share of tokens whose ratio the lower bound stopped."),
    metric("clip_ratio/high_mean", "Share of tokens whose ratio the upper bound stopped or weakened."),
    metric("clip_ratio/region_mean", "Share of tokens that either bound touched."),
];

/// The entropy that every method on tokens reports.
pub(super) const ENTROPY: Metric =
    metric("entropy", "Entropy of the policy where a token was chosen, in nats.");

/// The distance to the reference, where `kl.coef` is above 0.
pub(super) const REFERENCE: &[Metric] = &[
    metric("kl", "The KL estimate to the reference per token, with `kl.coef` above 0."),
    metric("objective/kl", "Its sum over an answer, which `kl.target` steers."),
    metric("kl_coef", "The weight of the penalty after this step."),
];

/// The critic's loss, where `advantage.baseline = "critic"`.
pub(super) const CRITIC: &[Metric] = &[
    metric("value/error", "Squared error of the critic, with `advantage.baseline = \"critic\"`."),
    metric("value/clip_ratio", "Share of tokens whose value `critic.clip` held."),
];

/// Groups that teach nothing.
pub(super) const EQUAL: &[Metric] =
    &[metric("dynamic_filtering_ratio", "Share of prompts left out by `filter_equal`.")];

/// Answers that are too long.
pub(super) const OVERLONG: &[Metric] = &[
    metric("rewards/overlong/mean", "What `overlong` takes from a reward."),
    metric("truncated_filtering_ratio", "Share of answers left out by `mask_truncated`."),
];

/// All that the shared settings of the policy-gradient methods write.
pub(super) const POLICY: &[&[Metric]] = &[REWARDED, SURROGATE, REFERENCE, CRITIC, EQUAL, OVERLONG];

/// The search that takes the optimizer's place.
pub const TRUST: &[Metric] = &[
    metric("trust/kl", "Mean KL per token between the policy before and after the step."),
    metric("trust/improvement", "How much the loss fell."),
    metric("trust/tries", "Steps tried until one was good."),
    metric("trust/step", "The step taken, as a share of the longest."),
];

/// Pairs of a better and a worse answer.
pub(super) const PAIRED: &[Metric] = &[
    metric(
        "rewards/chosen",
        "Implicit reward of the chosen answer: the scale (beta or tau) times its log-probability, as the loss takes it: \
         less the reference's where there is one, per token where the formula has a mean.",
    ),
    metric("rewards/rejected", "The same of the rejected one."),
    metric("rewards/margins", "The difference of the two."),
    metric("rewards/accuracies", "Share of pairs in which the chosen answer has the larger one."),
    metric("logps/chosen", "Log-probability of the chosen answer, summed over its tokens."),
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

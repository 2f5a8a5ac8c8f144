//! The metrics of `metrics.jsonl` and TensorBoard with their meanings, from which the manual is generated. An algorithm's
//! [`Entry`](super::Entry) names its groups; the metrics of the training loop are here too. Tests fail for a metric that is written and
//! not listed, or listed and never written.
//!
//! A word in capitals is a placeholder: `rewards/NAME/mean`.

use crate::run::metrics::RESERVED;

/// A number written at each step: a mean over the step's data, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name in `metrics.jsonl`.
    pub name: &'static str,
    pub about: &'static str,
}

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

/// Whether a run, of whatever algorithm, may write a metric of that name itself.
pub fn is_own(name: &str) -> bool {
    let of_algorithms = super::ALGORITHMS.iter().flat_map(|entry| entry.metrics.iter().copied().flatten());
    RESERVED.contains(&name)
        || STEP.iter().chain(SAMPLED).chain(EVALUATED).chain(of_algorithms).any(|metric| metric.covers(name))
}

/// Written by every stage.
pub const STEP: &[Metric] = &[
    metric("loss", "Loss of the update, computed before it; absent in a step without an update."),
    metric("grad_norm", "L2 norm of the policy's gradient before clipping."),
    metric(
        "learning_rate",
        "Learning rate of the policy; absent where a line search determines the step size.",
    ),
    metric(
        "adapter/arrived",
        "With an adapter in bf16: fraction of the adapter's change of the weights that survives rounding to bf16, \
         measured on one layer per step. Below 0.5, small updates do not reach the policy yet.",
    ),
    metric(
        "experts/max_load",
        "With a mixture of experts: tokens of the busiest expert over the mean of its layer, maximum over layers; 1 \
         is balanced, the number of experts means that one expert gets all tokens.",
    ),
    metric(
        "experts/min_load",
        "Tokens of the least busy expert over the mean of its layer, minimum over layers; 1 is balanced, 0 means an \
         unused expert.",
    ),
    metric(
        "experts/entropy",
        "Entropy of the fractions of tokens per expert over its maximum, mean over layers; 1 is balanced.",
    ),
    metric(
        "experts/aux_loss",
        "Load-balance loss of the routers before its coefficient, per sequence and layer: the number of experts per \
         token if balanced, higher otherwise.",
    ),
    metric("critic/grad_norm", "L2 norm of the critic's gradient, if the critic is a separate model."),
    metric(
        "updates/skipped",
        "1 for a skipped update: no learning signal (every advantage is 0, or every completion was left out), a ratio above \
         `skip_ratio`, or a line search without improvement.",
    ),
    metric("num_tokens", "Tokens trained on since the run began, prompts included, as TRL counts them."),
    metric("timing/exchange_mib", "MiB that rank 0 sent to other ranks in the step."),
    metric("timing/tokens_per_second", "Tokens of the step divided by its seconds."),
    metric("data/truncated", "Fraction of the rows that were truncated to `data.max_length`."),
    metric("micro_batches", "Number of micro-batches per update."),
    metric("micro_batches/balance", "Mean over maximum tokens of a micro-batch; 1 is balanced."),
    metric("step_time", "Seconds of the step, without evaluation and checkpoints."),
    metric(
        "timing/PHASE",
        "Seconds of one phase: data, rollout, reward, credit, annotate, train; `exchange` is the part of them spent \
         waiting for other ranks.",
    ),
];

/// Written by stages with completions that are sampled, or given with rewards.
pub const SAMPLED: &[Metric] = &[
    metric("score", "Score of a completion before reward weights; 1 is right."),
    metric("rewards/steps", "Number of rewarded steps per completion, with process rewards."),
    metric("completions/mean_length", "Mean length of completions in tokens."),
    metric("completions/min_length", "Length of the shortest completion."),
    metric("completions/max_length", "Length of the longest completion."),
    metric(
        "completions/mean_terminated_length",
        "Mean length of completions that ended with a stop token, if any.",
    ),
    metric("completions/min_terminated_length", "Minimum length of these completions."),
    metric("completions/max_terminated_length", "Maximum length of these completions."),
    metric("completions/clipped_ratio", "Fraction of completions truncated at the length limit."),
    metric("completions/total_tokens", "Tokens of all completions of the step."),
    metric(
        "completions/in_flight",
        "Unfinished completions that continue in the next step, with `rollout.partial_tokens`.",
    ),
    metric(
        "timing/rollout_tokens_per_second",
        "Generation throughput: tokens of the completions sampled in the step divided by the seconds of sampling them.",
    ),
    metric(
        "rollouts/lost",
        "Completions without a reward, because a reward function failed or returned none; they are excluded from the update \
         and from all means.",
    ),
    metric("episodes/mean_turns", "Mean number of turns (actions) per episode, with an environment."),
    metric("episodes/tool_calls", "Mean number of tool calls per episode, in environments with tools."),
    metric("episodes/failed_tool_calls", "Mean number of tool calls per episode that returned an error."),
    metric("episodes/lost", "Fraction of episodes given up because their environment failed."),
    metric(
        "episodes/decoding",
        "Fraction of the rollout time in which a decode batch ran; below 1 if the policy waited for environments.",
    ),
    metric(
        "episodes/overhead",
        "Fraction of the rollout time spent neither in decoding nor in environments: tokenization of turns, \
         bookkeeping.",
    ),
    metric("credit/steps", "Mean number of steps per completion, with Monte-Carlo values (`vineppo`)."),
    metric("search/paths", "Training completions (paths) per tree (`search.train`)."),
    metric("search/nodes", "Nodes per tree."),
    metric("search/tokens", "Sampled tokens per tree."),
    metric("search/value", "Value of a tree's root: the mean of its evaluations."),
    metric(
        "search/weight",
        "Importance weight of a path: its probability under the policy over its probability in the tree.",
    ),
    metric("credit/states", "Number of states whose value is estimated; equal prefixes count once."),
    metric("credit/rollouts", "Mean number of continuations per state."),
    metric("credit/value", "Mean value of a state."),
    metric(
        "credit/reward_std",
        "Standard deviation of the rewards of a state's continuations, mean over states.",
    ),
    metric(
        "credit/interval",
        "Width of the 95 % confidence interval of a value, mean over states, for rewards of 0 and 1.",
    ),
    metric("credit/clipped_ratio", "Fraction of continuations truncated at the length limit."),
    metric("credit/tokens", "Tokens of all continuations of the step."),
    metric(
        "credit/dropped",
        "Fraction of completions left out because they cannot be split or a state has no value.",
    ),
    metric(
        "sampling/sampling_logp_difference/mean",
        "Mean absolute difference between trainer and sampler log-probabilities at the same policy version; 0 if \
         exact.",
    ),
    metric("sampling/sampling_logp_difference/max", "Maximum of that difference; 0 if exact."),
    metric("sampling/lag", "Off-policy lag: policy versions between sampling a token and training on it."),
];

/// Written at each evaluation.
pub const EVALUATED: &[Metric] = &[
    metric("eval/pass@1", "Accuracy: fraction of right completions of held-out prompts, mean over samples."),
    metric("eval/pass@N", "Fraction of prompts with at least one right completion among N = `eval.samples`."),
    metric("eval/majority@N", "Fraction of prompts whose most frequent answer is right (majority vote)."),
    metric(
        "eval/ece",
        "Expected calibration error in ten bins, where completions state a confidence (verifier `calibration`).",
    ),
    metric(
        "eval/brier",
        "Brier score: mean squared difference of the stated confidence and the correctness, 0 or 1.",
    ),
    metric("eval/confidence", "Mean stated confidence."),
    metric("eval/search", "Fraction of prompts whose search result is right (`search.eval`)."),
    metric("eval/search_mean", "Fraction of the search's complete paths that are right, mean over prompts."),
    metric("eval/search_reward", "Mean reward of the search results."),
    metric("eval/search_tokens", "Sampled tokens per prompt of the search."),
    metric("eval/greedy", "Fraction of prompts with a right completion at temperature 0."),
    metric("eval/reward", "Mean reward of a completion."),
    metric("eval/mean_length", "Mean length of completions in tokens."),
    metric("eval/clipped_ratio", "Fraction of completions truncated at the length limit."),
    metric(
        "eval/lost",
        "Number of completions without a reward, if any; they count neither as right nor as wrong.",
    ),
    metric("eval/loss", "Loss on held-out rows, for stages that train on rows."),
    metric("eval/accuracy", "`rewards/accuracies` on held-out rows."),
    metric("eval/margin", "`rewards/margins` on held-out rows."),
    metric("eval/METRIC", "Any other metric of the algorithm on held-out rows."),
    metric(
        "eval_start/METRIC",
        "The same before the first step, for the stage's initial model; in the line of the first step.",
    ),
];

/// Distribution of rewards.
pub(super) const REWARDED: &[Metric] = &[
    metric("reward", "Mean reward of a completion: the weighted sum of its sources, before penalties."),
    metric(
        "reward_std",
        "Standard deviation of the rewards in a group, mean over groups. TRL 1.16 logs that of all completions of the step.",
    ),
    metric("frac_reward_zero_std", "Fraction of groups whose rewards are all equal."),
    metric("rewards/NAME/mean", "Mean of one named component of the reward."),
];

/// The shared token loss.
pub(super) const SURROGATE: &[Metric] = &[
    ENTROPY,
    metric("policy/ratio", "Mean probability ratio of the current policy to the policy before the update."),
    metric(
        "clip_ratio/low_mean",
        "Fraction of tokens clipped at the lower bound; with a ratio per completion, of completions.",
    ),
    metric("clip_ratio/high_mean", "The same at the upper bound, clipped or down-weighted."),
    metric("clip_ratio/region_mean", "The same at either bound."),
];

/// Written by all algorithms with token losses.
pub(super) const ENTROPY: Metric = metric("entropy", "Mean entropy of the policy per token, in nats.");

/// The KL divergence from the reference, where `kl.coef` is above 0.
pub(super) const REFERENCE: &[Metric] = &[
    metric("kl", "Estimated KL divergence from the reference per token, if `kl.coef` is above 0."),
    metric(
        "objective/kl",
        "Sum of that estimate over a completion, which the adaptive controller (`kl.target`) regulates.",
    ),
    metric("kl_coef", "KL coefficient after this step."),
];

/// The critic's loss, where `advantage.baseline = "critic"`.
pub(super) const CRITIC: &[Metric] = &[
    metric("value/error", "Mean squared error of the critic, with `advantage.baseline = \"critic\"`."),
    metric("value/clip_ratio", "Fraction of tokens whose value was clipped by `critic.clip`."),
];

/// Groups without learning signal.
pub(super) const EQUAL: &[Metric] =
    &[metric("dynamic_filtering_ratio", "Fraction of prompts dropped by `filter_equal`.")];

/// Completions that are too long.
pub(super) const OVERLONG: &[Metric] = &[
    metric("rewards/overlong/mean", "Mean penalty of `overlong`."),
    metric("truncated_filtering_ratio", "Fraction of completions masked by `mask_truncated`."),
];

/// Written by policy-gradient methods.
pub(super) const POLICY: &[&[Metric]] = &[REWARDED, SURROGATE, REFERENCE, CRITIC, EQUAL, OVERLONG];

/// Written by line searches (TRPO).
pub const TRUST: &[Metric] = &[
    metric("trust/kl", "Mean KL per token between the policy before and after the step."),
    metric("trust/improvement", "Decrease of the loss."),
    metric("trust/tries", "Number of line-search steps."),
    metric("trust/step", "Accepted step as a fraction of the first (longest) one."),
];

/// Pairs of a chosen and a rejected completion.
pub(super) const PAIRED: &[Metric] = &[
    metric(
        "rewards/chosen",
        "Implicit reward of the chosen completion: beta (or tau) times its log-probability as in the loss: minus the \
         reference's where there is one, per token where the formula has a mean.",
    ),
    metric("rewards/rejected", "The same for the rejected one."),
    metric("rewards/margins", "Difference of the two."),
    metric("rewards/accuracies", "Fraction of pairs in which the chosen completion has the larger one."),
    metric("logps/chosen", "Log-probability of the chosen completion, summed over its tokens."),
    metric("logps/rejected", "The same for the rejected one."),
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

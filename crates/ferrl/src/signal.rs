//! Warns once, with the cause, if rewards have no learning signal: all completions wrong, all right, no answer found by the
//! verifier, or truncated completions.

use crate::train::ScoredRollout;
use crate::warnings::Warnings;

/// Consecutive steps without learning signal before the warning.
const STREAK: u64 = 3;

/// Detector of steps without learning signal.
#[derive(Clone, Debug, Default)]
pub struct Signal {
    empty: Streak,
    same: Streak,
}

/// Consecutive steps with statistics of their completions.
#[derive(Clone, Debug, Default)]
struct Streak {
    steps: u64,
    completions: usize,
    truncated: usize,
    right: usize,
    /// Number of completions from which a verifier extracts an answer, and of those with one.
    looked: usize,
    found: usize,
    lowest: f64,
    highest: f64,
}

pub struct StepSignal<'a> {
    /// Counted from 1.
    pub number: u64,
    pub rollouts: &'a [ScoredRollout],
    /// Whether its update is skipped because every gradient is zero.
    pub empty: bool,
    /// Whether it is the last step of the stage.
    pub last: bool,
    pub max_new_tokens: usize,
}

impl Signal {
    /// Adds a step.
    pub fn look(&mut self, step: &StepSignal<'_>, warnings: &Warnings) {
        let rewards: Vec<f64> = step.rollouts.iter().filter_map(|r| r.scores.reward).collect();
        if rewards.is_empty() {
            return;
        }
        let flat = rewards.iter().all(|r| *r == rewards[0]);
        self.same.count(step, flat && (self.same.steps == 0 || rewards[0] == self.same.lowest));
        self.empty.count(step, step.empty);
        if step.empty && self.empty.steps == 1 {
            let (cause, fix) = self.empty.cause(step.max_new_tokens);
            let what =
                format!("step {} has no learning signal, and its update is skipped: {cause}", step.number);
            warnings.raise("empty-step", what, fix);
        }
        if self.empty.steps == STREAK {
            let (cause, fix) = self.empty.cause(step.max_new_tokens);
            let what = format!("the last {STREAK} steps had no learning signal: {cause}");
            warnings.raise("no-signal", what, fix);
        }
        let never = step.last && self.same.steps == step.number && self.same.steps < STREAK;
        if (self.same.steps == STREAK || never) && self.empty.steps == 0 {
            let (cause, fix) = self.same.cause(step.max_new_tokens);
            let what = format!(
                "every reward of the last {} steps was {}: {cause}",
                self.same.steps, self.same.lowest
            );
            warnings.raise("constant-rewards", what, fix);
        }
    }
}

impl Streak {
    fn count(&mut self, step: &StepSignal<'_>, goes_on: bool) {
        if !goes_on {
            *self = Streak::default();
            return;
        }
        for r in step.rollouts {
            let Some(reward) = r.scores.reward else { continue };
            let first = self.completions == 0;
            self.lowest = if first { reward } else { self.lowest.min(reward) };
            self.highest = if first { reward } else { self.highest.max(reward) };
            self.completions += 1;
            self.truncated += usize::from(r.completion.truncated);
            self.right += usize::from(r.scores.is_right());
            self.looked += usize::from(r.scores.found.is_some());
            self.found += usize::from(r.scores.found == Some(true));
        }
        self.steps += 1;
    }

    /// The cause, as far as the completions show it, and a fix.
    fn cause(&self, max_new_tokens: usize) -> (String, String) {
        let n = self.completions;
        let (mut why, mut fix) = if self.right == n {
            (format!("all {n} completions are right"), "harder prompts; the model solves these".to_string())
        } else if self.lowest < self.highest {
            let why = format!("within every group the {n} completions got equal rewards");
            (why, "more rollout.samples, or a reward for partial success".into())
        } else {
            match self.lowest {
                0.0 => (
                    format!("all {n} completions are wrong (reward 0)"),
                    "easier prompts, a supervised stage before this one, or a reward for partial success"
                        .into(),
                ),
                same => (
                    format!("all {n} completions got the same reward, {same}"),
                    "a reward that differs between completions".into(),
                ),
            }
        };
        if self.looked > 0 && self.found == 0 {
            why += "; the verifier found no answer in any of them";
            fix = "compare a completion in rollouts/ with the format that the verifier expects (ferrl verify --list)"
                .into();
        }
        if 2 * self.truncated >= n {
            let cut = self.truncated;
            why += &format!("; {cut} were truncated at rollout.max_new_tokens = {max_new_tokens}");
            fix = "a larger rollout.max_new_tokens, or rollout.stop if the model does not stop by itself"
                .into();
        }
        (why, fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::CompletionScores;
    use crate::rollout::RolloutCompletion;

    fn rollouts(rewards: &[f64], truncated: bool, found: Option<bool>) -> Vec<ScoredRollout> {
        let one = |&reward: &f64| ScoredRollout {
            prompt: Default::default(),
            completion: RolloutCompletion { tokens: 4, truncated, ..Default::default() },
            scores: CompletionScores {
                reward: Some(reward),
                score: Some(reward),
                found,
                ..Default::default()
            },
            advantage: 0.0,
            temperature: None,
            credit: None,
        };
        rewards.iter().map(one).collect()
    }

    /// The warnings after this number of consecutive steps of the same kind.
    fn said(steps: u64, rollouts: &[ScoredRollout], empty: bool) -> Vec<(&'static str, String)> {
        let (mut signal, warnings) = (Signal::default(), Warnings::default());
        for number in 1..=steps {
            signal.look(&StepSignal { number, rollouts, empty, last: false, max_new_tokens: 8 }, &warnings);
        }
        warnings.take().into_iter().map(|w| (w.name, format!("{} {}", w.message, w.fix))).collect()
    }

    #[test]
    fn a_run_without_signal_is_told_with_its_cause() {
        for (rewards, truncated, found, words) in [
            ([0.0, 0.0], false, Some(true), "all 6 completions are wrong (reward 0)"),
            ([1.0, 1.0], false, Some(true), "all 6 completions are right"),
            ([0.0, 0.0], false, Some(false), "found no answer"),
            ([0.0, 0.0], true, Some(true), "6 were truncated at rollout.max_new_tokens = 8"),
            ([0.0, 0.5], false, None, "within every group"),
        ] {
            let said = said(3, &rollouts(&rewards, truncated, found), true);
            assert_eq!(said.iter().map(|s| s.0).collect::<Vec<_>>(), ["empty-step", "no-signal"]);
            assert!(said[1].1.contains(words), "{said:?}");
        }
        assert_eq!(said(2, &rollouts(&[0.0, 0.0], false, None), true).len(), 1);
    }

    #[test]
    fn rewards_that_never_vary_are_told() {
        assert!(said(2, &rollouts(&[0.0, 0.0], false, None), false).is_empty());
        let said = said(3, &rollouts(&[0.0, 0.0], false, None), false);
        assert_eq!((said.len(), said[0].0), (1, "constant-rewards"));
        let (mut signal, warnings) = (Signal::default(), Warnings::default());
        for number in 1..30u64 {
            let rollouts = rollouts(&[f64::from(number % 3 == 0), 0.0], false, None);
            signal.look(
                &StepSignal { number, rollouts: &rollouts, empty: false, last: false, max_new_tokens: 8 },
                &warnings,
            );
        }
        assert!(warnings.take().is_empty());
    }
}

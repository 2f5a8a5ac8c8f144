//! Post-processors of the scores and advantages of a path.

use super::{Entry, PathStep, TreePath};

/// Changes a path.
type PostProcessor = fn(&mut TreePath);

/// An advantage that is nearly 0, for losses that skip steps of advantage 0.
const EPSILON: f64 = 1e-6;

pub const POST_PROCESSORS: &[Entry<PostProcessor>] = &[
    Entry {
        name: "chop_zero_advantage_tail",
        about: "removes trailing steps with advantage 0",
        apply: |p| {
            let kept = p.steps.iter().rposition(|s| s.advantage != 0.0).map_or(0, |last| last + 1);
            p.steps.truncate(kept);
        },
    },
    Entry {
        name: "keep_first_step_only",
        about: "removes all steps but the first",
        apply: |p| p.steps.truncate(1),
    },
    Entry {
        name: "chop_up_to_first_negative_advantage",
        about: "removes the first step of negative advantage and all after it",
        apply: |p| {
            let kept = p.steps.iter().position(|s| s.advantage < 0.0).unwrap_or(p.steps.len());
            p.steps.truncate(kept);
        },
    },
    Entry {
        name: "all_advantages_to_one",
        about: "every advantage is 1: SFT on the path",
        apply: |p| each(p, |s| s.advantage = 1.0),
    },
    Entry {
        name: "zero_advantages_to_epsilon",
        about: "advantages of 0 become 1e-6",
        apply: |p| {
            each(p, |s| {
                if s.advantage == 0.0 {
                    s.advantage = EPSILON;
                }
            });
        },
    },
    Entry {
        name: "negative_advantages_to_zero",
        about: "negative advantages become 0",
        apply: |p| each(p, |s| s.advantage = s.advantage.max(0.0)),
    },
    Entry {
        name: "non_last_nodes_score_to_zero",
        about: "only the last step has a score",
        apply: |p| each_but_last(p, |s| s.score = 0.0),
    },
    Entry {
        name: "non_last_nodes_advantage_to_zero",
        about: "only the last step has an advantage",
        apply: |p| each_but_last(p, |s| s.advantage = 0.0),
    },
    Entry {
        name: "fill_advantage_from_score",
        about: "every advantage is the step's score",
        apply: |p| each(p, |s| s.advantage = s.score),
    },
    Entry {
        name: "apply_importance_weights",
        about: "advantages times the number of completions that the path represents",
        apply: |p| {
            let weight = p.weight;
            each(p, |s| s.advantage *= weight);
        },
    },
    Entry {
        name: "last_step_advantage_to_one",
        about: "the last step has the advantage 1",
        apply: |p| p.steps.iter_mut().rev().take(1).for_each(|s| s.advantage = 1.0),
    },
];

fn each(path: &mut TreePath, change: impl FnMut(&mut PathStep)) {
    path.steps.iter_mut().for_each(change);
}

fn each_but_last(path: &mut TreePath, change: impl FnMut(&mut PathStep)) {
    path.steps.iter_mut().rev().skip(1).for_each(change);
}

#[cfg(test)]
mod tests {
    use super::super::find;
    use super::*;

    /// Score and advantage of each step after a post-processor.
    fn after(name: &str, steps: &[(f64, f64)], weight: f64) -> Vec<(f64, f64)> {
        let step = |&(score, advantage): &(f64, f64)| PathStep { score, advantage, ..Default::default() };
        let mut path = TreePath { steps: steps.iter().map(step).collect(), weight, correct: true };
        (find("path post-processor", POST_PROCESSORS, name).unwrap().apply)(&mut path);
        path.steps.iter().map(|s| (s.score, s.advantage)).collect()
    }

    const STEPS: &[(f64, f64)] = &[(0.5, 0.25), (0.0, -0.5), (1.0, 0.0)];

    #[test]
    fn a_tail_without_advantage_is_chopped() {
        assert_eq!(after("chop_zero_advantage_tail", STEPS, 1.0), STEPS[..2]);
        assert_eq!(after("chop_zero_advantage_tail", &[(1.0, 0.0)], 1.0), []);
    }
    #[test]
    fn only_the_first_step_is_kept() {
        assert_eq!(after("keep_first_step_only", STEPS, 1.0), STEPS[..1]);
    }
    #[test]
    fn steps_before_the_first_mistake_are_kept() {
        assert_eq!(after("chop_up_to_first_negative_advantage", STEPS, 1.0), STEPS[..1]);
        assert_eq!(after("chop_up_to_first_negative_advantage", &STEPS[..1], 1.0), STEPS[..1]);
    }
    #[test]
    fn every_step_is_imitated() {
        assert_eq!(after("all_advantages_to_one", STEPS, 1.0), [(0.5, 1.0), (0.0, 1.0), (1.0, 1.0)]);
    }
    #[test]
    fn no_advantage_is_zero() {
        assert_eq!(after("zero_advantages_to_epsilon", STEPS, 1.0), [(0.5, 0.25), (0.0, -0.5), (1.0, 1e-6)]);
    }
    #[test]
    fn no_advantage_is_negative() {
        assert_eq!(after("negative_advantages_to_zero", STEPS, 1.0), [(0.5, 0.25), (0.0, 0.0), (1.0, 0.0)]);
    }
    #[test]
    fn only_the_end_has_a_score() {
        assert_eq!(after("non_last_nodes_score_to_zero", STEPS, 1.0), [(0.0, 0.25), (0.0, -0.5), (1.0, 0.0)]);
    }
    #[test]
    fn only_the_end_has_an_advantage() {
        assert_eq!(
            after("non_last_nodes_advantage_to_zero", STEPS, 1.0),
            [(0.5, 0.0), (0.0, 0.0), (1.0, 0.0)]
        );
    }
    #[test]
    fn advantages_are_scores() {
        assert_eq!(after("fill_advantage_from_score", STEPS, 1.0), [(0.5, 0.5), (0.0, 0.0), (1.0, 1.0)]);
    }
    #[test]
    fn a_path_that_ended_early_counts_for_those_it_stands_for() {
        assert_eq!(after("apply_importance_weights", STEPS, 4.0), [(0.5, 1.0), (0.0, -2.0), (1.0, 0.0)]);
    }
    #[test]
    fn the_end_has_advantage_one() {
        assert_eq!(after("last_step_advantage_to_one", STEPS, 1.0), [(0.5, 0.25), (0.0, -0.5), (1.0, 1.0)]);
    }
}

//! Path filters.

use super::{Entry, TreePath};

/// Whether a path is kept.
type Filter = fn(&TreePath) -> bool;

pub const FILTERS: &[Entry<Filter>] = &[
    Entry { name: "none", about: "all paths", apply: |_| true },
    Entry { name: "successful", about: "paths whose completion is right", apply: |p| p.correct },
    Entry {
        name: "non_zero_score",
        about: "paths with a step whose score is not 0",
        apply: |p| p.steps.iter().any(|s| s.score != 0.0),
    },
    Entry {
        name: "non_zero_last_step_score",
        about: "paths whose last step has a score other than 0",
        apply: |p| p.score() != 0.0,
    },
    Entry {
        name: "zero_last_step_score",
        about: "paths whose last step has the score 0",
        apply: |p| p.score() == 0.0,
    },
    Entry {
        name: "non_zero_last_step_advantage",
        about: "paths whose last step has an advantage other than 0",
        apply: |p| p.steps.last().is_some_and(|s| s.advantage != 0.0),
    },
];

#[cfg(test)]
mod tests {
    use super::super::{find, paths, tests::tree};
    use super::*;

    fn kept(name: &str) -> Vec<String> {
        let filter = find("path filter", FILTERS, name).unwrap();
        paths(&tree()).iter().filter(|p| (filter.apply)(p)).map(TreePath::text).collect()
    }

    #[test]
    fn none_keeps_all_paths() {
        assert_eq!(kept("none").len(), 4);
    }
    #[test]
    fn successful_keeps_right_paths() {
        assert_eq!(kept("successful"), ["step good", "step good"]);
    }
    #[test]
    fn a_path_through_a_step_of_value_stays_though_its_end_is_wrong() {
        assert_eq!(kept("non_zero_score"), ["step good", "step bad", "step good"]);
    }
    #[test]
    fn ends_of_value_stay() {
        assert_eq!(kept("non_zero_last_step_score"), ["step good", "step good"]);
    }
    #[test]
    fn ends_without_value_stay() {
        assert_eq!(kept("zero_last_step_score"), ["early", "step bad"]);
    }
    #[test]
    fn ends_that_changed_the_value_stay() {
        let mut path = paths(&tree()).remove(0);
        let filter = find("path filter", FILTERS, "non_zero_last_step_advantage").unwrap();
        assert!((filter.apply)(&path));
        path.steps[0].advantage = 0.0;
        assert!(!(filter.apply)(&path));
    }
}

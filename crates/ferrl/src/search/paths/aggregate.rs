//! Aggregators: select among the paths of one tree.

use super::{Entry, TreePath};
use std::collections::HashSet;

/// Selects paths; the number is a percentage or a count.
type Aggregator = fn(Vec<TreePath>, f64) -> Vec<TreePath>;

pub const AGGREGATORS: &[Entry<Aggregator>] = &[
    Entry { name: "none", about: "all paths", apply: |paths, _| paths },
    Entry { name: "unique", about: "paths without duplicate texts", apply: |paths, _| unique(paths) },
    Entry {
        name: "top_k_percent_mean_advantage",
        about: "the given percentage of paths with the highest mean advantage, at least one",
        apply: |paths, percent| {
            top(paths, percent, |p| p.advantages().sum::<f64>() / p.steps.len().max(1) as f64)
        },
    },
    Entry {
        name: "top_k_percent_sum_advantage",
        about: "the given percentage of paths with the highest sum of advantages, at least one",
        apply: |paths, percent| top(paths, percent, |p| p.advantages().sum()),
    },
    Entry {
        name: "max_k_paths",
        about: "the given number of paths, from the first",
        apply: |mut paths, count| {
            paths.truncate(count.max(0.0) as usize);
            paths
        },
    },
];

fn unique(paths: Vec<TreePath>) -> Vec<TreePath> {
    let mut seen = HashSet::new();
    paths.into_iter().filter(|p| seen.insert(p.text())).collect()
}

/// The best paths by a key, in their original order; ties go to the first.
fn top(paths: Vec<TreePath>, percent: f64, key: impl Fn(&TreePath) -> f64) -> Vec<TreePath> {
    let count = ((paths.len() as f64 * percent / 100.0) as usize).max(1);
    let mut order: Vec<usize> = (0..paths.len()).collect();
    order.sort_by(|&a, &b| key(&paths[b]).total_cmp(&key(&paths[a])));
    let best: HashSet<usize> = order.into_iter().take(count).collect();
    paths.into_iter().enumerate().filter(|(i, _)| best.contains(i)).map(|(_, p)| p).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{find, paths, tests::tree};
    use super::*;

    fn kept(name: &str, number: f64) -> Vec<String> {
        let aggregator = find("path aggregator", AGGREGATORS, name).unwrap();
        (aggregator.apply)(paths(&tree()), number).iter().map(TreePath::text).collect()
    }

    #[test]
    fn none_uses_all_paths() {
        assert_eq!(kept("none", 0.0).len(), 4);
    }
    #[test]
    fn equal_texts_are_used_once() {
        assert_eq!(kept("unique", 0.0), ["early", "step good", "step bad"]);
    }
    #[test]
    fn the_highest_mean_advantages_are_used() {
        // Means: -1/3, 1/3, -1/6, 1/3.
        assert_eq!(kept("top_k_percent_mean_advantage", 50.0), ["step good", "step good"]);
        assert_eq!(kept("top_k_percent_mean_advantage", 75.0), ["step good", "step bad", "step good"]);
        assert_eq!(kept("top_k_percent_mean_advantage", 1.0), ["step good"], "one at least");
    }
    #[test]
    fn the_highest_sums_of_advantages_are_used() {
        // Sums: -1/3, 2/3, -1/3, 2/3; of equal ones the first.
        assert_eq!(kept("top_k_percent_sum_advantage", 75.0), ["early", "step good", "step good"]);
    }
    #[test]
    fn no_more_than_a_number_are_used() {
        assert_eq!(kept("max_k_paths", 2.0), ["early", "step good"]);
    }
}

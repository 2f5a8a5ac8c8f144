//! Pure arithmetic of an evaluation: pass@k, majority votes, means over questions.

use crate::verify::{last_answer, last_boxed};
use std::collections::BTreeMap;

/// pass@k from `right` of `n` samples: `1 - C(n - right, k) / C(n, k)`.
/// Unbiased, as in Chen et al., "Evaluating Large Language Models Trained on Code", 2021, arXiv:2107.03374.
/// `None` with fewer than `k` samples.
pub fn pass_at_k(n: usize, right: usize, k: usize) -> Option<f64> {
    if k == 0 || k > n || right > n {
        return None;
    }
    if n - right < k {
        return Some(1.0);
    }
    // C(n - c, k) / C(n, k) = Π (1 - k / i) for i from n - c + 1 to n: no large numbers.
    let none: f64 = (n - right + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product();
    Some(1.0 - none)
}

/// The vote of a completion: the text of its last `<answer>`, else of its last `\boxed{}`, else the whole text.
pub fn vote(text: &str) -> &str {
    last_answer(text).or_else(|| last_boxed(text)).unwrap_or(text.trim())
}

/// Index of the first answer with the most frequent vote; of equally frequent ones the first wins.
pub fn majority<'a>(votes: impl IntoIterator<Item = &'a str>) -> Option<usize> {
    let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (i, v) in votes.into_iter().enumerate() {
        counts.entry(v).or_insert((0, i)).0 += 1;
    }
    counts.values().max_by_key(|(count, first)| (*count, usize::MAX - first)).map(|&(_, first)| first)
}

/// Mean and standard error of the mean; the error is `None` for fewer than two values.
pub fn mean(values: &[f64]) -> Option<(f64, Option<f64>)> {
    let n = values.len() as f64;
    if values.is_empty() {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let square: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Some((mean, (values.len() > 1).then(|| (square / (n - 1.0) / n).sqrt())))
}

/// Normal quantile of a two-sided 95 % interval.
const Z: f64 = 1.959_963_984_540_054;

/// A 95 % confidence interval of the mean of values between 0 and 1: Wilson's score interval where all are 0 or 1 (it is
/// right at 0 of n, too), else the normal one from the standard error, within 0 and 1. `None` without values.
pub fn interval(values: &[f64]) -> Option<(f64, f64)> {
    let (p, error) = mean(values)?;
    let n = values.len() as f64;
    if values.iter().all(|v| *v == 0.0 || *v == 1.0) {
        let scale = 1.0 + Z * Z / n;
        let centre = (p + Z * Z / (2.0 * n)) / scale;
        let half = Z / scale * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        return Some(((centre - half).max(0.0), (centre + half).min(1.0)));
    }
    let half = Z * error?;
    Some(((p - half).max(0.0), (p + half).min(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_is_the_share_of_k_subsets_with_a_right_answer() {
        for n in 1..=10usize {
            for right in 0..=n {
                for k in 1..=n {
                    // Count subsets of size k that hold one of the first `right` answers.
                    let subsets = (0u32..1 << n).filter(|s| s.count_ones() as usize == k);
                    let (mut all, mut hit) = (0.0, 0.0);
                    for s in subsets {
                        all += 1.0;
                        hit += f64::from(s & ((1u32 << right) - 1) != 0);
                    }
                    let got = pass_at_k(n, right, k).expect("k answers were drawn");
                    assert!((got - hit / all).abs() < 1e-12, "n {n}, right {right}, k {k}: {got}");
                }
            }
        }
        assert_eq!(pass_at_k(4, 1, 5), None);
        assert_eq!(pass_at_k(4, 1, 0), None);
        // 100 of 10000 right: 1 - C(9900, 100) / C(10000, 100), from exact integers.
        let got = pass_at_k(10_000, 100, 100).expect("drawn");
        assert!((got - 0.635_805_484_760).abs() < 1e-9, "{got}");
    }

    #[test]
    fn votes_go_by_the_final_answer() {
        assert_eq!(vote("because <answer> 7 </answer>"), "7");
        assert_eq!(vote("so \\boxed{1} or \\boxed{\\frac{1}{2}}."), "\\frac{1}{2}");
        assert_eq!(vote("  plain \n"), "plain");
        assert_eq!(vote("cut \\boxed{1"), "cut \\boxed{1");
        assert_eq!(majority(["b", "a", "a"]), Some(1));
        assert_eq!(majority(["b", "a"]), Some(0), "the first of equals");
        assert_eq!(majority([]), None);
    }

    #[test]
    fn wilson_s_interval_is_the_published_one() {
        // Newcombe, Statistics in Medicine 17, 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        for (right, n, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            let values: Vec<f64> = (0..n).map(|i| f64::from(u8::from(i < right))).collect();
            let (l, h) = interval(&values).expect("values");
            assert!((l - low).abs() < 5e-5 && (h - high).abs() < 5e-5, "{right} of {n}: {l} to {h}");
        }
        let (l, h) = interval(&[0.5, 0.5, 0.25, 0.75]).expect("values");
        assert!(l > 0.2 && h < 0.8, "{l} to {h}");
        assert_eq!(interval(&[]), None);
    }

    #[test]
    fn standard_error_of_a_coin() {
        assert_eq!(mean(&[]), None);
        assert_eq!(mean(&[1.0]), Some((1.0, None)));
        let (m, e) = mean(&[0.0, 1.0, 0.0, 1.0]).expect("values");
        assert_eq!(m, 0.5);
        assert!((e.expect("several") - (1.0 / 12.0f64).sqrt()).abs() < 1e-12);
    }
}

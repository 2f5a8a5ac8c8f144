//! Calibration: whether completions that state a confidence of 80 % are right in 80 of 100 cases.

use super::EvaluatedCompletion;
use crate::experience::Metrics;

/// Bins of equal width.
const BINS: usize = 10;

/// Expected calibration error: over bins of confidence, the distance of the mean confidence from the fraction that is right,
/// weighted by the number of completions in the bin. Pairs of confidence, from 0 to 1, and whether it was right, 0 or 1.
pub fn ece(pairs: &[(f64, f64)]) -> f64 {
    let mut bins = [(0.0, 0.0); BINS];
    for &(confidence, right) in pairs {
        let bin = &mut bins[((confidence * BINS as f64) as usize).min(BINS - 1)];
        (bin.0, bin.1) = (bin.0 + confidence, bin.1 + right);
    }
    bins.iter().map(|(confidence, right)| (confidence - right).abs()).sum::<f64>() / pairs.len().max(1) as f64
}

/// Confidence and correctness of completions whose reward has both as parts.
pub fn stated(completions: &[EvaluatedCompletion]) -> Vec<(f64, f64)> {
    let part = |parts: &[(String, f32)], name: &str| {
        parts.iter().find(|(n, _)| n == name).map(|(_, value)| f64::from(*value))
    };
    let both = |(_, _, scores): &EvaluatedCompletion| {
        Some((part(&scores.components, "confidence")?, part(&scores.components, "correct")?))
    };
    completions.iter().filter_map(both).collect()
}

/// `eval/ece`, `eval/brier` and `eval/confidence`, where completions state a confidence.
pub fn metrics(completions: &[EvaluatedCompletion]) -> Metrics {
    let (mut metrics, pairs) = (Metrics::default(), stated(completions));
    if pairs.is_empty() {
        return metrics;
    }
    metrics.add("eval/ece", ece(&pairs));
    for (confidence, right) in &pairs {
        metrics.add("eval/confidence", *confidence);
        metrics.add("eval/brier", (confidence - right) * (confidence - right));
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_error_by_hand() {
        // 0.8 said four times and right three times, 0.3 said once and wrong; certainty counts in the last bin.
        let pairs = [(0.8, 1.0), (0.8, 1.0), (0.8, 1.0), (0.8, 0.0), (0.3, 0.0)];
        assert!((ece(&pairs) - ((3.2f64 - 3.0).abs() + 0.3) / 5.0).abs() < 1e-12);
        assert_eq!((ece(&[(1.0, 1.0), (1.0, 1.0)]), ece(&[]), ece(&[(1.0, 0.0)])), (0.0, 0.0, 1.0));
    }
}

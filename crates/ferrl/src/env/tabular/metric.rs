//! Metrics of the tabular task, and the improvement of a submission over the baseline.

use super::model::Matrix;
use super::table::PredictionTarget;

/// Metric of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TabularMetric {
    Accuracy,
    BalancedAccuracy,
    Auc,
    LogLoss,
    Rmse,
    Mae,
    R2,
}

impl TabularMetric {
    pub(super) const ALL: [(&'static str, TabularMetric); 7] = [
        ("accuracy", TabularMetric::Accuracy),
        ("balanced_accuracy", TabularMetric::BalancedAccuracy),
        ("auc", TabularMetric::Auc),
        ("log_loss", TabularMetric::LogLoss),
        ("rmse", TabularMetric::Rmse),
        ("mae", TabularMetric::Mae),
        ("r2", TabularMetric::R2),
    ];

    pub(super) fn name(self) -> &'static str {
        TabularMetric::ALL.iter().find(|(_, metric)| *metric == self).map_or("", |(name, _)| name)
    }

    pub(super) fn regression(self) -> bool {
        matches!(self, TabularMetric::Rmse | TabularMetric::Mae | TabularMetric::R2)
    }

    /// The value of a perfect submission.
    fn best(self) -> f64 {
        match self {
            TabularMetric::LogLoss | TabularMetric::Rmse | TabularMetric::Mae => 0.0,
            _ => 1.0,
        }
    }

    /// The metric of outputs: one per row in regression, one per class otherwise.
    pub(super) fn value(self, outputs: &Matrix, truth: &PredictionTarget) -> f64 {
        match truth {
            PredictionTarget::Numbers(values) => {
                let single: Vec<f64> =
                    outputs.iter().map(|o| o.first().copied().unwrap_or_default()).collect();
                self.of_numbers(&single, values)
            }
            PredictionTarget::Classes(names, rows) => self.of_classes(outputs, rows, names.len()),
        }
    }

    fn of_numbers(self, outputs: &[f64], truth: &[f64]) -> f64 {
        let n = truth.len().max(1) as f64;
        let sum =
            |f: &dyn Fn(f64, f64) -> f64| outputs.iter().zip(truth).map(|(o, t)| f(*o, *t)).sum::<f64>();
        let squares = sum(&|o, t| (o - t) * (o - t));
        match self {
            TabularMetric::Mae => sum(&|o, t| (o - t).abs()) / n,
            TabularMetric::R2 => {
                let mean = truth.iter().sum::<f64>() / n;
                let spread = sum(&|_, t| (t - mean) * (t - mean));
                if spread > 0.0 { 1.0 - squares / spread } else { 0.0 }
            }
            _ => (squares / n).sqrt(),
        }
    }

    fn of_classes(self, outputs: &Matrix, truth: &[usize], classes: usize) -> f64 {
        let n = truth.len().max(1) as f64;
        let said: Vec<usize> = outputs.iter().map(|o| largest(o)).collect();
        match self {
            TabularMetric::BalancedAccuracy => {
                let recall = |class: usize| {
                    let rows: Vec<usize> = (0..truth.len()).filter(|&i| truth[i] == class).collect();
                    let right = rows.iter().filter(|&&i| said[i] == class).count();
                    (!rows.is_empty()).then(|| right as f64 / rows.len() as f64)
                };
                let recalls: Vec<f64> = (0..classes).filter_map(recall).collect();
                recalls.iter().sum::<f64>() / recalls.len().max(1) as f64
            }
            TabularMetric::Auc => {
                auc(&outputs.iter().map(|o| o.get(1).copied().unwrap_or_default()).collect::<Vec<_>>(), truth)
            }
            TabularMetric::LogLoss => {
                let loss = |(o, &t): (&Vec<f64>, &usize)| {
                    // Outputs of a regression on classes may leave [0, 1].
                    let kept: Vec<f64> = o.iter().map(|p| p.clamp(1e-3, 1.0)).collect();
                    -(kept[t] / kept.iter().sum::<f64>()).ln()
                };
                outputs.iter().zip(truth).map(loss).sum::<f64>() / n
            }
            _ => said.iter().zip(truth).filter(|(a, b)| a == b).count() as f64 / n,
        }
    }

    /// Improvement over the baseline as a fraction of that of a perfect submission, at least -1.
    pub(super) fn improvement(self, value: f64, baseline: f64) -> f64 {
        let way = self.best() - baseline;
        if way.abs() < 1e-12 || !value.is_finite() {
            0.0
        } else {
            ((value - baseline) / way).clamp(-1.0, 1.0)
        }
    }
}

fn largest(outputs: &[f64]) -> usize {
    let mut best = 0;
    (1..outputs.len()).for_each(|i| {
        if outputs[i] > outputs[best] {
            best = i
        }
    });
    best
}

/// Probability that a row of the second class has a larger output than one of the first; ties count half.
fn auc(outputs: &[f64], truth: &[usize]) -> f64 {
    let mut order: Vec<usize> = (0..outputs.len()).collect();
    order.sort_by(|&a, &b| outputs[a].total_cmp(&outputs[b]));
    let (mut ranks, mut at) = (0.0, 0);
    while at < order.len() {
        let end = (at..order.len()).find(|&j| outputs[order[j]] != outputs[order[at]]).unwrap_or(order.len());
        let rank = (at + end + 1) as f64 / 2.0;
        ranks += rank * order[at..end].iter().filter(|&&i| truth[i] == 1).count() as f64;
        at = end;
    }
    let yes = truth.iter().filter(|&&t| t == 1).count() as f64;
    let no = truth.len() as f64 - yes;
    if yes * no == 0.0 { 0.5 } else { (ranks - yes * (yes + 1.0) / 2.0) / (yes * no) }
}

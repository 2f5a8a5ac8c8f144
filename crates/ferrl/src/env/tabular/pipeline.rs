//! The pipeline that a policy builds with its commands: preprocessing and a model, fitted on the training rows only.

use super::metric::TabularMetric;
use super::model::{Matrix, TabularModel};
use super::table::{Column, PredictionTarget, TabularData};

/// Maximum number of words of a column with a feature each; other words have none.
const MAX_WORDS: usize = 50;
/// Maximum number of products of nearest neighbours.
const MAX_WORK: usize = 2_000_000_000;
/// Number of folds of cross-validation.
const FOLDS: usize = 4;

/// Replacement of missing numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Impute {
    #[default]
    Zero,
    Mean,
    Median,
}

/// Scaling of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Scale {
    #[default]
    None,
    Standard,
    MinMax,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum WordEncoding {
    /// Dropped.
    #[default]
    None,
    OneHot,
    Ordinal,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TabularPipeline {
    pub impute: Impute,
    pub scale: Scale,
    pub encode: WordEncoding,
    pub dropped: Vec<String>,
    pub model: Option<TabularModel>,
}

impl TabularPipeline {
    /// Outputs for the rows of `test` after training on `train`, or an error for the policy.
    pub(super) fn predict(&self, train: &TabularData, test: &TabularData) -> Result<Matrix, String> {
        let model = self.model.ok_or("there is no model yet")?;
        let mut features = (vec![Vec::new(); train.rows()], vec![Vec::new(); test.rows()]);
        let kept = |name: &String| !self.dropped.contains(name);
        for ((own, other), _) in
            train.columns.iter().zip(&test.columns).zip(&train.names).filter(|(_, n)| kept(n))
        {
            self.add(own, other, &mut features);
        }
        let width = features.0.first().map_or(0, Vec::len);
        if width == 0 {
            return Err("no features are left".into());
        }
        if matches!(model, TabularModel::Knn { .. })
            && train.rows().saturating_mul(test.rows() * width) > MAX_WORK
        {
            return Err("there are too many rows for knn".into());
        }
        Ok(model.predict(&features.0, &outputs(&train.target), &features.1))
    }

    /// Adds the numbers of a column to the rows of both tables.
    fn add(&self, own: &Column, other: &Column, rows: &mut (Matrix, Matrix)) {
        match (own, other) {
            (Column::Numbers(own), Column::Numbers(other)) => {
                let there: Vec<f64> = own.iter().flatten().copied().collect();
                let fill = match self.impute {
                    Impute::Zero => 0.0,
                    Impute::Mean => there.iter().sum::<f64>() / there.len().max(1) as f64,
                    Impute::Median => median(&there),
                };
                let filled: Vec<f64> = own.iter().map(|cell| cell.unwrap_or(fill)).collect();
                let (shift, width) = self.spread(&filled);
                let scaled = |x: f64| (x - shift) / width;
                rows.0.iter_mut().zip(&filled).for_each(|(row, x)| row.push(scaled(*x)));
                rows.1.iter_mut().zip(other).for_each(|(row, x)| row.push(scaled(x.unwrap_or(fill))));
            }
            (Column::Words(own), Column::Words(other)) => self.add_words(own, other, rows),
            // Both tables are read with the kinds of the training rows.
            _ => {}
        }
    }

    fn add_words(&self, own: &[Option<String>], other: &[Option<String>], rows: &mut (Matrix, Matrix)) {
        let mut words: Vec<&String> = own.iter().flatten().collect();
        words.sort();
        words.dedup();
        words.truncate(MAX_WORDS);
        let number = |cell: &Option<String>| cell.as_ref().and_then(|word| words.binary_search(&word).ok());
        let push = |row: &mut Vec<f64>, cell: &Option<String>| match self.encode {
            WordEncoding::None => {}
            WordEncoding::Ordinal => row.push(number(cell).map_or(-1.0, |n| n as f64)),
            WordEncoding::OneHot => {
                row.extend((0..words.len()).map(|w| f64::from(u8::from(number(cell) == Some(w)))))
            }
        };
        rows.0.iter_mut().zip(own).for_each(|(row, cell)| push(row, cell));
        rows.1.iter_mut().zip(other).for_each(|(row, cell)| push(row, cell));
    }

    /// Offset and divisor of scaling.
    fn spread(&self, values: &[f64]) -> (f64, f64) {
        let n = values.len().max(1) as f64;
        let positive = |width: f64| if width > 0.0 { width } else { 1.0 };
        match self.scale {
            Scale::None => (0.0, 1.0),
            Scale::Standard => {
                let mean = values.iter().sum::<f64>() / n;
                let variance = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
                (mean, positive(variance.sqrt()))
            }
            Scale::MinMax => {
                let low = values.iter().copied().fold(f64::INFINITY, f64::min);
                let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if values.is_empty() { (0.0, 1.0) } else { (low, positive(high - low)) }
            }
        }
    }

    /// The metric of a submission for `test`.
    pub(super) fn grade(
        &self,
        train: &TabularData,
        test: &TabularData,
        metric: TabularMetric,
    ) -> Result<f64, String> {
        Ok(metric.value(&self.predict(train, test)?, &test.target))
    }

    /// The mean metric of cross-validation on the training rows.
    pub(super) fn validate(&self, train: &TabularData, metric: TabularMetric) -> Result<f64, String> {
        let part = |fold: usize, inside: bool| -> TabularData {
            let rows: Vec<usize> = (0..train.rows()).filter(|i| (i % FOLDS == fold) == inside).collect();
            train.take(&rows)
        };
        let values: Result<Vec<f64>, String> =
            (0..FOLDS).map(|fold| self.grade(&part(fold, false), &part(fold, true), metric)).collect();
        Ok(values?.iter().sum::<f64>() / FOLDS as f64)
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Training outputs of a target: the number, or a one-hot vector of the class.
fn outputs(target: &PredictionTarget) -> Matrix {
    match target {
        PredictionTarget::Numbers(values) => values.iter().map(|v| vec![*v]).collect(),
        PredictionTarget::Classes(names, rows) => {
            let one = |class: usize| (0..names.len()).map(|c| f64::from(u8::from(c == class))).collect();
            rows.iter().map(|&class| one(class)).collect()
        }
    }
}

/// The metric of the mean, or of the frequencies of the classes, of the training rows.
pub(super) fn baseline(train: &TabularData, test: &TabularData, metric: TabularMetric) -> f64 {
    let all = outputs(&train.target);
    let width = all.first().map_or(0, Vec::len);
    let mean = |j: usize| all.iter().map(|row| row[j]).sum::<f64>() / all.len().max(1) as f64;
    let constant: Vec<f64> = (0..width).map(mean).collect();
    metric.value(&vec![constant; test.rows()], &test.target)
}

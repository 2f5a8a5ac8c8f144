//! Summary of an evaluation, as table and JSON.

use super::estimate::{interval, majority, mean, pass_at_k, vote};
use super::{EvaluatedCompletion, Evaluation};
use serde_json::{Map, Value, json};

/// One figure, with its standard error over prompts if it has one.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Such as `pass@4`.
    pub name: String,
    /// Its mean.
    pub value: f64,
    /// How sure that is.
    pub error: Option<f64>,
    /// Whether it is a fraction, shown as a percentage.
    pub share: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub prompts: usize,
    /// Completions per prompt.
    pub samples: usize,
    /// Number of completions without a reward; they count neither as right nor as wrong.
    pub lost: usize,
    /// In the order for a table.
    pub figures: Vec<Figure>,
    /// 95 % confidence interval of the accuracy.
    pub interval: Option<(f64, f64)>,
}

impl Summary {
    /// From scored completions, `samples` of each question in a row, with pass@k for every `k` that was drawn.
    pub fn new(evaluation: &Evaluation, samples: usize, ks: &[usize]) -> Self {
        Self::of(&evaluation.completions, samples, ks)
    }

    /// The same of some completions, all of each question.
    pub fn of(completions: &[EvaluatedCompletion], samples: usize, ks: &[usize]) -> Self {
        let questions: Vec<_> = completions.chunks(samples.max(1)).collect();
        let lost = completions.iter().filter(|(_, _, g)| g.is_lost()).count();
        let mut figures = Vec::new();
        let mut add = |name: String, share: bool, values: Vec<f64>| {
            if let Some((value, error)) = mean(&values) {
                figures.push(Figure { name, value, error, share });
            }
        };
        // Of each question the completions that could be scored; a question without any says nothing.
        let with_reward = |q: &&[EvaluatedCompletion]| {
            q.iter().filter(|(_, _, g)| !g.is_lost()).cloned().collect::<Vec<_>>()
        };
        let scored: Vec<Vec<EvaluatedCompletion>> =
            questions.iter().map(with_reward).filter(|q| !q.is_empty()).collect();
        let right = |q: &[EvaluatedCompletion]| q.iter().filter(|(_, _, g)| g.is_right()).count();
        let over = |f: &dyn Fn(&[EvaluatedCompletion]) -> Option<f64>| {
            scored.iter().filter_map(|q| f(q)).collect::<Vec<_>>()
        };
        let accuracy = over(&|q| Some(right(q) as f64 / q.len() as f64));
        let interval = interval(&accuracy);
        add("accuracy".into(), true, accuracy);
        for &k in ks.iter().filter(|&&k| k <= samples) {
            add(format!("pass@{k}"), true, over(&|q| pass_at_k(q.len(), right(q), k)));
        }
        if samples > 1 {
            let wins = |q: &[EvaluatedCompletion]| {
                let winner = majority(q.iter().map(|(_, a, _)| vote(&a.text)));
                Some(f64::from(winner.is_some_and(|i| q[i].2.is_right())))
            };
            add(format!("majority@{samples}"), true, over(&wins));
        }
        add(
            "reward".into(),
            false,
            over(&|q| Some(q.iter().filter_map(|(_, _, g)| g.reward).sum::<f64>() / q.len() as f64)),
        );
        let each = |f: &dyn Fn(&EvaluatedCompletion) -> f64| {
            let mean = |q: &&[EvaluatedCompletion]| q.iter().map(f).sum::<f64>() / q.len().max(1) as f64;
            questions.iter().map(mean).collect::<Vec<_>>()
        };
        add("mean_length".into(), false, each(&|(_, a, _)| a.tokens as f64));
        add("truncated".into(), true, each(&|(_, a, _)| f64::from(a.truncated)));
        Summary { prompts: questions.len(), samples, lost, figures, interval }
    }

    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|f| f.name == name).map(|f| f.value)
    }

    pub fn json(&self) -> Map<String, Value> {
        let mut out = Map::new();
        out.insert("prompts".into(), json!(self.prompts));
        out.insert("samples".into(), json!(self.samples));
        out.insert("lost".into(), json!(self.lost));
        for f in &self.figures {
            out.insert(f.name.clone(), json!(f.value));
            if let Some(error) = f.error {
                out.insert(format!("{}_error", f.name), json!(error));
            }
        }
        if let Some((low, high)) = self.interval {
            out.insert("accuracy_interval".into(), json!([low, high]));
        }
        out
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for figure in &self.figures {
            let (unit, scale) = if figure.share { (" %", 100.0) } else { ("", 1.0) };
            write!(f, "{:<14}{:>9.2}{unit}", figure.name, scale * figure.value)?;
            match figure.error {
                Some(e) => writeln!(f, " ± {:.2}", scale * e)?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

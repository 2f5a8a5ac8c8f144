//! A task like those of MLE-bench: training rows with a target, test rows without one, a metric, and one graded submission.
//! The policy writes commands, one per line:
//!
//! ```text
//! impute zero|mean|median     scale none|standard|minmax     encode none|onehot|ordinal     drop COLUMN
//! model linear | ridge ALPHA | tree DEPTH | knn K            validate                       submit
//! ```
//!
//! `validate` shows the metric of cross-validation on the training rows; `submit` trains on all of them, is graded on the test
//! rows and ends the episode. The reward is the improvement over the baseline (the mean or the majority class) as a fraction of
//! that of a perfect submission; `score` is 1 above the baseline.

mod metric;
mod model;
mod pipeline;
mod table;

use super::{Environment, EpisodeEnd, Next, Turn, demonstrate};
use crate::env;
use crate::fixes::unknown;
use crate::task::{Entry, Task, TaskExample, options};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use metric::TabularMetric;
use model::TabularModel;
use pipeline::{Impute, Scale, TabularPipeline, WordEncoding, baseline};
use schemars::schema_for;
use serde_json::{Map, json};
use std::path::Path;
use std::sync::Arc;
use table::{Column, MadeUp, PredictionTarget, TabularProblem, make_up};

pub(crate) const ENTRY: Entry = Entry {
    name: "tabular",
    about: "train a model on a table with a few commands; the submission is graded",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(Tabular::new(options(values)?, seed)?)),
};

with_defaults! {
struct Options {
    /// CSV of the training rows; unset generates a table for every episode.
    train: Option<String> = None,
    /// CSV of the test rows with their targets; unset uses a quarter of the training rows.
    test: Option<String> = None,
    /// Target column.
    target: String = "target".into(),
    /// Metric: accuracy, balanced_accuracy, auc, log_loss, rmse, mae or r2.
    metric: String = "accuracy".into(),
    /// Maximum number of turns of an episode. [1, 1000]
    turns: usize = 10,
    /// Rows of a generated table. [40, 100000]
    rows: usize = 200,
    /// Whether the prompt lists the commands.
    instructions: bool = true,
}
}

struct Tabular {
    /// The user's tables.
    given: Option<Arc<TabularProblem>>,
    metric: TabularMetric,
    seed: u64,
    o: Options,
}

impl Tabular {
    fn new(o: Options, seed: u64) -> Result<Self> {
        let found = TabularMetric::ALL.iter().find(|(name, _)| *name == o.metric);
        let &(_, metric) = found.ok_or_else(|| {
            let names = TabularMetric::ALL.iter().map(|(name, _)| *name);
            let fix = |near: &str| format!("data.task.metric = {near:?}");
            unknown("metric", &o.metric, names, fix).at("data.task.metric")
        })?;
        if o.test.is_some() && o.train.is_none() {
            return Err(Error::usage("test rows without training rows")
                .at("data.task.train")
                .fix("data.task.train = \"train.csv\""));
        }
        let mut draw = TaskDraw::new("tabular split", seed, 0);
        let test = o.test.as_ref().map(Path::new);
        let read =
            |path: &String| table::read(Path::new(path), test, &o.target, metric.regression(), &mut draw);
        let given = o.train.as_ref().map(read).transpose()?.map(Arc::new);
        if metric == TabularMetric::Auc
            && let Some(PredictionTarget::Classes(classes, _)) = given.as_ref().map(|p| &p.train.target)
            && classes.len() != 2
        {
            let what = format!("auc needs two classes, the target has {}", classes.len());
            return Err(Error::data(what).at("data.task.metric").fix("data.task.metric = \"log_loss\""));
        }
        Ok(Tabular { given, metric, seed, o })
    }

    fn play(&self, index: u64, held_out: bool) -> TabularEpisode {
        let stream = if held_out { "tabular held out" } else { "tabular" };
        let mut draw = TaskDraw::new(stream, self.seed, index);
        let made = || {
            let how = MadeUp { rows: self.o.rows, regression: self.metric.regression() };
            Arc::new(make_up(how, &mut draw))
        };
        let problem = self.given.clone().unwrap_or_else(made);
        TabularEpisode {
            problem,
            metric: self.metric,
            target: self.o.target.clone(),
            turns: self.o.turns,
            instructions: self.o.instructions,
            pipeline: TabularPipeline::default(),
            turn: 0,
            draw,
        }
    }
}

impl Task for Tabular {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let columns = Map::from_iter([("episode".to_string(), json!(index))]);
        demonstrate(&mut self.play(index, held_out), columns, Environment::random_action)
    }

    fn episode(&self, index: u64, held_out: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(self.play(index, held_out)))
    }
}

const COMMANDS: &str = "Commands, one a line:\nimpute zero|mean|median\nscale none|standard|minmax\nencode none|onehot|ordinal\n\
                        drop COLUMN\nmodel linear | model ridge ALPHA | model tree DEPTH | model knn K\nvalidate\nsubmit\n";

struct TabularEpisode {
    problem: Arc<TabularProblem>,
    metric: TabularMetric,
    target: String,
    turns: usize,
    instructions: bool,
    pipeline: TabularPipeline,
    turn: usize,
    draw: TaskDraw,
}

/// The result of a command.
enum Done {
    Shown(String),
    Graded(f64),
}

impl TabularEpisode {
    /// One line for each column.
    fn describe(&self) -> String {
        let train = &self.problem.train;
        let goal = match &train.target {
            PredictionTarget::Numbers(_) => "a number".to_string(),
            PredictionTarget::Classes(names, _) if names.len() <= 10 => names.join("|"),
            PredictionTarget::Classes(names, _) => format!("{} classes", names.len()),
        };
        let rows = (train.rows(), self.problem.test.rows());
        let mut text = format!(
            "Predict {} ({goal}) by {}: {} rows, {} graded.\n",
            self.target,
            self.metric.name(),
            rows.0,
            rows.1
        );
        for (name, column) in train.names.iter().zip(&train.columns) {
            let kind = if matches!(column, Column::Numbers(_)) { "numbers" } else { "words" };
            let missing = 100 * column.missing() / column.len().max(1);
            text += &format!("{name}: {kind}, {missing} % missing\n");
        }
        text + &format!("{} turns.\n", self.turns)
    }

    fn command(&mut self, line: &str) -> std::result::Result<Done, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, argument) = (words[0], words.get(1).copied().unwrap_or_default());
        let ok = || Ok(Done::Shown("ok".into()));
        let TabularProblem { train, test } = &*self.problem;
        match name {
            "impute" => {
                self.pipeline.impute = choose(
                    argument,
                    &[("zero", Impute::Zero), ("mean", Impute::Mean), ("median", Impute::Median)],
                )?;
                ok()
            }
            "scale" => {
                let all = [("none", Scale::None), ("standard", Scale::Standard), ("minmax", Scale::MinMax)];
                self.pipeline.scale = choose(argument, &all)?;
                ok()
            }
            "encode" => {
                let all = [
                    ("none", WordEncoding::None),
                    ("onehot", WordEncoding::OneHot),
                    ("ordinal", WordEncoding::Ordinal),
                ];
                self.pipeline.encode = choose(argument, &all)?;
                ok()
            }
            "drop" => {
                let named: Vec<(&str, ())> = train.names.iter().map(|n| (n.as_str(), ())).collect();
                choose(argument, &named)?;
                self.pipeline.dropped.push(argument.to_string());
                ok()
            }
            "model" => {
                self.pipeline.model = Some(read_model(argument, words.get(2).copied())?);
                ok()
            }
            "validate" => {
                let value = self.pipeline.validate(train, self.metric)?;
                Ok(Done::Shown(format!("{} {value:.3}", self.metric.name())))
            }
            _ => Ok(Done::Graded(self.pipeline.grade(train, test, self.metric)?)),
        }
    }

    /// The last turn: the metrics of the submission and of the baseline.
    fn graded(&self, value: f64) -> Turn {
        let TabularProblem { train, test } = &*self.problem;
        let baseline = baseline(train, test, self.metric);
        let reward = self.metric.improvement(value, baseline);
        let mut extra = Map::new();
        extra.insert(self.metric.name().into(), json!(value));
        extra.insert("baseline".into(), json!(baseline));
        let shown = format!("\n{} {value:.3}, baseline {baseline:.3}\n", self.metric.name());
        let score = Some(f64::from(u8::from(reward > 0.0)));
        Turn {
            next: Next::Observation(shown),
            reward,
            score,
            end: Some(EpisodeEnd::Terminated),
            extra,
            ..Default::default()
        }
    }
}

const NAMES: [&str; 7] = ["impute", "scale", "encode", "drop", "model", "validate", "submit"];

/// The choice of that name, or an error that lists them.
fn choose<T: Copy>(word: &str, all: &[(&str, T)]) -> std::result::Result<T, String> {
    all.iter().find(|(name, _)| *name == word).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        format!("{word:?} is none of {}", names.join(", "))
    })
}

/// A model with its setting, plain or as `alpha=1`.
fn read_model(name: &str, setting: Option<&str>) -> std::result::Result<TabularModel, String> {
    let number = |default: f64, low: f64, high: f64| -> std::result::Result<f64, String> {
        let Some(text) = setting else { return Ok(default) };
        let text = text.split_once('=').map_or(text, |(_, value)| value);
        let inside = text.parse::<f64>().ok().filter(|x| (low..=high).contains(x));
        inside.ok_or_else(|| format!("{text:?} is no number from {low} to {high}"))
    };
    match choose(name, &[("linear", 0), ("ridge", 1), ("tree", 2), ("knn", 3)])? {
        0 => Ok(TabularModel::Ridge { alpha: 0.0 }),
        1 => Ok(TabularModel::Ridge { alpha: number(1.0, 0.0, 1e9)? }),
        2 => Ok(TabularModel::Tree { depth: number(5.0, 1.0, 30.0)? as usize }),
        _ => Ok(TabularModel::Knn { k: number(5.0, 1.0, 1e6)? as usize }),
    }
}

impl Environment for TabularEpisode {
    fn start(&mut self) -> env::Result<String> {
        Ok(format!("{}{}", self.describe(), if self.instructions { COMMANDS } else { "" }))
    }

    fn step(&mut self, action: &str) -> env::Result<Turn> {
        self.turn += 1;
        let is_command = |line: &&str| NAMES.iter().any(|name| line.split_whitespace().next() == Some(name));
        let lines: Vec<&str> = action.lines().filter(is_command).collect();
        let mut shown = Vec::new();
        for line in &lines {
            match self.command(line) {
                Ok(Done::Graded(value)) => return Ok(self.graded(value)),
                Ok(Done::Shown(text)) => shown.push(text),
                // Commands after a failed one may depend on it.
                Err(why) => {
                    shown.push(format!("error: {why}"));
                    break;
                }
            }
        }
        if lines.is_empty() {
            shown.push(format!("error: no command, expected one of {}", NAMES.join(", ")));
        }
        let over = self.turn >= self.turns;
        let next = Next::Observation(format!("\n{}\n", shown.join("\n")));
        let (score, end) = (over.then_some(0.0), over.then_some(EpisodeEnd::Terminated));
        Ok(Turn { next, score, end, ..Default::default() })
    }

    fn random_action(&mut self) -> Option<String> {
        let mut of = |all: &[&str]| all[self.draw.below(all.len())].to_string();
        let kind = of(&["impute", "scale", "encode", "model", "model", "validate", "submit"]);
        Some(match kind.as_str() {
            "impute" => of(&["impute zero", "impute mean", "impute median"]),
            "scale" => of(&["scale none", "scale standard", "scale minmax"]),
            "encode" => of(&["encode none", "encode onehot", "encode ordinal"]),
            "model" => of(&[
                "model linear", "model ridge 1", "model ridge 1000", "model tree 1", "model tree 5",
                "model knn 1", "model knn 9",
            ]),
            _ => kind,
        })
    }
}

#[cfg(test)]
mod tests;

//! Published data sets by name: benchmarks to evaluate on, questions, pairs and demonstrations to train on.
//!
//! `suite:NAME` in `data.train` or `eval.data` reads the published files as they are and turns every row into the columns
//! that the rest of Ferrl knows: `prompt`, and `answer` for a verifier, `response` for supervised training, or `chosen` and
//! `rejected`. The row's own columns stay. Each family of benchmarks is a file beside this one, each benchmark a line of
//! [`SUITES`].

mod choice;
mod code;
mod math;
mod page;
mod preference;
mod published;
mod qa;

pub use page::{markdown, table};

use crate::data::Row;
use crate::fixes::unknown;
use crate::task::TASK;
use crate::verify::{self, Verifier};
use ferrl_engine::{Error, Result};
use published::Published;
use serde_json::{Map, Value};

/// What the rows of a suite are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Prompts whose completions a verifier scores: its name, and its options as JSON.
    Verified {
        /// A name of the verifiers' registry.
        verifier: &'static str,
        /// A JSON object.
        options: &'static str,
    },
    /// Pairs of a chosen and a rejected response.
    Pairs,
    /// Prompts with a response.
    Demonstrations,
}

/// Sampling where neither the command line nor a recipe says otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuiteSampling {
    /// Sampling temperature of a single completion; 0 is greedy.
    pub temperature: f64,
    pub max_new_tokens: usize,
    /// Stop strings.
    pub stop: &'static [&'static str],
}

/// Temperature where a suite that is greedy by default is sampled several times.
pub const SEVERAL: f64 = 0.6;

/// A published data set.
pub struct Entry {
    /// The name after `suite:`.
    pub name: &'static str,
    pub about: &'static str,
    /// The repository on the Hugging Face hub.
    pub repo: &'static str,
    /// Folders or files of it that are read as one data set; the whole repository where empty.
    pub parts: &'static [&'static str],
    /// The split to train on; none where the data set is for tests alone.
    pub train: Option<&'static str>,
    /// The split to test on, or `*` where the parts are test rows as a whole; none where the data set is for training alone.
    pub test: Option<&'static str>,
    /// The terms it is published under.
    pub license: &'static str,
    pub cite: &'static str,
    /// What its rows are for.
    pub rows: Use,
    /// Columns that split the accuracy into a table, such as the subject.
    pub groups: &'static [&'static str],
    pub sampling: SuiteSampling,
    /// A row of the published shape, made up, as JSON.
    pub sample: &'static str,
    /// A right and a wrong completion to the sample row; empty where nothing is graded.
    pub completions: [&'static str; 2],
    /// Whether a row can be graded; rows that cannot are left out and counted. None where all can.
    pub usable: Option<fn(&Row) -> bool>,
    /// From a published row to prompt and columns.
    convert: fn(&Published<'_>) -> Result<Converted>,
}

/// What a published row becomes.
type Converted = Vec<(&'static str, Value)>;

pub const SUITES: &[&Entry] = &[
    &math::GSM8K,
    &math::MATH,
    &math::MATH500,
    &math::AMC,
    &math::AIME,
    &math::OLYMPIADBENCH,
    &math::MINERVA,
    &math::COLLEGE_MATH,
    &math::ORZ,
    &choice::MMLU,
    &choice::GPQA,
    &choice::SCIQ,
    &qa::TRIVIAQA,
    &qa::NQ,
    &qa::HOTPOTQA,
    &code::MBPP,
    &code::HUMANEVAL,
    &preference::HH_RLHF,
    &preference::TLDR,
    &preference::IMDB,
    &preference::REWARDBENCH,
];

/// The suite of that name; capitals, `-` and `_` make no difference.
pub fn find(name: &str) -> Result<&'static Entry> {
    let plain = |s: &str| s.to_lowercase().replace(['-', '_', ' '], "");
    SUITES
        .iter()
        .copied()
        .find(|s| plain(s.name) == plain(name))
        .ok_or_else(|| unknown("suite", name, SUITES.iter().map(|s| s.name), |near| format!("suite:{near}")))
}

/// The suite that an entry of `data.train` or `eval.data` names, where it names one that exists.
pub fn named(source: &str) -> Option<&'static Entry> {
    let rest = match source.strip_prefix(PREFIX) {
        Some(rest) => rest,
        None => source.split_once('@').and_then(|(_, path)| path.strip_prefix(PREFIX))?,
    };
    find(rest.split('=').next().unwrap_or_default()).ok()
}

/// What stands before the name of a suite where data is named.
pub const PREFIX: &str = "suite:";

impl Entry {
    /// A published row as prompt and columns; what was converted already stays as it is.
    pub fn row(&self, row: &Row) -> Result<Row> {
        let converted = (self.convert)(&Published { suite: self.name, row })?;
        let mut out = row.clone();
        out.extend(converted.into_iter().map(|(name, value)| (name.to_string(), value)));
        out.insert(TASK.into(), self.name.into());
        Ok(out)
    }

    /// The verifier that grades completions, where one does.
    pub fn verifier(&self) -> Option<Result<Box<dyn Verifier>>> {
        let Use::Verified { verifier, .. } = self.rows else { return None };
        Some(
            self.options().and_then(|options| verify::build(verifier, &options)).map_err(|e| e.at(self.name)),
        )
    }

    /// The options of its verifier.
    pub fn options(&self) -> Result<Map<String, Value>> {
        let Use::Verified { options, .. } = self.rows else { return Ok(Map::new()) };
        serde_json::from_str(options)
            .map_err(|e| Error::usage(format!("options of suite {}: {e}", self.name)))
    }

    /// The command that downloads its rows.
    pub fn download(&self) -> String {
        let part = |p: &&str| {
            format!(" --include {:?}", if p.contains('.') { p.to_string() } else { format!("{p}/*") })
        };
        let parts: String = self.parts.iter().map(part).collect();
        format!("hf download {} --repo-type dataset{parts}", self.repo)
    }

    /// The made-up row of the published shape.
    pub fn sample_row(&self) -> Result<Row> {
        serde_json::from_str(self.sample)
            .map_err(|e| Error::data(format!("sample row of suite {}: {e}", self.name)))
    }
}

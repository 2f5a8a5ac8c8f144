//! The strategies, each a file beside this one and a line of [`STRATEGIES`].

mod beam;
mod best_of_n;
mod branching;
mod cot;
mod fishbone;
mod majority;
mod mcts;
mod sampling;

use super::expand::{self, EXPANDER_OPTIONS, EXPANDERS, Expander};
use super::extract::EXTRACTORS;
use super::{ChoiceRule, Facts, Strategy};
use crate::fixes::unknown;
use crate::recipe::{option_keys, read_settings, unknown_key};
use ferrl_engine::{Error, Result};
use schemars::{Schema, schema_for};
use serde_json::{Map, Value};

/// A strategy's registry entry.
pub struct Entry {
    /// The name after `--strategy`.
    pub name: &'static str,
    pub about: &'static str,
    /// The JSON Schema of its own options, without [`STEP_OPTIONS`] and those of expanders.
    pub schema: fn() -> Schema,
    /// Builds the strategy for one prompt from its own options.
    pub build: BuildStrategy,
}

/// Makes a strategy from its own options and what all have in common.
pub type BuildStrategy = fn(&Map<String, Value>, &Common) -> Result<Box<dyn Strategy>>;

pub const STRATEGIES: &[Entry] = &[
    cot::ENTRY,
    best_of_n::ENTRY,
    best_of_n::WEIGHTED,
    majority::ENTRY,
    beam::ENTRY,
    branching::ENTRY,
    fishbone::ENTRY,
    mcts::ENTRY,
];

pub const STEP_OPTIONS: fn() -> Schema = || schema_for!(StepOptions);

with_defaults! {
struct StepOptions {
    /// Text that ends a step; if empty, only step_tokens and the end of a turn do.
    step: String = "\n".into(),
    /// Maximum tokens per step; 0 is no limit. [0, 1048576]
    step_tokens: usize = 0,
    /// Maximum number of steps of a path; the last continues to the end. [1, 4096]
    #[schemars(extend("default" = MAX_DEPTH))]
    max_depth: Option<usize> = None,
    /// Expander: how the children of a node are sampled.
    expander: String = EXPANDERS[0].name.into(),
    /// Extractor of the answer, for votes.
    extractor: String = EXTRACTORS[0].name.into(),
}
}

/// Default maximum number of steps of a path.
const MAX_DEPTH: usize = 64;
/// Maximum number of nodes that a round or a schedule may request.
const MAX_NODES: f64 = 1_048_576.0;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Common {
    /// Text that ends a step.
    pub separator: String,
    /// Maximum tokens per step.
    pub step_tokens: usize,
    /// Maximum number of steps of a path, if given.
    pub max_depth: Option<usize>,
    /// Facts that determine defaults.
    pub facts: Facts,
}

impl Common {
    fn new(options: &StepOptions, facts: Facts) -> Result<Self> {
        if options.step.is_empty() && options.step_tokens == 0 && !facts.turns {
            return Err(Error::usage("a step has no end: step is empty and step_tokens is 0")
                .at("--option")
                .fix("--option step_tokens=16"));
        }
        let (separator, step_tokens) = (options.step.clone(), options.step_tokens);
        Ok(Common { separator, step_tokens, max_depth: options.max_depth, facts })
    }

    /// Maximum number of steps of a path.
    fn depth(&self) -> usize {
        self.max_depth.unwrap_or(MAX_DEPTH)
    }
}

pub fn find(name: &str) -> Result<&'static Entry> {
    STRATEGIES.iter().find(|e| e.name == name).ok_or_else(|| {
        unknown("strategy", name, STRATEGIES.iter().map(|e| e.name), |near| format!("--strategy {near}"))
    })
}

/// A strategy with its common options.
pub struct Built {
    /// Searches for one prompt.
    pub strategy: Box<dyn Strategy>,
    pub common: Common,
    pub expander: Box<dyn Expander>,
    /// The extractor's name.
    pub extractor: String,
}

/// The schemas of all options of a strategy: its own, those of every strategy, those of expanders.
fn schemas(entry: &Entry) -> [fn() -> Schema; 3] {
    [entry.schema, STEP_OPTIONS, EXPANDER_OPTIONS]
}

/// Builds a strategy with these options; unknown options are an error.
pub fn build(entry: &Entry, table: &Map<String, Value>, facts: Facts) -> Result<Built> {
    let known = schemas(entry).map(|schema| option_keys(schema, ""));
    let mut parts = [Map::new(), Map::new(), Map::new()];
    for (key, value) in table {
        let Some(part) = known.iter().position(|keys| keys.iter().any(|k| k.path == *key)) else {
            let names: Vec<&str> = known.iter().flatten().map(|k| k.path.as_str()).collect();
            return Err(unknown_key(entry.name, key, &names, &str::to_string));
        };
        parts[part].insert(key.clone(), value.clone());
    }
    let [own, steps, expander] = parts;
    let steps: StepOptions = read_settings(entry.name, &steps)?;
    let common = Common::new(&steps, facts)?;
    expand::check_options(&steps.expander, expander.keys())?;
    Ok(Built {
        strategy: (entry.build)(&own, &common)?,
        expander: expand::build(&steps.expander, &read_settings(entry.name, &expander)?)?,
        extractor: steps.extractor,
        common,
    })
}

/// The options with the defaults of the strategy filled in, as trees store them.
pub fn resolved(entry: &Entry, table: &Map<String, Value>) -> Map<String, Value> {
    let [own, steps, _] = schemas(entry).map(|schema| option_keys(schema, ""));
    let given = own.into_iter().chain(steps).filter(|k| !k.default.is_null());
    let mut all: Map<String, Value> = given.map(|k| (k.path, k.default)).collect();
    all.extend(table.iter().map(|(k, v)| (k.clone(), v.clone())));
    all
}

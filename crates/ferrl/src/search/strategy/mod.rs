//! The strategies, each a file beside this one and a line of [`STRATEGIES`].

mod beam;
mod best_of_n;
mod branching;
mod cot;
mod fishbone;
mod majority;
mod mcts;
mod sampling;

use super::expand::{self, Expander};
use super::{ChoiceRule, Strategy};
use crate::verify::{Hooks, Options, Setting};
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};

/// A strategy's place in the registry.
pub struct Entry {
    /// The name after `--strategy`.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Its own options; those of [`COMMON`] and of expanders come on top.
    pub settings: &'static [Setting],
    /// Makes one for a question, from checked options.
    pub build: fn(&Options<'_>, &Common) -> Result<Box<dyn Strategy>>,
}

/// Every strategy.
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

/// Options of every strategy.
pub const COMMON: &[Setting] = &[
    Setting {
        name: "step",
        default: "\"\\n\"",
        about: "text that ends a step; empty: only step_tokens does, and the end of a turn",
    },
    Setting { name: "step_tokens", default: "0", about: "tokens of a step at most; 0 is no limit" },
    Setting { name: "max_depth", default: "64", about: "steps of a path at most; the last goes to the end" },
    Setting { name: "expander", default: "\"iid\"", about: "how the children of a node are drawn" },
    Setting {
        name: "extractor",
        default: "\"verifier\"",
        about: "what of a completion is its answer, for votes",
    },
];

/// What all strategies have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Common {
    /// Text that ends a step.
    pub separator: String,
    /// Tokens of a step at most.
    pub step_tokens: usize,
    /// Steps of a path at most.
    pub max_depth: usize,
    /// Whether a budget of tokens ends the search, and not a number of samples.
    pub budgeted: bool,
    /// Whether the scorer can judge steps.
    pub judges_steps: bool,
    /// Whether the scorer says more than the model itself believes.
    pub informed: bool,
    /// Whether an episode of several turns is searched: the end of a turn ends a step, too.
    pub turns: bool,
}

impl Common {
    fn read(options: &Options<'_>, facts: &Common) -> Result<Self> {
        let common = Common {
            separator: options.text("step", "\n")?,
            step_tokens: options.size("step_tokens", 0, 0..=1 << 20)? as usize,
            max_depth: options.size("max_depth", 64, 1..=4096)? as usize,
            ..facts.clone()
        };
        if common.separator.is_empty() && common.step_tokens == 0 && !common.turns {
            return Err(Error::usage("a step has no end: step is empty and step_tokens is 0")
                .at("--option")
                .fix("--option step_tokens=16"));
        }
        Ok(common)
    }
}

/// The strategy of that name.
pub fn find(name: &str) -> Result<&'static Entry> {
    STRATEGIES.iter().find(|e| e.name == name).ok_or_else(|| {
        let names = STRATEGIES.iter().map(|e| e.name);
        let all = names.clone().collect::<Vec<_>>().join(", ");
        let error = Error::usage(format!("unknown strategy {name:?}, expected one of {all}"));
        match nearest(name, names) {
            Some(near) => error.fix(format!("--strategy {near}")),
            None => error,
        }
    })
}

/// What a strategy's options make.
pub struct Built {
    /// Searches for one question.
    pub strategy: Box<dyn Strategy>,
    /// Steps.
    pub common: Common,
    /// Draws children.
    pub expander: Box<dyn Expander>,
    /// The extractor's name.
    pub extractor: String,
}

/// A strategy with these options; unknown ones are refused. `facts` are those that the options do not say.
pub fn build(entry: &Entry, table: &Map<String, Value>, facts: &Common) -> Result<Built> {
    let settings = [entry.settings, COMMON, expand::SETTINGS].concat();
    let hooks = Hooks::default();
    let options = Options::checked(entry.name, &settings, table, &hooks)?;
    let common = Common::read(&options, facts)?;
    Ok(Built {
        strategy: (entry.build)(&options, &common)?,
        expander: expand::build(&options)?,
        extractor: options.text("extractor", "verifier")?,
        common,
    })
}

/// The options with the defaults of the strategy filled in, as trees store them.
pub fn resolved(entry: &Entry, table: &Map<String, Value>) -> Map<String, Value> {
    let settings = entry.settings.iter().chain(COMMON);
    let default = |s: &Setting| serde_json::from_str(s.default).unwrap_or_else(|_| s.default.into());
    let mut all: Map<String, Value> =
        settings.filter(|s| !s.default.is_empty()).map(|s| (s.name.to_string(), default(s))).collect();
    all.extend(table.iter().map(|(k, v)| (k.clone(), v.clone())));
    all
}

/// A list of whole numbers from 1 on: one number, a list, or `3,2,1`.
fn schedule(options: &Options<'_>, key: &str, default: &[usize]) -> Result<Vec<usize>> {
    let Some(value) = options.value(key) else { return Ok(default.to_vec()) };
    let number = |v: &Value| v.as_u64().filter(|n| (1..=65536).contains(n)).map(|n| n as usize);
    let parsed: Option<Vec<usize>> = match value {
        Value::Array(list) => list.iter().map(number).collect(),
        Value::String(text) => {
            text.split(',').map(|part| part.trim().parse().ok().filter(|n| (1..=65536).contains(n))).collect()
        }
        other => number(other).map(|n| vec![n]),
    };
    parsed.filter(|list| !list.is_empty()).ok_or_else(|| {
        Error::usage(format!("{key} must be numbers from 1 to 65536, got {value}"))
            .fix(format!("{key}=3,2,1"))
    })
}

//! Length rewards: functions of the number of tokens, alone or combined with the correctness of the answer.
//!
//! - `overlong`: DAPO's soft penalty (2503.14476), 0 up to a soft limit, then down to -1 at `max`.
//! - `exact`: L1-Exact's (2503.04697) `-alpha |target - tokens|`.
//! - `budget`: L1-Max's, `clip(alpha (target - tokens) + delta, 0, 1)` for a right answer, 0 for a wrong one.
//! - `cosine`: the reward decreases with length for a right answer and increases for a wrong one (2502.03373), along a cosine
//!   from 0 to `max` tokens; beyond `max` it is `overlong_reward`.
//!
//! For `budget` and `cosine` another verifier, the option `of`, decides whether the answer is right.

use super::{Entry, Hooks, Sample, Score, Verifier, build_with, required};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub const ENTRY: Entry = Entry {
    name: "length",
    about: "a reward by length in tokens: DAPO's overlong penalty, L1's targets, cosine",
    schema: || schema_for!(Options),
    build: |given| Ok(Box::new(Length::new(given.read()?, given.hooks)?)),
};

/// Column with the length of completions without tokens.
const COUNTED: &str = "completion_tokens";

with_defaults! {
struct Options {
    /// Reward function: overlong (DAPO), exact (L1-Exact: -alpha * |target - tokens|), budget (L1-Max, needs of), cosine (needs of).
    mode: LengthMode = LengthMode::Overlong,
    /// Overlong: length at which the penalty reaches -1; cosine: end of the curve. Both need it. [1, inf)
    max: Option<u64> = None,
    /// Overlong: number of tokens below max over which the penalty grows; max / 5 by default.
    cache: Option<u64> = None,
    /// Column with the length in tokens; by default the completion's length.
    column: Option<String> = None,
    /// Exact, budget: target length, a number of tokens or a column. [1, inf)
    target: LengthTarget = LengthTarget::Column("target_tokens".into()),
    /// Exact, budget: reward per token of distance from the target. [0, inf)
    alpha: f64 = 3e-4,
    /// Budget: reward of a right answer of the target length. [0, inf)
    delta: f64 = 0.5,
    /// Cosine: rewards of a right answer of 0 and of max tokens.
    right: Vec<f64> = vec![1.0, 0.5],
    /// Cosine: rewards of a wrong answer of 0 and of max tokens.
    wrong: Vec<f64> = vec![-1.0, -0.5],
    /// Cosine: reward of completions longer than max.
    overlong_reward: f64 = -1.0,
    /// Budget, cosine: the verifier of the answer, { verifier = "math", options = { ... } }.
    of: Option<Judge> = None,
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LengthMode {
    Overlong,
    Exact,
    Budget,
    Cosine,
}

/// The target length.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(untagged)]
enum LengthTarget {
    Tokens(u64),
    Column(String),
}

/// Another verifier.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Judge {
    /// Its name.
    verifier: String,
    /// Its options.
    #[serde(default)]
    options: Map<String, Value>,
}

pub struct Length {
    options: Options,
    /// `max` and `cache` of the mode; 0 if it has none.
    max: u64,
    cache: u64,
    of: Option<Box<dyn Verifier>>,
}

impl Length {
    fn new(options: Options, hooks: &Hooks) -> Result<Self> {
        let wrong = |what: String| Error::usage(what).at(ENTRY.name);
        let limited = matches!(options.mode, LengthMode::Overlong | LengthMode::Cosine);
        let max = match options.max {
            None if limited => {
                return Err(wrong("option \"max\" is missing".into()).fix("set it to max_new_tokens"));
            }
            max => max.unwrap_or(0),
        };
        let cache = options.cache.unwrap_or(max / 5);
        if cache > max && options.mode == LengthMode::Overlong {
            return Err(wrong(format!("cache = {cache} is more than max = {max}")));
        }
        for (key, ends) in [("right", &options.right), ("wrong", &options.wrong)] {
            if ends.len() != 2 {
                return Err(wrong(format!("{key} must be two numbers, got {}", ends.len())));
            }
        }
        let judges = matches!(options.mode, LengthMode::Budget | LengthMode::Cosine);
        let of = match &options.of {
            None if judges => {
                return Err(wrong("this mode needs a verifier of the answer".into())
                    .fix("of = { verifier = \"math\" }"));
            }
            Some(_) if !judges => {
                return Err(wrong("of belongs to the modes budget and cosine".into())
                    .fix("name that verifier in a separate [[reward]]"));
            }
            of => of.as_ref().map(|of| build_with(&of.verifier, &of.options, hooks)),
        };
        let of = of.transpose().map_err(|e| e.at("of").at(ENTRY.name))?;
        Ok(Length { options, max, cache, of })
    }

    /// Length of a completion in tokens.
    fn tokens(&self, sample: &Sample<'_>) -> Result<u64> {
        if let (None, Some(tokens)) = (&self.options.column, sample.tokens) {
            return Ok(tokens as u64);
        }
        if self.options.column.is_none() && sample.columns.get(COUNTED).is_none() {
            let what = "the number of tokens of a completion is unknown";
            let fix = format!(
                "ferrl verify --model DIR counts them with the model's tokenizer; or give rows a column {COUNTED:?}"
            );
            return Err(sample.error(Error::data(what)).fix(fix));
        }
        let column = self.options.column.as_deref().unwrap_or(COUNTED);
        let value = required(sample, column, ENTRY.name)?;
        value.as_u64().ok_or_else(|| {
            sample.error(Error::data(format!("column {column:?} must be a whole number, got {value}")))
        })
    }

    /// The reward of that many tokens; `right` is the verdict of the verifier `of`.
    fn reward(&self, tokens: u64, wanted: u64, right: bool) -> f64 {
        let off = wanted as f64 - tokens as f64;
        let (o, max, cache) = (&self.options, self.max, self.cache);
        match o.mode {
            LengthMode::Overlong => {
                let soft = max - cache;
                if tokens <= soft {
                    0.0
                } else if tokens >= max {
                    -1.0
                } else {
                    -((tokens - soft) as f64) / cache as f64
                }
            }
            LengthMode::Exact => -o.alpha * off.abs(),
            LengthMode::Budget => f64::from(u8::from(right)) * (o.alpha * off + o.delta).clamp(0.0, 1.0),
            LengthMode::Cosine if tokens > max => o.overlong_reward,
            LengthMode::Cosine => {
                let ends = if right { &o.right } else { &o.wrong };
                let (start, end) = (ends[0], ends[1]);
                let turn = std::f64::consts::PI * tokens as f64 / max as f64;
                end + 0.5 * (start - end) * (1.0 + turn.cos())
            }
        }
    }

    fn wanted(&self, sample: &Sample<'_>) -> Result<u64> {
        match &self.options.target {
            _ if !matches!(self.options.mode, LengthMode::Exact | LengthMode::Budget) => Ok(0),
            LengthTarget::Tokens(tokens) => Ok(*tokens),
            LengthTarget::Column(column) => {
                let value = required(sample, column, ENTRY.name)?;
                value.as_u64().ok_or_else(|| {
                    let what = format!("column {column:?} must be a whole number of tokens, got {value}");
                    sample.error(Error::data(what))
                })
            }
        }
    }
}

impl Verifier for Length {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.of.as_ref().and_then(|of| of.extract(completion))
    }
    fn reads(&self) -> &'static [&'static str] {
        self.of.as_ref().map_or(&[], |of| of.reads())
    }
    fn file(&self) -> Option<&std::path::Path> {
        self.of.as_ref().and_then(|of| of.file())
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let (tokens, wanted) = (self.tokens(sample)?, self.wanted(sample)?);
        let judged = self.of.as_ref().map(|of| of.score(sample)).transpose()?;
        let right = judged.as_ref().is_some_and(|s| !sample.truncated && s.score.unwrap_or(s.reward) >= 1.0);
        let reward = self.reward(tokens, wanted, right);
        let mut components = vec![("length".into(), reward)];
        if judged.is_some() {
            components.insert(0, ("correct".into(), f64::from(u8::from(right))));
        }
        let score = judged.as_ref().map(|_| f64::from(u8::from(right)));
        let found = judged.and_then(|s| s.found);
        let why = (reward < 0.0).then(|| format!("it has {tokens} tokens"));
        Ok(Score { reward, components, score, found, why, ..Default::default() })
    }
    fn judges_truncated(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::build;
    use serde_json::json;

    fn overlong(max: u64, cache: u64) -> Length {
        Length { options: Options::default(), max, cache, of: None }
    }

    #[test]
    fn the_penalty_grows_over_the_cache() {
        let length = overlong(100, 20);
        for (tokens, want) in [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (5000, -1.0)] {
            assert_eq!(length.reward(tokens, 0, false), want, "{tokens}");
        }
        let hard = overlong(100, 0);
        assert_eq!((hard.reward(100, 0, false), hard.reward(101, 0, false)), (0.0, -1.0));
    }

    fn score(options: Value, tokens: usize, completion: &str) -> Score {
        let verifier = build("length", options.as_object().expect("an object")).expect("a verifier");
        let row = json!({"answer": "7", "target_tokens": 100});
        let columns = row.as_object().expect("an object").into();
        let sample = Sample { completion, tokens: Some(tokens), columns, ..Default::default() };
        verifier.score(&sample).expect("a score")
    }

    /// Closed forms of the papers.
    #[test]
    fn targets_and_the_cosine() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(score(json!({"mode": "exact"}), 130, "").reward, -0.0003 * 30.0);
        close(score(json!({"mode": "exact", "target": 50}), 40, "").reward, -0.0003 * 10.0);
        let budget = json!({"mode": "budget", "alpha": 0.01, "of": {"verifier": "numeric"}});
        close(score(budget.clone(), 100, "7").reward, 0.5);
        close(score(budget.clone(), 120, "7").reward, 0.3);
        close(score(budget.clone(), 10, "7").reward, 1.0);
        close(score(budget, 10, "8").reward, 0.0);
        let cosine = json!({"mode": "cosine", "max": 100, "of": {"verifier": "numeric"}});
        close(score(cosine.clone(), 0, "7").reward, 1.0);
        close(score(cosine.clone(), 50, "7").reward, 0.75);
        close(score(cosine.clone(), 100, "7").reward, 0.5);
        close(score(cosine.clone(), 0, "8").reward, -1.0);
        close(score(cosine.clone(), 100, "8").reward, -0.5);
        close(score(cosine.clone(), 101, "7").reward, -1.0);
        assert_eq!(score(cosine, 50, "7").score, Some(1.0));
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused() {
        for options in [
            json!({}),
            json!({"mode": "cosine", "max": 10}),
            json!({"mode": "budget"}),
            json!({"max": 10, "of": {"verifier": "math"}}),
            json!({"mode": "cosine", "max": 10, "of": {"verifier": "nmeric"}}),
            json!({"mode": "cosine", "max": 10, "of": "math"}),
            json!({"mode": "cosine", "max": 10, "right": [1], "of": {"verifier": "math"}}),
        ] {
            assert!(build("length", options.as_object().expect("an object")).is_err(), "{options}");
        }
    }
}

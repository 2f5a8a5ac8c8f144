//! Length shaping: a reward by the number of tokens, alone or combined with whether the answer is right.
//!
//! - `overlong`: DAPO's soft penalty (2503.14476), 0 up to a soft limit, then down to -1 at `max`.
//! - `exact`: L1-Exact's (2503.04697) `-alpha |target - tokens|`.
//! - `budget`: L1-Max's, `clip(alpha (target - tokens) + delta, 0, 1)` for a right answer, 0 for a wrong one.
//! - `cosine`: a right answer is worth more the shorter it is, a wrong one the longer it is (2502.03373), along a cosine
//!   from 0 to `max` tokens; beyond `max` it is `overlong_reward`.
//!
//! `budget` and `cosine` ask another verifier, named in `of`, whether the answer is right.

use super::{Entry, Options, Sample, Score, Setting, Verifier, build_with, required};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

/// Its place in the registry.
pub const ENTRY: Entry = Entry {
    name: "length",
    about: "a reward by length in tokens: DAPO's overlong penalty, L1's targets, the cosine",
    settings: &[
        Setting {
            name: "mode",
            default: "\"overlong\"",
            about: "overlong (DAPO), exact (L1-Exact: -alpha * |target - tokens|), budget (L1-Max, with of), cosine (with of)",
        },
        Setting {
            name: "max",
            default: "none",
            about: "overlong: tokens from which the penalty is -1; cosine: end of the curve; both need it",
        },
        Setting {
            name: "cache",
            default: "max / 5",
            about: "overlong: tokens below max over which the penalty grows",
        },
        Setting {
            name: "column",
            default: "the completion's own length",
            about: "column with the length in tokens, where the rows bring it",
        },
        Setting {
            name: "target",
            default: "\"target_tokens\"",
            about: "exact, budget: the length asked for, a number of tokens or the column that has it",
        },
        Setting { name: "alpha", default: "0.0003", about: "exact, budget: reward per token off the target" },
        Setting {
            name: "delta",
            default: "0.5",
            about: "budget: reward of a right answer of exactly the target's length",
        },
        Setting {
            name: "right",
            default: "[1.0, 0.5]",
            about: "cosine: reward of a right answer of no tokens and of max tokens",
        },
        Setting {
            name: "wrong",
            default: "[-1.0, -0.5]",
            about: "cosine: reward of a wrong answer of no tokens and of max tokens",
        },
        Setting { name: "overlong_reward", default: "-1.0", about: "cosine: reward beyond max" },
        Setting {
            name: "of",
            default: "none",
            about: "budget, cosine: the verifier that says what is right, { verifier = \"math\", options = { ... } }",
        },
    ],
    build: |options| Ok(Box::new(Length::new(options)?)),
};

/// The column with the length, for completions without tokens.
const COUNTED: &str = "completion_tokens";

/// What is rewarded.
#[derive(Clone, Debug, PartialEq)]
enum LengthRule {
    Overlong { max: u64, cache: u64 },
    Exact { target: LengthTarget, alpha: f64 },
    Budget { target: LengthTarget, alpha: f64, delta: f64 },
    Cosine { max: u64, right: [f64; 2], wrong: [f64; 2], overlong: f64 },
}

/// The length that is asked for.
#[derive(Clone, Debug, PartialEq)]
enum LengthTarget {
    Tokens(u64),
    Column(String),
}

/// The verifier.
pub struct Length {
    shape: LengthRule,
    column: Option<String>,
    of: Option<Box<dyn Verifier>>,
}

impl Length {
    fn new(options: &Options<'_>) -> Result<Self> {
        let modes = [("overlong", 0), ("exact", 1), ("budget", 2), ("cosine", 3)];
        let mode = options.choice("mode", 0, &modes)?;
        let shape = match mode {
            0 => {
                let max = max(options)?;
                let cache = options.count("cache", max / 5, 0)?;
                if cache > max {
                    return Err(
                        Error::usage(format!("cache = {cache} is more than max = {max}")).at(ENTRY.name)
                    );
                }
                LengthRule::Overlong { max, cache }
            }
            1 => LengthRule::Exact { target: target(options)?, alpha: options.number("alpha", 3e-4, 0.0)? },
            2 => LengthRule::Budget {
                target: target(options)?,
                alpha: options.number("alpha", 3e-4, 0.0)?,
                delta: options.number("delta", 0.5, 0.0)?,
            },
            _ => LengthRule::Cosine {
                max: max(options)?,
                right: two(options, "right", [1.0, 0.5])?,
                wrong: two(options, "wrong", [-1.0, -0.5])?,
                overlong: options.number("overlong_reward", -1.0, f64::NEG_INFINITY)?,
            },
        };
        let column = options.has("column").then(|| options.required_text("column")).transpose()?;
        let of = options.value("of").map(|value| nested(value, options)).transpose()?;
        let judges = matches!(shape, LengthRule::Budget { .. } | LengthRule::Cosine { .. });
        match (judges, of.is_some()) {
            (true, false) => Err(Error::usage("this mode needs to know which answers are right")
                .at(ENTRY.name)
                .fix("of = { verifier = \"math\" }")),
            (false, true) => Err(Error::usage("of belongs to the modes budget and cosine")
                .at(ENTRY.name)
                .fix("name that verifier in a [[reward]] of its own")),
            _ => Ok(Length { shape, column, of }),
        }
    }

    /// Length of a completion in tokens.
    fn tokens(&self, sample: &Sample<'_>) -> Result<u64> {
        if let (None, Some(tokens)) = (&self.column, sample.tokens) {
            return Ok(tokens as u64);
        }
        if self.column.is_none() && sample.columns.get(COUNTED).is_none() {
            let what = "length needs the number of tokens of a completion, and it is not known";
            let fix = format!(
                "ferrl verify --model DIR counts them with the model's tokenizer; or give rows a column {COUNTED:?}"
            );
            return Err(sample.error(Error::data(what)).fix(fix));
        }
        let column = self.column.as_deref().unwrap_or(COUNTED);
        let value = required(sample, column, ENTRY.name)?;
        value.as_u64().ok_or_else(|| {
            sample.error(Error::data(format!("column {column:?} must be a whole number, got {value}")))
        })
    }

    /// The reward for that many tokens; `right` where another verifier says whether the answer is.
    fn reward(&self, tokens: u64, wanted: u64, right: bool) -> f64 {
        let off = wanted as f64 - tokens as f64;
        match self.shape {
            LengthRule::Overlong { max, cache } => {
                let soft = max - cache;
                if tokens <= soft {
                    0.0
                } else if tokens >= max {
                    -1.0
                } else {
                    -((tokens - soft) as f64) / cache as f64
                }
            }
            LengthRule::Exact { alpha, .. } => -alpha * off.abs(),
            LengthRule::Budget { alpha, delta, .. } => {
                f64::from(u8::from(right)) * (alpha * off + delta).clamp(0.0, 1.0)
            }
            LengthRule::Cosine { max, overlong, .. } if tokens > max => overlong,
            LengthRule::Cosine { max, right: good, wrong: bad, .. } => {
                let [start, end] = if right { good } else { bad };
                let turn = std::f64::consts::PI * tokens as f64 / max as f64;
                end + 0.5 * (start - end) * (1.0 + turn.cos())
            }
        }
    }

    fn wanted(&self, sample: &Sample<'_>) -> Result<u64> {
        let (LengthRule::Exact { target, .. } | LengthRule::Budget { target, .. }) = &self.shape else {
            return Ok(0);
        };
        match target {
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

fn max(options: &Options<'_>) -> Result<u64> {
    if !options.has("max") {
        let error = Error::usage("option \"max\" is missing").at(ENTRY.name);
        return Err(error.fix("set it to max_new_tokens"));
    }
    options.count("max", 0, 1)
}

fn target(options: &Options<'_>) -> Result<LengthTarget> {
    match options.value("target") {
        Some(Value::Number(_)) => options.count("target", 0, 1).map(LengthTarget::Tokens),
        _ => options.text("target", "target_tokens").map(LengthTarget::Column),
    }
}

fn two(options: &Options<'_>, key: &str, default: [f64; 2]) -> Result<[f64; 2]> {
    match options.numbers(key)?.as_deref() {
        None => Ok(default),
        Some([start, end]) => Ok([*start, *end]),
        Some(list) => {
            Err(Error::usage(format!("{key} must be two numbers, got {}", list.len())).at(ENTRY.name))
        }
    }
}

/// The verifier that a table names.
fn nested(value: &Value, options: &Options<'_>) -> Result<Box<dyn Verifier>> {
    let fix = "of = { verifier = \"math\", options = { column = \"answer\" } }";
    let wrong = |what: String| Error::usage(what).at("of").at(ENTRY.name).fix(fix);
    let table = value.as_object().ok_or_else(|| wrong(format!("must be a table, got {value}")))?;
    if let Some(key) = table.keys().find(|key| !["verifier", "options"].contains(&key.as_str())) {
        return Err(wrong(format!("unknown key {key:?}, expected verifier and options")));
    }
    let name = table.get("verifier").and_then(Value::as_str);
    let name = name.ok_or_else(|| wrong("names no verifier".into()))?;
    let own = match table.get("options") {
        None => Map::new(),
        Some(Value::Object(own)) => own.clone(),
        Some(other) => return Err(wrong(format!("options must be a table, got {other}"))),
    };
    build_with(name, &own, options.hooks()).map_err(|e| e.at("of").at(ENTRY.name))
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

    fn plain(shape: LengthRule) -> Length {
        Length { shape, column: None, of: None }
    }

    #[test]
    fn the_penalty_grows_over_the_cache() {
        let length = plain(LengthRule::Overlong { max: 100, cache: 20 });
        for (tokens, want) in [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (5000, -1.0)] {
            assert_eq!(length.reward(tokens, 0, false), want, "{tokens}");
        }
        let hard = plain(LengthRule::Overlong { max: 100, cache: 0 });
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

//! Overlong shaping as in DAPO: nothing up to a soft limit, then a growing penalty down to -1.

use super::{Entry, Options, Sample, Score, Setting, Verifier, required};
use ferrl_engine::{Error, Result};

/// Its place in the registry.
pub const ENTRY: Entry = Entry {
    name: "length",
    about: "a penalty for completions near or over the length limit (DAPO)",
    settings: &[
        Setting { name: "max", default: "", about: "tokens from which the penalty is -1" },
        Setting { name: "cache", default: "max / 5", about: "tokens below max over which it grows" },
        Setting {
            name: "column",
            default: "the completion's own length",
            about: "column with the length in tokens, where the rows bring it",
        },
    ],
    build: |options| Ok(Box::new(Length::new(options)?)),
};

/// The column that has the length where nobody counted it.
const COUNTED: &str = "completion_tokens";

/// The verifier.
pub struct Length {
    max: u64,
    cache: u64,
    column: Option<String>,
}

impl Length {
    fn new(options: &Options<'_>) -> Result<Self> {
        if !options.has("max") {
            return Err(Error::usage("option \"max\" is missing")
                .at(ENTRY.name)
                .fix("set it to max_new_tokens"));
        }
        let max = options.count("max", 0, 1)?;
        let cache = options.count("cache", max / 5, 0)?;
        if cache > max {
            return Err(Error::usage(format!("cache = {cache} is more than max = {max}")).at(ENTRY.name));
        }
        let column = options.has("column").then(|| options.required_text("column")).transpose()?;
        Ok(Length { max, cache, column })
    }

    /// Length of a completion in tokens.
    fn tokens(&self, sample: &Sample<'_>) -> Result<u64> {
        if let (None, Some(tokens)) = (&self.column, sample.tokens) {
            return Ok(tokens as u64);
        }
        if self.column.is_none() && sample.columns.get(COUNTED).is_none() {
            let what = "length goes by the tokens of a completion, and nothing says how many it has";
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

    /// The reward for that many tokens.
    pub fn reward(&self, tokens: u64) -> f64 {
        let soft = self.max - self.cache;
        if tokens <= soft {
            0.0
        } else if tokens >= self.max {
            -1.0
        } else {
            -((tokens - soft) as f64) / self.cache as f64
        }
    }
}

impl Verifier for Length {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn about(&self) -> &'static str {
        ENTRY.about
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let reward = self.reward(self.tokens(sample)?);
        Ok(Score { reward, components: vec![("length".into(), reward)], ..Default::default() })
    }
    fn judges_truncated(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_penalty_grows_over_the_cache() {
        let length = Length { max: 100, cache: 20, column: None };
        for (tokens, want) in [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (5000, -1.0)] {
            assert_eq!(length.reward(tokens), want, "{tokens}");
        }
        let hard = Length { cache: 0, ..length };
        assert_eq!((hard.reward(100), hard.reward(101)), (0.0, -1.0));
    }
}

//! Regular expressions, matched in linear time for any pattern.

use super::{Entry, Sample, Score, Verifier, schema_for};
use ferrl_engine::{Error, Result};
use regex::{Regex, RegexBuilder};

pub const ENTRY: Entry = Entry {
    name: "regex",
    about: "1 if the completion matches a regular expression, otherwise 0",
    schema: || schema_for!(Options),
    build: |given| Ok(Box::new(RegexFormat::new(given.read()?)?)),
};

with_defaults! {
struct Options {
    /// The regular expression; a dot also matches a line break.
    #[schemars(extend("required" = true))]
    pattern: String = String::new(),
    /// Whether it must match the whole (trimmed) completion.
    whole: bool = true,
}
}

pub struct RegexFormat {
    regex: Regex,
}

impl RegexFormat {
    fn new(Options { pattern, whole }: Options) -> Result<Self> {
        let build = |p: &str| RegexBuilder::new(p).dot_matches_new_line(true).size_limit(1 << 20).build();
        // Compiled alone first: within the group a stray parenthesis could change its meaning.
        let regex = build(&pattern)
            .and_then(|alone| if whole { build(&format!(r"\A(?:{pattern})\z")) } else { Ok(alone) });
        let regex = regex.map_err(|e| Error::usage(format!("pattern {pattern:?}: {e}")).at(ENTRY.name))?;
        Ok(RegexFormat { regex })
    }
}

impl Verifier for RegexFormat {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let fits = self.regex.is_match(sample.completion.trim());
        let why = (!fits).then(|| "it does not match the pattern".to_string());
        let score = Score::single("format", f64::from(u8::from(fits)));
        Ok(Score { score: None, found: Some(fits), why, ..score })
    }
}

//! Format reward: tags in order, each exactly once, `<think>…</think><answer>…</answer>`, as in DeepSeek-R1 (2501.12948).
//!
//! Repeated or unclosed tags and text around them earn nothing: otherwise the policy learns to write more tags. Mode `count` rewards
//! every tag that occurs exactly once, as a partial reward for early training.

use super::{Entry, Sample, Score, Verifier};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub const ENTRY: Entry = Entry {
    name: "format",
    about: "1 if the completion is <think>…</think><answer>…</answer>, each once, otherwise 0",
    schema: || schema_for!(Options),
    build: |given| Ok(Box::new(Format::new(given.read()?)?)),
};

with_defaults! {
struct Options {
    /// Names of the tags, in order.
    tags: Vec<String> = vec!["think".into(), "answer".into()],
    /// Reward: all (1 if the whole format is right), count (the fraction of tags that occur exactly once).
    mode: FormatMode = FormatMode::All,
    /// Whether the prompt ends with the first opening tag, so that the completion starts inside it.
    prefilled: bool = false,
    /// Allow text before, between and after the tags.
    outside: bool = false,
    /// Allow empty tags.
    empty: bool = false,
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum FormatMode {
    All,
    Count,
}

pub struct Format {
    /// Opening and closing tag of each.
    tags: Vec<(String, String)>,
    options: Options,
}

impl Format {
    fn new(options: Options) -> Result<Self> {
        let names = &options.tags;
        let odd = |name: &str| name.is_empty() || name.contains(['<', '>', '/']) || name.trim() != name;
        let wrong = match names.iter().enumerate().find(|(at, name)| odd(name) || names[..*at].contains(name))
        {
            Some((_, name)) if odd(name) => format!("{name:?} is not a tag name"),
            Some((_, name)) => format!("the tag {name:?} is listed twice"),
            None if names.is_empty() => "tags is empty".to_string(),
            None => String::new(),
        };
        if !wrong.is_empty() {
            return Err(Error::usage(wrong).at(ENTRY.name).fix("tags = [\"think\", \"answer\"]"));
        }
        let tags = names.iter().map(|name| (format!("<{name}>"), format!("</{name}>"))).collect();
        Ok(Format { tags, options })
    }

    /// What is wrong with a completion's format; `None` if it is right.
    fn problem(&self, completion: &str) -> Option<String> {
        let mut rest = completion;
        for (at, (open, close)) in self.tags.iter().enumerate() {
            if let Some(tag) = [open, close].into_iter().find(|tag| occurrences(completion, tag) > 1) {
                return Some(format!("{tag} occurs more than once"));
            }
            let opened = self.options.prefilled && at == 0;
            let inner = match (opened, rest.split_once(open.as_str())) {
                (true, None) => rest,
                (true, Some(_)) => return Some(format!("{open} is already in the prompt")),
                (false, Some((before, inner))) if self.options.outside || before.trim().is_empty() => inner,
                (false, Some(_)) => return Some(format!("there is text before {open}")),
                (false, None) => return Some(format!("{open} is missing, or in the wrong place")),
            };
            let Some((inner, after)) = inner.split_once(close.as_str()) else {
                return Some(format!("{close} is missing, or in the wrong place"));
            };
            let stray =
                self.tags.iter().flat_map(|(open, close)| [open, close]).find(|tag| inner.contains(*tag));
            if let Some(tag) = stray {
                return Some(format!("{tag} is inside {open}"));
            }
            if !self.options.empty && inner.trim().is_empty() {
                return Some(format!("{open} is empty"));
            }
            rest = after;
        }
        (!self.options.outside && !rest.trim().is_empty())
            .then(|| "there is text after the last tag".to_string())
    }

    /// The fraction of tags that occur exactly once.
    fn counted(&self, completion: &str) -> f64 {
        let all = self
            .tags
            .iter()
            .flat_map(|(open, close)| [open, close])
            .skip(usize::from(self.options.prefilled));
        let (mut tags, mut once) = (0u32, 0u32);
        for tag in all {
            tags += 1;
            once += u32::from(occurrences(completion, tag) == 1);
        }
        f64::from(once) / f64::from(tags.max(1))
    }
}

/// Number of occurrences of a tag, at most 2.
fn occurrences(text: &str, tag: &str) -> usize {
    text.matches(tag).take(2).count()
}

impl Verifier for Format {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let why = self.problem(sample.completion);
        let fits = why.is_none();
        let reward = match self.options.mode {
            FormatMode::Count => self.counted(sample.completion),
            FormatMode::All => f64::from(u8::from(fits)),
        };
        Ok(Score { score: None, why, ..Score::single("format", reward) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::build;
    use serde_json::json;

    fn reward(options: serde_json::Value, completion: &str) -> f64 {
        let verifier = build("format", options.as_object().expect("an object")).expect("a verifier");
        verifier.score(&Sample { completion, ..Default::default() }).expect("a score").reward
    }

    #[test]
    fn tags_in_order_and_exactly_once() {
        for (completion, want) in [
            ("<think>a</think><answer>b</answer>", 1.0),
            (" <think>a\nb</think>\n\n<answer> 7 </answer>\n", 1.0),
            ("<think>a</think> so <answer>b</answer>", 0.0),
            ("<think>a</think><answer>b</answer> done", 0.0),
            ("<answer>b</answer><think>a</think>", 0.0),
            ("<think>a</think><answer>b</answer></answer>", 0.0),
            ("<think>a<think>a</think><answer>b</answer>", 0.0),
            ("<think>a<answer>b</answer></think>", 0.0),
            ("<think></think><answer>b</answer>", 0.0),
            ("<think>a</think><answer>b", 0.0),
            ("a</think><answer>b</answer>", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(reward(json!({}), completion), want, "{completion}");
        }
        assert_eq!(reward(json!({"prefilled": true}), "a</think><answer>b</answer>"), 1.0);
        assert_eq!(reward(json!({"prefilled": true}), "<think>a</think><answer>b</answer>"), 0.0);
        assert_eq!(reward(json!({"outside": true}), "x <think>a</think> y <answer>b</answer> z"), 1.0);
        assert_eq!(reward(json!({"tags": "final"}), "<final>1</final>"), 1.0);
        assert_eq!(reward(json!({"mode": "count"}), "<think>a</think>b</answer></answer>"), 0.5);
        assert_eq!(reward(json!({"empty": true}), "<think></think><answer></answer>"), 1.0);
    }

    #[test]
    fn odd_tags_are_refused() {
        for tags in [json!([]), json!(["a", "a"]), json!(["<a>"]), json!([""])] {
            let options = json!({ "tags": tags });
            assert!(build("format", options.as_object().expect("an object")).is_err(), "{tags}");
        }
    }
}

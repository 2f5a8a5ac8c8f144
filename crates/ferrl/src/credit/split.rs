//! The steps of a completion, in its tokens.
//!
//! Steps are found in the text; a token belongs to the step of its first character. A state is a prefix of sampled tokens, so that
//! continuations follow the tokens of the completion without tokenizing again.

use crate::solution;
use ferrl_engine::Result;
use ferrl_engine::tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a completion is split into steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepSplit {
    /// Lines, the answer behind `####` with the last (VinePPO's split of GSM8K).
    #[default]
    Gsm8k,
    /// Sentences, formulas and clauses (VinePPO's split of MATH).
    Math,
    Lines,
    /// Every `step_tokens` tokens.
    Tokens,
}

/// A step: its text, and the number of tokens of the completion up to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SolutionStep {
    pub text: String,
    pub end: usize,
}

/// The steps of a completion of these tokens; `text` is its text without the stop. `None` if it cannot be split or has no
/// tokens.
pub(crate) fn steps(
    split: (StepSplit, usize),
    ids: &[u32],
    text: &str,
    tokenizer: &Tokenizer,
) -> Result<Option<Vec<SolutionStep>>> {
    if ids.is_empty() {
        return Ok(None);
    }
    let (split, step_tokens) = split;
    if split == StepSplit::Tokens {
        let chunk = |(i, part): (usize, &[u32])| {
            let end = (i * step_tokens + step_tokens).min(ids.len());
            Ok(SolutionStep { text: tokenizer.decode(part, true)?, end })
        };
        return ids.chunks(step_tokens).enumerate().map(chunk).collect::<Result<_>>().map(Some);
    }
    let Some(parts) = texts(split, text) else { return Ok(None) };
    Ok(Some(in_tokens(&parts, &starts(ids, tokenizer)?)))
}

/// The steps of a text; `None` where it cannot be split, and where only tokens can say.
pub(crate) fn texts(split: StepSplit, text: &str) -> Option<Vec<&str>> {
    match split {
        StepSplit::Gsm8k => solution::steps(solution::SolutionKind::Gsm8k, text).ok(),
        StepSplit::Math => solution::steps(solution::SolutionKind::Math, text).ok(),
        StepSplit::Lines => Some(text.split_inclusive('\n').collect()),
        StepSplit::Tokens => None,
    }
}

/// Where the first character of each token stands in the text.
pub(crate) fn starts(ids: &[u32], tokenizer: &Tokenizer) -> Result<Vec<usize>> {
    let (mut stream, mut length, mut out) = (tokenizer.stream(true), 0, Vec::with_capacity(ids.len()));
    for &id in ids {
        out.push(length);
        length += stream.push(id)?.len();
    }
    Ok(out)
}

/// Steps of a text as numbers of tokens. A step in which no token begins joins the step before; tokens behind the text (the
/// stop) belong to the last step.
fn in_tokens(parts: &[&str], starts: &[usize]) -> Vec<SolutionStep> {
    let (mut out, mut from): (Vec<SolutionStep>, usize) = (Vec::new(), 0);
    for (i, part) in parts.iter().enumerate() {
        from += part.len();
        let last = i + 1 == parts.len();
        let end = if last { starts.len() } else { starts.partition_point(|&start| start < from) };
        match out.last_mut() {
            Some(before) if before.end == end => before.text += part,
            _ => out.push(SolutionStep { text: (*part).to_string(), end }),
        }
    }
    if out.is_empty() {
        out.push(SolutionStep { text: String::new(), end: starts.len() });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::tokenizer::train_chars;

    #[test]
    fn a_token_belongs_to_the_step_of_its_first_character() {
        // "ab", "\nc" (straddles), "d", "\n", stop: boundaries at 3 ("ab\n") and 5 ("cd").
        let step = |text: &str, end| SolutionStep { text: text.into(), end };
        assert_eq!(in_tokens(&["ab\n", "cd\n"], &[0, 2, 4, 5, 6]), [step("ab\n", 2), step("cd\n", 5)]);
        // A step in which no token begins joins the one before.
        assert_eq!(in_tokens(&["a\n", "\n", "b"], &[0, 1, 4]), [step("a\n\n", 2), step("b", 3)]);
        assert_eq!(in_tokens(&[], &[0]), [step("", 1)]);
    }

    #[test]
    fn steps_tile_completion_and_tokens() {
        let text: String = (' '..='~').chain(['\n']).collect();
        let specials = ["<pad>", "<eos>"].map(String::from);
        let tokenizer = train_chars([text].into_iter(), &specials).unwrap();
        let said = "one\ntwo\n\nthree\n#### 4";
        let mut ids = tokenizer.encode_text(said).unwrap();
        ids.push(tokenizer.eos()[0]);
        for split in [StepSplit::Gsm8k, StepSplit::Math, StepSplit::Lines, StepSplit::Tokens] {
            let found = steps((split, 4), &ids, said, &tokenizer).unwrap().unwrap();
            assert!(found.len() > 1 || split == StepSplit::Math, "{split:?}");
            let joined: String = found.iter().map(|s| s.text.as_str()).collect();
            assert_eq!(joined, said, "{split:?}");
            assert_eq!(found.last().unwrap().end, ids.len(), "{split:?}: the end token is of the last step");
            assert!(found.windows(2).all(|w| w[0].end < w[1].end), "{split:?}");
            for (i, step) in found.iter().enumerate() {
                let from = if i == 0 { 0 } else { found[i - 1].end };
                assert_eq!(tokenizer.decode(&ids[from..step.end], true).unwrap(), step.text, "{split:?}");
            }
        }
        let twice = "a\n#### 1\n#### 2";
        let ids = tokenizer.encode_text(twice).unwrap();
        assert_eq!(steps((StepSplit::Gsm8k, 1), &ids, twice, &tokenizer).unwrap(), None);
        assert_eq!(steps((StepSplit::Lines, 1), &[], "", &tokenizer).unwrap(), None);
    }
}

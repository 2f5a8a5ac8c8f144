//! Converts encoded rows to training examples.

use super::{Item, Prompt, RewardedGroup};
use crate::algo::Feed;
use crate::data::{self, EncodedRow, Encoder, Example, MaskedTokens};
use crate::experience::{Evidence, Sequence};
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Whether a row has completions with rewards.
pub(super) fn is_group(row: &data::Row) -> bool {
    ["completions", "rewards"].iter().all(|c| row.get(*c).is_some_and(|v| !v.is_null()))
}

/// What a row asks, without its tokens: as rewards see it.
fn asked(prompt: &Value, columns: data::Row, place: &str, encoder: &Encoder) -> Prompt {
    Prompt {
        text: match prompt {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        },
        messages: prompt.as_array().cloned().unwrap_or_default(),
        renamed: encoder.renamed().to_vec(),
        columns,
        place: place.to_string(),
        ..Default::default()
    }
}

/// The prompt of an encoded row, without its tokens: as rewards see it.
pub fn prompt_of(sample: &EncodedRow, encoder: &Encoder) -> Prompt {
    asked(&sample.prompt, sample.extra.clone(), &sample.place, encoder)
}

/// Tokens with their mask, as a sequence of that kind.
fn sequence(t: MaskedTokens, kind: Evidence) -> Sequence {
    let pair = matches!(kind, Evidence::Chosen | Evidence::Rejected).then_some(0);
    Sequence { pair, ids: t.ids, trained: t.mask, weight: 1.0, kind, ..Default::default() }
}

/// The completions of a row with rewards; one without a stop token counts as truncated.
fn rewarded_sequences(
    completions: Vec<MaskedTokens>,
    rewards: &[(String, Vec<f32>)],
    is_special: impl Fn(u32) -> bool,
) -> Vec<Sequence> {
    let one = |(i, tokens): (usize, MaskedTokens)| {
        let mut s = sequence(tokens, Evidence::Plain);
        s.truncated = s.ids.last().is_some_and(|&id| !is_special(id));
        s.components = rewards.iter().map(|(name, list)| (name.clone(), list[i])).collect();
        s.sources = s.components.iter().map(|c| (1.0, Some(c.1))).collect();
        let total = s.components.iter().map(|c| c.1).sum();
        s.rewarded(total)
    };
    completions.into_iter().enumerate().map(one).collect()
}

/// An encoded row as an example; `index` is the number of its prompt in the run.
pub(super) fn item(sample: EncodedRow, feed: Feed, index: u64, encoder: &Encoder) -> Result<Item> {
    let tokenizer = encoder.tokenizer();
    let ask = |ids: Vec<u32>, prompt: &Value, columns: data::Row| Prompt {
        index,
        ids,
        ..asked(prompt, columns, &sample.place, encoder)
    };
    let number = |name: &str, otherwise: f32| match sample.extra.get(name) {
        None | Some(Value::Null) => Ok(otherwise),
        Some(value) => value.as_f64().map(|n| n as f32).filter(|n| n.is_finite()).ok_or_else(|| {
            Error::data(format!("column {name} is {value}, expected a number of 32 bits"))
                .at(&sample.place)
                .fix("correct the row, or map another column")
        }),
    };
    Ok(match sample.example {
        Example::Text(tokens) if feed == Feed::Weighted => {
            Item::Sequences(vec![sequence(tokens, Evidence::Plain).rewarded(number("advantage", 1.0)?)])
        }
        Example::Text(tokens) => Item::Sequences(vec![sequence(tokens, Evidence::Plain)]),
        Example::Pair { chosen, rejected } => {
            let margin = number("margin", 0.0)?;
            let chosen = Sequence { margin, ..sequence(chosen, Evidence::Chosen) };
            Item::Sequences(vec![chosen, sequence(rejected, Evidence::Rejected)])
        }
        Example::Labelled { tokens, label } => {
            Item::Sequences(vec![sequence(tokens, Evidence::Labelled(label))])
        }
        Example::Target { tokens, target } => {
            Item::Sequences(vec![sequence(tokens, Evidence::Target(target))])
        }
        Example::Group { completions, rewards } if feed == Feed::Weighted => {
            let total = |i: usize| rewards.iter().map(|(_, list)| list[i]).sum();
            let completions = completions.into_iter().enumerate();
            Item::Sequences(
                completions.map(|(i, t)| sequence(t, Evidence::Plain).rewarded(total(i))).collect(),
            )
        }
        Example::Prompt { .. } if is_group(&sample.extra) => {
            return Err(Error::data(
                "this row has completions with rewards, but the first row is a prompt alone",
            )
            .at(sample.place)
            .fix("give either kind of row to a stage, not both"));
        }
        Example::Prompt { ids } => Item::Prompt(ask(ids, &sample.prompt, sample.extra)),
        Example::Group { completions, rewards } => {
            let is_special = |id| tokenizer.is_special(id);
            let completions = rewarded_sequences(completions, &rewards, is_special);
            let first = completions.first().and_then(|s| Some(s.ids[..=s.actions().next()?].to_vec()));
            let prompt = ask(first.unwrap_or_default(), &sample.prompt, sample.extra);
            Item::Group(RewardedGroup { prompt, completions, place: sample.place })
        }
        other => {
            return Err(Error::data(format!("no algorithm learns from {other:?} yet")).at(sample.place));
        }
    })
}

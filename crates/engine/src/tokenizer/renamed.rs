//! Added tokens that exist only in `tokenizer_config.json`, under the ids of unused vocabulary entries.
//!
//! E.g. InternLM2's `added_tokens_decoder` has `<|im_end|>` as id 92542, where `tokenizer.json` has `[UNUSED_TOKEN_145]`. Adding
//! them as new tokens would give them ids beyond the embedding; instead the vocabulary entries are renamed.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::HfTokenizer;
use super::config::{TokenizerConfig, content};

/// The text of `tokenizer.json` with unused tokens renamed; `None` if none needs to be.
pub(super) fn vocabulary(inner: &HfTokenizer, text: &str, config: &TokenizerConfig) -> Option<String> {
    let stands_in = |(id, value): (u32, &Value)| {
        let name = content(value)?;
        let old = inner.id_to_token(id).filter(|_| inner.token_to_id(name).is_none())?;
        (old != name && is_unused(&old)).then(|| (old, name.to_owned()))
    };
    let mut names: HashMap<String, String> = config.listed().into_iter().filter_map(stands_in).collect();
    if names.is_empty() {
        return None;
    }
    let mut json: Value = serde_json::from_str(text).ok()?;
    let used = merged(&json["model"]["merges"]);
    let listed =
        json["added_tokens"].as_array().into_iter().flatten().filter_map(|t| content(t).map(String::from));
    let used: HashSet<String> = used.into_iter().chain(listed).collect();
    names.retain(|old, _| !used.contains(old));
    match json.get_mut("model")?.get_mut("vocab")? {
        Value::Object(vocab) => {
            let renamed = std::mem::take(vocab).into_iter();
            vocab.extend(renamed.map(|(name, id)| (names.get(&name).cloned().unwrap_or(name), id)));
        }
        Value::Array(pieces) => {
            let named = pieces.iter_mut().filter_map(|piece| piece.get_mut(0));
            named.for_each(|piece| {
                if let Some(new) = piece.as_str().and_then(|old| names.get(old)) {
                    *piece = new.as_str().into();
                }
            });
        }
        _ => return None,
    }
    Some(json.to_string())
}

/// Whether a token's name marks it as reserved.
fn is_unused(name: &str) -> bool {
    let name = name.to_lowercase();
    ["unused", "reserved", "extra_", "placeholder"].iter().any(|word| name.contains(word))
}

/// Every token that takes part in a merge: renaming one would change tokenization.
fn merged(merges: &Value) -> HashSet<String> {
    let mut used = HashSet::new();
    for merge in merges.as_array().into_iter().flatten() {
        let pair = match merge {
            Value::String(text) => text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
            Value::Array(two) => two
                .first()
                .and_then(Value::as_str)
                .zip(two.get(1).and_then(Value::as_str))
                .map(|(a, b)| (a.to_owned(), b.to_owned())),
            _ => None,
        };
        if let Some((a, b)) = pair {
            used.extend([format!("{a}{b}"), a, b]);
        }
    }
    used
}

//! Multimodal checkpoints whose text part is a supported family: `config.json` has the text configuration under `text_config`,
//! and its tensors have a prefix. Only the text part is read, and saved under the family's own names.

use serde_json::{Map, Value, json};

use super::FAMILIES;
use super::fields::Fields;
use crate::Result;

/// Top-level fields that apply to the text part unless it overrides them.
const SHARED: [&str; 7] = [
    "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    "transformers_version",
];

/// Prefixes that replace `model.` for text tensors: in older and newer versions of transformers, and in Idefics 3 and SmolVLM.
const PREFIXES: [&str; 3] = ["language_model.model.", "model.language_model.", "model.text_model."];

/// The text configuration; `None` if the model is text-only.
pub fn text_config(json: &Value) -> Result<Option<Value>> {
    let whole = Fields::new(json)?;
    let place = "config.json: text_config";
    let Some(text) = whole.object("text_config", place)? else { return Ok(None) };
    let Some(kind) = text.text("model_type")? else {
        return Err(text.error("field model_type is missing").fix("add the model_type of the text part"));
    };
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == kind) else {
        let known = FAMILIES.iter().map(|family| family.model_type);
        return Err(super::unknown(
            text.error(format!("model type {kind:?} of the text part is not supported")),
            kind,
            known,
        ));
    };
    let mut out: Map<String, Value> = json["text_config"].as_object().cloned().unwrap_or_default();
    for key in SHARED {
        if let Some(value) = whole.get(key).filter(|_| text.get(key).is_none()) {
            out.insert(key.into(), value.clone());
        }
    }
    out.insert("architectures".into(), json!([family.architectures().causal]));
    Ok(Some(Value::Object(out)))
}

/// The prefix that transformers gives the text part's modules in place of `model.`; `None` if the model is text-only.
pub(crate) fn module_prefix(whole: &Value) -> Option<&'static str> {
    whole["text_config"].as_object().filter(|text| !text.is_empty())?;
    let [_, usual, other] = PREFIXES;
    Some(if matches!(whole["model_type"].as_str(), Some("idefics3" | "smolvlm")) { other } else { usual })
}

/// The family's own name of a module or tensor of a multimodal model; `None` outside the text part.
pub(crate) fn own_name(stored: &str) -> Option<String> {
    if let Some(rest) = PREFIXES.iter().find_map(|prefix| stored.strip_prefix(prefix)) {
        return Some(format!("model.{rest}"));
    }
    let bare = stored.strip_prefix("language_model.").unwrap_or(stored);
    let text = ["model.layers.", "model.norm", "model.embed_tokens", "lm_head", "score", "v_head."];
    text.iter().any(|start| bare.starts_with(start)).then(|| bare.to_string())
}

/// Whether the whole model's logits use the embedding. Its head belongs to the whole, whose `tie_word_embeddings` then counts
/// although the text part has one of its own.
pub(crate) fn ties_head(whole: &Value) -> bool {
    whole["tie_word_embeddings"] == true
}

/// Names that a text tensor may have in a multimodal checkpoint.
pub(crate) fn stored_names(name: &str) -> Vec<String> {
    if name == "lm_head.weight" {
        return vec!["language_model.lm_head.weight".into(), "model.lm_head.weight".into()];
    }
    let bare = name.strip_prefix("model.").unwrap_or(name);
    PREFIXES.iter().map(|prefix| format!("{prefix}{bare}")).collect()
}

/// Whether a stored tensor belongs to the text part.
pub(crate) fn is_text(stored: &str) -> bool {
    stored.starts_with("language_model.")
        || stored.starts_with("lm_head.")
        || PREFIXES.iter().any(|prefix| stored.starts_with(prefix))
}

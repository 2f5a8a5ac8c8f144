//! Special tokens in the JSON files next to `tokenizer.json`.

use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use crate::{Error, Result};

/// Roles a special token can have, in the order `transformers` registers them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const CONFIG: &str = "tokenizer_config.json";
const SPECIALS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";

/// The settings of a tokenizer, unmodified, so that saving loses nothing.
#[derive(Clone, Default)]
pub(crate) struct TokenizerConfig {
    settings: Map<String, Value>,
    specials: Map<String, Value>,
    template: Option<String>,
    pub bos_id: Option<u32>,
    pub pad_id: Option<u32>,
    /// EOS ids of the model's generation settings, in addition to the tokenizer's `eos_token`.
    pub eos_ids: Vec<u32>,
}

impl TokenizerConfig {
    /// Reads whichever of the files exist; a broken one is an error.
    pub fn read(dir: &Path) -> Result<Self> {
        let settings = read_json(&dir.join(CONFIG))?;
        let generation = read_json(&dir.join("generation_config.json"))?;
        let model = read_json(&dir.join("config.json"))?;
        let template = read_text(&dir.join(TEMPLATE))?;
        // A model's `bos_token_id` may be a token its tokenizer never uses, so it counts only without tokenizer settings.
        let alone = settings.is_none();
        let model = [generation.unwrap_or_default(), model.unwrap_or_default()];
        let first =
            |key: &str| model.iter().map(|m| ids(m.get(key))).find(|i| !i.is_empty()).unwrap_or_default();
        Ok(TokenizerConfig {
            bos_id: first("bos_token_id").first().copied().filter(|_| alone),
            pad_id: first("pad_token_id").first().copied(),
            eos_ids: eos_ids(dir)?,
            settings: settings.unwrap_or_default(),
            specials: read_json(&dir.join(SPECIALS))?.unwrap_or_default(),
            template,
        })
    }

    /// The settings of a newly trained tokenizer.
    pub fn fresh(settings: Value) -> Self {
        let settings = settings.as_object().cloned().unwrap_or_default();
        TokenizerConfig { settings, ..TokenizerConfig::default() }
    }

    /// The token with a role such as `eos_token`.
    pub fn named(&self, role: &str) -> Option<&str> {
        [&self.settings, &self.specials].into_iter().find_map(|m| m.get(role).and_then(content))
    }

    /// `added_tokens_decoder`: tokens with their ids.
    pub fn listed(&self) -> Vec<(u32, &Value)> {
        let listed = self.settings.get("added_tokens_decoder").and_then(Value::as_object);
        let mut listed: Vec<(u32, &Value)> =
            listed.into_iter().flatten().filter_map(|(k, v)| Some((k.parse().ok()?, v))).collect();
        listed.sort_by_key(|(id, _)| *id);
        listed
    }

    pub fn specials(&self) -> impl Iterator<Item = AddedToken> + '_ {
        let listed = self.listed();
        let extra = ["additional_special_tokens", "extra_special_tokens"].into_iter().flat_map(|key| {
            [&self.settings, &self.specials].into_iter().filter_map(move |m| m.get(key)).flat_map(|v| match v
            {
                Value::Array(list) => list.iter().collect::<Vec<_>>(),
                Value::Object(map) => map.values().collect(),
                _ => Vec::new(),
            })
        });
        let extra = extra.filter_map(content).map(|t| AddedToken::from(t, true));
        let roles = ROLES.into_iter().filter_map(|r| self.named(r)).map(|t| AddedToken::from(t, true));
        listed.into_iter().filter_map(|(_, v)| added(v)).chain(roles).chain(extra)
    }

    /// The files to save next to `tokenizer.json`.
    pub fn files(&self) -> Vec<(&'static str, String)> {
        let mut settings = self.settings.clone();
        settings.entry("tokenizer_class").or_insert_with(|| json!("PreTrainedTokenizerFast"));
        let mut specials = self.specials.clone();
        for role in ROLES {
            if let Some(name) = self.named(role).map(str::to_owned) {
                settings.entry(role).or_insert_with(|| json!(name));
                specials.entry(role).or_insert_with(|| json!(name));
            }
        }
        let pretty = |m: Map<String, Value>| format!("{:#}\n", Value::Object(m));
        let mut files = vec![(CONFIG, pretty(settings)), (SPECIALS, pretty(specials))];
        files.extend(self.template.clone().map(|t| (TEMPLATE, t)));
        files
    }
}

/// A JSON object from a file, `None` when there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let broken = |what: String| {
        Error::model(what)
            .at(path.display())
            .fix("the file is cut short or damaged: copy or download it again")
    };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(other) => Err(broken(format!("holds {}, expected a JSON object", kind(&other)))),
        Err(e) => Err(broken(format!("is not valid JSON: {e}"))),
    }
}

/// A text file, `None` when there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::model(format!("cannot read: {e}")).at(path.display())),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The name of a token written as a string or as an object with `content`.
pub(crate) fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str()).filter(|t| !t.is_empty())
}

fn added(value: &Value) -> Option<AddedToken> {
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
    let token = AddedToken::from(content(value)?, flag("special"));
    let token = token.normalized(flag("normalized")).single_word(flag("single_word"));
    Some(token.lstrip(flag("lstrip")).rstrip(flag("rstrip")))
}

/// EOS ids in a model directory's `generation_config.json`, or else in its `config.json`.
pub(crate) fn eos_ids(dir: &Path) -> Result<Vec<u32>> {
    let dir = &*crate::checkpoint::tokenizer_dir(dir);
    for file in ["generation_config.json", "config.json"] {
        let settings = read_json(&dir.join(file))?.unwrap_or_default();
        let value = settings.get("eos_token_id");
        // Ignored, generation would run to the length limit.
        let each = value.map(|v| v.as_array().map_or(std::slice::from_ref(v), Vec::as_slice));
        if let Some(wrong) = each.into_iter().flatten().find(|v| !v.is_null() && !v.is_i64() && !v.is_u64()) {
            let what = format!("eos_token_id is {wrong}, expected a token id or a list of them");
            return Err(Error::model(what)
                .at(dir.join(file).display())
                .fix("write the ids as whole numbers, or remove the field"));
        }
        let found = ids(value);
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|i| u32::try_from(i).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(other) => one(other).into_iter().collect(),
        None => Vec::new(),
    }
}

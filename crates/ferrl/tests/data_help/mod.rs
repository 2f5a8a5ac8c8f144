#![allow(clippy::unwrap_used)] // helpers of tests are tests
#![allow(dead_code)] // each test file uses some of them
//! A tokenizer of single characters, a ChatML template, and folders of files.

use std::path::{Path, PathBuf};

use ferrl::data::hub::HubCache;
use ferrl::data::prompt::PromptSettings;
use ferrl::data::schema::RowKind;
use ferrl::data::{EncodedRow, Encoder, Row, RowCounts, check};
use ferrl_engine::Result;
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::{Tokenizer, train_chars};
use serde_json::{Map, Value};

pub const CHATML: &str = "{%- for message in messages %}\
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

pub fn tokenizer() -> Tokenizer {
    let text: String = (' '..='~').chain(['\n', 'é', '→']).collect();
    let specials = ["<|im_start|>", "<|im_end|>"].map(String::from);
    train_chars([text].into_iter(), &specials).unwrap()
}

pub fn encoder(settings: PromptSettings) -> Encoder {
    let chat = ChatTemplate::from_source(CHATML, Map::new()).unwrap();
    Encoder::new(tokenizer(), Some(chat), settings).unwrap()
}

/// Settings from what a recipe would say.
pub fn settings(value: Value) -> PromptSettings {
    serde_json::from_value(value).unwrap()
}

pub fn row(value: Value) -> Row {
    value.as_object().unwrap().clone()
}

pub fn encode(encoder: &Encoder, value: Value, kind: RowKind) -> Result<EncodedRow> {
    let mut counts = RowCounts::default();
    encoder.encode(&row(value), kind, "rows.jsonl:1", &mut counts).map(|s| s.unwrap())
}

/// The sample as text, trained tokens between marks.
pub fn shown(encoder: &Encoder, value: Value, kind: RowKind) -> String {
    check::show(encoder.tokenizer(), &encode(encoder, value, kind).unwrap()).unwrap()
}

pub fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

pub fn no_cache() -> HubCache {
    HubCache { root: "/nowhere/hub".into(), offline: false }
}

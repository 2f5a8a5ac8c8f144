//! Tokenizers and chat templates against what `transformers` and `jinja2` gave (tools/make_text_fixtures.py).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use tempfile::TempDir;

#[path = "text/chat.rs"]
mod chat;
#[path = "text/tokenizer.rs"]
mod tokenizer;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text")
}

fn rows(name: &str) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(fixtures().join(name)).unwrap()).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_dir(&fixtures().join(name)).unwrap()
}

fn template(name: &str, owner: &str) -> ChatTemplate {
    let read = |p: PathBuf| std::fs::read_to_string(p).unwrap();
    let config: Value =
        serde_json::from_str(&read(fixtures().join(owner).join("tokenizer_config.json"))).unwrap();
    let mut variables = Map::new();
    for key in ["bos_token", "eos_token"] {
        match &config[key] {
            Value::String(s) => variables.insert(key.into(), s.clone().into()),
            Value::Object(o) => variables.insert(key.into(), o["content"].clone()),
            _ => None,
        };
    }
    let source = read(fixtures().join(format!("templates/{name}.jinja")));
    // The fixtures were made on this day.
    ChatTemplate::from_source(&source, variables).unwrap().with_now(1_721_952_000)
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// A copy of a fixture.
fn copy(from: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join(from)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

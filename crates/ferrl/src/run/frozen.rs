//! Models that a run reads and never writes: what is on disk must stay what it was.
//!
//! A resumed run builds its reference, its critic's start and its tokenizer from these directories again. Were one of
//! them another by now, the run would go on with another objective and nobody would notice.

use super::files::error;
use super::manifest::hex;
use super::resume::plain_files;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// A checksum of everything in a model's directory that decides what the model says.
pub fn fingerprint(dir: &Path) -> Result<String> {
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
    for name in plain_files(dir)?.iter().filter(|name| matters(name)) {
        let path = dir.join(name);
        let fail = |e: std::io::Error| error("cannot read", &path, &e);
        let mut file = File::open(&path).map_err(fail)?;
        hash.update(format!("{name}\n{}\n", file.metadata().map_err(fail)?.len()).as_bytes());
        loop {
            match file.read(&mut buffer).map_err(fail)? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
    }
    Ok(hex(hash.digest128()))
}

/// Weights, configuration, tokenizer and chat template; not a README or other formats of the same weights.
fn matters(name: &str) -> bool {
    [".safetensors", ".json", ".model", ".txt", ".jinja"].iter().any(|end| name.ends_with(end))
}

/// The directories as a checkpoint keeps them: path and checksum by role.
pub fn describe<'a>(dirs: impl IntoIterator<Item = (&'a str, &'a Path)>) -> Result<Value> {
    let entry = |(role, dir): (&str, &'a Path)| {
        Ok((role.to_string(), json!({ "path": dir.display().to_string(), "xxh3": fingerprint(dir)? })))
    };
    Ok(Value::Object(dirs.into_iter().map(entry).collect::<Result<Map<_, _>>>()?))
}

/// Refuses to go on where a directory is not what it was when the checkpoint was made.
pub fn unchanged(now: &Value, saved: &Value) -> Result<()> {
    for (role, was) in saved.as_object().into_iter().flatten() {
        let is = &now[role];
        if is["xxh3"] != was["xxh3"] {
            let path = is["path"].as_str().or(was["path"].as_str()).unwrap_or_default();
            return Err(Error::data(format!("the {role} model is not the one this run was started with"))
                .at(path)
                .fix("put the files back as they were, or start a new run with --name"));
        }
    }
    Ok(())
}

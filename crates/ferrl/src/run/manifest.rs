//! `manifest.json`: every file of a checkpoint with its size, and a checksum for each tensor in it.
//!
//! The last field is the checksum of all bytes before it, so that the manifest itself cannot change unseen.

use super::files::{Files, error};
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Component, Path};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

pub(crate) const NAME: &str = "manifest.json";
const FORMAT: u32 = 1;

/// What a checkpoint consists of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Of this file.
    pub format: u32,
    /// The version of Ferrl that wrote it.
    pub ferrl: String,
    /// The step it was made after.
    pub step: u64,
    /// What it was measured by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<super::Best>,
    /// By path inside the checkpoint, with `/`.
    pub files: BTreeMap<String, Vec<FilePart>>,
}

/// A stretch of a file; the parts of a file follow each other and cover it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilePart {
    /// The tensor's name, `header`, or nothing for a file without tensors.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3, 128 bits, in hexadecimal.
    pub xxh3: String,
}

impl FilePart {
    /// Of bytes at hand.
    pub fn of(name: &str, bytes: &[u8]) -> FilePart {
        FilePart { name: name.into(), bytes: bytes.len() as u64, xxh3: hex(xxh3_128(bytes)) }
    }

    /// How the part is called in an error.
    fn shown(&self) -> String {
        match self.name.as_str() {
            "" => "the file".into(),
            "header" => "the header".into(),
            name => format!("tensor {name:?}"),
        }
    }

    /// The bytes differ from the ones that were written.
    pub fn damaged(&self) -> Error {
        Error::data(format!("{} is damaged: its checksum does not match", self.shown()))
            .fix("use an earlier checkpoint, and check the disk")
    }
}

/// A checksum as it is written.
pub(crate) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

fn trailer(body: &[u8]) -> String {
    format!(",\n  \"xxh3\": \"{}\"\n}}\n", hex(xxh3_128(body)))
}

impl Manifest {
    /// Empty, for a step.
    pub fn new(step: u64, best: Option<super::Best>) -> Manifest {
        let ferrl = env!("CARGO_PKG_VERSION").to_string();
        Manifest { format: FORMAT, ferrl, step, best, files: BTreeMap::new() }
    }

    /// Writes it into a checkpoint's directory.
    pub fn write(&self, dir: &Path, files: &Files) -> Result<()> {
        let path = dir.join(NAME);
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::data(format!("cannot be written as JSON: {e}")).at(path.display()))?;
        let body = text.strip_suffix("\n}").unwrap_or(&text);
        let mut file = files.create(&path)?;
        file.put(format!("{body}{}", trailer(body.as_bytes())).as_bytes())?;
        file.sync()
    }

    /// Reads the manifest of a checkpoint; only itself is checked.
    pub fn read(dir: &Path) -> Result<Manifest> {
        let path = dir.join(NAME);
        let bytes = fs::read(&path).map_err(|e| error("cannot read", &path, &e))?;
        let body = bytes.len().saturating_sub(trailer(b"").len());
        let (body, end) = bytes.split_at(body);
        if end != trailer(body).as_bytes() {
            return Err(FilePart::of("", b"").damaged().at(path.display()));
        }
        let bad = |what: String| Error::data(what).at(path.display());
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| bad(format!("not JSON: {e}")))?;
        if value["format"] != FORMAT {
            return Err(bad(format!("has format {}, expected {FORMAT}", value["format"]))
                .fix("use the version of Ferrl that made the checkpoint"));
        }
        let manifest: Manifest =
            serde_json::from_value(value).map_err(|e| bad(format!("not a manifest: {e}")))?;
        let plain = |name: &str| Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
        match manifest.files.keys().find(|name| !plain(name)) {
            None => Ok(manifest),
            Some(name) => Err(bad(format!("names a file outside of the checkpoint: {name:?}"))),
        }
    }

    /// Checks every byte of every file.
    pub fn verify(&self, dir: &Path) -> Result<()> {
        self.verify_below(dir, "")
    }

    /// Checks every byte of the files whose path begins with `prefix`.
    pub fn verify_below(&self, dir: &Path, prefix: &str) -> Result<()> {
        for (name, parts) in self.files.iter().filter(|(name, _)| name.starts_with(prefix)) {
            let path = dir.join(name);
            check_file(&path, parts).map_err(|e| e.at(path.display()))?;
        }
        Ok(())
    }
}

fn check_file(path: &Path, parts: &[FilePart]) -> Result<()> {
    let fail = |e: std::io::Error| Error::data(format!("cannot be read: {e}"));
    let mut file = File::open(path).map_err(fail)?;
    let (got, want) = (file.metadata().map_err(fail)?.len(), parts.iter().map(|p| p.bytes).sum::<u64>());
    if got != want {
        return Err(Error::data(format!("has {got} bytes, expected {want}"))
            .fix("use an earlier checkpoint, and check the disk"));
    }
    for part in parts {
        if hash(&mut file, part.bytes).map_err(fail)? != part.xxh3 {
            return Err(part.damaged());
        }
    }
    Ok(())
}

/// The checksum of the next bytes.
fn hash(from: &mut impl Read, bytes: u64) -> std::io::Result<String> {
    let (mut state, mut left, mut buffer) = (Xxh3::new(), bytes, vec![0; 1 << 18]);
    while left > 0 {
        let n = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        from.read_exact(&mut buffer[..n])?;
        state.update(&buffer[..n]);
        left -= n as u64;
    }
    Ok(hex(state.digest128()))
}

/// The parts of a file that is already written: its tensors if it is a safetensors file.
pub(crate) fn parts_of(path: &Path) -> Result<Vec<FilePart>> {
    let fail = |e: std::io::Error| error("cannot read", path, &e);
    let file = File::open(path).map_err(fail)?;
    let total = file.metadata().map_err(fail)?.len();
    let mut file = BufReader::new(file);
    if path.extension().is_none_or(|e| e != "safetensors") {
        let xxh3 = hash(&mut file, total).map_err(fail)?;
        return Ok(vec![FilePart { name: String::new(), bytes: total, xxh3 }]);
    }
    let odd = || Error::data("not a safetensors file").at(path.display());
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(fail)?;
    let n = u64::from_le_bytes(length);
    let mut text = vec![0; usize::try_from(n).ok().filter(|_| n < total).ok_or_else(odd)?];
    file.read_exact(&mut text).map_err(fail)?;
    let header: Value = serde_json::from_slice(&text).map_err(|_| odd())?;
    let mut spans: Vec<(u64, u64, &str)> = Vec::new();
    for (name, info) in header.as_object().ok_or_else(odd)? {
        if name != "__metadata__" {
            let at = |i: usize| info["data_offsets"][i].as_u64().ok_or_else(odd);
            spans.push((at(0)?, at(1)?, name));
        }
    }
    spans.sort_unstable();
    let mut parts = vec![FilePart::of("header", &[&length[..], &text].concat())];
    let mut at = 0;
    for (start, end, name) in spans {
        if start != at || end < start {
            return Err(odd());
        }
        let xxh3 = hash(&mut file, end - start).map_err(fail)?;
        parts.push(FilePart { name: name.into(), bytes: end - start, xxh3 });
        at = end;
    }
    if 8 + n + at != total { Err(odd()) } else { Ok(parts) }
}

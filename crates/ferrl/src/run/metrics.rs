//! `metrics.jsonl`: one object per step, each line whole or absent.
//!
//! Numbers are written with as many digits as it takes to read the same number again. JSON has no NaN or infinity;
//! they are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

use super::files::{Files, OutFile, error};
use crate::data::lines::json_lines;
use crate::experience::Metrics;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Fields of a line that are not metrics.
pub(crate) const RESERVED: [&str; 4] = ["step", "stage", "epoch", "seconds"];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRecord {
    /// Counted over all stages.
    pub step: u64,
    pub stage: String,
    /// Passes over the data so far.
    pub epoch: f64,
    /// Since the run began, interruptions left out.
    pub seconds: f64,
    /// By name, in the order they are written.
    pub metrics: Vec<(String, f64)>,
}

impl StepRecord {
    /// All means of a step, sorted by name.
    pub fn new(step: u64, stage: &str, epoch: f64, seconds: f64, metrics: &Metrics) -> StepRecord {
        let metrics = metrics.means().map(|(n, v)| (n.to_string(), v)).collect();
        StepRecord { step, stage: stage.into(), epoch, seconds, metrics }
    }

    pub fn get(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(n, _)| n == name).map(|(_, v)| *v)
    }

    pub fn to_json(&self) -> Result<Value> {
        let mut out = Map::new();
        out.insert("step".into(), json!(self.step));
        out.insert("stage".into(), json!(self.stage));
        out.insert("epoch".into(), number(self.epoch));
        out.insert("seconds".into(), number(self.seconds));
        for (name, value) in &self.metrics {
            if RESERVED.contains(&name.as_str()) {
                return Err(Error::usage(format!("a metric cannot be named {name:?}")).at("metrics.jsonl"));
            }
            out.insert(name.clone(), number(*value));
        }
        Ok(Value::Object(out))
    }

    pub fn from_json(value: &Value) -> Option<StepRecord> {
        let object = value.as_object()?;
        let metric = |(name, v): (&String, &Value)| Some((name.clone(), read_number(v)?));
        Some(StepRecord {
            step: object.get("step")?.as_u64()?,
            stage: object.get("stage")?.as_str()?.into(),
            epoch: read_number(object.get("epoch")?)?,
            seconds: read_number(object.get("seconds")?)?,
            metrics: object
                .iter()
                .filter(|(n, _)| !RESERVED.contains(&n.as_str()))
                .filter_map(metric)
                .collect(),
        })
    }
}

/// JSON has only finite numbers.
pub(crate) fn number(x: f64) -> Value {
    match x {
        x if x.is_finite() => json!(x),
        x if x.is_nan() => json!("NaN"),
        x if x > 0.0 => json!("Infinity"),
        _ => json!("-Infinity"),
    }
}

pub(crate) fn read_number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        _ => value.as_f64(),
    }
}

/// `metrics.jsonl`, open at its end.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    files: Files,
    file: OutFile,
    /// Bytes of whole lines.
    len: u64,
    /// Whether a failed write may have left bytes behind them.
    torn: bool,
}

impl MetricsLog {
    /// Opens the file, making it where it is missing. A last line without its end is cut off.
    pub fn open(path: &Path, files: &Files) -> Result<MetricsLog> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(error("cannot read", path, &e)),
        };
        let len = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at as u64 + 1);
        if len < bytes.len() as u64 {
            files.truncate(path, len)?;
        }
        let file = files.append(path)?;
        Ok(MetricsLog { path: path.into(), files: files.clone(), file, len, torn: false })
    }

    /// Adds a step's line. After an error the line is not there, and the next attempt starts clean.
    pub fn append(&mut self, record: &StepRecord) -> Result<()> {
        let line = format!("{}\n", record.to_json()?);
        // It was removed: lines would go into a deleted file.
        if !self.path.exists() {
            *self = MetricsLog::open(&self.path, &self.files)?;
        }
        if self.torn {
            self.files.truncate(&self.path, self.len)?;
            self.torn = false;
        }
        if let Err(e) = self.file.put(line.as_bytes()) {
            self.torn = self.files.truncate(&self.path, self.len).is_err();
            return Err(e);
        }
        self.len += line.len() as u64;
        Ok(())
    }

    /// Waits until the lines are on disk; before a checkpoint that counts on them.
    pub fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    /// Bytes of all lines; a checkpoint keeps it.
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Forgets the lines after a checkpoint's [`MetricsLog::byte_len`].
    pub fn truncate_to(&mut self, len: u64) -> Result<()> {
        let bytes = fs::read(&self.path).map_err(|e| error("cannot read", &self.path, &e))?;
        let ends_a_line =
            len == 0 || usize::try_from(len).ok().and_then(|n| bytes.get(n - 1)) == Some(&b'\n');
        if len > self.len || !ends_a_line {
            return Err(Error::data(format!(
                "the checkpoint was made when this file had {len} bytes; it has {} now and no line ends there",
                self.len
            ))
            .at(self.path.display())
            .fix("the file was changed by hand; restore it, or start a new run from the checkpoint's model"));
        }
        self.files.truncate(&self.path, len)?;
        self.len = len;
        self.torn = false;
        Ok(())
    }

    /// All steps of a file, in order; a last line without its end is left out.
    pub fn history(path: &Path) -> Result<Vec<StepRecord>> {
        let bytes = fs::read(path).map_err(|e| error("cannot read", path, &e))?;
        let end = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let step = |(number, line): (usize, Result<Value>)| {
            let bad = || {
                let place = format!("{}:{number}", path.display());
                Error::data("not a step's metrics").at(place).fix("restore the line, or remove it")
            };
            line.ok().as_ref().and_then(StepRecord::from_json).ok_or_else(bad)
        };
        json_lines(&bytes[..end], path.display()).map(step).collect()
    }
}

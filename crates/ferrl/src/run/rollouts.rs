//! `rollouts/step_N.jsonl`: prompts, completions and rewards of each step.

use super::files::{Files, error};
use super::metrics::number;
use crate::credit::StepCredit;
use crate::data::lines::json_lines;
use crate::env::Lost;
use crate::episode::TurnRecord;
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutRecord {
    pub prompt: String,
    pub completion: String,
    /// The reward; `None` if it was lost.
    pub reward: Option<f64>,
    /// Its named parts.
    pub components: Vec<(String, f64)>,
    pub advantage: f64,
    /// Length of the completion in tokens.
    pub tokens: usize,
    /// Whether it was truncated at the length limit.
    pub truncated: bool,
    /// Temperature it was sampled at; absent where it was given.
    pub temperature: Option<f64>,
    /// Further columns, such as a reward function logs.
    pub extra: Map<String, Value>,
    /// The turns of an episode; empty where there is only one completion.
    pub turns: Vec<TurnRecord>,
    /// Which of the step's prompts it belongs to: episodes may begin with equal texts and differ in what is hidden.
    pub group: usize,
    /// How the environment of an episode failed, where it did.
    pub lost: Option<Lost>,
    /// Values and advantages of its steps, where continuations were sampled from them.
    pub credit: Option<StepCredit>,
}

impl RolloutRecord {
    fn to_json(&self) -> Value {
        let parts: Map<String, Value> =
            self.components.iter().map(|(n, v)| (n.clone(), number(*v))).collect();
        let lost = self.reward.is_none();
        let mut row = json!({
            "prompt": self.prompt,
            "completion": self.completion,
            "reward": self.reward.map(number),
            "components": parts,
            "advantage": (!lost).then(|| number(self.advantage)),
            "tokens": self.tokens,
            "truncated": self.truncated,
        });
        if lost {
            row["lost"] = self.lost.as_ref().map_or(true.into(), |lost| json!(lost));
        }
        if let Some(temperature) = self.temperature {
            row["temperature"] = number(temperature);
        }
        if !self.extra.is_empty() {
            row["extra"] = self.extra.clone().into();
        }
        if let Some(credit) = &self.credit {
            row["credit"] = json!(credit);
        }
        if !self.turns.is_empty() {
            row["turns"] = json!(self.turns);
            row["group"] = self.group.into();
        }
        row
    }
}

pub(crate) fn lines(rollouts: &[RolloutRecord]) -> String {
    rollouts.iter().map(|rollout| format!("{}\n", rollout.to_json())).collect()
}

/// How far the rollouts had come; a checkpoint keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The last step written, 0 when there is none.
    pub step: u64,
    /// Bytes of its file.
    pub bytes: u64,
}

/// The folder of rollouts.
#[derive(Clone, Debug)]
pub struct Rollouts {
    dir: PathBuf,
    files: Files,
    mark: Mark,
}

impl Rollouts {
    /// Opens the folder; what is in it stays until [`Rollouts::truncate_to`].
    pub fn open(dir: &Path, files: &Files) -> Result<Rollouts> {
        let mut out = Rollouts { dir: dir.into(), files: files.clone(), mark: Mark::default() };
        if let Some(step) = steps(dir)?.pop() {
            let path = out.path(step);
            let bytes = fs::metadata(&path).map_err(|e| error("cannot read", &path, &e))?.len();
            out.mark = Mark { step, bytes };
        }
        Ok(out)
    }

    /// The file of a step.
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step_{step}.jsonl"))
    }

    /// Writes the rollouts of a step, once for each step; its file appears whole or not at all.
    pub fn write(&mut self, step: u64, rollouts: &[RolloutRecord]) -> Result<Mark> {
        self.write_text(step, &lines(rollouts))
    }

    /// The same from the `lines` of its rollouts.
    pub fn write_text(&mut self, step: u64, text: &str) -> Result<Mark> {
        let aside = self.dir.join(format!("step_{step}.tmp"));
        let mut file = self.files.create(&aside)?;
        file.put(text.as_bytes())?;
        file.sync()?; // a checkpoint will count on these bytes
        drop(file);
        self.files.rename(&aside, &self.path(step))?;
        self.mark = Mark { step, bytes: text.len() as u64 };
        Ok(self.mark)
    }

    /// How far the rollouts have come.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// Forgets what was written after a checkpoint's mark.
    pub fn truncate_to(&mut self, mark: Mark) -> Result<()> {
        for step in steps(&self.dir)? {
            let path = self.path(step);
            if step > mark.step {
                self.files.remove_file(&path)?;
            } else if step == mark.step {
                let bytes = fs::metadata(&path).map_err(|e| error("cannot read", &path, &e))?.len();
                if bytes < mark.bytes {
                    return Err(Error::data(format!(
                        "has {bytes} bytes; the checkpoint was made when it had {}",
                        mark.bytes
                    ))
                    .at(path.display())
                    .fix("the file was changed by hand or is damaged; remove it to continue"));
                }
                self.files.truncate(&path, mark.bytes)?;
            }
        }
        self.mark = mark;
        Ok(())
    }

    /// The rollouts of a step, as they were written.
    pub fn read(dir: &Path, step: u64) -> Result<Vec<Value>> {
        let path = dir.join(format!("step_{step}.jsonl"));
        let bytes = fs::read(&path).map_err(|e| error("cannot read", &path, &e))?;
        json_lines(&bytes, path.display()).map(|(_, line)| line).collect()
    }
}

/// The steps that have a file, in order; none where there is no folder.
pub(crate) fn steps(dir: &Path) -> Result<Vec<u64>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(error("cannot read", dir, &e)),
    };
    let mut out = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| error("cannot read", dir, &e))?.file_name();
        let name = name.to_string_lossy();
        let step = name.strip_prefix("step_").and_then(|n| n.strip_suffix(".jsonl"));
        out.extend(step.and_then(|s| s.parse::<u64>().ok()));
    }
    out.sort_unstable();
    Ok(out)
}

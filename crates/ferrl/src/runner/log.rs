//! Files that are written at each step, and failures of the disk.

use crate::run::{EventWriter, Mark, MetricsLog, Rollouts, RunFolder, StepRecord};
use ferrl_engine::Result;
use serde_json::Value;
use std::time::Instant;

/// The files that grow with every step.
pub(super) struct Log {
    pub metrics: MetricsLog,
    pub rollouts: Rollouts,
    /// The TensorBoard file; after a failed write it is not written until the run is resumed.
    events: Option<EventWriter>,
    start: Instant,
    /// Seconds of the run before it was resumed.
    before: f64,
    /// Trained tokens so far, over all stages.
    pub num_tokens: u64,
}

/// Lengths of the files, stored in checkpoints.
#[derive(Clone, Copy)]
pub(super) struct LogLengths {
    pub metrics: u64,
    pub rollouts: Mark,
}

impl Log {
    /// Opens the files, truncated to their lengths at the checkpoint.
    pub fn open(folder: &RunFolder, state: &Value) -> Result<Self> {
        let mut metrics = MetricsLog::open(&folder.metrics(), folder.files())?;
        metrics.truncate_to(state["metrics_bytes"].as_u64().unwrap_or(0))?;
        let mut rollouts = Rollouts::open(&folder.rollouts(), folder.files())?;
        let mark = serde_json::from_value(state["rollouts"].clone()).unwrap_or_else(|_| Mark::default());
        rollouts.truncate_to(mark)?;
        let history = MetricsLog::history(&folder.metrics())?;
        let events = EventWriter::create(&folder.tensorboard(), folder.files(), &history)?;
        let before = history.last().map_or(0.0, |r| r.seconds);
        let num_tokens = history.last().and_then(|r| r.get("num_tokens")).map_or(0, |n| n as u64);
        Ok(Log { metrics, rollouts, events: Some(events), start: Instant::now(), before, num_tokens })
    }

    /// Seconds of the run, without interruptions.
    pub fn seconds(&self) -> f64 {
        self.before + self.start.elapsed().as_secs_f64()
    }

    /// Current lengths of the files.
    pub fn marks(&self) -> LogLengths {
        LogLengths { metrics: self.metrics.byte_len(), rollouts: self.rollouts.mark() }
    }

    /// Adds a step: its rollouts as lines of text, and its metrics. After an error it can be tried again.
    pub fn append(&mut self, record: &StepRecord, rollouts: &str) -> Result<()> {
        if !rollouts.is_empty() {
            self.rollouts.write_text(record.step, rollouts)?;
        }
        self.metrics.append(record)?;
        self.num_tokens = record.get("num_tokens").map_or(self.num_tokens, |n| n as u64);
        Ok(())
    }

    /// Adds a step to the TensorBoard file; returns the first error.
    pub fn append_event(&mut self, record: &StepRecord) -> Option<ferrl_engine::Error> {
        let failed = self.events.as_mut()?.append(record).err()?;
        self.events = None;
        Some(failed)
    }
}

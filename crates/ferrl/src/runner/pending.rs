//! A completed step that is not written yet: if its evaluation or its writes fail, a checkpoint stores it.

use crate::experience::Metrics;
use crate::run::metrics::{number, read_number};
use crate::run::rollouts;
use crate::train::StepReport;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};

#[derive(Clone)]
pub(super) struct PendingWrites {
    pub metrics: Metrics,
    pub epoch: f64,
    /// The lines of its rollouts.
    pub rollouts: String,
}

impl PendingWrites {
    pub fn new(report: StepReport) -> Self {
        let rollouts = rollouts::lines(&report.rollouts.iter().map(super::printed).collect::<Vec<_>>());
        PendingWrites { metrics: report.metrics, epoch: report.epoch, rollouts }
    }

    /// Its form in a checkpoint.
    pub fn to_json(&self) -> Value {
        let metrics: Map<String, Value> =
            self.metrics.means().map(|(name, value)| (name.to_string(), number(value))).collect();
        json!({ "metrics": metrics, "epoch": number(self.epoch), "rollouts": self.rollouts })
    }

    /// The pending step of a checkpoint; `None` for a checkpoint between two steps.
    pub fn from_json(value: &Value) -> Result<Option<PendingWrites>> {
        if value.is_null() {
            return Ok(None);
        }
        let read = || {
            let mut metrics = Metrics::default();
            for (name, value) in value["metrics"].as_object()? {
                metrics.add(name, read_number(value)?);
            }
            let epoch = read_number(&value["epoch"])?;
            Some(PendingWrites { metrics, epoch, rollouts: value["rollouts"].as_str()?.into() })
        };
        let broken = || Error::data("the checkpoint's last step cannot be read");
        read().map(Some).ok_or_else(broken)
    }
}

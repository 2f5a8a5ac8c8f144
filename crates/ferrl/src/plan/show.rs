//! A plan as text and JSON.

use super::work::{Rates, millions};
use super::{Plan, StagePlan};
use crate::algo::Feed;
use ferrl_engine::counted;
use serde_json::{Value, json};
use std::fmt::Write;

/// Bytes with a unit.
pub(super) fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        m if m < 10.0 => format!("{m:.1} MiB"),
        m if m < 1024.0 => format!("{m:.0} MiB"),
        m => format!("{:.1} GiB", m / 1024.0),
    }
}

/// Available bytes, if known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Memory of the device.
    pub memory: Option<u64>,
    /// Disk of the run folder.
    pub disk: Option<u64>,
}

pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.1 => format!("{:.0} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

impl StagePlan {
    /// Seconds of the stage without its start, where the number of steps is known.
    pub fn seconds(&self, rates: Rates) -> Option<f64> {
        let steps = self.steps? as f64;
        Some(steps * self.work.step_seconds(rates) + self.work.evaluation_seconds(rates))
    }

    fn table(&self, available: Option<u64>, rates: Option<Rates>) -> String {
        let i = &self.inputs;
        let mut out = String::new();
        let lengths = match (&i.lengths.assumed, i.feed) {
            (None, Feed::Rollouts) => "measured prompts, completions of maximum length",
            (None, _) => "measured lengths",
            (Some(_), _) => "assumed: maximum length",
        };
        let _ = writeln!(
            out,
            "{} ({}): {}, {}, {:.0} sequences of {:.0} tokens an update ({lengths})",
            self.name,
            i.recipe.algorithm_name(),
            millions(&i.config),
            i.dtype().name(),
            i.sequences(),
            i.lengths.sequence
        );
        if let Some(why) = &i.lengths.assumed {
            let _ = writeln!(out, "  lengths are assumed, not measured: {why}");
        }
        for p in &self.parts {
            let _ = writeln!(out, "  {:<12}{:>10}  {}", p.name, size(p.bytes), p.what);
        }
        let of = available.map_or(String::new(), |a| format!("  of {}", size(a)));
        let _ = writeln!(out, "  {:<12}{:>10}{of}", "memory", size(self.bytes()));
        let host = super::memory::host_bytes(i);
        if host > 0 {
            let _ = writeln!(out, "  {:<12}{:>10}  of host memory, page-locked", "host", size(host));
        }
        let Some(rates) = rates else { return out };
        let step = duration(self.work.step_seconds(rates));
        let all = match (self.steps, self.seconds(rates)) {
            (Some(steps), Some(s)) => {
                format!(", {} in about {}", counted(steps as usize, "step"), duration(s))
            }
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "  {:<12}{step:>10}  a step{all} (at {:.0} GFLOP/s, {:.0} while sampling)",
            "time",
            rates.training / 1e9,
            rates.sampling / 1e9,
        );
        out
    }
}

impl Plan {
    /// As a table; `rates` gives the peak of each stage's number format.
    pub fn table(&self, room: Room, rates: &dyn Fn(&StagePlan) -> Option<Rates>) -> String {
        let mut out: String = self.stages.iter().map(|s| s.table(room.memory, rates(s))).collect();
        let of = room.disk.map_or(String::new(), |d| format!("  of {}", size(d)));
        let most = self.stages.iter().map(|s| s.disk).max_by_key(|d| d.checkpoint * d.copies as u64);
        let Some(most) = most else { return out };
        let models: u64 = self.stages.iter().map(|s| s.disk.model).sum();
        let _ = writeln!(
            out,
            "disk{:>18}{of} ({} checkpoints of {} while one is written, models {})",
            size(self.disk()),
            most.copies,
            size(most.checkpoint),
            size(models)
        );
        out
    }

    pub fn json(&self, room: Room, rates: &dyn Fn(&StagePlan) -> Option<Rates>) -> Value {
        let stage = |s: &StagePlan| {
            let rates = rates(s);
            json!({
                "stage": s.name,
                "weights": super::memory::weights(&s.inputs.config),
                "micro_batch_tokens": s.inputs.micro_tokens(),
                "parts": s.parts.iter().map(|p| json!({"name": p.name, "bytes": p.bytes})).collect::<Vec<_>>(),
                "bytes": s.bytes(),
                "host_bytes": super::memory::host_bytes(&s.inputs),
                "lengths_assumed": s.inputs.lengths.assumed,
                "checkpoint_bytes": s.disk.checkpoint,
                "steps": s.steps,
                "flops_per_step": s.work.train + s.work.annotate + s.work.sample,
                "seconds_per_step": rates.map(|r| s.work.step_seconds(r)),
                "seconds": rates.and_then(|r| s.seconds(r)),
            })
        };
        json!({
            "available": room.memory,
            "disk_bytes": self.disk(),
            "disk_free": room.disk,
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
        })
    }
}

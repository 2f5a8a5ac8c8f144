//! Progress of a run on standard error: one updated line on a terminal, an occasional line elsewhere.

use crate::output::{finish_on_interrupt, on_interrupt, visible};
use ferrl::evaluate::Evaluation;
use ferrl::interrupt;
use ferrl::run::StepRecord;
use ferrl::runner::RunWatch;
use ferrl::train::Waits;
use ferrl_engine::{Error, counted};
use indicatif::HumanDuration;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Exit code of a run that was interrupted and saved.
pub const INTERRUPTED: i32 = 130;
/// How long a run waits for space on a full disk.
const DISK_PATIENCE: Duration = Duration::from_secs(600);

/// Evaluation metrics that are shown, and whether each is a fraction.
pub const SHOWN: &[(&str, bool)] = &[
    ("eval/pass@1", true),
    ("eval/greedy", true),
    ("eval/reward", false),
    ("eval/loss", false),
    ("eval/accuracy", true),
    ("eval/margin", false),
];

/// A metric formatted for the terminal.
pub fn figure(value: f64, fraction: bool) -> String {
    if fraction { format!("{:.1} %", 100.0 * value) } else { format!("{value:.4}") }
}

/// Shows a run.
pub struct Terminal {
    live: bool,
    /// The parts of the line as last shown.
    line: Arc<Mutex<Vec<LinePart>>>,
    shown: Option<Instant>,
    began: Instant,
    first_step: u64,
    trend: Option<f64>,
    /// The last evaluation, as shown in the line.
    evaluated: String,
    /// Whether the full disk has been reported.
    waits_for_disk: bool,
    /// Whether the wait for space has run out.
    disk_wait_over: bool,
    /// Whether the run has several stages.
    pub several: bool,
}

/// A part of the line with its priority: higher numbers are dropped first on a narrow terminal.
type LinePart = (u8, String);

impl Terminal {
    /// Handles Ctrl-C from now on: the first finishes the step, the second ends the process.
    pub fn new() -> Self {
        match std::env::var_os(crate::commands::launch::STOP_FILE) {
            // A signal comes from MPI's launcher, which ends this rank because another is lost; Ctrl-C comes as a file.
            Some(_) => on_interrupt(interrupt::request),
            None => finish_on_interrupt("finishing this step and saving"),
        }
        Terminal {
            live: std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb"),
            line: Arc::default(),
            shown: None,
            began: Instant::now(),
            first_step: 0,
            trend: None,
            evaluated: String::new(),
            waits_for_disk: false,
            disk_wait_over: false,
            several: false,
        }
    }

    pub fn clear(&self) {
        if self.live {
            eprint!("\r\x1b[K");
        }
    }

    fn parts(&mut self, stage: &str, step: u64, steps: u64, record: &StepRecord) -> Vec<LinePart> {
        let (name, value) = match (record.get("reward"), record.get("loss")) {
            (Some(reward), _) => ("reward", reward),
            (None, loss) => ("loss", loss.unwrap_or(f64::NAN)),
        };
        let before = *self.trend.get_or_insert(value);
        let trend = 0.9 * before + 0.1 * value;
        self.trend = Some(trend);
        let rate = record.get("timing/tokens_per_second").unwrap_or(0.0);
        let per_step = self.began.elapsed().as_secs_f64() / (step - self.first_step) as f64;
        let left = Duration::from_secs_f64(per_step * (steps - step) as f64);
        let mut parts = vec![
            (0, format!("{stage} {step}/{steps}")),
            (1, format!("{name} {value:.4}")),
            (5, format!("(mean {trend:.4})")),
            (6, format!("{rate:.0} tokens/s")),
            (2, format!("{} left", HumanDuration(left))),
        ];
        if !self.evaluated.is_empty() {
            parts.push((4, self.evaluated.clone()));
        }
        parts
    }
}

/// The parts that fit into `width` columns, in their order; the first is cut where even that is too long.
fn fit(parts: &[LinePart], width: usize) -> String {
    let mut kept: Vec<&LinePart> = parts.iter().collect();
    loop {
        let line = kept.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ");
        if line.chars().count() <= width || kept.len() <= 1 {
            return line.chars().take(width).collect();
        }
        let least = kept.iter().map(|(rank, _)| *rank).max().unwrap_or(0);
        kept.retain(|(rank, _)| *rank != least);
    }
}

/// Width of the terminal on standard error, in columns; 80 if unknown.
fn columns() -> usize {
    let own = || -> Option<usize> {
        #[cfg(unix)]
        let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok().map(|s| usize::from(s.ws_col));
        #[cfg(not(unix))]
        let size: Option<usize> = None;
        size.filter(|&n| n > 0)
    };
    let told = || std::env::var("COLUMNS").ok()?.parse().ok();
    own().or_else(told).unwrap_or(80)
}

/// Shows the line on a terminal; the last column stays empty, since some terminals wrap when it is written.
fn show(parts: &[LinePart]) {
    eprint!("\r\x1b[K{}", fit(parts, columns().saturating_sub(1).max(1)));
}

impl RunWatch for Terminal {
    fn stage(&mut self, name: &str, steps: u64) {
        if self.several {
            self.note(&format!("{name} begins: {}", counted(steps as usize, "step")));
        }
        (self.began, self.first_step, self.trend, self.shown) = (Instant::now(), u64::MAX, None, None);
        self.evaluated.clear();
    }

    fn step(&mut self, stage: &str, step: u64, steps: u64, record: &StepRecord) {
        self.waits_for_disk = false;
        if self.first_step == u64::MAX {
            // The line of the start has no parts of a step.
            let took = Duration::from_secs_f64(record.get("step_time").unwrap_or(0.0).max(0.0));
            let began = Instant::now().checked_sub(took).unwrap_or(self.began);
            (self.first_step, self.began) = (step - 1, began.max(self.began));
        }
        let parts = self.parts(stage, step, steps, record);
        let pause = Duration::from_millis(if self.live { 200 } else { 5000 });
        if step < steps && self.shown.is_some_and(|s| s.elapsed() < pause) {
            return;
        }
        self.shown = Some(Instant::now());
        if self.live {
            show(&parts);
        } else {
            // Timings of the step's phases, for log files.
            let spent = |phase: &str| record.get(&format!("timing/{phase}")).filter(|s| *s >= 0.001);
            let phases = ["rollout", "reward", "credit", "annotate", "train"];
            let phases: Vec<String> =
                phases.iter().filter_map(|p| Some(format!("{p} {:.2} s", spent(p)?))).collect();
            let spent = if phases.is_empty() { String::new() } else { format!("  ({})", phases.join(", ")) };
            eprintln!("{}{spent}", fit(&parts, usize::MAX));
        }
        if let Ok(mut line) = self.line.lock() {
            *line = parts;
        }
    }

    fn evaluated(&mut self, stage: &str, step: u64, evaluation: &Evaluation) {
        let shown = SHOWN.iter().filter_map(|(name, fraction)| {
            let value = evaluation.metrics.get(name)?;
            Some(format!("{} {}", name.trim_start_matches("eval/"), figure(value, *fraction)))
        });
        let shown: Vec<String> = shown.collect();
        self.evaluated = shown.first().map_or_else(String::new, |first| format!("eval {first}"));
        self.note(&format!("{stage}, evaluated after step {step}: {}", shown.join(", ")));
    }

    fn waits(&self) -> Option<Waits> {
        let line = self.line.clone();
        let tell = move |phase: &'static str| {
            if let Ok(line) = line.lock() {
                let mut parts = line.clone();
                parts.push((3, doing(phase).into()));
                show(&parts);
            }
        };
        self.live.then(|| Arc::new(tell) as Waits)
    }

    fn note(&mut self, text: &str) {
        self.clear();
        eprintln!("{}", visible(text));
    }

    fn disk_full(&mut self, error: &Error, waited: Duration) -> bool {
        // The wait is shared by all writes: after it, the last checkpoint does not wait again.
        self.disk_wait_over |= waited >= DISK_PATIENCE;
        if self.disk_wait_over || interrupt::requested() {
            return false;
        }
        if !self.waits_for_disk {
            let minutes = DISK_PATIENCE.as_secs() / 60;
            self.note(&format!(
                "paused: {error}\n  waiting {minutes} minutes for space; Ctrl-C stops the run"
            ));
        }
        self.waits_for_disk = true;
        std::thread::sleep(Duration::from_millis(500));
        true
    }

    fn interrupted(&self) -> bool {
        interrupt::requested()
    }
}

/// A phase of a step as shown in the line.
fn doing(phase: &str) -> &str {
    match phase {
        "data" => "reading data",
        "rollout" => "sampling",
        "reward" => "waiting for rewards",
        "credit" => "Monte-Carlo values",
        "annotate" => "reference and critic",
        "train" => "training",
        "evaluate" => "evaluating",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_never_wider_than_the_terminal_and_loses_what_matters_least_first() {
        let part = |rank, text: &str| (rank, text.to_string());
        let parts = [
            part(0, "reinforce 12/4000"),
            part(1, "reward 0.1234"),
            part(4, "(0.1200, up)"),
            part(5, "42252 tokens/s"),
            part(2, "34 minutes left"),
            part(3, "eval pass@1 12.5 %"),
        ];
        let whole = fit(&parts, 200);
        assert!(whole.contains("tokens/s") && whole.ends_with("12.5 %"), "{whole}");
        for width in 1..120 {
            assert!(fit(&parts, width).chars().count() <= width, "{width}");
        }
        let narrow = fit(&parts, 60);
        assert!(
            narrow.contains("12/4000") && narrow.contains("left") && !narrow.contains("tokens/s"),
            "{narrow}"
        );
        assert_eq!(fit(&parts, 9), "reinforce");
    }
}

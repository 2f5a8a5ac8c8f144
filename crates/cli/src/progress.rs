//! Progress bar on standard error with rate and remaining time, for work of more than two seconds.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle, park_timeout};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(2);
const BAR: &str = "{msg} [{bar:30}] {human_pos}/{human_len} {unit} {per_sec_} {eta_}";
const SPINNER: &str = "{spinner} {msg} {human_pos} {unit} {per_sec_}";

/// A progress bar that appears after two seconds, and only on a terminal.
pub struct ProgressLine {
    bar: ProgressBar,
    done: Arc<AtomicBool>,
    shower: Option<JoinHandle<()>>,
}

impl ProgressLine {
    /// A bar of `total` units, such as "tokens"; 0 if the total is unknown.
    pub fn new(what: &str, total: u64, unit: &'static str) -> Self {
        let bar = match total {
            0 => ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
            n => ProgressBar::with_draw_target(Some(n), ProgressDrawTarget::hidden()),
        };
        let template = if total == 0 { SPINNER } else { BAR };
        if let Ok(style) = ProgressStyle::with_template(template) {
            let style = style
                .progress_chars("=> ")
                .with_key("unit", move |_: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
                    let _ = w.write_str(unit);
                })
                .with_key("per_sec_", move |s: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
                    let _ = write!(w, "({:.0} {unit}/s)", s.per_sec());
                })
                .with_key("eta_", |s: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
                    if s.pos() > 0 {
                        let _ = write!(w, "{} left", indicatif::HumanDuration(s.eta()));
                    }
                });
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        let done = Arc::new(AtomicBool::new(false));
        let shower = std::io::stderr().is_terminal().then(|| show_later(bar.clone(), done.clone()));
        ProgressLine { bar, done, shower: shower.flatten() }
    }

    /// Advances the bar.
    pub fn add(&self, units: u64) {
        self.bar.inc(units);
    }
}

/// Waits on a separate thread, so that the bar also appears during one long call.
fn show_later(bar: ProgressBar, done: Arc<AtomicBool>) -> Option<JoinHandle<()>> {
    let start = Instant::now();
    let wait = move || {
        while let Some(left) = PATIENCE.checked_sub(start.elapsed()) {
            if done.load(Ordering::Acquire) {
                return;
            }
            park_timeout(left);
        }
        if !done.load(Ordering::Acquire) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(Duration::from_millis(200));
        }
    };
    Builder::new().name("progress".into()).spawn(wait).ok()
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        if let Some(shower) = self.shower.take() {
            shower.thread().unpark();
            let _ = shower.join();
        }
        self.bar.finish_and_clear();
    }
}

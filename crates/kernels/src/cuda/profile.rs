//! Profiling: with `FERRL_PROFILE=1` every kernel, GEMM and graph is timed on the GPU, and a table is printed to standard error
//! when the device is closed. `FERRL_PROFILE=kernels` also disables graphs, so that decode kernels are listed one by one.
//! Tuning is excluded.

use super::context::check;
use super::handles::{CudaContext, StreamEvent};
use crate::{Result, lock};
use cudarc::driver::sys::{self, CUstream};
use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Start and end events of a piece of work.
struct Span {
    name: String,
    events: [StreamEvent; 2],
}

/// Recorded times, if profiling.
pub(super) struct Profile(Option<ProfileSpans>);

struct ProfileSpans {
    spans: Mutex<Vec<Span>>,
    context: Arc<CudaContext>,
    /// Whether graphs are disabled.
    kernels: bool,
    /// Nesting depth of tuning.
    trials: AtomicUsize,
}

/// Suspends profiling while it lives.
pub(super) struct Trials<'a>(Option<&'a ProfileSpans>);

impl Drop for Trials<'_> {
    fn drop(&mut self) {
        if let Some(wanted) = self.0 {
            wanted.trials.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Profile {
    pub(super) fn from_env(context: &Arc<CudaContext>) -> Self {
        let said = std::env::var_os("FERRL_PROFILE").filter(|v| !v.is_empty() && v != "0");
        Profile(said.map(|said| ProfileSpans {
            spans: Mutex::default(),
            context: context.clone(),
            kernels: said == "kernels",
            trials: AtomicUsize::new(0),
        }))
    }

    /// Whether graphs are disabled for profiling.
    pub(super) fn wants_kernels(&self) -> bool {
        self.0.as_ref().is_some_and(|wanted| wanted.kernels)
    }

    /// Call before tuning.
    pub(super) fn trials(&self) -> Trials<'_> {
        if let Some(wanted) = &self.0 {
            wanted.trials.fetch_add(1, Ordering::Relaxed);
        }
        Trials(self.0.as_ref())
    }

    /// Launches work on the stream, timed if profiling.
    pub(super) fn time(
        &self,
        stream: CUstream,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(ProfileSpans { spans, context, trials, .. }) = &self.0 else { return work() };
        if trials.load(Ordering::Relaxed) > 0 {
            return work();
        }
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live variable and the card's stream.
        check(unsafe { sys::cuStreamIsCapturing(stream, &mut status) }, || "timing".into())?;
        if status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE {
            return work();
        }
        let events = [StreamEvent::new(context, true)?, StreamEvent::new(context, true)?];
        // SAFETY: live events; the stream is the card's.
        unsafe {
            check(sys::cuEventRecord(events[0].handle, stream), || "timing".into())?;
            work()?;
            check(sys::cuEventRecord(events[1].handle, stream), || "timing".into())?;
        }
        lock(spans).push(Span { name: name(), events });
        Ok(())
    }

    /// Prints a note if profiling.
    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        if self.0.is_some() {
            let _ = writeln!(std::io::stderr(), "{}", text());
        }
    }

    /// Prints the table, slowest first. All work must be complete.
    pub(super) fn report(&self) {
        let Some(ProfileSpans { spans, .. }) = &self.0 else { return };
        let mut sums: HashMap<String, (f64, usize)> = HashMap::new();
        for span in lock(spans).drain(..) {
            let mut ms = 0f32;
            // SAFETY: both events were recorded, and everything is done.
            unsafe { sys::cuEventElapsedTime_v2(&mut ms, span.events[0].handle, span.events[1].handle) };
            let sum = sums.entry(span.name).or_default();
            *sum = (sum.0 + f64::from(ms), sum.1 + 1);
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
        let all: f64 = sums.iter().map(|(_, (ms, _))| ms).sum();
        let mut table =
            format!("{:<52}{:>10}{:>9}{:>11}{:>8}\n", "kernel", "ms", "calls", "us a call", "share");
        for (name, (ms, calls)) in sums.iter().take(48) {
            let each = 1e3 * ms / *calls as f64;
            table += &format!("{name:<52}{ms:>10.2}{calls:>9}{each:>11.1}{:>7.1}%\n", 100.0 * ms / all);
        }
        let _ = writeln!(std::io::stderr(), "{table}{:<52}{all:>10.2}", "all");
    }
}

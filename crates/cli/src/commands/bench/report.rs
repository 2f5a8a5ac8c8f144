//! Measures a piece of work and prints the result, or serves measurements to a script.

use super::HowArgs;
use crate::machine::{START, peak_rss_mib};
use crate::output::print;
use crate::progress::ProgressLine;
use ferrl_engine::{Error, Result};
use ferrl_kernels::usage::MemoryReport;
use ferrl_kernels::{Backend, DType, Purpose};
use serde_json::{Value, json};
use std::io::BufRead;
use std::time::Instant;

/// Work that is measured repeatedly.
pub struct TimedWork<'a> {
    /// Title of the measurement.
    pub title: String,
    /// Tokens per repetition.
    pub tokens: usize,
    /// FLOPs per repetition, known after the first.
    pub flops: &'a dyn Fn() -> f64,
    pub device: &'a dyn Backend,
    /// Compute type.
    pub dtype: DType,
    /// Runs one repetition.
    pub once: &'a mut dyn FnMut() -> Result<()>,
    /// Seconds of its parts, for each repetition.
    pub parts: &'a dyn Fn() -> Vec<(&'static str, Vec<f64>)>,
}

/// Measures and prints, or serves.
pub fn run(how: &HowArgs, work: &mut TimedWork<'_>) -> Result<()> {
    if how.worker {
        return serve(|count| {
            let seconds = measure(work.once, count, None)?;
            Ok(json!({"tokens_per_s": work.tokens as f64 / median(&seconds), "seconds": seconds}))
        });
    }
    let ready = START.elapsed().as_secs_f64();
    let progress = ProgressLine::new("measuring", how.repeats as u64 + 1, "rounds");
    let first = measure(work.once, 1, Some(&progress))?[0];
    let seconds = measure(work.once, how.repeats, Some(&progress))?;
    drop(progress);
    // Without the warm-up.
    let parts = (work.parts)().into_iter();
    let parts = parts.map(|(name, all)| (name, all[all.len() - how.repeats..].to_vec())).collect();
    let time = median(&seconds);
    let measured = TimedResults {
        ready,
        first,
        rates: seconds.iter().map(|s| work.tokens as f64 / s).collect(),
        rate: work.tokens as f64 / time,
        gflops: (work.flops)() / time / 1e9,
        peak: work.device.peak_gflops(work.dtype),
        rss: peak_rss_mib(),
        memory: work.device.memory().1 as f64 / 1_048_576.0,
        report: work.device.memory_report(),
        seconds,
        parts,
    };
    print(&if how.json { measured.json() } else { measured.table(&work.title) })
}

/// What was measured, in seconds and MiB.
struct TimedResults {
    /// From the start of the process to the first round.
    ready: f64,
    first: f64,
    seconds: Vec<f64>,
    parts: Vec<(&'static str, Vec<f64>)>,
    /// Tokens per second of each round.
    rates: Vec<f64>,
    rate: f64,
    gflops: f64,
    /// Peak GFLOP/s of the device.
    peak: f64,
    rss: f64,
    memory: f64,
    report: Option<MemoryReport>,
}

impl TimedResults {
    fn json(&self) -> String {
        let mut out = json!({"seconds": self.seconds, "tokens_per_s": self.rate, "gflops": self.gflops,
            "peak_gflops": self.peak, "peak_rss_mib": self.rss, "peak_buffers_mib": self.memory,
            "ready_s": self.ready, "first_s": self.first});
        for (name, seconds) in &self.parts {
            out["parts"][name] = json!(seconds);
        }
        if let Some(report) = &self.report {
            for purpose in Purpose::ALL {
                out["buffers"][purpose.name()] = json!(report.books.at_peak.of(purpose));
            }
            out["device_bytes"] = json!(report.most);
        }
        format!("{out}\n")
    }

    fn table(&self, title: &str) -> String {
        let TimedResults { ready, first, gflops, peak, rss, memory, .. } = self;
        let ms = |seconds: &[f64]| spread(&seconds.iter().map(|s| s * 1e3).collect::<Vec<_>>(), 1);
        let mut out =
            format!("{title}\n  start       {ready:.2} s until the first round, which took {first:.2} s\n");
        out += &format!("  time        {} ms\n", ms(&self.seconds));
        for (name, seconds) in &self.parts {
            out += &format!("    {name:<10}{} ms\n", ms(seconds));
        }
        out += &format!(
            "  tokens/s    {}\n  GFLOP/s     {gflops:.0}, {:.0} % of a measured peak of {peak:.0}\n\
             \x20 peak RSS    {rss:.0} MiB; buffers of the device {memory:.0} MiB at most\n",
            spread(&self.rates, 0),
            100.0 * gflops / peak
        );
        if let Some(report) = &self.report {
            let [buffers, device] = report.lines();
            out += &format!("  buffers     {buffers}\n  device      {device}\n");
        }
        out
    }
}

fn measure(
    once: &mut dyn FnMut() -> Result<()>,
    count: usize,
    progress: Option<&ProgressLine>,
) -> Result<Vec<f64>> {
    let mut seconds = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        once()?;
        seconds.push(start.elapsed().as_secs_f64());
        if let Some(progress) = progress {
            progress.add(1);
        }
    }
    Ok(seconds)
}

/// Answers every line `run N` on standard input with one line of JSON; ends with its input.
pub fn serve(mut answer: impl FnMut(usize) -> Result<Value>) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| Error::data(format!("cannot read: {e}")).at("standard input"))?;
        if line.trim().is_empty() {
            continue;
        }
        let count = line.trim().strip_prefix("run ").and_then(|n| n.trim().parse().ok()).filter(|n| *n > 0);
        let result = match count {
            Some(count) => answer(count),
            None => {
                Err(Error::usage(format!("expected `run N` with N of at least 1, got {:?}", line.trim())))
            }
        };
        let mut reply = result.unwrap_or_else(|e| json!({"error": e.to_string()}));
        if reply.get("error").is_none() {
            reply["peak_rss_mib"] = json!(peak_rss_mib());
        }
        print(&format!("{reply}\n"))?;
    }
    Ok(())
}

/// The middle one, or the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    if n == 0 {
        return f64::NAN;
    }
    (v[(n - 1) / 2] + v[n / 2]) / 2.0
}

/// `median [least-most]`
pub fn spread(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{:.digits$} [{least:.digits$}-{most:.digits$}]", median(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(spread(&[3.0, 1.0, 2.0], 1), "2.0 [1.0-3.0]");
    }
}

//! How measurements are asked for and told.

use super::HowArgs;
use crate::machine::{START, peak_rss_mib};
use crate::output::print;
use crate::progress::ProgressLine;
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType, Purpose};
use serde_json::{Value, json};
use std::io::BufRead;
use std::time::Instant;

/// Something that is done again and again.
pub struct TimedWork<'a> {
    /// What is measured, for people.
    pub title: String,
    /// Tokens of one time.
    pub tokens: usize,
    /// Operations of one time, known once it has been done.
    pub flops: &'a dyn Fn() -> f64,
    /// Where it is done.
    pub device: &'a dyn Backend,
    /// Its compute type.
    pub dtype: DType,
    /// Does it once.
    pub once: &'a mut dyn FnMut() -> Result<()>,
    /// Seconds of its parts, each time that it was done.
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
    let (time, rss) = (median(&seconds), peak_rss_mib());
    let (memory, books) = (work.device.memory().1 as f64 / 1_048_576.0, work.device.memory_report());
    let peak = work.device.peak_gflops(work.dtype);
    let (rate, gflops) = (work.tokens as f64 / time, (work.flops)() / time / 1e9);
    // Of the measurements that count.
    let parts: Vec<(&str, Vec<f64>)> = (work.parts)()
        .into_iter()
        .map(|(name, all)| (name, all[all.len() - how.repeats..].to_vec()))
        .collect();
    if how.json {
        let mut out = json!({"seconds": seconds, "tokens_per_s": rate, "gflops": gflops, "peak_gflops": peak,
            "peak_rss_mib": rss, "peak_buffers_mib": memory, "ready_s": ready, "first_s": first});
        for (name, seconds) in parts {
            out["parts"][name] = json!(seconds);
        }
        if let Some(report) = books {
            for purpose in Purpose::ALL {
                out["buffers"][purpose.name()] = json!(report.books.at_peak.of(purpose));
            }
            out["device_bytes"] = json!(report.most);
        }
        return print(&format!("{out}\n"));
    }
    let rates: Vec<f64> = seconds.iter().map(|s| work.tokens as f64 / s).collect();
    let times: Vec<f64> = seconds.iter().map(|s| s * 1e3).collect();
    print(&format!(
        "{}\n  start       {ready:.2} s until the first round, which took {first:.2} s\n",
        work.title
    ))?;
    print(&format!("  time        {} ms\n", spread(&times, 1)))?;
    for (name, seconds) in parts {
        let times: Vec<f64> = seconds.iter().map(|s| s * 1e3).collect();
        print(&format!("    {name:<10}{} ms\n", spread(&times, 1)))?;
    }
    print(&format!(
        "  tokens/s    {}\n  GFLOP/s     {gflops:.0}, {:.0} % of a measured peak of {peak:.0}\n\
         \x20 peak RSS    {rss:.0} MiB; buffers of the device {memory:.0} MiB at most\n",
        spread(&rates, 0),
        100.0 * gflops / peak
    ))?;
    match books {
        Some(report) => {
            let [buffers, device] = report.lines();
            print(&format!("  buffers     {buffers}\n  device      {device}\n"))
        }
        None => Ok(()),
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
    fn the_middle_of_odd_and_even() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(spread(&[3.0, 1.0, 2.0], 1), "2.0 [1.0-3.0]");
    }
}

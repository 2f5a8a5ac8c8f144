//! `ferrl bench memory`: peak memory of each rank of a recipe, part by part, next to the plan.

use super::scratch::ScratchDir;
use crate::machine::peak_rss_mib;
use crate::options::{above_zero, at_least_one};
use crate::output::print;
use ferrl::plan::memory::MemoryPart;
use ferrl::plan::{Plan, ranks};
use ferrl::recipe::Recipe;
use ferrl::verify::VERIFIERS;
use ferrl::{parallel, setup};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Purpose, Ranks};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Planned and measured memory of each rank of a recipe
///
/// Runs the recipe's first steps and prints, for each rank and part, the planned bytes and the bytes at the peak of its buffers.
/// Memory outside of buffers (program, tokenizer, messages between ranks, memory kept for reuse) is the rest of the process's peak
/// resident size. Measures one process; `ferrl launch -n N -- bench memory` measures N ranks.
#[derive(clap::Args)]
pub struct Args {
    /// The recipe, a TOML file; its first stage is measured
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides, as for `ferrl train`
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Number of steps
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    steps: usize,
    /// Fail if a rank's peak differs from the plan by more than this many percent
    #[arg(long, value_name = "PERCENT", value_parser = above_zero)]
    within: Option<f32>,
    /// One line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Memory of a rank.
#[derive(Serialize, Deserialize)]
struct Measured {
    /// Bytes of buffers at their peak, by [`Purpose`].
    buffers: Vec<usize>,
    /// Peak resident size of the process, or peak memory of a card.
    peak: usize,
}

pub fn run(args: &Args) -> Result<()> {
    let ranks = Ranks::open()?;
    let done = ranks.together(|| measure(args, &ranks));
    let rank = ranks.rank();
    let shown = done.and_then(|(parts, all)| if rank == 0 { show(args, &parts, &all) } else { Ok(()) });
    ranks.finish();
    if rank == 0 { shown } else { Ok(()) } // rank 0 reports the error
}

fn measure(args: &Args, ranks: &Ranks) -> Result<(Vec<MemoryPart>, Vec<Measured>)> {
    let resolved = Recipe::load(&args.recipe, &args.changes)?;
    resolved.check(&VERIFIERS.iter().map(|v| v.name).collect::<Vec<_>>())?;
    let plan = Plan::new(&resolved)?;
    let stage = plan.stages.first().ok_or_else(|| Error::usage("a recipe without stages"))?;
    let recipe = stage.inputs.recipe.clone();
    let layout = parallel::check(&recipe, ranks.size())?;
    let parts = if ranks.is_alone() { stage.parts.clone() } else { ranks::parts(&stage.inputs, layout) };
    let scratch = (ranks.rank() == 0).then(|| ScratchDir::new("memory")).transpose()?;
    let fresh = scratch.as_ref().map(|s| setup::starting_model(&recipe, &s.0.join("start"))).transpose()?;
    let fresh = fresh.map_or(String::new(), |dir| dir.to_string_lossy().into_owned());
    let dir = ranks.broadcast(fresh.as_bytes())?;
    let dir = PathBuf::from(String::from_utf8_lossy(&dir).into_owned());
    let own = take_steps(args, ranks, recipe, &dir)?;
    let own = serde_json::to_vec(&own).map_err(|e| Error::rank(format!("cannot be sent: {e}")))?;
    let read = |bytes: &Vec<u8>| {
        serde_json::from_slice(bytes).map_err(|e| Error::rank(format!("cannot be read: {e}")))
    };
    let all = ranks.all_gather(&own)?.iter().map(read).collect::<Result<Vec<Measured>>>()?;
    Ok((parts, all))
}

fn take_steps(args: &Args, ranks: &Ranks, recipe: Recipe, dir: &Path) -> Result<Measured> {
    let threads = (recipe.threads > 0).then_some(recipe.threads);
    let device = ferrl_kernels::open_for(&recipe.device, threads, ranks)?;
    let mut stage = setup::stage_on(recipe, device.clone(), dir, ranks)?;
    if !ranks.is_alone() {
        stage.join(ranks)?;
    }
    for _ in 0..args.steps {
        stage.step()?;
    }
    let most = device.books().map(|books| books.at_peak).unwrap_or_default();
    let buffers = Purpose::ALL.map(|purpose| most.of(purpose)).to_vec();
    let resident = (peak_rss_mib() * f64::from(1 << 20)) as usize;
    Ok(Measured { buffers, peak: device.memory_report().map_or(resident, |report| report.most) })
}

/// The purpose of the buffers of a part of the plan; `None` if it is outside of buffers.
fn purpose(part: &MemoryPart) -> Option<Purpose> {
    match part.name {
        "gradients" | "leaving" => Some(Purpose::Gradients),
        "optimizer" | "moments" | "average" => Some(Purpose::Optimizer),
        "cache" => Some(Purpose::Cache),
        "activations" | "evaluation" => Some(Purpose::Activations),
        "in flight" | "allocator" | "program" | "context" => None,
        _ => Some(Purpose::Weights),
    }
}

fn show(args: &Args, parts: &[MemoryPart], all: &[Measured]) -> Result<()> {
    let planned = |of: Option<Purpose>| -> u64 {
        parts.iter().filter(|part| purpose(part) == of).map(|part| part.bytes).sum()
    };
    let total: u64 = parts.iter().map(|part| part.bytes).sum();
    let off = |m: &Measured| 100.0 * (m.peak as f64 / total as f64 - 1.0);
    if args.json {
        let parts: Vec<_> = parts.iter().map(|p| json!({"name": p.name, "bytes": p.bytes})).collect();
        let named = |m: &Measured| -> serde_json::Map<String, serde_json::Value> {
            Purpose::ALL.iter().zip(&m.buffers).map(|(p, &b)| (p.name().to_string(), json!(b))).collect()
        };
        let one = |m: &Measured| json!({"buffers": named(m), "peak": m.peak, "off_percent": off(m)});
        let line =
            json!({"planned": total, "parts": parts, "ranks": all.iter().map(one).collect::<Vec<_>>()});
        print(&format!("{line}\n"))?;
    } else {
        print(&table(parts, all, &planned, total))?;
    }
    let worst = all.iter().map(|m| off(m).abs()).fold(0.0, f64::max);
    match args.within {
        Some(within) if worst > f64::from(within) => Err(Error::resource(format!(
            "a rank's peak differs from the plan by {worst:.1} %, expected {within} % at most"
        ))),
        _ => Ok(()),
    }
}

fn table(
    parts: &[MemoryPart],
    all: &[Measured],
    planned: &dyn Fn(Option<Purpose>) -> u64,
    total: u64,
) -> String {
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let mut out = format!("{:<18}{:>14}", "MiB", "planned");
    (0..all.len()).for_each(|rank| out += &format!("{:>14}", format!("rank {rank}")));
    let mut line = |name: &str, planned: u64, measured: &dyn Fn(&Measured) -> u64| {
        out += &format!("\n{name:<18}{:>14}", mib(planned));
        all.iter().for_each(|m| out += &format!("{:>14}", mib(measured(m))));
    };
    for (i, purpose) in Purpose::ALL.into_iter().enumerate() {
        let planned = planned(Some(purpose));
        if planned > 0 || all.iter().any(|m| m.buffers[i] > 0) {
            line(purpose.name(), planned, &|m| m.buffers[i] as u64);
        }
    }
    let rest = |m: &Measured| (m.peak - m.buffers.iter().sum::<usize>().min(m.peak)) as u64;
    line("outside of buffers", planned(None), &rest);
    line("peak", total, &|m| m.peak as u64);
    out += &format!("\n{:<18}{:>14}", "", "");
    all.iter().for_each(|m| out += &format!("{:>13.1}%", 100.0 * (m.peak as f64 / total as f64 - 1.0)));
    out += "\n\nplanned:";
    parts.iter().for_each(|p| out += &format!("\n  {:<14}{:>10}  {}", p.name, mib(p.bytes), p.what));
    out + "\n"
}

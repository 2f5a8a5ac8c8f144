//! `ferrl plan`: memory and time of a recipe, before it runs.

use crate::machine;
use crate::output::print;
use ferrl::plan::{Plan, Rates, StagePlan};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::verify::VERIFIERS;
use ferrl_engine::Result;
use ferrl_kernels::{BACKENDS, DType};
use std::path::PathBuf;

/// Estimate memory and time of a recipe, stage by stage
///
/// Refuses (exit code 5) what does not fit into the memory that is free, and names the settings that would. A model
/// directory needs only its config.json.
#[derive(clap::Args)]
pub struct Args {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Changes to it, as for `ferrl train`
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Memory to plan for, such as 22GiB or 900MiB; what is free on this machine when left out
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let resolved = Recipe::load(&args.recipe, &args.changes)?;
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    resolved.check(&verifiers)?;
    let plan = Plan::new(&resolved)?;
    let available = args.memory.or_else(|| machine::memory().map(|m| m.available));
    let peaks = Peaks::measure(&resolved, &plan)?;
    if args.json {
        print(&format!("{}\n", plan.json(available, &|s| peaks.of(s))))?;
    } else {
        print(&plan.table(available, &|s| peaks.of(s)))?;
    }
    available.map_or(Ok(()), |a| plan.fit(a))
}

/// The plan of a resolved recipe as text.
pub fn text(resolved: &Resolved) -> Result<String> {
    let plan = Plan::new(resolved)?;
    let peaks = Peaks::measure(resolved, &plan)?;
    Ok(plan.table(machine::memory().map(|m| m.available), &|s| peaks.of(s)))
}

/// Multiply-add peaks of the formats that a plan uses.
struct Peaks(Vec<(DType, f64)>);

impl Peaks {
    fn measure(resolved: &Resolved, plan: &Plan) -> Result<Self> {
        let first = resolved.stages.first().map(|s| &s.recipe);
        let threads = first.map(|r| r.threads).filter(|&t| t > 0);
        let named = first.map_or("auto", |r| r.device.as_str());
        let backend = ferrl_kernels::open(if named == "auto" { BACKENDS[0].name } else { named }, threads)?;
        let mut peaks: Vec<(DType, f64)> = Vec::new();
        for stage in &plan.stages {
            let dtype = stage.inputs.dtype();
            if !peaks.iter().any(|(d, _)| *d == dtype) {
                peaks.push((dtype, 1e9 * backend.peak_gflops(dtype)));
            }
        }
        Ok(Peaks(peaks))
    }

    fn of(&self, stage: &StagePlan) -> Option<Rates> {
        let dtype = stage.inputs.dtype();
        self.0.iter().find(|(d, _)| *d == dtype).map(|&(_, peak)| Rates { peak })
    }
}

/// A number of bytes with a unit.
fn bytes(text: &str) -> std::result::Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1048576.0,
        "gib" | "g" => 1073741824.0,
        "tib" | "t" => 1099511627776.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => return Err(format!("{other:?} is no unit; write 22GiB, 900MiB or a number of bytes")),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n > 0.0 && n.is_finite() => Ok((n * factor) as u64),
        _ => Err(format!("{text:?} is not a size; write 22GiB, 900MiB or a number of bytes")),
    }
}

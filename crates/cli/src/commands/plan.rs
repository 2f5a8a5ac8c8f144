//! `ferrl plan`: estimates memory and time of a recipe.

use crate::machine;
use crate::options::size;
use crate::output::print;
use ferrl::parallel;
use ferrl::plan::ranks::Cluster;
use ferrl::plan::{Plan, Rates, Room, StagePlan, cards};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::disk;
use ferrl::verify::VERIFIERS;
use ferrl_engine::Result;
use ferrl_kernels::{AUTO, DType, cores};
use std::path::{Path, PathBuf};

/// Estimate memory, time and disk of a recipe, stage by stage
///
/// Refuses (exit code 5) what does not fit into the free memory or disk, and names settings that would fit. A model directory
/// needs only its config.json; without a tokenizer or data, sequences are assumed to have the maximum length. With `--ranks`:
/// memory, communication and time of each rank, and the fastest layout; layouts that `ferrl train` would refuse are refused.
#[derive(clap::Args)]
pub struct Args {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides, as for `ferrl train`
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Memory of another machine to plan for, such as 22GiB or 900MiB; its disk is not checked [default: the free memory of the
    /// recipe's device]
    #[arg(long, value_name = "SIZE", value_parser = ferrl::recipe::bytes)]
    memory: Option<u64>,
    /// Folder of the run folders, whose disk must have room for the checkpoints
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Number of ranks to plan for, each with one card, or with --card cpu a part of a machine's cores and memory
    #[arg(long, value_name = "N", value_parser = size::<1000000>, conflicts_with = "memory")]
    ranks: Option<usize>,
    /// Number of machines (nodes)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = size::<1000000>, requires = "ranks")]
    nodes: usize,
    /// GPU of every rank: A100-40GB, A100-80GB, H100-80GB, H200-141GB, B200-180GB, L40S-48GB or RTX4090-24GB; or cpu, for
    /// machines such as this one
    #[arg(long, value_name = "NAME", default_value = "H100-80GB", requires = "ranks")]
    card: String,
    /// Network bandwidth between machines in GB/s, per rank [default: 50]
    #[arg(long, value_name = "GB", requires = "ranks", value_parser = crate::options::at_least_one)]
    network: Option<usize>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(ranks) = args.ranks {
        return on_many(args, ranks);
    }
    let resolved = Recipe::load(&args.recipe, &args.changes)?;
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    resolved.check(&verifiers)?;
    parallel::check_stages(&resolved, 1).map_err(|e| e.fix("--ranks N plans for N ranks"))?;
    let plan = Plan::new(&resolved)?;
    let machine = Machine::find(&resolved, &plan);
    let machine = match args.memory {
        // A device that this machine lacks can be planned for, without its speed.
        Some(bytes) => Machine { memory: Some(bytes), peaks: machine.map_or(Vec::new(), |m| m.peaks) },
        None => machine.map_err(|e| e.fix("--memory 80GiB plans for one that is not here"))?,
    };
    let room =
        Room { memory: machine.memory, disk: args.memory.map_or_else(|| disk::free(&args.runs), |_| None) };
    if args.json {
        print(&format!("{}\n", plan.json(room, &|s| machine.rates(s))))?;
    } else {
        print(&plan.table(room, &|s| machine.rates(s)))?;
    }
    room.memory.map_or(Ok(()), |a| plan.fit(a))?;
    room.disk.map_or(Ok(()), |free| plan.fit_disk(free))
}

/// The plan for many ranks, whose card this machine need not have.
fn on_many(args: &Args, ranks: usize) -> Result<()> {
    let network = args.network.map_or(cards::NETWORK, |gigabytes| gigabytes as f64 * 1e9);
    let processors = args.card.eq_ignore_ascii_case(cards::CPU);
    let card = if processors { cards::processor(0, 0.0, 0.0) } else { *cards::find(&args.card)? };
    let mut cluster = Cluster { ranks, nodes: args.nodes, card, network };
    cluster.check()?;
    let device = if processors { "device=cpu" } else { "device=cuda" };
    let changes: Vec<String> = args.changes.iter().cloned().chain([device.into()]).collect();
    let resolved = Recipe::load(&args.recipe, &changes)?;
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    resolved.check(&verifiers)?;
    let plan = Plan::new(&resolved)?;
    if processors {
        cluster.card = processor(cluster.per_node())?;
    }
    print(&plan.on(&cluster, args.json)?)?;
    plan.fit_on(&cluster)
}

/// Cores and memory of each of `ranks` ranks of a machine such as this one.
fn processor(ranks: usize) -> Result<cards::Card> {
    let cores = cores();
    let backend = ferrl_kernels::open(cards::CPU, Some((cores / ranks).max(1)))?;
    // With more ranks than cores, ranks share a core.
    let part = (cores as f64 / ranks as f64).min(1.0);
    let peak = |dtype: DType| 1e9 * part * backend.peak_gflops(dtype);
    let memory = machine::memory().map_or(u64::MAX, |m| m.total / ranks as u64);
    Ok(cards::processor(memory, peak(DType::Bf16), peak(DType::F32)))
}

/// The plan of a resolved recipe as text, for runs in that folder.
pub fn text(resolved: &Resolved, runs: &Path) -> Result<String> {
    let plan = Plan::new(resolved)?;
    let machine = Machine::find(resolved, &plan).unwrap_or_default();
    let room = Room { memory: machine.memory, disk: disk::free(runs) };
    Ok(plan.table(room, &|s| machine.rates(s)))
}

/// The planned device: free memory, and peak multiply-adds per second by number format.
#[derive(Default)]
struct Machine {
    memory: Option<u64>,
    peaks: Vec<(DType, f64)>,
}

impl Machine {
    fn find(resolved: &Resolved, plan: &Plan) -> Result<Self> {
        let first = resolved.stages.first().map(|s| &s.recipe);
        let threads = first.map(|r| r.threads).filter(|&t| t > 0);
        let backend = ferrl_kernels::open(first.map_or(AUTO, |r| r.device.as_str()), threads)?;
        let limit = first.map(Recipe::device_bytes).transpose()?.flatten();
        let free = machine::memory_of(&*backend).map(|m| m.available);
        let memory = [free, limit].into_iter().flatten().min();
        let mut peaks: Vec<(DType, f64)> = Vec::new();
        for stage in &plan.stages {
            let dtype = stage.inputs.dtype();
            if !peaks.iter().any(|(d, _)| *d == dtype) {
                peaks.push((dtype, 1e9 * backend.peak_gflops(dtype)));
            }
        }
        Ok(Machine { memory, peaks })
    }

    fn rates(&self, stage: &StagePlan) -> Option<Rates> {
        let (dtype, device) = (stage.inputs.dtype(), stage.inputs.device);
        self.peaks.iter().find(|(d, _)| *d == dtype).map(|&(_, peak)| Rates::of(device, peak))
    }
}

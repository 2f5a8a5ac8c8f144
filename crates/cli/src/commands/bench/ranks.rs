//! `ferrl bench ranks`: training steps on several ranks against one process, and the error of a simulated step.

use super::simulate::{Link, LinkPattern, RankMesh, StepParts, link, part_of};
use super::{ShapeArgs, micro_batches};
use crate::options::{DeviceArgs, at_least_one, size};
use crate::output::print;
use ferrl_engine::model::tensor::Team;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, plan};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, Ranks, comm, cores};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Training steps on several ranks against one process with the same number of threads
///
/// Ranks are threads of this process, each with its own device; with `ferrl launch -n N -- bench ranks` they are processes that
/// communicate through MPI, or through NCCL with `--without-mpi`. Prints the transport, seconds per step, the time a rank waited for
/// communication, and whether all end with the same weights. Then simulates the step from the time of a rank's micro-batch and
/// update and from latency and bandwidth, and prints the simulation's error. With `--split` also a step whose communication does
/// not overlap with computation.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Number of ranks; `ferrl launch` overrides it
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = size::<64>)]
    ranks: usize,
    /// Sequences per step
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<65536>)]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = size::<{ 1 << 20 }>)]
    seq: usize,
    /// Maximum number of tokens per micro-batch [default: one micro-batch for each rank]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    micro_batch: Option<usize>,
    /// Measured steps after one warm-up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = size::<100000>)]
    repeats: usize,
    /// Split weights, moments and gradients over the ranks (ZeRO-3)
    #[arg(long)]
    split: bool,
    /// Copies of the weights (hybrid sharding) [default: 1 with `--split`, one per group of `--tp` ranks without]
    #[arg(long, value_name = "N", value_parser = size::<64>)]
    copies: Option<usize>,
    /// Tensor parallelism: ranks that share the features of every layer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = size::<64>)]
    tp: usize,
    /// Context parallelism: ranks that share the tokens of a micro-batch
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = size::<64>)]
    sp: usize,
    /// One line of JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Ranks and layout of the measured steps.
#[derive(Clone, Copy)]
struct StepSetup<'a> {
    ranks: &'a Ranks,
    /// Layout of all ranks, also when this one computes alone.
    mesh: RankMesh,
    /// Whether communication overlaps with computation.
    overlap: bool,
    /// Whether one process computes as a rank does: in two passes of the head if ranks share weights, and with memory that is
    /// returned before every update.
    as_rank: bool,
}

impl StepSetup<'_> {
    /// Without communication.
    fn alone(mesh: RankMesh, as_rank: bool) -> Self {
        StepSetup { ranks: Ranks::ALONE, mesh, overlap: true, as_rank }
    }
}

/// Seconds of a step and of its parts: medians over steps.
#[derive(Clone, Debug, Default)]
struct Timing {
    step: f64,
    exchange: f64,
    /// Of one micro-batch.
    micro_batch: f64,
    update: f64,
    /// Of forming the compute copies of all weights.
    forming: f64,
    /// During which transfers between cards were in progress; `None` without cards.
    cards: Option<f64>,
    /// Bytes that this rank sent in a step.
    sent: f64,
    exchanges: f64,
    /// Of all weights at the end.
    hash: u64,
}

pub fn run(args: &Args) -> Result<()> {
    let opened = Ranks::open()?;
    let size = if opened.is_alone() { args.ranks } else { opened.size() };
    if args.seq < 2 || size < 2 {
        return Err(Error::usage("nothing to compare").fix("--ranks 2 and --seq 2 at least"));
    }
    let mesh = args.mesh(size)?;
    // Threads per rank: an equal part of the cores by default.
    let threads = args.device.threads.unwrap_or((cores() / size).max(1));
    let alone = StepSetup::alone(mesh, false);
    let share = |ranks: &Ranks| share(args, mesh, ranks, &|| args.device_with(threads, &opened));
    let whole = |ranks: &Ranks| match ranks.rank() {
        0 => {
            let device = args.device_with(size * threads, &opened)?;
            let mut steps = MeasuredSteps::of(args, alone, &args.shape, device)?;
            (0..=args.repeats).try_for_each(|repeat| steps.take(repeat > 0))?;
            steps.end()
        }
        _ => Ok(Timing::default()),
    };
    if !opened.is_alone() {
        let done = opened.together(|| {
            let (whole, own) = (whole(&opened)?, share(&opened)?);
            let hashes = opened.all_gather(&own.timing.hash.to_le_bytes())?;
            Ok((whole, own, hashes.iter().all(|h| h == &hashes[0])))
        });
        let rank = opened.rank();
        let shown = done.and_then(|(whole, own, same)| match rank {
            0 => show(args, mesh, threads, &RankResults { whole, own, same, how: opened.describe() }),
            _ => Ok(()),
        });
        opened.finish();
        return if rank == 0 { shown } else { Ok(()) }; // rank 0 reports the error
    }
    let whole = whole(&opened)?;
    let mut all = std::thread::scope(|scope| {
        let share = &share;
        let running: Vec<_> = comm::threads(size)
            .into_iter()
            .map(|ranks| scope.spawn(move || ranks.together(|| share(&ranks))))
            .collect();
        let join = |r: std::thread::ScopedJoinHandle<'_, Result<Share>>| {
            r.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    let same = all.iter().all(|s| s.timing.hash == all[0].timing.hash);
    let (own, how) = (all.swap_remove(0), "threads of one process".to_string());
    show(args, mesh, threads, &RankResults { whole, own, same, how })
}

/// What each rank measures.
fn share(
    args: &Args,
    mesh: RankMesh,
    ranks: &Ranks,
    device: &dyn Fn() -> Result<Arc<dyn Backend>>,
) -> Result<Share> {
    let alone = StepSetup::alone(mesh, true);
    let own = |overlap| {
        MeasuredSteps::of(args, StepSetup { ranks, mesh, overlap, as_rank: true }, &args.shape, device()?)
    };
    let mut part = MeasuredSteps::of(args, alone, &args.shape, device()?)?;
    let shape = part_of(&args.shape, mesh)?;
    let mut piece = match mesh.team() {
        1 => None,
        _ => Some(MeasuredSteps::of(args, alone, &shape, device()?)?),
    };
    let mut in_turn = mesh.layer_by_layer().then(|| own(false)).transpose()?;
    let mut steps = own(true)?;
    // With groups most communication is within a group.
    let among = if mesh.team() > 1 { ranks.team(mesh.team()) } else { ranks.clone() };
    let probe = device()?;
    ranks.connect(&probe)?;
    let mut simulated = Vec::new();
    // Alternating, so that other load on the machine affects all variants equally; the first round is a warm-up.
    for repeat in 0..=args.repeats {
        let link = link(&among, &probe, steps.pattern())?;
        let all: [Option<&mut MeasuredSteps<'_>>; 4] =
            [Some(&mut part), piece.as_mut(), in_turn.as_mut(), Some(&mut steps)];
        for steps in all.into_iter().flatten() {
            ranks.all_gather(&[])?; // all begin together
            steps.take(repeat > 0)?;
        }
        if repeat > 0 {
            // The ranks wait for the slowest of them.
            let own = piece.as_ref().unwrap_or(&part).last.micro_batch;
            let each = ranks.all_gather(&own.to_le_bytes())?;
            let each =
                each.iter().filter_map(|bytes| bytes.as_slice().try_into().ok().map(f64::from_le_bytes));
            let micro_batch = each.fold(0.0, f64::max);
            let Timing { update, forming, .. } = part.last;
            simulated.push(StepParts { micro_batch, update, forming, link });
        }
    }
    let in_turn = in_turn.map(MeasuredSteps::end).transpose()?;
    let each = steps.seconds.clone();
    Ok(Share { part: part.end()?, in_turn, timing: steps.end()?, simulated, each })
}

/// What one rank measured.
struct Share {
    /// Without communication.
    part: Timing,
    /// Without overlap of communication and computation.
    in_turn: Option<Timing>,
    timing: Timing,
    /// What each step is simulated from, and its seconds.
    simulated: Vec<StepParts>,
    each: Vec<f64>,
}

impl Args {
    /// The layout of `ranks` ranks.
    fn mesh(&self, ranks: usize) -> Result<RankMesh> {
        let team = self.tp * self.sp;
        let groups = if team > 1 { ranks / self.tp } else { ranks };
        let copies = self.copies.unwrap_or(if self.split { 1 } else { groups });
        if !ranks.is_multiple_of(team) || !ranks.is_multiple_of(copies * self.tp) {
            return Err(Error::usage(format!("{copies} copies on {ranks} ranks, {team} in a group"))
                .fix("--ranks that --tp times --sp and --tp times --copies divide"));
        }
        Ok(RankMesh { ranks, tp: self.tp, sp: self.sp, copies })
    }

    /// Tokens of a micro-batch.
    fn budget(&self, mesh: RankMesh) -> usize {
        self.micro_batch.unwrap_or(self.batch.div_ceil(mesh.data()) * self.seq)
    }

    fn device_with(&self, threads: usize, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
        DeviceArgs { threads: Some(threads), ..self.device.clone() }.open_for(ranks)
    }
}

/// Training steps of a random model, the same on every rank.
struct MeasuredSteps<'a> {
    taken: StepSetup<'a>,
    trainer: ModelTrainer,
    batches: Vec<Batch>,
    /// Scored rows of a step.
    targets: f32,
    /// What each step took, and the last one.
    all: Vec<Timing>,
    seconds: Vec<f64>,
    last: Timing,
}

impl<'a> MeasuredSteps<'a> {
    /// Steps of a model of this shape: whole, or a rank's part of it with the rank's sequences.
    fn of(args: &Args, taken: StepSetup<'a>, shape: &ShapeArgs, device: Arc<dyn Backend>) -> Result<Self> {
        let StepSetup { ranks, mesh, overlap, .. } = taken;
        let options = Options { dtype: args.device.dtype.dtype(), training: true, context: args.seq };
        let model: Model = shape.model(device.clone(), options, None)?;
        let settings = OptimizerOptions { weight_decay: 0.01, max_grad_norm: None, ..Default::default() };
        let mut trainer = ModelTrainer::new(model, settings)?;
        trainer.overlap = overlap;
        ranks.connect(&device)?;
        if mesh.splits() && !ranks.is_alone() {
            trainer.split(ranks, mesh.copies, 0)?;
            if mesh.team() > 1 {
                trainer.model.set_team(Team::new(ranks, mesh.tp, mesh.sp, true))?;
            }
        }
        let (mut batch, mut budget) = (args.batch, args.budget(mesh));
        if !std::ptr::eq(shape, &args.shape) {
            batch = (budget / args.seq).clamp(1, args.batch).div_ceil(mesh.sp);
            budget = batch * args.seq;
        }
        let batches = micro_batches(shape.vocab, (batch, args.seq), budget)?;
        let targets = (batch * args.seq - batch) as f32;
        let (all, seconds, last) = (Vec::new(), Vec::new(), Timing::default());
        Ok(MeasuredSteps { taken, trainer, batches, targets, all, seconds, last })
    }

    /// How a rank exchanges most of its numbers.
    fn pattern(&self) -> LinkPattern {
        match self.taken.mesh.team() {
            1 => LinkPattern::Sums,
            _ => LinkPattern::Columns((self.last.sent / self.last.exchanges.max(1.0)) as usize / 4),
        }
    }

    /// Takes a step.
    fn take(&mut self, counts: bool) -> Result<()> {
        let StepSetup { ranks, .. } = self.taken;
        let device = self.trainer.model.backend.clone();
        ranks.take_cost();
        ranks.take_exchanges();
        ranks.take_card_seconds();
        let began = Instant::now();
        let micro = gradients(&mut self.trainer, &self.batches, self.targets, self.taken)?;
        let before_update = Instant::now();
        self.trainer.update(1e-3)?;
        device.wait()?;
        let (update, step) = (before_update.elapsed().as_secs_f64(), began.elapsed().as_secs_f64());
        let (exchange, sent) = ranks.take_cost();
        self.last = Timing {
            step,
            exchange,
            micro_batch: median(micro),
            update,
            forming: if ranks.is_alone() { forming(&mut self.trainer.model)? } else { 0.0 },
            cards: ranks.take_card_seconds(),
            sent: sent as f64,
            exchanges: ranks.take_exchanges() as f64,
            hash: 0,
        };
        if counts {
            self.all.push(self.last.clone());
            self.seconds.push(step);
        }
        Ok(())
    }

    /// Medians, and the hash of all weights.
    fn end(self) -> Result<Timing> {
        let StepSetup { ranks, mesh, .. } = self.taken;
        let split = mesh.splits() && !ranks.is_alone();
        let whole = split.then(|| self.trainer.model.exact_copy()).transpose()?;
        let hash = hash(whole.as_ref().unwrap_or(&self.trainer.model))?;
        let of = |f: fn(&Timing) -> f64| median(self.all.iter().map(f).collect());
        let cards: Vec<f64> = self.all.iter().filter_map(|t| t.cards).collect();
        Ok(Timing {
            step: of(|t| t.step),
            exchange: of(|t| t.exchange),
            micro_batch: of(|t| t.micro_batch),
            update: of(|t| t.update),
            forming: of(|t| t.forming),
            cards: (!cards.is_empty()).then(|| median(cards)),
            hash,
            ..self.last
        })
    }
}

/// Seconds of forming the compute copies of all weights.
fn forming(model: &mut Model) -> Result<f64> {
    let mut seconds = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        model.refresh()?;
        model.backend.wait()?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok(median(seconds))
}

/// Gradients of a step, summed over the ranks; returns the seconds of each micro-batch of this rank.
fn gradients(
    trainer: &mut ModelTrainer,
    batches: &[Batch],
    targets: f32,
    StepSetup { ranks, mesh, as_rank, .. }: StepSetup<'_>,
) -> Result<Vec<f64>> {
    // A group acts as one rank.
    let team = if ranks.is_alone() { 1 } else { mesh.team() };
    let (together, groups, own) = (ranks.team(team), ranks.size() / team, ranks.rank() / team);
    let mut seconds = Vec::new();
    trainer.prepare()?;
    for (i, batch) in batches.iter().enumerate() {
        if i % groups == own {
            let began = Instant::now();
            let logp = vec![-1.0 / targets; batch.tokens()];
            let grads = StatGrads { logp, ..Default::default() };
            together.in_step(|| match as_rank && ranks.is_alone() && mesh.splits() {
                true => trainer.forward(batch).and_then(|_| trainer.backward(batch, &grads)),
                false => trainer.forward_backward(batch, &grads).map(drop),
            })?;
            trainer.model.backend.wait()?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        if i + 1 == batches.len() || (i + 1).is_multiple_of(groups) {
            if own > i % groups && team == 1 {
                trainer.idle_forward()?;
                trainer.idle_backward()?;
            }
            trainer.add_round(ranks)?;
        }
    }
    trainer.gather_gradient(ranks)?;
    if as_rank && ranks.is_alone() {
        trainer.model.backend.trim();
    }
    Ok(seconds)
}

/// FNV-1a over the bits of every weight.
fn hash(model: &Model) -> Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for i in 0..model.params.len() {
        for x in model.read(i)? {
            hash = (hash ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(hash)
}

pub(super) fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// Medians over the steps, and the error of the simulated ones.
struct Simulation {
    step: f64,
    error: f64,
    link: Link,
    micro_batch: f64,
}

impl Share {
    fn simulation(&self, mesh: RankMesh, rounds: usize) -> Simulation {
        let (parts, sent) = (&self.simulated, (self.timing.sent, self.timing.exchanges));
        let of = |f: fn(&StepParts) -> f64| median(parts.iter().map(f).collect());
        let steps: Vec<f64> = parts.iter().map(|p| p.step(mesh, rounds, sent)).collect();
        let errors = steps.iter().zip(&self.each).map(|(simulated, took)| simulated / took - 1.0);
        Simulation {
            error: median(errors.collect()),
            step: median(steps),
            link: Link { latency: of(|p| p.link.latency), speed: of(|p| p.link.speed) },
            micro_batch: of(|p| p.micro_batch),
        }
    }
}

struct RankResults {
    whole: Timing,
    own: Share,
    same: bool,
    how: String,
}

fn show(args: &Args, mesh: RankMesh, threads: usize, r: &RankResults) -> Result<()> {
    let size = mesh.ranks;
    let rounds = plan(&vec![args.seq; args.batch], args.budget(mesh))?.len().div_ceil(mesh.data());
    let Share { part, in_turn, timing, .. } = &r.own;
    let Simulation { step: simulated, error, link, micro_batch } = r.own.simulation(mesh, rounds);
    let overhead = timing.step / r.whole.step - 1.0;
    let equal = r.same
        && [Some(timing), Some(part), in_turn.as_ref()].into_iter().flatten().all(|t| t.hash == r.whole.hash);
    if args.json {
        let line = json!({
            "ranks": size, "threads": threads, "how": r.how,
            "one_process_seconds": r.whole.step, "seconds": timing.step, "exchange_seconds": timing.exchange,
            "card_seconds": timing.cards,
            "in_turn_seconds": in_turn.as_ref().map(|t| t.step),
            "in_turn_exchange_seconds": in_turn.as_ref().map(|t| t.exchange),
            "overhead": overhead, "sent_bytes": timing.sent, "exchanges": timing.exchanges, "copies": mesh.copies,
            "link_bytes_per_second": link.speed, "latency_seconds": link.latency, "tp": mesh.tp, "sp": mesh.sp,
            "micro_batch_seconds": micro_batch, "update_seconds": part.update, "forming_seconds": part.forming,
            "simulated_seconds": simulated, "simulation_error": error,
            "weights": format!("{:016x}", timing.hash), "same_weights": equal,
        });
        print(&format!("{line}\n"))?;
    } else {
        let line = |what: &str, t: &Timing| {
            format!("{what:<18}{:>14.4}{:>14.4}   {:016x}\n", t.step, t.exchange, t.hash)
        };
        let cards = timing.cards.map_or(String::new(), |seconds| {
            format!("transfers between cards: {seconds:.4} s a step, including waits for slower ranks and overlapped computation\n")
        });
        let in_turn =
            in_turn.as_ref().map_or(String::new(), |t| line(&format!("{size} x {threads} in turn"), t));
        print(&format!(
            "training step: {}; {} x {} tokens; ranks are {}\n\n{:<18}{:>14}{:>14}   weights\n{}{}{in_turn}{}\n\
             overhead of {size} ranks against one process with the same number of threads: {:.1} %\n\
             a rank sends {:.1} MB a step in {} exchanges, at {:.2} GB/s and {:.0} us an exchange\n\
             {cards}simulated step: {simulated:.4} s, {:+.1} % off\n",
            args.shape.describe(),
            args.batch,
            args.seq,
            r.how,
            "ranks x threads",
            "seconds a step",
            "waiting",
            line(&format!("1 x {}", size * threads), &r.whole),
            line(&format!("{size} times 1 x {threads}"), part),
            line(&format!("{size} x {threads}"), timing),
            100.0 * overhead,
            timing.sent / 1e6,
            timing.exchanges,
            link.speed / 1e9,
            1e6 * link.latency,
            100.0 * error,
        ))?;
    }
    if equal {
        return Ok(());
    }
    Err(Error::numerics("the weights differ from those of one process")
        .fix("run `ferrl bench --check` on this device, and report it"))
}

//! `ferrl bench ranks`: several ranks against one process with as many threads, and the error of a simulation of it.

use super::{ShapeArgs, micro_batches};
use crate::options::{DeviceArgs, at_least_one, size};
use crate::output::print;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, plan};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, Ranks, comm, cores};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of the exchange that measures a link.
const PROBE: usize = 16 << 20;

/// Training steps on several ranks against one process with as many threads
///
/// Ranks are threads of this process, each with a device of its own; started by `ferrl launch -n N -- bench ranks` they are processes under
/// MPI, or with `--without-mpi` under NCCL. Prints which way gradients and weights travel, seconds a step, the time in which a rank waited for exchanges, and whether all left the same weights; then what a
/// simulation of the step says, from the time of a micro-batch and an update in one process and the speed of the exchange, and its error.
/// With `--split` also a step whose exchanges come in turn with what is computed.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Number of ranks; that of `ferrl launch` where it has started this
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = size::<64>)]
    ranks: usize,
    /// Sequences of a step
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<65536>)]
    batch: usize,
    /// Tokens of a sequence
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
    /// One line of JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Who takes the steps, and how.
#[derive(Clone, Copy)]
struct StepSetup<'a> {
    ranks: &'a Ranks,
    /// Cuts the step into micro-batches where nothing else does.
    size: usize,
    /// Whether exchanges go on while layers are computed.
    overlap: bool,
}

/// Seconds of a step and of its parts: medians over steps.
#[derive(Clone, Debug, Default)]
struct Timing {
    step: f64,
    exchange: f64,
    /// Of one micro-batch.
    micro_batch: f64,
    update: f64,
    /// In which transfers from card to card were under way; none where there are no such.
    cards: Option<f64>,
    /// Bytes that this rank sent in a step.
    sent: f64,
    /// Of all weights at the end.
    hash: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let opened = Ranks::open()?;
    let size = if opened.is_alone() { args.ranks } else { opened.size() };
    if args.seq < 2 || size < 2 {
        return Err(Error::usage("nothing to compare").fix("--ranks 2 and --seq 2 at least"));
    }
    // What one rank has: its share of the machine, unless told.
    let threads = args.device.threads.unwrap_or((cores() / size).max(1));
    // Alone, but while the others do the same: cores and memory are shared as they are among ranks.
    let alone = StepSetup { ranks: Ranks::ALONE, size, overlap: true };
    let share = |ranks: &Ranks| -> Result<Share> {
        ranks.all_gather(&[])?;
        let part = measure(args, alone, args.device_with(threads, &opened)?)?;
        ranks.all_gather(&[])?;
        let step =
            |overlap| measure(args, StepSetup { ranks, size, overlap }, args.device_with(threads, &opened)?);
        let in_turn = if args.split { Some(step(false)?) } else { None };
        Ok(Share { part, in_turn, timing: step(true)?, link: link(ranks)? })
    };
    let whole = |ranks: &Ranks| match ranks.rank() {
        0 => measure(args, alone, args.device_with(size * threads, &opened)?),
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
            0 => show(args, size, threads, &RankResults { whole, own, same, how: opened.describe() }),
            _ => Ok(()),
        });
        opened.finish();
        return if rank == 0 { shown } else { Ok(()) }; // rank 0 says what is wrong
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
    show(args, size, threads, &RankResults { whole, own, same, how })
}

/// What one rank measured.
struct Share {
    /// Without the others' gradients.
    part: Timing,
    /// Where exchanges wait for what is computed and the other way round.
    in_turn: Option<Timing>,
    timing: Timing,
    /// Bytes a second.
    link: f64,
}

impl Args {
    fn device_with(&self, threads: usize, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
        DeviceArgs { threads: Some(threads), ..self.device.clone() }.open_for(ranks)
    }
}

/// Steps of a random model, the same on every rank.
fn measure(args: &Args, taken: StepSetup<'_>, device: Arc<dyn Backend>) -> Result<Timing> {
    let StepSetup { ranks, size, overlap } = taken;
    let dtype = args.device.dtype.dtype();
    let options = Options { dtype, training: true, context: args.seq };
    let model: Model = args.shape.model(device.clone(), options, None)?;
    let settings = OptimizerOptions { weight_decay: 0.01, max_grad_norm: None, ..Default::default() };
    let mut trainer = ModelTrainer::new(model, settings)?;
    trainer.overlap = overlap;
    let split = args.split && !ranks.is_alone();
    ranks.connect(&device)?;
    if split {
        trainer.split(ranks, 1, 0)?;
    }
    let budget = args.micro_batch.unwrap_or(args.batch.div_ceil(size) * args.seq);
    let batches = micro_batches(args.shape.vocab, (args.batch, args.seq), budget)?;
    let targets = (args.batch * args.seq - args.batch) as f32;
    let (mut steps, mut exchanges, mut micro, mut updates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut sent, mut cards) = (0.0, Vec::new());
    for repeat in 0..=args.repeats {
        ranks.all_gather(&[])?; // all begin together
        ranks.take_cost();
        ranks.take_card_seconds();
        let began = Instant::now();
        let seconds = gradients(&mut trainer, &batches, targets, ranks)?;
        let before_update = Instant::now();
        trainer.update(1e-3)?;
        device.wait()?;
        let (update, step) = (before_update.elapsed().as_secs_f64(), began.elapsed().as_secs_f64());
        let (exchange, bytes) = ranks.take_cost();
        sent = bytes as f64;
        let on_cards = ranks.take_card_seconds();
        // The first step warms up.
        if repeat > 0 {
            micro.extend(seconds);
            updates.push(update);
            steps.push(step);
            exchanges.push(exchange);
            cards.extend(on_cards);
        }
    }
    let whole = split.then(|| trainer.model.exact_copy()).transpose()?;
    let hash = hash(whole.as_ref().unwrap_or(&trainer.model))?;
    Ok(Timing {
        step: median(steps),
        exchange: median(exchanges),
        micro_batch: median(micro),
        update: median(updates),
        cards: (!cards.is_empty()).then(|| median(cards)),
        sent,
        hash,
    })
}

/// Gradients of a step, summed over the ranks; returns the seconds of each micro-batch of this rank.
fn gradients(trainer: &mut ModelTrainer, batches: &[Batch], targets: f32, ranks: &Ranks) -> Result<Vec<f64>> {
    let mut seconds = Vec::new();
    for (i, batch) in batches.iter().enumerate() {
        if ranks.owns(i) {
            let began = Instant::now();
            let logp = vec![-1.0 / targets; batch.tokens()];
            trainer.forward_backward(batch, &StatGrads { logp, ..Default::default() })?;
            trainer.model.backend.wait()?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        if ranks.ends_round(i, batches.len()) {
            if ranks.sits_out(i) {
                trainer.idle_forward()?;
                trainer.idle_backward()?;
            }
            trainer.add_round(ranks)?;
        }
    }
    trainer.gather_gradient(ranks)?;
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

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// Bytes a second that a rank sends while all do.
fn link(ranks: &Ranks) -> Result<f64> {
    let part = vec![0u8; PROBE / ranks.size()];
    let parts: Vec<&[u8]> = (0..ranks.size()).map(|_| &part[..]).collect();
    let mut seconds = Vec::new();
    for _ in 0..6 {
        ranks.all_gather(&[])?;
        let began = Instant::now();
        ranks.all_to_all(&parts)?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok((part.len() * (ranks.size() - 1)) as f64 / median(seconds).max(1e-9))
}

struct RankResults {
    whole: Timing,
    own: Share,
    same: bool,
    how: String,
}

impl RankResults {
    /// Seconds that a step on the ranks should take: as many micro-batches in turn as there are rounds, the exchange, the update.
    fn simulated(&self, rounds: usize) -> f64 {
        let Share { part, timing, link, .. } = &self.own;
        rounds as f64 * part.micro_batch + timing.sent / link + part.update
    }
}

fn show(args: &Args, size: usize, threads: usize, r: &RankResults) -> Result<()> {
    let budget = args.micro_batch.unwrap_or(args.batch.div_ceil(size) * args.seq);
    let rounds = plan(&vec![args.seq; args.batch], budget)?.len().div_ceil(size);
    let simulated = r.simulated(rounds);
    let Share { part, in_turn, timing, link } = &r.own;
    let error = simulated / timing.step - 1.0;
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
            "overhead": overhead, "sent_bytes": timing.sent, "link_bytes_per_second": link,
            "simulated_seconds": simulated, "simulation_error": error,
            "weights": format!("{:016x}", timing.hash), "same_weights": equal,
        });
        print(&format!("{line}\n"))?;
    } else {
        let line = |what: &str, t: &Timing| {
            format!("{what:<18}{:>14.4}{:>14.4}   {:016x}\n", t.step, t.exchange, t.hash)
        };
        let cards = timing.cards.map_or(String::new(), |seconds| {
            format!("from card to card: {seconds:.4} s a step under way, slower ranks and what is computed meanwhile included\n")
        });
        let in_turn =
            in_turn.as_ref().map_or(String::new(), |t| line(&format!("{size} x {threads} in turn"), t));
        print(&format!(
            "training step: {}; {} x {} tokens; ranks are {}\n\n{:<18}{:>14}{:>14}   weights\n{}{}{in_turn}{}\n\
             overhead of {size} ranks against one process with as many threads: {:.1} %\n\
             a rank sends {:.1} MB a step, at {:.2} GB/s\n\
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
            link / 1e9,
            100.0 * error,
        ))?;
    }
    match equal {
        true => Ok(()),
        false => Err(Error::numerics("the ranks left other weights than one process")
            .fix("run `ferrl bench --check` on this device, and report it")),
    }
}

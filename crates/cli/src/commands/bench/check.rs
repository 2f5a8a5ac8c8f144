//! `ferrl bench --check`: whether a device computes what the CPU computes and keeps the engine's promises.

mod curves;
mod groups;
mod ranks;

use self::curves::Curves;
use super::parity::Fixtures;
use crate::output::print;
use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::generate::{
    CacheOptions, Completion, GenerationRequest, Generator, Sampler, SamplingParams,
};
use ferrl_engine::model::{FAMILIES, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, stats};
use ferrl_engine::{Error, Result, nearest};
use ferrl_kernels::check::{CASES, Check, CheckOutcome};
use ferrl_kernels::{BACKENDS, Backend, DType, Ranks};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Selected checks, the rows printed so far, and the failures.
struct CheckTable<'a> {
    only: &'a str,
    rows: usize,
    failures: usize,
}

impl CheckTable<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(self.only)
    }

    /// Runs a group of checks if selected; prints a line for the group and one for each failure.
    fn ask(
        &mut self,
        name: &str,
        questions: impl FnOnce(&mut Vec<CheckOutcome>) -> Result<()>,
    ) -> Result<()> {
        let outcomes = self.row(name, questions)?;
        outcomes.iter().filter(|o| !o.is_right()).take(8).try_for_each(Self::line)
    }

    /// The same for checks of different kinds, with a line for each.
    fn ask_each(
        &mut self,
        name: &str,
        questions: impl FnOnce(&mut Vec<CheckOutcome>) -> Result<()>,
    ) -> Result<()> {
        let outcomes = self.row(name, questions)?;
        outcomes.iter().try_for_each(Self::line)
    }

    fn line(o: &CheckOutcome) -> Result<()> {
        let verdict = if o.is_right() { "" } else { "  FAILED" };
        print(&format!("    {}: {:.3e}, allowed {:.3e}{verdict}\n", o.name, o.worst, o.limit))
    }

    fn row(
        &mut self,
        name: &str,
        questions: impl FnOnce(&mut Vec<CheckOutcome>) -> Result<()>,
    ) -> Result<Vec<CheckOutcome>> {
        let (mut outcomes, start) = (Vec::new(), Instant::now());
        if !self.wants(name) {
            return Ok(outcomes);
        }
        if self.rows == 0 {
            print(&format!(
                "{:<44}{:>9}{:>12}{:>12}{:>9}\n",
                "what", "checks", "worst", "allowed", "seconds"
            ))?;
        }
        self.rows += 1;
        // An error counts as one failure, with its own line.
        if let Err(e) = questions(&mut outcomes) {
            self.failures += 1;
            print(&format!("{name}: {e}\n"))?;
        }
        let share = |o: &CheckOutcome| if o.limit > 0.0 { o.worst / o.limit } else { o.worst };
        let worst = outcomes.iter().max_by(|a, b| share(a).total_cmp(&share(b)));
        let (most, limit) = worst.map_or((0.0, 0.0), |o| (o.worst, o.limit));
        let wrong = outcomes.iter().filter(|o| !o.is_right()).count();
        let verdict = if wrong == 0 { String::new() } else { format!("  {wrong} FAILED") };
        self.failures += wrong;
        let (count, seconds) = (outcomes.len(), start.elapsed().as_secs_f64());
        print(&format!("{name:<44}{count:>9}{most:>12.2e}{limit:>12.2e}{seconds:>9.2}{verdict}\n"))?;
        Ok(outcomes)
    }
}

pub fn run(
    device: &str,
    threads: Option<usize>,
    only: &str,
    fixtures: Option<&Path>,
    ranks: Option<usize>,
) -> Result<()> {
    let fixtures = fixtures.map(Fixtures::open).transpose()?;
    let member = Ranks::open()?;
    if !member.is_alone() {
        return ranks::as_member(&member, device, only);
    }
    let card = ferrl_kernels::open(device, threads)?;
    let cpu = (BACKENDS[0].open)(0, threads)?;
    print(&format!("{}\nagainst {}\n\n", card.describe(), cpu.describe()))?;
    let mut table = CheckTable { only, rows: 0, failures: 0 };
    for (name, case) in CASES {
        table.ask(name, |out| case(&mut Check::new(&*cpu, &*card, &mut |o| out.push(o.clone()))))?;
    }
    for family in FAMILIES.iter().map(|f| f.name()) {
        for (kind, init) in sizes(family) {
            for dtype in [DType::F32, DType::Bf16] {
                let name = format!("{family} {kind} {}", dtype.name());
                table.ask(&name, |out| family_checks(&cpu, &card, &init, dtype, out))?;
            }
        }
    }
    curve_checks(&cpu, &card, &mut table)?;
    if let Some(size) = ranks.filter(|&n| n > 1) {
        ranks::check((&cpu, &card), device, size, &mut table)?;
    }
    if let Some(fixtures) = &fixtures {
        for dir in &fixtures.models {
            let name = format!("reference {}", dir.file_name().map_or("".into(), |n| n.to_string_lossy()));
            table.ask(&name, |out| fixtures.check(&card, dir, out))?;
        }
    }
    if table.rows == 0 {
        let names: Vec<&str> = CASES.iter().map(|c| c.0).chain(FAMILIES.iter().map(|f| f.name())).collect();
        let hint = nearest(only, names.iter().copied().chain(["curves"])).unwrap_or("curves");
        return Err(Error::usage(format!("no check's name contains {only:?}"))
            .fix(format!("--only {hint:?}; without --only the names of all are printed")));
    }
    match table.failures {
        0 => print("\nall passed\n"),
        n => Err(Error::device(format!("{n} checks failed"))
            .fix("report the table above with the card's name; train on another device until then")),
    }
}

/// Whole training runs; creates no folder if none is selected.
fn curve_checks(cpu: &Arc<dyn Backend>, card: &Arc<dyn Backend>, table: &mut CheckTable<'_>) -> Result<()> {
    let mut cases = Curves::cases()?;
    cases.retain(|c| table.wants(&c.name));
    if cases.is_empty() {
        return Ok(());
    }
    let curves = Curves::new("curves")?;
    cases.iter().try_for_each(|case| table.ask_each(&case.name, |out| curves.check(cpu, card, case, out)))
}

/// Odd sizes, which use the general kernels, and even ones, which use the fast kernels.
fn sizes(family: &'static str) -> Vec<(&'static str, InitOptions)> {
    let make = |hidden: usize, heads: usize, kv_heads: usize, ffn: usize, vocab: usize| {
        let mut init = InitOptions {
            vocab,
            hidden,
            layers: 2,
            heads: Some(heads),
            kv_heads: Some(kv_heads),
            ffn: Some(ffn),
            max_positions: 256,
            window: Some(9),
            std: if hidden < 64 { 0.3 } else { 0.1 },
            ..InitOptions::new(family)
        };
        // Not every family has a window, or fewer key heads than query heads.
        for _ in 0..2 {
            if init.build().is_err() {
                init.window = None;
            }
            if init.build().is_err() {
                init.kv_heads = Some(heads);
            }
        }
        init
    };
    vec![("odd", make(24, 3, 1, 37, 67)), ("even", make(256, 4, 2, 512, 1000))]
}

fn model(device: &Arc<dyn Backend>, init: &InitOptions, dtype: DType) -> Result<Model> {
    Model::random(device.clone(), init, Options { dtype, training: true, context: 0 })
}

fn outcome(name: impl Into<String>, worst: f64, limit: f64) -> CheckOutcome {
    CheckOutcome { name: name.into(), worst: if worst.is_nan() { f64::INFINITY } else { worst }, limit }
}

/// The largest; a NaN is larger than anything.
fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

/// Sequences of several lengths.
fn batch(vocab: usize, seed: usize) -> Batch {
    let ids = |s: usize, n: usize| {
        let at =
            |i: usize| super::some_ids(1, vocab)[0].wrapping_add((i * i * 31 + s * 7 + i * 3 + seed) as u32);
        (0..n).map(|i| at(i) % vocab as u32).collect::<Vec<u32>>()
    };
    Batch::of([ids(0, 3), ids(1, 70), ids(2, 33), ids(3, 128)])
}

fn family_checks(
    cpu: &Arc<dyn Backend>,
    card: &Arc<dyn Backend>,
    init: &InitOptions,
    dtype: DType,
    out: &mut Vec<CheckOutcome>,
) -> Result<()> {
    // Log-probabilities against the CPU's.
    let batch_of = |seed| batch(init.vocab, seed);
    let routed = init.build()?.0.experts.is_some();
    let all = InitOptions { experts: Some(4), experts_per_token: Some(4), ..init.clone() };
    // Rounding decides between two experts of nearly equal probability: for the comparison with the CPU, every
    // expert has every token.
    let near = if routed { &all } else { init };
    let (here, there) = (model(cpu, near, dtype)?, model(card, near, dtype)?);
    let (want, got) = (stats(&here, &batch_of(0), 1.0)?, stats(&there, &batch_of(0), 1.0)?);
    let far = |a: &[f32], b: &[f32]| {
        largest(a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs()) / (1.0 + f64::from(b.abs()))))
    };
    let limit = if dtype == DType::Bf16 { 0.1 } else { 1e-4 };
    out.push(outcome("logp", far(&got.logp, &want.logp), limit));
    out.push(outcome("entropy", far(&got.entropy, &want.entropy), limit));
    // The loss curve of fifty steps against the CPU's.
    let (here, _) = curve(here, &batch_of(0), 50)?;
    let (there, mut trained) = curve(there, &batch_of(0), 50)?;
    let drop = here[0] - here[49];
    let worst = largest(here.iter().zip(&there).map(|(a, b)| (a - b).abs()));
    out.push(outcome("curve of 50 steps", worst / drop, if dtype == DType::Bf16 { 0.05 } else { 2e-3 }));
    // A second run has the same bits.
    let (again, _) = curve(model(card, near, dtype)?, &batch_of(0), 50)?;
    let other = there.iter().zip(&again).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    out.push(outcome("curve again", other as f64, 0.0));
    if routed {
        trained = curve(model(card, init, dtype)?, &batch_of(0), 50)?.1;
    }
    switches(card, trained, init.vocab, out)
}

/// Losses of training on one batch.
fn curve(model: Model, batch: &Batch, steps: usize) -> Result<(Vec<f64>, ModelTrainer)> {
    let mut trainer = ModelTrainer::new(model, OptimizerOptions::default())?;
    let mut losses = Vec::new();
    for _ in 0..steps {
        losses.push(step(&mut trainer, batch)?);
    }
    Ok((losses, trainer))
}

fn step(trainer: &mut ModelTrainer, batch: &Batch) -> Result<f64> {
    let tokens = batch.tokens();
    let targets = (tokens - batch.sequences.len()) as f64;
    let found = trainer.forward(batch)?;
    let loss = -found.logp.iter().map(|&x| f64::from(x)).sum::<f64>() / targets;
    let grads = StatGrads { logp: vec![-1.0 / targets as f32; tokens], ..Default::default() };
    trainer.backward(batch, &grads)?;
    trainer.update(1e-3)?;
    Ok(loss)
}

/// Alternates sampling and training a hundred times: sampled log-probabilities are recomputed to the same bits, memory does not
/// grow. Then repeats one such turn, which must not allocate memory.
fn switches(
    card: &Arc<dyn Backend>,
    mut trainer: ModelTrainer,
    vocab: usize,
    out: &mut Vec<CheckOutcome>,
) -> Result<()> {
    let mut sampler = Sampler::new(&trainer.model, CacheOptions::fit(&trainer.model, 8, 160))?;
    let (mut different, mut first, mut last) = (0, 0, 0);
    for n in 0..100 {
        different += turn(&mut sampler, &mut trainer, vocab, n)?;
        if n == 20 {
            first = card.memory().0;
        }
        last = card.memory().0;
    }
    out.push(outcome("sampled and recomputed logp, other bits", different as f64, 0.0));
    // Lists of the last batch's rows may be a little longer. The smallest leak per turn would be 80 x 512 bytes.
    out.push(outcome("memory after 100 switches, bytes more", last.abs_diff(first) as f64, 16384.0));
    let asked = || card.memory_report().map_or(0, |r| r.asked);
    let mut before = 0;
    for n in 0..8 {
        if n == 3 {
            before = asked();
        }
        turn(&mut sampler, &mut trainer, vocab, 0)?;
    }
    out.push(outcome("allocations in the steady state", (asked() - before) as f64, 0.0));
    Ok(())
}

/// Samples, scores and trains on the completions; returns the number of log-probabilities whose bits differ.
fn turn(sampler: &mut Sampler, trainer: &mut ModelTrainer, vocab: usize, turn: u32) -> Result<usize> {
    let temperature = [1.0, 0.7, 1.6][turn as usize % 3];
    let requests: Vec<GenerationRequest> = (0..6u32)
        .map(|p| GenerationRequest {
            prompt: (0..1 + (p * 13 + turn) % 70).map(|i| (i * 7 + p) % vocab as u32).collect(),
            params: SamplingParams {
                temperature,
                max_new_tokens: 1 + (p as usize * 5 + turn as usize) % 16,
                seed: 5,
                ..Default::default()
            },
            stream: [turn, p, 0],
        })
        .collect();
    let completions = sampler.generate(&trainer.model, requests.clone())?;
    let whole = |(r, c): (&GenerationRequest, &Completion)| [&r.prompt[..], &c.ids[..]].concat();
    let batch = Batch::of(requests.iter().zip(&completions).map(whole));
    let scored = stats(&trainer.model, &batch, temperature)?;
    let mut different = 0;
    for ((request, completion), rows) in requests.iter().zip(&completions).zip(batch.segments().iter()) {
        let from = rows.start + request.prompt.len() - 1;
        let again = &scored.logp[from..rows.end - 1];
        different += again.iter().zip(&completion.logp).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    }
    step(trainer, &batch)?;
    Ok(different)
}

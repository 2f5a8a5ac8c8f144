//! `ferrl bench continuations`: what VinePPO's continuations cost, beside as many new tokens from a cached prompt.

use super::measured::MeasuredModel;
use super::report::{median, spread};
use super::some_ids;
use crate::options::{DeviceArgs, size};
use crate::output::print;
use crate::progress::ProgressLine;
use ferrl_engine::generate::{
    CacheOptions, Completion, GenerationRequest, Generator, Sampler, SamplingParams,
};
use ferrl_engine::model::{Model, Options};
use ferrl_engine::{Error, Result};
use serde_json::json;
use std::time::Instant;

/// Continuations of the states between steps, as VinePPO samples them
///
/// Completions are sampled first. Then, in turn: K continuations of the end of every step, each as long as what its completion had left; and
/// as many completions of the same lengths from the prompt, whose keys and values are in the cache. No token ends a completion early.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: MeasuredModel,
    /// Completions, each to a prompt of its own
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<65536>)]
    prompts: usize,
    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = size::<{ 1 << 20 }>)]
    prompt: usize,
    /// Tokens of a completion
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = size::<{ 1 << 20 }>)]
    new: usize,
    /// Tokens of a step
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<{ 1 << 20 }>)]
    step: usize,
    /// Continuations of a state (K)
    #[arg(long, value_name = "K", default_value_t = 9, value_parser = size::<65536>)]
    samples: usize,
    /// Sequences that are decoded together
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = size::<65536>)]
    batch: usize,
    /// Measurements after one warm-up
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = size::<1000000>)]
    repeats: usize,
    /// One line of JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Seconds and computed rows of each round.
#[derive(Default)]
struct Rounds {
    seconds: Vec<f64>,
    rows: Vec<f64>,
}

pub fn run(args: &Args) -> Result<()> {
    let length = args.prompt + args.new;
    let options = Options { dtype: args.device.dtype.dtype(), training: false, context: length };
    let model = args.model.load(args.device.open()?, options, None)?;
    // Of every completion, and of what runs at the same time.
    let cache = CacheOptions::fit(&model, args.prompts + args.batch, length);
    let mut sampler = Sampler::new(&model, CacheOptions { max_sequences: args.batch, ..cache })?;
    let progress = ProgressLine::new("measuring", args.repeats as u64 + 1, "rounds");
    let (mut continued, mut fresh) = (Rounds::default(), Rounds::default());
    for round in 0..=args.repeats {
        let mut measure = |from_states: bool, rounds: &mut Rounds| -> Result<()> {
            sampler.invalidate();
            let completions = sampler.generate(&model, prompts(args, &model, round))?;
            let requests = continuations(args, &model, (round, from_states), &completions);
            let (before, start) = (sampler.usage().rows, Instant::now());
            sampler.generate(&model, requests)?;
            if round > 0 {
                rounds.seconds.push(start.elapsed().as_secs_f64());
                rounds.rows.push((sampler.usage().rows - before) as f64);
            }
            Ok(())
        };
        measure(true, &mut continued)?;
        measure(false, &mut fresh)?;
        progress.add(1);
    }
    drop(progress);
    show(args, &model, &continued, &fresh)
}

/// K requests for each state, or as many of the same lengths for its prompt.
fn continuations(
    args: &Args,
    model: &Model,
    (round, from_states): (usize, bool),
    completions: &[Completion],
) -> Vec<GenerationRequest> {
    let mut requests = Vec::new();
    for (i, completion) in completions.iter().enumerate() {
        for end in (0..args.new).step_by(args.step) {
            let mut ids = prompt(args, model, i);
            if from_states {
                ids.extend(&completion.ids[..end]);
            }
            let stream = |k: usize| [1 + k as u32, i as u32, end as u32];
            let one = |k| request(ids.clone(), args.new - end, (round, stream(k)));
            requests.extend((0..args.samples).map(one));
        }
    }
    requests
}

fn show(args: &Args, model: &Model, continued: &Rounds, fresh: &Rounds) -> Result<()> {
    let states = args.prompts * args.new.div_ceil(args.step);
    let left: usize = (0..args.new).step_by(args.step).map(|end| args.new - end).sum();
    let tokens = args.prompts * args.samples * left;
    let ratios: Vec<f64> = continued.seconds.iter().zip(&fresh.seconds).map(|(c, f)| c / f).collect();
    if ratios.iter().any(|r| !r.is_finite()) {
        return Err(Error::usage("a round took no time").fix("more --prompts, --new or --samples"));
    }
    if args.json {
        return print(&format!(
            "{}\n",
            json!({"states": states, "tokens": tokens, "ratio": median(&ratios), "continuations_s": continued.seconds,
                "from_prompts_s": fresh.seconds, "continuations_rows": median(&continued.rows),
                "from_prompts_rows": median(&fresh.rows)})
        ));
    }
    let rate = |r: &Rounds| spread(&r.seconds.iter().map(|s| tokens as f64 / s).collect::<Vec<_>>(), 0);
    print(&format!(
        "continuations: {}; {} completions of {} + {} tokens, {states} states, {} continuations each; {}, compute {}\n\
         \x20 continuations       {} tokens/s, {:.2} rows computed per new token\n\
         \x20 from cached prompts {} tokens/s, {:.2} rows computed per new token\n\
         \x20 a token takes       {} times as long\n",
        args.model.describe(),
        args.prompts,
        args.prompt,
        args.new,
        args.samples,
        model.backend.describe(),
        model.dtype.name(),
        rate(continued),
        median(&continued.rows) / tokens as f64,
        rate(fresh),
        median(&fresh.rows) / tokens as f64,
        spread(&ratios, 2),
    ))
}

/// The ids of a prompt, none of which begins as another.
fn prompt(args: &Args, model: &Model, i: usize) -> Vec<u32> {
    some_ids((i + 1) * args.prompt, model.config.vocab).split_off(i * args.prompt)
}

fn prompts(args: &Args, model: &Model, round: usize) -> Vec<GenerationRequest> {
    let of = |i: usize| request(prompt(args, model, i), args.new, (round, [0, i as u32, 0]));
    (0..args.prompts).map(of).collect()
}

fn request(prompt: Vec<u32>, new: usize, (round, stream): (usize, [u32; 3])) -> GenerationRequest {
    let params = SamplingParams { max_new_tokens: new, seed: round as u64, ..Default::default() };
    GenerationRequest { prompt, params, stream }
}

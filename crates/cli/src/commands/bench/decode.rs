//! `ferrl bench decode`: greedy decoding of a batch of sequences.

use super::measured::MeasuredModel;
use super::report::{self, TimedWork};
use super::{HowArgs, forward_flops};
use crate::options::{DeviceArgs, size};
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
use ferrl_engine::model::{Model, Options};
use ferrl_engine::{Error, Result};

/// Greedy decoding of a batch of sequences
///
/// Each measurement decodes all prompts greedily, prefill included; tokens are the new ones.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: MeasuredModel,
    /// Decode batch size: number of sequences; several, such as `1,16,64`, are measured one after the other
    #[arg(long, value_name = "N", default_value = "32", value_delimiter = ',', value_parser = size::<65536>)]
    batch: Vec<usize>,
    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<{ 1 << 20 }>)]
    prompt: usize,
    /// New tokens per sequence
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = size::<{ 1 << 20 }>)]
    new: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    how: HowArgs,
}

pub fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let options =
        Options { dtype: args.device.dtype.dtype(), training: false, context: args.prompt + args.new };
    let model = args.model.load(device, options, None)?;
    args.batch.iter().try_for_each(|&batch| measure(args, &model, batch))
}

fn measure(args: &Args, model: &Model, batch: usize) -> Result<()> {
    let (device, length) = (&*model.backend, args.prompt + args.new);
    let title = format!(
        "decoding: {}; {batch} sequences, {} + {} tokens; {}, compute {}",
        args.model.describe(),
        args.prompt,
        args.new,
        device.describe(),
        model.dtype.name()
    );
    let flops = forward_flops(&model.config, length as f64 / 2.0);
    let params = SamplingParams { max_new_tokens: args.new, ..SamplingParams::greedy() };
    let request = |i: usize| GenerationRequest {
        prompt: (i * args.prompt..(i + 1) * args.prompt)
            .map(|t| (t * 7 % model.config.vocab) as u32)
            .collect(),
        params: params.clone(),
        stream: [0, i as u32, 0],
    };
    let requests: Vec<GenerationRequest> = (0..batch).map(request).collect();
    let mut sampler = Sampler::new(model, CacheOptions::fit(model, batch, length))?;
    let mut once = || {
        sampler.invalidate(); // every measurement includes the prefill
        let out = sampler.generate(model, requests.clone())?;
        match out.iter().find(|c| c.ids.len() != args.new) {
            Some(c) => {
                Err(Error::model(format!("a completion has {} tokens, expected {}", c.ids.len(), args.new)))
            }
            None => Ok(()),
        }
    };
    let (tokens, all) = (batch * args.new, batch * length);
    let mut work = TimedWork {
        title,
        tokens,
        flops: &|| flops * all as f64,
        device,
        dtype: model.dtype,
        once: &mut once,
        parts: &Vec::new,
    };
    report::run(&args.how, &mut work)
}

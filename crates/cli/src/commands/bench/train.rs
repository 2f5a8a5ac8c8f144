//! `ferrl bench train`: whole training steps.

use super::measured::MeasuredModel;
use super::report::{self, TimedWork};
use super::{HowArgs, LoraArgs, forward_flops, micro_batches};
use crate::options::{DeviceArgs, at_least_one, size};
use ferrl_engine::model::Options;
use ferrl_engine::train::{ModelTrainer, OptimizerOptions, StatGrads};
use ferrl_engine::{Error, Result};

/// Training steps of a small random model: forward, backward, AdamW
///
/// Each measurement is a full step of supervised fine-tuning: forward, the gradient of the mean negative log-probability,
/// backward, AdamW with a weight decay of 0.01 and no clipping. Every token but the first of a sequence is a target.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: MeasuredModel,
    /// Sequences per step
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<65536>)]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = size::<{ 1 << 20 }>)]
    seq: usize,
    /// Maximum number of tokens per micro-batch [default: the whole step]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    micro_batch: Option<usize>,
    #[command(flatten)]
    lora: LoraArgs,
    /// AdamW with 8-bit moments
    #[arg(long)]
    adamw8: bool,
    /// Store the moments in host memory
    #[arg(long)]
    offload: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    how: HowArgs,
}

pub fn run(args: &Args) -> Result<()> {
    if args.seq < 2 {
        return Err(Error::usage("a sequence of 1 token has nothing to predict").fix("--seq 2 or more"));
    }
    let dtype = args.device.dtype.dtype();
    let options = Options { dtype, training: true, context: args.seq };
    let device = args.device.open()?;
    let title = format!(
        "training step: {}{}; {} x {} tokens{}; {}, compute {}",
        args.model.describe(),
        args.lora.describe(),
        args.batch,
        args.seq,
        args.micro_batch.map_or(String::new(), |n| format!(" in micro-batches of {n}")),
        device.describe(),
        dtype.name()
    );
    let model = args.model.load(device.clone(), options, args.lora.options())?;
    // Forward once, backward twice (gradients of inputs and of weights); an adapter has few weight gradients.
    let passes = if args.lora.lora.is_some() { 2.0 } else { 3.0 };
    let flops = passes * forward_flops(&model.config, args.seq as f64 / 2.0);
    let settings = OptimizerOptions {
        coded: args.adamw8,
        offload: args.offload,
        weight_decay: 0.01,
        max_grad_norm: None,
        ..Default::default()
    };
    let vocab = model.config.vocab;
    let mut trainer = ModelTrainer::new(model, settings)?;
    let tokens = args.batch * args.seq;
    let batches = micro_batches(vocab, (args.batch, args.seq), args.micro_batch.unwrap_or(tokens))?;
    let targets = tokens - args.batch;
    let mut once = || {
        let mut loss = 0.0;
        for batch in &batches {
            let logp = vec![-1.0 / targets as f32; batch.tokens()];
            let stats = trainer.forward_backward(batch, &StatGrads { logp, ..Default::default() })?;
            loss -= stats.logp.iter().map(|&x| f64::from(x)).sum::<f64>() / targets as f64;
        }
        if !loss.is_finite() {
            return Err(Error::numerics(format!("the loss is {loss}")));
        }
        trainer.update(1e-3)?;
        device.wait()
    };
    let mut work = TimedWork {
        title,
        tokens,
        flops: &|| flops * tokens as f64,
        device: &*device,
        dtype,
        once: &mut once,
        parts: &Vec::new,
    };
    report::run(&args.how, &mut work)
}

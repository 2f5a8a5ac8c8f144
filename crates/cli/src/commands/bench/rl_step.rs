//! `ferrl bench grpo`: whole training steps, the same as in `ferrl train`.

use super::report::{self, TimedWork};
use super::scratch::ScratchDir;
use super::{HowArgs, LoraArgs, ModelUse, ShapeArgs, forward_flops};
use crate::options::{DeviceArgs, at_least_one, size};
use ferrl::algo::GROUP_RELATIVE;
use ferrl::experience::Metrics;
use ferrl::recipe::{
    AdapterSettings, DataSettings, ModelSettings, Optim, Recipe, RewardSettings, Rollout, Train,
};
use ferrl::setup;
use ferrl::train::Stage;
use ferrl_engine::checkpoint::{SaveOptions, StorageFormat, init_model};
use ferrl_engine::model::ModelConfig;
use ferrl_engine::tokenizer::train_bpe;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Backend;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of the generated data set: more than the measured steps use.
const PROMPTS: usize = 256;

/// The timed parts of a step, and their names in the training loop.
const PARTS: [(&str, &[&str]); 3] = [
    ("rollout", &["data", "rollout", "credit"]),
    ("reward", &["reward"]),
    ("training", &["annotate", "train"]),
];

/// GRPO steps of a small random model: sample, reward, train
///
/// Each measurement is a whole step of the training loop: prompts are drawn, completions sampled and rewarded (for the letters
/// "ab"), advantages and gradients computed, the parameters updated. All completions have the maximum length; tokens are the
/// new ones.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Prompts per step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = size::<65536>)]
    prompts: usize,
    /// Completions per prompt
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = size::<65536>)]
    samples: usize,
    /// Words per prompt
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = size::<{ 1 << 20 }>)]
    words: usize,
    /// New tokens per completion
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = size::<{ 1 << 20 }>)]
    new: usize,
    /// Maximum number of tokens per micro-batch
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    micro_batch: usize,
    #[command(flatten)]
    lora: LoraArgs,
    /// Folder with the model, its tokenizer and the prompts; created if it does not exist, and kept [default: a temporary
    /// folder]
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// KV cache in MiB; completions that do not fit are queued
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    cache_mib: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    how: HowArgs,
}

impl Args {
    /// Maximum tokens of a prompt with its completion.
    fn context(&self) -> usize {
        16 * self.words + self.new
    }
}

pub fn run(args: &Args) -> Result<()> {
    let dtype = args.device.dtype.dtype();
    let device = args.device.open()?;
    let title = format!(
        "GRPO step: {}{}; {} prompts x {} completions x {} tokens; {}, compute {}",
        args.shape.describe(),
        args.lora.describe(),
        args.prompts,
        args.samples,
        args.new,
        device.describe(),
        dtype.name()
    );
    let mut stage = match &args.files {
        Some(dir) => {
            if !dir.exists() {
                make_files(args, dir, &*device)?;
            }
            stage(args, dir, &device)?
        }
        None => {
            let scratch = ScratchDir::new("step")?;
            make_files(args, &scratch.0, &*device)?;
            stage(args, &scratch.0, &device)?
        }
    };
    let answers = args.prompts * args.samples;
    let (new, flops) = (answers * args.new, Cell::new(0.0));
    let parts = RefCell::new(PARTS.map(|(name, _)| (name, Vec::new())));
    let mut once = || {
        let before = stage.num_tokens;
        let metrics = step(&mut stage, args)?;
        for ((_, all), (_, phases)) in parts.borrow_mut().iter_mut().zip(PARTS) {
            all.push(phases.iter().filter_map(|p| metrics.get(&format!("timing/{p}"))).sum());
        }
        let trained = (stage.num_tokens - before) as f64;
        // Prefill runs once per prompt; training a token costs three forward passes.
        let sampled = new as f64 + (trained - new as f64) / args.samples as f64;
        let context = trained / answers as f64 / 2.0;
        flops.set((sampled + 3.0 * trained) * forward_flops(&stage.policy.model.config, context));
        Ok(())
    };
    let mut work = TimedWork {
        title,
        tokens: new,
        flops: &|| flops.get(),
        device: &*device,
        dtype,
        once: &mut once,
        parts: &|| parts.borrow().to_vec(),
    };
    report::run(&args.how, &mut work)
}

fn stage(args: &Args, dir: &Path, device: &Arc<dyn Backend>) -> Result<Stage> {
    let mut stage = setup::stage(recipe(args, dir)?, device.clone(), dir)?;
    stage.skips_empty = false; // a step without learning signal takes the same time as any other
    let (asked, found) =
        (args.shape.init(&**device, args.context(), 0)?.build()?.0, &stage.policy.model.config);
    let shape = |c: &ModelConfig| (c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn);
    if shape(&asked) != shape(found) || found.vocab < asked.vocab {
        return Err(Error::usage("the model in this folder has another shape than the options")
            .at(dir.display())
            .fix("the options it was made with, or another --files"));
    }
    Ok(stage)
}

fn step(stage: &mut Stage, args: &Args) -> Result<Metrics> {
    let metrics = stage.step()?.metrics;
    let get = |name: &str| metrics.get(name).unwrap_or(f64::NAN);
    let (length, gap) = (get("completions/mean_length"), get("sampling/sampling_logp_difference/max"));
    if length != args.new as f64 {
        return Err(Error::model(format!("completions have {length} tokens, expected {}", args.new)));
    }
    if (gap != 0.0 && !args.device.inexact) || !get("loss").is_finite() {
        return Err(Error::numerics(format!(
            "the loss is {}, the log-probabilities differ by {gap}",
            get("loss")
        )));
    }
    Ok(metrics)
}

fn recipe(args: &Args, dir: &Path) -> Result<Recipe> {
    let object = |value: Value| value.as_object().cloned().unwrap_or_else(Map::new);
    let prompts = dir.join("prompts.jsonl");
    let prompts = prompts.to_str().ok_or_else(|| Error::usage("not text").at(prompts.display()))?;
    Ok(Recipe {
        exact: !args.device.inexact,
        model: ModelSettings { dtype: Some(args.device.dtype.dtype().name().into()), ..Default::default() },
        adapter: args.lora.lora.map(|r| AdapterSettings {
            r,
            alpha: r as f64,
            base: args.lora.base.clone(),
            ..Default::default()
        }),
        data: DataSettings { train: vec![prompts.into()], ..Default::default() },
        algo: object(json!({ "name": GROUP_RELATIVE.name, "kl": { "coef": 0.0 } })),
        rollout: Rollout {
            prompts: args.prompts,
            samples: args.samples,
            max_new_tokens: args.new,
            cache_mib: args.cache_mib,
            ..Default::default()
        },
        reward: vec![RewardSettings {
            verifier: Some("regex".into()),
            options: object(json!({ "pattern": "ab", "whole": false })),
            truncated: Some("score".into()), // every completion is truncated here
            ..Default::default()
        }],
        optim: Optim { lr: 1e-4, ..Default::default() },
        train: Train { steps: Some(1 << 40), micro_batch_tokens: args.micro_batch, ..Default::default() },
        ..Default::default()
    })
}

/// A model, a tokenizer without an end-of-text token, and prompts of random words.
fn make_files(args: &Args, dir: &Path, device: &dyn Backend) -> Result<()> {
    let mut random = PeerRandom(1);
    let words: Vec<String> = (0..3000).map(|_| random.word()).collect();
    let mut text = |count: usize| -> String {
        (0..count).map(|_| words[random.below(words.len())].as_str()).collect::<Vec<_>>().join(" ")
    };
    let lines: Vec<String> = (0..500).map(|_| text(30)).collect();
    let rows: String = (0..PROMPTS).map(|_| format!("{}\n", json!({ "prompt": text(args.words) }))).collect();
    let tokenizer = train_bpe(lines.into_iter(), args.shape.vocab, &["<pad>".into()])?;
    let (dtype, use_of) = (args.device.dtype.dtype(), ModelUse::of(true, args.lora.lora.is_some()));
    let mut init = args.shape.init(device, args.context(), use_of.bytes(device, dtype))?;
    // The tokenizer has few tokens; other ids of the vocabulary are sampled too and decode to no text.
    init.vocab = init.vocab.max(tokenizer.vocab_size());
    // Like a pretrained model that is adapted.
    let storage = if args.lora.lora.is_some() { dtype.into() } else { StorageFormat::F32 };
    init_model(dir, &init, &SaveOptions { dtype: storage, ..Default::default() })?;
    tokenizer.save(dir)?;
    let path = dir.join("prompts.jsonl");
    std::fs::write(&path, rows).map_err(|e| Error::data(format!("cannot write: {e}")).at(path.display()))
}

/// The random generator of the scripts of other libraries, so that both get the same prompts.
struct PeerRandom(u32);

impl PeerRandom {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as usize % n
    }
    fn word(&mut self) -> String {
        let length = 2 + self.below(8);
        (0..length).map(|_| char::from(b'a' + self.below(26) as u8)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_peers() {
        let mut random = PeerRandom(1);
        let words: Vec<String> = (0..3).map(|_| random.word()).collect();
        assert_eq!(words, ["bbi", "xdzscmx", "mfw"]);
    }
}

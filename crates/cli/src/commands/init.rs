//! `ferrl init`: a new model with random weights.

use crate::machine;
use crate::options::{StorageArg, above_zero, at_least_one, base, seed, size, weights};
use crate::output::{print, stop_of_save};
use clap::ValueEnum;
use ferrl_engine::checkpoint::{InitOptions, SaveOptions, init_model};
use ferrl_engine::model::{FAMILIES, Head};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use std::path::PathBuf;

/// Make a new model with random parameters
///
/// The same options and seed give the same bytes on every machine.
#[derive(clap::Args)]
pub struct Args {
    /// Model family
    #[arg(long, value_name = "NAME", default_value = FAMILIES[0].name(), value_parser = families())]
    family: String,
    /// Hidden size
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = size::<131072>)]
    hidden: usize,
    /// Number of layers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = size::<1024>)]
    layers: usize,
    /// Query heads [default: hidden size / 64]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    heads: Option<usize>,
    /// Key and value heads [default: number of query heads]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    kv_heads: Option<usize>,
    /// Head dimension [default: hidden size / heads]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    head_dim: Option<usize>,
    /// Intermediate size of the feed-forward network [default: 4 x hidden size]
    #[arg(long, value_name = "N", value_parser = size::<{ 1 << 20 }>)]
    ffn: Option<usize>,
    /// Experts of a layer, in a family that has them [default: 8]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    experts: Option<usize>,
    /// Experts per token [default: 2]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    experts_per_token: Option<usize>,
    /// Intermediate size of an expert [default: that of the feed-forward network / experts per token]
    #[arg(long, value_name = "N", value_parser = size::<{ 1 << 20 }>)]
    expert_ffn: Option<usize>,
    /// Size of the vocabulary [default: the tokenizer's]
    #[arg(long, value_name = "N", required_unless_present = "tokenizer", value_parser = size::<{ 1 << 24 }>)]
    vocab: Option<usize>,
    /// Directory with a tokenizer.json, which is copied
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Tie input and output embeddings [default: the family's]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    tied: Option<bool>,
    /// Maximum sequence length
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = size::<{ 1 << 24 }>)]
    max_positions: usize,
    /// RoPE base (theta) [default: 10000]
    #[arg(long, value_name = "X", value_parser = base)]
    rope_theta: Option<f64>,
    /// Sliding window of attention, for families that have one
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    window: Option<usize>,
    /// Standard deviation of the parameters
    #[arg(long, value_name = "X", default_value_t = 0.02, value_parser = above_zero)]
    std: f32,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    seed: u64,
    /// Storage type of the parameters
    #[arg(long, value_enum, default_value = "f32")]
    dtype: StorageArg,
    /// Head of the model
    #[arg(long, value_enum, default_value = "lm")]
    head: Top,
    /// Directory to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Overwrite an existing model; other files are kept
    #[arg(long)]
    overwrite: bool,
}

fn families() -> clap::builder::PossibleValuesParser {
    FAMILIES.iter().map(|f| f.name()).collect::<Vec<_>>().into()
}

/// Head of a model.
#[derive(Clone, Copy, ValueEnum)]
enum Top {
    /// next-token logits
    Lm,
    /// one number per sequence: a reward model
    Score,
    /// next-token logits and a value: a policy with its critic
    Value,
}

pub fn run(args: &Args) -> Result<()> {
    let options = options(args)?;
    let (config, _) = options.build()?;
    let count = weights(&config);
    let largest = config.params().iter().map(|p| p.len()).max().unwrap_or(0) as u64;
    machine::ensure_memory("the largest matrix", 8 * largest, "a smaller --vocab, --hidden or --ffn")?;
    let stop = stop_of_save();
    let save = SaveOptions {
        dtype: args.dtype.dtype(),
        source: args.tokenizer.as_deref(),
        overwrite: args.overwrite,
        stop: Some(&stop),
        ..Default::default()
    };
    init_model(&args.out, &options, &save)?;
    let bytes = machine::size((count * save.dtype.size()) as u64);
    let active = match config.experts {
        Some(_) => format!(" ({} active)", config.active_weights()),
        None => String::new(),
    };
    print(&format!(
        "{}: {} model, {count} parameters{active}, vocabulary {}, {bytes}\n",
        args.out.display(),
        config.family,
        config.vocab
    ))
}

/// The model that the flags describe, with the vocabulary and special tokens of the tokenizer where one is given.
fn options(args: &Args) -> Result<InitOptions> {
    let mut options = InitOptions {
        hidden: args.hidden,
        layers: args.layers,
        heads: args.heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        ffn: args.ffn,
        experts: args.experts,
        experts_per_token: args.experts_per_token,
        expert_ffn: args.expert_ffn,
        tied: args.tied,
        max_positions: args.max_positions,
        rope_theta: args.rope_theta,
        window: args.window,
        std: args.std,
        seed: args.seed,
        head: match args.head {
            Top::Lm => Head::Lm,
            Top::Score => Head::Score,
            Top::Value => Head::LmAndValue,
        },
        ..InitOptions::new(args.family.clone())
    };
    if let Some(vocab) = args.vocab {
        options.vocab = vocab;
    }
    if let Some(dir) = &args.tokenizer {
        let tokenizer = Tokenizer::from_dir(dir)?;
        let has = tokenizer.vocab_size();
        if let Some(asked) = args.vocab.filter(|v| *v < has) {
            return Err(Error::usage(format!(
                "--vocab {asked} is less than the {has} tokens of the tokenizer"
            ))
            .at(dir.display())
            .fix(format!("leave --vocab out, or --vocab {has} or more")));
        }
        options.vocab = args.vocab.unwrap_or(has);
        options.bos = tokenizer.bos();
        options.eos = tokenizer.eos().first().copied();
        options.pad = tokenizer.pad();
    }
    Ok(options)
}

//! `ferrl bench`: how fast this machine trains, decodes and multiplies.

mod check;
mod continuations;
mod decode;
mod gemm;
mod measured;
mod memory;
mod parity;
mod ranks;
mod report;
mod rl_step;
mod scratch;
mod shapes;
mod simulate;
mod train;

use crate::machine::ensure_memory_of;
use crate::options::{size, weights};
use clap::Subcommand;
use ferrl_engine::checkpoint::{InitOptions, StorageFormat};
use ferrl_engine::model::adapter::{AdapterOptions, BaseHome};
use ferrl_engine::model::{FAMILIES, Model, ModelConfig, Options};
use ferrl_engine::train::{Batch, plan};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{AUTO, Backend, DType};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Measure this machine, or check a device
///
/// `ferrl bench --check --device cuda` compares every operation of a device with the CPU, trains and samples small models of
/// every family, and runs a recipe of SFT and GRPO whose curves must match the CPU's. Run it first on a new GPU.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<Benchmark>,
    /// Check the device's results and their reproducibility
    #[arg(long)]
    check: bool,
    /// Device to check
    #[arg(long, value_name = "NAME", requires = "check", default_value = AUTO)]
    device: String,
    /// Threads of the CPU [default: all cores]
    #[arg(long, value_name = "N", requires = "check", value_parser = size::<1024>)]
    threads: Option<usize>,
    /// Folder of reference models with results of transformers to compare with: crates/engine/tests/fixtures in the source
    /// of this version
    #[arg(long, value_name = "DIR", requires = "check")]
    fixtures: Option<PathBuf>,
    /// Also check that this many ranks on the device train to the same weights as one process, bit for bit
    #[arg(long, value_name = "N", requires = "check", value_parser = size::<64>)]
    ranks: Option<usize>,
    /// Run only checks whose name contains this
    #[arg(long, value_name = "TEXT", requires = "check", default_value = "", hide_default_value = true)]
    only: String,
}

#[derive(Subcommand)]
enum Benchmark {
    Train(train::Args),
    Decode(decode::Args),
    Continuations(continuations::Args),
    Grpo(rl_step::Args),
    Gemm(gemm::Args),
    Shapes(shapes::Args),
    Ranks(ranks::Args),
    Memory(memory::Args),
}

pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        Some(Benchmark::Train(args)) => train::run(args),
        Some(Benchmark::Decode(args)) => decode::run(args),
        Some(Benchmark::Continuations(args)) => continuations::run(args),
        Some(Benchmark::Grpo(args)) => rl_step::run(args),
        Some(Benchmark::Gemm(args)) => gemm::run(args),
        Some(Benchmark::Shapes(args)) => shapes::run(args),
        Some(Benchmark::Ranks(args)) => ranks::run(args),
        Some(Benchmark::Memory(args)) => memory::run(args),
        None => check::run(&args.device, args.threads, &args.only, args.fixtures.as_deref(), args.ranks),
    }
}

/// Repetitions and output format.
#[derive(clap::Args)]
struct HowArgs {
    /// Measurements after one warm-up
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = size::<1000000>)]
    repeats: usize,
    /// Print one line of JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Stay running and reply to every line `run N` on standard input with one line of JSON
    #[arg(long)]
    worker: bool,
}

/// The model that is measured.
#[derive(Clone, clap::Args)]
struct ShapeArgs {
    /// Hidden size
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = size::<131072>)]
    hidden: usize,
    /// Number of layers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = size::<1024>)]
    layers: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = size::<4096>)]
    heads: usize,
    /// Key and value heads
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = size::<4096>)]
    kv_heads: usize,
    /// Head dimension [default: hidden size / heads]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    head_dim: Option<usize>,
    /// Model family [default: one with biases on queries, keys and values]
    #[arg(long, value_name = "NAME")]
    family: Option<String>,
    /// Intermediate size of the feed-forward network
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = size::<{ 1 << 20 }>)]
    inter: usize,
    /// Experts of a layer, in a family that has them [default: 8]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    experts: Option<usize>,
    /// Experts per token [default: 2]
    #[arg(long, value_name = "N", value_parser = size::<4096>)]
    experts_per_token: Option<usize>,
    /// Intermediate size of an expert [default: that of the feed-forward network / experts per token]
    #[arg(long, value_name = "N", value_parser = size::<{ 1 << 20 }>)]
    expert_inter: Option<usize>,
    /// Size of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = size::<{ 1 << 24 }>)]
    vocab: usize,
    /// Do not tie input and output embeddings
    #[arg(long)]
    untied: bool,
}

/// The adapter that is trained instead of the weights.
#[derive(clap::Args)]
struct LoraArgs {
    /// Train a LoRA adapter of this rank on all linear layers instead of the weights
    #[arg(long, value_name = "R", value_parser = size::<65536>)]
    lora: Option<usize>,
    /// Where the adapted weights are stored: device, host, or nf4 (4-bit)
    #[arg(long, value_name = "WHERE", requires = "lora", default_value = "device", value_parser = BASES)]
    base: String,
}

/// The adapter's options, as in a recipe.
const BASES: [&str; 3] = ["device", "host", "nf4"];

impl LoraArgs {
    fn options(&self) -> Option<AdapterOptions> {
        let home = match self.base.as_str() {
            "nf4" => BaseHome::Nf4,
            "host" => BaseHome::Host,
            _ => BaseHome::Device,
        };
        self.lora.map(|r| AdapterOptions { r, alpha: r as f64, base: home, ..Default::default() })
    }

    /// For a title.
    fn describe(&self) -> String {
        self.lora.map_or(String::new(), |r| format!(", adapter of rank {r} (base: {})", self.base))
    }
}

impl ShapeArgs {
    /// Options of the random model for sequences of this length; an error if the device has no memory for its weights.
    fn init(&self, device: &dyn Backend, context: usize, bytes: usize) -> Result<InitOptions> {
        let family = self.family.clone().or_else(|| measured_family().map(String::from));
        let family = family.ok_or_else(|| Error::usage("no family has the shape to measure"))?;
        let init = InitOptions {
            vocab: self.vocab,
            hidden: self.hidden,
            layers: self.layers,
            heads: Some(self.heads),
            kv_heads: Some(self.kv_heads),
            head_dim: self.head_dim,
            ffn: Some(self.inter),
            experts: self.experts,
            experts_per_token: self.experts_per_token,
            expert_ffn: self.expert_inter,
            tied: Some(!self.untied),
            rope_theta: Some(1e6),
            max_positions: context.max(1024),
            ..InitOptions::new(family)
        };
        let need = weights(&init.build()?.0) * bytes;
        let fix = "a smaller --hidden, --inter, --vocab or --layers";
        ensure_memory_of(device, "the model", need as u64, fix)?;
        Ok(init)
    }

    /// The random model; frozen weights are stored in its compute type.
    fn model(
        &self,
        device: Arc<dyn Backend>,
        options: Options,
        adapter: Option<AdapterOptions>,
    ) -> Result<Model> {
        let use_of = ModelUse::of(options.training, adapter.is_some());
        let init = self.init(&*device, options.context, use_of.bytes(&*device, options.dtype))?;
        let storage = if use_of == ModelUse::Train { StorageFormat::F32 } else { options.dtype.into() };
        let mut model = Model::random_stored(device, &init, options, storage)?;
        if let Some(adapter) = adapter {
            model.adapt(&adapter, 0, |_| Ok(None))?;
        }
        Ok(model)
    }

    fn describe(&self) -> String {
        format!(
            "width {} x {} layers, heads {}/{}, inner width {}, vocabulary {}",
            self.hidden, self.layers, self.heads, self.kv_heads, self.inter, self.vocab
        )
    }
}

/// What the model is used for, which decides its memory.
#[derive(Clone, Copy, PartialEq)]
enum ModelUse {
    Decode,
    /// Of an adapter.
    Adapt,
    Train,
}

impl ModelUse {
    fn of(training: bool, adapts: bool) -> ModelUse {
        match (training, adapts) {
            (false, _) => ModelUse::Decode,
            (true, true) => ModelUse::Adapt,
            (true, false) => ModelUse::Train,
        }
    }

    /// Bytes of device memory per weight: compute copy, master or base, gradient and moments.
    fn bytes(self, device: &dyn Backend, dtype: DType) -> usize {
        let shared = device.rounds_masters() && dtype == DType::Bf16;
        match self {
            ModelUse::Decode if shared => 2,
            ModelUse::Adapt if shared => 4,
            // A lower bound: the moments may be offloaded.
            ModelUse::Train if shared => 8,
            ModelUse::Decode => 8,
            ModelUse::Adapt => 12,
            ModelUse::Train => 24,
        }
    }
}

/// FLOPs of one token's forward pass with `context` tokens of attention; a multiply-add is two.
fn forward_flops(config: &ModelConfig, context: f64) -> f64 {
    let attention = config.hidden * (config.qkv_width() + config.attention_width());
    let network = |layer| match config.experts_of(layer) {
        None => config.hidden * (config.up_width() + config.ffn),
        Some(e) => config.hidden * (e.count + e.per_token * (config.expert_up_width(e) + e.width)),
    };
    let layers: usize = (0..config.layers).map(|layer| attention + network(layer)).sum();
    let products = (layers + config.vocab * config.hidden) as f64;
    2.0 * products + 4.0 * context * (config.layers * config.attention_width()) as f64
}

/// The family used to compare with other libraries: gated, with biases on queries, keys and values.
fn measured_family() -> Option<&'static str> {
    let fits =
        |c: &ModelConfig| c.qkv_bias && c.activation.is_gated() && c.qk_norm.is_none() && !c.post_norms;
    let built = |name: &str| InitOptions::new(name).build().ok();
    FAMILIES.iter().map(|f| f.name()).find(|name| built(name).is_some_and(|(c, _)| fits(&c)))
}

/// Token ids that look random and are always the same.
fn some_ids(count: usize, vocab: usize) -> Vec<u32> {
    let id = |i: usize| ferrl_kernels::philox::philox4x32([i as u32, 0, 0, 0], [0, 0])[0] % vocab as u32;
    (0..count).map(id).collect()
}

/// Sequences of `seq` random tokens, in micro-batches of at most `budget` tokens.
fn micro_batches(vocab: usize, (batch, seq): (usize, usize), budget: usize) -> Result<Vec<Batch>> {
    let ids = some_ids(batch * seq, vocab);
    let sequences = |c: &Range<usize>| ids[c.start * seq..c.end * seq].chunks(seq).map(<[u32]>::to_vec);
    Ok(plan(&vec![seq; batch], budget)?.iter().map(|c| Batch::of(sequences(c))).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_peers_family_is_found() {
        assert_eq!(super::measured_family(), Some("qwen2"));
    }
}

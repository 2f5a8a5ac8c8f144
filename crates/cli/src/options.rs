//! Options that several commands share, and numbers checked where they are read.

use crate::machine;
use clap::ValueEnum;
use ferrl::recipe::{Recipe, device_bytes};
use ferrl_engine::checkpoint::{self, ModelDir};
use ferrl_engine::model::{Model, ModelConfig, Options};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{AUTO, Backend, DType, Ranks};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Compute type of activations and matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// 32 bits
    F32,
    /// 16 bits with the range of f32; sums are kept in f32
    Bf16,
}

impl Compute {
    /// The kernels' type.
    pub fn dtype(self) -> DType {
        if self == Compute::F32 { DType::F32 } else { DType::Bf16 }
    }
}

/// Storage type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StorageArg {
    /// 32 bits
    F32,
    /// 16 bits with the range of f32
    Bf16,
    /// 16 bits with more precision and less range
    F16,
}

impl StorageArg {
    /// The checkpoint's type.
    pub fn dtype(self) -> checkpoint::StorageFormat {
        match self {
            StorageArg::F32 => checkpoint::StorageFormat::F32,
            StorageArg::Bf16 => checkpoint::StorageFormat::Bf16,
            StorageArg::F16 => checkpoint::StorageFormat::F16,
        }
    }
}

/// Where and how a model computes.
#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    /// Compute type
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: Compute,
    /// Number of threads [default: all cores]; results do not depend on it
    #[arg(long, value_name = "N", value_parser = size::<1024>)]
    pub threads: Option<usize>,
    /// Device: cpu, cuda or cuda:N; auto uses a GPU if there is one
    #[arg(long, value_name = "NAME", default_value = AUTO)]
    pub device: String,
    /// Allow log-probabilities to depend on the composition of the batch; may be faster (GPU only)
    #[arg(long)]
    pub inexact: bool,
    /// Maximum device memory, such as 24GiB [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = device_bytes)]
    pub device_memory: Option<u64>,
}

impl DeviceArgs {
    pub fn open(&self) -> Result<Arc<dyn Backend>> {
        self.open_for(Ranks::ALONE)
    }

    /// Opens the device of a rank: a card for each rank if there are enough, else one card for all.
    pub fn open_for(&self, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
        let own = ferrl_kernels::open_for(&self.device, self.threads, ranks);
        let device = own.or_else(|_| ferrl_kernels::open(&self.device, self.threads))?;
        device.set_exact(!self.inexact).map_err(|e| e.at("--inexact"))?;
        if let Some(bytes) = self.device_memory {
            device.set_memory_limit(Some(bytes as usize));
        }
        Ok(device)
    }
}

/// Flags that override settings of a recipe.
#[derive(clap::Args, Clone, Debug)]
pub struct RecipeArgs {
    /// Sampling temperature; 0 is greedy [default: the recipe's]
    #[arg(long, value_name = "T", value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Nucleus (top-p) sampling [default: the recipe's]
    #[arg(long, value_name = "P", value_parser = fraction)]
    pub top_p: Option<f32>,
    /// Maximum number of new tokens of a completion [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = size::<{ 1 << 20 }>)]
    pub max_new_tokens: Option<usize>,
    /// KV cache in MiB [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cache_mib: Option<usize>,
    /// Random seed [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub seed: Option<u64>,
    /// Compute type [default: the recipe's]
    #[arg(long, value_enum)]
    pub dtype: Option<Compute>,
    /// Threads [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = size::<1024>)]
    pub threads: Option<usize>,
    /// Device: cpu, cuda, cuda:N or auto [default: the recipe's]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
}

impl RecipeArgs {
    /// Applies the sampling flags to the settings of evaluations.
    pub fn sample(&self, recipe: &mut Recipe) {
        let r = &mut recipe.rollout;
        r.temperature = self.temperature.map_or(recipe.eval.temperature.unwrap_or(r.temperature), f64::from);
        r.max_new_tokens = self.max_new_tokens.unwrap_or(r.max_new_tokens);
        r.top_p = self.top_p.map_or(r.top_p, f64::from);
    }

    /// Applies the size of the cache and the compute type to a recipe.
    pub fn compute(&self, recipe: &mut Recipe) {
        recipe.rollout.cache_mib = self.cache_mib.unwrap_or(recipe.rollout.cache_mib);
        if let Some(dtype) = self.dtype {
            recipe.model.dtype = Some(dtype.dtype().name().into());
        }
    }

    pub fn seed(&self, recipe: &Recipe) -> u64 {
        self.seed.unwrap_or(recipe.seed)
    }

    /// Opens the device, which must have memory for the model and its cache.
    pub fn open(&self, recipe: &Recipe, dir: &ModelDir) -> Result<Arc<dyn Backend>> {
        let bytes = weights(&dir.config) * (DType::F32.size() + recipe.dtype()?.size())
            + (recipe.rollout.cache_mib << 20);
        let device = self.device.as_deref().unwrap_or(&recipe.device);
        let threads = self.threads.or(Some(recipe.threads).filter(|&t| t > 0));
        let backend = ferrl_kernels::open(device, threads)?;
        recipe.limit(&*backend)?;
        let fix = "a smaller --cache-mib, or --dtype bf16";
        machine::ensure_memory_of(&*backend, "the model and its cache", bytes as u64, fix)?;
        Ok(backend)
    }
}

/// A model directory and the device it runs on.
#[derive(clap::Args, Clone, Debug)]
pub struct ModelArgs {
    /// Hugging Face model directory, or org/name in the Hugging Face cache
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    #[command(flatten)]
    pub device: DeviceArgs,
}

impl ModelArgs {
    /// Opens and checks the directory; weights are not read yet.
    pub fn open(&self) -> Result<ModelDir> {
        open_model(&self.model)
    }

    /// The same for a causal language model.
    pub fn open_lm(&self) -> Result<ModelDir> {
        let dir = self.open()?;
        if dir.config.head.has_lm() {
            return Ok(dir);
        }
        Err(Error::model("this model has a score head, not a language-model head")
            .at(self.model.display())
            .fix("use the causal-LM directory it was made from, or `ferrl score`"))
    }

    /// Reads the weights. `context` is the maximum sequence length.
    pub fn load(&self, dir: &ModelDir, context: usize) -> Result<Model> {
        let dtype = self.device.dtype.dtype();
        // Master and derived form of every weight, and one parameter while it is read.
        let largest = dir.config.params().iter().map(|p| p.len()).max().unwrap_or(0);
        let bytes = weights(&dir.config) * (DType::F32.size() + dtype.size()) + largest * DType::F32.size();
        let device = self.device.open()?;
        let fix = "use a smaller model, --dtype bf16, or free memory";
        machine::ensure_memory_of(&*device, "the model", bytes as u64, fix)?;
        let options = Options { dtype, training: false, context };
        Model::load(device, dir, options)
    }
}

pub fn weights(config: &ModelConfig) -> usize {
    config.params().iter().map(|p| p.len()).sum()
}

/// Opens a model directory; the error for a missing one suggests the most similar name.
pub fn open_model(path: &Path) -> Result<ModelDir> {
    let dir = ferrl::data::hub::model_dir(path)?;
    ModelDir::open(&dir).map_err(|e| match nearest_path(path) {
        Some(near) if !path.exists() => e.fix(format!("the nearest name there is {near}")),
        _ => e,
    })
}

/// The entry of the path's folder with the most similar name.
pub fn nearest_path(path: &Path) -> Option<String> {
    ferrl::data::nearest_path(path, |_| true).map(|near| near.display().to_string())
}

/// Default maximum of counts given by flags: products of such numbers do not overflow.
const MOST: usize = 1 << 24;

/// A whole number from `LEAST` to `MOST`.
pub fn whole<const LEAST: usize, const MOST: usize>(text: &str) -> std::result::Result<usize, String> {
    let refused = || format!("must be a whole number from {LEAST} to {MOST}");
    text.parse().ok().filter(|n| (LEAST..=MOST).contains(n)).ok_or_else(refused)
}

pub fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    whole::<1, MOST>(text)
}

/// A whole number of at least 0; 0 means none or no limit.
pub fn count(text: &str) -> std::result::Result<usize, String> {
    whole::<0, MOST>(text)
}

pub fn seed(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

/// A size from 1 to `MOST`, so that products of sizes do not overflow.
pub fn size<const MOST: usize>(text: &str) -> std::result::Result<usize, String> {
    whole::<1, MOST>(text)
}

fn number(text: &str, good: impl Fn(f32) -> bool, wanted: &str) -> std::result::Result<f32, String> {
    text.parse().ok().filter(|x| good(*x)).ok_or_else(|| format!("must be {wanted}"))
}

pub fn above_zero(text: &str) -> std::result::Result<f32, String> {
    number(text, |x| x > 0.0 && x <= 1e6, "a number above 0, up to 1000000")
}

/// A temperature: 0, or large enough to divide by.
pub fn temperature(text: &str) -> std::result::Result<f32, String> {
    let good = |x| x == 0.0 || (1e-4..=100.0).contains(&x);
    number(text, good, "0 (greedy), or a number from 0.0001 to 100")
}

/// The temperature of given tokens.
pub fn scale(text: &str) -> std::result::Result<f32, String> {
    number(text, |x| (1e-4..=100.0).contains(&x), "a number from 0.0001 to 100")
}

/// A fraction: above 0 and up to 1.
pub fn fraction(text: &str) -> std::result::Result<f32, String> {
    number(text, |x| x > 0.0 && x <= 1.0, "a number above 0, up to 1")
}

/// A fraction that may be zero: from 0 to 1.
pub fn fraction_or_zero(text: &str) -> std::result::Result<f32, String> {
    number(text, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")
}

/// The base of rotary frequencies.
pub fn base(text: &str) -> std::result::Result<f64, String> {
    let good = |x: &f64| *x > 0.0 && *x <= 1e12;
    text.parse().ok().filter(good).ok_or_else(|| "must be a number above 0, up to 1e12".into())
}

/// Options given with a flag as `key=value`: numbers, booleans, lists and tables as JSON, anything else as text.
pub fn key_values(flag: &str, pairs: &[String]) -> Result<Map<String, Value>> {
    let read = |pair: &String| {
        let (key, value) = pair.split_once('=').ok_or_else(|| {
            Error::usage(format!("{flag} {pair:?} is not key=value")).fix(format!("{flag} {pair}=VALUE"))
        })?;
        Ok((key.to_string(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
    };
    pairs.iter().map(read).collect()
}

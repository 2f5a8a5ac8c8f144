//! Sampling flags and the size of the KV cache.

use crate::machine;
use crate::options::{above_zero, at_least_one, count, fraction, fraction_or_zero, seed, size, temperature};
use crate::text::ModelText;
use ferrl_engine::generate::{CacheOptions, Sampler, SamplingParams, Stops};
use ferrl_engine::model::Model;
use ferrl_engine::{Error, Result};
use std::sync::Arc;

/// Default maximum number of new tokens.
const USUAL: usize = 256;
/// Maximum number of concurrent sequences.
const SIDE_BY_SIDE: usize = 64;

/// Sampling parameters and stop conditions.
#[derive(clap::Args, Clone, Debug)]
pub struct SamplingArgs {
    /// Maximum number of new tokens [default: 256, or what the model's context allows]
    #[arg(long, value_name = "N", value_parser = size::<{ 1 << 20 }>)]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature)]
    pub temperature: f32,
    /// Nucleus (top-p) sampling; 1 disables it
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = fraction)]
    pub top_p: f32,
    /// Top-k sampling; 0 disables it
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count)]
    pub top_k: usize,
    /// Min-p sampling: minimum probability relative to the most probable token; 0 disables it
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = fraction_or_zero)]
    pub min_p: f32,
    /// Repetition penalty; 1 disables it
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = above_zero)]
    pub repetition_penalty: f32,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    pub seed: u64,
    /// Stop string; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Do not stop at end-of-sequence tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// KV cache in MiB [default: what is needed, up to a quarter of the free memory]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cache_mib: Option<usize>,
}

impl SamplingArgs {
    /// Stop conditions: stop tokens of the model's files, and stop strings of the flags.
    pub fn stops(&self, text: &ModelText) -> Result<Stops> {
        let stops = text.stops()?.with_strings(&self.stop, false);
        Ok(if self.ignore_eos { stops.without_ids() } else { stops })
    }

    /// Parameters for a prompt of that many tokens.
    pub fn params(&self, text: &ModelText, stops: &Stops, prompt: usize) -> Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            max_new_tokens: self.max_new_tokens.unwrap_or_else(|| text.room(prompt, USUAL)),
            stop_ids: stops.ids().to_vec(),
            stop_strings: stops.strings().to_vec(),
            seed: self.seed,
            ..Default::default()
        };
        params.validate()?;
        Ok(params)
    }

    /// A sampler whose cache fits requests of these lengths (prompt and completion).
    pub fn sampler(&self, model: &Model, text: &ModelText, lengths: &[usize]) -> Result<Sampler> {
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let wanted = CacheOptions::fit(model, lengths.len().clamp(1, SIDE_BY_SIDE), longest);
        let least = CacheOptions::fit(model, 1, longest).bytes;
        let free = machine::memory_of(&*model.backend).map_or(usize::MAX, |m| m.available as usize);
        let bytes = match self.cache_mib {
            Some(mib) => mib << 20,
            None => wanted.bytes.min((free / 4).max(least)),
        };
        if bytes > free {
            return Err(Error::resource(format!(
                "the cache needs {} of memory, {} is free",
                machine::size(bytes as u64),
                machine::size(free as u64)
            ))
            .fix("a smaller --max-new-tokens or --cache-mib, or shorter prompts"));
        }
        let mut sampler = Sampler::new(model, CacheOptions { bytes, ..wanted })?;
        if !self.stop.is_empty() {
            sampler = sampler.with_tokenizer(Arc::new(text.tokenizer()?.clone()));
        }
        Ok(sampler)
    }
}

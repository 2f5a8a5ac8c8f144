//! Sampling parameters.

use crate::{Error, Result};

/// Sampling parameters and stopping criteria of a request.
///
/// Applied in this order: penalties, temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    /// Top-k sampling; 0 disables it.
    pub top_k: usize,
    /// Nucleus (top-p) sampling; 1 disables it.
    pub top_p: f32,
    /// Min-p sampling: minimum probability relative to the largest; 0 disables it.
    pub min_p: f32,
    /// Repetition penalty: divides positive and multiplies negative logits of tokens in prompt or completion; 1 disables it.
    pub repetition_penalty: f32,
    /// Presence penalty: subtracted from the logits of tokens in the completion.
    pub presence_penalty: f32,
    /// Frequency penalty: subtracted from the logits of tokens in the completion, times their count.
    pub frequency_penalty: f32,
    pub max_new_tokens: usize,
    pub stop_ids: Vec<u32>,
    pub stop_strings: Vec<String>,
    pub seed: u64,
    /// Number of most probable tokens to return at each position (top logprobs).
    pub top_logprobs: usize,
    /// Number of tokens at the end of the prompt that are an earlier part of this completion. Stop strings and penalties include
    /// them and random numbers continue after theirs: a completion sampled in parts has the tokens of one sampled at once.
    pub sampled: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            max_new_tokens: 256,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            seed: 0,
            top_logprobs: 0,
            sampled: 0,
        }
    }
}

impl SamplingParams {
    /// Valid temperatures. Below, dividing by them overflows f32; above, sampling is uniform.
    pub const TEMPERATURES: std::ops::RangeInclusive<f32> = 1e-4..=100.0;

    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, ..Default::default() }
    }

    pub fn validate(&self) -> Result<()> {
        let t = self.temperature;
        let range = Self::TEMPERATURES;
        if !(t == 0.0 || range.contains(&t)) {
            let (least, most) = (range.start(), range.end());
            return Err(Error::usage(format!("temperature is {t}, expected 0 or {least} to {most}"))
                .fix("temperature = 0 takes the most probable token"));
        }
        check(
            "top_p",
            self.top_p,
            self.top_p > 0.0 && self.top_p <= 1.0,
            "above 0 and at most 1 (1 is off)",
        )?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 (off) to 1")?;
        let r = self.repetition_penalty;
        check("repetition_penalty", r, r > 0.0 && r.is_finite(), "above 0 (1 is off)")?;
        check(
            "presence_penalty",
            self.presence_penalty,
            self.presence_penalty.is_finite(),
            "a finite number",
        )?;
        check(
            "frequency_penalty",
            self.frequency_penalty,
            self.frequency_penalty.is_finite(),
            "a finite number",
        )?;
        if self.max_new_tokens == 0 {
            return Err(Error::usage("max_new_tokens is 0, expected at least 1")
                .fix("to score given tokens without sampling, use the trainer's statistics"));
        }
        if let Some(i) = self.stop_strings.iter().position(String::is_empty) {
            return Err(Error::usage(format!("stop string {i} is empty and would end every completion"))
                .fix("leave it out"));
        }
        Ok(())
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    pub(super) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the device samples: no penalties that depend on earlier tokens, no top logprobs.
    pub(super) fn is_chosen_by_device(&self) -> bool {
        !self.has_penalties() && self.top_logprobs == 0
    }

    /// Divisor of the logits: the temperature, or 1 for greedy decoding.
    pub fn divisor(&self) -> f32 {
        if self.is_greedy() { 1.0 } else { self.temperature }
    }
}

fn check(name: &str, value: f32, fits: bool, expected: &str) -> Result<()> {
    if fits { Ok(()) } else { Err(Error::usage(format!("{name} is {value}, expected {expected}"))) }
}

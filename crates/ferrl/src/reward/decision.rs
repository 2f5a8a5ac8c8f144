//! The decision-based reward of linguistic calibration (Band et al., 2024, arXiv 2404.00474): a proper scoring rule on the
//! forecasts of a reader of the paragraph.
//!
//! An extractor lists the answers that a paragraph names, a forecaster predicts their probabilities given the paragraph.
//! `R = log max(p(y*), 1e-4) - lambda |sum_k p_k - 1| + constant`: the forecast of the right answer, and the sum over the
//! extracted ones. The forecaster is a classifier trained on soft targets (`algo.name = "classifier"`), the extractor a
//! language model trained to write `red; blue` or `No Answer`; `task:calibration` has data for both.

use super::{Reward, RewardModel};
use crate::recipe::{Recipe, RewardSettings as Source, read_settings};
use crate::task::calibration::{ASKED, NO_ANSWER};
use crate::verify::calibration::{Decision, top};
use crate::verify::{Outcome, Progress, Sample, Score, required};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams, Stops};
use ferrl_engine::model::{Frozen, Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::name_words;
use ferrl_kernels::{Backend, DType, lock};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, Mutex};

with_defaults! {
/// `options` of a `[[reward]]` whose `model` is the forecaster.
pub struct DecisionOptions {
    /// `decision`: forecasts of the answers that a paragraph names.
    pub kind: String = "decision".into(),
    /// Extractor: directory of the model that lists the answers of a paragraph, or `stage:NAME`.
    pub extractor: String = String::new(),
    /// Column of the right answer: a text or a list of texts.
    pub column: String = "answer".into(),
    /// Text between the paragraph and the answers.
    pub asked: String = ASKED.into(),
    /// Weight of the penalty on a sum of forecasts other than 1. [0, 1000]
    pub lambda: f64 = 5.0,
    /// Added to every reward. [-1000, 1000]
    pub constant: f64 = 5.0,
    /// Temperature of the extractor; 0 is greedy. [0, 100]
    pub temperature: f64 = 0.0,
    /// Maximum tokens of a list of answers. [1, 1048576]
    pub max_new_tokens: usize = 64,
    /// Size of the extractor's KV cache in MiB. [1, 1048576]
    pub cache_mib: usize = 16,
}
}

/// An extractor and a forecaster, which together reward a paragraph.
pub struct DecisionReward {
    forecaster: RewardModel,
    extractor: Frozen,
    tokenizer: Tokenizer,
    stops: Stops,
    sampler: Mutex<Sampler>,
    reader: DecisionOptions,
    seed: u64,
    /// Its name in metrics.
    pub(super) name: String,
}

impl DecisionReward {
    /// Opens the forecaster of a directory and the extractor of the options.
    pub fn open(
        dir: &Path,
        source: &Source,
        recipe: &Recipe,
        dtype: DType,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let reader: DecisionOptions = read_settings("reward.options", &source.options)?;
        if reader.extractor.is_empty() {
            return Err(Error::usage("a decision reward needs an extractor")
                .at("reward.options.extractor")
                .fix("the directory of a language model that lists the answers of a paragraph"));
        }
        let path = Path::new(&reader.extractor);
        let opened = ModelDir::open(path)?;
        if !opened.config.head.has_lm() {
            return Err(Error::model("has a score head and writes no answers").at(path.display()));
        }
        let extractor = Model::load(backend.clone(), &opened, Options { dtype, ..Default::default() })?;
        let tokenizer = Tokenizer::from_dir(path)?;
        let (bytes, most) = (reader.cache_mib << 20, backend.busy_tokens());
        let cache = CacheOptions { bytes, max_batch_tokens: most, ..Default::default() };
        let sampler = Sampler::new(&extractor, cache)?.with_tokenizer(Arc::new(Tokenizer::from_dir(path)?));
        // The recipe's prefill is not part of the forecaster's input.
        let mut own = recipe.clone();
        own.data.prefill = None;
        Ok(DecisionReward {
            forecaster: RewardModel::open(dir, &own, dtype, backend, source.offload)?,
            extractor: Frozen::new(extractor, source.offload)?,
            stops: Stops::of_dir(path, &tokenizer),
            tokenizer,
            sampler: Mutex::new(sampler),
            reader,
            seed: recipe.seed,
            name: "decision".into(),
        })
    }

    /// The answers that each paragraph names, each once.
    pub fn answers(&self, paragraphs: &[&str], step: u64) -> Result<Vec<Vec<String>>> {
        let params = SamplingParams {
            temperature: self.reader.temperature as f32,
            max_new_tokens: self.reader.max_new_tokens,
            stop_ids: self.stops.ids().to_vec(),
            seed: self.seed,
            ..Default::default()
        };
        // A paragraph with characters outside of the extractor's vocabulary has no answers.
        let prompt = |text: &&str| self.tokenizer.encode_prompt(&format!("{text}{}", self.reader.asked)).ok();
        let prompts: Vec<Option<Vec<u32>>> = paragraphs.iter().map(prompt).collect();
        // Random numbers depend on the paragraph alone, not on the batch.
        let request = |(text, prompt): (&&str, &Option<Vec<u32>>)| {
            let [first, second] = name_words(text);
            let stream = [step as u32, first, second];
            Some(GenerationRequest { prompt: prompt.clone()?, params: params.clone(), stream })
        };
        let requests: Vec<GenerationRequest> = paragraphs.iter().zip(&prompts).filter_map(request).collect();
        let mut sampler = lock(&self.sampler);
        let written = self.extractor.with(|model| sampler.generate(model, requests))?;
        if self.extractor.offloads() {
            sampler.release();
        }
        let mut texts = crate::rollout::texts(&self.tokenizer, &self.stops, &written)?.into_iter();
        let read = |prompt: &Option<Vec<u32>>| {
            prompt.as_ref().map_or(Vec::new(), |_| listed(&texts.next().unwrap_or_default()))
        };
        Ok(prompts.iter().map(read).collect())
    }

    /// The forecast of each answer, given its paragraph.
    fn forecasts(&self, asked: &[(&Sample<'_>, &str)]) -> Result<Vec<f64>> {
        let prompts: Vec<String> =
            asked.iter().map(|(s, _)| format!("{}{}", s.completion, self.reader.asked)).collect();
        let samples: Vec<Sample<'_>> = asked
            .iter()
            .zip(&prompts)
            .map(|((_, answer), prompt)| Sample { prompt, completion: answer, ..Default::default() })
            .collect();
        let readable: Vec<bool> = samples.iter().map(|s| self.forecaster.reads(s)).collect();
        let known: Vec<Sample<'_>> =
            samples.iter().zip(&readable).filter(|(_, known)| **known).map(|(s, _)| *s).collect();
        let mut values = self.forecaster.values(&known)?.into_iter();
        let sigmoid = |x: f64| 1.0 / (1.0 + ferrl_engine::math::exp(-x));
        Ok(readable
            .iter()
            .map(|known| if *known { values.next().map_or(0.0, sigmoid) } else { 0.0 })
            .collect())
    }
}

/// The distinct answers of a list; empty for `No Answer`.
fn listed(text: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for part in text.split(';').map(str::trim) {
        let again = all.iter().any(|other| other.eq_ignore_ascii_case(part));
        if !part.is_empty() && !again && !part.eq_ignore_ascii_case(NO_ANSWER) {
            all.push(part.to_string());
        }
    }
    all
}

/// The right answers of a row, as texts.
fn truths(value: &Value) -> Vec<String> {
    match value {
        Value::Array(all) => all.iter().flat_map(truths).collect(),
        Value::String(text) => vec![text.clone()],
        other => vec![other.to_string()],
    }
}

impl Reward for DecisionReward {
    fn name(&self) -> &str {
        &self.name
    }
    fn check(&self, prompt: &Sample<'_>) -> Result<()> {
        required(prompt, &self.reader.column, "decision").map(|_| ())
    }
    fn score(&self, completions: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>> {
        let paragraphs: Vec<&str> = completions.iter().map(|c| c.completion).collect();
        let named = self.answers(&paragraphs, at.step)?;
        let right: Vec<&Value> = completions
            .iter()
            .map(|c| required(c, &self.reader.column, "decision"))
            .collect::<Result<_>>()?;
        let truths: Vec<Vec<String>> = right.iter().map(|v| truths(v)).collect();
        let mut asked = Vec::new();
        for ((sample, named), truths) in completions.iter().zip(&named).zip(&truths) {
            asked.extend(named.iter().chain(truths).map(|answer| (sample, answer.as_str())));
        }
        let mut forecasts = self.forecasts(&asked)?.into_iter();
        let decision = Decision { lambda: self.reader.lambda, constant: self.reader.constant };
        let mut out = Vec::with_capacity(completions.len());
        for ((named, truths), right) in named.iter().zip(&truths).zip(right) {
            let all: Vec<(String, f64)> = named.iter().cloned().zip(forecasts.by_ref()).collect();
            let p = forecasts.by_ref().take(truths.len()).fold(0.0, f64::max);
            let sum: f64 = all.iter().map(|(_, p)| p).sum();
            let (confidence, correct) = top(&all, right);
            let reward = decision.reward(p, sum);
            let parts = [
                (self.name.as_str(), reward),
                ("forecast", p),
                ("forecast_sum", sum),
                ("forecast_confidence", confidence),
                ("forecast_correct", f64::from(u8::from(correct))),
            ];
            let score = Some(f64::from(u8::from(correct)));
            let components = parts.map(|(name, value)| (name.to_string(), value)).into();
            out.push(Outcome::Scored(Score { reward, components, score, ..Default::default() }));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_answers_is_read_without_repetitions() {
        assert_eq!(listed("red; blue ;Red"), ["red", "blue"]);
        assert!(listed("No Answer").is_empty() && listed(" ; ").is_empty());
    }
}

//! Sampling completions: prompts in, sequences with the log-probabilities they were sampled with out.

use crate::experience::{Experience, Sequence};
use crate::recipe::Rollout;
use crate::source::Prompt;
use ferrl_engine::Result;
use ferrl_engine::generate::{Completion, Generator, Request, SamplingParams, Stop, Stops};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Tokens whose text is worth a thread.
const THREAD_TOKENS: usize = 4096;

/// A completion beside its prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Which of the prompts.
    pub prompt: usize,
    /// Text up to the stop, without special tokens.
    pub text: String,
    /// Tokens of the completion.
    pub tokens: usize,
    /// Whether the length limit cut it off.
    pub truncated: bool,
}

/// A policy and what completes prompts with it.
pub struct Actor<'a> {
    /// Completes prompts.
    pub generator: &'a mut dyn Generator,
    /// The policy as it is now.
    pub policy: &'a Model,
    /// The policy's.
    pub tokenizer: &'a Tokenizer,
    /// Stop tokens and stop strings.
    pub stops: &'a Stops,
}

/// What ends completions of the model in `dir` as a recipe samples them.
pub fn stops(dir: &Path, tokenizer: &Tokenizer, r: &Rollout) -> Stops {
    Stops::of_dir(dir, tokenizer).with_strings(&r.stop, r.include_stop)
}

/// How completions are sampled in a run.
pub fn params(r: &Rollout, stops: &Stops, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: r.temperature as f32,
        top_k: r.top_k,
        top_p: r.top_p as f32,
        max_new_tokens: r.max_new_tokens,
        stop_ids: stops.ids().to_vec(),
        stop_strings: stops.strings().to_vec(),
        seed,
        ..Default::default()
    }
}

/// `samples` completions to each prompt, in the order of prompts and samples. Random numbers depend on the seed, the step,
/// the prompt's number and the sample's alone.
pub fn sample(
    actor: &mut Actor<'_>,
    prompts: &[Prompt],
    params: &SamplingParams,
    samples: usize,
    step: u64,
) -> Result<(Experience, Vec<Answer>)> {
    let mut requests = Vec::new();
    for prompt in prompts {
        for sample in 0..samples {
            let stream = [step as u32, prompt.index as u32, sample as u32];
            requests.push(Request { prompt: prompt.ids.clone(), params: params.clone(), stream });
        }
    }
    let completions = actor.generator.generate(actor.policy, requests)?;
    let texts = texts(actor.tokenizer, actor.stops, &completions)?;
    let (mut experience, mut answers) = (Experience::default(), Vec::new());
    for (i, (c, text)) in completions.into_iter().zip(texts).enumerate() {
        let prompt = i / samples;
        answers.push(Answer { prompt, text, tokens: c.ids.len(), truncated: c.stop == Stop::Length });
        let mut sampled = sequence(&prompts[prompt].ids, c, i, prompt);
        sampled.temperature = Some(params.divisor());
        experience.sequences.push(sampled);
    }
    Ok((experience, answers))
}

/// The text of each completion, decoded by as many threads as there is work for: the device waits meanwhile.
pub fn texts(tokenizer: &Tokenizer, stops: &Stops, completions: &[Completion]) -> Result<Vec<String>> {
    let decode = |c: &Completion| stops.text(tokenizer, c);
    let tokens: usize = completions.iter().map(|c| c.ids.len()).sum();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(tokens / THREAD_TOKENS);
    if threads < 2 {
        return completions.iter().map(decode).collect();
    }
    std::thread::scope(|scope| {
        let parts = completions.chunks(completions.len().div_ceil(threads));
        let running: Vec<_> = parts
            .map(|part| scope.spawn(move || part.iter().map(decode).collect::<Result<Vec<_>>>()))
            .collect();
        let mut all = Vec::with_capacity(completions.len());
        for part in running {
            all.extend(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

fn sequence(prompt: &[u32], c: Completion, trajectory: usize, group: usize) -> Sequence {
    let mut ids = prompt.to_vec();
    ids.extend_from_slice(&c.ids);
    let n = ids.len();
    // Position i predicts token i + 1: the first completion token is predicted by the prompt's last position.
    let mut sampled_logp = vec![0.0; n];
    sampled_logp[prompt.len() - 1..n - 1].copy_from_slice(&c.logp);
    let mut versions = vec![0; n];
    versions[prompt.len() - 1..n - 1].copy_from_slice(&c.versions);
    Sequence {
        trained: (0..n).map(|i| i >= prompt.len()).collect(),
        trajectory,
        group,
        weight: 1.0,
        trajectory_tokens: c.ids.len(),
        reward: vec![0.0; n],
        sampled_logp,
        version: versions,
        truncated: c.stop == Stop::Length,
        ids,
        ..Default::default()
    }
}

//! Generative verifiers (GenRM; Zhang et al., 2024, arXiv 2408.15240) and language models as judges.
//!
//! The input is prompt, completion and a question, and the reward is the probability of the verdict "Yes":
//! `r = p(Yes | x, y, question)`. With `votes = K` the model first writes `K` rationales (GenRM-CoT), each followed by the question,
//! and the reward is the mean, `r = mean_k p(Yes | x, y, v_k, question)`. A model trained on verdicts (`ferrl data verdicts`) gets
//! plain text, a prompted judge its chat template (`chat = true`).

use super::Reward;
use super::reading::Reading;
use crate::credit::gains;
use crate::data::Encoder;
use crate::data::prompt::{Apply, PromptSettings};
use crate::recipe::{Recipe, RewardSettings as Source, read_settings};
use crate::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams, Stops};
use ferrl_engine::math::exp;
use ferrl_engine::model::{Frozen, Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, BatchSequence, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::name_words;
use ferrl_kernels::{Backend, DType, lock};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Default question before the verdict.
pub const QUESTION: &str = "\nIs the answer correct (Yes/No)? ";

/// Default text before a rationale.
pub const RATIONALE: &str = "\nLet's verify step by step.\n";

with_defaults! {
/// `options` of a `[[reward]]` whose `model` is a generative verifier.
pub struct Judgement {
    /// `generative`: the verdict of a language model.
    pub kind: String = "generative".into(),
    /// Text before the prompt, such as instructions for a judge.
    pub instruction: String = String::new(),
    /// Text after the completion, or after a rationale.
    pub question: String = QUESTION.into(),
    /// The verdict whose probability is the reward.
    pub yes: String = "Yes".into(),
    /// The other verdict.
    pub no: String = "No".into(),
    /// Normalise by the sum of the probabilities of both verdicts.
    pub normalise: bool = false,
    /// Apply the model's chat template to the text, as a user message.
    pub chat: bool = false,
    /// Number of rationales that are sampled and averaged over (GenRM-CoT); 0 disables them. [0, 4096]
    pub votes: usize = 0,
    /// Text before a rationale.
    pub rationale: String = RATIONALE.into(),
    /// Maximum tokens of a rationale. [1, 1048576]
    pub max_new_tokens: usize = 256,
    /// Sampling temperature of rationales. [0.0001, 100]
    pub temperature: f64 = 0.7,
    /// Size of the KV cache for rationales in MiB. [1, 1048576]
    pub cache_mib: usize = 64,
}
}

/// The stop string of a rationale: the question, trimmed at its end. Leading white space is kept, so that prompts have the form of
/// the training data.
fn rationale_end(question: &str) -> &str {
    match question.trim_end() {
        "" => question,
        text => text,
    }
}

/// A language model whose verdict is the reward.
pub struct GenerativeVerifier {
    model: Frozen,
    reading: Reading,
    stops: Stops,
    judgement: Judgement,
    sampler: Option<Mutex<Sampler>>,
    seed: u64,
    /// Its name in metrics.
    pub(super) name: String,
}

impl GenerativeVerifier {
    /// Opens the model of a directory with the options of its `[[reward]]`.
    pub fn open(
        dir: &Path,
        source: &Source,
        recipe: &Recipe,
        dtype: DType,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let judgement: Judgement = read_settings("reward.options", &source.options)?;
        let opened = ModelDir::open(dir)?;
        if !opened.config.head.has_lm() {
            return Err(Error::model("has a score head and writes no verdicts")
                .at(dir.display())
                .fix("no options.kind for a reward model, or a language model"));
        }
        let tokenizer = Tokenizer::from_dir(dir)?;
        for (name, word) in [("yes", &judgement.yes), ("no", &judgement.no)] {
            let fix = || format!("{name} and question in characters of the model's tokenizer");
            let at = format!("reward.options.{name}");
            if tokenizer.encode_text(word).map_err(|e| e.at(&at).fix(fix()))?.is_empty() {
                return Err(Error::usage(format!("{word:?} has no tokens")).at(at));
            }
        }
        let model = Model::load(backend.clone(), &opened, Options { dtype, ..Default::default() })?;
        let sampler = match judgement.votes {
            0 => None,
            _ => {
                let bytes = judgement.cache_mib << 20;
                let options =
                    CacheOptions { bytes, max_batch_tokens: backend.busy_tokens(), ..Default::default() };
                let sampler = Sampler::new(&model, options)?;
                Some(Mutex::new(sampler.with_tokenizer(Arc::new(Tokenizer::from_dir(dir)?))))
            }
        };
        let apply = if judgement.chat { Apply::On } else { Apply::Off };
        let chat = if judgement.chat { Some(ChatTemplate::from_dir(dir)?) } else { None };
        let stops =
            Stops::of_dir(dir, &tokenizer).with_strings(&[rationale_end(&judgement.question).into()], false);
        let prompts = PromptSettings { apply_chat_template: apply, ..Default::default() };
        Ok(GenerativeVerifier {
            model: Frozen::new(model, source.offload)?,
            reading: Reading::with(Encoder::new(tokenizer, chat, prompts)?, recipe),
            stops,
            judgement,
            sampler,
            seed: recipe.seed,
            name: "verdict".into(),
        })
    }

    /// The probability of a good verdict for each completion, in order; with rationales the mean over them.
    pub fn verdicts(&self, completions: &[Sample<'_>], step: u64) -> Result<Vec<f64>> {
        let j = &self.judgement;
        let text =
            |s: &Sample<'_>| format!("{}{}{}{}", j.instruction, s.prompt, self.reading.prefill, s.completion);
        let texts: Vec<String> = completions.iter().map(text).collect();
        let Some(sampler) = &self.sampler else {
            let asked =
                texts.iter().map(|t| Ok(self.reading.encoder.first(&format!("{t}{}", j.question))?.0));
            return self.ask(&asked.collect::<Result<Vec<_>>>()?);
        };
        let rationales = self.rationales(sampler, &texts, step)?;
        let mut asked = Vec::with_capacity(texts.len() * j.votes);
        for (text, votes) in texts.iter().zip(&rationales) {
            for thought in votes {
                asked.push(self.after_rationale(text, thought)?);
            }
        }
        let each = self.ask(&asked)?;
        Ok(each.chunks(j.votes).map(|votes| votes.iter().sum::<f64>() / votes.len() as f64).collect())
    }

    /// The tokens up to the verdict, with a rationale.
    fn after_rationale(&self, text: &str, thought: &str) -> Result<Vec<u32>> {
        let j = &self.judgement;
        if j.chat {
            let mut ids = self.reading.encoder.first(&format!("{text}{}", j.rationale))?.0;
            ids.extend(self.reading.tokenizer().encode_text(&format!("{thought}{}", j.question))?);
            return Ok(ids);
        }
        Ok(self.reading.encoder.first(&format!("{text}{}{thought}{}", j.rationale, j.question))?.0)
    }

    /// `votes` rationales for each text. Random numbers depend on the seed, the step, the text and the vote alone, so that verdicts
    /// do not depend on the batch or the ranks.
    fn rationales(&self, sampler: &Mutex<Sampler>, texts: &[String], step: u64) -> Result<Vec<Vec<String>>> {
        let j = &self.judgement;
        let params = SamplingParams {
            temperature: j.temperature as f32,
            max_new_tokens: j.max_new_tokens,
            stop_ids: self.stops.ids().to_vec(),
            stop_strings: self.stops.strings().to_vec(),
            seed: self.seed,
            ..Default::default()
        };
        let mut requests = Vec::with_capacity(texts.len() * j.votes);
        for text in texts {
            let [first, second] = name_words(text);
            let prompt = self.reading.encoder.first(&format!("{text}{}", j.rationale))?.0;
            for vote in 0..j.votes {
                let (prompt, params) = (prompt.clone(), params.clone());
                requests.push(GenerationRequest {
                    prompt,
                    params,
                    stream: [step as u32, first, second ^ vote as u32],
                });
            }
        }
        let mut sampler = lock(sampler);
        let written = self.model.with(|model| sampler.generate(model, requests))?;
        if self.model.offloads() {
            sampler.release();
        }
        let texts = crate::rollout::texts(self.reading.tokenizer(), &self.stops, &written)?;
        Ok(texts.chunks(j.votes).map(<[String]>::to_vec).collect())
    }

    /// The probability of a good verdict after each prefix.
    fn ask(&self, prefixes: &[Vec<u32>]) -> Result<Vec<f64>> {
        let yes = self.probabilities(prefixes, &self.judgement.yes)?;
        if !self.judgement.normalise {
            return Ok(yes);
        }
        let no = self.probabilities(prefixes, &self.judgement.no)?;
        Ok(yes.into_iter().zip(no).map(|(yes, no)| yes / (yes + no).max(f64::MIN_POSITIVE)).collect())
    }

    /// The probability of a word after each prefix: the product over its tokens.
    fn probabilities(&self, prefixes: &[Vec<u32>], word: &str) -> Result<Vec<f64>> {
        let word = self.reading.tokenizer().encode_text(word)?;
        let sequence = |prefix: &Vec<u32>| {
            let ids = [prefix, &word[..]].concat();
            let scored = (0..ids.len()).map(|i| i >= prefix.len()).collect();
            BatchSequence { ids, scored, ..Default::default() }
        };
        let sequences: Vec<BatchSequence> = prefixes.iter().map(sequence).collect();
        let judge = |model: &Model, batch: &Batch| {
            let logp = stats(model, batch, 1.0)?.logp;
            let probability = |rows: std::ops::Range<usize>| {
                let own = rows.end - 1 - word.len()..rows.end - 1;
                exp(logp[own].iter().map(|l| f64::from(*l)).sum())
            };
            Ok(batch.segments().iter().map(probability).collect())
        };
        self.model.with(|model| self.reading.packed(&sequences, |batch, _| judge(model, batch)))
    }
}

impl Reward for GenerativeVerifier {
    fn name(&self) -> &str {
        &self.name
    }
    fn score(&self, completions: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>> {
        let scored = |value: f64| Outcome::Scored(Score::single(&self.name, value));
        Ok(self.verdicts(completions, at.step)?.into_iter().map(scored).collect())
    }
    fn scores_steps(&self) -> bool {
        true
    }
    /// The reward of a step is the difference of the verdicts on the prefixes after and before it.
    fn score_steps(
        &self,
        completions: &[Sample<'_>],
        ends: &[Vec<usize>],
        at: Progress,
    ) -> Result<Vec<Outcome>> {
        let prefix =
            |sample: &Sample<'_>, end: usize| sample.completion.get(..end).unwrap_or_default().to_string();
        let texts: Vec<(Sample<'_>, Vec<String>)> = completions
            .iter()
            .zip(ends)
            .map(|(sample, ends)| (*sample, ends.iter().map(|&end| prefix(sample, end)).collect()))
            .collect();
        let prefixes: Vec<Sample<'_>> = texts
            .iter()
            .flat_map(|(sample, texts)| texts.iter().map(|completion| Sample { completion, ..*sample }))
            .collect();
        let mut verdicts = self.verdicts(&prefixes, at.step)?.into_iter();
        let one = |ends: &Vec<usize>| {
            let values: Vec<f64> = verdicts.by_ref().take(ends.len()).collect();
            let whole = Score::single(&self.name, values.last().copied().unwrap_or(0.0));
            Outcome::Scored(Score { steps: gains(&values), ..whole })
        };
        Ok(ends.iter().map(one).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Was: the line's end before the question stayed with the rationale, and the question brought another.
    #[test]
    fn a_rationale_ends_where_the_question_begins() {
        let learned = format!("7+5=12{QUESTION}Yes");
        let thought = learned.split(rationale_end(QUESTION)).next().unwrap();
        assert_eq!(format!("{thought}{QUESTION}Yes"), learned);
    }
}

//! Pairs of a right and a wrong step for Step-DPO (Lai et al., 2024, arXiv 2406.18629): samples completions, finds the first wrong
//! step of each with a verifier, and resamples that step until it is right.
//!
//! A row has the columns `prompt`, `initial_reason_steps` (everything before the step), `chosen` and `rejected` (that step
//! alone), and the columns of its prompt.

use crate::recipe::Recipe;
use crate::rollout::{self, Actor};
use crate::setup;
use crate::source::{Item, Mixture, Prompt};
use crate::verify::{self, RowColumns, Sample, Verifier};
use ferrl_engine::generate::GenerationRequest;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// How much to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSettings {
    /// Prompts to ask.
    pub prompts: usize,
    /// Completions to each prompt.
    pub samples: usize,
    /// Continuations sampled from before a wrong step.
    pub tries: usize,
    /// What ends a step.
    pub separator: String,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings { prompts: 256, samples: 4, tries: 8, separator: "\n".into() }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoundSteps {
    /// Completions looked at.
    pub completions: usize,
    /// Those with a wrong step.
    pub wrong: usize,
    /// Pairs made: wrong steps for which a right one was sampled.
    pub pairs: usize,
}

/// Prompts asked at once.
const PORTION: usize = 64;

/// A completion that went wrong.
struct Mistake {
    prompt: usize,
    before: String,
    rejected: String,
}

/// What judges the steps of a recipe's completions: its first reward, or the one that fits its task.
pub fn judge(recipe: &Recipe) -> Result<Box<dyn Verifier>> {
    if let Some(name) = recipe.reward.first().and_then(|r| r.verifier.as_ref()) {
        return verify::build(name, &recipe.reward[0].options);
    }
    match setup::task_verifier(recipe)? {
        Some(verifier) => Ok(verifier),
        None => Err(Error::usage("no verifier finds wrong steps")
            .at("reward")
            .fix("[[reward]] verifier = \"chain\"")),
    }
}

/// Samples from a model and its source of prompts, and hands on each row as it is found.
pub struct StepPairs<'a> {
    pub actor: Actor<'a>,
    pub verifier: &'a dyn Verifier,
    pub recipe: &'a Recipe,
    pub settings: StepSettings,
}

impl StepPairs<'_> {
    /// Asks, looks, asks again; `row` gets each pair, and every portion of prompts is followed by a call of `progress`.
    pub fn run(
        &mut self,
        source: &mut Mixture,
        row: &mut dyn FnMut(Map<String, Value>) -> Result<()>,
        progress: &mut dyn FnMut(usize, FoundSteps),
    ) -> Result<FoundSteps> {
        let (mut found, mut asked, mut seen) = (FoundSteps::default(), 0, BTreeSet::new());
        while asked < self.settings.prompts {
            let n = PORTION.min(self.settings.prompts - asked);
            let ask = |item| match item {
                Item::Prompt(prompt) => Some(prompt),
                Item::Sequences(_) | Item::Group(_) => None,
            };
            let prompts: Vec<Prompt> = source.next(n)?.into_iter().filter_map(ask).collect();
            let mistakes = self.mistakes(&prompts, &mut found, &mut seen)?;
            for (mistake, chosen) in self.corrections(&prompts, mistakes)? {
                let prompt = &prompts[mistake.prompt];
                let mut made = prompt.columns.clone();
                made.insert("prompt".into(), json!(prompt.text));
                made.insert("initial_reason_steps".into(), json!(mistake.before));
                made.insert("chosen".into(), json!(chosen));
                made.insert("rejected".into(), json!(mistake.rejected));
                found.pairs += 1;
                row(made)?;
            }
            asked += prompts.len().max(1);
            progress(asked, found);
        }
        Ok(found)
    }

    /// The first wrong step of each completion, each kind of mistake once.
    fn mistakes(
        &mut self,
        prompts: &[Prompt],
        found: &mut FoundSteps,
        seen: &mut BTreeSet<(u64, String, String)>,
    ) -> Result<Vec<Mistake>> {
        let starts = (0..prompts.len()).map(|p| (p, String::new())).collect::<Vec<_>>();
        let completions = self.sample(prompts, &starts, self.settings.samples, 0)?;
        let mut mistakes = Vec::new();
        for (i, completion) in completions.iter().enumerate() {
            let prompt = i / self.settings.samples;
            found.completions += 1;
            let Some(step) = self.wrong_step(&prompts[prompt], completion)? else { continue };
            found.wrong += 1;
            let (before, rejected) = (completion[..step.start].to_string(), completion[step].to_string());
            let new = seen.insert((prompts[prompt].index, before.clone(), rejected.clone()));
            if new && !rejected.is_empty() {
                mistakes.push(Mistake { prompt, before, rejected });
            }
        }
        Ok(mistakes)
    }

    /// For each mistake a right step sampled from the same beginning, where one came.
    fn corrections(&mut self, prompts: &[Prompt], mistakes: Vec<Mistake>) -> Result<Vec<(Mistake, String)>> {
        let tries = self.settings.tries;
        let starts: Vec<(usize, String)> = mistakes.iter().map(|m| (m.prompt, m.before.clone())).collect();
        let more = self.sample(prompts, &starts, tries, 1)?;
        let mut out = Vec::new();
        for (mistake, more) in mistakes.into_iter().zip(more.chunks(tries)) {
            for text in more {
                let Some(end) = text.find(&self.settings.separator) else { continue };
                let step = &text[..end + self.settings.separator.len()];
                let whole = format!("{}{step}", mistake.before);
                let wrong = self.wrong_step(&prompts[mistake.prompt], &whole)?;
                if wrong.is_none_or(|w| w.start >= whole.len()) {
                    out.push((mistake, step.to_string()));
                    break;
                }
            }
        }
        Ok(out)
    }

    fn wrong_step(&self, prompt: &Prompt, completion: &str) -> Result<Option<std::ops::Range<usize>>> {
        let columns = RowColumns { row: Some(&prompt.columns), renamed: &prompt.renamed };
        let sample = Sample {
            id: prompt.index,
            prompt: &prompt.text,
            completion,
            columns,
            place: &prompt.place,
            ..Default::default()
        };
        self.verifier.wrong_step(&sample)
    }

    /// `samples` continuations of each beginning of a completion, in order. `pass` keeps random numbers apart.
    fn sample(
        &mut self,
        prompts: &[Prompt],
        starts: &[(usize, String)],
        samples: usize,
        pass: u32,
    ) -> Result<Vec<String>> {
        let Actor { generator, policy, tokenizer, stops, .. } = &mut self.actor;
        let params = rollout::params(&self.recipe.rollout, stops, self.recipe.seed);
        let mut requests = Vec::new();
        for (start, (prompt, before)) in starts.iter().enumerate() {
            let mut ids = prompts[*prompt].ids.clone();
            ids.extend(tokenizer.encode_text(before)?);
            for sample in 0..samples {
                // Mistakes of one prompt differ in their number, which keeps their continuations apart.
                let stream = [
                    0x7374_6570 + pass,
                    prompts[*prompt].index as u32,
                    (start * usize::from(pass > 0) * samples + sample) as u32,
                ];
                requests.push(GenerationRequest { prompt: ids.clone(), params: params.clone(), stream });
            }
        }
        let completions = generator.generate(policy, requests)?;
        rollout::texts(tokenizer, stops, &completions)
    }
}

//! Rewards: every source scores every answer; the weighted sum lands on the answer's last token.
//!
//! A verifier reads an answer's text, a reward model its tokens as they were sampled.

use crate::experience::{Experience, Metrics};
use crate::recipe;
use crate::rollout::Answer;
use crate::source::Prompt;
use crate::verify::{self, Sample, Verifier};
use ferrl_engine::model::Model;
use ferrl_engine::train::{Batch, plan, stats};
use ferrl_engine::{Error, Result};

/// The sources of a run, with their weights.
pub struct Rewards {
    verifiers: Vec<(f64, Box<dyn Verifier>)>,
    models: Vec<(f64, Model)>,
}

/// Tokens that a reward model reads at once.
const MODEL_TOKENS: usize = 8192;

/// What one answer got.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graded {
    /// What training sees.
    pub reward: f64,
    /// Named parts.
    pub components: Vec<(String, f32)>,
    /// Logged only: usually whether the answer is right.
    pub score: f64,
}

impl Rewards {
    /// As the recipe says; `open` loads a reward model.
    pub fn new(sources: &[recipe::Reward], open: &dyn Fn(&str) -> Result<Model>) -> Result<Self> {
        let (mut verifiers, mut models) = (Vec::new(), Vec::new());
        for source in sources {
            let weight = source.weight.unwrap_or(1.0);
            let verifier = match (&source.verifier, &source.python, &source.model) {
                (Some(name), None, None) => verify::build(name, &source.options)?,
                (None, None, Some(path)) => {
                    models.push((weight, open(path)?));
                    continue;
                }
                (None, Some(file), None) => {
                    let mut options = source.options.clone();
                    options.insert("file".into(), file.to_string_lossy().into());
                    if let Some(function) = &source.function {
                        options.insert("function".into(), function.as_str().into());
                    }
                    verify::build("python", &options)?
                }
                _ => {
                    return Err(Error::usage("a reward names one of verifier, python or model")
                        .at("reward")
                        .fix("verifier = \"countdown\""));
                }
            };
            verifiers.push((weight, verifier));
        }
        Ok(Rewards { verifiers, models })
    }

    /// Scores the answers and places each reward on its answer's last token. An answer that no worker could score is
    /// left out of the experience and counted.
    pub fn score(
        &self,
        prompts: &[Prompt],
        answers: &[Answer],
        experience: &mut Experience,
        metrics: &mut Metrics,
    ) -> Result<Vec<Graded>> {
        let samples: Vec<Sample<'_>> = answers
            .iter()
            .enumerate()
            .map(|(i, a)| Sample {
                id: i as u64,
                prompt: &prompts[a.prompt].text,
                completion: &a.text,
                columns: &prompts[a.prompt].columns,
            })
            .collect();
        let mut graded = vec![Graded::default(); answers.len()];
        let mut lost = vec![false; answers.len()];
        for (weight, verifier) in &self.verifiers {
            for (i, score) in verifier.score_batch(&samples).into_iter().enumerate() {
                let score = match score {
                    Ok(score) => score,
                    Err(e) if verify::dropped(&e) => {
                        lost[i] = true;
                        continue;
                    }
                    Err(e) => return Err(e),
                };
                if !score.reward.is_finite() {
                    return Err(Error::numerics(format!(
                        "{} gave a reward of {}",
                        verifier.name(),
                        score.reward
                    ))
                    .at(format!("answer {i}")));
                }
                graded[i].reward += weight * score.reward;
                graded[i].score += score.score.unwrap_or(score.reward);
                graded[i].components.extend(score.components.into_iter().map(|(n, v)| (n, v as f32)));
            }
        }
        for (weight, model) in &self.models {
            for (g, score) in graded.iter_mut().zip(scores(model, experience)?) {
                g.reward += weight * score as f64;
                g.components.push(("model".into(), score));
                // What a model thinks of an answer does not make it right, unless nobody else says so.
                g.score += if self.verifiers.is_empty() { score as f64 } else { 0.0 };
            }
        }
        for (s, g) in experience.sequences.iter_mut().zip(&graded) {
            if let Some(last) = s.actions().last() {
                s.reward[last] = g.reward as f32;
            }
            s.components = g.components.clone();
        }
        let mut keep = lost.iter().map(|l| !l);
        experience.sequences.retain(|_| keep.next().unwrap_or(true));
        metrics.add("rollouts/lost", lost.iter().filter(|&&l| l).count() as f64);
        for (a, g) in answers.iter().zip(&graded) {
            metrics.add("score", g.score);
            metrics.add("completions/mean_length", a.tokens as f64);
            metrics.add("completions/clipped_ratio", f64::from(a.truncated));
        }
        Ok(graded)
    }
}

/// A reward model's score of each sequence, at its last token.
fn scores(model: &Model, e: &Experience) -> Result<Vec<f32>> {
    let lengths: Vec<usize> = e.sequences.iter().map(|s| s.ids.len()).collect();
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let mut all = Vec::new();
    for part in plan(&lengths, MODEL_TOKENS.max(longest))? {
        let batch = Batch::of(e.sequences[part.clone()].iter().map(|s| s.ids.clone()));
        let values = stats(model, &batch, 1.0).map_err(|e| e.at("the reward model"))?.value;
        let mut end = 0;
        for length in &lengths[part] {
            end += length;
            all.push(values[end - 1]);
        }
    }
    Ok(all)
}

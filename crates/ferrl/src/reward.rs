//! Rewards: every source scores every answer; the weighted sum lands on the answer's last token.

use crate::experience::{Experience, Metrics};
use crate::recipe;
use crate::rollout::Answer;
use crate::source::Prompt;
use crate::verify::{self, Sample, Verifier};
use ferrl_engine::{Error, Result};

/// The sources of a run, with their weights.
pub struct Rewards(Vec<(f64, Box<dyn Verifier>)>);

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
    /// As the recipe says.
    pub fn new(sources: &[recipe::Reward]) -> Result<Self> {
        let mut all = Vec::new();
        for source in sources {
            let verifier = match (&source.verifier, &source.python) {
                (Some(name), None) => verify::build(name, &source.options)?,
                (None, Some(file)) => {
                    let mut options = source.options.clone();
                    options.insert("file".into(), file.to_string_lossy().into());
                    if let Some(function) = &source.function {
                        options.insert("function".into(), function.as_str().into());
                    }
                    verify::build("python", &options)?
                }
                _ => {
                    return Err(Error::usage("a reward names one of verifier or python")
                        .at("reward")
                        .fix("verifier = \"countdown\""));
                }
            };
            all.push((source.weight.unwrap_or(1.0), verifier));
        }
        Ok(Rewards(all))
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
        let mut sources: Vec<Vec<(f32, f32)>> = vec![Vec::new(); answers.len()];
        for (weight, verifier) in &self.0 {
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
                sources[i].push((*weight as f32, score.reward as f32));
                graded[i].score += score.score.unwrap_or(score.reward);
                graded[i].components.extend(score.components.into_iter().map(|(n, v)| (n, v as f32)));
            }
        }
        for ((s, g), sources) in experience.sequences.iter_mut().zip(&graded).zip(sources) {
            if let Some(last) = s.actions().last() {
                s.reward[last] = g.reward as f32;
            }
            s.components = g.components.clone();
            s.sources = sources;
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

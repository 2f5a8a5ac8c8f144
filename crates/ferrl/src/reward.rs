//! Rewards: every source scores every answer; the weighted sum lands on the answer's last token.

mod model;

pub use model::RewardModel;

use crate::experience::{Experience, Metrics};
use crate::recipe::{self, Recipe};
use crate::rollout::Answer;
use crate::source::Prompt;
use crate::verify::{self, Sample, Score, Verifier};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// The sources of a run, with their weights.
pub struct Rewards(Vec<(f64, Judge)>);

/// Whoever says what an answer is worth.
enum Judge {
    /// A function of the text.
    Verifier(Box<dyn Verifier>),
    /// A model, and what its reward is called.
    Model(Box<RewardModel>, String),
}

/// What one answer got.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Graded {
    /// What training sees.
    pub reward: f64,
    /// Named parts.
    pub components: Vec<(String, f32)>,
    /// Logged only: what the first verifier says of it, usually whether it is right.
    pub score: f64,
}

impl Rewards {
    /// From sources that need no model.
    pub fn new(sources: &[recipe::Reward]) -> Result<Self> {
        Self::build(sources, &mut |dir| {
            Err(Error::usage("a reward model needs a device to run on")
                .at(format!("reward: model = {dir:?}")))
        })
    }

    /// One verifier, of weight 1.
    pub fn of(verifier: Box<dyn Verifier>) -> Self {
        Rewards(vec![(1.0, Judge::Verifier(verifier))])
    }

    /// As the recipe says, its models in memory.
    pub fn load(recipe: &Recipe, dtype: DType, backend: &Arc<dyn Backend>) -> Result<Self> {
        Self::build(&recipe.reward, &mut |dir| RewardModel::open(Path::new(dir), recipe, dtype, backend))
    }

    fn build(sources: &[recipe::Reward], open: &mut dyn FnMut(&str) -> Result<RewardModel>) -> Result<Self> {
        let (mut all, mut models) = (Vec::new(), 0);
        for source in sources {
            let judge = match (&source.verifier, &source.python, &source.model) {
                (Some(name), None, None) => Judge::Verifier(verify::build(name, &source.options)?),
                (None, Some(file), None) => {
                    let mut options = source.options.clone();
                    options.insert("file".into(), file.to_string_lossy().into());
                    if let Some(function) = &source.function {
                        options.insert("function".into(), function.as_str().into());
                    }
                    Judge::Verifier(verify::build("python", &options)?)
                }
                (None, None, Some(dir)) => {
                    models += 1;
                    let name = if models == 1 { "model".into() } else { format!("model_{models}") };
                    Judge::Model(Box::new(open(dir)?), name)
                }
                _ => {
                    return Err(Error::usage("a reward names one of verifier, python or model")
                        .at("reward")
                        .fix("verifier = \"countdown\""));
                }
            };
            all.push((source.weight.unwrap_or(1.0), judge));
        }
        Ok(Rewards(all))
    }

    /// Whether verifiers find what they need in the row of a prompt: each that is a plain function scores an empty completion.
    pub fn check(&self, prompt: &Prompt) -> Result<()> {
        let sample =
            Sample { id: prompt.index, prompt: &prompt.text, completion: "", columns: &prompt.columns };
        let place = |e: Error| if prompt.place.is_empty() { e } else { e.at(&prompt.place) };
        for (_, judge) in &self.0 {
            match judge {
                Judge::Verifier(v) if v.name() != verify::python::ENTRY.name => {
                    v.score(&sample).map_err(place)?
                }
                _ => continue,
            };
        }
        Ok(())
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
        let verified = self.0.iter().any(|(_, judge)| matches!(judge, Judge::Verifier(_)));
        // Whether an answer is right is for the first verifier to say; without one, for the first source.
        let says = |judge: &Judge| !verified || matches!(judge, Judge::Verifier(_));
        let first = self.0.iter().position(|(_, judge)| says(judge));
        for (source, (weight, judge)) in self.0.iter().enumerate() {
            let (name, scores) = match judge {
                Judge::Verifier(verifier) => (verifier.name(), verifier.score_batch(&samples)),
                Judge::Model(model, name) => {
                    let score =
                        |r: f64| Ok(Score { reward: r, components: vec![(name.clone(), r)], score: Some(r) });
                    (name.as_str(), model.score(prompts, answers)?.into_iter().map(score).collect())
                }
            };
            if scores.len() != answers.len() {
                let (got, want) = (scores.len(), answers.len());
                return Err(Error::data(format!("{name} gave {got} scores for {want} answers"))
                    .fix("one score for every answer, in their order"));
            }
            for (i, score) in scores.into_iter().enumerate() {
                let score = match score {
                    Ok(score) => score,
                    Err(e) if verify::dropped(&e) => {
                        lost[i] = true;
                        continue;
                    }
                    Err(e) => return Err(e),
                };
                if !score.reward.is_finite() {
                    return Err(Error::numerics(format!("{name} gave a reward of {}", score.reward))
                        .at(format!("answer {i}")));
                }
                graded[i].reward += weight * score.reward;
                sources[i].push((*weight as f32, score.reward as f32));
                if Some(source) == first {
                    graded[i].score = score.score.unwrap_or(score.reward);
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores all but the last.
    struct Forgetful;

    impl Verifier for Forgetful {
        fn name(&self) -> &str {
            "forgetful"
        }
        fn about(&self) -> &'static str {
            "forgets one"
        }
        fn score(&self, _sample: &Sample<'_>) -> Result<Score> {
            Ok(Score::default())
        }
        fn score_batch(&self, samples: &[Sample<'_>]) -> Vec<Result<Score>> {
            samples.iter().skip(1).map(|s| self.score(s)).collect()
        }
    }

    /// Its process dies over one text.
    struct Fragile;

    impl Verifier for Fragile {
        fn name(&self) -> &str {
            "fragile"
        }
        fn about(&self) -> &'static str {
            "breaks"
        }
        fn score(&self, sample: &Sample<'_>) -> Result<Score> {
            match sample.completion {
                "bad" => Err(Error::device("the worker died")),
                _ => Ok(Score { reward: 1.0, ..Score::default() }),
            }
        }
    }

    #[test]
    fn an_answer_whose_reward_failed_is_not_learned_from() {
        let rewards = Rewards(vec![(1.0, Judge::Verifier(Box::new(Fragile)))]);
        let answer = |text: &str| Answer { prompt: 0, text: text.into(), tokens: 1, truncated: false };
        let sequence = |trajectory| crate::experience::Sequence {
            ids: vec![1, 2],
            trained: vec![false, true],
            reward: vec![0.0; 2],
            trajectory,
            ..Default::default()
        };
        let mut e = Experience { sequences: (0..3).map(sequence).collect() };
        let (answers, mut m) = (["a", "bad", "b"].map(answer), Metrics::default());
        rewards.score(&[Prompt::default()], &answers, &mut e, &mut m).unwrap();
        assert_eq!(m.get("rollouts/lost"), Some(1.0));
        let left: Vec<_> = e.sequences.iter().map(|s| (s.trajectory, s.total_reward())).collect();
        assert_eq!(left, [(0, 1.0), (2, 1.0)]);
    }

    #[test]
    fn the_first_verifier_says_whether_an_answer_is_right() {
        let judge = |name: &str, pattern: &str| {
            let options = serde_json::json!({ "pattern": pattern, "whole": false });
            let options = options.as_object().cloned().unwrap_or_default();
            Judge::Verifier(verify::build(name, &options).unwrap())
        };
        let rewards = Rewards(vec![(1.0, judge("regex", "4")), (0.5, judge("regex", "[0-9]"))]);
        let answer = |text: &str| Answer { prompt: 0, text: text.into(), tokens: 1, truncated: false };
        let answers = ["4", "5", "x"].map(answer);
        let (mut e, mut m) = (Experience::default(), Metrics::default());
        let graded = rewards.score(&[Prompt::default()], &answers, &mut e, &mut m).unwrap();
        let both: Vec<_> = graded.iter().map(|g| (g.reward, g.score)).collect();
        assert_eq!(both, [(1.5, 1.0), (0.5, 0.0), (0.0, 0.0)], "a digit is well formed, not right");
    }

    #[test]
    fn as_many_scores_as_answers() {
        let rewards = Rewards(vec![(1.0, Judge::Verifier(Box::new(Forgetful)))]);
        let answer = || Answer { prompt: 0, text: "a".into(), tokens: 1, truncated: false };
        let (mut e, mut m) = (Experience::default(), Metrics::default());
        let error = rewards.score(&[Prompt::default()], &[answer(), answer()], &mut e, &mut m).unwrap_err();
        assert!(error.to_string().contains("forgetful gave 1 scores for 2 answers"), "{error}");
    }
}

//! Implicit process rewards: the log-ratio of a trained model to its reference, step by step (see `algo/implicit_prm.rs`).

use super::Reward;
use super::reading::{Reading, start};
use crate::credit::{StepSplit, split};
use crate::data::MaskedTokens;
use crate::recipe::{Recipe, RewardSettings as Source, read_settings};
use crate::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Frozen, Model, Options};
use ferrl_engine::train::{Batch, BatchSequence, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// Reduction of the rewards of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// The sum of the rewards of the steps, which is the outcome reward.
    #[default]
    Sum,
    /// The minimum reward of its steps.
    Min,
}

with_defaults! {
/// `options` of a `[[reward]]` whose `model` is an implicit PRM.
pub struct Implicit {
    /// `implicit`: the log-ratio of a trained model to its reference.
    pub kind: String = "implicit".into(),
    /// Directory of the reference: the initial model of the training.
    pub reference: String = String::new(),
    /// Scale of the log-ratio. (0, 1000]
    pub beta: f64 = 0.05,
    /// How a completion is split into steps.
    pub split: StepSplit = StepSplit::Lines,
    /// Tokens of a step with `split = "tokens"`. [1, 1048576]
    pub step_tokens: usize = 16,
    /// How the rewards of steps are reduced to one.
    pub reduce: Reduce = Reduce::Sum,
}
}

/// A model and its reference, which reward every step of a completion.
pub struct ImplicitReward {
    model: Frozen,
    reference: Frozen,
    reading: Reading,
    options: Implicit,
    /// Its name in metrics.
    pub(super) name: String,
}

impl ImplicitReward {
    /// Opens the model of a directory and the reference of the options.
    pub fn open(
        dir: &Path,
        source: &Source,
        recipe: &Recipe,
        dtype: DType,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let options: Implicit = read_settings("reward.options", &source.options)?;
        if options.reference.is_empty() {
            return Err(Error::usage("an implicit reward needs a reference model")
                .at("reward.options.reference")
                .fix("the directory of the model that training started from"));
        }
        let load = |dir: &Path| -> Result<Model> {
            let opened = ModelDir::open(dir)?;
            if !opened.config.head.has_lm() {
                return Err(Error::model("has a score head and no log-probabilities").at(dir.display()));
            }
            Model::load(backend.clone(), &opened, Options { dtype, ..Default::default() })
        };
        let (model, reference) = (load(dir)?, load(Path::new(&options.reference))?);
        if model.config.vocab != reference.config.vocab {
            let what = format!("has {} tokens, the model {}", reference.config.vocab, model.config.vocab);
            return Err(Error::model(what)
                .at("reward.options.reference")
                .fix("a reference with the same tokenizer"));
        }
        let reading = Reading::open(dir, recipe)?;
        let frozen = |model| Frozen::new(model, source.offload);
        let (model, reference) = (frozen(model)?, frozen(reference)?);
        Ok(ImplicitReward { model, reference, reading, options, name: "implicit".into() })
    }

    /// The reward of each step of each completion; their sum is the outcome reward.
    pub fn step_rewards(&self, completions: &[Sample<'_>]) -> Result<Vec<Vec<f64>>> {
        let tokens: Vec<MaskedTokens> =
            completions.iter().map(|c| self.reading.tokens(c)).collect::<Result<_>>()?;
        let ratios = self.ratios(&tokens)?;
        let mut out = Vec::with_capacity(completions.len());
        for ((sample, tokens), ratios) in completions.iter().zip(&tokens).zip(ratios) {
            let start = start(tokens);
            let said = format!("{}{}", self.reading.prefill, sample.completion);
            let how = (self.options.split, self.options.step_tokens);
            let steps = split::steps(how, &tokens.ids[start..], &said, self.reading.tokenizer())?;
            let mut from = 0;
            let ends = steps.map_or_else(|| vec![ratios.len()], |s| s.iter().map(|s| s.end).collect());
            let step = |end: usize| {
                let sum: f64 = ratios[from..end].iter().sum();
                from = end;
                self.options.beta * sum
            };
            out.push(ends.into_iter().map(step).collect());
        }
        Ok(out)
    }

    /// The log-ratio of each token of each completion.
    fn ratios(&self, tokens: &[MaskedTokens]) -> Result<Vec<Vec<f64>>> {
        let sequence = |t: &MaskedTokens| BatchSequence {
            ids: t.ids.clone(),
            scored: t.mask.clone(),
            ..Default::default()
        };
        let sequences: Vec<BatchSequence> = tokens.iter().map(sequence).collect();
        let logps = |model: &Model, batch: &Batch| {
            let logp = stats(model, batch, 1.0)?.logp;
            Ok(batch.segments().iter().map(|rows| logp[rows].to_vec()).collect())
        };
        // One model after the other: if both are offloaded, only one at a time is on the device.
        let under =
            |frozen: &Frozen| frozen.with(|model| self.reading.packed(&sequences, |b, _| logps(model, b)));
        let (own, reference): (Vec<Vec<f32>>, _) = (under(&self.model)?, under(&self.reference)?);
        let ratio = |((t, own), reference): ((&MaskedTokens, &Vec<f32>), &Vec<f32>)| {
            let acts = (1..t.ids.len()).filter(|&i| t.mask[i]).map(|i| i - 1);
            acts.map(|row| f64::from(own[row]) - f64::from(reference[row])).collect()
        };
        Ok(tokens.iter().zip(&own).zip(&reference).map(ratio).collect())
    }
}

impl Reward for ImplicitReward {
    fn name(&self) -> &str {
        &self.name
    }
    fn score(&self, completions: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let reduce = |steps: Vec<f64>| match self.options.reduce {
            Reduce::Sum => steps.iter().sum(),
            Reduce::Min => steps.iter().copied().reduce(f64::min).unwrap_or(0.0),
        };
        let scored = |steps| Outcome::Scored(Score::single(&self.name, reduce(steps)));
        Ok(self.step_rewards(completions)?.into_iter().map(scored).collect())
    }
    fn scores_steps(&self) -> bool {
        true
    }
    fn score_steps(
        &self,
        completions: &[Sample<'_>],
        ends: &[Vec<usize>],
        _at: Progress,
    ) -> Result<Vec<Outcome>> {
        let tokens: Vec<MaskedTokens> =
            completions.iter().map(|c| self.reading.tokens(c)).collect::<Result<_>>()?;
        let mut out = Vec::with_capacity(completions.len());
        for ((tokens, ends), ratios) in tokens.iter().zip(ends).zip(self.ratios(&tokens)?) {
            let start = start(tokens);
            let starts = split::starts(&tokens.ids[start..], self.reading.tokenizer())?;
            let mut steps = vec![0.0; ends.len()];
            // A token belongs to the step of its first character; tokens after the text to the last step.
            for (from, ratio) in starts.iter().zip(ratios) {
                let step = ends.partition_point(|end| end + self.reading.prefill.len() <= *from);
                if let Some(reward) = steps.get_mut(step.min(ends.len().saturating_sub(1))) {
                    *reward += self.options.beta * ratio;
                }
            }
            let whole = Score::single(&self.name, steps.iter().sum());
            out.push(Outcome::Scored(Score { steps, ..whole }));
        }
        Ok(out)
    }
}

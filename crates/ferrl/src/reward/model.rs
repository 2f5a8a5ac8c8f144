//! A reward model: its score at the last token of prompt and completion.

use super::Reward;
use super::reading::{Reading, start};
use crate::credit::{gains, split};
use crate::data::MaskedTokens;
use crate::recipe::Recipe;
use crate::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Frozen, Head, Model, Options};
use ferrl_engine::train::{Batch, BatchSequence, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A sequence classifier with one label. It uses its own tokenizer and chat template, which need not be the policy's.
pub struct RewardModel {
    model: Frozen,
    reading: Reading,
    /// Its name in metrics.
    pub(super) name: String,
}

impl RewardModel {
    /// Opens the model of a directory; the recipe has the prefill and the size of micro-batches. With `offload` it is in host memory
    /// between uses.
    pub fn open(
        dir: &Path,
        recipe: &Recipe,
        dtype: DType,
        backend: &Arc<dyn Backend>,
        offload: bool,
    ) -> Result<Self> {
        let opened = ModelDir::open(dir)?;
        if opened.config.head != Head::Score {
            return Err(Error::model("a language model has no score head").at(dir.display()).fix(
                "a sequence classifier with one label, such as a stage that trains a reward model leaves; or \
                     reward.0.options.kind = \"generative\", which makes the model a judge",
            ));
        }
        let model = Model::load(backend.clone(), &opened, Options { dtype, ..Default::default() })?;
        let model = Frozen::new(model, offload)?;
        Ok(RewardModel { model, reading: Reading::open(dir, recipe)?, name: "model".into() })
    }

    /// The score of each completion, in their order; no score depends on the other completions.
    pub fn values(&self, completions: &[Sample<'_>]) -> Result<Vec<f64>> {
        let all = self.token_values(completions)?;
        Ok(all.into_iter().map(|(_, values)| values.last().copied().unwrap_or(0.0)).collect())
    }

    /// Whether its tokenizer can encode a prompt and a completion.
    pub(crate) fn reads(&self, sample: &Sample<'_>) -> bool {
        self.reading.tokens(sample).is_ok()
    }

    /// Tokens of each completion with its prompt, and the score at each of them: one forward pass scores all
    /// prefixes.
    fn token_values(&self, completions: &[Sample<'_>]) -> Result<Vec<(MaskedTokens, Vec<f64>)>> {
        let encoded: Vec<MaskedTokens> =
            completions.iter().map(|c| self.reading.tokens(c)).collect::<Result<_>>()?;
        let sequence = |t: &MaskedTokens| BatchSequence { ids: t.ids.clone(), ..Default::default() };
        let sequences: Vec<BatchSequence> = encoded.iter().map(sequence).collect();
        let score = |model: &Model, batch: &Batch| {
            let values = stats(model, batch, 1.0)?.value;
            let own = |rows: Range<usize>| values[rows].iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
            Ok(batch.segments().iter().map(own).collect())
        };
        let values =
            self.model.with(|model| self.reading.packed(&sequences, |batch, _| score(model, batch)))?;
        Ok(encoded.into_iter().zip(values).collect())
    }

    /// The score at the end of each step, of a completion whose steps end at these bytes.
    fn step_values(&self, (tokens, values): &(MaskedTokens, Vec<f64>), ends: &[usize]) -> Result<Vec<f64>> {
        let start = start(tokens);
        let starts = split::starts(&tokens.ids[start..], self.reading.tokenizer())?;
        let last = values.len().saturating_sub(1);
        let value = |(i, &end): (usize, &usize)| {
            let own = starts.partition_point(|&from| from < end + self.reading.prefill.len());
            let at = if i + 1 == ends.len() { last } else { (start + own).saturating_sub(1).min(last) };
            values.get(at).copied().unwrap_or(0.0)
        };
        Ok(ends.iter().enumerate().map(value).collect())
    }
}

impl Reward for RewardModel {
    fn name(&self) -> &str {
        &self.name
    }
    fn score(&self, completions: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let scored = |value: f64| Outcome::Scored(Score::single(&self.name, value));
        Ok(self.values(completions)?.into_iter().map(scored).collect())
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
        let all = self.token_values(completions)?;
        let one = |(own, ends): (&(MaskedTokens, Vec<f64>), &Vec<usize>)| {
            let values = self.step_values(own, ends)?;
            let whole = Score::single(&self.name, values.last().copied().unwrap_or(0.0));
            Ok(Outcome::Scored(Score { steps: gains(&values), ..whole }))
        };
        all.iter().zip(ends).map(one).collect()
    }
}

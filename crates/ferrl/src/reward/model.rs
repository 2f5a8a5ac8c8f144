//! A reward model in process: its score at the last token of prompt and completion.

use super::Reward;
use crate::credit::{gains, split};
use crate::data::prompt::Settings;
use crate::data::schema::RowKind;
use crate::data::{Counts, Encoder, Example, Row, Tokens};
use crate::pack::{Budget, pack};
use crate::recipe::Recipe;
use crate::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Frozen, Head, Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A sequence classifier with one label. It reads text with its own tokenizer and chat template, which need not be the
/// policy's.
pub struct RewardModel {
    model: Frozen,
    encoder: Encoder,
    prefill: String,
    budget: usize,
    name: String,
}

impl RewardModel {
    /// The model in a directory; the recipe says how completions begin and how many tokens are computed at once.
    pub fn open(dir: &Path, recipe: &Recipe, dtype: DType, backend: &Arc<dyn Backend>) -> Result<Self> {
        RewardModel::open_at(dir, recipe, dtype, backend, false)
    }

    /// The same; with `offload` it lies in the machine's memory between uses.
    pub fn open_at(
        dir: &Path,
        recipe: &Recipe,
        dtype: DType,
        backend: &Arc<dyn Backend>,
        offload: bool,
    ) -> Result<Self> {
        let opened = ModelDir::open(dir)?;
        if opened.config.head != Head::Score {
            return Err(Error::model("a language model does not score answers").at(dir.display()).fix(
                "a sequence classifier with one label, such as a stage that trains a reward model leaves; or \
                     reward.0.options.kind = \"generative\", which asks the model for its verdict",
            ));
        }
        let model = Model::load(backend.clone(), &opened, Options { dtype, ..Default::default() })?;
        let chat = ChatTemplate::from_dir(dir).ok();
        Ok(RewardModel {
            model: Frozen::new(model, offload)?,
            encoder: Encoder::new(Tokenizer::from_dir(dir)?, chat, Settings::default())?,
            prefill: recipe.data.prefill.clone().unwrap_or_default(),
            budget: recipe.train.micro_batch_tokens,
            name: "model".into(),
        })
    }

    /// Under another name in metrics.
    pub fn named(self, name: String) -> Self {
        RewardModel { name, ..self }
    }

    /// The score of each completion, in their order; no score depends on the other completions.
    pub fn values(&self, completions: &[Sample<'_>]) -> Result<Vec<f64>> {
        let all = self.token_values(completions)?;
        Ok(all.into_iter().map(|(_, values)| values.last().copied().unwrap_or(0.0)).collect())
    }

    /// Whether it has tokens for a prompt and a completion.
    pub(crate) fn reads(&self, sample: &Sample<'_>) -> bool {
        self.tokens(sample).is_ok()
    }

    /// Tokens of each completion with its prompt, and the score behind every one of them: one pass over a completion scores all
    /// its prefixes.
    fn token_values(&self, completions: &[Sample<'_>]) -> Result<Vec<(Tokens, Vec<f64>)>> {
        let encoded: Vec<Tokens> = completions.iter().map(|c| self.tokens(c)).collect::<Result<_>>()?;
        let sequences: Vec<Vec<u32>> = encoded.iter().map(|t| t.ids.clone()).collect();
        let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
        let tokens = lengths.iter().copied().fold(self.budget, usize::max);
        let budget = Budget { tokens, setting: "train.micro_batch_tokens", multiple: 1 };
        let packing = pack(&lengths, &[], budget, &|i| format!("completion {i}"))?;
        let score = |model: &Model, bin: &Vec<usize>| {
            let batch = Batch::of(bin.iter().map(|&i| sequences[i].clone()));
            let values = stats(model, &batch, 1.0)?.value;
            let own = |rows: Range<usize>| values[rows].iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
            Ok(batch.segments().iter().map(own).collect())
        };
        let computed = self
            .model
            .with(|model| packing.bins.iter().map(|bin| score(model, bin)).collect::<Result<_>>())?;
        Ok(encoded.into_iter().zip(packing.restore(computed)?).collect())
    }

    /// The score at the end of each step, of a completion whose steps end at these bytes.
    fn step_values(&self, (tokens, values): &(Tokens, Vec<f64>), ends: &[usize]) -> Result<Vec<f64>> {
        let start = tokens.mask.iter().position(|m| *m).unwrap_or(tokens.ids.len());
        let starts = split::starts(&tokens.ids[start..], self.encoder.tokenizer())?;
        let last = values.len().saturating_sub(1);
        let value = |(i, &end): (usize, &usize)| {
            let own = starts.partition_point(|&from| from < end + self.prefill.len());
            let at = if i + 1 == ends.len() { last } else { (start + own).saturating_sub(1).min(last) };
            values.get(at).copied().unwrap_or(0.0)
        };
        Ok(ends.iter().enumerate().map(value).collect())
    }

    /// Prompt and completion as the model was trained to read them.
    fn tokens(&self, sample: &Sample<'_>) -> Result<Tokens> {
        let prompt = prompt_value(sample.prompt, sample.messages);
        let text = format!("{}{}", self.prefill, sample.completion);
        let row = Row::from_iter([("prompt".to_string(), prompt), ("completion".to_string(), text.into())]);
        let mut counts = Counts::default();
        let encoded = self.encoder.encode(&row, RowKind::Sft, "a completion", &mut counts)?;
        let Some(Example::Text(mut tokens)) = encoded.map(|s| s.example) else {
            return Err(Error::data("a completion has no tokens for the reward model"));
        };
        // A truncated completion has no end token: it is scored where it was cut.
        let ended = |ids: &[u32]| ids.last().is_some_and(|&id| self.encoder.tokenizer().is_special(id));
        if sample.truncated && ended(&tokens.ids) && tokens.ids.len() > 1 {
            tokens.ids.pop();
            tokens.mask.pop();
        }
        Ok(tokens)
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
        let one = |(own, ends): (&(Tokens, Vec<f64>), &Vec<usize>)| {
            let values = self.step_values(own, ends)?;
            let whole = Score::single(&self.name, values.last().copied().unwrap_or(0.0));
            Ok(Outcome::Scored(Score { steps: gains(&values), ..whole }))
        };
        all.iter().zip(ends).map(one).collect()
    }
}

/// A prompt as a model with its own chat template reads it.
pub(crate) fn prompt_value(text: &str, messages: &[Value]) -> Value {
    match messages.is_empty() {
        true => Value::String(text.to_string()),
        false => Value::Array(messages.to_vec()),
    }
}

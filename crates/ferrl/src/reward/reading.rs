//! Input of models that reward: with their own tokenizer and chat template, which need not be the policy's.

use crate::data::prompt::PromptSettings;
use crate::data::schema::RowKind;
use crate::data::{Encoder, Example, MaskedTokens, Row, RowCounts};
use crate::pack::{TokenBudget, pack};
use crate::recipe::Recipe;
use crate::verify::Sample;
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, BatchSequence};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// From completions to the micro-batches of a model.
pub(super) struct Reading {
    pub encoder: Encoder,
    /// The recipe's prefill.
    pub prefill: String,
    /// Tokens of a micro-batch.
    budget: usize,
}

impl Reading {
    /// With the tokenizer and the chat template of a model's directory.
    pub fn open(dir: &Path, recipe: &Recipe) -> Result<Self> {
        let chat = ChatTemplate::from_dir(dir).ok();
        Ok(Self::with(Encoder::new(Tokenizer::from_dir(dir)?, chat, PromptSettings::default())?, recipe))
    }

    pub fn with(encoder: Encoder, recipe: &Recipe) -> Self {
        let prefill = recipe.data.prefill.clone().unwrap_or_default();
        Reading { encoder, prefill, budget: recipe.train.micro_batch_tokens }
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        self.encoder.tokenizer()
    }

    /// Prompt and completion as the model was trained to read them.
    pub fn tokens(&self, sample: &Sample<'_>) -> Result<MaskedTokens> {
        let prompt = prompt_value(sample.prompt, sample.messages);
        let text = format!("{}{}", self.prefill, sample.completion);
        let row = Row::from_iter([("prompt".to_string(), prompt), ("completion".to_string(), text.into())]);
        let encoded = self.encoder.encode(&row, RowKind::Sft, "a completion", &mut RowCounts::default())?;
        let Some(Example::Text(mut tokens)) = encoded.map(|s| s.example) else {
            return Err(Error::data("a completion has no tokens for the reward model"));
        };
        // A truncated completion has no stop token: it is scored at its last token.
        let ended = |ids: &[u32]| ids.last().is_some_and(|&id| self.tokenizer().is_special(id));
        if sample.truncated && ended(&tokens.ids) && tokens.ids.len() > 1 {
            tokens.ids.pop();
            tokens.mask.pop();
        }
        Ok(tokens)
    }

    /// What `compute` returns for the sequences of each micro-batch, in the order of `sequences`.
    pub fn packed<T>(
        &self,
        sequences: &[BatchSequence],
        mut compute: impl FnMut(&Batch, &[usize]) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.ids.len()).collect();
        let tokens = lengths.iter().copied().fold(self.budget, usize::max);
        let budget = TokenBudget { tokens, setting: "train.micro_batch_tokens", multiple: 1 };
        let packing = pack(&lengths, &[], budget, &|i| format!("completion {i}"))?;
        let mut computed = Vec::new();
        for bin in &packing.bins {
            let sequences = bin.iter().map(|&i| sequences[i].clone()).collect();
            computed.push(compute(&Batch { sequences, others_per_row: 0 }, bin)?);
        }
        packing.restore(computed)
    }
}

/// Where the completion begins among the tokens of prompt and completion.
pub(super) fn start(tokens: &MaskedTokens) -> usize {
    tokens.mask.iter().position(|m| *m).unwrap_or(tokens.ids.len())
}

/// A prompt as a model with its own chat template reads it.
pub(crate) fn prompt_value(text: &str, messages: &[Value]) -> Value {
    match messages.is_empty() {
        true => Value::String(text.to_string()),
        false => Value::Array(messages.to_vec()),
    }
}

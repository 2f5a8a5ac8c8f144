//! Examples: rows as tokens with masks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Row;

/// Token ids and, for each, whether it is trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskedTokens {
    /// The ids.
    pub ids: Vec<u32>,
    /// Whether each is trained; of the same length.
    pub mask: Vec<bool>,
}

/// A row as training example.
#[derive(Clone, Debug, PartialEq)]
pub enum Example {
    /// A demonstration.
    Text(MaskedTokens),
    /// A chosen and a rejected completion.
    Pair {
        /// The chosen one, prompt included.
        chosen: MaskedTokens,
        /// The rejected one, prompt included.
        rejected: MaskedTokens,
    },
    /// A completion that is good or bad.
    Labelled {
        /// Prompt and completion.
        tokens: MaskedTokens,
        /// Whether it is good.
        label: bool,
    },
    /// A completion with a probability.
    Target {
        /// Prompt and completion.
        tokens: MaskedTokens,
        /// The probability.
        target: f32,
    },
    /// A prompt to sample from.
    Prompt {
        /// Its tokens.
        ids: Vec<u32>,
    },
    /// Completions to one prompt, with rewards.
    Group {
        /// Each completion, prompt included.
        completions: Vec<MaskedTokens>,
        /// Rewards by name, one per completion.
        rewards: Vec<(String, Vec<f32>)>,
    },
    /// A completion in steps.
    Steps {
        /// Prompt and steps; the last token of each step is marked.
        tokens: MaskedTokens,
        /// Where each step ends.
        ends: Vec<usize>,
        /// Whether each step is right.
        labels: Vec<f32>,
    },
}

/// A row ready for training.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedRow {
    /// Its tokens.
    pub example: Example,
    /// The prompt as rewards see it: text, or a list of messages; null where there is none.
    pub prompt: Value,
    /// Every column the schema did not use, for rewards and environments.
    pub extra: Row,
    /// File and row, for messages.
    pub place: String,
}

/// Handling of examples without trained tokens after truncation to `max_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Overlong {
    /// Stop with an error.
    #[default]
    Error,
    /// Drop it and count it.
    Drop,
}

/// What was counted on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RowCounts {
    /// Sequences cut to `max_length`.
    pub truncated: usize,
    /// Rows left out because the cut left nothing to train.
    pub dropped: usize,
    /// Responses that end in the token, written out, that ends them anyway.
    pub ended: usize,
    /// Responses that contain the name of a special token, which is encoded as plain text.
    pub spelled: usize,
    /// Responses without any text.
    pub empty: usize,
    /// Messages whose role no template is known to treat apart.
    pub strange: usize,
    /// Turns that end in no token that stops a completion.
    pub endless: usize,
    /// Prompts of plain text whose last word runs into the response's first.
    pub glued: usize,
    /// Prompts that are not what `chosen` and `rejected` begin with.
    pub other_prompt: usize,
    /// Prompts of plain text although the model has a chat template.
    pub raw: usize,
    /// Tokens of the longest sequence before it was cut.
    pub longest: usize,
}

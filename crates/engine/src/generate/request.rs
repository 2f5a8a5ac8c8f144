//! Requests, events and completions.

use super::SamplingParams;

/// A prompt to complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    /// Key of its random numbers, set by the caller (step, prompt and sample): a token's random number is a function of the seed,
    /// this and the token's index.
    pub stream: [u32; 3],
}

/// Identifies a request within its generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of the stop ids was sampled; it is the last token.
    Token(u32),
    /// The last token completed the stop string of this index.
    String(usize),
    /// `max_new_tokens` reached.
    Length,
    Cancelled,
}

/// The sampled tokens of a request; the other columns have one entry per token.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Token ids, including the stop token or the one that completed the stop string.
    pub ids: Vec<u32>,
    /// `log softmax(logits / temperature)` of the token, before penalties and truncation (temperature 1 if greedy). Bit-identical
    /// to the trainer's.
    pub logp: Vec<f32>,
    /// Log-probability under the distribution sampled from, after penalties and truncation; 0 if greedy.
    pub sampled_logp: Vec<f32>,
    /// Top logprobs: the most probable tokens with their `logp`; empty unless requested.
    pub top: Vec<Vec<(u32, f32)>>,
    /// Policy version that sampled each token.
    pub versions: Vec<u64>,
    /// Number of prompt tokens found in the prefix cache.
    pub shared: usize,
    pub stop: StopReason,
}

/// Ignores `shared`, which depends on what else was in the cache.
impl PartialEq for Completion {
    fn eq(&self, other: &Self) -> bool {
        let Completion { ids, logp, sampled_logp, top, versions, shared: _, stop } = self;
        let tokens = (ids, versions, stop) == (&other.ids, &other.versions, &other.stop);
        tokens && (logp, sampled_logp, top) == (&other.logp, &other.sampled_logp, &other.top)
    }
}

/// What happened in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Token {
        id: Id,
        token: u32,
        /// its log-probability, as in [`Completion::logp`]
        logp: f32,
    },
    /// A request ended, after the event of its last token.
    Done { id: Id, completion: Completion },
}

//! Requests, events and completions.

use super::SamplingParams;

/// A prompt to complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// Key of its random numbers, chosen by the caller (step, prompt and sample): a token's draw depends on the seed, this
    /// and the token's index alone.
    pub stream: [u32; 3],
}

/// Identifies a request within its generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of the stop ids was sampled; it is the last token.
    Token(u32),
    /// The last token completed the stop string of this index.
    String(usize),
    /// `max_new_tokens` were sampled.
    Length,
    /// The caller cancelled it.
    Cancelled,
}

/// The sampled tokens of a request, with one entry per token in every other column.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Token ids, up to and including the one that completed the stop.
    pub ids: Vec<u32>,
    /// `log softmax(logits / temperature)` of the token, before penalties and truncation; at temperature 1 where
    /// decoding is greedy. The trainer gives the same bits.
    pub logp: Vec<f32>,
    /// The same under the distribution that was sampled from, after penalties and truncation; 0 where the
    /// decoding is greedy.
    pub sampled_logp: Vec<f32>,
    /// The most probable tokens with their `logp`; empty unless requested.
    pub top: Vec<Vec<(u32, f32)>>,
    /// Version of the weights that gave the token.
    pub versions: Vec<u64>,
    /// Tokens of the prompt whose keys and values were in the cache when the request first ran: they were not computed again.
    pub shared: usize,
    /// Why it ended.
    pub stop: StopReason,
}

/// What was sampled is equal; `shared` tells what it cost, which depends on what else was in the cache.
impl PartialEq for Completion {
    fn eq(&self, other: &Self) -> bool {
        let Completion { ids, logp, sampled_logp, top, versions, shared: _, stop } = self;
        let tokens = (ids, versions, stop) == (&other.ids, &other.versions, &other.stop);
        tokens && (logp, sampled_logp, top) == (&other.logp, &other.sampled_logp, &other.top)
    }
}

/// What a step brought about.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A sequence has one token more.
    Token {
        /// which request
        id: Id,
        /// the token
        token: u32,
        /// its exact log-probability, as in [`Completion::logp`]
        logp: f32,
    },
    /// A request ended; its last token came just before.
    Done {
        /// which request
        id: Id,
        /// all of it
        completion: Completion,
    },
}

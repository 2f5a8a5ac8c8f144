//! The state of a request.

use super::cache::BlockTable;
use super::choose::PickedToken;
use super::{Completion, GenerationRequest, Id, SamplingParams, StopReason};
use crate::Result;
use crate::tokenizer::Tokenizer;

pub(super) struct RunningSequence {
    pub id: Id,
    pub params: SamplingParams,
    pub stream: [u32; 3],
    /// Prompt and completion tokens.
    pub ids: Vec<u32>,
    /// Length of the prompt.
    pub prompt: usize,
    /// Number of tokens whose keys and values are in the cache.
    pub computed: usize,
    pub table: BlockTable,
    /// Prompt tokens found in the prefix cache at admission.
    pub shared: Option<usize>,
    /// Rows in the current step.
    pub rows: usize,
    /// Admitted in the current step: may reference blocks that this step writes.
    pub fresh: bool,
    /// The sequence whose computation of a common prompt it waits for.
    pub follows: Option<Id>,
    logp: Vec<f32>,
    sampled_logp: Vec<f32>,
    top: Vec<Vec<(u32, f32)>>,
    versions: Vec<u64>,
}

impl RunningSequence {
    pub fn new(id: Id, request: GenerationRequest) -> Self {
        RunningSequence {
            id,
            prompt: request.prompt.len(),
            ids: request.prompt,
            params: request.params,
            stream: request.stream,
            computed: 0,
            table: BlockTable::default(),
            shared: None,
            rows: 0,
            fresh: false,
            follows: None,
            logp: Vec::new(),
            sampled_logp: Vec::new(),
            top: Vec::new(),
            versions: Vec::new(),
        }
    }

    /// Start of the completion, including parts sampled in earlier requests.
    pub fn completion(&self) -> usize {
        self.prompt - self.params.sampled
    }

    /// Tokens to compute before the next one can be sampled.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.computed
    }

    /// Whether `max_new_tokens` allows another token after the one in flight.
    pub fn continues(&self) -> bool {
        self.ids.len() - self.prompt + 1 < self.params.max_new_tokens
    }

    /// The tokens that the prefix cache may provide.
    pub fn cacheable_prefix(&self) -> &[u32] {
        &self.ids[..self.ids.len() - 1]
    }

    /// Whether its sequence starts with `ids`, so that keys and values can be shared.
    pub fn starts_with_prefix(&self, ids: &[u32]) -> bool {
        self.ids.len() >= ids.len() && self.ids[..ids.len()] == *ids
    }

    /// Appends a sampled token; returns why the completion ends, if it does.
    pub fn push(
        &mut self,
        pick: PickedToken,
        version: u64,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<StopReason>> {
        self.ids.push(pick.token);
        self.logp.push(pick.logp);
        self.sampled_logp.push(pick.sampled_logp);
        self.versions.push(version);
        if self.params.top_logprobs > 0 {
            self.top.push(pick.top);
        }
        if self.params.stop_ids.contains(&pick.token) {
            return Ok(Some(StopReason::Token(pick.token)));
        }
        if let Some(i) = self.stop_string(tokenizer)? {
            return Ok(Some(StopReason::String(i)));
        }
        let full = self.ids.len() - self.prompt >= self.params.max_new_tokens;
        Ok(full.then_some(StopReason::Length))
    }

    /// The stop string that the new token completed, if any.
    fn stop_string(&self, tokenizer: Option<&Tokenizer>) -> Result<Option<usize>> {
        let stops = &self.params.stop_strings;
        let (Some(longest), Some(tokenizer)) = (stops.iter().map(String::len).max(), tokenizer) else {
            return Ok(None);
        };
        // Each token is at least one byte; a few more tokens complete a multi-byte character at the start.
        let generated = &self.ids[self.completion()..];
        let tail = &generated[generated.len().saturating_sub(longest + 4)..];
        let text = tokenizer.decode(tail, false)?;
        Ok(stops.iter().position(|s| text.contains(s.as_str())))
    }

    /// The completion so far.
    pub fn finish(mut self, stop: StopReason) -> Completion {
        Completion {
            ids: self.ids.split_off(self.prompt),
            logp: self.logp,
            sampled_logp: self.sampled_logp,
            top: self.top,
            versions: self.versions,
            shared: self.shared.unwrap_or(0),
            stop,
        }
    }
}

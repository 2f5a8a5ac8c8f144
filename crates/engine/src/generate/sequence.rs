//! A request on its way.

use super::cache::BlockTable;
use super::choose::PickedToken;
use super::{Completion, GenerationRequest, Id, SamplingParams, StopReason};
use crate::Result;
use crate::tokenizer::Tokenizer;

pub(super) struct RunningSequence {
    pub id: Id,
    pub params: SamplingParams,
    pub stream: [u32; 3],
    /// Prompt and completion.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens whose keys and values are in the blocks of `table`.
    pub computed: usize,
    pub table: BlockTable,
    /// Tokens of the prompt that were in the cache when it first ran.
    pub shared: Option<usize>,
    /// Rows it has in the step under way.
    pub rows: usize,
    /// Joined in the step under way, and may refer to blocks that are only now being written.
    pub fresh: bool,
    /// Waits for this sequence to compute the prompt they have in common.
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

    /// Where the completion begins, pieces that were sampled before included.
    pub fn completion(&self) -> usize {
        self.prompt - self.params.sampled
    }

    /// Tokens that must still be computed before the next one can be chosen.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.computed
    }

    /// Whether `max_new_tokens` allow another token after the one that is being chosen now.
    pub fn continues(&self) -> bool {
        self.ids.len() - self.prompt + 1 < self.params.max_new_tokens
    }

    /// The tokens that another sequence must begin with to take its place in the cache.
    pub fn beginning(&self) -> &[u32] {
        &self.ids[..self.ids.len() - 1]
    }

    /// Whether the keys and values of `ids` are those of its own beginning.
    pub fn begins_with(&self, ids: &[u32]) -> bool {
        self.ids.len() >= ids.len() && self.ids[..ids.len()] == *ids
    }

    /// Takes a sampled token and says whether it was the last.
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

    /// The stop string that the end of the completion holds. Earlier text has been looked at before.
    fn stop_string(&self, tokenizer: Option<&Tokenizer>) -> Result<Option<usize>> {
        let stops = &self.params.stop_strings;
        let (Some(longest), Some(tokenizer)) = (stops.iter().map(String::len).max(), tokenizer) else {
            return Ok(None);
        };
        // A token gives a byte at least; the few more keep a character whole that begins before.
        let generated = &self.ids[self.completion()..];
        let tail = &generated[generated.len().saturating_sub(longest + 4)..];
        let text = tokenizer.decode(tail, false)?;
        Ok(stops.iter().position(|s| text.contains(s.as_str())))
    }

    /// What has been sampled.
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

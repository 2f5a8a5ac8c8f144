//! The tokens of an episode: sampled tokens are kept, observations are appended and masked.

use super::{Branch, Played};
use crate::data::Encoder;
use crate::env::{Environment, Next, Turn};
use crate::experience::Sequence;
use crate::rollout::Actor;
use crate::source::Prompt;
use ferrl_engine::Result;
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// A running or finished episode.
pub(crate) struct Episode {
    /// Index of its prompt.
    pub prompt: usize,
    stream: [u32; 3],
    params: Arc<SamplingParams>,
    pub(super) environment: Option<Box<dyn Environment>>,
    /// Training sequences: one, unless a state did not continue the previous text.
    pub sequences: Vec<Sequence>,
    /// Text of the last sequence, as environments get it.
    state: String,
    /// Whether it is a conversation: observations are messages then.
    chat: bool,
    /// The first observation, if the prompt had no tokens.
    pub begun: Option<Prompt>,
    /// Tokens of its actions so far.
    pub tokens: usize,
    /// Tokens of the last action.
    pub(super) action_tokens: usize,
    pub stop: StopReason,
    /// The completion of an episode without an environment, decoded at the end.
    pub completion: Option<Completion>,
    pub played: Option<Played>,
    /// The branch, if it continues a prefix of another episode.
    pub branch: Option<Box<Branch>>,
    /// Whether it has ended: by its environment, by a limit, or lost.
    pub over: bool,
}

impl Episode {
    /// An episode of prompt number `group`.
    pub fn new(
        group: usize,
        prompt: &Prompt,
        environment: Option<Box<dyn Environment>>,
        (params, stream): (&Arc<SamplingParams>, [u32; 3]),
    ) -> Self {
        let first = Sequence { ids: prompt.ids.clone(), group, weight: 1.0, ..Default::default() };
        Episode {
            prompt: group,
            stream,
            params: params.clone(),
            played: environment.is_some().then(Played::default),
            environment,
            sequences: vec![first],
            state: prompt.text.clone(),
            chat: !prompt.messages.is_empty(),
            begun: None,
            tokens: 0,
            action_tokens: 0,
            stop: StopReason::Length,
            completion: None,
            branch: None,
            over: false,
        }
    }

    /// Sets the number of its training sequences.
    pub fn numbered(mut self, number: usize) -> Self {
        self.sequences.iter_mut().for_each(|s| s.trajectory = number);
        self
    }

    pub(super) fn longest_action(&self) -> usize {
        self.params.max_new_tokens
    }

    /// Stop strings that end an action.
    pub(super) fn own_stops(&self) -> &[String] {
        &self.params.stop_strings
    }

    /// All tokens so far: the context of the next token.
    pub fn context(&self) -> &[u32] {
        self.sequences.last().map_or(&[], |s| &s.ids)
    }

    pub fn request(&mut self) -> GenerationRequest {
        let (prompt, params) = (self.context().to_vec(), SamplingParams::clone(&self.params));
        if let Some(branch) = &mut self.branch {
            return branch.request(prompt, params, self.stream);
        }
        // Samples of a prompt and turns are fewer than 2^16, so that every turn has its own random numbers.
        let turn = self.played.as_ref().map_or(0, |p| p.turns.len()) as u32;
        let [step, prompt_number, sample] = self.stream;
        GenerationRequest { prompt, params, stream: [step, prompt_number, sample | turn << 16] }
    }

    /// Processes the first observation, which is the prompt if it has no tokens yet.
    pub fn begin(&mut self, actor: &Actor<'_>, prompt: &Prompt, text: String) -> Result<()> {
        // The environment gets a conversation as rendered by the model's chat template.
        let state = if self.chat { actor.tokenizer.decode(&prompt.ids, false)? } else { prompt.text.clone() };
        if !prompt.ids.is_empty() && (text == state || text == prompt.text) {
            self.state = state;
            return Ok(());
        }
        let (ids, messages) = match &actor.environments.encoder {
            Some(encoder) => encoder.first(&text)?,
            None => (actor.tokenizer.encode_text(&text)?, Vec::new()),
        };
        self.chat = !messages.is_empty();
        self.state = if self.chat { actor.tokenizer.decode(&ids, false)? } else { text.clone() };
        self.sequences[0].ids = ids.clone();
        self.begun = Some(Prompt { ids, text, messages, ..prompt.clone() });
        Ok(())
    }

    /// Adds the tokens of an action to the last sequence, with the log-probabilities they were sampled with.
    pub fn act(&mut self, c: &Completion) {
        let s = self.sequences.last_mut().expect("an episode has a sequence");
        let from = s.ids.len();
        s.grow(from);
        s.ids.extend_from_slice(&c.ids);
        s.grow(s.ids.len());
        for (i, (logp, version)) in c.logp.iter().zip(&c.versions).enumerate() {
            (s.trained[from + i], s.sampled_logp[from + i - 1], s.version[from + i - 1]) =
                (true, *logp, *version);
        }
        self.tokens += c.ids.len();
        self.stop = c.stop;
    }

    /// Appends the next input of the policy to the sequence, or starts a new one. Sampled tokens are not changed.
    pub(super) fn observe(
        &mut self,
        actor: &Actor<'_>,
        observed: &mut EncodedTexts,
        action: &str,
        turn: Turn,
    ) -> Result<()> {
        // Observations are plain text; in a whole state special tokens are parsed.
        match turn.next {
            Next::Observation(text) => {
                self.state.push_str(action);
                match self.chat.then_some(actor.environments.encoder.as_deref()).flatten() {
                    Some(encoder) => {
                        let ids = self.message(encoder, &text, &turn.results)?;
                        self.state.push_str(&actor.tokenizer.decode(&ids, false)?);
                        self.extend(&ids);
                    }
                    None => {
                        self.state.push_str(&text);
                        self.extend(&observed.encode(actor.tokenizer, &text)?);
                    }
                }
            }
            Next::State(state) => {
                match self.continues(&state, action) {
                    Some(text) => {
                        let ids = actor.tokenizer.encode_markup(self.after_stop(actor, text))?;
                        self.extend(&ids);
                    }
                    None => {
                        let ids = actor.tokenizer.encode_prompt(&state)?;
                        let Sequence { trajectory, group, .. } = self.sequences[0];
                        let own = Sequence { ids, trajectory, group, weight: 1.0, ..Default::default() };
                        self.sequences.push(own);
                    }
                }
                self.state = state;
            }
        }
        Ok(())
    }

    /// What is new in a state that continues the text so far.
    pub(super) fn continues<'t>(&self, state: &'t str, action: &str) -> Option<&'t str> {
        state.strip_prefix(&self.state)?.strip_prefix(action)
    }

    /// Appends masked tokens to the last sequence.
    fn extend(&mut self, ids: &[u32]) {
        let s = self.sequences.last_mut().expect("an episode has a sequence");
        s.ids.extend_from_slice(ids);
        s.grow(s.ids.len());
    }

    /// Removes the text of the sampled stop token from the start of a state: its token is present already.
    fn after_stop<'t>(&self, actor: &Actor<'_>, text: &'t str) -> &'t str {
        let StopReason::Token(id) = self.stop else { return text };
        let name = actor.tokenizer.token(id).unwrap_or_default();
        text.strip_prefix(name.as_str()).filter(|_| !name.is_empty()).unwrap_or(text)
    }

    /// The tokens of the next message of a conversation, from the end of the assistant's turn on: the user's, or the results of
    /// tools that the assistant called.
    fn message(&self, encoder: &Encoder, text: &str, results: &[String]) -> Result<Vec<u32>> {
        let one = |role: &str, text: &str| json!({ "role": role, "content": text.trim() });
        let messages: Vec<Value> = match results.is_empty() {
            true => vec![one("user", text)],
            false => results.iter().map(|result| one("tool", result)).collect(),
        };
        let mut ids = encoder.next_turn(&messages)?;
        if let StopReason::Token(end) = self.stop
            && ids.first() == Some(&end)
        {
            ids.remove(0);
        }
        Ok(ids)
    }
}

/// Cache of the tokens of short observations that repeat, such as hints: encoding dominates the cost of a game's turn.
#[derive(Default)]
pub(super) struct EncodedTexts(HashMap<String, Arc<[u32]>>);

impl EncodedTexts {
    /// Longer texts seldom repeat.
    const LONGEST: usize = 256;
    /// Maximum number of cached texts.
    const MOST: usize = 4096;

    fn encode(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<Arc<[u32]>> {
        if let Some(ids) = self.0.get(text) {
            return Ok(ids.clone());
        }
        let ids: Arc<[u32]> = tokenizer.encode_text(text)?.into();
        if text.len() <= Self::LONGEST && self.0.len() < Self::MOST {
            self.0.insert(text.into(), ids.clone());
        }
        Ok(ids)
    }
}

impl Sequence {
    /// Extends all columns to the number of tokens; new entries are neither trained nor rewarded.
    fn grow(&mut self, len: usize) {
        self.trained.resize(len, false);
        self.reward.resize(len, 0.0);
        self.sampled_logp.resize(len, 0.0);
        self.version.resize(len, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::tokenizer::train_chars;

    #[test]
    fn texts_that_were_said_before_have_the_same_tokens_and_long_ones_are_not_stored() {
        let said = ["\nsmaller\n", "\nlarger\n"].map(String::from);
        let tokenizer = train_chars(said.into_iter(), &[]).unwrap();
        let mut observed = EncodedTexts::default();
        let long = "larger".repeat(100);
        for text in ["\nsmaller\n", "\nlarger\n", "\nsmaller\n", &long] {
            assert_eq!(
                observed.encode(&tokenizer, text).unwrap()[..],
                tokenizer.encode_text(text).unwrap()[..]
            );
        }
        assert_eq!(observed.0.len(), 2);
        assert!(observed.encode(&tokenizer, "?").is_err(), "a text without tokens is not stored");
    }
}

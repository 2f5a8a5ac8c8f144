//! What ends a completion, and where its text is cut: the one home of stop tokens and stop strings.
//!
//! A model may end what it says by any of the tokenizer's `eos_token`, the `eos_token_id` (one or a list) of
//! `generation_config.json` or else `config.json`, and the token by which its chat template ends the assistant's turn.
//! The last is found by rendering a conversation, so no list of names can miss it. Rollouts, evaluations and the commands
//! that generate all ask here: a model that stops in one of them stops in the others.

use super::{Completion, StopReason};
use crate::Result;
use crate::chat::ChatTemplate;
use crate::tokenizer::{StreamDecoder, Tokenizer, eos_ids};
use std::path::Path;

/// Stop tokens and stop strings of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stops {
    ids: Vec<u32>,
    strings: Vec<String>,
    /// Whether the text keeps the stop string that ended it.
    include: bool,
}

impl Stops {
    /// Those of a model that reads and writes text.
    pub fn of(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let mut ids = tokenizer.eos().to_vec();
        let turn = template.and_then(|t| t.end_of_turn(tokenizer));
        ids.extend(turn.filter(|id| !ids.contains(id)));
        Stops { ids, ..Default::default() }
    }

    /// Those of a model directory with a tokenizer; a chat template that cannot be used adds none.
    pub fn of_dir(dir: &Path, tokenizer: &Tokenizer) -> Self {
        Self::of(tokenizer, ChatTemplate::from_dir(dir).ok().as_ref())
    }

    /// The stop tokens in the configuration files of a model without a tokenizer.
    pub fn of_ids(dir: &Path) -> Result<Self> {
        Ok(Stops { ids: eos_ids(dir)?, ..Default::default() })
    }

    /// With texts that end a completion too; `include` keeps the one that did in the text.
    pub fn with_strings(mut self, strings: &[String], include: bool) -> Self {
        (self.strings, self.include) = (strings.to_vec(), include);
        self
    }

    /// Without stop tokens: only stop strings and the length limit end a completion.
    pub fn without_ids(mut self) -> Self {
        self.ids.clear();
        self
    }

    /// Tokens that end a completion; the tokenizer's own `eos_token` first.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Texts that end a completion.
    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// The text of a completion: no special tokens, no stop token, and nothing from the stop string on that ended it.
    pub fn text(&self, tokenizer: &Tokenizer, c: &Completion) -> Result<String> {
        let said = match c.stop {
            StopReason::Token(_) => c.ids.split_last().map_or(&c.ids[..], |(_, said)| said),
            _ => &c.ids[..],
        };
        let mut text = tokenizer.decode(said, true)?;
        self.cut(&mut text, c.stop);
        Ok(text)
    }

    /// A reader that gives out text token by token, as much as is certain to stay.
    pub fn stream<'a>(&'a self, tokenizer: &'a Tokenizer) -> StopStream<'a> {
        StopStream { stops: self, decoder: tokenizer.stream(true), held: String::new() }
    }

    fn cut(&self, text: &mut String, stop: StopReason) {
        let StopReason::String(i) = stop else { return };
        let Some(at) = self.strings.get(i).filter(|_| !self.include).and_then(|s| text.rfind(s.as_str()))
        else {
            return;
        };
        // The last token may complete several of them: the one that begins first decides.
        let overlapping = |s: &String| text.rfind(s.as_str()).filter(|start| start + s.len() > at);
        text.truncate(self.strings.iter().filter_map(overlapping).fold(at, usize::min));
    }
}

/// The text of a completion as it is sampled; what may turn out to be a stop string is held back.
pub struct StopStream<'a> {
    stops: &'a Stops,
    decoder: StreamDecoder<'a>,
    held: String,
}

impl StopStream<'_> {
    /// Takes the next token and returns the text that has become certain.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.stops.ids.contains(&id) {
            return Ok(String::new());
        }
        let piece = self.decoder.push(id)?;
        let Some(longest) = self.stops.strings.iter().map(String::len).max() else { return Ok(piece) };
        // The piece may complete a stop string, which then began at most `longest - 1` bytes before it.
        let most = self.held.len().saturating_sub(longest - 1);
        let certain = (0..=most).rev().find(|&i| self.held.is_char_boundary(i)).unwrap_or(0);
        let given = self.held.drain(..certain).collect();
        self.held += &piece;
        Ok(given)
    }

    /// The rest of the text, once it is known why it ended.
    pub fn finish(mut self, stop: StopReason) -> Result<String> {
        self.held += &self.decoder.finish()?;
        self.stops.cut(&mut self.held, stop);
        Ok(self.held)
    }
}

//! Stop tokens and stop strings, and how they cut a completion's text.
//!
//! Stop tokens are the tokenizer's `eos_token`, the `eos_token_id` (one or a list) of `generation_config.json` or else
//! `config.json`, and the token with which the chat template ends an assistant turn. The last is found by rendering a
//! conversation, so no list of names can miss it. Rollouts, evaluations and generating commands all use this module, so a model
//! stops at the same tokens in all of them.

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
    /// Whether the text includes the stop string that ended it.
    include: bool,
}

impl Stops {
    pub fn of(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let mut ids = tokenizer.eos().to_vec();
        let turn = template.and_then(|t| t.end_of_turn(tokenizer));
        ids.extend(turn.filter(|id| !ids.contains(id)));
        Stops { ids, ..Default::default() }
    }

    /// Stop tokens of a model directory with a tokenizer; an unusable chat template is ignored.
    pub fn of_dir(dir: &Path, tokenizer: &Tokenizer) -> Self {
        Self::of(tokenizer, ChatTemplate::from_dir(dir).ok().as_ref())
    }

    /// Stop tokens in a model's configuration files, without a tokenizer.
    pub fn of_ids(dir: &Path) -> Result<Self> {
        Ok(Stops { ids: eos_ids(dir)?, ..Default::default() })
    }

    /// Adds stop strings; `include` keeps the matched string in the text.
    pub fn with_strings(mut self, strings: &[String], include: bool) -> Self {
        (self.strings, self.include) = (strings.to_vec(), include);
        self
    }

    /// Removes all stop tokens: only stop strings and the length limit end a completion.
    pub fn without_ids(mut self) -> Self {
        self.ids.clear();
        self
    }

    /// Stop tokens; the tokenizer's `eos_token` first.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// The text of a completion, without special tokens, stop token, and everything from the stop string on.
    pub fn text(&self, tokenizer: &Tokenizer, c: &Completion) -> Result<String> {
        let said = match c.stop {
            StopReason::Token(_) => c.ids.split_last().map_or(&c.ids[..], |(_, said)| said),
            _ => &c.ids[..],
        };
        let mut text = tokenizer.decode(said, true)?;
        self.cut(&mut text, c.stop);
        Ok(text)
    }

    /// Streams the text token by token, as far as it cannot become part of a stop string.
    pub fn stream<'a>(&'a self, tokenizer: &'a Tokenizer) -> StopStream<'a> {
        StopStream { stops: self, decoder: tokenizer.stream(true), held: String::new() }
    }

    fn cut(&self, text: &mut String, stop: StopReason) {
        let StopReason::String(i) = stop else { return };
        let Some(at) = self.strings.get(i).filter(|_| !self.include).and_then(|s| text.rfind(s.as_str()))
        else {
            return;
        };
        // The last token may complete several stop strings: cut at the one that starts first.
        let overlapping = |s: &String| text.rfind(s.as_str()).filter(|start| start + s.len() > at);
        text.truncate(self.strings.iter().filter_map(overlapping).fold(at, usize::min));
    }
}

/// Streaming decoder of a completion; holds back text that may become a stop string.
pub struct StopStream<'a> {
    stops: &'a Stops,
    decoder: StreamDecoder<'a>,
    held: String,
}

impl StopStream<'_> {
    /// Adds a token and returns the text that is now final.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.stops.ids.contains(&id) {
            return Ok(String::new());
        }
        let piece = self.decoder.push(id)?;
        let Some(longest) = self.stops.strings.iter().map(String::len).max() else { return Ok(piece) };
        // The new piece may complete a stop string that started at most `longest - 1` bytes before it.
        let most = self.held.len().saturating_sub(longest - 1);
        let certain = (0..=most).rev().find(|&i| self.held.is_char_boundary(i)).unwrap_or(0);
        let given = self.held.drain(..certain).collect();
        self.held += &piece;
        Ok(given)
    }

    /// The remaining text, given why the completion ended.
    pub fn finish(mut self, stop: StopReason) -> Result<String> {
        self.held += &self.decoder.finish()?;
        self.stops.cut(&mut self.held, stop);
        Ok(self.held)
    }
}

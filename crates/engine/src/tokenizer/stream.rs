//! Streaming decoding.

use super::Tokenizer;
use crate::{Error, Result};

/// Returns text as soon as no later token can change it.
///
/// The concatenation of all pieces, including that of [`StreamDecoder::finish`], equals [`Tokenizer::decode`] of all ids.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Ids whose text is not final yet, after one final id for context.
    window: Vec<u32>,
    /// Bytes of the window's text already returned.
    given: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        StreamDecoder { tokenizer, skip_special, window: Vec::new(), given: 0 }
    }

    /// Adds an id and returns the text that is now final (empty within a multi-byte character).
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.tokenizer.token(id) else { return Ok(String::new()) };
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        self.window.push(id);
        if self.tokenizer.byte_fallback && is_byte(&token) {
            return Ok(String::new()); // a run of byte tokens is decoded as a whole, once it ends
        }
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        // A trailing replacement character may be the start of a multi-byte character.
        let stable = text.strip_suffix('\u{FFFD}').unwrap_or(&text).len();
        let piece = self.take(&text, stable)?;
        if stable == text.len() && self.window.len() > 1 {
            let context = self.tokenizer.decode(&[id], self.skip_special)?;
            if !context.is_empty() {
                self.window.drain(..self.window.len() - 1);
                self.given = context.len();
            }
        }
        Ok(piece)
    }

    /// Ends the stream and returns the remaining text, e.g. the replacement character for an incomplete one.
    pub fn finish(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        let end = text.len();
        self.take(&text, end)
    }

    fn take(&mut self, text: &str, stable: usize) -> Result<String> {
        if stable <= self.given {
            return Ok(String::new());
        }
        let piece = text.get(self.given..stable).ok_or_else(|| {
            Error::model("the tokenizer's decoder rewrites text it has already given out")
                .fix("decode the whole sequence at once")
        })?;
        self.given = stable;
        Ok(piece.to_owned())
    }
}

fn is_byte(token: &str) -> bool {
    token.len() == 6
        && token
            .strip_prefix("<0x")
            .and_then(|t| t.strip_suffix('>'))
            .is_some_and(|h| u8::from_str_radix(h, 16).is_ok())
}

//! Encoding text in which some special-token strings must stay plain text.
//!
//! A variant of the tokenizer has every special token under another name, one that cannot occur in the text: its id between two
//! guard characters. Special tokens that are meant as such are replaced by these names; the variant then does everything as the
//! original would (merges across plain text, stripping spaces next to a token, a leading space), so the text is not cut into
//! pieces that would tokenize differently.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, AddedVocabulary};

use super::{Encoded, HfTokenizer, Tokenizer};
use crate::{Error, Result};

/// Unicode noncharacters; one that the text does not contain serves as guard.
pub(crate) const GUARDS: [char; 8] =
    ['\u{FDD0}', '\u{FDD1}', '\u{FDD2}', '\u{FDD3}', '\u{FDD4}', '\u{FDD5}', '\u{FDD6}', '\u{FDD7}'];

/// A guard character that `text` does not contain.
pub(super) fn free_guard(text: &str) -> Result<char> {
    GUARDS.into_iter().find(|&g| !text.contains(g)).ok_or_else(|| {
        Error::data("the text holds every one of the code points U+FDD0 to U+FDD7")
            .fix("remove them; Unicode reserves them as never being characters")
    })
}

/// The variant that knows special tokens only under their guarded names.
#[derive(Clone)]
pub(super) struct PlainTokenizer {
    inner: HfTokenizer,
    guard: char,
    scanner: Scanner,
    /// Maps ids of the variant's added tokens to the original's.
    original: HashMap<u32, u32>,
    special_ids: HashSet<u32>,
}

impl PlainTokenizer {
    pub fn new(tokenizer: &Tokenizer, guard: char) -> Result<Self> {
        let mut added: Vec<(u32, AddedToken)> =
            tokenizer.inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let mut inner = tokenizer.inner.clone();
        inner.with_added_vocabulary(AddedVocabulary::new());
        let twins: Vec<AddedToken> = added
            .iter()
            .map(|(id, token)| match token.special {
                true => AddedToken {
                    content: guarded(*id, guard),
                    single_word: false,
                    normalized: false,
                    ..token.clone()
                },
                false => token.clone(),
            })
            .collect();
        let fail = |what: String| Error::model(what).fix("re-save the tokenizer with transformers");
        inner.add_tokens(twins.clone()).map_err(|e| fail(format!("cannot rename special tokens: {e}")))?;
        let mut original = HashMap::new();
        for ((id, token), twin) in added.iter().zip(&twins) {
            let new = inner.token_to_id(&twin.content).unwrap_or(*id);
            if token.special && tokenizers::Model::id_to_token(inner.get_model(), new).is_some() {
                return Err(fail(format!("the vocabulary has holes: id {new} is taken twice")));
            }
            original.insert(new, *id);
        }
        // The one special token that plain text may produce: the unknown token.
        let unknown = match inner.get_model() {
            ModelWrapper::BPE(model) => model.unk_token.as_deref(),
            ModelWrapper::WordPiece(model) => Some(model.unk_token.as_str()),
            ModelWrapper::WordLevel(model) => Some(model.unk_token.as_str()),
            ModelWrapper::Unigram(_) => tokenizer.config.named("unk_token"),
        };
        let unknown = unknown.and_then(|name| tokenizer.token_id(name));
        let special_ids = tokenizer.special_ids.iter().copied().filter(|&id| Some(id) != unknown).collect();
        Ok(PlainTokenizer { inner, guard, scanner: tokenizer.scanner.clone(), original, special_ids })
    }

    /// Encodes `text`; special tokens are parsed only outside the `plain` spans.
    pub fn encode(&self, text: &str, plain: &[Range<usize>]) -> Result<Encoded> {
        let mut renamed = String::with_capacity(text.len());
        let mut cuts = vec![(0, 0)]; // pairs of positions in `renamed` and `text`
        let mut at = 0;
        for (range, id) in self.scanner.find(text, plain) {
            renamed.push_str(&text[at..range.start]);
            cuts.push((renamed.len(), range.start));
            renamed.push_str(&guarded(id, self.guard));
            cuts.push((renamed.len(), range.end));
            at = range.end;
        }
        renamed.push_str(&text[at..]);
        cuts.push((renamed.len(), text.len()));

        let encoding = self.inner.encode(renamed.as_str(), false).map_err(super::failed)?;
        if let Some(&id) = encoding
            .get_ids()
            .iter()
            .find(|&&i| self.special_ids.contains(&self.back(i)) && !self.original.contains_key(&i))
        {
            let name = self.inner.id_to_token(id).unwrap_or_default();
            return Err(Error::data(format!(
                "this tokenizer turns the plain text {name:?} into its special token"
            ))
            .fix("remove it from the text"));
        }
        let place = |&(start, end): &(usize, usize)| {
            let start = unmap(&cuts, start);
            (start, unmap(&cuts, end).max(start))
        };
        Ok(Encoded {
            ids: encoding.get_ids().iter().map(|&id| self.back(id)).collect(),
            offsets: encoding.get_offsets().iter().map(place).collect(),
        })
    }

    fn back(&self, id: u32) -> u32 {
        self.original.get(&id).copied().unwrap_or(id)
    }
}

fn guarded(id: u32, guard: char) -> String {
    format!("{guard}{id}{guard}")
}

/// Maps a position in the renamed text to the original text.
fn unmap(cuts: &[(usize, usize)], at: usize) -> usize {
    let i = cuts.partition_point(|c| c.0 <= at).max(1) - 1;
    let limit = cuts.get(i + 1).map_or(usize::MAX, |c| c.1);
    (cuts[i].1 + (at - cuts[i].0)).min(limit)
}

/// Finds added tokens by the tokenizer's rule: leftmost, then longest.
#[derive(Clone)]
pub(super) struct Scanner {
    /// Tokens with ids, longest name first.
    tokens: Vec<(AddedToken, u32)>,
    starts: HashSet<u8>,
}

impl Scanner {
    pub fn new(tokenizer: &HfTokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<_> = added.into_iter().map(|(id, t)| (t, id)).collect();
        let shorter = |a: &str, b: &str| b.len().cmp(&a.len()).then_with(|| a.cmp(b));
        tokens.sort_by(|(a, _), (b, _)| shorter(&a.content, &b.content));
        let starts = tokens.iter().filter_map(|t| t.0.content.bytes().next()).collect();
        Scanner { tokens, starts }
    }

    /// Special tokens in `text` that touch no `plain` span; an empty span is a barrier that no token may cross.
    pub fn find(&self, text: &str, plain: &[Range<usize>]) -> Vec<(Range<usize>, u32)> {
        let all = self.added(text, plain).into_iter();
        all.filter(|(_, token, _)| token.special).map(|(range, _, id)| (range, id)).collect()
    }

    /// The rest of `text` after removing added tokens and the spaces they swallow.
    pub fn rest(&self, text: &str, plain: &[Range<usize>]) -> Vec<Range<usize>> {
        let (mut rest, mut at, mut swallowed) = (Vec::new(), 0, false);
        for (range, token, _) in self.added(text, plain) {
            rest.push(trimmed(text, at..range.start, swallowed, token.lstrip));
            (at, swallowed) = (range.end, token.rstrip);
        }
        rest.push(trimmed(text, at..text.len(), swallowed, false));
        rest
    }

    /// All added tokens in `text`, in order; special ones only if they touch no `plain` span.
    fn added(&self, text: &str, plain: &[Range<usize>]) -> Vec<(Range<usize>, &AddedToken, u32)> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let rest = &text.as_bytes()[at..];
            let fits = |(token, _): &&(AddedToken, u32)| {
                let end = at + token.content.len();
                rest.starts_with(token.content.as_bytes()) && !(token.special && touches(plain, at, end))
            };
            let hit = self.starts.contains(&rest[0]).then(|| self.tokens.iter().find(fits)).flatten();
            if let Some((token, id)) = hit {
                found.push((at..at + token.content.len(), token, *id));
            }
            at += hit.map_or(1, |(token, _)| token.content.len());
        }
        found
    }
}

/// Trims spaces from the start or end of a range.
fn trimmed(text: &str, range: Range<usize>, start: bool, end: bool) -> Range<usize> {
    let part = &text[range.clone()];
    let left = if start { part.len() - part.trim_start().len() } else { 0 };
    let right = if end { part[left..].len() - part[left..].trim_end().len() } else { 0 };
    range.start + left..range.end - right
}

fn touches(plain: &[Range<usize>], start: usize, end: usize) -> bool {
    plain.iter().any(|p| p.start < end && start < p.end)
}

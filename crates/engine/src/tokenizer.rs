//! Text to token ids and back, over a Hugging Face `tokenizer.json`.
//!
//! Three encoders, by the origin of the text: [`Tokenizer::encode_text`] for text of a user or an environment (markers are plain
//! characters), [`Tokenizer::encode_markup`] for a rendered chat template or raw prompt (markers are parsed),
//! [`Tokenizer::encode_prompt`] for what `transformers` does with a bare string.

mod config;
mod plain;
mod renamed;
mod stream;
mod train;

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Model as _, PostProcessor, PostProcessorWrapper};

use crate::files::{undisturbed, write_aside};
use crate::{Error, Result};
use config::TokenizerConfig;
pub(crate) use config::{content, eos_ids, read_json, read_text};
pub(crate) use plain::GUARDS;
use plain::{PlainTokenizer, Scanner};
pub use stream::StreamDecoder;
pub use train::{train_bpe, train_chars};

type HfTokenizer = tokenizers::Tokenizer;

/// A tokenizer with the special tokens that its model directory configures.
#[derive(Clone)]
pub struct Tokenizer {
    /// Parses markers. Its post-processor is moved to `post`, so offsets are untrimmed and no tokens are added.
    inner: HfTokenizer,
    post: Option<PostProcessorWrapper>,
    /// Finds added tokens in text.
    scanner: Scanner,
    /// The variant that treats markers as plain characters, built on first use.
    plain: OnceLock<Result<PlainTokenizer>>,
    config: TokenizerConfig,
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    size: usize,
    special_ids: HashSet<u32>,
    special_names: Vec<String>,
    /// The decoder joins runs of `<0xHH>` byte tokens, so a run must not be split.
    byte_fallback: bool,
    /// The model silently drops unknown characters; encoding must refuse them.
    drops_unknown: bool,
}

/// Token ids, and the byte range of the text of each.
pub(crate) struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and special tokens from the configuration files next to it.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let dir = &*crate::checkpoint::tokenizer_dir(dir);
        let path = dir.join("tokenizer.json");
        let text = std::fs::read_to_string(&path).map_err(|e| missing(dir, &path, &e))?;
        let config = TokenizerConfig::read(dir)?;
        let parse = |text: &str| -> Result<HfTokenizer> {
            text.parse().map_err(|e: tokenizers::Error| {
                Error::model(format!("is not a usable tokenizer: {e}"))
                    .at(path.display())
                    .fix("the file is cut short, damaged or of an unknown kind: copy or download it again")
            })
        };
        let mut inner = parse(&text)?;
        if let Some(renamed) = renamed::vocabulary(&inner, &text, &config) {
            inner = parse(&renamed)?;
        }
        Self::assemble(inner, config).map_err(|e| e.at(dir.display()))
    }

    fn assemble(mut inner: HfTokenizer, config: TokenizerConfig) -> Result<Self> {
        add_missing(&mut inner, &config)?;
        let _ = inner.with_truncation(None);
        inner.with_padding(None);
        let post = inner.get_post_processor().cloned();
        inner.with_post_processor(None::<PostProcessorWrapper>);
        inner.set_encode_special_tokens(false);

        let id = |name: &str| config.named(name).and_then(|t| inner.token_to_id(t));
        let bos = id("bos_token").or(config.bos_id);
        let pad = id("pad_token").or(config.pad_id);
        let mut eos: Vec<u32> = id("eos_token").into_iter().collect();
        for &other in &config.eos_ids {
            if !eos.contains(&other) {
                eos.push(other);
            }
        }
        let (mut special_ids, mut special_names) = (HashSet::new(), Vec::new());
        for (id, token) in inner.get_added_tokens_decoder().into_iter().filter(|(_, t)| t.special) {
            special_ids.insert(id);
            special_names.push(token.content);
        }
        special_names.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        let size = inner.get_vocab(true).into_values().max().map_or(0, |m| m as usize + 1);
        let decoder = serde_json::to_string(&inner.get_decoder()).unwrap_or_default();
        let drops_unknown = match inner.get_model() {
            ModelWrapper::BPE(bpe) => {
                bpe.unk_token.is_none()
                    && !bpe.byte_fallback
                    && inner.get_pre_tokenizer().is_none()
                    && inner.get_normalizer().is_none()
            }
            _ => false,
        };
        let byte_fallback = decoder.contains("\"ByteFallback\"");
        let (scanner, plain) = (Scanner::new(&inner), OnceLock::new());
        Ok(Tokenizer {
            inner,
            post,
            scanner,
            plain,
            config,
            bos,
            eos,
            pad,
            size,
            special_ids,
            special_names,
            byte_fallback,
            drops_unknown,
        })
    }

    /// Encodes plain text: special-token strings in it are ordinary characters.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        #[allow(clippy::single_range_in_vec_init)] // one span over the whole text
        Ok(self.encode_spans(text, &[0..text.len()])?.ids)
    }

    /// Encodes text whose special tokens are meant as such, e.g. a rendered chat template; adds nothing.
    pub fn encode_markup(&self, text: &str) -> Result<Vec<u32>> {
        if self.drops_unknown {
            return Ok(self.encode_spans(text, &[])?.ids);
        }
        Ok(self.inner.encode_fast(text, false).map_err(failed)?.get_ids().to_vec())
    }

    /// Encodes as `transformers` encodes a bare string: markers parsed, BOS and EOS added as configured.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        if self.drops_unknown {
            self.encode_spans(text, &[])?;
        }
        let encoding = self.inner.encode_fast(text, false).map_err(failed)?;
        let encoding = match &self.post {
            Some(post) => post.process(encoding, None, true).map_err(failed)?,
            None => encoding,
        };
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes markup; the `plain` byte spans must not be parsed as, or as part of, a marker. With offsets.
    pub(crate) fn encode_spans(&self, text: &str, plain: &[Range<usize>]) -> Result<Encoded> {
        let encoded = if plain.is_empty() {
            let encoding = self.inner.encode(text, false).map_err(failed)?;
            Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() }
        } else if text.contains(plain::GUARDS[0]) {
            // The text contains the guard character: build a variant with another.
            PlainTokenizer::new(self, plain::free_guard(text)?)?.encode(text, plain)?
        } else {
            let twin = self.plain.get_or_init(|| PlainTokenizer::new(self, plain::GUARDS[0]));
            twin.as_ref().map_err(Clone::clone)?.encode(text, plain)?
        };
        if self.drops_unknown {
            self.refuse_strangers(text, plain)?;
        }
        Ok(encoded)
    }

    /// Refuses text with a character that produces no token. Offsets cannot reveal it: they are sums of token lengths, which skip
    /// what was dropped.
    fn refuse_strangers(&self, text: &str, plain: &[Range<usize>]) -> Result<()> {
        let ModelWrapper::BPE(bpe) = self.inner.get_model() else { return Ok(()) };
        for range in self.scanner.rest(text, plain) {
            let part = &text[range.clone()];
            if bpe.ignore_merges && bpe.token_to_id(part).is_some() {
                continue;
            }
            for (i, c) in part.char_indices() {
                let (first, last) = (i == 0, i + c.len_utf8() == part.len());
                let prefix = bpe.continuing_subword_prefix.as_deref().filter(|_| !first).unwrap_or_default();
                let suffix = bpe.end_of_word_suffix.as_deref().filter(|_| last).unwrap_or_default();
                let plain = prefix.is_empty() && suffix.is_empty();
                let known = match plain {
                    true => bpe.token_to_id(c.encode_utf8(&mut [0; 4])),
                    false => bpe.token_to_id(&format!("{prefix}{c}{suffix}")),
                };
                if known.is_none() {
                    return Err(Error::data(format!("the character {c:?} is not in the vocabulary"))
                        .at(format!("byte {} of the text", range.start + i))
                        .fix(
                            "remove it, or train the tokenizer on text that has it or with a \"<unk>\" special \
                             token",
                        ));
                }
            }
        }
        Ok(())
    }

    /// Special tokens that parsing finds in `text` outside the `plain` spans, in order.
    pub(crate) fn markers(&self, text: &str, plain: &[Range<usize>]) -> Vec<(Range<usize>, u32)> {
        self.scanner.find(text, plain)
    }

    /// The first marker in `text`: a special token, or an added one named `<...>` or `[...]`. Other added tokens may be mere runs
    /// of spaces or newlines.
    pub(crate) fn first_marker(&self, text: &str) -> Option<u32> {
        let written = |name: &str| {
            let ends = (name.chars().next(), name.chars().next_back());
            matches!(ends, (Some('<'), Some('>')) | (Some('['), Some(']')))
        };
        let added = self.inner.get_added_tokens_decoder();
        let markers = added.iter().filter(|(_, t)| t.special || written(&t.content));
        let found = markers.filter_map(|(&id, t)| Some((text.find(&t.content)?, t.content.len(), id)));
        found.min_by_key(|&(at, len, id)| (at, usize::MAX - len, id)).map(|(_, _, id)| id)
    }

    /// Decodes `ids`; `skip_special` omits special tokens. Ids outside the vocabulary decode to nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|e| Error::model(format!("cannot decode token ids: {e}")))
    }

    /// A streaming decoder: takes one id at a time and returns text as soon as it is final.
    pub fn stream(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, skip_special)
    }

    /// Largest id + 1, including added tokens.
    pub fn vocab_size(&self) -> usize {
        self.size
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The name of a token in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Names of all special tokens, longest first, so that scans prefer the longest match.
    pub fn special_tokens(&self) -> &[String] {
        &self.special_names
    }

    /// BOS, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// EOS tokens: the tokenizer's own first, then those of the generation settings.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Writes the files `transformers.AutoTokenizer` loads; existing ones are replaced.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let mut whole = self.inner.clone();
        whole.with_post_processor(self.post.clone());
        let json =
            whole.to_string(true).map_err(|e| Error::model(format!("cannot write tokenizer.json: {e}")))?;
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::create_dir_all(dir).and_then(|()| write_aside(&path, text.as_bytes())).map_err(|e| {
                Error::resource(format!("cannot write: {e}"))
                    .at(path.display())
                    .fix("check that the folder exists, may be written and has space left")
            })
        };
        let _held = undisturbed();
        for (name, text) in self.config.files() {
            write(name, &text)?;
        }
        write("tokenizer.json", &json) // last: a folder that has it is a tokenizer
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.size)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// Adds special tokens that are configured but missing from `tokenizer.json`, as `transformers` does.
fn add_missing(inner: &mut HfTokenizer, config: &TokenizerConfig) -> Result<()> {
    let known: HashSet<String> =
        inner.get_added_tokens_decoder().values().map(|t| t.content.clone()).collect();
    let fresh: Vec<AddedToken> = config.specials().filter(|t| !known.contains(&t.content)).collect();
    if !fresh.is_empty() {
        inner.add_tokens(fresh).map_err(|e| Error::model(format!("cannot add special tokens: {e}")))?;
    }
    Ok(())
}

fn failed(e: tokenizers::Error) -> Error {
    Error::data(format!("cannot tokenize: {e}"))
}

fn missing(dir: &Path, path: &Path, e: &std::io::Error) -> Error {
    let error = match e.kind() {
        std::io::ErrorKind::NotFound if !dir.is_dir() => {
            Error::model("no such model directory").at(dir.display())
        }
        std::io::ErrorKind::NotFound => {
            Error::model("no tokenizer.json in the model directory").at(dir.display())
        }
        std::io::ErrorKind::InvalidData => Error::model("is not UTF-8 text").at(path.display()),
        _ => Error::model(format!("cannot read: {e}")).at(path.display()),
    };
    let sentencepiece = dir.join("tokenizer.model").exists();
    error.fix(if sentencepiece {
        "there is only a tokenizer.model: load it once with transformers' AutoTokenizer and save_pretrained() it"
    } else {
        "point to a Hugging Face model directory that has a tokenizer.json"
    })
}

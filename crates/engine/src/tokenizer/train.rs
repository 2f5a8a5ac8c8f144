//! Trains tokenizers, deterministically.

use std::collections::{BTreeSet, HashMap};

use serde_json::json;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::config::TokenizerConfig;
use super::{HfTokenizer, Tokenizer};
use crate::{Error, Result};

/// Pre-tokenization: words with the space before them, single digits, runs of symbols, newlines, spaces.
const WORDS: &str = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+";

const CHATML: &str = "{%- for message in messages %}\
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}\
{{- '<|im_start|>assistant\\n' }}\
{%- endif %}";

/// Roles of special tokens by name; the first match is used.
const ROLES: [(&str, &[&str]); 4] = [
    ("bos_token", &["<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>"]),
    ("eos_token", &["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]),
    ("pad_token", &["<|pad|>", "<pad>", "<|endoftext|>", "<|end_of_text|>"]),
    ("unk_token", &["<unk>", "<|unk|>"]),
];

/// Trains byte-level BPE with at most `vocab` tokens: `specials` first, then the 256 bytes, then merges.
pub fn train_bpe(
    texts: impl Iterator<Item = String> + Send,
    vocab: usize,
    specials: &[String],
) -> Result<Tokenizer> {
    check(specials)?;
    let least = 256 + specials.len();
    if vocab < least {
        return Err(Error::usage(format!("a vocabulary of {vocab} is too small"))
            .fix(format!("ask for at least {least}: the 256 bytes and {} special tokens", specials.len())));
    }
    let mut inner = HfTokenizer::new(BPE::default());
    let split = Split::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Isolated, false);
    let steps: Vec<PreTokenizerWrapper> =
        vec![split.map_err(broken)?.into(), ByteLevel::new(false, false, false).into()];
    inner.with_pre_tokenizer(Some(Sequence::new(steps)));
    inner.with_decoder(Some(ByteLevel::new(false, false, false)));
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special(specials))
        .build();
    inner.train(&mut TrainerWrapper::from(trainer), texts).map_err(broken)?;
    Tokenizer::assemble(inner, settings(specials))
}

/// Makes every distinct character of `texts` a token, after `specials`.
///
/// A character it has not seen becomes `<unk>` if that is among the specials and is an error otherwise.
pub fn train_chars(texts: impl Iterator<Item = String>, specials: &[String]) -> Result<Tokenizer> {
    check(specials)?;
    let mut seen = BTreeSet::new();
    for text in texts {
        seen.extend(text.chars());
    }
    if is_chat(specials) {
        seen.extend("user\nassistant\n".chars()); // what the template writes in every conversation
    }
    let mut vocab: HashMap<String, u32> = HashMap::new();
    for name in specials.iter().cloned().chain(seen.iter().map(char::to_string)) {
        let next = vocab.len() as u32;
        vocab.entry(name).or_insert(next);
    }
    let mut model = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), vec![]);
    if let Some(unknown) = role("unk_token", specials) {
        model = model.unk_token(unknown.to_owned());
    }
    let mut inner = HfTokenizer::new(model.build().map_err(broken)?);
    inner.with_decoder(Some(Fuse::new()));
    inner.add_special_tokens(special(specials)).map_err(broken)?;
    Tokenizer::assemble(inner, settings(specials))
}

/// The settings file of a newly trained tokenizer.
fn settings(specials: &[String]) -> TokenizerConfig {
    let mut value =
        json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
    for (name, _) in ROLES {
        if let Some(token) = role(name, specials) {
            value[name] = json!(token);
        }
    }
    if is_chat(specials) {
        value["chat_template"] = json!(CHATML);
    }
    TokenizerConfig::fresh(value)
}

/// Whether the tokenizer gets the ChatML template.
fn is_chat(specials: &[String]) -> bool {
    ["<|im_start|>", "<|im_end|>"].iter().all(|name| specials.iter().any(|s| s == name))
}

fn role<'a>(name: &str, specials: &'a [String]) -> Option<&'a str> {
    let (_, wanted) = ROLES.iter().find(|(role, _)| *role == name)?;
    wanted.iter().find_map(|w| specials.iter().find(|s| s == w)).map(String::as_str)
}

fn special(names: &[String]) -> Vec<AddedToken> {
    names.iter().map(|n| AddedToken::from(n, true)).collect()
}

fn check(specials: &[String]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in specials {
        if name.is_empty() {
            return Err(
                Error::usage("a special token has an empty name").fix("give every special token a name")
            );
        }
        if !seen.insert(name) {
            return Err(
                Error::usage(format!("the special token {name:?} is listed twice")).fix("list it once")
            );
        }
    }
    Ok(())
}

fn broken(e: tokenizers::Error) -> Error {
    Error::data(format!("cannot train a tokenizer: {e}"))
}

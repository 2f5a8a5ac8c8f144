//! `ferrl tokenizer`: trains a tokenizer, encodes and decodes text.

use crate::data;
use crate::options::{at_least_one, nearest_path};
use crate::output::{print, print_generated};
use crate::progress::ProgressLine;
use clap::{Subcommand, ValueEnum};
use ferrl_engine::tokenizer::{Tokenizer, train_bpe, train_chars};
use ferrl_engine::{Error, Result, counted};
use ferrl_kernels::lock;
use serde_json::Value;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Train a tokenizer, or encode and decode text with one
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: TokenizerCommand,
}

#[derive(Subcommand)]
enum TokenizerCommand {
    Train(TrainArgs),
    /// Print the token ids of a text
    Encode(EncodeArgs),
    /// Print the text of token ids
    Decode(DecodeArgs),
}

/// Train a tokenizer on text; the same text gives the same bytes
///
/// With the special tokens <|im_start|> and <|im_end|>, which it has by default, the tokenizer also gets a chat
/// template (ChatML).
#[derive(clap::Args)]
struct TrainArgs {
    /// Text: JSON lines (.jsonl, .json) of strings or of rows with `text`, `messages` or `prompt` and
    /// `completion`; any other file is plain text; may be given several times
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    input: Vec<PathBuf>,
    /// Maximum vocabulary size, special tokens included
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    vocab: usize,
    /// Kind of tokenizer
    #[arg(long, value_enum, default_value = "bpe")]
    kind: TokenizerKind,
    /// Special tokens, in the order of their ids
    #[arg(long, value_name = "TOKEN", num_args = 1.., default_values = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])]
    special: Vec<String>,
    /// No special tokens at all
    #[arg(long, conflicts_with = "special")]
    no_special: bool,
    /// Directory to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Overwrite an existing tokenizer
    #[arg(long)]
    overwrite: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TokenizerKind {
    /// byte-level BPE: encodes any text
    Bpe,
    /// one token per character seen: for tiny tasks; --vocab is not used
    Char,
}

#[derive(clap::Args)]
struct EncodeArgs {
    /// Directory with a tokenizer.json
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Encode the names of special tokens as plain text, and add no special tokens
    #[arg(long)]
    plain: bool,
    /// Print one id and its token per line
    #[arg(long)]
    tokens: bool,
    /// The text; - is standard input
    text: String,
}

#[derive(clap::Args)]
struct DecodeArgs {
    /// Directory with a tokenizer.json
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Leave special tokens out
    #[arg(long)]
    skip_special: bool,
    /// Token ids, separated by spaces or commas
    #[arg(required = true, num_args = 1..)]
    ids: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        TokenizerCommand::Train(args) => train(args),
        TokenizerCommand::Encode(args) => encode(args),
        TokenizerCommand::Decode(args) => decode(args),
    }
}

fn train(args: &TrainArgs) -> Result<()> {
    let specials: &[String] = if args.no_special { &[] } else { &args.special };
    for path in &args.input {
        data::open(path)?; // reports a wrong name before any work
    }
    if args.out.is_file() {
        return Err(Error::usage("is a file, expected a directory to write").at(args.out.display()));
    }
    if args.out.join("tokenizer.json").exists() && !args.overwrite {
        return Err(Error::usage("there is a tokenizer already")
            .at(args.out.join("tokenizer.json").display())
            .fix("another --out, or --overwrite to replace it"));
    }
    let sizes = args.input.iter().map(|p| std::fs::metadata(p).map_or(0, |m| m.len()));
    let progress = ProgressLine::new("reading text", sizes.sum::<u64>() / 1024, "KiB");
    // The trainer takes an iterator of texts: an error ends it and is stored here.
    let failed: Arc<Mutex<Option<Error>>> = Arc::default();
    let slot = failed.clone();
    let (mut found, mut bytes) = (false, 0);
    let texts = args
        .input
        .iter()
        .flat_map(|path| texts(path))
        .map_while(move |text| text.map_err(|e| *lock(&slot) = Some(e)).ok())
        .inspect(|text| {
            found |= !text.is_empty();
            bytes += text.len() as u64;
            progress.add(bytes / 1024);
            bytes %= 1024;
        });
    let tokenizer = match args.kind {
        TokenizerKind::Bpe => train_bpe(texts, args.vocab, specials),
        TokenizerKind::Char => train_chars(texts, specials),
    };
    if let Some(e) = lock(&failed).take() {
        return Err(e);
    }
    let tokenizer = tokenizer?;
    if !found {
        let names: Vec<String> = args.input.iter().map(|p| data::name(p)).collect();
        return Err(Error::data("holds no text").at(names.join(", ")).fix("give files with text in them"));
    }
    tokenizer.save(&args.out)?;
    drop(progress);
    let size = tokenizer.vocab_size();
    let note = match args.kind {
        TokenizerKind::Bpe if size < args.vocab => {
            format!(" (fewer than --vocab {}: the text yields no more)", args.vocab)
        }
        _ => String::new(),
    };
    let special = tokenizer.special_tokens().len();
    print(&format!("{}: {}{note}, {special} of them special\n", args.out.display(), counted(size, "token")))
}

type TextIter = Box<dyn Iterator<Item = Result<String>> + Send>;

fn texts(path: &Path) -> TextIter {
    let json = path.extension().is_some_and(|e| ["jsonl", "ndjson", "json"].iter().any(|j| e == *j));
    let found = if json || path.as_os_str() == "-" { json_texts(path) } else { plain_texts(path) };
    found.unwrap_or_else(|e| Box::new(std::iter::once(Err(e))))
}

/// Plain text in chunks that end at a line break.
fn plain_texts(path: &Path) -> Result<TextIter> {
    const PIECE: usize = 1 << 16;
    let (mut reader, place) = (data::open(path)?, data::name(path));
    Ok(Box::new(std::iter::from_fn(move || {
        let mut piece = String::new();
        while piece.len() < PIECE {
            match reader.read_line(&mut piece) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) => {
                    let error = Error::data(format!("cannot read: {e}")).at(&place);
                    return Some(Err(error.fix("expected plain text in UTF-8")));
                }
            }
        }
        (!piece.is_empty()).then_some(Ok(piece))
    })))
}

fn json_texts(path: &Path) -> Result<TextIter> {
    let rows =
        data::lines(path)?.flat_map(|line| match line.and_then(|(place, line)| row_texts(&place, &line)) {
            Ok(texts) => texts.into_iter().map(Ok).collect(),
            Err(e) => vec![Err(e)],
        });
    Ok(Box::new(rows))
}

fn row_texts(place: &str, line: &str) -> Result<Vec<String>> {
    let fields = match data::parse(place, line)? {
        Value::String(text) => return Ok(vec![text]),
        Value::Object(fields) => fields,
        other => {
            return Err(Error::data(format!("holds {}, expected a string or an object", data::kind(&other)))
                .at(place)
                .fix("write each row as a string or as {\"text\": ...}"));
        }
    };
    let row = data::PlacedRow { place: place.into(), fields };
    let contents = |messages: &[Value]| -> Vec<String> {
        messages.iter().filter_map(|m| m.get("content")?.as_str().map(str::to_owned)).collect()
    };
    match row.choose(&["text", "messages", "prompt"])? {
        "text" => Ok(vec![row.text("text")?.to_owned()]),
        "messages" => Ok(contents(row.messages("messages")?)),
        _ => {
            let parts = ["prompt", "completion"].iter().filter(|n| row.get(n).is_some());
            parts.map(|n| row.text(n).map(str::to_owned)).collect()
        }
    }
}

fn open(dir: &Path) -> Result<Tokenizer> {
    Tokenizer::from_dir(dir).map_err(|e| match nearest_path(dir) {
        Some(near) if !dir.exists() => e.fix(format!("the nearest name there is {near}")),
        _ => e,
    })
}

fn encode(args: &EncodeArgs) -> Result<()> {
    let tokenizer = open(&args.model)?;
    let mut text = args.text.clone();
    if text == "-" {
        text.clear();
        let read = std::io::stdin().read_to_string(&mut text);
        read.map_err(|e| Error::data(format!("cannot read: {e}")).at("standard input"))?;
    }
    let ids = if args.plain { tokenizer.encode_text(&text)? } else { tokenizer.encode_prompt(&text)? };
    if !args.tokens {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        return print(&format!("{}\n", ids.join(" ")));
    }
    let line = |id: &u32| format!("{id}\t{}\n", tokenizer.token(*id).unwrap_or_default());
    print_generated(&ids.iter().map(line).collect::<String>())
}

fn decode(args: &DecodeArgs) -> Result<()> {
    let tokenizer = open(&args.model)?;
    let words = args.ids.iter().flat_map(|w| w.split([' ', ',', '[', ']', '\n']));
    let mut ids = Vec::new();
    for word in words.filter(|w| !w.is_empty()) {
        let id: u32 = word.parse().map_err(|_| {
            Error::usage(format!("{word:?} is not a token id")).fix("give whole numbers from 0 on")
        })?;
        if id as usize >= tokenizer.vocab_size() {
            let size = tokenizer.vocab_size();
            return Err(Error::usage(format!("token id {id} is not below the tokenizer's size of {size}")));
        }
        ids.push(id);
    }
    print_generated(&format!("{}\n", tokenizer.decode(&ids, args.skip_special)?))
}

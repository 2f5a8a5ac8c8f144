//! Converts rows to token ids with the tokenizer and chat template of a model, which are read when first needed.

use crate::data::PlacedRow;
use ferrl_engine::chat::{ChatTemplate, Kwargs};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::Stops;
use ferrl_engine::model::config::Position;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::cell::OnceCell;
use std::path::PathBuf;

/// Tokenizer, chat template and stop tokens of a model.
pub struct ModelText {
    dir: PathBuf,
    vocab: usize,
    longest: usize,
    learned: bool,
    tokenizer: OnceCell<Tokenizer>,
    template: OnceCell<ChatTemplate>,
}

impl ModelText {
    /// Of a model directory; nothing is read yet.
    pub fn new(dir: &ModelDir) -> Self {
        ModelText {
            dir: dir.path.clone(),
            vocab: dir.config.vocab,
            longest: dir.config.max_positions,
            learned: dir.config.position == Position::Learned,
            tokenizer: OnceCell::new(),
            template: OnceCell::new(),
        }
    }

    /// The tokenizer, if it fits the model.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(t) = self.tokenizer.get() {
            return Ok(t);
        }
        let tokenizer = Tokenizer::from_dir(&self.dir)?;
        let (has, takes) = (tokenizer.vocab_size(), self.vocab);
        if has > takes {
            return Err(Error::model(format!(
                "the tokenizer has {has} tokens, the model's vocabulary (vocab_size) only {takes}"
            ))
            .at(self.dir.display())
            .fix("use the tokenizer the model was made with, or make a model for it: ferrl init --tokenizer DIR"));
        }
        Ok(self.tokenizer.get_or_init(|| tokenizer))
    }

    pub fn template(&self) -> Result<&ChatTemplate> {
        if let Some(t) = self.template.get() {
            return Ok(t);
        }
        let template = ChatTemplate::from_dir(&self.dir)?;
        Ok(self.template.get_or_init(|| template))
    }

    /// Ids of a conversation; with `reply` they end with the generation prompt.
    pub fn chat(&self, messages: &[Value], row: Option<&PlacedRow>, reply: bool) -> Result<Vec<u32>> {
        let tools = row.and_then(|r| r.get("tools"));
        let none = Kwargs::new();
        let kwargs = row.and_then(|r| r.get("chat_template_kwargs")?.as_object()).unwrap_or(&none);
        self.template()?.encode_chat(self.tokenizer()?, messages, tools, reply, kwargs)
    }

    /// Ids of a row to score: `ids`, `text`, `prompt` (text or messages) and `completion`, or `messages`. For a reward model the ids end
    /// with the stop token, at which it was trained to score.
    pub fn scored(&self, row: &PlacedRow, reward_model: bool) -> Result<Vec<u32>> {
        let at = |e: Error| e.at(&row.place);
        let ids = match row.choose(&["ids", "text", "prompt", "messages"])? {
            "ids" => row.ids("ids", self.vocab)?,
            "text" => self.prompt(row.text("text")?).map_err(at)?,
            "messages" => {
                let mut ids = self.chat(row.messages("messages")?, Some(row), false).map_err(at)?;
                let stops = self.stops()?;
                if let Some(end) =
                    ids.iter().rposition(|id| stops.ids().contains(id)).filter(|_| reward_model)
                {
                    ids.truncate(end + 1);
                }
                ids
            }
            _ => {
                let completion = row.text("completion")?;
                let mut ids = match row.get("prompt") {
                    Some(Value::Array(_)) => self.chat(row.messages("prompt")?, Some(row), true),
                    _ => self.prompt(row.text("prompt")?),
                }
                .map_err(at)?;
                ids.extend(self.tokenizer().and_then(|t| t.encode_text(completion)).map_err(at)?);
                ids.extend(self.stops()?.ids().first().filter(|_| reward_model));
                ids
            }
        };
        self.fits(&row.place, &ids, 0)?;
        Ok(ids)
    }

    /// Ids of a prompt row: `ids`, `prompt`, or `messages`.
    pub fn prompted(&self, row: &PlacedRow) -> Result<Vec<u32>> {
        let at = |e: Error| e.at(&row.place);
        Ok(match row.choose(&["ids", "prompt", "messages"])? {
            "ids" => row.ids("ids", self.vocab)?,
            "prompt" if row.get("prompt").is_some_and(Value::is_array) => {
                self.chat(row.messages("prompt")?, Some(row), true).map_err(at)?
            }
            "prompt" => self.prompt(row.text("prompt")?).map_err(at)?,
            _ => self.chat(row.messages("messages")?, Some(row), true).map_err(at)?,
        })
    }

    /// Default maximum number of new tokens: `usual`, limited by the context.
    pub fn room(&self, prompt: usize, usual: usize) -> usize {
        usual.min((self.longest + 1).saturating_sub(prompt)).max(1)
    }

    /// Whether the model has a tokenizer; token ids can be used without one.
    pub fn has_tokenizer(&self) -> bool {
        self.dir.join("tokenizer.json").is_file()
    }

    pub fn stops(&self) -> Result<Stops> {
        match self.has_tokenizer() {
            true => Ok(Stops::of(self.tokenizer()?, self.template().ok())),
            false => Stops::of_ids(&self.dir),
        }
    }

    /// Ids of plain text, the same as `transformers`.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer()?.encode_prompt(text)
    }

    /// Checks that the sequence and `new` more tokens fit the model's context.
    pub fn fits(&self, place: &str, ids: &[u32], new: usize) -> Result<()> {
        if ids.is_empty() {
            return Err(Error::data("has no tokens")
                .at(place)
                .fix("leave the row out, or give it some text"));
        }
        // The last new token is sampled, but is never an input.
        let (total, longest) = (ids.len() + new.saturating_sub(1), self.longest);
        if total <= longest {
            return Ok(());
        }
        let sum = if new == 0 { String::new() } else { format!(" ({} and {new} new ones)", ids.len()) };
        if self.learned {
            return Err(Error::data(format!("has {total} tokens{sum}, the model takes at most {longest}"))
                .at(place)
                .fix(if new == 0 { "shorten it" } else { "shorten it, or lower --max-new-tokens" }));
        }
        // As in transformers, RoPE allows positions beyond those the model was trained for.
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            eprintln!(
                "warning: {place}: {total} tokens{sum} are more than the {longest} the model was made for; \
                 what it says beyond them means little"
            );
        });
        Ok(())
    }
}

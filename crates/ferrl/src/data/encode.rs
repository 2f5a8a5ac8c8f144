//! Rows to tokens with a mask.
//!
//! Text: the prompt as `transformers` reads a bare string, then the answer, then the tokenizer's first
//! end-of-sequence token. Messages: the chat template decides, including what ends a turn; what it writes after
//! the last trained token is left off, so that every sequence ends where a sampled one would.

use std::path::Path;

use ferrl_engine::chat::{ChatTemplate, Kwargs, Turns, unix_day};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

use super::prompt::{Apply, PromptSettings, Prompts, TrainOn};
use super::schema::{self, ColumnNames, Content, RowFields, RowKind, is_assistant, is_strange};
use super::{EncodedRow, Example, MaskedTokens, Overlong, Row, RowCounts, kind};

/// Turns rows into examples for one model.
pub struct Encoder {
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    prompts: Prompts,
    columns: ColumnNames,
    settings: PromptSettings,
    /// Why the model's chat template cannot be used, where it has one.
    broken: Option<Error>,
    /// Tokens that end a response, as text.
    ends: Vec<String>,
    /// The chat template ends the assistant's turn with no token that stops a completion.
    endless: bool,
}

/// What belongs to one row while it is encoded.
struct EncodedChat<'a> {
    tools: Option<Value>,
    kwargs: Kwargs,
    counts: &'a mut RowCounts,
    /// Some sequence has nothing left to train.
    empty: bool,
}

impl Encoder {
    /// An encoder for a model's tokenizer and chat template, where it has one.
    pub fn new(tokenizer: Tokenizer, chat: Option<ChatTemplate>, settings: PromptSettings) -> Result<Self> {
        if settings.max_length == Some(0) {
            return Err(
                Error::usage("data.max_length is 0").fix("set it to a positive number, or leave it out")
            );
        }
        let (prompts, columns) = (Prompts::new(&settings)?, settings.column_map()?);
        let ends = ends(&tokenizer, chat.as_ref());
        let endless = chat.as_ref().is_some_and(|c| c.end_of_turn(&tokenizer).is_none());
        Ok(Encoder { tokenizer, chat, prompts, columns, settings, broken: None, ends, endless })
    }

    /// An encoder for the model in a directory. A chat template that cannot be used is an error once a row needs it.
    pub fn for_model(tokenizer: Tokenizer, dir: &Path, settings: PromptSettings) -> Result<Self> {
        let day = settings.date.as_deref().map(|date| {
            unix_day(date).ok_or_else(|| {
                Error::usage(format!("{date:?} is not a day"))
                    .at("data.date")
                    .fix("data.date = \"2026-01-31\"")
            })
        });
        let day = day.transpose()?;
        let (chat, broken) = match ChatTemplate::find(dir) {
            Ok(chat) => (chat.map(|c| if let Some(day) = day { c.with_now(day) } else { c }), None),
            Err(e) => (None, Some(e)),
        };
        Ok(Encoder { broken, ..Self::new(tokenizer, chat, settings)? })
    }

    /// The tokenizer it was made with.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// New and old name of each column that `data.columns` renames.
    pub fn renamed(&self) -> &[(String, String)] {
        &self.columns.0
    }

    /// Maximum length of sequences.
    pub fn max_length(&self) -> Option<usize> {
        self.settings.max_length
    }

    /// The names of a row's columns, new ones included.
    pub fn columns<'a>(&'a self, row: &'a Row) -> Vec<&'a str> {
        self.columns.0.iter().map(|(new, _)| new.as_str()).chain(row.keys().map(String::as_str)).collect()
    }

    /// A row as an example; nothing when it was dropped as too long.
    pub fn encode(
        &self,
        row: &Row,
        kind: RowKind,
        place: &str,
        counts: &mut RowCounts,
    ) -> Result<Option<EncodedRow>> {
        self.row(row, kind, place, counts).map_err(|e| e.at(place))
    }

    fn row(
        &self,
        row: &Row,
        kind: RowKind,
        place: &str,
        counts: &mut RowCounts,
    ) -> Result<Option<EncodedRow>> {
        let row = &self.columns.apply(row)?;
        let begins = |name: &&str| row.get(*name).is_some_and(|value| !value.is_null());
        if self.settings.promptless && kind == RowKind::Prompt && !["prompt", "messages"].iter().any(begins) {
            let example = Example::Prompt { ids: Vec::new() };
            return Ok(Some(EncodedRow {
                example,
                prompt: Value::Null,
                extra: row.clone(),
                place: place.to_owned(),
            }));
        }
        let (fields, extra) = schema::parse(row, kind, self.prompts.render(row)?)?;
        if let Some(name) = ["images", "videos", "audios"].into_iter().find(|name| filled(extra.get(*name))) {
            return Err(Error::data("holds data that is not text")
                .at(format!("column {name}"))
                .fix("Ferrl trains text models only: leave such rows out"));
        }
        counts.other_prompt += usize::from(contradicts(&fields, &extra));
        let mut chat = EncodedChat {
            tools: tools(row)?.or_else(|| self.settings.tools.clone()),
            kwargs: self.kwargs(row)?,
            counts,
            empty: false,
        };
        let (prompt, example) = self.fields(fields, &mut chat)?;
        if let Example::Prompt { ids } = &example {
            self.fits(ids.len(), &mut chat)?;
        }
        if chat.empty {
            chat.counts.dropped += 1;
            return Ok(None);
        }
        Ok(Some(EncodedRow { example, prompt, extra, place: place.to_owned() }))
    }

    /// A prompt to sample from is never truncated, which would change its meaning.
    fn fits(&self, length: usize, chat: &mut EncodedChat<'_>) -> Result<()> {
        chat.counts.longest = chat.counts.longest.max(length);
        let Some(most) = self.settings.max_length.filter(|&most| length > most) else { return Ok(()) };
        if self.settings.overlong == Overlong::Error {
            return Err(Error::data(format!("the prompt has {length} tokens, data.max_length is {most}"))
                .fix(format!(
                    "data.max_length = {length}, or data.overlong = \"drop\" to leave such prompts out"
                )));
        }
        chat.empty = true;
        Ok(())
    }

    /// The whole prompt of a row.
    fn built(&self, prompt: Content, messages: bool, chat: &mut EncodedChat<'_>) -> Result<Content> {
        let prompt = self.prompts.build(prompt, messages)?;
        let raw = self.chat.is_some() && self.settings.apply_chat_template == Apply::Auto;
        chat.counts.raw += usize::from(raw && !is_messages(&prompt));
        Ok(prompt)
    }

    fn fields(&self, fields: RowFields, chat: &mut EncodedChat<'_>) -> Result<(Value, Example)> {
        Ok(match fields {
            RowFields::Text(text) => (Value::Null, Example::Text(self.cut(self.whole_text(&text)?, chat)?)),
            RowFields::Conversation(messages) => {
                let tokens = self.conversation(&self.prompts.conversation(messages)?, chat)?;
                (Value::Null, Example::Text(self.cut(tokens, chat)?))
            }
            RowFields::Completion { prompt, completion } => {
                let prompt = self.built(prompt, is_messages(&completion), chat)?;
                (prompt.value(), Example::Text(self.answer(&prompt, &completion, chat)?))
            }
            RowFields::Pair { prompt, chosen, rejected } => {
                let prompt = self.built(prompt, is_messages(&chosen), chat)?;
                let chosen = self.answer(&prompt, &chosen, chat).map_err(|e| e.at("chosen"))?;
                let rejected = self.answer(&prompt, &rejected, chat).map_err(|e| e.at("rejected"))?;
                (prompt.value(), Example::Pair { chosen, rejected })
            }
            RowFields::StepPair { prompt, before, chosen, rejected } => {
                let prompt = self.built(prompt, false, chat)?;
                let chosen = self.step(&prompt, &before, &chosen, chat).map_err(|e| e.at("chosen"))?;
                let rejected = self.step(&prompt, &before, &rejected, chat).map_err(|e| e.at("rejected"))?;
                (prompt.value(), Example::Pair { chosen, rejected })
            }
            RowFields::Labelled { prompt, completion, label } => {
                let prompt = self.built(prompt, is_messages(&completion), chat)?;
                let tokens = self.answer(&prompt, &completion, chat)?;
                (prompt.value(), Example::Labelled { tokens, label })
            }
            RowFields::Target { prompt, completion, target } => {
                let prompt = self.built(prompt, is_messages(&completion), chat)?;
                let tokens = self.answer(&prompt, &completion, chat)?;
                (prompt.value(), Example::Target { tokens, target })
            }
            RowFields::Prompt(prompt) => {
                let prompt = self.built(prompt, false, chat)?;
                (prompt.value(), Example::Prompt { ids: self.prompt(&prompt, chat)? })
            }
            RowFields::Group { prompt, completions, rewards } => {
                let prompt = self.built(prompt, completions.iter().any(is_messages), chat)?;
                let encode = |(i, c): (usize, &Content)| {
                    self.answer(&prompt, c, chat).map_err(|e| e.at(format!("completion {}", i + 1)))
                };
                let completions = completions.iter().enumerate().map(encode).collect::<Result<_>>()?;
                (prompt.value(), Example::Group { completions, rewards })
            }
            RowFields::Steps { prompt, steps, labels } => {
                let prompt = self.built(prompt, false, chat)?;
                (prompt.value(), self.steps(&prompt, &steps, labels, chat)?)
            }
        })
    }

    /// The tokens and messages of a text prompt, as a row with it would have: no messages where it stays text.
    pub fn first(&self, text: &str) -> Result<(Vec<u32>, Vec<Value>)> {
        let (counts, kwargs) = (&mut RowCounts::default(), self.settings.chat_template_kwargs.clone());
        let chat = EncodedChat { tools: self.settings.tools.clone(), kwargs, counts, empty: false };
        let prompt = self.prompts.build(Content::Text(text.into()), false)?;
        let ids = self.prompt(&prompt, &chat)?;
        Ok((ids, if let Content::Messages(messages) = prompt { messages } else { Vec::new() }))
    }

    /// The tokens of a conversation's next messages, from the end of the assistant's turn to where its next one begins.
    pub fn next_turn(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let (tools, kwargs) = (self.settings.tools.as_ref(), &self.settings.chat_template_kwargs);
        let mut ids = self.template()?.encode_next_turn(&self.tokenizer, messages, tools, kwargs)?;
        ids.extend(self.tokenizer.encode_markup(self.settings.prefill.as_deref().unwrap_or(""))?);
        Ok(ids)
    }

    /// The token that ends an answer to a prompt with or without messages.
    pub fn end_of_answer(&self, chat: bool) -> Option<u32> {
        let of_turn = self.chat.as_ref().filter(|_| chat).and_then(|c| c.end_of_turn(&self.tokenizer));
        of_turn.or_else(|| self.tokenizer.eos().first().copied())
    }

    /// Everything that comes before what is sampled.
    fn prompt(&self, prompt: &Content, chat: &EncodedChat<'_>) -> Result<Vec<u32>> {
        let prefill = self.settings.prefill.as_deref().unwrap_or("");
        match prompt {
            Content::Text(text) => self.text_prompt(&format!("{text}{prefill}")),
            Content::Messages(messages) => {
                self.template()?.shows_all(messages, chat.tools.as_ref(), &chat.kwargs)?;
                let mut ids = self.template()?.encode_chat(
                    &self.tokenizer,
                    messages,
                    chat.tools.as_ref(),
                    true,
                    &chat.kwargs,
                )?;
                ids.extend(self.tokenizer.encode_markup(prefill)?);
                Ok(ids)
            }
        }
    }

    /// A bare string as the model's own tokenizer reads it, without an end of text that would end the prompt.
    fn text_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode_prompt(text)?;
        if let Some(last) = ids.last().copied().filter(|id| self.tokenizer.eos().contains(id))
            && self.tokenizer.encode_markup(text)?.last() != Some(&last)
        {
            ids.pop();
        }
        Ok(ids)
    }

    /// A text trained from its second token to its end; the first is predicted from nothing.
    fn whole_text(&self, text: &str) -> Result<MaskedTokens> {
        let mut ids = self.text_prompt(text)?;
        let eos = self.eos()?;
        if ids.last() != Some(&eos) {
            ids.push(eos);
        }
        let mut mask = vec![true; ids.len()];
        mask[0] = false;
        Ok(MaskedTokens { ids, mask })
    }

    /// A prompt with a response, of which the response is trained.
    fn answer(
        &self,
        prompt: &Content,
        completion: &Content,
        chat: &mut EncodedChat<'_>,
    ) -> Result<MaskedTokens> {
        let completion = &self.unended(completion, chat.counts);
        let tokens = match (prompt, completion) {
            (Content::Text(_), Content::Text(answer)) => {
                chat.counts.glued += usize::from(self.glued(prompt, answer));
                self.joined(self.prompt(prompt, chat)?, answer, Some(self.eos()?))?
            }
            (Content::Messages(messages), Content::Text(answer)) => {
                self.turn(messages, &[json!({ "role": "assistant", "content": answer })], prompt, chat)?
            }
            (Content::Messages(messages), Content::Messages(answer)) => {
                self.turn(messages, answer, prompt, chat)?
            }
            (Content::Text(_), Content::Messages(_)) => {
                return Err(Error::data("the prompt is text but the response is messages")
                    .fix("write both as text or both as messages"));
            }
        };
        self.cut(tokens, chat)
    }

    /// A response without an end that is written into it: the end is added as a token, and would be learned twice.
    fn unended(&self, completion: &Content, counts: &mut RowCounts) -> Content {
        let blank = |text: &str| text.trim().is_empty();
        match completion {
            Content::Text(text) => {
                let text = self.without_end(text, counts);
                counts.empty += usize::from(blank(text));
                Content::Text(text.to_owned())
            }
            Content::Messages(messages) => {
                let messages = self.without_ends(messages, counts);
                let says = |m: &Value| {
                    m["content"].as_str().is_some_and(|c| !blank(c)) || m.get("tool_calls").is_some()
                };
                counts.empty += usize::from(!messages.iter().any(|m| is_assistant(Some(m)) && says(m)));
                Content::Messages(messages)
            }
        }
    }

    fn without_ends(&self, messages: &[Value], counts: &mut RowCounts) -> Vec<Value> {
        let mut messages = messages.to_vec();
        for message in messages.iter_mut().filter(|m| is_assistant(Some(m))) {
            if let Some(Value::String(text)) = message.get_mut("content") {
                *text = self.without_end(text, counts).to_owned();
            }
        }
        messages
    }

    fn without_end<'t>(&self, text: &'t str, counts: &mut RowCounts) -> &'t str {
        let cut = |text: &'t str| self.ends.iter().find_map(|end| text.trim_end().strip_suffix(end.as_str()));
        let mut rest = text;
        while let Some(shorter) = cut(rest) {
            rest = shorter;
        }
        counts.ended += usize::from(rest.len() < text.len());
        counts.spelled += usize::from(self.tokenizer.special_tokens().iter().any(|name| rest.contains(name)));
        rest
    }

    /// Whether the last word of the prompt runs into the response, unless the recipe asks for plain text.
    fn glued(&self, prompt: &Content, answer: &str) -> bool {
        let word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let meant = self.settings.apply_chat_template == Apply::Off
            || self.settings.template.is_some()
            || self.settings.prefill.is_some();
        matches!(prompt, Content::Text(text) if !meant && word(text.chars().next_back()) && word(answer.chars().next()))
    }

    fn joined(&self, prompt: Vec<u32>, answer: &str, end: Option<u32>) -> Result<MaskedTokens> {
        let mut ids = prompt;
        let start = ids.len();
        ids.extend(self.tokenizer.encode_text(answer)?);
        ids.extend(end);
        let mask = (0..ids.len()).map(|i| i >= start).collect();
        Ok(MaskedTokens { ids, mask })
    }

    /// Messages that answer messages, of which the assistant's are trained.
    fn turn(
        &self,
        before: &[Value],
        answer: &[Value],
        prompt: &Content,
        chat: &mut EncodedChat<'_>,
    ) -> Result<MaskedTokens> {
        let single = answer.len() == 1;
        if let Some(prefill) = &self.settings.prefill {
            let said = answer.first().and_then(|m| m.get("content")).and_then(Value::as_str);
            let Some(said) = said.filter(|_| single) else {
                return Err(Error::data("data.prefill needs a response of one message with text")
                    .fix("leave data.prefill out"));
            };
            // The template only tells what ends the turn; what was begun is not rendered a second time.
            let begun = json!({ "role": "assistant", "content": format!("{prefill}{said}") });
            let whole = self.training(&[before, &[begun]].concat(), Turns::Last, chat)?;
            let end = whole.ids.last().copied().filter(|&id| self.tokenizer.is_special(id));
            return self.joined(self.prompt(prompt, chat)?, said, end);
        }
        let turns = if single { Turns::Last } else { Turns::All };
        let mut tokens = self.training(&[before, answer].concat(), turns, chat)?;
        if !single {
            let prompt = self.prompt(prompt, chat)?;
            if !tokens.ids.starts_with(&prompt) {
                return Err(Error::data(
                    "the chat template renders the prompt differently with the response after it",
                )
                .fix("give the response as one message, or use a template that keeps earlier turns"));
            }
            tokens.mask[..prompt.len()].fill(false);
        }
        checked(tokens)
    }

    fn conversation(&self, messages: &[Value], chat: &mut EncodedChat<'_>) -> Result<MaskedTokens> {
        let messages = &self.without_ends(messages, chat.counts);
        let says = |m: &Value| {
            m["content"].as_str().is_some_and(|c| !c.trim().is_empty()) || m.get("tool_calls").is_some()
        };
        chat.counts.empty += usize::from(messages.iter().any(|m| is_assistant(Some(m)) && !says(m)));
        if self.settings.prefill.is_some() {
            return Err(Error::usage("data.prefill cannot begin the turns of a whole conversation")
                .fix("leave it out, or give rows with a prompt and a response"));
        }
        let turns = match self.settings.turns {
            TrainOn::All => Turns::All,
            TrainOn::Last => Turns::Last,
        };
        checked(self.training(messages, turns, chat)?)
    }

    /// A rendered conversation, up to its last trained token.
    fn training(&self, messages: &[Value], turns: Turns, chat: &mut EncodedChat<'_>) -> Result<MaskedTokens> {
        let template = self.template()?;
        chat.counts.strange += usize::from(messages.iter().any(is_strange));
        chat.counts.endless += usize::from(self.endless);
        template.shows_all(messages, chat.tools.as_ref(), &chat.kwargs)?;
        let (mut ids, mut mask) =
            template.encode_training(&self.tokenizer, messages, chat.tools.as_ref(), &chat.kwargs, turns)?;
        let end = mask.iter().rposition(|&m| m).map_or(0, |p| p + 1);
        ids.truncate(end);
        mask.truncate(end);
        Ok(MaskedTokens { ids, mask })
    }

    /// A step after the steps before it; only the step is trained, and no end of sequence follows it.
    fn step(
        &self,
        prompt: &Content,
        before: &str,
        step: &str,
        chat: &mut EncodedChat<'_>,
    ) -> Result<MaskedTokens> {
        let mut begun = self.prompt(prompt, chat)?;
        begun.extend(self.tokenizer.encode_text(before)?);
        self.cut(self.joined(begun, step, None)?, chat)
    }

    /// Each step on a line of its own; its last token is where it is judged.
    fn steps(
        &self,
        prompt: &Content,
        steps: &[String],
        mut labels: Vec<f32>,
        chat: &mut EncodedChat<'_>,
    ) -> Result<Example> {
        let mut ids = self.prompt(prompt, chat)?;
        let line = self.tokenizer.encode_text("\n")?;
        let mut ends = Vec::new();
        for step in steps {
            ids.extend(self.tokenizer.encode_text(step)?);
            ids.extend(&line);
            ends.push(ids.len() - 1);
        }
        let mask = (0..ids.len()).map(|i| ends.contains(&i)).collect();
        let tokens = self.cut(MaskedTokens { ids, mask }, chat)?;
        ends.retain(|&end| end < tokens.ids.len());
        labels.truncate(ends.len());
        Ok(Example::Steps { tokens, ends, labels })
    }

    /// Truncates to `max_length` and counts it.
    fn cut(&self, mut tokens: MaskedTokens, chat: &mut EncodedChat<'_>) -> Result<MaskedTokens> {
        let length = tokens.ids.len();
        chat.counts.longest = chat.counts.longest.max(length);
        let Some(most) = self.settings.max_length.filter(|&most| length > most) else {
            return checked(tokens);
        };
        tokens.ids.truncate(most);
        tokens.mask.truncate(most);
        chat.counts.truncated += 1;
        if !tokens.mask.contains(&true) {
            if self.settings.overlong == Overlong::Error {
                return Err(Error::data(format!(
                    "{length} tokens are cut to data.max_length = {most}, which leaves nothing to train: the \
                     prompt fills it"
                ))
                .fix(format!(
                    "raise data.max_length (the whole row needs {length}), or set data.overlong = \"drop\""
                )));
            }
            chat.empty = true;
        }
        Ok(tokens)
    }

    fn eos(&self) -> Result<u32> {
        self.tokenizer.eos().first().copied().ok_or_else(|| {
            Error::model("the tokenizer has no end-of-sequence token to end responses")
                .fix("set eos_token in tokenizer_config.json")
        })
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            if let Some(broken) = &self.broken {
                return broken.clone();
            }
            let what = match self.settings.apply_chat_template {
                Apply::On => "data.apply_chat_template is set, but the model has no chat template",
                _ => "the row has messages, but the model has no chat template",
            };
            Error::model(what)
                .fix("use an instruction-tuned model, or rows of plain text (prompt and response) without data.apply_chat_template")
        })
    }

    fn kwargs(&self, row: &Row) -> Result<Kwargs> {
        let mut kwargs = self.settings.chat_template_kwargs.clone();
        match row.get("chat_template_kwargs") {
            None | Some(Value::Null) => {}
            Some(Value::Object(own)) => kwargs.extend(own.clone()),
            Some(other) => {
                return Err(Error::data(format!("got {}, expected an object", kind(other)))
                    .at("column chat_template_kwargs")
                    .fix("write it as {\"name\": value}"));
            }
        }
        Ok(kwargs)
    }
}

/// The special tokens that end a response, as text: the tokenizer's, and the one that ends a turn of the chat template.
fn ends(tokenizer: &Tokenizer, chat: Option<&ChatTemplate>) -> Vec<String> {
    const REPLY: &str = "ferrl";
    let eos = tokenizer.eos().iter().filter(|&&id| tokenizer.is_special(id));
    let mut ends: Vec<String> = eos.filter_map(|&id| tokenizer.token(id)).collect();
    let messages =
        [json!({ "role": "user", "content": "?" }), json!({ "role": "assistant", "content": REPLY })];
    let rendered = chat.and_then(|c| c.render(&messages, None, false, &Kwargs::new()).ok());
    let after = rendered.as_deref().and_then(|text| Some(text.rsplit_once(REPLY)?.1)).unwrap_or_default();
    let first = tokenizer.special_tokens().iter().filter_map(|name| Some((after.find(name.as_str())?, name)));
    if let Some((_, name)) = first.min_by_key(|(at, _)| *at)
        && !ends.contains(name)
    {
        ends.push(name.clone());
    }
    ends
}

/// Whether a column has entries.
fn filled(value: Option<&Value>) -> bool {
    value.and_then(Value::as_array).is_some_and(|list| !list.is_empty())
}

/// Whether a column `prompt` that nothing used says something else than the conversation of `chosen` and `rejected`.
fn contradicts(fields: &RowFields, extra: &Row) -> bool {
    let (RowFields::Pair { prompt: Content::Messages(turns), .. }, Some(prompt)) =
        (fields, extra.get("prompt"))
    else {
        return false;
    };
    let asked = match prompt {
        Value::Array(messages) => messages.last().and_then(|m| m["content"].as_str()),
        other => other.as_str(),
    };
    let said = |asked: &str| {
        turns
            .iter()
            .filter_map(|m| m["content"].as_str())
            .any(|c| asked.contains(c.trim()) || c.contains(asked.trim()))
    };
    asked.is_some_and(|asked| !asked.trim().is_empty() && !said(asked))
}

fn is_messages(content: &Content) -> bool {
    matches!(content, Content::Messages(_))
}

/// The `tools` column: a list, or JSON text of one.
fn tools(row: &Row) -> Result<Option<Value>> {
    let wrong = |got: &str| {
        Error::data(format!("got {got}, expected a list of tools"))
            .at("column tools")
            .fix("write a list of JSON schemas, or the JSON text of one")
    };
    match row.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list.clone().into())),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(list)) => Ok(Some(list.into()).filter(|_| text.trim() != "[]")),
            _ => Err(wrong("text that is not a JSON list")),
        },
        Some(other) => Err(wrong(kind(other))),
    }
}

fn checked(tokens: MaskedTokens) -> Result<MaskedTokens> {
    if tokens.mask.contains(&true) {
        return Ok(tokens);
    }
    Err(Error::data("the row has no trained token: the mask is all zero").fix("drop the row"))
}

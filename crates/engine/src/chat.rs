//! Conversations to token ids, through the model's own Hugging Face chat template.
//!
//! The template's markers become special tokens; the same strings inside a message are encoded as plain text, so nothing that a
//! user or a tool writes can end a turn. Loss masks come from `{% generation %}` blocks, or from rendering the conversation
//! turn by turn; a template that rewrites earlier turns is refused.

mod environment;
mod json;
mod marks;
mod mask;
mod parts;

use std::ffi::OsStr;
use std::path::Path;
use std::sync::OnceLock;

use minijinja::Environment;
use serde_json::{Map, Value};

use crate::tokenizer::{Tokenizer, content, read_json, read_text};
use crate::{Error, Result};
use environment::Now;
pub use environment::{bounded, today, unix_day};
use marks::{Marked, Marks};
pub use parts::text_of;

/// Extra variables for a template, such as `enable_thinking`.
pub type Kwargs = Map<String, Value>;

/// Which assistant turns are trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Turns {
    /// Every turn; refused if the template re-renders earlier turns.
    #[default]
    All,
    /// The last turn; earlier ones are context, as the template renders them.
    Last,
}

/// Time limit for a template's first rendering.
const TRIAL: std::time::Duration = std::time::Duration::from_secs(5);

/// A compiled chat template with its model's variables.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` etc.
    variables: Map<String, Value>,
    names: Vec<String>,
    /// All template sources, to choose mark characters that none of them contains.
    source: String,
    /// Some template has `{% generation %}` blocks.
    generation: bool,
    /// Where the template came from, for error messages.
    place: String,
    /// Whether the template reads content only as a list of parts; detected when first needed.
    takes_parts: OnceLock<bool>,
}

#[derive(Clone, Copy)]
struct Input<'a> {
    messages: &'a [Value],
    tools: Option<&'a Value>,
    add_generation_prompt: bool,
    kwargs: &'a Kwargs,
}

impl ChatTemplate {
    /// Loads `chat_template.jinja`, or else the template in `tokenizer_config.json`.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        Self::find(dir)?.ok_or_else(|| {
            Error::model("the model has no chat template").at(dir.display()).fix(
                "add a chat_template.jinja, use an instruction-tuned model, or give raw prompts instead of messages",
            )
        })
    }

    /// The same; `None` for a model without a template.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let dir = &*crate::checkpoint::tokenizer_dir(dir);
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        let specials = read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        let mut variables = Map::new();
        for map in [&specials, &config] {
            for (key, value) in map.iter().filter(|(k, _)| k.ends_with("_token")) {
                if let Some(name) = content(value) {
                    variables.insert(key.clone(), name.into());
                }
            }
        }
        let file = dir.join("chat_template.jinja");
        let (place, mut templates) = match read_text(&file)? {
            Some(text) => (file, vec![("default".to_owned(), text)]),
            None => {
                let found =
                    configured(config.get("chat_template")).map_err(|e| e.at(config_path.display()))?;
                (config_path, found)
            }
        };
        let more = std::fs::read_dir(dir.join("additional_chat_templates"));
        for path in more.into_iter().flatten().flatten().map(|entry| entry.path()) {
            if let (Some("jinja"), Some(name)) = (path.extension().and_then(OsStr::to_str), path.file_stem())
            {
                templates.extend(read_text(&path)?.map(|text| (name.to_string_lossy().into_owned(), text)));
            }
        }
        if templates.is_empty() {
            return Ok(None);
        }
        Self::compile(templates, variables, place.display().to_string()).map(Some)
    }

    /// Compiles a template; `variables` are what the tokenizer would provide (`bos_token`, ...).
    pub fn from_source(source: &str, variables: Map<String, Value>) -> Result<Self> {
        Self::compile(vec![("default".into(), source.into())], variables, "chat template".into())
    }

    fn compile(
        templates: Vec<(String, String)>,
        variables: Map<String, Value>,
        place: String,
    ) -> Result<Self> {
        let mut environment = environment::new();
        let mut all = String::new();
        let (mut names, mut generation) = (Vec::new(), false);
        for (name, source) in templates {
            environment::bounded(&source).map_err(|e| {
                Error::model(format!("the chat template cannot be used: {e}"))
                    .at(&place)
                    .fix("use the template of the model's authors")
            })?;
            all.push_str(&source);
            let source = environment::rewrite(&source);
            generation |= source.contains(environment::GENERATION);
            environment.add_template_owned(name.clone(), source).map_err(|e| {
                Error::model(format!("the chat template does not compile: {}", environment::explain(&e)))
                    .at(&place)
                    .fix("correct the template, or report it if transformers renders it")
            })?;
            names.push(name);
        }
        let takes_parts = OnceLock::new();
        let made =
            ChatTemplate { environment, variables, names, source: all, generation, place, takes_parts };
        made.ends()?;
        Ok(made)
    }

    /// Renders one message in another thread with a time limit. Fuel bounds the number of operations but not the size of their
    /// results: a template that doubles a string forty times would exhaust memory.
    fn ends(&self) -> Result<()> {
        let trial = self.clone();
        let (done, wait) = std::sync::mpsc::channel();
        let work = move || {
            parts::wanted(&trial);
            let _ = done.send(());
        };
        let Ok(_) = std::thread::Builder::new().spawn(work) else { return Ok(()) };
        match wait.recv_timeout(TRIAL) {
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Err(Error::model(format!(
                "the chat template takes more than {} s for one message",
                TRIAL.as_secs()
            ))
            .at(&self.place)
            .fix("use the template of the model's authors")),
            _ => Ok(()),
        }
    }

    /// Sets the time that `strftime_now` returns, in seconds since 1970 (UTC); the default is the start of the current day. A run
    /// sets the day it started, so that a resumed run renders the same text.
    pub fn with_now(mut self, unix_seconds: i64) -> Self {
        environment::set_now(&mut self.environment, Now::from_unix(unix_seconds));
        self
    }

    /// The token with which the template ends an assistant turn, found by rendering one; `None` if no marker follows the turn or
    /// the template cannot render a user and an assistant message.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        const REPLY: &str = "ferrl";
        let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let messages = [message("user", "?"), message("assistant", REPLY)];
        let text = self.render(&messages, None, false, &Kwargs::new()).ok()?;
        let (_, after) = text.rsplit_once(REPLY)?;
        tokenizer.first_marker(after)
    }

    /// The text of a conversation, as `transformers` renders it.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Kwargs,
    ) -> Result<String> {
        self.render_input(Input { messages, tools, add_generation_prompt, kwargs }, None)
    }

    /// The ids of a conversation; special-token strings inside messages, tools and documents stay plain text.
    pub fn encode_chat(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Kwargs,
    ) -> Result<Vec<u32>> {
        let marked =
            self.render_marked(tokenizer, Input { messages, tools, add_generation_prompt, kwargs }, false)?;
        if marked.plain.is_empty() {
            return tokenizer.encode_markup(&marked.text);
        }
        Ok(tokenizer.encode_spans(&marked.text, &marked.plain)?.ids)
    }

    /// The ids of the next messages after an assistant turn: from the token that ends that turn to the start of the next
    /// assistant turn. Earlier turns are not re-rendered, so sampled tokens stay as they are.
    pub fn encode_next_turn(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: Option<&Value>,
        kwargs: &Kwargs,
    ) -> Result<Vec<u32>> {
        const REPLY: &str = "ferrl says so";
        let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let mut all = vec![message("user", "?"), message("assistant", REPLY)];
        all.extend_from_slice(messages);
        let input = Input { messages: &all, tools, add_generation_prompt: true, kwargs };
        let marked = self.render_marked(tokenizer, input, false)?;
        let lost = || {
            Error::model("the chat template leaves out what the assistant says before a further message")
                .at(&self.place)
                .fix("a template for conversations of several turns")
        };
        // Keeps the reply as a prefix, because some tokenizers encode the first word of a text differently.
        let from = marked.text.find(REPLY).ok_or_else(lost)?;
        let behind = marked.plain.iter().filter(|span| span.start >= from);
        let plain: Vec<_> = behind.map(|span| span.start - from..span.end - from).collect();
        let mut ids = match plain.is_empty() {
            true => tokenizer.encode_markup(&marked.text[from..])?,
            false => tokenizer.encode_spans(&marked.text[from..], &plain)?.ids,
        };
        let reply = tokenizer.encode_markup(REPLY)?;
        match ids.starts_with(&reply) {
            true => drop(ids.drain(..reply.len())),
            // The end of turn is not a token of its own: it begins inside the reply's last token.
            false => ids = tokenizer.encode_markup(&marked.text[from + REPLY.len()..])?,
        }
        Ok(ids)
    }

    /// Refuses a conversation if the template drops a tool call, a tool, or a message's content: the model would be trained on
    /// replies to input that it never saw.
    pub fn shows_all(&self, messages: &[Value], tools: Option<&Value>, kwargs: &Kwargs) -> Result<()> {
        parts::refuse_dropped(self, Input { messages, tools, add_generation_prompt: false, kwargs })
    }

    /// The ids of a whole conversation and the loss mask: the assistant's content in the chosen turns, including the token that
    /// ends each.
    pub fn encode_training(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: Option<&Value>,
        kwargs: &Kwargs,
        turns: Turns,
    ) -> Result<(Vec<u32>, Vec<bool>)> {
        mask::encode(self, tokenizer, Input { messages, tools, add_generation_prompt: false, kwargs }, turns)
    }

    /// Renders; `generation` is the pair of marks put around each generation block.
    fn render_input(&self, input: Input<'_>, generation: Option<(char, char)>) -> Result<String> {
        let parts = *self.takes_parts.get_or_init(|| parts::wanted(self));
        self.render_as(input, generation, parts)
    }

    /// The same, with content as text or as a list with one part.
    fn render_as(&self, input: Input<'_>, generation: Option<(char, char)>, parts: bool) -> Result<String> {
        let mut context = self.variables.clone();
        let messages: Result<Vec<Value>> =
            input.messages.iter().enumerate().map(|(i, m)| message(i, m, parts)).collect();
        context.insert("messages".into(), messages?.into());
        context.insert("tools".into(), input.tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
        for (key, value) in input.kwargs {
            context.insert(key.clone(), value.clone());
        }
        if let Some((open, close)) = generation {
            context.insert(environment::MARKS.into(), format!("{open}{close}").into());
        }
        let tool_use = input.tools.is_some() && self.names.iter().any(|n| n == "tool_use");
        let name = if tool_use { "tool_use" } else { "default" };
        let template = self.environment.get_template(name).map_err(|_| {
            Error::model(format!(
                "the model has the chat templates {:?} but none named \"default\"",
                self.names
            ))
            .at(&self.place)
            .fix("name one of them \"default\"")
        })?;
        let context = json::to_template(&Value::Object(context));
        environment::render(&template, context).map_err(|e| self.refused(&e))
    }

    fn refused(&self, e: &minijinja::Error) -> Error {
        match environment::raised(e) {
            Some(words) => Error::data(format!("the chat template refuses the conversation: {words}"))
                .at(&self.place)
                .fix("change the messages to what the model's template accepts"),
            None => Error::model(format!("the chat template failed: {}", environment::explain(e)))
                .at(&self.place)
                .fix("check that every message has the fields the template reads, such as role and content"),
        }
    }

    /// Renders with marks around special-token strings that messages contain, then removes the marks.
    fn render_marked(&self, tokenizer: &Tokenizer, input: Input<'_>, generation: bool) -> Result<Marked> {
        let specials = tokenizer.special_tokens();
        let marks = Marks::choose(&self.source, input)?;
        let gen_marks = generation.then_some(marks.generation);
        let places = marks::places(input, specials);
        if places.is_empty() {
            return Ok(marks.read(&self.render_input(input, gen_marks)?, specials));
        }
        let unmarked = marks.read(&self.render_input(input, gen_marks)?, specials);
        let attempt = |places: &[marks::MarkPlace]| -> Result<Option<Marked>> {
            let (messages, tools, kwargs) = marks.write(input, places);
            let input = Input { messages: &messages, tools: tools.as_ref(), kwargs: &kwargs, ..input };
            // A template that reads the strings itself may fail on marked text; that is not the user's error.
            let Ok(text) = self.render_input(input, gen_marks) else { return Ok(None) };
            let marked = marks.read(&text, specials);
            Ok((marked.text == unmarked.text).then_some(marked))
        };
        if let Some(marked) = attempt(&places)? {
            return Ok(marked);
        }
        // The template itself acts on one of the strings (e.g. splits at a special "</think>"). Find out which; in an assistant
        // message, the model is trained on the template's reading.
        let mut kept = Vec::new();
        for place in places {
            if attempt(std::slice::from_ref(&place))?.is_some() {
                kept.push(place);
            } else if !place.assistant {
                return Err(Error::data(format!(
                    "the chat template acts on {:?} in what a user wrote",
                    place.name
                ))
                .at(&place.label)
                .fix("remove it from the message"));
            }
        }
        attempt(&kept)?.ok_or_else(|| {
            Error::data("the chat template acts on special-token names in the messages").fix("remove them")
        })
    }
}

/// A message as the template sees it: reasoning under every key that templates use, content in the form it reads.
fn message(index: usize, message: &Value, parts: bool) -> Result<Value> {
    const NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let Some(fields) = message.as_object() else {
        return Err(Error::data("a message is not an object")
            .at(format!("message {index}"))
            .fix("write messages as {\"role\": ..., \"content\": ...}"));
    };
    let mut fields = fields.clone();
    if let Some(content) = fields.get_mut("content").filter(|c| c.is_array() || (parts && c.is_string())) {
        let text = text_of(content).map_err(|e| e.at(format!("message {}", index + 1)))?;
        *content = if parts { serde_json::json!([{ "type": "text", "text": text }]) } else { text.into() };
    }
    let reasoning = NAMES.iter().find_map(|n| fields.get(*n).filter(|v| !v.is_null()).cloned());
    if let Some(reasoning) = reasoning {
        fields.entry("thinking").or_insert_with(|| reasoning.clone());
        fields.insert("reasoning_content".into(), reasoning);
    }
    Ok(Value::Object(fields))
}

/// The templates of a `tokenizer_config.json`: one, or a list of named ones.
fn configured(value: Option<&Value>) -> Result<Vec<(String, String)>> {
    let expected = || {
        Error::model("chat_template is neither a string nor a list of {name, template}")
            .fix("write the template as one string")
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![("default".into(), text.clone())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| {
                let field = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                field("name").zip(field("template")).ok_or_else(expected)
            })
            .collect(),
        Some(_) => Err(expected()),
    }
}

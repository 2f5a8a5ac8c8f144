//! Prompts from rows: a template over the columns, a system message, worked examples, the chat template.

use ferrl_engine::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::schema::{self, ColumnNames, Content, RowFields, RowKind};
use super::{Overlong, Row};

/// Whether prompts go through the model's chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Apply {
    /// Messages do, text does not.
    #[default]
    Auto,
    /// The same for plain text, which few users expect to go through a template.
    Quiet,
    /// Text becomes a user's message.
    On,
    /// Never; messages are refused.
    Off,
}

/// Which of the assistant's turns in a conversation are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// Every turn.
    #[default]
    All,
    /// The last one.
    Last,
}

with_defaults! {
/// How rows become examples: the `data` part of a recipe.
pub struct PromptSettings {
    /// New column names for old ones: `prompt = "question"`.
    pub columns: Map<String, Value> = Map::new(),
    /// The prompt, with the columns of the row in braces: `{{ question }}`.
    pub template: Option<String> = None,
    /// A system message for conversations that have none.
    pub system: Option<String> = None,
    /// What the assistant has already begun to say; never trained.
    pub prefill: Option<String> = None,
    /// Whether prompts go through the chat template.
    pub apply_chat_template: Apply = Apply::Auto,
    /// Worked examples before every prompt: rows with a prompt and a response.
    pub examples: Vec<Row> = Vec::new(),
    /// What stands between worked examples when the prompt is text.
    pub separator: String = "\n\n".into(),
    /// The day that `strftime_now` tells chat templates, as `2026-01-31`; today where absent.
    pub date: Option<String> = None,
    /// Variables for the chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Map<String, Value> = Map::new(),
    /// Tools that the chat template shows where a row names none: JSON Schemas of functions.
    pub tools: Option<Value> = None,
    /// Whether rows may come without a prompt, because an environment says what an episode begins with.
    pub promptless: bool = false,
    /// Which turns of a conversation are trained.
    pub turns: TrainOn = TrainOn::All,
    /// Sequences are cut to this many tokens; longer prompts to sample from are refused or left out.
    pub max_length: Option<usize> = None,
    /// What happens to an example that has no trained token left after the cut.
    pub overlong: Overlong = Overlong::Error,
}
}

impl PromptSettings {
    pub fn column_map(&self) -> Result<ColumnNames> {
        let one = |(new, old): (&String, &Value)| match old.as_str() {
            Some(old) => Ok((new.clone(), old.to_owned())),
            None => Err(Error::usage(format!("data.columns.{new} is not the name of a column"))
                .fix(format!("write {new} = \"old name\""))),
        };
        self.columns.iter().map(one).collect::<Result<_>>().map(ColumnNames)
    }
}

/// Makes the prompt of each row.
pub struct Prompts {
    environment: Environment<'static>,
    template: bool,
    system: Option<String>,
    apply: Apply,
    examples: Vec<(String, String)>,
    separator: String,
}

const NAME: &str = "data.template";

/// For templates of users: what is undefined is an error, and so is one that loops or calls itself without end.
pub(crate) fn strict_environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(1_000_000));
    environment.set_recursion_limit(100);
    let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
    environment.set_syntax(syntax.map_err(|e| Error::usage(format!("template syntax: {e}")))?);
    Ok(environment)
}

impl Prompts {
    /// Compiles the template and prepares the worked examples.
    pub fn new(settings: &PromptSettings) -> Result<Self> {
        let mut environment = strict_environment()?;
        if let Some(source) = &settings.template {
            ferrl_engine::chat::bounded(source).map_err(|e| {
                Error::usage(format!("the template cannot be used: {e}")).at(NAME).fix("a shorter expression")
            })?;
            environment.add_template_owned(NAME, source.clone()).map_err(|e| {
                Error::usage(format!("the template does not compile: {e}"))
                    .at(NAME)
                    .fix("columns go between {{ and }}, statements between {% and %}")
            })?;
        }
        let mut prompts = Prompts {
            environment,
            template: settings.template.is_some(),
            system: settings.system.clone(),
            apply: settings.apply_chat_template,
            examples: Vec::new(),
            separator: settings.separator.clone(),
        };
        let columns = settings.column_map()?;
        for (i, row) in settings.examples.iter().enumerate() {
            let example =
                prompts.example(&columns, row).map_err(|e| e.at(format!("data.examples {}", i + 1)))?;
            prompts.examples.push(example);
        }
        Ok(prompts)
    }

    fn example(&self, columns: &ColumnNames, row: &Row) -> Result<(String, String)> {
        // An example written in the recipe may use the new names already.
        let row = columns.apply(row).unwrap_or_else(|_| row.clone());
        let prompt = self.render(&row)?;
        match schema::parse(&row, RowKind::Sft, prompt)?.0 {
            RowFields::Completion { prompt: Content::Text(prompt), completion: Content::Text(response) } => {
                Ok((prompt, response))
            }
            _ => Err(Error::usage("a worked example is not a prompt and a response, both text")
                .fix("write prompt = \"...\", response = \"...\"")),
        }
    }

    /// The template over the columns of a row, if there is one.
    pub fn render(&self, row: &Row) -> Result<Option<String>> {
        if !self.template {
            return Ok(None);
        }
        let rendered = self.environment.get_template(NAME).and_then(|t| t.render(columns(row)));
        rendered.map(Some).map_err(|e| {
            let have: Vec<&str> = row.keys().map(String::as_str).collect();
            Error::data(format!(
                "the template fails on this row: {e}; its columns are {}",
                super::list(&have)
            ))
            .at(NAME)
            .fix("use only columns that every row has, or {{ column | default(\"\") }}")
        })
    }

    /// The whole prompt: system message and worked examples first, as messages or as text.
    ///
    /// `messages` says that the answers are messages, which makes a text prompt a user's message too.
    pub fn build(&self, prompt: Content, messages: bool) -> Result<Content> {
        let chat = match (self.apply, &prompt) {
            (Apply::On, _) => true,
            (Apply::Auto | Apply::Quiet, Content::Messages(_)) => true,
            (Apply::Auto | Apply::Quiet, Content::Text(_)) => messages,
            (Apply::Off, Content::Text(_)) if !messages => false,
            (Apply::Off, _) => {
                return Err(Error::usage("the row has messages, but data.apply_chat_template is false")
                    .fix("leave data.apply_chat_template out, or make text of them with data.template"));
            }
        };
        let turns = match prompt {
            Content::Text(text) if !chat => return self.text(text),
            Content::Text(text) => vec![json!({ "role": "user", "content": text })],
            Content::Messages(messages) => messages,
        };
        let has_system = turns.first().is_some_and(|m| m["role"] == "system");
        let mut all = self.system_message(&turns);
        let rest = if has_system {
            all.extend(turns.first().cloned());
            &turns[1..]
        } else {
            &turns[..]
        };
        for (prompt, response) in &self.examples {
            all.push(json!({ "role": "user", "content": prompt }));
            all.push(json!({ "role": "assistant", "content": response }));
        }
        all.extend_from_slice(rest);
        Ok(Content::Messages(all))
    }

    fn text(&self, text: String) -> Result<Content> {
        if self.system.is_some() {
            return Err(Error::usage("data.system is set, but the prompt is text without a chat template")
                .fix("set data.apply_chat_template = true, or put the words into data.template"));
        }
        let mut whole = String::new();
        for (prompt, response) in &self.examples {
            whole.push_str(prompt);
            whole.push_str(response);
            whole.push_str(&self.separator);
        }
        whole.push_str(&text);
        Ok(Content::Text(whole))
    }

    /// A conversation to imitate, with the system message it lacks.
    pub fn conversation(&self, turns: Vec<Value>) -> Result<Vec<Value>> {
        if !self.examples.is_empty() {
            return Err(Error::usage("data.examples cannot stand before a whole conversation")
                .fix("leave them out, or give rows with a prompt and a response"));
        }
        if self.apply == Apply::Off {
            return Err(Error::usage("the row has messages, but data.apply_chat_template is false")
                .fix("leave data.apply_chat_template out"));
        }
        let mut all = self.system_message(&turns);
        all.extend(turns);
        Ok(all)
    }

    fn system_message(&self, turns: &[Value]) -> Vec<Value> {
        let has = turns.first().is_some_and(|m| m["role"] == "system");
        let words = self.system.iter().filter(|_| !has);
        words.map(|words| json!({ "role": "system", "content": words })).collect()
    }
}

/// The columns of a row as a template sees them.
pub(crate) fn columns(row: &Row) -> minijinja::Value {
    minijinja::Value::from_pairs(row.iter().map(|(k, v)| (k.as_str(), to_template(v))))
}

fn to_template(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(b) => (*b).into(),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => i.into(),
            (_, Some(u)) => u.into(),
            _ => n.as_f64().unwrap_or_default().into(),
        },
        Value::String(s) => s.as_str().into(),
        Value::Array(items) => items.iter().map(to_template).collect(),
        Value::Object(fields) => columns(fields),
    }
}

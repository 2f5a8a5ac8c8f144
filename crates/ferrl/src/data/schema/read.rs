//! One row, column by column.

use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

use super::value::*;
use super::{Content, RowFields};
use crate::data::{Row, kind};

/// Names of the column that holds a conversation.
const CONVERSATION: [&str; 2] = ["messages", "conversations"];

/// Reads the columns of a row and remembers which were used.
pub struct RowReader<'a> {
    row: &'a Row,
    /// Stands in for the row's own prompt.
    prompt: Option<String>,
    used: Vec<&'static str>,
}

impl<'a> RowReader<'a> {
    pub fn new(row: &'a Row, prompt: Option<String>) -> Self {
        RowReader { row, prompt, used: Vec::new() }
    }

    pub fn used(&self) -> &[&'static str] {
        &self.used
    }

    pub fn sft(&mut self) -> Result<Option<RowFields>> {
        if self.prompt.is_none()
            && let Some(messages) = self.messages()?
            && is_assistant(messages.last())
        {
            return Ok(Some(RowFields::Conversation(messages)));
        }
        self.used.clear();
        if let (Some(prompt), Some(completion)) = (self.prompt()?, self.completion()?) {
            return Ok(Some(RowFields::Completion { prompt, completion }));
        }
        self.used.clear();
        if let Some(text) = self.text("text")?.filter(|_| self.prompt.is_none()) {
            return Ok(Some(RowFields::Text(text)));
        }
        match self.messages()? {
            // Messages, and nothing that answers them.
            Some(messages) if self.prompt.is_none() => {
                let name =
                    CONVERSATION.into_iter().find(|n| self.get(n).is_some()).unwrap_or(CONVERSATION[0]);
                Err(ends_wrong(&messages, "the assistant's").at(column(name)))
            }
            _ => Ok(None),
        }
    }

    pub fn preference(&mut self) -> Result<Option<RowFields>> {
        let (Some(chosen), Some(rejected)) = (self.content("chosen")?, self.content("rejected")?) else {
            return Ok(None);
        };
        let before = self.used.len();
        Ok(Some(match (chosen, rejected) {
            (Content::Text(chosen), Content::Text(rejected)) => match self.prompt()? {
                Some(prompt) => RowFields::Pair {
                    prompt,
                    chosen: Content::Text(chosen),
                    rejected: Content::Text(rejected),
                },
                None => split_texts(&chosen, &rejected),
            },
            (Content::Messages(chosen), Content::Messages(rejected)) => {
                for (name, messages) in [("chosen", &chosen), ("rejected", &rejected)] {
                    if !is_assistant(messages.last()) {
                        return Err(ends_wrong(messages, "the assistant's").at(column(name)));
                    }
                }
                let answer = is_assistant(chosen.first()) && is_assistant(rejected.first());
                match self.prompt()? {
                    Some(prompt) if answer => RowFields::Pair {
                        prompt,
                        chosen: Content::Messages(chosen),
                        rejected: Content::Messages(rejected),
                    },
                    // Both hold the whole conversation; the column only repeats the prompt.
                    _ => {
                        self.used.truncate(before);
                        self.led_pair(split_messages(chosen, rejected)?)?
                    }
                }
            }
            (chosen, rejected) => {
                return Err(Error::data(format!(
                    "is {} while chosen is {}",
                    kind(&rejected.value()),
                    kind(&chosen.value())
                ))
                .at(column("rejected"))
                .fix("write both as text or both as lists of messages"));
            }
        }))
    }

    pub fn step_preference(&mut self) -> Result<Option<RowFields>> {
        let (Some(before), Some(chosen), Some(rejected), Some(prompt)) = (
            self.text("initial_reason_steps")?,
            self.text("chosen")?,
            self.text("rejected")?,
            self.prompt()?,
        ) else {
            return Ok(None);
        };
        Ok(Some(RowFields::StepPair { prompt, before, chosen, rejected }))
    }

    pub fn unpaired(&mut self) -> Result<Option<RowFields>> {
        let Some(label) = self.get("label") else { return Ok(None) };
        let label = match label {
            Value::Bool(label) => *label,
            Value::Number(n) if n.as_f64() == Some(0.0) => false,
            Value::Number(n) if n.as_f64() == Some(1.0) => true,
            Value::String(s) if s.eq_ignore_ascii_case("true") => true,
            Value::String(s) if s.eq_ignore_ascii_case("false") => false,
            other => return Err(wrong("label", other, "true or false")),
        };
        self.used.push("label");
        let answered = self.answered()?;
        Ok(answered.map(|(prompt, completion)| RowFields::Labelled { prompt, completion, label }))
    }

    pub fn target(&mut self) -> Result<Option<RowFields>> {
        let Some(value) = self.get("target") else { return Ok(None) };
        let target =
            number(value).ok_or_else(|| no_number(value, "a number between 0 and 1").at(column("target")))?;
        if !(0.0..=1.0).contains(&target) {
            return Err(Error::data(format!("is {target}, expected a number between 0 and 1"))
                .at(column("target"))
                .fix("scale the targets to probabilities"));
        }
        self.used.push("target");
        let answered = self.answered()?;
        Ok(answered.map(|(prompt, completion)| RowFields::Target { prompt, completion, target }))
    }

    pub fn prompt_only(&mut self) -> Result<Option<RowFields>> {
        Ok(self.prompt()?.map(RowFields::Prompt))
    }

    pub fn group(&mut self) -> Result<Option<RowFields>> {
        let (Some(prompt), Some(completions), Some(rewards)) =
            (self.prompt()?, self.get("completions"), self.get("rewards"))
        else {
            return Ok(None);
        };
        let items = array("completions", completions)?;
        let completions: Result<Vec<Content>> =
            items.iter().enumerate().map(|(i, v)| content(v).map_err(|e| nth("completions", i, e))).collect();
        let rewards = match rewards {
            Value::Object(map) => map
                .iter()
                .filter(|(_, v)| !v.is_null())
                .map(|(name, list)| Ok((name.clone(), numbers("rewards", list, items.len())?)))
                .collect::<Result<_>>()
                .map_err(|e| e.fix("give each name one reward for each completion"))?,
            list => vec![("reward".to_owned(), numbers("rewards", list, items.len())?)],
        };
        self.used.extend(["completions", "rewards"]);
        Ok(Some(RowFields::Group { prompt, completions: completions?, rewards }))
    }

    pub fn steps(&mut self) -> Result<Option<RowFields>> {
        let (Some(prompt), Some(steps), Some(labels)) =
            (self.prompt()?, self.get("completions"), self.get("labels"))
        else {
            return Ok(None);
        };
        let items = array("completions", steps)?;
        let step = |(i, v): (usize, &Value)| {
            text(v).ok_or_else(|| nth("completions", i, expected(v, "the text of a step")))
        };
        let steps: Result<Vec<String>> = items.iter().enumerate().map(step).collect();
        let labels = numbers("labels", labels, items.len())?;
        self.used.extend(["completions", "labels"]);
        Ok(Some(RowFields::Steps { prompt, steps: steps?, labels }))
    }

    /// A prompt with its completion in a column, or a conversation that ends in the completion.
    fn answered(&mut self) -> Result<Option<(Content, Content)>> {
        let before = self.used.len();
        if let Some(completion) = self.completion()?
            && let Some(prompt) = self.prompt()?
        {
            return Ok(Some((prompt, completion)));
        }
        self.used.truncate(before);
        if self.prompt.is_some() {
            return Ok(None);
        }
        let Some(mut messages) = self.messages()? else { return Ok(None) };
        if !is_assistant(messages.last()) {
            return Err(ends_wrong(&messages, "the assistant's").at(column("messages")));
        }
        let answer: Vec<Value> = messages.pop().into_iter().collect();
        Ok(Some((Content::Messages(messages), Content::Messages(answer))))
    }

    fn completion(&mut self) -> Result<Option<Content>> {
        match self.content("completion")? {
            Some(completion) => Ok(Some(completion)),
            None if self.alpaca() && self.get("response").is_none() => self.content("output"),
            None => self.content("response"),
        }
    }

    /// Whether the row has the columns of Alpaca: `instruction`, `input` (often empty) and `output`.
    fn alpaca(&self) -> bool {
        let own = ["prompt", "messages", "conversations"].iter().any(|c| self.get(c).is_some());
        !own && self.get("instruction").is_some()
    }

    /// The instruction, and the input on a line of its own.
    fn instruction(&mut self) -> Result<Option<Content>> {
        let Some(mut prompt) = self.text("instruction")? else { return Ok(None) };
        if let Some(input) = self.text("input")?.filter(|t| !t.trim().is_empty()) {
            prompt = format!("{prompt}\n{input}");
        }
        Ok(Some(Content::Text(prompt)))
    }

    /// What comes before the completion: `prompt`, or `messages` that the assistant has not answered yet.
    fn prompt(&mut self) -> Result<Option<Content>> {
        if let Some(text) = &self.prompt {
            self.used.push("prompt");
            return Ok(Some(Content::Text(text.clone())));
        }
        if self.alpaca() {
            let prompt = self.instruction()?;
            return prompt.map(|prompt| self.led(prompt)).transpose();
        }
        let (name, prompt) = match self.content("prompt")? {
            Some(prompt) => ("prompt", prompt),
            None => match self.messages()? {
                Some(messages) => ("messages", Content::Messages(messages)),
                None => return Ok(None),
            },
        };
        match &prompt {
            Content::Messages(messages) if is_assistant(messages.last()) => {
                Err(ends_wrong(messages, "a user's").at(column(name)))
            }
            _ if name == "messages" => Ok(Some(prompt)),
            _ => self.led(prompt).map(Some),
        }
    }

    /// The prompt after what the columns `system` and `history` (LLaMA-Factory's) put before it.
    fn led(&mut self, prompt: Content) -> Result<Content> {
        let mut all = self.before()?;
        let turns = match prompt {
            Content::Text(text) if all.is_empty() => return Ok(Content::Text(text)),
            Content::Text(text) => vec![json!({ "role": "user", "content": text })],
            Content::Messages(messages) => messages,
        };
        let own = turns.first().filter(|m| m["role"] == "system");
        if let (Some(own), true) = (own, all.first().is_some_and(|m| m["role"] == "system")) {
            if *own != all[0] {
                return Err(Error::data("is not the system message of the conversation")
                    .at(column("system"))
                    .fix("leave one of them out"));
            }
            all.remove(0);
        }
        all.extend(turns);
        Ok(Content::Messages(all))
    }

    fn led_pair(&mut self, fields: RowFields) -> Result<RowFields> {
        match fields {
            RowFields::Pair { prompt, chosen, rejected } => {
                Ok(RowFields::Pair { prompt: self.led(prompt)?, chosen, rejected })
            }
            other => Ok(other),
        }
    }

    /// Messages of the columns `system` and `history`.
    fn before(&mut self) -> Result<Vec<Value>> {
        let mut turns = Vec::new();
        if let Some(system) = self.get("system").filter(|s| *s != "") {
            self.used.push("system");
            let words = system.as_str().ok_or_else(|| expected(system, "text").at(column("system")))?;
            turns.push(json!({ "role": "system", "content": words }));
        }
        if let Some(history) = self.get("history").filter(|h| *h != "") {
            self.used.push("history");
            let wanted = "a list of prompts with their responses";
            let pairs = history.as_array().ok_or_else(|| expected(history, wanted).at(column("history")))?;
            for (i, pair) in pairs.iter().enumerate() {
                let texts = pair.as_array().map(|p| p.iter().map(text).collect::<Option<Vec<String>>>());
                let Some(Some([user, assistant])) =
                    texts.map(|t| t.and_then(|t| <[String; 2]>::try_from(t).ok()))
                else {
                    return Err(nth("history", i, expected(pair, "a list of a prompt and its response")));
                };
                turns.push(json!({ "role": "user", "content": user }));
                turns.push(json!({ "role": "assistant", "content": assistant }));
            }
        }
        Ok(turns)
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.row.get(name).filter(|v| !v.is_null())
    }

    fn content(&mut self, name: &'static str) -> Result<Option<Content>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        self.used.push(name);
        content(value).map(Some).map_err(|e| e.at(column(name)))
    }

    fn text(&mut self, name: &'static str) -> Result<Option<String>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        self.used.push(name);
        text(value).map(Some).ok_or_else(|| wrong(name, value, "text"))
    }

    fn messages(&mut self) -> Result<Option<Vec<Value>>> {
        let Some(name) = CONVERSATION.into_iter().find(|n| self.get(n).is_some()) else { return Ok(None) };
        match self.content(name)? {
            Some(Content::Messages(messages)) => match self.led(Content::Messages(messages))? {
                Content::Messages(messages) => Ok(Some(messages)),
                Content::Text(_) => Ok(None),
            },
            _ => Err(wrong(name, &self.row[name], "a list of messages")),
        }
    }
}

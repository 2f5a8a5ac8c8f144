//! Generated tasks: examples without a file. Each is a file beside this one and a line in [`TASKS`].

mod countdown;

use crate::algo::Wants;
use crate::experience::Sequence;
use crate::source::{Item, Prompt, Source};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes, after `task:`.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Builds it from `data.task`; unknown settings are refused.
    pub build: Build,
}

/// Builds a task from its settings and the run's seed.
pub type Build = fn(&Map<String, Value>, seed: u64) -> Result<Box<dyn Task>>;

/// Every generated task.
pub const TASKS: &[&Entry] = &[&countdown::ENTRY];

/// Questions with known answers, by number.
pub trait Task: Send + Sync {
    /// Question `index`, to learn from or held out.
    fn example(&self, index: u64, held_out: bool) -> Result<Example>;
    /// The reward that fits the task: a verifier's name and settings.
    fn reward(&self) -> (&'static str, Map<String, Value>);
}

/// One question.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// What is asked.
    pub prompt: String,
    /// How a demonstration answers; not always right where the settings say so.
    pub answer: String,
    /// What a verifier needs.
    pub columns: Map<String, Value>,
}

/// The task of that name.
pub fn find(name: &str) -> Result<&'static Entry> {
    TASKS.iter().copied().find(|t| t.name == name).ok_or_else(|| {
        let names: Vec<&str> = TASKS.iter().map(|t| t.name).collect();
        let hint = nearest(name, names.iter().copied()).unwrap_or(names[0]);
        Error::usage(format!("unknown task {name:?}, expected one of {}", names.join(", ")))
            .at("data.train")
            .fix(format!("data.train = [\"task:{hint}\"]"))
    })
}

/// The stream of a task's examples, without end.
pub struct TaskSource {
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    wants: Wants,
    held_out: bool,
    next: u64,
}

impl TaskSource {
    /// Demonstrations or prompts, whichever is wanted.
    pub fn new(task: Arc<dyn Task>, tokenizer: Arc<Tokenizer>, wants: Wants, held_out: bool) -> Result<Self> {
        if wants == Wants::Pairs {
            return Err(Error::usage("a generated task has demonstrations and prompts, not pairs")
                .at("data.train")
                .fix("a file of pairs, or an algorithm that samples"));
        }
        Ok(TaskSource { task, tokenizer, wants, held_out, next: 0 })
    }

    fn item(&self, index: u64) -> Result<Item> {
        let example = self.task.example(index, self.held_out)?;
        let prompt = self.tokenizer.encode_text(&example.prompt)?;
        if self.wants == Wants::Rollouts {
            let (text, columns) = (example.prompt, example.columns);
            return Ok(Item::Ask(Prompt { index, ids: prompt, text, columns, ..Default::default() }));
        }
        let mut ids = prompt.clone();
        ids.extend(self.tokenizer.encode_text(&example.answer)?);
        ids.extend(self.tokenizer.eos().first());
        let trained = (0..ids.len()).map(|i| i >= prompt.len()).collect();
        Ok(Item::Given(vec![Sequence { ids, trained, weight: 1.0, ..Default::default() }]))
    }
}

impl Source for TaskSource {
    fn next(&mut self, n: usize) -> Result<Vec<Item>> {
        let from = self.next;
        self.next += n as u64;
        (from..self.next).map(|i| self.item(i)).collect()
    }
    fn epoch(&self) -> Option<usize> {
        None
    }
    fn state(&self) -> Value {
        json!({ "next": self.next })
    }
    fn restore(&mut self, state: &Value) -> Result<()> {
        let next = state["next"].as_u64();
        self.next = next.ok_or_else(|| Error::data("the task's state has no \"next\""))?;
        Ok(())
    }
}

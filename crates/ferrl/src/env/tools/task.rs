//! Questions with tools as a generated task.

use super::{Environment, ToolEpisode, ToolLimits};
use crate::env::demonstrate;
use crate::task::{Task, TaskExample};
use crate::tool::Tool;
use crate::verify::{self, Verifier};
use ferrl_engine::Result;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A question with its demonstration.
pub(super) struct Question {
    pub prompt: String,
    /// Columns for the verifier.
    pub columns: Map<String, Value>,
    /// The actions of a demonstration; the last one is the answer.
    pub actions: Vec<String>,
}

/// Questions by number.
pub(super) trait Questions: Send + Sync {
    fn question(&self, index: u64, held_out: bool) -> Result<Question>;
}

/// Questions with tools and a verifier.
pub(super) struct ToolTask<Q> {
    pub questions: Q,
    pub tools: Arc<[Arc<dyn Tool>]>,
    pub verifier: Arc<dyn Verifier>,
    pub limits: ToolLimits,
}

impl<Q: Questions> ToolTask<Q> {
    fn open(&self, question: &Question) -> ToolEpisode {
        let Question { prompt, columns, .. } = question;
        let (tools, verifier) = (self.tools.clone(), Some(self.verifier.clone()));
        ToolEpisode::new(prompt.clone(), columns.clone(), tools, verifier, self.limits)
    }
}

impl<Q: Questions> Task for ToolTask<Q> {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let question = self.questions.question(index, held_out)?;
        let mut episode = self.open(&question);
        let mut actions = question.actions.into_iter();
        demonstrate(&mut episode, question.columns, |_| actions.next())
    }

    fn episode(&self, index: u64, held_out: bool) -> Option<Box<dyn Environment>> {
        let question = self.questions.question(index, held_out).ok()?;
        Some(Box::new(self.open(&question)))
    }
}

/// An exact-match verifier of `<answer>` tags with these options.
pub(super) fn exact(mut options: Value) -> Result<Arc<dyn Verifier>> {
    options["take"] = "answer".into();
    Ok(Arc::from(verify::build("exact", options.as_object().unwrap_or(&Map::new()))?))
}

/// Instructions for the tools and the format of the answer.
pub(super) fn instructions(tools: &[Arc<dyn Tool>]) -> String {
    let mut text = String::new();
    for tool in tools {
        let (name, main) = (tool.name(), crate::tool::main_argument(&**tool));
        text += &format!("Call {name} with <{name}>{main}</{name}>. {}\n", tool.about());
    }
    if !tools.is_empty() {
        text += "The result comes between <information> and </information>. ";
    }
    text + "Give the final answer between <answer> and </answer>.\n"
}

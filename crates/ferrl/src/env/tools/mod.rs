//! A question with tools: after an action with tool calls the next observation has their results; an action without calls, or with
//! an `<answer>` before them, ends the episode and is scored by a verifier.
//!
//! Results have the format of the call: `<information>` for Search-R1's tags, `<tool_response>` for Hermes, plain text for
//! Llama 3. A malformed call gets a hint and counts as a call.

mod calculator;
mod python;
mod search;
mod task;

pub(crate) const TOOL_TASKS: &[&crate::task::Entry] = &[&calculator::ENTRY, &search::ENTRY, &python::ENTRY];

use super::{Environment, EpisodeEnd, Next, Turn};
use crate::env;
use crate::tool::call::{self, CallFormat};
use crate::tool::{self, Tool};
use crate::verify::{Sample, Verifier};
use ferrl_engine::Result;
use serde_json::{Map, Value, json};
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ToolLimits {
    /// Maximum number of calls per episode; an action beyond it ends the episode without a reward.
    pub max_calls: usize,
    /// Maximum length of a result in characters; longer ones are truncated.
    pub max_chars: usize,
}

impl Default for ToolLimits {
    fn default() -> Self {
        ToolLimits { max_calls: 4, max_chars: 8000 }
    }
}

/// One question, with tools and a verifier for its answer.
pub struct ToolEpisode {
    prompt: String,
    columns: Map<String, Value>,
    tools: Arc<[Arc<dyn Tool>]>,
    verifier: Option<Arc<dyn Verifier>>,
    limits: ToolLimits,
    calls: usize,
    errors: usize,
}

impl ToolEpisode {
    /// A prompt with the columns of the verifier. Without a verifier the recipe's rewards score the answer.
    pub fn new(
        prompt: String,
        columns: Map<String, Value>,
        tools: Arc<[Arc<dyn Tool>]>,
        verifier: Option<Arc<dyn Verifier>>,
        limits: ToolLimits,
    ) -> Self {
        ToolEpisode { prompt, columns, tools, verifier, limits, calls: 0, errors: 0 }
    }

    /// Runs calls; returns the text of each result and the format of the calls.
    fn run(&mut self, written: Vec<call::WrittenCall>) -> Result<(Vec<String>, CallFormat)> {
        let format = written.first().map_or(CallFormat::Tag, |first| first.format);
        let mut results = Vec::new();
        for one in written {
            if self.calls >= self.limits.max_calls {
                results.push("error: no calls are left".to_string());
                break;
            }
            self.calls += 1;
            let result = match one.call {
                Ok(call) => self.tools[call.tool].call(&call.arguments)?,
                Err(why) => why,
            };
            self.errors += usize::from(result.starts_with(tool::ERROR));
            results.push(result.chars().take(self.limits.max_chars).collect());
        }
        Ok((results, format))
    }

    /// Additional information of the last turn.
    fn extra(&self) -> Map<String, Value> {
        let mut extra = Map::new();
        extra.insert("tool_calls".into(), json!(self.calls));
        extra.insert("tool_errors".into(), json!(self.errors));
        extra
    }

    fn grade(&self, action: &str) -> Result<Turn> {
        let columns = (&self.columns).into();
        let sample = Sample { prompt: &self.prompt, completion: action, columns, ..Default::default() };
        let Some(verifier) = &self.verifier else {
            return Ok(Turn { end: Some(EpisodeEnd::Terminated), extra: self.extra(), ..Default::default() });
        };
        let score = verifier.score(&sample)?;
        let mut extra = self.extra();
        extra.extend(score.extra);
        extra.extend(score.components.into_iter().map(|(name, part)| (name, json!(part))));
        Ok(Turn {
            reward: score.reward,
            score: score.score.or(Some(score.reward)),
            end: Some(EpisodeEnd::Terminated),
            extra,
            ..Default::default()
        })
    }
}

fn observation(results: &[String], format: CallFormat) -> String {
    match format {
        CallFormat::Tag => format!("\n\n<information>{}</information>\n\n", results.join("\n")),
        CallFormat::Hermes => {
            let one = |result: &String| format!("<tool_response>\n{result}\n</tool_response>\n");
            format!("\n{}", results.iter().map(one).collect::<String>())
        }
        CallFormat::Llama => format!("\n{}\n", results.join("\n")),
    }
}

impl Environment for ToolEpisode {
    fn start(&mut self) -> env::Result<String> {
        Ok(self.prompt.clone())
    }

    fn waits(&self) -> bool {
        self.tools.iter().any(|tool| tool.waits())
    }

    fn step(&mut self, action: &str) -> env::Result<Turn> {
        let written = call::parse(action, &self.tools);
        let answered = action.find("<answer>");
        let first = match written.first() {
            Some(first) if answered.is_none_or(|at| first.at < at) => first.at,
            _ => return Ok(self.grade(action)?),
        };
        // Calls after an answer do not count.
        let until = answered.filter(|at| *at > first).unwrap_or(action.len());
        if self.calls >= self.limits.max_calls {
            let shown = observation(&["error: no calls are left".into()], written[0].format);
            let end = Some(EpisodeEnd::Terminated);
            let extra = self.extra();
            let (next, score) = (Next::Observation(shown), self.verifier.is_some().then_some(0.0));
            return Ok(Turn { next, score, end, extra, ..Default::default() });
        }
        let written = written.into_iter().filter(|one| one.at < until).collect();
        let (results, format) = self.run(written)?;
        Ok(Turn {
            next: Next::Observation(observation(&results, format)),
            extra: self.extra(),
            results,
            ..Default::default()
        })
    }
}

#[cfg(test)]
mod tests;

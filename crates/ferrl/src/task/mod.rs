//! Generated tasks: examples without a data file. Each is a file of this folder and a line in [`TASKS`].

pub mod calibration;
mod chain;
mod code;
mod countdown;
mod letter_counting;
mod questions;

use crate::algo::Feed;
use crate::data::Encoder;
use crate::env::Environment;
use crate::env::game::GAMES;
use crate::env::tools::TOOL_TASKS;
use crate::env::{tabular, trading};
use crate::episode::EpisodeKey;
use crate::experience::{Evidence, Sequence};
use crate::fixes::unknown;
use crate::recipe::read_settings;
use crate::reward::{QUESTION, RATIONALE};
use crate::source::{Item, Prompt};
use crate::verify::{self, Sample, Score, Verifier};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, Schema, schema_for};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::sync::Arc;

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes, after `task:`.
    pub name: &'static str,
    pub about: &'static str,
    pub schema: fn() -> Schema,
    /// Builds it from `data.task`; unknown settings are an error.
    pub build: BuildTask,
}

pub type BuildTask = fn(&Map<String, Value>, seed: u64) -> Result<Box<dyn Task>>;

/// The settings of a task, checked: `data.task` of the recipe.
pub(crate) fn options<T: DeserializeOwned + JsonSchema>(values: &Map<String, Value>) -> Result<T> {
    read_settings("data.task", values)
}

/// The lists that make up the registry.
const LISTS: [&[&Entry]; 5] = [
    &[&countdown::ENTRY, &chain::ENTRY, &letter_counting::ENTRY, &calibration::ENTRY],
    GAMES,
    TOOL_TASKS,
    &[&code::ENTRY, &tabular::ENTRY, &trading::ENTRY],
    questions::QUESTIONS,
];

pub const TASKS: &[&Entry] = &joined::<{ total(&LISTS) }>(&LISTS);

const fn total(lists: &[&[&Entry]]) -> usize {
    let (mut sum, mut list) = (0, 0);
    while list < lists.len() {
        sum += lists[list].len();
        list += 1;
    }
    sum
}

const fn joined<const N: usize>(lists: &[&[&'static Entry]]) -> [&'static Entry; N] {
    let mut all = [lists[0][0]; N];
    let (mut n, mut list) = (0, 0);
    while list < lists.len() {
        let mut i = 0;
        while i < lists[list].len() {
            all[n] = lists[list][i];
            (n, i) = (n + 1, i + 1);
        }
        list += 1;
    }
    all
}

/// Prompts with known answers, by index.
pub trait Task: Send + Sync {
    /// Example `index` of the training or the held-out part.
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample>;
    /// The verifier of completions with its settings; `None` for tasks with episodes, which are rewarded by their
    /// environment.
    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        None
    }
    /// Episode `index`, for tasks with several turns. Its first observation is the prompt of example `index`.
    fn episode(&self, _index: u64, _held_out: bool) -> Option<Box<dyn Environment>> {
        None
    }
    /// The example of a row of data, for tasks that read rows.
    fn of_row(&self, _row: &Map<String, Value>) -> Option<Result<TaskExample>> {
        None
    }
    /// Completions of different quality of example `index`, each with its true reward between 0 and 1, in descending order; empty
    /// if the task has none.
    fn answers(&self, _index: u64, _held_out: bool) -> Result<Vec<(String, f32)>> {
        Ok(Vec::new())
    }
    /// A right and a wrong next step of example `index`, for tasks with steps.
    fn step_pair(&self, _index: u64, _held_out: bool) -> Result<Option<StepPair>> {
        Ok(None)
    }
}

/// Kind of demonstrations: solutions, verdicts on solutions (GenRM), or rationales followed by a verdict (GenRM-CoT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum DemonstrationKind {
    #[default]
    Solutions,
    Verdicts,
    Rationales,
}

impl DemonstrationKind {
    /// Prompt and completion of a demonstration. `worked_out` is the rationale.
    fn demonstrate(
        self,
        prompt: String,
        solution: String,
        right: bool,
        worked_out: &str,
    ) -> (String, String) {
        let verdict = if right { "Yes" } else { "No" };
        match self {
            DemonstrationKind::Solutions => (prompt, solution),
            DemonstrationKind::Verdicts => (format!("{prompt}{solution}{QUESTION}"), verdict.into()),
            DemonstrationKind::Rationales => {
                let rationale = format!("{}{QUESTION}{verdict}", worked_out.trim_end());
                (format!("{prompt}{solution}{RATIONALE}"), rationale)
            }
        }
    }
}

/// Two continuations of the same prefix of a solution.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPair {
    /// The prefix, without mistakes.
    pub before: String,
    pub chosen: String,
    pub rejected: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskExample {
    pub prompt: String,
    /// The completion of a demonstration; with noise it may be wrong.
    pub answer: String,
    /// Columns for the verifier.
    pub columns: Map<String, Value>,
    /// For tasks with several turns, instead of `answer`: each action with the observation after it.
    pub turns: Vec<(String, String)>,
}

pub fn find(name: &str) -> Result<&'static Entry> {
    TASKS.iter().copied().find(|t| t.name == name).ok_or_else(|| {
        let fix = |near: &str| format!("data.train = [\"task:{near}\"]");
        unknown("task", name, TASKS.iter().map(|t| t.name), fix).at("data.train")
    })
}

/// A task's examples in the form an algorithm needs, by index and without end.
pub struct TaskExamples {
    /// The name in recipes, after `task:`.
    pub name: String,
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    feed: Feed,
    held_out: bool,
    /// Whether prompts have a column with their task's name: if several kinds of data are mixed.
    pub named: bool,
}

impl TaskExamples {
    /// Examples for an algorithm; an error if the task has none of the kind.
    pub fn new(
        name: &str,
        task: Arc<dyn Task>,
        tokenizer: Arc<Tokenizer>,
        feed: Feed,
        held_out: bool,
    ) -> Result<Self> {
        let has = match feed {
            Feed::Demonstrations | Feed::Rollouts => true,
            Feed::StepPairs => task.step_pair(0, held_out)?.is_some(),
            Feed::Weighted | Feed::Pairs | Feed::Labelled | Feed::Targets => {
                task.answers(0, held_out)?.len() > 1
            }
        };
        if !has {
            return Err(Error::usage(format!("task:{name} has no {}", feed.words()))
                .at("data.train")
                .fix("data.train = [\"task:chain\"], a file of such rows, or an algorithm that samples"));
        }
        Ok(TaskExamples { name: name.into(), task, tokenizer, feed, held_out, named: false })
    }

    /// Example `index` of the task; `number` is the prompt's number in the run.
    pub fn item(&self, index: u64, number: u64, encoder: &Encoder) -> Result<Item> {
        self.example(index, number, encoder).map_err(|e| e.at(format!("task:{} example {index}", self.name)))
    }

    fn example(&self, index: u64, number: u64, encoder: &Encoder) -> Result<Item> {
        let example = self.task.example(index, self.held_out)?;
        // An environment in another process returns its first observation when the episode starts.
        let (prompt, messages) = match example.prompt.is_empty() {
            true => Default::default(),
            false => encoder.first(&example.prompt)?,
        };
        let eos = encoder.end_of_answer(!messages.is_empty());
        let answers = || self.task.answers(index, self.held_out);
        // Of several completions a different one in each epoch.
        let one = || -> Result<(String, f32)> {
            let mut all = answers()?;
            let turn = index as usize % all.len();
            Ok(all.swap_remove(turn))
        };
        let whole = |text: &str, kind: Evidence| self.sequence(&prompt, text, eos, kind);
        Ok(Item::Sequences(match self.feed {
            Feed::Rollouts => {
                return Ok(Item::Prompt(self.prompt((index, number), example, (prompt, messages))));
            }
            Feed::Demonstrations if !example.turns.is_empty() => {
                let chat = (!messages.is_empty()).then_some(encoder);
                vec![self.turns(prompt, &example.turns, eos, chat)?]
            }
            Feed::Demonstrations => vec![whole(&example.answer, Evidence::Plain)?],
            Feed::Weighted => {
                let rewarded = |(text, r): &(String, f32)| Ok(whole(text, Evidence::Plain)?.rewarded(*r));
                answers()?.iter().map(rewarded).collect::<Result<_>>()?
            }
            Feed::Pairs => {
                let all = answers()?;
                vec![whole(&all[0].0, Evidence::Chosen)?, whole(&all[all.len() - 1].0, Evidence::Rejected)?]
            }
            Feed::Labelled => {
                let (text, reward) = one()?;
                vec![whole(&text, Evidence::Labelled(reward >= 1.0))?]
            }
            Feed::Targets => {
                let (text, reward) = one()?;
                vec![whole(&text, Evidence::Target(reward))?]
            }
            Feed::StepPairs => self.step_pair(index, prompt)?,
        }))
    }

    fn prompt(
        &self,
        (index, number): (u64, u64),
        example: TaskExample,
        (ids, messages): (Vec<u32>, Vec<Value>),
    ) -> Prompt {
        let (text, mut columns) = (example.prompt, example.columns);
        if self.named {
            columns.insert(TASK.into(), self.name.as_str().into());
        }
        let played = self.task.episode(index, self.held_out).is_some();
        let key = EpisodeKey { task: self.name.clone(), index, held_out: self.held_out };
        let episode = played.then_some(key);
        Prompt { index: number, ids, text, messages, columns, episode, ..Default::default() }
    }

    /// A right and a wrong next step after the same prefix.
    fn step_pair(&self, index: u64, mut begun: Vec<u32>) -> Result<Vec<Sequence>> {
        let pair = self.task.step_pair(index, self.held_out)?;
        let pair = pair.ok_or_else(|| Error::data(format!("question {index} has no steps")))?;
        begun.extend(self.tokenizer.encode_text(&pair.before)?);
        Ok(vec![
            self.sequence(&begun, &pair.chosen, None, Evidence::Chosen)?,
            self.sequence(&begun, &pair.rejected, None, Evidence::Rejected)?,
        ])
    }

    /// An episode as one sequence: actions are trained, observations are masked.
    fn turns(
        &self,
        prompt: Vec<u32>,
        turns: &[(String, String)],
        end: Option<u32>,
        chat: Option<&Encoder>,
    ) -> Result<Sequence> {
        let (mut ids, mut trained) = (prompt.clone(), vec![false; prompt.len()]);
        for (i, (action, observation)) in turns.iter().enumerate() {
            ids.extend(self.tokenizer.encode_text(action)?);
            ids.extend(end);
            trained.resize(ids.len(), true);
            if i + 1 < turns.len() {
                ids.extend(match chat {
                    None => self.tokenizer.encode_text(observation)?,
                    Some(encoder) => {
                        let mut next =
                            encoder.next_turn(&[json!({ "role": "user", "content": observation })])?;
                        next.drain(..usize::from(next.first().copied() == end));
                        next
                    }
                });
                trained.resize(ids.len(), false);
            }
        }
        Ok(Sequence { ids, trained, weight: 1.0, ..Default::default() })
    }

    /// A sequence whose tokens after the prompt are trained.
    fn sequence(&self, prompt: &[u32], answer: &str, end: Option<u32>, kind: Evidence) -> Result<Sequence> {
        let mut ids = prompt.to_vec();
        ids.extend(self.tokenizer.encode_text(answer)?);
        ids.extend(end);
        let trained = (0..ids.len()).map(|i| i >= prompt.len()).collect();
        let pair = matches!(kind, Evidence::Chosen | Evidence::Rejected).then_some(0);
        Ok(Sequence { ids, trained, weight: 1.0, kind, pair, ..Default::default() })
    }
}

/// Column with the name of a prompt's task, if several kinds of data are mixed.
pub const TASK: &str = "task";

/// The verifier of several tasks: scores each completion with the verifier of its prompt's task.
pub struct ByTask(Vec<(String, Box<dyn Verifier>)>);

impl ByTask {
    /// The verifier of some tasks and suites.
    pub fn of(
        tasks: &[(String, Arc<dyn Task>)],
        suites: Vec<(String, Box<dyn Verifier>)>,
    ) -> Result<Option<Box<dyn Verifier>>> {
        let rewarded = tasks.iter().filter_map(|(name, task)| Some((name, task.reward()?)));
        let mut all = rewarded
            .map(|(name, (verifier, options))| Ok((name.clone(), verify::build(verifier, &options)?)))
            .collect::<Result<Vec<_>>>()?;
        all.extend(suites);
        Ok(match all.len() {
            0 | 1 => all.pop().map(|(_, verifier)| verifier),
            _ => Some(Box::new(ByTask(all))),
        })
    }

    fn find(&self, sample: &Sample<'_>) -> Result<&dyn Verifier> {
        let name = sample.columns.get(TASK).and_then(Value::as_str).unwrap_or_default();
        let found = self.0.iter().find(|(task, _)| task == name);
        found.map(|(_, verifier)| &**verifier).ok_or_else(|| {
            let what = format!(
                "the prompt is not from a generated task or suite, so it has no reward (column task: {name:?})"
            );
            sample.error(Error::data(what)).fix("add a [[reward]] that fits all of data.train")
        })
    }
}

impl Verifier for ByTask {
    fn name(&self) -> &str {
        TASK
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        self.find(sample)?.score(sample)
    }
    fn reads(&self) -> &'static [&'static str] {
        self.0.iter().map(|(_, verifier)| verifier.reads()).find(|r| !r.is_empty()).unwrap_or_default()
    }
    fn wrong_step(&self, sample: &Sample<'_>) -> Result<Option<Range<usize>>> {
        self.find(sample)?.wrong_step(sample)
    }
}

//! Generated tasks: examples without a file. Each is a file beside this one and a line in [`TASKS`].

mod chain;
mod countdown;
mod letter_counting;

use crate::algo::Wants;
use crate::experience::{Kind, Sequence};
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
    /// The file it is written in: the comments of its settings are the manual's text.
    pub source: &'static str,
    /// Its settings where a recipe says nothing.
    pub defaults: fn() -> Value,
    /// Builds it from `data.task`; unknown settings are refused.
    pub build: Build,
}

/// Builds a task from its settings and the run's seed.
pub type Build = fn(&Map<String, Value>, seed: u64) -> Result<Box<dyn Task>>;

/// Every generated task.
pub const TASKS: &[&Entry] = &[&countdown::ENTRY, &chain::ENTRY, &letter_counting::ENTRY];

/// Questions with known answers, by number.
pub trait Task: Send + Sync {
    /// Question `index`, to learn from or held out.
    fn example(&self, index: u64, held_out: bool) -> Result<Example>;
    /// The reward that fits the task: a verifier's name and settings.
    fn reward(&self) -> (&'static str, Map<String, Value>);
    /// Answers of different quality to question `index`, each with its true reward between 0 and 1, the best first; none
    /// where the task has nothing to compare.
    fn answers(&self, _index: u64, _held_out: bool) -> Result<Vec<(String, f32)>> {
        Ok(Vec::new())
    }
    /// A right and a wrong step on the way to the answer of question `index`, where answers have steps.
    fn step_pair(&self, _index: u64, _held_out: bool) -> Result<Option<StepPair>> {
        Ok(None)
    }
}

/// Two ways to go on from the same beginning of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPair {
    /// The beginning, all right.
    pub before: String,
    /// A right step.
    pub chosen: String,
    /// A wrong step.
    pub rejected: String,
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
    /// Whatever the algorithm wants to learn from, where the task has it.
    pub fn new(task: Arc<dyn Task>, tokenizer: Arc<Tokenizer>, wants: Wants, held_out: bool) -> Result<Self> {
        let has = match wants {
            Wants::Demonstrations | Wants::Rollouts => true,
            Wants::StepPairs => task.step_pair(0, held_out)?.is_some(),
            Wants::Weighted | Wants::Pairs | Wants::Labelled | Wants::Targets => {
                task.answers(0, held_out)?.len() > 1
            }
        };
        if !has {
            return Err(Error::usage(format!("this generated task has no {}", wants.words()))
                .at("data.train")
                .fix("data.train = [\"task:chain\"], a file of such rows, or an algorithm that samples"));
        }
        Ok(TaskSource { task, tokenizer, wants, held_out, next: 0 })
    }

    fn item(&self, index: u64) -> Result<Item> {
        let example = self.task.example(index, self.held_out)?;
        let prompt = self.tokenizer.encode_text(&example.prompt)?;
        let eos = self.tokenizer.eos().first().copied();
        let answers = || self.task.answers(index, self.held_out);
        // Of several answers, a different one each time it is that number's turn.
        let one = || -> Result<(String, f32)> {
            let mut all = answers()?;
            let turn = index as usize % all.len();
            Ok(all.swap_remove(turn))
        };
        let whole = |text: &str, kind: Kind| self.sequence(&prompt, text, eos, kind);
        Ok(Item::Given(match self.wants {
            Wants::Rollouts => {
                let (text, columns) = (example.prompt, example.columns);
                return Ok(Item::Ask(Prompt { index, ids: prompt, text, columns, ..Default::default() }));
            }
            Wants::Demonstrations => vec![whole(&example.answer, Kind::Plain)?],
            Wants::Weighted => {
                let rewarded = |(text, r): &(String, f32)| Ok(whole(text, Kind::Plain)?.rewarded(*r));
                answers()?.iter().map(rewarded).collect::<Result<_>>()?
            }
            Wants::Pairs => {
                let all = answers()?;
                vec![whole(&all[0].0, Kind::Chosen)?, whole(&all[all.len() - 1].0, Kind::Rejected)?]
            }
            Wants::Labelled => {
                let (text, reward) = one()?;
                vec![whole(&text, Kind::Labelled(reward >= 1.0))?]
            }
            Wants::Targets => {
                let (text, reward) = one()?;
                vec![whole(&text, Kind::Target(reward))?]
            }
            Wants::StepPairs => {
                let pair = self.task.step_pair(index, self.held_out)?;
                let pair = pair.ok_or_else(|| Error::data(format!("question {index} has no steps")))?;
                let mut begun = prompt.clone();
                begun.extend(self.tokenizer.encode_text(&pair.before)?);
                vec![
                    self.sequence(&begun, &pair.chosen, None, Kind::Chosen)?,
                    self.sequence(&begun, &pair.rejected, None, Kind::Rejected)?,
                ]
            }
        }))
    }

    /// Tokens of which those after the prompt are trained.
    fn sequence(&self, prompt: &[u32], answer: &str, end: Option<u32>, kind: Kind) -> Result<Sequence> {
        let mut ids = prompt.to_vec();
        ids.extend(self.tokenizer.encode_text(answer)?);
        ids.extend(end);
        let trained = (0..ids.len()).map(|i| i >= prompt.len()).collect();
        let pair = matches!(kind, Kind::Chosen | Kind::Rejected).then_some(0);
        Ok(Sequence { ids, trained, weight: 1.0, kind, pair, ..Default::default() })
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

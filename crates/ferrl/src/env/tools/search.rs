//! Questions about documents with a search tool: the user's documents and questions, or generated ones about people with a
//! document each. The people of evaluations are held out.

use super::ToolLimits;
use super::task::{Question, Questions, ToolTask, exact, instructions};
use crate::data::{columns_of, each_row};
use crate::task::{Entry, options};
use crate::tool::{self, Document, SearchIndex, SearchTool, Tool};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use schemars::schema_for;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "search",
    about: "questions about documents with a search to call, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let tools = o.tools(seed)?;
        Ok(Box::new(ToolTask {
            verifier: exact(json!({ "ignore_case": true, "ignore_punctuation": true }))?,
            limits: ToolLimits { max_calls: o.max_calls, ..Default::default() },
            questions: SearchQuestion {
                told: o.instructions.then(|| instructions(&tools)),
                rows: o.rows()?,
                seed,
                o,
            },
            tools,
        }))
    },
};

with_defaults! {
struct Options {
    /// File of documents: rows with `text` or `contents`, optionally `title`; unset generates people and questions.
    documents: Option<String> = None,
    /// Address of a retrieval service instead of `documents`, such as `http://127.0.0.1:8000/retrieve`.
    url: Option<String> = None,
    /// File of questions: rows with `question` (or `prompt`) and `answer` (or `golden_answers`); a text or a list.
    questions: Option<String> = None,
    /// Fraction of a file's questions, from its end, that is held out for evaluations. [0, 1]
    held_out: f64 = 0.1,
    /// Number of generated people. [10, 200000]
    people: usize = 1000,
    /// Documents per result (top k). [1, 100]
    topk: usize = 3,
    /// Whether the search is available; without it episodes have one turn.
    tool: bool = true,
    /// Maximum number of tool calls per episode. [0, 1000]
    max_calls: usize = 4,
    /// Fraction of demonstrations that search; the others give the right answer directly. [0, 1]
    demonstrated: f64 = 0.5,
    /// Whether the prompt explains the tool and the answer's form.
    instructions: bool = true,
}
}

impl Options {
    fn tools(&self, seed: u64) -> Result<Arc<[Arc<dyn Tool>]>> {
        let own = self.documents.is_some() || self.url.is_some();
        if own != self.questions.is_some() {
            let (has, lacks) = if own { ("documents", "questions") } else { ("questions", "documents") };
            return Err(Error::usage(format!("{has} without {lacks}"))
                .at(format!("data.task.{lacks}"))
                .fix(format!("data.task.{lacks} = \"{lacks}.jsonl\"")));
        }
        if !self.tool {
            return Ok(Vec::new().into());
        }
        if own {
            let keys =
                [("documents", json!(self.documents)), ("url", json!(self.url)), ("topk", json!(self.topk))];
            let given = keys.into_iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.to_string(), v));
            return Ok(vec![tool::build("search", &given.collect())?].into());
        }
        let documents = (0..self.people).map(|i| Person::new(seed, i).document()).collect();
        let search: Arc<dyn Tool> =
            Arc::new(SearchTool::over(Arc::new(SearchIndex::new(documents)), self.topk));
        Ok(vec![search].into())
    }

    /// Questions and answers of the file.
    fn rows(&self) -> Result<Vec<(String, Value)>> {
        let Some(path) = self.questions.as_ref().map(Path::new) else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        each_row(path, |place, row| {
            let question = ["question", "prompt"].iter().find_map(|name| row.get(*name)?.as_str());
            let answer = ["answer", "golden_answers", "answers"].iter().find_map(|name| row.get(*name));
            let (Some(question), Some(answer)) = (question, answer) else {
                let what = format!("a row needs `question` and `answer`; it has {}", columns_of(&row));
                return Err(Error::data(what).at(place));
            };
            rows.push((question.to_string(), answer.clone()));
            Ok(())
        })?;
        if rows.is_empty() {
            return Err(Error::data("no questions").at(path.display()));
        }
        Ok(rows)
    }
}

const FIRST: [&str; 20] = [
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kira", "Leo", "Mila", "Nils",
    "Olga", "Paul", "Rosa", "Sam", "Tea", "Vito",
];
const SYLLABLES: [&str; 20] = [
    "ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we",
    "xi", "yo", "zu",
];
const CITIES: [&str; 20] = [
    "Athens", "Bergen", "Cairo", "Delhi", "Essen", "Faro", "Ghent", "Hanoi", "Izmir", "Jena", "Kyoto",
    "Lima", "Malmo", "Nice", "Oslo", "Porto", "Quito", "Rome", "Sofia", "Turin",
];
const TRADES: [&str; 20] = [
    "actor", "baker", "cook", "dancer", "editor", "farmer", "guard", "hunter", "judge", "lawyer", "miner",
    "nurse", "painter", "pilot", "porter", "sailor", "singer", "tailor", "teacher", "weaver",
];
const PETS: [&str; 20] = [
    "bee", "camel", "cat", "crab", "dog", "duck", "eel", "frog", "goat", "goose", "horse", "lizard", "mouse",
    "newt", "owl", "parrot", "rabbit", "sheep", "snail", "toad",
];

/// A generated person.
struct Person {
    name: String,
    city: &'static str,
    trade: &'static str,
    pet: &'static str,
}

impl Person {
    /// Person `number`; no two have the same surname.
    fn new(seed: u64, number: usize) -> Person {
        let mut draw = TaskDraw::new("search people", seed, number as u64);
        let mut surname = String::new();
        // The digits of an odd multiple modulo a power of 20 are a different word for every number.
        let mut word = (number * 7919 + 4211) % 160_000 + 160_000 * (number / 160_000);
        while surname.len() < 8 || word > 0 {
            surname += SYLLABLES[word % 20];
            word /= 20;
        }
        surname[..1].make_ascii_uppercase();
        Person {
            name: format!("{} {surname}", FIRST[draw.below(20)]),
            city: CITIES[draw.below(20)],
            trade: TRADES[draw.below(20)],
            pet: PETS[draw.below(20)],
        }
    }

    fn document(&self) -> Document {
        let Person { name, city, trade, pet } = self;
        let text = format!("{name} lives in {city}, works as a {trade} and owns a {pet}.");
        Document { title: String::new(), text }
    }

    /// A question about one of the facts, with its answer.
    fn asked(&self, fact: usize) -> (String, &'static str) {
        let Person { name, city, trade, pet } = self;
        match fact {
            0 => (format!("Where does {name} live?"), city),
            1 => (format!("What does {name} work as?"), trade),
            _ => (format!("What animal does {name} own?"), pet),
        }
    }
}

struct SearchQuestion {
    /// Instructions for the tool, if the prompt has them.
    told: Option<String>,
    rows: Vec<(String, Value)>,
    seed: u64,
    o: Options,
}

impl SearchQuestion {
    /// The row of question `index`: training rows first, the held-out fraction behind them.
    fn split(&self, count: usize, index: u64, held_out: bool, draw: &mut TaskDraw) -> usize {
        let kept = (((1.0 - self.o.held_out) * count as f64).round() as usize).clamp(1, count);
        match held_out && kept < count {
            true => kept + index as usize % (count - kept),
            false => draw.below(kept),
        }
    }
}

impl Questions for SearchQuestion {
    fn question(&self, index: u64, held_out: bool) -> Result<Question> {
        let stream = if held_out { "search held out" } else { "search" };
        let mut draw = TaskDraw::new(stream, self.seed, index);
        let made_up = self.rows.is_empty();
        let count = if made_up { self.o.people } else { self.rows.len() };
        let number = self.split(count, index, held_out, &mut draw);
        let (mut prompt, query, answer) = match made_up {
            true => {
                let person = Person::new(self.seed, number);
                let (question, answer) = person.asked(draw.below(3));
                (question, person.name, json!(answer))
            }
            false => {
                let (question, answer) = self.rows[number].clone();
                (question.clone(), question, answer)
            }
        };
        prompt.push('\n');
        prompt.extend(self.told.as_deref());
        let said = match &answer {
            Value::Array(any) => any.first().and_then(Value::as_str).unwrap_or_default().to_string(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let mut actions = Vec::new();
        if self.o.tool && draw.chance(self.o.demonstrated) {
            actions.push(format!("<search>{query}</search>"));
        }
        actions.push(format!("<answer>{said}</answer>"));
        Ok(Question { prompt, columns: Map::from_iter([("answer".to_string(), answer)]), actions })
    }
}

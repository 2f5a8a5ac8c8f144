//! Sums worked out term by term: the prompt is `7+5-3:`, the completion the lines `7+5=12` and `12-3=9`. Every completion has a
//! true reward and every line is right or wrong, so the task has demonstrations, preference pairs, labels, soft targets, pairs of
//! steps, and prompts.

use super::{DemonstrationKind, Entry, StepPair, Task, TaskExample, options, schema_for};
use crate::verify::chain::Chain;
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::{name_words, philox4x32};
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "chain",
    about: "sums worked out term by term; with pairs, labels and steps to learn from",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(ChainTask { options: options(values)?, seed })),
};

with_defaults! {
struct Options {
    /// Steps of a sum: one less than its terms. [1, 32]
    steps: usize = 3,
    /// Largest term. [2, 1000000]
    max_number: i64 = 9,
    /// Fraction of demonstrations with a wrong step. [0, 1]
    noise: f64 = 0.0,
    /// Kind of demonstrations: `solutions`, `verdicts` on a solution (GenRM), or `rationales` that recompute the sum before the
    /// verdict (GenRM-CoT).
    kind: DemonstrationKind = DemonstrationKind::Solutions,
}
}

struct ChainTask {
    options: Options,
    seed: u64,
}

/// Fraction of all sums that is held out.
const HELD_OUT: f64 = 0.1;

/// Whether a sum is held out, by a hash of its terms alone.
fn is_held_out(terms: &[i64]) -> bool {
    let words = name_words(&format!("{terms:?}"));
    let mixed = philox4x32([words[0], words[1], 0, 0], name_words("chain split"))[0];
    f64::from(mixed) < HELD_OUT * 4_294_967_296.0
}

impl ChainTask {
    /// Sum `index` and its stream of random numbers.
    fn chain(&self, index: u64, held_out: bool) -> Result<(Chain, TaskDraw)> {
        let mut draw = TaskDraw::new(if held_out { "chain held out" } else { "chain" }, self.seed, index);
        let most = self.options.max_number as usize;
        for _ in 0..10_000 {
            let mut terms = vec![1 + draw.below(most) as i64];
            for _ in 0..self.options.steps {
                let (sum, term): (i64, i64) = (terms.iter().sum(), 1 + draw.below(most) as i64);
                terms.push(if draw.chance(0.5) && term <= sum { -term } else { term });
            }
            if is_held_out(&terms) == held_out {
                return Ok((Chain { terms }, draw));
            }
        }
        Err(Error::usage("found no such sum in 10000 draws").at("data.task").fix("a larger max_number"))
    }

    /// A random wrong step: its index and error.
    fn slip(&self, draw: &mut TaskDraw) -> (usize, i64) {
        let off = [1, -1, 2, -2, 10, -10][draw.below(6)];
        (draw.below(self.options.steps), off)
    }
}

impl Task for ChainTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let (chain, mut draw) = self.chain(index, held_out)?;
        let slips = draw.chance(self.options.noise);
        let slip = self.slip(&mut draw);
        let answer = chain.lines(slips.then_some(slip)).concat();
        let columns = json!({ "terms": chain.terms }).as_object().cloned().unwrap_or_default();
        let worked_out = chain.lines(None).concat();
        let (prompt, answer) = self.options.kind.demonstrate(chain.prompt(), answer, !slips, &worked_out);
        Ok(TaskExample { prompt, answer, columns, ..Default::default() })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        Some(("chain", Map::new()))
    }

    fn answers(&self, index: u64, held_out: bool) -> Result<Vec<(String, f32)>> {
        let (chain, mut draw) = self.chain(index, held_out)?;
        let slip = self.slip(&mut draw);
        let share = slip.0 as f32 / chain.len() as f32;
        Ok(vec![(chain.lines(None).concat(), 1.0), (chain.lines(Some(slip)).concat(), share)])
    }

    fn step_pair(&self, index: u64, held_out: bool) -> Result<Option<StepPair>> {
        let (chain, mut draw) = self.chain(index, held_out)?;
        let (at, off) = self.slip(&mut draw);
        let (right, wrong) = (chain.lines(None), chain.lines(Some((at, off))));
        let before = right[..at].concat();
        Ok(Some(StepPair { before, chosen: right[at].clone(), rejected: wrong[at].clone() }))
    }
}

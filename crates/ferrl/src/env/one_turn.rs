//! A prompt with a verifier as an environment of one turn.

use super::{Environment, EpisodeEnd, Result, Turn};
use crate::task::TaskExample;
use crate::verify::{Sample, Verifier};
use serde_json::json;

/// One prompt of a generated task.
pub(super) struct OneTurn {
    pub example: TaskExample,
    pub verifier: Box<dyn Verifier>,
}

impl Environment for OneTurn {
    fn start(&mut self) -> Result<String> {
        Ok(self.example.prompt.clone())
    }

    fn step(&mut self, action: &str) -> Result<Turn> {
        let TaskExample { prompt, columns, .. } = &self.example;
        let sample = Sample { prompt, completion: action, columns: columns.into(), ..Default::default() };
        let score = self.verifier.score(&sample)?;
        let mut extra = score.extra;
        extra.extend(score.components.into_iter().map(|(name, part)| (name, json!(part))));
        let right = score.score.or(Some(score.reward));
        Ok(Turn {
            reward: score.reward,
            score: right,
            end: Some(EpisodeEnd::Terminated),
            extra,
            ..Default::default()
        })
    }
}

//! Restores the stage after a failed step, so that it can be saved and resumed before that step.
//!
//! Most of a step changes no weight: data, sampling, rewards, the first loss. The small state that it changes (position in the
//! data, adaptive coefficients, rollouts in flight) is restored. Weights are not copied: a step that fails after one of its updates
//! cannot be undone, and the run resumes from the last checkpoint.

use crate::partial::Unfinished;
use crate::train::{Stage, StepExperience};
use ferrl_engine::Result;
use ferrl_engine::train::ModelTrainer;
use serde_json::Value;
use std::collections::VecDeque;

/// State of a stage between two steps, without its weights.
pub struct Before {
    source: Value,
    algorithm: Value,
    ahead: VecDeque<StepExperience>,
    unfinished: Vec<Unfinished>,
    one_pass: bool,
    step: u64,
    weights: Vec<(u64, u64)>,
}

impl Stage {
    /// The state for [`Stage::go_back`].
    pub fn before_step(&self) -> Before {
        Before {
            source: self.source.state(),
            algorithm: self.algo.state(),
            ahead: self.ahead.clone(),
            unfinished: self.unfinished.clone(),
            one_pass: self.one_pass,
            step: self.step,
            weights: self.weights_version(),
        }
    }

    /// Restores everything but the weights; returns whether these have not changed.
    pub fn go_back(&mut self, before: Before) -> Result<bool> {
        let same = !self.updating && self.weights_version() == before.weights;
        self.source.restore(&before.source)?;
        if !before.algorithm.is_null() {
            self.algo.restore(&before.algorithm)?;
        }
        (self.ahead, self.unfinished) = (before.ahead, before.unfinished);
        (self.one_pass, self.step) = (before.one_pass, before.step);
        self.trainers_mut().for_each(ModelTrainer::zero_grads);
        // Ranks that failed at different moments have gathered different layers.
        self.trainers_mut().for_each(|trainer| trainer.model.release_all());
        self.reference.iter_mut().for_each(|reference| reference.release());
        self.release_weights()?;
        Ok(same)
    }

    /// Changes whenever a weight or a moment of the optimizer does.
    fn weights_version(&self) -> Vec<(u64, u64)> {
        let trainers = std::iter::once(&self.policy).chain(&self.critic);
        trainers.map(|t| (t.model.version, t.optimizer.steps)).collect()
    }
}

//! Weights that are split over ranks: when all of them are there, and who reads them.

use crate::run::load;
use crate::train::Stage;
use ferrl_engine::model::serve::serve;
use ferrl_engine::train::Trainer;
use ferrl_engine::{Error, Result};
use std::path::Path;

impl Stage {
    /// The policy, and the critic where it is a model of its own.
    pub(crate) fn trainers_mut(&mut self) -> impl Iterator<Item = &mut Trainer> {
        std::iter::once(&mut self.policy).chain(&mut self.critic)
    }

    /// Whether weights are split over ranks.
    pub(crate) fn is_split(&self) -> bool {
        self.policy.model.split_over().is_some()
    }

    /// Makes all weights readable on every rank, for rollouts and for passes that ranks take at their own pace. All ranks
    /// call it together.
    pub(crate) fn gather_weights(&mut self) -> Result<()> {
        self.trainers_mut().try_for_each(|trainer| trainer.model.gather_all())
    }

    /// Gives them back.
    pub(crate) fn release_weights(&mut self) {
        self.trainers_mut().for_each(|trainer| trainer.model.release_all());
    }

    /// The passes of a micro-batch, for a rank that has none in this round: the same as [`Stage::forward_only`] and
    /// [`Stage::backward`], in their order.
    pub(crate) fn idle_round(&mut self) -> Result<()> {
        let frozen = self.critic.is_some() && self.step < self.algo.updates().policy_frozen_steps;
        self.trainers_mut().try_for_each(Trainer::idle_forward)?;
        if let Some(critic) = &mut self.critic {
            critic.idle_backward()?;
        }
        if frozen { Ok(()) } else { self.policy.idle_backward() }
    }

    /// Puts the weights and moments of a checkpoint in their places.
    pub(crate) fn load(&mut self, path: &Path) -> Result<()> {
        let mut roles = vec![("policy", &mut self.policy)];
        roles.extend(self.critic.as_mut().map(|c| ("critic", c)));
        load(path, &mut roles).map(drop)
    }

    /// Answers rank 0, which saves this stage.
    pub(crate) fn serve(&self) -> Result<()> {
        let trainers = [Some(&self.policy), self.critic.as_ref()];
        serve(&self.ranks, |tensor| {
            let trainer = trainers.get(tensor.model).copied().flatten();
            let trainer = trainer.ok_or_else(|| Error::rank("rank 0 has models that this rank has not"))?;
            Ok(trainer.own_state(tensor.param, tensor.kind)?.unwrap_or_default())
        })
    }
}

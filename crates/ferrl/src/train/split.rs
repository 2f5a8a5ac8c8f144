//! Weights split over ranks: when they are gathered and released.

use crate::parallel::RankLayout;
use crate::run::load;
use crate::run::shared::is_shared;
use crate::setup::sampler;
use crate::train::Stage;
use ferrl_engine::model::serve::serve;
use ferrl_engine::model::tensor::Team;
use ferrl_engine::train::ModelTrainer;
use ferrl_engine::{Error, Result};
use std::path::Path;

/// The ranks that compute layers together with this one.
#[derive(Clone, Default)]
pub struct TrainAndRollout {
    train: Option<Team>,
    rollout: Option<Team>,
}

impl Stage {
    /// The policy, and the critic if it is a separate model.
    pub(crate) fn trainers_mut(&mut self) -> impl Iterator<Item = &mut ModelTrainer> {
        std::iter::once(&mut self.policy).chain(&mut self.critic)
    }

    /// Whether weights are split over ranks.
    pub(crate) fn is_split(&self) -> bool {
        self.policy.model.split_over().is_some()
    }

    /// Whether ranks write checkpoints together, each its own part.
    pub(crate) fn is_written_together(&self) -> bool {
        is_shared(&self.policy)
    }

    /// Forms the groups of ranks of this layout; an error if the model or the device does not support it.
    pub(crate) fn form_teams(&mut self, layout: &RankLayout) -> Result<()> {
        let RankLayout { tp, sp, rollout_tp, .. } = *layout;
        if layout.teams().is_empty() {
            return Ok(());
        }
        let models = std::iter::once(&self.policy).chain(&self.critic).map(|t| &t.model.config);
        layout.serves(&self.recipe, models)?;
        let train = Team::new(&self.ranks, tp, sp, true);
        // The same ranks compute with the same weights in rollouts and in training.
        let rollout = Team::new(&self.ranks, rollout_tp, 1, rollout_tp == tp && sp == 1);
        self.teams = TrainAndRollout { train, rollout };
        self.lay_out(true)?;
        if self.generator.take().is_some() {
            self.generator = Some(sampler(&self.recipe, &self.policy.model, &self.tokenizer)?);
        }
        self.lay_out(false)
    }

    /// Switches between the groups of training and of rollouts.
    fn lay_out(&mut self, rollout: bool) -> Result<()> {
        let team = if rollout { &self.teams.rollout } else { &self.teams.train }.clone();
        self.trainers_mut().try_for_each(|trainer| trainer.model.set_team(team.clone()))
    }

    /// Gathers all weights on every rank or group, for rollouts and for passes that ranks run independently. All ranks call it
    /// together.
    pub(crate) fn gather_weights(&mut self) -> Result<()> {
        self.lay_out(true)?;
        self.trainers_mut().try_for_each(|trainer| trainer.model.gather_to_read())
    }

    /// Releases them: training gathers layer by layer.
    pub(crate) fn release_weights(&mut self) -> Result<()> {
        self.lay_out(false)?;
        self.release_whole();
        Ok(())
    }

    /// Releases gathered weights of models that a rank computes with alone.
    pub(crate) fn release_whole(&mut self) {
        let whole = self.trainers_mut().filter(|trainer| trainer.model.team().is_none());
        whole.for_each(|trainer| trainer.model.release_all());
        if self.is_split() {
            self.policy.model.backend.trim(); // what comes next needs other sizes
        }
    }

    /// Gathers weights for the passes of an update that groups compute together.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        self.trainers_mut().try_for_each(ModelTrainer::prepare)
    }

    /// Takes part in the communication of a round without a micro-batch: the same passes as [`Stage::forward_only`] and
    /// [`Stage::backward`], in the same order.
    pub(crate) fn idle_round(&mut self) -> Result<()> {
        let frozen = self.critic.is_some() && self.step < self.algo.updates().policy_frozen_steps;
        self.trainers_mut().try_for_each(ModelTrainer::idle_forward)?;
        if let Some(critic) = &mut self.critic {
            critic.idle_backward()?;
        }
        if frozen { Ok(()) } else { self.policy.idle_backward() }
    }

    pub(crate) fn load(&mut self, path: &Path) -> Result<()> {
        let mut roles = vec![("policy", &mut self.policy)];
        roles.extend(self.critic.as_mut().map(|c| ("critic", c)));
        load(path, &mut roles).map(drop)
    }

    /// Replaces the policy's weights by their EMA.
    pub(crate) fn use_averages(&mut self) -> Result<()> {
        self.policy.optimizer.use_averages(&mut self.policy.model)
    }

    /// Sends this rank's part to rank 0, which saves the stage.
    pub(crate) fn serve(&self) -> Result<()> {
        let trainers = [Some(&self.policy), self.critic.as_ref()];
        serve(&self.ranks, |tensor| {
            let trainer = trainers.get(tensor.model).copied().flatten();
            let trainer = trainer.ok_or_else(|| Error::rank("rank 0 has models that this rank has not"))?;
            Ok(trainer.own_state(tensor.param, tensor.kind)?.unwrap_or_default())
        })
    }
}

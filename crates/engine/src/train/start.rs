//! The initial policy at no memory cost: with an adapter it is the base plus a copy of the few initial trained values.

use super::ModelTrainer;
use crate::Result;
use crate::model::Model;

/// Initial values of trained parameters, by index.
pub(super) type Start = Vec<(usize, Vec<f32>)>;

impl ModelTrainer {
    /// Saves the trained values for [`ModelTrainer::at_start`] and [`ModelTrainer::restart`]: meant for adapters, whose trained
    /// values are few. Under ZeRO-3 each rank saves its shards.
    pub fn keep_start(&mut self) -> Result<()> {
        let trained = (0..self.model.params.len()).filter(|&i| self.optimizer.trains(i));
        self.start = trained.map(|i| Ok((i, self.model.own_values(i)?))).collect::<Result<_>>()?;
        Ok(())
    }

    /// Calls `f` with the initial model, then restores the current one bit for bit. Collective under ZeRO-3; weights are gathered
    /// for `f` and again afterwards.
    pub fn at_start<T>(&mut self, f: impl FnOnce(&Model) -> Result<T>) -> Result<T> {
        let now: Start =
            self.start.iter().map(|(i, _)| Ok((*i, self.model.own_values(*i)?))).collect::<Result<_>>()?;
        let version = self.model.version;
        let start = std::mem::take(&mut self.start);
        let there = self.put(&start).and_then(|()| self.model.gather_to_read());
        let done = there.and_then(|()| f(&self.model));
        self.start = start;
        self.put(&now)?;
        self.model.gather_to_read()?;
        self.model.version = version;
        done
    }

    /// Restores the initial weights and resets the optimizer.
    pub fn restart(&mut self) -> Result<()> {
        let start = std::mem::take(&mut self.start);
        let done = self.put(&start);
        self.start = start;
        self.optimizer.restart();
        done
    }

    /// Whether checkpoints store the parameter: all except an adapter's base.
    pub fn is_stored(&self, param: usize) -> bool {
        self.model.adapter().is_none() || self.optimizer.trains(param)
    }

    fn put(&mut self, values: &Start) -> Result<()> {
        for (i, values) in values {
            self.model.backend.write(&mut self.model.params[*i].master, 0, values)?;
        }
        self.model.refresh()
    }
}

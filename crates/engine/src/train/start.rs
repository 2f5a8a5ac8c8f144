//! The policy as it started, computed with for nothing: where an adapter is trained, what it started from is the base and
//! the few numbers that are trained.

use super::ModelTrainer;
use crate::Result;
use crate::model::Model;

/// First values of the parameters that are trained, by their index.
pub(super) type Start = Vec<(usize, Vec<f32>)>;

impl ModelTrainer {
    /// Remembers the weights as they are, for [`ModelTrainer::at_start`] and [`ModelTrainer::restart`]. It takes a copy of what is
    /// trained, so it is meant for adapters. Where weights are split each rank has its part.
    pub fn keep_start(&mut self) -> Result<()> {
        let trained = (0..self.model.params.len()).filter(|&i| self.optimizer.trains(i));
        self.start = trained.map(|i| Ok((i, self.model.own_values(i)?))).collect::<Result<_>>()?;
        Ok(())
    }

    /// Calls `f` with the model as it was, then restores the same bits. All ranks call it together where weights are
    /// split; they are gathered meanwhile and afterwards.
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

    /// Takes the first weights again and begins training anew.
    pub fn restart(&mut self) -> Result<()> {
        let start = std::mem::take(&mut self.start);
        let done = self.put(&start);
        self.start = start;
        self.optimizer.restart();
        done
    }

    /// Whether a checkpoint needs the parameter: all but the base of an adapter.
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

//! The gradient of an update while its batches are added up, and whether it is whole.
//!
//! A batch that fails invalidates the update, whose sum is then incomplete. The trainer remembers that, so that no weight
//! changes by it.

use super::{ModelTrainer, StatGrads};
use crate::model::decoder::Layers;
use crate::model::gradient::{Gradient, Grads};
use crate::{Error, Result};
use ferrl_kernels::{Backend, Purpose};

/// What the gradients are the sum of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sum {
    /// Of no batch.
    Nothing,
    /// Of every batch that was begun.
    Whole,
    /// A batch failed after others had been added.
    Broken,
}

impl Sum {
    /// The error of an update, if the sum is not whole.
    pub(super) fn check(self, waits: bool) -> Result<()> {
        let what = match self {
            Sum::Whole if !waits => return Ok(()),
            Sum::Whole => "an update while the last forward waits for its backward",
            Sum::Nothing => "an update without a gradient: no backward has succeeded since the last one",
            Sum::Broken => "an update by a part of its gradient: a batch failed",
        };
        Err(Error::usage(format!("{what}; the weights were not changed"))
            .fix("forward and backward of every batch again, after zero_grads"))
    }
}

impl ModelTrainer {
    /// Does something for a batch whose gradient belongs to the update. Where it fails, so does the update: a first batch
    /// leaves nothing behind, a later one an incomplete sum.
    pub(super) fn for_update<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let done = f(self);
        if done.is_err() {
            self.pending = None;
            match self.sum {
                Sum::Nothing => self.zero_grads(),
                Sum::Whole | Sum::Broken => self.sum = Sum::Broken,
            }
        }
        done
    }

    /// Calls `f` with the slots that a batch's gradient is added to, then adds what was summed apart to the totals. The
    /// slots are returned on errors too.
    ///
    /// The head's weight, which a backward adds to more than once, is summed apart where it was added to before.
    pub(super) fn accumulate<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Layers, Grads<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if self.sum == Sum::Broken {
            self.sum.check(false)?;
        }
        if self.model.team().is_some() {
            return self.accumulate_in_team(f);
        }
        if self.model.split_over().is_some() {
            return self.accumulate_split(f);
        }
        let added_to = |i: &usize| self.grads[*i].as_ref().is_some_and(|slot| !slot.is_empty());
        let often: Vec<usize> = self.model.summed_in_parts().filter(added_to).collect();
        let rooms = often.iter().map(|&i| self.slot(i)).collect::<Result<Vec<_>>>()?;
        let apart = often.into_iter().zip(rooms);
        let totals: Vec<_> =
            apart.map(|(i, room)| (i, std::mem::replace(&mut self.grads[i], room))).collect();
        let mut done = f(&mut &self.model, &mut self.grads);
        for (i, total) in totals {
            let part = std::mem::replace(&mut self.grads[i], total);
            if let (Ok(Some(_)), Some(part), Some(total)) = (&done, part, &mut self.grads[i])
                && let Err(e) = add(&*self.model.backend, &part, total)
            {
                done = Err(e);
            }
        }
        if let Ok(Some(_)) = &done {
            self.sum = Sum::Whole;
        }
        done
    }

    /// Discards the gradients added since the last update, and a forward that waits for its backward.
    pub fn zero_grads(&mut self) {
        match self.model.split_over() {
            Some(_) => self.grads.iter_mut().for_each(|slot| *slot = None),
            None => self.grads.iter_mut().flatten().for_each(Gradient::clear),
        }
        (self.pending, self.totals) = (None, None);
        self.sum = Sum::Nothing;
    }

    /// Memory for the gradient of a parameter, unless it is frozen; for this rank's part if weights are sharded.
    pub(super) fn slot(&self, param: usize) -> Result<Option<Gradient>> {
        let len = self.model.params[param].own.len();
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        self.optimizer.trains(param).then(|| Gradient::new(&*self.model.backend, len)).transpose()
    }

    /// A parameter may hold several tensors of which some are frozen: their gradients do not count. What was not added to
    /// becomes zero.
    pub(super) fn mask_frozen(&mut self) -> Result<()> {
        for (i, slot) in self.grads.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            let grad = slot.added_to(&*self.model.backend)?;
            let mut at = 0;
            let trained = self.optimizer.trained_here(&self.model, i);
            for range in trained.into_iter().chain(std::iter::once(grad.len()..grad.len())) {
                if at < range.start {
                    self.model.backend.write(grad, at, &vec![0.0; range.start - at])?;
                }
                at = range.end;
            }
        }
        Ok(())
    }
}

/// Adds the sum of a batch to the total, in one addition.
fn add(backend: &dyn Backend, part: &Gradient, total: &mut Gradient) -> Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    backend.axpy(1.0, part.buffer(), total.added_to(backend)?)
}

/// What a loss's gradients must be: one number for each row, finite, and of something that the model has.
pub(super) struct Fits {
    /// Input positions of the batch.
    pub tokens: usize,
    /// Other tokens at each.
    pub others: usize,
    /// Whether there is a value (or score) head.
    pub value: bool,
    /// Whether the last forward compared two models.
    pub compared: bool,
}

impl Fits {
    /// Refuses gradients that do not.
    pub(super) fn check(&self, g: &StatGrads) -> Result<()> {
        let (n, j) = (self.tokens, self.others);
        let columns = [
            ("logp", &g.logp, n),
            ("entropy", &g.entropy, n),
            ("value", &g.value, n),
            ("others", &g.others, n * j),
            ("kl", &g.kl, n),
        ];
        for (name, column, rows) in columns {
            if !column.is_empty() && column.len() != rows {
                return Err(Error::data(format!(
                    "the loss's gradient by {name} has {} numbers, the batch {rows} rows",
                    column.len()
                ))
                .fix("one number for each row, or none at all for zero"));
            }
            if let Some(at) = column.iter().position(|x| !x.is_finite()) {
                return Err(Error::numerics(format!(
                    "the loss's gradient by {name} is not finite at row {at}"
                ))
                .fix("check the columns that the loss reads at that row"));
            }
        }
        let lost = [("value", &g.value, self.value), ("kl", &g.kl, self.compared)];
        for (name, column, there) in lost {
            if !there && column.iter().any(|&x| x != 0.0) {
                return Err(Error::usage(format!("a gradient by {name}, which the forward did not compute"))
                    .fix("a model with a value head for values, forward_against for the KL"));
            }
        }
        Ok(())
    }
}

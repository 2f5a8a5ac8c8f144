//! Gradient accumulation over the batches of an update, and whether it is complete.
//!
//! If a batch fails, the accumulated gradient is incomplete; the trainer records that, so that no weight is updated from it.

use super::{ModelTrainer, StatGrads};
use crate::model::decoder::Layers;
use crate::model::gradient::{Gradient, Grads};
use crate::{Error, Result};
use ferrl_kernels::{Backend, Purpose};

/// State of the accumulated gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accumulated {
    /// No batch has been added.
    Nothing,
    /// Every batch that was started has been added.
    Whole,
    /// A batch failed after others had been added.
    Broken,
}

impl Accumulated {
    /// The error of an update whose gradient is not complete.
    pub(super) fn check(self, waits: bool) -> Result<()> {
        let what = match self {
            Accumulated::Whole if !waits => return Ok(()),
            Accumulated::Whole => "an update while the last forward waits for its backward",
            Accumulated::Nothing => {
                "an update without a gradient: no backward has succeeded since the last one"
            }
            Accumulated::Broken => "an update with an incomplete gradient: a batch failed",
        };
        Err(Error::usage(format!("{what}; the weights were not changed"))
            .fix("forward and backward of every batch again, after zero_grads"))
    }
}

impl ModelTrainer {
    /// Runs `f` for a batch of the update. If it fails, so does the update: after a first batch nothing is left, after a later
    /// one an incomplete gradient.
    pub(super) fn for_update<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let done = f(self);
        if done.is_err() {
            self.pending = None;
            match self.sum {
                Accumulated::Nothing => self.zero_grads(),
                Accumulated::Whole | Accumulated::Broken => self.sum = Accumulated::Broken,
            }
        }
        done
    }

    /// Calls `f` with the accumulators for a batch, then adds the separate ones to the totals, also after an error.
    ///
    /// The language-model head's weight, to which one backward adds more than once, has a separate accumulator per batch.
    pub(super) fn accumulate<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Layers, Grads<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if self.sum == Accumulated::Broken {
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
            self.sum = Accumulated::Whole;
        }
        done
    }

    /// Discards the accumulated gradient, and a forward whose backward is pending.
    pub fn zero_grads(&mut self) {
        match self.model.split_over() {
            Some(_) => self.grads.iter_mut().for_each(|slot| *slot = None),
            None => self.grads.iter_mut().flatten().for_each(Gradient::clear),
        }
        (self.pending, self.totals) = (None, None);
        self.sum = Accumulated::Nothing;
    }

    /// Allocates the gradient of a parameter, or of this rank's shard; `None` if it is frozen.
    pub(super) fn slot(&self, param: usize) -> Result<Option<Gradient>> {
        let len = self.model.params[param].own.len();
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        self.optimizer.trains(param).then(|| Gradient::new(&*self.model.backend, len)).transpose()
    }

    /// Zeroes the gradient of frozen tensors inside a fused parameter. Parameters that got no gradient become zero.
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

/// Adds a batch's accumulator to the total, in one addition per element.
fn add(backend: &dyn Backend, part: &Gradient, total: &mut Gradient) -> Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    backend.axpy(1.0, part.buffer(), total.added_to(backend)?)
}

/// Expected shape of a loss's gradients: one finite number per row, for statistics that the model has.
pub(super) struct ExpectedGrads {
    /// Input positions of the batch.
    pub tokens: usize,
    /// Additional scored tokens per position.
    pub others: usize,
    /// Whether there is a value (or score) head.
    pub value: bool,
    /// Whether the last forward computed a KL to another model.
    pub compared: bool,
}

impl ExpectedGrads {
    /// Refuses gradients that do not match.
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
                    "the loss's gradient with respect to {name} has {} numbers, the batch {rows} rows",
                    column.len()
                ))
                .fix("one number for each row, or none at all for zero"));
            }
            if let Some(at) = column.iter().position(|x| !x.is_finite()) {
                return Err(Error::numerics(format!(
                    "the loss's gradient with respect to {name} is not finite at row {at}"
                ))
                .fix("check the columns that the loss reads at that row"));
            }
        }
        let lost = [("value", &g.value, self.value), ("kl", &g.kl, self.compared)];
        for (name, column, there) in lost {
            if !there && column.iter().any(|&x| x != 0.0) {
                return Err(Error::usage(format!(
                    "a gradient with respect to {name}, which the forward did not compute"
                ))
                .fix("a model with a value head for values, forward_against for the KL"));
            }
        }
        Ok(())
    }
}

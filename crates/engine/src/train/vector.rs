//! Vectors the size of the parameters, for methods that need more than the gradient (TRPO).

use super::ModelTrainer;
use super::accumulate::Accumulated;
use crate::model::gradient::Gradient;
use crate::{Error, Result};
use ferrl_kernels::{Buffer, DType};

/// One number per trained weight, in the device's layout.
pub struct ParamVector(pub(super) Vec<Option<Buffer>>);

impl ModelTrainer {
    /// A zero vector.
    pub fn vector(&self) -> Result<ParamVector> {
        let zeros = (0..self.model.params.len()).map(|i| self.slot(i)).collect::<Result<_>>()?;
        self.summed(zeros)
    }

    /// Moves the accumulated gradient out; the next backward starts from zero.
    pub fn take_gradient(&mut self) -> Result<ParamVector> {
        if self.sum != Accumulated::Nothing {
            self.sum.check(self.pending.is_some())?;
        }
        self.mask_frozen()?;
        // Under ZeRO-3, backward allocates gradients when it needs them.
        let whole = self.model.split_over().is_none();
        let slot = |i: usize| if whole { self.slot(i) } else { Ok(None) };
        let fresh = (0..self.model.params.len()).map(slot).collect::<Result<_>>()?;
        let taken = std::mem::replace(&mut self.grads, fresh);
        self.zero_grads();
        self.summed(taken)
    }

    fn summed(&self, slots: Vec<Option<Gradient>>) -> Result<ParamVector> {
        let one = |slot: Option<Gradient>| slot.map(|s| s.into_sum(&*self.model.backend)).transpose();
        Ok(ParamVector(slots.into_iter().map(one).collect::<Result<_>>()?))
    }

    pub fn set_gradient(&mut self, v: ParamVector) {
        self.grads = v.0.into_iter().map(|b| b.map(Gradient::of)).collect();
        (self.sum, self.pending) = (Accumulated::Whole, None);
    }

    pub fn dot(&self, a: &ParamVector, b: &ParamVector) -> Result<f64> {
        let both = a.0.iter().zip(&b.0).enumerate();
        let pairs: Vec<_> = both.filter_map(|(i, (a, b))| Some((i, a.as_ref()?, b.as_ref()?))).collect();
        Ok(self.model.dots(&pairs)?.iter().sum())
    }

    /// `y += a * x`
    pub fn axpy(&self, a: f32, x: &ParamVector, y: &mut ParamVector) -> Result<()> {
        for (x, y) in x.0.iter().zip(&mut y.0) {
            if let (Some(x), Some(y)) = (x, y) {
                self.model.backend.axpy(a, x, y)?;
            }
        }
        Ok(())
    }

    /// `weights += a * v`, bypassing the optimizer.
    pub fn shift(&mut self, a: f32, v: &ParamVector) -> Result<()> {
        self.model.reserve(v.lengths(), 1)?;
        self.shift_weights(a, v)
    }

    /// `weights += a * v`. The memory it needs is reserved first, so that only a device failure can stop it halfway.
    fn shift_weights(&mut self, a: f32, v: &ParamVector) -> Result<()> {
        let backend = self.model.backend.clone();
        for (param, v) in self.model.params.iter_mut().zip(&v.0) {
            if let Some(v) = v {
                backend.axpy(a, v, &mut param.master)?;
            }
        }
        self.model.refresh()
    }

    /// Calls `f`, which computes no gradients, at `weights + eps * v`, then restores the weights bit for bit.
    pub fn perturbed<T>(
        &mut self,
        eps: f32,
        v: &ParamVector,
        f: impl FnOnce(&mut ModelTrainer) -> Result<T>,
    ) -> Result<T> {
        if self.model.dtype != DType::F32 {
            return Err(Error::usage("a small move of the weights is lost in bf16").fix("compute in f32"));
        }
        let backend = self.model.backend.clone();
        let version = self.model.version;
        // Everything that can fail comes before the first weight changes.
        let mut saved = Vec::new();
        for (param, v) in self.model.params.iter().zip(&v.0) {
            let copy = v.as_ref().map(|v| -> Result<Buffer> {
                let mut copy = backend.alloc(DType::F32, v.len())?;
                backend.copy(&param.master, 0, &mut copy, 0, v.len())?;
                Ok(copy)
            });
            saved.push(copy.transpose()?);
        }
        self.model.reserve(v.lengths(), 1)?;
        let result =
            self.shift_weights(eps, v).and_then(|()| self.model.gather_to_read()).and_then(|()| f(self));
        for (param, saved) in self.model.params.iter_mut().zip(saved) {
            if let Some(saved) = saved {
                // Into the same memory: captured CUDA graphs hold the weights' addresses.
                backend.copy(&saved, 0, &mut param.master, 0, saved.len())?;
            }
        }
        self.model.refresh()?;
        self.model.version = version;
        result
    }
}

impl ParamVector {
    /// Lengths of the trained parameters.
    fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flatten().map(Buffer::len)
    }
}

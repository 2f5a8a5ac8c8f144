//! A model that is only read: a reference, a teacher, a reward model.
//!
//! It stays on its device, or is offloaded to host memory between uses. Offloaded weights take two bytes each where bf16 is
//! exact, else four; the derived weights are rebuilt at each use, with the same bits.

use super::param::ParamShape;
use super::weights::{Model, Param};
use crate::Result;
use ferrl_kernels::{Buffer, DType, lock};
use std::sync::{Mutex, MutexGuard};

/// Weights copied at a time: a device may need an f32 buffer for them.
const PIECE: usize = 1 << 24;

/// A model that is not trained.
pub struct Frozen(Placement);

enum Placement {
    Device(Box<Model>),
    Host(Box<Mutex<Parked>>),
}

struct Parked {
    /// Has no parameters while offloaded.
    model: Model,
    /// Host copy of every parameter.
    host: Vec<(ParamShape, Buffer)>,
    /// Whether it stays on the device until [`Frozen::park`].
    held: bool,
}

impl Frozen {
    /// A frozen model; with `offload` it lives in host memory between uses.
    pub fn new(model: Model, offload: bool) -> Result<Self> {
        if !offload {
            return Ok(Frozen(Placement::Device(Box::new(model))));
        }
        let mut parked = Parked { host: model.to_host()?, model, held: false };
        parked.unload();
        Ok(Frozen(Placement::Host(Box::new(Mutex::new(parked)))))
    }

    /// Calls `read` with the model on its device.
    pub fn with<T>(&self, read: impl FnOnce(&Model) -> Result<T>) -> Result<T> {
        let Some(mut parked) = self.parked() else { return read(self.resident()) };
        let done = parked.load().and_then(|()| read(&parked.model));
        if !parked.held {
            parked.unload();
        }
        done
    }

    /// The same for a sharded model: gathers its weights first. Collective.
    pub fn gathered<T>(&mut self, read: impl FnOnce(&Model) -> Result<T>) -> Result<T> {
        let Placement::Device(model) = &mut self.0 else { return self.with(read) };
        model.gather_all()?;
        let done = read(model);
        model.release_all();
        done
    }

    /// Frees the weights that a failed [`Frozen::gathered`] left gathered.
    pub fn release(&mut self) {
        if let Placement::Device(model) = &mut self.0 {
            model.release_all();
        }
    }

    /// Whether its weights are sharded over ranks.
    pub fn is_split(&self) -> bool {
        matches!(&self.0, Placement::Device(model) if model.split_over().is_some())
    }

    /// Keeps an offloaded model on its device until [`Frozen::park`]: for many uses in a row.
    pub fn hold(&self) -> Result<()> {
        let Some(mut parked) = self.parked() else { return Ok(()) };
        parked.held = true;
        parked.load()
    }

    /// Frees the device memory of an offloaded model.
    pub fn park(&self) {
        if let Some(mut parked) = self.parked() {
            parked.held = false;
            parked.unload();
        }
    }

    /// Whether it is offloaded between uses.
    pub fn offloads(&self) -> bool {
        matches!(self.0, Placement::Host(_))
    }

    fn parked(&self) -> Option<MutexGuard<'_, Parked>> {
        match &self.0 {
            Placement::Host(parked) => Some(lock(parked)),
            Placement::Device(_) => None,
        }
    }

    fn resident(&self) -> &Model {
        match &self.0 {
            Placement::Device(model) => model,
            Placement::Host(_) => unreachable!("a model in the machine's memory is behind its lock"),
        }
    }
}

impl Parked {
    fn load(&mut self) -> Result<()> {
        if self.model.params.is_empty() {
            self.model.take_weights(&self.host)?;
        }
        Ok(())
    }

    fn unload(&mut self) {
        self.model.params.clear();
    }
}

impl Model {
    /// Host copies of all parameters.
    fn to_host(&self) -> Result<Vec<(ParamShape, Buffer)>> {
        let copy = |(i, param): (usize, &Param)| {
            let values = self.read_f32s(self.master(i))?;
            let dtype = if values.iter().all(|&x| fits_bf16(x)) { DType::Bf16 } else { DType::F32 };
            let mut host = self.backend.alloc_host(dtype, values.len())?;
            self.backend.write(&mut host, 0, &values)?;
            Ok((param.shape, host))
        };
        self.params.iter().enumerate().map(copy).collect()
    }

    /// Uploads the parameters.
    fn take_weights(&mut self, host: &[(ParamShape, Buffer)]) -> Result<()> {
        let mut params = Vec::with_capacity(host.len());
        for (shape, values) in host {
            let fits = values.dtype() == DType::Bf16 || self.rounds_to_read(shape);
            let rounds = fits && !self.training;
            let backend = &self.backend;
            params.push(self.param_from(*shape, rounds, |master| {
                (0..values.len())
                    .step_by(PIECE)
                    .try_for_each(|at| backend.copy(values, at, master, at, PIECE.min(values.len() - at)))
            })?);
        }
        self.params = params;
        self.renumber();
        Ok(())
    }
}

/// Whether `x` is exactly representable in bf16.
pub(super) fn fits_bf16(x: f32) -> bool {
    x.to_bits() & 0xffff == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::checkpoint::InitOptions;
    use crate::model::Options;
    use crate::train::{Batch, stats};

    fn model(family: &str, dtype: DType) -> Model {
        let mut init = InitOptions::new(family);
        (init.vocab, init.hidden, init.layers) = (50, 64, 2);
        let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
        Model::random(backend, &init, Options { dtype, ..Default::default() }).unwrap()
    }

    #[test]
    fn an_offloaded_model_computes_the_same_bits_and_leaves_its_device() {
        let batch = Batch::of([vec![1, 7, 3, 49, 8], vec![2, 5]]);
        for (family, dtype) in [("llama", DType::F32), ("qwen3_moe", DType::Bf16), ("gpt2", DType::Bf16)] {
            let resident = model(family, dtype);
            let wanted = stats(&resident, &batch, 1.0).unwrap().logp;
            let held = resident.backend.memory().0;
            let backend = resident.backend.clone();
            let number = resident.weights();
            let frozen = Frozen::new(resident, true).unwrap();
            let parked = backend.memory().0;
            assert!(parked < held, "{family}: {parked} bytes parked, {held} before");
            for round in 0..2 {
                let logp = frozen.with(|m| Ok(stats(m, &batch, 1.0)?.logp)).unwrap();
                assert!(logp == wanted, "{family}: round {round}");
                assert_eq!(backend.memory().0, parked, "{family}: freed after round {round}");
            }
            frozen.hold().unwrap();
            let inside = backend.memory().0;
            let now = frozen.with(|m| Ok(m.weights())).unwrap();
            assert_ne!(now, number, "captured graphs of old addresses are void");
            assert!(inside > parked && backend.memory().0 == inside, "{family}: held");
            frozen.park();
            assert_eq!(backend.memory().0, parked, "{family}");
        }
    }

    #[test]
    fn a_failed_use_frees_the_device_too() {
        let model = model("llama", DType::F32);
        let backend = model.backend.clone();
        let frozen = Frozen::new(model, true).unwrap();
        let parked = backend.memory().0;
        assert!(frozen.with(|_| Err::<(), _>(crate::Error::usage("no"))).is_err());
        assert_eq!(backend.memory().0, parked);
    }
}

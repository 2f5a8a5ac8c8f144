//! From gradients to weights: trainable parameters, clipping, AdamW or SGD, EMA.

use super::moment::{MomentStorage, StateKind, is_coded};
use crate::model::gradient::Gradient;
use crate::model::weights::{Model, Param};
use crate::model::{ModelConfig, Tensor, family};
use crate::{Error, Result, nearest};
use ferrl_kernels::backend::{AdamW, AdamWParam, Sgd};
use ferrl_kernels::{Buffer, DType, Purpose};
use std::ops::Range;

/// Settings of an optimizer; the learning rate is passed to each step.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerOptions {
    /// AdamW or SGD.
    pub rule: Rule,
    /// 8-bit AdamW: moments of large matrices are block-wise 8-bit codes.
    pub coded: bool,
    /// Offload moments to host memory; steps read and write them over the bus. Same bits; no effect where the device is the host.
    pub offload: bool,
    /// Weight decay, decoupled for AdamW; norms and biases have none.
    pub weight_decay: f64,
    /// Gradient clipping: maximum global norm; `None` disables it.
    pub max_grad_norm: Option<f32>,
    /// EMA decay; `None` disables the EMA of the weights.
    pub ema: Option<f32>,
    /// Frozen tensors, by any part of their name in the checkpoint: `model.embed_tokens`, `model.layers.0.`, `q_proj`.
    pub frozen: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam with decoupled weight decay.
    AdamW {
        /// decay of the first moment
        beta1: f64,
        /// decay of the second moment
        beta2: f64,
        /// added to the square root of the second moment
        eps: f64,
    },
    Sgd {
        momentum: f64,
    },
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        OptimizerOptions {
            rule: Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
            coded: false,
            offload: false,
            weight_decay: 0.01,
            max_grad_norm: Some(1.0),
            ema: None,
            frozen: Vec::new(),
        }
    }
}

pub struct Optimizer {
    options: OptimizerOptions,
    /// Steps taken.
    pub steps: u64,
    /// Trained elements of each parameter.
    pub(super) trained: Vec<Vec<Range<usize>>>,
    /// Buffers of each parameter.
    state: Vec<ParamState>,
}

/// A parameter's buffers, by [`StateKind`].
type ParamState = [Option<Buffer>; StateKind::ALL.len()];

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    pub learning_rate: f64,
}

impl Optimizer {
    pub fn new(model: &Model, options: OptimizerOptions) -> Result<Self> {
        let n = model.params.len();
        let trained = match model.adapter() {
            Some(adapter) => adapter.trained(&model.params),
            None => trained_parts(&model.config, &options.frozen)?,
        };
        let state = (0..n).map(|_| ParamState::default()).collect();
        Ok(Optimizer { options, steps: 0, trained, state })
    }

    /// Resets steps, moments and EMA.
    pub fn restart(&mut self) {
        self.steps = 0;
        self.state.iter_mut().for_each(|state| *state = ParamState::default());
    }

    /// Whether any element of the parameter is trained.
    pub fn trains(&self, param: usize) -> bool {
        !self.trained[param].is_empty()
    }

    /// Keeps this rank's shards of the state of a model that has just been sharded.
    pub(super) fn split(&mut self, model: &Model) -> Result<()> {
        for i in 0..self.state.len() {
            for kind in StateKind::ALL {
                let Some(buffer) = &self.state[i][kind as usize] else { continue };
                let whole = model.read_f32s(buffer)?;
                let own = kind.range(&model.params[i].own);
                self.put_own(model, i, kind, Some(&whole[own]))?;
            }
        }
        Ok(())
    }

    /// Trained elements of this rank's shard of a parameter.
    pub(super) fn trained_here(&self, model: &Model, param: usize) -> Vec<Range<usize>> {
        let own = &model.params[param].own;
        let here = self.trained[param].iter().map(|r| r.start.max(own.start)..r.end.min(own.end));
        here.filter(|r| !r.is_empty()).map(|r| r.start - own.start..r.end - own.start).collect()
    }

    /// Clips the gradient, takes a step, and derives the GEMM weights from the masters. After an error nothing has changed:
    /// non-finite gradients and missing memory are detected before the first weight changes.
    pub fn update(&mut self, model: &mut Model, grads: &[Option<Gradient>], lr: f64) -> Result<UpdateReport> {
        let grad_norm = self.norm(model, grads)?;
        let scale = match self.options.max_grad_norm {
            // As PyTorch's clip_grad_norm_, which divides by norm + 1e-6.
            Some(max) => (max as f64 / (grad_norm + 1e-6)).min(1.0) as f32,
            None => 1.0,
        };
        let _moments = Purpose::Optimizer.on(&model.backend.clone());
        let new_state = self.allocate(model, grads)?;
        let averages = self.install_moments(new_state);
        if let Some(split) = model.split_over() {
            split.ranks().all_gather(&[])?; // barrier: every rank has its memory, so every rank updates
            model.release_all();
        }
        if let Err(e) = self.step(model, grads, lr, scale) {
            self.remove_moments(&averages);
            return Err(e);
        }
        model.merge()?;
        self.steps += 1;
        model.version += 1;
        if let Some(keep) = self.options.ema {
            self.move_averages(model, grads, averages, keep)?;
        }
        Ok(UpdateReport { grad_norm, learning_rate: lr })
    }

    /// Updates weights and moments.
    fn step(
        &mut self,
        model: &mut Model,
        grads: &[Option<Gradient>],
        lr: f64,
        grad_scale: f32,
    ) -> Result<()> {
        let (weight_decay, step) = (0.0, self.steps + 1);
        match self.options.rule {
            Rule::AdamW { beta1, beta2, eps } => {
                self.adamw(model, grads, AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale })
            }
            Rule::Sgd { momentum } => self.sgd(model, grads, Sgd { lr, momentum, weight_decay, grad_scale }),
        }
    }

    /// Allocates everything that an update needs before it changes anything: missing moments (zeros) and EMAs, and scratch memory
    /// on devices that update out of place.
    fn allocate(&self, model: &Model, grads: &[Option<Gradient>]) -> Result<Vec<NewState>> {
        let (backend, average) = (&*model.backend, self.options.ema.is_some());
        let copies = if matches!(self.options.rule, Rule::Sgd { .. }) { 1 } else { 0 };
        let moved: Vec<usize> = (0..grads.len()).filter(|&i| grads[i].is_some() && self.trains(i)).collect();
        let mut all = Vec::new();
        for &param in &moved {
            let n = model.params[param].master.len();
            let (old, stored) = (self.buffers(param), self.stored(model, param));
            let mut moments = Vec::new();
            for &kind in self.moments(stored.coded).iter().filter(|&&kind| old[kind as usize].is_none()) {
                moments.push((kind, kind.zeros(backend, n, stored)?));
            }
            let average = average && old[StateKind::Average as usize].is_none();
            let average = average.then(|| backend.alloc(DType::F32, n)).transpose()?;
            all.push(NewState { param, moments, average });
        }
        let copies = if average { copies.max(2) } else { copies };
        model.reserve(moved.iter().map(|&i| model.params[i].master.len()), copies)?;
        model.reserve_for_merge()?;
        Ok(all)
    }

    /// State that the rule keeps for a parameter.
    fn moments(&self, coded: bool) -> &'static [StateKind] {
        use StateKind::{First, FirstAbsmax, Second, SecondAbsmax};
        match self.options.rule {
            Rule::AdamW { .. } if coded => &[First, Second, FirstAbsmax, SecondAbsmax],
            Rule::AdamW { .. } => &[First, Second],
            Rule::Sgd { momentum } if momentum != 0.0 => &[First],
            Rule::Sgd { .. } => &[],
        }
    }

    fn stored(&self, model: &Model, param: usize) -> MomentStorage {
        MomentStorage { coded: self.is_coded(model, param), offload: self.options.offload }
    }

    /// Whether a parameter's moments are 8-bit.
    pub fn is_coded(&self, model: &Model, param: usize) -> bool {
        self.options.coded && is_coded(&model.params[param].shape, &self.trained[param])
    }

    /// Installs new moments; returns what was new for each parameter, and its EMA buffer if that is new.
    fn install_moments(&mut self, new_state: Vec<NewState>) -> Vec<Installed> {
        let mut installed = Vec::new();
        for NewState { param, moments, average } in new_state {
            let new = moments.iter().map(|(kind, _)| *kind).collect();
            for (kind, moment) in moments {
                self.state[param][kind as usize] = Some(moment);
            }
            installed.push(Installed { param, new, average });
        }
        installed
    }

    /// Removes new moments after a failed update.
    fn remove_moments(&mut self, installed: &[Installed]) {
        for Installed { param, new, .. } in installed {
            new.iter().for_each(|&kind| self.state[*param][kind as usize] = None);
        }
    }

    /// Weight decay of a parameter.
    fn decay(&self, param: &Param) -> f64 {
        if param.shape.id.is_vector() { 0.0 } else { self.options.weight_decay }
    }

    fn adamw(&mut self, model: &mut Model, grads: &[Option<Gradient>], op: AdamW) -> Result<()> {
        let backend = model.backend.clone();
        let decays: Vec<f64> = model.params.iter().map(|p| self.decay(p)).collect();
        let trained: Vec<_> = (0..grads.len()).map(|i| self.trained_here(model, i)).collect();
        let params = model.params.iter_mut().zip(grads).zip(&mut self.state).zip(&trained).zip(decays);
        let mut steps = Vec::new();
        for ((((param, grad), state), ranges), weight_decay) in params {
            let [first, second, _, first_absmax, second_absmax] = state.each_mut().map(Option::as_mut);
            let (Some(grad), Some(first), Some(second)) = (grad, first, second) else { continue };
            if ranges.is_empty() {
                continue; // owned by another rank
            }
            steps.push(AdamWParam {
                op: AdamW { weight_decay, ..op },
                ranges,
                param: &mut param.master,
                grad: grad.buffer(),
                first,
                second,
                absmax: first_absmax.zip(second_absmax).map(|(first, second)| [first, second]),
                derived: param.derived.as_mut(),
            });
        }
        backend.adamw(&mut steps)
    }

    fn sgd(&mut self, model: &mut Model, grads: &[Option<Gradient>], op: Sgd) -> Result<()> {
        let backend = model.backend.clone();
        for (i, grad) in grads.iter().enumerate() {
            let Some(grad) = grad else { continue };
            let op = Sgd { weight_decay: self.decay(&model.params[i]), ..op };
            let ranges = self.trained_here(model, i);
            let param = &mut model.params[i];
            for range in &ranges {
                let velocity = self.state[i][StateKind::First as usize].as_mut();
                backend.sgd(op, range.clone(), &mut param.master, grad.buffer(), velocity)?;
                if let Some(derived) = &mut param.derived {
                    backend.load_weight(&param.master, derived)?;
                }
            }
        }
        Ok(())
    }

    /// `average -= (1 - keep) * (average - weight)`; a new average is a copy of the weight.
    fn move_averages(
        &mut self,
        model: &Model,
        grads: &[Option<Gradient>],
        installed: Vec<Installed>,
        keep: f32,
    ) -> Result<()> {
        let backend = &*model.backend;
        for (i, param) in model.params.iter().enumerate().filter(|&(i, _)| grads[i].is_some()) {
            let average = &mut self.state[i][StateKind::Average as usize];
            let (n, Some(average)) = (param.master.len(), average) else { continue };
            let mut gap = backend.alloc(DType::F32, n)?;
            backend.copy(average, 0, &mut gap, 0, n)?;
            backend.axpy(-1.0, &param.master, &mut gap)?;
            backend.axpy(keep - 1.0, &gap, average)?;
        }
        for Installed { param, average, .. } in installed {
            let Some(mut average) = average else { continue };
            let master = &model.params[param].master;
            backend.copy(master, 0, &mut average, 0, master.len())?;
            self.state[param][StateKind::Average as usize] = Some(average);
        }
        Ok(())
    }

    /// Replaces every parameter that has an EMA by it; called for the result of a stage.
    pub fn use_averages(&self, model: &mut Model) -> Result<()> {
        for (param, state) in model.params.iter_mut().zip(&self.state) {
            if let Some(average) = &state[StateKind::Average as usize] {
                let n = average.len();
                model.backend.copy(average, 0, &mut param.master, 0, n)?;
            }
        }
        model.refresh()
    }

    /// The EMA of a parameter, or its weights without EMA.
    pub fn average<'a>(&'a self, model: &'a Model, param: usize) -> &'a Buffer {
        self.state[param][StateKind::Average as usize].as_ref().unwrap_or(&model.params[param].master)
    }

    /// A parameter's buffers, by [`StateKind`], for checkpoints.
    pub fn buffers(&self, param: usize) -> [Option<&Buffer>; StateKind::ALL.len()] {
        self.state[param].each_ref().map(Option::as_ref)
    }

    /// Restores a buffer from a checkpoint: this rank's shard of it.
    pub fn put_own(
        &mut self,
        model: &Model,
        param: usize,
        kind: StateKind,
        own: Option<&[f32]>,
    ) -> Result<()> {
        let stored = self.stored(model, param);
        let _moments = Purpose::Optimizer.on(&model.backend);
        self.state[param][kind as usize] = match own {
            None => None,
            Some(values) => {
                let mut buffer = kind.alloc(&*model.backend, values.len(), stored)?;
                model.backend.write(&mut buffer, 0, values)?;
                Some(buffer)
            }
        };
        Ok(())
    }

    /// Global gradient norm.
    fn norm(&self, model: &Model, grads: &[Option<Gradient>]) -> Result<f64> {
        let there = grads.iter().enumerate().filter_map(|(i, g)| g.as_ref().map(|g| (i, g.buffer())));
        let pairs: Vec<_> = there.map(|(i, g)| (i, g, g)).collect();
        let square: f64 = model.dots(&pairs)?.iter().sum();
        if square.is_finite() {
            return Ok(square.sqrt());
        }
        let Some((param, at)) = first_non_finite(model, grads)? else {
            return Err(Error::numerics("the gradient's length overflows f64; the weights were not changed"));
        };
        let shape = &model.params[param].shape;
        let (row, col) = (at / shape.cols, at % shape.cols);
        Err(Error::numerics(format!(
            "the gradient of {} is not finite at [{row}, {col}]; the weights were not changed",
            shape.id
        ))
        .fix("a lower learning rate, or look at the batch that caused it"))
    }
}

/// The first non-finite element of the gradient on any rank, as (parameter, element).
fn first_non_finite(model: &Model, grads: &[Option<Gradient>]) -> Result<Option<(usize, usize)>> {
    let mut found = None;
    for (i, grad) in grads.iter().enumerate() {
        if let Some(grad) = grad.as_ref().filter(|_| found.is_none())
            && let Some(at) = model.backend.first_non_finite(grad.buffer())?
        {
            found = Some((i, model.params[i].own.start + at));
        }
    }
    let Some(split) = model.split_over() else { return Ok(found) };
    let own = found.map_or(Vec::new(), |(i, at)| [i as u64, at as u64].map(u64::to_le_bytes).concat());
    let all = split.ranks().all_gather(&own)?;
    let number = |b: &[u8; 8]| u64::from_le_bytes(*b) as usize;
    let found = all.iter().filter_map(|bytes| match bytes.as_chunks::<8>() {
        ([param, at], []) => Some((number(param), number(at))),
        _ => None,
    });
    Ok(found.min())
}

/// Buffers allocated for the first update of a parameter.
struct NewState {
    param: usize,
    moments: Vec<(StateKind, Buffer)>,
    average: Option<Buffer>,
}

/// What [`Optimizer::install_moments`] installed, and the EMA buffer not yet in use.
struct Installed {
    param: usize,
    new: Vec<StateKind>,
    average: Option<Buffer>,
}

/// Number of trained weights; an entry of `frozen` that matches no tensor is an error.
pub fn trained_weights(config: &ModelConfig, frozen: &[String]) -> Result<usize> {
    Ok(trained_parts(config, frozen)?.iter().flatten().map(ExactSizeIterator::len).sum())
}

/// Elements of each parameter whose tensor is not frozen.
fn trained_parts(config: &ModelConfig, frozen: &[String]) -> Result<Vec<Vec<Range<usize>>>> {
    let tensors: Vec<Tensor> = family(config.family)?.tensors(config);
    let mut used = vec![false; frozen.len()];
    let mut out = Vec::new();
    for tensor in &tensors {
        let (mut at, mut ranges) = (0, Vec::<Range<usize>>::new());
        for part in &tensor.parts {
            let len = part.shape.iter().product::<usize>();
            let hits = frozen.iter().enumerate().filter(|(_, f)| part.name.contains(f.as_str()));
            let hits: Vec<usize> = hits.map(|(i, _)| i).collect();
            hits.iter().for_each(|&i| used[i] = true);
            // Merge adjacent ranges.
            match ranges.last_mut() {
                _ if !hits.is_empty() => {}
                Some(last) if last.end == at => last.end = at + len,
                _ => ranges.push(at..at + len),
            }
            at += len;
        }
        out.push(ranges);
    }
    if let Some(i) = used.iter().position(|u| !u) {
        let names: Vec<&str> = tensors.iter().flat_map(|t| t.parts.iter().map(|p| p.name.as_str())).collect();
        let hint = nearest(&frozen[i], names.iter().copied()).or(names.first().copied()).unwrap_or("");
        return Err(Error::usage(format!("frozen {:?} is part of no tensor's name", frozen[i]))
            .fix(format!("a part of a name such as {hint:?}")));
    }
    if out.iter().all(Vec::is_empty) {
        return Err(Error::usage("every tensor is frozen: nothing would be learned")
            .fix("leave the tensors out of `frozen` that should be trained"));
    }
    Ok(out)
}

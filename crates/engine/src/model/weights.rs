//! A model in memory: one f32 master per parameter, and the forms derived from it.
//!
//! Sampler and trainer read the same derived forms; `refresh` rebuilds them after an update and raises the version.

use super::adapter::base::Nf4Base;
use super::adapter::{Adapter, AdapterOptions, BaseHome, adapted_weights, frozen_params};
use super::config::{LayerRope, ModelConfig, Position, Rope, RopeScaling};
use super::frozen::fits_bf16;
use super::layout::Layout;
use super::param::{ParamId, ParamShape};
use super::shard::Split;
use super::tensor::Team;
use crate::checkpoint::{
    InitOptions, ModelDir, ParamValues, SaveOptions, StorageFormat, init_param, save_model,
};
use crate::{Error, Result};
use ferrl_kernels::{Backend, Buffer, DType, Purpose, Weight, lock};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A decoder with its weights on a device.
pub struct Model {
    /// Where it lives.
    pub backend: Arc<dyn Backend>,
    /// What it is made of.
    pub config: ModelConfig,
    /// Compute type: of activations, and of what products multiply. Checkpoints are stored in a
    /// [`StorageFormat`], masters in f32.
    pub dtype: DType,
    /// Every parameter, in the order of [`ModelConfig::params`], then those of an adapter.
    pub params: Vec<Param>,
    /// Counts updates of the weights.
    pub version: u64,
    pub(super) layout: Layout,
    /// An adapter, whose parameters follow those of the configuration in `params`.
    pub(super) adapter: Option<Adapter>,
    /// Its bases that are NF4, by parameter.
    pub(super) bases: BTreeMap<usize, Nf4Base>,
    /// Whether gradients will be computed.
    pub(super) training: bool,
    /// Whether of what products multiply no more is kept than they read.
    rounds: bool,
    /// What backward multiplies the load-balance loss of a sequence and layer with.
    pub balance: f32,
    rotary: Mutex<Option<Arc<RotaryTables>>>,
    context: usize,
    /// How the weights are split over ranks, where they are.
    pub(super) split: Option<Split>,
    /// The ranks that compute with this one, where there are any.
    pub(super) team: Option<Team>,
    /// No other model of this process has it.
    number: u64,
}

/// Models that were made.
static MODELS: AtomicU64 = AtomicU64::new(0);

/// One parameter.
pub struct Param {
    /// Which it is, and its shape.
    pub shape: ParamShape,
    /// The one owner of the value, f32: of the weights in `own`.
    pub master: Buffer,
    /// All weights, or this rank's part of them.
    pub own: Range<usize>,
    /// All weights in f32 where this rank owns a part of them and something reads them all.
    pub(super) whole: Option<Buffer>,
    /// What linear layers multiply with, derived from the master.
    pub(crate) derived: Option<Weight>,
    /// What the gradient of a shared layer's input is computed with (`tensor.rs`).
    pub(super) turned: Option<Weight>,
    /// What this rank computes with alone, while it computes with a team, where that lies within the master.
    pub(super) aside: Option<Weight>,
}

/// Cosines and sines for the first `positions` positions, of each rotation that the model has.
pub struct RotaryTables {
    positions: usize,
    global: RotaryTable,
    local: Option<RotaryTable>,
}

/// One rotation's.
pub(super) struct RotaryTable {
    /// Dimensions of a head that are rotated.
    pub dim: usize,
    pub cos: Buffer,
    pub sin: Buffer,
}

impl RotaryTables {
    /// Those of a layer; `None` where it does not rotate.
    pub(super) fn of(&self, layer: LayerRope) -> Option<&RotaryTable> {
        match layer {
            LayerRope::Global => Some(&self.global),
            LayerRope::Local => self.local.as_ref(),
            LayerRope::None => None,
        }
    }
    /// Positions they have.
    pub(crate) fn positions(&self) -> usize {
        self.positions
    }
}

/// What the model will be used for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Compute type: of activations, and of what products multiply. Checkpoints are stored in a
    /// [`StorageFormat`], masters in f32.
    pub dtype: DType,
    /// Whether gradients will be computed.
    pub training: bool,
    /// Longest sequence of the run, where the model's rotation depends on it; 0 means as in pre-training.
    pub context: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { dtype: DType::F32, training: false, context: 0 }
    }
}

impl Model {
    /// Reads a model directory; an adapter becomes part of the weights.
    pub fn load(backend: Arc<dyn Backend>, dir: &ModelDir, options: Options) -> Result<Model> {
        if let Some(own) = dir.adapter().filter(|own| own.options.base == BaseHome::Nf4) {
            let mut model = Model::load_adapted(backend, dir, options, &own.options, 0)?;
            model.fold()?;
            return Ok(model);
        }
        let mut model = Model::load_base(backend, dir, options, (None, None))?;
        if let Some(adapter) = dir.adapter() {
            model.put_on(&adapter.options, 0, |module| adapter.values(module).map(Some))?;
            model.fold()?;
        }
        Ok(model)
    }

    /// Reads a model directory and puts an adapter on the model: the directory's own, where it holds one with these options,
    /// else a new one from `seed`.
    pub fn load_adapted(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        wanted: &AdapterOptions,
        seed: u64,
    ) -> Result<Model> {
        Model::load_adapted_part(backend, dir, options, (wanted, seed), None)
    }

    /// The same of which this rank keeps its part, where weights are split: one weight at a time is whole.
    pub fn load_adapted_part(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        (wanted, seed): (&AdapterOptions, u64),
        split: Option<Split>,
    ) -> Result<Model> {
        if let Some(own) = dir.adapter() {
            own.options.same(wanted, &dir.config).map_err(|e| e.at(dir.path.display()))?;
        }
        let mut model = Model::load_base(backend, dir, options, (Some(wanted), split.as_ref()))?;
        let base = model.params.len();
        model.split = split; // so that nothing is merged before it is gathered
        match dir.adapter() {
            None => model.put_adapter(wanted, seed, |_| Ok(None))?,
            Some(own) => model.put_adapter(wanted, seed, |module| own.values(module).map(Some))?,
        }
        if let Some(split) = model.split.clone() {
            (base..model.params.len()).try_for_each(|i| model.keep_part(i, &split))?;
        }
        Ok(model)
    }

    /// The parameters of a directory; weights with an adapter are converted to its base format as they are read, and cut to this
    /// rank's part where they are split.
    fn load_base(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        (adapted, split): (Option<&AdapterOptions>, Option<&Split>),
    ) -> Result<Model> {
        let mut model = Model::empty(backend, dir.config.clone(), options)?;
        let bases =
            adapted.map(|wanted| adapted_weights(&dir.config, wanted)).transpose()?.unwrap_or_default();
        let home = adapted.map_or(BaseHome::Device, |wanted| wanted.base);
        let frozen = adapted.map(|wanted| frozen_params(&dir.config, wanted)).transpose()?;
        let mut next = 0;
        model.rounds = !options.training;
        dir.load_stored(|shape, numbers| {
            let param = match bases.contains(&next) {
                true => {
                    let _weights = Purpose::Weights.on(&model.backend.clone());
                    let block = dir.nf4_block(next)?;
                    model.base_param(next, *shape, numbers, (home, block))?
                }
                false => {
                    let frozen = !options.training || frozen.as_ref().is_some_and(|all| all.contains(&next));
                    model.param_with(*shape, &numbers, frozen)?
                }
            };
            model.params.push(param);
            match split {
                Some(split) if bases.contains(&next) => model.keep_base_part(next, split, home)?,
                Some(split) => model.keep_part(next, split)?,
                None => (),
            }
            next += 1;
            Ok(())
        })?;
        assert_eq!(next, model.config.params().len(), "a directory gives every parameter");
        Ok(model)
    }

    /// Reads this rank's part of a directory's parameters and nothing of the others'. A directory with an adapter is read whole
    /// first.
    pub fn load_split(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        split: Split,
    ) -> Result<Model> {
        if dir.adapter().is_some() {
            let mut model = Model::load(backend, dir, options)?;
            model.split(split)?;
            return Ok(model);
        }
        let mut model = Model::empty(backend, dir.config.clone(), options)?;
        let _weights = Purpose::Weights.on(&model.backend.clone());
        let part = |param: usize, len: usize| split.part(param, len, split.ranks().rank());
        dir.load_ranges(part, |shape, own, values| {
            let param = model.own_part(*shape, own, &values)?;
            model.params.push(param);
            Ok(())
        })?;
        model.split = Some(split);
        Ok(model)
    }

    /// A parameter of which this rank has a part.
    fn own_part(&self, shape: ParamShape, own: Range<usize>, values: &[f32]) -> Result<Param> {
        let mut master = self.backend.alloc(DType::F32, own.len())?;
        self.backend.write(&mut master, 0, values)?;
        Ok(Param { shape, master, own, whole: None, derived: None, turned: None, aside: None })
    }

    /// A random model, as `ferrl init` would write it.
    pub fn random(backend: Arc<dyn Backend>, init: &InitOptions, options: Options) -> Result<Model> {
        Model::random_stored(backend, init, options, StorageFormat::F32)
    }

    /// A random model as files of that format would hold it.
    pub fn random_stored(
        backend: Arc<dyn Backend>,
        init: &InitOptions,
        options: Options,
        storage: StorageFormat,
    ) -> Result<Model> {
        let (config, _) = init.build()?;
        let mut model = Model::empty(backend, config.clone(), options)?;
        for shape in config.params() {
            let mut values = init_param(&config, init, &shape);
            storage.round(&mut values);
            model.push(shape, values)?;
        }
        Ok(model)
    }

    fn empty(backend: Arc<dyn Backend>, config: ModelConfig, options: Options) -> Result<Model> {
        let layout = Layout::of(&config);
        Ok(Model {
            backend,
            config,
            dtype: options.dtype,
            params: Vec::new(),
            version: 0,
            layout,
            adapter: None,
            bases: BTreeMap::new(),
            training: options.training,
            rounds: false,
            balance: 0.0,
            rotary: Mutex::new(None),
            context: options.context,
            split: None,
            team: None,
            number: MODELS.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Its weights lie elsewhere from now on: what was captured with the old addresses is another model's.
    pub(super) fn renumber(&mut self) {
        self.number = MODELS.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of the model and version of its weights: what was computed with equal ones is the same.
    pub(crate) fn weights(&self) -> (u64, u64) {
        (self.number, self.version)
    }

    /// Which weights these are and where they lie, whatever their values: recorded work that names addresses is good for
    /// one such place.
    pub(crate) fn place(&self) -> Vec<usize> {
        let forms = self.params.iter().filter_map(|p| p.derived.as_ref());
        let forms = forms.map(|w| std::ptr::from_ref(w.data()).addr());
        let masters = (0..self.params.len()).map(|i| std::ptr::from_ref(self.master(i).data()).addr());
        [self.number as usize].into_iter().chain(masters).chain(forms).collect()
    }

    fn push(&mut self, shape: ParamShape, values: Vec<f32>) -> Result<()> {
        let param = self.param(shape, &ParamValues::F32(values))?;
        self.params.push(param);
        Ok(())
    }

    /// A parameter with these numbers.
    pub(super) fn param(&self, shape: ParamShape, numbers: &ParamValues<'_>) -> Result<Param> {
        self.param_with(shape, numbers, !self.training)
    }

    /// The same; where it is `frozen`, nothing trains it as long as it lies there.
    pub(super) fn param_with(
        &self,
        shape: ParamShape,
        numbers: &ParamValues<'_>,
        frozen: bool,
    ) -> Result<Param> {
        let fits = || match numbers {
            ParamValues::Bf16(_) => true,
            ParamValues::F32(values) => values.iter().all(|&x| fits_bf16(x)),
        };
        let rounds = frozen && (self.rounds_to_read(&shape) || self.rounds_where_frozen(&shape) && fits());
        self.param_from(shape, rounds, |master| numbers.write(&*self.backend, master))
    }

    /// Whether no more of a parameter is kept than products read. Tables are read in f32 too.
    pub(super) fn rounds_to_read(&self, shape: &ParamShape) -> bool {
        self.rounds && !shape.id.slot.is_table()
    }

    /// A parameter with the numbers that `write` writes; in two bytes a weight with `rounds`, where the device can.
    pub(super) fn param_from(
        &self,
        shape: ParamShape,
        rounds: bool,
        write: impl FnOnce(&mut Buffer) -> Result<()>,
    ) -> Result<Param> {
        let _weights = Purpose::Weights.on(&self.backend);
        let rounded = if rounds { self.rounded_forms(&shape)? } else { None };
        let (mut derived, mut master) = rounded.map_or_else(|| self.forms(&shape, self.training), Ok)?;
        write(&mut master)?;
        if let Some(weight) = &mut derived {
            self.backend.load_weight(&master, weight)?;
        }
        Ok(Param { shape, master, own: 0..shape.len(), whole: None, derived, turned: None, aside: None })
    }

    /// Whether the device holds it in two bytes a weight where nothing trains it and bf16 holds its numbers exactly.
    pub(super) fn rounds_where_frozen(&self, shape: &ParamShape) -> bool {
        let read = self.config.is_multiplied(shape.id) || shape.id.slot.is_table();
        self.dtype == DType::Bf16 && self.backend.rounds_masters() && read && !shape.id.slot.is_f32()
    }

    /// The same as [`Model::forms`] in two bytes a weight, for what is not trained; `None` where the device cannot.
    fn rounded_forms(&self, shape: &ParamShape) -> Result<Option<(Option<Weight>, Buffer)>> {
        if !self.rounds_where_frozen(shape) {
            return Ok(None);
        }
        let weight = self.backend.weight(shape.rows, shape.cols, self.dtype, self.training)?;
        let master = self.backend.rounded_master(&weight)?;
        Ok(master.map(|master| (self.config.is_multiplied(shape.id).then_some(weight), master)))
    }

    /// A weight as its own master, where no more of it is kept than products read.
    pub(super) fn rounded_view(&self, param: usize) -> Result<Option<Buffer>> {
        match &self.params[param].derived {
            Some(weight) if self.rounds && !self.training => self.backend.rounded_master(weight),
            _ => Ok(None),
        }
    }

    /// Room for what products read of a parameter, where they do (those of `backward` too), and for its weights in f32.
    pub(super) fn forms(&self, shape: &ParamShape, backward: bool) -> Result<(Option<Weight>, Buffer)> {
        let dtype = if shape.id.slot.is_f32() { DType::F32 } else { self.dtype };
        let weight = || self.backend.weight(shape.rows, shape.cols, dtype, backward);
        let derived = self.config.is_multiplied(shape.id).then(weight).transpose()?;
        let shared = derived.as_ref().map(|weight| self.backend.master(weight)).transpose()?.flatten();
        Ok((derived, shared.map_or_else(|| self.backend.alloc(DType::F32, shape.len()), Ok)?))
    }

    /// Writes a Hugging Face directory; `source` is the one the model came from, whose other files are copied.
    pub fn save(&self, dir: &Path, json: Option<&Value>, options: &SaveOptions<'_>) -> Result<()> {
        save_model(dir, &self.config, json, options, &mut |shape| {
            let param = self.find(shape.id).expect("the model has every parameter of its configuration");
            self.values_of(param)
        })
    }

    /// A copy that computes what the original computes now, whole on every rank; no more is kept of it than that takes. All ranks
    /// call it together where weights are split.
    pub fn frozen_copy(&self) -> Result<Model> {
        self.copy(true)
    }

    /// A copy with every bit of the masters, to start from again.
    pub fn exact_copy(&self) -> Result<Model> {
        self.copy(false)
    }

    fn copy(&self, rounds: bool) -> Result<Model> {
        let mut copy = self.frozen_twin()?;
        copy.rounds = rounds;
        if self.adapter.is_some() && self.split.is_some() {
            return Err(Error::usage(
                "a copy of an adapted model whose base is split over ranks is not made",
            )
            .fix("parallel.ddp_size = 0, or an estimate of the KL that needs no sum over the vocabulary"));
        }
        for (i, shape) in self.config.params().into_iter().enumerate() {
            let values = if self.adapter.is_some() { self.values_of(i)? } else { self.read_together(i)? };
            copy.push(shape, values)?;
        }
        Ok(copy)
    }

    fn frozen_twin(&self) -> Result<Model> {
        let options = Options { dtype: self.dtype, training: false, context: self.context };
        Model::empty(self.backend.clone(), self.config.clone(), options)
    }

    /// The same, split over ranks as the original is; `number` tells it from other models of the run. None where the original
    /// is whole or has an adapter.
    pub fn frozen_part(&self, number: usize) -> Result<Option<Model>> {
        let Some(split) = self.split.as_ref().filter(|_| self.adapter.is_none()) else { return Ok(None) };
        let mut copy = self.frozen_twin()?;
        let _weights = Purpose::Weights.on(&self.backend);
        for (i, param) in self.params.iter().enumerate() {
            let values = self.own_values(i)?;
            copy.params.push(copy.own_part(param.shape, param.own.clone(), &values)?);
        }
        copy.split = Some(Split { number, ..split.clone() });
        Ok(Some(copy))
    }

    /// Rebuilds what is derived from the masters, after they changed.
    pub fn refresh(&mut self) -> Result<()> {
        self.release_all();
        for (i, param) in self.params.iter_mut().enumerate() {
            if let Some(weight) = param.derived.as_mut().filter(|_| !adapts(&self.adapter, i)) {
                self.backend.load_weight(&param.master, weight)?;
            }
        }
        self.merge()?;
        self.version += 1;
        Ok(())
    }

    /// Makes sure that what changes the weights will find memory for `copies` copies of a parameter of each of these
    /// lengths, one parameter at a time: freed memory is kept for later allocations.
    pub(crate) fn room(&self, lengths: impl IntoIterator<Item = usize>, copies: usize) -> Result<()> {
        let lengths: std::collections::BTreeSet<usize> = lengths.into_iter().collect();
        let all = lengths.into_iter().flat_map(|n| std::iter::repeat_n(n, copies));
        all.map(|n| self.backend.alloc(DType::F32, n)).collect::<Result<Vec<Buffer>>>().map(drop)
    }

    /// The values of a parameter; where they are split, on rank 0 while the others [`serve`](super::serve::serve).
    pub fn read(&self, param: usize) -> Result<Vec<f32>> {
        let own = self.own_values(param)?;
        let Some(split) = &self.split else { return Ok(own) };
        split.collect((param, 0), self.params[param].shape.len(), &own, |weights| weights)
    }

    /// Longest sequence the model was trained for ([`ModelConfig::max_context`]).
    pub fn max_context(&self) -> Option<usize> {
        self.config.max_context()
    }

    /// Index of a parameter.
    pub fn find(&self, id: ParamId) -> Option<usize> {
        self.params.iter().position(|p| p.shape.id == id)
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        self.params.iter().map(|p| p.shape.len()).sum()
    }

    /// Whether there are no weights.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Cosines and sines for at least that many positions, where the model rotates.
    pub(crate) fn rotary(&self, positions: usize) -> Result<Option<Arc<RotaryTables>>> {
        let Position::Rotary(rope) = &self.config.position else { return Ok(None) };
        let mut slot: MutexGuard<'_, _> = lock(&self.rotary);
        if let Some(tables) = slot.as_ref().filter(|t| t.positions >= positions) {
            return Ok(Some(tables.clone()));
        }
        let positions = positions.next_power_of_two().max(256);
        let local = self.config.local_rope.as_ref().map(|rope| self.turns(rope, positions)).transpose()?;
        let tables = Arc::new(RotaryTables { positions, global: self.turns(rope, positions)?, local });
        *slot = Some(tables.clone());
        Ok(Some(tables))
    }

    /// The longest sequence that the model was loaded for; 0 means as in pre-training.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Refuses a sequence beyond the context of pre-training where LongRoPE's divisors were chosen for that.
    pub(crate) fn check_reach(&self, tokens: usize) -> Result<()> {
        let &Position::Rotary(Rope { scaling: RopeScaling::PerDimension { original, .. }, .. }) =
            &self.config.position
        else {
            return Ok(());
        };
        if tokens <= original || self.context > original {
            return Ok(());
        }
        let what =
            format!("{tokens} tokens, and LongRoPE (rope_scaling) has the divisors for up to {original}");
        Err(Error::data(what).fix(format!(
            "allow longer sequences from the start, so that the divisors for those are taken: data.max_length and rollout.max_new_tokens \
             together above {original}; or shorter sequences"
        )))
    }

    fn turns(&self, rope: &Rope, positions: usize) -> Result<RotaryTable> {
        let (frequencies, gain) = rope.inv_freq(self.context);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            for f in &frequencies {
                // The product is rounded to f32 first, as transformers does.
                let (s, c) = ferrl_kernels::math::sin_cos((position as f32 * f) as f64);
                cos.push(c as f32 * gain);
                sin.push(s as f32 * gain);
            }
        }
        Ok(RotaryTable { dim: rope.rotary_dim, cos: self.upload(&cos)?, sin: self.upload(&sin)? })
    }

    /// Parameters whose gradient a backward adds to more than once: the weight of the language-model head, which is the
    /// embedding where they are tied. A table of its own gets one sum a backward.
    pub(crate) fn summed_in_parts(&self) -> impl Iterator<Item = usize> {
        self.layout.head.map(|head| head.weight).into_iter()
    }

    /// The f32 master.
    pub(super) fn master(&self, param: usize) -> &Buffer {
        let param = &self.params[param];
        param.whole.as_ref().unwrap_or(&param.master)
    }

    pub(super) fn weight(&self, param: usize) -> &Weight {
        self.params[param].derived.as_ref().expect("a linear layer's parameter")
    }
}

fn adapts(adapter: &Option<Adapter>, param: usize) -> bool {
    adapter.as_ref().is_some_and(|adapter| adapter.adapts(param))
}

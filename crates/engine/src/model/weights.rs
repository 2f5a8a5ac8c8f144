//! A model in memory: an f32 master per parameter, and the weights derived from it for GEMMs.
//!
//! Sampler and trainer read the same derived weights; `refresh` rebuilds them after an update and increments the version.

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
    pub backend: Arc<dyn Backend>,
    pub config: ModelConfig,
    /// Compute type, of activations and GEMM weights. Masters are f32; checkpoints have a [`StorageFormat`].
    pub dtype: DType,
    /// Parameters, in the order of [`ModelConfig::params`], then the adapter's.
    pub params: Vec<Param>,
    /// Number of weight updates.
    pub version: u64,
    pub(super) layout: Layout,
    /// The adapter; its parameters follow those of the configuration in `params`.
    pub(super) adapter: Option<Adapter>,
    /// NF4 bases, by parameter.
    pub(super) bases: BTreeMap<usize, Nf4Base>,
    /// Whether gradients will be computed.
    pub(super) training: bool,
    /// Whether only the rounded weights are stored (no f32 master) where nothing reads the latter.
    rounds: bool,
    /// Coefficient of the load-balance loss (per sequence and layer) in backward.
    pub balance: f32,
    rotary: Mutex<Option<Arc<RotaryTables>>>,
    context: usize,
    /// How the weights are sharded over ranks, if they are.
    pub(super) split: Option<Split>,
    /// The team this rank computes with, if any.
    pub(super) team: Option<Team>,
    /// Unique in this process.
    number: u64,
}

/// Next value of `Model::number`.
static MODELS: AtomicU64 = AtomicU64::new(0);

pub struct Param {
    pub shape: ParamShape,
    /// The f32 master, the only owner of the values; holds the range `own`.
    pub master: Buffer,
    /// This rank's shard; everything if not sharded.
    pub own: Range<usize>,
    /// The gathered f32 weights of a sharded parameter, if something other than a GEMM reads them.
    pub(super) whole: Option<Buffer>,
    /// The GEMM weight, derived from the master.
    pub(crate) derived: Option<Weight>,
    /// The transposed columns for the gradient of a tensor-parallel layer's input (`tensor.rs`).
    pub(super) transposed: Option<Weight>,
    /// The single-rank GEMM weight, kept while computing with a team on devices that store it inside the master.
    pub(super) single_rank: Option<Weight>,
}

impl Param {
    /// A parameter that is not sharded.
    pub(super) fn new(shape: ParamShape, master: Buffer, derived: Option<Weight>) -> Self {
        Param {
            shape,
            master,
            own: 0..shape.len(),
            whole: None,
            derived,
            transposed: None,
            single_rank: None,
        }
    }
}

/// RoPE tables: cosines and sines of the first `positions` positions.
pub struct RotaryTables {
    positions: usize,
    global: RotaryTable,
    local: Option<RotaryTable>,
}

pub(super) struct RotaryTable {
    /// Dimensions of a head that are rotated.
    pub dim: usize,
    pub cos: Buffer,
    pub sin: Buffer,
}

impl RotaryTables {
    /// The table of a layer; `None` for NoPE.
    pub(super) fn of(&self, layer: LayerRope) -> Option<&RotaryTable> {
        match layer {
            LayerRope::Global => Some(&self.global),
            LayerRope::Local => self.local.as_ref(),
            LayerRope::None => None,
        }
    }
    pub(crate) fn positions(&self) -> usize {
        self.positions
    }
}

/// How the model will be used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Compute type, of activations and GEMM weights. Masters are f32; checkpoints have a [`StorageFormat`].
    pub dtype: DType,
    /// Whether gradients will be computed.
    pub training: bool,
    /// Longest sequence of the run, for LongRoPE; 0: the context of pre-training.
    pub context: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { dtype: DType::F32, training: false, context: 0 }
    }
}

impl Model {
    /// Reads a model directory; an adapter is merged into the weights.
    pub fn load(backend: Arc<dyn Backend>, dir: &ModelDir, options: Options) -> Result<Model> {
        if let Some(own) = dir.adapter().filter(|own| own.options.base == BaseHome::Nf4) {
            let mut model = Model::load_adapted(backend, dir, options, &own.options, 0)?;
            model.fold()?;
            return Ok(model);
        }
        let mut model = Model::load_base(backend, dir, options, (None, None))?;
        if let Some(adapter) = dir.adapter() {
            model.attach_adapter(&adapter.options, 0, |module| adapter.values(module).map(Some))?;
            model.fold()?;
        }
        Ok(model)
    }

    /// Reads a model directory with an adapter: the directory's own if its options match, else a new one from `seed`.
    pub fn load_adapted(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        wanted: &AdapterOptions,
        seed: u64,
    ) -> Result<Model> {
        Model::load_adapted_part(backend, dir, options, (wanted, seed), None)
    }

    /// The same, keeping only this rank's shards; one full weight is in memory at a time.
    pub fn load_adapted_part(
        backend: Arc<dyn Backend>,
        dir: &ModelDir,
        options: Options,
        (wanted, seed): (&AdapterOptions, u64),
        split: Option<Split>,
    ) -> Result<Model> {
        if let Some(own) = dir.adapter() {
            own.check_trainable().map_err(|e| e.at(dir.path.display()))?;
            own.options.same(wanted, &dir.config).map_err(|e| e.at(dir.path.display()))?;
        }
        let mut model = Model::load_base(backend, dir, options, (Some(wanted), split.as_ref()))?;
        let base = model.params.len();
        model.split = split; // defers merging to the gathers
        match dir.adapter() {
            None => model.attach_to_bases(wanted, seed, |_| Ok(None))?,
            Some(own) => model.attach_to_bases(wanted, seed, |module| own.values(module).map(Some))?,
        }
        if let Some(split) = model.split.clone() {
            (base..model.params.len()).try_for_each(|i| model.shard_param(i, &split))?;
        }
        Ok(model)
    }

    /// The parameters of a directory; an adapter's base weights are converted to their storage format, and sharded, one at a
    /// time.
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
        let (mut next, tensors) = (0, dir.family.tensors(&dir.config));
        model.rounds = !options.training;
        dir.load_stored(|shape, numbers| {
            let param = match bases.contains(&next) {
                true => {
                    let _weights = Purpose::Weights.on(&model.backend.clone());
                    let stored = if home == BaseHome::Nf4 { dir.nf4(&tensors[next])? } else { None };
                    model.base_param(next, *shape, numbers, (home, stored))?
                }
                false => {
                    let frozen = !options.training || frozen.as_ref().is_some_and(|all| all.contains(&next));
                    model.param_with(*shape, &numbers, frozen)?
                }
            };
            model.params.push(param);
            match split {
                Some(split) if bases.contains(&next) => model.shard_base(next, split, home)?,
                Some(split) => model.shard_param(next, split)?,
                None => (),
            }
            next += 1;
            Ok(())
        })?;
        assert_eq!(next, model.config.params().len(), "a directory gives every parameter");
        Ok(model)
    }

    /// Reads only this rank's shards of a directory's parameters. With an adapter, the directory is first read in full.
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

    /// A sharded parameter, given this rank's values.
    fn own_part(&self, shape: ParamShape, own: Range<usize>, values: &[f32]) -> Result<Param> {
        let mut master = self.backend.alloc(DType::F32, own.len())?;
        self.backend.write(&mut master, 0, values)?;
        Ok(Param { own, ..Param::new(shape, master, None) })
    }

    /// A randomly initialised model, as `ferrl init` would write it.
    pub fn random(backend: Arc<dyn Backend>, init: &InitOptions, options: Options) -> Result<Model> {
        Model::random_stored(backend, init, options, StorageFormat::F32)
    }

    /// The same, rounded as if it had been stored in a format.
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

    /// Call after weights have moved: captured graphs hold the old addresses and belong to the old number.
    pub(super) fn renumber(&mut self) {
        self.number = MODELS.fetch_add(1, Ordering::Relaxed);
    }

    /// `(number, version)`: equal values mean equal weights.
    pub(crate) fn weights(&self) -> (u64, u64) {
        (self.number, self.version)
    }

    /// Identifies the addresses of the weights, whatever their values: a captured graph is valid for one value of this.
    pub(crate) fn place(&self) -> Vec<usize> {
        let derived = self.params.iter().filter_map(|p| p.derived.as_ref());
        let derived = derived.map(|w| std::ptr::from_ref(w.data()).addr());
        let masters = (0..self.params.len()).map(|i| std::ptr::from_ref(self.master(i).data()).addr());
        [self.number as usize].into_iter().chain(masters).chain(derived).collect()
    }

    fn push(&mut self, shape: ParamShape, values: Vec<f32>) -> Result<()> {
        let param = self.param(shape, &ParamValues::F32(values))?;
        self.params.push(param);
        Ok(())
    }

    /// A parameter with these values.
    pub(super) fn param(&self, shape: ParamShape, numbers: &ParamValues<'_>) -> Result<Param> {
        self.param_with(shape, numbers, !self.training)
    }

    /// The same; `frozen` parameters may be stored without an f32 master.
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

    /// Whether only a parameter's rounded values are stored. Embedding tables are excluded: they are also read in f32.
    pub(super) fn rounds_to_read(&self, shape: &ParamShape) -> bool {
        self.rounds && !shape.id.slot.is_table()
    }

    /// A parameter whose values `write` writes; with `rounds`, stored in two bytes per weight where the device can.
    pub(super) fn param_from(
        &self,
        shape: ParamShape,
        rounds: bool,
        write: impl FnOnce(&mut Buffer) -> Result<()>,
    ) -> Result<Param> {
        let _weights = Purpose::Weights.on(&self.backend);
        let rounded = if rounds { self.alloc_rounded(&shape)? } else { None };
        let (mut derived, mut master) =
            rounded.map_or_else(|| self.alloc_weights(&shape, self.training), Ok)?;
        write(&mut master)?;
        if let Some(weight) = &mut derived {
            self.backend.load_weight(&master, weight)?;
        }
        Ok(Param::new(shape, master, derived))
    }

    /// Whether the device can store it in two bytes per weight while frozen (if bf16 holds the values exactly).
    pub(super) fn rounds_where_frozen(&self, shape: &ParamShape) -> bool {
        let read = self.config.is_multiplied(shape.id) || shape.id.slot.is_table();
        self.dtype == DType::Bf16 && self.backend.rounds_masters() && read && !shape.id.slot.is_f32()
    }

    /// [`Model::alloc_weights`] in two bytes per weight, for frozen parameters; `None` if the device cannot.
    fn alloc_rounded(&self, shape: &ParamShape) -> Result<Option<(Option<Weight>, Buffer)>> {
        if !self.rounds_where_frozen(shape) {
            return Ok(None);
        }
        let weight = self.backend.weight(shape.rows, shape.cols, self.dtype, self.training)?;
        let master = self.backend.rounded_master(&weight)?;
        Ok(master.map(|master| (self.config.is_multiplied(shape.id).then_some(weight), master)))
    }

    /// A GEMM weight viewed as its own master, where no f32 master is stored.
    pub(super) fn rounded_view(&self, param: usize) -> Result<Option<Buffer>> {
        match &self.params[param].derived {
            Some(weight) if self.rounds && !self.training => self.backend.rounded_master(weight),
            _ => Ok(None),
        }
    }

    /// Allocates a parameter's GEMM weight, if a GEMM reads it (`backward`: also its transpose), and its f32 master.
    pub(super) fn alloc_weights(
        &self,
        shape: &ParamShape,
        backward: bool,
    ) -> Result<(Option<Weight>, Buffer)> {
        let dtype = if shape.id.slot.is_f32() { DType::F32 } else { self.dtype };
        let weight = || self.backend.weight(shape.rows, shape.cols, dtype, backward);
        let derived = self.config.is_multiplied(shape.id).then(weight).transpose()?;
        let shared = derived.as_ref().map(|weight| self.backend.master(weight)).transpose()?.flatten();
        Ok((derived, shared.map_or_else(|| self.backend.alloc(DType::F32, shape.len()), Ok)?))
    }

    /// Writes a Hugging Face directory; non-weight files are copied from `source`.
    pub fn save(&self, dir: &Path, json: Option<&Value>, options: &SaveOptions<'_>) -> Result<()> {
        save_model(dir, &self.config, json, options, &mut |shape| {
            let param = self.find(shape.id).expect("the model has every parameter of its configuration");
            self.values_of(param)
        })
    }

    /// A full copy on every rank that computes what the original computes now, without f32 masters where possible. Collective if
    /// weights are sharded.
    pub fn frozen_copy(&self) -> Result<Model> {
        self.copy(true)
    }

    /// A copy with exact masters, to restore from.
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

    /// A frozen copy sharded like the original; `number` is its index within the run. `None` if the original is not sharded or
    /// has an adapter.
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

    /// Rebuilds the derived weights after the masters changed.
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

    /// Reserves memory for `copies` copies of a parameter of each of these lengths, one parameter at a time (the allocator keeps
    /// freed memory), so that changing the weights cannot run out of memory halfway.
    pub(crate) fn reserve(&self, lengths: impl IntoIterator<Item = usize>, copies: usize) -> Result<()> {
        let lengths: std::collections::BTreeSet<usize> = lengths.into_iter().collect();
        let all = lengths.into_iter().flat_map(|n| std::iter::repeat_n(n, copies));
        all.map(|n| self.backend.alloc(DType::F32, n)).collect::<Result<Vec<Buffer>>>().map(drop)
    }

    /// A parameter's values; if sharded, on rank 0 while the others [`serve`](super::serve::serve).
    pub fn read(&self, param: usize) -> Result<Vec<f32>> {
        let own = self.own_values(param)?;
        let Some(split) = &self.split else { return Ok(own) };
        split.collect((param, 0), self.params[param].shape.len(), &own, |weights| weights)
    }

    /// Index of a parameter.
    pub fn find(&self, id: ParamId) -> Option<usize> {
        self.params.iter().position(|p| p.shape.id == id)
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        self.params.iter().map(|p| p.shape.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// RoPE tables for at least this many positions; `None` for learned positions.
    pub(crate) fn rotary(&self, positions: usize) -> Result<Option<Arc<RotaryTables>>> {
        let Position::Rotary(rope) = &self.config.position else { return Ok(None) };
        let mut slot: MutexGuard<'_, _> = lock(&self.rotary);
        if let Some(tables) = slot.as_ref().filter(|t| t.positions >= positions) {
            return Ok(Some(tables.clone()));
        }
        let positions = positions.next_power_of_two().max(256);
        let local =
            self.config.local_rope.as_ref().map(|rope| self.rotary_table(rope, positions)).transpose()?;
        let tables = Arc::new(RotaryTables { positions, global: self.rotary_table(rope, positions)?, local });
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

    fn rotary_table(&self, rope: &Rope, positions: usize) -> Result<RotaryTable> {
        let (frequencies, gain) = rope.inv_freq(self.context);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            for f in &frequencies {
                // The product is rounded to f32 first, as in transformers.
                let (s, c) = ferrl_kernels::math::sin_cos((position as f32 * f) as f64);
                cos.push(c as f32 * gain);
                sin.push(s as f32 * gain);
            }
        }
        Ok(RotaryTable { dim: rope.rotary_dim, cos: self.upload(&cos)?, sin: self.upload(&sin)? })
    }

    /// Parameters to whose gradient one backward adds more than once: the language-model head's weight (the embedding if tied).
    /// An untied embedding is added to once per backward.
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

//! A LoRA adapter on a model: its parameters, the merged weights, its gradients.
//!
//! Forward never multiplies by `A` or `B`: GEMMs read the merged weight `round(base + s B A)`. Backward does not form the
//! gradient of that weight: with `u = s x A^T` and `v = s dy B`, both `r` wide, `dB = dy^T u` and `dA = v^T x`. `B` is stored
//! transposed, `[r, out]`, so that these products, and `B A` itself, are each one operation that every device has.

use super::{AdapterOptions, BaseHome, Init, LoraModule, SavedTensor, lora_modules, saved_tensors};
use crate::Result;
use crate::checkpoint::ParamValues;
use crate::model::gradient::{Grads, Taken};
use crate::model::weights::{Model, Param};
use crate::model::{ModelConfig, ParamId, ParamKind, ParamShape};
use ferrl_kernels::backend::{ColumnsOf, LinearGrads, LowRank, LowRankGrad};
use ferrl_kernels::philox::{name_words, normals, philox4x32, uniform};
use ferrl_kernels::{Buffer, DType, Purpose, Weight};
use std::collections::BTreeSet;
use std::ops::Range;

pub struct Adapter {
    pub options: AdapterOptions,
    /// Tensors outside the adapter that are fully trained with it (`modules_to_save`, biases, heads).
    pub saved: Vec<SavedTensor>,
    parts: Vec<ModuleAdapter>,
}

/// LoRA on one module.
struct ModuleAdapter {
    module: LoraModule,
    /// Indices of `A` and `B` among the model's parameters.
    a: usize,
    b: usize,
    /// `s A`, `[r, in]`, and `s B`, `[r, out]`: the operands of backward.
    scaled_a: Weight,
    scaled_b: Weight,
}

/// Initial values of a module's `A` and `B`, both with `r` rows.
pub type Values = [Vec<f32>; 2];

/// How much of the update `d = s B A` survives rounding of the merged weight, as `d' = round(base + d) - round(base)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AdapterRounding {
    /// `sum d * d`
    pub intended: f64,
    /// `sum d * d'`
    pub arrived: f64,
}

impl AdapterRounding {
    /// `sum d d' / sum d d`; `None` if the update is zero.
    pub fn fraction(self) -> Option<f64> {
        (self.intended > 0.0).then(|| self.arrived / self.intended)
    }
}

impl Adapter {
    /// Adapted modules, in the order of the model's parameters.
    pub fn modules(&self) -> impl Iterator<Item = &LoraModule> {
        self.parts.iter().map(|part| &part.module)
    }

    /// Each module with the indices of its `A` and `B` among the model's parameters.
    pub fn places(&self) -> impl Iterator<Item = (&LoraModule, [usize; 2])> {
        self.parts.iter().map(|part| (&part.module, [part.a, part.b]))
    }

    /// Whether a weight is merged from a base and an adapter.
    pub fn adapts(&self, weight: usize) -> bool {
        self.parts.iter().any(|part| part.module.param == weight)
    }

    /// Trained elements of each parameter of the model.
    pub(crate) fn trained(&self, params: &[Param]) -> Vec<Vec<Range<usize>>> {
        let mut all: Vec<Vec<Range<usize>>> = vec![Vec::new(); params.len()];
        for SavedTensor { param, elements, .. } in &self.saved {
            match all[*param].last_mut() {
                Some(last) if last.end == elements.start => last.end = elements.end,
                _ => all[*param].push(elements.clone()),
            }
        }
        for part in &self.parts {
            for i in [part.a, part.b] {
                all[i].push(0..params[i].shape.len());
            }
        }
        all
    }

    fn of(&self, weight: usize) -> impl Iterator<Item = &ModuleAdapter> {
        self.parts.iter().filter(move |part| part.module.param == weight)
    }

    fn weights(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.parts.iter().map(|part| part.module.param).collect();
        all.dedup();
        all
    }

    /// Adds to the gradients of `A` and `B` of each module of a linear layer.
    pub(in crate::model) fn backward(
        &self,
        m: &Model,
        weight: usize,
        (dy, x): (&Buffer, &Buffer),
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, shape) = (&*m.backend, m.params[weight].shape);
        let tokens = dy.len() / shape.rows;
        let x = ColumnsOf { of: x, from: 0, width: shape.cols };
        for part in self.of(weight) {
            let dy = ColumnsOf { of: dy, from: part.module.row, width: part.module.rows };
            for (param, x, w, y) in [(part.a, dy, &part.scaled_b, x), (part.b, x, &part.scaled_a, dy)] {
                if grads[param].is_none() {
                    continue;
                }
                Taken::with(param, None, grads, |taken| {
                    let (add, [weight, _]) = taken.sums(b)?;
                    let of = LowRankGrad { x, w, y, tokens };
                    b.low_rank_dw(of, LinearGrads { weight, bias: None, add })
                })?;
            }
        }
        Ok(())
    }
}

impl Model {
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Adds an adapter; the current weights become its frozen base. `first` may give a module's initial values (`None`: drawn
    /// from `seed`).
    pub fn adapt(
        &mut self,
        options: &AdapterOptions,
        seed: u64,
        first: impl FnMut(&LoraModule) -> Result<Option<Values>>,
    ) -> Result<()> {
        self.attach_adapter(options, seed, first)?;
        frozen_params(&self.config, options)?.into_iter().try_for_each(|i| self.set_storage(i, true))
    }

    /// As [`Model::adapt`], but parameters other than the base keep their storage.
    pub(in crate::model) fn attach_adapter(
        &mut self,
        options: &AdapterOptions,
        seed: u64,
        first: impl FnMut(&LoraModule) -> Result<Option<Values>>,
    ) -> Result<()> {
        for weight in adapted_weights(&self.config, options)? {
            self.set_base(weight, options.base)?;
        }
        self.attach_to_bases(options, seed, first)
    }

    /// Moves a parameter to the compact storage for `frozen` weights, or back, on devices that have one.
    fn set_storage(&mut self, param: usize, frozen: bool) -> Result<()> {
        let shape = self.params[param].shape;
        if !self.training || !self.rounds_where_frozen(&shape) {
            return Ok(());
        }
        let _weights = Purpose::Weights.on(&self.backend.clone());
        let values = self.read(param)?;
        self.params[param].derived = None; // free the old memory first
        self.params[param].master = self.backend.alloc(DType::F32, 0)?;
        self.params[param] = self.param_with(shape, &ParamValues::F32(values), frozen)?;
        Ok(())
    }

    /// As [`Model::attach_adapter`], on weights that were created as bases.
    pub(in crate::model) fn attach_to_bases(
        &mut self,
        options: &AdapterOptions,
        seed: u64,
        mut first: impl FnMut(&LoraModule) -> Result<Option<Values>>,
    ) -> Result<()> {
        assert!(self.adapter.is_none(), "one adapter a model");
        let _weights = Purpose::Weights.on(&self.backend.clone());
        let (modules, saved) = (lora_modules(&self.config, options)?, saved_tensors(&self.config, options)?);
        let mut parts = Vec::new();
        for module in modules {
            let values = match first(&module)? {
                Some(values) => values,
                None => initial_values(&module, options.init, seed),
            };
            parts.push(self.add_module(module, &values)?);
        }
        self.adapter = Some(Adapter { options: options.clone(), saved, parts });
        self.merge()
    }

    /// Makes a weight a base with memory of its own: some devices store a GEMM weight inside its master. A base that is exact in
    /// bf16 is stored in bf16 if the model computes in bf16.
    fn set_base(&mut self, weight: usize, home: BaseHome) -> Result<()> {
        let _weights = Purpose::Weights.on(&self.backend.clone());
        let (values, shape) = (self.read(weight)?, self.params[weight].shape);
        // Free the old memory first.
        self.params[weight].derived = None;
        self.params[weight].master = self.backend.alloc(DType::F32, 0)?;
        self.params[weight] = self.base_param(weight, shape, ParamValues::F32(values), (home, None))?;
        Ok(())
    }

    fn add_module(&mut self, module: LoraModule, [a, b]: &Values) -> Result<ModuleAdapter> {
        let LoraModule { rows, cols, r, .. } = module;
        let of = self.params[module.param].shape.id;
        let index = module.part as u8;
        let mut add = |kind: ParamKind, cols: usize, values: &[f32]| -> Result<usize> {
            let shape = ParamShape { id: ParamId { kind, ..of }, rows: r, cols };
            let mut master = self.backend.alloc(DType::F32, shape.len())?;
            self.backend.write(&mut master, 0, values)?;
            self.params.push(Param::new(shape, master, None));
            Ok(self.params.len() - 1)
        };
        let (a, b) = (add(ParamKind::LoraA(index), cols, a)?, add(ParamKind::LoraB(index), rows, b)?);
        let form = |cols| self.backend.weight(r, cols, self.dtype, false);
        let (scaled_a, scaled_b) = (form(cols)?, form(rows)?);
        Ok(ModuleAdapter { module, a, b, scaled_a, scaled_b })
    }

    /// [`Model::reserve`] for [`Model::merge`]: scratch copies of a weight on devices that merge out of place, and dequantised NF4.
    pub(crate) fn reserve_for_merge(&self) -> Result<()> {
        let Some(adapter) = &self.adapter else { return Ok(()) };
        let in_place = |weight: &Weight| !self.backend.merges_in_copies(weight);
        let in_place = |w: &usize| self.params[*w].derived.as_ref().is_some_and(in_place);
        let (in_place, copied): (BTreeSet<usize>, BTreeSet<usize>) =
            adapter.weights().into_iter().partition(in_place);
        let len = |w: &usize| self.params[*w].shape.len();
        let parts = adapter.parts.iter().filter(|part| copied.contains(&part.module.param));
        let parts = parts.map(|part| part.module.elements().len());
        self.reserve(copied.iter().map(len).chain(parts), 2)?;
        self.reserve(in_place.iter().filter(|w| self.is_nf4(**w)).map(len), 1)
    }

    /// Derives the merged weights. Under ZeRO-3 or in a team this happens at each gather instead.
    pub(crate) fn merge(&mut self) -> Result<()> {
        if self.split.is_some() || self.team.is_some() {
            return Ok(());
        }
        let weights = self.adapter.as_ref().map(Adapter::weights).unwrap_or_default();
        self.derive(&weights)
    }

    /// [`Model::merge`] of one gathered weight, whose `A` and `B` were gathered before it; frees the gathered base. No-op for
    /// other parameters.
    pub(in crate::model) fn merge_gathered(&mut self, param: usize) -> Result<()> {
        if !self.is_base(param) {
            return Ok(());
        }
        // Under tensor parallelism each member derives its own output features.
        if self.is_shared(param) {
            return self.merge_shared(param);
        }
        let _weights = Purpose::Weights.on(&self.backend.clone());
        let shape = self.params[param].shape;
        let form = self.backend.weight(shape.rows, shape.cols, self.dtype, self.training)?;
        self.params[param].derived = Some(form);
        self.derive(&[param])?;
        self.params[param].whole = None;
        Ok(())
    }

    fn merge_shared(&mut self, weight: usize) -> Result<()> {
        let Some(mut adapter) = self.adapter.take() else { return Ok(()) };
        let done = self.scale_parts(&mut adapter, &[weight]).and_then(|()| {
            let values = self.read_f32s(&self.merged(&adapter, weight)?)?;
            self.params[weight].whole = None;
            self.materialize_own(weight, &values).map(drop)
        });
        self.adapter = Some(adapter);
        done
    }

    fn derive(&mut self, weights: &[usize]) -> Result<()> {
        let Some(mut adapter) = self.adapter.take() else { return Ok(()) };
        let done = self.derive_with(&mut adapter, weights);
        self.adapter = Some(adapter);
        done
    }

    /// Updates the `s A` and `s B` of these weights' modules.
    fn scale_parts(&self, adapter: &mut Adapter, weights: &[usize]) -> Result<()> {
        for part in adapter.parts.iter_mut().filter(|part| weights.contains(&part.module.param)) {
            for (i, form) in [(part.a, &mut part.scaled_a), (part.b, &mut part.scaled_b)] {
                let scaled = self.scaled(i, part.module.scale)?;
                self.backend.load_weight(scaled.as_ref().unwrap_or_else(|| self.master(i)), form)?;
            }
        }
        Ok(())
    }

    fn derive_with(&mut self, adapter: &mut Adapter, weights: &[usize]) -> Result<()> {
        self.scale_parts(adapter, weights)?;
        for &weight in weights {
            let mut derived = self.params[weight].derived.take().expect("an adapted weight is multiplied");
            let done = self.with_parts(adapter, weight, |base, parts| {
                self.backend.load_adapted(base, parts, &mut derived)
            });
            self.params[weight].derived = Some(derived);
            done?;
        }
        Ok(())
    }

    /// Calls `f` with a weight's base and its adapter terms.
    fn with_parts<T>(
        &self,
        adapter: &Adapter,
        weight: usize,
        f: impl FnOnce(&Buffer, &[LowRank<'_>]) -> Result<T>,
    ) -> Result<T> {
        let scaled = adapter.of(weight).map(|part| self.scaled(part.b, part.module.scale));
        let scaled = scaled.collect::<Result<Vec<_>>>()?;
        let parts = adapter.of(weight).zip(&scaled).map(|(part, scaled)| LowRank {
            row: part.module.row,
            a: self.master(part.a),
            b: scaled.as_ref().unwrap_or_else(|| self.master(part.b)),
            r: part.module.r,
        });
        let parts: Vec<LowRank<'_>> = parts.collect();
        let decoded = self.decoded_base(weight)?;
        f(decoded.as_ref().unwrap_or_else(|| self.master(weight)), &parts)
    }

    /// `scale * param`; `None` if `scale` is 1.
    fn scaled(&self, param: usize, scale: f32) -> Result<Option<Buffer>> {
        if scale == 1.0 {
            return Ok(None); // saves 3 small kernels for each of hundreds of modules: 1 % of a step
        }
        let mut scaled = self.f32s(self.params[param].shape.len())?;
        self.backend.fill(&mut scaled, 0.0)?;
        self.backend.axpy(scale, self.master(param), &mut scaled)?;
        Ok(Some(scaled))
    }

    /// `base + s B A` of a weight, f32.
    fn merged(&self, adapter: &Adapter, weight: usize) -> Result<Buffer> {
        self.with_parts(adapter, weight, |base, parts| {
            let mut whole = self.f32s(base.len())?;
            self.backend.adapted(base, parts, &mut whole)?;
            Ok(whole)
        })
    }

    /// A parameter's values, with the adapter merged in.
    pub fn values_of(&self, param: usize) -> Result<Vec<f32>> {
        match &self.adapter {
            Some(adapter) if adapter.adapts(param) => self.read_f32s(&self.merged(adapter, param)?),
            _ => self.read(param),
        }
    }

    /// Merges the adapter into the weights and drops it (PEFT's `merge_and_unload`); the derived weights do not change.
    pub fn fold(&mut self) -> Result<()> {
        let Some(adapter) = self.adapter.take() else { return Ok(()) };
        for weight in adapter.weights() {
            // Where only the rounded weight is stored, that becomes the master.
            if let Some(master) = self.rounded_view(weight)? {
                self.params[weight].master = master;
                continue;
            }
            let values = self.read_f32s(&self.merged(&adapter, weight)?)?;
            let shape = self.params[weight].shape;
            self.bases.remove(&weight);
            self.params[weight] = self.param(shape, &ParamValues::F32(values))?;
        }
        self.params.truncate(self.config.params().len());
        // Parameters that the adapter froze may be trained again.
        frozen_params(&self.config, &adapter.options)?
            .into_iter()
            .try_for_each(|i| self.set_storage(i, false))
    }

    /// What rounding to bf16 leaves of the adapter's update, measured on one layer: layer `version % layers`. `None` without an
    /// adapter, in f32, or under ZeRO-3.
    pub fn arrived(&self) -> Result<Option<AdapterRounding>> {
        let (Some(adapter), DType::Bf16, b) = (&self.adapter, self.dtype, &*self.backend) else {
            return Ok(None);
        };
        if self.split.is_some() {
            return Ok(None); // no rank has a full weight and its base
        }
        let layers: Vec<usize> =
            adapter.weights().into_iter().filter_map(|w| self.params[w].shape.id.layer).collect();
        let Some(&layer) = layers.get(self.version as usize % layers.len().max(1)) else { return Ok(None) };
        let mut sum = AdapterRounding::default();
        for weight in adapter.weights() {
            if self.params[weight].shape.id.layer != Some(layer) {
                continue;
            }
            let rounded = |x: &Buffer| -> Result<Buffer> {
                let (mut half, mut out) = (b.alloc(DType::Bf16, x.len())?, self.f32s(x.len())?);
                b.copy(x, 0, &mut half, 0, x.len())?;
                b.copy(&half, 0, &mut out, 0, x.len())?;
                Ok(out)
            };
            let mut intended = self.merged(adapter, weight)?;
            let mut arrived = rounded(&intended)?;
            let master = self.master(weight);
            if master.dtype() == DType::Bf16 && !self.is_nf4(weight) {
                // A bf16 base is its own rounding; copies of it would take most of the memory here.
                b.axpy(-1.0, master, &mut arrived)?;
                b.axpy(-1.0, master, &mut intended)?;
            } else {
                let base = self.base_f32(weight)?;
                b.axpy(-1.0, &rounded(&base)?, &mut arrived)?;
                b.axpy(-1.0, &base, &mut intended)?;
            }
            let dots = b.dots(&[(&intended, &intended), (&intended, &arrived)])?;
            (sum.intended, sum.arrived) = (sum.intended + dots[0], sum.arrived + dots[1]);
        }
        Ok(Some(sum))
    }
}

/// The weights that these options adapt, in parameter order.
pub(in crate::model) fn adapted_weights(
    config: &ModelConfig,
    options: &AdapterOptions,
) -> Result<Vec<usize>> {
    let mut all: Vec<usize> = lora_modules(config, options)?.iter().map(|m| m.param).collect();
    all.dedup();
    Ok(all)
}

/// Parameters that these options neither adapt nor train in full.
pub fn frozen_params(config: &ModelConfig, options: &AdapterOptions) -> Result<BTreeSet<usize>> {
    let adapted = lora_modules(config, options)?.into_iter().map(|m| m.param);
    let saved = saved_tensors(config, options)?.into_iter().map(|t| t.param);
    let changes: BTreeSet<usize> = adapted.chain(saved).collect();
    Ok((0..config.params().len()).filter(|i| !changes.contains(i)).collect())
}

/// Initial values: `A` random, a function of seed and module name only; `B` zero.
fn initial_values(module: &LoraModule, init: Init, seed: u64) -> Values {
    let key = [seed as u32, (seed >> 32) as u32];
    let name = name_words(&format!("{}.lora_A", module.name));
    let mut a = vec![0.0; module.r * module.cols];
    let bound = 1.0 / (module.cols as f32).sqrt();
    for (i, four) in a.chunks_mut(4).enumerate() {
        let words = philox4x32([i as u32, (i >> 32) as u32, name[0], name[1]], key);
        let drawn = match init {
            Init::Kaiming => words.map(|w| (2.0 * uniform(w) - 1.0) * bound),
            Init::Gaussian => normals(words).map(|x| x / module.r as f32),
        };
        four.iter_mut().zip(drawn).for_each(|(x, y)| *x = y);
    }
    [a, vec![0.0; module.r * module.rows]]
}

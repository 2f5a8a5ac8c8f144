//! Adapters whose settings do not name the decoder's modules: of a multimodal model, and of experts as PEFT stacks them.
//!
//! transformers holds the matrices of all `E` experts of a layer as one parameter, gate on top of up. PEFT's `A` of it has `r` rows
//! for each expert, one expert after another; its `B` has a column for each rank and expert, experts innermost. Both parameters
//! belong to one module, which PEFT wraps twice: one adapter is `experts.lora_A`, the other `experts.base_layer.lora_A`.

use super::peft::{AdapterDir, MERGE};
use crate::model::adapter::{LoraModule, Modules, Values};
use crate::model::{ModelConfig, ParamId, RowOrder, Slot, StoredPart, Tensor, family};
use crate::{Error, Result};
use regex::Regex;
use std::collections::HashSet;

/// The adapter of one parameter of a layer's experts.
pub(super) struct Stack {
    /// Whether of gate and up; else of down.
    up: bool,
    /// `A` and `B` in the file.
    parts: [StoredPart; 2],
}

/// The adapter of a router, which is added to it.
pub(super) struct Router {
    /// The router.
    pub param: ParamId,
    parts: [StoredPart; 2],
    scale: f32,
}

/// A pattern of module names with the rank and alpha of these modules.
type ParameterChoice = (String, usize, f64);

impl AdapterDir {
    /// Names the adapted modules by the tensors in the file, where the settings cannot.
    pub(super) fn name_modules(&mut self, config: &ModelConfig, wrapped: bool) -> Result<()> {
        let unreadable = |modules: &Modules| match modules {
            Modules::Matching(pattern) => Regex::new(&format!("^(?:{pattern})$")).is_err(),
            _ => false,
        };
        let odd = [Some(&self.options.target_modules), self.options.exclude_modules.as_ref()];
        if !wrapped && !self.config.by_parameter && !odd.into_iter().flatten().any(unreadable) {
            return Ok(());
        }
        let stems: Vec<String> = self
            .index
            .keys()
            .filter_map(|name| name.strip_suffix(".lora_A.weight").map(String::from))
            .collect();
        let mut choices = Vec::new();
        for stem in &stems {
            choices.extend(self.choice(config, stem)?);
        }
        let own = &mut self.options;
        let patterns: Vec<&str> = choices.iter().map(|(pattern, ..)| pattern.as_str()).collect();
        own.target_modules = Modules::Matching(patterns.join("|"));
        (own.exclude_modules, own.layers_to_transform) = (None, None);
        let (r, alpha) = (own.r, own.alpha);
        own.rank_pattern = choices.iter().filter(|c| c.1 != r).map(|c| (c.0.clone(), c.1)).collect();
        own.alpha_pattern = choices.iter().filter(|c| c.2 != alpha).map(|c| (c.0.clone(), c.2)).collect();
        Ok(())
    }

    /// Names the modules whose weights are in the file, where the settings name one around them, or one of a multimodal model.
    pub(super) fn name_saved(&mut self) {
        let whole = &mut self.options.modules_to_save;
        for module in self.index.keys().filter_map(|name| name.strip_suffix(".weight")) {
            let adapter = [".lora_A", ".lora_B", ".base_layer"].iter().any(|end| module.ends_with(end));
            if !adapter
                && !module.starts_with("v_head.")
                && !whole.iter().any(|name| module.ends_with(name.as_str()))
            {
                whole.push(module.into());
            }
        }
    }

    /// The decoder's modules that `stem.lora_A` adapts; none for a router, which is kept apart.
    fn choice(&mut self, config: &ModelConfig, stem: &str) -> Result<Option<ParameterChoice>> {
        // PEFT's patterns are about its own names.
        let peft = self.index[&format!("{stem}.lora_A.weight")].clone();
        let peft = peft.strip_prefix(super::peft::PREFIX).unwrap_or(&peft);
        let peft = peft.trim_end_matches(".weight").trim_end_matches(".default").trim_end_matches(".lora_A");
        let outer = stem.strip_suffix(".base_layer").unwrap_or(stem);
        let experts = config.experts.as_ref();
        if let (Some(experts), Some(_)) = (experts, outer.strip_suffix(".experts")) {
            let shape = |kind: &str| self.shape(&format!("{stem}.{kind}.weight"));
            let (a, b) = (shape("lora_A")?, shape("lora_B")?);
            let up = b[0] == 2 * experts.width && a[1] == config.hidden;
            if !up && (b[0] != config.hidden || a[1] != experts.width) {
                return Err(self.odd(stem, &format!("has shapes {a:?} and {b:?}")));
            }
            let peft = peft.strip_suffix(".base_layer").unwrap_or(peft);
            let param = format!("{peft}.{}", if up { "gate_up_proj" } else { "down_proj" });
            let (r, alpha) = self.options.ranks(std::iter::once(param.as_str()))?[0];
            if a[0] != r * experts.count || b[1] != a[0] {
                return Err(
                    self.odd(stem, &format!("has {} rows for {} experts of rank {r}", a[0], experts.count))
                );
            }
            let parts = ["lora_A", "lora_B"].map(|kind| {
                let shape = if kind == "lora_A" { a } else { b };
                plain(format!("{stem}.{kind}.weight"), shape)
            });
            self.stacks.entry(outer.to_string()).or_default().push(Stack { up, parts });
            let projections = if up { "(?:gate|up)_proj" } else { "down_proj" };
            return Ok(Some((format!(r"{}\.\d+\.{projections}", regex::escape(outer)), r, alpha)));
        }
        let named = |p: &StoredPart| p.name.strip_suffix(".weight") == Some(stem);
        let routers = experts.map(|_| family(config.family)).transpose()?.filter(|_| stem.ends_with(".gate"));
        let tensors = routers.map_or_else(Vec::new, |family| family.tensors(config));
        let is_router = |t: &&Tensor| t.param.id.slot == Slot::Router && t.parts.iter().any(named);
        let Some(router) = tensors.iter().find(is_router) else {
            let (r, alpha) = self.options.ranks(std::iter::once(peft))?[0];
            return Ok(Some((regex::escape(stem), r, alpha)));
        };
        let (r, alpha) = self.options.ranks(std::iter::once(format!("{peft}.weight").as_str()))?[0];
        let divisor = if self.options.use_rslora { (r as f64).sqrt() } else { r as f64 };
        let parts = [
            plain(format!("{stem}.lora_A.weight"), [r, router.param.cols]),
            plain(format!("{stem}.lora_B.weight"), [router.param.rows, r]),
        ];
        self.routers.push(Router { param: router.param.id, parts, scale: (alpha / divisor) as f32 });
        Ok(None)
    }

    fn shape(&self, name: &str) -> Result<[usize; 2]> {
        let info = self.index.get(name).and_then(|stored| self.store.get(stored));
        match info.map(|(_, info, _)| info.shape.as_slice()) {
            Some(&[rows, cols]) => Ok([rows, cols]),
            _ => Err(self.odd(name, "is missing, or is no matrix")),
        }
    }

    fn odd(&self, name: &str, what: &str) -> Error {
        Error::model(format!("tensor {name:?} {what}")).at(self.path.display()).fix(MERGE)
    }

    /// Names in the file of all tensors of stacks and routers.
    pub(super) fn known_stacks(&self) -> HashSet<String> {
        let stacks = self.stacks.values().flatten().flat_map(|stack| &stack.parts);
        let all = stacks.chain(self.routers.iter().flat_map(|router| &router.parts));
        all.filter_map(|part| self.index.get(&part.name).cloned()).collect()
    }

    /// The stack that a module is a part of, and its expert.
    pub(super) fn stack_of(&self, module: &LoraModule) -> Option<(&Stack, usize)> {
        let (layer, rest) = module.name.split_once(".experts.")?;
        let (expert, projection) = rest.split_once('.')?;
        let stacks = self.stacks.get(&format!("{layer}.experts"))?;
        let stack = stacks.iter().find(|stack| stack.up == (projection != "down_proj"))?;
        Some((stack, expert.parse().ok()?))
    }

    /// A module's share of a stack: the rows of its expert in `A`, its rows and the columns of its expert in `B`.
    pub(super) fn unstacked(&self, stack: &Stack, expert: usize, module: &LoraModule) -> Result<Values> {
        let [a, b] = &stack.parts;
        let (r, rows, cols) = (module.r, module.rows, module.cols);
        let (experts, first) = (a.shape[0] / r, if module.name.ends_with(".up_proj") { rows } else { 0 });
        let (_, dtype, bytes) = self.find(a)?;
        let mut down = vec![0.0; r * cols];
        let from = expert * r * cols;
        let bad_a = dtype.decode(&bytes[from * dtype.size()..(from + r * cols) * dtype.size()], &mut down);
        let (_, dtype, bytes) = self.find(b)?;
        let (mut up, mut bad_b) = (vec![0.0; r * rows], None);
        for (k, of_rank) in up.chunks_mut(rows).enumerate() {
            for (row, x) in of_rank.iter_mut().enumerate() {
                let at = (first + row) * r * experts + k * experts + expert;
                let bytes = &bytes[at * dtype.size()..(at + 1) * dtype.size()];
                bad_b = bad_b.or(dtype.decode_part(bytes, std::slice::from_mut(x)).map(|_| at));
            }
        }
        match bad_a.map(|at| (a, from + at)).or(bad_b.map(|at| (b, at))) {
            None => Ok([down, up]),
            Some((part, at)) => {
                Err(self.odd(&part.name, &format!("holds a NaN or infinity at element {at}")))
            }
        }
    }

    /// Adds its adapter to a router.
    pub(super) fn add_router(&self, router: &Router, values: &mut [f32]) -> Result<()> {
        let [a, b] = &router.parts;
        let (down, up) = (self.read(a)?, self.read(b)?);
        let (r, cols) = (a.shape[0], a.shape[1]);
        for (row, own) in values.chunks_mut(cols).enumerate() {
            for (col, x) in own.iter_mut().enumerate() {
                let sum: f32 = (0..r).map(|k| up[row * r + k] * down[k * cols + col]).sum();
                *x += router.scale * sum;
            }
        }
        Ok(())
    }

    /// Refuses to train an adapter of which a part was merged.
    pub(crate) fn check_trainable(&self) -> Result<()> {
        match self.routers.is_empty() {
            true => Ok(()),
            false => Err(Error::model("the adapter adapts routers, which Ferrl does not train").fix(
                "merge it (`ferrl export DIR --merge --out DIR`), and train a new adapter on the result",
            )),
        }
    }
}

fn plain(name: String, shape: [usize; 2]) -> StoredPart {
    StoredPart { name, shape: shape.to_vec(), transposed: false, order: RowOrder::Same }
}

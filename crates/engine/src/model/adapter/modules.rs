//! Which tensors of a model get an adapter, and which are trained in full with it.

use super::choices::{ModuleChoices, at_end};
use super::{AdapterOptions, Bias, Modules, ends_with};
use crate::model::{ModelConfig, ParamKind, RowOrder, Slot, StoredPart, family};
use crate::{Error, Result, nearest};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

/// An adapted module: one checkpoint tensor, which may be a block of rows of a fused weight.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraModule {
    /// Name in the checkpoint, without `.weight`.
    pub name: String,
    /// Index of the weight among the configuration's parameters.
    pub param: usize,
    /// Index of the tensor among those fused in the weight.
    pub part: usize,
    /// Its first row in the fused weight.
    pub row: usize,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Rank.
    pub r: usize,
    /// Scale of `B A`.
    pub scale: f32,
    /// Whether the checkpoint stores it as `[in, out]`.
    pub transposed: bool,
    /// Row order of the tensor, and of `B`, in the checkpoint.
    pub order: RowOrder,
}

impl LoraModule {
    /// The module's elements of the fused weight.
    pub fn elements(&self) -> Range<usize> {
        self.row * self.cols..(self.row + self.rows) * self.cols
    }
}

/// A tensor that is trained in full and saved with the adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Index among the configuration's parameters.
    pub param: usize,
    /// Its elements in that parameter.
    pub elements: Range<usize>,
    /// Its layout in the checkpoint.
    pub stored: StoredPart,
    /// Whether it is the bias of an adapted module.
    pub of_adapted: bool,
}

/// All modules that the options adapt, in the order of the configuration's parameters.
pub fn lora_modules(config: &ModelConfig, options: &AdapterOptions) -> Result<Vec<LoraModule>> {
    let (mut found, mut linear) = (Vec::new(), Vec::new());
    let choices = ModuleChoices::new(options)?;
    for (param, tensor) in family(config.family)?.tensors(config).into_iter().enumerate() {
        let id = tensor.param.id;
        if id.kind != ParamKind::Weight || !id.slot.is_linear() {
            continue;
        }
        let mut row = 0;
        for (part, stored) in tensor.parts.iter().enumerate() {
            let cols = tensor.param.cols;
            let rows = stored.len() / cols;
            let name = module(&stored.name);
            if choices.chosen(name, id.layer) {
                let (r, scale) = choices.shape(name)?;
                let name = name.to_string();
                let (transposed, order) = (stored.transposed, stored.order);
                found.push(LoraModule { name, param, part, row, rows, cols, r, scale, transposed, order });
            }
            linear.push((module(&stored.name).to_string(), id.layer.is_some()));
            row += rows;
        }
    }
    check(options, &found, &linear)?;
    Ok(found)
}

/// Refuses options that adapt nothing, or name a module that does not exist or cannot be adapted.
fn check(options: &AdapterOptions, found: &[LoraModule], linear: &[(String, bool)]) -> Result<()> {
    let refuse = |what: String, fix: String| Err(Error::usage(what).at("adapter.target_modules").fix(fix));
    let head = linear.iter().find(|(name, inside)| !inside && found.iter().any(|m| m.name == *name));
    if let Some((name, _)) = head {
        return refuse(
            format!("{name:?} is a head, which is not adapted"),
            format!("adapter.modules_to_save = [{name:?}] trains it in full"),
        );
    }
    if let Modules::Named(names) = &options.target_modules {
        let there = |name: &&String| linear.iter().any(|(module, _)| ends_with(module, name));
        if let Some(name) = names.iter().find(|name| !there(name)) {
            let words: Vec<&str> = linear.iter().filter_map(|(m, _)| m.rsplit('.').next()).collect();
            let near = nearest(name, words.iter().copied()).or(words.first().copied()).unwrap_or_default();
            return refuse(
                format!("{name:?} is not a linear layer of the model"),
                format!("adapter.target_modules = [{near:?}], or \"all-linear\""),
            );
        }
    }
    if found.is_empty() {
        let example = linear.first().map_or("", |(name, _)| name.as_str());
        return refuse(
            "the adapter adapts no module of the model".into(),
            format!(
                "\"all-linear\", or names such as {example:?}; see exclude_modules and layers_to_transform too"
            ),
        );
    }
    Ok(())
}

pub(super) fn check_names(options: &AdapterOptions, config: &ModelConfig) -> Result<()> {
    let refuse =
        |what: String, at: &str, fix: &str| Err(Error::usage(what).at(format!("adapter.{at}")).fix(fix));
    let found = lora_modules(config, options)?;
    let patterns = [
        ("rank_pattern", options.rank_pattern.iter().map(|(text, _)| text).collect::<Vec<_>>()),
        ("alpha_pattern", options.alpha_pattern.iter().map(|(text, _)| text).collect()),
    ];
    for (key, text) in patterns.iter().flat_map(|(key, texts)| texts.iter().map(move |text| (key, text))) {
        let pattern = at_end(text)?;
        if !found.iter().any(|m| pattern.is_match(&m.name)) {
            return refuse(
                format!("{text:?} matches no adapted module"),
                key,
                "the end of a module's name, such as \"v_proj\"",
            );
        }
    }
    if let Some(excluded) = &options.exclude_modules {
        let all = lora_modules(config, &AdapterOptions { exclude_modules: None, ..options.clone() })?;
        let idle = match excluded {
            Modules::Named(names) => names
                .iter()
                .find(|name| !all.iter().any(|m| ends_with(&m.name, name)))
                .map(|name| format!("{name:?}")),
            _ => (all.len() == found.len()).then(|| "exclude_modules".to_string()),
        };
        if let Some(name) = idle {
            return refuse(
                format!("{name} excludes no adapted module"),
                "exclude_modules",
                "names such as \"v_proj\", or leave it out",
            );
        }
    }
    let layers = options.layers_to_transform.iter().flatten();
    if let Some(layer) = { layers }.find(|&&layer| layer >= config.layers) {
        let what = format!("there is no layer {layer}: the model has {}", config.layers);
        return refuse(what, "layers_to_transform", "numbers from 0");
    }
    check_experts(options, config, &found)
}

/// PEFT stacks the matrices of all experts of a layer, and gate on top of up: refuses adapters that it could not load, or would
/// scale differently.
pub(super) fn check_experts(
    options: &AdapterOptions,
    config: &ModelConfig,
    found: &[LoraModule],
) -> Result<()> {
    let Some(experts) = &config.experts else { return Ok(()) };
    let refuse =
        |what: String, at: &str, fix: &str| Err(Error::usage(what).at(format!("adapter.{at}")).fix(fix));
    let mut stacks: BTreeMap<(&str, &str), Vec<&LoraModule>> = BTreeMap::new();
    for m in found {
        if let Some((layer, rest)) = m.name.split_once(".experts.")
            && let Some((_, projection)) = rest.split_once('.')
        {
            stacks.entry((layer, projection)).or_default().push(m);
        }
    }
    for (&(layer, projection), stack) in &stacks {
        let first = stack[0];
        if stack.len() != experts.count {
            let what =
                format!("{projection} is adapted in {} of {layer}'s {} experts", stack.len(), experts.count);
            return refuse(what, "target_modules", "all experts of a layer, or none: PEFT stacks them");
        }
        if let Some(m) = stack.iter().find(|m| m.r != first.r || m.scale != first.scale) {
            let what = format!("{} has rank {} and {} rank {}", m.name, m.r, first.name, first.r);
            let fix = "one rank and alpha for all experts of a layer: PEFT stacks them";
            return refuse(what, if m.r == first.r { "alpha_pattern" } else { "rank_pattern" }, fix);
        }
        if projection == "down_proj" {
            continue;
        }
        if let Some(lacking) =
            ["gate_proj", "up_proj", "down_proj"].into_iter().find(|p| !stacks.contains_key(&(layer, *p)))
        {
            let what = format!("{layer}'s experts are adapted in {projection}, but not in {lacking}");
            let fix =
                "gate_proj, up_proj and down_proj together, or down_proj alone: PEFT loads no other choice";
            return refuse(what, "target_modules", fix);
        }
        let fix = "experts with the adapter's own r and alpha, unscaled by use_rslora (down_proj may differ): PEFT stacks gate on up";
        if options.use_rslora {
            return refuse(format!("{} would have another scale in PEFT", first.name), "use_rslora", fix);
        }
        if first.r != options.r {
            let what = format!("{} has rank {}, the adapter {}", first.name, first.r, options.r);
            return refuse(what, "rank_pattern", fix);
        }
        if first.scale != (options.alpha / options.r as f64) as f32 {
            return refuse(format!("{} has an alpha of its own", first.name), "alpha_pattern", fix);
        }
    }
    let whole = saved_tensors(config, options)?;
    if let Some(t) = whole.iter().find(|t| t.name.contains(".experts.")) {
        let fix = "adapter.target_modules adapts experts; PEFT does not load one that was trained whole";
        return refuse(format!("{} is a matrix of an expert", t.name), "modules_to_save", fix);
    }
    Ok(())
}

/// Tensors trained in full: `modules_to_save`, biases, and a value or score head.
pub fn saved_tensors(config: &ModelConfig, options: &AdapterOptions) -> Result<Vec<SavedTensor>> {
    let adapted = lora_modules(config, options)?;
    let adapted: HashSet<&str> = adapted.iter().map(|m| m.name.as_str()).collect();
    let (mut found, mut used) = (Vec::new(), vec![false; options.modules_to_save.len()]);
    let (tensors, mut names) = (family(config.family)?.tensors(config), Vec::new());
    for (param, tensor) in tensors.iter().enumerate() {
        let (id, mut at) = (tensor.param.id, 0);
        for part in &tensor.parts {
            let elements = at..at + part.len();
            at = elements.end;
            let name = module(&part.name);
            names.push(name);
            let named: Vec<usize> =
                // PEFT tests `name.endswith(module)`: "norm" is every norm.
                (0..used.len()).filter(|&i| name.ends_with(&options.modules_to_save[i])).collect();
            named.iter().for_each(|&i| used[i] = true);
            if config.tied && id.slot == Slot::Embed && !named.is_empty() {
                return Err(Error::usage(format!(
                    "{name:?} is the language-model head too (tied embeddings)"
                ))
                .at("adapter.modules_to_save")
                .fix("leave it out: PEFT would load it as the embedding alone"));
            }
            let of_adapted = adapted.contains(name);
            let bias = id.kind == ParamKind::Bias
                && match options.bias {
                    Bias::None => false,
                    Bias::All => true,
                    Bias::LoraOnly => of_adapted,
                };
            if named.is_empty() && !bias && id.slot != Slot::Value {
                continue;
            }
            if of_adapted && id.kind == ParamKind::Weight {
                return Err(Error::usage(format!("{name:?} is both adapted and trained in full"))
                    .at("adapter.modules_to_save")
                    .fix(format!("leave it out, or adapter.exclude_modules = [{name:?}]")));
            }
            let (name, stored) = (part.name.clone(), part.clone());
            found.push(SavedTensor { name, param, elements, stored, of_adapted });
        }
    }
    if let Some(i) = used.iter().position(|u| !u) {
        let name = &options.modules_to_save[i];
        let words = names.iter().filter_map(|n| n.rsplit('.').next());
        let near = nearest(name, words).or(names.first().copied()).unwrap_or_default();
        if config.tied && name == "lm_head" {
            return Err(Error::usage("the language-model head is the embedding (tied embeddings)")
                .at("adapter.modules_to_save")
                .fix("leave it out: PEFT would load it as the head alone"));
        }
        return Err(Error::usage(format!("{name:?} is not a module of the model"))
            .at("adapter.modules_to_save")
            .fix(format!("adapter.modules_to_save = [{near:?}]")));
    }
    Ok(found)
}

/// Number of trained weights: in `A` and `B`, and in tensors trained in full.
pub fn adapter_weights(config: &ModelConfig, options: &AdapterOptions) -> Result<(usize, usize)> {
    let low: usize = lora_modules(config, options)?.iter().map(|m| m.r * (m.rows + m.cols)).sum();
    let whole: usize = saved_tensors(config, options)?.iter().map(|t| t.elements.len()).sum();
    Ok((low, low + whole))
}

/// A tensor's name without `.weight` or `.bias`.
fn module(stored: &str) -> &str {
    stored.strip_suffix(".weight").or(stored.strip_suffix(".bias")).unwrap_or(stored)
}

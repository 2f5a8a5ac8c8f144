//! Which tensors of a model are adapted, and which are trained whole beside them.

use super::{AdapterOptions, Bias, Modules, ends_with};
use crate::model::{Config, ParamKind, Part, RowOrder, Slot, family};
use crate::{Error, Result, nearest};
use std::ops::Range;

/// An adapted module: `A` and `B` of a tensor that a weight of the decoder is stacked from.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraModule {
    /// Its name in the model's files, without `.weight`.
    pub name: String,
    /// The weight, among the parameters of the configuration.
    pub param: usize,
    /// Which of the weight's tensors.
    pub part: usize,
    /// First row of the tensor in the weight.
    pub row: usize,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Rank.
    pub r: usize,
    /// What `B A` is multiplied with.
    pub scale: f32,
    /// Whether the tensor is stored as `[in, out]`.
    pub transposed: bool,
    /// In which order its rows are stored, and with them those of `B`.
    pub order: RowOrder,
}

impl LoraModule {
    /// Elements of the weight that are this module's.
    pub fn elements(&self) -> Range<usize> {
        self.row * self.cols..(self.row + self.rows) * self.cols
    }
}

/// A tensor that is trained whole and saved with the adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// Its name in the model's files.
    pub name: String,
    /// The parameter, among those of the configuration.
    pub param: usize,
    /// Its elements there.
    pub elements: Range<usize>,
    /// How the model's files hold it.
    pub stored: Part,
    /// Whether it is the bias of an adapted module.
    pub of_adapted: bool,
}

/// Every module that the options adapt, in the order of the configuration's parameters.
pub fn lora_modules(config: &Config, options: &AdapterOptions) -> Result<Vec<LoraModule>> {
    let (mut found, mut linear) = (Vec::new(), Vec::new());
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
            if chosen(options, name, id.layer)? {
                let (r, scale) = options.shape(name)?;
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

fn chosen(options: &AdapterOptions, name: &str, layer: Option<usize>) -> Result<bool> {
    // Heads are no linear layers to PEFT's all-linear; named, they are refused below.
    if options.target_modules == Modules::AllLinear && layer.is_none() {
        return Ok(false);
    }
    let within = match (&options.layers_to_transform, layer) {
        (Some(layers), Some(layer)) => layers.contains(&layer),
        (Some(_), None) => false,
        (None, _) => true,
    };
    let excluded = options.exclude_modules.as_ref().map_or(Ok(false), |modules| modules.names(name))?;
    Ok(within && !excluded && options.target_modules.names(name)?)
}

/// Refuses options that adapt nothing, or name what is not there or cannot be adapted.
fn check(options: &AdapterOptions, found: &[LoraModule], linear: &[(String, bool)]) -> Result<()> {
    let refuse = |what: String, fix: String| Err(Error::usage(what).at("adapter.target_modules").fix(fix));
    let head = linear.iter().find(|(name, inside)| !inside && found.iter().any(|m| m.name == *name));
    if let Some((name, _)) = head {
        return refuse(
            format!("{name:?} is a head, which is not adapted"),
            format!("adapter.modules_to_save = [{name:?}] trains it whole"),
        );
    }
    if let Modules::Named(names) = &options.target_modules {
        let there = |name: &&String| linear.iter().any(|(module, _)| ends_with(module, name));
        if let Some(name) = names.iter().find(|name| !there(name)) {
            let words: Vec<&str> = linear.iter().filter_map(|(m, _)| m.rsplit('.').next()).collect();
            let near = nearest(name, words.iter().copied()).or(words.first().copied()).unwrap_or_default();
            return refuse(
                format!("{name:?} is no linear layer of the model"),
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

/// Every tensor that is trained whole: those of `modules_to_save`, biases, and a value or score head.
pub fn saved_tensors(config: &Config, options: &AdapterOptions) -> Result<Vec<SavedTensor>> {
    let adapted = lora_modules(config, options)?;
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
                (0..used.len()).filter(|&i| ends_with(name, &options.modules_to_save[i])).collect();
            named.iter().for_each(|&i| used[i] = true);
            let of_adapted = adapted.iter().any(|m| m.name == name);
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
                return Err(Error::usage(format!("{name:?} is adapted and trained whole at once"))
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
        let tied = config.tied && name == "lm_head";
        let why = if tied { ": the head is the embedding" } else { "" };
        let near = if tied { names.first().and_then(|n| n.rsplit('.').next()).unwrap_or(near) } else { near };
        return Err(Error::usage(format!("{name:?} is no module of the model{why}"))
            .at("adapter.modules_to_save")
            .fix(format!("adapter.modules_to_save = [{near:?}]")));
    }
    Ok(found)
}

/// Number of weights that an adapter trains, beside the tensors that are trained whole and with them.
pub fn adapter_weights(config: &Config, options: &AdapterOptions) -> Result<(usize, usize)> {
    let low: usize = lora_modules(config, options)?.iter().map(|m| m.r * (m.rows + m.cols)).sum();
    let whole: usize = saved_tensors(config, options)?.iter().map(|t| t.elements.len()).sum();
    Ok((low, low + whole))
}

/// A tensor's name without `.weight` or `.bias`.
fn module(stored: &str) -> &str {
    stored.strip_suffix(".weight").or(stored.strip_suffix(".bias")).unwrap_or(stored)
}

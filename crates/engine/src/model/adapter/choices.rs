//! An adapter's settings applied to the names of modules, with regular expressions compiled once: a model with experts has
//! tens of thousands of modules.

use super::{AdapterOptions, Modules, ends_with};
use crate::{Error, Result};
use regex::Regex;

/// Largest rank.
const MOST: usize = 1 << 16;

/// The settings, ready to be asked about modules.
pub(super) struct ModuleChoices<'a> {
    options: &'a AdapterOptions,
    target: ModuleNames<'a>,
    excluded: Option<ModuleNames<'a>>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
}

enum ModuleNames<'a> {
    All,
    Matching(Regex),
    Named(&'a [String]),
}

impl<'a> ModuleChoices<'a> {
    pub fn new(options: &'a AdapterOptions) -> Result<Self> {
        Ok(ModuleChoices {
            options,
            target: ModuleNames::new(&options.target_modules)?,
            excluded: options.exclude_modules.as_ref().map(ModuleNames::new).transpose()?,
            ranks: compiled(&options.rank_pattern)?,
            alphas: compiled(&options.alpha_pattern)?,
        })
    }

    /// Whether a linear module is adapted.
    pub fn chosen(&self, name: &str, layer: Option<usize>) -> bool {
        // Heads are no linear layers to PEFT's all-linear; where they are named, the caller refuses them.
        if self.options.target_modules == Modules::AllLinear && layer.is_none() {
            return false;
        }
        let within = match (&self.options.layers_to_transform, layer) {
            (Some(layers), Some(layer)) => layers.contains(&layer),
            (Some(_), None) => false,
            (None, _) => true,
        };
        within
            && !self.excluded.as_ref().is_some_and(|names| names.contain(name))
            && self.target.contain(name)
    }

    /// Rank and alpha of a module.
    pub fn rank_and_alpha(&self, module: &str) -> (usize, f64) {
        let r = first(&self.ranks, module).unwrap_or(self.options.r);
        (r, first(&self.alphas, module).unwrap_or(self.options.alpha))
    }

    pub fn shape(&self, module: &str) -> Result<(usize, f32)> {
        let (r, alpha) = self.rank_and_alpha(module);
        if r == 0 || r > MOST {
            return Err(Error::usage(format!("the rank of {module:?} is {r}, expected 1 to {MOST}"))
                .at("adapter.r")
                .fix("adapter.r = 32"));
        }
        let divisor = if self.options.use_rslora { (r as f64).sqrt() } else { r as f64 };
        Ok((r, (alpha / divisor) as f32))
    }
}

impl<'a> ModuleNames<'a> {
    fn new(modules: &'a Modules) -> Result<Self> {
        Ok(match modules {
            Modules::AllLinear => ModuleNames::All,
            Modules::Matching(pattern) => ModuleNames::Matching(regex(&format!("^(?:{pattern})$"), pattern)?),
            Modules::Named(names) => ModuleNames::Named(names),
        })
    }

    /// Whether they name a module; all linear layers are the caller's to tell.
    fn contain(&self, module: &str) -> bool {
        match self {
            ModuleNames::All => true,
            ModuleNames::Matching(pattern) => pattern.is_match(module),
            ModuleNames::Named(names) => names.iter().any(|name| ends_with(module, name)),
        }
    }
}

fn compiled<T: Copy>(patterns: &[(String, T)]) -> Result<Vec<(Regex, T)>> {
    patterns.iter().map(|(text, value)| Ok((at_end(text)?, *value))).collect()
}

/// The value of the first pattern that matches the end of a module's name, as PEFT finds it.
fn first<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

/// A pattern of the end of a module's name.
pub(super) fn at_end(text: &str) -> Result<Regex> {
    regex(&format!(r"^(?:.*\.)?(?:{text})$"), text)
}

fn regex(whole: &str, given: &str) -> Result<Regex> {
    Regex::new(whole).map_err(|_| {
        Error::usage(format!("{given:?} is no regular expression that is understood here")).at("adapter").fix(
            "without look-ahead and back-references, or a list of names such as [\"q_proj\", \"v_proj\"]",
        )
    })
}

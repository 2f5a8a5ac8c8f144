//! The one error type of the whole program.
//!
//! Every message says what failed, where, and what to do about it. This crate knows no settings or exit codes: an error carries
//! a class, and the purposes of memory that ran out, from which its users derive them.

use crate::usage::Purpose;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A wrong argument, or settings that do not go together.
    Usage,
    /// A row or file of data that cannot be used.
    Data,
    /// A model directory that is broken, incomplete or unsupported.
    Model,
    /// Memory or disk is too small for the request.
    Resource,
    /// A NaN or infinity, detected before it reached the weights.
    Numerics,
    /// Hardware or a library that it needs is missing or failed.
    Device,
    /// Another rank of the run is lost.
    Rank,
    /// Work abandoned because the process was asked to stop.
    Interrupted,
}

/// An error with a place and a fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub class: Class,
    what: String,
    place: Option<String>,
    fix: Option<String>,
    short_of: Vec<Purpose>,
}

/// Result type of Ferrl's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of any class; lower case, no full stop.
    pub fn new(class: Class, what: impl Into<String>) -> Self {
        Error { class, what: what.into(), place: None, fix: None, short_of: Vec::new() }
    }
    /// A wrong argument, or settings that do not go together.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Class::Usage, what)
    }
    /// Data that cannot be used.
    pub fn data(what: impl Into<String>) -> Self {
        Self::new(Class::Data, what)
    }
    /// A model directory that cannot be used.
    pub fn model(what: impl Into<String>) -> Self {
        Self::new(Class::Model, what)
    }
    /// Too little memory or disk.
    pub fn resource(what: impl Into<String>) -> Self {
        Self::new(Class::Resource, what)
    }
    /// Hardware, or a library it needs, that is missing or failed.
    pub fn device(what: impl Into<String>) -> Self {
        Self::new(Class::Device, what)
    }
    /// Another rank of the run that is lost.
    pub fn rank(what: impl Into<String>) -> Self {
        Self::new(Class::Rank, what)
    }
    /// A non-finite number.
    pub fn numerics(what: impl Into<String>) -> Self {
        Self::new(Class::Numerics, what)
    }
    /// Prefixes the message with what was being attempted.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.what = format!("{what}: {}", self.what);
        self
    }
    /// Adds where it happened: a file, a row, a field.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        let place = place.to_string();
        self.place = Some(match self.place {
            Some(inner) => format!("{place}: {inner}"),
            None => place,
        });
        self
    }
    /// Adds the purposes for which memory ran out, the most important first.
    pub fn short_of(mut self, purposes: impl IntoIterator<Item = Purpose>) -> Self {
        self.short_of.extend(purposes);
        self
    }
    /// The purposes for which memory ran out, if that is what failed.
    pub fn purposes(&self) -> &[Purpose] {
        &self.short_of
    }
    /// The message, the place and the fix.
    pub(crate) fn parts(&self) -> (&String, Option<&String>, Option<&String>) {
        (&self.what, self.place.as_ref(), self.fix.as_ref())
    }
    /// Adds what the user can do about it.
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.what)?;
        if let Some(fix) = &self.fix {
            write!(f, "\n  fix: {fix}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// The candidate closest to `name` by edit distance (transpositions count once), if it is close enough to be a typo.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    candidates
        .into_iter()
        .map(|c| (strsim::osa_distance(&lower, &c.to_lowercase()), strsim::osa_distance(name, c), c))
        .min()
        .filter(|&(d, _, c)| d <= 1 + name.len().max(c.len()) / 3)
        .map(|(_, _, c)| c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_a_typo_and_refuses_a_stranger() {
        let names = ["llama", "qwen2", "qwen3", "gemma2"];
        assert_eq!(nearest("quen2", names), Some("qwen2"));
        assert_eq!(nearest("lama", names), Some("llama"));
        assert_eq!(nearest("gpro", ["dpo", "ppo", "grpo"]), Some("grpo"), "a swap is one change");
        assert_eq!(nearest("transformer-xl", names), None);
        assert_eq!(nearest("GRPO", ["dpo", "sft", "grpo"]), Some("grpo"), "was sft: no letter was the same");
        assert_eq!(nearest("Makefile", ["makefile", "Makefiles"]), Some("makefile"));
    }

    #[test]
    fn message_carries_place_and_fix() {
        let e = Error::model("tensor is missing").at("model.safetensors").at("dir").fix("download it again");
        assert_eq!(e.to_string(), "dir: model.safetensors: tensor is missing\n  fix: download it again");
    }
}

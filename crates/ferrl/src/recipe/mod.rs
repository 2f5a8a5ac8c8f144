//! Recipes: one typed TOML file says everything about a run.

mod settings;

pub use settings::*;

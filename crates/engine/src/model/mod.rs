//! Decoders: one implementation, many families.

pub mod config;

pub use config::Config;

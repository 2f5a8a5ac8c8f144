//! From hidden states to log-probabilities, divergences and tokens.

pub(crate) mod kl;
pub(crate) mod logp;
mod part;
pub(crate) mod sample;

//! From hidden states to log-probabilities, divergences and tokens.

pub(crate) mod kl;
pub(crate) mod logp;
pub(crate) mod sample;

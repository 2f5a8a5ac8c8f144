//! From hidden states to log-probabilities, KL divergences and sampled tokens.

pub(crate) mod kl;
pub(crate) mod logp;
mod part;
pub(crate) mod sample;

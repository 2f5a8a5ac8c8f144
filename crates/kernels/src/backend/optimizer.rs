//! Optimizer steps.

use super::LinearOps;
use crate::operands::*;
use crate::{Buffer, Result};

/// Optimizer steps.
pub trait OptimizerOps: LinearOps {
    /// Updates parameters, their moments, and the weights derived from them.
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()>;
    /// Updates elements `range` of a parameter and of its momentum buffer (absent without momentum).
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()>;
}

//! Updates of parameters from their gradients.

use super::LinearOps;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::operands::*;

/// Updates of parameters.
pub trait OptimizerOps: LinearOps {
    /// Updates parameters, their state, and the forms derived from them where there are any.
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()>;
    /// Elements `range` of a parameter and of its velocity (absent without momentum).
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()>;
}

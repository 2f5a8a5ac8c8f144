//! The `parallel` section: how weights and sequences are split over ranks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How weights and sequences are split over ranks. The launcher sets the number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// Copies of the weights (hybrid sharding): 1 splits them over all ranks (ZeRO-3, FSDP), 0 leaves a whole copy on every rank.
    /// [0, 1000000]
    pub ddp_size: usize,
    /// Tensor parallelism: ranks that compute one layer together. [1, 1000000]
    pub tp_size: usize,
    /// Context parallelism: ranks that share the tokens of a sequence. [1, 1000000]
    pub sp_size: usize,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel { ddp_size: 0, tp_size: 1, sp_size: 1 }
    }
}

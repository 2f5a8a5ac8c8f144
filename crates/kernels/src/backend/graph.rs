//! CUDA-graph-like capture of work that is launched again.

use super::MemoryOps;
use crate::error::{Error, Result};
use crate::operands::*;

/// Work that is captured once and launched again.
pub trait GraphOps: MemoryOps {
    /// Whether the device can record.
    fn records(&self) -> bool {
        false
    }
    /// Records the operations of `body` instead of doing them. They must have been done before with the same shapes;
    /// what they read and write must stay where it is as long as the recording is replayed; none may bring results to
    /// the host or take anything from it.
    fn record(&self, _body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        Err(Error::device("this device cannot record"))
    }
    /// Does what was recorded.
    fn replay(&self, _recording: &Recording) -> Result<()> {
        Err(Error::device("this device cannot record"))
    }
    /// Tells the device the rows of the paged operations that are to be replayed, in a batch of `batch` rows: one new
    /// token for each sequence. The number that comes back changes when older recordings of such a batch are void.
    fn stage_rows(&self, _rows: &PagedRows, _batch: usize) -> Result<u64> {
        Ok(0)
    }
}

//! Work that is captured once and launched again as a whole.

use super::CacheOps;
use crate::error::Result;
use crate::operands::*;

/// Graph capture, and whether operations run asynchronously.
pub trait GraphOps: CacheOps {
    /// Whether operations return before their work is done, so that the host can prepare the next step meanwhile.
    fn runs_async(&self) -> bool {
        false
    }
    /// Whether [`GraphOps::repeat`] captures, so that few distinct batch sizes pay.
    fn captures(&self) -> bool {
        false
    }
    /// Runs `body`, or launches the graph that was captured from it. A device that captures runs it as it is the first time
    /// (everything is then compiled, planned and in memory), captures it the second time, and from then on launches the
    /// graph without calling it. `rows` are the rows of its paged operations in a batch of `batch` rows, one new token for
    /// each sequence. As long as `graph` lives, `body` has the same operations, what they read and write stays where it
    /// is, and none copies to or from the host.
    fn repeat(
        &self,
        _graph: &mut Graph,
        _rows: &PagedRows,
        _batch: usize,
        body: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        body()
    }
}

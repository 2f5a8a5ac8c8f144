//! Graph capture and replay.

use super::CacheOps;
use crate::error::Result;
use crate::operands::*;

/// Graph capture, and whether operations run asynchronously.
pub trait GraphOps: CacheOps {
    /// Whether operations return before they complete, so that the host can prepare the next step meanwhile.
    fn runs_async(&self) -> bool {
        false
    }
    /// Whether [`GraphOps::repeat`] captures graphs, so that rounding to few distinct batch sizes pays off.
    fn captures(&self) -> bool {
        false
    }
    /// Runs `body`, or replays the graph captured from it. A device that captures runs `body` eagerly the first time (which
    /// compiles, plans and allocates), captures it the second time, and afterwards replays the graph without calling it. `rows`
    /// are the rows of its paged operations in a batch of `batch` rows, one new token per sequence. While `graph` lives, `body`
    /// must have the same operations on buffers at the same addresses, none of which copies to or from the host.
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

//! CUDA graphs: work captured once and replayed as a whole, hundreds of kernels for the price of one launch.
//!
//! A graph contains the addresses it was captured with. Memory allocated during capture stays with the graph, so that nothing
//! else uses it between two replays.

use crate::backend::{Graph, GraphOps, PagedRows};
use crate::cuda::attention;
use crate::cuda::context::{Cuda, check};
use crate::cuda::handles::CudaContext;
use crate::cuda::memory::RetainedBlocks;
use crate::error::Result;
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode_enum};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An executable graph, and the memory that its kernels use in between.
pub(crate) struct Executable {
    exec: CUgraphExec,
    held: RetainedBlocks,
    context: Arc<CudaContext>,
}

// SAFETY: a graph may be used from any thread.
unsafe impl Send for Executable {}
// SAFETY: launches go to one stream.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `capture`; the driver waits for a running launch.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// A captured graph before instantiation.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the capture that ended.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Captures work while it lives; ends the capture also if the work fails or panics.
struct Capture<'a> {
    cuda: &'a Cuda,
    ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(cuda: &'a Cuda) -> Result<Self> {
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the GPU's stream, on which nothing is being captured.
        check(unsafe { sys::cuStreamBeginCapture_v2(cuda.stream, mode) }, || "beginning to capture".into())?;
        cuda.capturing.store(true, Ordering::Relaxed);
        cuda.arena.retain_freed();
        Ok(Capture { cuda, ended: false })
    }

    /// The captured graph, and the memory that was freed during capture.
    fn end(&mut self) -> (Result<Captured>, RetainedBlocks) {
        self.ended = true;
        let held = self.cuda.arena.take_retained();
        self.cuda.capturing.store(false, Ordering::Relaxed);
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what `begin` began.
        let ended = unsafe { sys::cuStreamEndCapture(self.cuda.stream, &mut graph) };
        let graph = Captured(graph);
        (check(ended, || "capturing".into()).map(|()| graph), held)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.end();
        }
    }
}

/// Contents of a [`Graph`] of this backend.
#[derive(Default)]
struct Captures {
    executable: Option<Executable>,
    /// The paged lists' reallocation number at capture: if it has changed, the graph is invalid.
    lists: u64,
}

impl GraphOps for Cuda {
    fn runs_async(&self) -> bool {
        !self.trace.waits()
    }
    fn captures(&self) -> bool {
        !self.trace.waits() && !self.profile.wants_kernels()
    }
    fn repeat(
        &self,
        graph: &mut Graph,
        rows: &PagedRows,
        batch: usize,
        body: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if !self.captures() {
            return body();
        }
        let Some(kept) = graph.data::<Captures>() else {
            body()?;
            graph.keep(Box::new(Captures::default()));
            return Ok(());
        };
        let lists = attention::stage(self, rows, batch)?;
        let mine = |e: &Executable| e.held.is_of(&self.arena);
        if kept.lists != lists || !kept.executable.as_ref().is_some_and(mine) {
            let executable = capture(self, body)?;
            *kept = Captures { executable: Some(executable), lists };
        }
        kept.executable.as_ref().map_or(Ok(()), |executable| executable.launch(self))
    }
}

/// Captures the operations of `body` instead of running them.
pub(crate) fn capture(cuda: &Cuda, body: &mut dyn FnMut() -> Result<()>) -> Result<Executable> {
    cuda.bind()?;
    let mut capture = Capture::begin(cuda)?;
    let done = body();
    let (graph, held) = capture.end();
    done?;
    let graph = graph?;
    let mut exec = std::ptr::null_mut();
    // SAFETY: a complete captured graph; it is destroyed once the executable form exists.
    let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0) };
    check(made, || "instantiating a graph".into())?;
    Ok(Executable { exec, held, context: cuda.context.clone() })
}

impl Executable {
    pub(crate) fn launch(&self, cuda: &Cuda) -> Result<()> {
        cuda.bind()?;
        let start = || {
            // SAFETY: the graph is alive; the caller promises that the memory it refers to is.
            check(unsafe { sys::cuGraphLaunch(self.exec, cuda.stream) }, || "a graph".into())
        };
        cuda.profile.time(cuda.stream, || "graph".into(), start)
    }
}

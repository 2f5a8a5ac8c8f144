//! CUDA graphs: work that is captured once and launched again as a whole, hundreds of kernels for the price of one launch.
//!
//! A graph names the addresses it was captured with. What was allocated during capture stays its own, so that nothing else
//! uses that memory between two launches.

use crate::backend::{Graph, GraphOps, PagedRows};
use crate::cuda::attention;
use crate::cuda::context::{Cuda, check};
use crate::cuda::handles::CudaContext;
use crate::cuda::memory::Held;
use crate::error::Result;
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode_enum};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A graph that can be launched, and the memory between its kernels.
pub(crate) struct Executable {
    exec: CUgraphExec,
    held: Held,
    context: Arc<CudaContext>,
}

// SAFETY: a graph may be used from any thread.
unsafe impl Send for Executable {}
// SAFETY: launches go to one stream.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `capture`; the driver waits for a launch that runs.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// What was captured, before it is made into something that can be launched.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the capture that ended.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// While this lives, work is captured. It ends the capture also where the work fails or panics.
struct Capture<'a> {
    cuda: &'a Cuda,
    ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(cuda: &'a Cuda) -> Result<Self> {
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the card's stream, on which nothing is being captured.
        check(unsafe { sys::cuStreamBeginCapture_v2(cuda.stream, mode) }, || "beginning to capture".into())?;
        cuda.capturing.store(true, Ordering::Relaxed);
        cuda.arena.hold();
        Ok(Capture { cuda, ended: false })
    }

    /// What was captured, and the memory that was given back meanwhile.
    fn end(&mut self) -> (Result<Captured>, Held) {
        self.ended = true;
        let held = self.cuda.arena.held_since();
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

/// What a [`Graph`] of this backend holds.
#[derive(Default)]
struct Captures {
    executable: Option<Executable>,
    /// The number of the paged lists it was captured with: where they have moved since, it is void.
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
    // SAFETY: a graph that was captured whole; it is destroyed when its executable form exists.
    let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0) };
    check(made, || "instantiating a graph".into())?;
    Ok(Executable { exec, held, context: cuda.context.clone() })
}

impl Executable {
    pub(crate) fn launch(&self, cuda: &Cuda) -> Result<()> {
        cuda.bind()?;
        let start = || {
            // SAFETY: the graph lives; what it names lives as long as the caller promises.
            check(unsafe { sys::cuGraphLaunch(self.exec, cuda.stream) }, || "a graph".into())
        };
        cuda.profile.time(cuda.stream, || "graph".into(), start)
    }
}

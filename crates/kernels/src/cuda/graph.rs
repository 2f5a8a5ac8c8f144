//! Work that is recorded once and started again as a whole: hundreds of kernels for the price of one launch.
//!
//! A recording names the addresses it was made with. What it allocated on the way stays its own, so that nobody else
//! uses that memory between two replays.

use crate::backend::{GraphOps, PagedRows, Recording};
use crate::cuda::context::{Cuda, check};
use crate::cuda::handles::Context;
use crate::cuda::memory::Held;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode_enum};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A graph that can be launched, and the memory between its kernels.
struct Graph {
    exec: CUgraphExec,
    held: Held,
    context: Arc<Context>,
}

// SAFETY: a graph may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: launches go to one stream.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `record`; the driver waits for a launch that runs.
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

/// While this lives, work is recorded. It ends the capture also where the work fails or panics.
struct Capture<'a> {
    cuda: &'a Cuda,
    ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(cuda: &'a Cuda) -> Result<Self> {
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the card's stream, on which nothing is being recorded.
        check(unsafe { sys::cuStreamBeginCapture_v2(cuda.stream, mode) }, || "beginning to record".into())?;
        cuda.recording.store(true, Ordering::Relaxed);
        cuda.arena.hold();
        Ok(Capture { cuda, ended: false })
    }

    /// What was recorded, and the memory that was given back meanwhile.
    fn end(&mut self) -> (Result<Captured>, Held) {
        self.ended = true;
        let held = self.cuda.arena.held_since();
        self.cuda.recording.store(false, Ordering::Relaxed);
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what `begin` began.
        let ended = unsafe { sys::cuStreamEndCapture(self.cuda.stream, &mut graph) };
        let graph = Captured(graph);
        (check(ended, || "recording".into()).map(|()| graph), held)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.end();
        }
    }
}

impl GraphOps for Cuda {
    fn records(&self) -> bool {
        !self.trace.waits()
    }
    fn record(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        self.bind()?;
        let mut capture = Capture::begin(self)?;
        let done = body();
        let (graph, held) = capture.end();
        done?;
        let graph = graph?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: a graph that was captured whole; it is destroyed when its executable form exists.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0) };
        check(made, || "making a recording".into())?;
        Ok(Recording::new(Box::new(Graph { exec, held, context: self.context.clone() })))
    }
    fn replay(&self, recording: &Recording) -> Result<()> {
        self.bind()?;
        let graph = recording.data().downcast_ref::<Graph>();
        let Some(graph) = graph.filter(|graph| graph.held.is_of(&self.arena)) else {
            return Err(Error::usage("operation replay: a recording of another device"));
        };
        let start = || {
            // SAFETY: the graph lives; what it names lives as long as the caller promises.
            check(unsafe { sys::cuGraphLaunch(graph.exec, self.stream) }, || "a recording".into())
        };
        self.profile.time(self.stream, || "recording".into(), start)
    }
    fn stage_rows(&self, rows: &PagedRows, batch: usize) -> Result<u64> {
        crate::cuda::attention::stage(self, rows, batch)
    }
}

//! Work that is recorded once and started again as a whole: hundreds of kernels for the price of one launch.
//!
//! A recording names the addresses it was made with. What it allocated on the way stays its own, so that nobody else
//! uses that memory between two replays.

use super::context::{Cuda, check};
use super::memory::Held;
use crate::backend::Recording;
use crate::error::Result;
use cudarc::driver::sys::{self, CUgraphExec, CUstreamCaptureMode_enum};
use std::sync::atomic::Ordering;

/// A graph that can be launched, and the memory between its kernels.
struct Graph {
    exec: CUgraphExec,
    _held: Held,
}

// SAFETY: a graph may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: launches go to one stream.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`; the driver waits for a launch that runs.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// See [`crate::Backend::record`].
pub fn record(cuda: &Cuda, body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
    cuda.bind()?;
    let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the card's stream, on which nothing is being recorded.
    check(unsafe { sys::cuStreamBeginCapture_v2(cuda.stream, mode) }, || "beginning to record".into())?;
    cuda.recording.store(true, Ordering::Relaxed);
    cuda.arena.hold();
    let done = body();
    let held = cuda.arena.held_since();
    cuda.recording.store(false, Ordering::Relaxed);
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: ends what was begun above; the graph is destroyed when its executable form exists.
    unsafe {
        let ended = sys::cuStreamEndCapture(cuda.stream, &mut graph);
        done?;
        check(ended, || "recording".into())?;
        let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
        sys::cuGraphDestroy(graph);
        check(made, || "making a recording".into())?;
    }
    Ok(Recording::new(Box::new(Graph { exec, _held: held })))
}

/// See [`crate::Backend::replay`].
pub fn replay(cuda: &Cuda, recording: &Recording) -> Result<()> {
    cuda.bind()?;
    let graph: &Graph = recording.data().downcast_ref().expect("a recording of the CUDA backend");
    let start = || {
        // SAFETY: the graph lives; what it names lives as long as the caller promises.
        check(unsafe { sys::cuGraphLaunch(graph.exec, cuda.stream) }, || "a recording".into())
    };
    cuda.profile.time(cuda.stream, || "recording".into(), start)
}

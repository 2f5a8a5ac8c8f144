//! Context for device errors: the last launched work, the state of the stream, and free memory.
//!
//! Launches are asynchronous, so a failing kernel is noticed later. With `FERRL_SYNC=1` every kernel and GEMM is waited for and
//! nothing is captured, so that the error names the one that failed.

use super::context::{Cuda, reason};
use super::gemm::Gemm;
use super::launch::{Arg, Grid};
use crate::usage::size;
use crate::{Error, Result, lock};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureStatus_enum as Capture};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Records the last launch.
#[derive(Default)]
pub(super) struct Trace {
    last: Mutex<Last>,
    waits: bool,
}

#[derive(Default)]
enum Last {
    #[default]
    Nothing,
    Kernel {
        module: &'static str,
        name: String,
        grid: Grid,
        args: Vec<Arg>,
    },
    Product(Gemm),
}

impl Trace {
    pub(super) fn from_env() -> Self {
        let waits = std::env::var_os("FERRL_SYNC").is_some_and(|v| !v.is_empty() && v != "0");
        Trace { last: Mutex::default(), waits }
    }

    /// Whether every launch is waited for.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Records a kernel launch.
    pub(super) fn kernel(&self, of: &'static str, called: &str, on: Grid, with: &[Arg]) {
        let mut last = lock(&self.last);
        match &mut *last {
            // No allocation for a kernel like the last one.
            Last::Kernel { module, name, grid, args } => {
                (*module, *grid) = (of, on);
                called.clone_into(name);
                with.clone_into(args);
            }
            other => {
                *other = Last::Kernel { module: of, name: called.into(), grid: on, args: with.to_vec() };
            }
        }
    }

    /// Records a GEMM launch.
    pub(super) fn product(&self, g: &Gemm) {
        *lock(&self.last) = Last::Product(*g);
    }

    fn describe(&self) -> String {
        match &*lock(&self.last) {
            Last::Nothing => "nothing".into(),
            Last::Kernel { module, name, grid, args } => {
                let sizes: Vec<String> = args.iter().filter_map(Arg::size).map(|n| n.to_string()).collect();
                let [x, y, z] = grid.blocks;
                format!(
                    "kernel {name} of {module}.cu, sizes {}, {x} x {y} x {z} blocks of {} threads and {} bytes",
                    sizes.join(" "),
                    grid.threads,
                    grid.shared
                )
            }
            Last::Product(g) => format!("product {} into {}", g.name(), g.out.name()),
        }
    }
}

impl Cuda {
    /// The error of a failed driver call.
    pub(super) fn failed(&self, result: CUresult, what: &str) -> Error {
        self.failure(format!("the card failed in {what}: {}", reason(result)))
    }

    /// The error of a failure, with this context.
    pub(super) fn failure(&self, what: String) -> Error {
        let fix = if self.trace.waits {
            "report it, with this message and what `ferrl doctor` says"
        } else {
            "run it again with FERRL_SYNC=1, which names the work that failed"
        };
        let (last, stream, memory) = (self.trace.describe(), self.stream_state(), self.free_memory());
        Error::device(format!("{what}; last started: {last}; stream: {stream}; memory: {memory}")).fix(fix)
    }

    fn stream_state(&self) -> String {
        let mut status = Capture::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live variable and the card's stream.
        let (asked, state) =
            unsafe { (sys::cuStreamIsCapturing(self.stream, &mut status), sys::cuStreamQuery(self.stream)) };
        match (asked, status, state) {
            (CUresult::CUDA_SUCCESS, Capture::CU_STREAM_CAPTURE_STATUS_ACTIVE, _) => "capturing".into(),
            (_, _, CUresult::CUDA_SUCCESS) => "idle".into(),
            (_, _, CUresult::CUDA_ERROR_NOT_READY) => "busy".into(),
            (_, _, other) => format!("broken ({})", reason(other)),
        }
    }

    fn free_memory(&self) -> String {
        let (mut free, mut total) = (0, 0);
        if self.bind().is_err() {
            return format!("{} in use before", size(self.arena.usage().0));
        }
        // SAFETY: live variables; the context is current.
        match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
            CUresult::CUDA_SUCCESS => format!("{} of {} free", size(free), size(total)),
            _ => format!("{} in use before", size(self.arena.usage().0)),
        }
    }

    /// Waits for the last launch, with `FERRL_SYNC=1`.
    pub(super) fn started(&self) -> Result<()> {
        if self.trace.waits && !self.capturing.load(Ordering::Relaxed) {
            return self.synchronize();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::launch::args;
    use super::*;

    /// Needs a GPU; skipped without one.
    #[test]
    fn an_error_names_the_work_its_sizes_the_stream_and_the_memory() {
        let cuda = match Cuda::new(0) {
            Ok(cuda) => cuda,
            Err(e) => return eprintln!("skipped: {e}"),
        };
        let impossible = Grid::new(3, 4096);
        let error = cuda
            .launch("split_master", "join", impossible, &args![0u64, 0u64, 0u64, 12_345usize])
            .unwrap_err();
        let text = error.to_string();
        let parts = [
            "starting join",
            "split_master.cu, sizes 12345, 3 x 1 x 1 blocks of 4096",
            "stream: idle",
            "free",
            "FERRL_SYNC",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} is not in {text:?}");
        }
        cuda.synchronize().unwrap();
    }
}

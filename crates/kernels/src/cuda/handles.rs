//! Owners of driver handles: a GPU's context, which lives as long as the process, and streams, events and pinned memory, each
//! destroyed with its owner.
//!
//! Each makes its context current before it is destroyed, since the thread may have used another GPU meanwhile.

use super::context::check;
use crate::usage::size;
use crate::{Error, Result, lock};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUstream};
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// A GPU's primary context.
pub(crate) struct CudaContext {
    handle: CUcontext,
    device: CUdevice,
}

// SAFETY: a context may be used from any thread.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

/// One per GPU that was opened. Creating a context takes a good part of a second, and a GPU is often opened to see whether it is
/// available before it is used; so contexts live until the process ends.
static OPENED: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());

thread_local! {
    /// The context that we last made current on this thread.
    static CURRENT: Cell<CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

impl CudaContext {
    /// The context of a device, made current. The driver must be initialised.
    pub(super) fn of(device: CUdevice) -> Result<Arc<CudaContext>> {
        let mut opened = lock(&OPENED);
        if let Some(context) = opened.iter().find(|context| context.device == device) {
            context.bind()?;
            return Ok(context.clone());
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live variable.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) };
        check(retained, || "opening its context".into())?;
        let context = Arc::new(CudaContext { handle, device });
        opened.push(context.clone());
        context.bind()?;
        Ok(context)
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes it current on this thread.
    pub(super) fn bind(&self) -> Result<()> {
        if CURRENT.get() == self.handle {
            return Ok(());
        }
        // SAFETY: a context that was retained and is never released.
        check(unsafe { sys::cuCtxSetCurrent(self.handle) }, || "binding its context".into())?;
        CURRENT.set(self.handle);
        Ok(())
    }
}

/// A CUDA stream.
pub(super) struct Stream {
    pub(super) handle: CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a live variable; the context is current.
        check(unsafe { sys::cuStreamCreate(&mut handle, flags) }, || "making a stream".into())?;
        Ok(Stream { handle, context: context.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `new`; nothing is launched on it after this.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// A CUDA event.
pub(crate) struct StreamEvent {
    pub(super) handle: CUevent,
    pub(super) context: Arc<CudaContext>,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    pub(super) fn new(context: &Arc<CudaContext>, timing: bool) -> Result<Self> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = if timing { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        // SAFETY: a live variable; the context is current.
        check(unsafe { sys::cuEventCreate(&mut handle, flags) }, || "making an event".into())?;
        Ok(StreamEvent { handle, context: context.clone() })
    }

    /// Waits until it has completed.
    pub(super) fn wait(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: made by `new`.
        check(unsafe { sys::cuEventSynchronize(self.handle) }, || "work that was started earlier".into())
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `new`.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

/// Pinned (page-locked) host memory. Users must wait for their copies before dropping it.
pub(super) struct Pinned {
    at: *mut u8,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared access gives an address only.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut at: *mut c_void = std::ptr::null_mut();
        // SAFETY: a live variable; the context is current.
        let made = unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) };
        if made == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let what = format!("cannot allocate {} of pinned host memory", size(bytes));
            return Err(Error::resource(what).fix("more host memory, or keep this data in device memory"));
        }
        check(made, || format!("taking {bytes} bytes of page-locked memory"))?;
        Ok(Pinned { at: at.cast(), bytes, context: context.clone() })
    }

    /// Address of byte `from`; asserts that `len` bytes follow.
    pub(super) fn at(&self, from: usize, len: usize) -> *mut u8 {
        assert!(from <= self.bytes && len <= self.bytes - from, "beyond the page-locked memory");
        // SAFETY: within the allocation.
        unsafe { self.at.add(from) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `new`.
            unsafe { sys::cuMemFreeHost(self.at.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::{MemoryOps, VectorOps};
    use crate::buffer::DType;
    use crate::cuda::Cuda;

    /// Needs a GPU; skipped without one. Streams, pinned memory, modules and descriptors were leaked.
    #[test]
    fn a_card_that_is_closed_gives_everything_back() {
        let use_it = || -> crate::error::Result<usize> {
            let cuda = Cuda::new(0)?;
            let mut x = cuda.alloc(DType::F32, 1 << 20)?;
            cuda.fill(&mut x, 1.0)?;
            assert_eq!(cuda.dot(&x, &x)?, f64::from(1 << 20));
            let used = cuda.memory_report().map_or(0, |report| report.used);
            drop(cuda);
            // A buffer may outlive its device.
            drop(x);
            Ok(used)
        };
        let first = match use_it() {
            Ok(used) => used,
            Err(e) => return eprintln!("skipped: {e}"),
        };
        let last = (0..30).map(|_| use_it().expect("the card")).fold(0, |_, used| used);
        assert!(last <= first + (64 << 20), "{first} bytes in use at first, {last} in the end");
    }
}

//! A second stream for transfers between GPUs, and device staging memory for messages of host bytes.
//!
//! The two streams are ordered by events; the host waits for neither. Memory that a transfer uses stays allocated until the
//! compute stream waits for the transfer: then the allocator's single-stream rule holds again.

use super::context::{Cuda, check};
use super::handles::{CudaContext, Pinned, Stream, StreamEvent};
use crate::{Error, Result, lock};
use cudarc::driver::sys::{self, CUdevice, CUresult, CUstream};
use std::ffi::c_int;
use std::sync::Arc;

/// UUID of a GPU, the same in every process.
pub(crate) type CardId = [u8; 16];

/// The transfer stream of a GPU.
pub(crate) struct ExchangeStream {
    compute: Arc<Stream>,
    exchanges: Stream,
    context: Arc<CudaContext>,
    pub(crate) card: CardId,
}

impl ExchangeStream {
    fn new(cuda: &Cuda) -> Result<Self> {
        let context = cuda.context.clone();
        let (exchanges, card) = (Stream::new(&context)?, id(context.device())?);
        Ok(ExchangeStream { compute: cuda.compute.clone(), exchanges, context, card })
    }

    /// Makes the context current on this thread; returns the compute stream.
    pub(crate) fn bind(&self) -> Result<CUstream> {
        self.context.bind()?;
        Ok(self.exchanges.handle)
    }

    /// An event after all compute work launched so far.
    pub(crate) fn computed(&self) -> Result<StreamEvent> {
        self.record(self.compute.handle, false)
    }

    /// An event after all transfers launched so far, with timing.
    pub(crate) fn exchanged(&self) -> Result<StreamEvent> {
        self.record(self.exchanges.handle, true)
    }

    fn record(&self, stream: CUstream, timing: bool) -> Result<StreamEvent> {
        let event = StreamEvent::new(&self.context, timing)?;
        // SAFETY: an event and a stream of this GPU, whose context `new` made current.
        check(unsafe { sys::cuEventRecord(event.handle, stream) }, || "marking a place in a stream".into())?;
        Ok(event)
    }

    /// Later transfers wait for an event.
    pub(crate) fn exchanges_wait(&self, event: &StreamEvent) -> Result<()> {
        self.wait(self.exchanges.handle, event)
    }

    /// Later compute work waits for an event.
    pub(crate) fn compute_waits(&self, event: &StreamEvent) -> Result<()> {
        self.wait(self.compute.handle, event)
    }

    fn wait(&self, stream: CUstream, event: &StreamEvent) -> Result<()> {
        self.context.bind()?;
        // SAFETY: a stream and an event of this card.
        check(unsafe { sys::cuStreamWaitEvent(stream, event.handle, 0) }, || "ordering two streams".into())
    }
}

impl Cuda {
    /// Its transfer stream; created on first use.
    pub(crate) fn exchange_stream(&self) -> Result<Arc<ExchangeStream>> {
        let mut stream = lock(&self.exchanges);
        if let Some(stream) = &*stream {
            return Ok(stream.clone());
        }
        Ok(stream.insert(Arc::new(ExchangeStream::new(self)?)).clone())
    }

    /// Its UUID.
    pub(crate) fn card_id(&self) -> Result<CardId> {
        id(self.context.device())
    }
}

fn id(device: CUdevice) -> Result<CardId> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: a live variable and a device of the driver.
    check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) }, || "asking which card it is".into())?;
    Ok(uuid.bytes.map(|b| b as u8))
}

impl StreamEvent {
    pub(crate) fn has_happened(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: made by `new`; the context is current.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            failed => check(failed, || "work that was started earlier".into()).map(|()| false),
        }
    }

    /// Seconds from an earlier event; both have completed and have timing.
    pub(crate) fn seconds_since(&self, earlier: &StreamEvent) -> f64 {
        let mut ms = 0.0;
        // SAFETY: a live variable and two events of one card.
        unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.handle, self.handle) };
        f64::from(ms) * 1e-3
    }
}

/// Device staging memory for messages of host bytes to other ranks: one buffer to send, one to receive.
pub(crate) struct CardStaging {
    out: u64,
    into: u64,
    host_out: Pinned,
    host_into: Pinned,
    /// Bytes of each buffer.
    pub(crate) bytes: usize,
    stream: Stream,
    context: Arc<CudaContext>,
    pub(crate) card: CardId,
}

// SAFETY: the driver's handles may be used from any thread; the context is made current before they are.
unsafe impl Send for CardStaging {}

impl CardStaging {
    /// On one of this machine's GPUs: rank modulo their number.
    pub(crate) fn new(rank: usize, bytes: usize) -> Result<Self> {
        super::libraries::open(super::libraries::Library::Driver)?;
        let (mut count, mut device) = (0, 0);
        // SAFETY: plain calls of the driver with pointers to live variables.
        unsafe {
            check(sys::cuInit(0), || "starting the driver".into())?;
            check(sys::cuDeviceGetCount(&mut count), || "counting cards".into())?;
            if count < 1 {
                return Err(Error::device("the driver has no card"));
            }
            let index = rank % count as usize;
            check(sys::cuDeviceGet(&mut device, index as c_int), || format!("opening card {index}"))?;
        }
        let context = CudaContext::of(device)?;
        let (host_out, host_into) = (Pinned::new(&context, bytes)?, Pinned::new(&context, bytes)?);
        let stream = Stream::new(&context)?;
        let card = id(device)?;
        let mut staging = CardStaging { out: 0, into: 0, host_out, host_into, bytes, stream, context, card };
        for at in [&mut staging.out, &mut staging.into] {
            // SAFETY: the context is current; the driver writes an address, which `drop` frees.
            let done = unsafe { sys::cuMemAlloc_v2(at, bytes) };
            check(done, || format!("taking {bytes} bytes of its memory"))?;
        }
        Ok(staging)
    }

    /// Makes the context current on this thread; returns the copy stream.
    pub(crate) fn bind(&self) -> Result<CUstream> {
        self.context.bind()?;
        Ok(self.stream.handle)
    }

    /// Device addresses of the send and receive buffers.
    pub(crate) fn addresses(&self) -> (u64, u64) {
        (self.out, self.into)
    }

    /// Writes bytes to the host side of the send buffer.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        let to = self.host_out.at(at, bytes.len());
        // SAFETY: `at` returns that many bytes; no copy is in flight between `arrived` and `leave`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Starts copying the first bytes to the device.
    pub(crate) fn leave(&self, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both memories are at least that large, as `at` checks for the host's; they live until the stream is done.
        let done = unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.out, self.host_out.at(0, bytes).cast(), bytes, self.stream.handle)
        };
        check(done, || format!("copying {bytes} bytes to it"))
    }

    /// Starts copying the first received bytes back to the host; the event completes with the copy.
    pub(crate) fn arrive(&self, bytes: usize) -> Result<StreamEvent> {
        if bytes > 0 {
            let to = self.host_into.at(0, bytes).cast();
            // SAFETY: as above.
            let done = unsafe { sys::cuMemcpyDtoHAsync_v2(to, self.into, bytes, self.stream.handle) };
            check(done, || format!("copying {bytes} bytes from it"))?;
        }
        let event = StreamEvent::new(&self.context, false)?;
        // SAFETY: an event and a stream of this card.
        check(unsafe { sys::cuEventRecord(event.handle, self.stream.handle) }, || "marking a copy".into())?;
        Ok(event)
    }

    /// Received bytes, after the event of [`CardStaging::arrive`] has completed.
    pub(crate) fn take(&mut self, at: usize, bytes: &mut [u8]) {
        let from = self.host_into.at(at, bytes.len());
        // SAFETY: `at` gives that many bytes, and no copy is under way.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }
}

impl Drop for CardStaging {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for at in [self.out, self.into].into_iter().filter(|&at| at != 0) {
                // SAFETY: made by `new`; the driver waits for what uses it.
                unsafe { sys::cuMemFree_v2(at) };
            }
        }
    }
}

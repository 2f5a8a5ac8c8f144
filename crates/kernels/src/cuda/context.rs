//! An open GPU: context, stream, cuBLASLt handle, and transfers between host and device.

use super::compile::KernelModules;
use super::exchange::ExchangeStream;
use super::gemm::Products;
use super::handles::{CudaContext, Pinned, Stream};
use super::libraries::{self, Library};
use super::memory::{CardArena, CardMemory};
use super::profile::Profile;
use super::trace::Trace;
use super::transfer::{self, StagingBuffers};
use crate::plain::Plain;
use crate::{Error, Purpose, Result, lock};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult, CUstream};
use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Device properties.
#[derive(Clone, Debug, Default)]
pub struct CardInfo {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub processors: u32,
    /// Multiprocessor clock in kHz.
    pub clock: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// Maximum shared memory per block in bytes.
    pub shared: usize,
    /// CUDA version of the driver, such as `(13, 0)`.
    pub driver: (u32, u32),
}

/// An open GPU.
pub struct Cuda {
    pub card: CardInfo,
    pub(super) arena: CardArena,
    pub(super) modules: KernelModules,
    /// GEMM through cuBLASLt.
    pub(super) products: Products,
    pub(super) stream: CUstream,
    pub(super) profile: Profile,
    pub(super) trace: Trace,
    /// Whether a row's bits must not depend on the other rows of the batch.
    pub(super) exact: AtomicBool,
    /// Whether work is being captured into a graph.
    pub(super) capturing: AtomicBool,
    /// Attention's cached work lists.
    pub(super) tables: Mutex<super::attention::Tables>,
    /// Shapes that decode GEMM kernels serve.
    pub(super) decode_gemms: super::decode::DecodeLimits,
    /// Plans for GEMMs of up to 256 rows.
    pub(super) streams: super::gemm::stream::StreamPlans,
    /// Pinned memory for sampled tokens.
    pub(super) slots: super::head::sample::Slots,
    /// Cached sampling parameters on the device.
    pub(super) lists: super::head::sample::Lists,
    staging: Mutex<Staging>,
    /// Pinned buffers for large uploads; created on first use.
    rooms: Mutex<Option<StagingBuffers>>,
    /// Stream for transfers to and from other GPUs.
    pub(super) exchanges: Mutex<Option<Arc<ExchangeStream>>>,
    /// Owns `stream`. Declared last but one, so that the fields above are dropped before it.
    pub(super) compute: Arc<Stream>,
    pub(super) context: Arc<CudaContext>,
}

// SAFETY: the driver's handles may be used from any thread; `bind` makes the context current before use.
unsafe impl Send for Cuda {}
// SAFETY: as above; mutable state is behind locks.
unsafe impl Sync for Cuda {}

/// Pinned staging memory for uploads, so that copies need not wait for the stream.
struct Staging {
    memory: Pinned,
    used: usize,
}

/// Bytes of the staging memory.
const STAGING: usize = 8 << 20;

/// Turns a driver error into an `Err`.
pub(super) fn check(result: CUresult, what: impl FnOnce() -> String) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::device(format!("the card failed in {}: {}", what(), reason(result))))
}

/// The driver's description of a result.
pub(super) fn reason(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a string that is never freed, or leaves null.
    let named = unsafe { sys::cuGetErrorString(result, &mut text) } == CUresult::CUDA_SUCCESS;
    let text = if named && !text.is_null() {
        // SAFETY: a string of the driver's own.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        String::new()
    };
    format!("{text} ({result:?})")
}

impl Cuda {
    /// Opens the GPU with this index.
    pub fn new(index: usize) -> Result<Self> {
        for library in [Library::Driver, Library::Compiler, Library::Products] {
            libraries::open(library)?;
        }
        let none = |e: Error| e.fix("check `nvidia-smi`; or use the device cpu");
        // SAFETY: plain calls of the driver with pointers to live variables.
        unsafe {
            check(sys::cuInit(0), || "starting the driver".into()).map_err(none)?;
            let mut count = 0;
            check(sys::cuDeviceGetCount(&mut count), || "counting cards".into()).map_err(none)?;
            if index >= count as usize {
                let what = format!("there is no card {index}, the driver has {count}");
                return Err(Error::device(what).fix("use a lower number, or the device cpu"));
            }
            let mut device = 0;
            check(sys::cuDeviceGet(&mut device, index as c_int), || format!("opening card {index}"))?;
            let context = CudaContext::of(device).map_err(none)?;
            let card = CardInfo::of(device)?;
            if card.capability < (8, 0) {
                let what = format!(
                    "{} has compute capability {}.{}, 8.0 or more is needed",
                    card.name, card.capability.0, card.capability.1
                );
                return Err(Error::device(what).fix("use the device cpu"));
            }
            let stream = Stream::new(&context)?;
            let staging = Mutex::new(Staging { memory: Pinned::new(&context, STAGING)?, used: 0 });
            let arena = CardArena::new(context.clone());
            let usual = arena.set_purpose(Purpose::Workspace);
            let products = Products::new(&context, &arena)?;
            arena.set_purpose(usual);
            let modules = KernelModules::new(card.capability, context.clone());
            let profile = Profile::from_env(&context);
            Ok(Cuda {
                profile,
                trace: Trace::from_env(),
                exact: AtomicBool::new(true),
                capturing: AtomicBool::new(false),
                card,
                arena,
                modules,
                products,
                stream: stream.handle,
                tables: Mutex::default(),
                decode_gemms: Default::default(),
                streams: Default::default(),
                slots: Default::default(),
                lists: Default::default(),
                staging,
                rooms: Mutex::default(),
                exchanges: Mutex::default(),
                compute: Arc::new(stream),
                context,
            })
        }
    }

    /// Whether a row's bits must not depend on the other rows of the batch.
    pub(super) fn exact(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    /// Waits for all launched work.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamSynchronize(self.stream) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            failed => Err(self.failed(failed, "work that was started earlier")),
        }
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        lock(&self.staging)
    }

    /// Copies to the GPU; the source may change as soon as this returns. Waits only when the staging memory is full.
    pub(super) fn upload<T: Plain>(&self, to: u64, values: &[T]) -> Result<()> {
        self.bind()?;
        if self.capturing.load(Ordering::Relaxed) {
            return Err(Error::device("a copy to the card cannot be captured"));
        }
        // SAFETY: plain elements have no padding.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        if bytes.len() >= transfer::LARGE {
            let mut rooms = lock(&self.rooms);
            if rooms.is_none() {
                *rooms = Some(StagingBuffers::new(&self.context)?);
            }
            return rooms.as_mut().map_or(Ok(()), |rooms| rooms.upload(self, to, bytes));
        }
        let mut staging = self.staging();
        for (i, piece) in bytes.chunks(STAGING).enumerate() {
            if staging.used + piece.len() > STAGING {
                // SAFETY: the stream lives as long as `self`.
                check(unsafe { sys::cuStreamSynchronize(self.stream) }, || "work before a copy".into())?;
                staging.used = 0;
            }
            let from = staging.memory.at(staging.used, piece.len());
            // SAFETY: the piece fits into the rest of the staging memory, and the destination has room (checked by callers).
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), from, piece.len());
                let to = to + (i * STAGING) as u64;
                let done = sys::cuMemcpyHtoDAsync_v2(to, from.cast(), piece.len(), self.stream);
                check(done, || format!("copying {} bytes to it", piece.len()))?;
            }
            staging.used = (staging.used + piece.len()).next_multiple_of(256);
        }
        Ok(())
    }

    /// New device memory with these values.
    pub(super) fn uploaded<T: Plain>(&self, values: &[T]) -> Result<CardMemory> {
        let memory = self.arena.take(size_of_val(values))?;
        self.upload(memory.ptr(), values)?;
        Ok(memory)
    }

    /// Copies from the GPU, after all launched work.
    pub(super) fn download<T: Plain>(&self, from: u64, values: &mut [T]) -> Result<()> {
        self.bind()?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the slice has this many bytes, any of which are values, and lives until the stream is done.
        unsafe {
            let bytes = size_of_val(values);
            let done = sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from, bytes, self.stream);
            check(done, || format!("copying {bytes} bytes from it"))?;
        }
        self.synchronize()
    }

    /// One line for users.
    pub(super) fn describe_card(&self) -> String {
        let CardInfo { name, capability, driver, memory, .. } = &self.card;
        let (nvrtc, places) = (super::compile::version().unwrap_or((0, 0)), super::libraries::open);
        let found = |l| places(l).unwrap_or_else(|e| e.to_string());
        format!(
            "{name}, compute capability {}.{}, {:.1} GiB, driver for CUDA {}.{}, NVRTC {}.{} ({}), cuBLASLt {} ({})",
            capability.0,
            capability.1,
            *memory as f64 / (1u64 << 30) as f64,
            driver.0,
            driver.1,
            nvrtc.0,
            nvrtc.1,
            found(Library::Compiler),
            self.products.version(),
            found(Library::Products),
        )
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Memory must not be freed under running work; an error here cannot be returned.
        if self.synchronize().is_ok() {
            self.profile.report();
        }
    }
}

impl CardInfo {
    fn of(device: sys::CUdevice) -> Result<CardInfo> {
        let attribute = |which: Attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: a live variable and a device the driver gave.
            check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, || {
                "asking what it is".into()
            })?;
            Ok(value as u32)
        };
        let (mut name, mut memory, mut version) = ([0u8; 128], 0usize, 0);
        // SAFETY: live variables of the given sizes.
        unsafe {
            check(sys::cuDeviceGetName(name.as_mut_ptr().cast(), 128, device), || "asking its name".into())?;
            check(sys::cuDeviceTotalMem_v2(&mut memory, device), || "asking its memory".into())?;
            check(sys::cuDriverGetVersion(&mut version), || "asking the driver's version".into())?;
        }
        let name =
            CStr::from_bytes_until_nul(&name).map_or("unknown".into(), |n| n.to_string_lossy().into_owned());
        Ok(CardInfo {
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            clock: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory,
            driver: ((version / 1000) as u32, (version % 1000 / 10) as u32),
        })
    }
}

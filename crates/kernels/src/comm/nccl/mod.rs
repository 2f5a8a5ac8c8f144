//! NCCL as a transport between GPUs. The library is opened at run time; its reductions are not used: sums are Ferrl's own.

mod mover;
mod world;

pub(super) use mover::NcclMover;
pub use world::NcclWorld;
pub(super) use world::open;

use crate::card::libraries::{self, Library as Needed};
use crate::{Error, Result, lock};
use cudarc::driver::sys::CUstream;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// `ncclComm_t`.
type NcclHandle = *mut c_void;

/// `ncclUniqueId`: how the ranks of a communicator find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; 128]);

/// `ncclUint8`
const BYTES: c_int = 1;
/// `ncclInProgress`: only returned for non-blocking communicators, which are not used here.
const IN_PROGRESS: c_int = 7;

/// The functions used, as declared in `nccl.h` of version 2.
struct NcclFunctions {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut NcclHandle, c_int, UniqueId, c_int) -> c_int,
    /// Since 2.18; the last argument is a configuration, null for the parent's.
    split: Option<unsafe extern "C" fn(NcclHandle, c_int, c_int, *mut NcclHandle, *mut c_void) -> c_int>,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, NcclHandle, CUstream) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, NcclHandle, CUstream) -> c_int,
    async_error: unsafe extern "C" fn(NcclHandle, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(NcclHandle) -> c_int,
    destroy: unsafe extern "C" fn(NcclHandle) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Since 2.13.
    last_error: Option<unsafe extern "C" fn(NcclHandle) -> *const c_char>,
}

/// The opened library.
pub(super) struct Nccl {
    functions: NcclFunctions,
    /// Where it was found.
    file: String,
    /// E.g. 23203 for 2.32.3.
    pub version: u32,
}

/// An NCCL library on this machine.
#[derive(Clone, Debug)]
pub struct FoundNccl {
    /// The file, or its name in the loader's path.
    pub file: String,
    /// E.g. 2.32.3.
    pub version: String,
}

/// The NCCL library that ranks with GPUs would use, or why they would use none.
pub fn find() -> Result<FoundNccl> {
    let nccl = Nccl::get()?;
    Ok(FoundNccl { file: nccl.file.clone(), version: nccl.version() })
}

/// Whether the environment disables device-to-device transfers.
pub(super) fn is_off() -> bool {
    std::env::var("FERRL_NCCL").is_ok_and(|value| value == "off")
}

impl Nccl {
    /// Opens it once per process.
    pub fn get() -> Result<&'static Nccl> {
        static OPENED: OnceLock<Result<Nccl>> = OnceLock::new();
        OPENED.get_or_init(Nccl::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Nccl> {
        let named = std::env::var("FERRL_NCCL").ok().filter(|name| !name.is_empty() && name != "off");
        let Some(name) = named else {
            let file = libraries::open(Needed::Transfers)?;
            // An already open library is found under its own name, wherever it is.
            let opened = ["libnccl.so.2", "libnccl.so"].iter().find_map(|name| load(name).ok());
            let library = opened.ok_or_else(|| Error::device(format!("{file} cannot be opened again")))?;
            return Nccl::of(library, file);
        };
        let library = load(&name).map_err(|e| {
            Error::device(format!("FERRL_NCCL: {e}"))
                .fix("the path of libnccl.so.2, or pip install nvidia-nccl-cu13")
        })?;
        Nccl::of(library, name)
    }

    fn of(library: Library, file: String) -> Result<Nccl> {
        let lacks = |name: &str| {
            Error::device(format!("{file} lacks {name}"))
                .fix("NCCL 2.18 or later: pip install nvidia-nccl-cu13")
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the signature is that of nccl.h. The library is never closed, so that the address stays good.
                unsafe { library.get($name) }.map(|f| *f)
            };
        }
        let functions = NcclFunctions {
            version: function!("ncclGetVersion").map_err(|_| lacks("ncclGetVersion"))?,
            unique_id: function!("ncclGetUniqueId").map_err(|_| lacks("ncclGetUniqueId"))?,
            init_rank: function!("ncclCommInitRank").map_err(|_| lacks("ncclCommInitRank"))?,
            split: function!("ncclCommSplit").ok(),
            group_start: function!("ncclGroupStart").map_err(|_| lacks("ncclGroupStart"))?,
            group_end: function!("ncclGroupEnd").map_err(|_| lacks("ncclGroupEnd"))?,
            send: function!("ncclSend").map_err(|_| lacks("ncclSend"))?,
            receive: function!("ncclRecv").map_err(|_| lacks("ncclRecv"))?,
            async_error: function!("ncclCommGetAsyncError").map_err(|_| lacks("ncclCommGetAsyncError"))?,
            abort: function!("ncclCommAbort").map_err(|_| lacks("ncclCommAbort"))?,
            destroy: function!("ncclCommDestroy").map_err(|_| lacks("ncclCommDestroy"))?,
            error_string: function!("ncclGetErrorString").map_err(|_| lacks("ncclGetErrorString"))?,
            last_error: function!("ncclGetLastError").ok(),
        };
        std::mem::forget(library); // its threads may outlive the last call
        let mut version = 0;
        // SAFETY: a live variable.
        let code = unsafe { (functions.version)(&mut version) };
        let nccl = Nccl { functions, file, version: version as u32 };
        nccl.check(code, "ncclGetVersion")?;
        Ok(nccl)
    }

    /// E.g. 2.32.3.
    pub fn version(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10000, v / 100 % 100, v % 100)
    }

    fn check(&self, code: c_int, what: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |at: *const c_char| match at.is_null() {
            true => String::new(),
            // SAFETY: a string owned by the library.
            false => unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_string(),
        };
        // SAFETY: any code is allowed.
        let meaning = text(unsafe { (self.functions.error_string)(code) });
        // SAFETY: null means the last error of any communicator.
        let last = self.functions.last_error.map(|f| text(unsafe { f(std::ptr::null_mut()) }));
        let last = last.filter(|last| !last.is_empty()).map_or(String::new(), |last| format!(" ({last})"));
        Err(Error::device(format!("NCCL {} failed in {what}: {meaning}{last}", self.version()))
            .fix("NCCL_DEBUG=WARN says more; FERRL_NCCL=off exchanges through host memory"))
    }

    /// Creates the identifier of a new communicator. One rank calls this and sends the result to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: a live variable of the size that nccl.h gives.
        self.check(unsafe { (self.functions.unique_id)(&mut id) }, "ncclGetUniqueId")?;
        Ok(id)
    }
}

fn load(name: &str) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: NCCL has initialisers that may run at any time.
    unsafe { Library::new(name) }
}

/// Device memory to send to, or receive from, another rank.
#[derive(Clone, Copy)]
pub(super) struct CardBytes {
    pub peer: usize,
    pub at: u64,
    pub bytes: usize,
}

/// `ncclComm_t` of ranks with one GPU each.
pub(super) struct Communicator {
    nccl: &'static Nccl,
    /// Null once destroyed. Calls are serialised.
    handle: Mutex<NcclHandle>,
    failed: AtomicBool,
    pub rank: usize,
    pub size: usize,
}

// SAFETY: a communicator may be used from any thread, one at a time: the lock ensures that.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the communicator. The GPU that is current on this thread becomes this rank's.
    pub fn new(nccl: &'static Nccl, id: UniqueId, rank: usize, size: usize) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live variable; the identifier is passed by value, as nccl.h has it.
        let code = unsafe { (nccl.functions.init_rank)(&mut handle, size as c_int, id, rank as c_int) };
        nccl.check(code, "ncclCommInitRank").map_err(|e| {
            e.fix("a card for each rank, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1; NCCL_DEBUG=WARN says more")
        })?;
        Ok(Communicator { nccl, handle: Mutex::new(handle), failed: AtomicBool::new(false), rank, size })
    }

    /// The subgroup of ranks that pass the same `first`, in rank order. Collective, with the GPU current.
    pub fn split(&self, first: usize, rank: usize, size: usize) -> Result<Self> {
        let split = self.nccl.functions.split.ok_or_else(|| {
            Error::device(format!("NCCL {} cannot make groups of ranks", self.nccl.version()))
                .fix("NCCL 2.18 or later: pip install nvidia-nccl-cu13")
        })?;
        let (parent, mut handle) = (self.lock()?, std::ptr::null_mut());
        // SAFETY: the parent lives; no configuration means the parent's.
        let code =
            unsafe { split(*parent, first as c_int, self.rank as c_int, &mut handle, std::ptr::null_mut()) };
        self.nccl.check(code, "ncclCommSplit")?;
        let (handle, failed) = (Mutex::new(handle), AtomicBool::new(false));
        Ok(Communicator { nccl: self.nccl, handle, failed, rank, size })
    }

    fn lock(&self) -> Result<std::sync::MutexGuard<'_, NcclHandle>> {
        let handle = lock(&self.handle);
        if handle.is_null() || self.failed.load(Ordering::SeqCst) {
            return Err(Error::rank("the ranks' cards are no longer connected")
                .fix("see what was printed before; --resume goes on from the last checkpoint"));
        }
        Ok(handle)
    }

    /// Starts all sends and receives as one NCCL group, on a stream of the current GPU. Messages between two ranks match in
    /// order. The memory must not change until the stream is done.
    pub fn begin(&self, sends: &[CardBytes], receives: &[CardBytes], stream: CUstream) -> Result<()> {
        let handle = self.lock()?;
        let f = &self.nccl.functions;
        // SAFETY: callers pass memory of this GPU, of these lengths, that lives until the stream is done.
        let codes = unsafe {
            let mut codes = vec![(f.group_start)()];
            for &CardBytes { peer, at, bytes } in sends {
                codes.push((f.send)(at as *const c_void, bytes, BYTES, peer as c_int, *handle, stream));
            }
            for &CardBytes { peer, at, bytes } in receives {
                codes.push((f.receive)(at as *mut c_void, bytes, BYTES, peer as c_int, *handle, stream));
            }
            codes.push((f.group_end)());
            codes
        };
        let failed = codes.into_iter().find(|&code| code != 0).unwrap_or(0);
        drop(handle);
        self.nccl.check(failed, "ncclSend and ncclRecv").inspect_err(|_| self.abort())
    }

    /// Checks for an asynchronous error, such as a lost rank.
    pub fn check_async_error(&self) -> Result<()> {
        let mut code = 0;
        let handle = self.lock()?;
        // SAFETY: the communicator lives.
        let asked = unsafe { (self.nccl.functions.async_error)(*handle, &mut code) };
        drop(handle);
        let code = if asked == 0 { code } else { asked };
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        self.abort();
        let error = self.nccl.check(code, "an exchange").err();
        Err(error
            .map_or_else(|| Error::rank("another rank is gone"), |e| Error::rank(e.parts().0.clone()))
            .fix("see what the other ranks printed; --resume goes on from the last checkpoint"))
    }

    /// Aborts all operations of this rank; the other ranks are not asked.
    pub fn abort(&self) {
        self.failed.store(true, Ordering::SeqCst);
        self.end(self.nccl.functions.abort);
    }

    /// Last call, collective, when nothing is in flight.
    pub fn finish(&self) {
        if !self.failed.load(Ordering::SeqCst) {
            self.end(self.nccl.functions.destroy);
        }
    }

    fn end(&self, how: unsafe extern "C" fn(NcclHandle) -> c_int) {
        let mut handle = lock(&self.handle);
        let ended = std::mem::replace(&mut *handle, std::ptr::null_mut());
        if !ended.is_null() {
            // SAFETY: created by the library and not used any more: the lock is held and the handle is null from now on.
            unsafe { how(ended) };
        }
    }

    /// The transport, for users.
    pub fn describe(&self) -> String {
        format!("NCCL {}", self.nccl.version())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

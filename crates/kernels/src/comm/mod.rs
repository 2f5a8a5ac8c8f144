//! Ranks: the processes of a run, and communication between them.
//!
//! A [`Comm`] only moves bytes: all reductions are Ferrl's own, in a fixed order, so that results do not depend on the number
//! of ranks. [`Ranks`] is what the rest of Ferrl uses: a group of ranks in step, or a single process. A rank that fails sends
//! its error in its next exchange, so that all ranks return it and none waits forever.

mod connect;
mod device;
mod launcher;
mod line;
#[cfg(unix)]
mod machine;
#[cfg(unix)]
mod mpi;
mod nccl;
mod parcel;
mod pool;
#[cfg(unix)]
mod siblings;
mod threads;
#[cfg(unix)]
mod watch;

pub(crate) use launcher::card_of;
pub use launcher::{Launched, Launcher};
#[cfg(unix)]
pub use mpi::{Found, find as find_mpi};
pub use nccl::{FoundNccl, find as find_nccl};
pub use parcel::{Block, Inbox, Outbox, ParcelContents, ParcelPiece, PendingParcels, Route};
pub use pool::{message_buffer, recycle};
pub use threads::{device_threads, threads};

use crate::{Class, Error, Result, cores, lock};
use device::Devices;
use line::{Completed, Job, Line};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// A message from another rank.
pub struct Arrived {
    /// Whether it is an error.
    pub failed: bool,
    pub bytes: Vec<u8>,
}

/// Message transport between the ranks of a group.
pub trait Comm: Send + Sync {
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// Local size and local rank on this machine.
    fn local(&self) -> (usize, usize) {
        (self.size(), self.rank())
    }
    /// This rank's part of the cores of its machine.
    fn threads(&self) -> usize {
        (cores() / self.local().0).max(1)
    }
    /// All-to-all: sends part `r` to rank `r`, returns what rank `r` sent here at index `r`. Collective.
    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>>;
    /// The subgroup of `members`, which include this rank, with separate messages. Collective over the members, which number it
    /// consistently.
    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm>;
    /// The transport, for users.
    fn describe(&self) -> String;
    /// Ends all ranks because of an error that this rank can no longer send to the others, which wait on their devices. No-op
    /// if the launcher ends the others once this rank has ended.
    fn abort(&self, _error: &Error) {}
    /// Whether the ranks are threads of one process: they share its GPUs and must not wait for each other on them.
    fn is_one_process(&self) -> bool {
        false
    }
    /// The ranks of NCCL, if that is the only transport.
    #[doc(hidden)]
    fn nccl(&self) -> Option<&nccl::NcclWorld> {
        None
    }
    /// Last call, after every rank has finished.
    fn finish(&self) {}
}

/// The ranks of a run, or a subgroup.
#[derive(Clone, Default)]
pub struct Ranks(Option<Arc<Group>>);

struct Group {
    comm: Arc<dyn Comm>,
    /// Exchanges in flight.
    line: Mutex<Line>,
    /// Rank of its first member in the whole run.
    first: usize,
    /// Whether an exchange brought an error, so that every rank knows.
    failed: AtomicBool,
    /// Communication cost of this rank over all groups.
    cost: Arc<Cost>,
    /// Its teams, by size.
    teams: Mutex<HashMap<usize, Ranks>>,
    /// Device-to-device transfers; unset until [`Ranks::connect`].
    devices: OnceLock<Devices>,
}

#[derive(Default)]
struct Cost {
    /// Nanoseconds that this rank waited for exchanges (including for slower ranks).
    waited: AtomicU64,
    /// Bytes sent.
    sent: AtomicU64,
    exchanges: AtomicU64,
}

impl Ranks {
    /// A single process.
    pub const ALONE: &Ranks = &Ranks(None);

    pub fn alone() -> Self {
        Ranks(None)
    }

    /// A group over a transport.
    pub fn of(comm: impl Comm + 'static) -> Self {
        Ranks::group(Box::new(comm), 0, Arc::default())
    }

    fn group(comm: Box<dyn Comm>, first: usize, cost: Arc<Cost>) -> Self {
        let (failed, teams, line) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let devices = OnceLock::new();
        Ranks(Some(Arc::new(Group { comm: comm.into(), line, first, failed, cost, teams, devices })))
    }

    /// The team of `size` consecutive ranks that includes this one; `size` must divide the number of ranks. Collective. For
    /// device-to-device transfers its members must call [`Ranks::connect`].
    ///
    /// Within [`Ranks::in_step`] of a team, a rank must not wait for ranks outside the team: so a member's error reaches the
    /// others wherever they are.
    pub fn team(&self, size: usize) -> Ranks {
        let Some(group) = self.0.as_ref().filter(|_| size > 1) else { return Ranks::alone() };
        assert!(self.size().is_multiple_of(size), "teams of equal size");
        let mut teams = lock(&group.teams);
        let new = || {
            let first = self.rank() / size * size;
            let members: Vec<usize> = (first..first + size).collect();
            let team = Ranks::group(group.comm.subgroup(&members), first, group.cost.clone());
            if let (Some(team), Some(mover)) = (&team.0, group.mover().and_then(|mover| mover.team(&members)))
            {
                let _ = team.devices.set(Devices { mover: Some(mover), why_not: None }); // a new group
            }
            team
        };
        teams.entry(size).or_insert_with(new).clone()
    }

    /// Runs work in which the ranks of a team communicate only among themselves. It ends on all of them together: an error on
    /// one is returned by all.
    pub fn in_step<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.together(|| {
            let done = work()?;
            self.all_gather(&[]).map(|_| done)
        })
    }

    /// The ranks started by `mpirun`, `srun`, `ferrl launch` or `torchrun`, or a single process.
    pub fn open() -> Result<Self> {
        let Some(launched) = Launched::from_env()? else { return Ok(Ranks::alone()) };
        crate::heap::return_large_blocks();
        if launched.launcher == Launcher::Torchrun {
            return Ok(Ranks::of(nccl::open(&launched)?));
        }
        #[cfg(unix)]
        return Ok(Ranks::of(mpi::open(&launched)?));
        #[cfg(not(unix))]
        Err(Error::usage("several ranks need a system with MPI").fix("Linux or macOS"))
    }

    /// This process's rank; rank 0 writes the files of the run.
    pub fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, |g| g.comm.rank())
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |g| g.comm.size())
    }

    /// Local size and local rank on this machine.
    pub fn local(&self) -> (usize, usize) {
        self.0.as_ref().map_or((1, 0), |g| g.comm.local())
    }

    /// This rank's part of the cores of its machine.
    pub fn threads(&self) -> usize {
        self.0.as_ref().map_or_else(cores, |g| g.comm.threads())
    }

    pub fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// The transport, for users.
    pub fn describe(&self) -> String {
        let bytes = self.0.as_ref().map_or("one process".into(), |g| g.comm.describe());
        match self.cards() {
            Some(Ok(mover)) => format!("{bytes}; numbers go from card to card by {mover}"),
            Some(Err(why)) => format!("{bytes}; numbers go through host memory ({why})"),
            None => bytes,
        }
    }

    /// This rank's share of `count` consecutive items; shares differ by one at most.
    pub fn share(&self, count: usize) -> Range<usize> {
        part(count, self.rank(), self.size())
    }

    /// Whether the last exchange brought an error, so that every rank knows.
    pub fn has_failed(&self) -> bool {
        self.0.as_ref().is_some_and(|g| g.failed.load(Ordering::SeqCst))
    }

    /// All-gather of bytes, in rank order.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_to_all(&vec![own; self.size()])
    }

    /// All-to-all: sends part `r` to rank `r`, returns what rank `r` sent here at index `r`.
    pub fn all_to_all(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        assert_eq!(parts.len(), self.size(), "a part for every rank");
        let Some(group) = &self.0 else { return Ok(vec![parts[0].to_vec()]) };
        group.count_sent(parts.iter().map(|part| part.len()));
        let completed = group.waiting(|line| match line.is_idle() {
            true => line.exchange(&*group.comm, parts, false),
            false => {
                line.begin(&group.comm, Job::each(parts.iter().map(|part| part.to_vec()).collect()));
                line.last()
            }
        })?;
        group.read(completed)
    }

    /// Starts [`Ranks::all_to_all`] in the background; [`Ranks::wait`] returns the result. All ranks must start and wait in the
    /// same order, with at most two exchanges in flight.
    pub fn begin(&self, parts: Vec<Vec<u8>>) -> Pending {
        assert_eq!(parts.len(), self.size(), "a part for every rank");
        let Some(group) = &self.0 else { return Pending { number: 0, alone: Some(parts) } };
        group.count_sent(parts.iter().map(Vec::len));
        let number = group.line().begin(&group.comm, Job::each(parts));
        Pending { number, alone: None }
    }

    /// The same, sending `own` to some ranks and nothing to the others.
    pub fn begin_gather(&self, own: Vec<u8>, to: Vec<usize>) -> Pending {
        let Some(group) = &self.0 else { return Pending { number: 0, alone: Some(vec![own]) } };
        group.count_sent((0..self.size()).map(|rank| if to.contains(&rank) { own.len() } else { 0 }));
        let number = group.line().begin(&group.comm, Job::same(own, to));
        Pending { number, alone: None }
    }

    /// Waits for an exchange.
    pub fn wait(&self, pending: Pending) -> Result<Vec<Vec<u8>>> {
        let Some(group) = &self.0 else { return Ok(pending.alone.unwrap_or_default()) };
        let completed = group.waiting(|line| line.wait(pending.number))?;
        group.read(completed)
    }

    pub fn broadcast(&self, from_first: &[u8]) -> Result<Vec<u8>> {
        let own: &[u8] = if self.rank() == 0 { from_first } else { &[] };
        Ok(self.all_gather(own)?.swap_remove(0))
    }

    /// Runs work in which ranks communicate. An error of this rank is returned by all, through their next exchange.
    pub fn together<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(group) = &self.0 else { return work() };
        group.failed.store(false, Ordering::SeqCst);
        let done = work();
        if let Err(e) = &done {
            self.fail(e);
        }
        done
    }

    /// Sends an error to the other ranks, unless they know of one.
    pub fn fail(&self, error: &Error) {
        let Some(group) = &self.0 else { return };
        if !group.failed.swap(true, Ordering::SeqCst) {
            let text = pack_error(error).into_bytes();
            // A rank that has ended needs no message.
            let _ = group.waiting(|line| {
                line.begin(&group.comm, Job::error(text, (0..self.size()).collect()));
                line.settle(&group.comm, None)
            });
        }
    }

    /// Seconds that this rank waited for exchanges, and bytes it sent, since the last call.
    pub fn take_cost(&self) -> (f64, u64) {
        let Some(group) = &self.0 else { return (0.0, 0) };
        let nanos = group.cost.waited.swap(0, Ordering::Relaxed);
        (nanos as f64 * 1e-9, group.cost.sent.swap(0, Ordering::Relaxed))
    }

    /// Number of exchanges since the last call, including those of subgroups.
    pub fn take_exchanges(&self) -> u64 {
        self.0.as_ref().map_or(0, |group| group.cost.exchanges.swap(0, Ordering::Relaxed))
    }

    /// Seconds for which device-to-device transfers were in flight since the last call, overlapped or not, including waits for
    /// slower ranks. `None` if transfers go through host memory.
    pub fn take_card_seconds(&self) -> Option<f64> {
        let group = self.0.as_ref()?;
        let own = group.mover().map(|mover| mover.take_seconds());
        let teams = group.teams().iter().filter_map(Ranks::take_card_seconds).reduce(|a, b| a + b);
        own.into_iter().chain(teams).reduce(|a, b| a + b)
    }

    /// Last call, after every rank has finished.
    pub fn finish(&self) {
        if let Some(group) = &self.0 {
            group.teams().iter().for_each(Ranks::finish);
            if let Some(mover) = group.mover() {
                mover.finish();
            }
            group.comm.finish();
        }
    }
}

/// An exchange in flight.
#[must_use]
pub struct Pending {
    /// Its number within the group.
    number: u64,
    /// For a single process: its messages to itself.
    alone: Option<Vec<Vec<u8>>>,
}

impl Group {
    /// Its teams, in the same order on all ranks.
    fn teams(&self) -> Vec<Ranks> {
        let teams = lock(&self.teams);
        let mut sizes: Vec<&usize> = teams.keys().collect();
        sizes.sort_unstable();
        sizes.into_iter().map(|size| teams[size].clone()).collect()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        lock(&self.line)
    }

    /// Runs work that waits for other ranks, and counts the time.
    fn waiting<T>(&self, work: impl FnOnce(&mut Line) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let done = work(&mut self.line());
        self.cost.waited.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done.inspect_err(|_| self.failed.store(true, Ordering::SeqCst))
    }

    fn count_sent(&self, lengths: impl Iterator<Item = usize>) {
        let own = self.comm.rank();
        let sent: usize = lengths.enumerate().filter(|(rank, _)| *rank != own).map(|(_, len)| len).sum();
        self.cost.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.cost.exchanges.fetch_add(1, Ordering::Relaxed);
    }

    /// The messages of an exchange, or the error that one of them is.
    fn read(&self, (number, completed): Completed) -> Result<Vec<Vec<u8>>> {
        let arrived = completed.arrived;
        let Some(rank) = arrived.iter().position(|a| a.failed) else {
            self.failed.store(false, Ordering::SeqCst);
            return Ok(arrived.into_iter().map(|a| a.bytes).collect());
        };
        self.waiting(|line| line.settle(&self.comm, Some(number)))?;
        self.failed.store(true, Ordering::SeqCst);
        let error = unpack_error(&String::from_utf8_lossy(&arrived[rank].bytes));
        let named = || format!("rank {}", self.first + rank);
        Err(if rank == self.comm.rank() { error } else { error.at(named()) })
    }
}

/// Share `rank` of `count` consecutive items in `size` shares that differ by one at most.
pub fn part(count: usize, rank: usize, size: usize) -> Range<usize> {
    count * rank / size..count * (rank + 1) / size
}

/// Separates the fields of a serialised error.
const FIELD: char = '\u{1f}';

pub fn pack_error(error: &Error) -> String {
    let (what, place, fix) = error.parts();
    let class = CLASSES.iter().position(|c| *c == error.class).unwrap_or_default();
    let (class, none) = (class.to_string(), String::new());
    let fields = [&class, what, place.unwrap_or(&none), fix.unwrap_or(&none)].map(String::as_str);
    fields.join(&FIELD.to_string())
}

pub fn unpack_error(text: &str) -> Error {
    let fields: Vec<&str> = text.split(FIELD).collect();
    let [class, what, place, fix] = fields[..] else { return Error::rank("an error that cannot be read") };
    let class = class.parse().ok().and_then(|i: usize| CLASSES.get(i).copied()).unwrap_or(Class::Rank);
    let mut error = Error::new(class, what);
    if !place.is_empty() {
        error = error.at(place);
    }
    if !fix.is_empty() {
        error = error.fix(fix);
    }
    error
}

const CLASSES: [Class; 8] = [
    Class::Rank,
    Class::Usage,
    Class::Data,
    Class::Model,
    Class::Resource,
    Class::Numerics,
    Class::Device,
    Class::Interrupted,
];

#[cfg(test)]
mod tests;

//! Ranks: the processes of one run, and how bytes go from one to another.
//!
//! A [`Comm`] moves bytes and sums nothing: every sum is Ferrl's own, in a fixed order, so that results do not depend on the
//! number of ranks. [`Ranks`] is what the rest of Ferrl holds: a group of ranks in step with each other, or one process alone.
//! A rank that fails says so in its next exchange, so that all ranks return its error and none waits for it.

mod connect;
mod device;
mod launcher;
mod line;
#[cfg(unix)]
mod mpi;
mod nccl;
mod parcel;
mod room;
#[cfg(unix)]
mod siblings;
mod threads;
#[cfg(unix)]
mod watch;

pub use launcher::{Launched, Launcher};
#[cfg(unix)]
pub use mpi::{Found, find as find_mpi};
pub use nccl::{FoundNccl, find as find_nccl};
pub use parcel::{Block, ComingParcels, Inbox, Outbox, ParcelContents, ParcelPiece, Route};
pub use room::{give_back, room};
pub use threads::{device_threads, threads};

use crate::error::{Class, Error, Result};
use crate::lock;
use device::Devices;
use line::{Brought, Job, Line};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// What a rank got from another.
pub struct Arrived {
    /// Whether these bytes are an error.
    pub failed: bool,
    /// What was sent.
    pub bytes: Vec<u8>,
}

/// Moves bytes between the ranks of a group.
pub trait Comm: Send + Sync {
    /// This process's number, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// Ranks on this machine, and this one's number among them.
    fn local(&self) -> (usize, usize) {
        (self.size(), self.rank())
    }
    /// Part `r` goes to rank `r`; what rank `r` sent here comes back at `r`. All ranks call it together.
    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>>;
    /// The group of these ranks alone, of which this is one. Its messages never mix with those of other groups. All members
    /// call it; what the group has in common is found by its members.
    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm>;
    /// What moves the bytes, for people.
    fn describe(&self) -> String;
    /// Ends all ranks because of an error of this one, of which it cannot tell the others any more: they wait on their cards. Nothing
    /// where whoever started the ranks ends the others once this one has ended.
    fn abort(&self, _error: &Error) {}
    /// Whether the ranks are threads of one process: they share its cards and are not to wait for each other on them.
    fn is_one_process(&self) -> bool {
        false
    }
    /// Where NCCL alone moves them: its ranks.
    #[doc(hidden)]
    fn nccl(&self) -> Option<&nccl::NcclWorld> {
        None
    }
    /// The last call: every rank has finished.
    fn finish(&self) {}
}

/// The ranks of a run.
#[derive(Clone, Default)]
pub struct Ranks(Option<Arc<Group>>);

struct Group {
    comm: Arc<dyn Comm>,
    /// Exchanges that have begun.
    line: Mutex<Line>,
    /// Number of the first of them among the ranks of the run.
    first: usize,
    /// Whether an exchange brought an error: everyone knows it then.
    failed: AtomicBool,
    /// Of this rank, in all groups.
    cost: Arc<Cost>,
    /// Groups of these ranks, by their size.
    teams: Mutex<HashMap<usize, Ranks>>,
    /// How numbers go from device to device; unset until [`Ranks::connect`].
    devices: OnceLock<Devices>,
}

#[derive(Default)]
struct Cost {
    /// Nanoseconds in which this rank waited for exchanges, for slower ranks included.
    waited: AtomicU64,
    /// Bytes sent to other ranks.
    sent: AtomicU64,
    /// Exchanges, whatever was sent.
    exchanges: AtomicU64,
}

impl Ranks {
    /// One process without others.
    pub const ALONE: &Ranks = &Ranks(None);

    /// The same.
    pub fn alone() -> Self {
        Ranks(None)
    }

    /// Those that a group of processes or threads has.
    pub fn of(comm: impl Comm + 'static) -> Self {
        Ranks::group(Box::new(comm), 0, Arc::default())
    }

    fn group(comm: Box<dyn Comm>, first: usize, cost: Arc<Cost>) -> Self {
        let (failed, teams, line) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let devices = OnceLock::new();
        Ranks(Some(Arc::new(Group { comm: comm.into(), line, first, failed, cost, teams, devices })))
    }

    /// The group of `size` ranks in a row that this one belongs to; `size` divides the number of ranks. All ranks call it. Between
    /// cards its numbers travel once its members have called [`Ranks::connect`].
    ///
    /// While a rank is in [`Ranks::in_step`] of a team, nothing in it waits for ranks outside: an error of one member then
    /// reaches the others wherever they are.
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

    /// Does work in which the ranks of a team exchange something, and nothing with others. It ends on all of them together: an
    /// error of one is the error of all.
    pub fn in_step<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.together(|| {
            let done = work()?;
            self.all_gather(&[]).map(|_| done)
        })
    }

    /// As this process was started: by `mpirun`, `srun`, `ferrl launch` or `torchrun`, or alone.
    pub fn open() -> Result<Self> {
        let Some(launched) = Launched::from_env()? else { return Ok(Ranks::alone()) };
        if launched.size == 1 {
            return Ok(Ranks::alone());
        }
        crate::heap::return_large_blocks();
        if launched.launcher == Launcher::Torchrun {
            return Ok(Ranks::of(nccl::open(&launched)?));
        }
        #[cfg(unix)]
        return Ok(Ranks::of(mpi::open(&launched)?));
        #[cfg(not(unix))]
        Err(Error::usage("several ranks need a system with MPI").fix("Linux or macOS"))
    }

    /// This process's number, from 0; rank 0 writes the files of the run.
    pub fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, |g| g.comm.rank())
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |g| g.comm.size())
    }

    /// Ranks on this machine, and this one's number among them.
    pub fn local(&self) -> (usize, usize) {
        self.0.as_ref().map_or((1, 0), |g| g.comm.local())
    }

    /// Whether there is one rank only.
    pub fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// What moves the bytes, for people.
    pub fn describe(&self) -> String {
        let bytes = self.0.as_ref().map_or("one process".into(), |g| g.comm.describe());
        match self.cards() {
            Some(Ok(mover)) => format!("{bytes}; numbers go from card to card by {mover}"),
            Some(Err(why)) => format!("{bytes}; numbers go through host memory ({why})"),
            None => bytes,
        }
    }

    /// The part of `count` things in a row that is this rank's; parts differ by one at most.
    pub fn share(&self, count: usize) -> Range<usize> {
        part(count, self.rank(), self.size())
    }

    /// Whether thing `i` of a list that goes round is this rank's.
    pub fn owns(&self, i: usize) -> bool {
        i % self.size() == self.rank()
    }

    /// Whether a round, one thing for each rank, ends with thing `i` of a list of `count` that goes round.
    pub fn ends_round(&self, i: usize, count: usize) -> bool {
        i + 1 == count || (i + 1).is_multiple_of(self.size())
    }

    /// Whether this rank has nothing in the round that thing `i` of such a list ends.
    pub fn sits_out(&self, i: usize) -> bool {
        self.rank() > i % self.size()
    }

    /// Whether the last exchange brought an error: every rank knows of it then.
    pub fn has_failed(&self) -> bool {
        self.0.as_ref().is_some_and(|g| g.failed.load(Ordering::SeqCst))
    }

    /// Every rank's bytes, in the order of ranks.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_to_all(&vec![own; self.size()])
    }

    /// Part `r` goes to rank `r`; what rank `r` sent here comes back at `r`.
    pub fn all_to_all(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        assert_eq!(parts.len(), self.size(), "a part for every rank");
        let Some(group) = &self.0 else { return Ok(vec![parts[0].to_vec()]) };
        group.count_sent(parts.iter().map(|part| part.len()));
        let brought = group.waiting(|line| match line.is_idle() {
            true => line.exchange(&*group.comm, parts, false),
            false => {
                line.begin(&group.comm, Job::each(parts.iter().map(|part| part.to_vec()).collect()));
                line.last()
            }
        })?;
        group.read(brought)
    }

    /// Begins [`Ranks::all_to_all`]; what it moves is a thread's business until [`Ranks::wait`]. All ranks begin and wait in the
    /// same order, and at most two exchanges are on their way at a time.
    pub fn begin(&self, parts: Vec<Vec<u8>>) -> Pending {
        assert_eq!(parts.len(), self.size(), "a part for every rank");
        let Some(group) = &self.0 else { return Pending { number: 0, alone: Some(parts) } };
        group.count_sent(parts.iter().map(Vec::len));
        let number = group.line().begin(&group.comm, Job::each(parts));
        Pending { number, alone: None }
    }

    /// The same where some ranks get the same bytes, and the others nothing.
    pub fn begin_gather(&self, own: Vec<u8>, to: Vec<usize>) -> Pending {
        let Some(group) = &self.0 else { return Pending { number: 0, alone: Some(vec![own]) } };
        group.count_sent((0..self.size()).map(|rank| if to.contains(&rank) { own.len() } else { 0 }));
        let number = group.line().begin(&group.comm, Job::same(own, to));
        Pending { number, alone: None }
    }

    /// What came of an exchange.
    pub fn wait(&self, pending: Pending) -> Result<Vec<Vec<u8>>> {
        let Some(group) = &self.0 else { return Ok(pending.alone.unwrap_or_default()) };
        let brought = group.waiting(|line| line.wait(pending.number))?;
        group.read(brought)
    }

    /// What rank 0 has, everywhere.
    pub fn broadcast(&self, from_first: &[u8]) -> Result<Vec<u8>> {
        let own: &[u8] = if self.rank() == 0 { from_first } else { &[] };
        Ok(self.all_gather(own)?.swap_remove(0))
    }

    /// Does work in which ranks exchange something. An error of this rank becomes the error of all, in their next exchange.
    pub fn together<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(group) = &self.0 else { return work() };
        group.failed.store(false, Ordering::SeqCst);
        let done = work();
        if let Err(e) = &done {
            self.fail(e);
        }
        done
    }

    /// Tells the others of an error that they do not know of yet.
    pub fn fail(&self, error: &Error) {
        let Some(group) = &self.0 else { return };
        if !group.failed.swap(true, Ordering::SeqCst) {
            let text = pack_error(error).into_bytes();
            // Whoever is gone needs no message.
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

    /// Exchanges since the last call, those of groups of these ranks included.
    pub fn take_exchanges(&self) -> u64 {
        self.0.as_ref().map_or(0, |group| group.cost.exchanges.swap(0, Ordering::Relaxed))
    }

    /// Seconds in which transfers from card to card were under way since the last call, whatever was computed meanwhile; slower
    /// ranks are waited for on the card. `None` where numbers go through host memory.
    pub fn take_card_seconds(&self) -> Option<f64> {
        let group = self.0.as_ref()?;
        let own = group.mover().map(|mover| mover.take_seconds());
        let teams = group.teams().iter().filter_map(Ranks::take_card_seconds).reduce(|a, b| a + b);
        own.into_iter().chain(teams).reduce(|a, b| a + b)
    }

    /// The last call: every rank has finished.
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

/// An exchange on its way.
#[must_use]
pub struct Pending {
    /// Of the group's exchanges.
    number: u64,
    /// What one process sends itself.
    alone: Option<Vec<Vec<u8>>>,
}

impl Group {
    /// Groups of these ranks, in the same order on all of them.
    fn teams(&self) -> Vec<Ranks> {
        let teams = lock(&self.teams);
        let mut sizes: Vec<&usize> = teams.keys().collect();
        sizes.sort_unstable();
        sizes.into_iter().map(|size| teams[size].clone()).collect()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        lock(&self.line)
    }

    /// Does something that waits for other ranks.
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

    /// The bytes of an exchange, or the error that one of them is.
    fn read(&self, (number, brought): Brought) -> Result<Vec<Vec<u8>>> {
        let arrived = brought.arrived;
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

/// Part `rank` of `count` things in a row, cut into `size` parts that differ by one at most.
pub fn part(count: usize, rank: usize, size: usize) -> Range<usize> {
    count * rank / size..count * (rank + 1) / size
}

/// What stands between the fields of an error that travels.
const FIELD: char = '\u{1f}';

/// An error as text, for another rank.
pub fn pack_error(error: &Error) -> String {
    let (what, place, fix) = error.parts();
    let class = CLASSES.iter().position(|c| *c == error.class).unwrap_or_default();
    let (class, none) = (class.to_string(), String::new());
    let fields = [&class, what, place.unwrap_or(&none), fix.unwrap_or(&none)].map(String::as_str);
    fields.join(&FIELD.to_string())
}

/// The error that a text stands for.
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

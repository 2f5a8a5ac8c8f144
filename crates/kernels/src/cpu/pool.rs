//! A thread pool with spinning workers.
//!
//! An operation of a decode step takes tens of microseconds, less than waking a sleeping thread. So workers spin for a while
//! before they sleep, and a job never waits for a worker that has not joined it: all awake threads take tasks from a shared
//! counter until none is left. Results do not depend on which thread runs which task.

use crate::{Error, Result, cores, lock};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{JoinHandle, Thread};

/// Spins before a worker sleeps: about a millisecond, longer than the gap between two operations of a decode step.
const SPINS: u32 = 50_000;
/// Maximum threads per core, and a number that is always allowed: waiting threads spin, so more threads than cores slow each
/// other down. (A job counts its workers in 16 bits.)
const TO_A_CORE: usize = 16;
const ALWAYS: usize = 64;

/// A fixed set of threads that run indexed tasks.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    wakers: Vec<Thread>,
    busy: Mutex<()>,
}

struct Shared {
    /// `job number << 17 | open << 16 | workers inside`
    state: AtomicU64,
    next_task: AtomicUsize,
    job: Mutex<PoolJob>,
    asleep: Vec<AtomicBool>,
    quit: AtomicBool,
    panicked: AtomicBool,
}

#[derive(Clone, Copy)]
struct PoolJob {
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

// SAFETY: the pointer is only dereferenced between joining and leaving an open job, and `ThreadPool::run` returns, ending the
// closure's lifetime, only after the job is closed and every worker has left.
unsafe impl Send for PoolJob {}

const OPEN: u64 = 1 << 16;
const JOB: u64 = 1 << 17;
const INSIDE: u64 = OPEN - 1;

impl ThreadPool {
    /// `threads` includes the caller, so 1 spawns none.
    pub fn new(threads: usize) -> Result<Self> {
        let cores = cores();
        let most = (TO_A_CORE * cores).clamp(ALWAYS, INSIDE as usize);
        if threads > most {
            return Err(Error::usage(format!("{threads} threads on a machine with {cores} cores"))
                .fix(format!("{cores} threads, or leave their number out; at most {most}")));
        }
        let n = threads.max(1) - 1;
        let nothing: &'static (dyn Fn(usize) + Sync) = &|_| {};
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next_task: AtomicUsize::new(0),
            job: Mutex::new(PoolJob { task: nothing, tasks: 0 }),
            asleep: (0..n).map(|_| AtomicBool::new(false)).collect(),
            quit: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        // Grows as threads start: if spawning fails, dropping this ends the others.
        let mut pool = ThreadPool { shared, workers: Vec::new(), wakers: Vec::new(), busy: Mutex::new(()) };
        for i in 0..n {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new().name(format!("ferrl-{}", i + 1));
            let worker = thread.spawn(move || shared.work(i)).map_err(|e| {
                Error::resource(format!("the system starts no more than {} threads: {e}", i + 1))
                    .fix(format!("{cores} threads, or a higher limit (ulimit -u)"))
            })?;
            pool.wakers.push(worker.thread().clone());
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(0)` to `task(tasks - 1)`, each once, and returns when all are done.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        let alone = tasks <= 1 || self.workers.is_empty();
        // A concurrent caller runs its tasks itself rather than waiting; the results are the same.
        let turn = if alone { None } else { self.busy.try_lock().or_else(unpoison).ok() };
        if turn.is_none() {
            return (0..tasks).for_each(task);
        }
        let shared = &*self.shared;
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime is erased; see `PoolJob`.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        *shared.job.lock().expect("no task panics while the job is set") = PoolJob { task, tasks };
        shared.next_task.store(0, Ordering::Relaxed);
        let number = (shared.state.load(Ordering::Relaxed) / JOB + 1) * JOB;
        shared.state.store(number | OPEN, Ordering::SeqCst);
        for (asleep, thread) in shared.asleep.iter().zip(&self.wakers) {
            if asleep.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let close = CloseOnDrop(shared);
        shared.take_tasks(task, tasks);
        drop(close);
        assert!(!shared.panicked.load(Ordering::Acquire), "a task panicked on another thread");
    }

    /// Splits `0..n` into pieces of at most `grain` and runs them.
    pub fn ranges(&self, n: usize, grain: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
        let grain = grain.max(1);
        self.run(n.div_ceil(grain), |i| f(i * grain..((i + 1) * grain).min(n)));
    }
}

fn unpoison<T>(e: TryLockError<T>) -> std::result::Result<T, ()> {
    match e {
        TryLockError::Poisoned(p) => Ok(p.into_inner()),
        TryLockError::WouldBlock => Err(()),
    }
}

/// Closes the job and waits for the workers inside, also if one of the caller's tasks panics.
struct CloseOnDrop<'a>(&'a Shared);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins.is_multiple_of(SPINS) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

impl Shared {
    fn take_tasks(&self, task: &(dyn Fn(usize) + Sync), tasks: usize) {
        loop {
            let i = self.next_task.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                return;
            }
            task(i);
        }
    }

    /// Enters the open job if it is newer than `seen`.
    fn join(&self, seen: u64) -> Option<u64> {
        let state = self.state.load(Ordering::SeqCst);
        if state & OPEN == 0 || state / JOB == seen {
            return None;
        }
        let entered = self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
        entered.ok().map(|_| state / JOB)
    }

    fn work(&self, me: usize) {
        let mut seen = 0;
        let mut spins = 0;
        while !self.quit.load(Ordering::Relaxed) {
            if let Some(number) = self.join(seen) {
                seen = number;
                spins = 0;
                let job = *lock(&self.job);
                let leave = LeaveOnDrop(self);
                // SAFETY: this worker is inside an open job, so `ThreadPool::run` has not returned.
                let task = unsafe { &*job.task };
                self.take_tasks(task, job.tasks);
                drop(leave);
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                self.asleep[me].store(true, Ordering::SeqCst);
                let state = self.state.load(Ordering::SeqCst);
                if (state & OPEN == 0 || state / JOB == seen) && !self.quit.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.asleep[me].store(false, Ordering::SeqCst);
                spins = 0;
            }
        }
    }
}

struct LeaveOnDrop<'a>(&'a Shared);

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked.store(true, Ordering::Release);
        }
        self.0.state.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker's panic has already failed the operation it was part of.
            let _ = worker.join();
        }
    }
}

/// A mutable slice shared by tasks, each of which accesses its own part.
pub struct Disjoint<'a, T> {
    at: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Disjoint<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Disjoint<'_, T> {}

// SAFETY: as for `&mut [T]`; callers of `part` promise that no other task uses an overlapping part.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Shares a whole slice.
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint { at: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }
    /// The slice from `from` on.
    pub fn shifted(self, from: usize) -> Self {
        assert!(from <= self.len, "{from} is beyond {} elements", self.len);
        // SAFETY: within the slice.
        Disjoint { at: unsafe { self.at.add(from) }, len: self.len - from, slice: PhantomData }
    }
    /// The part `from..from + len`, which must lie within the slice.
    ///
    /// # Safety
    /// No other task uses an overlapping part at the same time.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn part(&self, from: usize, len: usize) -> &'a mut [T] {
        // An assert also in release: an unchecked length must never become an out-of-bounds write.
        assert!(from <= self.len && len <= self.len - from, "a part beyond the end");
        // SAFETY: within the slice; the caller promises that no other task uses this part.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads).expect("threads");
            for tasks in [0, 1, 2, 3, 100] {
                for _ in 0..200 {
                    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(tasks, |i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    /// `threads = 10000` brought a machine with two cores to a halt; the largest number aborted.
    #[test]
    fn absurd_numbers_of_threads_are_refused() {
        for threads in [10_000_000, usize::MAX, 1 << 63] {
            let error = ThreadPool::new(threads).err().expect("refused").to_string();
            assert!(error.contains(&format!("{threads} threads on a machine with")), "{error}");
        }
        assert_eq!(ThreadPool::new(0).expect("the caller").threads(), 1);
    }

    #[test]
    #[should_panic(expected = "beyond the end")]
    fn a_part_beyond_the_end_is_never_handed_out() {
        let mut slice = [0u8; 8];
        // SAFETY: no other task.
        unsafe { Disjoint::new(&mut slice).shifted(4).part(1, 4) };
    }

    #[test]
    fn callers_may_overlap_and_nest() {
        let pool = ThreadPool::new(3).expect("threads");
        let sum = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..100 {
                        pool.run(7, |i| {
                            pool.run(2, |j| {
                                sum.fetch_add(i + j, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 400 * (2 * 21 + 7));
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = ThreadPool::new(2).expect("threads");
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let n = AtomicUsize::new(0);
            pool.run(64, |_| {
                n.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(n.load(Ordering::Relaxed), 64);
        }
    }
}

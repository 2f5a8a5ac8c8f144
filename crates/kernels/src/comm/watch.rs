//! Whether the other ranks are still alive, however long they compute.
//!
//! A thread of every rank sends a beat to the next rank twice a second and listens for those of the one before. A rank that is
//! frozen, or whose machine is gone, sends none: after [`SILENCE`] its neighbour ends all ranks. A rank that merely computes,
//! or waits for a reward, goes on beating. A rank that was killed is noticed by the launcher at once.
//!
//! Where the way to another machine is cut, ranks on both sides must end, and the launcher reaches one side alone: a rank that has
//! noticed a loss passes an alarm on to the next one, and ends by itself where MPI does not end it.

use super::mpi::{Mpi, Request, Tag};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between beats.
const BEAT: Duration = Duration::from_millis(500);
/// A rank that is silent for longer is lost.
pub(super) const SILENCE: Duration = Duration::from_secs(6);
/// Exit code of every rank when one is lost.
pub(super) const LOST: i32 = 7;
/// The last beat of a rank that ends as it should.
const GOODBYE: u8 = 1;
/// The last beat of a rank that has noticed a loss. It is static because it may be on its way until the process ends.
static ALARM: [u8; 1] = [2];
/// How long an alarm may take to the next rank.
const PASSING_ON: Duration = Duration::from_millis(200);
/// How long MPI may take to end a rank after that: where no launcher can be reached it does not return.
const ENDING: Duration = Duration::from_millis(1500);

unsafe extern "C" {
    /// Of the system's library: ends the process without its handlers.
    fn _exit(code: std::ffi::c_int) -> !;
}

/// The thread that watches.
pub(super) struct Watch {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Begins to watch; where no thread can be started, nobody does.
    pub fn begin(mpi: &Arc<Mpi>) -> Option<Watch> {
        let ending = Arc::new(AtomicBool::new(false));
        let (mpi, ends) = (mpi.clone(), ending.clone());
        let thread =
            std::thread::Builder::new().name("ranks".into()).spawn(move || beat(&mpi, &ends)).ok()?;
        Some(Watch { ending, thread })
    }

    /// Says goodbye and waits for the neighbour's.
    pub fn end(self) {
        self.ending.store(true, Ordering::SeqCst);
        let _ = self.thread.join();
    }
}

fn beat(mpi: &Mpi, ending: &AtomicBool) {
    let (next, before) = ((mpi.rank + 1) % mpi.size, (mpi.rank + mpi.size - 1) % mpi.size);
    if next == mpi.rank {
        return;
    }
    let (mut sent, mut heard) = ([0u8; 1], [0u8; 1]);
    let mut receiving = mpi.receive(&mut heard, before, Tag::Alive);
    let (mut sending, mut last_sent): (Option<Request>, _) = (None, Instant::now() - BEAT);
    let (mut last_heard, mut parted, mut said_goodbye) = (Instant::now(), false, false);
    let mut looked = Instant::now();
    loop {
        if sending.as_mut().is_none_or(|s| mpi.is_done(s)) {
            sending = None;
            let ends = ending.load(Ordering::SeqCst);
            if said_goodbye && parted {
                return;
            }
            if !said_goodbye && (ends || last_sent.elapsed() >= BEAT) {
                sent[0] = if ends { GOODBYE } else { 0 };
                said_goodbye = ends;
                sending = Some(mpi.send(&sent, next, Tag::Alive));
                last_sent = Instant::now();
            }
        }
        if !parted && mpi.is_done(&mut receiving) {
            last_heard = Instant::now();
            if heard == ALARM {
                return end_all(mpi, next);
            }
            parted = heard[0] == GOODBYE;
            if !parted {
                receiving = mpi.receive(&mut heard, before, Tag::Alive);
            }
        }
        // Whoever was frozen himself has heard nobody, and must not accuse others.
        if looked.elapsed() > SILENCE / 2 {
            last_heard = Instant::now();
        }
        looked = Instant::now();
        if !parted && last_heard.elapsed() > SILENCE {
            let _ = writeln!(
                std::io::stderr(),
                "error: rank {before} has not been heard of for {} s: all ranks end\n  fix: --resume goes on from the last \
                 checkpoint, on any number of ranks",
                SILENCE.as_secs()
            );
            return end_all(mpi, next);
        }
        let wait = if said_goodbye { Duration::from_millis(1) } else { Duration::from_millis(50) };
        std::thread::sleep(wait);
    }
}

/// Passes the alarm on and ends all ranks, or at least this one.
fn end_all(mpi: &Mpi, next: usize) {
    let (mut passing, since) = (mpi.send(&ALARM, next, Tag::Alive), Instant::now());
    while !mpi.is_done(&mut passing) && since.elapsed() < PASSING_ON {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(ENDING);
        end_process(LOST)
    });
    mpi.abort(LOST);
}

/// Ends this process at once.
pub(super) fn end_process(code: i32) -> ! {
    // SAFETY: ends the process; nothing runs after it. MPI's own handlers, which wait for other ranks or print addresses, do not.
    unsafe { _exit(code) }
}

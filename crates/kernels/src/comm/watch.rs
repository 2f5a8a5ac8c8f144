//! Heartbeats: detects lost ranks, however long ranks compute.
//!
//! A thread of every rank sends a heartbeat to the next rank twice a second and listens to the previous one. If a rank is
//! frozen, or its machine is lost, its neighbour ends all ranks after [`SILENCE`]. A rank that merely computes, or waits for a
//! reward, keeps sending. A rank that was killed is noticed by the launcher at once.
//!
//! If the network is partitioned, ranks on both sides must end, but the launcher reaches one side only: a rank that notices a
//! loss forwards an alarm to the next one, and exits by itself if MPI does not end it.

use super::mpi::{Mpi, Request, Tag};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Heartbeat interval.
const BEAT: Duration = Duration::from_millis(500);
/// A rank that is silent for longer is considered lost.
pub(super) const SILENCE: Duration = Duration::from_secs(6);
/// Exit code of every rank when one is lost.
pub(super) const LOST: i32 = 7;
/// Final heartbeat of a rank that ends normally.
const GOODBYE: u8 = 1;
/// Final heartbeat of a rank that has noticed a loss. Static, because the send may be pending until the process ends.
static ALARM: [u8; 1] = [2];
/// Time limit for forwarding an alarm.
const PASSING_ON: Duration = Duration::from_millis(200);
/// Time limit for MPI to end a rank after that: without a reachable launcher it does not return.
const ENDING: Duration = Duration::from_millis(1500);

unsafe extern "C" {
    /// libc: ends the process without exit handlers.
    fn _exit(code: std::ffi::c_int) -> !;
}

/// The heartbeat thread.
pub(super) struct Watch {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Starts the heartbeat; without a thread there is none.
    pub fn begin(mpi: &Arc<Mpi>) -> Option<Watch> {
        let ending = Arc::new(AtomicBool::new(false));
        let (mpi, ends) = (mpi.clone(), ending.clone());
        let thread =
            std::thread::Builder::new().name("ranks".into()).spawn(move || beat(&mpi, &ends)).ok()?;
        Some(Watch { ending, thread })
    }

    /// Sends the final heartbeat and waits for the neighbour's.
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
        // A rank that was frozen itself has heard nobody, and must not report others as lost.
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

/// Forwards the alarm and ends all ranks, or at least this one.
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

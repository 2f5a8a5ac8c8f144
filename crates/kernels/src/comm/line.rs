//! A group's queue of started exchanges; a thread completes them while this rank computes.
//!
//! Ranks start the same exchanges in the same order, so their n-th exchanges match. A rank that fails sends its error as its next
//! exchange, while others may have started later ones. So once ranks know the number of the first failed exchange, they all
//! continue with empty exchanges up to a number that none can have passed ([`Line::settle`]), and are in step again.
//!
//! Device-to-device transfers belong to an exchange whose messages announce their lengths. They start only if no rank sent an
//! error, so that all ranks start the same ones.

use super::device::Shipment;
use super::{Arrived, Comm, recycle};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Maximum exchanges in flight.
pub(super) const LOOKAHEAD: u64 = 3;

/// An exchange to complete.
pub(super) struct Job {
    parts: Parts,
    failed: bool,
    /// Device-to-device transfers to start once the messages have arrived.
    shipment: Option<Shipment>,
}

enum Parts {
    /// One message per rank.
    Each(Vec<Vec<u8>>),
    /// The same message to some ranks.
    Same(Vec<u8>, Vec<usize>),
}

impl Job {
    /// Sends part `r` to rank `r`.
    pub fn each(parts: Vec<Vec<u8>>) -> Self {
        Job { parts: Parts::Each(parts), failed: false, shipment: None }
    }

    /// Sends the same bytes to some ranks.
    pub fn same(bytes: Vec<u8>, to: Vec<usize>) -> Self {
        Job { parts: Parts::Same(bytes, to), failed: false, shipment: None }
    }

    /// Sends part `r`, which announces the device-to-device transfer, to rank `r`.
    pub fn announced(parts: Vec<Vec<u8>>, shipment: Shipment) -> Self {
        Job { shipment: Some(shipment), ..Job::each(parts) }
    }

    /// Sends an error to all ranks.
    pub fn error(text: Vec<u8>, to: Vec<usize>) -> Self {
        Job { failed: true, ..Job::same(text, to) }
    }

    /// Completes the exchange.
    fn run(self, comm: &dyn Comm) -> Result<Delivery> {
        let own = comm.rank();
        // What a rank sends to itself is moved, not copied.
        let part = |rank: usize| match &self.parts {
            Parts::Each(parts) if rank != own => parts[rank].as_slice(),
            Parts::Same(bytes, to) if rank != own && to.contains(&rank) => bytes,
            _ => &[],
        };
        let arrived = comm.exchange(&(0..comm.size()).map(part).collect::<Vec<_>>(), self.failed);
        let kept = match self.parts {
            Parts::Each(mut parts) => {
                let kept = std::mem::take(&mut parts[own]);
                recycle(parts);
                kept
            }
            Parts::Same(bytes, to) if to.contains(&own) => bytes,
            Parts::Same(bytes, _) => {
                recycle([bytes]);
                Vec::new()
            }
        };
        let mut arrived = arrived?;
        arrived[own].bytes = kept;
        let mut shipment = self.shipment.filter(|_| arrived.iter().all(|a| !a.failed));
        if let Some(shipment) = &mut shipment {
            // The other ranks have started transfers that this one has not, and wait for them on their devices.
            shipment.begin(&arrived, comm.rank()).inspect_err(|e| comm.abort(e)).map_err(lost)?;
        }
        Ok(Delivery { arrived, shipment })
    }
}

/// The same error in a form after which the ranks cannot get in step again.
fn lost(error: Error) -> Error {
    let (what, _, fix) = error.parts();
    let lost = Error::rank(what.clone());
    fix.map_or(lost.clone(), |fix| lost.fix(fix.clone()))
}

pub(super) struct Delivery {
    pub arrived: Vec<Arrived>,
    /// Its device-to-device transfers.
    pub shipment: Option<Shipment>,
}

impl Delivery {
    fn has_failed(&self) -> bool {
        self.arrived.iter().any(|a| a.failed)
    }
}

/// An exchange's number and result.
pub(super) type Completed = (u64, Delivery);

type Reply = Sender<Result<Delivery>>;

#[derive(Default)]
pub(super) struct Line {
    /// Number of exchanges started.
    begun: u64,
    /// Those not yet waited for, oldest first.
    coming: VecDeque<Receiver<Result<Delivery>>>,
    /// The thread's inbox; the thread ends when this is dropped.
    thread: Option<Sender<(Job, Reply)>>,
}

impl Line {
    pub fn is_idle(&self) -> bool {
        self.coming.is_empty()
    }

    /// A blocking exchange; none may be in flight.
    pub fn exchange(&mut self, comm: &dyn Comm, parts: &[&[u8]], failed: bool) -> Result<Completed> {
        self.begun += 1;
        Ok((self.begun, Delivery { arrived: comm.exchange(parts, failed)?, shipment: None }))
    }

    /// Starts an exchange; returns its number.
    pub fn begin(&mut self, comm: &Arc<dyn Comm>, job: Job) -> u64 {
        let thread = self.thread.get_or_insert_with(|| start(comm.clone()));
        let (reply, coming) = channel();
        // If the thread has ended, whoever waits gets an error.
        let _ = thread.send((job, reply));
        self.coming.push_back(coming);
        self.begun += 1;
        self.begun
    }

    /// Waits for exchange `number`, which must be the oldest in flight.
    pub fn wait(&mut self, number: u64) -> Result<Completed> {
        assert_eq!(
            number,
            self.begun + 1 - self.coming.len() as u64,
            "exchanges are waited for in their order"
        );
        let coming = self.coming.pop_front().expect("one is on its way");
        Ok((number, receive(&coming)?))
    }

    /// Waits for all in flight; returns the first that failed, or else the newest.
    pub fn last(&mut self) -> Result<Completed> {
        loop {
            let brought = self.wait(self.begun + 1 - self.coming.len() as u64)?;
            if self.coming.is_empty() || brought.1.has_failed() {
                return Ok(brought);
            }
        }
    }

    /// Brings the ranks in step after a failed exchange; `first` is the number of the first one, if known.
    pub fn settle(&mut self, comm: &Arc<dyn Comm>, mut first: Option<u64>) -> Result<()> {
        loop {
            while first.is_some_and(|first| self.begun < first + LOOKAHEAD) {
                self.begin(comm, Job::same(Vec::new(), Vec::new()));
            }
            if self.coming.is_empty() {
                return Ok(());
            }
            let (number, brought) = self.wait(self.begun + 1 - self.coming.len() as u64)?;
            if first.is_none() && brought.has_failed() {
                first = Some(number);
            }
        }
    }
}

fn start(comm: Arc<dyn Comm>) -> Sender<(Job, Reply)> {
    let (thread, inbox) = channel::<(Job, Reply)>();
    let work = move || {
        for (job, reply) in inbox {
            let _ = reply.send(job.run(&*comm)); // the receiver may be gone
        }
    };
    // If the thread cannot start, the inbox is dropped, and whoever waits gets an error.
    let _ = std::thread::Builder::new().name("exchange".into()).spawn(work);
    thread
}

fn receive(coming: &Receiver<Result<Delivery>>) -> Result<Delivery> {
    coming.recv().unwrap_or_else(|_| Err(Error::rank("the thread of exchanges has ended")))
}

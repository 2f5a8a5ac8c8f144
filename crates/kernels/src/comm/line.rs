//! Exchanges of a group that have begun, in their order. A thread takes them to their end while this rank computes.
//!
//! Ranks begin the same exchanges in the same order, so the n-th of one meets the n-th of the others. A rank that fails sends its
//! error as its next exchange, while others may have begun exchanges beyond it. So all ranks, once they know which exchange was the
//! first that failed, go on with empty ones up to a number that none can have passed ([`Line::settle`]), and are in step again.
//!
//! Transfers between devices belong to an exchange whose messages say how long they are. They begin only after no rank has sent an
//! error, so that all ranks begin the same ones.

use super::device::Shipment;
use super::{Arrived, Comm, give_back};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Exchanges that may be on their way at a time.
pub(super) const LOOKAHEAD: u64 = 3;

/// An exchange to be taken to its end.
pub(super) struct Job {
    parts: Parts,
    failed: bool,
    /// What goes from device to device once the messages are there.
    shipment: Option<Shipment>,
}

enum Parts {
    /// One for each rank.
    Each(Vec<Vec<u8>>),
    /// The same for some of them.
    Same(Vec<u8>, Vec<usize>),
}

impl Job {
    /// Part `r` goes to rank `r`.
    pub fn each(parts: Vec<Vec<u8>>) -> Self {
        Job { parts: Parts::Each(parts), failed: false, shipment: None }
    }

    /// These bytes go to some ranks.
    pub fn same(bytes: Vec<u8>, to: Vec<usize>) -> Self {
        Job { parts: Parts::Same(bytes, to), failed: false, shipment: None }
    }

    /// Part `r` goes to rank `r`, and announces what goes there from device to device.
    pub fn announced(parts: Vec<Vec<u8>>, shipment: Shipment) -> Self {
        Job { shipment: Some(shipment), ..Job::each(parts) }
    }

    /// An error, for all ranks.
    pub fn error(text: Vec<u8>, to: Vec<usize>) -> Self {
        Job { failed: true, ..Job::same(text, to) }
    }

    /// Takes it to its end.
    fn run(self, comm: &dyn Comm) -> Result<Delivery> {
        let part = |rank: usize| match &self.parts {
            Parts::Each(parts) => parts[rank].as_slice(),
            Parts::Same(bytes, to) if to.contains(&rank) => bytes,
            Parts::Same(..) => &[],
        };
        let arrived = comm.exchange(&(0..comm.size()).map(part).collect::<Vec<_>>(), self.failed);
        match self.parts {
            Parts::Each(parts) => give_back(parts),
            Parts::Same(bytes, _) => give_back([bytes]),
        }
        let arrived = arrived?;
        let mut shipment = self.shipment.filter(|_| arrived.iter().all(|a| !a.failed));
        if let Some(shipment) = &mut shipment {
            // The others have begun what this rank has not, and wait for it on their devices.
            shipment.begin(&arrived, comm.rank()).inspect_err(|e| comm.abort(e)).map_err(lost)?;
        }
        Ok(Delivery { arrived, shipment })
    }
}

/// As an error after which the ranks are not in step again.
fn lost(error: Error) -> Error {
    let (what, _, fix) = error.parts();
    let lost = Error::rank(what.clone());
    fix.map_or(lost.clone(), |fix| lost.fix(fix.clone()))
}

/// What an exchange brought.
pub(super) struct Delivery {
    pub arrived: Vec<Arrived>,
    /// What comes from device to device.
    pub shipment: Option<Shipment>,
}

impl Delivery {
    fn has_failed(&self) -> bool {
        self.arrived.iter().any(|a| a.failed)
    }
}

/// The same with the exchange's number.
pub(super) type Brought = (u64, Delivery);

type Reply = Sender<Result<Delivery>>;

#[derive(Default)]
pub(super) struct Line {
    /// Exchanges that were begun.
    begun: u64,
    /// Those nobody has waited for yet, the oldest first.
    coming: VecDeque<Receiver<Result<Delivery>>>,
    /// The thread's inbox; it ends when this is gone.
    thread: Option<Sender<(Job, Reply)>>,
}

impl Line {
    /// Whether nothing is on its way.
    pub fn is_idle(&self) -> bool {
        self.coming.is_empty()
    }

    /// One exchange, here and now, where nothing is on its way.
    pub fn exchange(&mut self, comm: &dyn Comm, parts: &[&[u8]], failed: bool) -> Result<Brought> {
        self.begun += 1;
        Ok((self.begun, Delivery { arrived: comm.exchange(parts, failed)?, shipment: None }))
    }

    /// Begins one; its number.
    pub fn begin(&mut self, comm: &Arc<dyn Comm>, job: Job) -> u64 {
        let thread = self.thread.get_or_insert_with(|| start(comm.clone()));
        let (reply, coming) = channel();
        // Where the thread is gone, whoever waits finds that out.
        let _ = thread.send((job, reply));
        self.coming.push_back(coming);
        self.begun += 1;
        self.begun
    }

    /// The end of exchange `number`, which is the oldest on its way.
    pub fn wait(&mut self, number: u64) -> Result<Brought> {
        assert_eq!(
            number,
            self.begun + 1 - self.coming.len() as u64,
            "exchanges are waited for in their order"
        );
        let coming = self.coming.pop_front().expect("one is on its way");
        Ok((number, receive(&coming)?))
    }

    /// The end of the newest, after those of all others: the first of them that failed, where one did.
    pub fn last(&mut self) -> Result<Brought> {
        loop {
            let brought = self.wait(self.begun + 1 - self.coming.len() as u64)?;
            if self.coming.is_empty() || brought.1.has_failed() {
                return Ok(brought);
            }
        }
    }

    /// Brings the ranks in step after the first exchange that failed; its number where that is known already.
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
            let _ = reply.send(job.run(&*comm)); // nobody may be left to listen
        }
    };
    // Without a thread the inbox is dropped, and whoever waits is told.
    let _ = std::thread::Builder::new().name("exchange".into()).spawn(work);
    thread
}

fn receive(coming: &Receiver<Result<Delivery>>) -> Result<Delivery> {
    coming.recv().unwrap_or_else(|_| Err(Error::rank("the thread of exchanges has ended")))
}

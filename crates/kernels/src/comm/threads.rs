//! Ranks as threads of one process, for tests.

use super::device::{Devices, Mover, Section, Transfer};
use super::{Arrived, Comm, Ranks};
use crate::backend::Backend;
use crate::{Error, Result, lock};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// `size` ranks, one per thread.
pub fn threads(size: usize) -> Vec<Ranks> {
    let hub = Arc::new(MessageHub::new(size));
    (0..size).map(|rank| Ranks::of(Thread { rank, size, hub: hub.clone() })).collect()
}

/// The same with simulated device-to-device transfers. Data arrives only when it is joined, so that tests detect premature reads.
pub fn device_threads(size: usize) -> Vec<Ranks> {
    let desk = Arc::new(DeviceHub::default());
    let all = threads(size);
    for (rank, ranks) in all.iter().enumerate() {
        let mover = Some(Arc::new(ThreadMover { rank, desk: desk.clone() }) as Arc<dyn Mover>);
        let group = ranks.0.as_ref().expect("a group");
        assert!(group.devices.set(Devices { mover, why_not: None }).is_ok(), "a new group");
    }
    all
}

/// Data in flight by (sender, receiver), oldest first.
type Posted = HashMap<(usize, usize), VecDeque<Vec<f32>>>;

#[derive(Default)]
struct DeviceHub {
    posted: Mutex<Posted>,
    news: Condvar,
    /// Desks of subgroups, by members.
    teams: Mutex<HashMap<Vec<usize>, Arc<DeviceHub>>>,
}

impl DeviceHub {
    fn open(&self) -> MutexGuard<'_, Posted> {
        lock(&self.posted)
    }
}

struct ThreadMover {
    rank: usize,
    desk: Arc<DeviceHub>,
}

impl Mover for ThreadMover {
    fn describe(&self) -> String {
        "from buffer to buffer".into()
    }

    fn prepare(&self, backend: &Arc<dyn Backend>) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(ThreadTransfer { rank: self.rank, desk: self.desk.clone(), backend: backend.clone() }))
    }

    fn team(&self, members: &[usize]) -> Option<Arc<dyn Mover>> {
        let desk = lock(&self.desk.teams).entry(members.to_vec()).or_default().clone();
        let rank = members.iter().position(|&m| m == self.rank)?;
        Some(Arc::new(ThreadMover { rank, desk }))
    }
}

struct ThreadTransfer {
    rank: usize,
    desk: Arc<DeviceHub>,
    backend: Arc<dyn Backend>,
}

impl Transfer for ThreadTransfer {
    fn begin(&mut self, out: &[Section], _into: &mut [Section]) -> Result<()> {
        for section in out {
            let others = section.ranges.iter().enumerate().filter(|(to, _)| *to != self.rank);
            for (to, range) in others.filter(|(_, range)| !range.is_empty()) {
                let mut numbers = vec![0.0; range.len()];
                self.backend.read(&section.buffer, range.start, &mut numbers)?;
                self.desk.open().entry((self.rank, to)).or_default().push_back(numbers);
            }
        }
        self.desk.news.notify_all();
        Ok(())
    }

    fn join(&mut self, into: &mut [Section]) -> Result<()> {
        for section in into {
            for (from, range) in section.ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
                let mut posted = self.desk.open();
                let numbers = loop {
                    match posted.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                        Some(numbers) => break numbers,
                        None => posted = self.desk.news.wait(posted).unwrap_or_else(|e| e.into_inner()),
                    }
                };
                drop(posted);
                assert_eq!(numbers.len(), range.len(), "as many as were announced");
                self.backend.write(&mut section.buffer, range.start, &numbers)?;
            }
        }
        Ok(())
    }
}

struct Thread {
    rank: usize,
    size: usize,
    hub: Arc<MessageHub>,
}

struct MessageHub {
    boxes: Mutex<Mailboxes>,
    news: Condvar,
    /// Offices of subgroups, by members.
    subgroups: Mutex<HashMap<Vec<usize>, Arc<MessageHub>>>,
}

struct Mailboxes {
    /// Messages from rank `a` to rank `b` at `a * size + b`, oldest first.
    mail: Vec<VecDeque<Arrived>>,
    gone: Vec<bool>,
}

impl MessageHub {
    fn new(size: usize) -> Self {
        let mail = (0..size * size).map(|_| VecDeque::new()).collect();
        let boxes = Mutex::new(Mailboxes { mail, gone: vec![false; size] });
        MessageHub { boxes, news: Condvar::new(), subgroups: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, Mailboxes> {
        lock(&self.boxes)
    }
}

impl Comm for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>> {
        let mut boxes = self.hub.open();
        for (to, part) in parts.iter().enumerate() {
            boxes.mail[self.rank * self.size + to].push_back(Arrived { failed, bytes: part.to_vec() });
        }
        self.hub.news.notify_all();
        let mut all = Vec::with_capacity(self.size);
        for from in 0..self.size {
            let arrived = loop {
                if let Some(arrived) = boxes.mail[from * self.size + self.rank].pop_front() {
                    break arrived;
                }
                if boxes.gone[from] {
                    return Err(Error::rank(format!("rank {from} has ended")));
                }
                boxes = self.hub.news.wait(boxes).unwrap_or_else(|e| e.into_inner());
            };
            all.push(arrived);
        }
        Ok(all)
    }

    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm> {
        let mut subgroups = lock(&self.hub.subgroups);
        let hub =
            subgroups.entry(members.to_vec()).or_insert_with(|| Arc::new(MessageHub::new(members.len())));
        let rank = members.iter().position(|&m| m == self.rank).expect("a member");
        Box::new(Thread { rank, size: members.len(), hub: hub.clone() })
    }

    fn describe(&self) -> String {
        format!("{} threads of one process", self.size)
    }

    fn is_one_process(&self) -> bool {
        true
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.hub.open().gone[self.rank] = true;
        self.hub.news.notify_all();
    }
}

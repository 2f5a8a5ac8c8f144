//! Ranks as threads of one process, for tests of everything above.

use super::{Arrived, Comm, Ranks};
use crate::error::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// `size` ranks of one process; each belongs to a thread of its own.
pub fn threads(size: usize) -> Vec<Ranks> {
    let office = Arc::new(Office::new(size));
    (0..size).map(|rank| Ranks::of(Thread { rank, size, office: office.clone() })).collect()
}

struct Thread {
    rank: usize,
    size: usize,
    office: Arc<Office>,
}

struct Office {
    boxes: Mutex<Boxes>,
    news: Condvar,
    /// Those of groups of its ranks, by their members.
    rooms: Mutex<HashMap<Vec<usize>, Arc<Office>>>,
}

struct Boxes {
    /// From rank `a` to rank `b` at `a * size + b`, the oldest first.
    mail: Vec<VecDeque<Arrived>>,
    gone: Vec<bool>,
}

impl Office {
    fn new(size: usize) -> Self {
        let mail = (0..size * size).map(|_| VecDeque::new()).collect();
        let boxes = Mutex::new(Boxes { mail, gone: vec![false; size] });
        Office { boxes, news: Condvar::new(), rooms: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, Boxes> {
        self.boxes.lock().unwrap_or_else(|e| e.into_inner())
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
        let mut boxes = self.office.open();
        for (to, part) in parts.iter().enumerate() {
            boxes.mail[self.rank * self.size + to].push_back(Arrived { failed, bytes: part.to_vec() });
        }
        self.office.news.notify_all();
        let mut all = Vec::with_capacity(self.size);
        for from in 0..self.size {
            let arrived = loop {
                if let Some(arrived) = boxes.mail[from * self.size + self.rank].pop_front() {
                    break arrived;
                }
                if boxes.gone[from] {
                    return Err(Error::rank(format!("rank {from} has ended")));
                }
                boxes = self.office.news.wait(boxes).unwrap_or_else(|e| e.into_inner());
            };
            all.push(arrived);
        }
        Ok(all)
    }

    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm> {
        let mut rooms = self.office.rooms.lock().unwrap_or_else(|e| e.into_inner());
        let office = rooms.entry(members.to_vec()).or_insert_with(|| Arc::new(Office::new(members.len())));
        let rank = members.iter().position(|&m| m == self.rank).expect("a member");
        Box::new(Thread { rank, size: members.len(), office: office.clone() })
    }

    fn describe(&self) -> String {
        format!("{} threads of one process", self.size)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.office.open().gone[self.rank] = true;
        self.office.news.notify_all();
    }
}

//! A pool of message buffers: a step sends and receives the same lengths again and again, and page faults of new memory cost
//! more than the copies. Unused buffers are limited to the bytes of the two largest exchanges, one sent and one received:
//! otherwise activations of many lengths would hold memory that gradients then allocate anew.

use crate::lock;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Smaller messages are not pooled.
const SMALLEST: usize = 64 << 10;
/// Maximum number of pooled buffers.
const KEPT: usize = 64;

/// Unused buffers.
struct Pool(Mutex<Unused>);

struct Unused {
    /// Least recently returned first.
    all: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Most bytes returned at once: the messages of one exchange.
    largest: usize,
}

static POOL: Pool = Pool::new();

/// A buffer with unspecified contents.
pub fn message_buffer(bytes: usize) -> Vec<u8> {
    POOL.take(bytes)
}

/// Returns message buffers to the pool.
pub fn recycle(read: impl IntoIterator<Item = Vec<u8>>) {
    POOL.put(read);
}

impl Pool {
    const fn new() -> Self {
        Pool(Mutex::new(Unused { all: VecDeque::new(), bytes: 0, largest: 0 }))
    }

    fn take(&self, bytes: usize) -> Vec<u8> {
        let found = if bytes < SMALLEST { None } else { lock(&self.0).take(bytes) };
        let mut found = found.unwrap_or_else(|| Vec::with_capacity(bytes));
        found.resize(bytes, 0);
        found
    }

    fn put(&self, read: impl IntoIterator<Item = Vec<u8>>) {
        let read: Vec<Vec<u8>> = read.into_iter().filter(|bytes| bytes.capacity() >= SMALLEST).collect();
        if !read.is_empty() {
            drop(lock(&self.0).put(read)); // after the lock: freeing memory is slow
        }
    }
}

impl Unused {
    fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let fits = |v: &(usize, &Vec<u8>)| v.1.capacity() >= bytes && v.1.capacity() <= 2 * bytes;
        let (nearest, _) = self.all.iter().enumerate().filter(fits).min_by_key(|(_, v)| v.capacity())?;
        let found = self.all.remove(nearest)?;
        self.bytes -= found.capacity();
        Some(found)
    }

    /// Adds buffers; returns those to be freed.
    fn put(&mut self, read: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let more: usize = read.iter().map(Vec::capacity).sum();
        (self.bytes, self.largest) = (self.bytes + more, self.largest.max(more));
        self.all.extend(read);
        let mut left = Vec::new();
        while self.bytes > 2 * self.largest || self.all.len() > KEPT {
            let Some(oldest) = self.all.pop_front() else { break };
            self.bytes -= oldest.capacity();
            left.push(oldest);
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_like_length_use_the_same_memory() {
        let pool = Pool::new();
        let first = pool.take(1 << 20);
        let at = first.as_ptr();
        pool.put([first]);
        let again = pool.take((1 << 20) - 5);
        assert_eq!((again.as_ptr(), again.len()), (at, (1 << 20) - 5));
        let other = pool.take(1 << 20);
        assert_ne!(other.as_ptr(), at);
    }

    #[test]
    fn messages_of_many_lengths_do_not_pile_up() {
        let pool = Pool::new();
        for i in 1..40 {
            let exchange: Vec<Vec<u8>> =
                (0..2).map(|_| pool.take(i * 97 * SMALLEST % (40 * SMALLEST))).collect();
            pool.put(exchange);
            let unused = lock(&pool.0);
            assert_eq!(unused.bytes, unused.all.iter().map(Vec::capacity).sum::<usize>());
            assert!(unused.bytes <= 2 * 2 * 40 * SMALLEST, "{} bytes", unused.bytes);
        }
    }
}

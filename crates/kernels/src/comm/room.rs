//! Memory of messages, used again: a step sends and receives the same lengths over and over, and pages that are new each time
//! cost more than the bytes.

use crate::lock;
use std::sync::Mutex;

/// Messages of fewer bytes are left to the system's allocator.
const SMALLEST: usize = 64 << 10;
/// Vectors that are kept.
const KEPT: usize = 64;

/// Vectors that no message uses.
struct Pool(Mutex<Vec<Vec<u8>>>);

static POOL: Pool = Pool(Mutex::new(Vec::new()));

/// This many bytes with unspecified contents.
pub fn room(bytes: usize) -> Vec<u8> {
    POOL.take(bytes)
}

/// Takes back messages that were read.
pub fn give_back(read: impl IntoIterator<Item = Vec<u8>>) {
    POOL.put(read);
}

impl Pool {
    fn take(&self, bytes: usize) -> Vec<u8> {
        let mut unused = lock(&self.0);
        let fits = |v: &(usize, &Vec<u8>)| v.1.capacity() >= bytes && v.1.capacity() <= 2 * bytes;
        let nearest =
            unused.iter().enumerate().filter(fits).min_by_key(|(_, v)| v.capacity()).map(|(i, _)| i);
        let found = if bytes < SMALLEST { None } else { nearest.map(|i| unused.swap_remove(i)) };
        drop(unused);
        let mut found = found.unwrap_or_else(|| Vec::with_capacity(bytes));
        found.resize(bytes, 0);
        found
    }

    fn put(&self, read: impl IntoIterator<Item = Vec<u8>>) {
        let mut unused = lock(&self.0);
        for bytes in read {
            if bytes.capacity() >= SMALLEST && unused.len() < KEPT {
                unused.push(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_like_length_use_the_same_memory() {
        let pool = Pool(Mutex::new(Vec::new()));
        let first = pool.take(1 << 20);
        let at = first.as_ptr();
        pool.put([first]);
        let again = pool.take((1 << 20) - 5);
        assert_eq!((again.as_ptr(), again.len()), (at, (1 << 20) - 5));
        let other = pool.take(1 << 20);
        assert_ne!(other.as_ptr(), at);
    }
}

//! Memory of messages, used again: a step sends and receives the same lengths over and over, and pages that are new each time
//! cost more than the bytes.

use std::sync::Mutex;

/// Messages of fewer bytes are the system's business.
const SMALLEST: usize = 64 << 10;
/// Vectors that are kept.
const KEPT: usize = 64;

static UNUSED: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// So many bytes with unspecified contents.
pub fn room(bytes: usize) -> Vec<u8> {
    let mut unused = UNUSED.lock().unwrap_or_else(|e| e.into_inner());
    let fits = |v: &(usize, &Vec<u8>)| v.1.capacity() >= bytes && v.1.capacity() <= 2 * bytes;
    let nearest = unused.iter().enumerate().filter(fits).min_by_key(|(_, v)| v.capacity()).map(|(i, _)| i);
    let found = if bytes < SMALLEST { None } else { nearest.map(|i| unused.swap_remove(i)) };
    drop(unused);
    let mut found = found.unwrap_or_else(|| Vec::with_capacity(bytes));
    found.resize(bytes, 0);
    found
}

/// Takes back messages that were read.
pub fn give_back(read: impl IntoIterator<Item = Vec<u8>>) {
    let mut unused = UNUSED.lock().unwrap_or_else(|e| e.into_inner());
    for bytes in read {
        if bytes.capacity() >= SMALLEST && unused.len() < KEPT {
            unused.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_like_length_use_the_same_memory() {
        let first = room(1 << 20);
        let at = first.as_ptr();
        give_back([first]);
        let again = room((1 << 20) - 5);
        assert_eq!((again.as_ptr(), again.len()), (at, (1 << 20) - 5));
        let other = room(1 << 20);
        assert_ne!(other.as_ptr(), at);
    }
}

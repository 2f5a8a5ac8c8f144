//! The three pipes of a worker, each with a thread of its own, so that nothing blocks the caller.

use super::WorkerLog;
use ferrl_kernels::lock;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const TAIL_LINES: usize = 12;
const TAIL_BYTES: usize = 400;

/// Lines that may wait to be written.
const LINES: usize = 1024;

/// What came out of a worker.
pub(super) enum WorkerLine {
    /// A line without its end.
    Text(Vec<u8>),
    /// A line of more bytes than this; nothing is read after it.
    TooLong(usize),
}

/// Writes whole lines in the background; ends when the pipe breaks or the sender is gone.
pub(super) fn writer(mut pipe: impl Write + Send + 'static) -> SyncSender<Vec<u8>> {
    let (sender, receiver) = sync_channel::<Vec<u8>>(LINES);
    std::thread::spawn(move || {
        while let Ok(line) = receiver.recv() {
            if pipe.write_all(&line).and_then(|()| pipe.flush()).is_err() {
                return;
            }
        }
    });
    sender
}

/// Reads lines in the background and hands each to `take`, which says whether to go on; nothing at the end of the pipe.
pub(super) fn reader(
    pipe: impl Read + Send + 'static,
    max_line: usize,
    mut take: impl FnMut(Option<WorkerLine>) -> bool + Send + 'static,
) {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        loop {
            let mut line = Vec::new();
            let read = (&mut pipe).take(max_line as u64 + 1).read_until(b'\n', &mut line);
            let whole = line.pop_if(|byte| *byte == b'\n').is_some();
            let long = line.len() > max_line;
            // A last line without its end was cut short by the end of the process.
            if !matches!(read, Ok(1..)) || (!whole && !long) {
                take(None);
                return;
            }
            let item = if long { WorkerLine::TooLong(max_line) } else { WorkerLine::Text(line) };
            if !take(Some(item)) || long {
                return;
            }
        }
    });
}

/// The last lines of a pipe that is read to its end, whatever comes.
pub(super) struct Tail {
    shared: Arc<(Mutex<TailState>, Condvar)>,
}

#[derive(Default)]
struct TailState {
    lines: VecDeque<String>,
    ended: bool,
}

impl Tail {
    /// Reads the pipe in the background and tells `log` each line.
    pub(super) fn follow(mut pipe: impl Read + Send + 'static, label: &str, log: Option<WorkerLog>) -> Tail {
        let shared = Arc::new((Mutex::new(TailState::default()), Condvar::new()));
        let theirs = Arc::clone(&shared);
        let label = label.to_string();
        std::thread::spawn(move || {
            let (state, changed) = &*theirs;
            let keep = |bytes: &[u8]| {
                let line = String::from_utf8_lossy(bytes).trim_end().to_string();
                if line.is_empty() {
                    return;
                }
                if let Some(log) = &log {
                    log(&label, &line);
                }
                let mut state = lock(state);
                if state.lines.len() == TAIL_LINES {
                    state.lines.pop_front();
                }
                state.lines.push_back(line);
            };
            let mut line = Vec::new();
            let mut chunk = [0; 8192];
            while let Ok(n @ 1..) = pipe.read(&mut chunk) {
                for piece in chunk[..n].split_inclusive(|b| *b == b'\n') {
                    let room = TAIL_BYTES - line.len();
                    line.extend_from_slice(&piece[..piece.len().min(room)]);
                    if piece.ends_with(b"\n") {
                        keep(&line);
                        line.clear();
                    }
                }
            }
            keep(&line);
            lock(state).ended = true;
            changed.notify_all();
        });
        Tail { shared }
    }

    /// The last lines so far.
    pub(super) fn lines(&self) -> Vec<String> {
        lock(&self.shared.0).lines.iter().cloned().collect()
    }

    /// Waits until the pipe has ended, but no longer than this.
    pub(super) fn wait(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let (state, changed) = &*self.shared;
        let mut state = lock(state);
        while !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            (state, _) = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

//! Ahead-of-time compilation of kernels in background threads.
//!
//! Compiled one after another, the sources take a dozen seconds at the first start on a machine. So when one is requested that is
//! not in the cache folder, threads compile all others that are missing. (Sources with variants wait until their definitions
//! are known.) A source that no thread has started on is compiled by the caller.

use super::compile::{KernelSource, SOURCES, is_cached, machine_code};
use crate::{Error, Result, cores, lock};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Queue and results.
#[derive(Default)]
struct Board {
    waiting: Vec<&'static KernelSource>,
    /// By source name; `None` while a thread compiles it.
    begun: HashMap<&'static str, Option<Result<Vec<u8>>>>,
}

#[derive(Default)]
struct AheadShared {
    board: Mutex<Board>,
    changed: Condvar,
}

impl AheadShared {
    fn board(&self) -> MutexGuard<'_, Board> {
        lock(&self.board)
    }
}

/// The threads and their queue.
#[derive(Default)]
pub(super) struct Ahead {
    shared: Arc<AheadShared>,
    threads: Vec<std::thread::JoinHandle<()>>,
    started: bool,
}

impl Ahead {
    /// Starts compiling everything that is not cached and has no variants, except `not`.
    pub(super) fn begin(&mut self, architecture: &str, not: &str) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        let missing =
            |s: &&KernelSource| s.variants == [""] && s.name != not && !is_cached(s, "", architecture);
        let missing: Vec<&'static KernelSource> = SOURCES.iter().filter(missing).collect();
        let threads = missing.len().min(cores() - 1);
        self.shared.board().waiting = missing;
        for _ in 0..threads {
            let (shared, architecture) = (self.shared.clone(), architecture.to_string());
            let work = move || {
                let _here = LiveThread::new();
                while let Some(source) = next(&shared) {
                    let compiled = || machine_code(source, "", &architecture);
                    let code = std::panic::catch_unwind(compiled).unwrap_or_else(|_| {
                        Err(Error::device(format!("the thread that compiled {}.cu panicked", source.name)))
                    });
                    shared.board().begun.insert(source.name, Some(code));
                    shared.changed.notify_all();
                }
            };
            // Without threads, sources are compiled when they are needed.
            self.threads.extend(std::thread::Builder::new().name("compiler".into()).spawn(work));
        }
    }

    /// The machine code of a source if a thread has started on it (waits for it); `None`: the caller compiles it.
    pub(super) fn take(&mut self, name: &str) -> Option<Result<Vec<u8>>> {
        let mut board = self.shared.board();
        board.waiting.retain(|s| s.name != name);
        while let Some(None) = board.begun.get(name) {
            board = self.shared.changed.wait(board).unwrap_or_else(|e| e.into_inner());
        }
        board.begun.remove(name).flatten()
    }
}

/// Compiles variants of sources into the cache folder, in parallel on all cores: one alone takes half a second. Errors are left
/// to whoever loads the variant.
pub(super) fn compile_together(architecture: &str, variants: &[(&'static str, String)]) {
    let missing = variants.iter().filter_map(|(name, defines)| {
        let source = SOURCES.iter().find(|s| s.name == *name)?;
        (!is_cached(source, defines, architecture)).then_some((source, defines))
    });
    let missing: Vec<_> = missing.collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let _here = LiveThread::new();
        while let Some((source, defines)) = missing.get(next.fetch_add(1, Ordering::Relaxed))
            && !LEAVING.load(Ordering::Relaxed)
        {
            let _ = machine_code(source, defines, architecture);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..missing.len().min(cores()) {
            scope.spawn(work);
        }
    });
}

/// The next source to compile.
fn next(shared: &AheadShared) -> Option<&'static KernelSource> {
    let mut board = shared.board();
    let source = board.waiting.pop().filter(|_| !LEAVING.load(Ordering::Relaxed))?;
    board.begun.insert(source.name, None);
    Some(source)
}

impl Drop for Ahead {
    /// Empties the queue and waits for compilations in progress.
    fn drop(&mut self) {
        self.shared.board().waiting.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

static LEAVING: AtomicBool = AtomicBool::new(false);
static THREADS: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// Counts live threads of this module.
struct LiveThread;

impl LiveThread {
    fn new() -> Self {
        *lock(&THREADS) += 1;
        LiveThread
    }
}

impl Drop for LiveThread {
    fn drop(&mut self) {
        *lock(&THREADS) -= 1;
        ENDED.notify_all();
    }
}

/// Call before the program exits: unloading the compiler while a thread uses it would crash.
pub fn settle() {
    LEAVING.store(true, Ordering::Relaxed);
    let mut threads = lock(&THREADS);
    while *threads > 0 {
        threads = ENDED.wait(threads).unwrap_or_else(|e| e.into_inner());
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile::version;
    use super::*;

    /// Needs NVRTC, as the test below.
    #[test]
    fn variants_are_kept_once_they_were_compiled_together() {
        if let Err(e) = version() {
            return eprintln!("skipped: {e}");
        }
        let source = SOURCES.iter().find(|s| s.name == "stream").unwrap();
        let variants: Vec<_> = source.variants.iter().map(|v| (source.name, v.to_string())).collect();
        compile_together("sm_90a", &variants);
        compile_together("sm_90a", &[("stream", "RING=no number".into()), ("no such source", String::new())]);
        for (_, defines) in &variants {
            assert!(is_cached(source, defines, "sm_90a"), "{defines}");
        }
        assert!(!is_cached(source, "RING=no number", "sm_90a"));
    }

    /// Needs NVRTC; elsewhere it says so. Its cache is the user's, as for every program.
    #[test]
    fn background_compilation_gives_the_compilers_machine_code() {
        if let Err(e) = version() {
            return eprintln!("skipped: {e}");
        }
        let architecture = "sm_80";
        let mut ahead = Ahead::default();
        ahead.begin(architecture, "rows");
        assert!(ahead.take("rows").is_none(), "left to who asked for it");
        for source in SOURCES.iter().filter(|s| ["embed", "rotary", "optim"].contains(&s.name)) {
            let own = machine_code(source, "", architecture).unwrap();
            if let Some(code) = ahead.take(source.name) {
                assert!(code.unwrap() == own, "{}", source.name);
            }
            assert!(ahead.take(source.name).is_none(), "taken once");
        }
    }
}

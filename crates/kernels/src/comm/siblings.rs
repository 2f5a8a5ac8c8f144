//! Whether the ranks come together while MPI starts, and part while it ends. Nobody beats then, and MPI waits for ever.
//!
//! A thread looks at what the launcher has started on this machine: a process that is stopped ends all ranks as it does later
//! ([`super::watch`]). A rank that never calls MPI, on whichever machine, is noticed by the time alone.

use super::watch::{LOST, SILENCE, end_process};
use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between looks.
const LOOK: Duration = Duration::from_millis(100);
/// Seconds that MPI may take to bring the ranks together; thousands of them on slow disks may need more.
const LONGEST: u64 = 120;
/// Names another number of seconds.
const LONGEST_NAME: &str = "FERRL_START_SECONDS";

/// What MPI does while it waits for all ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MpiPhase {
    Starts,
    /// However long: rank 0 may write its report before.
    Ends,
}

/// Does work in which MPI waits for all ranks.
pub(super) fn watched<T>(phase: MpiPhase, work: impl FnOnce() -> T) -> T {
    let over = Arc::new(AtomicBool::new(false));
    let ends = over.clone();
    // Where no thread can be started, nobody looks.
    let _ = std::thread::Builder::new().name("siblings".into()).spawn(move || look(phase, &ends));
    let done = work();
    over.store(true, Ordering::SeqCst);
    done
}

fn look(phase: MpiPhase, over: &AtomicBool) {
    let longest = std::env::var(LONGEST_NAME).ok().and_then(|s| s.parse().ok()).unwrap_or(LONGEST);
    let (mut began, mut looked) = (Instant::now(), Instant::now());
    let mut stopped: HashMap<u32, Instant> = HashMap::new();
    while !over.load(Ordering::SeqCst) {
        std::thread::sleep(LOOK);
        // Whoever was stopped himself must not accuse others.
        if looked.elapsed() > SILENCE / 2 {
            began = Instant::now();
            stopped.clear();
        }
        looked = Instant::now();
        let now = stopped_children(std::os::unix::process::parent_id());
        stopped.retain(|process, _| now.contains(process));
        for process in now {
            stopped.entry(process).or_insert(looked);
        }
        let lost = stopped.iter().find(|(_, since)| since.elapsed() > SILENCE);
        let why = match lost {
            Some((process, _)) => {
                format!("process {process} of this run has been stopped for {} s", SILENCE.as_secs())
            }
            None if phase == MpiPhase::Starts && began.elapsed().as_secs() >= longest => {
                format!("not all ranks have called MPI within {longest} s")
            }
            None => continue,
        };
        if over.load(Ordering::SeqCst) {
            return;
        }
        let _ = writeln!(
            std::io::stderr(),
            "error: {why}: all ranks end\n  fix: the same ferrl command on every rank; see what the others printed; \
             {LONGEST_NAME}=600 where machines need longer to start"
        );
        end_process(LOST); // the launcher ends the others
    }
}

/// Processes that this one has started and that are stopped; none where the system does not say.
fn stopped_children(parent: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{parent}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let all: Vec<u32> = lists
        .flat_map(|list| list.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
        .collect();
    all.into_iter().filter(|process| is_stopped(*process)).collect()
}

fn is_stopped(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_stopped_process_is_told_from_one_that_sleeps() {
        if !std::path::Path::new("/proc/thread-self/children").exists() {
            eprintln!("SKIPPED: this kernel does not say whose children processes are");
            return;
        }
        let sleeps = || Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().expect("sleep");
        let (mut stopped, mut sleeping) = (sleeps(), sleeps());
        let stop = Command::new("kill").args(["-STOP", &stopped.id().to_string()]).status().expect("kill");
        assert!(stop.success());
        let began = Instant::now();
        while !is_stopped(stopped.id()) && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let found = stopped_children(std::process::id());
        assert!(found.contains(&stopped.id()) && !found.contains(&sleeping.id()), "{found:?}");
        for child in [&mut stopped, &mut sleeping] {
            child.kill().expect("its end");
            child.wait().expect("its end");
        }
    }
}

//! A run that is stopped in whatever way and resumed ends with the same bytes as one that was left alone.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[path = "resume/changes.rs"]
mod changes;
#[path = "resume/common.rs"]
mod common;
#[path = "resume/losses.rs"]
mod losses;
#[path = "resume/refusals.rs"]
mod refusals;

use common::{Folder, Left, RUNS, STAGES, names};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::time::{Duration, Instant};

/// Kills at moments that `next` chooses as shares of a whole run's time, until `kills` of them hit a living process.
fn kill_at_random(algorithm: &str, kills: usize) {
    let whole = Folder::of("whole", algorithm);
    let began = Instant::now();
    whole.succeed(2);
    let time = began.elapsed();
    let want = Left::by(&whole);
    assert_eq!(want.metrics.len(), 14, "every step once");
    assert_eq!(want.rollouts.len(), if algorithm == "grpo" { 14 } else { 0 });
    assert_eq!(want.events, 15, "every step once, and the version");
    let folder = Folder::of("killed", algorithm);
    let (mut hits, mut runs, mut state) = (0, 0, 0x9e37_79b9u32);
    while hits < kills || runs == 0 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let share = f64::from(state >> 8) / f64::from(1 << 24);
        let threads = 1 + (state >> 4) as usize % 3;
        let end = Instant::now() + time.mul_f64(share);
        if hits < kills && folder.kill_when(threads, || Instant::now() >= end) {
            hits += 1;
            continue;
        }
        folder.succeed(threads);
        Left::by(&folder).assert_equals(&want, &format!("{algorithm}, after {hits} kills"));
        runs += 1;
        fs::remove_dir_all(folder.run()).unwrap();
    }
    if folder.run().exists() {
        folder.succeed(1);
        Left::by(&folder).assert_equals(&want, &format!("{algorithm}, after {hits} kills"));
        runs += 1;
    }
    println!("{algorithm}: {hits} kills over {runs} runs");
}

#[test]
fn killed_at_any_moment_and_resumed_is_the_same_run() {
    for (algorithm, _) in RUNS {
        kill_at_random(algorithm, 4);
    }
}

/// As many as `FERRL_KILLS` says, 200 of each otherwise.
#[test]
#[ignore = "minutes: hundreds of killed processes"]
fn killed_hundreds_of_times_and_resumed_is_the_same_run() {
    let kills = std::env::var("FERRL_KILLS").map_or(200, |n| n.parse().unwrap());
    for (algorithm, _) in RUNS {
        kill_at_random(algorithm, kills);
    }
}

#[test]
fn killed_at_the_worst_moments_and_resumed_is_the_same_run() {
    let whole = Folder::new("stages-whole", STAGES);
    whole.succeed(2);
    let want = Left::by(&whole);
    assert_eq!(want.metrics.len(), 16, "every step once");
    let folder = Folder::new("stages-killed", STAGES);
    let run = folder.run();
    let holds = |place: &str, end: &str| names(&run.join(place)).iter().any(|n| n.ends_with(end));
    type When<'a> = Box<dyn Fn() -> bool + 'a>;
    let moments: [(&str, When<'_>); 7] = [
        ("while the folder is made", Box::new(|| holds("..", ".new"))),
        ("while the first model is made", Box::new(|| holds("", "start_0.tmp"))),
        ("in the first step", Box::new(|| run.join("start_0/config.json").exists())),
        ("while a checkpoint is written", Box::new(|| holds("checkpoints", ".tmp"))),
        ("while an old checkpoint is removed", Box::new(|| holds("checkpoints", ".del"))),
        ("between stages", Box::new(|| holds("stages", "0"))),
        ("while rollouts are written", Box::new(|| holds("rollouts", ".tmp"))),
    ];
    let mut hit = Vec::new();
    for (i, (moment, when)) in moments.iter().enumerate() {
        // One after the other in the same run, each with another number of threads.
        if folder.kill_when(1 + i % 2, when) {
            hit.push(*moment);
        }
    }
    folder.succeed(1);
    Left::by(&folder).assert_equals(&want, "killed at the worst moments");
    // The others last some microseconds, which a busy machine may sleep through; tests of the library break a run at
    // every single operation.
    println!("hit: {hit:?}");
    assert!(hit.contains(&"in the first step") && hit.contains(&"between stages"), "only hit: {hit:?}");
}

#[test]
fn a_signal_saves_and_the_resumed_run_is_the_same() {
    // Enough steps that on a busy machine, too, the run has not ended when the test sees the second.
    let recipe = STAGES.replace("steps = 9", "steps = 90");
    let whole = Folder::new("signal-whole", &recipe);
    whole.succeed(2);
    let want = Left::by(&whole);
    let folder = Folder::new("signal", &recipe);
    let mut stopped = 0;
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut child = folder.start(2);
        let lines =
            || fs::read_to_string(folder.run().join("metrics.jsonl")).map_or(0, |t| t.lines().count());
        let (before, limit) = (lines(), Instant::now() + Duration::from_secs(300));
        while lines() < before + 2 && child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "no step was made");
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = kill(Pid::from_raw(child.id() as i32), signal); // it may have ended
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let code = out.status.code();
        assert!(code == Some(130) || code == Some(0), "{code:?}: {said}");
        stopped += usize::from(code == Some(130));
        let newest = names(&folder.run().join("checkpoints")).iter().filter_map(|n| step(n)).max();
        assert_eq!(newest, Some(lines() as u64), "the step it had come to was saved");
    }
    assert!(stopped > 0, "the run was over before a signal came");
    folder.succeed(1);
    Left::by(&folder).assert_equals(&want, "stopped by signals");
}

fn step(name: &str) -> Option<u64> {
    name.strip_prefix("step_")?.parse().ok()
}

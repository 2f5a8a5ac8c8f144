//! `ferrl train` under a real `mpirun`: the same bits on 1, 2 and 3 ranks, errors that end all ranks, ranks that are killed or
//! frozen. Where there is no MPI the tests say so and pass; `.ci/run` installs one.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const FERRL: &str = env!("CARGO_BIN_EXE_ferrl");

const RECIPE: &str = r#"
name = "run"
data = { train = ["task:countdown"], max_length = 48 }
rollout = { prompts = 4, samples = 4, max_new_tokens = 12, cache_mib = 4 }
reward = [{ verifier = "regex", truncated = "score", options = { pattern = "[0-4]", whole = false } }]
train = { steps = 4, micro_batch_tokens = 128 }
checkpoint = { every = 1 }
optim = { lr = 1e-3 }
model = { init = { family = "qwen2", hidden = 16, layers = 2, heads = 2 } }
device = "cpu"
threads = 1
"#;

/// Recipes of both kinds: completions that are given, and completions that are sampled.
const KINDS: [(&str, &[&str]); 2] = [
    ("sft", &["algo=sft", "train.batch=8", "model.dtype=bf16"]),
    ("ppo", &["algo=ppo", "algo.kl.coef=0", "algo.epochs=2", "algo.minibatches=2"]),
];

/// A folder with the recipe; none where there is no MPI.
fn folder() -> Option<tempfile::TempDir> {
    // Open MPI refuses to run as root, or more ranks than cores, without being told; MPICH does not know these flags.
    let told: &[&str] = &["--allow-run-as-root", "--oversubscribe"];
    let starts = |flags: &[&str]| {
        let mut mpirun = Command::new("mpirun");
        mpirun.args(flags).args(["-n", "2", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
        mpirun.status().is_ok_and(|status| status.success())
    };
    if !starts(told) && !starts(&[]) {
        eprintln!("SKIPPED: there is no mpirun that starts processes on this machine");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("run.toml"), RECIPE).unwrap();
    Some(folder)
}

/// `ferrl launch -n ranks -- train run.toml ...`, which runs `mpirun`; alone for one rank.
fn train(dir: &Path, ranks: usize, name: &str, more: &[&str]) -> Command {
    let mut command = Command::new(FERRL);
    if ranks > 1 {
        command.args(["launch", "-n", &ranks.to_string(), "--"]);
    }
    command.args(["train", "run.toml", "--name", name]).args(more).current_dir(dir);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn weights(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join("runs").join(name).join("stages/0/model.safetensors")).unwrap()
}

fn finished(out: Output) -> String {
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{}: {text}", out.status);
    text
}

/// Ranks that compute layers together in training and in rollouts, and ranks that share tokens.
#[test]
fn teams_leave_the_same_bytes() {
    let Some(folder) = folder() else { return };
    let dir = folder.path();
    let (kind, changes) = KINDS[1];
    finished(train(dir, 1, kind, changes).output().unwrap());
    for (n, layout) in
        [["parallel.tp_size=2", "rollout.tp_size=0"], ["parallel.sp_size=2", "rollout.tp_size=2"]]
            .into_iter()
            .enumerate()
    {
        let name = format!("{kind}-team-{n}");
        finished(train(dir, 2, &name, &[changes, &layout].concat()).output().unwrap());
        assert_eq!(weights(dir, &name), weights(dir, kind), "{layout:?}");
    }
    let refused = train(dir, 3, "refused", &["parallel.tp_size=3"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    let expected = "parallel.tp_size: 3 ranks cannot share 2 query and 2 key heads equally";
    assert!(said.contains(expected) && said.contains("one of 1, 2"), "{said}");
}

#[test]
fn one_two_and_three_ranks_leave_the_same_bytes() {
    let Some(folder) = folder() else { return };
    let dir = folder.path();
    for (kind, changes) in KINDS {
        finished(train(dir, 1, kind, changes).output().unwrap());
        for ranks in [2, 3] {
            let name = format!("{kind}-{ranks}");
            let said = finished(train(dir, ranks, &name, changes).output().unwrap());
            assert!(said.contains(&format!("{ranks} ranks under")), "{said}");
            assert_eq!(weights(dir, &name), weights(dir, kind), "{name}");
        }
        // Weights, moments and gradients split over the ranks (ZeRO-3).
        let split = [changes, &["parallel.ddp_size=1"]].concat();
        let name = format!("{kind}-split");
        finished(train(dir, 3, &name, &split).output().unwrap());
        assert_eq!(weights(dir, &name), weights(dir, kind), "{name}");
    }
}

#[test]
fn a_mistake_is_said_once_and_ends_every_rank() {
    let Some(folder) = folder() else { return };
    let out = train(folder.path(), 2, "typo", &["algo=sft", "train.bathc=3"]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
    assert!(said.contains("train.batch"), "{said}");
    // Bug: Open MPI's banners stood around it.
    assert!(!said.contains("Primary job") && !said.contains("mpirun detected"), "{said}");
    assert_eq!(out.status.code(), Some(2), "{said}");
}

/// Processes of a run that are ranks: they have the launcher's variables, and this run's name.
fn ranks_of(name: &str) -> Vec<i32> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path: PathBuf = entry.path();
        let Some(pid) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()) else {
            continue;
        };
        let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        let ours = words.first() == Some(&FERRL.as_bytes()) && words.get(1) == Some(&&b"train"[..]);
        if ours && words.contains(&name.as_bytes()) {
            all.push(pid);
        }
    }
    all.sort_unstable();
    all
}

/// The launcher may end some moments before the last rank that it kills.
fn no_rank_is_left(name: &str) {
    let began = Instant::now();
    while !ranks_of(name).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "ranks are left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal);
}

/// Waits until the run has saved something, so that there is something to lose.
fn begun(dir: &Path, name: &str, child: &mut Child) {
    let saved = dir.join("runs").join(name).join("checkpoints");
    let began = Instant::now();
    while !std::fs::read_dir(&saved).is_ok_and(|mut d| d.next().is_some()) {
        assert!(child.try_wait().unwrap().is_none(), "ended too early");
        assert!(began.elapsed() < Duration::from_secs(120), "nothing was saved");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// All ranks end soon after one is lost, and another number of them goes on to the same bytes.
#[cfg(target_os = "linux")]
fn loses_a_rank(how: nix::sys::signal::Signal, name: &str) {
    let Some(folder) = folder() else { return };
    let dir = folder.path();
    let changes: &[&str] = &["algo=sft", "train.batch=8", "train.steps=400", "checkpoint.every=20"];
    finished(train(dir, 1, "whole", changes).output().unwrap());
    let mut child = train(dir, 3, name, changes).spawn().unwrap();
    begun(dir, name, &mut child);
    let ranks = ranks_of(name);
    assert_eq!(ranks.len(), 3);
    signal(ranks[1], how);
    let began = Instant::now();
    let out = child.wait_with_output().unwrap();
    // Bug: killed ranks had the code of their signal.
    assert_eq!(out.status.code(), Some(7), "{}", String::from_utf8_lossy(&out.stderr));
    // How soon is what `bench/kills` measures; here a busy machine must not fail.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    no_rank_is_left(name);
    // With the weights split over them, too: how they lie may change.
    let again: Vec<&str> = changes.iter().copied().chain(["parallel.ddp_size=1", "--resume"]).collect();
    finished(train(dir, 2, name, &again).output().unwrap());
    assert_eq!(weights(dir, name), weights(dir, "whole"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_killed_ends_the_others_and_any_number_of_ranks_goes_on() {
    loses_a_rank(nix::sys::signal::Signal::SIGKILL, "killed");
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_frozen_ends_the_others_and_any_number_of_ranks_goes_on() {
    loses_a_rank(nix::sys::signal::Signal::SIGSTOP, "frozen");
}

/// Bug: `mpirun`, told to be quiet, could not start the ranks, and nobody said anything.
#[test]
fn a_launch_without_slots_says_where_to_look() {
    let Some(folder) = folder() else { return };
    let dir = folder.path();
    std::fs::write(dir.join("hosts"), "no-such-machine.invalid slots=2\n").unwrap();
    let mut launch = Command::new(FERRL);
    launch.args(["launch", "-n", "2", "--hostfile", "hosts", "--", "train", "run.toml", "algo=sft"]);
    let out = launch.current_dir(dir).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(6), "{said}");
    assert!(said.contains("mpirun -n 2 --hostfile hosts true"), "{said}");
}

/// Bug: a rank that was frozen before MPI had connected it left the others waiting for ever.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_frozen_while_mpi_starts_ends_the_others() {
    if !Path::new("/proc/thread-self/children").exists() {
        eprintln!("SKIPPED: this kernel does not say whose children processes are");
        return;
    }
    let Some(folder) = folder() else { return };
    let changes: &[&str] = &["algo=sft", "train.batch=8", "train.steps=100000"];
    let child = train(folder.path(), 2, "frozen-early", changes).spawn().unwrap();
    let began = Instant::now();
    while ranks_of("frozen-early").is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "no rank was started");
        std::thread::sleep(Duration::from_millis(1));
    }
    signal(ranks_of("frozen-early")[0], nix::sys::signal::Signal::SIGSTOP);
    let began = Instant::now();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(7), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    no_rank_is_left("frozen-early");
}

/// Bug: `kill -9` of `ferrl launch` left all ranks running, with nobody to stop them.
#[test]
#[cfg(target_os = "linux")]
fn ranks_whose_launch_is_killed_save_and_stop() {
    let Some(folder) = folder() else { return };
    let changes: &[&str] = &["algo=sft", "train.batch=8", "train.steps=1000000"];
    let mut child = train(folder.path(), 2, "orphans", changes).spawn().unwrap();
    begun(folder.path(), "orphans", &mut child);
    child.kill().unwrap(); // and not waited for: a launch that nobody takes notice of has ended, too
    no_rank_is_left("orphans");
    child.wait().unwrap();
}

/// Bug: a rank that was told to end, as a batch system does before it takes a machine away, said nothing to the others.
#[test]
#[cfg(target_os = "linux")]
fn an_interrupt_of_any_rank_saves_and_stops() {
    let Some(folder) = folder() else { return };
    let changes: &[&str] = &["algo=sft", "train.batch=8", "train.steps=1000000", "checkpoint.every=1000000"];
    let mut child = train(folder.path(), 3, "told", changes).spawn().unwrap();
    let metrics = folder.path().join("runs/told/metrics.jsonl");
    let began = Instant::now();
    while !std::fs::metadata(&metrics).is_ok_and(|m| m.len() > 0) {
        assert!(child.try_wait().unwrap().is_none(), "ended too early");
        assert!(began.elapsed() < Duration::from_secs(120), "no step was made");
        std::thread::sleep(Duration::from_millis(5));
    }
    let rank_of = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let names = ["OMPI_COMM_WORLD_RANK=2", "PMI_RANK=2", "PMIX_RANK=2"].map(str::as_bytes);
        environment.split(|b| *b == 0).any(|entry| names.contains(&entry))
    };
    signal(ranks_of("told").into_iter().find(rank_of).unwrap(), nix::sys::signal::Signal::SIGTERM);
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(said.contains("rank 2 was interrupted: finishing this step and saving"), "{said}");
    assert!(std::fs::read_dir(folder.path().join("runs/told/checkpoints")).unwrap().next().is_some());
}

/// Bug: what user code printed on other ranks than the first was lost.
#[test]
fn what_any_rank_prints_is_in_the_log() {
    let Some(folder) = folder() else { return };
    let dir = folder.path();
    let code = "def reward(completions, **_):\n    print('hello')\n    return [float(len(c)) for c in completions]\n";
    std::fs::write(dir.join("reward.py"), code).unwrap();
    let changes: &[&str] = &["algo=grpo", "algo.kl.coef=0", r#"reward=[{python="reward.py"}]"#];
    finished(train(dir, 2, "prints", changes).output().unwrap());
    let log = std::fs::read_to_string(dir.join("runs/prints/log.jsonl")).unwrap();
    let of = |rank_1: bool| {
        log.lines().filter(|l| l.contains("hello") && l.contains("of rank 1") == rank_1).count()
    };
    assert!(of(false) >= 4 && of(true) >= 4, "{log}");
}

/// Bug: mpirun of Open MPI 4.1 hung for good where a rank was killed while another was being started, and `ferrl launch` with it.
#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_hangs_after_its_ranks_are_gone_is_ended() {
    use std::os::unix::fs::PermissionsExt;
    if !Path::new("/proc/thread-self/children").exists() {
        eprintln!("SKIPPED: this kernel does not say whose children processes are");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mpirun = folder.path().join("mpirun");
    // Its only process ends, and it takes no notice.
    let script = "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit 0; fi\ntrue &\nexec sleep 1000\n";
    std::fs::write(&mpirun, script).unwrap();
    std::fs::set_permissions(&mpirun, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut launch = Command::new(FERRL);
    launch.args(["launch", "-n", "2", "--", "train", "run.toml"]).env("PATH", path);
    let status = launch.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(7), "a rank was lost");
}

//! A whole run whose disk fails at each operation in turn: told in words, nothing lost, and it goes on afterwards.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{FaultKind, FileFault, Files, RunFolder, files::FAULT_EXIT, latest};
use ferrl::runner::{self, RunWatch};
use ferrl::warnings::Warning;
use ferrl_engine::{Class, Result};
use ferrl_kernels::cpu::Cpu;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

const RECIPE: &str = r#"
name = "r"
model = { init = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, ffn = 16, max_positions = 64 } }
data = { train = ["task:countdown"], max_length = 64 }
rollout = { prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 1 }
train = { micro_batch_tokens = 256 }
checkpoint = { every = 1, keep = 1 }

[[stage]]
name = "imitate"
algo = "sft"
train = { steps = 1, batch = 2 }

[[stage]]
name = "reinforce"
algo = "grpo"
train = { steps = 2 }
"#;

fn temp() -> TempDir {
    // Thousands of fsyncs: where memory can be had as a disk, it is quicker.
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Remembers what it was warned of.
#[derive(Default)]
struct Silent(Vec<Warning>);

impl RunWatch for Silent {
    fn warn(&mut self, warning: &Warning) {
        self.0.push(warning.clone());
    }
}

fn resolved() -> Resolved {
    Recipe::parse(RECIPE, "r.toml", "r", &[]).unwrap()
}

/// Starts the run, or goes on with it.
fn go(root: &Path, files: &Files) -> Result<Vec<Warning>> {
    let resolved = resolved();
    let folder = match root.join("r").exists() {
        true => RunFolder::open_with(&root.join("r"), files.clone())?,
        false => RunFolder::create_with(root, "r", &resolved.toml, files.clone())?,
    };
    let mut watch = Silent::default();
    runner::run(&resolved, folder, Arc::new(Cpu::new(Some(1)).unwrap()), &mut watch)?;
    Ok(watch.0)
}

/// Weights, the steps in metrics.jsonl, and all rollouts.
type Left = (Vec<u8>, Vec<u64>, Vec<String>);

fn left(root: &Path) -> Left {
    let run = root.join("r");
    let steps = ferrl::run::MetricsLog::history(&run.join("metrics.jsonl")).unwrap();
    let rollouts = [2, 3].map(|s| fs::read_to_string(run.join(format!("rollouts/step_{s}.jsonl"))).unwrap());
    let weights = fs::read(run.join("stages/1/model.safetensors")).unwrap();
    (weights, steps.iter().map(|r| r.step).collect(), rollouts.to_vec())
}

/// The work of the processes that [`ended_anywhere`] starts.
#[test]
#[ignore = "run by another test"]
fn child() {
    let Ok(dir) = std::env::var("FERRL_TEST_DIR") else { return };
    let fault = FileFault::parse(&std::env::var("FERRL_TEST_FAULT").unwrap()).unwrap();
    go(Path::new(&dir), &Files::with_faults(Some(fault))).unwrap();
}

/// Breaks a run at operation `n`, and later goes on with it.
fn broken_at(n: u64, kind: FaultKind, want: &Left) {
    let temp = temp();
    let what = format!("{kind:?} at operation {n}");
    if kind == FaultKind::Exit {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--ignored"]).env("FERRL_TEST_DIR", temp.path());
        let status = command.env("FERRL_TEST_FAULT", format!("{n}:exit")).output().unwrap().status;
        assert_eq!(status.code(), Some(FAULT_EXIT), "{what}");
    } else {
        let fault = FileFault { at: n, kind, lasting: kind == FaultKind::Enospc };
        let checkpoints = temp.path().join("r/checkpoints");
        match go(temp.path(), &Files::with_faults(Some(fault))) {
            // Old checkpoints that could not be removed are a warning, and so is what is derived from other files.
            Ok(warnings) => {
                let known = |w: &Warning| ["log", "old-checkpoints", "tensorboard"].contains(&w.name);
                let short = kind == FaultKind::Short; // a write of half the bytes that says so is made whole
                assert!(short || warnings.iter().any(known), "{what} was not noticed: {warnings:?}");
            }
            Err(e) => {
                let text = e.to_string();
                let full = kind == FaultKind::Enospc;
                assert_eq!(e.class, if full { Class::Resource } else { Class::Data }, "{what}: {text}");
                assert!(text.contains(temp.path().to_str().unwrap()), "{what} names no place: {text}");
                assert!(!full || text.contains("free some disk space"), "{what} names no way out: {text}");
            }
        }
        if checkpoints.is_dir() {
            let found = latest(&checkpoints).unwrap();
            assert!(found.skipped.is_empty(), "{what} damaged a checkpoint: {:?}", found.skipped);
        }
    }
    go(temp.path(), &Files::default()).unwrap_or_else(|e| panic!("{what}: cannot go on: {e}"));
    assert!(left(temp.path()) == *want, "{what}: another run");
}

/// An undisturbed run and the number of its operations.
fn whole() -> (Left, u64) {
    let temp = temp();
    let files = Files::default();
    go(temp.path(), &files).unwrap();
    let want = left(temp.path());
    assert_eq!(want.1, [1, 2, 3]);
    assert!(files.operations() > 100, "{} operations", files.operations());
    (want, files.operations())
}

#[test]
fn a_disk_that_fails_anywhere_loses_nothing() {
    let (want, operations) = whole();
    for kind in [FaultKind::Enospc, FaultKind::Eio, FaultKind::Short] {
        for n in 1..=operations {
            broken_at(n, kind, &want);
        }
    }
}

#[test]
fn a_process_that_ends_anywhere_loses_nothing() {
    ended_anywhere(9);
}

#[test]
#[ignore = "a process for every operation of a run"]
fn a_process_that_ends_at_each_operation_loses_nothing() {
    ended_anywhere(1);
}

fn ended_anywhere(stride: usize) {
    let (want, operations) = whole();
    for n in (1..=operations).step_by(stride) {
        broken_at(n, FaultKind::Exit, &want);
    }
}

//! Ctrl-C while a reward function hangs, and while rows are written.

use crate::common::*;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Was: the run went on until the function's time-out, half a minute or more.
#[test]
#[cfg(unix)]
fn a_reward_that_hangs_does_not_hold_up_ctrl_c() {
    stops_and_saves("interrupt", &["-INT"]);
}

/// Bug: Slurm sends SIGTERM twice at the end of a job's time, and the second ended the run before it was saved.
#[test]
#[cfg(unix)]
fn a_batch_system_that_repeats_its_signal_does_not_hinder_the_save() {
    stops_and_saves("interrupt-twice", &["-TERM", "-TERM", "-INT"]);
}

/// A run whose reward hangs in the second step gets these signals, without a terminal.
#[cfg(unix)]
fn stops_and_saves(name: &str, signals: &[&str]) {
    let folder = Folder::new(name);
    let model = folder.model();
    let data = folder.write("rows.jsonl", "{\"prompt\": \"the\"}\n{\"prompt\": \"fox\"}\n");
    let python = folder.write(
        "hang.py",
        "import os, time\ndef reward(completions, trainer_state, **kw):\n    if trainer_state.global_step == 1 and 'HANGS' in os.environ:\n        \
         open(os.path.join(os.path.dirname(__file__), 'hangs'), 'w').close()\n        time.sleep(3600)\n    \
         return [float(len(set(c))) for c in completions]\n",
    );
    let recipe = folder.write(
        "hang.toml",
        format!(
            "algo = \"dr_grpo\"\nmodel.path = {model:?}\ndata = {{ train = [{data:?}], max_length = 64 }}\n\
             reward = {{ python = {python:?}, options = {{ timeout = 600 }} }}\ntrain = {{ steps = 3, micro_batch_tokens = 256 }}\n\
             rollout = {{ prompts = 2, samples = 4, max_new_tokens = 4, cache_mib = 4 }}\n"
        ),
    );
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(["train", &recipe, "--runs", &folder.path("runs")])
        .current_dir(&folder.0)
        .env("HANGS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !folder.0.join("hangs").exists() {
        assert!(start.elapsed() < Duration::from_secs(300), "the second step never came");
        std::thread::sleep(Duration::from_millis(20));
    }
    for signal in signals {
        Command::new("kill").args([*signal, &child.id().to_string()]).status().unwrap();
    }
    let asked = Instant::now();
    let status = child.wait().unwrap();
    // Two seconds are promised on a quiet machine; what hangs, hangs for an hour.
    assert!(asked.elapsed() < Duration::from_secs(40), "{:?}", asked.elapsed());
    assert_eq!(status.code(), Some(130));
    let run = folder.0.join("runs/hang");
    assert!(run.join("checkpoints/step_1").is_dir(), "the step before is saved");
    ok(&["train", &recipe, "--runs", &folder.path("runs"), "--resume"]);
    assert_eq!(folder.read("runs/hang/metrics.jsonl").lines().count(), 3);
}

/// Was: the process ended without a word, and the rows that were still buffered were lost.
#[test]
#[cfg(unix)]
fn the_rows_that_are_scored_before_ctrl_c_are_kept_and_named() {
    let folder = Folder::new("interrupt-score");
    let model = folder.model();
    let line = "{\"text\": \"the quick brown fox jumps over the lazy dogs\"}\n";
    let input = folder.write("rows.jsonl", line.repeat(200_000));
    let output = folder.path("scores.jsonl");
    let child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(["score", "--model", &model, "--input", &input, "--output", &output, "--threads", "1"])
        .args(["--batch-tokens", "64"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let part = folder.0.join("scores.jsonl.part");
    let start = Instant::now();
    while std::fs::metadata(&part).map_or(0, |m| m.len()) == 0 {
        assert!(start.elapsed() < Duration::from_secs(300), "no row came");
        std::thread::sleep(Duration::from_millis(5));
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{message}");
    assert!(message.contains("scores.jsonl.part"), "{message}");
    assert!(!rows(&std::fs::read_to_string(&part).unwrap()).is_empty());
}

/// `ferrl data steps` with many rows, as a child of `sh` after `first`; killed by `signal` once rows are there. None where it ended
/// before, on a busy machine.
#[cfg(unix)]
fn split_and_signal(folder: &Folder, first: &str, signal: &str) -> Option<std::process::Output> {
    let row = "{\"text\": \"One and one is two.\\nTwo and two is four.\\n#### 4\"}\n";
    let input = folder.write("solutions.jsonl", row.repeat(400_000));
    let part = folder.0.join("steps.jsonl.part");
    let _ = std::fs::remove_file(&part);
    let mut child = Command::new("sh")
        .args(["-c", &format!("{first} exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_ferrl")])
        .args([
            "data",
            "steps",
            "--kind",
            "gsm8k",
            "--input",
            &input,
            "--output",
            &folder.path("steps.jsonl"),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while std::fs::metadata(&part).map_or(0, |m| m.len()) == 0 && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let running = child.try_wait().unwrap().is_none();
    Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    running.then_some(out)
}

/// Was: commands that had not asked for it were ended by the signal without a word, in the middle of a row.
#[test]
#[cfg(unix)]
fn every_command_that_writes_rows_names_them_when_a_signal_stops_it() {
    let folder = Folder::new("interrupt-rows");
    folder.write("steps.jsonl", "{\"old\": true}\n");
    for signal in ["-INT", "-TERM", "-HUP"] {
        let stopped = || split_and_signal(&folder, "", signal).filter(|out| out.status.code() != Some(0));
        let out = (0..50).find_map(|_| stopped()).unwrap();
        let message = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(130), "{signal}: {message}");
        assert!(
            message.contains("the rows so far are in") && message.contains("steps.jsonl.part"),
            "{message}"
        );
        let part = folder.read("steps.jsonl.part");
        assert!(part.ends_with('\n') && !rows(&part).is_empty(), "rows are whole");
    }
}

/// Was: the rows so far replaced the earlier file.
#[test]
#[cfg(unix)]
fn a_search_that_is_stopped_leaves_earlier_paths_alone() {
    let folder = Folder::new("interrupt-search");
    let (model, paths) = (folder.model(), folder.write("paths.jsonl", "{\"old\": true}\n"));
    let stopped = || {
        let trees = folder.0.join("trees");
        let _ = std::fs::remove_dir_all(&trees);
        let mut child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(["search", &model, "--task", "countdown", "--prompts", "2000", "--strategy", "best_of_n"])
            .args(["--max-new-tokens", "12", "--threads", "1", "--paths", &paths, "--save"])
            .arg(&trees)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        while !trees.join("tree-0.json").exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        Some(child.wait_with_output().unwrap()).filter(|out| out.status.code() == Some(130))
    };
    // On a busy machine it may end between two looks.
    let out = (0..20).find_map(|_| stopped()).unwrap();
    let message = String::from_utf8_lossy(&out.stderr);
    assert!(message.contains("paths.jsonl.part"), "{message}");
    assert!(!rows(&folder.read("paths.jsonl.part")).is_empty());
    assert_eq!(folder.read("paths.jsonl"), "{\"old\": true}\n");
}

/// Was: the end of a terminal stopped a run that `nohup` had started.
#[test]
#[cfg(target_os = "linux")]
fn a_hangup_that_nohup_ignores_is_ignored() {
    let folder = Folder::new("interrupt-nohup");
    let out = (0..50).find_map(|_| split_and_signal(&folder, "trap '' HUP;", "-HUP")).unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(folder.read("steps.jsonl").lines().count(), 400_000);
}

/// Was: a folder with a hidden name stayed, as large as the model; for a moment it was the old model's.
#[test]
#[cfg(unix)]
fn a_model_that_is_half_made_is_removed_at_ctrl_c() {
    let folder = Folder::new("interrupt-init");
    init_and_interrupt(&folder, &[]);
    assert!(!folder.0.join("model").exists());
    ok(&["init", "--hidden", "64", "--vocab", "100", "--out", &folder.path("model")]);
    let before = std::fs::read(folder.0.join("model/model.safetensors")).unwrap();
    init_and_interrupt(&folder, &["--overwrite"]);
    assert!(std::fs::read(folder.0.join("model/model.safetensors")).unwrap() == before);
}

/// Interrupts `ferrl init` of a large model as soon as its hidden folder is there, which must be gone after it.
#[cfg(unix)]
fn init_and_interrupt(folder: &Folder, more: &[&str]) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(["init", "--hidden", "2048", "--layers", "64", "--vocab", "1000"])
        .args(["--out", &folder.path("model")])
        .args(more)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let hidden = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(".model.");
    let left = || std::fs::read_dir(&folder.0).unwrap().any(|e| hidden(&e.unwrap().file_name()));
    let start = Instant::now();
    while !left() {
        assert!(child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(300));
        std::thread::sleep(Duration::from_millis(1));
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!left());
}

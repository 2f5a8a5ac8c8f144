//! What a run's folder promises: nothing overwritten, one process at a time, every step once.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::experience::Metrics;
use ferrl::run::{
    FaultKind, FileFault, Files, Mark, MetricsLog, RolloutRecord, Rollouts, RunFolder, StepRecord, check_name,
};
use std::fs;

fn record(step: u64) -> StepRecord {
    let mut metrics = Metrics::default();
    metrics.add("reward", 1.0 / (step as f64 + 3.0));
    metrics.add("loss", -0.0);
    metrics.add("kl", f64::NAN);
    metrics.add("completions/mean_length", 5e-324 * step as f64);
    StepRecord::new(step, "rl \"1\"", 0.1 + 0.2, step as f64 * 1.7, &metrics)
}

fn same(a: &StepRecord, b: &StepRecord) -> bool {
    let bits = |r: &StepRecord| -> Vec<(String, u64)> {
        r.metrics.iter().map(|(n, v)| (n.clone(), v.to_bits())).collect()
    };
    (a.step, &a.stage, a.epoch, a.seconds) == (b.step, &b.stage, b.epoch, b.seconds) && bits(a) == bits(b)
}

#[test]
fn a_folder_is_made_once_and_opened_by_one() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path().join("runs/deep");
    let run = RunFolder::create(&root, "first", "algo = \"grpo\"\n").unwrap();
    run.log("info", "begun").unwrap();
    assert_eq!((run.name().as_str(), run.recipe().unwrap().as_str()), ("first", "algo = \"grpo\"\n"));

    let e = RunFolder::create(&root, "first", "other").unwrap_err().to_string();
    for part in ["runs/deep/first", "--resume", "--name first-2"] {
        assert!(e.contains(part), "{e}");
    }
    let e = RunFolder::open(run.path()).unwrap_err().to_string();
    assert!(e.contains(&format!("process {} is using", std::process::id())), "{e}");
    let path = run.path().to_path_buf();
    drop(run);
    assert_eq!(fs::read_to_string(path.join("recipe.toml")).unwrap(), "algo = \"grpo\"\n");
    // A process that died left its number behind; that locks nobody out.
    fs::write(path.join("lock"), "1\n").unwrap();
    let again = RunFolder::open(&path).unwrap();
    for place in [again.rollouts(), again.checkpoints(), again.tensorboard()] {
        assert!(place.is_dir());
    }
    assert!(RunFolder::open(&root.join("none")).unwrap_err().to_string().contains("no such run"));
    fs::create_dir(root.join("bare")).unwrap();
    assert!(RunFolder::open(&root.join("bare")).unwrap_err().to_string().contains("recipe.toml is missing"));
    fs::write(root.join("file"), "").unwrap();
    assert!(RunFolder::create(&root, "file", "").unwrap_err().to_string().contains("never overwritten"));
}

#[test]
fn run_names_with_path_components_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let long = "x".repeat(101);
    let bad = [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "/abs",
        "a\\b",
        "c:x",
        "a\0b",
        "-flag",
        ".hidden",
        "_x",
        "dot.",
        "new\nline",
        "sp ace",
        "nul",
        "CON",
        "com1.txt",
        "LPT9",
        "ünï",
        "a\u{202e}b",
        "~",
        "$HOME",
        "a;b",
        "*",
        long.as_str(),
    ];
    for name in bad {
        assert!(check_name(name).is_err(), "{name:?}");
        assert!(RunFolder::create(temp.path(), name, "").is_err(), "{name:?}");
    }
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "nothing was made");
    for name in ["grpo", "2024-05-01_x", "a..b", "Run.7", "com10", "console", &long[1..]] {
        check_name(name).unwrap();
    }
}

#[test]
fn metrics_come_back_and_are_cut_at_a_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("metrics.jsonl");
    let files = Files::default();
    let mut log = MetricsLog::open(&path, &files).unwrap();
    let mut marks = vec![0];
    for step in 1..=20 {
        log.append(&record(step)).unwrap();
        marks.push(log.byte_len());
    }
    let text = fs::read_to_string(&path).unwrap();
    let first = text.lines().next().unwrap();
    assert!(
        first.starts_with("{\"step\":1,\"stage\":\"rl \\\"1\\\"\",\"epoch\":0.30000000000000004,"),
        "{first}"
    );
    assert!(first.contains("\"kl\":\"NaN\",\"loss\":0.0,\"reward\":0.25"), "{first}");
    let history = MetricsLog::history(&path).unwrap();
    assert!(history.len() == 20 && history.iter().zip(1..).all(|(r, step)| same(r, &record(step))));

    // A resumed process: lines after the checkpoint go, a torn line goes, and each step is there once.
    fs::write(&path, &text[..text.len() - 9]).unwrap();
    assert_eq!(MetricsLog::history(&path).unwrap().len(), 19);
    let mut log = MetricsLog::open(&path, &files).unwrap();
    assert_eq!(log.byte_len(), marks[19]);
    log.truncate_to(marks[12]).unwrap();
    for step in 13..=20 {
        log.append(&record(step)).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    for wrong in [marks[3] + 1, marks[20] + 1, u64::MAX] {
        assert!(log.truncate_to(wrong).is_err());
    }
    let mut reserved = record(21);
    reserved.metrics.push(("epoch".into(), 1.0));
    assert!(log.append(&reserved).is_err());
}

#[test]
fn a_failed_line_is_not_there_and_can_be_written_again() {
    for kind in [FaultKind::Eio, FaultKind::Enospc, FaultKind::Short] {
        for at in 1..=5 {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("metrics.jsonl");
            let files = Files::with_faults(Some(FileFault { at, kind, lasting: false }));
            let mut log = loop {
                if let Ok(log) = MetricsLog::open(&path, &files) {
                    break log;
                }
            };
            for step in 1..=3 {
                while log.append(&record(step)).is_err() {}
            }
            let steps: Vec<u64> = MetricsLog::history(&path).unwrap().iter().map(|r| r.step).collect();
            assert_eq!(steps, [1, 2, 3], "{kind:?} at {at}");
        }
    }
}

#[test]
fn rollouts_are_cut_at_a_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let mut rollouts = Rollouts::open(temp.path(), &Files::default()).unwrap();
    assert_eq!(rollouts.mark(), Mark::default());
    let make = |step: u64| RolloutRecord {
        prompt: "2 + 2 = ?\n".into(),
        completion: format!("<think>\u{2028}{step}"),
        reward: Some(f64::INFINITY),
        components: vec![("format".into(), 0.1)],
        advantage: -0.5,
        tokens: 7,
        truncated: true,
        ..Default::default()
    };
    let mut marks = vec![Mark::default()];
    for step in 1..=4 {
        marks.push(rollouts.write(step, &vec![make(step); step as usize]).unwrap());
    }
    let rows = Rollouts::read(temp.path(), 3).unwrap();
    assert_eq!(
        (rows.len(), &rows[0]["reward"], &rows[0]["components"]["format"]),
        (3, &"Infinity".into(), &0.1.into())
    );
    let mut again = Rollouts::open(temp.path(), &Files::default()).unwrap();
    assert_eq!(again.mark(), marks[4]);
    again.truncate_to(marks[2]).unwrap();
    assert_eq!(again.mark(), marks[2]);
    assert!(!again.path(3).exists() && Rollouts::read(temp.path(), 2).unwrap().len() == 2);
    assert!(again.truncate_to(Mark { bytes: 1 << 40, ..marks[2] }).is_err());
}

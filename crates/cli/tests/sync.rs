//! `ferrl sync --to wandb` against the real `wandb` package, where Python has it. The format itself is tested in
//! `crates/ferrl/src/run/wandb.rs`.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::run::{Files, MetricsLog, RunFolder, StepRecord};
use std::io::Write;
use std::path::Path;
use std::process::Command;

#[test]
fn wandb_uploads_a_run() {
    let python = std::env::var("FERRL_PYTHON").unwrap_or_else(|_| "python3".into());
    // A folder of that name would be importable, too.
    let package = "from wandb.proto import wandb_internal_pb2";
    let there = Command::new(&python).args(["-c", package]).output().is_ok_and(|o| o.status.success());
    if !there {
        // Not through a macro, whose output a passing test hides.
        let words = format!(
            "SKIPPED wandb_uploads_a_run: {python} has no wandb (pip install wandb, or FERRL_PYTHON=FILE)\n"
        );
        let _ = std::io::stderr().write_all(words.as_bytes());
        return;
    }
    let root = std::env::temp_dir().join(format!("ferrl-sync-{}", std::process::id()));
    std::fs::create_dir_all(&root).unwrap();
    let recipe = "model.path = \"m\"\n\n[[stage]]\nalgo = \"sft\"\n\n[[stage]]\nalgo = \"grpo\"\n";
    let folder = RunFolder::create(&root, "mine", recipe).unwrap();
    folder.log("info", "started").unwrap();
    let mut log = MetricsLog::open(&folder.metrics(), &Files::default()).unwrap();
    for step in 1..=300u64 {
        // Long names make records that cross the blocks of the file.
        let metric = |i: u64| (format!("rewards/{}{i}/mean", "part".repeat(9)), (step * i) as f64 / 7.0);
        let metrics = (0..20).map(metric).collect();
        let (stage, seconds) = (if step < 100 { "sft" } else { "grpo" }.to_string(), step as f64);
        log.append(&StepRecord { step, stage, epoch: 0.0, seconds, metrics }).unwrap();
    }
    let run = folder.path().to_path_buf();
    drop(folder);
    let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .arg("sync")
        .arg(&run)
        .args(["--to", "wandb"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check_wandb_run.py");
    let out = Command::new(&python).arg(script).arg(&run).current_dir(&root).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    assert!(said.starts_with("300 steps"), "{said}");
    std::fs::remove_dir_all(&root).unwrap();
}

//! A run that is killed and resumed ends with the same bytes as one that was left alone.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const RECIPE: &str = r#"
name = "tiny"
model = { init = { hidden = 32, layers = 2, heads = 2, kv_heads = 1, ffn = 48, max_positions = 64 } }
data = { train = ["task:countdown"], task = { noise = 0.5 }, max_length = 64 }
rollout = { prompts = 8, samples = 4, max_new_tokens = 12 }
reward = [{ verifier = "countdown", options = { format = "plain" } }]
train = { micro_batch_tokens = 256 }
eval = { at_start = true, prompts = 8 }
checkpoint = { every = 2 }

[[stage]]
name = "imitate"
algo = "sft"
train = { steps = 9, batch = 16 }
optim = { lr = 1e-3, schedule = "cosine", ema = 0.9 }

[[stage]]
name = "reinforce"
algo = { name = "ppo", epochs = 2, minibatches = 2, kl = { coef = 0.05, target = 0.1 } }
train = { steps = 7 }
optim = { lr = 1e-3 }
"#;

fn ferrl(dir: &Path, resume: bool, threads: usize) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrl"));
    command.current_dir(dir).args(["train", "tiny.toml", &format!("threads={threads}")]);
    command.args(resume.then_some("--resume")).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("ferrl-resume-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("tiny.toml"), RECIPE).unwrap();
    dir
}

/// Final weights, and every line of metrics.jsonl without its times.
fn result(dir: &Path) -> (Vec<u8>, Vec<String>) {
    let run = dir.join("runs/tiny");
    let weights = std::fs::read(run.join("stages/1/model.safetensors")).unwrap();
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let timeless = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
        fn drop_times(v: &mut serde_json::Value) {
            if let Some(map) = v.as_object_mut() {
                map.retain(|k, _| !k.contains("tim") && !k.contains("seconds") && !k.contains("wall"));
                map.values_mut().for_each(drop_times);
            }
        }
        drop_times(&mut value);
        value.to_string()
    };
    (weights, metrics.lines().map(timeless).collect())
}

#[test]
fn killed_and_resumed_is_the_same_run() {
    let whole = folder("whole");
    let out = ferrl(&whole, false, 2).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let want = result(&whole);
    assert_eq!(want.1.len(), 16, "every step once");
    // Killed at different moments, and resumed with another number of threads.
    for (round, pauses) in [[60u64, 150, 90], [20, 300, 200], [110, 40, 500]].into_iter().enumerate() {
        let dir = folder(&format!("killed-{round}"));
        for (i, pause) in pauses.into_iter().enumerate() {
            let started = dir.join("runs/tiny/recipe.toml").exists();
            let mut child = ferrl(&dir, started, 1 + i % 2).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            let _ = child.kill(); // SIGKILL
            child.wait().unwrap();
        }
        let started = dir.join("runs/tiny/recipe.toml").exists();
        let out = ferrl(&dir, started, 1).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let got = result(&dir);
        assert_eq!(got.1, want.1, "round {round}");
        assert!(got.0 == want.0, "round {round}: the weights differ");
        std::fs::remove_dir_all(&dir).unwrap();
    }
    std::fs::remove_dir_all(&whole).unwrap();
}

#[test]
fn sigterm_saves_and_says_so() {
    let dir = folder("sigterm");
    std::fs::write(dir.join("tiny.toml"), RECIPE.replace("steps = 9", "steps = 100000")).unwrap();
    let child = ferrl(&dir, false, 2).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", String::from_utf8_lossy(&out.stderr));
    let saved = std::fs::read_dir(dir.join("runs/tiny/checkpoints")).unwrap().count();
    assert!(saved > 0);
    // A run folder is never overwritten, and a changed recipe is not resumed.
    let again = ferrl(&dir, false, 2).output().unwrap();
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("--resume"));
    std::fs::write(dir.join("tiny.toml"), RECIPE.replace("1e-3", "2e-3")).unwrap();
    let changed = ferrl(&dir, true, 2).output().unwrap();
    assert_eq!(changed.status.code(), Some(2));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_run_that_never_began_leaves_no_folder() {
    let dir = folder("false-start");
    let wrong = RECIPE.replace("model = { init", "model = { path = \"nowhere\" } #");
    std::fs::write(dir.join("tiny.toml"), wrong).unwrap();
    let out = ferrl(&dir, false, 1).output().unwrap();
    assert_eq!(out.status.code(), Some(4), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(!dir.join("runs/tiny").exists());
    std::fs::write(dir.join("tiny.toml"), RECIPE).unwrap();
    assert!(ferrl(&dir, false, 1).output().unwrap().status.success());
    std::fs::remove_dir_all(&dir).unwrap();
}

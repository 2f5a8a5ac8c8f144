//! A change that is not meant to change results changes no bit of them: ten short runs of every kind of algorithm, two
//! families, f32 and bf16, with 1 and 2 threads, at every instruction-set level that has recorded values. Their weights
//! and metrics are hashed and compared with `fixtures/same_bits.json`.
//!
//! Where results are meant to change, say why in the commit and record them anew:
//! `FERRL_WRITE_BITS=1 cargo test --release --test same_bits`.
//!
//! `FERRL_PROGRAM="qemu-aarch64-static -L /usr/aarch64-linux-gnu PROGRAM"` asks another program instead, at the portable
//! level and with one thread: a CPU of another kind must leave the same bytes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Levels whose values are recorded; every x86-64 machine of the last ten years has both.
const LEVELS: [&str; 2] = ["portable", "avx2"];

/// Names another program.
const OTHER: &str = "FERRL_PROGRAM";

const COMMON: &str = r#"
name = "run"
data = { train = ["task:countdown"], max_length = 48 }
rollout = { prompts = 4, samples = 4, max_new_tokens = 12, cache_mib = 4 }
reward = [{ verifier = "regex", truncated = "score", options = { pattern = "[0-4]", whole = false } }]
train = { steps = 3, batch = 8, micro_batch_tokens = 128 }
optim = { lr = 1e-3 }
device = "cpu"
"#;

/// Name, family, and what differs.
const RUNS: [(&str, &str, &[&str]); 10] = [
    ("sft", "llama", &["algo=sft"]),
    ("sft in bf16", "qwen2", &["algo=sft", "model.dtype=bf16", "optim.ema=0.9", "model.recompute=true"]),
    ("rm", "llama", &["algo=rm", "data.train=pairs.jsonl", "train.batch=4"]),
    ("dpo", "qwen2", &["algo=dpo", "data.train=pairs.jsonl", "train.batch=4"]),
    ("orpo in bf16", "llama", &["algo=orpo", "data.train=pairs.jsonl", "train.batch=4", "model.dtype=bf16"]),
    ("kto", "qwen2", &["algo=kto", "data.train=labels.jsonl", "train.batch=4"]),
    ("grpo", "qwen2", &["algo=grpo"]),
    ("dapo in bf16", "llama", &["algo=dapo", "model.dtype=bf16", "rollout.samples=8"]),
    ("ppo", "qwen2", &["algo=ppo", "algo.epochs=2", "algo.minibatches=2"]),
    ("trpo", "llama", &["algo=trpo"]),
];

/// The program that runs, or another that the environment names.
fn program() -> Command {
    let Ok(line) = std::env::var(OTHER) else { return Command::new(env!("CARGO_BIN_EXE_ferrl")) };
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/same_bits.json")
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> String {
    let mix = |h: u64, b: &u8| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// Lines of metrics without what depends on the clock.
fn timeless(text: &str) -> String {
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        value.as_object_mut().unwrap().retain(|k, _| !k.contains("tim") && k != "seconds");
        format!("{value}\n")
    };
    text.lines().map(line).collect()
}

/// Hashes of the weights and the metrics that a run leaves.
fn run(dir: &Path, level: &str, family: &str, changes: &[&str], threads: usize) -> Value {
    let _ = std::fs::remove_dir_all(dir.join("runs"));
    let out = program()
        .args(["train", "run.toml", &format!("model.path={family}"), &format!("threads={threads}")])
        .args(changes)
        .env("FERRL_SIMD", level)
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(out.status.success(), "{level} {changes:?}: {}", String::from_utf8_lossy(&out.stderr));
    let weights = std::fs::read(dir.join("runs/run/stages/0/model.safetensors")).unwrap();
    let metrics = std::fs::read_to_string(dir.join("runs/run/metrics.jsonl")).unwrap();
    json!({ "weights": hash(&weights), "metrics": hash(timeless(&metrics).as_bytes()) })
}

#[test]
#[cfg(target_arch = "x86_64")]
fn results_are_the_recorded_bits() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    write("run.toml", COMMON.into());
    let rows = |row: &dyn Fn(usize) -> Value| (0..16).map(|i| format!("{}\n", row(i))).collect::<String>();
    let prompt = |i: usize| format!("{} + {} = ", i, 15 - i);
    write(
        "pairs.jsonl",
        rows(&|i| json!({ "prompt": prompt(i), "chosen": "15", "rejected": format!("{i}") })),
    );
    write(
        "labels.jsonl",
        rows(
            &|i| json!({ "prompt": prompt(i), "completion": format!("{}", 10 + i % 7), "label": i % 3 == 0 }),
        ),
    );
    write("text.jsonl", "{\"text\": \"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=()[]<>.,:;?!\\n\"}\n".into());
    let make = |line: &str| {
        let out = program().args(line.split(' ')).current_dir(folder.path()).output().unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    };
    make("tokenizer train --input text.jsonl --kind char --special <eos> --out tok");
    for family in ["llama", "qwen2"] {
        make(&format!(
            "init --family {family} --hidden 32 --layers 2 --heads 4 --max-positions 64 --std 0.2 --tokenizer tok --out {family}"
        ));
    }
    let recorded: Value =
        serde_json::from_slice(&std::fs::read(fixture()).unwrap_or(b"{}".to_vec())).unwrap();
    let (mut now, mut wrong) = (Map::new(), Vec::new());
    let other = std::env::var_os(OTHER).is_some();
    for level in if other { &LEVELS[..1] } else { &LEVELS[..] } {
        let mut own = Map::new();
        for (name, family, changes) in RUNS {
            let one = run(folder.path(), level, family, changes, 1);
            if !other {
                let two = run(folder.path(), level, family, changes, 2);
                assert_eq!(one, two, "{name}, {level}: with 1 and with 2 threads");
            }
            if recorded[level][name] != one {
                wrong.push(format!("{name}, {level}: {one}, recorded {}", recorded[level][name]));
            }
            own.insert(name.into(), one);
        }
        now.insert((*level).into(), own.into());
    }
    if !other && std::env::var_os("FERRL_WRITE_BITS").is_some() {
        std::fs::write(fixture(), format!("{:#}\n", Value::Object(now))).unwrap();
        return;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

//! A folder of its own for each test, and the program run in it.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A folder that is removed with its test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrl-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), text).unwrap();
        self.path(name)
    }
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }

    /// A tokenizer and a model made for it.
    pub fn model(&self) -> String {
        let words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"];
        let line = |i: usize| format!("{{\"text\": \"{} {} {i}\"}}\n", words[i % 8], words[i * 3 % 7]);
        let text = self.write("text.jsonl", (0..200).map(line).collect::<String>());
        let (tokens, model) = (self.path("tok"), self.path("model"));
        ok(&["tokenizer", "train", "--input", &text, "--vocab", "320", "--out", &tokens]);
        let sizes = ["--hidden", "32", "--layers", "2", "--heads", "2", "--std", "0.2"];
        ok(&[&["init", "--family", "qwen2", "--tokenizer", &tokens, "--out", &model], &sizes[..]].concat());
        model
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A model directory whose numbers transformers gave.
pub fn fixture(case: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/models").join(case);
    path.to_str().unwrap().to_owned()
}

pub fn ferrl(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes()); // it may have ended already
    child.wait_with_output().unwrap()
}

/// Standard output of a run that must succeed.
pub fn ok_with(args: &[&str], input: &str) -> String {
    let out = ferrl(args, input);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "ferrl {args:?}: {:?}\n{errors}", out.status);
    String::from_utf8(out.stdout).unwrap()
}

pub fn ok(args: &[&str]) -> String {
    ok_with(args, "")
}

/// A run that must fail with that exit code, one message that holds all of `parts`, and no backtrace.
#[track_caller]
pub fn fails_with(args: &[&str], input: &str, code: i32, parts: &[&str]) {
    let out = ferrl(args, input);
    let message = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "ferrl {args:?}\n{message}");
    assert!(message.lines().any(|l| l.starts_with("error: ")), "ferrl {args:?}\n{message}");
    assert!(!message.contains("panicked") && !message.contains("backtrace"), "{message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    for part in parts {
        assert!(message.contains(part), "ferrl {args:?}: no {part:?} in\n{message}");
    }
}

#[track_caller]
pub fn fails(args: &[&str], code: i32, parts: &[&str]) {
    fails_with(args, "", code, parts);
}

/// JSON lines.
pub fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

pub fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[track_caller]
pub fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "at {i}: got {g}, expected {w}");
    }
}

/// An f32 tensor of a fixture's `reference.safetensors`.
pub fn reference(case: &str, name: &str) -> Vec<f64> {
    let bytes = std::fs::read(Path::new(&fixture(case)).join("reference.safetensors")).unwrap();
    let head = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + head]).unwrap();
    assert_eq!(header[name]["dtype"], "F32", "{case} {name}");
    let at = |i: usize| 8 + head + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    let numbers = bytes[at(0)..at(1)].chunks_exact(4);
    numbers.map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
}

pub fn reference_json(case: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(&fixture(case)).join("reference.json")).unwrap())
        .unwrap()
}

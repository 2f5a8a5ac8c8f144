//! Pages that begin with a download: a tiny stand-in for what they download, and smaller numbers, so that their commands run
//! in seconds and without a network. Everything else is as on the page.

use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Pages, and what is smaller in their commands; each must be on the page.
const PAGES: [(&str, &[(&str, &str)]); 1] = [(
    "real-model.md",
    &[
        ("train[:-512]@", "train[:-4]@"),
        ("train[-512:]@", "train[-4:]@"),
        ("train[:-2512]@", "train[:-8]@"),
        ("train[-2512:-512]@", "train[-8:-4]@"),
        ("prompts = 512", "prompts = 4"),
        ("epochs = 2, batch = 64", "epochs = 2, batch = 4"),
        ("steps = 140", "steps = 2"),
        ("every = 70", "every = 1"),
        ("prompts = 64", "prompts = 2"),
        ("samples = 16", "samples = 2"),
        ("max_new_tokens = 256", "max_new_tokens = 12"),
        ("cache_mib = 12000", "cache_mib = 16"),
        ("micro_batch_tokens = 32768", "micro_batch_tokens = 1024"),
    ],
)];

/// Models and data sets of which there is a stand-in.
const MODEL: &str = "models--HuggingFaceTB--SmolLM2-135M-Instruct";
const DATA: &str = "datasets--openai--gsm8k";

/// Says yes where the cache has what is to be downloaded.
const HF: &str = r#"#!/bin/sh
test "$1" = download || exit 2
kind=models
case "$*" in *"--repo-type dataset"*) kind=datasets ;; esac
test -d "$HF_HOME/hub/$kind--$(printf %s "$2" | sed 's|/|--|')"
"#;

/// The stand-ins of a page.
pub struct Twin {
    home: PathBuf,
    smaller: &'static [(&'static str, &'static str)],
}

/// Those of a page that has any, made in the folder that its commands run in.
pub fn of(page: &str, text: &str, dir: &Path, ferrl: &Path) -> Option<Twin> {
    let (_, smaller) = PAGES.iter().find(|(name, _)| *name == page)?;
    for (from, _) in *smaller {
        assert!(text.contains(from), "{page} has no {from:?} any more");
    }
    let home = dir.join(".twin");
    write(&home.join("bin/hf"), HF);
    let made = Command::new("chmod").arg("+x").arg(home.join("bin/hf")).status().unwrap();
    assert!(made.success());
    for repo in [MODEL, DATA] {
        write(&home.join("hub").join(repo).join("refs/main"), "0");
    }
    let data = home.join("hub").join(DATA).join("snapshots/0/main");
    write(&data.join("train.jsonl"), &rows(0..12));
    write(&data.join("test.jsonl"), &rows(12..18));
    let model = home.join("hub").join(MODEL).join("snapshots/0");
    let tokenizer = home.join("tokenizer");
    let train = data.join("train.jsonl").display().to_string().replace("train.jsonl", "text.jsonl");
    write(Path::new(&train), &rows(0..12).replace("\"question\"", "\"text\""));
    let run = |args: &[&str]| {
        let out = Command::new(ferrl).args(args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let (tokenizer, model) = (tokenizer.display().to_string(), model.display().to_string());
    run(&["tokenizer", "train", "--input", &train, "--vocab", "400", "--out", &tokenizer]);
    std::fs::remove_file(&train).unwrap();
    let shape = ["--family", "llama", "--hidden", "32", "--layers", "1", "--heads", "2"];
    run(&[&["init"], &shape[..], &["--tokenizer", &tokenizer, "--out", &model]].concat());
    Some(Twin { home, smaller })
}

impl Twin {
    /// The block with smaller numbers, in an environment whose cache holds the stand-ins.
    pub fn apply(&self, block: &str, path: &str, command: &mut Command) -> String {
        command.env("HF_HOME", &self.home).env("HF_HUB_OFFLINE", "1").env_remove("HF_HUB_CACHE");
        command.env("PATH", format!("{}:{path}", self.home.join("bin").display()));
        self.smaller.iter().fold(block.to_string(), |text, (from, to)| text.replace(from, to))
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// Made-up rows in the shape of GSM8K's.
fn rows(of: std::ops::Range<usize>) -> String {
    let names = ["Ana", "Ben", "Cleo", "Dan", "Eve", "Finn"];
    let row = |i: usize| {
        let (name, bags, each, eaten) = (names[i % 6], 3 + i, 2 + i % 4, 1 + i % 3);
        let (all, left) = (bags * each, bags * each - eaten);
        let question =
            format!("{name} has {bags} bags with {each} apples each and eats {eaten}. How many are left?");
        let answer = format!(
            "{name} has {bags} * {each} = <<{bags}*{each}={all}>>{all} apples.\n{all} - {eaten} = <<{all}-{eaten}={left}>>{left}.\n#### {left}"
        );
        json!({ "question": question, "answer": answer }).to_string() + "\n"
    };
    of.map(row).collect()
}

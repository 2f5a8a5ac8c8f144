//! The README's commands, run as a reader would run them.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::Path;
use std::process::Command;

/// The shell blocks of a Markdown text.
fn shell_blocks(text: &str) -> Vec<&str> {
    text.split("```sh\n").skip(1).map(|b| b.split("```").next().unwrap()).collect()
}

#[test]
fn the_readme_s_commands_work_in_an_empty_folder() {
    let binary = Path::new(env!("CARGO_BIN_EXE_ferrl"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let blocks: Vec<&str> = shell_blocks(&readme)
        .into_iter()
        .filter(|b| b.contains("\nferrl ") || b.starts_with("ferrl "))
        .collect();
    assert!(!blocks.is_empty());
    let dir = std::env::temp_dir().join(format!("ferrl-readme-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path =
        format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    for block in blocks {
        // Building and testing Ferrl is what runs this test.
        let commands: String =
            block.lines().filter(|l| !l.starts_with("cargo ")).map(|l| format!("{l}\n")).collect();
        let out = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &commands])
            .current_dir(&dir)
            .env("PATH", &path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{commands}\n{said}");
    }
    let scores = std::fs::read_to_string(dir.join("scores.jsonl")).unwrap();
    assert!(scores.contains("\"logprobs\"") && scores.contains("\"entropy\""), "{scores}");
    std::fs::remove_dir_all(&dir).unwrap();
}

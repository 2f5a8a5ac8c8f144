//! The manual: every page is in its contents, every link leads somewhere, every command works, every recipe is one.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Pages by file name, with their texts.
fn pages() -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = std::fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .map(|p| (p.file_name().unwrap().to_string_lossy().into(), std::fs::read_to_string(&p).unwrap()))
        .collect();
    all.sort();
    assert!(all.len() > 10);
    all
}

/// Fenced blocks of one language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    text.split(opening.as_str()).skip(1).map(|b| b.split("\n```").next().unwrap()).collect()
}

#[test]
fn contents_and_links_lead_somewhere() {
    let pages = pages();
    let summary = &pages.iter().find(|p| p.0 == "SUMMARY.md").unwrap().1;
    let mut links = 0;
    for (page, text) in &pages {
        assert!(
            page == "SUMMARY.md" || summary.contains(&format!("({page})")),
            "{page} is not in SUMMARY.md"
        );
        for target in text.split("](").skip(1).map(|t| t.split(')').next().unwrap()) {
            let file = target.split('#').next().unwrap();
            if !file.starts_with("http") && !file.is_empty() {
                assert!(
                    root().join("docs").join(file).exists(),
                    "{page} links to {file}, which does not exist"
                );
                links += 1;
            }
        }
        for word in text.split('`').skip(1).step_by(2).filter(|w| !w.contains(['<', ' ', '\n', '*'])) {
            if ["crates/", "bench/", "tools/", "docs/"].iter().any(|s| word.starts_with(s)) {
                assert!(root().join(word).exists(), "{page} names {word}, which does not exist");
            }
        }
    }
    assert!(links > 15, "only {links} links");
}

#[test]
fn recipes_in_the_manual_are_recipes() {
    let mut checked = 0;
    for (page, text) in pages() {
        for block in blocks(&text, "toml") {
            Recipe::parse(block, &page, "manual", &[]).unwrap_or_else(|e| panic!("{page}: {e}\n{block}"));
            checked += 1;
        }
    }
    assert!(checked > 3);
}

/// Each page's commands in an empty folder of their own, as a reader would type them.
#[test]
fn commands_of_every_page_work() {
    let binary = Path::new(env!("CARGO_BIN_EXE_ferrl"));
    let path =
        format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    let mut ran = 0;
    for (page, text) in pages() {
        let commands = blocks(&text, "sh");
        if commands.is_empty() {
            continue;
        }
        let dir = std::env::temp_dir().join(format!("ferrl-manual-{}-{page}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for block in commands {
            let out = Command::new("bash")
                .args(["-euo", "pipefail", "-c", block])
                .current_dir(&dir)
                .env("PATH", &path)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{page}:\n{block}\n{said}");
            ran += 1;
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
    assert!(ran >= 6, "only {ran} blocks of commands");
}

#[test]
fn generated_pages_are_current() {
    let keys = std::fs::read_to_string(root().join("docs/keys.md")).unwrap();
    assert!(keys == ferrl::recipe::keys_markdown(), "docs/keys.md is old: ferrl recipe > docs/keys.md");
}

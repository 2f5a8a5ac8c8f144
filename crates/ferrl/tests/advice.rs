//! Advice names keys that exist: every `key = value` in a message of the source, and every key in the manual.
//!
//! Bug: "drop_last = false" was advised, and there was no such key.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::ALGORITHMS;
use ferrl::recipe::{KeyKind, algorithm_keys, keys, option_keys, policy_keys};
use ferrl::verify::VERIFIERS;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Every key a recipe may hold, numbers of entries as `N`.
fn known() -> Vec<String> {
    let own = keys().iter().chain(policy_keys()).map(|k| k.path.clone());
    let settings = ALGORITHMS.iter().flat_map(|e| algorithm_keys(e)).map(|k| k.path);
    own.chain(settings).chain(["algo.name".into()]).collect()
}

/// Whether the key exists, or lies in a table whose keys a task or verifier knows.
fn exists(key: &str, known: &[String]) -> bool {
    let number = |part: &str| if part.parse::<usize>().is_ok() { "N".into() } else { part.to_string() };
    let parts: Vec<String> = key.split('.').map(number).collect();
    let parts = if parts.len() > 2 && parts[0] == "stage" { &parts[2..] } else { &parts[..] };
    let free = |k: &ferrl::recipe::Key| {
        let table: Vec<&str> = k.path.split('.').collect();
        matches!(k.kind, KeyKind::Free)
            && k.path != "algo"
            && parts.len() > table.len()
            && parts.iter().zip(&table).all(|(a, b)| a == b)
    };
    known.contains(&parts.join(".")) || keys().iter().any(free)
}

fn files(folder: &Path, end: &str, found: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if path.is_dir() {
            files(&path, end, found);
        } else if path.to_str().unwrap().ends_with(end) {
            found.push(path);
        }
    }
}

/// String literals of Rust source, without comments, characters and tests.
fn literals(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]").next().unwrap();
    let (mut found, mut rest) = (Vec::new(), code);
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let here = &rest[at..];
        if here.starts_with("//") {
            rest = here.find('\n').map_or("", |end| &here[end..]);
        } else if here.starts_with("'\"'") || here.starts_with("'\\\"'") || here.starts_with("b'\"'") {
            rest = &here[here[1..].find('\'').unwrap() + 2..];
        } else if rest[..at].ends_with("r#") {
            rest = here[1..].split_once("\"#").map_or("", |(_, after)| after);
        } else if let Some(text) = here.strip_prefix('"') {
            let (mut end, mut escaped) = (0, false);
            for (i, c) in text.char_indices() {
                end = i;
                match c {
                    '"' if !escaped => break,
                    c => escaped = c == '\\' && !escaped,
                }
            }
            found.push(text[..end].to_string());
            rest = text.get(end + 1..).unwrap_or_default();
        } else {
            rest = &here[1..];
        }
    }
    found
}

/// The words before ` = ` in a text, unless they are quoted code.
fn assigned(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(" = ") {
        let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.".contains(c);
        let start = text[..at].rfind(|c| !part(c)).map_or(0, |i| i + 1);
        let before = text[..start].chars().next_back();
        let word = &text[start..at];
        if before.is_none_or(|c| " (,".contains(c)) && word.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.push(word);
        }
    }
    found
}

/// Keys of a [[reward]] where advice is about one, an expander's option, columns of rows, and letters of formulas.
const OTHERS: &[&str] = &[
    "verifier", "model", "truncated", "systems", "prompt", "response", "chosen", "cache", "max", "a", "b",
    "key",
];

#[test]
fn advice_in_messages_names_keys_that_exist() {
    let known = known();
    let options: Vec<String> =
        VERIFIERS.iter().flat_map(|v| option_keys(v.schema, "")).map(|k| k.path).collect();
    let (mut sources, mut wrong, mut seen) = (Vec::new(), Vec::new(), 0);
    files(&root().join("crates/ferrl/src"), ".rs", &mut sources);
    files(&root().join("crates/cli/src"), ".rs", &mut sources);
    for path in &sources {
        for text in literals(&std::fs::read_to_string(path).unwrap()) {
            for key in assigned(&text) {
                seen += 1;
                let inside = text.contains(&format!("{{ {key} = ")) || text.contains("= { "); // a table that is shown whole
                if !exists(key, &known)
                    && !options.iter().any(|o| o == key)
                    && !OTHERS.contains(&key)
                    && !inside
                {
                    wrong.push(format!("{}: {key} in {text:?}", path.display()));
                }
            }
        }
    }
    assert!(seen > 60, "only {seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn keys_in_the_manual_exist() {
    let known = known();
    let (mut pages, mut wrong, mut seen) = (vec![root().join("README.md")], Vec::new(), 0);
    files(&root().join("docs"), ".md", &mut pages);
    pages.retain(|page| !page.ends_with("errors.md")); // it quotes keys that are wrong, and tensors
    let tables: Vec<&str> =
        keys().iter().filter_map(|k| k.path.split_once('.')).map(|(table, _)| table).collect();
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        // The first column of these tables has settings of other libraries.
        let theirs = ["names.md", "coming-from.md"].iter().any(|name| page.ends_with(name));
        let own = |line: &str| match line.strip_prefix("| ").filter(|_| theirs) {
            Some(row) => row.split_once(" | ").map_or(String::new(), |(_, ours)| ours.to_string()),
            None => line.to_string(),
        };
        let text = text.lines().map(own).collect::<Vec<_>>().join("\n");
        for word in text.split('`').skip(1).step_by(2) {
            let key = word.trim_start_matches(['+', '~']).split(['=', ' ']).next().unwrap();
            let plain = key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.".contains(c));
            let Some((table, _)) = key.split_once('.').filter(|_| plain && !key.ends_with('.')) else {
                continue;
            };
            if !tables.contains(&table) && table != "algo" {
                continue;
            }
            seen += 1;
            // Within `[algo]` the manual says `critic.clip` for `algo.critic.clip`.
            let good = exists(key, &known) || exists(&format!("algo.{key}"), &known);
            let inner = known.iter().any(|k| k.starts_with(&format!("{key}.")));
            if !good && !inner && key != "optim.learning_rate" {
                wrong.push(format!("{}: {word}", page.display()));
            }
        }
    }
    assert!(seen > 150, "only {seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

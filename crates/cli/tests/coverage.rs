//! `docs/coverage.md`: every feature has its row, and whatever a row names exists.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Letters of the table and how many features each has.
const ROWS: [(char, usize); 10] = [
    ('A', 20),
    ('B', 8),
    ('C', 15),
    ('D', 10),
    ('E', 15),
    ('F', 6),
    ('G', 13),
    ('H', 6),
    ('I', 11),
    ('J', 2),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Rows of the page: name, feature, what shows it.
fn rows() -> Vec<(String, String, String)> {
    let page = std::fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    let cells =
        |line: &str| line.trim_matches('|').split(" | ").map(|c| c.trim().to_string()).collect::<Vec<_>>();
    let row = |line: &str| match &cells(line)[..] {
        [name, feature, shown] if name.len() > 1 && name[1..].chars().all(|c| c.is_ascii_digit()) => {
            Some((name.clone(), feature.clone(), shown.clone()))
        }
        _ => None,
    };
    page.lines().filter(|l| l.starts_with('|')).filter_map(row).collect()
}

/// Every function of the repository's Rust code.
fn functions() -> BTreeSet<String> {
    fn walk(dir: &Path, out: &mut BTreeSet<String>) {
        for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let name = |after: &str| after.split('(').next().unwrap_or_default().trim().to_string();
                out.extend(text.split("fn ").skip(1).map(name));
            }
        }
    }
    let mut out = BTreeSet::new();
    walk(&root().join("crates"), &mut out);
    out
}

/// `ferrl WORDS... --flag...`: the command is there and its help names the flags.
fn check_command(words: &str) -> Result<(), String> {
    let (flags, names): (Vec<&str>, Vec<&str>) = words.split(' ').partition(|w| w.starts_with('-'));
    let out = Command::new(env!("CARGO_BIN_EXE_ferrl")).args(&names).arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&out.stdout).into_owned();
    // The help of a command above is shown where the last word is none.
    let usage = help.lines().find(|l| l.starts_with("Usage:")).unwrap_or_default();
    if !out.status.success() || names.iter().any(|n| !usage.contains(n)) {
        return Err(format!("no command ferrl {}: {usage}", names.join(" ")));
    }
    match flags.iter().find(|f| !help.contains(&format!("{f} ")) && !help.contains(&format!("{f}\n"))) {
        Some(flag) => Err(format!("ferrl {} has no flag {flag}", names.join(" "))),
        None => Ok(()),
    }
}

#[test]
fn every_feature_has_one_row_that_shows_it_or_says_not_yet() {
    let rows = rows();
    let names: Vec<String> = rows.iter().map(|r| r.0.clone()).collect();
    let want: Vec<String> =
        ROWS.iter().flat_map(|(letter, n)| (1..=*n).map(move |i| format!("{letter}{i}"))).collect();
    assert_eq!(names, want);
    for (name, feature, shown) in &rows {
        assert!(
            !feature.is_empty() && (shown.contains('`') || shown.contains("**not yet** (")),
            "{name}: {shown}"
        );
    }
}

#[test]
fn what_the_rows_name_exists() {
    let (functions, keys) = (functions(), ferrl::recipe::keys_markdown());
    let algorithms = std::fs::read_to_string(root().join("docs/algorithms.md")).unwrap();
    let mut checked = 0;
    for (row, _, shown) in rows() {
        for word in shown.split('`').skip(1).step_by(2) {
            let wrong = |what: String| panic!("{row}: {what}");
            if let Some(name) = word.strip_prefix("fn ") {
                assert!(functions.contains(name), "{row}: no function {name}");
            } else if let Some(words) = word.strip_prefix("ferrl ") {
                check_command(words).unwrap_or_else(wrong);
            } else if let Some(key) = word.strip_prefix("key ") {
                let known = [&keys, &algorithms].iter().any(|page| page.contains(&format!("`{key}`")));
                assert!(known, "{row}: no key {key}");
            } else if word.contains(['/', '.']) && !word.starts_with("timing/") || word == "Dockerfile" {
                assert!(root().join(word).exists(), "{row}: no file {word}");
            } else {
                let metrics = [ferrl::algo::metrics::STEP, ferrl::algo::metrics::SAMPLED].concat();
                assert!(
                    metrics.iter().any(|m| m.name == word),
                    "{row}: {word} is no file, command, key, metric or function"
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 150, "only {checked} things are named");
}

#[test]
fn the_page_on_benchmarks_has_the_registry_s_table() {
    let page = std::fs::read_to_string(root().join("docs/benchmarks.md")).unwrap();
    let table = ferrl::suite::markdown();
    assert!(
        page.contains(&table),
        "old: put `ferrl data suites --markdown` into docs/benchmarks.md\n{table}"
    );
}

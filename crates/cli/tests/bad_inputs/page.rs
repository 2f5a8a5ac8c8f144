//! The part of `docs/errors.md` that is made of the cases.

use super::Area;
use std::fmt::Write;

const BEGIN: &str = "<!-- made by FERRL_WRITE_DOCS=1 cargo test --test bad_inputs -->\n";

/// The page holds the list as it is now.
pub fn current(areas: &[Area]) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (head, list) = page.split_once(BEGIN).expect("docs/errors.md has no place for the list");
    let new = written(areas);
    if std::env::var_os("FERRL_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{head}{BEGIN}{new}")).unwrap();
    } else {
        assert!(list == new, "docs/errors.md is old: FERRL_WRITE_DOCS=1 cargo test --test bad_inputs");
    }
}

fn written(areas: &[Area]) -> String {
    let mut out = String::new();
    for (title, cases) in areas {
        let cases = cases();
        if cases.is_empty() {
            continue;
        }
        writeln!(out, "\n### {title}\n\n| input | exit code | the message names |\n|---|---|---|").unwrap();
        for case in cases {
            let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
            let words: Vec<String> = case.says.iter().map(|w| format!("`{}`", cell(w))).collect();
            writeln!(out, "| {} | {} | {} |", cell(case.name), case.exit, words.join(", ")).unwrap();
        }
    }
    out
}

//! The list of suites, for people: a table for the manual, a listing for the terminal.

use super::{Entry, SUITES, Use};
use std::fmt::Write;

/// What a suite is graded by, or what else its rows are.
fn graded(suite: &Entry) -> String {
    match suite.rows {
        Use::Verified { verifier, .. } => format!("`{verifier}`"),
        Use::Pairs => "pairs".into(),
        Use::Demonstrations => "demonstrations".into(),
    }
}

/// Where the rows are: the repository and what is read of it.
fn home(suite: &Entry) -> String {
    match suite.parts {
        [] => suite.repo.to_string(),
        [one] => format!("{}/{one}", suite.repo),
        many => format!("{} ({} folders)", suite.repo, many.len()),
    }
}

fn splits(suite: &Entry) -> String {
    let one =
        |split: Option<&str>, whole: &str| split.map(|s| if s == "*" { whole.into() } else { s.to_string() });
    let both = [one(suite.train, "all rows to train on"), one(suite.test, "all rows to test on")];
    both.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The table of `docs/benchmarks.md`.
pub fn markdown() -> String {
    let mut out = String::from(
        "| suite | what | rows on the hub | splits | graded by | licence | cite |\n|---|---|---|---|---|---|---|\n",
    );
    for s in SUITES {
        let _ = writeln!(
            out,
            "| `{}` | {} | `{}` | {} | {} | {} | {} |",
            s.name,
            s.about,
            home(s),
            splits(s),
            graded(s),
            s.license,
            s.cite
        );
    }
    out
}

/// A line a suite, for the terminal.
pub fn table() -> String {
    SUITES
        .iter()
        .map(|s| format!("{:<14} {:<16} {}\n", s.name, graded(s).replace('`', ""), s.about))
        .collect()
}

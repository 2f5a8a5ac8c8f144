//! Bad inputs: what a user can get wrong, each with the exit code of its class, a message that names the place, no panic,
//! no abort, no hang, and nothing lost. `docs/errors.md` lists them; `FERRL_WRITE_DOCS=1 cargo test --test bad_inputs`
//! writes that list anew.

#![allow(clippy::unwrap_used)]

#[path = "bad_inputs/case.rs"]
mod case;
#[path = "bad_inputs/data.rs"]
mod data;
#[path = "bad_inputs/engine.rs"]
mod engine;
#[path = "bad_inputs/page.rs"]
mod page;
#[path = "bad_inputs/preflight.rs"]
mod preflight;
#[path = "bad_inputs/recipes.rs"]
mod recipes;
#[path = "bad_inputs/rewards.rs"]
mod rewards;
#[path = "bad_inputs/runs.rs"]
mod runs;

/// Title of an area in the manual, and its cases.
type Area = (&'static str, fn() -> Vec<case::Case>);

const AREAS: &[Area] = &[
    ("Recipes and flags", recipes::cases),
    ("Data", data::cases),
    ("Rewards and rollouts", rewards::cases),
    ("Before the first step", preflight::cases),
    ("Runs", runs::cases),
    ("Models", engine::cases),
];

#[test]
fn recipes() {
    case::all(recipes::cases());
}

#[test]
fn data() {
    case::all(data::cases());
}

#[test]
fn rewards() {
    case::all(rewards::cases());
}

#[test]
fn before_the_first_step() {
    case::all(preflight::cases());
}

#[test]
fn runs() {
    case::all(runs::cases());
}

#[test]
fn models() {
    case::all(engine::cases());
}

#[test]
fn the_manual_lists_every_case() {
    page::current(AREAS);
}

#[test]
fn case_names_are_unique() {
    let mut names: Vec<&str> = Vec::new();
    for case in AREAS.iter().flat_map(|(_, cases)| cases()) {
        assert!(!names.contains(&case.name), "two cases are called {:?}", case.name);
        names.push(case.name);
    }
}

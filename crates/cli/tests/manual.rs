//! The manual: every page is in its contents, every link leads somewhere, every command works, every recipe is one.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[path = "manual/twin.rs"]
mod twin;

use ferrl::recipe::Recipe;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Pages by their path below docs/, with their texts.
fn pages() -> Vec<(String, String)> {
    fn collect(dir: &Path, all: &mut Vec<(String, String)>) {
        for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                collect(&path, all);
            } else if path.extension().is_some_and(|e| e == "md") {
                let name = path.strip_prefix(root().join("docs")).unwrap().to_string_lossy().into_owned();
                all.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut all = Vec::new();
    collect(&root().join("docs"), &mut all);
    all.sort();
    assert!(all.len() > 40);
    all
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|l| l.starts_with('#')).map(|l| l.trim_start_matches('#').trim());
    let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
    headings.map(|h| h.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
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
    for (page, _) in pages.iter().filter(|p| p.0 != "SUMMARY.md") {
        assert_eq!(summary.matches(&format!("({page})")).count(), 1, "{page} is not in SUMMARY.md, or twice");
    }
    let outside = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
        .map(|name| (format!("../{name}"), std::fs::read_to_string(root().join(name)).unwrap()));
    let mut links = 0;
    for (page, text) in pages.iter().chain(&outside) {
        let home = root().join("docs").join(page).parent().unwrap().to_path_buf();
        for target in text.split("](").skip(1).map(|t| t.split(')').next().unwrap()) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            if file.starts_with("http") {
                continue;
            }
            let path = if file.is_empty() { root().join("docs").join(page) } else { home.join(file) };
            assert!(path.exists(), "{page} links to {file}, which does not exist");
            if !anchor.is_empty() {
                let there = anchors(&std::fs::read_to_string(&path).unwrap());
                assert!(there.iter().any(|a| a == anchor), "{page} links to {target}: no such heading");
            }
            links += 1;
        }
        for word in text.split('`').skip(1).step_by(2).filter(|w| !w.contains(['<', ' ', '\n', '*'])) {
            if ["crates/", "bench/", "tools/", "docs/"].iter().any(|s| word.starts_with(s)) {
                assert!(root().join(word).exists(), "{page} names {word}, which does not exist");
            }
        }
    }
    assert!(links > 60, "only {links} links");
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
        let dir = std::env::temp_dir().join(format!(
            "ferrl-manual-{}-{}",
            std::process::id(),
            page.replace('/', "-")
        ));
        std::fs::create_dir_all(&dir).unwrap();
        let twin = twin::of(&page, &text, &dir, binary);
        for block in commands {
            let mut command = Command::new("bash");
            command.current_dir(&dir).env("PATH", &path);
            let block =
                &twin.as_ref().map_or(block.to_string(), |twin| twin.apply(block, &path, &mut command));
            let out = command.args(["-euo", "pipefail", "-c", block]).output().unwrap();
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
    let page = |name: &str| std::fs::read_to_string(root().join("docs").join(name)).unwrap();
    assert!(page("keys.md") == ferrl::recipe::keys_markdown(), "old: ferrl recipe > docs/keys.md");
    assert!(page("names.md") == ferrl::recipe::names_markdown(), "old: ferrl recipe names > docs/names.md");
    let commands = Command::new(env!("CARGO_BIN_EXE_ferrl")).args(["man", "--markdown"]).output().unwrap();
    let commands = String::from_utf8(commands.stdout).unwrap();
    assert!(page("commands.md") == commands, "old: ferrl man --markdown > docs/commands.md");
    let verifiers = ferrl::recipe::verifiers_markdown();
    assert!(page("verifiers.md") == verifiers, "old: ferrl verify --markdown > docs/verifiers.md");
    let figures: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&page("figures.json")).unwrap();
    for (name, measured) in &figures {
        assert!(ferrl::algo::find(name).is_ok(), "docs/figures.json: no algorithm {name}");
        for part in ["before", "after", "metric", "command"] {
            assert!(measured[part].is_string(), "docs/figures.json: {name} has no {part}");
        }
    }
    assert!(
        page("algorithms.md") == ferrl::recipe::algorithms_markdown(&figures),
        "old: ferrl algorithms --markdown --figures docs/figures.json > docs/algorithms.md"
    );
}

/// Every algorithm has a recipe of its name that uses it; the page links to it.
#[test]
fn every_algorithm_has_its_recipe() {
    for entry in ferrl::algo::ALGORITHMS {
        let recipe = Recipe::load(root().join(format!("recipes/{}.toml", entry.name)), &[]).unwrap();
        let used = recipe.stages.iter().any(|s| s.recipe.algorithm_name() == entry.name);
        assert!(used, "recipes/{0}.toml does not use {0}", entry.name);
    }
}

/// The page on a real model shows the recipe as it is.
#[test]
fn the_real_models_page_shows_its_recipe() {
    let page = std::fs::read_to_string(root().join("docs/real-model.md")).unwrap();
    let recipe = std::fs::read_to_string(root().join("recipes/real/smollm2_gsm8k.toml")).unwrap();
    assert!(page.contains(&format!("<<'END'\n{}\nEND\n", recipe.trim_end())));
}

/// Every study is a recipe that could run, and the page on them names it.
#[test]
fn studies_are_recipes_and_are_described() {
    let page = std::fs::read_to_string(root().join("docs/takeaways.md")).unwrap();
    let verifiers: Vec<&str> = ferrl::verify::VERIFIERS.iter().map(|v| v.name).collect();
    let mut studies = 0;
    for path in std::fs::read_dir(root().join("recipes/studies")).unwrap().map(|e| e.unwrap().path()) {
        Recipe::load(&path, &[]).and_then(|r| r.check(&verifiers)).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&format!("`{name}`")), "docs/takeaways.md says nothing of {name}");
        studies += 1;
    }
    assert!(studies >= 10);
}

/// The worked example of a contribution shows lines that are there, in their order.
#[test]
fn the_worked_diff_is_the_code() {
    let page = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let shown = blocks(&page, "diff");
    assert_eq!(shown.len(), 3);
    for block in shown {
        let (head, lines) = block.split_once('\n').unwrap();
        let path = head.trim_start_matches(['+', '-', ' ']);
        let file = std::fs::read_to_string(root().join(path)).unwrap();
        let mut rest = file.lines();
        for line in lines.lines().filter(|l| !l.contains("...") && !l.starts_with("@@")) {
            assert!(rest.any(|have| have == &line[1..]), "{path} has no such line there: {line}");
        }
    }
}

#[test]
fn code_in_the_manual_is_the_examples() {
    let page = std::fs::read_to_string(root().join("docs/rust-api.md")).unwrap();
    let shown = blocks(&page, "rust");
    for name in ["reward", "dpo", "grpo"] {
        let file = std::fs::read_to_string(root().join(format!("crates/ferrl/examples/{name}.rs"))).unwrap();
        assert!(
            shown.contains(&file.trim_end()),
            "docs/rust-api.md does not show examples/{name}.rs as it is"
        );
    }
    assert_eq!(shown.len(), 3);
}

#[test]
fn every_search_strategy_has_its_row() {
    let page = std::fs::read_to_string(root().join("docs/reasoning.md")).unwrap();
    for entry in ferrl::search::STRATEGIES {
        assert!(page.contains(&format!("| `{}` |", entry.name)), "{}", entry.name);
    }
}

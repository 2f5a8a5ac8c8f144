//! Recipes that say only what differs from another.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;
use tempfile::TempDir;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    files.iter().for_each(|(file, text)| std::fs::write(dir.path().join(file), text).unwrap());
    dir
}

#[test]
fn a_recipe_is_laid_over_its_base_and_loads_alone_once_resolved() {
    let base = "seed = 3\nmodel.path = \"m\"\ndata.train = \"d\"\nalgo = { name = \"grpo\", clip_low = 0.1 }\noptim.lr = 1e-4\n";
    let middle = "base = \"a.toml\"\noptim = { schedule = \"cosine\" }\nreward = \"exact\"\n";
    let top = "base = \"b.toml\"\nalgo = \"rloo\"\n[[reward]]\nverifier = \"numeric\"\n";
    let dir = folder(&[("a.toml", base), ("b.toml", middle), ("c.toml", top)]);
    let resolved = Recipe::load(dir.path().join("c.toml"), &["optim.warmup=0.2".into()]).unwrap();
    let recipe = &resolved.stages[0].recipe;
    assert_eq!((recipe.seed, recipe.optim.lr, recipe.optim.warmup), (3, 1e-4, 0.2));
    assert_eq!(recipe.optim.schedule, "cosine");
    assert_eq!(recipe.algorithm_name(), "rloo");
    assert!(!recipe.algo.contains_key("clip_low"), "another algorithm inherits no settings");
    assert_eq!(recipe.reward.len(), 1);
    assert_eq!(recipe.reward[0].verifier.as_deref(), Some("numeric"), "lists are replaced");
    let again = Recipe::parse(&resolved.toml, "x", "c", &[]).unwrap();
    assert_eq!(again.stages, resolved.stages);
}

#[test]
fn bases_that_lead_nowhere_or_in_a_circle_are_named() {
    let files = [
        ("a.toml", "base = \"b.toml\""),
        ("b.toml", "base = \"a.toml\""),
        ("c.toml", "\nbase = \"none.toml\""),
        ("d.toml", "base = 3"),
        ("e.toml", "model.path = \"m\"\n[[stage]]\nbase = \"a.toml\""),
    ];
    let dir = folder(&files);
    let error = |file: &str| {
        Recipe::load(dir.path().join(file), &[]).and_then(|r| r.check(&[])).err().unwrap().to_string()
    };
    assert!(
        error("a.toml").contains("circular") && error("a.toml").contains("b.toml:1"),
        "{}",
        error("a.toml")
    );
    assert!(
        error("c.toml").contains("none.toml") && error("c.toml").contains("c.toml:2"),
        "{}",
        error("c.toml")
    );
    assert!(error("d.toml").contains("expected text"), "{}", error("d.toml"));
    assert!(error("e.toml").contains("base"), "{}", error("e.toml"));
}

/// Bug: a key over an alias of the base was overridden by the base.
#[test]
fn a_key_wins_over_an_alias_of_the_base() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.toml"), "actor.lr = 1e-3\n").unwrap();
    std::fs::write(dir.path().join("b.toml"), "base = \"a.toml\"\noptim.lr = 1e-4\n").unwrap();
    assert_eq!(Recipe::load(dir.path().join("b.toml"), &[]).unwrap().stages[0].recipe.optim.lr, 1e-4);
}

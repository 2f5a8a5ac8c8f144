//! Rollouts by search: paths of trees with their advantages, under any policy gradient.

use crate::help::{fails, model, stage, weights, write};
use ferrl::reward::Rewards;
use ferrl::train::Stage;
use ferrl::verify::Sample;

const ROWS: &str = "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"2+2=\", \"answer\": \"4\"}\n";

fn recipe(data: &str, algo: &str, search: &str) -> String {
    format!(
        "algo = {algo}\noptim.lr = 1e-3\ntrain = {{ steps = 2, micro_batch_tokens = 512 }}\n\
         data = {{ train = {data:?}, max_length = 32 }}\nsearch = {{ train = true, {search} }}\n\
         rollout = {{ prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 8 }}\nreward = \"exact\"\n"
    )
}

/// A stage that pays 1 for completions that begin with a digit or a capital.
fn letters(model: &str, recipe: &str) -> Stage {
    let mut stage = stage(model, recipe).unwrap();
    let first = |s: &Sample<'_>| s.completion.chars().next().is_some_and(|c| ('0'..='Z').contains(&c));
    stage.rewards = Rewards::of(move |s: &Sample<'_>| f64::from(u8::from(first(s))));
    stage
}

const TREE: &str = "strategy = \"tree\", options = { branch = [3, 2], step = \"\", step_tokens = 2 }";
const MCTS: &str = "strategy = \"mcts\", options = { simulations = 8, step = \"\", step_tokens = 1 }";

#[test]
fn every_policy_gradient_learns_from_the_steps_of_trees() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    for search in [TREE, MCTS] {
        for algo in
            ["\"vineppo\"", "{ name = \"reinforce\", advantage.baseline = \"steps\" }", "\"grpo\"", "\"ppo\""]
        {
            let mut stage = letters(&model, &recipe(&data, algo, search));
            let before = weights(&stage);
            let report = stage.step().unwrap();
            let get = |name: &str| report.metrics.get(name).unwrap_or_else(|| panic!("{algo}: {name}"));
            assert!(report.rollouts.len() > 4 && get("search/paths") > 2.0, "{algo} {search}");
            assert!(get("search/weight") > 0.0 && get("search/tokens") > 4.0);
            if search == TREE {
                assert_eq!(get("search/paths"), 6.0, "three times two");
                assert!((get("search/weight") - 1.0).abs() < 1e-6, "a full tree is drawn from the policy");
            }
            assert!(weights(&stage) != before, "{algo} {search}: nothing was learned");
        }
    }
}

/// Was refused: the check took every scorer for one of whole completions.
#[test]
fn a_scorer_of_prefixes_evaluates_leaves_and_ranks_beams() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    for strategy in ["mcts", "beam"] {
        let options = "options = { step = \"\", step_tokens = 1, evaluate = \"score\" }";
        let search = format!("strategy = {strategy:?}, scorer = \"logp\", {options}");
        let report = letters(&model, &recipe(&data, "\"vineppo\"", &search)).step().unwrap();
        assert!(report.metrics.get("search/paths").is_some_and(|paths| paths > 0.0), "{strategy}");
    }
}

#[test]
fn draws_at_another_temperature_are_weighed() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let search = "strategy = \"tree\", options = { branch = [4, 1], step = \"\", step_tokens = 2, expander = \
                  \"high_low_temperature_iid\" }";
    let algo = "{ name = \"vineppo\", correction = { kind = \"truncate\", cap = 2.0 } }";
    let mut stage = letters(&model, &recipe(&data, algo, search));
    stage.step().unwrap();
}

#[test]
fn a_search_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let with = |algo: &str, search: &str| fails(&model, &recipe(&data, algo, search));
    let error = with("\"vineppo\"", "strategy = \"mtcs\"");
    assert!(error.contains("search.strategy = \"mcts\""), "{error}");
    let error = with("\"vineppo\"", "strategy = \"mcts\", options = { simulatoins = 3 }");
    assert!(error.contains("search.options") && error.contains("simulatoins"), "{error}");
    assert!(error.contains("fix: did you mean \"simulations\"?"), "{error}");
    let systems = "options = { expander = \"iid_with_different_system_message\", systems = [\"a\"] }";
    let error = with("\"vineppo\"", &format!("strategy = \"mcts\", {systems}"));
    assert!(
        error.contains("completions with other system messages cannot be trained on")
            && error.contains("expander = \"iid\""),
        "{error}"
    );
    let error = with("\"vineppo\"", "strategy = \"mcts\", options = { evaluate = \"score\" }");
    assert!(error.contains("needs a scorer of prefixes"), "{error}");
    let error = with("\"vineppo\"", "eval = true");
    assert!(error.contains("a search without a strategy"), "{error}");
    // Was: these were read and changed nothing.
    for unused in ["budget = 4", "scorer = \"logp\""] {
        let recipe = recipe(&data, "\"vineppo\"", unused).replace("train = true, ", "");
        let error = fails(&model, &recipe);
        assert!(error.contains("has no effect without search.strategy"), "{unused}: {error}");
    }
    let error = with("\"vineppo\"", "strategy = \"mcts\", scorer_options = { kind = \"generative\" }");
    assert!(error.contains("options of a model"), "{error}");
}

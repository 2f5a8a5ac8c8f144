//! Research with tools, judged by a model: a policy that searches before it answers, and a judge that rewards what it wrote.

use crate::help::{metrics, model_with, run, write};
use ferrl_engine::model::FAMILIES;
use serde_json::{Value, json};
use std::path::Path;

/// What the search finds for every query.
const FOUND: &str = "\n\n<information>Doc 1(Title: emma) austen</information>\n\n";
const CALL: &str = "<search>emma</search>";

/// A policy that has learned to search and then to answer, a judge that has learned verdicts, and GRPO with both.
fn pipeline(dir: &Path) -> String {
    let model = model_with(dir, FAMILIES[0].name(), 192);
    let documents = write(dir, "documents.jsonl", "{\"title\": \"emma\", \"text\": \"austen\"}\n");
    let rows = |rows: &[Value]| rows.iter().map(|row| format!("{row}\n")).collect::<String>();
    let shown = write(
        dir,
        "shown.jsonl",
        &rows(&[
            json!({ "prompt": "who? ", "completion": CALL }),
            json!({ "prompt": format!("who? {CALL}{FOUND}"), "completion": "austen" }),
        ]),
    );
    let verdict = |completion: &str, verdict: &str| json!({ "prompt": format!("who? {completion} ok? "), "completion": verdict });
    let judged = write(dir, "judged.jsonl", &rows(&[verdict("austen", "Yes"), verdict("bronte", "No")]));
    let asked = write(dir, "asked.jsonl", "{\"prompt\": \"who? \"}\n");
    format!(
        "model.path = {model:?}\ndata.max_length = 160\ntrain.micro_batch_tokens = 2048\n\
         [[stage]]\nname = \"judge\"\nalgo = \"sft\"\ndata.train = {judged:?}\ntrain = {{ steps = 60, batch = 2 }}\noptim.lr = 5e-3\n\
         [[stage]]\nname = \"imitate\"\nalgo = \"sft\"\nmodel.path = {model:?}\ndata.train = {shown:?}\n\
         train = {{ steps = 120, batch = 2 }}\noptim.lr = 5e-3\n\
         [[stage]]\nname = \"research\"\nalgo = \"grpo\"\nmodel.path = \"stage:imitate\"\ndata.train = {asked:?}\n\
         env = {{ tools = [\"search\"], options = {{ search = {{ documents = {documents:?}, topk = 1 }} }} }}\n\
         reward = [{{ model = \"stage:judge\", options = {{ kind = \"generative\", question = \" ok? \" }} }}]\n\
         train.steps = 2\noptim.lr = 1e-3\n\
         rollout = {{ prompts = 2, samples = 4, max_new_tokens = 24, max_turns = 3, stop = [\"</search>\"], include_stop = true }}\n"
    )
}

#[test]
fn a_policy_that_searches_is_rewarded_by_a_judge() {
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    run(&runs, &pipeline(dir.path()), false, 1000).unwrap();
    let steps: Vec<_> = metrics(&runs).into_iter().filter(|r| r.stage == "research").collect();
    assert_eq!(steps.len(), 2);
    for step in &steps {
        let verdict = step.get("rewards/verdict/mean").unwrap();
        assert!(verdict > 0.0 && verdict <= 1.0 && step.get("reward").unwrap() == verdict, "{verdict}");
        assert!(step.get("episodes/tool_calls").unwrap() >= 0.5, "the policy searches");
    }
    let rollouts = runs.join("test/rollouts");
    let last = std::fs::read_dir(rollouts).unwrap().map(|e| e.unwrap().path()).max().unwrap();
    let rows = std::fs::read_to_string(last).unwrap();
    let rows: Vec<Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found = |row: &&Value| row["turns"][0]["observation"].as_str().is_some_and(|o| o.contains("austen"));
    assert!(rows.iter().any(|row| found(&row)), "what was found is shown to the policy: {}", rows[0]);
}

//! Rows that bring their answers and rewards: the same algorithms, and nothing is sampled.

use crate::help::{fails, model, stage, write};
use ferrl::algo::{ALGORITHMS, Entry};
use ferrl_engine::train::{Batch, BatchSequence};
use serde_json::json;

const ROWS: &str = r#"
{"prompt": "one and one is ", "completions": ["two", "ten"], "rewards": [1.0, 0.0]}
{"prompt": "two and two is ", "completions": ["four", "five", "six"], "rewards": [1.0, 0.0, 0.25]}
"#;

fn recipe(data: &str, more: &str) -> String {
    format!(
        "data.train = {data:?}\ndata.max_length = 48\ntrain = {{ steps = 12, micro_batch_tokens = 512 }}\n\
         optim.lr = 3e-3\nrollout.prompts = 2\n{more}"
    )
}

/// The log-probability of each answer, prompt and end included in the sequence.
fn logp(stage: &ferrl::train::Stage, prompt: &str, answer: &str) -> f64 {
    let t = &stage.tokenizer;
    let mut ids = t.encode_prompt(prompt).unwrap();
    let start = ids.len();
    ids.extend(t.encode_text(answer).unwrap());
    ids.extend(t.eos().first());
    let scored = (0..ids.len()).map(|i| i >= start).collect();
    let batch =
        Batch { sequences: vec![BatchSequence { ids, scored, ..Default::default() }], others_per_row: 0 };
    stage.policy.stats(&batch).unwrap().logp.iter().map(|&l| l as f64).sum()
}

#[test]
fn every_method_that_compares_answers_learns_from_given_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    // A completion that is given cannot be continued: `vine.rs`.
    let compares = |e: &&&Entry| {
        let algorithm = (e.build)(json!({})).unwrap();
        e.feed.sampled() && !algorithm.needs().teacher && algorithm.vine().is_none()
    };
    for entry in ALGORITHMS.iter().filter(compares) {
        let mut stage = stage(&model, &recipe(&data, &format!("algo = {:?}", entry.name))).unwrap();
        assert!(stage.generator.is_none(), "{}: nothing is sampled", entry.name);
        let margin = |s: &_| logp(s, "one and one is ", "two") - logp(s, "one and one is ", "ten");
        let before = margin(&stage);
        let first = stage.step().unwrap();
        assert_eq!(first.rollouts.len(), 5, "{}", entry.name);
        assert!(first.metrics.get("sampling/sampling_logp_difference/max").is_none());
        assert_eq!(first.metrics.get("policy/ratio").unwrap_or(1.0), 1.0, "{}: old is now", entry.name);
        assert!(first.rollouts.iter().any(|r| r.completion.text == "two" && r.scores.reward == Some(1.0)));
        for _ in 1..12 {
            stage.step().unwrap();
        }
        let after = margin(&stage);
        assert!(after > before + 0.1, "{}: {before} to {after}", entry.name);
    }
}

#[test]
fn named_rewards_are_added_and_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let row =
        r#"{"prompt": "a", "completions": ["b", "c"], "rewards": {"right": [1, 0], "short": [0.5, 0.25]}}"#;
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", row));
    let mut stage = stage(
        &model,
        &recipe(&data, "algo = \"grpo\"\nrollout.prompts = 1").replace("rollout.prompts = 2\n", ""),
    )
    .unwrap();
    let report = stage.step().unwrap();
    let first = report.rollouts.iter().find(|r| r.completion.text == "b").unwrap();
    assert_eq!(first.scores.reward, Some(1.5));
    assert_eq!(first.scores.components, [("right".to_string(), 1.0), ("short".to_string(), 0.5)]);
    assert_eq!(report.metrics.get("reward"), Some((1.5 + 0.25) / 2.0));
    assert_eq!(report.metrics.get("rewards/right/mean"), Some(0.5));
}

#[test]
fn rows_that_do_not_fit_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let grouped = r#"{"prompt": "a", "completions": ["b", "c"], "rewards": [1, 0]}"#;
    for (second, says) in [
        (r#"{"prompt": "a"}"#, "groups of completions"),
        (r#"{"prompt": "a", "completions": ["b", "c"], "rewards": [1]}"#, "rewards"),
        (r#"{"prompt": "a", "completions": ["b"], "rewards": [1]}"#, "1 completions"),
        (r#"{"prompt": "a", "completions": ["b", "c"], "rewards": {"x": [1, 0], "y": [1]}}"#, "rewards"),
    ] {
        let data = write(dir.path(), "rows.jsonl", &format!("{grouped}\n{second}\n"));
        let error = fails(&model, &recipe(&data, "algo = \"grpo\""));
        assert!(error.contains("rows.jsonl:2") && error.contains(says), "{error}");
    }
    let data = write(dir.path(), "rows.jsonl", &format!("{{\"prompt\": \"a\"}}\n{grouped}\n"));
    let error =
        fails(&model, &recipe(&data, "algo = \"grpo\"\nreward = \"countdown\"\nrollout.max_new_tokens = 4"));
    assert!(error.contains("rows.jsonl:2") && error.contains("not both"), "{error}");
    let data = write(dir.path(), "rows.jsonl", grouped);
    let error = fails(&model, &recipe(&data, "algo = \"grpo\"\nreward = \"countdown\""));
    assert!(error.contains("the rows of data.train have completions"), "{error}");
    let alone = write(dir.path(), "prompts.jsonl", "{\"prompt\": \"a\"}\n");
    let error = fails(&model, &recipe(&alone, "algo = \"grpo\""));
    assert!(error.contains("reward: grpo needs rewards") && error.contains("reward.0.verifier"), "{error}");
    let error = fails(&model, &recipe(&data, "algo = \"grpo\"\nrollout.max_lag = 1"));
    assert!(error.contains("rollout.max_lag"), "{error}");
}

//! Which weights a stage hands on, and when it ends: what held-out rows say of it decides.

use crate::help::{fails, metrics, model, run, write};
use ferrl::run::StepRecord;
use std::path::Path;

/// Rows that few steps learn by heart, and held-out ones that share only their beginning.
fn recipe(dir: &Path, checkpoint: &str) -> String {
    let row = |i: usize| format!("{{\"prompt\": \"{i} \", \"response\": \"row {i}\"}}\n");
    let data = write(dir, "rows.jsonl", &(0..4).map(row).collect::<String>());
    let held_out = write(dir, "held.jsonl", &(5..9).map(row).collect::<String>());
    format!(
        "model.path = {:?}\ndata = {{ train = {data:?}, max_length = 32 }}\noptim.lr = 1e-2\n\
         train = {{ steps = 24, batch = 4, micro_batch_tokens = 128 }}\n\
         eval = {{ data = {held_out:?}, every = 2, at_start = true }}\ncheckpoint = {{ {checkpoint} }}\n",
        model(dir)
    )
}

/// Steps of a stage at which it was evaluated, with the value.
fn values(lines: &[StepRecord], stage: &str, metric: &str) -> Vec<(u64, f64)> {
    lines.iter().filter(|r| r.stage == stage).filter_map(|r| Some((r.step, r.get(metric)?))).collect()
}

#[test]
fn the_next_stage_starts_from_the_best_weights_and_not_from_the_last() {
    for (metric, lower) in [("eval/loss", true), ("eval/entropy", false)] {
        for use_best in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let checkpoint = format!(
                "keep = 1, keep_best = 1, metric = {metric:?}, lower_is_better = {lower}, use_best = {use_best}"
            );
            let stages = "[[stage]]\nname = \"first\"\nalgo = \"sft\"\n\
                          [[stage]]\nname = \"second\"\nalgo = \"sft\"\ntrain.steps = 1\n";
            let runs = dir.path().join("runs");
            run(&runs, &(recipe(dir.path(), &checkpoint) + stages), false, 100).unwrap();
            let lines = metrics(&runs);
            let all = values(&lines, "first", metric);
            let better = |a: f64, b: f64| if lower { a < b } else { a > b };
            let best = all.iter().copied().reduce(|a, b| if better(b.1, a.1) { b } else { a }).unwrap();
            let last = *all.last().unwrap();
            assert!(all.len() == 12 && better(best.1, last.1), "the last is the best: this shows nothing");
            let start = lines.iter().find(|r| r.stage == "second").unwrap();
            let start = start.get(&metric.replace("eval/", "eval_start/")).unwrap();
            assert_eq!(start, if use_best { best.1 } else { last.1 }, "{metric} of step {}", best.0);
        }
    }
}

#[test]
fn a_stage_ends_when_its_patience_is_used_up() {
    let dir = tempfile::tempdir().unwrap();
    let best = "keep_best = 1, use_best = true, metric = \"eval/loss\", lower_is_better = true";
    let base = recipe(dir.path(), &format!("{best}, patience = NUMBER"));
    let text = |patience: usize| format!("algo = \"sft\"\n{}", base.replace("NUMBER", &patience.to_string()));
    let whole = dir.path().join("whole");
    run(&whole, &text(0), false, 100).unwrap();
    let lines = metrics(&whole);
    let losses = values(&lines, &lines[0].stage, "eval/loss");
    assert_eq!(losses.len(), 12);
    for patience in [1, 3] {
        // The first evaluation that has `patience` before it, itself included, none of which is a new best.
        let least = |n: usize| losses[..n].iter().map(|l| l.1).fold(f64::INFINITY, f64::min);
        let end = (patience..losses.len()).find(|&i| least(i + 1) == least(i + 1 - patience)).unwrap();
        let end = losses[end].0;
        assert!(end < 24 && end > 4, "patience {patience} ends at {end}: this shows nothing");

        let runs = dir.path().join(format!("runs{patience}"));
        let outcome = run(&runs, &text(patience), false, 100).unwrap();
        let got = metrics(&runs);
        assert!(got == lines[..end as usize], "patience {patience}: {} steps, not {end}", got.len());
        let weights = std::fs::read(outcome.model.unwrap().join("model.safetensors")).unwrap();

        // Stopped and resumed it ends there too; a run that is over stays over.
        let parts = dir.path().join(format!("parts{patience}"));
        assert!(run(&parts, &text(patience), false, end - 1).unwrap().interrupted);
        for _ in 0..2 {
            let outcome = run(&parts, &text(patience), true, 100).unwrap();
            assert!(metrics(&parts) == got, "patience {patience}, resumed");
            let again = std::fs::read(outcome.model.unwrap().join("model.safetensors")).unwrap();
            assert!(again == weights, "patience {patience}: other weights");
        }
    }
}

#[test]
fn patience_without_anything_to_wait_for_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let rows = write(dir.path(), "rows.jsonl", "{\"prompt\": \"1 \", \"response\": \"one\"}\n");
    for (more, says) in [
        ("checkpoint.patience = 1", "checkpoint.patience needs a metric of the evaluation"),
        (
            "checkpoint = { patience = 1, metric = \"loss\", lower_is_better = true }",
            "checkpoint.patience needs a metric of the evaluation",
        ),
        ("checkpoint = { patience = 1, metric = \"eval/pass@1\" }", "counts evaluations"),
        (
            "eval = { every = 1, split = 0.5 }\ncheckpoint = { patience = 1, metric = \"eval/loss\" }",
            "largest loss",
        ),
    ] {
        let error = fails(&model, &format!("algo = \"sft\"\ndata.train = {rows:?}\n{more}"));
        assert!(error.contains(says), "{error}");
    }
}

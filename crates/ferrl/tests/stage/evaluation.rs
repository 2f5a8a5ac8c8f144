//! Held-out examples of supervised stages: their loss, the checkpoints it rates, and the true epoch.

use crate::help::{fails, metrics, model, run, stage, write};
use ferrl::algo::Feed;
use ferrl::run::{CheckpointOptions, Checkpoints, Files};
use ferrl::setup;
use ferrl::source::Item;
use std::path::Path;

fn rows(n: usize) -> String {
    (0..n).map(|i| format!("{{\"prompt\": \"{i} \", \"response\": \"row {i}\"}}\n")).collect()
}

fn recipe(data: &str, more: &str) -> String {
    format!(
        "algo = \"sft\"\ndata.train = {data:?}\ndata.max_length = 32\noptim.lr = 3e-3\n\
         train.batch = 4\ntrain.micro_batch_tokens = 64\n{more}"
    )
}

#[test]
fn held_out_rows_are_never_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(40)));
    let mut stage = stage(&model, &recipe(&data, "eval = { split = 0.2, every = 1 }")).unwrap();
    let (recipe, tokenizer) = (stage.recipe.clone(), stage.tokenizer.clone());
    let texts = |items: Vec<Item>| -> Vec<String> {
        let given = items.into_iter().map(|i| match i {
            Item::Sequences(s) => tokenizer.decode(&s[0].ids, true).unwrap(),
            other => panic!("{other:?}"),
        });
        given.collect()
    };
    let part = |held_out| {
        setup::source(
            &recipe,
            Path::new(&model),
            &tokenizer,
            Feed::Demonstrations,
            held_out,
            &Default::default(),
        )
    };
    let mut held = part(true).unwrap();
    assert_eq!(held.epoch(), Some(8));
    let held = texts(held.next(8).unwrap());
    assert_eq!(stage.source.epoch(), Some(32));
    let mut trained = texts(stage.source.next(32).unwrap());
    assert!(trained.iter().all(|t| !held.contains(t)));
    trained.extend(held.clone());
    trained.sort();
    trained.dedup();
    assert_eq!(trained.len(), 40);
    assert_eq!(held, texts(part(true).unwrap().next(8).unwrap()), "the same rows every time");
}

#[test]
fn the_loss_is_that_of_the_examples_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(16)));
    let text = recipe(&data, &format!("eval = {{ data = {data:?}, every = 1, prompts = 16 }}"));
    let mut plain = stage(&model, &text).unwrap();
    let mut watched = stage(&model, &text).unwrap();
    for _ in 0..3 {
        let mut source = setup::source(
            &watched.recipe,
            Path::new(&model),
            &watched.tokenizer,
            Feed::Demonstrations,
            true,
            &Default::default(),
        )
        .unwrap();
        let loss = watched.validate(&mut source, 16).unwrap().get("eval/loss").unwrap();
        assert!(loss.is_finite() && loss > 0.0);
        let (a, b) = (plain.step().unwrap().metrics, watched.step().unwrap().metrics);
        assert_eq!(a.get("loss"), b.get("loss"));
        assert_eq!(a.get("grad_norm"), b.get("grad_norm"));
    }
}

#[test]
fn the_best_checkpoints_are_kept_by_their_metric_and_epochs_are_true() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(20)));
    let runs = dir.path().join("runs");
    let best = "checkpoint = { keep = 1, keep_best = 2, metric = \"eval/loss\", lower_is_better = true }\n\
                eval = { split = 0.2, every = 2, at_start = true }\ntrain.epochs = 2.0";
    let text = format!("model.path = {model:?}\n{}", recipe(&data, best));
    let outcome = run(&runs, &text, false, 100).unwrap();
    let (_, first, last) = &outcome.evaluations[0];
    let loss =
        |e: &Option<ferrl::evaluate::Evaluation>| e.as_ref().unwrap().metrics.get("eval/loss").unwrap();
    assert!(loss(last) < loss(first));
    let lines = metrics(&runs);
    let epochs: Vec<f64> = lines.iter().map(|r| r.epoch).collect();
    assert_eq!(epochs, [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]);
    let evaluated: Vec<u64> = lines.iter().filter(|r| r.get("eval/loss").is_some()).map(|r| r.step).collect();
    assert_eq!(evaluated, [2, 4, 6, 8]);
    let kept =
        Checkpoints::new(&runs.join("test/checkpoints"), &Files::default(), CheckpointOptions::default());
    let kept = kept.list().unwrap();
    assert!(!kept.is_empty() && kept.iter().all(|(_, b)| b.as_ref().unwrap().metric == "eval/loss"));
    let mut by_loss: Vec<(f64, u64)> =
        lines.iter().filter_map(|r| Some((r.get("eval/loss")?, r.step))).collect();
    by_loss.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (_, step) in &by_loss[..2] {
        assert!(kept.iter().any(|(s, _)| s == step), "{step} is among the best: {kept:?}");
    }
}

#[test]
fn pairs_have_an_accuracy_and_a_margin() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let pair = |i: usize| format!("{{\"prompt\": \"{i} \", \"chosen\": \"yes\", \"rejected\": \"no\"}}\n");
    let data = write(dir.path(), "pairs.jsonl", &(0..12).map(pair).collect::<String>());
    for algo in ["dpo", "rm"] {
        let text = recipe(&data, "eval = { split = 0.25, every = 6 }\ntrain.steps = 6")
            .replace("\"sft\"", &format!("{algo:?}"));
        let runs = dir.path().join(algo);
        run(&runs, &format!("model.path = {model:?}\n{text}"), false, 100).unwrap();
        let last = metrics(&runs).pop().unwrap();
        assert_eq!(last.get("eval/accuracy"), Some(1.0), "{algo}");
        assert!(last.get("eval/margin").unwrap() > 0.0 && last.get("eval/loss").unwrap() < 0.7, "{algo}");
    }
}

#[test]
fn evaluations_that_cannot_happen_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(8)));
    for (more, says) in [
        ("eval.every = 2", "nothing to evaluate on"),
        ("eval.split = 0.1", "no evaluation runs"),
        ("eval = { split = 1.5, every = 1 }", "eval.split: expected"),
        ("eval = { split = 0.1, every = 1, data = \"x\" }", "held out already"),
        (
            "eval = { split = 0.1, every = 1 }\ncheckpoint = { keep_best = 1, metric = \"eval/loss\" }",
            "the largest loss",
        ),
    ] {
        let error = fails(&model, &recipe(&data, more));
        assert!(error.contains(says), "{error}");
    }
    let text = "eval = { split = 0.2, every = 1 }\ncheckpoint = { keep_best = 1, metric = \"eval/lss\" }";
    let text = format!("model.path = {model:?}\n{}", recipe(&data, text));
    let error = run(&dir.path().join("runs"), &text, false, 9).err().unwrap().to_string();
    assert!(error.contains("\"eval/lss\"") && error.contains("= \"eval/loss\""), "{error}");
}

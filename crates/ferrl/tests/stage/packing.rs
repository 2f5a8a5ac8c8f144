//! Micro-batches that are about equally full, and results that do not depend on how they are cut.

use crate::help::{model, stage, weights, write};
use ferrl::algo::UpdatePlan;
use ferrl::batch::{Update, balance, updates};
use ferrl::experience::{Evidence, Experience, Metrics, Sequence};

fn sequence(n: usize, pair: Option<usize>, kind: Evidence) -> Sequence {
    let trained = (0..n).map(|i| i > 0).collect();
    Sequence { ids: vec![1; n], trained, pair, kind, weight: 1.0, ..Default::default() }
}

#[test]
fn micro_batches_are_balanced_and_hold_every_sequence_once() {
    let lengths = (0..64).map(|i| 5 + (i * 37) % 60);
    let e = Experience {
        sequences: lengths
            .enumerate()
            .map(|(g, n)| Sequence { group: g, ..sequence(n, None, Evidence::Plain) })
            .collect(),
    };
    let update = &updates(&e, UpdatePlan::default(), 7, 0)[0];
    let mut all: Vec<usize> = update.bins(&e, 256).unwrap().concat();
    all.sort_unstable();
    assert_eq!(all, (0..64).collect::<Vec<_>>());
    let batches = update.micro_batches(&e, 256).unwrap();
    assert!(batches.iter().all(|b| b.len() <= 256));
    let mut metrics = Metrics::default();
    balance(&batches, &mut metrics);
    assert!(metrics.get("micro_batches/balance").unwrap() > 0.97, "{metrics:?}");
    let tokens: usize = e.sequences.iter().map(|s| s.ids.len()).sum();
    assert_eq!(batches.len(), tokens.div_ceil(256));
}

#[test]
fn pairs_stay_together_and_what_is_too_long_is_named() {
    let pair = |p: usize| {
        [sequence(3 + p % 5, Some(p), Evidence::Chosen), sequence(9 - p % 7, Some(p), Evidence::Rejected)]
    };
    let e = Experience { sequences: (0..20).flat_map(pair).collect() };
    for bin in Update::whole(&e).bins(&e, 24).unwrap() {
        for &i in &bin {
            assert!(bin.contains(&(i ^ 1)));
        }
    }
    let error = Update::whole(&e).bins(&e, 8).unwrap_err().to_string();
    assert!(error.contains("sequence") && error.contains("train.micro_batch_tokens"), "{error}");
}

#[test]
fn a_smaller_budget_changes_weights_by_rounding_only_and_keeps_reference_logps_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let words = ["a", "bb", "ccccccc", "dddd", "eeeeeeeeeeee", "ff"];
    let rows: Vec<String> = (0..12)
        .map(|i| {
            let (c, r) = (words[i % 6], words[(i * 5 + 1) % 6]);
            format!("{{\"prompt\": \"{}\", \"chosen\": \"{c}\", \"rejected\": \"{r}\"}}", words[(i + 2) % 6])
        })
        .collect();
    let data = write(dir.path(), "pairs.jsonl", &rows.join("\n"));
    let run = |budget: usize| {
        let recipe = format!(
            "algo = \"dpo\"\ndata.train = {data:?}\ndata.max_length = 32\noptim.lr = 1e-3\n\
             train = {{ steps = 2, batch = 12, micro_batch_tokens = {budget} }}"
        );
        let mut stage = stage(&model, &recipe).unwrap();
        // At the start the policy is its own reference: any mix-up of rows would show as a margin.
        let first = stage.step().unwrap().metrics;
        assert_eq!(first.get("rewards/margins"), Some(0.0));
        assert!((first.get("loss").unwrap() - std::f64::consts::LN_2).abs() < 1e-9);
        let second = stage.step().unwrap().metrics;
        (weights(&stage), second.get("loss").unwrap(), second.get("micro_batches").unwrap())
    };
    let (whole, loss, one) = run(4096);
    let (cut, cut_loss, many) = run(64);
    assert!(one == 1.0 && many > 3.0, "{one} and {many} micro-batches");
    assert!((loss - cut_loss).abs() < 1e-5, "{loss} and {cut_loss}");
    let worst = whole.iter().zip(&cut).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");
}

//! Gradients before the forward pass: the same bits, and two passes where a guess was wrong.

use crate::help::{model, stage, weights};
use ferrl::train::Stage;

/// Random answers are rewarded for having such a letter, so advantages are not all zero.
fn recipe(algo: &str, train: &str) -> String {
    format!(
        "data.train = \"task:countdown\"\ndata.max_length = 48\n\
         reward = {{ verifier = \"regex\", truncated = \"score\", options = {{ pattern = \"[a-m]\", whole = false }} }}\noptim.lr = 1e-2\n\
         train = {{ steps = 5, {train} }}\nrollout = {{ prompts = 2, samples = 4, max_new_tokens = 8 }}\nalgo = {algo}"
    )
}

fn steps(mut stage: Stage, one_pass: bool) -> (Vec<f32>, Vec<Option<f64>>, bool) {
    stage.one_pass = one_pass;
    let names = ["loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/max"];
    let report = |stage: &mut Stage| stage.step().unwrap().metrics;
    let all: Vec<_> = (0..4).map(|_| report(&mut stage)).collect();
    let numbers = all.iter().flat_map(|m| names.map(|n| m.get(n))).collect();
    (weights(&stage), numbers, stage.one_pass)
}

#[test]
fn precomputed_gradients_are_the_gradients() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let algorithms = [
        "\"grpo\"",
        "\"rloo\"",
        "{ name = \"grpo\", kl = { coef = 0.1 }, epochs = 2 }",
        "{ name = \"gspo\", minibatches = 2 }",
        "{ name = \"grpo\", entropy_coef = 0.01 }",
    ];
    for algo in algorithms {
        for train in ["micro_batch_tokens = 4096", "micro_batch_tokens = 64"] {
            let build = || stage(&model, &recipe(algo, train)).unwrap();
            let (with, without) = (steps(build(), true), steps(build(), false));
            assert!(with.0 == without.0 && with.0 != weights(&build()), "{algo} {train}: the weights differ");
            assert_eq!(with.1, without.1, "{algo} {train}");
            assert!(with.2, "{algo} {train}: the sampler and the trainer agree");
        }
    }
}

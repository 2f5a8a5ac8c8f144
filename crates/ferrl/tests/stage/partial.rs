//! Completions that go on in later steps.

use crate::help::{metrics, model, run, stage, weights};
use ferrl::partial::Unfinished;

fn recipe(piece: usize, more: &str) -> String {
    format!(
        "data.train = \"task:countdown\"\ndata.max_length = 48\nreward = \"countdown\"\noptim.lr = 1e-2\n\
         train = {{ steps = 6, micro_batch_tokens = 256 }}\n\
         rollout = {{ prompts = 4, samples = 3, max_new_tokens = 9, partial_tokens = {piece} }}\n{more}"
    )
}

fn grpo(piece: usize) -> String {
    // The entropy and KL terms move the weights at every step, whatever the rewards.
    recipe(piece, "algo = { name = \"grpo\", entropy_coef = 0.05, correction = { kind = \"truncate\" } }")
}

#[test]
fn a_completion_gets_so_many_tokens_of_each_policy_and_each_prompt_is_learned_from_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut stage = stage(&model, &grpo(3)).unwrap();
    let (mut learned, mut waited, mut versions) = (Vec::new(), 0.0, 0);
    for step in 0..6 {
        let report = stage.step().unwrap();
        assert!(!report.rollouts.is_empty(), "step {step} learns from something");
        let difference = report.metrics.get("sampling/sampling_logp_difference/max").unwrap_or(0.0);
        assert_eq!(
            difference, 0.0,
            "tokens of this version have the trainer's bits, after tokens of others too"
        );
        waited += report.metrics.get("completions/in_flight").unwrap();
        learned.extend(report.rollouts.iter().map(|r| r.prompt.index));
        versions += usize::from(report.metrics.get("sampling/lag").is_some_and(|lag| lag > 0.0));
    }
    assert!(waited > 0.0, "some completions are longer than 3 tokens");
    assert!(versions > 0, "some steps learn from tokens of earlier policies");
    // Every prompt that was drawn is learned from once, with all of its completions, or still in flight.
    let mut all: Vec<u64> = learned.clone();
    all.dedup();
    let count = |index: u64| learned.iter().filter(|&&i| i == index).count();
    assert!(all.iter().all(|&index| count(index) == 3), "{learned:?}");
    all.extend(stage.unfinished.iter().map(|u| u.prompt.index));
    all.sort_unstable();
    // Three rounds of four prompts in the first step, until the first are over, and one in each of the others.
    assert_eq!(all, (0..32).collect::<Vec<u64>>());
}

#[test]
fn partial_rollouts_with_room_for_whole_completions_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let after = |piece: usize| {
        let mut stage = stage(&model, &grpo(piece)).unwrap();
        (0..3).for_each(|_| drop(stage.step().unwrap()));
        assert!(stage.unfinished.is_empty());
        weights(&stage)
    };
    assert!(after(0) == after(9));
    assert!(after(0) == after(100));
}

/// What waits is part of a checkpoint: a run that is stopped and taken up again writes the same bytes.
#[test]
fn a_stopped_and_resumed_run_with_completions_in_flight_is_the_same_run() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("model.path = {:?}\n{}", model(dir.path()), grpo(3));
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    run(&whole, &text, false, 100).unwrap();
    assert!(run(&parts, &text, false, 2).unwrap().interrupted);
    assert!(run(&parts, &text, true, 1).unwrap().interrupted);
    assert!(!run(&parts, &text, true, 100).unwrap().interrupted);
    assert_eq!(metrics(&whole), metrics(&parts));
    let bytes = |runs: &std::path::Path| std::fs::read(runs.join("test/stages/0/model.safetensors")).unwrap();
    assert!(bytes(&whole) == bytes(&parts));
}

/// Bits of log-probabilities survive being written and read.
#[test]
fn completions_in_flight_are_written_and_read_bit_by_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = stage(&model(dir.path()), &grpo(2)).unwrap();
    stage.step().unwrap();
    assert!(!stage.unfinished.is_empty());
    let text = serde_json::to_string(&stage.unfinished).unwrap();
    let back: Vec<Unfinished> = serde_json::from_str(&text).unwrap();
    assert_eq!(back, stage.unfinished);
}

#[test]
fn what_cannot_be_continued_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let refused = |more: &str| {
        let text = format!("model.path = {path:?}\n{}", recipe(3, more));
        let resolved = ferrl::recipe::Recipe::parse(&text, "r.toml", "r", &[]).unwrap();
        resolved.check(&["countdown"]).unwrap_err().to_string()
    };
    assert!(refused("algo = \"dapo\"").contains("algo.refills"));
    assert!(refused("env.gem = \"game:GuessTheNumber-v0\"").contains("rollout.partial_tokens"));
}

//! Rollouts that run ahead of training.

use crate::help::{metrics, model, run, stage, weights};
use ferrl::train::{Stage, StepExperience};
use std::collections::VecDeque;

fn recipe(lag: usize, more: &str) -> String {
    format!(
        "data.train = \"task:countdown\"\ndata.max_length = 48\nreward = \"countdown\"\noptim.lr = 1e-2\n\
         train = {{ steps = 5, micro_batch_tokens = 256 }}\n\
         rollout = {{ prompts = 2, samples = 3, max_new_tokens = 6, max_lag = {lag} }}\n{more}"
    )
}

fn grpo(lag: usize) -> String {
    // Countdown's rewards are all zero for a random model; the KL term makes every step move the weights.
    recipe(lag, "algo = { name = \"grpo\", entropy_coef = 0.05, correction = { kind = \"truncate\" } }")
}

#[test]
fn experience_is_learned_from_that_many_updates_after_it_was_sampled() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut stage = stage(&model, &grpo(2)).unwrap();
    for step in 0..5u64 {
        assert_eq!(stage.policy.model.version, step);
        let report = stage.step().unwrap();
        let lag = step.min(2);
        assert_eq!(report.metrics.get("sampling/lag"), Some(lag as f64), "step {step}");
        let difference = report.metrics.get("sampling/sampling_logp_difference/max");
        assert_eq!(difference, (lag == 0).then_some(0.0), "only tokens of this version are compared");
        // Old log-probabilities are the policy's as it is now, so that the ratio starts at one.
        assert_eq!(report.metrics.get("policy/ratio"), Some(1.0));
        assert_eq!(stage.ahead.len() as u64, 2.min(4 - step), "drained towards the end");
    }
}

#[test]
fn without_lag_nothing_waits() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut stage = stage(&model, &grpo(0)).unwrap();
    for _ in 0..3 {
        let report = stage.step().unwrap();
        assert!(stage.ahead.is_empty());
        assert_eq!(report.metrics.get("sampling/sampling_logp_difference/max"), Some(0.0));
        assert_eq!(report.metrics.get("sampling/lag"), Some(0.0));
    }
}

/// What waits is part of a checkpoint: put into a stage built anew it gives the same bits.
#[test]
fn rollouts_in_flight_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let build = || stage(&model, &grpo(2)).unwrap();
    let mut whole = build();
    (0..2).for_each(|_| drop(whole.step().unwrap()));
    let text = serde_json::to_string(&whole.ahead).unwrap();
    let back: VecDeque<StepExperience> = serde_json::from_str(&text).unwrap();
    assert_eq!(back, whole.ahead);
    assert_eq!(back.len(), 2);
    // The same steps again, but with the queue as it was written and read.
    let mut again: Stage = build();
    (0..2).for_each(|_| drop(again.step().unwrap()));
    again.ahead = back;
    for _ in 0..3 {
        whole.step().unwrap();
        again.step().unwrap();
    }
    assert!(weights(&whole) == weights(&again));
    assert!(weights(&whole) != weights(&build()));
}

/// The whole way: a run that is stopped with rollouts in flight and taken up again writes the same bytes.
#[test]
fn a_stopped_and_resumed_run_with_lag_is_the_same_run() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("model.path = {:?}\n{}", model(dir.path()), grpo(2));
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    run(&whole, &text, false, 100).unwrap();
    assert!(run(&parts, &text, false, 2).unwrap().interrupted);
    assert!(run(&parts, &text, true, 1).unwrap().interrupted);
    assert!(!run(&parts, &text, true, 100).unwrap().interrupted);
    assert_eq!(metrics(&whole), metrics(&parts));
    let bytes = |runs: &std::path::Path| std::fs::read(runs.join("test/stages/0/model.safetensors")).unwrap();
    assert!(bytes(&whole) == bytes(&parts));
}

/// Weights that moved under the sampler's feet, or tokens of another model: learned from, they would be noise.
#[test]
fn a_sampled_log_probability_that_the_weights_do_not_give_stops_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut stage = stage(&model, &grpo(1)).unwrap();
    stage.step().unwrap();
    let waiting = stage.ahead[0].clone();
    let with = |collected: StepExperience| {
        let mut fresh = crate::help::stage(&model, &grpo(1)).unwrap();
        fresh.ahead.push_back(collected);
        fresh.step()
    };
    assert!(with(waiting.clone()).is_ok(), "the same weights sampled it");
    let mut off = waiting;
    let s = &mut off.experience.sequences[2];
    let at = s.actions().next().unwrap();
    s.sampled_logp[at] = f32::from_bits(s.sampled_logp[at].to_bits() ^ 1);
    let error = with(off).err().expect("one bit is enough").to_string();
    assert!(
        error.contains("log-probabilities differ by") && error.contains("same policy version"),
        "{error}"
    );
}

//! Advantages, losses and gradients against TRL's own (`tools/make_trl_policy_fixtures.py`), on fixed numbers.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::find;
use ferrl::experience::{ByRole, Experience, Loss, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::train::Stats;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Prompts have two tokens, so the first answer token is predicted at position 1.
const FIRST: usize = 1;
const TOLERANCE: f64 = 1e-5;

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().unwrap().iter().map(floats).collect()
}

/// A column with the answer's numbers at the positions that predict its tokens.
fn column(answer: &[f64]) -> Vec<f32> {
    let mut column = vec![0.0; FIRST];
    column.extend(answer.iter().map(|&x| x as f32));
    column.push(0.0);
    column
}

fn experience(all: &Value) -> Experience {
    let (old, reference, rewards) = (rows(&all["old"]), rows(&all["ref"]), rows(&all["rewards"]));
    let (weights, group) = (floats(&all["weights"]), all["group"].as_u64().unwrap() as usize);
    let sequence = |k: usize| {
        let tokens = old[k].len();
        let total: f64 = rewards[k].iter().zip(&weights).map(|(r, w)| r * w).sum();
        let mut reward = vec![0.0; tokens + 2];
        reward[FIRST + tokens - 1] = total as f32;
        Sequence {
            ids: vec![1; tokens + 2],
            trained: (0..tokens + 2).map(|i| i > FIRST).collect(),
            trajectory: k,
            group: k / group,
            weight: 1.0,
            trajectory_tokens: tokens,
            reward,
            sources: weights.iter().zip(&rewards[k]).map(|(w, r)| (*w as f32, Some(*r as f32))).collect(),
            sampled_logp: column(&old[k]),
            ref_logp: column(&reference[k]),
            ..Default::default()
        }
    };
    Experience { sequences: (0..old.len()).map(sequence).collect() }
}

/// Our loss on the moved log-probabilities, with the settings of a case; also the advantages.
fn ours(all: &Value, settings: &Map<String, Value>) -> (Loss, Vec<f64>) {
    let mut settings = settings.clone();
    let name = settings.shift_remove("name").unwrap();
    let mut algorithm = (find(name.as_str().unwrap()).unwrap().build)(Value::Object(settings)).unwrap();
    let mut e = experience(all);
    algorithm.prepare(&mut e).unwrap();
    let logp: Vec<f32> = rows(&all["new"]).iter().flat_map(|r| column(r)).collect();
    let entropy = vec![1.0; logp.len()];
    let mut stats = ByRole::default();
    stats.set(Role::Policy, Stats { logp, entropy, ..Default::default() });
    let batch =
        MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
    let loss = algorithm.loss(&batch, &stats);
    (loss, e.sequences.iter().map(|s| s.advantage[FIRST] as f64).collect())
}

/// Relative to the largest of the numbers it stands among.
fn close(got: f64, want: f64, scale: f64) -> bool {
    (got - want).abs() <= TOLERANCE * scale.max(want.abs())
}

fn check(all: &Value, case: &Value) {
    let settings = case["ours"].as_object().unwrap();
    let (loss, advantages) = ours(all, settings);
    let gradient = &loss.grads.get(Role::Policy).unwrap().logp;
    let what = &case["theirs"];
    for (got, want) in advantages.iter().zip(floats(&case["advantages"])) {
        assert!(close(*got, want, 0.1), "{what}: advantage {got}, TRL's {want}");
    }
    let mut want = Vec::new();
    for answer in rows(&case["grads"]) {
        want.extend(column(&answer).into_iter().map(f64::from));
    }
    let largest = want.iter().fold(0.0f64, |m, w| m.max(w.abs()));
    assert!(largest > 0.0 && gradient.len() == want.len());
    for (row, (got, want)) in gradient.iter().zip(&want).enumerate() {
        assert!(close(*got as f64, *want, 0.01 * largest), "{what}: gradient[{row}] {got}, TRL's {want}");
    }
    let mut value = loss.value;
    if case["theirs"]["loss_type"] == "cispo" {
        // TRL's number for the surrogate is its detached weights times the log-probabilities: our gradient without
        // the KL, times them. The KL's own part is what the coefficient adds to our loss.
        let mut without = settings.clone();
        without.insert("kl".into(), serde_json::json!({ "coef": 0.0 }));
        let plain = ours(all, &without).0;
        let logp: Vec<f32> = rows(&all["new"]).iter().flat_map(|r| column(r)).collect();
        let weights = &plain.grads.get(Role::Policy).unwrap().logp;
        let linear: f64 = weights.iter().zip(logp).map(|(w, l)| *w as f64 * l as f64).sum();
        value = value - plain.value + linear;
    }
    // Clipped tokens, or with a ratio per completion clipped completions.
    for (name, want) in case["metrics"].as_object().unwrap() {
        let (got, want) = (loss.metrics.get(name).unwrap(), want.as_f64().unwrap());
        assert!((got - want).abs() < 1e-6, "{what}: {name} {got}, TRL's {want}");
    }
    let want = case["loss"].as_f64().unwrap();
    assert!(close(value, want, 0.01), "{what}: loss {value}, TRL's {want}");
}

#[test]
fn losses_and_gradients_are_those_of_trl() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trl/policy.json");
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    let named: BTreeSet<&str> = cases.iter().map(|c| c["ours"]["name"].as_str().unwrap()).collect();
    for name in ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gdpo", "rloo"] {
        assert!(named.contains(name), "no case for {name}");
    }
    cases.iter().for_each(|case| check(&all, case));
}

//! What a stage does for an algorithm beside its loss: which weights change, and where they start from.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{InitSettings, Recipe, RewardSettings};
use ferrl::setup;
use ferrl::train::Stage;
use serde_json::{Value, json};

fn recipe(algo: Value) -> Recipe {
    let mut r = Recipe { algo: algo.as_object().unwrap().clone(), ..Default::default() };
    let (heads, kv_heads, ffn) = (Some(2), Some(2), Some(32));
    let init =
        InitSettings { hidden: 16, layers: 1, heads, kv_heads, ffn, max_positions: 64, ..Default::default() };
    r.model.init = Some(init);
    r.data.train = vec!["task:chain".into()];
    r.data.max_length = 48;
    (r.train.steps, r.train.batch, r.optim.lr) = (Some(4), 4, 1e-2);
    (r.rollout.prompts, r.rollout.samples, r.rollout.max_new_tokens) = (4, 2, 8);
    r.rollout.cache_mib = 4;
    r
}

fn stage(recipe: Recipe) -> (Stage, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let dir = setup::starting_model(&recipe, &folder.path().join("start")).unwrap();
    let backend = ferrl_kernels::open("cpu", Some(2)).unwrap();
    (setup::stage(recipe, backend, &dir).unwrap(), folder)
}

/// Every weight by name, as bits.
fn weights(stage: &Stage) -> Vec<(String, Vec<u32>)> {
    let model = &stage.policy.model;
    let bits = |i: usize| model.read(i).unwrap().into_iter().map(f32::to_bits).collect();
    (0..model.params.len()).map(|i| (model.params[i].shape.name(), bits(i))).collect()
}

#[test]
fn a_head_only_start_leaves_the_trunk_alone_and_then_trains_it() {
    for name in ["rm", "classifier"] {
        let (mut stage, _folder) = stage(recipe(json!({ "name": name, "head_only_steps": 2 })));
        let start = weights(&stage);
        for _ in 0..2 {
            assert!(stage.step().unwrap().metrics.get("grad_norm").unwrap() > 0.0);
        }
        let after = weights(&stage);
        for ((name, before), (_, now)) in start.iter().zip(&after) {
            assert_eq!(before != now, name.starts_with("value."), "{name}");
        }
        stage.step().unwrap();
        assert_eq!(stage.policy.optimizer.steps, 1, "the optimizer starts anew");
        let trained = weights(&stage);
        let moved = after.iter().zip(&trained).filter(|(a, b)| a != b).count();
        assert!(moved > after.len() / 2, "{moved} of {}", after.len());
    }
}

#[test]
fn a_restart_goes_back_to_the_stage_s_first_weights() {
    for restart in [true, false] {
        // Every answer is good enough.
        let mut r = recipe(json!({ "name": "rest_em", "threshold": -1.0, "restart": restart }));
        r.reward = vec![RewardSettings { verifier: Some("chain".into()), ..Default::default() }];
        let (mut stage, _folder) = stage(r);
        let start = weights(&stage);
        stage.step().unwrap();
        let moved = weights(&stage);
        assert_ne!(start, moved);
        // At a rate of zero the second step ends where its updates began.
        stage.schedules.0.lr = 0.0;
        stage.step().unwrap();
        assert_eq!(weights(&stage), if restart { start } else { moved });
    }
}

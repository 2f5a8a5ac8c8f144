//! From a model's mistakes to pairs of steps, and from those to a better model.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::Feed;
use ferrl::recipe::{InitSettings, Recipe};
use ferrl::rollout::Actor;
use ferrl::setup;
use ferrl::steps::{StepPairs, StepSettings, judge};
use ferrl::train::Stage;
use ferrl::verify::chain::Chain;
use ferrl_engine::checkpoint::{SaveOptions, StorageFormat};
use ferrl_engine::generate::{CacheOptions, Sampler};
use serde_json::{Map, Value, json};
use std::path::Path;

fn recipe(algo: Value) -> Recipe {
    let mut r = Recipe { algo: algo.as_object().unwrap().clone(), ..Default::default() };
    r.data.train = vec!["task:chain".into()];
    r.data.task = json!({ "steps": 2, "max_number": 4, "noise": 0.5 }).as_object().unwrap().clone();
    r.data.max_length = 32;
    (r.train.steps, r.train.batch) = (Some(200), 32);
    (r.optim.lr, r.rollout.max_new_tokens, r.rollout.cache_mib) = (4e-3, 24, 8);
    r
}

/// Trains and gives the mean of a metric over the last ten steps.
fn train(mut stage: Stage, metric: &str) -> (Stage, f64) {
    let all: Vec<f64> = (0..stage.schedules.0.total_steps)
        .map(|_| stage.step().unwrap().metrics.get(metric).unwrap())
        .collect();
    (stage, all[all.len() - 10..].iter().sum::<f64>() / 10.0)
}

/// Pairs of steps from the model of a stage.
fn collect(stage: &Stage, recipe: &Recipe, dir: &Path) -> Vec<Map<String, Value>> {
    let verifier = judge(recipe).unwrap();
    let cache = CacheOptions { bytes: 8 << 20, ..Default::default() };
    let mut sampler =
        Sampler::new(&stage.policy.model, cache).unwrap().with_tokenizer(stage.tokenizer.clone());
    let mut source =
        setup::source(recipe, dir, &stage.tokenizer, Feed::Rollouts, false, &Default::default()).unwrap();
    let mut pairs = StepPairs {
        actor: Actor {
            generator: &mut sampler,
            policy: &stage.policy.model,
            tokenizer: &stage.tokenizer,
            stops: &stage.stops,
            environments: &stage.environments,
            ranks: ferrl_kernels::Ranks::ALONE,
        },
        verifier: &*verifier,
        recipe,
        settings: StepSettings { prompts: 100, samples: 2, ..Default::default() },
    };
    let mut rows = Vec::new();
    let mut asked = 0;
    let mut keep = |row| {
        rows.push(row);
        Ok(())
    };
    let found = pairs.run(&mut source, &mut keep, &mut |n, _| asked = n).unwrap();
    assert_eq!((asked, found.completions, found.pairs), (100, 200, rows.len()));
    assert!(found.wrong >= found.pairs && found.pairs > 20, "{found:?}");
    rows
}

#[test]
fn mistakes_become_pairs_of_steps_that_a_method_learns_from() {
    let folder = tempfile::tempdir().unwrap();
    let start = folder.path().join("start");
    let mut first = recipe(json!({ "name": "sft" }));
    first.model.init = Some(InitSettings {
        hidden: 32,
        layers: 1,
        heads: Some(2),
        kv_heads: Some(2),
        ffn: Some(64),
        max_positions: 64,
        ..Default::default()
    });
    let dir = setup::starting_model(&first, &start).unwrap();
    let backend = ferrl_kernels::open("cpu", Some(2)).unwrap();
    let (stage, _) = train(setup::stage(first.clone(), backend.clone(), &dir).unwrap(), "loss");
    let rows = collect(&stage, &first, &dir);
    for row in &rows {
        let chain = Chain::read(&row["terms"]).unwrap();
        let [before, chosen, rejected] =
            ["initial_reason_steps", "chosen", "rejected"].map(|c| row[c].as_str().unwrap());
        let right = chain.lines(None).concat();
        assert!(right.starts_with(&format!("{before}{chosen}")), "{row:?}");
        assert_eq!(chain.first_wrong(&format!("{before}{rejected}")).unwrap().start, before.len());
    }
    assert_eq!(rows, collect(&stage, &first, &dir), "the same seed finds the same");

    // The rows are data like any other.
    let trained = folder.path().join("trained");
    let options = SaveOptions { dtype: StorageFormat::F32, source: Some(&dir), ..Default::default() };
    stage.policy.model.save(&trained, None, &options).unwrap();
    let file = folder.path().join("steps.jsonl");
    let lines: Vec<String> = rows.iter().map(|r| Value::Object(r.clone()).to_string()).collect();
    std::fs::write(&file, lines.join("\n")).unwrap();
    let mut second = recipe(json!({ "name": "step_dpo" }));
    second.data.train = vec![file.to_string_lossy().into_owned()];
    (second.optim.lr, second.train.steps, second.train.batch) = (1e-3, Some(80), 16);
    let (_, accuracy) = train(setup::stage(second, backend, &trained).unwrap(), "rewards/accuracies");
    assert!(accuracy > 0.9, "{accuracy}");
}

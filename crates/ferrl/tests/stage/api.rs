//! The programs of `examples/` on a small model, and what the API refuses.

use crate::help::{backend, model};
use ferrl::api::{Config, Rewards, Sample, Trainer};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[path = "../../examples/dpo.rs"]
#[allow(dead_code)] // its main is not run here
mod dpo;
#[path = "../../examples/grpo.rs"]
#[allow(dead_code)]
mod grpo;
#[path = "../../examples/reward.rs"]
#[allow(dead_code)]
mod reward;

/// Log-probability of an answer and its end.
fn logp(dir: &str, prompt: &str, answer: &str) -> f64 {
    let model = Model::load(backend(), &ModelDir::open(Path::new(dir)).unwrap(), Options::default()).unwrap();
    let tokenizer = Tokenizer::from_dir(Path::new(dir)).unwrap();
    let mut ids = tokenizer.encode_prompt(prompt).unwrap();
    let start = ids.len();
    ids.extend(tokenizer.encode_text(answer).unwrap());
    ids.extend(tokenizer.eos().first());
    let all = stats(&model, &Batch::of([ids]), 1.0).unwrap().logp;
    all[start - 1..].iter().map(|&l| f64::from(l)).sum()
}

#[test]
fn the_examples_learn_what_they_show() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let out = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let (before, after) = dpo::train(&model, &out("dpo")).unwrap();
    assert!(before == 0.0 && after > 0.5, "{before} to {after}");
    grpo::train(&model, &out("grpo")).unwrap();
    let margin = |dir: &str| logp(dir, "2 + 2 = ", "4") - logp(dir, "2 + 2 = ", "7");
    let (before, after) = (margin(&model), margin(&out("grpo")));
    assert!(after > before + 0.5, "{before} to {after}");
    let rewards = reward::train(&model, &out("reward")).unwrap();
    assert!(rewards.len() == 20 && rewards.iter().any(|r| *r > 0.0), "{rewards:?}");
}

#[test]
fn training_with_ones_own_reward_takes_15_lines() {
    let text = include_str!("../../examples/reward.rs");
    let body = text.split("pub(crate) fn train").nth(1).unwrap().split("fn main").next().unwrap();
    assert!(body.lines().count() <= 15, "{body}");
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let config = |algorithm| Config { batch_size: 1, max_length: 32, ..Config::new(algorithm, &model) };
    let says = |config: Config, rows: Vec<Value>, part: &str| {
        let e = Trainer::new(config, rows).err().unwrap().to_string();
        assert!(e.contains(part), "{e}");
    };
    let pair = || vec![json!({ "prompt": "a", "chosen": "b", "rejected": "c" })];
    says(config("gpro"), vec![], "\"grpo\"");
    says(Config { beta: Some(0.1), ..config("sft") }, vec![], "no beta");
    says(Config { reference: Some(model.clone().into()), ..config("sft") }, vec![], "no reference");
    says(Config { lr: -1.0, ..config("dpo") }, pair(), "optim.lr");
    says(Config { settings: vec!["optim.lrr=1".into()], ..config("dpo") }, pair(), "optim.lr");
    says(config("dpo"), vec![json!({ "prompt": "a", "chosen": "b" })], "dataset:1");
    says(config("dpo"), vec![json!("a")], "dataset:1");
    says(config("grpo"), vec![json!({ "prompt": "a" })], "needs rewards");
    let rows = vec![json!({ "prompt": "a" })];
    let mut trainer = Trainer::with_reward(config("grpo"), rows, |_: &Sample<'_>| f64::NAN).unwrap();
    let e = trainer.train(1).err().unwrap().to_string();
    assert!(e.contains("function returned a reward of NaN"), "{e}");
}

#[test]
fn several_rewards_are_added_by_weight() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { batch_size: 1, max_new_tokens: 3, ..Config::new("grpo", model(dir.path())) };
    let short = |s: &Sample<'_>| f64::from(s.completion.len() < 2);
    let rewards = Rewards::default().with(1.0, |_: &Sample<'_>| 1.0).with(0.5, short);
    let mut trainer = Trainer::with_rewards(config, [json!({ "prompt": "a" })], rewards).unwrap();
    let step = &trainer.train(1).unwrap()[0];
    let (whole, parts) = (step.get("reward").unwrap(), step.get("rewards/function/mean").unwrap());
    assert!((1.0..=1.5).contains(&whole) && (0.5..=1.0).contains(&parts), "{whole} {parts}");
}

#[test]
fn a_reference_of_its_own_is_compared_with() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let rows = [json!({ "prompt": "a", "chosen": "b", "rejected": "c" })];
    let train = |reference: Option<PathBuf>| {
        let config =
            Config { batch_size: 1, max_length: 32, lr: 1e-2, reference, ..Config::new("dpo", &model) };
        let mut trainer = Trainer::new(config, rows.clone()).unwrap();
        let first = trainer.train(3).unwrap()[0].get("rewards/margins").unwrap();
        let out = dir.path().join("out");
        let _ = std::fs::remove_dir_all(&out);
        trainer.save(&out).unwrap();
        (first, out)
    };
    let (same, out) = train(None);
    let (other, _) = train(Some(out.clone()));
    assert!(same == 0.0 && other < -0.001, "{same} and {other}");
}

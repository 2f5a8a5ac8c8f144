//! The programs of `examples/` on a small model, and what the API refuses.

use crate::help::{backend, model};
use ferrl::api::{Agent, Config, Trainer};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use serde_json::json;
use std::path::Path;

#[path = "../../examples/dpo.rs"]
#[allow(dead_code)] // its main is not run here
mod dpo;
#[path = "../../examples/grpo.rs"]
#[allow(dead_code)]
mod grpo;

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
}

#[test]
fn examples_are_short() {
    for text in [include_str!("../../examples/dpo.rs"), include_str!("../../examples/grpo.rs")] {
        assert!(text.lines().count() < 40);
    }
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let config = Config { batch_size: 1, max_length: 32, ..Default::default() };
    let agent =
        |algo: &str, config: &Config, reference: Option<&Path>| Agent::new(algo, config, &model, reference);
    let says = |e: Option<ferrl::api::Error>, part: &str| {
        let e = e.unwrap().to_string();
        assert!(e.contains(part), "{e}");
    };
    says(agent("gpro", &config, None).err(), "\"grpo\"");
    says(agent("sft", &Config { beta: Some(0.1), ..config.clone() }, None).err(), "no beta");
    says(agent("sft", &config, Some(Path::new(&model))).err(), "no reference");
    says(agent("dpo", &Config { lr: -1.0, ..config.clone() }, None).err(), "optim.lr");
    let rows = vec![json!({ "prompt": "a", "chosen": "b" })];
    says(Trainer::new(agent("dpo", &config, None).unwrap(), rows, config.clone()).err(), "dataset:1");
    let rows = vec![json!("a")];
    says(Trainer::new(agent("dpo", &config, None).unwrap(), rows, config.clone()).err(), "dataset:1");
    let other = Config { lr: 1.0, ..config.clone() };
    says(Trainer::new(agent("dpo", &config, None).unwrap(), vec![json!({})], other).err(), "the same config");
}

#[test]
fn a_reference_of_its_own_is_compared_with() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let config = Config { batch_size: 1, max_length: 32, lr: 1e-2, ..Default::default() };
    let rows = vec![json!({ "prompt": "a", "chosen": "b", "rejected": "c" })];
    let train = |reference: Option<&Path>| {
        let agent = Agent::new("dpo", &config, &model, reference).unwrap();
        let mut trainer = Trainer::new(agent, rows.clone(), config.clone()).unwrap();
        let first = trainer.train(3).unwrap()[0].get("rewards/margins").unwrap();
        let out = dir.path().join("out");
        let _ = std::fs::remove_dir_all(&out);
        trainer.save(&out).unwrap();
        (first, out)
    };
    let (same, out) = train(None);
    let (other, _) = train(Some(&out.clone()));
    assert!(same == 0.0 && other < -0.001, "{same} and {other}");
}

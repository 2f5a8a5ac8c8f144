//! Loss and gradient norm of every step against TRL's trainers, through the real loop: files, tokenizer, loader,
//! reference model, optimizer. The trajectories are made by `tools/make_trl_fixtures.py`.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;
use ferrl::setup;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trl")
}

fn copy(from: &Path, names: &[&str], to: &Path) {
    for name in names {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// Trains as the case says; gives loss and gradient norm of each step.
fn train(case: &Value, micro_batch_tokens: usize) -> Vec<(f64, f64)> {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let settings = &case["settings"];
    let model = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../engine/tests/fixtures/models")
        .join(settings["model"].as_str().unwrap());
    copy(&model, &["config.json", "model.safetensors"], dir);
    copy(&fixtures().join("tokenizer"), &["tokenizer.json", "tokenizer_config.json"], dir);
    let rows = case["rows"].as_array().unwrap();
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    let data = dir.join("rows.jsonl");
    std::fs::write(&data, lines.join("\n")).unwrap();

    let mut recipe = Recipe { algo: settings["algo"].as_object().unwrap().clone(), ..Default::default() };
    recipe.model.dtype = Some("f32".into());
    recipe.data.train = vec![data.to_string_lossy().into_owned()];
    recipe.data.shuffle = false;
    recipe.data.max_length = 64;
    let number = |name: &str| settings["optim"][name].as_f64().unwrap();
    recipe.optim.lr = number("lr");
    (recipe.optim.beta1, recipe.optim.beta2) = (number("beta1"), number("beta2"));
    (recipe.optim.eps, recipe.optim.weight_decay) = (number("eps"), number("weight_decay"));
    recipe.optim.max_grad_norm = number("max_grad_norm");
    if let Some(schedule) = settings["optim"]["schedule"].as_str() {
        (recipe.optim.schedule, recipe.optim.warmup) = (schedule.into(), number("warmup"));
    }
    recipe.train.batch = settings["batch"].as_u64().unwrap() as usize;
    recipe.train.micro_batch_tokens = micro_batch_tokens;

    let backend = ferrl_kernels::open("cpu", Some(2)).unwrap();
    let mut stage = setup::stage(recipe, backend, dir).unwrap();
    let steps = stage.schedules.0.total_steps;
    assert_eq!(steps as usize, case["loss"].as_array().unwrap().len());
    let mut all = Vec::new();
    for _ in 0..steps {
        let metrics = stage.step().unwrap().metrics;
        all.push((metrics.get("loss").unwrap(), metrics.get("grad_norm").unwrap()));
    }
    all
}

fn read(name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn check(name: &str) {
    let case = read(name);
    let ours = train(&case, 4096);
    assert!(ours.len() >= 12);
    let mut worst = 0.0f64;
    for (step, (loss, norm)) in ours.iter().enumerate() {
        for (what, got) in [("loss", *loss), ("grad_norm", *norm)] {
            let want = case[what][step].as_f64().unwrap();
            let off = (got - want).abs() / want.abs();
            worst = worst.max(off);
            let limit = if step < 3 { 1e-5 } else { 1e-4 };
            assert!(
                off < limit,
                "{name}, {what} of step {}: {got} against {want}, off by {off:.1e}",
                step + 1
            );
        }
    }
    println!("{name}: at most {worst:.1e} from TRL in {} steps", ours.len());
}

#[test]
fn sft() {
    check("sft");
    check("sft_cosine");
}

#[test]
fn dpo() {
    check("dpo");
    check("dpo_sft");
}

#[test]
fn ipo() {
    check("ipo");
}

#[test]
fn simpo() {
    check("simpo");
}

#[test]
fn kto() {
    check("kto");
}

#[test]
fn orpo() {
    check("orpo");
}

#[test]
fn reward_model() {
    check("rm");
    check("rm_margin");
}

/// TRL's divisors, and KTO's reference point, are those of a micro-batch. Ours are those of the update, so the cut into
/// micro-batches (here one pair at a time) changes nothing but rounding.
#[test]
fn micro_batches_change_nothing() {
    for name in ["sft", "dpo_sft", "kto", "orpo", "rm"] {
        let case = read(name);
        for (a, b) in train(&case, 4096).iter().zip(train(&case, 40)).take(4) {
            assert!((a.0 - b.0).abs() < 2e-5 * a.0 && (a.1 - b.1).abs() < 2e-5 * a.1, "{name}: {a:?} {b:?}");
        }
    }
}

//! On-policy distillation on tiny real models: the student comes nearer to its teacher.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;
use ferrl::setup;
use ferrl::verify::VERIFIERS;
use ferrl_kernels::cpu::Cpu;
use std::path::Path;
use std::sync::Arc;

const RECIPE: &str = r#"
    model.init = { hidden = 32, layers = 2, heads = 2, kv_heads = 2, ffn = 64, max_positions = 64 }
    data = { train = ["task:countdown"], max_length = 32 }
    rollout = { prompts = 16, samples = 2, max_new_tokens = 6, cache_mib = 8 }
    optim = { lr = 5e-3 }
    train = { steps = 12, micro_batch_tokens = 512 }
    algo = "distill"
"#;

fn parse(overrides: &[String]) -> ferrl::recipe::Resolved {
    Recipe::parse(RECIPE, "test", "test", overrides).unwrap()
}

/// KL per token at each step, with a random model of another seed as teacher.
fn learn(overrides: &[&str]) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let made = |seed: u64| {
        let recipe = parse(&[format!("seed={seed}")]).stages[0].recipe.clone();
        setup::starting_model(&recipe, &dir.path().join(seed.to_string())).unwrap()
    };
    let (student, teacher) = (made(1), made(2));
    // A teacher with opinions: its head is tied to the embedding, which is scaled up.
    sharpen(&teacher);
    let mut words: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    words.push(format!("teacher.path={}", teacher.display()));
    let recipe = parse(&words).stages[0].recipe.clone();
    let mut stage = setup::stage(recipe, Arc::new(Cpu::new(Some(1)).unwrap()), &student).unwrap();
    (0..12).map(|_| stage.step().unwrap().metrics.get("kl").unwrap()).collect()
}

fn sharpen(dir: &Path) {
    let file = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = &header["model.embed_tokens.weight"]["data_offsets"];
    let (from, to) = (at[0].as_u64().unwrap() as usize, at[1].as_u64().unwrap() as usize);
    for value in bytes[8 + length + from..8 + length + to].chunks_exact_mut(4) {
        let scaled = 8.0 * f32::from_le_bytes(value.try_into().unwrap());
        value.copy_from_slice(&scaled.to_le_bytes());
    }
    std::fs::write(&file, bytes).unwrap();
}

#[test]
fn the_student_comes_nearer_to_its_teacher() {
    for (name, overrides) in [("full", vec![]), ("sampled", vec!["algo.full=false"])] {
        let kls = learn(&overrides);
        let (first, last) = (kls[0], kls[11]);
        assert!(first > 0.1 && last < 0.7 * first, "{name}: {kls:?}");
    }
}

#[test]
fn a_teacher_is_asked_for_and_refused_where_it_has_no_use() {
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    let error = parse(&[]).check(&verifiers).err().unwrap().to_string();
    assert!(error.contains("teacher.path"), "{error}");
    let words = ["algo=grpo", "algo.kl.coef=0.0", "teacher.path=x", "reward=exact"].map(String::from);
    let error = parse(&words).check(&verifiers).err().unwrap().to_string();
    assert!(error.contains("has no teacher"), "{error}");
    let error = parse(&["teacher.path=stage:big".into()]).check(&verifiers).err().unwrap().to_string();
    assert!(error.contains("no stage \"big\" comes before"), "{error}");
}

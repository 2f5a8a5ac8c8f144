//! Every algorithm with an adapter: it learns, the base stays as it is, and what is handed on is the adapter alone.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{AdapterSettings, Recipe, Resolved};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, RunWatch};
use ferrl_engine::checkpoint::{ModelDir, base_of};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[derive(Default)]
struct Quiet {
    worst: f64,
    steps: usize,
    until: Option<usize>,
}

impl RunWatch for Quiet {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, record: &StepRecord) {
        self.worst = self.worst.max(record.get("sampling/sampling_logp_difference/max").unwrap_or(0.0));
        self.steps += 1;
    }
    fn interrupted(&self) -> bool {
        self.until.is_some_and(|until| self.steps >= until)
    }
}

fn recipes() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    all.sort();
    all
}

/// Two steps of each stage with a tiny model and an adapter.
fn small(path: &Path) -> Resolved {
    let mut resolved = Recipe::load(path, &[]).unwrap();
    for stage in &mut resolved.stages {
        let r = &mut stage.recipe;
        if let Some(init) = &mut r.model.init {
            (init.hidden, init.layers, init.ffn) = (16, 1, Some(32));
            (init.heads, init.kv_heads) = (Some(2), Some(2));
        }
        (r.train.steps, r.train.batch, r.optim.lr) = (Some(2), 6, 1e-2);
        (r.rollout.prompts, r.rollout.samples, r.rollout.max_new_tokens) = (3, 2, 6);
        (r.rollout.cache_mib, r.eval.prompts, r.eval.at_start) = (4, 0, false);
        (r.checkpoint.use_best, r.checkpoint.metric, r.eval.every) = (false, None, 0);
        r.adapter = Some(AdapterSettings { r: 4, ..Default::default() });
        r.model.frozen.clear();
    }
    resolved
}

fn run(resolved: &Resolved, runs: &Path, watch: &mut Quiet) -> Option<PathBuf> {
    let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
    let folder = match runs.join("run").exists() {
        true => RunFolder::open(&runs.join("run")).unwrap(),
        false => RunFolder::create(runs, "run", &resolved.toml).unwrap(),
    };
    runner::run(resolved, folder, backend, watch).unwrap().model
}

#[test]
fn every_algorithm_trains_an_adapter() {
    let mut shown = BTreeSet::new();
    for path in recipes() {
        let resolved = small(&path);
        let algorithm = resolved.stages.last().unwrap().recipe.algorithm_name().to_string();
        if !shown.insert(algorithm.clone()) {
            continue;
        }
        let runs = tempfile::tempdir().unwrap();
        let mut watch = Quiet::default();
        let model = run(&resolved, runs.path(), &mut watch).unwrap();
        assert_eq!(watch.worst, 0.0, "{algorithm}: what was sampled is not what was trained");
        assert!(model.join("adapter_model.safetensors").is_file(), "{algorithm}");
        assert!(!model.join("model.safetensors").exists(), "{algorithm}");
        let opened = ModelDir::open(&model).unwrap();
        // The base is the model that the first stage started from, as it was.
        assert_eq!(base_of(&model).unwrap().unwrap(), opened.base());
        let state = runs.path().join("run/checkpoints");
        for checkpoint in std::fs::read_dir(state).unwrap() {
            let text = std::fs::read(checkpoint.unwrap().path().join("state/policy.safetensors")).unwrap();
            let header = String::from_utf8_lossy(&text[8..text.len().min(20_000)]).into_owned();
            assert!(header.contains("lora_a") && !header.contains("master.embed"), "{algorithm}");
        }
    }
    let all = ferrl::algo::ALGORITHMS.iter().filter(|e| !shown.contains(e.name)).map(|e| e.name);
    assert_eq!(all.collect::<Vec<_>>(), Vec::<&str>::new(), "algorithms without a recipe");
}

#[test]
fn a_run_with_an_adapter_that_was_stopped_ends_with_the_same_bytes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/lora.toml");
    let resolved = small(&path);
    let weights = |runs: &Path, file: &str| std::fs::read(runs.join("run").join(file)).unwrap();
    let whole = tempfile::tempdir().unwrap();
    run(&resolved, whole.path(), &mut Quiet::default()).unwrap();
    // In the first stage, between the stages, in the second.
    for until in [1, 2, 3] {
        let parts = tempfile::tempdir().unwrap();
        run(&resolved, parts.path(), &mut Quiet { until: Some(until), ..Default::default() });
        run(&resolved, parts.path(), &mut Quiet::default()).unwrap();
        for file in ["stages/0/adapter_model.safetensors", "stages/1/adapter_model.safetensors"] {
            assert!(weights(whole.path(), file) == weights(parts.path(), file), "{file} after {until}");
        }
        let state = "checkpoints/step_4/state/policy.safetensors";
        assert!(weights(whole.path(), state) == weights(parts.path(), state), "moments after {until}");
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The critic's adapter was saved with the policy's base.
#[test]
fn a_critic_from_another_model_keeps_its_own_base() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/ppo.toml");
    let mut resolved = small(&path);
    let first = tempfile::tempdir().unwrap();
    run(&resolved, first.path(), &mut Quiet::default()).unwrap();
    let critic = first.path().join("another-model");
    copy_folder(&first.path().join("run/start_0"), &critic);
    for stage in &mut resolved.stages {
        stage.recipe.critic.path = Some(critic.display().to_string());
    }
    let runs = tempfile::tempdir().unwrap();
    run(&resolved, runs.path(), &mut Quiet::default()).unwrap();
    let (mut seen, there) = (0, std::fs::canonicalize(&critic).unwrap());
    for checkpoint in std::fs::read_dir(runs.path().join("run/checkpoints")).unwrap() {
        let path = checkpoint.unwrap().path();
        if path.join("model_critic").is_dir() {
            assert_eq!(base_of(&path.join("model_critic")).unwrap().unwrap(), there);
            assert_ne!(base_of(&path.join("model")).unwrap().unwrap(), there);
            seen += 1;
        }
    }
    assert!(seen > 0);
}

/// The distance of a stage that trains an adapter was that of its base: nothing.
#[test]
fn the_distance_of_an_adapters_weights_counts_the_adapter() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/sft.toml");
    let runs = tempfile::tempdir().unwrap();
    run(&small(&path), runs.path(), &mut Quiet::default()).unwrap();
    let analysis = ferrl::analyze::find(&["weights".into()]).unwrap()[0];
    let table = (analysis.run)(&runs.path().join("run")).unwrap().unwrap();
    let moved = table.rows[0][2].as_f64().unwrap();
    assert!(moved > 0.0, "{moved}");
}

/// A stage that trains an adapter cannot go on with one of another rank, and that is known before the first stage has cost anything.
#[test]
fn adapters_that_differ_between_stages_are_refused_before_the_first_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stages.toml");
    let stages = |second: &str| {
        let text = format!(
            "name = \"s\"\ndata.train = [\"task:countdown\"]\nalgo = \"sft\"\ntrain = {{ steps = 2, batch = 2 }}\n\
             model.init = {{ hidden = 16, layers = 1, heads = 2, kv_heads = 2 }}\n\
             [[stage]]\nadapter = {{ r = 4, alpha = 8 }}\n[[stage]]\nadapter = {second}\n"
        );
        std::fs::write(&path, text).unwrap();
        let resolved = Recipe::load(&path, &[]).unwrap();
        let planned = ferrl::plan::Plan::new(&resolved).map(drop).map_err(|e| e.to_string());
        let at = ferrl::preflight::Standing::default();
        let checked = ferrl::preflight::check(&resolved, at, &mut |_, _, _| true);
        (planned, checked.map(drop).map_err(|e| e.to_string()))
    };
    for (second, said) in [
        ("{ r = 8, alpha = 8 }", "rank 4 in the model, 8 in the recipe"),
        ("{ r = 4, alpha = 4 }", "alpha / r is 2 in the model, 1 in the recipe"),
        ("{ r = 4, alpha = 8, base = \"nf4\" }", "NF4"),
        ("{ r = 4, alpha = 8, rank_pattern = { vproj = 2 } }", "vproj"),
    ] {
        let (planned, checked) = stages(second);
        assert!(planned.as_ref().is_err_and(|e| e.contains(said)), "{second}: {planned:?}");
        assert!(checked.as_ref().is_err_and(|e| e.contains(said)), "{second}: {checked:?}");
    }
    for second in ["{ r = 4, alpha = 8, base = \"host\" }", "\"off\""] {
        assert_eq!(stages(second), (Ok(()), Ok(())), "{second}");
    }
}

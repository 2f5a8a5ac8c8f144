//! Runs that need less memory a weight: what is sampled is what is trained, a stopped run ends with the same bytes, and so do
//! several ranks.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, Follower, RunOptions, RunPosition, RunWatch};
use ferrl_kernels::Ranks;
use ferrl_kernels::comm::threads;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Default)]
struct Quiet {
    worst: f64,
    sampled: bool,
    moved: bool,
    steps: usize,
    until: Option<usize>,
}

impl RunWatch for Quiet {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, record: &StepRecord) {
        let difference = record.get("sampling/sampling_logp_difference/max");
        self.sampled |= difference.is_some();
        self.moved |= record.get("grad_norm").is_some_and(|norm| norm > 0.0);
        self.worst = self.worst.max(difference.unwrap_or(0.0));
        self.steps += 1;
    }
    fn interrupted(&self) -> bool {
        self.until.is_some_and(|until| self.steps >= until)
    }
}

const RECIPE: &str = r#"
name = "memory"
device = "cpu"
threads = 1
algo = "grpo"

[model]
dtype = "bf16"
init = { hidden = 64, layers = 2, heads = 2, kv_heads = 2, ffn = 96, max_positions = 64 }

[data]
train = ["task:countdown"]

[[reward]]
verifier = "regex"
options = { pattern = ".*[0-4].*" }

[rollout]
prompts = 4
samples = 3
max_new_tokens = 8
cache_mib = 8

[train]
steps = 4
micro_batch_tokens = 128

[optim]
lr = 1e-2
ema = 0.9

[eval]
prompts = 0
at_start = false

[checkpoint]
every = 1
"#;

fn recipe(dir: &Path, changes: &[&str]) -> Resolved {
    let path = dir.join("memory.toml");
    std::fs::write(&path, RECIPE).unwrap();
    let changes: Vec<String> = changes.iter().map(|c| c.to_string()).collect();
    Recipe::load(&path, &changes).unwrap()
}

/// Runs on so many ranks; every file of the last checkpoint's state and model.
fn run(resolved: &Resolved, runs: &Path, size: usize, until: Option<usize>) -> BTreeMap<String, Vec<u8>> {
    let all = if size == 1 { vec![Ranks::alone()] } else { threads(size) };
    std::thread::scope(|scope| {
        let one = |ranks: Ranks| {
            scope.spawn(move || {
                let options = RunOptions { ranks: ranks.clone(), ..Default::default() };
                let open = || ferrl_kernels::open("cpu", Some(1));
                if ranks.rank() > 0 {
                    let resolved = resolved.clone();
                    return runner::follow(&ranks, || Ok(Follower { resolved, backend: open()?, options }));
                }
                runner::lead(&ranks, || {
                    let (backend, path) = (open()?, runs.join("run"));
                    let folder = match path.exists() {
                        true => RunFolder::open(&path)?,
                        false => RunFolder::create(runs, "run", &resolved.toml)?,
                    };
                    let options = RunOptions { position: Some(RunPosition::of(&folder)?), ..options };
                    let mut watch = Quiet { until, ..Default::default() };
                    runner::run_with(resolved, folder, backend, &mut watch, options)?;
                    // ReST-EM trains other weights than those that sampled, and compares nothing.
                    let compares = resolved.stages[0].recipe.algorithm_name() == "grpo";
                    assert_eq!(watch.sampled, compares, "log-probabilities are compared");
                    assert!(watch.worst == 0.0, "what was sampled is not what was trained");
                    assert!(watch.moved, "the weights have not moved");
                    Ok(())
                })
            })
        };
        let running: Vec<_> = all.into_iter().map(one).collect();
        running.into_iter().for_each(|r| r.join().unwrap().unwrap());
    });
    let mut files = BTreeMap::new();
    for folder in ["checkpoints/step_4/state", "checkpoints/step_4/model", "stages/0"] {
        for entry in std::fs::read_dir(runs.join("run").join(folder)).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let name = format!("{folder}/{}", path.file_name().unwrap().to_string_lossy());
                files.insert(name, std::fs::read(path).unwrap());
            }
        }
    }
    files
}

/// What a run with these changes leaves: alone, stopped and resumed, and on two ranks with each of these settings.
fn check(changes: &[&str], parallel: &[&[&str]]) -> BTreeMap<String, Vec<u8>> {
    let place = || tempfile::tempdir().unwrap();
    let same = |what: &str, one: &BTreeMap<String, Vec<u8>>, other: &BTreeMap<String, Vec<u8>>| {
        assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}");
        one.iter().for_each(|(name, bytes)| assert!(bytes == &other[name], "{changes:?}, {what}: {name}"));
    };
    let folder = place();
    let resolved = recipe(folder.path(), changes);
    let whole = run(&resolved, folder.path(), 1, None);
    assert!(whole.len() >= 3, "{:?}", whole.keys());
    let parts = place();
    run(&resolved, parts.path(), 1, Some(2));
    same("stopped and resumed", &run(&resolved, parts.path(), 1, None), &whole);
    for more in parallel {
        let ranks = place();
        let resolved = recipe(folder.path(), &[changes, more].concat());
        let left = run(&resolved, ranks.path(), 2, None);
        same(&format!("two ranks, {more:?}"), &left, &whole);
    }
    whole
}

const WHOLE: &[&str] = &[];
/// Weights split over the ranks (ZeRO-3).
const SPLIT: &[&str] = &["parallel.ddp_size=1"];

fn header(files: &BTreeMap<String, Vec<u8>>) -> serde_json::Value {
    let bytes = &files["checkpoints/step_4/state/policy.safetensors"];
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    serde_json::from_slice(&bytes[8..8 + len]).unwrap()
}

#[test]
fn moments_of_8_bits() {
    let left = check(&["optim.name=adamw8"], &[WHOLE, SPLIT]);
    let header = header(&left);
    let dtype = |name: &str| header[name]["dtype"].as_str().map(str::to_string);
    let names: Vec<&String> = header.as_object().unwrap().keys().collect();
    let of = |part: &str| names.iter().find(|n| n.starts_with("first.") && n.contains(part)).unwrap();
    assert_eq!(dtype(of("up")).as_deref(), Some("U8"), "{names:?}");
    assert_eq!(dtype(of("embed")).as_deref(), Some("F32"), "tables keep f32");
    assert_eq!(dtype(of("norm")).as_deref(), Some("F32"), "norms keep f32");
    let plain = check(&[], &[]);
    let state = "checkpoints/step_4/state/policy.safetensors";
    assert!(left[state].len() < plain[state].len(), "a checkpoint is smaller");
    assert!(left["stages/0/model.safetensors"] != plain["stages/0/model.safetensors"], "codes are used");
}

#[test]
fn moments_on_the_host() {
    let (left, plain) = (check(&["optim.offload=moments"], &[SPLIT]), check(&[], &[]));
    assert!(left == plain, "the same bits as on the device");
    let both = ["optim.offload=moments", "optim.name=adamw8"];
    assert!(check(&both, &[]) == check(&both[1..], &[]), "of 8-bit moments too");
}

const ADAPTER: &str = "adapter={r=4}";

#[test]
fn an_adapter_on_nf4() {
    let left = check(&[ADAPTER, "adapter.base=nf4"], &[WHOLE, SPLIT]);
    let plain = check(&[ADAPTER], &[WHOLE, SPLIT]);
    let file = "stages/0/adapter_model.safetensors";
    assert!(left[file] != plain[file], "another base");
}

/// The reference is the base, with the adapter's first values.
#[test]
fn an_adapter_with_a_reference_whose_base_is_split() {
    check(&[ADAPTER, "algo.kl.coef=0.1", "model.dtype=f32"], &[SPLIT]);
}

#[test]
fn an_adapter_on_a_base_in_the_machines_memory() {
    assert!(check(&[ADAPTER, "adapter.base=host"], &[SPLIT]) == check(&[ADAPTER], &[]), "the same bits");
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let eight = recipe(folder.path(), &["optim.name=adamw8"]);
    run(&eight, folder.path(), 1, Some(2));
    let checkpoint = folder.path().join("run/checkpoints/step_2");
    let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
    let model = ferrl_engine::checkpoint::ModelDir::open(&checkpoint.join("model")).unwrap();
    let options =
        ferrl_engine::model::Options { dtype: ferrl_kernels::DType::Bf16, training: true, context: 0 };
    let model = ferrl_engine::model::Model::load(backend, &model, options).unwrap();
    let mut plain = ferrl_engine::train::ModelTrainer::new(model, Default::default()).unwrap();
    let error = ferrl::run::load(&checkpoint, &mut [("policy", &mut plain)]).unwrap_err().to_string();
    assert!(error.contains("1 bytes a number") && error.contains("optim.name"), "{error}");
}

#[test]
fn a_cache_that_is_released_while_the_policy_trains() {
    let evaluated = ["eval.prompts=4", "eval.every=2"];
    let released = [&evaluated[..], &["rollout.release_cache=true"]].concat();
    assert!(check(&released, &[WHOLE, SPLIT]) == check(&evaluated, &[]), "the same bits");
}

/// The reference computes log-probabilities, and with the KL over the vocabulary it is read in every micro-batch.
#[test]
fn a_reference_on_the_host_between_uses() {
    for estimator in ["k3", "full"] {
        let estimator = format!("algo.kl.estimator={estimator}");
        let plain = ["algo.kl.coef=0.1", estimator.as_str()];
        let offload = [&plain[..], &["reference.offload=true"]].concat();
        assert!(check(&offload, &[WHOLE]) == check(&plain, &[]), "{estimator}: the same bits");
    }
}

/// ReST-EM begins every step with the weights that the stage started from, every bit of them.
#[test]
fn a_start_on_the_host_keeps_every_bit() {
    let plain = ["algo.name=rest_em", "algo.restart=true"];
    let offload = [&plain[..], &["reference.offload=true"]].concat();
    assert!(check(&offload, &[]) == check(&plain, &[]), "the same bits");
}

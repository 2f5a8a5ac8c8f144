//! The same recipe on 1 to 4 ranks: the same weights, metrics and rollouts, bit for bit.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, Follower, RunOptions, RunPosition, RunWatch};
use ferrl_engine::Result;
use ferrl_kernels::Ranks;
use ferrl_kernels::comm::threads;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

struct Quiet {
    /// Number of steps before it stops.
    until: u64,
    done: u64,
}

impl RunWatch for Quiet {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, _record: &StepRecord) {
        self.done += 1;
    }
    fn interrupted(&self) -> bool {
        self.done >= self.until
    }
}

/// Every recipe of the repository, and with them every algorithm.
fn recipes() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    all.sort();
    all
}

/// Two steps of each stage with a tiny model, cut into several micro-batches.
fn small(resolved: &mut Resolved, steps: u64) {
    for stage in &mut resolved.stages {
        let r = &mut stage.recipe;
        if let Some(init) = &mut r.model.init {
            (init.hidden, init.layers, init.ffn) = (16, 1, Some(32));
            (init.heads, init.kv_heads) = (Some(4), Some(4));
        }
        (r.train.steps, r.train.batch) = (Some(steps), 6);
        (r.rollout.prompts, r.rollout.samples, r.rollout.max_new_tokens) = (3, 2, 6);
        r.rollout.partial_tokens = r.rollout.partial_tokens.min(2);
        (r.rollout.cache_mib, r.eval.prompts) = (4, r.eval.prompts.min(3));
        if r.checkpoint.use_best {
            (r.eval.every, r.checkpoint.every) = (1, 1);
        }
    }
}

/// Runs a recipe on so many ranks, in a new folder or on from where it stands; what became of each rank.
fn run(resolved: &Resolved, runs: &Path, size: usize, until: u64) -> Vec<Result<()>> {
    run_each(&vec![resolved; size], runs, until)
}

/// The same with a recipe for each rank.
fn run_each(recipes: &[&Resolved], runs: &Path, until: u64) -> Vec<Result<()>> {
    let size = recipes.len();
    let all = if size == 1 { vec![Ranks::alone()] } else { threads(size) };
    std::thread::scope(|scope| {
        let running: Vec<_> = all
            .into_iter()
            .zip(recipes)
            .map(|(ranks, &resolved)| {
                scope.spawn(move || {
                    let options = RunOptions { ranks: ranks.clone(), ..Default::default() };
                    let open = || ferrl_kernels::open(&resolved.stages[0].recipe.device, Some(1));
                    if ranks.rank() > 0 {
                        let resolved = resolved.clone();
                        return runner::follow(&ranks, || {
                            Ok(Follower { resolved, backend: open()?, options })
                        });
                    }
                    runner::lead(&ranks, || {
                        let backend = open()?;
                        let path = runs.join("run");
                        let folder = match path.exists() {
                            true => RunFolder::open(&path)?,
                            false => RunFolder::create(runs, "run", &resolved.toml)?,
                        };
                        let position = Some(RunPosition::of(&folder)?);
                        let mut watch = Quiet { until, done: 0 };
                        runner::run_with(
                            resolved,
                            folder,
                            backend,
                            &mut watch,
                            RunOptions { position, ..options },
                        )
                        .map(drop)
                    })
                })
            })
            .collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Weights of every stage, rollouts, and metrics without what depends on the clock.
fn left(runs: &Path) -> BTreeMap<String, String> {
    let run = runs.join("run");
    let mut all = BTreeMap::new();
    let hash = |bytes: &[u8]| format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes));
    for stage in std::fs::read_dir(run.join("stages")).unwrap() {
        let path = stage.unwrap().path();
        let adapter = std::fs::read(path.join("adapter_model.safetensors"));
        let weights = adapter.unwrap_or_else(|_| std::fs::read(path.join("model.safetensors")).unwrap());
        all.insert(format!("weights of stage {:?}", path.file_name().unwrap()), hash(&weights));
    }
    for rollout in std::fs::read_dir(run.join("rollouts")).unwrap() {
        let path = rollout.unwrap().path();
        all.insert(format!("{:?}", path.file_name().unwrap()), hash(&std::fs::read(&path).unwrap()));
    }
    let clock = |k: &str| {
        k.contains("tim")
            || k == "seconds"
            || ["episodes/decoding", "episodes/overhead"].contains(&k)
            || k.starts_with("ranks/")
    };
    for (i, line) in std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        for (key, value) in line.as_object().unwrap().iter().filter(|(k, _)| !clock(k)) {
            all.insert(format!("line {i}: {key}"), value.to_string());
        }
    }
    all
}

fn same(name: &str, one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) {
    for key in one.keys().chain(other.keys()) {
        assert_eq!(one.get(key), other.get(key), "{name}: {key}");
    }
}

#[test]
fn every_recipe_gives_the_same_bits_on_one_to_four_ranks() {
    let (all, mut several) = (recipes(), 0);
    for (n, path) in all.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        // The smallest budget that its longest sequence fits into.
        let fits = [40, 80, 160, 320, 640, 4096].into_iter().find_map(|tokens| {
            let mut resolved = Recipe::load(path, &[]).unwrap();
            small(&mut resolved, 2);
            resolved.stages.iter_mut().for_each(|s| s.recipe.train.micro_batch_tokens = tokens);
            let runs = folder.path().join(tokens.to_string());
            match run(&resolved, &runs, 1, u64::MAX).remove(0) {
                Ok(()) => Some((resolved, left(&runs))),
                Err(e) if e.to_string().contains("train.micro_batch_tokens") => None,
                Err(e) => panic!("{}: {e}", path.display()),
            }
        });
        let (resolved, alone) = fits.unwrap();
        let cut = |(key, value): (&String, &String)| key.ends_with(": micro_batches") && value != "1.0";
        several += usize::from(alone.iter().any(cut));
        // Whole weights on every rank; weights that are split over them (ZeRO-3); layers that two ranks compute together in
        // training, in rollouts, or in both (tensor parallelism), and tokens that they share (context parallelism).
        let teams = [
            (2, 0, 2, 1, 0),
            (4, 1, 1, 2, 2),
            (4, 1, 2, 1, 1),
            (2, 0, 1, 2, 1),
            (4, 1, 2, 2, 1),
            (4, 2, 2, 1, 2),
        ];
        for layout in [(2 + n % 3, 0, 1, 1, 1), (2 + (n + 1) % 3, 1, 1, 1, 1), teams[n % 6]] {
            let (size, ddp, tp, sp, rollout_tp) = layout;
            let mut resolved = resolved.clone();
            for r in resolved.stages.iter_mut().map(|s| &mut s.recipe) {
                (r.parallel.ddp_size, r.parallel.tp_size) = (ddp, tp);
                (r.parallel.sp_size, r.rollout.tp_size) = (sp, rollout_tp);
            }
            let name = format!("{}: (ranks, ddp, tp, sp, rollout tp) = {layout:?}", path.display());
            let runs = folder.path().join(format!("{layout:?}"));
            for done in run(&resolved, &runs, size, u64::MAX) {
                done.unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            same(&name, &alone, &left(&runs));
        }
    }
    assert_eq!(several, all.len(), "every recipe has several micro-batches");
}

/// Sampled and trained log-probabilities are the same numbers for every pair of layouts of training and rollouts, and everything
/// that a run leaves is what one process leaves.
#[test]
fn every_pair_of_training_and_rollout_layouts_samples_what_it_trains() {
    let trained = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)];
    samples_what_it_trains(4, trained.into_iter().flat_map(|t| [1, 2, 4].map(|rollout| (t, rollout))));
}

/// The same where more ranks share tokens than there are key heads.
#[test]
fn ranks_beyond_the_key_heads_sample_what_they_train() {
    samples_what_it_trains(1, [((1, 2), 1), ((1, 4), 1)]);
    samples_what_it_trains(2, [((1, 4), 1), ((1, 4), 2), ((2, 2), 1), ((2, 2), 2)]);
}

/// PPO of a model with `kv_heads` key heads on four ranks, in layouts `((tp, sp), rollout tp)`.
fn samples_what_it_trains(kv_heads: usize, layouts: impl IntoIterator<Item = ((usize, usize), usize)>) {
    let path = recipes().into_iter().find(|p| p.ends_with("ppo.toml")).unwrap();
    let mut resolved = Recipe::load(&path, &[]).unwrap();
    resolved.stages.drain(..resolved.stages.len() - 1);
    resolved.stages[0].index = 0;
    let r = &mut resolved.stages[0].recipe;
    r.model.init = Some(serde_json::from_value(serde_json::json!({ "family": "qwen3" })).unwrap());
    small(&mut resolved, 2);
    let r = &mut resolved.stages[0].recipe;
    let init = r.model.init.as_mut().unwrap();
    (init.hidden, init.heads, init.kv_heads) = (32, Some(8), Some(kv_heads));
    r.train.micro_batch_tokens = 320;
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("alone");
    run(&resolved, &alone, 1, u64::MAX).remove(0).unwrap();
    let alone = left(&alone);
    let gap = "line 0: sampling/sampling_logp_difference/max";
    assert_eq!(alone.get(gap).map(String::as_str), Some("0.0"));
    for ((tp, sp), rollout_tp) in layouts {
        let (mut resolved, name) = (resolved.clone(), format!("tp {tp}, sp {sp}, rollout tp {rollout_tp}"));
        let r = &mut resolved.stages[0].recipe;
        (r.parallel.tp_size, r.parallel.sp_size, r.rollout.tp_size) = (tp, sp, rollout_tp);
        let runs = folder.path().join(&name);
        run(&resolved, &runs, 4, u64::MAX).into_iter().for_each(|done| done.unwrap());
        same(&format!("{kv_heads} key heads, {name}"), &alone, &left(&runs));
    }
}

/// A run that stops after every step goes on alone, split, and in teams, to the bytes of one that never stopped.
#[test]
fn any_number_of_ranks_resumes_a_run() {
    let path = recipes().into_iter().find(|p| p.ends_with("ppo.toml")).unwrap();
    let mut resolved = Recipe::load(&path, &[]).unwrap();
    resolved.stages.drain(..resolved.stages.len() - 1);
    let last = &mut resolved.stages[0];
    last.index = 0;
    last.recipe.model.init = Some(serde_json::from_value(serde_json::json!({ "family": "qwen2" })).unwrap());
    small(&mut resolved, 5);
    // Wide enough that parameters are cut over ranks.
    let init = resolved.stages[0].recipe.model.init.as_mut().unwrap();
    (init.hidden, init.layers, init.ffn) = (64, 2, Some(256));
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    run(&resolved, &whole, 1, u64::MAX).remove(0).unwrap();
    let layouts = [(3, 1, 1, 1, 1), (1, 0, 1, 1, 1), (2, 0, 2, 1, 2), (4, 2, 1, 2, 2), (4, 2, 1, 1, 1)];
    for (n, (size, ddp, tp, sp, rollout_tp)) in layouts.into_iter().enumerate() {
        let until = if n + 1 == layouts.len() { u64::MAX } else { 1 };
        let r = &mut resolved.stages[0].recipe;
        (r.parallel.ddp_size, r.parallel.tp_size) = (ddp, tp);
        (r.parallel.sp_size, r.rollout.tp_size) = (sp, rollout_tp);
        run(&resolved, &parts, size, until).into_iter().for_each(|done| done.unwrap());
    }
    same("resumed", &left(&whole), &left(&parts));
}

/// Every recipe, stopped three times and resumed on other ranks each time, also with settings whose state is saved apart.
#[test]
fn every_recipe_resumes_on_other_numbers_of_ranks() {
    let layouts = [
        (2, 0, 1, 1, 1),
        (3, 1, 1, 1, 1),
        (1, 0, 1, 1, 1),
        (2, 0, 2, 1, 2),
        (4, 2, 1, 2, 1),
        (4, 1, 1, 1, 2),
    ];
    for (n, path) in recipes().iter().enumerate() {
        let mut resolved = Recipe::load(path, &[]).unwrap();
        small(&mut resolved, 4);
        for r in resolved.stages.iter_mut().map(|s| &mut s.recipe) {
            r.train.micro_batch_tokens = 4096;
            r.optim.ema = (n % 2 == 0 && !path.ends_with("trpo.toml")).then_some(0.9);
            if n % 3 == 0 {
                r.optim.name = "adamw8".into();
            }
            if r.checkpoint.metric.is_some() {
                (r.eval.every, r.checkpoint.every, r.checkpoint.keep_best) = (1, 1, 1);
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
        run(&resolved, &whole, 1, u64::MAX).remove(0).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let steps = 4 * resolved.stages.len() as u64;
        for session in 0..4 {
            let (size, ddp, tp, sp, rollout_tp) = layouts[(n + session) % layouts.len()];
            for r in resolved.stages.iter_mut().map(|s| &mut s.recipe) {
                (r.parallel.ddp_size, r.parallel.tp_size) = (ddp, tp);
                (r.parallel.sp_size, r.rollout.tp_size) = (sp, rollout_tp);
            }
            let until = if session < 3 { steps / 4 } else { u64::MAX };
            for done in run(&resolved, &parts, size, until) {
                done.unwrap_or_else(|e| panic!("{}, {size} ranks: {e}", path.display()));
            }
        }
        same(&path.display().to_string(), &left(&whole), &left(&parts));
    }
}

/// What one rank cannot do ends all of them with its error, and nothing is lost.
#[test]
fn an_error_of_any_rank_is_the_error_of_all() {
    let path = recipes().into_iter().find(|p| p.ends_with("sft.toml")).unwrap();
    let mut resolved = Recipe::load(&path, &[]).unwrap();
    small(&mut resolved, 2);
    let mut other = resolved.clone();
    other.toml.push_str("# another recipe\n");
    let folder = tempfile::tempdir().unwrap();
    let all = run_each(&[&resolved, &other, &resolved], folder.path(), u64::MAX);
    for (rank, done) in all.into_iter().enumerate() {
        let said = done.unwrap_err().to_string();
        assert!(said.contains("rank 1 does not have the recipe of rank 0"), "rank {rank}: {said}");
    }
    // Was: a rank that failed before the first order went home, and rank 0 waited for it for ever.
    for broken in [[false, true, false], [true, true, false], [true, false, false], [true, true, true]] {
        let mut wrong = resolved.clone();
        wrong.stages[0].recipe.device = "no such device".into();
        let recipes = broken.map(|b| if b { &wrong } else { &resolved });
        for done in run_each(&recipes, folder.path(), u64::MAX) {
            let said = done.unwrap_err().to_string();
            assert!(said.contains("unknown device"), "{broken:?}: {said}");
        }
    }
}

/// Only the first rank of a team samples: what it cannot do ends the ranks that compute along, and those of other teams.
#[test]
fn an_error_of_the_rank_that_samples_is_the_error_of_all() {
    let path = recipes().into_iter().find(|p| p.ends_with("ppo.toml")).unwrap();
    let mut resolved = Recipe::load(&path, &[]).unwrap();
    resolved.stages.drain(..resolved.stages.len() - 1);
    resolved.stages[0].index = 0;
    let init = serde_json::json!({ "family": "qwen2", "max_positions": 8192 });
    resolved.stages[0].recipe.model.init = Some(serde_json::from_value(init).unwrap());
    small(&mut resolved, 2);
    let r = &mut resolved.stages[0].recipe;
    let init = r.model.init.as_mut().unwrap();
    (init.hidden, init.layers, r.rollout.tp_size) = (64, 4, 2);
    (r.rollout.cache_mib, r.rollout.max_new_tokens) = (1, 4000);
    let folder = tempfile::tempdir().unwrap();
    for (rank, done) in run(&resolved, folder.path(), 4, u64::MAX).into_iter().enumerate() {
        let said = done.unwrap_err().to_string();
        assert!(said.contains("rollout.cache_mib"), "rank {rank}: {said}");
    }
}

/// The files of a folder below `checkpoints` that hold tensors or belong to a model.
fn model_files(runs: &Path) -> BTreeMap<String, Vec<u8>> {
    let (mut all, top) = (BTreeMap::new(), runs.join("run/checkpoints"));
    for step in std::fs::read_dir(&top).unwrap().map(|e| e.unwrap().path()) {
        for folder in ["model", "state"] {
            for file in std::fs::read_dir(step.join(folder)).unwrap().map(|e| e.unwrap().path()) {
                let name = file.strip_prefix(&top).unwrap().to_string_lossy().into_owned();
                if !name.ends_with("state.json") {
                    all.insert(name, std::fs::read(&file).unwrap());
                }
            }
        }
    }
    all
}

/// Ranks that split the weights write a checkpoint together: the files of one process, byte by byte, for tensors that are stored as
/// they are held (qwen2), the other way round (gpt2) and in another order (glm4).
#[test]
fn ranks_write_the_files_of_one_process() {
    let path = recipes().into_iter().find(|p| p.ends_with("sft.toml")).unwrap();
    for (family, dtype) in [("qwen2", "f32"), ("gpt2", "bf16"), ("glm4", "f32")] {
        let mut resolved = Recipe::load(&path, &[]).unwrap();
        let r = &mut resolved.stages[0].recipe;
        r.model.init = Some(serde_json::from_value(serde_json::json!({ "family": family })).unwrap());
        (r.model.dtype, r.checkpoint.every, r.optim.ema) = (Some(dtype.into()), 1, Some(0.9));
        small(&mut resolved, 2);
        let init = resolved.stages[0].recipe.model.init.as_mut().unwrap();
        (init.hidden, init.layers, init.ffn) = (64, 2, Some(256));
        let folder = tempfile::tempdir().unwrap();
        let alone = folder.path().join("alone");
        run(&resolved, &alone, 1, u64::MAX).remove(0).unwrap();
        let whole = model_files(&alone);
        assert!(whole.keys().any(|name| name.ends_with("model/model.safetensors")), "{:?}", whole.keys());
        for (size, copies) in [(3, 1), (4, 2)] {
            resolved.stages[0].recipe.parallel.ddp_size = copies;
            let runs = folder.path().join(size.to_string());
            run(&resolved, &runs, size, u64::MAX).into_iter().for_each(|done| done.unwrap());
            let parts = model_files(&runs);
            assert!(whole.keys().eq(parts.keys()), "{:?}, not {:?}", parts.keys(), whole.keys());
            let other: Vec<_> = whole.iter().filter(|(name, bytes)| parts[*name] != **bytes).collect();
            assert_eq!(other.len(), 0, "{family} on {size} ranks: {:?}", other.iter().map(|o| o.0));
            same(family, &left(&alone), &left(&runs));
        }
    }
}

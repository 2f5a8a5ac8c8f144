//! Memory of ranks beside what `ferrl plan --ranks` says: the buffers that each rank has when they are most, for every way of
//! training and every kind of layout.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::parallel::RankLayout;
use ferrl::plan::{Plan, ranks};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::setup;
use ferrl_kernels::comm::threads;
use ferrl_kernels::{MemoryUsage, Purpose, Ranks};
use std::path::Path;

/// Sizes are powers of two, which the allocator does not round up.
const RECIPE: &str = r#"
name = "memory"
device = "cpu"
threads = 1

[model]
init = { family = "qwen2", hidden = 128, layers = 8, heads = 4, kv_heads = 2, ffn = 512, max_positions = 128 }

[data]
train = ["task:chain"]
max_length = 96

[[reward]]
verifier = "regex"
truncated = "score"
options = { pattern = "[0-4]", whole = false }

[rollout]
prompts = 24
samples = 4
max_new_tokens = 4
cache_mib = 4

[train]
steps = 2
batch = 80
micro_batch_tokens = 512

[eval]
prompts = 0
at_start = false
"#;

fn resolved(changes: &[&str]) -> Resolved {
    let changes: Vec<String> = changes.iter().map(|c| c.to_string()).collect();
    Recipe::parse(RECIPE, "memory.toml", "memory", &changes).unwrap()
}

/// What the buffers of each rank were when they were most, in two steps.
fn taken(resolved: &Resolved, dir: &Path, size: usize) -> Vec<MemoryUsage> {
    let recipe = &resolved.stages[0].recipe;
    let dir = &setup::starting_model(recipe, &dir.join("start")).unwrap();
    let one = |ranks: Ranks| {
        let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
        let mut stage = setup::stage_on(recipe.clone(), backend.clone(), dir, &ranks).unwrap();
        stage.join(&ranks).unwrap();
        (0..2).for_each(|_| drop(stage.step().unwrap()));
        backend.books().unwrap()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = threads(size).into_iter().map(|ranks| scope.spawn(|| one(ranks))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

const SPLIT: &str = "parallel.ddp_size=1";
const TP: &str = "parallel.tp_size=2";
const SP: &str = "parallel.sp_size=2";

const LAYOUTS: &[(usize, &[&str])] = &[
    (2, &[]),
    (2, &[SPLIT]),
    (2, &[TP]),
    (2, &[SP]),
    (4, &[TP, SP]),
    (4, &[SPLIT]),
    (4, &["parallel.ddp_size=2"]),
    (4, &[SPLIT, TP]),
];

const MIB: f64 = (1 << 20) as f64;

/// The rank that takes most takes what is planned, within 5 %; one without a micro-batch takes less.
fn check(algorithm: &[&str], layouts: &[(usize, &[&str])]) {
    let mut wrong = Vec::new();
    for &(size, layout) in layouts {
        let changes = [algorithm, layout].concat();
        let (folder, resolved) = (tempfile::tempdir().unwrap(), resolved(&changes));
        let plan = Plan::new(&resolved).unwrap();
        let inputs = &plan.stages[0].inputs;
        let layout = RankLayout::of(&inputs.recipe, size).unwrap();
        let want = ranks::buffers(inputs, layout);
        let all = taken(&resolved, folder.path(), size);
        let most = |books: &MemoryUsage| books.at_peak.total() - books.at_peak.of(Purpose::Cache);
        let off = |books: &MemoryUsage| 100.0 * (most(books) as f64 / want as f64 - 1.0);
        let largest = all.iter().max_by_key(|books| most(books)).unwrap();
        println!("{size} ranks, {changes:?}: {:.1} % of {:.1} MiB", off(largest), want as f64 / MIB);
        if off(largest).abs() > 5.0 {
            let parts = ranks::parts(inputs, layout);
            let planned: Vec<_> =
                parts.iter().map(|p| format!("{} {:.1}", p.name, p.bytes as f64 / MIB)).collect();
            let taken =
                Purpose::ALL.map(|p| format!("{} {:.1}", p.name(), largest.at_peak.of(p) as f64 / MIB));
            wrong.push(format!(
                "{size} ranks, {changes:?}: {:.1} %\n  {planned:?}\n  {taken:?}",
                off(largest)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn supervised_tuning_takes_what_is_planned() {
    check(&["algo=sft"], LAYOUTS);
    check(&["algo=sft", "model.dtype=bf16"], &LAYOUTS[..5]);
    check(&["algo=sft", "model.recompute=true", "optim.ema=0.9"], &LAYOUTS[..2]);
}

#[test]
fn adapters_take_what_is_planned() {
    check(&["algo=sft", "adapter.r=8"], &LAYOUTS[..5]);
    // A new model's weights are no bf16 numbers: its base was planned with 2 bytes a weight.
    check(&["algo=sft", "adapter.r=8", "model.dtype=bf16"], &LAYOUTS[..5]);
    check(&["algo=dpo", "adapter.r=8"], &LAYOUTS[..3]);
}

#[test]
fn learning_from_preferences_takes_what_is_planned() {
    for algorithm in ["algo=dpo", "algo=kto", "algo=rm"] {
        check(&[algorithm], &LAYOUTS[..5]);
    }
}

#[test]
fn policy_gradients_take_what_is_planned() {
    check(&["algo=grpo", "algo.kl.coef=0"], LAYOUTS);
    check(&["algo=ppo", "algo.kl.coef=0"], &LAYOUTS[..5]);
}

#[test]
fn trust_regions_take_what_is_planned() {
    check(&["algo=trpo", "algo.cg_steps=1"], LAYOUTS);
}

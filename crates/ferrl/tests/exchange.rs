//! What ranks send in a step beside what `ferrl plan --ranks` says, in every kind of layout.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::parallel::RankLayout;
use ferrl::plan::ranks::{Cluster, RankPlan};
use ferrl::plan::{Plan, cards};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::setup;
use ferrl_kernels::comm::threads;
use std::path::Path;

const RECIPE: &str = r#"
name = "exchange"
device = "cpu"
threads = 1

[model]
init = { hidden = 64, layers = 6, heads = 8, kv_heads = 4, ffn = 128, max_positions = 64 }

[data]
train = ["task:countdown"]
max_length = 64

[[reward]]
verifier = "regex"
options = { pattern = ".*[0-4].*" }

[rollout]
prompts = 8
samples = 4
max_new_tokens = 2
cache_mib = 8

[train]
steps = 1
batch = 64
micro_batch_tokens = 256

[eval]
prompts = 0
at_start = false
"#;

fn resolved(changes: &[&str]) -> Resolved {
    let changes: Vec<String> = changes.iter().map(|c| c.to_string()).collect();
    Recipe::parse(RECIPE, "exchange.toml", "exchange", &changes).unwrap()
}

/// MiB that a rank sends in the first step, the mean over all ranks.
fn sent(resolved: &Resolved, dir: &Path, size: usize) -> f64 {
    let recipe = &resolved.stages[0].recipe;
    let dir = &setup::starting_model(recipe, &dir.join("start")).unwrap();
    let one = |ranks: ferrl_kernels::Ranks| {
        let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
        let mut stage = setup::stage_on(recipe.clone(), backend, dir, &ranks).unwrap();
        stage.join(&ranks).unwrap();
        stage.ranks.take_cost();
        stage.step().unwrap().metrics.get("timing/exchange_mib").unwrap()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = threads(size).into_iter().map(|ranks| scope.spawn(|| one(ranks))).collect();
        running.into_iter().map(|r| r.join().unwrap()).sum::<f64>() / size as f64
    })
}

fn planned(resolved: &Resolved, ranks: usize) -> RankPlan {
    let plan = Plan::new(resolved).unwrap();
    let cluster = Cluster { ranks, nodes: 1, card: cards::processor(1 << 40, 1e12, 1e12), network: 1e9 };
    let layout = RankLayout::of(&plan.stages[0].inputs.recipe, ranks).unwrap();
    RankPlan::new(&plan.stages[0], layout, &cluster)
}

/// Every rank of a group that shares features computes all experts.
#[test]
fn experts_are_not_planned_as_shared() {
    let train = |family: &str, tp: &str| {
        let init = format!("model.init.family={family}");
        planned(&resolved(&["algo=sft", &init, &format!("parallel.tp_size={tp}")]), 2).train
    };
    let longer = |family: &str| train(family, "2") / train(family, "1");
    // A layer has 64 x 192 weights in attention, 64 x 8 in the router, and in the two experts of a token 2 x 3 x 64 x 64.
    let most = 1.0 + 24576.0 / (12288.0 + 512.0 + 24576.0);
    let experts = longer("qwen3_moe") / longer("qwen3");
    assert!((most - 0.1..most).contains(&experts), "{experts}");
}

#[test]
fn exchanges_are_what_is_planned() {
    let (grpo, kl) = ("algo=grpo", "algo.kl.coef=0.0");
    let cases: &[(usize, &[&str])] = &[
        (2, &["algo=sft"]),
        (2, &["algo=sft", "parallel.ddp_size=1"]),
        (2, &["algo=sft", "parallel.ddp_size=1", "model.dtype=bf16"]),
        (2, &["algo=sft", "parallel.ddp_size=1", "model.recompute=true"]),
        (4, &["algo=sft", "parallel.ddp_size=2"]),
        (2, &["algo=sft", "adapter.r=4"]),
        (2, &["algo=sft", "adapter.r=4", "parallel.ddp_size=1"]),
        (2, &["algo=sft", "adapter.r=4", "adapter.base=nf4", "parallel.ddp_size=1", "model.dtype=bf16"]),
        (2, &["algo=sft", "parallel.tp_size=2"]),
        (2, &["algo=sft", "parallel.tp_size=2", "model.recompute=true"]),
        (2, &["algo=sft", "parallel.sp_size=2"]),
        (4, &["algo=sft", "parallel.sp_size=2", "parallel.tp_size=2", "parallel.ddp_size=1"]),
        (4, &["algo=sft", "parallel.sp_size=4", "model.init.kv_heads=2"]),
        (2, &["algo=sft", "parallel.sp_size=2", "model.init.kv_heads=1", "model.recompute=true"]),
        (4, &["algo=sft", "parallel.sp_size=2", "parallel.tp_size=2", "model.init.kv_heads=2"]),
        (2, &["algo=sft", "model.init.family=qwen3", "parallel.tp_size=2"]),
        (2, &["algo=sft", "model.init.family=qwen3", "parallel.sp_size=2"]),
        (2, &["algo=sft", "model.init.family=olmo2", "parallel.tp_size=2"]),
        (2, &["algo=sft", "model.init.family=olmo2", "parallel.sp_size=2"]),
        (2, &["algo=sft", "model.init.family=gemma2", "parallel.sp_size=2"]),
        (2, &["algo=sft", "model.init.family=qwen3_moe", "parallel.tp_size=2"]),
        (2, &["algo=sft", "model.init.family=qwen3_moe", "parallel.sp_size=2"]),
        (2, &[grpo, kl]),
        (2, &[grpo, kl, "parallel.ddp_size=1"]),
        (2, &[grpo, kl, "rollout.tp_size=2"]),
        (2, &[grpo, kl, "parallel.tp_size=2"]),
        (4, &[grpo, kl, "parallel.tp_size=2", "rollout.tp_size=4"]),
        (2, &["algo=ppo", kl, "parallel.ddp_size=1"]),
        (2, &["algo=ppo", kl, "rollout.tp_size=2"]),
    ];
    for &(size, changes) in cases {
        let (folder, resolved) = (tempfile::tempdir().unwrap(), resolved(changes));
        let plan = planned(&resolved, size);
        let want = plan.exchanges.iter().map(|x| x.bytes).sum::<f64>() / f64::from(1 << 20);
        let off = 100.0 * (sent(&resolved, folder.path(), size) / want - 1.0);
        // A completion's last token is sampled and not read, here every second one; some completions have one token.
        let least = if changes.contains(&grpo) { -6.0 } else { -3.0 };
        assert!((least..2.0).contains(&off), "{size} ranks, {changes:?}: {off:.1} % of {:?}", plan.exchanges);
    }
}

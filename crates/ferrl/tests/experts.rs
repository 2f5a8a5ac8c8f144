//! A mixture of experts in whole runs: what is sampled is what is trained, routers stay where they should, and a stopped run
//! ends with the same bytes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, RunWatch};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::Slot;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Two stages; the reward is one that a new model earns now and then.
const RECIPE: &str = r#"
seed = 3
model.dtype = "bf16"
model.init = { family = "qwen3_moe", hidden = 32, layers = 2, heads = 2, kv_heads = 1, ffn = 48, experts = 6, experts_per_token = 2, expert_ffn = 24, max_positions = 64 }
data = { train = ["task:countdown"], task = { numbers = 3, max_number = 9 }, max_length = 48 }
train = { steps = 3, batch = 8, micro_batch_tokens = 96 }
rollout = { prompts = 4, samples = 4, max_new_tokens = 8, cache_mib = 4 }
eval.prompts = 0
optim = { lr = 1e-2, weight_decay = 0.0 }
reward = { verifier = "regex", truncated = "score", options = { pattern = "^[0-4]", whole = false } }
[[stage]]
name = "imitate"
algo = "sft"
model = { train_router = true, router_aux_loss_coef = 0.01 }
[[stage]]
name = "reinforce"
algo = { name = "grpo", kl = { coef = 0.01 } }
"#;

#[derive(Default)]
struct Quiet {
    steps: usize,
    until: Option<usize>,
    /// Of each step by name.
    metrics: Vec<BTreeMap<String, f64>>,
}

impl RunWatch for Quiet {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, record: &StepRecord) {
        self.steps += 1;
        self.metrics.push(record.metrics.iter().cloned().collect());
    }
    fn interrupted(&self) -> bool {
        self.until.is_some_and(|until| self.steps >= until)
    }
}

fn resolved(more: &str) -> Resolved {
    let resolved = Recipe::parse(&format!("{more}{RECIPE}"), "experts.toml", "experts", &[]).unwrap();
    resolved.check(&["countdown", "regex"]).unwrap();
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

/// The weights of routers, and of everything else.
fn weights(dir: &Path) -> (Vec<f32>, Vec<f32>) {
    let (mut routers, mut others) = (Vec::new(), Vec::new());
    let load = |shape: &ferrl_engine::model::ParamShape, values: Vec<f32>| {
        if shape.id.slot == Slot::Router {
            routers.extend(values)
        } else {
            others.extend(values)
        }
        Ok(())
    };
    ModelDir::open(dir).unwrap().load(load).unwrap();
    (routers, others)
}

#[test]
fn what_is_sampled_is_what_is_trained_and_routers_stay_unless_trained() {
    let runs = tempfile::tempdir().unwrap();
    let mut watch = Quiet::default();
    run(&resolved(""), runs.path(), &mut watch).unwrap();
    let gap = "sampling/sampling_logp_difference/max";
    let gaps: Vec<f64> = watch.metrics.iter().filter_map(|m| m.get(gap).copied()).collect();
    assert!(gaps.len() == 3 && gaps.iter().all(|&gap| gap == 0.0), "{gaps:?}");
    for metrics in &watch.metrics {
        let of = |name: &str| metrics[&format!("experts/{name}")];
        assert!(of("max_load") >= 1.0 && of("max_load") <= 3.0, "{metrics:?}"); // two of six: no more than half of all
        assert!(of("min_load") <= 1.0 && of("min_load") >= 0.0, "{metrics:?}");
        assert!(of("entropy") > 0.3 && of("entropy") <= 1.0, "{metrics:?}");
        assert!(of("aux_loss") > 1.5 && of("aux_loss") < 6.0, "{metrics:?}");
    }
    let stage = |n: usize| weights(&runs.path().join(format!("run/stages/{n}")));
    let start = weights(&runs.path().join("run/start_0"));
    let (imitated, reinforced) = (stage(0), stage(1));
    assert!(start.0 != imitated.0, "the first stage trains routers");
    assert!(imitated.0 == reinforced.0, "the second leaves them");
    assert!(imitated.1 != reinforced.1, "and trains the rest");
}

#[test]
fn a_run_that_was_stopped_ends_with_the_same_bytes() {
    let resolved = resolved("");
    let file = |runs: &Path, name: &str| std::fs::read(runs.join("run").join(name)).unwrap();
    let whole = tempfile::tempdir().unwrap();
    run(&resolved, whole.path(), &mut Quiet::default()).unwrap();
    for until in [1, 4] {
        let parts = tempfile::tempdir().unwrap();
        run(&resolved, parts.path(), &mut Quiet { until: Some(until), ..Default::default() });
        run(&resolved, parts.path(), &mut Quiet::default()).unwrap();
        for name in ["stages/0/model.safetensors", "stages/1/model.safetensors"] {
            assert!(file(whole.path(), name) == file(parts.path(), name), "{name} after {until}");
        }
    }
}

/// A hundred times the coefficient spreads tokens more evenly.
#[test]
fn the_load_balance_loss_balances() {
    let loss = |coefficient: f64| {
        let mut plan = resolved("");
        plan.stages.truncate(1);
        let recipe = &mut plan.stages[0].recipe;
        (recipe.model.router_aux_loss_coef, recipe.train.steps) = (coefficient, Some(25));
        let (runs, mut watch) = (tempfile::tempdir().unwrap(), Quiet::default());
        run(&plan, runs.path(), &mut watch).unwrap();
        watch.metrics.last().unwrap()["experts/aux_loss"]
    };
    let (without, with) = (loss(0.0), loss(1.0));
    assert!(with < without, "{with} {without}");
    assert!(with < 2.2, "near two, the least for two experts per token: {with}");
}

#[test]
fn settings_of_routers_that_do_nothing_are_refused() {
    let said = |change: &dyn Fn(&mut Recipe)| {
        let mut plan = resolved("");
        change(&mut plan.stages[1].recipe);
        plan.check(&["countdown", "regex"]).unwrap_err().to_string()
    };
    let frozen = said(&|r| r.model.router_aux_loss_coef = 0.1);
    assert!(
        frozen.contains("routers, which are frozen") && frozen.contains("train_router = true"),
        "{frozen}"
    );
    let adapted = said(&|r| {
        (r.adapter, r.model.train_router) = (Some(Default::default()), true);
    });
    assert!(adapted.contains("adapter.modules_to_save = [\"mlp.gate\"]"), "{adapted}");
}

//! Implicit process rewards: learned from outcomes, given by step.

use crate::help::{backend, fails, metrics, model, run, write};
use ferrl::recipe::Recipe;
use ferrl::reward::ImplicitReward;
use ferrl::run::StepRecord;
use ferrl::verify::Sample;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_kernels::DType;
use serde_json::json;

/// Completions of two lines; those with an `x` in them are wrong.
fn rows() -> String {
    let lines = ["ab", "ba", "ax", "xb", "aa", "bb"];
    let pair = |a: &&str| lines.map(|b| (format!("{a}\n{b}"), !a.contains('x') && !b.contains('x')));
    let all = lines.iter().flat_map(pair);
    all.map(|(c, label)| format!("{}\n", json!({ "prompt": "go: ", "completion": c, "label": label })))
        .collect()
}

#[test]
fn step_rewards_add_up_to_the_outcome_reward_and_find_the_wrong_step() {
    let dir = tempfile::tempdir().unwrap();
    let (start, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows()));
    let prompts = write(dir.path(), "prompts.jsonl", "{\"prompt\": \"go: \"}\n");
    let text = format!(
        "model.path = {start:?}\ndata.max_length = 32\ntrain.micro_batch_tokens = 1024\n\
         [[stage]]\nname = \"reward\"\nalgo = {{ name = \"implicit_prm\", beta = 0.5 }}\ndata.train = {data:?}\n\
         train = {{ steps = 40, batch = 36 }}\noptim = {{ lr = 2e-3, weight_decay = 0.0 }}\n\
         [[stage]]\nname = \"tune\"\nalgo = \"grpo\"\nmodel.path = {start:?}\ndata.train = {prompts:?}\n\
         reward = [{{ model = \"stage:reward\", options = {{ kind = \"implicit\", reference = {start:?}, beta = 0.5 }} }}]\n\
         train.steps = 2\nrollout = {{ prompts = 1, samples = 4, max_new_tokens = 4 }}\n\
         [[stage]]\nname = \"process\"\nalgo = \"ppo\"\nmodel.path = {start:?}\ndata.train = {prompts:?}\n\
         reward = [{{ model = \"stage:reward\", steps = \"lines\", \
         options = {{ kind = \"implicit\", reference = {start:?}, beta = 0.5 }} }}]\n\
         train.steps = 2\nrollout = {{ prompts = 1, samples = 4, max_new_tokens = 8 }}\n\
         [[stage]]\nname = \"search\"\nalgo = \"vineppo\"\nmodel.path = {start:?}\ndata.train = {prompts:?}\n\
         reward = [{{ model = \"stage:reward\", options = {{ kind = \"implicit\", reference = {start:?} }} }}]\n\
         search = {{ strategy = \"mcts\", train = true, scorer = \"stage:reward\", \
         scorer_options = {{ kind = \"implicit\", reference = {start:?} }}, \
         options = {{ simulations = 4, step = \"\", step_tokens = 2, evaluate = \"score\" }} }}\n\
         train.steps = 2\nrollout = {{ prompts = 1, max_new_tokens = 4 }}\n"
    );
    let runs = dir.path().join("runs");
    run(&runs, &text, false, 1000).unwrap();
    let all = metrics(&runs);
    let accuracy = all.iter().rev().find_map(|r| r.get("rewards/accuracies")).unwrap();
    assert!(accuracy > 0.9, "{accuracy}");
    // It rewards completions for GRPO, each of their lines for PPO, and scores prefixes for a search.
    for stage in ["tune", "process", "search"] {
        let rewarded =
            |r: &&StepRecord| r.stage == stage && r.get("rewards/implicit/mean").is_some_and(f64::is_finite);
        assert_eq!(all.iter().filter(rewarded).count(), 2, "{stage}");
    }

    let trained = runs.join("test/stages/0");
    let recipe = Recipe::parse(&text, "r.toml", "r", &[]).unwrap().stages[1].recipe.clone();
    let reward = ImplicitReward::open(&trained, &recipe.reward[0], &recipe, DType::F32, &backend()).unwrap();
    let sample = |completion: &'static str| Sample { prompt: "go: ", completion, ..Default::default() };
    let samples = ["ab\nbb", "ab\nax", "xb\nba"].map(sample);
    let steps = reward.step_rewards(&samples).unwrap();
    assert!(steps.iter().all(|s| s.len() == 2), "{steps:?}");
    // The sum of the steps is beta times the log-ratio of the whole completion, computed by hand.
    let tokenizer = Tokenizer::from_dir(&trained).unwrap();
    let load = |dir: &std::path::Path| {
        Model::load(backend(), &ModelDir::open(dir).unwrap(), Options::default()).unwrap()
    };
    let (own, reference) = (load(&trained), load(std::path::Path::new(&start)));
    for (sample, steps) in samples.iter().zip(&steps) {
        let mut ids = tokenizer.encode_prompt("go: ").unwrap();
        let from = ids.len();
        ids.extend(tokenizer.encode_text(sample.completion).unwrap());
        ids.extend(tokenizer.eos().first());
        let n = ids.len();
        let logp = |m: &Model| {
            let logp = stats(m, &Batch::of([ids.clone()]), 1.0).unwrap().logp;
            logp[from - 1..n - 1].iter().map(|l| f64::from(*l)).sum::<f64>()
        };
        let outcome = 0.5 * (logp(&own) - logp(&reference));
        assert!((steps.iter().sum::<f64>() - outcome).abs() < 1e-5, "{steps:?} against {outcome}");
    }
    // Labels were of whole completions; a step with an x has a lower reward than a right step in its place all the same.
    assert!(steps[1][1] < steps[0][1] - 1.0 && steps[2][0] < steps[0][0] - 1.0, "{steps:?}");
    assert!(steps[0].iter().sum::<f64>() > steps[1].iter().sum::<f64>());
}

#[test]
fn an_implicit_reward_without_a_reference_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let prompts = write(dir.path(), "prompts.jsonl", "{\"prompt\": \"go: \"}\n");
    let recipe = format!(
        "algo = \"grpo\"\ndata.train = {prompts:?}\ndata.max_length = 32\ntrain.steps = 1\n\
         reward = [{{ model = {model:?}, options = {{ kind = \"implicit\" }} }}]\n"
    );
    let error = fails(&model, &recipe);
    assert!(error.contains("needs a reference model"), "{error}");
}

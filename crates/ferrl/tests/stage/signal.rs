//! Steps with nothing to learn from, a critic that warms up, tokens that are counted over the whole run.

use crate::help::{metrics, model, run, stage, weights, write};
use ferrl::train::Stage;

const ROWS: &str = "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n{\"prompt\": \"d\"}\n";

/// Completions of a random model, rewarded where the pattern is found.
fn recipe(data: &str, pattern: &str, more: &str) -> String {
    format!(
        "data = {{ train = {data:?}, max_length = 16 }}\ntrain = {{ steps = 6, micro_batch_tokens = 256 }}\noptim.lr = 1e-2\n\
         rollout = {{ prompts = 2, samples = 8, max_new_tokens = 6, cache_mib = 8 }}\n\
         reward = {{ verifier = \"regex\", truncated = \"score\", options = {{ pattern = {pattern:?}, whole = false }} }}\n{more}\n"
    )
}

fn names(stage: &Stage) -> Vec<&'static str> {
    stage.warnings.take().into_iter().map(|w| w.name).collect()
}

/// Was: a run whose rewards are all equal trained on for hours without a word.
#[test]
fn a_step_without_signal_costs_no_training_and_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let mut flat = stage(&model, &recipe(&data, "never there", "algo = \"dr_grpo\"")).unwrap();
    let start = (weights(&flat), flat.policy.model.version);
    for _ in 0..3 {
        let m = flat.step().unwrap().metrics;
        let seen = (m.get("updates/skipped"), m.get("loss"), m.get("grad_norm"), m.get("micro_batches"));
        assert_eq!(seen, (Some(1.0), Some(0.0), Some(0.0), None));
    }
    assert!((weights(&flat), flat.policy.model.version) == start, "weight decay is no learning either");
    assert_eq!(names(&flat), ["empty-step", "no-signal"]);
    // A KL to the reference is something to learn from.
    let more = "algo = { name = \"dr_grpo\", kl = { coef = 0.1, place = \"loss\" } }";
    let mut held = stage(&model, &recipe(&data, "never there", more)).unwrap();
    let m = held.step().unwrap().metrics;
    assert_eq!((m.get("updates/skipped"), m.get("micro_batches")), (None, Some(1.0)));
    let mut varied = stage(&model, &recipe(&data, "[a-m]", "algo = \"dr_grpo\"")).unwrap();
    let m = varied.step().unwrap().metrics;
    assert_eq!(m.get("updates/skipped"), None);
    assert!(names(&varied).is_empty());
}

/// The value head's weights, and all others.
fn parts(stage: &Stage) -> (Vec<f32>, Vec<f32>) {
    let (mut head, mut rest) = (Vec::new(), Vec::new());
    for (i, p) in stage.policy.model.params.iter().enumerate() {
        let to = if p.shape.id.slot == ferrl_engine::model::Slot::Value { &mut head } else { &mut rest };
        to.extend(stage.policy.model.read(i).unwrap());
    }
    (head, rest)
}

/// Was: with a critic on the policy's trunk the warm-up trained nothing at all.
#[test]
fn a_critic_warms_up_while_the_policy_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let ppo = |shared: bool| {
        let more = format!(
            "algo = {{ name = \"ppo\", critic_warmup = 2, epochs = 2, minibatches = 2, kl = {{ coef = 0.0 }} }}\n\
             critic.shared = {shared}"
        );
        stage(&model, &recipe(&data, "[a-m]", &more)).unwrap()
    };
    let mut shared = ppo(true);
    let mut seen = vec![parts(&shared)];
    for _ in 0..3 {
        shared.step().unwrap();
        seen.push(parts(&shared));
    }
    assert!(!seen[0].0.is_empty() && seen[0].0 != seen[1].0 && seen[1].0 != seen[2].0, "the head learns");
    assert!(seen[0].1 == seen[1].1 && seen[1].1 == seen[2].1, "two steps, each of four updates");
    assert!(seen[2].1 != seen[3].1, "then the policy does");
    let mut own = ppo(false);
    let critic = |s: &Stage| s.critic.as_ref().unwrap().model.read(0).unwrap();
    let (policy, values) = (weights(&own), critic(&own));
    own.step().unwrap();
    own.step().unwrap();
    assert!(weights(&own) == policy && critic(&own) != values);
    own.step().unwrap();
    assert!(weights(&own) != policy);
}

/// Was: `num_tokens` was that of the step, where TRL's accumulates.
#[test]
fn tokens_are_counted_over_the_run_and_over_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let rows: String =
        (0..8).map(|i| format!("{{\"prompt\": \"{i} \", \"response\": \"row {i}\"}}\n")).collect();
    let data = write(dir.path(), "rows.jsonl", &rows);
    let text = format!(
        "model.path = {model:?}\ndata = {{ train = {data:?}, max_length = 32 }}\nalgo = \"sft\"\n\
         train = {{ steps = 3, batch = 4, micro_batch_tokens = 64 }}\n[[stage]]\nname = \"one\"\n[[stage]]\nname = \"two\"\n"
    );
    let counted = |runs: &std::path::Path, stops: &[u64]| -> Vec<f64> {
        std::fs::create_dir_all(runs).unwrap();
        for (i, stop) in stops.iter().enumerate() {
            run(runs, &text, i > 0, *stop).unwrap();
        }
        metrics(runs).iter().map(|r| r.get("num_tokens").unwrap()).collect()
    };
    let whole = counted(&dir.path().join("whole"), &[u64::MAX]);
    // `2 ` + `row 2` + the end: eight tokens a row.
    assert_eq!(whole, (1..=6).map(|step| step as f64 * 32.0).collect::<Vec<_>>());
    assert_eq!(counted(&dir.path().join("parts"), &[2, 2, u64::MAX]), whole);
}

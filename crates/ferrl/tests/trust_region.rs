//! The trust-region update and its parts, on tiny real models.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::metrics::TRUST;
use ferrl::recipe::Recipe;
use ferrl::setup;
use ferrl::train::Stage;
use ferrl::trust_region::{Fisher, conjugate_gradients};
use ferrl::verify::VERIFIERS;
use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::{Batch, BatchSequence, ModelTrainer, OptimizerOptions, ParamVector, StatGrads};
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{DType, Ranks};
use std::sync::Arc;

fn tiny() -> ModelTrainer {
    let mut init = InitOptions::new("qwen2");
    (init.vocab, init.hidden, init.layers) = (11, 8, 1);
    (init.heads, init.kv_heads, init.ffn) = (Some(2), Some(1), Some(12));
    (init.max_positions, init.std, init.seed) = (32, 0.3, 7);
    let options = Options { dtype: DType::F32, training: true, context: 0 };
    let model = Model::random(Arc::new(Cpu::new(Some(1)).unwrap()), &init, options).unwrap();
    ModelTrainer::new(model, OptimizerOptions::default()).unwrap()
}

/// Two batches whose last tokens are scored.
fn batches() -> Vec<Batch> {
    let sequence = |s: u32, n: u32| {
        let ids: Vec<u32> = (0..n).map(|i| (s * 5 + i * i + 3 * i) % 11).collect();
        let scored = (0..n).map(|i| i >= 3).collect();
        BatchSequence { ids, scored, ..Default::default() }
    };
    let batch = |s: Vec<BatchSequence>| Batch { sequences: s, others_per_row: 0 };
    vec![batch(vec![sequence(1, 7), sequence(2, 9)]), batch(vec![sequence(3, 8)])]
}

/// The gradient of the log-probabilities with these weights, read out, and as the engine's vector.
fn pull(t: &mut ModelTrainer, weights: impl Fn(usize) -> f32) -> (Vec<f64>, ParamVector) {
    t.zero_grads();
    let mut token = 0;
    for batch in batches() {
        let stats = t.forward(&batch).unwrap();
        let mut logp = vec![0.0; batch.tokens()];
        for (row, l) in logp.iter_mut().enumerate() {
            if stats.logp[row] != 0.0 {
                *l = weights(token);
                token += 1;
            }
        }
        t.backward(&batch, &StatGrads { logp, ..Default::default() }).unwrap();
    }
    let read = read(t);
    (read, t.take_gradient().unwrap())
}

fn read(t: &ModelTrainer) -> Vec<f64> {
    let of = |i| t.gradient(i).unwrap().unwrap_or_default().into_iter().map(f64::from).collect::<Vec<_>>();
    (0..t.model.params.len()).flat_map(of).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The gradients of every scored token by themselves: the rows of J.
fn jacobian(t: &mut ModelTrainer) -> Vec<Vec<f64>> {
    let count: usize = batches().iter().flat_map(|b| &b.sequences).map(|s| s.ids.len() - 3).sum();
    (0..count).map(|i| pull(t, |token| f32::from(u8::from(token == i))).0).collect()
}

#[test]
fn products_are_those_of_the_explicit_fisher_matrix() {
    let mut t = tiny();
    let rows = jacobian(&mut t);
    let n = rows[0].len();
    assert!(rows.len() == 15 && n > 500);
    let mut matrix = vec![0.0; n * n];
    for row in &rows {
        for (i, a) in row.iter().enumerate() {
            for (j, b) in row.iter().enumerate() {
                matrix[i * n + j] += a * b / rows.len() as f64;
            }
        }
    }
    let (batches, damping) = (batches(), 0.01);
    let before = weights(&t);
    // Long and short vectors: the length of the difference adjusts itself.
    for scale in [1.0, 1e4, 1e-4] {
        let (v, vector) = pull(&mut t, |i| scale * ((i * 7 % 5) as f32 - 1.7));
        let product = Fisher::new(&batches, Ranks::ALONE, damping).times(&mut t, &vector).unwrap();
        t.set_gradient(product);
        let got = read(&t);
        let want: Vec<f64> = (0..n).map(|i| dot(&matrix[i * n..(i + 1) * n], &v) + damping * v[i]).collect();
        let gap: f64 = got.iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum::<f64>();
        let error = (gap / dot(&want, &want)).sqrt();
        assert!(error < 2e-3, "scale {scale}: relative error {error}");
        assert!(dot(&got, &v) > 0.0);
    }
    assert_eq!(weights(&t), before, "the weights are the same bits as before");
}

fn weights(t: &ModelTrainer) -> Vec<u32> {
    let bits = |i| t.model.read(i).unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    (0..t.model.params.len()).flat_map(bits).collect()
}

#[test]
fn conjugate_gradients_solve_what_they_are_given() {
    let mut t = tiny();
    let rows = jacobian(&mut t);
    let (b, vector) = pull(&mut t, |i| (i as f32 - 6.0) / 10.0);
    let (batches, damping) = (batches(), 0.05);
    let mut fisher = Fisher::new(&batches, Ranks::ALONE, damping);
    let (x, curvature) = conjugate_gradients(&mut t, &mut fisher, &vector, 20).unwrap();
    t.set_gradient(x);
    let x = read(&t);
    let mut product: Vec<f64> = x.iter().map(|x| damping * x).collect();
    for row in &rows {
        let along = dot(row, &x) / rows.len() as f64;
        product.iter_mut().zip(row).for_each(|(p, r)| *p += along * r);
    }
    let left: Vec<f64> = b.iter().zip(&product).map(|(b, p)| b - p).collect();
    assert!((dot(&left, &left) / dot(&b, &b)).sqrt() < 0.02);
    assert!((curvature / dot(&x, &product) - 1.0).abs() < 0.02);
}

/// A stage on a new model whose answers are rewarded for starting with a digit.
fn stage(name: &str, overrides: &[&str]) -> Stage {
    let text = r#"
        seed = 3
        model.init = { hidden = 32, layers = 2, heads = 2, kv_heads = 2, ffn = 64, max_positions = 64 }
        data = { train = ["task:countdown"], max_length = 32 }
        rollout = { prompts = 8, samples = 8, max_new_tokens = 4, cache_mib = 8 }
        reward = { verifier = "regex", truncated = "score", options = { pattern = "^[0-9]", whole = false } }
        optim = { lr = 1e-3 }
        train = { steps = 12, micro_batch_tokens = 512 }
        algo = "trpo"
    "#;
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    let resolved = Recipe::parse(text, "test", name, &overrides).unwrap();
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    resolved.check(&verifiers).unwrap();
    let recipe = resolved.stages[0].recipe.clone();
    let dir = tempfile::tempdir().unwrap();
    let start = setup::starting_model(&recipe, dir.path()).unwrap();
    setup::stage(recipe, Arc::new(Cpu::new(Some(1)).unwrap()), &start).unwrap()
}

const STEPS: usize = 12;

#[test]
fn the_surrogate_rises_and_the_kl_keeps_its_bound() {
    for (name, overrides) in [
        ("group", vec!["algo.delta=0.02"]),
        ("critic", vec!["algo.advantage.baseline=critic", "algo.critic_updates=2", "algo.delta=0.02"]),
    ] {
        let mut stage = stage(name, &overrides);
        let (mut rewards, mut moved) = (Vec::new(), 0);
        for _ in 0..STEPS {
            let before = weights(&stage.policy);
            let metrics = stage.step().unwrap().metrics;
            rewards.push(metrics.get("reward").unwrap());
            assert_eq!(metrics.get("sampling/sampling_logp_difference/max"), Some(0.0));
            match metrics.get("trust/kl") {
                Some(kl) => {
                    assert!(kl > 0.0 && kl <= 0.02, "{name}: KL {kl}");
                    assert!(metrics.get("trust/improvement").unwrap() > 0.0);
                    let written: Vec<&str> = metrics.means().map(|(n, _)| n).collect();
                    assert!(TRUST.iter().all(|m| written.contains(&m.name)), "{written:?}");
                    let listed = written.iter().filter(|n| n.starts_with("trust/")).count();
                    assert_eq!(listed, TRUST.len(), "{written:?}");
                    assert_ne!(weights(&stage.policy), before);
                    moved += 1;
                }
                None => assert_eq!(weights(&stage.policy), before, "a search that fails changes nothing"),
            }
        }
        assert!(moved >= STEPS - 2, "{name}: {moved} of {STEPS} searches found a step");
        let mean = |r: &[f64]| r.iter().sum::<f64>() / r.len() as f64;
        let (first, last) = (mean(&rewards[..3]), mean(&rewards[STEPS - 3..]));
        assert!(last > first + 0.2, "{name}: from {first} to {last}: {rewards:?}");
    }
}

#[test]
fn a_step_without_a_gradient_is_skipped() {
    let nothing = "reward=[{ verifier = \"regex\", options = { pattern = \"never\" } }]";
    let mut stage = stage("equal", &[nothing]);
    let before = weights(&stage.policy);
    let metrics = stage.step().unwrap().metrics;
    assert_eq!((metrics.get("updates/skipped"), metrics.get("grad_norm")), (Some(1.0), Some(0.0)));
    assert_eq!(weights(&stage.policy), before);
}

#[test]
fn small_moves_are_refused_in_bf16() {
    let text =
        "model.path = \"x\"\nmodel.dtype = \"bf16\"\ndata.train = \"x\"\nreward = \"exact\"\nalgo = \"trpo\"";
    let resolved = Recipe::parse(text, "test", "test", &[]).unwrap();
    let error = resolved.check(&["exact"]).err().unwrap().to_string();
    assert!(error.contains("model.dtype") && error.contains("f32"), "{error}");
}

//! Failures that cost users of other systems weeks because nothing was said: each is a test here, named for it.
//!
//! Others of their kind have tests elsewhere: checkpoints that lose state (`run_checkpoint.rs`, `run_faults.rs`, and the
//! command's `resume.rs`), masks and chat templates (`data_masks.rs`), rewards of Python functions (`verify_worker.rs`).
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::UpdatePlan;
use ferrl::algo::find;
use ferrl::batch::updates;
use ferrl::experience::{ByRole, Experience, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl::recipe::{DataSettings, ModelSettings, Optim, Recipe, RewardSettings, Rollout, Train};
use ferrl::run::{MetricsLog, RunFolder, StepRecord};
use ferrl::runner::{self, RunWatch};
use ferrl::setup;
use ferrl::train::Stage;
use ferrl_engine::checkpoint::{InitOptions, SaveOptions, StorageFormat, init_model};
use ferrl_engine::tokenizer::train_bpe;
use ferrl_engine::train::{Batch, Stats};
use ferrl_engine::{Class, Result};
use ferrl_kernels::cpu::Cpu;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// A model directory and data, gone with the test.
struct World(PathBuf, #[allow(dead_code)] tempfile::TempDir);

/// A question longer than a block of the cache, so that a stale block would be found again.
fn question(i: usize) -> String {
    let words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"];
    (0..90).map(|k| words[(i * 3 + k * (i + 2)) % 7]).collect::<Vec<_>>().join(" ")
}

impl World {
    fn new() -> World {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("model");
        let texts: Vec<String> = (0..40).map(|i| format!("{} {i}", question(i))).collect();
        let tokenizer = train_bpe(texts.into_iter(), 290, &["<eos>".into()]).unwrap();
        let mut init = InitOptions::new("qwen2");
        (init.vocab, init.hidden, init.layers, init.ffn) = (tokenizer.vocab_size(), 32, 2, Some(48));
        (init.heads, init.kv_heads, init.max_positions, init.std) = (Some(2), Some(1), 512, 0.1);
        init_model(&dir, &init, &SaveOptions { dtype: StorageFormat::F32, ..Default::default() }).unwrap();
        tokenizer.save(&dir).unwrap();
        let world = World(dir, temp);
        let rows = |f: &dyn Fn(usize) -> Value| (0..6).map(|i| format!("{}\n", f(i))).collect::<String>();
        world.write("prompts.jsonl", &rows(&|i| json!({ "prompt": question(i % 2) })));
        let answer = |i: usize| "eta zeta ".repeat(1 + i * i);
        world.write("sft.jsonl", &rows(&|i| json!({ "prompt": question(i), "response": answer(i) })));
        let pair = |i| json!({ "prompt": question(i), "chosen": answer(i), "rejected": answer(5 - i) });
        world.write("dpo.jsonl", &rows(&pair));
        world
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }

    fn recipe(&self, file: &str, algo: Value) -> Recipe {
        let object = |value: Value| -> Map<String, Value> { value.as_object().unwrap().clone() };
        Recipe {
            model: ModelSettings { dtype: Some("f32".into()), ..Default::default() },
            data: DataSettings {
                train: vec![self.0.join(file).to_str().unwrap().into()],
                ..Default::default()
            },
            algo: object(algo),
            rollout: Rollout {
                prompts: 2,
                samples: 6,
                max_new_tokens: 12,
                cache_mib: 8,
                ..Default::default()
            },
            reward: vec![RewardSettings {
                verifier: Some("regex".into()),
                options: object(json!({ "pattern": "[aeiou].*[aeiou]", "whole": false })),
                // A random model seldom ends by itself.
                truncated: Some("score".into()),
                ..Default::default()
            }],
            optim: Optim { lr: 1e-2, max_grad_norm: 0.0, ..Default::default() },
            train: Train { steps: Some(50), batch: 6, ..Default::default() },
            ..Default::default()
        }
    }

    fn stage(&self, recipe: Recipe, threads: usize) -> Result<Stage> {
        setup::stage(recipe, Arc::new(Cpu::new(Some(threads)).unwrap()), &self.0)
    }
}

fn path(folder: &std::path::Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().into()
}

fn grpo() -> Value {
    json!({ "name": "grpo", "kl": { "coef": 0.0 } })
}

/// All weights, as bits.
fn weights(stage: &Stage) -> Vec<Vec<u32>> {
    let model = &stage.policy.model;
    let bits = |i| model.read(i).unwrap().into_iter().map(f32::to_bits).collect();
    (0..model.params.len()).map(bits).collect()
}

#[test]
fn rollouts_that_use_old_weights() {
    // The same long prompts in every step: what the cache holds of them belongs to weights that are gone.
    for dtype in ["f32", "bf16"] {
        let world = World::new();
        let mut recipe = world.recipe("prompts.jsonl", grpo());
        recipe.model.dtype = Some(dtype.into());
        let mut stage = world.stage(recipe, 2).unwrap();
        for step in 0..4 {
            let before = weights(&stage);
            let metrics = stage.step().unwrap().metrics;
            assert_eq!(
                metrics.get("sampling/sampling_logp_difference/max"),
                Some(0.0),
                "{dtype}, step {step}"
            );
            assert!(weights(&stage) != before, "{dtype}: step {step} changed nothing");
        }
    }
}

#[test]
fn a_gap_between_sampler_and_trainer_that_grows_without_learning() {
    for (dtype, temperature) in [("f32", 0.7), ("bf16", 1.3)] {
        let world = World::new();
        let mut recipe = world.recipe("prompts.jsonl", grpo());
        recipe.model.dtype = Some(dtype.into());
        recipe.rollout.temperature = temperature;
        recipe.optim.lr = 0.0;
        let mut stage = world.stage(recipe, 1).unwrap();
        for _ in 0..2 {
            let metrics = stage.step().unwrap().metrics;
            assert_eq!(metrics.get("sampling/sampling_logp_difference/max"), Some(0.0), "{dtype}");
            assert_eq!(metrics.get("policy/ratio"), Some(1.0), "{dtype}");
        }
    }
}

#[test]
fn tokens_trained_on_that_were_never_sampled() {
    // Text encoded again gives other tokens than those that were sampled; training must not notice.
    let world = World::new();
    let mut stage = world.stage(world.recipe("prompts.jsonl", grpo()), 1).unwrap();
    let report = stage.step().unwrap();
    let again = |text: &str| stage.tokenizer.encode_text(text).unwrap().len();
    let differ = report.rollouts.iter().filter(|r| again(&r.completion.text) != r.completion.tokens).count();
    assert!(differ > 0, "no answer is encoded differently: this test shows nothing");
    let prompts: usize = report.rollouts.iter().map(|r| r.prompt.ids.len()).sum();
    let answers: usize = report.rollouts.iter().map(|r| r.completion.tokens).sum();
    assert_eq!(report.metrics.get("num_tokens"), Some((prompts + answers) as f64));
    assert_eq!(report.metrics.get("sampling/sampling_logp_difference/max"), Some(0.0));
}

#[test]
fn a_wrong_loss_scale_under_accumulation() {
    let world = World::new();
    for (file, algo) in [
        ("sft.jsonl", json!({ "name": "sft" })),
        ("sft.jsonl", json!({ "name": "sft", "aggregate": "sequence" })),
        ("dpo.jsonl", json!({ "name": "dpo" })),
        ("prompts.jsonl", grpo()),
        ("prompts.jsonl", json!({ "name": "dr_grpo", "kl": { "coef": 0.0 } })),
    ] {
        let took = |tokens: usize| {
            let mut recipe = world.recipe(file, algo.clone());
            recipe.train.micro_batch_tokens = tokens;
            let metrics = world.stage(recipe, 2).unwrap().step().unwrap().metrics;
            (metrics.get("loss").unwrap(), metrics.get("grad_norm").unwrap())
        };
        let (whole, cut) = (took(1 << 16), took(700));
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * (1e-3 + a.abs());
        assert!(close(whole.0, cut.0) && close(whole.1, cut.1), "{algo}: {whole:?} against {cut:?}");
        assert!(whole.1 > 1e-4, "{algo}: no gradient to compare");
    }
}

#[test]
fn results_that_depend_on_the_number_of_threads() {
    let world = World::new();
    for (file, algo) in [("dpo.jsonl", json!({ "name": "dpo" })), ("prompts.jsonl", grpo())] {
        let after = |threads: usize| {
            let mut stage = world.stage(world.recipe(file, algo.clone()), threads).unwrap();
            (0..2).for_each(|_| drop(stage.step().unwrap()));
            weights(&stage)
        };
        assert!(after(1) == after(3), "{algo}");
    }
}

#[test]
fn old_log_probabilities_that_are_stale_or_follow_along() {
    let world = World::new();
    let ratio = |epochs: usize| {
        let mut algo = grpo();
        algo["epochs"] = json!(epochs);
        let mut stage = world.stage(world.recipe("prompts.jsonl", algo), 1).unwrap();
        stage.step().unwrap();
        let metrics = stage.step().unwrap().metrics;
        (metrics.get("policy/ratio").unwrap(), metrics.get("clip_ratio/region_mean").unwrap())
    };
    assert_eq!(ratio(1), (1.0, 0.0), "fresh rollouts are on-policy");
    // In a second pass the policy has moved away from the one that sampled.
    assert_ne!(ratio(2).0, 1.0);
}

#[test]
fn an_empty_loss_mask_is_an_error() {
    let blind = Sequence { ids: vec![1; 5], trained: vec![false; 5], weight: 1.0, ..Default::default() };
    let e = Experience { sequences: vec![blind.clone(), Sequence { trajectory: 1, group: 1, ..blind }] };
    let error = updates(&e, UpdatePlan::default(), 0, 0)[0].micro_batches(&e, 100).err().unwrap();
    assert!(error.to_string().contains("no token of this update is trained on"), "{error}");
    assert_eq!(error.class, Class::Data);
    // Prompts that leave no room for an answer, through the whole loop.
    let world = World::new();
    let mut recipe = world.recipe("sft.jsonl", json!({ "name": "sft" }));
    recipe.data.max_length = 16;
    let error = world.stage(recipe, 1).and_then(|mut s| s.step().map(|_| ())).unwrap_err();
    assert_eq!(error.class, Class::Data, "{error}");
}

#[test]
fn a_row_cut_to_nothing_that_still_counts() {
    // The third question fills the limit: none of its answer is left.
    let world = World::new();
    let row = |i: usize| {
        let question = if i == 2 { question(2) } else { format!("eta {i}") };
        format!("{}\n", json!({ "prompt": question, "response": "zeta ".repeat(i + 1) }))
    };
    world.write("long.jsonl", &(0..6).map(row).collect::<String>());
    world.write("short.jsonl", &(0..6).filter(|&i| i != 2).map(row).collect::<String>());
    let first = |file: &str, overlong: &str, batch: usize| {
        let mut recipe = world.recipe(file, json!({ "name": "sft", "aggregate": "sequence" }));
        (recipe.data.max_length, recipe.data.overlong) = (48, overlong.into());
        recipe.train.batch = batch;
        let metrics = world.stage(recipe, 1).and_then(|mut s| s.step())?.metrics;
        Ok::<_, ferrl_engine::Error>((metrics.get("loss").unwrap(), metrics.get("grad_norm").unwrap()))
    };
    let error = first("long.jsonl", "error", 6).unwrap_err();
    let text = error.to_string();
    assert!(error.class == Class::Data && text.contains("leaves nothing to train"), "{text}");
    assert!(text.contains("long.jsonl:3"), "the row is named: {text}");
    // Left out, it is left out of the mean too.
    let (got, want) = (first("long.jsonl", "drop", 5).unwrap(), first("short.jsonl", "error", 5).unwrap());
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
    assert!(close(got.0, want.0) && close(got.1, want.1), "{got:?} against {want:?}");
}

#[test]
fn a_cut_off_answer_that_is_left_out_and_still_counts() {
    let settings =
        json!({ "kl": { "coef": 0.0 }, "mask_truncated": true, "advantage": { "divide_by_std": false } });
    let mut algorithm = (find("grpo").unwrap().build)(settings).unwrap();
    let mut e = graded(&[0, 0, 0, 0], &[1.0, 0.0, 0.5, 0.5]);
    e.sequences[3].truncated = true;
    algorithm.prepare(&mut e).unwrap();
    let update = &updates(&e, UpdatePlan::default(), 0, 0)[0];
    let batches = update.micro_batches(&e, 100).unwrap();
    let rows: usize = batches.iter().map(MicroBatch::len).sum();
    let mut all = ByRole::default();
    all.set(Role::Policy, Stats { logp: vec![-1.0; rows], entropy: vec![0.0; rows], ..Default::default() });
    let loss = algorithm.loss(&batches[0], &all);
    // The better answer's advantage is 0.5, one of two tokens of one of three answers.
    assert_eq!(loss.grads.get(Role::Policy).unwrap().logp[0], (-0.5 / 3.0 / 2.0) as f32);
}

#[test]
fn a_nan_that_reaches_the_weights() {
    let world = World::new();
    let mut stage = world.stage(world.recipe("sft.jsonl", json!({ "name": "sft" })), 1).unwrap();
    stage.step().unwrap();
    let model = &mut stage.policy.model;
    let backend = model.backend.clone();
    backend.write(&mut model.params[1].master, 3, &[f32::NAN]).unwrap();
    model.refresh().unwrap();
    let before = weights(&stage);
    let error = stage.step().err().unwrap();
    assert_eq!(error.class, Class::Numerics, "{error}");
    assert!(error.to_string().contains(&stage.policy.model.params[1].shape.name()), "{error}");
    assert!(weights(&stage) == before, "the weights changed");
}

#[test]
fn rows_without_what_training_needs() {
    let world = World::new();
    world.write("odd.jsonl", "{\"prompt\": \"a\"}\n{\"question\": \"b\", \"label\": 1}\n");
    let error = world.stage(world.recipe("odd.jsonl", grpo()), 1);
    let error = error.and_then(|mut s| (0..3).try_for_each(|_| s.step().map(|_| ()))).unwrap_err();
    let text = error.to_string();
    assert!(error.class == Class::Data && text.contains("odd.jsonl") && text.contains("prompt"), "{text}");
}

#[test]
fn rewards_given_to_another_answer() {
    let world = World::new();
    let mut stage = world.stage(world.recipe("prompts.jsonl", grpo()), 1).unwrap();
    let vowel = |c: char| "aeiou".contains(c);
    let mut both = [0, 0];
    for _ in 0..3 {
        let rollouts = stage.step().unwrap().rollouts;
        assert_eq!(rollouts.len(), 12);
        for group in rollouts.chunks(6) {
            assert!(group.iter().all(|r| r.prompt.ids == group[0].prompt.ids), "answers to another prompt");
            let own: Vec<f64> = group
                .iter()
                .map(|r| f64::from(u8::from(r.completion.text.chars().filter(|&c| vowel(c)).count() >= 2)))
                .collect();
            let mean = own.iter().sum::<f64>() / 6.0;
            let std = (own.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / 5.0).sqrt();
            for (r, own) in group.iter().zip(&own) {
                assert_eq!(r.scores.reward, Some(*own), "{:?}", r.completion.text);
                both[*own as usize] += 1;
                let want = (own - mean) / (std + 1e-4);
                assert!((f64::from(r.advantage) - want).abs() < 1e-5, "another's advantage: {own:?} {want}");
            }
        }
    }
    assert!(both[0] > 0 && both[1] > 0, "all rewards were alike: this test shows nothing");
}

/// Sequences of two actions with these groups and rewards.
fn graded(groups: &[usize], rewards: &[f32]) -> Experience {
    let one = |(i, (&group, &reward)): (usize, (&usize, &f32))| Sequence {
        ids: vec![1, 2, 3],
        trained: vec![false, true, true],
        trajectory: i,
        group,
        weight: 1.0,
        trajectory_tokens: 2,
        reward: vec![0.0, reward, 0.0],
        old_logp: vec![-1.0, -1.0, 0.0],
        sampled_logp: vec![-1.0, -1.0, 0.0],
        ..Default::default()
    };
    Experience { sequences: groups.iter().zip(rewards).enumerate().map(one).collect() }
}

#[test]
fn groups_mixed_up_with_one_another() {
    for name in ["grpo", "dr_grpo"] {
        let advantages = |groups: &[usize], rewards: &[f32]| {
            let mut algorithm = (find(name).unwrap().build)(json!({ "kl": { "coef": 0.0 } })).unwrap();
            let mut e = graded(groups, rewards);
            algorithm.prepare(&mut e).unwrap();
            e.sequences.iter().map(|s| s.advantage[0]).collect::<Vec<f32>>()
        };
        let apart = advantages(&[0, 0, 0, 1, 1, 1], &[1.0, 0.0, 0.5, 9.0, 8.0, 10.0]);
        let woven = advantages(&[0, 1, 0, 1, 0, 1], &[1.0, 9.0, 0.0, 8.0, 0.5, 10.0]);
        assert_eq!(woven, [apart[0], apart[3], apart[1], apart[4], apart[2], apart[5]], "{name}");
        assert_eq!((woven[0] > 0.0, woven[3] > 0.0), (true, false), "{name}: compared with the other group");
    }
}

#[test]
fn clip_bounds_on_the_wrong_side() {
    let settings = json!({ "kl": { "coef": 0.0 }, "clip_low": 0.1, "clip_high": 0.3 });
    let mut algorithm = (find("grpo").unwrap().build)(settings).unwrap();
    let mut e = graded(&[0, 0], &[1.0, 0.0]);
    algorithm.prepare(&mut e).unwrap();
    let slope = |sequence: usize, ratio: f64| {
        let mut all = ByRole::default();
        let mut logp = vec![-1.0f32; 6];
        logp[3 * sequence] += ratio.ln() as f32;
        all.set(Role::Policy, Stats { logp, entropy: vec![0.0; 6], ..Default::default() });
        let batch =
            MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
        algorithm.loss(&batch, &all).grads.get(Role::Policy).unwrap().logp[3 * sequence]
    };
    // The better answer stops gaining above 1.3 and is never held back below; the worse one is its mirror image.
    for (ratio, moves) in [(0.5, true), (0.85, true), (1.25, true), (1.35, false), (3.0, false)] {
        assert_eq!(slope(0, ratio) < 0.0, moves, "better, ratio {ratio}");
    }
    for (ratio, moves) in [(0.5, false), (0.85, false), (0.95, true), (1.25, true), (3.0, true)] {
        assert_eq!(slope(1, ratio) > 0.0, moves, "worse, ratio {ratio}");
    }
}

#[test]
fn an_order_of_data_that_begins_again_after_a_restart() {
    let world = World::new();
    let recipe = || world.recipe("sft.jsonl", json!({ "name": "sft" }));
    let mut source = world.stage(recipe(), 1).unwrap().source;
    source.next(4).unwrap(); // in the middle of an epoch
    let state: Value = serde_json::from_str(&source.state().to_string()).unwrap();
    let want = [source.next(5).unwrap(), source.next(5).unwrap()];
    let mut again = world.stage(recipe(), 1).unwrap().source;
    again.restore(&state).unwrap();
    assert!([again.next(5).unwrap(), again.next(5).unwrap()] == want);
    assert!(want[0] != want[1]);
}

/// Looks on for so many steps.
struct Steps(usize);

impl RunWatch for Steps {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, _record: &StepRecord) {
        self.0 -= 1;
    }
    fn interrupted(&self) -> bool {
        self.0 == 0
    }
}

#[test]
fn a_resume_that_loses_the_place_in_the_data_or_an_adaptive_weight() {
    let world = World::new();
    let row = |i: usize| format!("{}\n", json!({ "prompt": format!("eta {}", question(i)) }));
    world.write("many.jsonl", &(0..6).map(row).collect::<String>());
    let text = format!(
        "model = {{ path = {:?}, dtype = \"f32\" }}\ndata = {{ train = [{:?}], max_length = 400 }}\n\
         algo = {{ name = \"ppo\", kl = {{ coef = 0.05, target = 1e-4, horizon = 40 }} }}\n\
         rollout = {{ prompts = 2, samples = 4, max_new_tokens = 8, cache_mib = 8 }}\n\
         reward = [{{ verifier = \"regex\", truncated = \"score\", \
         options = {{ pattern = \"[aeiou].*[aeiou]\", whole = false }} }}]\n\
         train.steps = 5\noptim.lr = 1e-2\n",
        path(&world.0, ""),
        path(&world.0, "many.jsonl"),
    );
    let resolved = Recipe::parse(&text, "recipe.toml", "test", &[]).unwrap();
    let run = |name: &str, stops: &[usize]| {
        for (i, &stop) in stops.iter().enumerate() {
            let folder = match i {
                0 => RunFolder::create(&world.0.join("runs"), name, &resolved.toml).unwrap(),
                _ => RunFolder::open(&world.0.join("runs").join(name)).unwrap(),
            };
            runner::run(&resolved, folder, Arc::new(Cpu::new(Some(1)).unwrap()), &mut Steps(stop)).unwrap();
        }
        let lines = MetricsLog::history(&world.0.join("runs").join(name).join("metrics.jsonl")).unwrap();
        let of = |name: &'static str| lines.iter().map(|r| r.get(name)).collect::<Vec<_>>();
        (lines.iter().map(|r| r.epoch).collect::<Vec<_>>(), of("loss"), of("kl_coef"), of("score"))
    };
    let (whole, parts) = (run("whole", &[9]), run("parts", &[2, 1, 9]));
    assert_eq!(whole, parts);
    let coefs = whole.2;
    assert!(coefs.len() == 5 && coefs.windows(2).all(|c| c[0] != c[1]), "the weight stands still: {coefs:?}");
}

#[test]
fn a_logp_off_by_one_position() {
    // The statistic at position i is of token i + 1: changing the last token changes the one before it and no other.
    let world = World::new();
    let stage = world.stage(world.recipe("sft.jsonl", json!({ "name": "sft" })), 1).unwrap();
    let logp = |last: u32| {
        let ids = vec![5, 9, 11, 7, last];
        stage.policy.stats(&Batch::of([ids])).unwrap().logp
    };
    let (a, b) = (logp(20), logp(21));
    assert_eq!(a[..3], b[..3]);
    assert!(a[3] != b[3] && a[4] == 0.0 && b[4] == 0.0);
}

/// Was: every algorithm divided its logits by `rollout.temperature`, so that the losses of SFT and DPO moved with it.
#[test]
fn a_sampling_temperature_that_changes_what_is_learned_from_given_data() {
    let world = World::new();
    for (file, algo) in [("sft.jsonl", json!({ "name": "sft" })), ("dpo.jsonl", json!({ "name": "dpo" }))] {
        let train = |temperature: f64| {
            let mut recipe = world.recipe(file, algo.clone());
            recipe.rollout.temperature = temperature;
            let mut stage = world.stage(recipe, 1).unwrap();
            let loss: Vec<f64> = (0..2).map(|_| stage.step().unwrap().metrics.get("loss").unwrap()).collect();
            (loss, weights(&stage))
        };
        assert!(train(1.0) == train(0.5), "{file}");
    }
}

/// Was: `optim.ema` kept an average that no file but the optimizer state had; the result was the last weights.
#[test]
fn an_average_of_the_weights_that_is_not_the_result() {
    let world = World::new();
    let text = format!(
        "model = {{ path = {:?}, dtype = \"f32\" }}\ndata = {{ train = [{:?}], max_length = 400 }}\n\
         algo = \"sft\"\ntrain = {{ steps = 4, batch = 2 }}\noptim = {{ lr = 1e-2, ema = 0.8 }}\n\
         checkpoint = {{ every = 1, keep = 9 }}\n",
        path(&world.0, ""),
        path(&world.0, "sft.jsonl"),
    );
    let resolved = Recipe::parse(&text, "recipe.toml", "test", &[]).unwrap();
    let folder = RunFolder::create(&world.0.join("runs"), "ema", &resolved.toml).unwrap();
    runner::run(&resolved, folder, Arc::new(Cpu::new(Some(1)).unwrap()), &mut Steps(9)).unwrap();
    let numbers = |dir: String| -> Vec<f32> {
        let bytes = fs::read(world.0.join("runs/ema").join(dir).join("model.safetensors")).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header..].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
    };
    let mut want = numbers("checkpoints/step_1/model".into());
    for step in 2..=4 {
        let now = numbers(format!("checkpoints/step_{step}/model"));
        want.iter_mut().zip(now).for_each(|(w, n)| *w = 0.8 * *w + 0.2 * n);
    }
    let (got, last) = (numbers("stages/0".into()), numbers("checkpoints/step_4/model".into()));
    let far = |other: &[f32]| got.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far(&want) < 1e-6 && far(&last) > 1e-4, "{} {}", far(&want), far(&last));
}

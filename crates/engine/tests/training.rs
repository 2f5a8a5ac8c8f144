//! What the trainer promises: PyTorch's steps, the same bits under any threads, and no step on bad numbers.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::{InitOptions, ModelDir};
use ferrl_engine::model::{FAMILIES, Head, Model, Options, ParamId, Slot};
use ferrl_engine::train::{
    Batch, BatchSequence, Decay, ModelTrainer, OptimizerOptions, Rule, Schedule, StatGrads, Stats, kl, plan,
};
use ferrl_kernels::cpu::{Cpu, Level};
use ferrl_kernels::{Backend, Class, DType, Purpose};
use std::path::Path;
use std::sync::Arc;

fn backend(threads: usize, level: Level) -> Arc<dyn Backend> {
    Arc::new(Cpu::with_level(threads, level).unwrap())
}

fn best() -> Arc<dyn Backend> {
    backend(2, Level::available().pop().unwrap())
}

fn tiny(family: &str) -> InitOptions {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers) = (67, 24, 2);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(4), Some(20));
    (init.max_positions, init.std, init.seed) = (64, 0.2, 5);
    // Half of its head is rotated, an even number of elements.
    init.head_dim = (family == "glm4").then_some(8);
    init
}

fn trainer(
    backend: Arc<dyn Backend>,
    init: &InitOptions,
    dtype: DType,
    options: OptimizerOptions,
) -> ModelTrainer {
    let model = Model::random(backend, init, Options { dtype, training: true, context: 0 }).unwrap();
    ModelTrainer::new(model, options).unwrap()
}

fn batch(seed: u32, vocab: u32) -> Batch {
    Batch::of(
        (0..5u32).map(|s| (0..3 + 5 * s).map(|i| (seed * 97 + s * 31 + i * i * 7 + i) % vocab).collect()),
    )
}

/// Gradients with every sign, of logp, entropy and value.
fn flow(stats: &Stats, n: usize) -> StatGrads {
    let column = |have: bool, k: f32| -> Vec<f32> {
        if have { (0..n).map(|i| ((i * 7 % 13) as f32 - 6.0) * k).collect() } else { Vec::new() }
    };
    StatGrads {
        logp: column(stats.logp.iter().any(|&l| l != 0.0), 0.1),
        entropy: column(stats.logp.iter().any(|&l| l != 0.0), 0.01),
        value: column(!stats.value.is_empty(), 0.05),
        ..Default::default()
    }
}

fn weights(t: &ModelTrainer) -> Vec<Vec<u32>> {
    let bits = |i| t.model.read(i).unwrap().into_iter().map(f32::to_bits).collect();
    (0..t.model.params.len()).map(bits).collect()
}

fn gradients(t: &ModelTrainer) -> Vec<Vec<f32>> {
    (0..t.model.params.len()).map(|i| t.gradient(i).unwrap().unwrap_or_default()).collect()
}

/// `steps` updates, each of the batch cut by a token budget.
fn train(t: &mut ModelTrainer, steps: u32, budget: usize) -> Vec<Stats> {
    let mut all = Vec::new();
    for step in 0..steps {
        let whole = batch(step, t.model.config.vocab as u32);
        let lengths: Vec<usize> = whole.sequences.iter().map(|s| s.ids.len()).collect();
        let mut row = 0;
        let n = whole.tokens();
        for range in plan(&lengths, budget).unwrap() {
            let micro = Batch { sequences: whole.sequences[range].to_vec(), others_per_row: 0 };
            let stats = t.forward(&micro).unwrap();
            let g = flow(&stats, n);
            let cut =
                |c: &Vec<f32>| if c.is_empty() { vec![] } else { c[row..row + micro.tokens()].to_vec() };
            let g = StatGrads {
                logp: cut(&g.logp),
                entropy: cut(&g.entropy),
                value: cut(&g.value),
                ..Default::default()
            };
            t.backward(&micro, &g).unwrap();
            row += micro.tokens();
            all.push(stats);
        }
        t.update(1e-2).unwrap();
    }
    all
}

#[test]
fn twelve_steps_follow_pytorch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let want: serde_json::Value =
        serde_json::from_slice(&std::fs::read(root.join("adamw.json")).unwrap()).unwrap();
    let dir = ModelDir::open(&root.join("models/qwen2")).unwrap();
    let options = Options { training: true, ..Default::default() };
    let model = Model::load(best(), &dir, options).unwrap();
    let vocab = model.config.vocab;
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8 };
    let options =
        OptimizerOptions { rule, weight_decay: 0.1, max_grad_norm: Some(1.0), ..Default::default() };
    let mut t = ModelTrainer::new(model, options).unwrap();
    let steps = want["steps"].as_u64().unwrap();
    let lr = want["lr"].as_f64().unwrap();
    let schedule = Schedule { lr, warmup_steps: 3, total_steps: steps, decay: Decay::Cosine, min_ratio: 0.0 };
    for step in 0..steps {
        let id = |s: usize, i: usize| ((step as usize * 31 + s * 17 + i * i * 7 + i) % vocab) as u32;
        let b = Batch::of((0..3).map(|s| (0..5 + 4 * s).map(|i| id(s, i)).collect()));
        let targets = b.tokens() - 3;
        let stats = t.forward(&b).unwrap();
        let loss = -stats.logp.iter().map(|&l| l as f64).sum::<f64>() / targets as f64;
        let dlogp = vec![-1.0 / targets as f32; b.tokens()];
        t.backward(&b, &StatGrads { logp: dlogp, ..Default::default() }).unwrap();
        let report = t.update(schedule.at(step)).unwrap();
        for (got, name) in [(loss, "losses"), (report.grad_norm, "grad_norms")] {
            let want = want[name][step as usize].as_f64().unwrap();
            assert!(((got - want) / want).abs() < 1e-4, "{name} at step {step}: {got} {want}");
        }
    }
    let down = t.model.read(t.model.find(ParamId::layer(0, Slot::Down)).unwrap()).unwrap();
    for (got, want) in down.iter().zip(want["down_proj_0"].as_array().unwrap()) {
        assert!((*got as f64 - want.as_f64().unwrap()).abs() < 1e-4);
    }
}

#[test]
fn weights_are_the_same_bits_under_any_threads() {
    for level in Level::available() {
        for dtype in [DType::F32, DType::Bf16] {
            for family in FAMILIES {
                let run = |threads| {
                    let mut init = tiny(family.name());
                    init.head = Head::LmAndValue;
                    let mut t = trainer(backend(threads, level), &init, dtype, OptimizerOptions::default());
                    train(&mut t, 2, 30);
                    weights(&t)
                };
                let one = run(1);
                assert!(run(2) == one && run(3) == one, "{} {level:?} {dtype:?}", family.name());
            }
        }
    }
}

#[test]
fn another_micro_batch_budget_changes_no_statistic_and_gradients_only_by_rounding() {
    for dtype in [DType::F32, DType::Bf16] {
        let run = |budget| {
            let mut t = trainer(best(), &tiny("qwen3"), dtype, OptimizerOptions::default());
            let whole = batch(3, 67);
            let lengths: Vec<usize> = whole.sequences.iter().map(|s| s.ids.len()).collect();
            let (mut logp, mut row) = (Vec::new(), 0);
            for range in plan(&lengths, budget).unwrap() {
                let micro = Batch { sequences: whole.sequences[range].to_vec(), others_per_row: 0 };
                let stats = t.forward(&micro).unwrap();
                logp.extend(stats.logp.iter().chain(&stats.entropy).map(|x| x.to_bits()));
                let g: Vec<f32> = (row..row + micro.tokens()).map(|i| (i % 5) as f32 * 0.1 - 0.2).collect();
                t.backward(&micro, &StatGrads { logp: g, ..Default::default() }).unwrap();
                row += micro.tokens();
            }
            logp.sort_unstable();
            (logp, gradients(&t))
        };
        let (logp, grads) = run(1000);
        for budget in [23, 30, 50] {
            let (other, others) = run(budget);
            assert_eq!(logp, other, "{dtype:?} {budget}");
            for (a, b) in grads.iter().zip(&others) {
                let scale = a.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
                let worst = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs() / scale));
                assert!(worst < 1e-5, "{dtype:?} {budget}: {worst:e}");
            }
        }
    }
}

/// An embedding of its own gets one sum a backward and needs no second gradient. The total is that of micro-batches
/// which were summed each by itself.
#[test]
fn the_head_alone_has_a_second_gradient_while_a_later_micro_batch_adds_to_it() {
    for tied in [false, true] {
        let backend = best();
        let mut init = tiny("qwen2");
        (init.vocab, init.hidden, init.tied) = (512, 32, Some(tied)); // sizes that no allocator rounds
        let mut t = trainer(backend.clone(), &init, DType::F32, OptimizerOptions::default());
        let micro: Vec<Batch> = (0..3).map(|seed| batch(seed, 512)).collect();
        let mut own = Vec::new();
        for b in &micro {
            let flow = StatGrads { logp: vec![0.01; b.tokens()], ..Default::default() };
            t.forward_backward(b, &flow).unwrap();
            own.push(gradients(&t));
            t.zero_grads();
        }
        let one = backend.books().unwrap().at_peak.of(Purpose::Gradients);
        for b in &micro {
            let flow = StatGrads { logp: vec![0.01; b.tokens()], ..Default::default() };
            t.forward_backward(b, &flow).unwrap();
        }
        let more = backend.books().unwrap().at_peak.of(Purpose::Gradients) - one;
        assert_eq!(more, 4 * 512 * 32, "tied: {tied}");
        for (i, got) in gradients(&t).iter().enumerate() {
            let want = (0..got.len()).map(|j| own[0][i][j] + own[1][i][j] + own[2][i][j]);
            let same = want.zip(got).all(|(want, got)| want.to_bits() == got.to_bits());
            assert!(same || !t.model.params[i].shape.id.slot.is_table(), "{}", t.model.params[i].shape.id);
        }
    }
}

#[test]
fn recompute_changes_no_bit_and_saves_memory() {
    for family in FAMILIES {
        for dtype in [DType::F32, DType::Bf16] {
            let run = |recompute| {
                let backend = best();
                let mut init = tiny(family.name());
                init.layers = 6;
                let mut t = trainer(backend.clone(), &init, dtype, OptimizerOptions::default());
                t.recompute = recompute;
                let b = Batch::of((0..40u32).map(|s| (0..50).map(|i| (s * 13 + i) % 67).collect()));
                let before = backend.memory().0;
                t.forward(&b).unwrap();
                let held = backend.memory().0 - before;
                t.backward(&b, &StatGrads { logp: vec![0.01; b.tokens()], ..Default::default() }).unwrap();
                let bits: Vec<u32> = gradients(&t).into_iter().flatten().map(f32::to_bits).collect();
                (bits, held)
            };
            let ((kept, all), (again, few)) = (run(false), run(true));
            assert!(kept == again, "{} {dtype:?}", family.name());
            assert!(few * 2 < all, "{}: {few} of {all} bytes held", family.name());
        }
    }
}

#[test]
fn frozen_tensors_do_not_move() {
    let frozen = vec!["embed_tokens".into(), "layers.0.".into(), "k_proj".into()];
    let options = OptimizerOptions { frozen, max_grad_norm: None, ..Default::default() };
    let mut t = trainer(best(), &tiny("qwen2"), DType::F32, options);
    let before: Vec<Vec<f32>> = (0..t.model.params.len()).map(|i| t.model.read(i).unwrap()).collect();
    train(&mut t, 1, 1000);
    let (q, kv) = (24 * 24, 24 * 24);
    for (i, old) in before.iter().enumerate() {
        let new = t.model.read(i).unwrap();
        let name = t.model.params[i].shape.name();
        if name == "embed" || name.starts_with("layers.0.") {
            assert_eq!(&new, old, "{name}");
        } else if name == "layers.1.qkv.weight" {
            assert_eq!(new[q..q + kv], old[q..q + kv], "keys stay");
            assert!(new[..q] != old[..q] && new[q + kv..] != old[q + kv..], "queries and values move");
        } else {
            assert_ne!(&new, old, "{name}");
        }
    }
    let options = OptimizerOptions { frozen: vec!["model.layer.0.".into()], ..Default::default() };
    let model =
        Model::random(best(), &tiny("qwen2"), Options { training: true, ..Default::default() }).unwrap();
    let error = ModelTrainer::new(model, options).err().unwrap().to_string();
    assert!(error.contains("model.layer.0.") && error.contains("fix:"), "{error}");
}

#[test]
fn weights_return_bit_for_bit_after_a_perturbation() {
    let mut t = trainer(best(), &tiny("llama"), DType::F32, OptimizerOptions::default());
    let b = batch(1, 67);
    let dlogp = |n: usize| StatGrads { logp: vec![1.0; n], ..Default::default() };
    t.forward(&b).unwrap();
    t.backward(&b, &dlogp(b.tokens())).unwrap();
    let g = t.take_gradient().unwrap();
    let before = weights(&t);
    let sum = |s: &Stats| s.logp.iter().map(|&x| x as f64).sum::<f64>();
    // The derivative along the gradient is its squared length.
    let eps = 1e-4 / t.dot(&g, &g).unwrap().sqrt() as f32;
    let places = |t: &ModelTrainer| -> Vec<*const ()> {
        t.model.params.iter().map(|p| std::ptr::from_ref(p.master.data()).cast()).collect()
    };
    let there = places(&t);
    let up = t.perturbed(eps, &g, |t| Ok(sum(&t.stats(&b)?))).unwrap();
    assert_eq!(places(&t), there, "recorded sampling reads the weights where they were");
    let down = t.perturbed(-eps, &g, |t| Ok(sum(&t.stats(&b)?))).unwrap();
    let slope = (up - down) / (2.0 * eps as f64);
    assert!((slope / t.dot(&g, &g).unwrap() - 1.0).abs() < 1e-2, "{slope}");
    assert!(weights(&t) == before);
    let mut twice = t.vector().unwrap();
    t.axpy(2.0, &g, &mut twice).unwrap();
    assert!((t.dot(&twice, &g).unwrap() / t.dot(&g, &g).unwrap() - 2.0).abs() < 1e-6);
    let mut low = trainer(best(), &tiny("llama"), DType::Bf16, OptimizerOptions::default());
    let v = low.vector().unwrap();
    assert!(low.perturbed(1.0, &v, |_| Ok(())).is_err_and(|e| e.to_string().contains("bf16")));
}

#[test]
fn numbers_that_are_not_finite_stop_before_the_update() {
    let mut t = trainer(best(), &tiny("qwen2"), DType::F32, OptimizerOptions::default());
    let b = batch(0, 67);
    let stats = t.forward(&b).unwrap();
    let mut g = flow(&stats, b.tokens());
    g.logp[4] = f32::NAN;
    let error = t.backward(&b, &g).unwrap_err();
    assert!(
        error.class == Class::Numerics && error.to_string().contains("logp is not finite at row 4"),
        "{error}"
    );
    // A gradient that overflows names its tensor and leaves the weights alone.
    let before = weights(&t);
    let stats = t.forward(&b).unwrap();
    let mut g = flow(&stats, b.tokens());
    g.logp.iter_mut().for_each(|x| *x *= 1e38);
    g.entropy.clear();
    t.backward(&b, &g).unwrap();
    let error = t.update(1e-3).unwrap_err().to_string();
    assert!(error.contains("the gradient of ") && error.contains("not changed"), "{error}");
    assert!(weights(&t) == before);
    // A weight that is not finite is named.
    let i = t.model.find(ParamId::layer(1, Slot::Up)).unwrap();
    let backend = t.model.backend.clone();
    backend.write(&mut t.model.params[i].master, 3, &[f32::INFINITY]).unwrap();
    t.model.refresh().unwrap();
    let error = t.forward(&b).unwrap_err().to_string();
    assert!(error.contains("layers.1.up.weight"), "{error}");
}

#[test]
fn an_average_of_the_weights_is_kept_where_asked_for() {
    let options = OptimizerOptions { ema: Some(0.5), ..Default::default() };
    let mut t = trainer(best(), &tiny("gpt2"), DType::F32, options);
    let i = t.model.find(ParamId::layer(0, Slot::Down)).unwrap();
    let mut want: Option<Vec<f32>> = None;
    for _ in 0..3 {
        train(&mut t, 1, 1000);
        let now = t.model.read(i).unwrap();
        want = Some(match want {
            None => now,
            Some(w) => w.iter().zip(&now).map(|(w, n)| w + 0.5 * (n - w)).collect(),
        });
    }
    let mut got = vec![0.0; t.model.params[i].shape.len()];
    t.model.backend.read(t.optimizer.average(&t.model, i), 0, &mut got).unwrap();
    let want = want.unwrap();
    assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-6));
}

#[test]
fn only_scored_tokens_and_listed_others_are_computed() {
    let t = trainer(best(), &tiny("mistral"), DType::F32, OptimizerOptions::default());
    let ids: Vec<u32> = (0..9).map(|i| i * 5 % 67).collect();
    let whole = t.stats(&Batch::of([ids.clone()])).unwrap();
    let scored: Vec<bool> = (0..9).map(|i| i >= 4).collect();
    // At each position the next token itself, and token 7.
    let others = (0..9).flat_map(|i| [ids[(i + 1) % 9], 7]).collect();
    let part = Batch { sequences: vec![BatchSequence { ids, scored, others }], others_per_row: 2 };
    let part = t.stats(&part).unwrap();
    for i in 0..8 {
        let want = if i + 1 >= 4 { whole.logp[i] } else { 0.0 };
        assert_eq!(part.logp[i].to_bits(), want.to_bits());
        assert_eq!(part.others[2 * i].to_bits(), want.to_bits());
    }
}

#[test]
fn known_gradients_in_one_pass_give_the_bits_of_two() {
    for family in FAMILIES.iter().map(|f| f.name()) {
        for dtype in [DType::F32, DType::Bf16] {
            let mut both = [0, 1].map(|_| trainer(best(), &tiny(family), dtype, OptimizerOptions::default()));
            let [two, one] = &mut both;
            for seed in 0..3 {
                let b = batch(seed, 67);
                let grads = StatGrads {
                    logp: (0..b.tokens()).map(|i| (i * 7 % 13) as f32 * 0.1 - 0.6).collect(),
                    ..Default::default()
                };
                let stats = two.forward(&b).unwrap();
                two.backward(&b, &grads).unwrap();
                assert_eq!(one.forward_backward(&b, &grads).unwrap(), stats, "{family}");
                assert_eq!(gradients(one), gradients(two), "{family}");
            }
        }
    }
}

#[test]
fn a_wrong_guess_of_logp_adds_no_gradient() {
    let mut t = trainer(best(), &tiny("qwen2"), DType::F32, OptimizerOptions::default());
    let mut right = trainer(best(), &tiny("qwen2"), DType::F32, OptimizerOptions::default());
    for seed in 0..3 {
        let b = batch(seed, 67);
        let grads = StatGrads { logp: vec![0.3; b.tokens()], ..Default::default() };
        let stats = right.forward(&b).unwrap();
        right.backward(&b, &grads).unwrap();
        let before = gradients(&t);
        let mut guess = stats.logp.clone();
        let scored = guess.iter().position(|&x| x != 0.0).unwrap();
        guess[scored] = f32::from_bits(guess[scored].to_bits() ^ 1);
        assert_eq!(t.one_pass(&b, &grads, &guess).unwrap(), None);
        assert_eq!(gradients(&t), before, "the first batch, and one that is added to others");
        assert_eq!(t.one_pass(&b, &grads, &stats.logp).unwrap(), Some(stats));
        assert_eq!(gradients(&t), gradients(&right));
    }
}

#[test]
fn batches_that_make_no_sense_are_refused() {
    let t = trainer(best(), &tiny("qwen2"), DType::F32, OptimizerOptions::default());
    for (b, says) in [
        (Batch::of([vec![1, 2], vec![]]), "sequence 1: it has no tokens"),
        (Batch::of([vec![1, 67]]), "token id 67 is not below the vocabulary's 67"),
        (Batch::default(), "a batch without sequences"),
        (
            Batch {
                sequences: vec![BatchSequence { ids: vec![1, 2], scored: vec![true], ..Default::default() }],
                others_per_row: 0,
            },
            "the mask has 1 entries for 2 tokens",
        ),
    ] {
        let error = t.stats(&b).unwrap_err();
        assert!(error.class == Class::Data && error.to_string().contains(says), "{error}");
    }
    assert!(plan(&[3, 9], 8).is_err_and(|e| e.to_string().contains("sequence 1 has 9 tokens")));
    assert_eq!(plan(&[3, 4, 2, 8, 1], 8).unwrap(), [0..2, 2..3, 3..4, 4..5]);
}

/// A GPT-2 read beyond its table of positions: a panic.
#[test]
fn a_sequence_beyond_the_learned_positions_is_refused() {
    let mut t = trainer(best(), &tiny("gpt2"), DType::F32, OptimizerOptions::default());
    assert_eq!((t.model.config.max_context(), t.model.config.max_positions_hard()), (Some(64), Some(64)));
    let long = Batch::of([vec![1; 3], vec![1; 65]]);
    let grads = StatGrads { logp: vec![0.1; 68], ..Default::default() };
    let errors = [
        t.stats(&long).err(),
        t.forward(&long).err(),
        t.forward_backward(&long, &grads).err(),
        kl(&t.model, &t.model, &long, 1.0).err(),
        t.model.tokens(&[1], &[64]).err(),
        t.model.tokens(&[67], &[0]).err(),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        let error = error.unwrap();
        let says = match i {
            0..4 => "sequence 1: 65 tokens, the model has 64 learned positions",
            4 => "65 tokens, the model has 64 learned positions",
            _ => "token id 67",
        };
        assert!(error.class == Class::Data && error.to_string().starts_with(says), "{i}: {error}");
    }
    t.stats(&Batch::of([vec![1; 64]])).unwrap();
    let rotary = trainer(best(), &tiny("llama"), DType::F32, OptimizerOptions::default());
    assert_eq!(
        (rotary.model.config.max_context(), rotary.model.config.max_positions_hard()),
        (Some(64), None)
    );
    rotary.stats(&Batch::of([vec![1; 65]])).unwrap();
}

#[test]
fn training_never_holds_the_logits() {
    let backend = best();
    let mut init = tiny("qwen2");
    (init.vocab, init.layers) = (32_768, 1);
    let mut t = trainer(backend.clone(), &init, DType::F32, OptimizerOptions::default());
    let b = Batch::of((0..8u32).map(|s| (0..64).map(|i| (s * 977 + i * 31) % 32_768).collect()));
    let before = backend.memory().0;
    let grads = StatGrads { logp: vec![0.01; b.tokens()], ..Default::default() };
    t.forward(&b).unwrap();
    t.backward(&b, &grads).unwrap();
    t.forward_backward(&b, &grads).unwrap();
    let (logits, held) = (b.tokens() * 32_768 * 4, backend.memory().1 - before);
    assert!(held * 4 < logits, "{held} bytes at the peak, the logits would be {logits}");
}

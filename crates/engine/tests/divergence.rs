//! KL of two models over the whole vocabulary: its value against explicit sums, its gradient against differences.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::{Batch, BatchSequence, ModelTrainer, OptimizerOptions, StatGrads, kl, stats};
use ferrl_kernels::DType;
use ferrl_kernels::cpu::Cpu;
use std::sync::Arc;

const VOCAB: usize = 23;

fn model(seed: u64, vocab: usize, training: bool) -> Model {
    let mut init = InitOptions::new("qwen3");
    (init.vocab, init.hidden, init.layers) = (vocab, 16, 2);
    (init.heads, init.kv_heads, init.ffn) = (Some(2), Some(2), Some(24));
    (init.max_positions, init.std, init.seed) = (32, 0.3, seed);
    let options = Options { dtype: DType::F32, training, context: 0 };
    Model::random(Arc::new(Cpu::new(Some(2)).unwrap()), &init, options).unwrap()
}

/// Some tokens are scored, some are not.
fn batch() -> Batch {
    let sequence = |s: u32, n: u32| BatchSequence {
        ids: (0..n).map(|i| (s * 7 + i * i + i) % VOCAB as u32).collect(),
        scored: (0..n).map(|i| i > 2 && i != 5).collect(),
        ..Default::default()
    };
    Batch { sequences: vec![sequence(1, 8), sequence(2, 6)], others_per_row: 0 }
}

/// Log-probabilities of the whole vocabulary at every position.
fn everything(m: &Model, temperature: f32) -> Vec<f32> {
    let mut b = batch();
    b.others_per_row = VOCAB;
    for s in &mut b.sequences {
        s.others = s.ids.iter().flat_map(|_| 0..VOCAB as u32).collect();
    }
    stats(m, &b, temperature).unwrap().others
}

#[test]
fn the_kl_is_the_sum_over_the_vocabulary() {
    let (p, q) = (model(1, VOCAB, false), model(2, VOCAB, false));
    for temperature in [1.0, 0.7] {
        let got = kl(&p, &q, &batch(), temperature).unwrap();
        let (lp, lq) = (everything(&p, temperature), everything(&q, temperature));
        let mut row = 0;
        for s in &batch().sequences {
            for i in 0..s.ids.len() {
                let of = |l: &[f32], v: usize| l[(row + i) * VOCAB + v] as f64;
                let term = |v: usize| of(&lp, v).exp() * (of(&lp, v) - of(&lq, v));
                let scored = s.scored.get(i + 1).copied().unwrap_or(false);
                let want: f64 = if scored { (0..VOCAB).map(term).sum() } else { 0.0 };
                assert!((got[row + i] as f64 - want).abs() < 1e-5, "{} against {want}", got[row + i]);
            }
            row += s.ids.len();
        }
    }
    assert!(kl(&p, &p, &batch(), 1.0).unwrap().iter().all(|k| k.abs() < 1e-6));
    let other = model(3, VOCAB + 1, false);
    assert!(kl(&p, &other, &batch(), 1.0).err().unwrap().to_string().contains("24"));
}

#[test]
fn its_gradient_is_that_of_the_whole_model() {
    let teacher = model(2, VOCAB, false);
    let mut t = ModelTrainer::new(model(1, VOCAB, true), OptimizerOptions::default()).unwrap();
    let b = batch();
    let weight = |i: usize| ((i * 5 % 7) as f32 - 2.0) * 0.1;
    let s = t.forward_against(&b, &teacher).unwrap();
    assert_eq!(s.kl, kl(&t.model, &teacher, &b, 1.0).unwrap());
    // Together with a gradient of the log-probabilities, which shares the way back.
    let dkl: Vec<f32> = (0..b.tokens()).map(weight).collect();
    let dlogp: Vec<f32> = (0..b.tokens()).map(|i| 0.5 * weight(i + 3)).collect();
    let grads = StatGrads { kl: dkl.clone(), logp: dlogp.clone(), ..Default::default() };
    t.backward_against(&b, &grads, &teacher).unwrap();
    let g = t.take_gradient().unwrap();
    let square = t.dot(&g, &g).unwrap();
    let mut loss = |eps: f32| {
        t.perturbed(eps, &g, |t| {
            let now = t.stats(&b)?;
            let kl = kl(&t.model, &teacher, &b, 1.0)?;
            let sum =
                |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum() };
            Ok(sum(&kl, &dkl) + sum(&now.logp, &dlogp))
        })
        .unwrap()
    };
    let h = 2e-3 / square.sqrt();
    let numeric = (loss(h as f32) - loss(-h as f32)) / (2.0 * h);
    assert!((numeric / square - 1.0).abs() < 5e-3, "{numeric} against {square}");
}

//! What is left after a failure: an update happens as a whole or not at all.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::{Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, Rule, StatGrads};
use ferrl_kernels::backend::MemoryOps;
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Backend, Buffer, Class, DType, Error};
use std::sync::Arc;

fn trainer(family: &str, head: Head, options: OptimizerOptions) -> (Arc<Cpu>, ModelTrainer) {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers, init.head) = (67, 24, 2, head);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(4), Some(20));
    (init.max_positions, init.std, init.seed) = (64, 0.2, 5);
    let cpu = Arc::new(Cpu::new(Some(1)).unwrap());
    let (backend, training) = (cpu.clone() as Arc<dyn Backend>, true);
    let model = Model::random(backend, &init, Options { dtype: DType::F32, training, context: 0 }).unwrap();
    (cpu, ModelTrainer::new(model, options).unwrap())
}

fn batch(seed: u32) -> Batch {
    Batch::of((0..3u32).map(|s| (0..5 + 4 * s).map(|i| (seed * 97 + s * 31 + i * i * 7 + i) % 67).collect()))
}

fn grads(b: &Batch) -> StatGrads {
    let logp = (0..b.tokens()).map(|i| ((i * 7 % 13) as f32 - 6.0) * 0.1).collect();
    StatGrads { logp, ..Default::default() }
}

/// A batch's gradient, by two passes or one.
fn add(t: &mut ModelTrainer, b: &Batch, at_once: bool) -> Result<(), Error> {
    if at_once {
        return t.forward_backward(b, &grads(b)).map(drop);
    }
    t.forward(b)?;
    t.backward(b, &grads(b))
}

/// All that an update changes, to the bit: weights, derived weights by what they give, moments, averages, counts.
#[derive(Clone, Debug, PartialEq)]
struct State {
    weights: Vec<Vec<u32>>,
    state: Vec<[Option<Vec<u32>>; 5]>,
    logp: Vec<u32>,
    version: u64,
    steps: u64,
}

fn state(t: &ModelTrainer) -> State {
    let bits = |b: &Buffer| -> Vec<u32> {
        let mut v = vec![0.0; b.len()];
        t.model.backend.read(b, 0, &mut v).unwrap();
        v.iter().map(|x| x.to_bits()).collect()
    };
    let all = 0..t.model.params.len();
    State {
        weights: t.model.params.iter().map(|p| bits(&p.master)).collect(),
        state: all.map(|i| t.optimizer.buffers(i).map(|b| b.map(bits))).collect(),
        logp: t.stats(&batch(9)).unwrap().logp.iter().map(|x| x.to_bits()).collect(),
        version: t.model.version,
        steps: t.optimizer.steps,
    }
}

fn rules() -> Vec<OptimizerOptions> {
    let sgd = |momentum| Rule::Sgd { momentum };
    let plain = OptimizerOptions::default();
    vec![
        plain.clone(),
        OptimizerOptions { ema: Some(0.9), ..plain.clone() },
        OptimizerOptions { rule: sgd(0.0), ema: Some(0.5), ..plain.clone() },
        OptimizerOptions { rule: sgd(0.9), ..plain },
    ]
}

/// A backward that ran out of memory took all gradients with it; the update that followed "succeeded" by none.
#[test]
fn a_failed_backward_leaves_no_update_behind() {
    for (family, at_once) in [("qwen3", false), ("gpt2", false), ("llama", true)] {
        let (cpu, mut t) = trainer(family, Head::Lm, OptimizerOptions::default());
        add(&mut t, &batch(1), at_once).unwrap();
        let used = cpu.memory().0;
        let before = state(&t);
        let (mut failed, mut room) = (0, 0);
        loop {
            cpu.limit_memory(Some(used + room));
            let done = add(&mut t, &batch(2), at_once);
            cpu.limit_memory(None);
            match done {
                Ok(()) => break,
                Err(e) => assert_eq!(e.class, Class::Resource, "{e}"),
            }
            failed += 1;
            room += 256;
            // Neither an update nor another batch goes on with what is left.
            let error = t.update(1e-2).unwrap_err();
            assert!(error.class == Class::Usage && error.to_string().contains("a batch failed"), "{error}");
            assert!(add(&mut t, &batch(2), at_once).is_err() && t.take_gradient().is_err());
            assert!(state(&t) == before, "{family}: weights have moved");
            t.zero_grads();
            add(&mut t, &batch(1), at_once).unwrap();
        }
        assert!(failed > 20, "{family}: {failed} places where memory is asked for");
        t.update(1e-2).unwrap();
        let (_, mut whole) = trainer(family, Head::Lm, OptimizerOptions::default());
        add(&mut whole, &batch(1), at_once).unwrap();
        add(&mut whole, &batch(2), at_once).unwrap();
        whole.update(1e-2).unwrap();
        assert!(state(&t) == state(&whole), "{family}: what was tried before has left something");
    }
}

#[test]
fn an_update_without_a_backward_is_refused() {
    let (_, mut t) = trainer("llama", Head::Lm, OptimizerOptions::default());
    let (b, before) = (batch(1), state(&t));
    let refused = |t: &mut ModelTrainer, says: &str| {
        let error = t.update(1e-2).unwrap_err();
        assert!(error.class == Class::Usage && error.to_string().contains(says), "{error}");
        assert!(state(t) == before);
    };
    refused(&mut t, "without a gradient");
    t.forward(&b).unwrap();
    refused(&mut t, "without a gradient");
    let error = t.backward(&batch(2), &grads(&batch(2))).unwrap_err();
    assert!(error.to_string().contains("does not follow the forward"), "{error}");
    refused(&mut t, "without a gradient");
    assert!(t.backward(&b, &grads(&b)).is_err(), "the forward is gone");
    add(&mut t, &b, false).unwrap();
    t.forward(&b).unwrap();
    refused(&mut t, "waits for its backward");
    t.backward(&b, &grads(&b)).unwrap();
    t.update(1e-2).unwrap();
    let moved = state(&t);
    assert!(t.update(1e-2).is_err() && state(&t) == moved, "the gradient is used up");
}

/// A first average that found no memory left new weights under the old version.
#[test]
fn an_update_without_memory_changes_nothing() {
    for options in rules() {
        let (cpu, mut t) = trainer("gpt2", Head::Lm, options.clone());
        let (_, mut whole) = trainer("gpt2", Head::Lm, options.clone());
        // The first update needs most; later ones still need copies where there is an average.
        for step in 0..2 {
            add(&mut t, &batch(step), false).unwrap();
            add(&mut whole, &batch(step), false).unwrap();
            whole.update(1e-2).unwrap();
            let (used, before) = (cpu.memory().0, state(&t));
            let mut room = 0;
            loop {
                cpu.limit_memory(Some(used + room));
                let done = t.update(1e-2);
                cpu.limit_memory(None);
                match done {
                    Ok(_) => break,
                    Err(e) => assert_eq!(e.class, Class::Resource, "{e}"),
                }
                assert!(state(&t) == before, "{options:?}: something changed");
                room += 1024;
            }
            let asks = step == 0 && options.rule != (Rule::Sgd { momentum: 0.0 });
            assert!(room > 0 || !(asks || options.ema.is_some()), "{options:?}: memory is asked for");
            assert!(state(&t) == state(&whole), "{options:?}: what was tried before has left something");
        }
    }
}

/// Short columns were filled up with zeros, and gradients of what the model does not have were dropped.
#[test]
fn gradients_that_do_not_fit_the_batch_are_refused() {
    let (_, mut t) = trainer("llama", Head::Lm, OptimizerOptions::default());
    let b = batch(1);
    let n = b.tokens();
    let short = vec![0.1; n - 1];
    let cases = [
        (StatGrads { logp: short.clone(), ..Default::default() }, "logp has 26 numbers, the batch 27 rows"),
        (StatGrads { logp: vec![0.1; n + 1], ..Default::default() }, "logp has 28 numbers"),
        (StatGrads { entropy: short.clone(), ..grads(&b) }, "entropy has 26 numbers"),
        (StatGrads { others: short.clone(), ..grads(&b) }, "others has 26 numbers, the batch 0 rows"),
        (StatGrads { value: vec![0.1; n], ..grads(&b) }, "to value, which the forward did not compute"),
        (StatGrads { kl: vec![0.1; n], ..grads(&b) }, "to kl, which the forward did not compute"),
    ];
    for (g, says) in cases {
        t.forward(&b).unwrap();
        let errors = [t.backward(&b, &g).unwrap_err(), t.forward_backward(&b, &g).unwrap_err()];
        assert!(errors.iter().all(|e| e.to_string().contains(says)), "{errors:?}");
        assert!(t.update(1e-2).is_err());
    }
    let (_, mut scored) = trainer("llama", Head::LmAndValue, OptimizerOptions::default());
    scored.forward(&b).unwrap();
    let error = scored.backward(&b, &StatGrads { value: short, ..Default::default() }).unwrap_err();
    assert!(error.to_string().contains("value has 26 numbers"), "{error}");
}

/// Weights that were moved for a while come back also where what was to happen meanwhile failed for want of memory.
#[test]
fn a_perturbation_that_fails_puts_the_weights_back() {
    let (cpu, mut t) = trainer("llama", Head::Lm, OptimizerOptions::default());
    add(&mut t, &batch(1), false).unwrap();
    let g = t.take_gradient().unwrap();
    let (before, used) = (state(&t), cpu.memory().0);
    for room in (0..).step_by(512) {
        cpu.limit_memory(Some(used + room));
        let done = t.perturbed(1e-3, &g, |_| Ok(()));
        cpu.limit_memory(None);
        assert!(state(&t) == before);
        if done.is_ok() {
            assert!(room > 0);
            break;
        }
    }
    assert!(t.perturbed(1e-3, &g, |_| Err::<(), _>(Error::usage("no"))).is_err() && state(&t) == before);
}

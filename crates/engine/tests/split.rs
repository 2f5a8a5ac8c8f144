//! Weights split over ranks (ZeRO-3): the bits of one process in every number, and a part of its memory.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::{InitOptions, ModelDir, SaveOptions, StorageFormat, init_model};
use ferrl_engine::model::serve::{serve, served};
use ferrl_engine::model::shard::Split;
use ferrl_engine::model::{FAMILIES, Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, Rule, StatGrads};
use ferrl_kernels::comm::{device_threads, threads};
use ferrl_kernels::{DType, Ranks};

fn trainer(family: &str, dtype: DType, rule: Rule) -> ModelTrainer {
    with_moments(family, dtype, rule, false)
}

fn with_moments(family: &str, dtype: DType, rule: Rule, coded: bool) -> ModelTrainer {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers, init.head) = (150, 64, 3, Head::LmAndValue);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(4), Some(112));
    (init.max_positions, init.std, init.seed) = (64, 0.2, 5);
    let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
    let model = Model::random(backend, &init, Options { dtype, training: true, context: 0 }).unwrap();
    let options = OptimizerOptions { rule, coded, ema: Some(0.9), ..OptimizerOptions::default() };
    ModelTrainer::new(model, options).unwrap()
}

fn batch(seed: u32) -> Batch {
    Batch::of((0..3u32).map(|s| (0..5 + 4 * s).map(|i| (seed * 97 + s * 31 + i * i * 7 + i) % 150).collect()))
}

fn grads(b: &Batch) -> StatGrads {
    let column = |k: usize| (0..b.tokens()).map(|i| ((i * k % 13) as f32 - 6.0) * 0.1).collect();
    StatGrads { logp: column(7), entropy: column(5), value: column(3), ..Default::default() }
}

/// Three updates of five micro-batches; what each gave, and afterwards the whole state on rank 0. Two copies exchange in turn with
/// what they compute, one copy meanwhile.
fn run(mut t: ModelTrainer, ranks: &Ranks, copies: usize) -> (Vec<u64>, Vec<Option<Vec<u32>>>) {
    t.overlap = copies != 2;
    if copies > 0 {
        t.split(ranks, copies, 0).unwrap();
    }
    let mut seen = Vec::new();
    for update in 0..3 {
        for i in 0..5 {
            if i % ranks.size() == ranks.rank() {
                let b = batch(update * 5 + i as u32);
                t.forward(&b).unwrap();
                t.backward(&b, &grads(&b)).unwrap();
            }
            if i + 1 == 5 || (i + 1).is_multiple_of(ranks.size()) {
                if ranks.rank() > i % ranks.size() {
                    t.idle_forward().unwrap();
                    t.idle_backward().unwrap();
                }
                t.add_round(ranks).unwrap();
            }
        }
        t.gather_gradient(ranks).unwrap();
        seen.push(t.update(1e-2).unwrap().grad_norm.to_bits());
    }
    t.model.gather_all().unwrap();
    let logp = t.stats(&batch(77)).unwrap().logp;
    seen.extend(logp.iter().map(|x| x.to_bits() as u64));
    if copies > 0 && ranks.rank() > 0 {
        serve(ranks, |asked| Ok(t.own_state(asked.param, asked.kind)?.unwrap_or_default())).unwrap();
        return (seen, Vec::new());
    }
    let tensors = (0..t.model.params.len()).flat_map(|i| (0..6).map(move |kind| (i, kind)));
    let read = || tensors.map(|(i, kind)| t.state_tensor(i, kind)).collect::<ferrl_engine::Result<Vec<_>>>();
    let whole = if copies > 0 { served(ranks, read) } else { read() }.unwrap();
    let bits = |v: Vec<f32>| v.iter().map(|x| x.to_bits()).collect();
    (seen, whole.into_iter().map(|t| t.map(bits)).collect())
}

/// What each rank returns, as a thread of its own.
fn on_each<T: Send>(all: Vec<Ranks>, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = all.into_iter().map(|ranks| scope.spawn(move || work(ranks))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// With whole weights on every rank, gradients alone travel; through host memory, or from buffer to buffer.
#[test]
fn summed_gradients_have_the_bits_of_one_process() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    for (name, dtype) in [("llama", DType::Bf16), ("gpt2", DType::F32)] {
        let (alone, state) = run(trainer(name, dtype, rule), Ranks::ALONE, 0);
        for size in [2, 3] {
            for connect in [threads, device_threads] {
                for (seen, whole) in
                    on_each(connect(size), |ranks| run(trainer(name, dtype, rule), &ranks, 0))
                {
                    assert!(seen == alone && whole == state, "{name} over {size} ranks");
                }
            }
        }
    }
}

#[test]
fn split_weights_have_the_bits_of_whole_ones() {
    let rules = [
        Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
        Rule::Sgd { momentum: 0.9 },
        Rule::Sgd { momentum: 0.0 },
    ];
    for (n, family) in FAMILIES.iter().enumerate() {
        let (name, rule) = (family.name(), rules[n % 3]);
        let dtype = [DType::F32, DType::Bf16][n / 2 % 2];
        let (alone, state) = run(trainer(name, dtype, rule), Ranks::ALONE, 0);
        for (size, copies) in [(2, 1), (3, 1), (4, 2)] {
            for connect in [threads, device_threads] {
                let results = on_each(connect(size), |ranks| run(trainer(name, dtype, rule), &ranks, copies));
                for (rank, (seen, _)) in results.iter().enumerate() {
                    assert_eq!(seen, &alone, "{name} on rank {rank} of {size}, {copies} copies");
                }
                assert_eq!(results[0].1, state, "{name} over {size} ranks, {copies} copies");
            }
        }
    }
}

/// Parts are cut at multiples of the blocks that 8-bit codes share.
#[test]
fn split_8_bit_moments_have_the_bits_of_whole_ones() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    let make = || with_moments("llama", DType::Bf16, rule, true);
    let t = make();
    let coded = (0..t.model.params.len()).filter(|&i| t.optimizer.is_coded(&t.model, i)).count();
    assert!(coded > 0 && coded < t.model.params.len(), "{coded} parameters have codes");
    let (alone, state) = run(t, Ranks::ALONE, 0);
    for (size, copies) in [(2, 1), (4, 2)] {
        let results = on_each(threads(size), |ranks| run(make(), &ranks, copies));
        results.iter().for_each(|(seen, _)| assert_eq!(seen, &alone, "{size} ranks"));
        assert_eq!(results[0].1, state, "{size} ranks, {copies} copies");
    }
}

/// What stays between two updates is a rank's part of weights, moments and average.
#[test]
fn a_rank_keeps_its_part_alone() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    let whole = trainer("llama", DType::F32, rule).model.len();
    let mut all = vec![0; 4];
    for (rank, ranks) in threads(4).iter().enumerate() {
        let mut t = trainer("llama", DType::F32, rule);
        t.split(ranks, 1, 0).unwrap();
        all[rank] = t.model.params.iter().map(|p| p.master.len()).sum();
        let readable = t.model.params.iter().filter(|p| p.own.len() == p.shape.len() && p.shape.len() > 8192);
        assert_eq!(readable.count(), 0, "a parameter that can be cut is cut");
    }
    assert_eq!(all.iter().sum::<usize>(), whole);
    let most = *all.iter().max().unwrap();
    assert!(most * 4 < whole * 2, "{all:?} of {whole}: short parameters go round");
}

/// A rank reads its own ranges of a model's files: the bits it has after everything was read and cut, gathered the same.
#[test]
fn a_rank_reads_its_own_part_of_every_family() {
    let folder = tempfile::tempdir().unwrap();
    let backend = || ferrl_kernels::open("cpu", Some(1)).unwrap();
    for (n, family) in FAMILIES.iter().enumerate() {
        let dir = folder.path().join(family.name());
        let mut init = InitOptions::new(family.name());
        (init.vocab, init.hidden, init.layers, init.ffn) = (150, 64, 2, Some(112));
        (init.heads, init.kv_heads, init.seed) = (Some(4), Some(4), 3);
        let storage = [StorageFormat::F32, StorageFormat::Bf16][n % 2];
        init_model(&dir, &init, &SaveOptions { dtype: storage, ..Default::default() }).unwrap();
        let opened = ModelDir::open(&dir).unwrap().with_head(Head::LmAndValue, 9).unwrap();
        let options = Options { dtype: DType::F32, training: true, context: 0 };
        let bits = |m: &Model| -> Vec<Vec<u32>> {
            let own = |i| m.own_values(i).unwrap().iter().map(|x| x.to_bits()).collect();
            (0..m.params.len()).map(own).collect()
        };
        for ranks in threads(3) {
            let split = || Split::new(&ranks, 1, 0).unwrap();
            let mut whole = Model::load(backend(), &opened, options).unwrap();
            whole.split(split()).unwrap();
            let read = Model::load_split(backend(), &opened, options, split()).unwrap();
            assert_eq!(bits(&read), bits(&whole), "{} on rank {}", family.name(), ranks.rank());
            let copy = read.frozen_part(2).unwrap().unwrap();
            assert_eq!(bits(&copy), bits(&whole), "the reference of {}", family.name());
            let most = read.backend.memory().1;
            assert!(2 * most < whole.backend.memory().1, "{most} bytes at most");
        }
    }
}

/// A gradient that is not finite is found by the rank that owns it, and every rank returns the same error.
#[test]
fn every_rank_names_the_gradient_that_is_not_finite() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    for connect in [threads, device_threads] {
        let said = on_each(connect(3), |ranks| {
            let mut t = trainer("llama", DType::F32, rule);
            t.split(&ranks, 1, 0).unwrap();
            let b = batch(1);
            t.forward(&b).unwrap();
            let huge = StatGrads { logp: vec![3e38; b.tokens()], ..Default::default() };
            t.backward(&b, &huge).unwrap();
            t.add_round(&ranks).unwrap();
            t.gather_gradient(&ranks).unwrap();
            t.update(1e-2).unwrap_err().to_string()
        });
        assert!(said[0].contains("is not finite at ["), "{said:?}");
        assert!(said.iter().all(|s| *s == said[0]), "{said:?}");
    }
}

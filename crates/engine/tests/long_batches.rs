//! Micro-batches whose head takes several stretches of the vocabulary and several parts of the rows: their gradients, summed over
//! an update, have the bits of one process on any number of ranks.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::adapter::AdapterOptions;
use ferrl_engine::model::tensor::Team;
use ferrl_engine::model::{FAMILIES, Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads};
use ferrl_kernels::comm::{device_threads, threads};
use ferrl_kernels::{DType, Ranks};

/// Five stretches of 2,048 tokens, the last not full. With 2,000 rows there are more logits than a one-pass head keeps, or ranks
/// that share the vocabulary compute and exchange, at a time.
const VOCAB: usize = 8500;
/// Scored rows of the micro-batches of an update.
const ROWS: [usize; 3] = [2010, 1990, 7];

fn model(family: &str, dtype: DType, head: Head, seed: u64) -> Model {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers, init.head) = (VOCAB, 16, 1, head);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(4), Some(24));
    (init.max_positions, init.std, init.seed) = (256, 0.2, seed);
    let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
    Model::random(backend, &init, Options { dtype, training: true, context: 0 }).unwrap()
}

fn trainer(family: &str, dtype: DType) -> ModelTrainer {
    ModelTrainer::new(model(family, dtype, Head::Lm, 5), OptimizerOptions::default()).unwrap()
}

/// Sequences of 200 tokens at most, some of which occur often.
fn batch(number: usize, rows: usize) -> Batch {
    let token =
        |i: usize| ((number * 97 + i * i * 7 + i / 3) % if i.is_multiple_of(5) { 11 } else { VOCAB }) as u32;
    let starts = (0..rows).step_by(199);
    Batch::of(starts.map(|at| (at..=(at + 199).min(rows)).map(token).collect()))
}

/// With gradients of the entropy too the head cannot take its one pass.
fn grads(b: &Batch, entropy: bool) -> StatGrads {
    let column = |k: usize| (0..b.tokens()).map(|i| ((i * k % 13) as f32 - 6.0) * 0.1).collect();
    StatGrads { logp: column(7), entropy: if entropy { column(5) } else { Vec::new() }, ..Default::default() }
}

/// How ranks share the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WeightSplit {
    Whole,
    /// ZeRO-3, with this number of copies of the weights.
    Split(usize),
    /// Tensor and context parallelism, and copies of the weights.
    Team(usize, usize, usize),
}

/// The gradients of an update: of this rank's part of the weights, with where it begins.
fn run(mut t: ModelTrainer, ranks: &Ranks, split: WeightSplit, entropy: bool) -> Vec<(usize, Vec<u32>)> {
    let mut size = 1;
    match split {
        WeightSplit::Whole => {}
        WeightSplit::Split(copies) => t.split(ranks, copies, 0).unwrap(),
        WeightSplit::Team(tp, sp, copies) => {
            size = tp * sp;
            t.split(ranks, copies, 0).unwrap();
            t.model.set_team(Team::new(ranks, tp, sp, true)).unwrap();
        }
    }
    let (team, teams, own) = (ranks.team(size), ranks.size() / size, ranks.rank() / size);
    t.prepare().unwrap();
    for (i, &rows) in ROWS.iter().enumerate() {
        if i % teams == own {
            let b = batch(i, rows);
            team.in_step(|| t.forward_backward(&b, &grads(&b, entropy)).map(|_| ())).unwrap();
        }
        if i + 1 == ROWS.len() || (i + 1) % teams == 0 {
            if matches!(split, WeightSplit::Split(_)) && own > i % teams {
                t.idle_forward().unwrap();
                t.idle_backward().unwrap();
            }
            t.add_round(ranks).unwrap();
        }
    }
    t.gather_gradient(ranks).unwrap();
    let bits = |i: usize| t.gradient(i).unwrap().unwrap().iter().map(|x| x.to_bits()).collect();
    (0..t.model.params.len()).map(|i| (t.model.params[i].own.start, bits(i))).collect()
}

fn on_each<T: Send>(all: Vec<Ranks>, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = all.into_iter().map(|ranks| scope.spawn(move || work(ranks))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn compare(family: &str, dtype: DType, entropy: bool) {
    let alone = run(trainer(family, dtype), Ranks::ALONE, WeightSplit::Whole, entropy);
    let lies = [
        (2, WeightSplit::Whole),
        (4, WeightSplit::Whole),
        (2, WeightSplit::Split(1)),
        (4, WeightSplit::Split(1)),
        (4, WeightSplit::Split(2)),
        (2, WeightSplit::Team(2, 1, 1)),
        (2, WeightSplit::Team(1, 2, 1)),
        (4, WeightSplit::Team(2, 1, 1)),
        (4, WeightSplit::Team(2, 2, 1)),
    ];
    for (n, (size, split)) in lies.into_iter().enumerate() {
        let ranks = if n % 2 == 0 { threads(size) } else { device_threads(size) };
        let results = on_each(ranks, |ranks| run(trainer(family, dtype), &ranks, split, entropy));
        for (rank, parts) in results.iter().enumerate() {
            for (i, ((start, got), (_, whole))) in parts.iter().zip(&alone).enumerate() {
                let want = &whole[*start..start + got.len()];
                let off = got.iter().zip(want).filter(|(a, b)| a != b).count();
                assert!(
                    off == 0,
                    "{family}: {off} of {} numbers of gradient {i} on rank {rank} of {size}, {split:?}",
                    got.len()
                );
            }
        }
    }
}

#[test]
fn a_head_of_its_own_in_f32() {
    compare("llama", DType::F32, true);
    compare("llama", DType::F32, false);
}

#[test]
fn the_embedding_as_head_in_bf16() {
    compare("qwen2", DType::Bf16, true);
    compare("qwen2", DType::Bf16, false);
}

/// Which parts of a model are trained, by which gradients.
#[derive(Clone, Copy, Debug)]
enum Trained {
    /// All weights and a value head, with a KL over the whole vocabulary.
    All,
    /// An adapter.
    Adapter,
}

impl Trained {
    fn trainer(self, family: &str, dtype: DType) -> ModelTrainer {
        let mut model = model(family, dtype, Head::LmAndValue, 5);
        if let Trained::Adapter = self {
            let options = AdapterOptions { r: 3, alpha: 6.0, ..Default::default() };
            let wave = |n: usize| (0..n).map(|i| ((i * 37 % 61) as f32 - 30.0) * 4e-3).collect::<Vec<f32>>();
            model.adapt(&options, 3, |m| Ok(Some([wave(m.r * m.cols), wave(m.r * m.rows)]))).unwrap();
        }
        ModelTrainer::new(model, OptimizerOptions::default()).unwrap()
    }

    fn add(self, t: &mut ModelTrainer, number: usize, other: &Model) {
        let b = batch(number, ROWS[number]);
        let mut g = grads(&b, number != 1);
        g.value = (0..b.tokens()).map(|i| ((i * 3 % 11) as f32 - 5.0) * 0.1).collect();
        match self {
            Trained::All => {
                g.kl = (0..b.tokens()).map(|i| (i % 7) as f32 * 0.1).collect();
                t.forward_against(&b, other).unwrap();
                t.backward_against(&b, &g, other).unwrap();
            }
            Trained::Adapter => drop(t.forward_backward(&b, &g).unwrap()),
        }
    }
}

/// What ranks rely on: a micro-batch adds its gradient to that of an update once, as if it had been computed alone.
#[test]
fn an_update_is_the_sum_of_whole_micro_batches_for_every_weight() {
    let (all, most) = ([Trained::All, Trained::Adapter], ["qwen2", "olmo2", "qwen3_moe", "gpt2"]);
    for (family, dtype) in FAMILIES.iter().flat_map(|f| [(f.name(), DType::F32), (f.name(), DType::Bf16)]) {
        let other = model(family, dtype, Head::Lm, 6);
        // All weights in f32 and adapters in bf16; families with operations of their own also the other way round.
        let usual = usize::from(dtype == DType::Bf16);
        for trained in if most.contains(&family) { &all[..] } else { &all[usual..=usual] } {
            let mut update = trained.trainer(family, dtype);
            (0..ROWS.len()).for_each(|number| trained.add(&mut update, number, &other));
            let each: Vec<ModelTrainer> = (0..ROWS.len())
                .map(|number| {
                    let mut alone = trained.trainer(family, dtype);
                    trained.add(&mut alone, number, &other);
                    alone
                })
                .collect();
            let mut moved = 0;
            for i in 0..update.model.params.len() {
                let Some(got) = update.gradient(i).unwrap() else { continue };
                let mut sum = vec![0.0f32; got.len()];
                for alone in &each {
                    let part = alone.gradient(i).unwrap().unwrap();
                    sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                }
                moved += usize::from(sum.iter().any(|x| *x != 0.0));
                let off = got.iter().zip(&sum).filter(|(a, b)| a != b).count();
                let name = update.model.params[i].shape.id;
                assert_eq!(off, 0, "{family}, {dtype:?}, {trained:?}: of {} numbers of {name}", got.len());
            }
            assert!(moved > 5, "{family}, {trained:?}: {moved} gradients");
        }
    }
}

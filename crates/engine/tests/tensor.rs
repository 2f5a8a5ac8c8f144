//! Tensor and context parallelism: the bits of one process in every number, whatever the number of ranks that compute together.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::adapter::{AdapterOptions, LoraModule};
use ferrl_engine::model::serve::{serve, served};
use ferrl_engine::model::tensor::Team;
use ferrl_engine::model::{FAMILIES, Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, Rule, StatGrads};
use ferrl_kernels::comm::{device_threads, threads};
use ferrl_kernels::{DType, Ranks};

fn model(family: &str, dtype: DType) -> Model {
    model_of(family, dtype, (8, 4))
}

fn model_of(family: &str, dtype: DType, (heads, kv_heads): (usize, usize)) -> Model {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers, init.head) = (600, 96, 2, Head::LmAndValue);
    (init.heads, init.kv_heads, init.ffn) = (Some(heads), Some(kv_heads), Some(107));
    (init.max_positions, init.std, init.seed) = (64, 0.2, 5);
    let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
    let options = Options { dtype, training: true, context: 0 };
    match Model::random(backend.clone(), &init, options) {
        Ok(model) => model,
        Err(_) => {
            init.kv_heads = Some(heads); // a family without grouped queries
            Model::random(backend, &init, options).unwrap()
        }
    }
}

/// On all linear layers, with a `B` that is not zero.
fn adapted(family: &str, dtype: DType) -> ModelTrainer {
    adapter_on(model(family, dtype))
}

fn adapter_on(mut model: Model) -> ModelTrainer {
    let first = |module: &LoraModule| {
        let values = |n: usize, k: usize| (0..n).map(|i| ((i * k) % 17) as f32 * 0.01 - 0.08).collect();
        Ok(Some([values(module.r * module.cols, 7), values(module.r * module.rows, 5)]))
    };
    model.adapt(&AdapterOptions { r: 3, ..AdapterOptions::default() }, 1, first).unwrap();
    let mut trainer = ModelTrainer::new(model, OptimizerOptions::default()).unwrap();
    trainer.keep_start().unwrap();
    trainer
}

fn trainer(family: &str, dtype: DType) -> ModelTrainer {
    trainer_of(model(family, dtype))
}

fn trainer_of(model: Model) -> ModelTrainer {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    let options = OptimizerOptions { rule, ema: Some(0.9), ..OptimizerOptions::default() };
    ModelTrainer::new(model, options).unwrap()
}

fn batch(seed: u32) -> Batch {
    // One of the micro-batches has fewer tokens than some teams have ranks.
    let sequences = if seed == 3 { 0..1u32 } else { 1..4 };
    Batch::of(sequences.map(|s| (0..3 + 4 * s).map(|i| (seed * 97 + s * 31 + i * i * 7 + i) % 600).collect()))
}

fn grads(b: &Batch) -> StatGrads {
    let column = |k: usize| (0..b.tokens()).map(|i| ((i * k % 13) as f32 - 6.0) * 0.1).collect();
    StatGrads { logp: column(7), entropy: column(5), value: column(3), ..Default::default() }
}

/// How ranks lie: `tp * sp` of them in a team, with `copies` of the weights.
#[derive(Clone, Copy, Debug)]
struct Mesh {
    ranks: usize,
    tp: usize,
    sp: usize,
    copies: usize,
}

/// Two updates of five micro-batches; what each gave, and afterwards the whole state on rank 0.
fn run(mut t: ModelTrainer, ranks: &Ranks, mesh: Mesh) -> (Vec<u64>, Vec<Option<Vec<u32>>>) {
    let alone = ranks.is_alone();
    let size = mesh.tp * mesh.sp;
    let team = ranks.team(size);
    if !alone {
        t.split(ranks, mesh.copies, 0).unwrap();
        t.model.set_team(Team::new(ranks, mesh.tp, mesh.sp, true)).unwrap();
    }
    let (teams, own) = (mesh.ranks / size, ranks.rank() / size);
    let mut seen = Vec::new();
    for update in 0..2 {
        t.model.gather_all().unwrap();
        for i in 0..5 {
            if i % teams == own {
                let b = batch(update * 5 + i as u32);
                let done = team.in_step(|| t.forward(&b).and_then(|_| t.backward(&b, &grads(&b))));
                done.unwrap();
            }
            if i == 4 || (i + 1) % teams == 0 {
                t.add_round(ranks).unwrap();
            }
        }
        t.gather_gradient(ranks).unwrap();
        seen.push(t.update(1e-2).unwrap().grad_norm.to_bits());
    }
    t.model.gather_all().unwrap();
    let stats = t.stats(&batch(77)).unwrap();
    let numbers = stats.logp.iter().chain(&stats.entropy).chain(&stats.value);
    seen.extend(numbers.map(|x| x.to_bits() as u64));
    if ranks.rank() > 0 {
        serve(ranks, |asked| Ok(t.own_state(asked.param, asked.kind)?.unwrap_or_default())).unwrap();
        return (seen, Vec::new());
    }
    let tensors = (0..t.model.params.len()).flat_map(|i| (0..4).map(move |kind| (i, kind)));
    let read = || tensors.map(|(i, kind)| t.state_tensor(i, kind)).collect::<ferrl_engine::Result<Vec<_>>>();
    let whole = if alone { read() } else { served(ranks, read) }.unwrap();
    let bits = |v: Vec<f32>| v.iter().map(|x| x.to_bits()).collect();
    (seen, whole.into_iter().map(|t| t.map(bits)).collect())
}

/// Ranks as threads, whose numbers go from buffer to buffer or through messages.
type Connect = fn(usize) -> Vec<Ranks>;

fn on_each<T: Send>(connect: Connect, size: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = connect(size).into_iter().map(|r| scope.spawn(move || work(r))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Weights, moments, averages, norms of gradients and log-probabilities after updates of every family, with widths that do not
/// divide evenly.
#[test]
fn ranks_that_share_features_train_to_the_bits_of_one() {
    train_in_teams([(2, 2, 1, 1), (4, 4, 1, 1), (4, 2, 1, 2), (4, 2, 1, 1)]);
}

/// The same where they share the tokens of micro-batches.
#[test]
fn ranks_that_share_tokens_train_to_the_bits_of_one() {
    train_in_teams([(2, 1, 2, 1), (4, 1, 4, 1), (4, 1, 2, 4), (4, 1, 2, 1)]);
}

/// The same where they share both.
#[test]
fn ranks_that_share_features_and_tokens_train_to_the_bits_of_one() {
    train_in_teams([(4, 2, 2, 1), (4, 2, 2, 4), (8, 2, 2, 2), (4, 2, 2, 2)]);
}

/// Adapters, whose few numbers every rank computes, on bases whose features or tokens are shared.
#[test]
fn adapters_in_teams_train_to_the_bits_of_one() {
    train_all([(2, 2, 1, 1), (2, 1, 2, 1), (4, 2, 2, 1), (4, 4, 1, 1)], adapted);
}

/// The same where there are fewer key heads than ranks that share tokens: these share the query rows of attention.
#[test]
fn more_ranks_than_one_key_head_train_to_the_bits_of_one() {
    let one_key_head = |family: &str, dtype| trainer_of(model_of(family, dtype, (2, 1)));
    train_all([(2, 1, 2, 1), (4, 1, 4, 1), (4, 1, 2, 4), (3, 1, 3, 1)], one_key_head);
}

/// The same with two key heads: over four ranks, over two that share features and two that share tokens, and over three, which
/// do not divide the heads. Each family has the compute type here that it has not in the other tests.
#[test]
fn more_ranks_than_two_key_heads_train_to_the_bits_of_one() {
    let two_key_heads = |family: &str, dtype| {
        let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
        trainer_of(model_of(family, other, (4, 2)))
    };
    train_all([(4, 2, 2, 1), (4, 1, 4, 1), (3, 1, 3, 3), (8, 2, 4, 2)], two_key_heads);
}

/// Adapters where ranks share query rows.
#[test]
fn adapters_beyond_the_key_heads_train_to_the_bits_of_one() {
    let adapted = |family: &str, dtype| adapter_on(model_of(family, dtype, (4, 2)));
    train_all([(4, 1, 4, 1), (4, 2, 2, 1), (3, 1, 3, 1), (8, 2, 4, 1)], adapted);
}

fn train_in_teams(meshes: [(usize, usize, usize, usize); 4]) {
    train_all(meshes, trainer);
}

fn train_all(meshes: [(usize, usize, usize, usize); 4], trainer: fn(&str, DType) -> ModelTrainer) {
    for (n, family) in FAMILIES.iter().enumerate() {
        let (name, dtype) = (family.name(), [DType::F32, DType::Bf16][n % 2]);
        let one = Mesh { ranks: 1, tp: 1, sp: 1, copies: 1 };
        let (alone, state) = run(trainer(name, dtype), Ranks::ALONE, one);
        let connects: [Connect; 2] = [threads, device_threads];
        for (i, (ranks, tp, sp, copies)) in [meshes[0], meshes[1 + n % 3]].into_iter().enumerate() {
            let mesh = Mesh { ranks, tp, sp, copies };
            let results = on_each(connects[(n / 2 + i) % 2], ranks, |r| run(trainer(name, dtype), &r, mesh));
            for (rank, (seen, _)) in results.iter().enumerate() {
                assert_eq!(seen, &alone, "{name} on rank {rank} of {mesh:?}");
            }
            assert!(results[0].1 == state, "{name} over {mesh:?}");
        }
    }
}

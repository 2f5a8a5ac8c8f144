//! A vocabulary that the ranks of a team share: embeddings, scores, divergences, gradients and sampled tokens have the bits of
//! one process.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::generate::{
    CacheOptions, Completion, GenerationRequest, Generator, Sampler, SamplingParams, dismiss,
};
use ferrl_engine::model::tensor::Team;
use ferrl_engine::model::{Head, Model, Options};
use ferrl_engine::train::{Batch, BatchSequence, ModelTrainer, OptimizerOptions, StatGrads, kl};
use ferrl_kernels::comm::{device_threads, threads};
use ferrl_kernels::{DType, Ranks};

/// Families whose heads are tied and not, capped and divided, and one with learned positions.
const FAMILIES: [&str; 5] = ["qwen2", "llama", "gemma2", "gpt2", "granite"];

fn model(family: &str, dtype: DType, (vocab, seed): (usize, u64)) -> Model {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers, init.head) = (vocab, 48, 1, Head::Lm);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(4), Some(40));
    (init.max_positions, init.std, init.seed) = (64, 0.3, seed);
    let options = Options { dtype, training: true, context: 0 };
    Model::random(ferrl_kernels::open("cpu", Some(1)).unwrap(), &init, options).unwrap()
}

/// Ranks as threads, whose numbers go from buffer to buffer or through messages.
type Connect = fn(usize) -> Vec<Ranks>;

const CONNECTS: [Connect; 2] = [threads, device_threads];

fn on_each<T: Send>(connect: Connect, size: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = connect(size).into_iter().map(|r| scope.spawn(move || work(r))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn batch(vocab: usize) -> Batch {
    let sequence = |s: usize| {
        let n = 3 + 5 * s;
        let token = |i: usize| ((s * 131 + i * i * 37 + i) % vocab) as u32;
        let others = (0..2 * n).map(|i| ((i * 7919 + s) % vocab) as u32).collect();
        let scored = (0..n).map(|i| i > 0 && i != 4).collect();
        BatchSequence { ids: (0..n).map(token).collect(), scored, others }
    };
    Batch { sequences: (1..4).map(sequence).collect(), others_per_row: 2 }
}

/// Statistics, KL both ways, and the gradient of everything: of this rank's part of the weights.
fn scored(
    mut t: ModelTrainer,
    other: &Model,
    ranks: &Ranks,
    (tp, sp): (usize, usize),
) -> (Vec<u32>, Vec<Vec<u32>>) {
    if !ranks.is_alone() {
        t.split(ranks, 1, 0).unwrap();
        t.model.set_team(Team::new(ranks, tp, sp, true)).unwrap();
        t.model.gather_all().unwrap();
    }
    t.temperature = 0.9;
    let b = batch(t.model.config.vocab);
    let column = |k: usize, n: usize| (0..n).map(|i| ((i * k % 13) as f32 - 6.0) * 0.1).collect();
    let n = b.tokens();
    let grads = StatGrads {
        logp: column(7, n),
        entropy: column(5, n),
        kl: column(3, n),
        others: column(11, 2 * n),
        ..Default::default()
    };
    let stats = ranks.in_step(|| t.forward_against(&b, other)).unwrap();
    ranks.in_step(|| t.backward_against(&b, &grads, other)).unwrap();
    let back = ranks.in_step(|| kl(other, &t.model, &b, 0.9)).unwrap();
    t.add_round(ranks).unwrap();
    t.gather_gradient(ranks).unwrap();
    let seen = [stats.logp, stats.entropy, stats.others, stats.kl, back].concat();
    (bits(&seen), (0..t.model.params.len()).map(|i| bits(&t.gradient(i).unwrap().unwrap())).collect())
}

#[test]
fn scores_and_gradients_of_a_shared_vocabulary_are_those_of_one_rank() {
    // Three tiles: of four ranks one has none.
    for (n, family) in FAMILIES.into_iter().enumerate() {
        let (dtype, vocab) = ([DType::F32, DType::Bf16][n % 2], [600, 1111, 200][n % 3]);
        let new =
            || ModelTrainer::new(model(family, dtype, (vocab, 5)), OptimizerOptions::default()).unwrap();
        let other = model(family, dtype, (vocab, 6));
        let (want, gradient) = scored(new(), &other, Ranks::ALONE, (1, 1));
        for (i, (tp, sp)) in [(2, 1), (4, 1), (1, 2), (2, 2)].into_iter().enumerate() {
            let all = on_each(CONNECTS[(n + i) % 2], tp * sp, |ranks| {
                let other = model(family, dtype, (vocab, 6));
                let t = new();
                let own: Vec<_> = {
                    let mut split = new();
                    split.split(&ranks, 1, 0).unwrap();
                    split.model.params.iter().map(|p| p.own.clone()).collect()
                };
                (own, scored(t, &other, &ranks, (tp, sp)))
            });
            for (rank, (own, (got, parts))) in all.into_iter().enumerate() {
                assert_eq!(got, want, "{family} on rank {rank} of {tp} x {sp}");
                for (i, (own, part)) in own.into_iter().zip(parts).enumerate() {
                    assert!(part == gradient[i][own], "{family}: gradient {i} on rank {rank} of {tp} x {sp}");
                }
            }
        }
    }
}

fn requests(vocab: usize) -> Vec<GenerationRequest> {
    let plain = || SamplingParams { max_new_tokens: 7, seed: 3, ..Default::default() };
    let greedy = || SamplingParams { temperature: 0.0, ..plain() };
    let all = [
        greedy(),
        plain(),
        SamplingParams { temperature: 0.7, ..plain() },
        SamplingParams { top_k: 5, ..plain() },
        SamplingParams { top_k: 1000, ..plain() },
        SamplingParams { top_k: 40, top_p: 0.8, ..plain() },
        SamplingParams { top_p: 0.9, ..plain() },
        SamplingParams { min_p: 0.05, ..plain() },
        SamplingParams { top_k: 30, min_p: 0.1, temperature: 1.3, ..plain() },
        SamplingParams { repetition_penalty: 1.3, ..greedy() },
        SamplingParams { presence_penalty: 0.4, frequency_penalty: 0.2, top_p: 0.95, ..plain() },
        SamplingParams { top_logprobs: 4, ..plain() },
        SamplingParams { top_logprobs: 3, ..greedy() },
    ];
    let prompt = |i: usize| (0..2 + 3 * (i % 4)).map(|j| ((i * 97 + j * 53) % vocab) as u32).collect();
    let request = |(i, params)| GenerationRequest { prompt: prompt(i), params, stream: [0, i as u32, 1] };
    all.into_iter().enumerate().map(request).collect()
}

fn sampled(mut m: Model, ranks: &Ranks) -> Vec<Completion> {
    let vocab = m.config.vocab;
    m.set_team(Team::new(ranks, ranks.size(), 1, false)).unwrap();
    m.gather_all().unwrap();
    let mut sampler = Sampler::new(&m, CacheOptions::fit(&m, 16, 64)).unwrap();
    let work = || match ranks.rank() {
        0 => {
            let done = sampler.generate(&m, requests(vocab))?;
            dismiss(&m).map(|()| done)
        }
        _ => sampler.follow(&m).map(|()| Vec::new()),
    };
    ranks.in_step(work).unwrap()
}

#[test]
fn tokens_sampled_from_a_shared_vocabulary_are_those_of_one_rank() {
    for (n, family) in FAMILIES.into_iter().enumerate() {
        let (dtype, vocab) = ([DType::Bf16, DType::F32][n % 2], [600, 1111, 200][n % 3]);
        let new = || model(family, dtype, (vocab, 8));
        let want = sampled(new(), Ranks::ALONE);
        assert!(want.iter().all(|c| c.ids.len() == 7));
        for (i, size) in [2, 4].into_iter().enumerate() {
            let got = on_each(CONNECTS[(n + i) % 2], size, |ranks| sampled(new(), &ranks)).swap_remove(0);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got, want, "{family}: request {i} on {size} ranks");
            }
            assert_eq!(got.len(), want.len());
        }
    }
}

/// Was: copies of cache blocks that had to be made before others, in the same step, were made by the first rank alone.
#[test]
fn continuations_in_a_small_cache_are_those_of_one_rank() {
    let run = |ranks: &Ranks| {
        let mut m = model("llama", DType::F32, (600, 8));
        m.set_team(Team::new(ranks, ranks.size(), 1, false)).unwrap();
        m.gather_all().unwrap();
        let small = CacheOptions { max_sequences: 6, ..CacheOptions::fit(&m, 2, 64) };
        let mut sampler = Sampler::new(&m, small).unwrap();
        let request = |prompt: &[u32], max_new_tokens, stream| GenerationRequest {
            prompt: prompt.to_vec(),
            params: SamplingParams { max_new_tokens, seed: 9, ..Default::default() },
            stream,
        };
        let lead = |sampler: &mut Sampler| {
            let prompts: Vec<Vec<u32>> = (0..4).map(|p| (p * 7..p * 7 + 6).collect()).collect();
            let first = prompts.iter().zip(0..).map(|(p, i)| request(p, 20, [0, i, 0])).collect();
            let mut all = sampler.generate(&m, first)?;
            let mut next = Vec::new();
            for (p, (prompt, c)) in prompts.iter().zip(&all).enumerate() {
                for at in [3, 8, 13] {
                    let state = [&prompt[..], &c.ids[..at]].concat();
                    let new = |k: u32| 1 + (k as usize * 5 + at) % 4;
                    next.extend((0..6).map(|k| request(&state, new(k), [1 + k, p as u32, at as u32])));
                }
            }
            all.extend(sampler.generate(&m, next)?);
            dismiss(&m).map(|()| all)
        };
        let work = || match ranks.rank() {
            0 => lead(&mut sampler),
            _ => sampler.follow(&m).map(|()| Vec::new()),
        };
        ranks.in_step(work).unwrap()
    };
    let tokens = |all: Vec<Completion>| all.into_iter().map(|c| (c.ids, c.logp)).collect::<Vec<_>>();
    let want = tokens(run(Ranks::ALONE));
    assert_eq!(want.len(), 4 + 4 * 3 * 6);
    for connect in CONNECTS {
        assert_eq!(tokens(on_each(connect, 2, |ranks| run(&ranks)).swap_remove(0)), want);
    }
}

/// What a rank exchanges to choose a token is a small part of the logits.
#[test]
fn logits_stay_where_they_are_computed() {
    let sent = |vocab: usize, params: SamplingParams| {
        let sent = on_each(threads, 2, |ranks| {
            let mut m = model("qwen2", DType::F32, (vocab, 8));
            m.set_team(Team::new(&ranks, 2, 1, false)).unwrap();
            m.gather_all().unwrap();
            let mut sampler = Sampler::new(&m, CacheOptions::fit(&m, 4, 64)).unwrap();
            ranks.take_cost();
            let request = GenerationRequest { prompt: vec![1, 2, 3], params: params.clone(), stream: [0; 3] };
            let work = || match ranks.rank() {
                0 => sampler.generate(&m, vec![request.clone()]).and_then(|_| dismiss(&m)),
                _ => sampler.follow(&m),
            };
            ranks.in_step(work).unwrap();
            ranks.take_cost().1
        });
        sent[1]
    };
    let params = SamplingParams { max_new_tokens: 8, ..Default::default() };
    let more = |p: &SamplingParams| sent(20_480, p.clone()) - sent(10_240, p.clone());
    // Twelve bytes a tile of 256 for each token, and not four for each of its logits.
    let tiles = 8 * 12 * 20;
    assert!(more(&params) <= tiles, "{} bytes", more(&params));
    assert!(more(&SamplingParams { temperature: 0.0, ..params.clone() }) <= tiles);
    assert!(more(&SamplingParams { top_k: 20, ..params }) <= tiles);
}

//! The promise the engine is built on: the log-probability that comes with a sampled token is, bit for bit, the one
//! the trainer computes for it, and the token itself depends on its request alone.

#![allow(clippy::unwrap_used)]

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::generate::{
    CacheOptions, Completion, Event, GenerationRequest, Generator, Sampler, SamplingParams,
};
use ferrl_engine::model::{FAMILIES, Model, Options, ParamId, Slot};
use ferrl_engine::train::{Batch, stats};
use ferrl_kernels::cpu::{Cpu, Level};
use ferrl_kernels::philox::philox4x32;
use ferrl_kernels::{Backend, DType, open};
use std::collections::HashMap;
use std::sync::Arc;

const VOCAB: u32 = 67;
const TEMPERATURES: [f32; 4] = [0.0, 0.7, 1.0, 1.6];

/// Small, odd and peaky.
fn tiny(family: &str, dtype: DType, threads: usize) -> Model {
    on(open("cpu", Some(threads)).unwrap(), family, dtype)
}

fn on(backend: Arc<dyn Backend>, family: &str, dtype: DType) -> Model {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers) = (VOCAB as usize, 24, 2);
    (init.heads, init.kv_heads, init.ffn) = (Some(3), Some(if family == "gpt2" { 3 } else { 1 }), Some(37));
    (init.max_positions, init.std) = (160, 0.3);
    init.window = ["mistral", "gemma2", "gemma3"].contains(&family).then_some(9);
    Model::random(backend, &init, Options { dtype, training: false, context: 0 }).unwrap()
}

struct Dice(u32, u32);
impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        philox4x32([self.1, 0, 0, 0], [self.0, 7])[0] as usize % n
    }
    fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(VOCAB as usize) as u32).collect()
    }
}

/// Prompts of all lengths, some with a common beginning, some the beginning of another; three samples of each.
fn requests(seed: u32) -> Vec<GenerationRequest> {
    let mut dice = Dice(seed, 0);
    let common = dice.tokens(70);
    let mut out = Vec::new();
    for p in 0..6 {
        let mut prompt = match p % 3 {
            0 => common[..1 + dice.below(70)].to_vec(),
            1 => common[..[32, 64, 33][dice.below(3)]].to_vec(),
            _ => Vec::new(),
        };
        let more = dice.below(9) + usize::from(prompt.is_empty());
        prompt.extend(dice.tokens(more));
        let temperature = TEMPERATURES[dice.below(4)];
        for sample in 0..3 {
            let params = SamplingParams {
                temperature,
                max_new_tokens: 1 + dice.below(24),
                seed: 5,
                top_logprobs: sample,
                ..Default::default()
            };
            out.push(GenerationRequest { prompt: prompt.clone(), params, stream: [seed, p, sample as u32] });
        }
    }
    out
}

/// The bits of every logp as the trainer gives them, sequences packed in another order.
fn rescored(model: &Model, requests: &[GenerationRequest], completions: &[Completion]) -> Vec<Vec<u32>> {
    let mut out = vec![Vec::new(); requests.len()];
    for t in TEMPERATURES {
        let mut group: Vec<usize> =
            (0..requests.len()).filter(|&i| requests[i].params.temperature == t).collect();
        group.reverse();
        if group.is_empty() {
            continue;
        }
        let whole = |&i: &usize| [&requests[i].prompt[..], &completions[i].ids[..]].concat();
        let batch = Batch::of(group.iter().map(whole));
        let s = stats(model, &batch, if t == 0.0 { 1.0 } else { t }).unwrap();
        for (&i, rows) in group.iter().zip(batch.segments().iter()) {
            let from = rows.start + requests[i].prompt.len() - 1;
            out[i] = s.logp[from..rows.end - 1].iter().map(|x| x.to_bits()).collect();
        }
    }
    out
}

fn bits(c: &Completion) -> Vec<u32> {
    c.logp.iter().map(|x| x.to_bits()).collect()
}

fn tight(model: &Model) -> CacheOptions {
    // 70 + 8 + 24 tokens are four blocks of 32: one sequence fits, and a little more.
    CacheOptions { max_batch_tokens: 5, max_sequences: 6, ..CacheOptions::fit(model, 1, 128) }
}

#[test]
fn every_logp_is_the_trainers() {
    let mut preempted = 0;
    for level in Level::available() {
        for (f, family) in FAMILIES.iter().enumerate() {
            for dtype in [DType::F32, DType::Bf16] {
                let model = on(Arc::new(Cpu::with_level(2, level).unwrap()), family.name(), dtype);
                for seed in 0..3 {
                    let what = format!("{level:?} {} {dtype:?} {seed}", family.name());
                    preempted += logps_are_the_trainers(&model, 10 * f as u32 + seed, &what);
                }
            }
        }
    }
    assert!(preempted > 100, "{preempted} preemptions");
}

fn logps_are_the_trainers(model: &Model, seed: u32, what: &str) -> u64 {
    let requests = requests(seed);
    let roomy = CacheOptions { bytes: 4 << 20, max_batch_tokens: 64, max_sequences: 32 };
    let (mut first, mut preempted) = (None, 0);
    for options in [roomy, tight(model)] {
        let mut sampler = Sampler::new(model, options).unwrap();
        let done = sampler.generate(model, requests.clone()).unwrap();
        let got: Vec<_> = done.iter().map(bits).collect();
        assert_eq!(got, rescored(model, &requests, &done), "{what}");
        for (c, r) in done.iter().zip(&requests) {
            assert_eq!(c.ids.len(), r.params.max_new_tokens);
            for (token, (top, logp)) in c.ids.iter().zip(c.top.iter().zip(&c.logp)) {
                assert!(top[0].1 >= *logp && (top[0].0 != *token || top[0].1 == *logp));
            }
        }
        let usage = sampler.usage();
        assert_eq!((usage.used, usage.running, usage.waiting), (0, 0, 0));
        assert!(usage.reused > 0 && usage.copies > 0);
        preempted += usage.preemptions;
        assert_eq!(*first.get_or_insert(done.clone()), done, "{what}: another budget, other tokens");
    }
    preempted
}

#[test]
fn one_flipped_bit_is_seen() {
    for family in ["qwen2", "gemma2"] {
        for (dtype, bit) in [(DType::F32, 0), (DType::Bf16, 16)] {
            let mut model = tiny(family, dtype, 1);
            let requests = requests(3);
            let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
            let done = sampler.generate(&model, requests.clone()).unwrap();
            let got: Vec<_> = done.iter().map(bits).collect();
            assert_eq!(got, rescored(&model, &requests, &done));
            let param = model.find(ParamId::layer(0, Slot::Qkv)).unwrap();
            let value = model.read(param).unwrap()[11];
            let flipped = f32::from_bits(value.to_bits() ^ 1 << bit);
            model.backend.write(&mut model.params[param].master, 11, &[flipped]).unwrap();
            model.refresh().unwrap();
            assert_ne!(got, rescored(&model, &requests, &done), "{family} {dtype:?}");
            // The sampler notices the new version and does not use what it has cached.
            let again = sampler.generate(&model, requests.clone()).unwrap();
            let got: Vec<_> = again.iter().map(bits).collect();
            assert_eq!(got, rescored(&model, &requests, &again));
            assert!(again.iter().all(|c| c.versions.iter().all(|&v| v == model.version)));
        }
    }
}

#[test]
fn tokens_depend_on_their_request_alone() {
    for dtype in [DType::F32, DType::Bf16] {
        let requests = requests(11);
        let mut want: Option<Vec<Completion>> = None;
        for threads in [1, 2, 3] {
            let model = tiny("qwen3", dtype, threads);
            let mut runs = Vec::new();
            let alone = |r: &GenerationRequest| {
                let mut sampler = Sampler::new(&model, tight(&model)).unwrap();
                sampler.generate(&model, vec![r.clone()]).unwrap().remove(0)
            };
            runs.push(requests.iter().map(alone).collect::<Vec<_>>());
            for (blocks, chunk, at_once) in [(5, 1, 3), (6, 7, 32), (9, 33, 4), (60, 500, 32)] {
                let options =
                    CacheOptions { max_batch_tokens: chunk, ..CacheOptions::fit(&model, 1, 32 * blocks) };
                let mut sampler =
                    Sampler::new(&model, CacheOptions { max_sequences: at_once, ..options }).unwrap();
                runs.push(sampler.generate(&model, requests.clone()).unwrap());
                let mut backwards = requests.clone();
                backwards.reverse();
                let mut done = sampler.generate(&model, backwards).unwrap();
                done.reverse();
                runs.push(done);
            }
            for run in runs {
                assert_eq!(*want.get_or_insert(run.clone()), run, "{threads} threads");
            }
        }
    }
}

/// Trees: forks of forks at any token, under a budget that makes them give way to each other.
#[test]
fn forks_are_exact_too() {
    let mut preempted = 0;
    for seed in 0..12 {
        let dtype = [DType::F32, DType::Bf16][seed as usize % 2];
        let model = tiny("llama", dtype, 2);
        let mut dice = Dice(seed, 1000);
        let options =
            CacheOptions { max_batch_tokens: 9, max_sequences: 8, ..CacheOptions::fit(&model, 1, 160) };
        let mut sampler = Sampler::new(&model, options).unwrap();
        let params =
            |n| SamplingParams { temperature: 0.7, max_new_tokens: n, seed: 1, ..SamplingParams::default() };
        let (mut known, mut done) = (HashMap::new(), HashMap::new());
        for p in 0..3 {
            let request = GenerationRequest {
                prompt: dice.tokens(20 + 15 * p),
                params: params(40),
                stream: [9, p as u32, 0],
            };
            known.insert(sampler.submit(request.clone()).unwrap(), request);
        }
        let mut grown: HashMap<_, Vec<u32>> = known.iter().map(|(&id, r)| (id, r.prompt.clone())).collect();
        while !sampler.is_idle() {
            for event in sampler.step(&model).unwrap() {
                match event {
                    Event::Token { id, token, .. } => grown.get_mut(&id).unwrap().push(token),
                    Event::Done { id, completion } => drop(done.insert(id, completion)),
                }
            }
            let mut alive: Vec<_> = grown.keys().copied().filter(|id| !done.contains_key(id)).collect();
            alive.sort();
            if known.len() < 14 && !alive.is_empty() && dice.below(3) == 0 {
                let parent = alive[dice.below(alive.len())];
                let at = 1 + dice.below(grown[&parent].len());
                let (prompt, stream) = (grown[&parent][..at].to_vec(), [9, 9, known.len() as u32]);
                let child = sampler.fork(parent, at, params(15), stream).unwrap();
                grown.insert(child, prompt.clone());
                known.insert(child, GenerationRequest { prompt, params: params(15), stream });
            }
        }
        assert!(known.len() >= 10 && done.len() == known.len());
        let usage = sampler.usage();
        assert!(usage.copies > 0 && usage.used == 0, "{usage:?}");
        preempted += usage.preemptions;
        let (requests, done): (Vec<_>, Vec<_>) =
            known.iter().map(|(id, r)| (r.clone(), done[id].clone())).unzip();
        let got: Vec<_> = done.iter().map(bits).collect();
        assert_eq!(got, rescored(&model, &requests, &done));
        // A fork gives what its tokens as a plain prompt give.
        let plain =
            Sampler::new(&model, CacheOptions::default()).unwrap().generate(&model, requests).unwrap();
        assert_eq!(plain, done);
    }
    assert!(preempted > 12, "{preempted} preemptions");
}

/// Weights that change half way: each token is exact under the version it was sampled with.
#[test]
fn a_new_version_half_way_is_exact_by_version() {
    let mut model = tiny("qwen2", DType::F32, 2);
    let params = SamplingParams { max_new_tokens: 20, ..Default::default() };
    let prompt = Dice(4, 0).tokens(40);
    let request = GenerationRequest { prompt, params, stream: [0; 3] };
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    sampler.submit(request.clone()).unwrap();
    for _ in 0..8 {
        sampler.step(&model).unwrap();
    }
    let old = model.read(model.find(ParamId::model(Slot::Embed)).unwrap()).unwrap();
    let embed = model.find(ParamId::model(Slot::Embed)).unwrap();
    let new: Vec<f32> = old.iter().map(|x| x * 0.5).collect();
    model.backend.write(&mut model.params[embed].master, 0, &new).unwrap();
    model.refresh().unwrap();
    let done = loop {
        if let Some(Event::Done { completion, .. }) = sampler.step(&model).unwrap().pop() {
            break completion;
        }
    };
    assert_eq!(done.versions.iter().filter(|&&v| v == 0).count(), 8);
    let after = rescored(&model, std::slice::from_ref(&request), std::slice::from_ref(&done));
    assert_eq!(bits(&done)[8..], after[0][8..]);
    assert_ne!(bits(&done)[..8], after[0][..8]);
}

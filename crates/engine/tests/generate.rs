//! Sampling against naive references; stops, queueing, sharing, errors.

#![allow(clippy::unwrap_used)]

use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::generate::{
    CacheOptions, Completion, Event, GenerationRequest, Generator, Sampler, SamplingParams, StopReason,
};
use ferrl_engine::model::decoder::{Keep, PastKv};
use ferrl_engine::model::{Head, Model, Options, ParamId, Slot};
use ferrl_engine::tokenizer::{Tokenizer, train_chars};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads};
use ferrl_kernels::backend::Segments;
use ferrl_kernels::philox::{philox4x32, uniform};
use ferrl_kernels::{DType, open};
use std::sync::Arc;

fn init(family: &str, vocab: usize, std: f32) -> InitOptions {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers) = (vocab, 32, 2);
    (init.heads, init.ffn, init.max_positions, init.std) = (Some(2), Some(48), 256, std);
    init
}

fn model(family: &str, vocab: usize, std: f32) -> Model {
    Model::random(open("cpu", Some(2)).unwrap(), &init(family, vocab, std), Options::default()).unwrap()
}

fn request(prompt: &[u32], params: SamplingParams, sample: u32) -> GenerationRequest {
    GenerationRequest { prompt: prompt.to_vec(), params, stream: [0, 0, sample] }
}

fn short(max_new_tokens: usize) -> SamplingParams {
    SamplingParams { max_new_tokens, ..Default::default() }
}

/// The logits after `ids`, undivided.
fn logits(model: &Model, ids: &[u32]) -> Vec<f32> {
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let tokens = model.tokens(ids, &positions).unwrap();
    let (h, _) = model.forward(&tokens, PastKv::Packed(&Segments::of([ids.len()])), Keep::Nothing).unwrap();
    let last = model.select_rows(&h, &[ids.len() as u32 - 1]).unwrap();
    let (logits, _) = model.logits(&last, 1.0).unwrap();
    let mut out = vec![0.0; logits.len()];
    model.backend.read(&logits, 0, &mut out).unwrap();
    out
}

/// Probabilities after penalties, temperature, top-k, top-p and min-p, the plain way.
fn naive(logits: &[f32], p: &SamplingParams, ids: &[u32], prompt: usize) -> Vec<f64> {
    let mut l: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    for id in 0..l.len() {
        if ids.contains(&(id as u32)) {
            let r = f64::from(p.repetition_penalty);
            l[id] = if l[id] > 0.0 { l[id] / r } else { l[id] * r };
        }
        let times = ids[prompt..].iter().filter(|&&t| t as usize == id).count();
        if times > 0 {
            l[id] -= f64::from(p.frequency_penalty) * times as f64 + f64::from(p.presence_penalty);
        }
        l[id] /= f64::from(p.temperature);
    }
    let softmax = |l: &[f64]| -> Vec<f64> {
        let m = l.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = l.iter().map(|x| (x - m).exp()).sum();
        l.iter().map(|x| (x - m).exp() / total).collect()
    };
    let mut order: Vec<usize> = (0..l.len()).collect();
    order.sort_by(|&a, &b| l[b].total_cmp(&l[a]).then(a.cmp(&b)));
    if p.top_k > 0 {
        order.iter().skip(p.top_k).for_each(|&i| l[i] = f64::NEG_INFINITY);
    }
    let probs = softmax(&l);
    let mut before = 0.0;
    for &i in &order {
        if before >= f64::from(p.top_p) {
            l[i] = f64::NEG_INFINITY;
        }
        before += probs[i];
    }
    let probs = softmax(&l);
    for i in 0..l.len() {
        if probs[i] < f64::from(p.min_p) * probs[order[0]] {
            l[i] = f64::NEG_INFINITY;
        }
    }
    softmax(&l)
}

#[test]
fn truncation_and_penalties_are_those_of_a_naive_sampler() {
    let model = model("llama", 101, 0.25);
    let base =
        SamplingParams { temperature: 0.9, max_new_tokens: 12, seed: 8 << 32 | 3, ..Default::default() };
    let settings = [
        SamplingParams { top_k: 5, ..base.clone() },
        SamplingParams { top_k: 1, ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { top_p: 0.01, ..base.clone() },
        SamplingParams { top_p: 0.999, temperature: 3.0, ..base.clone() },
        SamplingParams { min_p: 0.1, ..base.clone() },
        SamplingParams { top_k: 20, top_p: 0.8, min_p: 0.05, temperature: 1.3, ..base.clone() },
        SamplingParams { repetition_penalty: 1.5, ..base.clone() },
        SamplingParams { presence_penalty: 0.7, frequency_penalty: 0.4, ..base.clone() },
        SamplingParams {
            repetition_penalty: 0.8,
            frequency_penalty: -0.5,
            top_k: 7,
            top_p: 0.9,
            ..base.clone()
        },
    ];
    let prompt = [3, 1, 4, 1, 5, 9, 2, 6];
    let mut requests = Vec::new();
    for (i, params) in settings.iter().enumerate() {
        requests.extend((0..4).map(|s| request(&prompt, params.clone(), 4 * i as u32 + s)));
    }
    let done =
        Sampler::new(&model, CacheOptions::default()).unwrap().generate(&model, requests.clone()).unwrap();
    let mut close_calls = 0;
    for (r, c) in requests.iter().zip(&done) {
        let ids = [&r.prompt[..], &c.ids[..]].concat();
        for (i, &token) in c.ids.iter().enumerate() {
            let ids = &ids[..prompt.len() + i];
            let probs = naive(&logits(&model, ids), &r.params, ids, prompt.len());
            let draw = philox4x32([0, 0, r.stream[2], i as u32], [3, 8])[0];
            let (draw, mut below) = (f64::from(uniform(draw)), 0.0);
            let edges = probs.iter().map(|p| {
                below += p;
                below
            });
            let edges: Vec<f64> = edges.collect();
            if edges.iter().any(|e| (e - draw).abs() < 1e-5 && *e < 0.9999) {
                close_calls += 1; // rounding may decide either way
                continue;
            }
            let want = edges.iter().position(|&e| e > draw).unwrap();
            assert_eq!(token as usize, want, "{:?}", r.params);
            assert!((f64::from(c.sampled_logp[i]) - probs[want].ln()).abs() < 1e-4);
            let plain = naive(
                &logits(&model, ids),
                &SamplingParams { temperature: r.params.temperature, ..short(1) },
                ids,
                prompt.len(),
            );
            assert!((f64::from(c.logp[i]) - plain[want].ln()).abs() < 1e-4);
        }
    }
    assert!(close_calls < 5);
}

#[test]
fn sampled_tokens_follow_the_distribution() {
    let model = model("qwen2", 23, 0.2);
    for temperature in [0.6, 1.0, 2.0] {
        let params = SamplingParams { temperature, seed: 99, ..short(1) };
        let prompt = [7, 8, 9];
        let probs = naive(&logits(&model, &prompt), &params, &prompt, 3);
        let n = 6000;
        let requests = (0..n).map(|s| request(&prompt, params.clone(), s)).collect();
        let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
        let mut counts = [0f64; 23];
        for c in sampler.generate(&model, requests).unwrap() {
            counts[c.ids[0] as usize] += 1.0;
            assert_eq!(c.logp, c.sampled_logp);
        }
        let (mut chi, mut bins) = (0.0, 0.0);
        for (count, p) in counts.iter().zip(&probs).filter(|(_, p)| **p * f64::from(n) >= 5.0) {
            let expected = p * f64::from(n);
            chi += (count - expected).powi(2) / expected;
            bins += 1.0;
        }
        assert!(bins > 5.0 && chi < bins + 4.0 * f64::sqrt(2.0 * bins), "{chi} over {bins} bins");
    }
}

#[test]
fn greedy_takes_the_likeliest_and_scores_it_at_temperature_one() {
    let model = model("gemma2", 61, 0.2);
    let params = SamplingParams { max_new_tokens: 9, top_logprobs: 3, ..SamplingParams::greedy() };
    let penalised = SamplingParams { repetition_penalty: 1.8, ..params.clone() };
    let prompt = [5, 6];
    let requests = vec![request(&prompt, params, 0), request(&prompt, penalised.clone(), 1)];
    let done = Sampler::new(&model, CacheOptions::default()).unwrap().generate(&model, requests).unwrap();
    let first = |l: &[f64]| (0..l.len()).fold(0, |best, i| if l[i] > l[best] { i } else { best });
    for (c, r) in done.iter().zip([1.0, 1.8]) {
        let mut ids = prompt.to_vec();
        for i in 0..c.ids.len() {
            let raw = logits(&model, &ids);
            let p = SamplingParams { repetition_penalty: r, temperature: 1.0, ..penalised.clone() };
            assert_eq!(c.ids[i] as usize, first(&naive(&raw, &p, &ids, 2)));
            let plain = naive(&raw, &short(1), &ids, 2);
            assert!((f64::from(c.logp[i]) - plain[c.ids[i] as usize].ln()).abs() < 1e-4);
            assert_eq!((c.sampled_logp[i], c.top[i].len()), (0.0, 3));
            assert_eq!(c.top[i][0].0 as usize, first(&plain));
            assert!(c.top[i].is_sorted_by(|a, b| a.1 >= b.1));
            ids.push(c.ids[i]);
        }
    }
}

fn letters() -> (Arc<Tokenizer>, Model) {
    let tokenizer = train_chars(["abcdefghij é\n".to_string()].into_iter(), &["<eos>".into()]).unwrap();
    let model = model("llama", tokenizer.vocab_size(), 0.1);
    (Arc::new(tokenizer), model)
}

#[test]
fn completions_end_where_they_should() {
    let (tokenizer, model) = letters();
    let mut sampler =
        Sampler::new(&model, CacheOptions::default()).unwrap().with_tokenizer(tokenizer.clone());
    let run = |sampler: &mut Sampler, params: SamplingParams| -> Completion {
        sampler.generate(&model, vec![request(&[1, 2], params, 7)]).unwrap().remove(0)
    };
    let free = run(&mut sampler, short(60));
    assert_eq!((free.stop, free.ids.len()), (StopReason::Length, 60));
    // The stop is kept, and nothing after it.
    let stop = free.ids[20];
    let c = run(&mut sampler, SamplingParams { stop_ids: vec![9999, stop], ..short(60) });
    let at = free.ids.iter().position(|&t| t == stop).unwrap();
    assert_eq!((c.stop, &c.ids[..]), (StopReason::Token(stop), &free.ids[..=at]));
    assert_eq!(c.logp, free.logp[..=at]);
    for len in [1, 2, 3] {
        let string = tokenizer.decode(&free.ids[30..30 + len], false).unwrap();
        let params = SamplingParams { stop_strings: vec!["never there".into(), string.clone()], ..short(60) };
        let c = run(&mut sampler, params);
        let ends = |n: usize| tokenizer.decode(&free.ids[..n], false).unwrap().contains(&string);
        let n = (1..=60).find(|&n| ends(n)).unwrap();
        assert_eq!((c.stop, &c.ids[..]), (StopReason::String(1), &free.ids[..n]), "{string:?}");
    }
    assert_eq!(sampler.usage().used, 0);
}

#[test]
fn a_group_computes_its_prompt_once() {
    let model = model("llama", 50, 0.2);
    let prompt: Vec<u32> = (0..45).collect();
    let group =
        |params: SamplingParams| (0..8).map(|s| request(&prompt, params.clone(), s)).collect::<Vec<_>>();
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    let first = sampler.generate(&model, group(short(10))).unwrap();
    let usage = sampler.usage();
    // The prompt, seven times its last token, and nine more tokens each; one holder of the last block writes in place.
    assert_eq!((usage.rows, usage.copies, usage.reused), (45 + 7 + 8 * 9, 7, 7 * 44));
    assert_eq!(usage.steps, 11);
    assert!(first.iter().any(|c| c.ids != first[0].ids));
    // A later group finds the full block of 32 and the 12 tokens behind it: only the last one is computed, by each.
    assert_eq!(sampler.generate(&model, group(short(10))).unwrap(), first);
    assert_eq!(sampler.usage().rows - usage.rows, 8 + 8 * 9);
    // Even where the first of them ends at once; and nobody waits for another.
    let before = sampler.usage();
    sampler.generate(&model, group(short(1))).unwrap();
    assert_eq!((sampler.usage().rows - before.rows, sampler.usage().steps - before.steps), (8, 1));
    sampler.invalidate();
    assert_eq!(sampler.usage().cached, 0);
    assert_eq!(sampler.generate(&model, group(short(10))).unwrap(), first);
}

#[test]
fn prompts_of_one_step_share_blocks_that_are_being_written() {
    let model = model("llama", 50, 0.2);
    let prompt = |tail: u32| (0..40).chain([tail, tail, tail]).collect::<Vec<u32>>();
    let requests: Vec<GenerationRequest> = (40..46).map(|t| request(&prompt(t), short(5), t)).collect();
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    let together = sampler.generate(&model, requests.clone()).unwrap();
    assert_eq!((sampler.usage().steps, sampler.usage().reused), (5, 5 * 32));
    for (r, c) in requests.iter().zip(&together) {
        let mut alone = Sampler::new(&model, CacheOptions::default()).unwrap();
        assert_eq!(alone.generate(&model, vec![r.clone()]).unwrap()[0], *c);
    }
}

#[test]
fn what_does_not_fit_waits_or_gives_way_and_ends_the_same() {
    let model = model("mistral", 50, 0.2);
    let requests: Vec<GenerationRequest> =
        (0..7).map(|i| request(&(i..i + 20).collect::<Vec<u32>>(), short(60), i)).collect();
    let want =
        Sampler::new(&model, CacheOptions::default()).unwrap().generate(&model, requests.clone()).unwrap();
    let block = CacheOptions::fit(&model, 1, 0).bytes;
    for (blocks, max_sequences) in [(3, 7), (5, 7), (100, 2)] {
        let options = CacheOptions { bytes: blocks * block, max_batch_tokens: 16, max_sequences };
        let mut sampler = Sampler::new(&model, options).unwrap();
        let ids: Vec<_> = requests.iter().map(|r| sampler.submit(r.clone()).unwrap()).collect();
        let (mut done, mut most) = (vec![None; ids.len()], 0);
        while !sampler.is_idle() {
            for event in sampler.step(&model).unwrap() {
                if let Event::Done { id, completion } = event {
                    done[ids.iter().position(|&i| i == id).unwrap()] = Some(completion);
                }
            }
            most = most.max(sampler.usage().running);
        }
        assert!(done.into_iter().flatten().eq(want.iter().cloned()));
        let usage = sampler.usage();
        assert!(most > 1 && most <= max_sequences && usage.blocks == blocks && usage.used == 0);
        assert_eq!(usage.preemptions > 0, blocks < 100, "{usage:?}");
    }
}

#[test]
fn forks_share_until_they_write_and_references_return_to_zero() {
    let model = model("llama", 50, 0.2);
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    let id = sampler.submit(request(&(0..40).collect::<Vec<u32>>(), short(50), 0)).unwrap();
    for _ in 0..5 {
        sampler.step(&model).unwrap();
    }
    assert_eq!(sampler.usage().used, 2);
    let forks: Vec<_> =
        [33, 45, 12].iter().map(|&at| sampler.fork(id, at, short(4), [1, 1, at as u32]).unwrap()).collect();
    assert_eq!((sampler.usage().used, sampler.usage().copies), (2, 0));
    sampler.step(&model).unwrap();
    // One fork begins a block, two write into a shared one, and so does the first, whose block one of them holds.
    let usage = sampler.usage();
    assert!(usage.copies >= 2 && usage.used > 2, "{usage:?}");
    let partial = sampler.cancel(id).unwrap();
    assert_eq!((partial.stop, partial.ids.len()), (StopReason::Cancelled, 6));
    assert_eq!(sampler.cancel(id), None);
    assert!(sampler.fork(id, 3, short(4), [0; 3]).unwrap_err().to_string().contains("has ended"));
    assert_eq!(sampler.cancel(forks[2]).map(|c| c.stop), Some(StopReason::Cancelled));
    // A run in between leaves the others' events for the next step.
    sampler.generate(&model, vec![request(&[1, 2, 3], short(30), 0)]).unwrap();
    let events = sampler.step(&model).unwrap();
    let ended: Vec<_> =
        events.iter().filter_map(|e| if let Event::Done { id, .. } = e { Some(*id) } else { None }).collect();
    assert_eq!(ended.len(), 2);
    assert!(forks[..2].iter().all(|f| ended.contains(f)) && sampler.is_idle());
    assert_eq!((sampler.usage().used, sampler.usage().waiting), (0, 0));
}

#[test]
fn a_block_that_can_be_found_is_copied_before_it_is_written() {
    let model = model("llama", 50, 0.2);
    let prompt: Vec<u32> = (0..40).collect();
    let fresh = || Sampler::new(&model, CacheOptions::default()).unwrap();
    let want = fresh().generate(&model, vec![request(&prompt, short(5), 0)]).unwrap();
    let mut sampler = fresh();
    let parent = sampler.submit(request(&prompt, short(5), 0)).unwrap();
    sampler.step(&model).unwrap();
    sampler.fork(parent, 20, short(5), [3; 3]).unwrap();
    sampler.cancel(parent);
    while !sampler.is_idle() {
        sampler.step(&model).unwrap();
    }
    assert_eq!(sampler.usage().copies, 1);
    assert_eq!(sampler.generate(&model, vec![request(&prompt, short(5), 0)]).unwrap(), want);
}

#[test]
fn continuations_of_an_ended_completion_compute_one_token_each() {
    let model = model("llama", 50, 0.2);
    let prompt: Vec<u32> = (0..45).collect();
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    let whole = sampler.generate(&model, vec![request(&prompt, short(30), 0)]).unwrap().remove(0);
    for at in [1, 7, 19, 20, 29] {
        let state = [&prompt[..], &whole.ids[..at]].concat();
        let before = sampler.usage();
        let continued =
            sampler.generate(&model, (1..4).map(|s| request(&state, short(4), s)).collect()).unwrap();
        let usage = sampler.usage();
        assert_eq!(usage.rows - before.rows, 3 * 4, "after {at} tokens");
        let mut fresh = Sampler::new(&model, CacheOptions::default()).unwrap();
        let alone = fresh.generate(&model, (1..4).map(|s| request(&state, short(4), s)).collect()).unwrap();
        for (a, b) in continued.iter().zip(&alone) {
            assert_eq!((&a.ids, &a.logp), (&b.ids, &b.logp), "after {at} tokens");
        }
    }
}

#[test]
fn a_prefix_that_a_request_waits_with_is_not_evicted() {
    let model = model("llama", 50, 0.2);
    // Room for the completions and little more, one sequence at a time: each continuation leaves a block that nobody continues.
    let options = CacheOptions { max_sequences: 1, ..CacheOptions::fit(&model, 6, 32) };
    let mut sampler = Sampler::new(&model, options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|p| (p..p + 9).collect()).collect();
    let whole = sampler.generate(&model, prompts.iter().map(|p| request(p, short(12), 0)).collect()).unwrap();
    let before = sampler.usage();
    let states = || prompts.iter().zip(&whole).map(|(p, c)| [&p[..], &c.ids[..7]].concat());
    let continued: Vec<_> = states().flat_map(|s| (1..8).map(move |k| request(&s, short(5), k))).collect();
    let tokens = continued.len() as u64 * 5;
    sampler.generate(&model, continued).unwrap();
    let usage = sampler.usage();
    assert!((usage.blocks as u64) < tokens / 5, "{usage:?}");
    assert_eq!(usage.rows - before.rows, tokens);
    assert_eq!((usage.used, usage.waiting), (0, 0));
}

#[test]
fn looking_ahead_changes_no_token() {
    let (tokenizer, model) = letters();
    let vocab = tokenizer.vocab_size() as u32;
    let request = |i: u32| {
        let mut params = short(4 + i as usize * 3 % 17);
        params.temperature = [0.0, 1.0, 0.7, 1.0][i as usize % 4];
        params.stop_ids = if i.is_multiple_of(3) { vec![1, 4] } else { Vec::new() };
        match i % 7 {
            3 => params.top_k = 9,
            4 => params.top_p = 0.8,
            5 => params.min_p = 0.1,
            6 => params.stop_strings = vec!["ab".into()],
            _ => {}
        }
        // Some that only the host can choose for, late enough that others have run ahead.
        if i >= 20 {
            (params.frequency_penalty, params.top_logprobs) = (0.3, 2);
        }
        request(&(0..1 + i * 5 % 40).map(|t| (t * 7 + i % 4) % vocab).collect::<Vec<u32>>(), params, i)
    };
    let requests: Vec<GenerationRequest> = (0..24).map(request).collect();
    let block = CacheOptions::fit(&model, 1, 0).bytes;
    for (blocks, max_sequences, batch) in [(200, 24, 2048), (200, 3, 16), (9, 24, 64)] {
        let options = CacheOptions { bytes: blocks * block, max_batch_tokens: batch, max_sequences };
        let run = |ahead: bool| {
            let mut sampler =
                Sampler::new(&model, options).unwrap().with_tokenizer(tokenizer.clone()).look_ahead(ahead);
            let (mut done, mut ids, mut steps) = (vec![None; requests.len()], Vec::new(), 0);
            while ids.len() < requests.len() || !sampler.is_idle() {
                // They come in one by one, while others run; one leaves, one is continued by another.
                if let Some(r) = requests.get(ids.len()).filter(|_| steps % 2 == 0 || steps < 6) {
                    ids.push(sampler.submit(r.clone()).unwrap());
                }
                for event in sampler.step(&model).unwrap() {
                    if let Event::Done { id, completion } = event {
                        done[ids.iter().position(|&i| i == id).unwrap()] = Some(completion);
                    }
                }
                steps += 1;
            }
            let usage = sampler.usage();
            assert_eq!((usage.used, usage.running, usage.waiting), (0, 0, 0));
            (done.into_iter().flatten().collect::<Vec<Completion>>(), usage)
        };
        let ((want, _), (got, usage)) = (run(false), run(true));
        assert!(want.len() == requests.len() && want == got, "{usage:?}");
    }
}

#[test]
fn a_step_that_was_begun_ahead_is_dropped_with_what_it_was_for() {
    let mut model = model("llama", 50, 0.3);
    let prompts = [request(&[1, 2, 3], short(30), 0), request(&[4, 5], short(30), 1)];
    let run = |model: &mut Model, ahead: bool| {
        let mut sampler = Sampler::new(model, CacheOptions::default()).unwrap().look_ahead(ahead);
        let ids: Vec<_> = prompts.iter().map(|r| sampler.submit(r.clone()).unwrap()).collect();
        for _ in 0..5 {
            sampler.step(model).unwrap();
        }
        let fork = sampler.fork(ids[0], 6, short(3), [9; 3]).unwrap();
        let left = sampler.cancel(ids[1]).unwrap();
        assert_eq!((left.ids.len(), left.stop), (5, StopReason::Cancelled));
        // The very next token is that of the new weights, and so is everything it depends on.
        let bias = model.find(ParamId::model(Slot::FinalNorm)).unwrap();
        let values: Vec<f32> = model.read(bias).unwrap().iter().map(|x| -x).collect();
        let backend = model.backend.clone();
        backend.write(&mut model.params[bias].master, 0, &values).unwrap();
        model.refresh().unwrap();
        let mut done = Vec::new();
        while !sampler.is_idle() {
            for event in sampler.step(model).unwrap() {
                if let Event::Done { id, completion } = event {
                    done.push((id == fork, completion));
                }
            }
        }
        assert!(done.iter().any(|(fork, _)| *fork) && sampler.usage().used == 0);
        (left, done)
    };
    let want = run(&mut model, false);
    let mut model = self::model("llama", 50, 0.3);
    let got = run(&mut model, true);
    assert_eq!(want, got);
    let versions = &got.1.iter().find(|(fork, _)| !*fork).unwrap().1.versions;
    assert_eq!((versions[..5].iter().max(), versions[5..].iter().min()), (Some(&0), Some(&1)));
}

#[test]
fn sampler_and_trainer_read_one_copy_of_the_weights() {
    let options = Options { training: true, ..Default::default() };
    let backend = open("cpu", Some(2)).unwrap();
    let model = Model::random(backend.clone(), &init("llama", 50, 0.2), options).unwrap();
    let mut trainer = ModelTrainer::new(model, OptimizerOptions::default()).unwrap();
    // Where the masters and the head are.
    let places = |m: &Model| {
        let masters = m.params.iter().map(|p| std::ptr::from_ref(p.master.data()).addr());
        masters.chain([std::ptr::from_ref(m.lm_head().unwrap().data()).addr()]).collect::<Vec<usize>>()
    };
    let (before, free) = (places(&trainer.model), backend.memory().0);
    let cache = CacheOptions::default();
    let mut sampler = Sampler::new(&trainer.model, cache).unwrap().look_ahead(true);
    assert!(backend.memory().0 - free <= cache.bytes, "a sampler takes its cache and nothing else");
    let asked = request(&[1, 2, 3], short(40), 0);
    sampler.submit(asked.clone()).unwrap();
    for step in 1..6u64 {
        sampler.step(&trainer.model).unwrap();
        let batch = Batch::of([vec![1, 2, 3, 4, 5]]);
        trainer.forward(&batch).unwrap();
        let grads = StatGrads { logp: vec![-0.2; batch.tokens()], ..Default::default() };
        trainer.backward(&batch, &grads).unwrap();
        trainer.update(0.05).unwrap();
        assert_eq!((places(&trainer.model), trainer.model.version), (before.clone(), step));
    }
    // What is left is sampled as if it had only ever known these weights.
    let ended = std::iter::from_fn(|| (!sampler.is_idle()).then(|| sampler.step(&trainer.model).unwrap()))
        .flatten()
        .find_map(|e| if let Event::Done { completion, .. } = e { Some(completion) } else { None });
    let ended = ended.unwrap();
    let mut prompt = asked.prompt;
    prompt.extend(&ended.ids[..39]);
    let last = logits(&trainer.model, &prompt);
    let lse = last.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
    let want = f64::from(last[ended.ids[39] as usize]) - lse;
    assert!((f64::from(ended.logp[39]) - want).abs() < 1e-5);
    assert_eq!(ended.versions[..6], [0, 1, 2, 3, 4, 5]);
}

#[test]
fn what_cannot_be_done_is_refused_with_a_reason() {
    let model = model("gpt2", 50, 0.2);
    let block = CacheOptions::fit(&model, 1, 0).bytes;
    let options = CacheOptions { bytes: 4 * block + 1, ..CacheOptions::default() };
    let mut sampler = Sampler::new(&model, options).unwrap();
    let base = short(10);
    let cases: Vec<(Vec<u32>, SamplingParams, &str)> = vec![
        (vec![], base.clone(), "the prompt has no tokens"),
        (vec![50], base.clone(), "token id 50 is not below the vocabulary's 50"),
        (vec![1], SamplingParams { temperature: -1.0, ..base.clone() }, "temperature is -1"),
        (vec![1], SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature is NaN"),
        (vec![1], SamplingParams { top_p: 0.0, ..base.clone() }, "top_p is 0"),
        (vec![1], SamplingParams { min_p: 1.5, ..base.clone() }, "min_p is 1.5"),
        (vec![1], SamplingParams { repetition_penalty: 0.0, ..base.clone() }, "repetition_penalty is 0"),
        (
            vec![1],
            SamplingParams { presence_penalty: f32::INFINITY, ..base.clone() },
            "presence_penalty is inf",
        ),
        (vec![1], short(0), "max_new_tokens is 0"),
        (
            vec![1],
            SamplingParams { stop_strings: vec!["a".into()], ..base.clone() },
            "stop strings need a tokenizer",
        ),
        (vec![1], SamplingParams { stop_strings: vec!["".into()], ..base.clone() }, "stop string 0 is empty"),
        (vec![1], SamplingParams { top_logprobs: 51, ..base.clone() }, "top_logprobs is 51"),
        (vec![1; 120], base.clone(), "need 5 cache blocks"),
        (vec![1; 250], base.clone(), "pass the model's 256 positions"),
        (vec![1], short(usize::MAX), "positions"),
    ];
    for (prompt, params, message) in cases {
        let error = sampler.submit(request(&prompt, params, 0)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let error = sampler.submit(request(&[1; 120], base.clone(), 0)).unwrap_err().to_string();
    assert!(error.contains(&format!("the budget of {} bytes has 4", 4 * block + 1)), "{error}");
    assert!(error.contains(&format!("at least {} bytes", 5 * block)), "{error}");
    let error = sampler.generate(&model, vec![request(&[1], base.clone(), 0), request(&[], base.clone(), 1)]);
    assert!(error.unwrap_err().to_string().starts_with("request 1: "));
    assert!(sampler.is_idle());
    // As much as fits exactly.
    assert_eq!(sampler.generate(&model, vec![request(&[1; 119], base.clone(), 0)]).unwrap()[0].ids.len(), 10);
    assert!(Sampler::new(&model, CacheOptions { bytes: 10, ..options }).is_err());
    assert!(Sampler::new(&model, CacheOptions { max_sequences: 0, ..options }).is_err());
    let score = InitOptions { head: Head::Score, ..init("llama", 50, 0.2) };
    let score = Model::random(open("cpu", Some(1)).unwrap(), &score, Options::default()).unwrap();
    assert!(Sampler::new(&score, CacheOptions::default()).is_err());
    let id = sampler.submit(request(&[1, 2], base.clone(), 0)).unwrap();
    assert!(
        sampler.fork(id, 3, base.clone(), [0; 3]).unwrap_err().to_string().contains("a number from 1 to 2")
    );
}

#[test]
fn weights_that_are_not_finite_are_an_error_and_leave_the_sampler_sound() {
    let mut model = model("llama", 50, 0.2);
    let mut sampler = Sampler::new(&model, CacheOptions::default()).unwrap();
    let want = sampler.generate(&model, vec![request(&[1, 2, 3], short(5), 0)]).unwrap();
    let norm = model.find(ParamId::model(Slot::FinalNorm)).unwrap();
    for value in [f32::NAN, 1.0] {
        model.backend.write(&mut model.params[norm].master, 0, &[value]).unwrap();
        model.refresh().unwrap();
        let got = sampler.generate(&model, vec![request(&[1, 2, 3], short(5), 0)]);
        match got {
            Err(e) => assert!(value.is_nan() && e.to_string().contains("are not finite"), "{e}"),
            Ok(done) => assert_eq!((done[0].ids.clone(), value), (want[0].ids.clone(), 1.0)),
        }
        assert_eq!((sampler.is_idle(), sampler.usage().used), (true, 0));
    }
}

/// `cargo test --release -p ferrl-engine --test generate -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn time_of_a_step() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut init = InitOptions::new("llama");
        (init.vocab, init.heads, init.ffn) = (4096, Some(4), Some(1024));
        let options = Options { dtype, ..Default::default() };
        let model = Model::random(open("cpu", None).unwrap(), &init, options).unwrap();
        let mut sampler = Sampler::new(&model, CacheOptions::fit(&model, 32, 160)).unwrap();
        let params = SamplingParams { seed: 1, ..short(128) };
        let mut times = Vec::new();
        for round in 0..8 {
            let prompt = |i: u32| (0..16).map(|t| (i * 131 + t * 7 + round) % 4096).collect::<Vec<u32>>();
            let requests = (0..32).map(|i| request(&prompt(i), params.clone(), i)).collect();
            let start = std::time::Instant::now();
            sampler.generate(&model, requests).unwrap();
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        for (what, time) in [("best", best), ("median", median)] {
            let rate = 32.0 * 128.0 / time;
            println!("{} {what}: {:.2} ms a step, {rate:.0} tokens/s", dtype.name(), time / 128.0 * 1e3);
        }
    }
}

#[test]
fn a_completion_in_pieces_is_the_completion_in_one() {
    let (tokenizer, model) = letters();
    let mut sampler =
        Sampler::new(&model, CacheOptions::default()).unwrap().with_tokenizer(tokenizer.clone());
    let free = sampler.generate(&model, vec![request(&[1, 2], short(60), 7)]).unwrap().remove(0);
    let string = tokenizer.decode(&free.ids[31..34], false).unwrap();
    let ways = [
        short(60),
        SamplingParams {
            presence_penalty: 0.7,
            frequency_penalty: 0.4,
            repetition_penalty: 1.3,
            ..short(60)
        },
        SamplingParams { stop_strings: vec![string], ..short(60) },
    ];
    for params in ways {
        let whole = sampler.generate(&model, vec![request(&[1, 2], params.clone(), 7)]).unwrap().remove(0);
        for piece in [1, 7, 32, 59] {
            let (mut ids, mut logp, mut stop) = (vec![1, 2], Vec::new(), StopReason::Length);
            while ids.len() - 2 < 60 && stop == StopReason::Length {
                let sampled = ids.len() - 2;
                let max_new_tokens = piece.min(60 - sampled);
                let params = SamplingParams { sampled, max_new_tokens, ..params.clone() };
                let c = sampler.generate(&model, vec![request(&ids, params, 7)]).unwrap().remove(0);
                ids.extend(c.ids);
                logp.extend(c.logp);
                stop = c.stop;
            }
            assert_eq!((&ids[2..], logp, stop), (&whole.ids[..], whole.logp.clone(), whole.stop), "{piece}");
        }
    }
    let nothing = SamplingParams { sampled: 2, ..short(5) };
    let error = sampler.submit(request(&[1, 2], nothing, 0)).unwrap_err().to_string();
    assert!(error.contains("none is left to complete"), "{error}");
}

#[test]
fn a_released_cache_is_allocated_again_and_changes_no_token() {
    let model = model("llama", 40, 0.3);
    let options = CacheOptions { bytes: 1 << 20, ..Default::default() };
    let mut sampler = Sampler::new(&model, options).unwrap();
    let ask = |sampler: &mut Sampler| {
        let requests = (0..3).map(|i| request(&[1, 2, 3], short(9), i)).collect();
        let done = sampler.generate(&model, requests).unwrap();
        done.into_iter().map(|c| (c.ids, c.logp)).collect::<Vec<_>>()
    };
    let first = ask(&mut sampler);
    let held = model.backend.memory().0;
    sampler.release();
    let released = model.backend.memory().0;
    assert!(held - released >= 9 << 16, "{held} bytes, then {released}: most of 1 MiB is given back");
    assert!(ask(&mut sampler) == first);
    let id = sampler.submit(request(&[1, 2, 3], short(9), 0)).unwrap();
    sampler.step(&model).unwrap();
    let busy = model.backend.memory().0;
    sampler.release();
    assert_eq!(model.backend.memory().0, busy, "nothing is released under a request in flight");
    assert!(sampler.cancel(id).is_some());
}

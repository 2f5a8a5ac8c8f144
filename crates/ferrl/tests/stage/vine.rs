//! Monte-Carlo values of steps: exact where everything can be enumerated, each prefix computed once, and the same bits for
//! any number of threads.

use crate::help::{fails, model, stage, weights, write};
use ferrl::credit::{self, StepCredit};
use ferrl::recipe::Recipe;
use ferrl::reward::{Reward, Rewards};
use ferrl::setup;
use ferrl::train::{Stage, StepReport};
use ferrl::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::generate::{
    CacheOptions, Completion, Event, GenerationRequest, Generator, Id, Sampler, Usage,
};
use ferrl_engine::model::Model;
use ferrl_engine::train::{Batch, BatchSequence};
use ferrl_engine::{Error, Result};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

fn recipe(data: &str, vine: &str) -> String {
    format!(
        "algo = {{ name = \"vineppo\", vine = {{ split = \"tokens\", step_tokens = 1, {vine} }} }}\n\
         optim.lr = 1e-3\ntrain = {{ steps = 2, micro_batch_tokens = 512 }}\n\
         data = {{ train = {data:?}, max_length = 32 }}\n\
         rollout = {{ prompts = 2, samples = 2, max_new_tokens = 3, cache_mib = 8 }}\nreward = \"exact\"\n"
    )
}

const ROWS: &str = "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"2+2=\", \"answer\": \"4\"}\n";

fn good(last: Option<char>) -> f64 {
    f64::from(last.is_some_and(|c| ('0'..='Z').contains(&c)))
}

/// A stage that pays 1 for completions that end with a digit or a capital.
fn letters(model: &str, data: &str, vine: &str) -> Stage {
    let mut stage = stage(model, &recipe(data, vine)).unwrap();
    stage.rewards = Rewards::of(|s: &Sample<'_>| good(s.completion.chars().last()));
    stage
}

fn credits(report: &StepReport) -> Vec<&StepCredit> {
    report.rollouts.iter().filter_map(|r| r.credit.as_ref()).collect()
}

/// The exact value of a state: the sum over every completion of its tokens, up to `left` more.
fn exact(stage: &Stage, ids: &[u32], left: usize) -> f64 {
    let (eos, size) = (stage.tokenizer.eos()[0], stage.tokenizer.vocab_size() as u32);
    let batch = |prefixes: &[Vec<u32>]| {
        let sequence = |ids: &Vec<u32>| {
            let scored = (0..ids.len()).map(|i| i + 1 == ids.len()).collect();
            BatchSequence { ids: ids.clone(), scored, ..Default::default() }
        };
        Batch { sequences: prefixes.iter().map(sequence).collect(), others_per_row: 0 }
    };
    let text = |ids: &[u32]| stage.tokenizer.decode(ids, true).unwrap().chars().last();
    let next: Vec<Vec<u32>> = (0..size).map(|t| [ids, &[t]].concat()).collect();
    let logp = stage.policy.stats(&batch(&next)).unwrap().logp;
    let mut total = 0.0;
    for (t, ids) in next.iter().enumerate() {
        let p = (logp[t * ids.len() + ids.len() - 2] as f64).exp();
        total += p * match left {
            _ if t as u32 == eos => good(text(&ids[4..])),
            1 => good(text(&ids[4..])),
            _ => exact(stage, ids, left - 1),
        };
    }
    total
}

#[test]
fn monte_carlo_values_are_unbiased_against_exact_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let start = letters(&model, &data, "samples = 1");
    let mut stage = letters(&model, &data, "samples = 2000");
    let report = stage.step().unwrap();
    let (mut compared, mut known) = (0, HashMap::new());
    for rollout in &report.rollouts {
        let credit = rollout.credit.as_ref().unwrap();
        let mut ids = rollout.prompt.ids.clone();
        assert_eq!(ids.len(), 4);
        for (i, estimates) in credit.rollouts.iter().enumerate() {
            let want = *known.entry(ids.clone()).or_insert_with_key(|ids| exact(&start, ids, 3 - i));
            let (got, n) = (credit.values[i], estimates.len() as f64);
            assert_eq!((got, n), (credit::mean(estimates), 2000.0));
            let error = (want * (1.0 - want) / n).sqrt();
            assert!((got - want).abs() < 4.0 * error, "state {i}: {got} against {want} ± {error}");
            assert!(want > 0.05 && want < 0.95, "{want}");
            ids.extend(stage.tokenizer.encode_text(&credit.steps[i]).unwrap());
            compared += 1;
        }
        let total: f64 = credit.advantages.iter().sum();
        assert!((total - (credit.score - credit.values[0])).abs() < 1e-9, "advantages telescope");
    }
    assert!(compared >= 8, "{compared}");
}

#[test]
fn the_weights_are_the_same_bits_for_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let run = |threads: usize, cache: usize| {
        let text = recipe(&data, "samples = 3, interval = 0.5, max_samples = 7")
            .replace("cache_mib = 8", &format!("cache_mib = {cache}"));
        let text = format!("{text}\n[model]\npath = {model:?}\n");
        let resolved = Recipe::parse(&text, "recipe.toml", "test", &[]).unwrap();
        let backend = ferrl_kernels::open("cpu", Some(threads)).unwrap();
        let mut stage = setup::stage(resolved.stages[0].recipe.clone(), backend, Path::new(&model)).unwrap();
        stage.rewards = Rewards::of(|s: &Sample<'_>| good(s.completion.chars().last()));
        let before = weights(&stage);
        let reports: Vec<StepReport> = (0..2).map(|_| stage.step().unwrap()).collect();
        let credits: Vec<StepCredit> = reports.iter().flat_map(credits).cloned().collect();
        assert!(credits.iter().flat_map(|c| &c.rollouts).any(|r| r.len() == 7), "the interval asks for more");
        assert!(weights(&stage) != before, "learned");
        (credits, weights(&stage))
    };
    let one = run(1, 8);
    assert!(one == run(3, 8) && one == run(1, 1));
}

/// Scores the completions of its first two calls, a rollout and the continuations of it; all later ones are lost.
struct Dying(Mutex<usize>);

impl Reward for Dying {
    fn name(&self) -> &str {
        "dying"
    }
    fn score(&self, completions: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let mut calls = self.0.lock().unwrap();
        *calls += 1;
        let one = |s: &Sample<'_>| match *calls {
            3.. => Outcome::Lost(Error::data("the worker died")),
            _ => Outcome::Scored(Score { reward: good(s.completion.chars().last()), ..Default::default() }),
        };
        Ok(completions.iter().map(one).collect())
    }
}

/// Was: continuations that a confidence interval added to a few states ended the run where all of them lost their reward.
#[test]
fn added_continuations_without_rewards_leave_the_values_of_the_first_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let mut stage = letters(&model, &data, "samples = 4, interval = 0.1, add = 2, max_samples = 8");
    stage.rewards = Rewards::of(Dying(Mutex::new(0)));
    let report = stage.step().unwrap();
    let credits = credits(&report);
    assert!(!credits.is_empty() && credits.iter().all(|c| c.rollouts.iter().all(|r| r.len() == 4)));

    // Without any reward of a continuation there is nothing to learn from.
    let mut stage = letters(&model, &data, "samples = 4");
    stage.rewards = Rewards::of(Dying(Mutex::new(1)));
    let error = stage.step().err().unwrap().to_string();
    assert!(error.contains("no continuation got a reward: the worker died"), "{error}");
}

/// A sampler whose usage can be read from outside.
struct Counted(Arc<Mutex<Sampler>>);

impl Generator for Counted {
    fn check(&self, request: &GenerationRequest) -> Result<()> {
        self.0.lock().unwrap().check(request)
    }
    fn submit(&mut self, request: GenerationRequest) -> Result<Id> {
        self.0.lock().unwrap().submit(request)
    }
    fn step(&mut self, policy: &Model) -> Result<Vec<Event>> {
        self.0.lock().unwrap().step(policy)
    }
    fn cancel(&mut self, id: Id) -> Option<Completion> {
        self.0.lock().unwrap().cancel(id)
    }
    fn is_exact(&self) -> bool {
        self.0.lock().unwrap().is_exact()
    }
    fn put_back(&mut self, events: Vec<Event>) {
        self.0.lock().unwrap().put_back(events)
    }
}

/// Rows of the forward passes of one step, the tokens of its continuations, and its states.
fn rows(model: &str, data: &str, samples: usize) -> (Usage, f64, f64, usize) {
    let text =
        recipe(data, &format!("samples = {samples}")).replace("max_new_tokens = 3", "max_new_tokens = 24");
    let mut stage = stage(model, &text.replace("step_tokens = 1", "step_tokens = 4")).unwrap();
    stage.rewards = Rewards::of(|s: &Sample<'_>| good(s.completion.chars().last()));
    let options = CacheOptions { bytes: 8 << 20, ..Default::default() };
    let sampler = Arc::new(Mutex::new(Sampler::new(&stage.policy.model, options).unwrap()));
    stage.generator = Some(Box::new(Counted(sampler.clone())));
    let report = stage.step().unwrap();
    let metric = |name: &str| report.metrics.get(name).unwrap();
    let usage = sampler.lock().unwrap().usage();
    let tokens: usize = report.rollouts.iter().map(|r| r.completion.tokens).sum();
    (usage, metric("credit/tokens"), metric("credit/states"), tokens)
}

#[test]
fn every_prefix_is_computed_once() {
    let dir = tempfile::tempdir().unwrap();
    let rows_of_data = ROWS.replace("1+1=", "what is one and one, in digits? ");
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows_of_data));
    let (few, few_tokens, states, completions) = rows(&model, &data, 1);
    let (many, many_tokens, same_states, same_completions) = rows(&model, &data, 9);
    assert_eq!((states, completions), (same_states, same_completions));
    // Eight more continuations of every state cost a row for each of their tokens, and nothing for their prefixes.
    let (more_rows, more_tokens) = ((many.rows - few.rows) as f64, many_tokens - few_tokens);
    assert!(more_tokens > 500.0 && more_rows <= more_tokens, "{more_rows} rows for {more_tokens} tokens");
    // The prefixes of the first continuations were computed when the completions were sampled: what is left of them is at
    // most a block each.
    let block = 16.0 * states;
    assert!((few.rows as f64) < completions as f64 + few_tokens + block + 80.0, "{few:?}");
}

#[test]
fn equal_prefixes_are_one_state() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let report = letters(&model, &data, "samples = 2").step().unwrap();
    let all = credits(&report);
    let passed: usize = all.iter().map(|c| c.rollouts.len()).sum();
    let states = report.metrics.get("credit/states").unwrap() as usize;
    assert!(states + 2 <= passed, "the prompt of two completions is one state: {states} of {passed}");
    for pair in all.chunks(2) {
        assert_eq!(pair[0].rollouts[0], pair[1].rollouts[0]);
    }
    // Tokens have the advantage of their step; the first one's is shown, whitened.
    let capped = letters(&model, &data, "samples = 2, max_steps = 1").step().unwrap();
    for credit in credits(&capped) {
        assert_eq!(credit.rollouts.len(), credit.steps.len().min(2));
        assert!(credit.advantages[credit.rollouts.len()..].iter().all(|a| *a == 0.0), "back-filled");
        let estimated: Vec<f64> = credit.rollouts.iter().map(|r| credit::mean(r)).collect();
        let (values, advantages) = credit::advantages(credit.steps.len(), credit.score, &estimated);
        assert_eq!((&values, &advantages), (&credit.values, &credit.advantages), "recomputed");
    }
}

#[test]
fn what_cannot_be_continued_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", ROWS));
    let graded = r#"{"prompt": "a", "completions": ["b", "c"], "rewards": [1, 0]}"#;
    let given = write(dir.path(), "given.jsonl", graded);
    let error = fails(&model, &recipe(&given, "samples = 2").replace("reward = \"exact\"\n", ""));
    assert!(error.contains("values of steps need sampled completions"), "{error}");
    for (more, words) in [
        ("algo.vine.add = 2", "belong to vine.interval"),
        ("algo.vine = { split = \"lines\", step_tokens = 3 }", "counted in tokens"),
        ("algo.vine = { interval = 0.1, max_samples = 5 }", "below vine.samples"),
        ("algo.overlong = 0.5", "rewards of whole completions"),
        ("algo.advantage.baseline = \"group\"\nalgo.vine.samples = 3", "this baseline does not use"),
    ] {
        let rest = recipe(&data, "").lines().skip(1).collect::<Vec<_>>().join("\n");
        let error = fails(&model, &format!("algo.name = \"vineppo\"\n{more}\n{rest}"));
        assert!(error.contains(words), "{more}: {error}");
    }
}

//! Branches of episodes: values of turns by VinePPO and by trees, exact where the game can be enumerated.

use crate::help::{model, stage, weights};
use ferrl::credit;
use ferrl::env::{self, Environment, EpisodeEnd, Next, Turn};
use ferrl::episode::Environments;
use ferrl::task::{Task, TaskExample};
use ferrl::train::{Stage, StepReport};
use ferrl_engine::Result;
use ferrl_engine::train::{Batch, BatchSequence};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PROMPT: &str = "go\n";

fn good(action: &str) -> f64 {
    f64::from(u8::from(action.chars().any(|c| ('0'..='Z').contains(&c))))
}

/// What the game says to a first action: the second one follows it.
fn said(action: &str) -> &'static str {
    if good(action) > 0.0 { "yes\n" } else { "no\n" }
}

/// How a game answers.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Observes,
    Restates,
    Forgets,
}

/// Two turns; half a point for each action with a digit or a capital.
struct Game(Kind, usize);

static CALLS: AtomicU64 = AtomicU64::new(0);

impl Environment for Game {
    fn start(&mut self) -> env::Result<String> {
        Ok(PROMPT.into())
    }
    fn step(&mut self, action: &str) -> env::Result<Turn> {
        self.1 += 1;
        let odd = self.0 == Kind::Forgets && CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(3);
        let text = if odd { "hm\n" } else { said(action) };
        let next = match self.0 {
            Kind::Restates => Next::State(format!("now {text}")),
            _ => Next::Observation(text.into()),
        };
        let end = (self.1 == 2).then_some(EpisodeEnd::Terminated);
        Ok(Turn { next, reward: 0.5 * good(action), end, ..Default::default() })
    }
}

struct Games(Kind);

impl Task for Games {
    fn example(&self, _index: u64, _held_out: bool) -> Result<TaskExample> {
        Ok(TaskExample { prompt: PROMPT.into(), ..Default::default() })
    }
    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        None
    }
    fn episode(&self, _index: u64, _held_out: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(Game(self.0, 0)))
    }
}

fn playing(model: &str, more: &str, kind: Kind) -> Stage {
    let recipe = format!(
        "optim.lr = 1e-3\ntrain = {{ steps = 3, micro_batch_tokens = 512 }}\n\
         rollout = {{ prompts = 3, samples = 2, max_new_tokens = 1, cache_mib = 8 }}\n\
         data = {{ train = [\"task:guess\"], task = {{ turns = 3, format = \"line\" }}, max_length = 64 }}\n{more}\n"
    );
    let mut stage = stage(model, &recipe).unwrap();
    stage.environments = Environments::new(vec![("guess".into(), Arc::new(Games(kind)))], 10);
    stage
}

fn vine(samples: usize) -> String {
    format!("algo = {{ name = \"vineppo\", vine.samples = {samples} }}")
}

/// The expected return of what is to come after these tokens, with `left` turns to play.
fn exact(stage: &Stage, ids: &[u32], kind: Kind, left: usize) -> f64 {
    let size = stage.tokenizer.vocab_size() as u32;
    let next: Vec<Vec<u32>> = (0..size).map(|t| [ids, &[t]].concat()).collect();
    let sequence = |ids: &Vec<u32>| {
        let scored = (0..ids.len()).map(|i| i + 1 == ids.len()).collect();
        BatchSequence { ids: ids.clone(), scored, ..Default::default() }
    };
    let batch = Batch { sequences: next.iter().map(sequence).collect(), others_per_row: 0 };
    let logp = stage.policy.stats(&batch).unwrap().logp;
    let text = |t: usize| stage.tokenizer.decode(&[t as u32], true).unwrap();
    let value = |(t, ids): (usize, &Vec<u32>)| {
        let p = f64::from(logp[t * ids.len() + ids.len() - 2]).exp();
        let encode = |text: &str| stage.tokenizer.encode_text(text).unwrap();
        let after = match kind {
            Kind::Restates => encode(&format!("now {}", said(&text(t)))),
            _ => [&ids[..], &encode(said(&text(t)))].concat(),
        };
        let later = if left > 1 { exact(stage, &after, kind, left - 1) } else { 0.0 };
        p * (0.5 * good(&text(t)) + later)
    };
    next.iter().enumerate().map(value).sum()
}

fn exact_logp(report: &StepReport) {
    assert_eq!(report.metrics.get("sampling/sampling_logp_difference/max"), Some(0.0));
}

#[test]
fn turns_of_episodes_are_credited_as_the_enumerated_game_says() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    for kind in [Kind::Observes, Kind::Restates] {
        let start = playing(&model, &vine(1), kind);
        let mut stage = playing(&model, &vine(1500), kind);
        let before = weights(&stage);
        let report = stage.step().unwrap();
        exact_logp(&report);
        assert!(weights(&stage) != before, "learned");
        let mut known = HashMap::new();
        for rollout in &report.rollouts {
            let credit = rollout.credit.as_ref().expect("every episode is credited");
            let turns = &rollout.completion.played.as_ref().unwrap().turns;
            assert_eq!((credit.steps.len(), credit.rollouts.len()), (2, 2));
            assert_eq!(credit.steps, turns.iter().map(|t| t.action.clone()).collect::<Vec<_>>());
            let encode = |text: &str| start.tokenizer.encode_text(text).unwrap();
            let first = encode(PROMPT);
            let second = match kind {
                Kind::Restates => encode(&format!("now {}", said(&turns[0].action))),
                _ => continue_with(&start, &rollout.prompt.ids, &turns[0].action),
            };
            assert_eq!(rollout.prompt.ids, first);
            for (i, ids) in [first, second].into_iter().enumerate() {
                // A value is the mean return of the whole episode: what was earned so far comes on top.
                let earned: f64 = turns[..i].iter().map(|t| t.reward).sum();
                let later =
                    *known.entry((i, ids.clone())).or_insert_with(|| exact(&start, &ids, kind, 2 - i));
                let (got, want) = (credit.values[i], earned + later);
                assert_eq!(got, credit::mean(&credit.rollouts[i]));
                // Returns lie between 0 and 1, so their deviation is at most one half.
                assert!((got - want).abs() < 4.0 * 0.5 / 1500f64.sqrt(), "turn {i}: {got}, exactly {want}");
                assert!(later > 0.02 && later < 0.98, "{later}: a game worth estimating");
            }
            let total: f64 = credit.advantages.iter().sum();
            assert!((total - (credit.score - credit.values[0])).abs() < 1e-9, "advantages telescope");
            // The advantage of a turn stands on its action: whitening keeps their order.
            let placed = turns.iter().map(|t| t.advantage).collect::<Vec<_>>();
            assert_eq!(placed[0] > placed[1], credit.advantages[0] > credit.advantages[1], "{placed:?}");
        }
    }
}

/// Prompt, action and observation as the policy read them.
fn continue_with(stage: &Stage, prompt: &[u32], action: &str) -> Vec<u32> {
    let encode = |text: &str| stage.tokenizer.encode_text(text).unwrap();
    let own = if action.is_empty() { vec![stage.tokenizer.eos()[0]] } else { encode(action) };
    [prompt, &own, &encode(said(action))].concat()
}

#[test]
fn credit_of_turns_is_the_same_for_any_cache_and_refused_where_a_game_forgets() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let run = |cache: usize| {
        let mut stage = playing(&model, &vine(5), Kind::Observes);
        let options = ferrl_engine::generate::CacheOptions { bytes: cache << 10, ..Default::default() };
        let sampler = ferrl_engine::generate::Sampler::new(&stage.policy.model, options).unwrap();
        stage.generator = Some(Box::new(sampler));
        let reports: Vec<StepReport> = (0..2).map(|_| stage.step().unwrap()).collect();
        let credits = reports.iter().flat_map(|r| &r.rollouts).map(|r| r.credit.clone().unwrap());
        (credits.collect::<Vec<_>>(), weights(&stage))
    };
    assert!(run(8192) == run(512));
    let mut stage = playing(&model, &vine(5), Kind::Forgets);
    let error = stage.step().err().unwrap().to_string();
    assert!(error.contains("led to another state"), "{error}");
}

#[test]
fn trees_of_episodes_are_rollouts() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let search = |strategy: &str, options: &str| {
        format!("[search]\nstrategy = {strategy:?}\noptions = {{ step = \"\", {options} }}\ntrain = true")
    };
    for kind in [Kind::Observes, Kind::Restates] {
        for algo in ["\"vineppo\"", "\"grpo\"", "\"ppo\""] {
            for search in [search("tree", "branch = [3, 2]"), search("mcts", "simulations = 8")] {
                let mut stage = playing(&model, &format!("algo = {algo}\n{search}"), kind);
                let before = weights(&stage);
                let report = stage.step().unwrap();
                exact_logp(&report);
                assert!(weights(&stage) != before, "{algo} {search}");
                let get = |name: &str| report.metrics.get(name).unwrap();
                assert_eq!(report.rollouts.len() as f64, 3.0 * get("search/paths"));
                if search.contains("tree") {
                    assert_eq!(get("search/paths"), 6.0);
                }
                for rollout in &report.rollouts {
                    let played = rollout.completion.played.as_ref().unwrap();
                    let earned: f64 = played.turns.iter().map(|t| 0.5 * good(&t.action)).sum();
                    assert_eq!((played.turns.len(), rollout.scores.reward), (2, Some(earned)));
                }
            }
        }
    }
}

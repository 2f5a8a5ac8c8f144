//! Search over environments with several turns: a node is a prefix of an episode, and a child plays it again.

use crate::help::*;
use crate::invariants::holds;
use crate::same::bare;
use ferrl::env::{Environment, EpisodeEnd, Next, Result, Turn};
use ferrl::episode::{Environments, EpisodeKey};
use ferrl::reward::Rewards;
use ferrl::search::{Figures, Record, STRATEGIES, replay};
use ferrl::source::Prompt;
use ferrl::task::{Task, TaskExample};
use ferrl_engine::train::{Batch, stats};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How the toy answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// With an observation.
    Observes,
    /// With a whole state that replaces what was read before.
    Restates,
    /// With an observation, on a thread of its own.
    Waits,
    /// With an observation that no seed decides.
    Forgets,
    /// Not at all, from the second turn on.
    Breaks,
}

/// Three turns: an action with more `a` than `b` is right; the reward is the share of right ones, and the toy says `a` or `b`
/// depending on its number, the turn and the action.
struct Toy {
    number: u64,
    kind: Kind,
    turn: u64,
    right: u32,
}

static CALLS: AtomicU64 = AtomicU64::new(0);

impl Environment for Toy {
    fn start(&mut self) -> Result<String> {
        Ok(["abba\n", "baab\n", "aabb\n"][self.number as usize % 3].into())
    }
    fn step(&mut self, action: &str) -> Result<Turn> {
        self.turn += 1;
        self.right += u32::from(right(action) > 0.0);
        if self.kind == Kind::Breaks && self.turn > 1 {
            let lost = ferrl::env::Lost::new(ferrl::env::Why::Raised, "no more");
            return Err(ferrl::env::Fault::Lost(Box::new(lost)));
        }
        let salt = if self.kind == Kind::Forgets { CALLS.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let even = (self.number + self.turn + action.len() as u64 + salt).is_multiple_of(2);
        let said = if even { "a" } else { "b" };
        let next = match self.kind {
            Kind::Restates => Next::State(format!("{}\n", said.repeat(1 + self.turn as usize))),
            _ => Next::Observation(format!("\n{said}\n")),
        };
        let over = self.turn == 3;
        let share = f64::from(self.right) / 3.0;
        Ok(Turn {
            next,
            reward: if over { share } else { 0.0 },
            score: over.then_some(share),
            end: over.then_some(EpisodeEnd::Terminated),
            ..Default::default()
        })
    }
    fn waits(&self) -> bool {
        self.kind == Kind::Waits
    }
    fn label(&self) -> String {
        "toy".into()
    }
}

struct Toys(Kind);

impl Task for Toys {
    fn example(&self, _: u64, _: bool) -> ferrl_engine::Result<TaskExample> {
        Ok(TaskExample::default())
    }
    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        None
    }
    fn episode(&self, number: u64, _: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(Toy { number, kind: self.0, turn: 0, right: 0 }))
    }
}

fn environments(kind: Kind, max_turns: usize) -> Environments {
    let task: Arc<dyn Task> = Arc::new(Toys(kind));
    Environments::new(vec![("toy".into(), task)], max_turns)
}

/// Prompts without tokens: the environment begins them.
fn prompts(n: u64) -> Vec<Prompt> {
    let key = |index| EpisodeKey { task: "toy".into(), index, held_out: true };
    (0..n).map(|index| Prompt { index, episode: Some(key(index)), ..Default::default() }).collect()
}

fn how(strategy: &'static str, options: Value) -> How {
    How { max_new_tokens: 4, ..How::new(strategy, options) }
}

fn searched(world: &World, kind: Kind, n: u64, how: &How) -> Vec<Record> {
    let rewards = Rewards::default();
    run_in(world, (&environments(kind, 8), Some(&rewards)), &prompts(n), how).unwrap().0
}

/// Plays the actions of every path again and compares what is in the tree.
fn plays_as_recorded(r: &Record, kind: Kind, world: &World) {
    for end in r.nodes.terminals() {
        let mut toy = Toy { number: r.index, kind, turn: 0, right: 0 };
        assert_eq!(toy.start().unwrap(), r.prompt);
        let path: Vec<_> = r.nodes.path(end.id).into_iter().map(|id| r.nodes.node(id)).collect();
        let turns: Vec<_> = path.iter().flat_map(|n| n.turns.iter()).collect();
        let mut reward = 0.0;
        for (i, turn) in turns.iter().enumerate() {
            let Turn { next: Next::Observation(said) | Next::State(said), reward: earned, end, .. } =
                toy.step(&turn.action).unwrap();
            assert_eq!((&said, earned), (&turn.observation, turn.reward));
            assert_eq!(end.is_some(), i + 1 == turns.len());
            reward += earned;
        }
        assert_eq!((turns.len(), end.reward), (3, Some(reward)));
        // Tokens are those of three actions and of what was read after the first two.
        let encode = |text: &str| world.tokenizer.encode_text(text).unwrap().len();
        let observed: usize = path.iter().map(|n| n.observed).sum();
        assert_eq!(observed, turns[..2].iter().map(|t| encode(&t.observation)).sum::<usize>());
        let (sampled, said) = (r.nodes.sampled(end.id).0, turns.iter().map(|t| encode(&t.action)).sum());
        assert!((said..=3 * 4).contains(&sampled), "{sampled} tokens for {said} characters");
    }
}

#[test]
fn every_strategy_searches_episodes() {
    let world = World::new(1);
    for kind in [Kind::Observes, Kind::Restates, Kind::Waits] {
        for entry in STRATEGIES {
            for options in [json!({}), json!({"step": ""}), json!({"step_tokens": 2})] {
                let records = searched(&world, kind, 3, &how(entry.name, options.clone()));
                for r in &records {
                    let what = format!("{} {kind:?} {options}", entry.name);
                    holds(r, &what);
                    plays_as_recorded(r, kind, &world);
                    assert!(r.facts.turns, "{what}");
                    let tokens: u64 = r.nodes.nodes().iter().map(|n| n.sampled() as u64 * n.samples).sum();
                    assert_eq!(r.generated_tokens, tokens, "{what}: every sampled token is in the tree");
                }
            }
        }
    }
}

#[test]
fn a_step_is_a_turn_where_nothing_else_ends_it() {
    let world = World::new(1);
    let records = searched(&world, Kind::Observes, 2, &how("tree", json!({"branch": [3, 2, 2], "step": ""})));
    for r in records {
        assert_eq!(r.nodes.nodes().len(), 1 + 3 + 6 + 12);
        assert!(r.nodes.nodes()[1..].iter().all(|n| n.turns.len() == 1 && n.terminal == (n.depth == 3)));
        // What was observed follows the action, and the last action has no observation that anybody reads.
        assert!(r.nodes.nodes()[1..].iter().all(|n| (n.observed > 0) != n.terminal));
    }
}

#[test]
fn trees_of_episodes_do_not_depend_on_threads_batches_or_waiting() {
    let (one, two) = (World::new(1), World::new(2));
    for entry in STRATEGIES {
        let how = how(entry.name, json!({}));
        let want: Vec<Value> = searched(&one, Kind::Observes, 4, &how).iter().map(bare).collect();
        for (world, kind, at_once, max_sequences) in
            [(&two, Kind::Observes, 4, 256), (&one, Kind::Waits, 1, 256), (&two, Kind::Waits, 3, 2)]
        {
            let how = How { at_once, max_sequences, ..how.clone() };
            let got: Vec<Value> = searched(world, kind, 4, &how).iter().map(bare).collect();
            assert_eq!(got, want, "{}: {kind:?}, {at_once} at once, {max_sequences} sequences", entry.name);
        }
    }
}

#[test]
fn saved_trees_of_episodes_replay_without_environment_or_model() {
    let world = World::new(1);
    for entry in STRATEGIES {
        let dir = tempfile::tempdir().unwrap();
        let records = searched(&world, Kind::Restates, 2, &how(entry.name, json!({"step": ""})));
        records.iter().for_each(|r| drop(r.save(dir.path()).unwrap()));
        let again = replay(dir.path()).unwrap().records;
        assert_eq!(again, records, "{}", entry.name);
        assert_eq!(Figures::of(&again), Figures::of(&records));
    }
}

#[test]
fn prefixes_of_episodes_are_computed_once() {
    let world = World::new(1).endless();
    let how = How { max_new_tokens: 32, ..How::new("fishbone", json!({"step": "", "branch": 9})) };
    let r = searched(&world, Kind::Observes, 1, &how).remove(0);
    // Spine and bones continue the prompt and the first two turns: 5, 5 + 35 and 5 + 70 tokens.
    let all: u64 = [5, 40, 75].iter().map(|p| 10 * p).sum();
    assert_eq!(r.generated_tokens, 3 * 32 + 9 * 32 * (3 + 2 + 1));
    assert!(r.shared_tokens as f64 > 0.6 * all as f64, "{} of {all}", r.shared_tokens);
}

#[test]
fn an_environment_that_answers_otherwise_the_second_time_is_refused() {
    let world = World::new(1);
    let rewards = Rewards::default();
    let tree = how("tree", json!({"step": "", "branch": [4, 4, 4]}));
    let e = run_in(&world, (&environments(Kind::Forgets, 8), Some(&rewards)), &prompts(2), &tree);
    let e = e.err().unwrap().to_string();
    assert!(e.contains("led to another state") && e.contains("toy") && e.contains("env check"), "{e}");
    // Whole episodes are played once each: nothing is repeated.
    let cot = how("cot", json!({"samples": 2}));
    run_in(&world, (&environments(Kind::Forgets, 8), Some(&rewards)), &prompts(2), &cot).unwrap();
}

#[test]
fn lost_episodes_have_no_reward_and_do_not_win() {
    let world = World::new(1);
    for entry in STRATEGIES {
        for r in searched(&world, Kind::Breaks, 2, &how(entry.name, json!({"step": ""}))) {
            let ends: Vec<_> = r.nodes.terminals().collect();
            assert!(!ends.is_empty() && ends.iter().all(|n| n.reward.is_none() && n.correct.is_none()));
            assert!(
                ends.iter().all(|n| n.lost.as_ref().unwrap().contains("toy: turn 2: ")),
                "{}",
                entry.name
            );
            assert_eq!(Figures::of(std::slice::from_ref(&r)).lost, ends.len());
        }
    }
}

#[test]
fn the_limit_of_turns_cuts_episodes_off() {
    let world = World::new(1);
    let rewards = Rewards::default();
    let environments = environments(Kind::Observes, 2);
    let mcts = how("mcts", json!({"step": ""}));
    for r in run_in(&world, (&environments, Some(&rewards)), &prompts(2), &mcts).unwrap().0 {
        assert!(r.nodes.terminals().all(|n| n.truncated && n.reward == Some(0.0)));
        let turns = |id: usize| r.nodes.path(id).iter().map(|&i| r.nodes.node(i).turns.len()).sum::<usize>();
        assert!(r.nodes.terminals().all(|n| turns(n.id) == 2));
    }
}

/// One token a turn, two turns: right where the second action is what the environment said after the first.
struct Echo {
    said: Option<char>,
}

impl Environment for Echo {
    fn start(&mut self) -> Result<String> {
        Ok("abba".into())
    }
    fn step(&mut self, action: &str) -> Result<Turn> {
        let Some(said) = self.said else {
            let said = if action.contains('a') { 'b' } else { 'a' };
            self.said = Some(said);
            return Ok(Turn { next: Next::Observation(said.into()), ..Default::default() });
        };
        let reward = f64::from(u8::from(action.contains(said)));
        Ok(Turn { reward, score: Some(reward), end: Some(EpisodeEnd::Terminated), ..Default::default() })
    }
}

struct Echoes;

impl Task for Echoes {
    fn example(&self, _: u64, _: bool) -> ferrl_engine::Result<TaskExample> {
        Ok(TaskExample::default())
    }
    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        None
    }
    fn episode(&self, _: u64, _: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(Echo { said: None }))
    }
}

/// Probabilities of the next token.
fn next(world: &World, context: &[u32]) -> Vec<f64> {
    let vocab = world.model.config.vocab as u32;
    let sequences: Vec<Vec<u32>> = (0..vocab).map(|t| [context, &[t]].concat()).collect();
    let rows = context.len() + 1;
    let logp = stats(&world.model, &Batch::of(sequences), 1.0).unwrap().logp;
    (0..vocab as usize).map(|t| f64::from(logp[t * rows + rows - 2]).exp()).collect()
}

#[test]
fn values_of_turns_are_those_of_the_enumerated_episode() {
    let world = World::new(1);
    let text = |t: usize| world.tokenizer.decode(&[t as u32], true).unwrap();
    let start = world.tokenizer.encode_text("abba").unwrap();
    // After each first action: its probability, the context, and the exact probability of the right second one.
    let first = next(&world, &start);
    let after = |t: usize| {
        let said = if text(t).contains('a') { "b" } else { "a" };
        let context = [&start[..], &[t as u32], &world.tokenizer.encode_text(said).unwrap()].concat();
        let second = next(&world, &context);
        (0..second.len()).filter(|&u| text(u).contains(said)).map(|u| second[u]).sum::<f64>()
    };
    let values: Vec<f64> = (0..first.len()).map(after).collect();
    let exact: f64 = first.iter().zip(&values).map(|(p, v)| p * v).sum();
    assert!((0.05..0.95).contains(&exact), "{exact}: a task worth estimating");
    let task: Arc<dyn Task> = Arc::new(Echoes);
    let environments = Environments::new(vec![("toy".into(), task)], 4);
    let search = |strategy, options| {
        let how = How { max_new_tokens: 1, ..How::new(strategy, options) };
        let rewards = Rewards::default();
        run_in(&world, (&environments, Some(&rewards)), &prompts(1), &how).unwrap().0.remove(0)
    };
    let near = |what: &str, got: f64, want: f64, n: f64| {
        let error = (want * (1.0 - want) / n).sqrt().max(1e-3);
        assert!((got - want).abs() < 4.0 * error, "{what}: {got}, exactly {want}");
    };
    let cot = search("cot", json!({"samples": 4000}));
    near("cot", cot.nodes.node(0).value, exact, 4000.0);
    let tree = search("tree", json!({"step": "", "branch": [12, 1500]}));
    for &id in tree.nodes.children(0) {
        let n = tree.nodes.node(id);
        near(&format!("after {:?}", n.turns[0].action), n.value, values[n.tokens[0] as usize], 1500.0);
    }
}

//! Episodes of several turns: what is trained, what is rewarded, and that nothing depends on the order of events.

use crate::help::{model, model_of, stage, weights};
use ferrl::env::{self, Environment, EpisodeEnd, Next, Turn};
use ferrl::episode::Environments;
use ferrl::task::{Task, TaskExample};
use ferrl::train::{Stage, StepReport};
use ferrl_engine::Result;
use serde_json::{Map, Value};
use std::sync::Arc;

const RECIPE: &str = "algo = \"ALGO\"\noptim.lr = 1e-3\ntrain = { steps = 3, micro_batch_tokens = 512 }\n\
     rollout = { prompts = 4, samples = 3, max_new_tokens = 3, cache_mib = CACHE }\n\
     data = { train = [\"task:guess\"], task = { turns = 3, format = \"line\" }, max_length = 64 }\n";

const PROMPT: &str = "between 1 and 10, 3 turns.\n";

fn recipe(algo: &str, cache: usize) -> String {
    RECIPE.replace("ALGO", algo).replace("CACHE", &cache.to_string())
}

/// Three turns, each rewarded by the letters from a to m in the action.
struct Letters(usize);

impl Environment for Letters {
    fn start(&mut self) -> env::Result<String> {
        Ok(PROMPT.into())
    }
    fn step(&mut self, action: &str) -> env::Result<Turn> {
        self.0 += 1;
        let reward = action.chars().filter(|c| ('a'..='m').contains(c)).count() as f64;
        let end = (self.0 == 3).then_some(EpisodeEnd::Terminated);
        Ok(Turn { next: Next::Observation("ok\n".into()), reward, end, ..Default::default() })
    }
}

/// A task whose episodes are those of a function.
struct Played(fn() -> Box<dyn Environment>);

impl Task for Played {
    fn example(&self, _index: u64, _held_out: bool) -> Result<TaskExample> {
        Ok(TaskExample { prompt: PROMPT.into(), ..Default::default() })
    }
    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        None
    }
    fn episode(&self, _index: u64, _held_out: bool) -> Option<Box<dyn Environment>> {
        Some((self.0)())
    }
}

/// A stage whose prompts begin episodes of another environment.
fn playing(model: &str, recipe: &str, max_turns: usize, episode: fn() -> Box<dyn Environment>) -> Stage {
    let mut stage = stage(model, recipe).unwrap();
    stage.environments = Environments::new(vec![("guess".into(), Arc::new(Played(episode)))], max_turns);
    stage
}

fn step(stage: &mut Stage) -> StepReport {
    let report = stage.step().unwrap();
    assert_eq!(report.metrics.get("sampling/sampling_logp_difference/max"), Some(0.0));
    report
}

#[test]
fn every_policy_gradient_learns_from_episodes_with_exact_log_probabilities() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    for algo in ["grpo", "ppo", "reinforce", "rloo"] {
        let mut stage = playing(&model, &recipe(algo, 8), 10, || Box::new(Letters(0)));
        let before = weights(&stage);
        let report = step(&mut stage);
        assert!(weights(&stage) != before, "{algo}");
        for rollout in &report.rollouts {
            let played = rollout.completion.played.as_ref().expect("an environment played");
            assert_eq!(played.turns.len(), 3, "{algo}");
            let total: f64 = played.turns.iter().map(|t| t.reward).sum();
            assert_eq!(rollout.scores.reward, Some(total), "{algo}");
            assert_eq!(rollout.completion.tokens, played.turns.iter().map(|t| t.tokens).sum::<usize>());
            assert_eq!(rollout.advantage, played.turns[0].advantage);
        }
    }
}

/// With a small cache sequences wait for each other and are preempted: other batches, another order of completions.
#[test]
fn the_order_in_which_episodes_go_on_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let run = |cache: usize| {
        let mut stage = playing(&model, &recipe("grpo", cache), 10, || Box::new(Letters(0)));
        let texts: Vec<String> =
            (0..2).flat_map(|_| step(&mut stage).rollouts).map(|r| r.completion.text).collect();
        (texts, weights(&stage))
    };
    assert!(run(8) == run(1));
}

/// Three turns: the second state continues the first, the third is another text altogether.
struct Forgetful(usize);

impl Environment for Forgetful {
    fn start(&mut self) -> env::Result<String> {
        Ok(PROMPT.into())
    }
    fn step(&mut self, action: &str) -> env::Result<Turn> {
        self.0 += 1;
        let next = match self.0 {
            1 => Next::State(format!("{PROMPT}{action}cd")),
            _ => Next::State("xyz".into()),
        };
        let end = (self.0 == 3).then_some(EpisodeEnd::Terminated);
        Ok(Turn { next, reward: self.0 as f64, score: Some(0.5), end, ..Default::default() })
    }
}

#[test]
fn a_state_that_continues_nothing_opens_a_new_sequence_of_the_trajectory() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = playing(&model(dir.path()), &recipe("reinforce", 8), 10, || Box::new(Forgetful(0)));
    let report = stage.step().unwrap();
    for rollout in &report.rollouts {
        let played = rollout.completion.played.as_ref().unwrap();
        let places: Vec<(usize, f64)> = played.turns.iter().map(|t| (t.sequence, t.reward)).collect();
        assert_eq!(places, [(0, 1.0), (0, 2.0), (1, 3.0)]);
        assert_eq!(
            (rollout.scores.reward, rollout.scores.score),
            (Some(6.0), Some(0.5)),
            "the return sums all turns"
        );
        assert!(!rollout.completion.truncated);
    }
}

/// Was: a state that continued the text so far was recorded whole, so that records, and judges of whole episodes, read every
/// turn again at each turn after it.
#[test]
fn a_state_that_continues_the_text_is_recorded_as_what_is_new_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = playing(&model(dir.path()), &recipe("reinforce", 8), 10, || Box::new(Forgetful(0)));
    for rollout in stage.step().unwrap().rollouts {
        let played = rollout.completion.played.as_ref().unwrap();
        let observed: Vec<&str> = played.turns.iter().map(|t| t.observation.as_str()).collect();
        assert_eq!(observed[..2], ["cd", "xyz"], "the second state continued nothing");
        let [first, second, third] = &played.turns[..] else { panic!("{} turns", played.turns.len()) };
        let text = [&first.action, "cd", &second.action, "xyz", &third.action].concat();
        assert_eq!(rollout.completion.text, text);
    }
}

/// Never ends, and writes half of the model's context at each turn.
struct Endless;

impl Environment for Endless {
    fn start(&mut self) -> env::Result<String> {
        Ok(PROMPT.into())
    }
    fn step(&mut self, _action: &str) -> env::Result<Turn> {
        Ok(Turn { next: Next::Observation("x".repeat(32)), reward: 1.0, ..Default::default() })
    }
}

#[test]
fn an_episode_that_outgrows_the_context_is_cut_off_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe("reinforce", 8);
    let mut stage = stage(&model_of(dir.path(), "gpt2"), &recipe).unwrap();
    let task: Arc<dyn Task> = Arc::new(Played(|| Box::new(Endless)));
    stage.environments = Environments::new(vec![("guess".into(), task)], 1000);
    for rollout in stage.step().unwrap().rollouts {
        let played = rollout.completion.played.as_ref().unwrap();
        assert!(played.outgrown && rollout.completion.truncated && played.turns.len() < 4);
    }
    assert!(stage.warnings.take().iter().any(|w| w.name == "outgrown-episodes"));
}

#[test]
fn the_limit_of_turns_cuts_an_episode_off() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = playing(&model(dir.path()), &recipe("reinforce", 8), 2, || Box::new(Forgetful(0)));
    for rollout in stage.step().unwrap().rollouts {
        assert_eq!(rollout.completion.played.as_ref().unwrap().turns.len(), 2);
        assert!(rollout.completion.truncated);
    }
}

//! Completions whose verifier fails.

use crate::help::*;
use crate::same::bare;
use ferrl::episode::Environments;
use ferrl::reward::{Reward, Rewards};
use ferrl::search::{Figures, Record, STRATEGIES, replay};
use ferrl::verify::{Outcome, Progress, Sample, Score};
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

/// Fails where the text has a number of characters that this divides.
struct Fragile(usize);

impl Reward for Fragile {
    fn name(&self) -> &str {
        "fragile"
    }
    fn score(&self, completions: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let one = |s: &Sample<'_>| match s.completion.len().is_multiple_of(self.0) {
            true => Outcome::Lost(Error::data("the worker died")),
            false => Outcome::Scored(Score { reward: right(s.completion), ..Default::default() }),
        };
        Ok(completions.iter().map(one).collect())
    }
}

fn searched(world: &World, every: usize, how: &How) -> Result<Vec<Record>> {
    let rewards = Rewards::of(Fragile(every));
    Ok(run_in(world, (&Environments::default(), Some(&rewards)), &world.prompts(4), how)?.0)
}

/// Was: the search ended with an error where one round had one completion and its reward was lost, so that the result depended on
/// the prompts searched concurrently.
#[test]
fn a_lost_reward_ends_no_search_and_is_the_same_in_any_batch() {
    let world = World::new(1);
    for entry in STRATEGIES {
        let how = How::new(entry.name, json!({}));
        let records = searched(&world, 2, &How { at_once: 1, ..how.clone() }).unwrap();
        let want: Vec<Value> = records.iter().map(bare).collect();
        let got: Vec<Value> = searched(&world, 2, &how).unwrap().iter().map(bare).collect();
        assert_eq!(got, want, "{}", entry.name);
        let mut lost = 0;
        for n in records.iter().flat_map(|r| r.nodes.terminals()) {
            let none = n.score.is_none() && n.reward.is_none() && n.correct.is_none();
            assert_eq!(n.lost.as_deref(), none.then_some("the worker died"), "{}: {n:?}", entry.name);
            lost += usize::from(none);
        }
        assert_eq!(Figures::of(&records).lost, lost, "{}", entry.name);
        let dir = tempfile::tempdir().unwrap();
        records.iter().for_each(|r| drop(r.save(dir.path()).unwrap()));
        assert_eq!(replay(dir.path()).unwrap().records, records, "{}", entry.name);
    }
    let some = searched(&world, 2, &How::new("mcts", json!({}))).unwrap();
    assert!(Figures::of(&some).lost > 0 && some.iter().any(|r| r.correct.is_some()));
}

#[test]
fn a_verifier_that_always_fails_ends_the_search_early() {
    let error = searched(&World::new(1), 1, &How::new("mcts", json!({"simulations": 4000}))).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("none of the first 16 completions got a reward: the worker died"), "{text}");
}

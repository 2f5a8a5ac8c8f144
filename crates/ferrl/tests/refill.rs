//! Dynamic sampling: which groups a step takes, and that only the order of the prompts decides.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::find;
use ferrl::experience::{Experience, Sequence};
use serde_json::json;

/// Two answers to each prompt; `true` gives them different rewards.
fn round(groups: &[bool]) -> Experience {
    let mut sequences = Vec::new();
    for (group, &differ) in groups.iter().enumerate() {
        for answer in 0..2 {
            let reward = if differ { answer as f32 } else { 1.0 };
            let trajectory = sequences.len();
            sequences.push(Sequence {
                ids: vec![1, 2],
                trained: vec![false, true],
                group,
                trajectory,
                reward: vec![reward, 0.0],
                sampled_logp: vec![-1.0, 0.0],
                ..Default::default()
            });
        }
    }
    Experience { sequences }
}

fn groups(e: &Experience) -> Vec<usize> {
    let mut all: Vec<usize> = e.sequences.iter().map(|s| s.group).collect();
    all.dedup();
    all
}

#[test]
fn a_step_takes_the_first_groups_that_teach_in_the_order_of_the_prompts() {
    let mut algo = (find("dapo").unwrap().build)(json!({})).unwrap();
    let refill = algo.updates().refill.unwrap();
    let mut e = round(&[true, false, false, true]);
    // Half taught: two missing groups are expected among four more prompts.
    assert_eq!(refill.missing(&e, 4), Some(4));
    e.append(round(&[false, true, true, true]), 4, 8);
    assert_eq!(groups(&e), (0..8).collect::<Vec<_>>());
    assert_eq!(e.sequences.iter().map(|s| s.trajectory).collect::<Vec<_>>(), (0..16).collect::<Vec<_>>());
    assert_eq!(refill.missing(&e, 4), None);
    refill.cut(&mut e, 4);
    // Group 7 teaches too, but four came before it; those that teach nothing stay until the filter, for the metrics.
    assert_eq!(groups(&e), [0, 1, 2, 3, 4, 5, 6]);
    let metrics = algo.prepare(&mut e).unwrap().metrics;
    assert_eq!(groups(&e), [0, 3, 5, 6]);
    assert_eq!(metrics.get("dynamic_filtering_ratio"), Some(3.0 / 7.0));
}

#[test]
fn where_nothing_teaches_a_round_is_asked_again_and_nothing_is_cut() {
    let refill = (find("dapo").unwrap().build)(json!({})).unwrap().updates().refill.unwrap();
    let mut e = round(&[false; 6]);
    assert_eq!(refill.missing(&e, 6), Some(6));
    refill.cut(&mut e, 6);
    assert_eq!(groups(&e).len(), 6);
    assert_eq!(refill.rounds, 5, "and the rounds are bounded");
}

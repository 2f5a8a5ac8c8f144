//! What each expander draws.

use crate::help::*;
use ferrl::search::expand::EXPANDERS;
use ferrl_engine::train::{Batch, stats};
use serde_json::json;

#[test]
fn independent_draws_by_any_of_their_names() {
    let world = World::new(1);
    let nodes = |name: &str| {
        let how = How::new("tree", json!({"branch": [3, 2], "expander": name}));
        serde_json::to_value(
            search(&world, &world.prompts(2), &how).iter().map(|r| &r.nodes).collect::<Vec<_>>(),
        )
        .unwrap()
    };
    let iid = nodes("iid");
    assert_eq!(iid, nodes("efficient_iid"));
    assert_eq!(iid, nodes("efficient_iid_for_tree"));
    let e = run(&world, &world.prompts(1), &How::new("tree", json!({"expander": "idd"}))).err().unwrap();
    assert!(e.to_string().contains("expander=iid"), "{e}");
}

#[test]
fn below_the_last_branching_one_completion_goes_to_the_end() {
    let world = World::new(1).endless();
    let options = json!({
        "branch": [3, 3, 3, 3], "step": "", "step_tokens": 2, "expander": "iid_with_max_branching_depth",
        "branch_depth": 2,
    });
    let r = search(&world, &world.prompts(1), &How::new("tree", options)).remove(0);
    assert_eq!(r.nodes.nodes().len(), 1 + 3 + 9 + 9);
    let ends = r.nodes.nodes().iter().filter(|n| n.depth == 3);
    assert!(ends.clone().count() == 9 && ends.clone().all(|n| n.terminal && n.tokens.len() == 12 - 4));
}

#[test]
fn half_of_the_samples_use_the_high_temperature() {
    let world = World::new(1);
    let options = json!({"samples": 60, "expander": "high_low_temperature_iid", "high": 3.0, "low": 0.05});
    let r = search(&world, &world.prompts(1), &How::new("cot", options)).remove(0);
    let ends: Vec<&str> = r.nodes.terminals().map(|n| n.text.as_str()).collect();
    let distinct = |part: &[&str]| part.iter().collect::<std::collections::HashSet<_>>().len();
    let (high, low) = (distinct(&ends[..30]), distinct(&ends[30..]));
    assert!(high > 3 * low, "{high} and {low} different completions");
}

#[test]
fn draws_at_the_prompt_take_turns_among_system_messages() {
    let world = World::new(1);
    let systems = ["aaaa", "bb\n"];
    let options = json!({
        "branch": [5, 2], "step": "", "step_tokens": 3, "expander": "iid_with_different_system_message", "systems": systems,
    });
    let prompts = world.prompts(2);
    for r in search(&world, &prompts, &How::new("tree", options)) {
        let first: Vec<Option<usize>> = r.nodes.children(0).iter().map(|&c| r.nodes.node(c).system).collect();
        assert_eq!(first, [Some(0), Some(1), Some(0), Some(1), Some(0)]);
        // The probability of every whole path is that behind the prompt with its own system message.
        for end in r.nodes.terminals() {
            let system = r.nodes.path(end.id).iter().find_map(|&id| r.nodes.node(id).system).unwrap();
            let opening = world.tokenizer.encode_text(&format!("{}{}", systems[system], r.prompt)).unwrap();
            let tokens = r.nodes.tokens(end.id);
            let all =
                stats(&world.model, &Batch::of([[opening.clone(), tokens].concat()]), 1.0).unwrap().logp;
            let logp: f64 = all[opening.len() - 1..].iter().map(|l| f64::from(*l)).sum();
            let sampled = r.nodes.sampled(end.id).1;
            assert!((sampled - logp).abs() < 1e-9, "{sampled}, {logp} behind {:?}", systems[system]);
        }
    }
    let none = How::new("tree", json!({"expander": "iid_with_different_system_message"}));
    let e = run(&world, &world.prompts(1), &none).err().unwrap().to_string();
    assert!(e.contains("needs system messages"), "{e}");
}

#[test]
fn steps_too_similar_to_a_sibling_are_drawn_again() {
    let world = World::new(1);
    let how = |expander: &str| {
        let mut options = json!({"branch": [8, 1], "step_tokens": 2, "expander": expander});
        if expander != "iid" {
            (options["max_bleu"], options["tries"]) = (json!(0.5), json!(6));
        }
        search(&world, &world.prompts(4), &How::new("tree", options))
    };
    let equal = |r: &ferrl::search::Record| {
        let mut texts: Vec<&str> = r.nodes.children(0).iter().map(|&c| r.nodes.node(c).text.trim()).collect();
        let all = texts.len();
        texts.sort_unstable();
        texts.dedup();
        all - texts.len()
    };
    let plain: usize = how("iid").iter().map(equal).sum();
    let rejecting = how("bleu_rejection_sampling_iid");
    assert!(plain > 0 && rejecting.iter().map(equal).sum::<usize>() == 0, "{plain}");
    for r in &rejecting {
        let kept: u64 = r.nodes.nodes().iter().map(|n| n.tokens.len() as u64).sum();
        assert!(r.generated_tokens > kept, "rejected tokens were sampled, too");
    }
}

/// Was: only the steps of the same expansion counted as siblings, and those of progressive widening came in again.
#[test]
fn steps_of_a_later_expansion_are_compared_with_the_earlier_ones() {
    let world = World::new(1);
    let options = json!({
        "simulations": 60, "branch": 2, "widen": 1.0, "step_tokens": 4, "expander": "bleu_rejection_sampling_iid",
        "max_bleu": 0.0, "tries": 3,
    });
    let mut widened = false;
    for r in search(&world, &world.prompts(4), &How::new("mcts", options)) {
        let steps: Vec<&str> = r.nodes.steps(0).map(|c| r.nodes.node(c).text.trim()).collect();
        let mut words: Vec<&str> = steps.iter().flat_map(|s| s.split_whitespace()).collect();
        words.sort_unstable();
        // A BLEU of 0 is a word that no sibling has.
        assert!(words.windows(2).all(|w| w[0] != w[1]), "{steps:?}");
        widened |= steps.len() > 2;
    }
    assert!(widened);
}

/// Was: ten draws of each step, whatever the strategy asked for, as unscored steps counted as certain.
#[test]
fn steps_that_nothing_scores_are_as_many_as_the_strategy_asks_for() {
    let world = World::new(1).endless();
    let options = json!({
        "branch": [3, 2], "step": "", "step_tokens": 2, "expander": "confidence_interval_aware_efficient_iid",
        "ci_start": 5, "ci_max": 9,
    });
    for r in search(&world, &world.prompts(2), &How::new("tree", options)) {
        assert_eq!(r.nodes.children(0).len(), 3);
        for &step in r.nodes.children(0) {
            assert!(
                [5, 9].contains(&r.nodes.children(step).len()),
                "completions are counted by their interval"
            );
        }
    }
}

/// Was: `high` without its expander changed nothing, and nothing was said.
#[test]
fn options_of_another_expander_are_refused() {
    let world = World::new(1);
    for entry in EXPANDERS {
        for other in EXPANDERS.iter().filter(|o| o.name != entry.name) {
            for &key in other.options {
                let how = How::new("cot", json!({"expander": entry.name, key: other_value(key)}));
                let e = run(&world, &world.prompts(1), &how).err().unwrap().to_string();
                assert!(e.contains(key) && e.contains(other.name), "{}: {e}", entry.name);
            }
        }
    }
}

fn other_value(key: &str) -> serde_json::Value {
    if key == "systems" { json!(["a"]) } else { json!(1) }
}

#[test]
fn completions_are_drawn_until_their_mean_is_certain() {
    let world = World::new(1);
    let drawn = |options: serde_json::Value| {
        let mut options = options;
        options["expander"] = json!("confidence_interval_aware_efficient_iid");
        let how = How::new("cot", options);
        search(&world, &world.prompts(6), &how)
            .iter()
            .map(|r| r.nodes.terminals().count())
            .collect::<Vec<_>>()
    };
    // The mean of completions that are right sometimes is never that certain: 10, then 4 at a time, 30 at most.
    assert!(drawn(json!({})).iter().all(|n| [10, 14, 18, 22, 26, 30].contains(n)));
    assert!(drawn(json!({})).contains(&30));
    assert!(drawn(json!({"ci_width": 1.0})).iter().all(|&n| n == 10), "certain at once");
    let wide = drawn(json!({"ci_width": 0.45, "ci_start": 4, "ci_add": 2, "ci_max": 20}));
    assert!(wide.iter().all(|&n| n <= 20 && n % 2 == 0), "{wide:?}");
    let e = run(
        &world,
        &world.prompts(1),
        &How::new("cot", json!({"expander": "confidence_interval_aware_efficient_iid", "ci_start": 40})),
    )
    .err()
    .unwrap();
    assert!(e.to_string().contains("ci_max"), "{e}");
}

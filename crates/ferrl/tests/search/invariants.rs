//! Node counts, visits, values and priors.

use crate::help::*;
use ferrl::search::{Backup, Prior, Record, STRATEGIES};
use serde_json::{Value, json};

/// What must hold in any tree whose inner values are means over evaluations.
pub fn holds(r: &Record, what: &str) {
    let nodes = r.nodes.nodes();
    for n in nodes {
        let below = r.nodes.children(n.id);
        let visits: u64 = below.iter().map(|&c| nodes[c].visits).sum();
        assert_eq!(n.visits, n.evaluations + visits, "{what}: visits of node {}", n.id);
        assert!((0.0..=1.0).contains(&n.value) && n.logprob <= 0.0, "{what}: {n:?}");
        if !below.is_empty() {
            let prior: f64 = below.iter().map(|&c| nodes[c].prior).sum();
            assert!((prior - 1.0).abs() < 1e-9, "{what}: priors below {} sum to {prior}", n.id);
        }
        if n.visits > 0 && !["tree", "fishbone"].contains(&r.strategy.as_str()) {
            let sum: f64 = below.iter().map(|&c| nodes[c].value * nodes[c].visits as f64).sum();
            let mean = (n.evaluation + sum) / n.visits as f64;
            assert!((n.value - mean).abs() < 1e-9, "{what}: value of node {}", n.id);
        }
        if r.strategy == "fishbone" && below.len() > 1 {
            let ends = below[1..].iter().map(|&c| nodes[c].score.unwrap_or(0.0));
            let mean = ends.sum::<f64>() / (below.len() - 1) as f64;
            assert!((n.value - mean).abs() < 1e-9, "{what}: value of prefix {}", n.id);
        }
        if let Some(p) = n.parent {
            assert!(p < n.id && nodes[p].depth + 1 == n.depth && !nodes[p].terminal, "{what}: {n:?}");
            let own = n.estimate().zip(nodes[p].estimate()).map_or(0.0, |(own, above)| own - above);
            assert!((n.advantage - own).abs() < 1e-12, "{what}: advantage of node {}", n.id);
            let known = n.visits > 0 || n.terminal && n.score.is_some();
            assert_eq!(n.estimate().is_some(), known, "{what}: node {}", n.id);
        }
        assert_eq!(n.terminal, n.reward.is_some(), "{what}: a reward at the ends, and only there");
        assert!(!n.terminal || below.is_empty());
    }
    let result = r.nodes.node(r.answer_node.unwrap_or_else(|| panic!("{what}: no result")));
    assert!(result.terminal && (r.reward, r.correct) == (result.reward, result.correct), "{what}");
}

#[test]
fn every_strategy_ends_with_a_result_and_consistent_numbers() {
    let world = World::new(1);
    let prompts = world.prompts(3);
    for entry in STRATEGIES {
        for logp in [false, true] {
            let how = How { logp, ..How::new(entry.name, json!({})) };
            let records = search(&world, &prompts, &how);
            assert_eq!(records.len(), 3, "{}", entry.name);
            for r in &records {
                holds(r, entry.name);
                let tokens: u64 = r.nodes.nodes().iter().map(|n| n.sampled() as u64 * n.samples).sum();
                assert_eq!(r.generated_tokens, tokens, "{}: every sampled token is in the tree", entry.name);
            }
        }
    }
}

#[test]
fn simulations_are_the_root_s_visits_whatever_the_settings() {
    let world = World::new(1);
    let prompts = world.prompts(2);
    let mut draw = 0u64;
    let mut pick = |n: u64| {
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (draw >> 33) % n
    };
    for trial in 0..24 {
        let simulations = 1 + pick(40);
        let options = json!({
            "simulations": simulations, "parallel": 1 + pick(12), "branch": 1 + pick(5),
            "select": (["uct", "puct"][pick(2) as usize]), "c": ([0.0, 0.5, 2.0][pick(3) as usize]),
            "widen": ([0.0, 0.4, 1.0][pick(3) as usize]), "prior": (["logp", "count", "uniform"][pick(3) as usize]),
            "evaluate": (["rollout", "score"][pick(2) as usize]), "step_tokens": pick(4), "max_depth": 1 + pick(5),
        });
        let how = How { logp: true, seed: trial, ..How::new("mcts", options.clone()) };
        for r in search(&world, &prompts, &how) {
            holds(&r, &options.to_string());
            let rollouts = r.nodes.nodes().iter().filter(|n| n.rollout);
            assert!(rollouts.clone().all(|n| n.visits == 1 && n.terminal), "{options}");
            assert_eq!(r.nodes.node(0).visits, simulations, "{options}");
        }
    }
    let how = How::new("mcts", json!({"simulations": 10, "rollouts": 3, "max_depth": 1}));
    for r in search(&world, &prompts, &how) {
        assert_eq!(r.nodes.node(0).visits, 10, "at depth 1 every leaf is a whole completion: {:?}", r.nodes);
    }
}

#[test]
fn node_counts_follow_the_schedule() {
    let world = World::new(1).endless();
    let prompts = world.prompts(2);
    let counts = |options: Value, strategy: &'static str| {
        let records = search(&world, &prompts, &How { max_new_tokens: 8, ..How::new(strategy, options) });
        let nodes: Vec<usize> = records.iter().map(|r| r.nodes.nodes().len()).collect();
        assert!(nodes.windows(2).all(|w| w[0] == w[1]));
        nodes[0]
    };
    let step = |options: Value| {
        let mut options = options;
        (options["step"], options["step_tokens"]) = (json!(""), json!(2));
        options
    };
    // 1 + 3 + 3·2 + 3·2·1, and no more children after the list.
    assert_eq!(counts(step(json!({"branch": [3, 2, 1]})), "tree"), 1 + 3 + 6 + 6);
    assert_eq!(counts(step(json!({"branch": "4,1,1,2"})), "tree"), 1 + 4 + 4 + 4 + 8);
    assert_eq!(counts(step(json!({"branch": 2, "max_depth": 3})), "tree"), 1 + 2 + 4 + 8);
    assert_eq!(
        counts(step(json!({"branch": 2})), "tree"),
        1 + 2 + 4 + 8,
        "three levels unless said otherwise"
    );
    // Eight tokens are four steps of two: completions branch off the prompt and off three of the steps.
    assert_eq!(counts(step(json!({"branch": 5})), "fishbone"), 1 + 4 + 4 * 5);
    assert_eq!(counts(step(json!({"samples": 7})), "cot"), 1 + 7);
}

#[test]
fn a_budget_of_tokens_ends_any_search() {
    let world = World::new(1).endless();
    let prompts = world.prompts(2);
    for entry in STRATEGIES {
        let how = How { budget: Some(150), ..How::new(entry.name, json!({"step_tokens": 3})) };
        for r in search(&world, &prompts, &how) {
            holds(&r, entry.name);
            // The round that reaches it is completed: sixteen steps of three, or four completions of twelve.
            assert!(r.generated_tokens < 150 + 60, "{}: {}", entry.name, r.generated_tokens);
            let fixed = matches!(entry.name, "beam" | "tree" | "fishbone"); // end by themselves
            assert!(fixed || r.generated_tokens >= 150, "{}: {}", entry.name, r.generated_tokens);
        }
    }
}

/// Was: a step is sampled behind its prefix as behind a prompt, where the generator looks for no stop string, so that one which
/// began in the step before was missed.
#[test]
fn a_stop_string_that_spans_two_steps_ends_the_completion() {
    for (strings, step_tokens) in [(&["abb", "bbaa"][..], 2), (&["\n\n"], 3), (&["a\nb"], 1)] {
        let world = World::new(1).stopping(strings);
        let mut spanning = 0;
        for entry in STRATEGIES {
            let how = How { max_new_tokens: 24, ..How::new(entry.name, json!({"step_tokens": step_tokens})) };
            for r in search(&world, &world.prompts(3), &how) {
                // Special tokens are no part of a stop string, as where the generator looks for it.
                let text = |ids: &[u32]| world.tokenizer.decode(ids, false).unwrap();
                for n in r.nodes.nodes().iter().skip(1) {
                    let ids = r.nodes.tokens(n.id);
                    let (all, before) = (text(&ids), text(&ids[..ids.len() - 1]));
                    assert!(!strings.iter().any(|s| before.contains(s)), "{}: {all:?}", entry.name);
                    let stopped = strings.iter().find(|s| all.ends_with(*s));
                    assert!(n.terminal || stopped.is_none(), "{}: {all:?} goes on", entry.name);
                    assert_eq!(n.drawn.logp.len(), n.tokens.len());
                    spanning += usize::from(stopped.is_some_and(|s| text(&n.tokens).len() < s.len()));
                }
            }
        }
        assert!(spanning > 0, "{strings:?}");
    }
}

#[test]
fn numbers_that_contradict_each_other_are_refused() {
    let world = World::new(1);
    let r = search(&world, &world.prompts(1), &How::new("mcts", json!({}))).remove(0);
    assert_eq!(r.replayed().unwrap(), r);
    r.nodes.check(Backup::Visits, Prior::Logp).unwrap();
    let saved = serde_json::to_value(&r).unwrap();
    for (key, value) in [("visits", json!(999)), ("value", json!(0.123)), ("prior", json!(0.9))] {
        let mut wrong = saved.clone();
        wrong["nodes"][1][key] = value;
        let wrong: Record = serde_json::from_value(wrong).unwrap();
        let e = wrong.replayed().unwrap_err().to_string();
        assert!(e.contains("node") && e.contains(key), "{key}: {e}");
    }
    let mut wrong = saved.clone();
    wrong["answer_node"] = json!(0);
    let e = serde_json::from_value::<Record>(wrong).unwrap().replayed().unwrap_err().to_string();
    assert!(e.contains("result"), "{e}");
    let mut wrong = saved;
    wrong["nodes"][1]["parent"] = json!(5);
    assert!(serde_json::from_value::<Record>(wrong).is_err());
}

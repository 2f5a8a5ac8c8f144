//! Monte Carlo values against exact ones: every completion of three tokens can be enumerated.

use crate::help::*;
use ferrl::search::Record;
use ferrl_engine::train::{Batch, stats};
use serde_json::json;

const LENGTH: usize = 3;

/// The exact value of a prefix: `Σ p(token) V(prefix + token)`.
fn exact(world: &World, prompt: &[u32], so_far: &[u32]) -> f64 {
    let end = world.tokenizer.eos()[0];
    let text = || world.tokenizer.decode(so_far, true).unwrap();
    match so_far.last() {
        Some(&last) if last == end => return right(&text()),
        // Rewards see the text of a completion that was cut off.
        _ if so_far.len() == LENGTH => return right(&text()),
        _ => {}
    }
    let vocab = world.model.config.vocab as u32;
    let next = |t: u32| [prompt, so_far, &[t]].concat();
    let sequences: Vec<Vec<u32>> = (0..vocab).map(next).collect();
    let rows = sequences[0].len();
    let logp = stats(&world.model, &Batch::of(sequences), 1.0).unwrap().logp;
    (0..vocab)
        .map(|t| {
            // Of each sequence the statistics of its last token.
            let p = f64::from(logp[t as usize * rows + rows - 2]).exp();
            p * exact(world, prompt, &[so_far, &[t]].concat())
        })
        .sum()
}

fn near(what: &str, got: f64, want: f64, n: u64) {
    let error = (want * (1.0 - want) / n as f64).sqrt();
    assert!((got - want).abs() < 4.0 * error.max(1e-3), "{what}: {got}, exactly {want}, {n} samples");
}

#[test]
fn monte_carlo_values_are_those_of_the_enumerated_task() {
    let world = World::new(1);
    let prompt = world.prompt(0, "abba");
    let how = |strategy, options| How { max_new_tokens: LENGTH, ..How::new(strategy, options) };
    let root = exact(&world, &prompt.ids, &[]);
    assert!((0.05..0.95).contains(&root), "{root}: a task worth estimating");

    let cot = search(&world, std::slice::from_ref(&prompt), &how("cot", json!({"samples": 4000}))).remove(0);
    near("cot", cot.nodes.node(0).value, root, 4000);

    // Values of the prefixes of a spine: completions off the node itself, without what comes below the spine's next step.
    let options = json!({"branch": 3000, "step": "", "step_tokens": 1});
    let bones: Record = search(&world, std::slice::from_ref(&prompt), &how("fishbone", options)).remove(0);
    let mut checked = 0;
    for n in bones.nodes.nodes().iter().filter(|n| bones.nodes.children(n.id).len() > 3000) {
        let ends = bones.nodes.children(n.id).iter().map(|&c| bones.nodes.node(c)).skip(1);
        let mean = ends.map(|e| e.score.unwrap()).sum::<f64>() / 3000.0;
        assert!((n.value - mean).abs() < 1e-9, "{} is not the mean {mean} of its branches", n.value);
        near(
            &format!("prefix {:?}", n.text),
            n.value,
            exact(&world, &prompt.ids, &bones.nodes.tokens(n.id)),
            3000,
        );
        checked += 1;
    }
    assert!(checked >= 2, "{checked}");

    // Rollouts of a search's leaves estimate the value of the leaf, whatever led there.
    let options = json!({"simulations": 3000, "branch": 3, "step": "", "step_tokens": 1, "rollouts": 50, "parallel": 8});
    let tree = search(&world, std::slice::from_ref(&prompt), &how("mcts", options)).remove(0);
    let mut checked = 0;
    for n in tree.nodes.nodes() {
        let below = tree.nodes.children(n.id).iter().map(|&c| tree.nodes.node(c));
        let scores: Vec<f64> = below.filter(|c| c.rollout).filter_map(|c| c.score).collect();
        if scores.len() >= 50 {
            let mean = scores.iter().sum::<f64>() / scores.len() as f64;
            near("leaf", mean, exact(&world, &prompt.ids, &tree.nodes.tokens(n.id)), scores.len() as u64);
            checked += 1;
        }
    }
    assert!(checked >= 4, "{checked}");
}

#[test]
fn a_tree_s_inner_score_is_the_mean_of_its_children() {
    let world = World::new(1);
    for r in search(&world, &world.prompts(3), &How::new("tree", json!({"branch": [4, 3, 2]}))) {
        for n in r.nodes.nodes() {
            let below: Vec<f64> = r.nodes.children(n.id).iter().map(|&c| r.nodes.node(c).value).collect();
            if !below.is_empty() {
                let mean = below.iter().sum::<f64>() / below.len() as f64;
                assert!((n.value - mean).abs() < 1e-12);
                let sum: f64 = r.nodes.children(n.id).iter().map(|&c| r.nodes.node(c).advantage).sum();
                assert!(sum.abs() < 1e-9, "advantages of siblings sum to zero");
            } else {
                assert_eq!(n.value, n.score.unwrap());
            }
        }
    }
}

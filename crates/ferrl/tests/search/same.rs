//! The same tree whatever computes it, saved and replayed, on prefixes that are computed once.

use crate::help::*;
use ferrl::search::{Figures, Record, STRATEGIES, replay};
use serde_json::{Value, json};

/// All but the time, and what the cache had.
pub fn bare(r: &Record) -> Value {
    let mut value = serde_json::to_value(r).unwrap();
    for key in ["seconds", "shared_tokens"] {
        value.as_object_mut().unwrap().remove(key);
    }
    value
}

#[test]
fn threads_and_decode_batches_do_not_change_a_tree() {
    let (one, two) = (World::new(1), World::new(2));
    let prompts = one.prompts(5);
    for entry in STRATEGIES {
        let how = How::new(entry.name, json!({}));
        let want: Vec<Value> = search(&one, &prompts, &how).iter().map(bare).collect();
        for (world, at_once, max_sequences) in [(&two, 4, 256), (&one, 1, 256), (&two, 5, 3), (&one, 2, 1)] {
            let how = How { at_once, max_sequences, ..how.clone() };
            let got: Vec<Value> = search(world, &prompts, &how).iter().map(bare).collect();
            assert_eq!(got, want, "{}: {at_once} at once, {max_sequences} sequences", entry.name);
        }
        // A question's tree does not depend on the others.
        let alone: Vec<Value> = search(&one, &prompts[3..4], &how).iter().map(bare).collect();
        assert_eq!(alone, want[3..4], "{}", entry.name);
        let other = search(&one, &prompts, &How { seed: 6, ..how });
        assert_ne!(other.iter().map(bare).collect::<Vec<_>>(), want, "{}: the seed decides", entry.name);
    }
}

#[test]
fn the_same_for_a_given_parallel_and_another_for_another() {
    let (one, two) = (World::new(1), World::new(2));
    let prompts = one.prompts(3);
    let trees = |world: &World, parallel: usize, at_once: usize| {
        let how = How::new("mcts", json!({"simulations": 40, "parallel": parallel}));
        search(world, &prompts, &How { at_once, ..how }).iter().map(bare).collect::<Vec<_>>()
    };
    for parallel in [1, 4, 16] {
        assert_eq!(trees(&one, parallel, 3), trees(&two, parallel, 1), "parallel = {parallel}");
    }
    let tree = |v: Vec<Value>| v.into_iter().map(|r| r["nodes"].clone()).collect::<Vec<_>>();
    assert_ne!(tree(trees(&one, 1, 3)), tree(trees(&one, 16, 3)));
}

#[test]
fn saved_trees_replay_to_the_same_numbers() {
    let world = World::new(1);
    let prompts = world.prompts(4);
    for entry in STRATEGIES {
        let dir = tempfile::tempdir().unwrap();
        let records = search(&world, &prompts, &How::new(entry.name, json!({})));
        records.iter().for_each(|r| drop(r.save(dir.path()).unwrap()));
        let again = replay(dir.path()).unwrap().records;
        assert_eq!(again, records, "{}", entry.name);
        assert_eq!(Figures::of(&again), Figures::of(&records), "{}", entry.name);
        assert_eq!(replay(&dir.path().join("tree-2.json")).unwrap().records, records[2..3]);
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(replay(empty.path()).err().unwrap().to_string().contains("no saved trees"));
}

#[test]
fn prefixes_are_computed_once() {
    let world = World::new(1).endless();
    let prompts: Vec<_> = (0..2).map(|i| world.prompt(i, &"abbaab".repeat(20))).collect();
    let how = How {
        max_new_tokens: 32,
        ..How::new("fishbone", json!({"step": "", "step_tokens": 8, "branch": 9}))
    };
    let (records, usage) = run(&world, &prompts, &how).unwrap();
    for r in &records {
        // Four steps one after another, and nine completions off each prefix of 120, 128, 136 and 144 tokens.
        let prefixes = [120, 128, 136, 144];
        let all: u64 = prefixes.iter().map(|p| p + 9 * p).sum();
        assert_eq!(r.generated_tokens, 4 * 8 + 9 * (32 + 24 + 16 + 8));
        assert!(r.shared_tokens as f64 > 0.85 * all as f64, "{} of {all}", r.shared_tokens);
    }
    let shared: u64 = records.iter().map(|r| r.shared_tokens).sum();
    let generated: u64 = records.iter().map(|r| r.generated_tokens).sum();
    assert_eq!(usage.reused, shared, "what the sampler says of itself");
    // Computed rows: each prompt once, the sampled tokens, and less than a block for each request that opens a prefix.
    assert!(usage.rows < 2 * 120 + generated + 2 * 8 * 16, "{usage:?}");
}

/// Was: a character over two nodes became two replacement characters in the texts of paths that `--paths` writes.
#[test]
fn the_texts_of_a_path_join_to_the_text_of_its_tokens() {
    let world = World::of_bytes(1);
    let mut split = 0;
    for strategy in ["tree", "mcts", "fishbone"] {
        let options = json!({"step": "", "step_tokens": 1});
        for r in search(&world, &world.prompts(4), &How::new(strategy, options)) {
            for end in r.nodes.terminals() {
                let ids = r.nodes.tokens(end.id);
                let whole = world.tokenizer.decode(&ids, true).unwrap();
                assert_eq!(r.nodes.text(end.id), whole, "{strategy}: {ids:?}");
                let parts = r.nodes.path(end.id).into_iter().map(|id| &r.nodes.node(id).tokens);
                let parts: String = parts.map(|ids| world.tokenizer.decode(ids, true).unwrap()).collect();
                split += usize::from(parts != whole);
            }
        }
    }
    assert!(split > 5, "{split} paths have a character over two nodes");
}

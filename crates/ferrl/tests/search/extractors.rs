//! Extractors that ask the model for its answer in a next turn.

use crate::help::*;
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
use serde_json::json;

/// Characters of every question that an extractor asks.
const CHARS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz?:,. \n";

/// What the model replies, greedily, to a prefix and a question behind it.
fn reply(world: &World, prefix: Vec<u32>, ask: &str) -> String {
    let mut sampler = Sampler::new(&world.model, CacheOptions::default()).unwrap();
    let prompt = [prefix, world.tokenizer.encode_text(ask).unwrap()].concat();
    let params = SamplingParams { temperature: 0.0, max_new_tokens: 128, ..Default::default() };
    let request = GenerationRequest { prompt, params, stream: [0; 3] };
    let ids = sampler.generate(&world.model, vec![request]).unwrap().remove(0).ids;
    world.tokenizer.decode(&ids, true).unwrap()
}

#[test]
fn the_answer_is_the_reply_to_a_next_turn() {
    let world = World::with_chars(1, CHARS).endless();
    let prompts = [world.prompt(0, "abba")];
    let how = |options| How::new("majority", options);
    let asked = "\nWhat is the final answer? Reply with the answer alone.\n";
    let r = search(&world, &prompts, &how(json!({"samples": 3, "extractor": "next_chat_turn"}))).remove(0);
    for end in r.nodes.terminals() {
        let said = reply(&world, [prompts[0].ids.clone(), r.nodes.tokens(end.id)].concat(), asked);
        assert_eq!(end.answer.as_deref(), Some(said.trim()).filter(|s| !s.is_empty()));
    }
    assert_eq!(r.nodes.terminals().count(), 3);

    // Behind the prompt with the path's own system message.
    let systems = ["Be brief.", "Think."];
    let options = json!({
        "samples": 2, "extractor": "next_chat_turn", "expander": "iid_with_different_system_message", "systems": systems,
    });
    let r = search(&world, &prompts, &how(options)).remove(0);
    for end in r.nodes.terminals() {
        let opening = format!("{}{}", systems[end.system.unwrap()], prompts[0].text);
        let prefix = [world.tokenizer.encode_text(&opening).unwrap(), r.nodes.tokens(end.id)].concat();
        let said = reply(&world, prefix, asked);
        assert_eq!(end.answer.as_deref(), Some(said.trim()).filter(|s| !s.is_empty()), "{opening}");
    }
}

/// Was: a search ended with an error where a completion left no position for the question, or fewer than a reply may have.
#[test]
fn a_completion_that_leaves_no_room_for_a_reply_has_no_answer() {
    // The prompt has 4 tokens, the question 56: with 20 of a completion a reply has what is left of the positions.
    for (positions, room) in [(81, true), (70, false)] {
        let world = World::of_family(1, CHARS, "gpt2", positions).endless();
        let prompts = [world.prompt(0, "abba")];
        let options = json!({"samples": 2, "extractor": "next_chat_turn"});
        let how = How { max_new_tokens: 20, ..How::new("majority", options) };
        let r = search(&world, &prompts, &how).remove(0);
        let asked: u64 = r.generated_tokens - 40;
        assert_eq!(asked > 0, room, "{asked} tokens of replies");
        assert!(room || r.nodes.terminals().all(|n| n.answer.is_none()));
        assert!(r.answer_node.is_some());
    }
}

/// Was: tokens of replies were sampled and counted nowhere.
#[test]
fn replies_count_as_sampled_tokens() {
    let world = World::with_chars(1, CHARS).endless();
    let options = json!({"samples": 3, "extractor": "next_chat_turn"});
    let r = search(&world, &[world.prompt(0, "abba")], &How::new("majority", options)).remove(0);
    assert_eq!(r.generated_tokens, 3 * (12 + 128));
}

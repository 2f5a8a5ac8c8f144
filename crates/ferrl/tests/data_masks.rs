//! Every kind of example, from text and from messages: what is said and what of it is trained.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod data_help;

use data_help::{encode, encoder, row, settings, shown};
use ferrl::algo::ALGORITHMS;
use ferrl::data::prompt::PromptSettings;
use ferrl::data::schema::RowKind;
use ferrl::data::{Example, RowCounts};
use serde_json::{Value, json};

const ASK: &str = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n";

fn user() -> Value {
    json!([{ "role": "user", "content": "Hi?" }])
}
fn said(text: &str) -> Value {
    json!([{ "role": "assistant", "content": text }])
}
fn talk(text: &str) -> Value {
    json!([{ "role": "user", "content": "Hi?" }, { "role": "assistant", "content": text }])
}

/// Row, what it is for, and how it has to be shown; `{ask}` is the rendered question.
fn table() -> Vec<(Value, RowKind, &'static str)> {
    use RowKind::*;
    let yes = "{ask}⟦Yes<|im_end|>⟧";
    vec![
        (json!({ "text": "Hi? Yes" }), Sft, "H⟦i? Yes<|im_end|>⟧"),
        (json!({ "prompt": "Hi?", "response": "Yes" }), Sft, "Hi?⟦Yes<|im_end|>⟧"),
        (json!({ "prompt": "Hi?", "completion": "Yes" }), Sft, "Hi?⟦Yes<|im_end|>⟧"),
        (json!({ "messages": talk("Yes") }), Sft, yes),
        (
            json!({ "conversations": [{ "from": "human", "value": "Hi?" }, { "from": "gpt", "value": "Yes" }] }),
            Sft,
            yes,
        ),
        (json!({ "messages": user(), "response": "Yes" }), Sft, yes),
        (json!({ "prompt": user(), "completion": said("Yes") }), Sft, yes),
        (json!({ "prompt": "Hi?", "completion": said("Yes") }), Sft, yes),
        (
            json!({ "prompt": "Hi?", "chosen": "Yes", "rejected": "No" }),
            Preference,
            "chosen:   Hi?⟦Yes<|im_end|>⟧\nrejected: Hi?⟦No<|im_end|>⟧",
        ),
        (
            json!({ "chosen": "Hi? Yes", "rejected": "Hi? No" }),
            Preference,
            "chosen:   Hi?⟦ Yes<|im_end|>⟧\nrejected: Hi?⟦ No<|im_end|>⟧",
        ),
        (
            json!({ "messages": user(), "chosen": "Yes", "rejected": "No" }),
            Preference,
            "chosen:   {ask}⟦Yes<|im_end|>⟧\nrejected: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "prompt": user(), "chosen": said("Yes"), "rejected": said("No") }),
            Preference,
            "chosen:   {ask}⟦Yes<|im_end|>⟧\nrejected: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "chosen": talk("Yes"), "rejected": talk("No") }),
            Preference,
            "chosen:   {ask}⟦Yes<|im_end|>⟧\nrejected: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "prompt": "Hi?", "chosen": talk("Yes"), "rejected": talk("No") }),
            Preference,
            "chosen:   {ask}⟦Yes<|im_end|>⟧\nrejected: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "prompt": "Hi?", "initial_reason_steps": "a=1\n", "chosen": "b=2\n", "rejected": "b=3\n" }),
            StepPreference,
            "chosen:   Hi?a=1\n⟦b=2\n⟧\nrejected: Hi?a=1\n⟦b=3\n⟧",
        ),
        (
            json!({ "messages": user(), "initial_reason_steps": "", "chosen": "b", "rejected": "c" }),
            StepPreference,
            "chosen:   {ask}⟦b⟧\nrejected: {ask}⟦c⟧",
        ),
        (
            json!({ "prompt": "Hi?", "completion": "Yes", "label": true }),
            Unpaired,
            "label true: Hi?⟦Yes<|im_end|>⟧",
        ),
        (
            json!({ "prompt": user(), "completion": said("Yes"), "label": 0 }),
            Unpaired,
            "label false: {ask}⟦Yes<|im_end|>⟧",
        ),
        (json!({ "messages": talk("Yes"), "label": "True" }), Unpaired, "label true: {ask}⟦Yes<|im_end|>⟧"),
        (
            json!({ "prompt": "Hi?", "response": "Yes", "target": 0.25 }),
            Target,
            "target 0.25: Hi?⟦Yes<|im_end|>⟧",
        ),
        (json!({ "messages": talk("Yes"), "target": 1 }), Target, "target 1: {ask}⟦Yes<|im_end|>⟧"),
        (json!({ "prompt": "Hi?" }), Prompt, "Hi?"),
        (json!({ "prompt": user() }), Prompt, "{ask}"),
        (json!({ "messages": user() }), Prompt, "{ask}"),
        (
            json!({ "prompt": "Hi?", "completions": ["Yes", "No"], "rewards": [1, 0.5] }),
            Group,
            "reward 1: Hi?⟦Yes<|im_end|>⟧\nreward 0.5: Hi?⟦No<|im_end|>⟧",
        ),
        (
            json!({ "messages": user(), "completions": ["Yes", "No"], "rewards": { "right": [1, 0], "short": [0, 1] } }),
            Group,
            "right 1, short 0: {ask}⟦Yes<|im_end|>⟧\nright 0, short 1: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "prompt": user(), "completions": [said("Yes"), said("No")], "rewards": [1, 0] }),
            Group,
            "reward 1: {ask}⟦Yes<|im_end|>⟧\nreward 0: {ask}⟦No<|im_end|>⟧",
        ),
        (
            json!({ "prompt": "Hi?", "completions": ["a=1", "b=2"], "labels": [true, false] }),
            Steps,
            "labels [1.0, 0.0]: Hi?a=1⟦\n⟧b=2⟦\n⟧",
        ),
        (
            json!({ "messages": user(), "completions": ["a", "b"], "labels": [1, 0.5] }),
            Steps,
            "labels [1.0, 0.5]: {ask}a⟦\n⟧b⟦\n⟧",
        ),
    ]
}

#[test]
fn what_is_trained_for_every_schema() {
    let encoder = encoder(PromptSettings::default());
    let table = table();
    for (row, kind, expected) in &table {
        assert_eq!(shown(&encoder, row.clone(), *kind), expected.replace("{ask}", ASK), "{row}");
    }
    for kind in RowKind::ALL {
        for messages in [false, true] {
            let is = |row: &Value| row.to_string().contains("\"role\"");
            assert!(table.iter().any(|(row, w, _)| *w == kind && is(row) == messages), "{kind} {messages}");
        }
    }
}

#[test]
fn every_algorithm_is_shown_its_masks_for_text_and_for_messages() {
    let encoder = encoder(PromptSettings::default());
    for entry in ALGORITHMS {
        let kind = entry.feed.row_kind(false);
        for messages in [false, true] {
            let fits = |(row, w, _): &&(Value, RowKind, &str)| {
                *w == kind && row.to_string().contains("\"role\"") == messages
            };
            let table = table();
            let rows: Vec<_> = table.iter().filter(fits).collect();
            assert!(!rows.is_empty(), "{} has no row with messages = {messages}", entry.name);
            for (row, _, expected) in rows {
                let expected = expected.replace("{ask}", ASK);
                assert_eq!(shown(&encoder, row.clone(), kind), expected, "{}: {row}", entry.name);
                // What is trained is marked, and a prompt that is answered is never trained.
                let marked = expected.contains('⟦');
                assert_eq!(marked, kind != RowKind::Prompt, "{}: {row}", entry.name);
            }
        }
    }
}

#[test]
fn masks_have_the_length_of_the_ids_and_the_prompt_is_common() {
    let encoder = encoder(PromptSettings::default());
    let row = json!({ "messages": user(), "chosen": "Yes", "rejected": "No" });
    let Example::Pair { chosen, rejected } = encode(&encoder, row, RowKind::Preference).unwrap().example
    else {
        panic!("not a pair");
    };
    let Example::Prompt { ids } =
        encode(&encoder, json!({ "messages": user() }), RowKind::Prompt).unwrap().example
    else {
        panic!("not a prompt");
    };
    for side in [&chosen, &rejected] {
        assert_eq!(side.ids.len(), side.mask.len());
        assert!(side.ids.starts_with(&ids));
        assert!(side.mask.iter().enumerate().all(|(i, &m)| m == (i >= ids.len())));
    }
}

#[test]
fn rl2_readme_samples() {
    let encoder = encoder(PromptSettings::default());
    let ask = "<|im_start|>user\nWhat is the capital of China?<|im_end|>\n<|im_start|>assistant\n";
    let question = json!({ "role": "user", "content": "What is the capital of China?" });
    let raw = "The capital of China is";
    let answer = json!({ "role": "assistant", "content": "Beijing." });
    assert_eq!(
        shown(&encoder, json!({ "prompt": raw, "response": "Beijing." }), RowKind::Sft),
        format!("{raw}⟦Beijing.<|im_end|>⟧")
    );
    assert_eq!(
        shown(&encoder, json!({ "messages": [question, answer] }), RowKind::Sft),
        format!("{ask}⟦Beijing.<|im_end|>⟧")
    );
    assert_eq!(
        shown(
            &encoder,
            json!({ "prompt": raw, "chosen": "Beijing.", "rejected": "Shanghai." }),
            RowKind::Preference
        ),
        format!("chosen:   {raw}⟦Beijing.<|im_end|>⟧\nrejected: {raw}⟦Shanghai.<|im_end|>⟧")
    );
    let pair = format!("chosen:   {ask}⟦Beijing.<|im_end|>⟧\nrejected: {ask}⟦Shanghai.<|im_end|>⟧");
    let row = json!({ "messages": [question], "chosen": "Beijing.", "rejected": "Shanghai." });
    assert_eq!(shown(&encoder, row, RowKind::Preference), pair);
    // Its later versions write the whole conversation twice.
    let other = json!({ "role": "assistant", "content": "Shanghai." });
    let row = json!({ "chosen": [question, answer], "rejected": [question, other] });
    assert_eq!(shown(&encoder, row, RowKind::Preference), pair);
    for (row, expected) in [
        (json!({ "prompt": raw, "extra_info": { "answer": "Beijing" } }), raw),
        (json!({ "messages": [question], "extra_info": { "answer": "Beijing" } }), ask),
    ] {
        assert_eq!(shown(&encoder, row.clone(), RowKind::Prompt), expected);
        let sample = encode(&encoder, row, RowKind::Prompt).unwrap();
        assert_eq!(sample.extra["extra_info"]["answer"], "Beijing");
        assert_eq!(sample.extra.len(), 1);
    }
}

#[test]
fn many_turns_train_the_assistant_only() {
    let turns = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": "b" },
        { "role": "user", "content": "c" },
        { "role": "assistant", "content": "d" },
    ]);
    let before =
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
    let between = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n";
    let all = encoder(PromptSettings::default());
    assert_eq!(
        shown(&all, json!({ "messages": turns }), RowKind::Sft),
        format!("{before}⟦b<|im_end|>⟧{between}⟦d<|im_end|>⟧")
    );
    let last = encoder(settings(json!({ "turns": "last" })));
    assert_eq!(
        shown(&last, json!({ "messages": turns }), RowKind::Sft),
        format!("{before}b<|im_end|>{between}⟦d<|im_end|>⟧")
    );
    // An answer of several messages: what the user says within it is not trained, nor is the prompt.
    let list = turns.as_array().unwrap();
    let row = json!({ "prompt": list[..2], "completion": list[2..] });
    assert_eq!(shown(&all, row, RowKind::Sft), format!("{before}⟦b<|im_end|>⟧{between}⟦d<|im_end|>⟧"));
}

#[test]
fn markers_in_the_data_stay_text() {
    let encoder = encoder(PromptSettings::default());
    let row = json!({ "messages": [{ "role": "user", "content": "x<|im_end|>" }, { "role": "assistant", "content": "y" }] });
    let Example::Text(tokens) = encode(&encoder, row, RowKind::Sft).unwrap().example else {
        panic!("not text")
    };
    let end = encoder.tokenizer().token_id("<|im_end|>").unwrap();
    assert_eq!(tokens.ids.iter().filter(|&&id| id == end).count(), 2);
    // A raw prompt is the user's own markup; a response is not.
    let row = |response: &str| json!({ "prompt": "<|im_start|>x", "response": response });
    let Example::Text(tokens) = encode(&encoder, row("<|im_end|>y"), RowKind::Sft).unwrap().example else {
        panic!("not text")
    };
    assert_eq!(tokens.ids.len(), 2 + "<|im_end|>y".len() + 1);
    // At the end of a response it is the end itself, and learned once.
    assert_eq!(shown(&encoder, row("y<|im_end|>"), RowKind::Sft), "<|im_start|>x⟦y<|im_end|>⟧");
    let talk = json!({ "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": "y<|im_end|>\n" }] });
    assert!(shown(&encoder, talk, RowKind::Sft).ends_with("assistant\n⟦y<|im_end|>⟧"));
}

/// Was: the characters of a special token's name were trained without a word, where TRL trains the token.
#[test]
fn names_of_special_tokens_in_responses_are_counted() {
    let encoder = encoder(PromptSettings::default());
    let counts = |value: Value| {
        let mut counts = RowCounts::default();
        encoder.encode(&row(value), RowKind::Sft, "rows.jsonl:1", &mut counts).unwrap().unwrap();
        (counts.spelled, counts.ended)
    };
    assert_eq!(counts(json!({ "prompt": "Hi? ", "response": "a<|im_end|>b" })), (1, 0));
    assert_eq!(counts(json!({ "messages": talk("a<|im_start|>b") })), (1, 0));
    assert_eq!(
        counts(json!({ "messages": talk("b<|im_end|>") })),
        (0, 1),
        "the end has a warning of its own"
    );
    assert_eq!(counts(json!({ "messages": talk("plain") })), (0, 0));
}

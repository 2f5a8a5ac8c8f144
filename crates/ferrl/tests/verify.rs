//! The small verifiers, through the registry.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::option_keys;
use ferrl::verify::{Sample, VERIFIERS, build};
use serde_json::{Value, json};

fn reward(name: &str, options: Value, completion: &str, columns: Value) -> f64 {
    let verifier = build(name, options.as_object().unwrap()).unwrap();
    let columns = columns.as_object().unwrap();
    verifier
        .score(&Sample { id: 3, completion, columns: columns.into(), ..Default::default() })
        .unwrap()
        .reward
}

#[test]
fn exact_compares_texts() {
    let row = || json!({"answer": " The  Cat. "});
    let exact = |options: Value, text: &str| reward("exact", options, text, row());
    assert_eq!(exact(json!({}), "The Cat.\n"), 1.0);
    assert_eq!(exact(json!({}), "the cat."), 0.0);
    assert_eq!(exact(json!({"ignore_case": true, "ignore_punctuation": true}), "the cat"), 1.0);
    assert_eq!(exact(json!({"take": "answer"}), "x <answer>The Cat.</answer> y"), 1.0);
    assert_eq!(exact(json!({"take": "answer"}), "The Cat."), 0.0);
    assert_eq!(exact(json!({"take": "last_line"}), "I think\nThe Cat.\n\n"), 1.0);
    assert_eq!(reward("exact", json!({}), "b", json!({"answer": ["a", "b"]})), 1.0);
    assert_eq!(reward("exact", json!({"column": "x.y"}), "4", json!({"x": {"y": 4}})), 1.0);
    assert_eq!(reward("exact", json!({}), "", json!({"answer": ""})), 0.0, "nothing earns nothing");
}

/// Exact match of question answering: SQuAD's normalisation, any of several answers.
#[test]
fn exact_matches_as_question_answering_does() {
    let exact = |text: &str, gold: Value| {
        reward("exact", json!({"normalize": "squad", "take": "auto"}), text, json!({ "answer": gold }))
    };
    assert_eq!(exact("the Cat", json!("A cat!")), 1.0);
    assert_eq!(exact("so <answer>Cat</answer>", json!(["dog", "The cat"])), 1.0);
    assert_eq!(exact("cat and dog", json!("cat")), 0.0);
    assert_eq!(exact("Denver", json!({"text": ["Denver", "Broncos"]})), 1.0);
    assert_eq!(exact("", json!("the")), 0.0, "nothing earns nothing");
}

#[test]
fn numeric_compares_final_numbers() {
    let row = || json!({"answer": "48/2 = <<48/2=24>>24 more. In all 72.\n#### 1,072"});
    let numeric = |options: Value, text: &str| reward("numeric", options, text, row());
    assert_eq!(numeric(json!({}), "so it is $1,072.00."), 1.0);
    assert_eq!(numeric(json!({}), "#### 1072 dollars\nor 5"), 1.0);
    assert_eq!(numeric(json!({}), "1072 or 1073"), 0.0);
    assert_eq!(numeric(json!({"take": "hashes"}), "it is 1072"), 0.0);
    assert_eq!(numeric(json!({"take": "answer"}), "<answer>1072</answer> 5"), 1.0);
    assert_eq!(numeric(json!({"tolerance": 0.5}), "1072.4"), 1.0);
    assert_eq!(numeric(json!({}), "1072.0000000000000000000001"), 0.0, "exact beyond floating point");
    assert_eq!(numeric(json!({}), "no number"), 0.0);
    assert_eq!(reward("numeric", json!({}), "-0.50", json!({"answer": -0.5})), 1.0);
}

#[test]
fn regex_and_length_shape() {
    let think = || json!({"pattern": "<think>.*</think>\\s*<answer>.*</answer>"});
    let none = || json!({});
    assert_eq!(reward("regex", think(), "<think>a\nb</think>\n<answer>1</answer>\n", none()), 1.0);
    assert_eq!(reward("regex", think(), "oh <think></think><answer></answer>", none()), 0.0);
    assert_eq!(reward("regex", json!({"pattern": "b", "whole": false}), "abc", none()), 1.0);
    assert_eq!(reward("regex", json!({"pattern": "(a*)*b"}), &"a".repeat(100_000), none()), 0.0);
    let tokens = |n: u64| reward("length", json!({"max": 100}), "", json!({"completion_tokens": n}));
    assert_eq!([tokens(80), tokens(90), tokens(100)], [0.0, -0.5, -1.0]);
}

#[test]
fn wrong_options_are_refused_with_a_hint() {
    for (name, options, part) in [
        ("exact", json!({"colum": "a"}), "did you mean \"column\"?"),
        ("exact", json!({"take": "lastline"}), "take = \"last_line\""),
        ("exact", json!({"ignore_case": 1}), "true or false"),
        ("numeric", json!({"tolerance": -1}), "at least 0"),
        ("regex", json!({}), "\"pattern\" is missing"),
        ("regex", json!({"pattern": "a)(b"}), "a)(b"),
        ("length", json!({}), "\"max\" is missing"),
        ("length", json!({"max": 10, "cache": 11}), "more than max"),
        ("countdown", json!({"format": "thinkanswer"}), "format = \"think_answer\""),
        ("countdown", json!({"correct_reward": "x"}), "a number"),
        ("python", json!({}), "\"file\" is missing"),
        ("python", json!({"file": "a.py", "worker": 2}), "did you mean \"workers\"?"),
        ("python", json!({"file": "a.py", "workers": 100000}), "from 1 to 256"),
        (
            "python",
            json!({"file": "a.py", "function": "f", "functions": ["g"]}),
            "both function and functions",
        ),
    ] {
        let error = build(name, options.as_object().unwrap()).err().unwrap().to_string();
        assert!(error.contains(part), "{name}: {error}");
    }
}

#[test]
fn the_registry_describes_itself() {
    for entry in VERIFIERS {
        assert!(!entry.about.is_empty() && entry.about.len() < 90, "{}", entry.name);
        assert!(option_keys(entry.schema, "").iter().all(|k| !k.about.is_empty()), "{}", entry.name);
        assert_eq!(VERIFIERS.iter().filter(|e| e.name == entry.name).count(), 1);
    }
    let column = json!({"anser": 3});
    let verifier = build("exact", &Default::default()).unwrap();
    let columns = column.as_object().unwrap();
    let error = verifier
        .score(&Sample { id: 3, columns: columns.into(), ..Default::default() })
        .unwrap_err()
        .to_string();
    assert!(error.contains("rollout 3") && error.contains("anser"), "{error}");
}

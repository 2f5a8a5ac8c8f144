//! `ferrl verify` and `ferrl data steps`.

use crate::common::*;
use ferrl::verify::VERIFIERS;
use serde_json::{Value, json};

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// A verifier, its options, a row that earns all, one that earns nothing.
type Case = (&'static str, Vec<&'static str>, Value, Value);

/// Every verifier that needs no process and no tokenizer.
fn cases() -> Vec<Case> {
    vec![
        (
            "countdown",
            vec![],
            json!({"completion": "<answer>1+2</answer>", "nums": [1, 2], "target": 3}),
            json!({"completion": "3", "nums": [1, 2], "target": 3}),
        ),
        (
            "chain",
            vec![],
            json!({"completion": "7+5=12", "terms": [7, 5]}),
            json!({"completion": "7+5=13", "terms": [7, 5]}),
        ),
        (
            "calibration",
            vec!["rule=brier", "constant=0", "lambda=0"],
            json!({"completion": "red 100%", "answer": "red"}),
            json!({"completion": "no idea", "answer": "red"}),
        ),
        (
            "exact",
            vec![],
            json!({"completion": "a", "answer": "a"}),
            json!({"completion": "b", "answer": "a"}),
        ),
        (
            "f1",
            vec![],
            json!({"completion": "The cat", "answer": ["dog", "cat"]}),
            json!({"completion": "x", "answer": "cat"}),
        ),
        (
            "choice",
            vec![],
            json!({"completion": "The answer is (B).", "answer": "B"}),
            json!({"completion": "(A)", "answer": "B"}),
        ),
        (
            "numeric",
            vec![],
            json!({"completion": "#### 4", "answer": 4}),
            json!({"completion": "5", "answer": 4}),
        ),
        (
            "gsm8k",
            vec![],
            json!({"completion": "#### 4", "answer": "2+2=<<2+2=4>>4\n#### 4"}),
            json!({"completion": "5", "answer": "#### 4"}),
        ),
        (
            "math",
            vec!["take=whole"],
            json!({"completion": "1/2", "answer": "0.5"}),
            json!({"completion": "2", "answer": "0.5"}),
        ),
        (
            "json",
            vec!["schema={\"type\": \"object\"}"],
            json!({"completion": "{}"}),
            json!({"completion": "[]"}),
        ),
        (
            "format",
            vec![],
            json!({"completion": "<think>a</think><answer>b</answer>"}),
            json!({"completion": "b"}),
        ),
        ("regex", vec!["pattern=a+"], json!({"completion": "aa"}), json!({"completion": "b"})),
        (
            "length",
            vec!["mode=exact", "target=3"],
            json!({"completion": "a", "completion_tokens": 3}),
            json!({"completion": "a", "completion_tokens": 9}),
        ),
    ]
}

#[test]
fn every_verifier_grades_a_file() {
    let known: Vec<&str> = cases().iter().map(|c| c.0).collect();
    // What runs programs has tests of its own.
    let others: Vec<&str> = VERIFIERS
        .iter()
        .map(|v| v.name)
        .filter(|n| !known.contains(n) && !["python", "code"].contains(n))
        .collect();
    assert!(others.is_empty(), "no case for {others:?}");
    for (name, options, right, wrong) in cases() {
        let mut args = vec!["verify", name, "--input", "-"];
        options.iter().for_each(|o| args.extend(["--option", *o]));
        let out = ferrl(&args, &lines(&[right, wrong, json!({"completion": 3})]));
        let got = rows(&String::from_utf8_lossy(&out.stdout));
        let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(keys(&got[0]), "reward components score extracted why micros", "{name}");
        assert_eq!(keys(&got[2]), "reward error micros", "{name}");
        let full = if name == "length" { 0.0 } else { 1.0 };
        assert_eq!((got[0]["reward"].as_f64(), &got[0]["why"]), (Some(full), &Value::Null), "{name}");
        assert!(
            got[1]["reward"].as_f64().unwrap() < full && got[0]["micros"].as_f64().unwrap() >= 0.0,
            "{name}"
        );
        assert!(got[1]["why"].is_string(), "{name}: {}", got[1]);
        assert!(
            got[2]["reward"].is_null() && got[2]["error"].as_str().unwrap().contains("completion"),
            "{name}"
        );
        let last = String::from_utf8_lossy(&out.stderr).trim_end().lines().last().unwrap().to_string();
        assert!(last.starts_with("3 rows, 2 scored, mean reward"), "{name}: {last}");
    }
}

#[test]
fn threads_change_nothing_but_the_time() {
    let row = |i: usize| json!({"completion": format!("\\boxed{{{}/{}}}", i, i + 1), "answer": format!("{}/{}", i % 7, i % 7 + 1)});
    let input = lines(&(0..200).map(row).collect::<Vec<_>>());
    let graded = |threads: &str| {
        let out = ok_with(&["verify", "math", "--input", "-", "--threads", threads], &input);
        let mut rows = rows(&out);
        rows.iter_mut().for_each(|row| drop(row.as_object_mut().unwrap().remove("micros")));
        rows
    };
    assert_eq!(graded("1"), graded("3"));
    assert_eq!(graded("2").len(), 200);
}

#[test]
fn the_extracted_answer_is_shown() {
    let input = lines(&[
        json!({"completion": "It is London.", "answer": "B", "choices": ["Paris", "London"]}),
        json!({"completion": "I do not know", "answer": "B", "choices": ["Paris", "London"]}),
    ]);
    let got = rows(&ok_with(&["verify", "choice", "--input", "-"], &input));
    assert_eq!([&got[0]["extracted"], &got[1]["extracted"]], [&json!("B"), &Value::Null]);
    assert_eq!(got[1]["why"], "no answer was found in it");
    let schema = r#"schema={"required": ["a"]}"#;
    let got = rows(&ok_with(
        &["verify", "json", "--input", "-", "--option", schema],
        &lines(&[json!({"completion": "so {\"b\": 1}"})]),
    ));
    assert_eq!(
        (&got[0]["extracted"], &got[0]["why"]),
        (&json!("{\"b\": 1}"), &json!("the answer has no \"a\""))
    );
}

#[test]
fn steps_join_to_the_text() {
    let gsm8k = "Tom has 3 apples.\nHe eats 1, so 3 - 1 = <<3-1=2>>2 are left.\n#### 2";
    let math = "Let $x = 2.$ Then we compute the value of the square, which is $x^2 = 4,$ and we are done.\n\nTherefore the answer is $\\boxed{4}.$";
    for (kind, text, least) in [("gsm8k", gsm8k, 2), ("math", math, 3)] {
        let input = lines(&[json!({"text": text, "id": 7}), json!({"text": ""})]);
        let got = rows(&ok_with(&["data", "steps", "--kind", kind, "--input", "-"], &input));
        let steps: Vec<&str> =
            got[0]["steps"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
        assert_eq!(steps.concat(), text);
        assert!(steps.len() >= least, "{steps:?}");
        assert_eq!((&got[0]["id"], &got[1]["steps"]), (&json!(7), &json!([])));
    }
}

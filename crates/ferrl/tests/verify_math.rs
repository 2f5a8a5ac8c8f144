//! Mathematical equality, through the registry.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::verify::{Sample, Verifier, build};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn math(options: Value) -> Box<dyn Verifier> {
    build("math", options.as_object().unwrap()).unwrap()
}

fn grade(verifier: &dyn Verifier, gold: Value, completion: &str) -> f64 {
    let row = json!({"answer": gold});
    let columns = row.as_object().unwrap().into();
    verifier.score(&Sample { id: 3, completion, columns, ..Default::default() }).unwrap().reward
}

/// Gold, answer and whether they are equal, from the fixture.
fn pairs() -> Vec<(&'static str, &'static str, bool)> {
    let text = include_str!("fixtures/verify/math_pairs.txt");
    let pair = |line: &'static str| match line.split_once("  ===  ") {
        Some((gold, answer)) => Some((gold, answer, true)),
        None => line.split_once("  =/=  ").map(|(gold, answer)| (gold, answer, false)),
    };
    text.lines().filter_map(pair).collect()
}

#[test]
fn pairs_of_every_kind_are_told_apart() {
    let verifier = math(json!({"take": "whole"}));
    let wrong: Vec<String> = pairs()
        .into_iter()
        .filter(|(gold, answer, equal)| (grade(&*verifier, json!(gold), answer) == 1.0) != *equal)
        .map(|(gold, answer, equal)| format!("{gold}  |  {answer}  should be {equal}"))
        .collect();
    assert!(pairs().len() > 1_500);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn completions_are_graded_by_the_answer_they_give() {
    let verifier = math(json!({}));
    for line in include_str!("fixtures/verify/math_completions.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let completion = row["completion"].as_str().unwrap();
        let reward = grade(&*verifier, row["answer"].clone(), completion);
        assert_eq!(reward == 1.0, row["equal"], "{line}: took {:?}", verifier.extract(completion));
    }
}

#[test]
fn a_box_around_an_answer_changes_no_verdict() {
    let (bare, boxed) = (math(json!({"take": "whole"})), math(json!({})));
    // Brackets that do not close, texts with boxes and percent signs behind the box are read by other rules.
    let plain = |text: &str| !text.contains(['$', '#', '%']) && !text.contains("box");
    for (gold, answer, _) in pairs() {
        let balanced = answer.matches('{').count() == answer.matches('}').count();
        if !(plain(gold) && plain(answer) && balanced) {
            continue;
        }
        let completion = format!("We get 17, and so \\[x = \\boxed{{{answer}}}.\\]");
        let want = grade(&*bare, json!(gold), answer);
        assert_eq!(grade(&*boxed, json!(gold), &completion), want, "{gold}  |  {answer}");
    }
}

#[test]
fn the_answer_is_found_where_it_stands() {
    for (take, completion, want) in [
        ("auto", "Thus $x = \\boxed{\\frac{3}{4}}$ as claimed in step 2.", Some("\\frac{3}{4}")),
        ("auto", "\\boxed{1}? No. \\boxed{2}", Some("2")),
        ("auto", "<think>maybe \\boxed{9}</think> It is \\boxed{8}.", Some("8")),
        ("auto", "<answer>x = 4</answer>", Some("x = 4")),
        ("auto", "5 * 3 = 15\n#### 15", Some("15")),
        ("auto", "The final answer is $\\sqrt{2}$.", Some("$\\sqrt{2}$")),
        ("auto", "She has 3 left, so she pays $12.50.", Some("12.50")),
        ("auto", "\\frac{1}{2}", Some("\\frac{1}{2}")),
        ("auto", "I do not know how one would even begin to solve this.", None),
        ("boxed", "The answer is 7.", None),
        ("answer", "7 <answer>8</answer>", Some("8")),
        ("hashes", "7 #### 8\n9", Some("8")),
        ("last", "either $3$ or $4$", Some("$4$")),
        ("whole", " 3 or 4 ", Some("3 or 4")),
    ] {
        let found = math(json!({"take": take})).extract(completion);
        assert_eq!(found.as_deref(), want, "{take}: {completion}");
    }
}

#[test]
fn the_expected_answer_may_be_a_solution_a_number_or_any_of_several() {
    let verifier = math(json!({}));
    for gold in [
        json!("We add: $\\boxed{\\frac12}$."),
        json!("half of it\n#### 0.5"),
        json!(0.5),
        json!(["1/3", "\\frac{1}{2}"]),
    ] {
        assert_eq!(grade(&*verifier, gold.clone(), "so \\boxed{1/2}"), 1.0, "{gold}");
        assert_eq!(grade(&*verifier, gold.clone(), "so \\boxed{2}"), 0.0, "{gold}");
        assert_eq!(grade(&*verifier, gold.clone(), "no idea at all"), 0.0, "{gold}");
    }
    for bad in [json!(null), json!(""), json!([]), json!({"a": 1})] {
        let row = json!({"answer": bad});
        let columns = row.as_object().unwrap().into();
        let sample = Sample { id: 3, completion: "1", columns, ..Default::default() };
        let error = verifier.score(&sample).unwrap_err().to_string();
        assert!(error.contains("\"answer\"") && error.contains("rollout 3"), "{error}");
    }
}

#[test]
fn an_unknown_mode_is_refused_with_the_known_ones() {
    let options = json!({"mode": "hendryks"});
    let error = build("math", options.as_object().unwrap()).err().unwrap().to_string();
    assert!(error.contains("mode = \"hendrycks\"") && error.contains("math_verify"), "{error}");
}

/// Where known graders differ from each other and from mathematics.
#[test]
fn modes_judge_as_the_graders_they_are_named_after() {
    const MODES: [&str; 5] = ["equal", "hendrycks", "prm800k", "minerva", "math_verify"];
    for (gold, answer, verdicts) in [
        ("\\frac{1}{2}", "\\frac12", [1, 1, 1, 1, 1]),
        ("\\frac{1}{2}", "1/2", [1, 1, 1, 1, 1]),
        ("\\frac{3}{5}", "0.6", [1, 0, 1, 1, 1]),
        ("7,200", "7200", [1, 0, 1, 1, 1]),
        ("x^2+2x+1", "(x+1)^2", [1, 0, 1, 1, 1]),
        ("2\\sqrt{3}", "\\sqrt{12}", [1, 0, 1, 1, 1]),
        // VinePPO's Minerva takes a hundredth and a hundredfold, and any brackets.
        ("3", "300", [0, 0, 0, 1, 0]),
        ("(0,9)", "[0,9)", [0, 0, 0, 1, 0]),
        ("1.5", "1.5004", [0, 0, 0, 1, 0]),
        // Six decimals are enough for Math-Verify.
        ("\\frac{1}{3^{40}}", "\\frac{1}{3^{41}}", [0, 0, 0, 0, 1]),
        ("12\\text{ cm}", "12", [1, 1, 1, 1, 1]),
        ("5", "6", [0, 0, 0, 0, 0]),
    ] {
        let got = MODES.map(|mode| {
            let verifier = math(json!({"mode": mode, "take": "whole"}));
            grade(&*verifier, json!(gold), answer) as i32
        });
        assert_eq!(got, verdicts, "{gold}  |  {answer}: {MODES:?}");
    }
}

#[test]
fn minerva_splits_answers_where_the_problem_asks_for_commas() {
    let row = json!({"answer": "1,2"});
    let reward = |prompt: &str| {
        let columns = row.as_object().unwrap().into();
        let sample = Sample { prompt, completion: "\\boxed{2,1}", columns, ..Default::default() };
        math(json!({"mode": "minerva"})).score(&sample).unwrap().reward
    };
    assert_eq!(reward("List the roots, separated by commas."), 1.0);
    assert_eq!(reward("List the roots."), 0.0);
}

/// What would keep a computer algebra system busy for hours, or would run as code in it.
#[test]
fn no_answer_hangs_or_runs() {
    let verifier = math(json!({"take": "whole"}));
    let deep = |open: &str, close: &str| format!("{}1{}", open.repeat(900), close.repeat(900));
    let marker = std::env::temp_dir().join(format!("ferrl-math-{}", std::process::id()));
    let hostile = [
        "9^{9^{9^{9}}}".to_string(),
        "99999999999!".to_string(),
        "\\sum_{k=1}^{10^{12}} \\frac{1}{k}".to_string(),
        "(x+1)^{100000}".to_string(),
        "\\int_0^{\\infty} e^{-x^2} \\sin(x^3) dx".to_string(),
        deep("(", ")"),
        deep("\\frac{1}{1+", "}"),
        deep("\\sqrt{", "}"),
        "1+".repeat(50_000),
        "2^".repeat(3_000),
        format!("__import__('os').system('touch {}')", marker.display()),
        format!("[open('{}', 'w'), 2]", marker.display()),
    ];
    let start = Instant::now();
    for text in &hostile {
        for gold in ["2", "x^2+1", "(1,2)", "\\sqrt{2}", text] {
            let equal = grade(&*verifier, json!(gold), text) == 1.0;
            assert_eq!(equal, gold == text, "{}", &text[..text.len().min(60)]);
        }
    }
    // A generous bound, for builds without optimisation on busy machines; a hang is what it finds.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert!(!marker.exists(), "an answer was run");
}

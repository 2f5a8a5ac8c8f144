//! Countdown: the judge against tricky answers, the puzzles and their split.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::verify::countdown::expression::{CountdownExpr, CountdownOp};
use ferrl::verify::countdown::{
    AnswerFormat, CountdownOptions, CountdownVerdict, DemonstrationOptions, PuzzleSplit, demonstrate,
    generate, held_out, judge,
};
use ferrl::verify::{Sample, Score, build};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

use CountdownVerdict::{Malformed, Right, Wrong};

/// Answers that must not be right for the numbers 3, 5, 5, 20 and the target 40.
const ANSWERS: &[(&str, CountdownVerdict)] = &[
    ("20+5*5-3-2", Wrong),
    ("(20-5-3)*5", Wrong),
    ("5*20-5*3", Wrong),
    ("20*3-5*5", Wrong),
    ("20+5+5+3", Wrong),
    ("", Malformed),
    ("   ", Malformed),
    ("()", Malformed),
    ("(20+5", Malformed),
    ("20+5)", Malformed),
    ("20 5 5 3", Malformed),
    ("20(5)", Malformed),
    ("(20)(5)", Malformed),
    ("20**5", Malformed),
    ("20//5", Malformed),
    ("20%5", Malformed),
    ("20^5", Malformed),
    ("20--5", Malformed),
    ("20-(-5)", Malformed),
    ("-5+20", Malformed),
    ("+20", Malformed),
    ("20+", Malformed),
    ("*20", Malformed),
    ("1e3", Malformed),
    ("0x14", Malformed),
    ("2_0", Malformed),
    ("20.0", Malformed),
    ("1,000", Malformed),
    ("020", Malformed),
    ("20 # a comment", Malformed),
    ("20 /* five */ +5", Malformed),
    ("٢٠+٥", Malformed),
    ("２０+５", Malformed),
    ("²", Malformed),
    ("x", Malformed),
    ("abs(20)", Malformed),
    ("__import__('os')", Malformed),
    ("20;5", Malformed),
    ("[20]", Malformed),
    ("{20}", Malformed),
    ("20\0+5", Malformed),
    ("20==20", Malformed),
    ("20=5=5", Malformed),
    ("=40", Malformed),
    ("40=", Malformed),
    ("20+5=forty", Malformed),
    ("20+5=2*20", Malformed),
    ("99999999999999999999", Malformed),
    ("\\frac{20}{5}", Malformed),
    ("20+5\\times 5", Malformed),
    ("True", Malformed),
    ("40", Wrong),
    ("40=40", Wrong),
    ("20/(5-5)", Wrong),
    ("20/(5-5)+3", Wrong),
    ("5*(5+3)", Wrong),
    ("5*(5+3)+20-20", Wrong),
    ("5*5+5+5+5", Wrong),
    ("20+20", Wrong),
    ("355+20", Wrong),
    ("3*5*5*20", Wrong),
    ("9223372036854775807*9223372036854775807*9223372036854775807", Wrong),
];

#[test]
fn adversarial_answers_get_no_reward() {
    let numbers = [3, 5, 5, 20];
    assert!(ANSWERS.len() >= 60, "{}", ANSWERS.len());
    for (answer, want) in ANSWERS {
        assert_eq!(judge(answer, &numbers, 40, true), *want, "{answer:?}");
    }
}

#[test]
fn equivalent_notations_of_a_right_answer_are_correct() {
    let numbers = [3, 5, 5, 20];
    for (answer, target) in [
        ("20+5*5-3", 42),
        (" ( 20 + 5 * 5 ) - 3 ", 42),
        ("20+5*5-3=42", 42),
        ("20+5*5-3 = 42", 42),
        ("20+5×5−3", 42),
        ("((((20+5*5-3))))", 42),
        ("5*5+20-3", 42),
        ("3-20-5-5", -27),
        ("3-20-5-5 = -27", -27),
        ("20÷5+5*3", 19),
        ("20/(5/3)+5", 17),
        ("20\n+5*5\n-3", 42),
    ] {
        assert_eq!(judge(answer, &numbers, target, true), Right, "{answer:?}");
        assert_eq!(judge(answer, &numbers, target + 1, true), Wrong, "{answer:?}");
    }
    assert_eq!(judge("20+5*5-3=41", &numbers, 42, true), Wrong, "a false claim");
    // The number check is one of multisets, not of members.
    assert_eq!(judge("3*3+5", &[3, 5, 5], 14, true), Wrong);
    assert_eq!(judge("3*3+5", &[3, 5, 5], 14, false), Wrong);
    // At most once.
    assert_eq!(judge("20*(5-3)", &numbers, 40, false), Right);
    assert_eq!(judge("20*(5-3)", &numbers, 40, true), Wrong);
    assert_eq!(judge("12", &[1, 2], 12, false), Wrong, "digits run together");
    assert_eq!(judge("8/(3-8/3)", &[3, 3, 8, 8], 24, true), Right, "through fractions");
}

fn score(options: Value, completion: &str) -> Score {
    let verifier = build("countdown", options.as_object().unwrap()).unwrap();
    let columns = json!({"nums": [3, 5, 5, 20], "target": 42});
    let columns = columns.as_object().unwrap();
    verifier.score(&Sample { completion, columns: columns.into(), ..Default::default() }).unwrap()
}

/// Whose answer counts, and what a wrong one is worth, by the table of their graders.
#[test]
fn modes_give_the_verdicts_of_other_graders() {
    let right = "<answer>20+5*5-3</answer>";
    let wrong = "<answer>20+5</answer>";
    for (completion, last, first, tinyzero) in [
        (right.to_string(), 1.0, 1.0, 1.0),
        (format!("{wrong} {right}"), 1.0, 0.1, 1.0),
        (format!("{right} {wrong}"), 0.1, 1.0, 0.1),
        (format!("{right}\nand that is it"), 1.0, 1.0, 0.0),
        (format!("{wrong}\n{right}"), 1.0, 0.1, 1.0),
        ("<answer>20+5*5\n-3</answer>".to_string(), 1.0, 0.0, 0.0),
        ("<answer>no idea</answer>".to_string(), 0.0, 0.1, 0.1),
        ("<answer>20+5*5-3 = 42</answer>".to_string(), 1.0, 0.1, 0.1),
        ("<answer>2**9**9**9</answer>".to_string(), 0.0, 0.1, 0.1),
        ("20+5*5-3".to_string(), 0.0, 0.0, 0.0),
    ] {
        let got = ["last", "first", "tinyzero"].map(|mode| score(json!({"mode": mode}), &completion).reward);
        assert_eq!(got, [last, first, tinyzero], "{completion}");
    }
    assert_eq!(score(json!({"mode": "first"}), wrong).score, Some(0.0));
}

#[test]
fn formats_extract_the_answer_or_none() {
    let right = "20+5*5-3";
    let reward = |format: &str, completion: &str| score(json!({"format": format}), completion).reward;
    for (format, completion, want) in [
        ("answer", "so <answer>20+5*5-3</answer>", 1.0),
        ("answer", "<answer>20+5*5-3 = 42</answer>\n", 1.0),
        ("answer", "<answer>1+1</answer><answer>20+5*5-3</answer>", 1.0),
        ("answer", "<answer>20+5*5-3</answer><answer>1+1</answer>", 0.1),
        ("answer", "<answer>20+5*5-3", 0.0),
        ("answer", right, 0.0),
        ("answer", "<answer>the answer is 20+5*5-3</answer>", 0.0),
        ("answer", "<ANSWER>20+5*5-3</ANSWER>", 0.0),
        ("think_answer", "<think>hm</think><answer>20+5*5-3</answer>", 1.0),
        ("think_answer", "begun before</think>\n<answer>20+5*5-3</answer>\n", 1.0),
        ("think_answer", "<think>hm</think><answer>20+5*5</answer>", 0.1),
        ("think_answer", "<answer>20+5*5-3</answer>", 0.0),
        ("think_answer", "<think></think><answer>20+5*5-3</answer>", 0.0),
        ("think_answer", "<think>hm</think><answer>20+5*5-3</answer> done", 0.0),
        ("think_answer", "<think>a</think><answer>1</answer><answer>20+5*5-3</answer>", 0.0),
        ("think_answer", "<think>a<think>b</think><answer>20+5*5-3</answer>", 0.0),
        ("plain", "20+5*5-3", 1.0),
        ("plain", " 20+5*5-3=42\n", 1.0),
        ("plain", "1+1\nthen 20+5*5-3", 0.0),
        ("line", "20+5+5+3=33\n20+5*5-3\n", 1.0),
        ("line", "20+5*5-3\n20+5+5+3", 0.1),
    ] {
        assert_eq!(reward(format, completion), want, "{format}: {completion}");
    }
    let both = |s: Score| s.components.into_iter().map(|(_, v)| v).collect::<Vec<_>>();
    assert_eq!(both(score(json!({}), "<answer>20+5*5-3</answer>")), [1.0, 1.0]);
    assert_eq!(both(score(json!({}), "<answer>20</answer>")), [0.0, 1.0]);
    assert_eq!(score(json!({"format_reward": 0.0}), "<answer>20</answer>").reward, 0.0);
    // Size alone breaks nothing.
    for huge in ["<answer>".repeat(200_000), "(".repeat(1_000_000), "<answer>1</answer>".repeat(100_000)] {
        assert!(reward("answer", &huge) <= 0.1 && reward("think_answer", &huge) == 0.0);
    }
    assert_eq!(reward("answer", &format!("<answer>{}</answer>", "(".repeat(500_000))), 0.0);
    assert_eq!(reward("plain", &"1+".repeat(500_000)), 0.0);
}

#[test]
fn columns_are_read_with_care() {
    let verifier = build("countdown", &Map::new()).unwrap();
    let score = |columns: Value| {
        let columns = columns.as_object().unwrap().clone();
        verifier.score(&Sample {
            id: 9,
            completion: "<answer>1+2</answer>",
            columns: (&columns).into(),
            ..Default::default()
        })
    };
    assert_eq!(score(json!({"numbers": [1, 2.0], "target": "3"})).unwrap().reward, 1.0);
    for (columns, part) in [
        (json!({"target": 3}), "needs column \"nums\""),
        (json!({"nums": [1, 2]}), "needs column \"target\""),
        (json!({"nums": [1, 2.5], "target": 3}), "list of whole numbers"),
        (json!({"nums": [], "target": 3}), "list of whole numbers"),
        (json!({"nums": [1, -2], "target": 3}), "list of whole numbers"),
        (json!({"nums": [1, 2], "target": 3.5}), "whole number"),
    ] {
        let error = score(columns).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("rollout 9"), "{error}");
    }
}

#[test]
fn puzzles_are_solvable_repeatable_and_split_for_good() {
    let train = CountdownOptions::default();
    let test = CountdownOptions { split: PuzzleSplit::HeldOut, ..train.clone() };
    let mut seen: [HashSet<(Vec<i64>, i64)>; 2] = Default::default();
    for (side, (options, seed)) in [(&train, 1), (&test, 2)].into_iter().enumerate() {
        for index in 0..10_000 {
            let puzzle = generate(seed, index, options).unwrap();
            assert_eq!(judge(&puzzle.solution, &puzzle.numbers, puzzle.target, true), Right, "{puzzle:?}");
            assert!(
                (1..=100).contains(&puzzle.target) && puzzle.numbers.iter().all(|n| (1..=20).contains(n))
            );
            assert_eq!(held_out(&puzzle.numbers, puzzle.target, 0.1), side == 1);
            let mut numbers = puzzle.numbers;
            numbers.sort_unstable();
            seen[side].insert((numbers, puzzle.target));
        }
    }
    assert!(seen[0].is_disjoint(&seen[1]));
    assert!(seen[0].len() > 6_000 && seen[1].len() > 1_200, "{} {}", seen[0].len(), seen[1].len());
    assert_eq!(generate(1, 77, &train), generate(1, 77, &train));
    assert_ne!(generate(1, 77, &train), generate(2, 77, &train));
    // The same puzzle in another order is on the same side.
    assert_eq!(held_out(&[1, 2, 3], 6, 0.5), held_out(&[3, 1, 2], 6, 0.5));
    let all = CountdownOptions { held_out: 0.0, ..train.clone() };
    let share = (0..5_000).filter(|&i| {
        let p = generate(3, i, &all).unwrap();
        held_out(&p.numbers, p.target, 0.1)
    });
    assert!((400..600).contains(&share.count()));
}

#[test]
fn other_kinds_of_puzzles() {
    let options = CountdownOptions {
        numbers: (3, 4),
        max_number: 99,
        max_target: 1000,
        ops: CountdownOp::listed("+ - */").unwrap(),
        ..CountdownOptions::default()
    };
    let mut signs = HashSet::new();
    for index in 0..2_000 {
        let puzzle = generate(5, index, &options).unwrap();
        assert_eq!(judge(&puzzle.solution, &puzzle.numbers, puzzle.target, true), Right, "{puzzle:?}");
        signs.extend(puzzle.solution.chars().filter(|c| !c.is_ascii_digit()));
    }
    assert!("+-*/()".chars().all(|c| signs.contains(&c)), "{signs:?}");
    for bad in [
        CountdownOptions { numbers: (1, 3), ..options.clone() },
        CountdownOptions { numbers: (4, 3), ..options.clone() },
        CountdownOptions { ops: vec![], ..options.clone() },
        CountdownOptions { held_out: 1.5, ..options.clone() },
        CountdownOptions { held_out: 1.0, ..options.clone() },
        CountdownOptions { max_number: 0, ..options.clone() },
    ] {
        assert!(generate(0, 0, &bad).is_err(), "{bad:?}");
    }
    assert!(CountdownOp::listed("+^").is_err());
    let puzzle = generate(5, 0, &options).unwrap();
    assert_eq!(puzzle.columns()["target"], json!(puzzle.target));
    assert!(puzzle.short_prompt().ends_with(&format!(":{}=", puzzle.target)));
}

#[test]
fn demonstrations_are_right_except_for_their_noise() {
    let puzzles: Vec<_> = (0..1_000).map(|i| generate(7, i, &CountdownOptions::default()).unwrap()).collect();
    for (format, tries) in [
        (AnswerFormat::Plain, 0),
        (AnswerFormat::Answer, 0),
        (AnswerFormat::Answer, 3),
        (AnswerFormat::Line, 3),
        (AnswerFormat::ThinkAnswer, 0),
        (AnswerFormat::ThinkAnswer, 3),
    ] {
        for (noise, least, most) in [(0.0, 1000, 1000), (0.5, 500, 650), (1.0, 20, 250)] {
            let options = DemonstrationOptions { format, tries, noise, ..DemonstrationOptions::default() };
            let mut right = 0;
            for (puzzle, index) in puzzles.iter().zip(0..) {
                let text = demonstrate(puzzle, 1, index, &options).unwrap();
                assert_eq!(text, demonstrate(puzzle, 1, index, &options).unwrap());
                let answer = format.answer(&text).unwrap_or_else(|| panic!("{text}"));
                let expr = CountdownExpr::parse(answer).unwrap_or_else(|| panic!("{text}"));
                let (mut used, mut given) = (expr.numbers(), puzzle.numbers.clone());
                used.sort_unstable();
                given.sort_unstable();
                assert_eq!(used, given, "{text}");
                right += usize::from(judge(answer, &puzzle.numbers, puzzle.target, true) == Right);
            }
            assert!((least..=most).contains(&right), "{format:?} {tries} {noise}: {right}");
        }
    }
    let plain = DemonstrationOptions { tries: 2, ..DemonstrationOptions::default() };
    assert!(demonstrate(&puzzles[0], 1, 0, &plain).is_err());
}

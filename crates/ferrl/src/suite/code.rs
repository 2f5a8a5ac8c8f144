//! Programs: a function is asked for, and called with the arguments of its tests in a sandbox.

use super::{Converted, Entry, Published, SuiteSampling, Use};
use crate::data::Row;
use crate::verify::code::called;
use ferrl_engine::Result;
use serde_json::{Value, json};

const TESTED: Use = Use::Verified { verifier: "code", options: "{}" };
const PROGRAM: SuiteSampling = SuiteSampling { temperature: 0.0, max_new_tokens: 768, stop: &[] };

/// Short Python problems with three assertions each.
pub const MBPP: Entry = Entry {
    name: "mbpp",
    about: "MBPP: short Python problems with three tests each, run in a sandbox",
    repo: "google-research-datasets/mbpp",
    parts: &["full"],
    train: Some("train"),
    test: Some("test"),
    license: "CC BY 4.0",
    cite: "Austin et al., Program Synthesis with Large Language Models, 2021, arXiv 2108.07732",
    rows: TESTED,
    groups: &[],
    sampling: PROGRAM,
    sample: r#"{"task_id": 1, "text": "Write a function that adds two numbers.", "code": "def plus(a, b):\r\n  return a + b",
                "test_list": ["assert plus(1, 2) == 3", "assert plus(-1, 1) == 0"], "test_setup_code": "",
                "challenge_test_list": []}"#,
    completions: [
        "```python\ndef plus(a, b):\n    return a + b\n```",
        "```python\ndef plus(a, b):\n    return a - b\n```",
    ],
    usable: Some(|row| tests(row).is_some()),
    convert: mbpp,
};

/// The assertions of a row, where every one of them is a call of the same function.
fn tests(row: &Row) -> Option<Vec<String>> {
    let list: Vec<String> = row
        .get("test_list")?
        .as_array()?
        .iter()
        .map(|t| t.as_str().map(String::from))
        .collect::<Option<_>>()?;
    let first = called(list.first()?)?;
    list.iter().all(|t| called(t).as_ref() == Some(&first)).then_some(list)
}

fn mbpp(row: &Published<'_>) -> Result<Converted> {
    let problem = row.text(&["text", "prompt"])?;
    let tests = row.texts(&["test_list"])?;
    let prompt = format!(
        "{}\nThe function must pass these tests:\n{}\nWrite it in a block of Python.\n",
        problem.trim(),
        tests.join("\n")
    );
    let code = row.text(&["code"])?.replace("\r\n", "\n");
    Ok(vec![("prompt", json!(prompt)), ("response", json!(format!("```python\n{}\n```", code.trim_end())))])
}

/// Functions to be completed from their docstring.
pub const HUMANEVAL: Entry = Entry {
    name: "humaneval",
    about: "HumanEval: Python functions from their docstring; rows whose tests are plain assertions",
    repo: "openai/openai_humaneval",
    parts: &["openai_humaneval"],
    train: None,
    test: Some("test"),
    license: "MIT",
    cite: "Chen et al., Evaluating Large Language Models Trained on Code, 2021, arXiv 2107.03374",
    rows: TESTED,
    groups: &[],
    sampling: PROGRAM,
    sample: r#"{"task_id": "Example/0", "prompt": "def twice(x):\n    \"\"\" Return x times two. \"\"\"\n",
                "canonical_solution": "    return 2 * x\n", "entry_point": "twice",
                "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n"}"#,
    completions: [
        "```python\ndef twice(x):\n    return x + x\n```",
        "```python\ndef twice(x):\n    return x * x + 1\n```",
    ],
    usable: Some(|row| assertions(row).is_some()),
    convert: humaneval,
};

/// The assertions in `check`, of the function by its own name; none where it does anything else.
fn assertions(row: &Row) -> Option<Vec<String>> {
    let (test, entry) = (row.get("test")?.as_str()?, row.get("entry_point")?.as_str()?);
    let (_, body) = test.split_once("def check(candidate):")?;
    let mut list = Vec::new();
    for line in body.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#') && *l != "pass") {
        let assertion = line.replace("candidate(", &format!("{entry}("));
        if assertion != "assert True" && !assertion.starts_with("assert True,") {
            list.push(assertion.clone());
            called(&assertion).filter(|name| name == entry)?;
        }
    }
    (!list.is_empty()).then_some(list)
}

fn humaneval(row: &Published<'_>) -> Result<Converted> {
    let (prompt, entry) = (row.text(&["prompt"])?, row.text(&["entry_point"])?);
    let tests = assertions(row.row).ok_or_else(|| {
        let test = row.find(&["test"]).cloned().unwrap_or(Value::Null);
        row.wrong("test", &test, "a function check whose lines are plain assertions")
    })?;
    let solution = row.find(&["canonical_solution"]).and_then(Value::as_str).unwrap_or_default();
    Ok(vec![
        (
            "prompt",
            json!(format!(
                "Complete the function {entry} and write all of it in a block of Python.\n```python\n{}\n```\n",
                prompt.trim_end()
            )),
        ),
        ("response", json!(format!("```python\n{prompt}{}\n```", solution.trim_end()))),
        ("test_list", json!(tests)),
    ])
}

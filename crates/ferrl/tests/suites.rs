//! Published data sets by name: every sample row becomes a prompt whose right completion is graded right and whose wrong one
//! is graded wrong, from files and from the hub's cache.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::data::hub::HubCache;
use ferrl::data::{DataSource, Dataset, Row};
use ferrl::suite::{Entry, SUITES, Use, find};
use ferrl::verify::{RowColumns, Sample};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

fn cache(root: &Path) -> HubCache {
    HubCache { root: root.to_path_buf(), offline: true }
}

fn read(source: &str, root: &Path) -> Dataset {
    Dataset::read(&DataSource::parse(source).unwrap(), &cache(root)).unwrap()
}

fn score(entry: &Entry, row: &Row, completion: &str) -> f64 {
    let verifier = entry.verifier().unwrap().unwrap();
    let prompt = row["prompt"].as_str().unwrap();
    let columns = RowColumns::from(row);
    let sample = Sample { prompt, completion, columns, ..Default::default() };
    let score = verifier.score(&sample).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
    score.score.unwrap_or(score.reward)
}

#[test]
fn sample_rows_are_graded_as_their_completions_are() {
    let folder = tempfile::tempdir().unwrap();
    for entry in SUITES {
        let sample = entry.sample_row().unwrap();
        let path = folder.path().join(format!("{}.jsonl", entry.name));
        std::fs::write(&path, format!("{}\n", Value::Object(sample.clone()))).unwrap();
        let row = read(&format!("suite:{}={}", entry.name, path.display()), folder.path()).row(0).unwrap();
        assert!(!row["prompt"].as_str().unwrap().is_empty(), "{}", entry.name);
        assert_eq!(row["task"], entry.name);
        match entry.rows {
            Use::Verified { .. } => {
                let [right, wrong] = entry.completions;
                assert!(score(entry, &row, right) >= 1.0, "{}: {right:?} is not right", entry.name);
                assert!(score(entry, &row, wrong) < 1.0, "{}: {wrong:?} is not wrong", entry.name);
                assert!(score(entry, &row, "") < 1.0, "{}: nothing is right", entry.name);
                // What was published as the solution is right by the suite's own verifier.
                if let Some(response) = row.get("response").and_then(Value::as_str)
                    && (response.contains("boxed") || response.contains("####"))
                {
                    assert!(score(entry, &row, response) >= 1.0, "{}: {response:?}", entry.name);
                }
            }
            Use::Pairs => assert_ne!(row["chosen"], row["rejected"], "{}", entry.name),
            Use::Demonstrations => assert!(row["response"].is_string(), "{}", entry.name),
        }
        for column in entry.groups {
            let optional = matches!((entry.name, *column), ("minerva", "type"));
            assert!(optional || row.contains_key(*column), "{} has no column {column}", entry.name);
        }
        assert!(!entry.cite.is_empty() && !entry.license.is_empty());
    }
}

#[test]
fn a_row_that_is_not_of_the_suite_is_named_with_its_columns() {
    let folder = tempfile::tempdir().unwrap();
    for entry in SUITES {
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "{\"nothing\": 1}\n").unwrap();
        let source = DataSource::parse(&format!("suite:{}={}", entry.name, path.display())).unwrap();
        let data = Dataset::read(&source, &cache(folder.path()));
        if entry.usable.is_some() {
            assert!(data.unwrap_err().to_string().contains("none of the 1 rows"), "{}", entry.name);
            continue;
        }
        let error = data.unwrap().row(0).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:1") && error.contains(entry.name), "{error}");
    }
}

/// A repository in the hub's cache.
fn put(root: &Path, repo: &str, file: &str, rows: &[Value]) {
    let home = root.join(format!("datasets--{}", repo.replace('/', "--")));
    let path = home.join("snapshots/0123456789abcdef0123456789abcdef01234567").join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::create_dir_all(home.join("refs")).unwrap();
    std::fs::write(home.join("refs/main"), "0123456789abcdef0123456789abcdef01234567").unwrap();
    std::fs::write(&path, rows.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
}

#[test]
fn the_hub_s_cache_gives_training_rows_to_train_and_test_rows_to_test() {
    let folder = tempfile::tempdir().unwrap();
    let row = |q: &str| json!({"question": q, "answer": "#### 1"});
    put(folder.path(), "openai/gsm8k", "main/train.jsonl", &[row("a"), row("b")]);
    put(folder.path(), "openai/gsm8k", "main/test.jsonl", &[row("c")]);
    put(folder.path(), "openai/gsm8k", "socratic/train.jsonl", &[row("not this")]);
    let texts = |source: DataSource| {
        let data = Dataset::read(&source, &cache(folder.path())).unwrap();
        let text = |i| data.row(i).unwrap()["question"].as_str().unwrap().to_string();
        (0..data.len()).map(text).collect::<Vec<_>>()
    };
    assert_eq!(texts(DataSource::parse("suite:gsm8k").unwrap()), ["a", "b"]);
    assert_eq!(texts(DataSource::held_out("suite:gsm8k").unwrap()), ["c"]);
    assert_eq!(texts(DataSource::parse("test@suite:gsm8k").unwrap()), ["c"]);
    assert_eq!(texts(DataSource::parse("train[1:]@suite:gsm8k").unwrap()), ["b"]);
    // Seven folders are one data set.
    let entry = find("math").unwrap();
    for (i, part) in entry.parts.iter().enumerate() {
        let row =
            json!({"problem": format!("p{i}"), "level": "Level 1", "type": part, "solution": "\\boxed{1}"});
        put(folder.path(), entry.repo, &format!("{part}/test.jsonl"), &[row.clone(), row]);
    }
    let all = Dataset::read(&DataSource::held_out("suite:math").unwrap(), &cache(folder.path())).unwrap();
    assert_eq!(all.len(), 14);
    // The only file is read whatever it is called.
    let college = find("college-math").unwrap();
    put(folder.path(), college.repo, "college-math-test.jsonl", &[row("x")]);
    let data =
        Dataset::read(&DataSource::held_out("suite:college_math").unwrap(), &cache(folder.path())).unwrap();
    assert_eq!(data.len(), 1);
}

#[test]
fn names_and_splits_that_are_not_there_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let parse = |text: &str| DataSource::parse(text).unwrap_err().to_string();
    assert!(parse("suite:gsm8").contains("suite:gsm8k"));
    assert!(
        parse("suite:math500").contains("test@suite:math500"),
        "a test set is not trained on by its name alone"
    );
    let absent =
        DataSource::held_out("suite:gsm8k").unwrap().files(&cache(folder.path())).unwrap_err().to_string();
    assert!(absent.contains("hf download openai/gsm8k --repo-type dataset --include \"main/*\""), "{absent}");
    assert!(absent.contains("suite:gsm8k=PATH"), "{absent}");
    for same in ["MATH-500", "math_500", "math500"] {
        assert_eq!(find(same).unwrap().name, "math500");
    }
}

/// HH-RLHF is published as `train.jsonl.gz`, Open-Reasoner-Zero as a JSON array of arrays.
#[test]
fn published_files_are_read_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("train.jsonl.gz");
    let mut file =
        flate2::write::GzEncoder::new(std::fs::File::create(&packed).unwrap(), flate2::Compression::fast());
    writeln!(
        file,
        "{}",
        json!({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
                                "rejected": "\n\nHuman: a\n\nAssistant: x"})
    )
    .unwrap();
    file.finish().unwrap();
    let row = read(&format!("suite:hh_rlhf={}", packed.display()), folder.path()).row(0).unwrap();
    let text = |name: &str| row[name].as_str().unwrap().to_string();
    assert_eq!(text("prompt"), "\n\nHuman: a\n\nAssistant:");
    assert_eq!((text("chosen"), text("rejected")), (" b\n\nHuman: c\n\nAssistant: d".into(), " x".into()));
    let orz = folder.path().join("orz.json");
    let turns = json!([[{"from": "human", "value": "1 + 1?"}, {"from": "assistant", "ground_truth": {"value": "2"}}]]);
    std::fs::write(&orz, turns.to_string()).unwrap();
    let row = read(&format!("suite:orz={}", orz.display()), folder.path()).row(0).unwrap();
    assert_eq!(row["answer"], "2");
    assert!(row["prompt"].as_str().unwrap().starts_with("1 + 1?"));
}

/// Tests of a program that are no plain calls cannot be run outside of it: such rows do not count.
#[test]
fn rows_whose_tests_cannot_be_run_are_left_out_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let row =
        |test: &str| json!({"text": "t", "code": "def f(x):\n  return x", "test_list": [test]}).to_string();
    let rows =
        [row("assert f(1) == 1"), row("for i in range(9): assert f(i) == i"), row("assert f([2]) == [2]")];
    let path = folder.path().join("mbpp.jsonl");
    std::fs::write(&path, rows.join("\n")).unwrap();
    let data = read(&format!("suite:mbpp={}", path.display()), folder.path());
    assert_eq!((data.len(), data.left_out), (2, 1));
    assert!(data.place(1).ends_with("mbpp.jsonl:3"), "rows keep their numbers");
}

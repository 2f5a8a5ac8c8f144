//! `ferrl data check`: what would be trained, and every problem with its place.

use crate::common::*;
use serde_json::{Value, json};

#[test]
fn clean_data_is_shown_with_its_masks() {
    let folder = Folder::new("data-clean");
    let rows = folder.write(
        "rows.jsonl",
        "{\"prompt\": \"2+2=\", \"response\": \"4\"}\n{\"prompt\": \"3+3=\", \"response\": \"6\"}\n",
    );
    let text = ok(&["data", "check", &rows]);
    for part in ["2+2=⟦4", "2 rows in 1 file", "4 trained", "no problems", "characters", "####"] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
    let pairs = folder.write(
        "pairs.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi?\"}], \"chosen\": \"Yes\", \"rejected\": \"No\"}\n",
    );
    let text = ok(&["data", "check", &pairs]);
    assert!(text.contains("preference pairs") && text.contains("rejected:"), "{text}");
    let cut = ok(&["data", "check", &rows, "--set", "data.max_length=5", "--json"]);
    let cut: Value = serde_json::from_str(&cut).unwrap();
    assert_eq!((cut["truncated"].as_u64(), cut["longest"].as_u64()), (Some(2), Some(5)));
}

#[test]
fn a_model_s_own_tokens_are_counted() {
    let folder = Folder::new("data-model");
    let model = folder.model();
    let rows = folder.write("rows.jsonl", "{\"text\": \"the quick brown fox\"}\n");
    let text = ok(&["data", "check", &rows, "--model", &model, "--json"]);
    let got: Value = serde_json::from_str(&text).unwrap();
    let ids: Value = serde_json::from_str(
        ok(&["score", "--model", &model, "--input", &rows, "--output", "-"]).lines().next().unwrap(),
    )
    .unwrap();
    let scored = ids["logprobs"].as_array().unwrap().len() as i64;
    let tokens = got["tokens"].as_i64().unwrap();
    assert!((tokens - scored).abs() <= 2 && tokens < 19, "{tokens} tokens, {scored} scored");
    fails(&["data", "check", &rows, "--model", &folder.path("modle")], 4, &["no such directory", "model"]);
}

#[test]
fn every_problem_has_file_row_and_fix_and_the_exit_code_is_3() {
    let folder = Folder::new("data-bad");
    let good = "{\"prompt\": \"2+2=\", \"response\": \"4\"}\n";
    let rows = folder.write(
        "rows.jsonl",
        format!(
            "{good}{{\"promt\": \"x\", \"response\": \"y\"}}\n{{cut\n{{\"prompt\": {{\"a\": 1}}, \"response\": \"y\"}}\n"
        ),
    );
    let out = ferrl(&["data", "check", &rows], "");
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(3));
    let wanted =
        ["rows.jsonl:2", "prompt = \"promt\"", "rows.jsonl:3", "rows.jsonl:4", "column", "3 problems"];
    for part in wanted {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    fails(&["data", "check", &rows], 3, &["3 problems", "fix: "]);
    fails(&["data", "check", &folder.path("row.jsonl")], 3, &["no such file", "rows.jsonl"]);
    fails(&["data", "check", &folder.path("rows.jsonl"), "--algo", "gpro"], 2, &["gpro", "--algo grpo"]);
    fails(&["data", "check"], 2, &["PATH"]);
    std::fs::create_dir_all(folder.0.join("empty")).unwrap();
    fails(&["data", "check", &folder.path("empty")], 3, &["no data files"]);
    let broken = folder.write("broken.parquet", "PAR1 and then nothing");
    let out = ferrl(&["data", "check", &broken], "");
    assert_eq!(out.status.code(), Some(3), "{}", String::from_utf8_lossy(&out.stderr));
    let recipe = folder.write("r.toml", "data.train = [\"task:countdown\"]\n");
    fails(&["data", "check", "--recipe", &recipe], 2, &["generated task"]);
}

#[test]
fn the_algorithm_decides_how_rows_are_read() {
    let folder = Folder::new("data-algo");
    let rows = folder.write("rows.jsonl", "{\"prompt\": \"2+2=\", \"answer\": \"4\"}\n");
    let text = ok(&["data", "check", &rows, "--algo", "grpo"]);
    assert!(text.contains("read as prompts, for grpo"), "{text}");
    let out = ferrl(&["data", "check", &rows, "--algo", "dpo"], "");
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(3));
    assert!(text.contains("chosen") && text.contains("expected"), "{text}");
}

#[test]
fn suites_are_listed_and_one_is_shown_in_detail() {
    let list = ok(&["data", "suites"]);
    assert!(list.contains("gsm8k") && list.contains("hh_rlhf"), "{list}");
    let one = ok(&["data", "suites", "MATH-500"]);
    for part in ["hf download HuggingFaceH4/MATH-500", "math", "unique_id", "prompt = ", "cite"] {
        assert!(one.contains(part), "no {part:?} in\n{one}");
    }
    let all: Value = serde_json::from_str(&ok(&["data", "suites", "--json"])).unwrap();
    assert!(all.as_array().unwrap().iter().all(|s| s["row"]["prompt"].is_string()));
    fails(&["data", "suites", "gsm9k"], 2, &["gsm9k", "gsm8k"]);
}

#[test]
fn overlap_shows_which_rows_give_others_away() {
    let folder = Folder::new("data-overlap");
    let words = "seven old wizards walked slowly over the long bridge while the river sang below";
    let train = folder.write(
        "train.jsonl",
        format!("{{\"prompt\": \"new\", \"response\": \"x\"}}\n{{\"prompt\": \"tell\", \"response\": \"Then {words}.\"}}\n"),
    );
    let test =
        folder.write("test.jsonl", format!("{{\"question\": \"{words}?\"}}\n{{\"question\": \"NEW\"}}\n"));
    let got: Value = serde_json::from_str(&ok(&["data", "overlap", &train, &test, "--json"])).unwrap();
    assert_eq!((got["overlapping_train_rows"].as_u64(), got["exact"].as_u64()), (Some(2), Some(1)));
    assert!(got["pairs"][1]["train"].as_str().unwrap().ends_with("train.jsonl:2"));
    assert!(got["pairs"][1]["test"].as_str().unwrap().ends_with("test.jsonl:1"));
    let text = ok(&["data", "overlap", &train, &test]);
    assert!(text.contains("2 of 2 training rows overlap with 2 of 2 test rows"), "{text}");
    let longer: Value =
        serde_json::from_str(&ok(&["data", "overlap", &train, &test, "--words", "20", "--json"])).unwrap();
    assert_eq!(longer["overlapping_train_rows"], 1, "no run of 20 words");
}

#[test]
fn pairs_train_every_kind_of_reward_model() {
    let folder = Folder::new("unpair");
    let pair =
        |i: usize| json!({"prompt": format!("{i}+1="), "chosen": "2", "rejected": "3", "subset": "sums"});
    let text: String = (0..4).map(|i| format!("{}\n", pair(i))).collect();
    let (pairs, labelled) = (folder.write("pairs.jsonl", &text), folder.path("labelled.jsonl"));
    for algo in ["classifier", "kto", "implicit_prm"] {
        let told = ferrl(&["data", "check", &pairs, "--algo", algo], "");
        assert_eq!(told.status.code(), Some(3));
        assert!(String::from_utf8(told.stdout).unwrap().contains("ferrl data unpair"), "{algo}");
    }
    fails(&["data", "verdicts", "--input", &pairs], 3, &["pairs.jsonl:1", "ferrl data unpair"]);
    ok(&["data", "unpair", "--input", &pairs, "--output", &labelled]);
    let made = rows(&folder.read("labelled.jsonl"));
    let want = json!({"prompt": "0+1=", "subset": "sums", "completion": "3", "label": false, "target": 0.0, "reward": 0.0});
    assert!(made.len() == 8 && made[1] == want, "{made:?}");
    for algo in ["classifier", "kto", "implicit_prm"] {
        ok(&["data", "check", &labelled, "--algo", algo]);
    }
    let verdicts = folder.path("verdicts.jsonl");
    ok(&["data", "verdicts", "--input", &labelled, "--output", &verdicts, "--lambda", "0"]);
    assert_eq!(rows(&folder.read("verdicts.jsonl")).len(), 8);
    // Was: a verdict's prompt holds completion and question, too, so that no pair was found among the rows trained on.
    let met: Value = serde_json::from_str(&ok(&["data", "overlap", &verdicts, &pairs, "--json"])).unwrap();
    assert_eq!(met["overlapping_test_rows"], 4, "{met}");
    fails_with(
        &["data", "unpair", "--input", "-"],
        "{\"prompt\": \"a\", \"chosen\": \"b\"}\n",
        3,
        &["standard input:1", "rejected"],
    );
}

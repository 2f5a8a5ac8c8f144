//! `ferrl score`.

use crate::common::*;
use serde_json::{Value, json};

fn lines(sequences: &Value) -> String {
    sequences.as_array().unwrap().iter().map(|ids| format!("{}\n", json!({"ids": ids}))).collect()
}

#[test]
fn log_probabilities_are_those_of_transformers() {
    for case in ["llama2", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mistral", "llama_sharded"] {
        let json = reference_json(case);
        let out = ok_with(&["score", "--model", &fixture(case), "--input", "-"], &lines(&json["sequences"]));
        let rows = rows(&out);
        assert_eq!(rows.len(), json["sequences"].as_array().unwrap().len());
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(row["ids"], json["sequences"][i], "{case}");
            let targets = row["ids"].as_array().unwrap().len() - 1;
            assert_eq!(floats(&row["logprobs"]).len(), targets);
            if targets > 0 {
                close(&floats(&row["logprobs"]), &reference(case, &format!("logp.{i}")), 1e-4);
            }
            let entropy = reference(case, &format!("entropy.{i}"));
            close(&floats(&row["entropy"]), &entropy[..targets], 1e-4);
        }
    }
}

#[test]
fn the_temperature_divides_the_logits() {
    let json = reference_json("llama2");
    let at = json["temperature_sequence"].as_u64().unwrap();
    let input = format!("{}\n", json!({"ids": json["sequences"][at as usize]}));
    let t = json["temperature"].to_string();
    let out = ok_with(&["score", "--model", &fixture("llama2"), "--input", "-", "--temperature", &t], &input);
    close(&floats(&rows(&out)[0]["logprobs"]), &reference("llama2", &format!("logp_temp.{at}")), 1e-4);
}

#[test]
fn a_reward_model_writes_scores() {
    for case in ["qwen2_score", "llama_score"] {
        let json = reference_json(case);
        let out = ok_with(&["score", "--model", &fixture(case), "--input", "-"], &lines(&json["sequences"]));
        let scores: Vec<f64> = rows(&out).iter().map(|r| r["score"].as_f64().unwrap()).collect();
        close(&scores, &floats(&json["pooled"]), 1e-4);
        assert!(rows(&out)[0].get("logprobs").is_none());
    }
}

#[test]
fn scores_do_not_depend_on_threads_or_batches() {
    let folder = Folder::new("score-bits");
    let model = folder.model();
    let input: String =
        (0..40).map(|i| format!("{}\n", json!({"text": "the quick fox ".repeat(1 + i % 9)}))).collect();
    let input = folder.write("rows.jsonl", input);
    for dtype in ["f32", "bf16"] {
        let run = |threads: &str, tokens: &str| {
            let base = ["score", "--model", &model, "--input", &input, "--dtype", dtype];
            ok(&[&base[..], &["--threads", threads, "--batch-tokens", tokens]].concat())
        };
        let one = run("1", "4096");
        assert_eq!(one.lines().count(), 40);
        assert_eq!(one, run("2", "4096"));
        assert_eq!(one, run("2", "64"));
        assert_eq!(one, run("1", "1"), "a budget below the longest row is raised to it");
    }
}

#[test]
fn every_kind_of_row_and_a_file_for_the_result() {
    let folder = Folder::new("score-rows");
    let model = folder.model();
    let input = folder.write(
        "rows.jsonl",
        "{\"text\": \"the quick\"}\n\n{\"prompt\": \"the\", \"completion\": \" quick\", \"extra\": 1}\n\
         {\"messages\": [{\"role\": \"user\", \"content\": \"fox\"}]}\n{\"ids\": [5]}\n",
    );
    let out = folder.path("out.jsonl");
    assert_eq!(ok(&["score", "--model", &model, "--input", &input, "--output", &out]), "");
    let rows = rows(&folder.read("out.jsonl"));
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0]["ids"], rows[1]["ids"]);
    assert_eq!(rows[0]["logprobs"], rows[1]["logprobs"]);
    assert_eq!(rows[2]["ids"][0], 1, "the chat template's marker");
    assert_eq!(rows[3]["logprobs"], json!([]));
    assert!(!folder.0.join("out.jsonl.part").exists());
}

//! `ferrl generate` and `ferrl chat`.

use crate::common::*;
use serde_json::json;

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for case in ["llama2", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mistral"] {
        let json = reference_json(case);
        for greedy in json["greedy"].as_array().unwrap() {
            let prompt = &json["sequences"][greedy["sequence"].as_u64().unwrap() as usize];
            let count = greedy["tokens"].as_array().unwrap().len().to_string();
            let base = ["generate", "--model", &fixture(case), "--input", "-", "--temperature", "0"];
            let args = [&base[..], &["--max-new-tokens", &count, "--ignore-eos"]].concat();
            let out = rows(&ok_with(&args, &json!({"ids": prompt}).to_string()));
            assert_eq!(out[0]["completions"][0]["ids"], greedy["tokens"], "{case}");
            assert_eq!(out[0]["completions"][0]["stop"], "length");
            assert_eq!(&out[0]["prompt_ids"], prompt);
        }
    }
}

#[test]
fn the_seed_decides_and_threads_do_not() {
    let folder = Folder::new("generate-bits");
    let model = folder.model();
    let input: String =
        (0..12).map(|i| format!("{}\n", json!({"prompt": "the ".repeat(1 + i % 5)}))).collect();
    let input = folder.write("rows.jsonl", input);
    let run = |more: &[&str]| {
        let base = ["generate", "--model", &model, "--input", &input, "--n", "3", "--max-new-tokens", "12"];
        ok(&[&base[..], &["--logprobs"], more].concat())
    };
    let one = run(&["--seed", "7", "--threads", "1"]);
    assert_eq!(one, run(&["--seed", "7", "--threads", "2"]));
    assert_eq!(one, run(&["--seed", "7", "--cache-mib", "1"]));
    assert_ne!(one, run(&["--seed", "8"]));
    let first = &rows(&one)[0]["completions"];
    assert_ne!(first[0]["ids"], first[1]["ids"], "samples of one prompt differ");
}

#[test]
fn sampled_and_scored_log_probabilities_are_the_same_bits() {
    let folder = Folder::new("generate-exact");
    let model = folder.model();
    let t = ["--temperature", "0.8"];
    let base = ["generate", "--model", &model, "--input", "-", "--max-new-tokens", "20", "--logprobs"];
    let input = "{\"prompt\": \"the quick\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"fox\"}]}\n";
    for dtype in ["f32", "bf16"] {
        let out = rows(&ok_with(&[&base[..], &t, &["--dtype", dtype]].concat(), input));
        for row in out {
            let (prompt, c) = (row["prompt_ids"].as_array().unwrap(), &row["completions"][0]);
            let whole: Vec<_> = prompt.iter().chain(c["ids"].as_array().unwrap()).cloned().collect();
            let args = [&["score", "--model", &model, "--input", "-", "--dtype", dtype][..], &t].concat();
            let scored = rows(&ok_with(&args, &json!({"ids": whole}).to_string()));
            let scored = &scored[0]["logprobs"].as_array().unwrap()[prompt.len() - 1..];
            assert_eq!(c["logprobs"].as_array().unwrap(), scored);
        }
    }
}

#[test]
fn text_is_printed_and_ends_before_a_stop_string() {
    let folder = Folder::new("generate-text");
    let model = folder.model();
    let base =
        ["generate", "--model", &model, "--prompt", "the quick", "--max-new-tokens", "30", "--ignore-eos"];
    let whole = ok(&base);
    assert!(whole.ends_with('\n') && whole.len() > 2);
    let text = whole.trim_end_matches('\n');
    let letter = text.chars().rev().find(|c| c.is_ascii_alphanumeric()).expect("some letter").to_string();
    let cut = ok(&[&base[..], &["--stop", &letter]].concat());
    assert_eq!(cut.trim_end_matches('\n'), &text[..text.find(&letter).unwrap()]);
    let out = rows(&ok(&[&base[..], &["--stop", &letter, "--output", "-"]].concat()));
    assert_eq!(out[0]["completions"][0]["stop"], "string");
    assert_eq!(out[0]["completions"][0]["text"], cut.trim_end_matches('\n'));
    let list = ok(&[&base[..], &["--n", "2"]].concat());
    assert!(list.starts_with("[1] ") && list.contains("\n[2] "), "{list}");
}

#[test]
fn a_conversation_goes_on_after_a_typo() {
    let folder = Folder::new("chat");
    let model = folder.model();
    let args = ["chat", "--model", &model, "--max-new-tokens", "5", "--system", "be brief"];
    let out = ferrl(&args, "hello\n/rest\n\n/reset\nhello\n/quit\nnever read\n");
    assert!(out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("did you mean /reset?"));
    assert!(!out.stdout.is_empty());
    assert_eq!(ok_with(&args, "hello\n"), ok_with(&args, "hello\n"));
}

/// Was: `--prompt` was raw text even where the model has a chat template.
#[test]
fn a_prompt_goes_through_the_chat_template() {
    let folder = Folder::new("generate-chat");
    let model = folder.model();
    let base =
        ["generate", "--model", &model, "--prompt", "the fox", "--max-new-tokens", "4", "--output", "-"];
    let ids = |text: String| rows(&text)[0]["prompt_ids"].clone();
    let plain = ids(ok(&[&base[..], &["--raw"]].concat()));
    let input = "{\"messages\": [{\"role\": \"user\", \"content\": \"the fox\"}]}\n";
    let chat = ids(ok_with(&["generate", "--model", &model, "--input", "-", "--max-new-tokens", "4"], input));
    assert_ne!(plain, chat, "the model has a chat template");
    assert_eq!(ids(ok(&base)), chat);
}

#[test]
fn a_program_is_run_for_every_row() {
    let folder = Folder::new("generate-program");
    let model = folder.model();
    let program = folder.write(
        "p.jinja",
        "the {{ animal }}{{ gen('verb', stop=' ', max_tokens=6) }} {{ select(['quick', 'lazy'], 'how') }}\n",
    );
    let input = folder.write("rows.jsonl", "{\"animal\": \"fox\"}\n{\"animal\": \"dogs\"}\n");
    let got = rows(&ok(&["generate", "--model", &model, "--program", &program, "--input", &input]));
    assert_eq!(got.len(), 2);
    for (row, animal) in got.iter().zip(["fox", "dogs"]) {
        let (verb, how) =
            (row["variables"]["verb"].as_str().unwrap(), row["variables"]["how"].as_str().unwrap());
        assert_eq!(row["text"], format!("the {animal}{verb} {how}\n"));
        assert!(["quick", "lazy"].contains(&how) && row["generated_tokens"].as_u64().unwrap() <= 6);
    }
    let alone = folder.write("alone.jinja", "the quick{{ gen(max_tokens=3) }}");
    assert!(ok(&["generate", "--model", &model, "--program", &alone]).starts_with("the quick"));
    // Was: an error about a cache that no flag sets, where the text is longer than the model was made for.
    let long = folder.write("long.jinja", "the quick{{ gen(max_tokens=900) }}");
    ok(&["generate", "--model", &model, "--program", &long]);
    fails(&["generate", "--model", &model, "--program", &program], 2, &["animal", "p.jinja"]);
    fails(&["generate", "--model", &model, "--program", &folder.path("none")], 2, &["none"]);
}

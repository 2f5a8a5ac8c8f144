//! Mistakes: one message that says what, where and how to fix it, the exit code of its class, no panic.

use crate::common::*;
use std::path::Path;

#[test]
fn wrong_flags_name_the_nearest() {
    fails(&["score", "--modle", "x"], 2, &["--modle", "--model"]);
    fails(&["scor"], 2, &["scor", "score"]);
    fails(&["score", "--input", "x"], 2, &["--model"]);
    fails(&["generate", "--model", "x"], 2, &["--prompt"]);
    fails(&["score", "--model", "x", "--input", "y", "--dtype", "fp32"], 2, &["fp32", "f32", "bf16"]);
    fails(&["score", "--model", "x", "--input", "y", "--threads", "0"], 2, &["--threads", "from 1 to 1024"]);
    fails(&["score", "--model", "x", "--input", "y", "--threads", "two"], 2, &["two", "whole number"]);
    fails(&["score", "--model", "x", "--input", "y", "--temperature", "0"], 2, &["--temperature", "0.0001"]);
    fails(&["generate", "--model", "x", "--prompt", "y", "--top-p", "1.5"], 2, &["--top-p", "up to 1"]);
    fails(&["generate", "--model", "x", "--prompt", "y", "--temperature", "-1"], 2, &["temperature"]);
    fails(&["chat", "runs/x"], 2, &["tip: ", "--model runs/x"]);
    fails(&["data", "unpair", "x.jsonl"], 2, &["tip: ", "--input x.jsonl"]);
    fails(&["init", "--out", "x"], 2, &["--vocab"]);
    fails(
        &["init", "--out", "x", "--vocab", "9", "--family", "quen2"],
        2,
        &["quen2", "a similar value", "qwen2"],
    );
    fails(
        &["init", "--out", "x", "--vocab", "9", "--hidden", "100", "--heads", "3"],
        2,
        &["100", "3", "fix: "],
    );
    fails(&["bench", "train", "--seq", "1"], 2, &["1 token", "--seq 2"]);
    fails(&["bench", "train", "--device", "gpu"], 2, &["gpu", "cpu"]);
}

#[test]
fn wrong_paths_name_the_nearest() {
    let folder = Folder::new("errors-paths");
    folder.write("rows.jsonl", "{\"ids\": [1]}\n");
    let (model, typo) = (fixture("llama2"), fixture("lama2"));
    let rows = folder.path("rows.jsonl");
    fails(
        &["score", "--model", &typo, "--input", &rows],
        4,
        &["lama2", "no such directory", "fix: ", "llama2"],
    );
    fails(&["score", "--model", &rows, "--input", &rows], 4, &["rows.jsonl", "not a model directory"]);
    let row = folder.path("row.jsonl");
    fails(&["score", "--model", &model, "--input", &row], 3, &["row.jsonl", "no such file", "rows.jsonl"]);
    let here = folder.0.to_str().unwrap();
    fails(&["score", "--model", &model, "--input", here], 3, &["is a directory"]);
    fails(&["score", "--model", here, "--input", &rows], 4, &["config.json is missing", "fix: "]);
    let nowhere = folder.path("no/where.jsonl");
    let base = ["score", "--model", &model, "--input", &rows, "--output"];
    fails(&[&base[..], &[&nowhere]].concat(), 2, &["where.jsonl", "cannot write", "mkdir -p"]);
    fails(&[&base[..], &[here]].concat(), 2, &["is a directory"]);
    fails(&["tokenizer", "encode", "--model", &model, "x"], 4, &["tokenizer.json", "fix: "]);
    fails(&["tokenizer", "train", "--input", &row, "--out", here], 3, &["row.jsonl", "no such file"]);
}

#[test]
fn bad_rows_are_named_by_file_and_line() {
    let folder = Folder::new("errors-rows");
    let model = fixture("llama2");
    let check = |line: &str, parts: &[&str]| {
        let path = folder.write("rows.jsonl", format!("{{\"ids\": [1, 2]}}\n{line}\n"));
        let out = folder.path("out.jsonl");
        let parts = [&["rows.jsonl:2"], parts].concat();
        fails(&["score", "--model", &model, "--input", &path, "--output", &out], 3, &parts);
        assert!(!Path::new(&out).exists());
        let args = ["generate", "--model", &model, "--input", &path, "--output", &out];
        fails(&args, 3, &["rows.jsonl:2"]);
        assert!(!Path::new(&out).exists() && !Path::new(&format!("{out}.part")).exists());
    };
    check("{\"ids\": [1, 2]", &["cut short", "fix: "]);
    check("{\"ids\": [1 2]}", &["not valid JSON", "column", "[1 2]"]);
    check("[1, 2]", &["a list", "expected a JSON object", "fix: "]);
    check("{\"idz\": [1, 2]}", &["idz", "ids", "fix: "]);
    check("{\"idz\": [1], \"qq\": 2}", &["rename \"idz\" to \"ids\""]);
    check("{\"ids\": \"1 2\"}", &["a string", "list of token ids"]);
    check("{\"ids\": [1, -2]}", &["ids[1]", "-2"]);
    check("{\"ids\": [1, 2.5]}", &["ids[1]", "2.5"]);
    check("{\"ids\": [1, 83]}", &["ids[1]", "83", "vocabulary of 83", "fix: "]);
    check("{\"ids\": []}", &["no tokens", "fix: "]);
    check("{\"ids\": [1], \"prompt\": \"x\"}", &["only one"]);
    check("{\"ids\": null}", &["expected one of"]);
    fails_with(&["score", "--model", &model, "--input", "-"], "", 3, &["standard input", "no rows"]);
    let text = "{\"ids\": [1]}\n{\"prompt\": \"x\"}";
    fails_with(&["score", "--model", &model, "--input", "-"], text, 3, &["standard input:2", "completion"]);
    let bytes = folder.write("bytes.jsonl", b"{\"text\": \"\xff\"}\n");
    fails(&["score", "--model", &model, "--input", &bytes], 3, &["bytes.jsonl:1", "UTF-8"]);
    fails(&["tokenizer", "train", "--input", &bytes, "--out", &folder.path("t")], 3, &["bytes.jsonl:1"]);
    let empty = folder.write("empty.txt", "");
    fails(
        &["tokenizer", "train", "--input", &empty, "--out", &folder.path("t")],
        3,
        &["empty.txt", "no text"],
    );
    assert!(!folder.0.join("t").exists());
    let long = format!("{{\"ids\": {:?}}}", vec![1; 80]);
    fails_with(&["score", "--model", &fixture("gpt2"), "--input", "-"], &long, 3, &["80 tokens", "at most"]);
}

#[test]
fn broken_models_are_refused_before_any_work() {
    let folder = Folder::new("errors-models");
    let good = folder.model();
    let copy = |name: &str| {
        let to = folder.0.join(name);
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(&good).unwrap().flatten() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    };
    let score = |dir: &Path, parts: &[&str]| {
        let args = ["score", "--model", dir.to_str().unwrap(), "--input", "-"];
        fails_with(&args, "{\"text\": \"the\"}", 4, parts);
    };
    let dir = copy("cut");
    let weights = std::fs::read(dir.join("model.safetensors")).unwrap();
    std::fs::write(dir.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    score(&dir, &["model.safetensors", "fix: "]);
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    score(&dir, &["safetensors"]);
    let dir = copy("config");
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    std::fs::write(dir.join("config.json"), &config[..config.len() / 2]).unwrap();
    score(&dir, &["config.json"]);
    std::fs::write(dir.join("config.json"), config.replace("\"qwen2\"", "\"mamba\"")).unwrap();
    score(&dir, &["mamba", "not supported", "fix: ", "qwen2"]);
    let dir = copy("tokenizer");
    let text = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
    std::fs::write(dir.join("tokenizer.json"), &text[..text.len() / 2]).unwrap();
    score(&dir, &["tokenizer.json", "fix: "]);
    std::fs::remove_file(dir.join("tokenizer.json")).unwrap();
    score(&dir, &["tokenizer.json", "fix: "]);
    // A tokenizer that is larger than the model's vocabulary.
    let small = folder.path("small");
    ok(&["init", "--vocab", "40", "--hidden", "32", "--layers", "1", "--out", &small]);
    std::fs::write(Path::new(&small).join("tokenizer.json"), text).unwrap();
    score(Path::new(&small), &["the tokenizer has", "vocabulary", "only 40", "fix: "]);
    let tokens = folder.path("tok");
    fails(
        &["init", "--tokenizer", &tokens, "--vocab", "40", "--out", &folder.path("x")],
        2,
        &["--vocab 40", "fix: "],
    );
    let reward = ["generate", "--model", &fixture("llama_score"), "--prompt", "x"];
    fails(&reward, 4, &["a score head, not a language-model head", "fix: "]);
    fails(&["chat", "--model", &fixture("llama2")], 4, &["tokenizer.json"]);
}

#[test]
fn what_does_not_fit_is_said_before_it_is_tried() {
    let folder = Folder::new("errors-memory");
    let out = folder.path("huge");
    let huge = ["--vocab", "16000000", "--hidden", "65536"];
    fails(&[&["init", "--out", &out], &huge[..]].concat(), 5, &["memory", "free", "fix: "]);
    fails(&["init", "--out", &out, "--vocab", "99999999999"], 2, &["--vocab", "from 1 to"]);
    fails(&[&["bench", "train"], &huge[..]].concat(), 5, &["memory", "fix: "]);
    let model = folder.model();
    let base = ["generate", "--model", &model, "--prompt", "the"];
    fails(&[&base[..], &["--max-new-tokens", "4000000000"]].concat(), 2, &["--max-new-tokens", "1048576"]);
    fails(&[&base[..], &["--cache-mib", "16777216"]].concat(), 5, &["cache", "fix: "]);
    fails(&[&base[..], &["--cache-mib", "1", "--max-new-tokens", "100000"]].concat(), 5, &["cache", "fix: "]);
}

/// Was: the run waited ten minutes for space, which no free disk could have given it.
#[test]
#[cfg(unix)]
fn a_file_size_limit_is_no_full_disk() {
    let folder = Folder::new("errors-limit");
    let model = folder.model();
    folder.write("rows.jsonl", "{\"prompt\": \"the\", \"response\": \"fox\"}\n");
    let recipe =
        format!("algo = \"sft\"\nmodel.path = {model:?}\ndata.train = [\"rows.jsonl\"]\ntrain.steps = 1\n");
    folder.write("r.toml", recipe);
    let start = std::time::Instant::now();
    let out = std::process::Command::new("sh")
        .current_dir(&folder.0)
        .args(["-c", "ulimit -f 16; exec \"$0\" train r.toml", env!("CARGO_BIN_EXE_ferrl")])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{message}");
    assert!(message.contains("ulimit -f") && !message.contains("free some disk"), "{message}");
    assert!(start.elapsed().as_secs() < 300, "{:?}", start.elapsed());
}

/// Were: panics, one for the words of the command line and one for the path of the reward function.
#[cfg(target_os = "linux")]
#[test]
fn names_that_are_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let name = |bytes: &[u8]| std::ffi::OsStr::from_bytes(bytes).to_owned();
    let folder = Folder::new("errors-bytes");
    let inside = folder.0.join(name(b"caf\xe9"));
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("rows.jsonl"), "{\"prompt\": \"a\", \"response\": \"b\"}\n").unwrap();
    std::fs::write(
        inside.join("my.py"),
        "def reward(completions, **_):\n    return [1.0] * len(completions)\n",
    )
    .unwrap();
    let recipe = "train.steps = 1\ndata.train = [\"rows.jsonl\"]\n\
                  model.init = { hidden = 32, layers = 1, heads = 2, kv_heads = 2, max_positions = 64 }\n";
    std::fs::write(inside.join(name(b"r\xff.toml")), format!("algo = \"sft\"\n{recipe}")).unwrap();
    std::fs::write(
        inside.join("g.toml"),
        format!("algo = \"dr_grpo\"\nrollout.max_new_tokens = 4\n{recipe}[[reward]]\npython = \"my.py\"\n"),
    )
    .unwrap();
    let train = |recipe: &[u8], run: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferrl"));
        let output = command
            .arg("train")
            .arg(name(recipe))
            .args(["--name", run])
            .current_dir(&inside)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = train(b"r\xff.toml", "first");
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = train(b"g.toml", "second");
    assert!(code == Some(2) && said.contains("not UTF-8") && said.contains("fix: rename"), "{code:?} {said}");
}

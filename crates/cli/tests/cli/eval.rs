//! `ferrl eval`: figures that can be worked out by hand, on runs, models, tasks and files.

use crate::common::*;
use serde_json::Value;

/// A run of a tiny model on a generated task; its folder.
pub fn tiny_run(folder: &Folder) -> String {
    let recipe = folder.write(
        "tiny.toml",
        "algo = \"sft\"\n\
         model.init = { hidden = 32, layers = 1, heads = 2, max_positions = 64 }\n\
         data = { train = [\"task:countdown\"], max_length = 48 }\n\
         train = { steps = 1, batch = 4 }\n\
         rollout = { max_new_tokens = 8, cache_mib = 4 }\n",
    );
    let runs = folder.path("runs");
    ok(&["train", &recipe, "--runs", &runs]);
    format!("{runs}/tiny")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap()
}

/// Was: `device_memory` counted in training alone.
#[test]
fn the_recipe_s_memory_is_that_of_evaluations_and_searches() {
    let folder = Folder::new("eval-memory");
    let run = tiny_run(&folder);
    for command in ["eval", "search"] {
        let small = [command, &run, "--prompts", "1", "--threads", "1", "device_memory=64KiB"];
        fails(&small, 5, &["memory"]);
        ok(&[&small[..5], &["1", "device_memory=1GiB"]].concat());
    }
}

#[test]
fn figures_follow_from_the_rollouts_that_are_written() {
    let folder = Folder::new("eval-figures");
    let run = tiny_run(&folder);
    let python = folder.write(
        "grade.py",
        "def reward(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n",
    );
    let out = folder.path("rollouts.jsonl");
    let base = ["eval", &run, "--prompts", "30", "--samples", "4", "--reward", &python, "--score-truncated"];
    let got = json(&ok(&[&base[..], &["--json", "--output", &out]].concat()));
    let rows = rows(&folder.read("rollouts.jsonl"));
    assert_eq!(rows.len(), 120);
    let (mut right, mut pass2, mut majority, mut length) = (0.0, 0.0, 0.0, 0.0);
    for group in rows.chunks(4) {
        let text = |r: &Value| r["completion"].as_str().unwrap().trim().to_owned();
        let grades: Vec<f64> = group.iter().map(|r| r["score"].as_f64().unwrap()).collect();
        for (r, grade) in group.iter().zip(&grades) {
            let odd = r["completion"].as_str().unwrap().chars().count() % 2;
            assert_eq!(*grade, odd as f64, "{r}");
            length += r["tokens"].as_f64().unwrap() / 120.0;
        }
        let c = grades.iter().filter(|g| **g == 1.0).count();
        right += c as f64 / 4.0 / 30.0;
        // Of the six pairs of four answers, those without a right one: C(4 - c, 2).
        pass2 += (1.0 - ((4 - c) * (4usize - c).saturating_sub(1) / 2) as f64 / 6.0) / 30.0;
        let votes = |i: usize| group.iter().filter(|r| text(r) == text(&group[i])).count();
        let winner = (0..4).max_by_key(|&i| (votes(i), 4 - i)).unwrap();
        majority += grades[winner] / 30.0;
    }
    let figure = |name: &str| got[name].as_f64().unwrap_or(f64::NAN);
    let want = [right, right, pass2, majority, length];
    let names = ["accuracy", "pass@1", "pass@2", "majority@4", "mean_length"];
    close(&names.map(figure), &want, 1e-9);
    assert_eq!((got["prompts"].as_u64(), got["samples"].as_u64()), (Some(30), Some(4)));
    // The same command gives the same answers, whatever the number of threads.
    let again = json(&ok(&[&base[..], &["--json", "--threads", "1"]].concat()));
    assert_eq!(again["pass@4"], got["pass@4"]);
    let table = ok(&base);
    assert!(table.contains("pass@4") && table.contains("majority@4") && table.contains('%'), "{table}");
}

#[test]
fn models_are_graded_on_tasks_and_files() {
    let folder = Folder::new("eval-sources");
    let model = format!("{}/stages/0", tiny_run(&folder));
    let small = ["--max-new-tokens", "6", "--cache-mib", "4", "--json"];
    let task = json(&ok(&[&["eval", &model, "--task", "countdown", "--prompts", "5"], &small[..]].concat()));
    assert_eq!(task["prompts"], 5);
    let rows = folder.write(
        "q.jsonl",
        "{\"prompt\": \"1,2:3=\", \"answer\": \"1+2\"}\n{\"prompt\": \"4,2:8=\", \"answer\": \"4*2\"}\n",
    );
    let file = ["eval", &model, "--data", &rows, "--verifier", "exact", "--option", "column=answer"];
    let file = json(&ok(&[&file[..], &small[..]].concat()));
    assert_eq!(file["prompts"], 2, "all rows");
    let changed = ["eval", &model, "--task", "countdown", "--prompts", "3", "data.task.numbers=4"];
    assert_eq!(json(&ok(&[&changed[..], &small[..]].concat()))["prompts"], 3);
}

#[test]
fn missing_inputs_are_named() {
    let folder = Folder::new("eval-errors");
    let run = tiny_run(&folder);
    let model = format!("{run}/stages/0");
    fails(&["eval", &folder.path("runs/tony")], 4, &["no such directory", "runs/tiny"]);
    fails(&["eval", &model], 2, &["no prompts", "--task"]);
    fails(&["eval", &model, "--task", "countdwn"], 2, &["countdwn", "--task countdown"]);
    let rows = folder.write("q.jsonl", "{\"prompt\": \"1\"}\n");
    fails(&["eval", &model, "--data", &rows], 2, &["no verifier or reward", "--verifier", "--reward"]);
    fails(&["eval", &model, "--data", &rows, "--verifier", "exct"], 2, &["exct", "exact"]);
    fails(&["eval", &run, "--k", "8"], 2, &["pass@8", "--samples 8"]);
    fails(&["eval", &run, "--samples", "2", "--temperature", "0"], 2, &["all the same"]);
    fails(&["eval", &run, "rollout.tempratur=1"], 2, &["tempratur", "temperature"]);
    let gone = folder.path("gone.jsonl");
    fails(&["eval", &model, "--data", &gone, "--verifier", "exact"], 3, &["gone.jsonl", "no such file"]);
    std::fs::create_dir_all(folder.0.join("young")).unwrap();
    let young = folder.path("young");
    folder.write("young/recipe.toml", "");
    std::fs::create_dir_all(folder.0.join("young/checkpoints")).unwrap();
    fails(&["eval", &young], 4, &["no model yet", "checkpoint"]);
}

#[test]
fn a_model_in_the_hub_s_cache_goes_by_its_name() {
    let folder = Folder::new("eval-hub");
    let run = tiny_run(&folder);
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let home = folder.0.join("hub/models--org--tiny");
    std::fs::create_dir_all(home.join("refs")).unwrap();
    std::fs::create_dir_all(home.join("snapshots")).unwrap();
    std::fs::write(home.join("refs/main"), commit).unwrap();
    std::fs::rename(format!("{run}/stages/0"), home.join("snapshots").join(commit)).unwrap();
    let ask = |model: &str| {
        std::process::Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(["eval", model, "--task", "countdown", "--prompts", "2", "--max-new-tokens", "4"])
            .args(["--cache-mib", "4"])
            .env("HF_HUB_CACHE", folder.0.join("hub"))
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap()
    };
    let out = ask("org/tiny");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let out = ask("org/tony");
    let message = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(3), "{message}");
    assert!(message.contains("org/tiny") && message.contains("HF_HUB_OFFLINE"), "{message}");
}

/// Was: the run's `eval.split` was applied to the file, and 5 of 100 questions were asked.
#[test]
fn every_row_of_a_file_is_asked() {
    let folder = Folder::new("eval-all-rows");
    let model = folder.model();
    let row = |i: usize| format!("{{\"prompt\": \"the {i}\", \"answer\": \"fox\"}}\n");
    let data = folder.write("rows.jsonl", (0..100).map(row).collect::<String>());
    let recipe = folder.write(
        "split.toml",
        format!(
            "algo = \"dr_grpo\"\nmodel.path = {model:?}\ndata = {{ train = [{data:?}], max_length = 64 }}\n\
             reward = {{ verifier = \"exact\" }}\ntrain = {{ steps = 2, micro_batch_tokens = 256 }}\n\
             rollout = {{ prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 4 }}\n\
             eval = {{ split = 0.05, every = 2, prompts = 2 }}\n"
        ),
    );
    let runs = folder.path("runs");
    ok(&["train", &recipe, "--runs", &runs]);
    let run = format!("{runs}/split");
    let asked = |more: &[&str]| {
        let base = ["eval", &run, "--max-new-tokens", "2", "--json"];
        json(&ok(&[&base[..], more].concat()))["prompts"].as_u64()
    };
    assert_eq!(asked(&["--data", &data]), Some(100));
    assert_eq!(asked(&[]), Some(5), "the run's own held-out part");
    assert_eq!(asked(&["--seed", "7"]), Some(5), "another seed samples anew and holds out the same rows");
}

/// A completion that was cut off is wrong, whatever stands in it.
#[test]
fn a_truncated_completion_is_not_right() {
    let folder = Folder::new("eval-truncated");
    let (model, data) = (folder.model(), folder.write("rows.jsonl", "{\"prompt\": \"the\"}\n"));
    let python =
        folder.write("one.py", "def one(completions, **kw):\n    return [1.0 for c in completions]\n");
    let grade = format!("{python}:one");
    let base = [
        "eval", &model, "--data", &data, "--reward", &grade, "--max-new-tokens", "1", "--json", "--samples",
        "4",
    ];
    let (strict, loose) = (json(&ok(&base)), json(&ok(&[&base[..], &["--score-truncated"]].concat())));
    assert_eq!(loose["accuracy"].as_f64(), Some(1.0));
    let cut = strict["truncated"].as_f64().unwrap();
    assert!(cut > 0.0);
    assert_eq!(strict["accuracy"].as_f64(), Some(1.0 - cut));
}

/// Rows of two benchmarks; the first of GSM8K's has this answer.
fn benchmarks(folder: &Folder) -> (String, String) {
    let sum = |i: usize| {
        format!("{{\"question\": \"What is {i} + 1?\", \"answer\": \"It is.\\n#### {}\"}}\n", i + 1)
    };
    let sums = folder.write("sums.jsonl", (0..5).map(sum).collect::<String>());
    let choice = |i: usize| {
        format!(
            "{{\"question\": \"Which? {i}\", \"choices\": [\"x\", \"y\"], \"answer\": 1, \"subject\": \"s{}\"}}\n",
            i % 2
        )
    };
    (sums, folder.write("mmlu.jsonl", (0..4).map(choice).collect::<String>()))
}

#[test]
fn suites_have_an_accuracy_each_a_mean_and_tables_by_subject() {
    let folder = Folder::new("eval-suite");
    let model = folder.model();
    let (sums, choices) = benchmarks(&folder);
    let suites = format!("gsm8k={sums},MMLU={choices}");
    let out = folder.path("rollouts.jsonl");
    let base = ["eval", &model, "--suite", &suites, "--max-new-tokens", "3", "--threads", "1"];
    let got = json(&ok(&[&base[..], &["--json", "--output", &out]].concat()));
    let all = got["suites"].as_array().unwrap();
    assert_eq!(all.iter().map(|s| s["suite"].as_str().unwrap()).collect::<Vec<_>>(), ["gsm8k", "mmlu"]);
    assert_eq!((all[0]["prompts"].as_u64(), all[1]["prompts"].as_u64()), (Some(5), Some(4)));
    assert_eq!(all[0]["temperature"], 0.0);
    assert_eq!(all[1]["groups"]["subject"]["s0"]["prompts"], 2);
    let accuracy = |i: usize| all[i]["accuracy"].as_f64().unwrap();
    close(&[got["macro_accuracy"].as_f64().unwrap()], &[(accuracy(0) + accuracy(1)) / 2.0], 1e-12);
    // 0 of 5: Wilson's upper end is 0.4345.
    assert_eq!(accuracy(0), 0.0);
    close(&floats(&all[0]["accuracy_interval"]), &[0.0, 0.434_482], 1e-4);
    let written = rows(&folder.read("rollouts.jsonl"));
    assert_eq!(written.iter().filter(|r| r["suite"] == "gsm8k").count(), 5);
    assert!(written[0]["prompt"].as_str().unwrap().contains("What is 0 + 1?"));
    let table = ok(&base);
    for part in ["suite", "95 % interval", "gsm8k", "mean over suites", "mmlu by subject", "s1", "tokens/s"] {
        assert!(table.contains(part), "no {part:?} in\n{table}");
    }
    let sampled = ["eval", &model, "--suite", &suites, "--max-new-tokens", "2", "--samples", "4", "--json"];
    let sampled = json(&ok(&sampled));
    assert_eq!(sampled["suites"][0]["temperature"], 0.6, "several samples are not greedy");
    assert!(sampled["suites"][0]["pass@4"].is_number() && sampled["suites"][0]["majority@4"].is_number());
}

#[test]
fn options_are_chosen_by_the_log_probabilities_that_score_gives() {
    let folder = Folder::new("eval-likelihood");
    let model = folder.model();
    let (sums, choices) = benchmarks(&folder);
    let out = folder.path("graded.jsonl");
    let suite = format!("mmlu={choices}");
    let base =
        ["eval", &model, "--suite", &suite, "--threads", "1", "--json", "--output", &out, "--likelihood"];
    for (by, options) in [("letter", ["A", "B"]), ("text", ["x", "y"])] {
        let got = json(&ok(&[&base[..], &[by]].concat()));
        let written = rows(&folder.read("graded.jsonl"));
        assert_eq!(written.len(), 4);
        let mut right = 0;
        for row in &written {
            let asked = options.map(|o| {
                // The model has a chat template: the prompt is a conversation.
                let messages = json(row["prompt"].as_str().unwrap());
                let row = serde_json::json!({ "prompt": messages, "completion": o });
                let input = folder.write("asked.jsonl", row.to_string());
                let scored = rows(&ok(&["score", "--model", &model, "--input", &input, "--threads", "1"]));
                let text = floats(&scored[0]["logprobs"]);
                // A letter is a token of this tokenizer.
                text[text.len() - o.len()]
            });
            let parts = &row["components"];
            let logps = ["logp_A", "logp_B"].map(|n| parts[n].as_f64().unwrap());
            close(&logps, &asked, 1e-4);
            right += usize::from(logps[1] > logps[0]);
            assert_eq!(parts["acc"], f64::from(logps[1] > logps[0]));
        }
        assert_eq!(got["suites"][0]["acc"], right as f64 / 4.0);
        assert!(got["suites"][0]["acc_norm"].is_number());
    }
    fails(
        &["eval", &model, "--suite", &format!("gsm8k={sums}"), "--likelihood", "letter"],
        2,
        &["mmlu, gpqa, sciq"],
    );
}

#[test]
fn an_evaluation_that_was_stopped_is_resumed_to_the_same_rows() {
    let folder = Folder::new("eval-resume");
    let model = folder.model();
    let sum = |i: usize| format!("{{\"question\": \"What is {i} + 1?\", \"answer\": \"#### {}\"}}\n", i + 1);
    let sums = folder.write("many.jsonl", (0..2500).map(sum).collect::<String>());
    let suite = format!("gsm8k={sums}");
    let args = |out: &str, samples: &str| {
        let args =
            ["eval", &model, "--suite", &suite, "--max-new-tokens", "3", "--threads", "1", "--output", out];
        args.iter().chain(&["--samples", samples, "--json"]).map(|s| s.to_string()).collect::<Vec<_>>()
    };
    let call = |args: &[String], more: &[&str]| {
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        json(&ok(&args))
    };
    let whole = call(&args(&folder.path("whole.jsonl"), "2"), &[]);
    let out = folder.path("stopped.jsonl");
    let part = folder.0.join("stopped.jsonl.part");
    let stopped = || {
        let mut run = std::process::Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(args(&out, "2"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while std::fs::metadata(&part).map_or(0, |m| m.len()) == 0 && run.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        run.kill().unwrap();
        run.wait().unwrap();
        part.exists()
    };
    // On a busy machine it may end between two looks.
    assert!((0..50).any(|_| stopped()), "it was stopped before its end");
    // Killed in the middle of a line.
    let text = std::fs::read_to_string(&part).unwrap();
    std::fs::write(&part, &text[..text.len() - 20]).unwrap();
    let other: Vec<String> = args(&out, "3").into_iter().chain(["--resume".to_string()]).collect();
    fails(&other.iter().map(String::as_str).collect::<Vec<_>>(), 2, &["samples = 2, not 3", "start over"]);
    // Was: the rows of the old data stayed among those of the new.
    let before = folder.read("many.jsonl");
    folder.write("many.jsonl", before.replacen("What is 0", "What was 0", 1));
    let same: Vec<String> = args(&out, "2").into_iter().chain(["--resume".to_string()]).collect();
    let same: Vec<&str> = same.iter().map(String::as_str).collect();
    fails(&same, 2, &["prompt 0", "What was 0", "What is 0", "start over"]);
    folder.write("many.jsonl", before);
    let resumed = call(&args(&out, "2"), &["--resume"]);
    assert_eq!(resumed["suites"][0]["accuracy"], whole["suites"][0]["accuracy"]);
    assert_eq!(resumed["suites"][0]["mean_length"], whole["suites"][0]["mean_length"]);
    assert!(folder.read("stopped.jsonl") == folder.read("whole.jsonl"), "the same rows in the same order");
    assert!(
        !part.exists() && !folder.0.join("stopped.jsonl.part.json").exists(),
        "nothing is left to resume"
    );
}

/// Bug: with a closed standard output (`| head`) the exit code was 0, but the output was still named `.part`.
#[test]
fn the_rows_are_whole_when_nobody_reads_the_report() {
    let folder = Folder::new("eval-closed-pipe");
    let model = folder.model();
    let (sums, _) = benchmarks(&folder);
    let out = folder.path("rows.jsonl");
    let mut run = std::process::Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args([
            "eval",
            &model,
            "--suite",
            &format!("gsm8k={sums}"),
            "--max-new-tokens",
            "3",
            "--output",
            &out,
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    drop(run.stdout.take());
    assert!(run.wait().unwrap().success());
    assert!(!rows(&folder.read("rows.jsonl")).is_empty());
}

#[test]
fn a_suite_that_cannot_be_evaluated_says_what_to_do() {
    let folder = Folder::new("eval-suite-errors");
    let model = folder.model();
    fails(&["eval", &model, "--suite", "gsm8"], 2, &["gsm8", "gsm8k"]);
    fails(&["eval", &model, "--suite", "hh_rlhf"], 2, &["no answers to grade", "data.train", "gsm8k"]);
    let (sums, _) = benchmarks(&folder);
    let twice = format!("gsm8k={sums},gsm8k={sums}");
    fails(&["eval", &model, "--suite", &twice], 2, &["named twice"]);
    fails(&["eval", &model, "--suite", "gsm8k=gone.jsonl"], 3, &["gone.jsonl"]);
    let bad = folder.write("bad.jsonl", "{\"q\": 1}\n");
    fails(&["eval", &model, "--suite", &format!("gsm8k={bad}")], 3, &["bad.jsonl:1", "question"]);
    let absent = std::process::Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(["eval", &model, "--suite", "math500"])
        .env("HF_HUB_CACHE", folder.0.join("empty"))
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert_eq!(absent.status.code(), Some(3), "{message}");
    assert!(message.contains("hf download HuggingFaceH4/MATH-500"), "{message}");
    assert!(message.contains("suite:math500=PATH"), "{message}");
}

/// Was: a run could be evaluated on the rows it was trained on, without a warning.
#[test]
fn a_suite_that_the_run_was_trained_on_is_said() {
    let folder = Folder::new("eval-suite-trained");
    let (model, (sums, choices)) = (folder.model(), benchmarks(&folder));
    let recipe = folder.write(
        "seen.toml",
        format!(
            "algo = \"sft\"\nmodel.path = {model:?}\n\
             data = {{ train = [\"suite:gsm8k={sums}\"], replacement = true, max_length = 128 }}\n\
             train = {{ steps = 1, batch = 4, micro_batch_tokens = 1024 }}\nrollout.cache_mib = 4\n"
        ),
    );
    let runs = folder.path("runs");
    ok(&["train", &recipe, "--runs", &runs]);
    let run = format!("{runs}/seen");
    let say = |suite: &str| {
        let out = ferrl(&["eval", &run, "--suite", suite, "--max-new-tokens", "2", "--json"], "");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let said = say(&format!("gsm8k={sums}"));
    assert!(said.contains("5 of 5 rows") && said.contains("sums.jsonl:1"), "{said}");
    assert!(!say(&format!("mmlu={choices}")).contains("overlap"));
}

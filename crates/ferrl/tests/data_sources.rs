//! What a stage learns from: sources that mix, epochs that end, and everything that is said about rows before the first step.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[allow(dead_code)]
#[path = "stage/help.rs"]
mod help;

use ferrl::source::Item;
use ferrl::train::Stage;
use ferrl::warnings::Warning;
use help::{model, stage, write};
use serde_json::json;
use std::path::Path;

fn rows(n: usize) -> String {
    (0..n).map(|i| format!("{{\"prompt\": \"{i} \", \"response\": \"row {i}\"}}\n")).collect()
}

fn recipe(algo: &str, train: &str, more: &str) -> String {
    format!(
        "algo = {algo:?}\ndata.train = {train}\noptim.lr = 1e-3\ndata.max_length = 40\n\
         train.micro_batch_tokens = 256\nrollout.max_new_tokens = 8\nrollout.samples = 2\n{more}"
    )
}

fn error(model: &str, text: &str) -> String {
    match stage(model, text).and_then(|mut s| s.source.check(&mut |_, _| true).map(|()| s)) {
        Ok(_) => panic!("the recipe must be refused:\n{text}"),
        Err(e) => e.to_string(),
    }
}

/// The stage after its rows were looked at, and what was said about them.
fn checked(model: &str, text: &str) -> (Stage, Vec<Warning>) {
    let mut stage = stage(model, text).unwrap();
    stage.source.check(&mut |_, _| true).unwrap();
    let warnings = stage.warnings.take();
    (stage, warnings)
}

fn raised<'a>(warnings: &'a [Warning], name: &str) -> &'a str {
    let names: Vec<&str> = warnings.iter().map(|w| w.name).collect();
    &warnings.iter().find(|w| w.name == name).unwrap_or_else(|| panic!("no {name} in {names:?}")).message
}

fn texts(stage: &Stage, items: Vec<Item>) -> Vec<String> {
    let text = |item| match item {
        Item::Sequences(s) => stage.tokenizer.decode(&s[0].ids, true).unwrap(),
        Item::Prompt(prompt) => prompt.text,
        other => panic!("{other:?}"),
    };
    items.into_iter().map(text).collect()
}

#[test]
fn what_follows_a_task_is_not_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let e = error(&model, &recipe("sft", "[\"task:countdown\", \"no_such_file.jsonl\"]", "train.steps = 1"));
    assert!(e.contains("no_such_file.jsonl"), "{e}");
    let e = error(&model, &recipe("sft", "[\"task:countdown\", \"task:countdwn\"]", "train.steps = 1"));
    assert!(e.contains("countdwn"), "{e}");
    let e = error(
        &model,
        &recipe("sft", "[\"task:countdown\", \"task:countdown\"]", "train.steps = 1\neval.every=1"),
    );
    assert!(e.contains("twice"), "{e}");
}

#[test]
fn tasks_and_files_mix_by_weight_and_resume_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(30)));
    let train = format!("[\"task:countdown\", {data:?}, \"task:chain\"]");
    let text = recipe("sft", &train, "data.weights = [0.5, 1.0, 0.2]\ntrain.steps = 4");
    let mut whole = stage(&model, &text).unwrap();
    assert_eq!(whole.source.epoch(), Some(15 + 30 + 6));
    let first = whole.source.next(51).unwrap();
    let all = texts(&whole, first);
    let of_file = all.iter().filter(|t| t.contains("row ")).count();
    let chains = all.iter().filter(|t| t.contains(":") && t.contains("\n")).count();
    assert_eq!((all.len(), of_file), (51, 30));
    assert_eq!(chains, 6, "{all:?}");
    let state = whole.source.state();
    let second = whole.source.next(20).unwrap();
    let mut resumed = stage(&model, &text).unwrap();
    resumed.source.restore(&serde_json::from_str(&state.to_string()).unwrap()).unwrap();
    assert_eq!(resumed.source.next(20).unwrap(), second);
}

#[test]
fn several_tasks_are_rewarded_each_by_its_own_verifier() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let both = "[\"task:countdown\", \"task:chain\"]";
    let more = "train.steps = 2\nrollout.prompts = 8\n[data.task.chain]\nsteps = 2\n";
    let mut stage = stage(&model, &recipe("grpo", both, more)).unwrap();
    assert_eq!(stage.source.epoch(), None);
    let report = stage.step().unwrap();
    let tasks: Vec<&str> =
        report.rollouts.iter().map(|r| r.prompt.columns["task"].as_str().unwrap()).collect();
    assert!(tasks.contains(&"countdown") && tasks.contains(&"chain"), "{tasks:?}");
    let e = error(&model, &recipe("grpo", both, "train.steps = 1\n[data.task]\nsteps = 2\n"));
    assert!(e.contains("data.task.steps") && e.contains("data.task.chain.steps"), "{e}");
    let data = write(dir.path(), "prompts.jsonl", "{\"prompt\": \"1 \"}\n");
    let e = error(&model, &recipe("grpo", &format!("[\"task:chain\", {data:?}]"), "train.steps = 1"));
    assert!(e.contains("reward") && e.contains("prompts.jsonl"), "{e}");
}

#[test]
fn three_epochs_are_three_epochs_also_with_a_smaller_last_batch() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows(10)));
    let text = |batch: usize| {
        recipe("sft", &format!("[{data:?}]"), &format!("train.epochs = 3\ntrain.batch = {batch}"))
    };
    let mut stage = stage(&model, &text(6)).unwrap();
    assert_eq!(stage.schedules.0.total_steps, 6);
    let epochs: Vec<f64> = (0..6).map(|_| stage.step().unwrap().epoch).collect();
    assert_eq!(epochs, [0.6, 1.0, 1.6, 2.0, 2.6, 3.0]);
    let mut larger = help::stage(&model, &text(64)).unwrap();
    assert_eq!(larger.schedules.0.total_steps, 3);
    assert_eq!(larger.step().unwrap().epoch, 1.0);
    for (key, bad) in [
        ("train.epochs", "1e300"),
        ("data.weights", "[1e18]"),
        ("data.weights", "[nan]"),
        ("data.weights", "[-1.0]"),
    ] {
        let text = recipe("sft", &format!("[{data:?}]"), &format!("{key} = {bad}"));
        assert!(error(&model, &text).contains(key), "{key} = {bad}");
    }
}

#[test]
fn cut_rows_are_counted_at_the_start_in_the_metrics_and_in_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let long = json!({"prompt": "a", "response": "b".repeat(60)});
    let data = write(dir.path(), "rows.jsonl", &format!("{}{long}\n{long}\n", rows(6)));
    let (mut stage, warnings) = checked(&model, &recipe("sft", &format!("[{data:?}]"), "train.batch = 8"));
    let said = raised(&warnings, "truncated-rows");
    for part in ["2 of 8", "rows.jsonl:7", "62 tokens", "data.max_length = 40"] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    let summary = stage.source.summary();
    assert_eq!((summary.rows, summary.truncated, summary.longest, summary.exact), (Some(8), 2, 40, true));
    assert_eq!(summary.tokens, Some(6 * 8 + 80));
    assert_eq!(stage.step().unwrap().metrics.get("data/truncated"), Some(0.25));
}

#[test]
fn rows_that_are_dropped_do_not_count_in_an_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let long = json!({"prompt": "a".repeat(50), "response": "b"});
    let data = write(dir.path(), "rows.jsonl", &format!("{long}\n{}{long}\n", rows(5)));
    let text = recipe("sft", &format!("[{data:?}]"), "train.batch = 5\ndata.overlong = \"drop\"");
    let (stage, warnings) = checked(&model, &text);
    assert_eq!((stage.source.epoch(), stage.schedules.0.total_steps), (Some(5), 1));
    assert!(raised(&warnings, "dropped-rows").contains("rows.jsonl:1"));
    assert_eq!(stage.source.summary().dropped, 2);
    let e = error(&model, &recipe("sft", &format!("[{data:?}]"), ""));
    assert!(e.contains("rows.jsonl:1") && e.contains("data.max_length"), "{e}");
    // A prompt to sample from is refused or left out, never cut.
    let reward = "[[reward]]\nverifier = \"length\"\noptions.max = 8\n";
    let e = error(&model, &recipe("grpo", &format!("[{data:?}]"), &format!("train.steps = 1\n{reward}")));
    assert!(e.contains("rows.jsonl:1") && e.contains("50 tokens"), "{e}");
}

#[test]
fn sequences_beyond_the_context_are_said_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let long = json!({"prompt": "a", "response": "b".repeat(70)});
    let data = write(dir.path(), "rows.jsonl", &format!("{}{long}\n", rows(3)));
    let text = recipe("sft", &format!("[{data:?}]"), "").replace("max_length = 40", "max_length = 100");
    let rotary = model(dir.path());
    let (_, warnings) = checked(&rotary, &text);
    let said = raised(&warnings, "beyond-context");
    assert!(said.contains("1 of 4") && said.contains("rows.jsonl:4") && said.contains("64"), "{said}");
    let learned = help::model_of(dir.path(), "gpt2");
    let e = error(&learned, &text);
    assert!(e.contains("rows.jsonl:4") && e.contains("data.max_length = 64"), "{e}");
    let prompts = write(dir.path(), "prompts.jsonl", &format!("{}\n", json!({"prompt": "c".repeat(60)})));
    let reward = "train.steps = 1\n[[reward]]\nverifier = \"length\"\noptions.max = 8\n";
    let text =
        recipe("grpo", &format!("[{prompts:?}]"), reward).replace("max_length = 40", "max_length = 100");
    let e = error(&learned, &text);
    assert!(e.contains("prompts.jsonl:1") && e.contains("max_new_tokens"), "{e}");
    assert!(raised(&checked(&rotary, &text).1, "beyond-context").contains("68 tokens"));
}

#[test]
fn doubtful_rows_are_counted_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let pair = |c: &str, r: &str| format!("{}\n", json!({"prompt": "p ", "chosen": c, "rejected": r}));
    let pairs = write(dir.path(), "pairs.jsonl", &(pair("a", "b") + &pair("same", "same") + &pair("", "c")));
    let (_, warnings) = checked(&model, &recipe("dpo", &format!("[{pairs:?}]"), ""));
    assert!(
        raised(&warnings, "equal-pairs").contains("1 of 3")
            && raised(&warnings, "equal-pairs").contains("pairs.jsonl:2")
    );
    assert!(raised(&warnings, "empty-responses").contains("pairs.jsonl:3"));
    let ended = write(dir.path(), "ended.jsonl", "{\"prompt\": \"1\", \"response\": \"2<eos>\"}\n");
    let (mut stage, warnings) =
        checked(&model, &recipe("sft", &format!("[{ended:?}]"), "data.task.steps = 3"));
    assert!(raised(&warnings, "written-end").contains("ended.jsonl:1"));
    assert!(raised(&warnings, "unused-task-options").contains("steps"));
    let Item::Sequences(sequences) = stage.source.next(1).unwrap().remove(0) else { panic!("sequences") };
    assert_eq!(sequences[0].ids.len(), 3, "the end is one token");
    assert_eq!(sequences[0].ids[2], stage.tokenizer.eos()[0]);
    assert!(warnings.iter().all(|w| w.name != "spelled-tokens"), "the end is its own warning");
    // TRL's tokenizer makes it the token.
    let spelled = write(dir.path(), "spelled.jsonl", "{\"prompt\": \"1\", \"response\": \"2<eos>3\"}\n");
    let (_, warnings) = checked(&model, &recipe("sft", &format!("[{spelled:?}]"), ""));
    assert!(raised(&warnings, "spelled-tokens").contains("spelled.jsonl:1"));
}

const LONG: &str =
    "One morning twelve geese crossed the road near the old mill and none of them looked left or right";

/// Train rows 3 and 4 give test rows 1 and 2 away: the same prompt in other letters, and thirteen words in a response.
fn overlapping(dir: &Path) -> (String, String) {
    let row = |prompt: &str, response: &str| format!("{}\n", json!({"prompt": prompt, "response": response}));
    let train =
        row("a ", "b") + &row("c ", "d") + &row("What  is THIS?", "e") + &row("f ", &LONG.to_uppercase());
    let test = row("what is this?", "z") + &row(&format!("Story: {LONG}."), "y") + &row("free ", "x");
    (write(dir, "train.jsonl", &train), write(dir, "test.jsonl", &test))
}

#[test]
fn training_rows_that_give_evaluation_rows_away_are_said_dropped_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let (train, test) = overlapping(dir.path());
    let text = |overlap: &str| {
        let more = format!(
            "eval.every = 1\neval.data = [{test:?}]\ndata.max_length = 200\ndata.overlap = {overlap:?}\ntrain.batch = 8"
        );
        recipe("sft", &format!("[{train:?}]"), "").replace("data.max_length = 40\n", "") + &more
    };
    let (stage, warnings) = checked(&model, &text("warn"));
    let said = raised(&warnings, "overlapping-rows");
    assert!(
        said.contains("2 of 3") && said.contains("train.jsonl:3") && said.contains("test.jsonl:1"),
        "{said}"
    );
    assert_eq!(stage.source.epoch(), Some(4), "a warning changes nothing");
    let (mut stage, warnings) = checked(&model, &text("drop"));
    assert!(raised(&warnings, "overlap-dropped").contains("2 of 4"));
    assert!(!warnings.iter().any(|w| w.name == "overlapping-rows"), "nothing is left to warn of");
    assert_eq!(stage.source.epoch(), Some(2));
    let items = stage.source.next(8).unwrap();
    let mut left = texts(&stage, items);
    left.sort();
    assert!(left[0].starts_with("a b") && left[1].starts_with("c d"), "{left:?}");
    let refused = error(&model, &text("error"));
    assert!(refused.contains("data.overlap") && refused.contains("2 of 3"), "{refused}");
    assert!(!checked(&model, &text("off")).1.iter().any(|w| w.name.contains("overlap")), "off is off");
    let e = error(&model, &text("dorp"));
    assert!(e.contains("data.overlap"), "{e}");
}

/// A suite names its own verifier: no `[[reward]]` is needed, also where several are mixed.
#[test]
fn suites_bring_their_verifiers() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let row = |i: usize| {
        format!("{}\n", json!({"question": format!("{i} + 0?"), "answer": format!("so\n#### {i}")}))
    };
    let sums = write(dir.path(), "sums.jsonl", &(0..6).map(row).collect::<String>());
    let problem =
        json!({"problem": "1 + 2?", "solution": "\\boxed{3}", "answer": "3", "subject": "A", "level": 1});
    let math = write(dir.path(), "math.jsonl", &format!("{problem}\n"));
    let names = format!("[\"suite:gsm8k={sums}\", \"test@suite:math500={math}\"]");
    // The test's model has room for few tokens: a shorter prompt, over the published columns.
    let short = "data.template = '{{ question | default(\"?\") }}'";
    let (stage, _) = checked(&model, &recipe("dr_grpo", &names, short));
    let grade = |task: &str, answer: &str, completion: &str| {
        let row = json!({"task": task, "answer": answer});
        let columns = ferrl::verify::RowColumns::from(row.as_object().unwrap());
        let verifier = ferrl::setup::task_verifier(&stage.recipe).unwrap().unwrap();
        let sample = ferrl::verify::Sample { completion, columns, ..Default::default() };
        verifier.score(&sample).unwrap().reward
    };
    assert_eq!(grade("gsm8k", "7", "#### 7"), 1.0);
    assert_eq!(grade("math500", "1/2", "\\boxed{0.5}"), 1.0, "mathematics, not a number");
    assert_eq!(grade("gsm8k", "7", "#### 8"), 0.0);
    // Supervised training reads the same rows as demonstrations.
    let (mut stage, _) = checked(&model, &recipe("sft", &format!("[\"suite:gsm8k={sums}\"]"), short));
    let items = stage.source.next(1).unwrap();
    assert!(texts(&stage, items)[0].contains("####"));
}

#[test]
fn evaluation_rows_that_are_training_rows_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let train = write(dir.path(), "train.jsonl", &rows(20));
    let test = write(
        dir.path(),
        "test.jsonl",
        "{\"prompt\": \"7 \", \"response\": \"row 7\"}\n{\"prompt\": \"x\", \"response\": \"y\"}\n",
    );
    let text = recipe("sft", &format!("[{train:?}]"), &format!("eval.every = 1\neval.data = [{test:?}]"));
    let (_, warnings) = checked(&model, &text);
    let said = raised(&warnings, "leaked-rows");
    assert!(said.contains("1 of 2") && said.contains("test.jsonl:1"), "{said}");
    let twice = write(dir.path(), "twice.jsonl", &(rows(20) + &rows(20)));
    let text = recipe("sft", &format!("[{twice:?}]"), "eval.every = 1\neval.split = 0.5");
    assert!(raised(&checked(&model, &text).1, "leaked-rows").contains("twice.jsonl:"));
    let bad = write(dir.path(), "bad.jsonl", "{\"prompt\": \"1\"}\n");
    let text = recipe("sft", &format!("[{train:?}]"), &format!("eval.every = 1\neval.data = [{bad:?}]"));
    assert!(
        error(&model, &text).contains("bad.jsonl:1"),
        "evaluation rows are checked before the first step"
    );
}

#[test]
fn a_bad_row_far_behind_is_found_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let data = write(dir.path(), "rows.jsonl", &(rows(700) + "{\"prompt\": \"x\"}\n" + &rows(50)));
    let text = recipe("sft", &format!("[{data:?}]"), "train.steps = 1");
    let mut source = stage(&model, &text).unwrap().source;
    let mut seen = Vec::new();
    let e = source
        .check(&mut |done, all| {
            seen.push((done, all));
            true
        })
        .unwrap_err()
        .to_string();
    assert!(e.contains("rows.jsonl:701") && e.contains("response"), "{e}");
    assert!(seen.iter().all(|&(done, all)| done <= all && all == 751), "{seen:?}");
    let mut source = stage(&model, &text).unwrap().source;
    source.check(&mut |_, _| false).unwrap();
    assert!(!source.summary().exact, "stopped by whoever looks on");
}

#[test]
fn plain_text_for_a_model_with_a_chat_template_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(Path::new(&path).join("chat_template.jinja"), template).unwrap();
    let data = write(dir.path(), "rows.jsonl", &rows(3));
    let train = format!("[{data:?}]");
    let (_, warnings) = checked(&path, &recipe("sft", &train, ""));
    let raw = warnings.iter().find(|w| w.name == "raw-prompts").unwrap();
    assert!(raw.message.contains("3 of 3") && raw.fix.contains("data.apply_chat_template"), "{raw}");
    let (mut stage, warnings) = checked(&path, &recipe("sft", &train, "data.apply_chat_template = true"));
    assert!(warnings.is_empty(), "{warnings:?}");
    let Item::Sequences(s) = stage.source.next(1).unwrap().remove(0) else { panic!("sequences") };
    let text = stage.tokenizer.decode(&s[0].ids, false).unwrap();
    assert!(
        text.starts_with("<user>") && text.contains("<assistant>row ") && text.ends_with("<eos>"),
        "{text}"
    );
    assert!(checked(&path, &recipe("sft", &train, "data.apply_chat_template = false")).1.is_empty());
}

#[test]
fn a_new_model_makes_its_tokenizer_from_data_files() {
    let dir = tempfile::tempdir().unwrap();
    let init = "train.steps = 1\ntrain.batch = 2\n[model.init]\nhidden = 32\nlayers = 1\nheads = 2\nmax_positions = 64\n";
    let data = write(dir.path(), "rows.jsonl", "{\"prompt\": \"1+1=\", \"response\": \"2é\"}\n");
    help::run(&dir.path().join("plain"), &recipe("sft", &format!("[{data:?}]"), init), false, 9).unwrap();
    let made = ferrl_engine::tokenizer::Tokenizer::from_dir(&dir.path().join("plain/test/start_0")).unwrap();
    assert!(made.token_id("é").is_some() && made.eos().len() == 1);
    let talk = json!({ "messages": [{ "role": "user", "content": "a?" }, { "role": "assistant", "content": "b!" }] });
    let data = write(dir.path(), "chat.jsonl", &format!("{talk}\n"));
    for kind in ["char", "bpe"] {
        let runs = dir.path().join(kind);
        let text =
            recipe("sft", &format!("[{data:?}]"), &format!("{init}tokenizer = {kind:?}\nvocab = 300\n"));
        help::run(&runs, &text, false, 9).unwrap();
        assert!(ferrl_engine::chat::ChatTemplate::from_dir(&runs.join("test/start_0")).is_ok(), "{kind}");
    }
    let bad = write(dir.path(), "bad.jsonl", "{\"prompt\": \"1\"}\n");
    let e = help::run(&dir.path().join("bad"), &recipe("sft", &format!("[{bad:?}]"), init), false, 9);
    assert!(e.err().unwrap().to_string().contains("bad.jsonl:1"));
}

/// Was: `did you mean "rows.jsonl"?` of `rows.jsonl`, where the name is that of a pipe or of a link that leads nowhere.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_said_to_be_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink("loop.jsonl", path("loop.jsonl")).unwrap();
    std::os::unix::fs::symlink("gone.jsonl", path("link.jsonl")).unwrap();
    std::fs::create_dir(path("folder")).unwrap();
    for pipe in ["pipe.jsonl", "folder/pipe.jsonl"] {
        let made = std::process::Command::new("mkfifo").arg(path(pipe)).status().unwrap();
        assert!(made.success());
    }
    let files = |path: &Path| {
        let source = ferrl::data::DataSource::parse(path.to_str().unwrap()).unwrap();
        source.files(&ferrl::data::hub::HubCache::from_env()).unwrap_err().to_string()
    };
    let cases = [
        ("loop.jsonl", "loop.jsonl"),
        ("link.jsonl", "gone.jsonl"),
        ("pipe.jsonl", "pipe"),
        ("folder", "pipe"),
    ];
    for (name, word) in cases {
        let error = files(&path(name));
        assert!(error.contains("not a regular file") && error.contains(word), "{error}");
        assert!(!error.contains("did you mean"), "{error}");
    }
    let error = files(&path("lop.jsonl"));
    assert!(error.contains("did you mean") && error.contains("loop.jsonl"), "{error}");
}

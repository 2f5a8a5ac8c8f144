//! What may change between a run and its resumption, what may not, and what the clock must not decide.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use crate::common::{Folder, Left, STAGES, names};
use crate::refusals::said;
use std::fs;
use std::path::Path;
use std::process::Output;

fn replace(folder: &Folder, name: &str, from: &str, to: &str) {
    let text = fs::read_to_string(folder.0.join(name)).unwrap();
    assert!(text.contains(from), "{name} has no {from:?}");
    folder.write(name, &text.replace(from, to));
}

fn resume(folder: &Folder, more: &[&str]) -> Output {
    folder.command(1).args(more).output().unwrap()
}

fn modified(path: &Path) -> std::time::SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

/// [`STAGES`] with the second stage as it should have been.
fn mended() -> String {
    STAGES.replace(
        "algo = { name = \"ppo\", epochs = 2, minibatches = 2, kl = { coef = 0.05, target = 0.1 } }",
        "algo = \"rloo\"",
    )
}

#[test]
fn a_mended_later_stage_is_taken_up_and_a_finished_one_is_not_done_again() {
    let whole = Folder::new("mended-whole", &mended());
    whole.succeed(1);
    let folder = Folder::new("mended", STAGES);
    assert!(folder.kill_when(1, || folder.run().join("stages/0/config.json").exists()));
    let weights = folder.run().join("stages/0/model.safetensors");
    let before = modified(&weights);
    folder.write("tiny.toml", &mended());
    let told = folder.succeed(2);
    assert!(told.contains("algo.name of stage reinforce"), "{told}");
    assert_eq!(modified(&weights), before, "the finished stage was done again");
    Left::by(&folder).assert_equals(&Left::by(&whole), "with the mended stage");
    let kept = |name: &str| fs::read_to_string(folder.run().join(name)).unwrap();
    assert!(kept("recipe.toml").contains("rloo") && kept("recipe_until_step_9.toml").contains("ppo"));
    // The stage has begun now: it stays as it is.
    folder.write("tiny.toml", STAGES);
    let out = resume(&folder, &[]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    for part in ["of stage reinforce was", "--allow-changed"] {
        assert!(said(&out).contains(part), "{}", said(&out));
    }
}

#[test]
fn a_stage_may_be_added_behind_a_finished_run() {
    let first = STAGES.split("[[stage]]").take(2).collect::<Vec<_>>().join("[[stage]]");
    let (folder, whole) = (Folder::new("added", &first), Folder::new("added-whole", STAGES));
    folder.succeed(1);
    let before = modified(&folder.run().join("stages/0/model.safetensors"));
    folder.write("tiny.toml", STAGES);
    let told = folder.succeed(1);
    assert!(told.contains("stage reinforce is new") && told.contains("imitate is finished"), "{told}");
    assert_eq!(modified(&folder.run().join("stages/0/model.safetensors")), before);
    whole.succeed(1);
    Left::by(&folder).assert_equals(&Left::by(&whole), "a stage was added");
}

#[test]
fn a_finished_run_gets_more_steps_and_never_fewer() {
    let (folder, whole) = (Folder::of("more", "grpo"), Folder::of("more-whole", "grpo"));
    folder.succeed(1);
    replace(&folder, "tiny.toml", "steps = 14", "steps = 20");
    let told = folder.succeed(1);
    assert!(told.contains("train.steps of stage grpo was 14 and is 20"), "{told}");
    replace(&whole, "tiny.toml", "steps = 14", "steps = 20");
    whole.succeed(1);
    Left::by(&folder).assert_equals(&Left::by(&whole), "six more steps");
    replace(&folder, "tiny.toml", "steps = 20", "steps = 5");
    let out = resume(&folder, &[]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    assert!(said(&out).contains("train.steps") && said(&out).contains("20"), "{}", said(&out));
    Left::by(&folder).assert_equals(&Left::by(&whole), "refused");
}

#[test]
fn how_often_a_run_is_saved_may_change() {
    let (folder, whole) = (Folder::of("saving", "sft"), Folder::of("saving-whole", "sft"));
    whole.succeed(1);
    assert!(folder.kill_when(1, || folder.run().join("checkpoints/step_6/manifest.json").exists()));
    replace(&folder, "tiny.toml", "checkpoint = { every = 3 }", "checkpoint = { every = 2, keep = 3 }");
    folder.succeed(1);
    Left::by(&folder).assert_equals(&Left::by(&whole), "saved more often");
    assert_eq!(names(&folder.run().join("checkpoints")).len(), 3);
}

/// Stops a run after its third step, changes something, and resumes it.
fn after_a_change(name: &str, recipe: &str, change: impl Fn(&Folder), says: &[&str]) {
    let folder = Folder::of(name, "grpo");
    if !recipe.is_empty() {
        replace(
            &folder,
            "tiny.toml",
            "reward = [{ verifier = \"regex\", truncated = \"score\", options = { pattern = \".*1.*\" } }]",
            recipe,
        );
        folder.write("reward.py", "import helper\ndef reward(completions, **_):\n    return [helper.score(c) for c in completions]\n");
        folder.write("helper.py", "def score(text):\n    return float('1' in text)\n");
    }
    assert!(folder.kill_when(1, || folder.run().join("checkpoints/step_3/manifest.json").exists()));
    let metrics = fs::read(folder.run().join("metrics.jsonl")).unwrap();
    change(&folder);
    let out = resume(&folder, &[]);
    assert_eq!(out.status.code(), Some(3), "{name}: {}", said(&out));
    for part in says.iter().chain(&["--allow-changed", "have changed"]) {
        assert!(said(&out).contains(part), "{name}: {}", said(&out));
    }
    assert_eq!(
        fs::read(folder.run().join("metrics.jsonl")).unwrap(),
        metrics,
        "{name}: refused and yet touched"
    );
    let out = resume(&folder, &["--allow-changed"]);
    assert!(out.status.success(), "{name}: {}", said(&out));
    assert!(said(&out).contains("changed: ") && said(&out).contains(says[0]), "{name}: {}", said(&out));
    let log = fs::read_to_string(folder.run().join("log.jsonl")).unwrap();
    assert!(log.contains("is resumed although"), "{log}");
    assert_eq!(Left::by(&folder).metrics.len(), 14);
}

#[test]
fn changed_data_of_the_same_count_is_refused() {
    after_a_change("data", "", |f| replace(f, "prompts.jsonl", "1+", "2+"), &["data.train prompts.jsonl"]);
}

#[test]
fn data_with_more_rows_is_refused_and_begins_anew_on_request() {
    let add = |f: &Folder| {
        let text = fs::read_to_string(f.0.join("prompts.jsonl")).unwrap();
        f.write("prompts.jsonl", &format!("{text}{{\"prompt\": \"9+9=\"}}\n"));
    };
    after_a_change("rows", "", add, &["data.train prompts.jsonl", "bytes"]);
}

#[test]
fn a_changed_reward_file_or_what_it_imports_is_refused() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        return println!("not run: there is no python3");
    }
    let python = "reward = [{ python = \"reward.py\" }]";
    for file in ["reward.py", "helper.py"] {
        let change = |f: &Folder| {
            let text = fs::read_to_string(f.0.join(file)).unwrap();
            f.write(file, &format!("{text}# another\n"));
        };
        after_a_change(&format!("python-{file}"), python, change, &["reward reward.py"]);
    }
}

#[test]
fn when_a_checkpoint_is_written_changes_no_byte() {
    // The best by a metric of training, and the clock saves at every step, at some, or never.
    let eval = "eval = { every = 4, data = [\"prompts.jsonl\"], prompts = 6 }\n";
    let best = |minutes: &str| {
        format!(
            "checkpoint = {{ every = 3, minutes = {minutes}, keep = 1, keep_best = 1, metric = \"eval/reward\", use_best = true }}"
        )
    };
    let left = |name: &str, minutes: &str| {
        let folder = Folder::of(name, "grpo");
        replace(&folder, "tiny.toml", "checkpoint = { every = 3 }", &format!("{eval}{}", best(minutes)));
        folder.succeed(1);
        Left::by(&folder)
    };
    let never = left("clock-never", "0");
    left("clock-always", "1e-9").assert_equals(&never, "saved after every step");
    left("clock-sometimes", "0.0004").assert_equals(&never, "saved now and then");
}

#[test]
fn what_a_killed_process_left_is_cleared_away_at_the_start() {
    let folder = Folder::of("left", "grpo");
    folder.succeed(1);
    let run = folder.run();
    assert_eq!(names(&run.join("checkpoints")).len(), 2);
    let copy = |to: &str| {
        let (from, to) = (run.join("checkpoints/step_14"), run.join("checkpoints").join(to));
        let out = std::process::Command::new("cp").arg("-r").args([&from, &to]).output().unwrap();
        assert!(out.status.success());
    };
    ["step_7", "step_7.del", "step_9.tmp"].iter().for_each(|to| copy(to));
    for made in ["stages/.0.4711.tmp", "stages/.0.4711.old", ".start_0.tmp.4711.tmp"] {
        fs::create_dir_all(run.join(made)).unwrap();
    }
    fs::write(run.join("rollouts/step_15.tmp"), "half").unwrap();
    fs::write(run.join("stages/notes.tmp"), "mine").unwrap();
    folder.succeed(1);
    assert_eq!(names(&run.join("checkpoints")).len(), 2, "{:?}", names(&run.join("checkpoints")));
    assert!(!run.join("checkpoints/step_7").exists() && run.join("checkpoints/step_14").exists());
    let mut stages = names(&run.join("stages"));
    stages.sort();
    assert_eq!(stages, ["0", "notes.tmp"], "only what a run makes is removed");
    assert!(!run.join(".start_0.tmp.4711.tmp").exists() && !run.join("rollouts/step_15.tmp").exists());
}

/// Bug: the saved recipe was read with today's variables, so a run went on at another learning rate without a word; and a
/// resumption that was refused had rewritten the run's recipe.
#[test]
fn a_variable_that_has_another_value_is_refused_and_the_recipe_stays() {
    let folder = Folder::of("variable", "sft");
    replace(&folder, "tiny.toml", "max_length = 32", "max_length = 32, separator = \"${FERRL_BETWEEN}\"");
    let run = |between: &str| folder.command(1).env("FERRL_BETWEEN", between).output().unwrap();
    assert!(run("a").status.success());
    replace(&folder, "tiny.toml", "steps = 14", "steps = 20");
    let out = run("b");
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    assert!(said(&out).contains("${NAME}") && said(&out).contains("--allow-changed"), "{}", said(&out));
    let kept = fs::read_to_string(folder.run().join("recipe.toml")).unwrap();
    assert!(kept.contains("steps = 14") && !folder.run().join("recipe_until_step_14.toml").exists());
    let out = run("a");
    assert!(out.status.success(), "{}", said(&out));
}

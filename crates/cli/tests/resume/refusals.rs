//! What a run refuses, and what it survives on disk.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use crate::common::{Folder, Left, STAGES, names};
use std::fs;
use std::path::PathBuf;

pub fn said(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A run of six steps that stopped after its fourth, with checkpoints of steps 2 and 4.
fn halfway(name: &str) -> (Folder, Left) {
    let recipe =
        |steps: u32| STAGES.replace("steps = 9", &format!("steps = {steps}")).replace("cosine", "constant");
    let cut = |text: String| text.split("[[stage]]").take(2).collect::<Vec<_>>().join("[[stage]]");
    let whole = Folder::new(&format!("{name}-whole"), &cut(recipe(6)));
    whole.succeed(1);
    let want = Left::by(&whole);
    let folder = Folder::new(name, &cut(recipe(6)));
    assert!(folder.kill_when(1, || folder.run().join("checkpoints/step_4/manifest.json").exists()));
    (folder, want)
}

fn newest(folder: &Folder) -> PathBuf {
    let dir = folder.run().join("checkpoints");
    let mut steps: Vec<u32> =
        names(&dir).iter().filter_map(|n| n.strip_prefix("step_")?.parse().ok()).collect();
    steps.sort_unstable();
    dir.join(format!("step_{}", steps.last().unwrap()))
}

fn flip(file: &PathBuf) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_flipped_byte_is_told_of_and_the_checkpoint_before_is_used() {
    let (folder, want) = halfway("flipped");
    let damaged = newest(&folder);
    flip(&damaged.join("state/policy.safetensors"));
    let told = folder.succeed(2);
    for part in ["skipped", damaged.file_name().unwrap().to_str().unwrap(), "checksum", "resumed after step"]
    {
        assert!(told.contains(part), "{told}");
    }
    Left::by(&folder).assert_equals(&want, "resumed from the checkpoint before");
    // With none that is whole nothing is thrown away in silence.
    for name in names(&folder.run().join("checkpoints")) {
        flip(&folder.run().join("checkpoints").join(name).join("state/policy.safetensors"));
    }
    let before = fs::read(folder.run().join("metrics.jsonl")).unwrap();
    let out = folder.finish(1);
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    assert!(said(&out).contains("all checkpoints of this run are damaged"), "{}", said(&out));
    assert_eq!(fs::read(folder.run().join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn a_torn_last_line_of_metrics_is_no_harm() {
    let (folder, want) = halfway("torn");
    let path = folder.run().join("metrics.jsonl");
    let mut text = fs::read_to_string(&path).unwrap();
    text.push_str("{\"step\":9,\"stage\":\"imit");
    fs::write(&path, text).unwrap();
    folder.succeed(2);
    Left::by(&folder).assert_equals(&want, "after a torn line");
}

#[test]
fn a_run_is_not_overwritten_and_a_finished_one_says_so() {
    let (folder, _) = halfway("taken");
    let out = folder.afresh();
    assert_eq!(out.status.code(), Some(2));
    for part in ["never overwritten", "--resume", "--name tiny-2"] {
        assert!(said(&out).contains(part), "{}", said(&out));
    }
    folder.succeed(1);
    let weights = folder.run().join("stages/0/model.safetensors");
    let before = (Left::by(&folder), fs::metadata(&weights).unwrap().modified().unwrap());
    let told = folder.succeed(1);
    assert!(told.contains("is finished: all of its 6 steps are done"), "{told}");
    Left::by(&folder).assert_equals(&before.0, "resumed when finished");
    assert_eq!(fs::metadata(&weights).unwrap().modified().unwrap(), before.1, "nothing is written again");
}

/// Was: the run began anew and wrote over the finished model, without a word.
#[test]
fn a_finished_run_without_checkpoints_is_not_begun_anew() {
    let (folder, _) = halfway("gone");
    folder.succeed(1);
    fs::remove_dir_all(folder.run().join("checkpoints")).unwrap();
    let before = Left::by(&folder);
    let out = folder.finish(1);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    for part in ["runs/tiny/stages/0", "--name", "model.path"] {
        assert!(said(&out).contains(part), "{}", said(&out));
    }
    Left::by(&folder).assert_equals(&before, "refused");
}

#[test]
fn another_recipe_is_refused_by_its_key() {
    let (folder, want) = halfway("changed");
    let recipe = fs::read_to_string(folder.0.join("tiny.toml")).unwrap();
    for (from, to, says) in [
        ("lr = 1e-3", "lr = 2e-3", "optim.lr of stage imitate was 0.001 and is 0.002"),
        ("noise = 0.5", "noise = 0.25", "data.task.noise of stage imitate was 0.5 and is 0.25"),
        ("name = \"tiny\"", "name = \"tiny\"\nseed = 7", "seed of stage imitate was 0 and is 7"),
    ] {
        folder.write("tiny.toml", &recipe.replace(from, to));
        let out = folder.finish(1);
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(said(&out).contains(says), "{}", said(&out));
    }
    folder.write("tiny.toml", &recipe);
    folder.succeed(3);
    Left::by(&folder).assert_equals(&want, "refused in between");
}

#[test]
fn another_starting_model_is_refused() {
    let whole = Folder::of("frozen-whole", "dpo");
    whole.succeed(1);
    let folder = Folder::of("frozen", "dpo");
    assert!(folder.kill_when(1, || folder.run().join("checkpoints/step_3/manifest.json").exists()));
    for file in ["model.safetensors", "tokenizer.json", "config.json"] {
        let path = folder.0.join("model").join(file);
        let bytes = fs::read(&path).unwrap();
        let mut changed = bytes.clone();
        changed.push(b' ');
        if file == "model.safetensors" {
            changed = bytes.clone();
            *changed.last_mut().unwrap() ^= 1;
        }
        fs::write(&path, changed).unwrap();
        let out = folder.finish(1);
        assert_eq!(out.status.code(), Some(3), "{file}: {}", said(&out));
        assert!(
            said(&out).contains("the starting model is not the one this run was started with"),
            "{}",
            said(&out)
        );
        fs::write(&path, bytes).unwrap();
    }
    folder.succeed(1);
    Left::by(&folder).assert_equals(&Left::by(&whole), "put back as it was");
}

#[test]
fn a_run_that_never_began_leaves_no_folder() {
    let folder =
        Folder::new("false-start", &STAGES.replace("model = { init", "model = { path = \"nowhere\" } #"));
    let out = folder.finish(1);
    assert_eq!(out.status.code(), Some(4), "{}", said(&out));
    assert!(!folder.run().exists());
    folder.write("tiny.toml", STAGES);
    folder.succeed(1);
}

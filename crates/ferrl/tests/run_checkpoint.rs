//! What checkpoints promise: the same bits, whatever breaks while one is made, and no damage unseen.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::run::{
    Best, CheckpointOptions, Checkpoints, FaultKind, FileFault, Files, TrainedModel, files::FAULT_EXIT,
    latest, load,
};
use ferrl_engine::Class;
use ferrl_engine::checkpoint::{InitOptions, ModelDir};
use ferrl_engine::model::{Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads};
use ferrl_kernels::cpu::Cpu;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory that disappears with the test.
struct Temp(PathBuf);

impl Temp {
    fn new() -> Temp {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Thousands of fsyncs: where memory can be had as a disk, it is quicker.
        let memory = PathBuf::from("/dev/shm");
        let root = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let path = root.join(format!("ferrl-run-{}-{number}", std::process::id()));
        fs::create_dir_all(path.join("source")).unwrap();
        fs::write(path.join("source/tokenizer.json"), "{\"model\": {}}").unwrap();
        Temp(path)
    }
    fn checkpoints(&self) -> PathBuf {
        let dir = self.0.join("checkpoints");
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn trainer(head: Head, seed: u64) -> ModelTrainer {
    let mut init = InitOptions::new("qwen2");
    (init.vocab, init.hidden, init.layers, init.ffn) = (31, 16, 1, Some(12));
    (init.heads, init.kv_heads, init.max_positions) = (Some(2), Some(1), 32);
    (init.seed, init.std, init.head) = (seed, 0.2, head);
    let options = Options { training: true, ..Options::default() };
    let model = Model::random(Arc::new(Cpu::new(Some(1)).unwrap()), &init, options).unwrap();
    ModelTrainer::new(model, OptimizerOptions { ema: Some(0.9), ..OptimizerOptions::default() }).unwrap()
}

fn step(t: &mut ModelTrainer, salt: u32) {
    let batch = Batch::of((0..3u32).map(|s| (0..6).map(|i| (salt * 7 + s * 5 + i * i) % 31).collect()));
    let stats = t.forward(&batch).unwrap();
    let column = |c: &[f32]| c.iter().enumerate().map(|(i, _)| (i % 5) as f32 * 0.1 - 0.2).collect();
    let lm = stats.logp.iter().any(|&l| l != 0.0);
    let grads = StatGrads {
        logp: if lm { column(&stats.logp) } else { Vec::new() },
        value: column(&stats.value),
        ..StatGrads::default()
    };
    t.backward(&batch, &grads).unwrap();
    t.update(1e-2).unwrap();
}

/// Every number of a trainer, as bits.
fn bits(t: &ModelTrainer) -> Vec<Option<Vec<u32>>> {
    let mut out = Vec::new();
    for (i, param) in t.model.params.iter().enumerate() {
        for buffer in [Some(&param.master)].into_iter().chain(t.optimizer.buffers(i)) {
            out.push(buffer.map(|b| {
                let mut values = vec![0.0; b.len()];
                t.model.backend.read(b, 0, &mut values).unwrap();
                values.into_iter().map(f32::to_bits).collect()
            }));
        }
    }
    out.push(Some(vec![t.optimizer.steps as u32, t.model.version as u32]));
    out
}

fn role<'a>(name: &'a str, trainer: &'a ModelTrainer, source: Option<&'a Path>) -> TrainedModel<'a> {
    TrainedModel { name, trainer, config_json: None, source }
}

fn save(dir: &Path, files: &Files, n: u64, t: &ModelTrainer) -> ferrl_engine::Result<PathBuf> {
    let source = dir.parent().unwrap().join("source");
    let keeper = Checkpoints::new(dir, files, CheckpointOptions { keep: 1, ..Default::default() });
    let saved = keeper.save(n, &[role("policy", t, Some(&source))], &json!({"step": n}), None)?;
    Ok(saved.path)
}

fn loaded(path: &Path) -> (Value, Vec<Option<Vec<u32>>>) {
    let mut fresh = trainer(Head::Lm, 99);
    let value = load(path, &mut [("policy", &mut fresh)]).unwrap();
    (value, bits(&fresh))
}

#[test]
fn checkpoints_restore_two_roles_bit_for_bit() {
    let temp = Temp::new();
    let (mut policy, mut critic) = (trainer(Head::Lm, 1), trainer(Head::Score, 2));
    for salt in 0..3 {
        step(&mut policy, salt);
        step(&mut critic, salt + 10);
    }
    let value =
        json!({"rng": u64::MAX, "kl_coef": 0.1 + 0.2, "loader": {"cursor": 7}, "text": "\u{1f980}\n"});
    let keeper = Checkpoints::new(&temp.checkpoints(), &Files::default(), CheckpointOptions::default());
    let source = temp.0.join("source");
    let roles = [role("policy", &policy, Some(&source)), role("critic", &critic, None)];
    let saved = keeper.save(3, &roles, &value, None).unwrap();
    assert!(saved.problems.is_empty());
    assert!(saved.path.join("model/tokenizer.json").exists());

    let (mut a, mut b) = (trainer(Head::Lm, 8), trainer(Head::Score, 9));
    step(&mut a, 5); // what was there is replaced, moments and all
    let back = load(&saved.path, &mut [("critic", &mut b), ("policy", &mut a)]).unwrap();
    assert_eq!(back, value);
    assert!(bits(&a) == bits(&policy) && bits(&b) == bits(&critic));
    for (one, other) in [(&mut policy, &mut a), (&mut critic, &mut b)] {
        step(one, 77);
        step(other, 77);
        assert!(bits(one) == bits(other), "the next step is the same");
    }
    // The model in it is one that anybody can load.
    let read = |name: &str| ModelDir::open(&saved.path.join(name)).unwrap().config.head;
    assert_eq!((read("model"), read("model_critic")), (Head::Lm, Head::Score));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_in_words() {
    let temp = Temp::new();
    let path = save(&temp.checkpoints(), &Files::default(), 1, &trainer(Head::Lm, 1)).unwrap();
    let mut scorer = trainer(Head::Score, 1);
    let before = bits(&scorer);
    let e = load(&path, &mut [("policy", &mut scorer)]).unwrap_err().to_string();
    assert!(e.contains("value") && e.contains("another model"), "{e}");
    let e = load(&path, &mut [("critic", &mut scorer)]).unwrap_err().to_string();
    assert!(e.contains("policy") && e.contains("critic"), "{e}");
    assert!(bits(&scorer) == before, "nothing was changed");
}

/// The work of the processes that [`a_save_broken_anywhere_leaves_a_whole_checkpoint`] starts.
#[test]
#[ignore = "run by another test"]
fn child() {
    let Ok(dir) = std::env::var("FERRL_TEST_DIR") else { return };
    let fault = std::env::var("FERRL_TEST_FAULT").ok().map(|f| FileFault::parse(&f).unwrap());
    let mut t = trainer(Head::Lm, 1);
    step(&mut t, 0);
    step(&mut t, 1);
    let number = std::env::var("FERRL_TEST_STEP").unwrap().parse().unwrap();
    save(Path::new(&dir), &Files::with_faults(fault), number, &t).unwrap();
}

/// Step 1 is there; a save of `second` is broken at operation `n`. Whether the save was struck at all.
fn broken_at(
    n: u64,
    kind: FaultKind,
    lasting: bool,
    second: u64,
    states: &[Vec<Option<Vec<u32>>>; 2],
) -> bool {
    let temp = Temp::new();
    let dir = temp.checkpoints();
    let mut t = trainer(Head::Lm, 1);
    step(&mut t, 0);
    save(&dir, &Files::default(), 1, &t).unwrap();
    let struck = if kind == FaultKind::Exit {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored"])
            .env("FERRL_TEST_DIR", &dir)
            .env("FERRL_TEST_FAULT", format!("{n}:exit"))
            .env("FERRL_TEST_STEP", second.to_string())
            .output()
            .unwrap()
            .status;
        assert!(status.success() || status.code() == Some(FAULT_EXIT), "{status}");
        !status.success()
    } else {
        step(&mut t, 1);
        let files = Files::with_faults(Some(FileFault { at: n, kind, lasting }));
        if let Err(e) = save(&dir, &files, second, &t) {
            let full = kind == FaultKind::Enospc;
            assert_eq!(e.class, if full { Class::Resource } else { Class::Data }, "{e}");
        }
        files.operations() >= n
    };
    let what = format!("{kind:?} at {n} (lasting: {lasting}), step {second} after step 1");
    let found = latest(&dir).unwrap();
    assert!(found.skipped.is_empty(), "{what}: {:?}", found.skipped);
    let (value, numbers) = loaded(&found.path.unwrap_or_else(|| panic!("{what}: no checkpoint")));
    let is_old = numbers == states[0] && value["step"] == 1;
    let is_new = numbers == states[1] && value["step"] == second;
    assert!(is_old || is_new, "{what}: neither the one nor the other");

    // The next save cleans up and succeeds.
    step(&mut t, 2);
    let path = save(&dir, &Files::default(), 3, &t).unwrap();
    assert!(loaded(&path).1 == bits(&t), "{what}");
    let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step_3"], "{what}");
    struck
}

#[test]
fn a_save_broken_anywhere_leaves_a_whole_checkpoint() {
    let mut t = trainer(Head::Lm, 1);
    step(&mut t, 0);
    let first = bits(&t);
    step(&mut t, 1);
    let states = [first, bits(&t)];
    let mut broken = 0;
    for second in [2, 1] {
        for (kind, lasting) in [
            (FaultKind::Exit, false),
            (FaultKind::Eio, false),
            (FaultKind::Eio, true),
            (FaultKind::Short, false),
            (FaultKind::Enospc, false),
            (FaultKind::Enospc, true),
        ] {
            let mut n = 1;
            while broken_at(n, kind, lasting, second, &states) {
                n += 1;
            }
            assert!(n > 30, "{kind:?}: {n} operations were broken");
            broken += n - 1;
        }
    }
    println!("{broken} saves broken");
}

fn all_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all_files(&path, out) } else { out.push(path) }
    }
}

#[test]
fn any_flipped_byte_is_found_and_named() {
    let temp = Temp::new();
    let dir = temp.checkpoints();
    let mut t = trainer(Head::Lm, 1);
    step(&mut t, 0);
    let path = save(&dir, &Files::default(), 4, &t).unwrap();
    let mut files = Vec::new();
    all_files(&path, &mut files);
    assert_eq!(files.len(), 6, "manifest, state, tensors, config, tokenizer, weights");
    let (mut flips, mut named) = (0, 0);
    let mut fresh = trainer(Head::Lm, 2);
    let before = bits(&fresh);
    for file in &files {
        let whole = fs::read(file).unwrap();
        for i in 0..250usize {
            let mut bytes = whole.clone();
            let at = (i * 7919 + i * i * 31) % bytes.len();
            bytes[at] ^= 1 << (i % 8);
            fs::write(file, &bytes).unwrap();
            let e = load(&path, &mut [("policy", &mut fresh)]).unwrap_err().to_string();
            assert!(e.contains(file.file_name().unwrap().to_str().unwrap()), "{e}");
            named += usize::from(e.contains("tensor \""));
            flips += 1;
        }
        let cut = [&whole[..whole.len() - 1], &whole[..0], &[&whole[..], b"x"].concat()].map(<[u8]>::to_vec);
        for bytes in cut {
            fs::write(file, bytes).unwrap();
            let found = latest(&dir).unwrap();
            assert!(found.path.is_none() && found.skipped.len() == 1);
        }
        fs::remove_file(file).unwrap();
        assert!(load(&path, &mut [("policy", &mut fresh)]).is_err());
        fs::write(file, &whole).unwrap();
    }
    assert!(flips == 1500 && named > 300, "{named} of {flips} name a tensor");
    assert!(bits(&fresh) == before, "nothing broken was loaded");
    load(&path, &mut [("policy", &mut fresh)]).unwrap();
    assert!(bits(&fresh) == bits(&t));
}

#[test]
fn a_damaged_checkpoint_is_skipped_and_told_of() {
    let temp = Temp::new();
    let dir = temp.checkpoints();
    let t = trainer(Head::Lm, 1);
    let keeper =
        Checkpoints::new(&dir, &Files::default(), CheckpointOptions { keep: 3, ..Default::default() });
    for n in [9, 10, 11] {
        keeper.save(n, &[role("policy", &t, None)], &json!(n), None).unwrap();
    }
    fs::create_dir(dir.join("step_12.tmp")).unwrap();
    fs::create_dir(dir.join("step_13")).unwrap();
    let weights = dir.join("step_11/state/policy.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let found = latest(&dir).unwrap();
    assert_eq!(found.path.unwrap(), dir.join("step_10"));
    assert_eq!(found.skipped.len(), 2);
    assert!(found.skipped[1].1.to_string().contains("tensor \"master.head\""), "{:?}", found.skipped);
}

#[test]
fn the_latest_and_the_best_are_kept() {
    let temp = Temp::new();
    let t = trainer(Head::Lm, 1);
    let files = Files::default();
    for (lower, expected) in [(false, [2, 4, 5, 7, 8]), (true, [1, 3, 6, 7, 8])] {
        let dir = temp.0.join(format!("lower-{lower}"));
        fs::create_dir_all(&dir).unwrap();
        let options = CheckpointOptions { keep: 2, keep_best: 3, dtype: None };
        let keeper = Checkpoints::new(&dir, &files, options);
        for (n, value) in
            [(1, 0.1), (2, 0.9), (3, 0.2), (4, 0.8), (5, 0.7), (6, 0.3), (7, f64::NAN), (8, 0.5)]
        {
            let best = Best { metric: "eval/pass@1".into(), value, lower };
            keeper.save(n, &[role("policy", &t, None)], &Value::Null, Some(best)).unwrap();
        }
        let kept: Vec<u64> = keeper.list().unwrap().into_iter().map(|c| c.0).collect();
        assert_eq!(kept, expected);
    }
}

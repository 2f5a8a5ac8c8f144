//! A run that fails in the middle, in whatever way, has saved what it learned, and goes on from there.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{FaultKind, FileFault, Files, MetricsLog, RunFolder, StepRecord, latest};
use ferrl::runner::{self, RunOptions, RunOutcome, RunWatch};
use ferrl::train::Waits;
use ferrl_engine::{Class, Error, Result};
use ferrl_kernels::cpu::Cpu;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Two stages, four steps, no checkpoint but at the end of each stage; rollouts run ahead by one.
const RECIPE: &str = r#"
name = "r"
model = { init = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, ffn = 16, max_positions = 64 } }
data = { train = ["task:countdown"], max_length = 64 }
rollout = { prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 1, max_lag = 1 }
train = { micro_batch_tokens = 256 }
eval = { every = 2, prompts = 2 }

[[stage]]
name = "imitate"
algo = "sft"
train = { steps = 3, batch = 2 }
optim = { ema = 0.9 }

[[stage]]
name = "reinforce"
algo = { name = "grpo" }
train = { steps = 4 }
"#;

fn temp() -> TempDir {
    // Thousands of fsyncs: where memory can be had as a disk, it is quicker.
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Looks on, and breaks what it is asked to break.
#[derive(Default)]
struct Saboteur {
    /// Panics at that many-th thing that a run tells anybody; 0 never.
    panics_at: usize,
    told: Arc<AtomicUsize>,
    /// Notes, in order.
    notes: Vec<String>,
    /// Removes this folder after a step.
    removes: Option<(u64, PathBuf)>,
    waits_for_disk: bool,
}

fn tell(told: &AtomicUsize, panics_at: usize) {
    assert!(told.fetch_add(1, Ordering::SeqCst) + 1 != panics_at, "sabotage");
}

impl RunWatch for Saboteur {
    fn step(&mut self, _: &str, _: u64, _: u64, record: &StepRecord) {
        if let Some((_, folder)) = self.removes.as_ref().filter(|r| r.0 == record.step) {
            fs::remove_dir_all(folder).unwrap();
        }
    }
    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }
    fn waits(&self) -> Option<Waits> {
        let (told, at) = (self.told.clone(), self.panics_at);
        Some(Arc::new(move |_| tell(&told, at)))
    }
    fn disk_full(&mut self, _: &Error, _: Duration) -> bool {
        self.waits_for_disk
    }
}

/// Starts the run, or goes on with it.
fn go(root: &Path, resolved: &Resolved, files: &Files, watch: &mut Saboteur) -> Result<RunOutcome> {
    let folder = match root.join("r").exists() {
        true => RunFolder::open_with(&root.join("r"), files.clone())?,
        false => RunFolder::create_with(root, "r", &resolved.toml, files.clone())?,
    };
    runner::run(resolved, folder, Arc::new(Cpu::new(Some(1)).unwrap()), watch)
}

fn parse(text: &str) -> Resolved {
    Recipe::parse(text, "r.toml", "r", &[]).unwrap()
}

/// Weights, metrics without times, and all rollouts.
type Left = (Vec<u8>, Vec<StepRecord>, Vec<String>);

fn left(root: &Path, stages: usize) -> Left {
    let run = root.join("r");
    let mut steps = MetricsLog::history(&run.join("metrics.jsonl")).unwrap();
    for record in &mut steps {
        record.seconds = 0.0;
        record.metrics.retain(|(name, _)| !name.contains("tim"));
    }
    let rollouts = steps.iter().map(|r| run.join(format!("rollouts/step_{}.jsonl", r.step)));
    let rollouts = rollouts.filter_map(|path| fs::read_to_string(path).ok()).collect();
    let weights = fs::read(run.join(format!("stages/{}/model.safetensors", stages - 1))).unwrap();
    (weights, steps, rollouts)
}

/// Steps in metrics.jsonl, and the step of the newest checkpoint.
fn standing(root: &Path) -> (u64, u64) {
    let run = root.join("r");
    let steps = MetricsLog::history(&run.join("metrics.jsonl")).unwrap().len() as u64;
    let newest = latest(&run.join("checkpoints")).unwrap().path;
    let step = newest.map_or(0, |p| p.file_name().unwrap().to_str().unwrap()[5..].parse().unwrap());
    (steps, step)
}

#[test]
fn a_panic_anywhere_in_a_step_or_an_evaluation_loses_no_step() {
    let resolved = parse(RECIPE);
    let whole = temp();
    let mut watch = Saboteur::default();
    go(whole.path(), &resolved, &Files::default(), &mut watch).unwrap();
    let want = left(whole.path(), 2);
    assert_eq!((want.1.len(), want.2.len()), (7, 4));
    let places = watch.told.load(Ordering::SeqCst);
    assert!(places > 30, "{places} places");
    std::panic::set_hook(Box::new(|_| ())); // what follows panics on purpose
    for at in 1..=places {
        let temp = temp();
        let mut watch = Saboteur { panics_at: at, ..Default::default() };
        let run =
            catch_unwind(AssertUnwindSafe(|| go(temp.path(), &resolved, &Files::default(), &mut watch)));
        assert!(run.is_err(), "nothing happened at {at}");
        let (written, saved) = standing(temp.path());
        let pending = saved == written + 1; // a step whose evaluation panicked is kept with the checkpoint
        assert!(saved == written || pending, "at {at}: {written} steps, saved after {saved}");
        let told = watch.notes.iter().any(|n| n.contains(&format!("--resume continues after step {saved}")));
        assert!(told || saved == 0 || saved == 3, "at {at}: {:?}", watch.notes);
        go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
        assert!(left(temp.path(), 2) == want, "at {at}: another run");
    }
    let _ = std::panic::take_hook();
}

#[test]
fn the_log_tells_what_happened_to_a_run() {
    let temp = temp();
    let resolved = parse(&RECIPE.replace("eval = {", "eval = { at_start = true,"));
    go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
    go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
    let lines = ferrl::run::journal::read(&temp.path().join("r")).unwrap();
    let of = |event: &str| lines.iter().filter(|l| l["event"] == event).collect::<Vec<_>>();
    for line in &lines {
        let whole = line["time"].is_number() && line["level"].is_string() && line["message"].is_string();
        assert!(whole, "{line}");
    }
    let start = of("start");
    assert_eq!(start.len(), 1);
    assert!(start[0]["version"].is_string() && start[0]["recipe_xxh3"].is_string(), "{}", start[0]);
    assert!(start[0]["device"].as_str().unwrap().contains("cpu"), "{}", start[0]);
    let names: Vec<_> = of("stage").iter().map(|l| l["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["imitate", "reinforce"]);
    let evaluated: Vec<_> = of("evaluation").iter().map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(evaluated, [0, 2, 3, 3, 5, 7], "counted over all stages");
    assert!(of("evaluation").iter().all(|l| !l["metrics"].as_object().unwrap().is_empty()));
    let saved: Vec<_> = of("checkpoint").iter().map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(saved, [3, 7]);
    assert_eq!((of("resume").len(), of("end").len()), (1, 2));
}

#[test]
fn an_error_in_the_middle_saves_the_last_good_state() {
    // The learning rate rises until a weight is no number any more.
    let text = RECIPE.split("[[stage]]").take(2).collect::<Vec<_>>().join("[[stage]]");
    let text = text
        .replace("eval = { every = 2, prompts = 2 }", "")
        .replace("ema = 0.9", "name = \"sgd\", warmup = 1.0, max_grad_norm = 0.0");
    let mut resolved = parse(&text.replace("steps = 3", "steps = 50"));
    resolved.stages[0].recipe.optim.lr = 1e18; // beyond what a recipe may say
    let temp = temp();
    let mut watch = Saboteur::default();
    let error = go(temp.path(), &resolved, &Files::default(), &mut watch).err().expect("numbers too large");
    assert_eq!(error.class, Class::Numerics, "{error}");
    let (written, saved) = standing(temp.path());
    assert!(written > 0 && written == saved, "{written} steps, saved after {saved}");
    assert!(watch.notes.iter().any(|n| n.contains(&format!("after step {saved}"))), "{:?}", watch.notes);
    let log = fs::read_to_string(temp.path().join("r/log.jsonl")).unwrap();
    assert!(log.contains("\"level\":\"error\"") && log.contains(&format!("after step {saved}")), "{log}");
    let again = go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).err().unwrap();
    assert_eq!(again.to_string(), error.to_string(), "the resumed run fails at the same place");
    assert_eq!(standing(temp.path()), (written, saved));
}

#[test]
fn a_disk_that_is_full_for_a_while_pauses_the_run() {
    let text = RECIPE.replace("steps = 3,", "steps = 2,").replace("steps = 4", "steps = 2");
    let resolved = parse(&text.replace("eval = { every = 2, prompts = 2 }", "checkpoint = { every = 1 }"));
    let (whole, files) = (temp(), Files::default());
    go(whole.path(), &resolved, &files, &mut Saboteur::default()).unwrap();
    let want = left(whole.path(), 2);
    let made = temp();
    let before = Files::default();
    drop(RunFolder::create_with(made.path(), "r", &resolved.toml, before.clone()).unwrap());
    let mut paused = 0;
    for at in before.operations() + 1..=files.operations() {
        let temp = temp();
        let fault = FileFault { at, kind: FaultKind::Enospc, lasting: false };
        let mut watch = Saboteur { waits_for_disk: true, ..Default::default() };
        match go(temp.path(), &resolved, &Files::with_faults(Some(fault)), &mut watch) {
            Ok(_) => paused += 1,
            // Before the first step nothing is lost, and the models of stages are written once more.
            Err(e) => {
                assert_eq!(e.class, Class::Resource, "{e}");
                go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
            }
        }
        assert!(left(temp.path(), 2) == want, "at operation {at}: another run");
    }
    assert!(paused > 60, "the run waited at {paused} operations only");
}

#[test]
fn what_was_learned_is_saved_when_a_line_cannot_be_written() {
    let text = RECIPE.replace("eval = { every = 2, prompts = 2 }", "");
    let resolved = parse(&text);
    let (whole, files) = (temp(), Files::default());
    go(whole.path(), &resolved, &files, &mut Saboteur::default()).unwrap();
    let want = left(whole.path(), 2);
    let mut lost = 0;
    for at in (20..=files.operations()).step_by(3) {
        let temp = temp();
        let files = Files::with_faults(Some(FileFault { at, kind: FaultKind::Eio, lasting: false }));
        if go(temp.path(), &resolved, &files, &mut Saboteur::default()).is_err() {
            let (written, saved) = standing(temp.path());
            lost += written.saturating_sub(saved);
            go(temp.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
        }
        assert!(left(temp.path(), 2) == want, "at operation {at}: another run");
    }
    assert_eq!(lost, 0, "steps were taken again");
}

#[test]
fn a_folder_that_vanishes_is_noticed_at_the_next_step() {
    let temp = temp();
    let mut watch = Saboteur { removes: Some((2, temp.path().join("r"))), ..Default::default() };
    let error = go(temp.path(), &parse(RECIPE), &Files::default(), &mut watch).err().expect("it is gone");
    let text = error.to_string();
    assert!(text.contains("is missing") && text.contains(temp.path().join("r").to_str().unwrap()), "{text}");
    assert!(!temp.path().join("r").exists(), "nothing is left where somebody removed everything");
}

#[test]
fn a_folder_that_vanishes_is_rescued_where_that_was_asked_for() {
    let text = RECIPE.split("[[stage]]").take(2).collect::<Vec<_>>().join("[[stage]]");
    let (whole, temp, resolved) = (temp(), temp(), parse(&text));
    go(whole.path(), &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
    let mut watch = Saboteur { removes: Some((1, temp.path().join("r"))), ..Default::default() };
    let folder = RunFolder::create(temp.path(), "r", &resolved.toml).unwrap();
    let options = RunOptions { rescue: Some(temp.path().join("elsewhere")), ..Default::default() };
    let backend = Arc::new(Cpu::new(Some(1)).unwrap());
    let error = runner::run_with(&resolved, folder, backend, &mut watch, options).err().expect("it is gone");
    assert!(error.to_string().contains("is missing"), "{error}");
    let rescued = temp.path().join("elsewhere");
    assert!(watch.notes.iter().any(|n| n.contains(rescued.join("r").to_str().unwrap())), "{:?}", watch.notes);
    assert!(rescued.join("r/checkpoints/step_2/model/tokenizer.json").is_file());
    go(&rescued, &resolved, &Files::default(), &mut Saboteur::default()).unwrap();
    assert!(left(&rescued, 1).0 == left(whole.path(), 1).0, "the rescued run ends with other weights");
}

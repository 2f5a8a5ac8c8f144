//! A folder with small recipes, the program run in it, and what a finished run leaves.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const COMMON: &str = r#"
name = "tiny"
model = { path = "model" }
rollout = { prompts = 4, samples = 4, max_new_tokens = 8, cache_mib = 4 }
reward = [{ verifier = "regex", truncated = "score", options = { pattern = ".*1.*" } }]
train = { micro_batch_tokens = 96 }
checkpoint = { every = 3 }
"#;

/// What is trained: a name, and what the recipe says beside [`COMMON`].
pub const RUNS: [(&str, &str); 3] = [
    (
        "sft",
        r#"
        algo = "sft"
        data = { train = ["demonstrations.jsonl"], max_length = 32 }
        train = { steps = 14, batch = 8 }
        optim = { lr = 1e-3, schedule = "cosine", warmup = 0.2, ema = 0.9 }
        "#,
    ),
    (
        "dpo",
        r#"
        algo = { name = "dpo", beta = 0.3 }
        data = { train = ["pairs.jsonl"], max_length = 32 }
        train = { steps = 14, batch = 4 }
        optim = { lr = 1e-3, schedule = "linear" }
        "#,
    ),
    (
        "grpo",
        r#"
        algo = { name = "grpo", epochs = 2, minibatches = 2 }
        data = { train = ["prompts.jsonl"], max_length = 32 }
        train = { steps = 14 }
        optim = { lr = 1e-3 }
        "#,
    ),
];

/// Two stages from nothing: a tokenizer and a model are made, imitate, then meet a critic and an adaptive KL weight.
pub const STAGES: &str = r#"
name = "tiny"
model = { init = { hidden = 32, layers = 2, heads = 2, kv_heads = 1, ffn = 48, max_positions = 64 } }
data = { train = ["task:countdown"], task = { noise = 0.5 }, max_length = 64 }
rollout = { prompts = 8, samples = 4, max_new_tokens = 12, cache_mib = 4 }
reward = [{ verifier = "countdown", options = { format = "plain" } }]
train = { micro_batch_tokens = 256 }
eval = { at_start = true, prompts = 8 }
checkpoint = { every = 2 }

[[stage]]
name = "imitate"
algo = "sft"
train = { steps = 9, batch = 16 }
optim = { lr = 1e-3, schedule = "cosine", ema = 0.9 }

[[stage]]
name = "reinforce"
algo = { name = "ppo", epochs = 2, minibatches = 2, kl = { coef = 0.05, target = 0.1 } }
train = { steps = 7 }
optim = { lr = 1e-3 }
"#;

/// A folder that disappears with its test.
pub struct Folder(pub PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Folder {
    /// With a recipe in it.
    pub fn new(name: &str, recipe: &str) -> Folder {
        // Hundreds of checkpoints: where memory can be had as a disk, it is quicker.
        let memory = PathBuf::from("/dev/shm");
        let root = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let dir = root.join(format!("ferrl-resume-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        let folder = Folder(dir);
        folder.write("tiny.toml", recipe);
        folder
    }

    /// With one of [`RUNS`], its data and its model.
    pub fn of(name: &str, algorithm: &str) -> Folder {
        let own = RUNS.iter().find(|r| r.0 == algorithm).unwrap().1;
        let recipe = merged(COMMON, own);
        let folder = Folder::new(&format!("{name}-{algorithm}"), &recipe);
        let row = |i: usize| format!("{}+{}=", i % 7, i * 5 % 11);
        let lines = |f: &dyn Fn(usize) -> Value| (0..24).map(|i| format!("{}\n", f(i))).collect::<String>();
        let prompt = |i| serde_json::json!({ "prompt": row(i) });
        let demonstration =
            |i| serde_json::json!({ "prompt": row(i), "response": format!("{}", i % 7 + i * 5 % 11) });
        let pair =
            |i| serde_json::json!({ "prompt": row(i), "chosen": format!("{}", i + 1), "rejected": "0" });
        folder.write("prompts.jsonl", &lines(&prompt));
        folder.write("demonstrations.jsonl", &lines(&demonstration));
        folder.write("pairs.jsonl", &lines(&pair));
        folder.write("text.jsonl", "{\"text\": \"0123456789+=\"}\n");
        let made = ["tokenizer", "train", "--input", "text.jsonl", "--kind", "char", "--special", "<eos>"];
        folder.ok(&[&made[..], &["--out", "tok"]].concat());
        let sizes = ["--hidden", "32", "--layers", "2", "--heads", "2", "--std", "0.2", "--seed", "3"];
        folder
            .ok(&[&["init", "--family", "qwen2", "--tokenizer", "tok", "--out", "model"], &sizes[..]]
                .concat());
        folder
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }

    /// The run's folder.
    pub fn run(&self) -> PathBuf {
        self.0.join("runs/tiny")
    }

    fn ok(&self, args: &[&str]) {
        let out = Command::new(env!("CARGO_BIN_EXE_ferrl")).current_dir(&self.0).args(args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    /// The command that starts the run, or goes on with it where there is one.
    pub fn command(&self, threads: usize) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrl"));
        command.current_dir(&self.0).args(["train", "tiny.toml", &format!("threads={threads}")]);
        command.args(self.run().exists().then_some("--resume"));
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Starts the run, or goes on with it where there is one.
    pub fn start(&self, threads: usize) -> Child {
        self.command(threads).spawn().unwrap()
    }

    /// The same, until it ends.
    pub fn finish(&self, threads: usize) -> Output {
        self.command(threads).output().unwrap()
    }

    /// The same, and it ends well.
    pub fn succeed(&self, threads: usize) -> String {
        let out = self.finish(threads);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{}: {said}", self.0.display());
        said
    }

    /// The run begun anew, whatever is there.
    pub fn afresh(&self) -> Output {
        let args = ["train", "tiny.toml"];
        Command::new(env!("CARGO_BIN_EXE_ferrl")).current_dir(&self.0).args(args).output().unwrap()
    }

    /// Kills the run (SIGKILL) as soon as `when` holds; whether it was still alive then.
    pub fn kill_when(&self, threads: usize, when: impl Fn() -> bool) -> bool {
        let mut child = self.start(threads);
        let limit = Instant::now() + Duration::from_secs(120);
        while !when() && child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "{} hangs", self.0.display());
            std::thread::sleep(Duration::from_micros(50));
        }
        let alive = child.try_wait().unwrap().is_none();
        let _ = child.kill();
        child.wait().unwrap();
        alive
    }
}

/// Tables of the second text added to those of the first.
fn merged(common: &str, own: &str) -> String {
    let train = |text: &str| {
        let line = text.lines().find(|l| l.trim().starts_with("train = {")).unwrap();
        line.trim().trim_start_matches("train = {").trim_end_matches('}').trim().to_string()
    };
    let rest = |text: &str| {
        text.lines()
            .filter(|l| !l.trim().starts_with("train = {"))
            .map(str::trim)
            .collect::<Vec<_>>()
            .join("\n")
    };
    format!("{}\n{}\ntrain = {{ {}, {} }}\n", rest(common), rest(own), train(common), train(own))
}

/// What a run leaves: everything that must not depend on how often it was stopped.
#[derive(PartialEq)]
pub struct Left {
    /// The bytes of the last stage's weights.
    weights: Vec<u8>,
    /// Every line of metrics.jsonl without its times.
    pub metrics: Vec<String>,
    /// Every file of rollouts.
    pub rollouts: BTreeMap<String, String>,
    /// Records of the TensorBoard file.
    pub events: usize,
}

impl Left {
    pub fn by(folder: &Folder) -> Left {
        let run = folder.run();
        let last = names(&run.join("stages")).into_iter().filter(|n| !n.starts_with('.')).max().unwrap();
        let weights = fs::read(run.join("stages").join(last).join("model.safetensors")).unwrap();
        let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let rollouts = names(&run.join("rollouts"));
        let read = |name: String| {
            let text = fs::read_to_string(run.join("rollouts").join(&name)).unwrap();
            (name, text)
        };
        let rollouts = rollouts.into_iter().filter(|n| n.ends_with(".jsonl")).map(read).collect();
        let files = names(&run.join("tensorboard"));
        assert_eq!(files.len(), 1, "one file of events");
        let events = frames(&fs::read(run.join("tensorboard").join(&files[0])).unwrap());
        Left { weights, metrics: metrics.lines().map(timeless).collect(), rollouts, events }
    }

    pub fn assert_equals(&self, other: &Left, what: &str) {
        assert_eq!(self.metrics, other.metrics, "{what}");
        assert!(self.rollouts == other.rollouts, "{what}: the rollouts differ");
        assert_eq!(self.events, other.events, "{what}: events");
        assert!(self.weights == other.weights, "{what}: the weights differ");
    }
}

pub fn names(dir: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(dir).map(|all| all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect());
    entries.unwrap_or_default()
}

/// A line of metrics without what depends on the clock or on the machine.
fn timeless(line: &str) -> String {
    let mut value: Value = serde_json::from_str(line).unwrap();
    let timed = ["tim", "seconds", "per_second", "tokens/s", "memory"];
    value.as_object_mut().unwrap().retain(|k, _| !timed.iter().any(|t| k.contains(t)));
    value.to_string()
}

/// Records: eight bytes of length, four of checksum, the data, four of checksum.
fn frames(mut bytes: &[u8]) -> usize {
    let mut count = 0;
    while bytes.len() >= 12 {
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes = &bytes[n + 16..];
        count += 1;
    }
    assert!(bytes.is_empty(), "a torn record");
    count
}

//! One bad input: files, a command, and what must come of it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// No bad input may take longer.
const LIMIT: Duration = Duration::from_secs(300);

/// Looks at the folder after the command, and at what it printed.
pub type Check = fn(&Path, &str);

/// A bad input and what must come of it.
pub struct Case {
    /// What is wrong, in a few words; also the row of the manual.
    pub name: &'static str,
    /// The arguments of `ferrl`; `{model}` and `{chat}` stand for tiny models without and with a chat template,
    /// `{short}` for one with 16 learned positions, `{few}` for one of 20 tokens and `{judge}` for a reward model of that kind.
    pub command: Vec<String>,
    files: Vec<(&'static str, Vec<u8>)>,
    /// The exit code of its class; 0 where a warning is enough.
    pub exit: i32,
    /// What the output must name: files, rows, keys, numbers. Never sentences, which may be worded anew.
    pub says: Vec<String>,
    never: Vec<&'static str>,
    exists: Vec<&'static str>,
    absent: Vec<&'static str>,
    checks: Vec<Check>,
    env: Vec<(&'static str, &'static str)>,
    input: &'static str,
}

impl Case {
    /// `command` is split at spaces; [`Case::arg`] adds arguments that contain some.
    pub fn new(name: &'static str, command: &str) -> Self {
        Case {
            name,
            command: command.split_whitespace().map(String::from).collect(),
            files: Vec::new(),
            exit: 2,
            says: Vec::new(),
            never: Vec::new(),
            exists: Vec::new(),
            absent: Vec::new(),
            checks: Vec::new(),
            env: Vec::new(),
            input: "",
        }
    }
    /// One more argument, as it is.
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.command.push(argument.into());
        self
    }
    /// A file in the folder where the command runs; `{model}` and `{chat}` in it are replaced too.
    pub fn file(mut self, name: &'static str, content: impl AsRef<[u8]>) -> Self {
        self.files.push((name, content.as_ref().to_vec()));
        self
    }
    /// The expected exit code.
    pub fn exit(mut self, code: i32) -> Self {
        self.exit = code;
        self
    }
    /// Words that standard output or standard error must contain.
    pub fn says(mut self, words: &[&str]) -> Self {
        self.says.extend(words.iter().map(|w| w.to_string()));
        self
    }
    /// Words that neither may contain.
    pub fn never_says(mut self, words: &[&'static str]) -> Self {
        self.never.extend(words);
        self
    }
    /// Paths that must be there afterwards.
    pub fn leaves(mut self, paths: &[&'static str]) -> Self {
        self.exists.extend(paths);
        self
    }
    /// Paths that must not be there afterwards.
    pub fn leaves_no(mut self, paths: &[&'static str]) -> Self {
        self.absent.extend(paths);
        self
    }
    /// Anything else that must hold.
    pub fn check(mut self, check: Check) -> Self {
        self.checks.push(check);
        self
    }
    /// A variable of the environment.
    pub fn env(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.push((name, value));
        self
    }
    /// What standard input holds.
    pub fn input(mut self, text: &'static str) -> Self {
        self.input = text;
        self
    }

    /// What is wrong with the outcome, if anything is.
    fn problem(&self) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let filled =
            |text: &str| models().iter().fold(text.to_string(), |t, (name, dir)| t.replace(name, dir));
        for (name, content) in &self.files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let content = match std::str::from_utf8(content) {
                Ok(text) => filled(text).into_bytes(),
                Err(_) => content.clone(),
            };
            std::fs::write(path, content).unwrap();
        }
        let arguments: Vec<String> = self.command.iter().map(|a| filled(a)).collect();
        let (status, output) = match self.run(folder.path(), &arguments) {
            Ok(ended) => ended,
            Err(output) => return Some(format!("runs longer than {LIMIT:?}\n{output}")),
        };
        let said = |what: String| Some(format!("{what}\n{output}"));
        if status.code() != Some(self.exit) {
            return said(format!("exit code {} expected, got {status}", self.exit));
        }
        if output.contains("panicked") || output.contains("this is a bug in ferrl") {
            return said("a panic".into());
        }
        if let Some(word) = self.says.iter().find(|w| !output.contains(&filled(w))) {
            return said(format!("does not name {word:?}"));
        }
        if let Some(word) = self.never.iter().find(|w| output.contains(&filled(w))) {
            return said(format!("says {word:?}"));
        }
        if let Some(path) = self.exists.iter().find(|p| !folder.path().join(p).exists()) {
            return said(format!("{path} is gone"));
        }
        if let Some(path) = self.absent.iter().find(|p| folder.path().join(p).exists()) {
            return said(format!("{path} was left behind"));
        }
        self.checks.iter().for_each(|check| check(folder.path(), &output));
        None
    }

    /// The exit status and both outputs; only the outputs where the time is over.
    fn run(&self, folder: &Path, arguments: &[String]) -> Result<(ExitStatus, String), String> {
        std::fs::write(folder.join(".input"), self.input).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(arguments)
            .current_dir(folder)
            .envs(self.env.iter().copied())
            .env("FERRL_THREADS", "1")
            .stdin(std::fs::File::open(folder.join(".input")).unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipes: Vec<Box<dyn Read + Send>> =
            vec![Box::new(child.stderr.take().unwrap()), Box::new(child.stdout.take().unwrap())];
        let readers: Vec<_> = pipes
            .drain(..)
            .map(|mut pipe| {
                std::thread::spawn(move || {
                    let mut bytes = Vec::new();
                    let _ = pipe.read_to_end(&mut bytes);
                    String::from_utf8_lossy(&bytes).into_owned()
                })
            })
            .collect();
        let start = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if start.elapsed() > LIMIT => break None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        if status.is_none() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let output = readers.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>().join("\n");
        status.map(|s| (s, output.clone())).ok_or(output)
    }
}

/// Runs the cases; all that fail are shown.
pub fn all(cases: Vec<Case>) {
    let problem = |case: &Case| Some(format!("{}: {}", case.name, case.problem()?));
    let problems: Vec<String> = cases.iter().filter_map(problem).collect();
    let (failed, all) = (problems.len(), cases.len());
    assert!(problems.is_empty(), "{failed} of {all} bad inputs\n\n{}", problems.join("\n\n"));
}

/// Turns begin with a name and end with a token that is not the tokenizer's end of text.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}\
                        {% if add_generation_prompt %}assistant: {% endif %}";

/// Tiny models by their names in cases, made once: characters as tokens, one layer.
fn models() -> &'static [(&'static str, String)] {
    static MODELS: OnceLock<(Vec<(&str, String)>, tempfile::TempDir)> = OnceLock::new();
    let made = || {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let letters: String = (' '..='~').collect();
        let row = serde_json::json!({ "text": format!("{letters}\n") });
        std::fs::write(path("text.jsonl"), format!("{row}\n")).unwrap();
        let make = |arguments: &[&str]| {
            let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
                .current_dir(folder.path())
                .args(arguments)
                .output()
                .unwrap();
            assert!(out.status.success(), "{arguments:?}\n{}", String::from_utf8_lossy(&out.stderr));
        };
        let special = ["--special", "<eos>", "--special", "<end>"];
        make(
            &[
                &["tokenizer", "train", "--input", "text.jsonl", "--kind", "char", "--out", "tok"],
                &special[..],
            ]
            .concat(),
        );
        let sizes = "--hidden 16 --layers 1 --heads 2 --tokenizer tok --out";
        let kinds = [
            ("{model}", "plain", "--family qwen2"),
            ("{chat}", "chat", "--family qwen2"),
            ("{short}", "short", "--family gpt2 --max-positions 16"),
            ("{judge}", "judge", "--family gpt2 --max-positions 16 --head score"),
        ];
        let mut all = Vec::new();
        for (shown, name, family) in kinds {
            make(&format!("init {family} {sizes} {name}").split(' ').collect::<Vec<_>>());
            all.push((shown, path(name).to_str().unwrap().to_string()));
        }
        make(&"init --hidden 16 --layers 1 --heads 2 --vocab 20 --out few".split(' ').collect::<Vec<_>>());
        all.push(("{few}", path("few").to_str().unwrap().to_string()));
        add_template(&path("chat"));
        (all, folder)
    };
    &MODELS.get_or_init(made).0
}

fn add_template(dir: &Path) {
    let path: PathBuf = dir.join("tokenizer_config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["chat_template"] = TEMPLATE.into();
    std::fs::write(path, config.to_string()).unwrap();
}

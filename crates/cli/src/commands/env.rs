//! `ferrl env`: lists environments, plays them in the terminal or with the actions of a file, and checks them.

use crate::data;
use crate::options::{key_values, seed};
use crate::output::{JsonlOutput, print, visible};
use clap::Subcommand;
use ferrl::env::openenv::Servers;
use ferrl::env::python::{EpisodeStart, PythonEnv, WorkerEpisode, WorkerSettings, Workers};
use ferrl::env::{Environment, EpisodeEnd, Fault, Next, Turn, check, open, open_row};
use ferrl::recipe::{EnvSettings, option_keys, tasks_json, tasks_text};
use ferrl::task::TASKS;
use ferrl::tool::TOOLS;
use ferrl::verify::Hooks;
use ferrl_engine::{Class, Error, Result, counted, nearest};
use serde_json::{Map, Value, json};
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// List, play, run or check environments
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: EnvCommand,
}

#[derive(Subcommand)]
enum EnvCommand {
    /// List the built-in environments with their settings (`data.task`) and defaults
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List the tools that a recipe may name in `env.tools`, with their settings (`env.options`) and defaults
    Tools,
    /// Play an episode in the terminal, an action per line
    Play(Which),
    /// Run an episode with the actions of a file, and write every turn as a JSON line
    ///
    /// The first line is `{"turn": 0, "state": ...}`. Each further line holds `turn`, `action`, `next_state` (the whole text before
    /// the next action), `reward`, `score`, `done`, `terminated`, `truncated`, `extra_info` and `sequence` (which
    /// training sequence of the trajectory the turn is in). An episode that is lost ends with `{"turn": N, "lost": {...}}`.
    Run {
        #[command(flatten)]
        which: Which,
        /// JSON lines, each the text of an action; - is standard input
        #[arg(long, value_name = "FILE")]
        actions: PathBuf,
        /// JSON lines to write; - is standard output
        #[arg(long, value_name = "FILE", default_value = "-")]
        output: PathBuf,
    },
    /// Check an environment: an episode runs, repeats with its seed, and does not disturb a concurrent one
    Check {
        #[command(flatten)]
        which: Which,
        /// JSON lines, each the text of an action [default: a few short texts]
        #[arg(long, value_name = "FILE")]
        actions: Option<PathBuf>,
        /// Print violations as a JSON list
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
struct Which {
    /// A name of `ferrl env list`, FILE.py, FILE.py:CLASS, gem:NAME, reasoning_gym:NAME or http://HOST:PORT
    #[arg(value_name = "WHAT")]
    what: String,
    /// Seed of the episode
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    seed: u64,
    /// Row of data that the episode starts from: JSON, or a file whose first row is used
    #[arg(long, value_name = "JSON|FILE")]
    row: Option<String>,
    /// Setting of the environment: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    option: Vec<String>,
    /// Maximum seconds per call, for environments in Python
    #[arg(long, value_name = "S", value_parser = crate::options::above_zero)]
    timeout: Option<f32>,
    /// Python interpreter, for environments in Python [default: python3]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
}

/// Opens episodes with the same initial state.
type OpenAlike = Box<dyn Fn() -> Result<Box<dyn Environment>>>;

impl Which {
    fn open(&self) -> Result<OpenAlike> {
        let options = key_values("--option", &self.option)?;
        let row = self.row.as_deref().map(row).transpose()?;
        let env = EnvSettings::default();
        let timeout = Duration::from_secs_f64(self.timeout.map_or(env.timeout, f64::from));
        if ["http://", "https://", "ws://"].iter().any(|scheme| self.what.starts_with(scheme)) {
            let (servers, seed) = (Servers::new(&self.what, &options, timeout)?, self.seed);
            servers.check()?;
            return Ok(Box::new(move || Ok(servers.open(seed))));
        }
        let Some(what) = python(&self.what) else { return self.built_in(options, row) };
        let workers = Workers::new(WorkerSettings {
            what,
            options,
            workers: 1,
            timeout,
            start_timeout: Duration::from_secs_f64(env.start_timeout),
            memory: env.memory_mib << 20,
            python: self.python.clone().unwrap_or(env.python),
            hooks: Hooks::default(),
        });
        workers.check()?;
        let state =
            row.as_ref().and_then(|row| row.get("prompt")).and_then(Value::as_str).unwrap_or_default();
        let start = EpisodeStart {
            seed: self.seed,
            state: state.to_string(),
            name: format!("seed {}", self.seed),
            row: row.map(|row| (0, row)),
        };
        Ok(Box::new(move || Ok(Box::new(WorkerEpisode::new(Arc::clone(&workers), start.clone())))))
    }

    fn built_in(&self, options: Map<String, Value>, row: Option<Map<String, Value>>) -> Result<OpenAlike> {
        let name = self.what.strip_prefix("task:").unwrap_or(&self.what).to_string();
        if !TASKS.iter().any(|task| task.name == name) {
            let near = nearest(&name, TASKS.iter().map(|task| task.name)).unwrap_or(TASKS[0].name);
            return Err(Error::usage(format!("there is no environment {name:?}"))
                .fix(format!("did you mean {near}? `ferrl env list` shows all")));
        }
        let seed = self.seed;
        Ok(match row {
            Some(row) => Box::new(move || open_row(&name, &options, seed, &row)),
            None => Box::new(move || open(&name, &options, seed, 0)),
        })
    }
}

/// The Python environment that a word names, if it does.
fn python(word: &str) -> Option<PythonEnv> {
    if let Some(name) = word.strip_prefix("gem:") {
        return Some(PythonEnv::Gem(name.into()));
    }
    if let Some(name) = word.strip_prefix("reasoning_gym:") {
        return Some(PythonEnv::ReasoningGym(name.into()));
    }
    (word.ends_with(".py") || word.contains(".py:")).then(|| PythonEnv::file(word))
}

/// A row, as JSON or as the first one of a file.
fn row(word: &str) -> Result<Map<String, Value>> {
    let (place, line) = match word.trim_start().starts_with('{') {
        true => ("--row".to_string(), word.to_string()),
        false => data::lines(Path::new(word))?
            .next()
            .unwrap_or_else(|| Err(Error::data("the file has no row").at(word)))?,
    };
    match data::parse(&place, &line)? {
        Value::Object(row) => Ok(row),
        other => Err(Error::data(format!("a row is {}, expected an object", data::kind(&other)))
            .at(place)
            .fix(r#"{"prompt": "...", "extra_info": {}}"#)),
    }
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        EnvCommand::List { json: true } => print(&format!("{}\n", tasks_json())),
        EnvCommand::List { json: false } => print(&tasks_text()),
        EnvCommand::Tools => print(&tools_text()),
        EnvCommand::Play(which) => play(which),
        EnvCommand::Run { which, actions, output } => drive(which, actions, output),
        EnvCommand::Check { which, actions, json } => examine(which, actions.as_deref(), *json),
    }
}

fn tools_text() -> String {
    let mut text = String::new();
    for tool in TOOLS {
        text += &format!("{}: {}\n", tool.name, tool.about);
        for key in option_keys(tool.schema, &format!("  env.options.{}.", tool.name)) {
            text += &format!("{} = {}\n", key.path, key.default);
        }
    }
    text
}

fn play(which: &Which) -> Result<()> {
    let mut episode = which.open()?()?;
    print(&format!("{}\n", visible(episode.start()?.trim_end())))?;
    let (mut total, mut line) = (0.0, String::new());
    loop {
        line.clear();
        let read = std::io::stdin().lock().read_line(&mut line);
        if read.map_err(|e| Error::data(e.to_string()).at("standard input"))? == 0 {
            return print("stopped\n");
        }
        // At the terminal an action needs no \boxed{}.
        let action = line.trim();
        let action = match python(&which.what).is_some() || action.contains("\\boxed{") {
            true => action.to_string(),
            false => format!("{action}\n\\boxed{{{action}}}"),
        };
        let Turn { next, reward, score, end, .. } = episode.step(&action)?;
        total += reward;
        let (Next::Observation(shown) | Next::State(shown)) = next;
        print(&format!("{}\n", visible(shown.trim())))?;
        if end.is_some() {
            let score = score.map_or(String::new(), |score| format!(", score {score}"));
            return print(&format!("episode over: return {total:.3}{score}\n"));
        }
    }
}

/// The texts of a file of actions.
fn texts(path: &Path) -> Result<Vec<String>> {
    let read = |line: Result<(String, String)>| {
        let (place, line) = line?;
        match data::parse(&place, &line)? {
            Value::String(text) => Ok(text),
            other => {
                let what = format!("an action is {}, expected a JSON text", data::kind(&other));
                Err(Error::data(what).at(place).fix(r#""\\boxed{5}" on a line of its own"#))
            }
        }
    };
    data::lines(path)?.map(read).collect()
}

fn drive(which: &Which, actions: &Path, output: &Path) -> Result<()> {
    let (read, actions, mut episode) = (actions, texts(actions)?, which.open()?()?);
    let mut out = JsonlOutput::beside(output, &[read])?;
    let mut state = match episode.start() {
        Ok(state) => state,
        Err(Fault::Lost(lost)) => {
            out.row(&json!({ "turn": 0, "lost": lost }))?;
            return out.finish();
        }
        Err(other) => return Err(other.into()),
    };
    out.row(&json!({ "turn": 0, "state": state }))?;
    let mut sequence = 0;
    for (i, action) in actions.iter().enumerate() {
        let Turn { next, reward, score, end, extra, .. } = match episode.step(action) {
            Ok(turn) => turn,
            Err(Fault::Lost(lost)) => {
                out.row(&json!({ "turn": i + 1, "lost": lost }))?;
                break;
            }
            Err(other) => return Err(other.into()),
        };
        let within = sequence;
        let next = match next {
            Next::Observation(text) => format!("{state}{action}{text}"),
            Next::State(next) => {
                sequence += usize::from(!next.starts_with(&format!("{state}{action}")));
                next
            }
        };
        out.row(&json!({
            "turn": i + 1, "action": action, "next_state": next, "reward": reward, "score": score, "done": end.is_some(),
            "terminated": matches!(end, Some(EpisodeEnd::Terminated | EpisodeEnd::Limit)),
            "truncated": matches!(end, Some(EpisodeEnd::Truncated | EpisodeEnd::Limit)), "extra_info": extra, "sequence": within,
        }))?;
        state = next;
        if end.is_some() {
            break;
        }
    }
    out.finish()
}

/// Default actions of a check.
const ACTIONS: &[&str] = &["\\boxed{1}", "<answer>1</answer>", "I do not know.", "", "\\boxed{a}"];

fn examine(which: &Which, actions: Option<&Path>, as_json: bool) -> Result<()> {
    let actions = match actions {
        Some(path) => texts(path)?,
        None => ACTIONS.iter().map(|action| action.to_string()).collect(),
    };
    let found = check(&*which.open()?, &actions)?;
    if as_json {
        print(&format!("{}\n", json!(found)))?;
    } else {
        for violation in &found {
            print(&format!(
                "{}: {}\n  fix: {}\n",
                violation.rule,
                visible(&violation.problem),
                violation.fix
            ))?;
        }
    }
    match found.len() {
        0 if as_json => Ok(()),
        0 => print("episodes run, repeat with their seed, and do not disturb each other\n"),
        n => {
            Err(Error::new(Class::Data, format!("{} breaks {}", which.what, counted(n, "rule")))
                .fix("see above"))
        }
    }
}

//! `ferrl env`: built-in environments, listed, played by a person, and driven by a file of actions.

use crate::data;
use crate::options::key_values;
use crate::output::{Output, print, visible};
use clap::Subcommand;
use ferrl::env::{End, Environment, Next, Turn, open};
use ferrl::recipe::{tasks_json, tasks_text};
use ferrl::task::TASKS;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Value, json};
use std::io::BufRead;
use std::path::{Path, PathBuf};

/// List, play or drive the built-in environments
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the environments with their settings (`data.task`) and defaults
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Play an episode in the terminal; each line is an action
    Play(Which),
    /// Drive an episode with the actions of a file, and write every turn as a JSON line
    ///
    /// The first line is `{"turn": 0, "state": ...}`. Each further line holds `turn`, `action`, `next_state` (the whole text that
    /// the next action continues), `reward`, `score`, `done`, `terminated`, `truncated`, `extra_info` and `sequence` (which
    /// training sequence of the trajectory the turn is in).
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
}

#[derive(clap::Args)]
struct Which {
    /// One of `ferrl env list`
    #[arg(value_name = "NAME")]
    name: String,
    /// Seed of the episode
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Setting of the environment: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    option: Vec<String>,
}

impl Which {
    fn open(&self) -> Result<Box<dyn Environment>> {
        let name = self.name.strip_prefix("task:").unwrap_or(&self.name);
        if !TASKS.iter().any(|task| task.name == name) {
            let near = nearest(name, TASKS.iter().map(|task| task.name)).unwrap_or(TASKS[0].name);
            return Err(Error::usage(format!("there is no environment {name:?}"))
                .fix(format!("did you mean {near}? `ferrl env list` shows all")));
        }
        open(name, &key_values(&self.option)?, self.seed, 0)
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::List { json: true } => print(&format!("{}\n", tasks_json())),
        Command::List { json: false } => print(&tasks_text()),
        Command::Play(which) => play(which),
        Command::Run { which, actions, output } => drive(which, actions, output),
    }
}

fn play(which: &Which) -> Result<()> {
    let mut episode = which.open()?;
    print(&format!("{}\n", visible(episode.start()?.trim_end())))?;
    let (mut total, mut line) = (0.0, String::new());
    loop {
        line.clear();
        let read = std::io::stdin().lock().read_line(&mut line);
        if read.map_err(|e| Error::data(e.to_string()).at("standard input"))? == 0 {
            return print("stopped\n");
        }
        // A person need not write the box.
        let action = line.trim();
        let action = if action.contains("\\boxed{") {
            action.to_string()
        } else {
            format!("{action}\n\\boxed{{{action}}}")
        };
        let Turn { next, reward, score, end, .. } = episode.step(&action)?;
        total += reward;
        let (Next::Observation(shown) | Next::State(shown)) = next;
        print(&format!("{}\n", visible(shown.trim())))?;
        if end.is_some() {
            let score = score.map_or(String::new(), |score| format!(", score {score}"));
            return print(&format!("over: return {total:.3}{score}\n"));
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
    let (actions, mut episode) = (texts(actions)?, which.open()?);
    let mut out = Output::create(output)?;
    let mut state = episode.start()?;
    out.row(&json!({ "turn": 0, "state": state }))?;
    let mut sequence = 0;
    for (i, action) in actions.iter().enumerate() {
        let Turn { next, reward, score, end, extra } = episode.step(action)?;
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
            "terminated": end == Some(End::Terminated), "truncated": end == Some(End::Truncated), "extra_info": extra,
            "sequence": within,
        }))?;
        state = next;
        if end.is_some() {
            break;
        }
    }
    out.finish()
}

//! Environments of real packages: gem-llm, reasoning-gym, gymnasium, openenv-core. Each test says aloud that it is skipped where its
//! package is not installed; FERRL_TEST_PYTHON names an interpreter that has them.

use crate::common::Folder;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The interpreter, where it has a package.
fn python_with(package: &str) -> Option<PathBuf> {
    let python = std::env::var_os("FERRL_TEST_PYTHON").map_or("python3".into(), PathBuf::from);
    let import =
        Command::new(&python).args(["-c", &format!("import {package}")]).stderr(Stdio::null()).status();
    if import.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    eprintln!("skipped: {} has no package {package}", python.display());
    None
}

/// `ferrl env ARGS` with that interpreter as `python3`: its output and how it ended.
fn env(python: &std::path::Path, args: &[&str]) -> (String, Option<i32>) {
    let first = python.parent().map_or(String::new(), |bin| format!("{}:", bin.display()));
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrl"));
    let out = command.arg("env").args(args).env("PATH", format!("{first}{path}")).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    (text + &String::from_utf8_lossy(&out.stderr), out.status.code())
}

fn play(
    python: &std::path::Path,
    folder: &Folder,
    what: &str,
    actions: &[&str],
    more: &[&str],
) -> Vec<Value> {
    let lines: String = actions.iter().map(|a| format!("{}\n", Value::from(*a))).collect();
    let actions = folder.write("actions.jsonl", lines);
    let (text, code) =
        env(python, &[&["run", what, "--actions", &actions, "--timeout", "120"], more].concat());
    assert_eq!(code, Some(0), "{text}");
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn gems_games_play_by_their_seed() {
    let Some(python) = python_with("gem") else { return };
    let folder = Folder::new("real-gem");
    let game = "gem:game:GuessTheNumber-v0-easy";
    let boxed: Vec<String> = (1..=10).map(|n| format!("\\boxed{{{n}}}")).collect();
    let hits: usize = boxed
        .chunks(4)
        .map(|four| {
            let four: Vec<&str> = four.iter().map(String::as_str).collect();
            let turns = play(&python, &folder, game, &four, &["--seed", "3"]);
            turns.iter().filter(|turn| turn["reward"] == 1.0 && turn["done"] == true).count()
        })
        .sum();
    assert_eq!(hits, 1, "one of ten numbers is the secret of a seed");
    // It draws from process-wide generators at every move, which two episodes at once would share.
    let (text, code) = env(&python, &["check", "gem:game:Game2048-v0-easy", "--timeout", "120"]);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_task_of_reasoning_gym_is_scored_by_its_own_scorer() {
    let Some(python) = python_with("reasoning_gym") else { return };
    let folder = Folder::new("real-reasoning-gym");
    let asked = play(&python, &folder, "reasoning_gym:letter_counting", &["x"], &["--seed", "3"]);
    let state = asked[0]["state"].as_str().unwrap();
    let quoted: Vec<&str> = state.split('"').collect();
    let count = quoted[3].matches(quoted[1]).count();
    for (answer, reward) in [(count, 1.0), (count + 1, 0.0)] {
        let action = format!("I counted. <answer>{answer}</answer>");
        let turns = play(&python, &folder, "reasoning_gym:letter_counting", &[&action], &["--seed", "3"]);
        assert_eq!(turns[1]["reward"], reward, "{state} {answer}");
    }
}

#[test]
fn an_environment_of_gymnasium_plays_through_a_class_that_speaks_text() {
    let Some(python) = python_with("gymnasium") else { return };
    let folder = Folder::new("real-gymnasium");
    let file = folder.write(
        "lake.py",
        "import gymnasium\nMOVES = {'left': 0, 'down': 1, 'right': 2, 'up': 3}\nclass Lake(gymnasium.Wrapper):\n    \
         def __init__(self):\n        super().__init__(gymnasium.make('FrozenLake-v1', is_slippery=False))\n    \
         def reset(self, seed=None, options=None):\n        at, info = self.env.reset(seed=seed)\n        return f'You stand on {at}.', {}\n    \
         def step(self, action):\n        at, reward, terminated, truncated, info = self.env.step(MOVES[action])\n        \
         return f'You stand on {at}.', float(reward), terminated, truncated, {}\n",
    );
    let path = ["down", "down", "right", "right", "down", "right"];
    let turns = play(&python, &folder, &format!("{file}:Lake"), &path, &[]);
    assert!(turns[0]["state"].as_str().unwrap().starts_with("You stand on 0."));
    let last = turns.last().unwrap();
    assert_eq!((turns.len(), &last["reward"], &last["terminated"]), (7, &1.0.into(), &true.into()), "{last}");
}

/// Guess a digit: the seed decides it, an action is the field `guess`.
const SERVER: &str = r#"
import socket, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    guess: str

class Hint(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.secret, self.turns = None, 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.turns = (seed or 0) % 10, 0
        return Hint(text="Guess a digit.")
    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        right = int(action.guess) == self.secret
        return Hint(text=f"{'right' if right else 'wrong'} after {self.turns}", reward=float(right), done=right)
    @property
    def state(self):
        return State(step_count=self.turns)

app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"#;

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_of_openenv_keeps_an_episode_on_its_websocket() {
    let Some(python) = python_with("openenv.core") else { return };
    let folder = Folder::new("real-openenv");
    let file = folder.write("server.py", SERVER);
    let mut server = Running(Command::new(&python).arg(&file).stdout(Stdio::piped()).spawn().unwrap());
    // The server chooses a free port itself and prints it once it listens.
    let mut port = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
    let url = format!("http://127.0.0.1:{}", port.trim());
    let turns = play(&python, &folder, &url, &["3", "5", "7"], &["--seed", "7"]);
    // Over HTTP every request has a new environment, whose count begins again.
    assert!(turns[2]["next_state"].as_str().unwrap().ends_with("wrong after 2\n"), "{}", turns[2]);
    assert_eq!((&turns[3]["reward"], &turns[3]["done"]), (&1.0.into(), &true.into()), "{}", turns[3]);
    let lost = play(&python, &folder, &url, &["seven"], &["--seed", "7"]);
    assert_eq!(lost[1]["lost"]["why"], "raised", "{}", lost[1]);
}

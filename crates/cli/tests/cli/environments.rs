//! Environments in Python: their contracts, their faults, and training with them.

use crate::common::{Folder, fails_with, ferrl, ok};
use serde_json::Value;
use std::process::Command;

/// RL2's contract, with hints, prints to stdout and a random number in every state.
const GUESS: &str = r#"
import random
async def step(state, action, extra_info):
    print("a print that must not reach the protocol")
    secret = extra_info["secret"]
    words = [w for w in action.split() if w.isdigit()]
    if not words:
        return {"next_state": None, "reward": -0.1, "score": 0.0, "done": True, "extra_info": extra_info}
    guess = int(words[-1])
    extra_info["turns"] = extra_info.get("turns", 0) + 1
    if guess == secret:
        return {"next_state": None, "reward": 1.0, "score": 1.0, "done": True, "extra_info": extra_info}
    hint = "larger" if guess < secret else "smaller"
    state = f"{state}{action} {hint} {random.randrange(1000)}\n"
    return {"next_state": state, "reward": 0.0, "score": 0.0, "done": False, "extra_info": extra_info}
"#;

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn run(folder: &Folder, what: &str, actions: &[&str], more: &[&str]) -> Vec<Value> {
    let lines: String = actions.iter().map(|a| format!("{}\n", Value::from(*a))).collect();
    let actions = folder.write("actions.jsonl", lines);
    rows(&ok(&[&["env", "run", what, "--actions", &actions], more].concat()))
}

#[test]
fn the_first_contract_of_rl2_plays_and_its_turns_join_one_sequence() {
    let folder = Folder::new("env-rl2");
    let file = folder.write("guess.py", GUESS);
    let row = r#"{"prompt": "Guess: ", "extra_info": {"secret": 3}}"#;
    let turns = run(&folder, &file, &["5", "2", "3", "9"], &["--row", row]);
    assert_eq!(turns[0]["state"], "Guess: ");
    assert_eq!(turns.len(), 4, "the fourth action is never needed");
    assert!(turns[1]["next_state"].as_str().unwrap().starts_with("Guess: 5 smaller "));
    assert_eq!(turns[3]["reward"], 1.0);
    assert_eq!(turns[3]["done"], true);
    assert_eq!(turns[3]["extra_info"]["turns"], 2 + 1);
    assert!(turns[1..].iter().all(|t| t["sequence"] == 0));
    // The random numbers are those of the seed.
    assert_eq!(turns, run(&folder, &file, &["5", "2", "3"], &["--row", row]));
    assert_ne!(turns[1], run(&folder, &file, &["5"], &["--row", row, "--seed", "1"])[1]);
}

#[test]
fn every_contract_of_rl2_is_served_or_refused_with_the_difference() {
    let folder = Folder::new("env-contracts");
    // reset gives the text, or the text and the extra_info of the episode, or takes nothing.
    let step = "async def step(state, action, extra_info):\n    return {'next_state': 'again', 'reward': extra_info['n'], 'score': 0, \
                'done': False, 'extra_info': extra_info}\n";
    let resets = [
        "async def reset(extra_info):\n    extra_info['n'] = 2\n    return 'begin'\n",
        "async def reset(extra_info):\n    return 'begin', {'n': 2}\n",
        "def reset():\n    return 'begin', {'n': 2}\n",
    ];
    for reset in resets {
        let file = folder.write("reset.py", format!("{step}{reset}"));
        let turns = run(&folder, &file, &["a", "b"], &["--row", r#"{"extra_info": {}}"#]);
        assert_eq!((&turns[0]["state"], &turns[1]["reward"]), (&"begin".into(), &2.0.into()), "{reset}");
        // A state that continues nothing opens another training sequence.
        assert_eq!((&turns[1]["sequence"], &turns[2]["sequence"]), (&0.into(), &1.into()));
    }
    let later = "async def env_step(sample):\n    more = sample.state_text + sample.action_text + '.'\n    \
                 return {'next_state': more, 'done': sample.turn == 1, 'reward': sample.sample['worth']}\n";
    let file = folder.write("later.py", later);
    let turns = run(&folder, &file, &["a", "b", "c"], &["--row", r#"{"prompt": "P", "worth": 0.5}"#]);
    assert_eq!(turns[2]["next_state"], "Pa.b.");
    assert_eq!((&turns[2]["done"], turns.len()), (&true.into(), 3));
    let file =
        folder.write("served.py", "async def generate(config, tokenizer, router_url, sample):\n    pass\n");
    let actions = folder.path("actions.jsonl");
    fails_with(&["env", "run", &file, "--actions", &actions], "", 2, &["router_url", "env_step(sample)"]);
    let file = folder.write("empty.py", "x = 1\n");
    fails_with(&["env", "run", &file, "--actions", &actions], "", 2, &["no step(state, action, extra_info)"]);
    // Was refused with "No module named 'RL2'": RL2's own files import a type and its rollout, and name the step in `generate`.
    let shipped = "from functools import partial\nfrom RL2.datasets import Sample, base_generate\nfrom RL2.utils.text import norm\n\n\
                   async def graded(sample: Sample):\n    if 'norm' in sample.action_text:\n        norm(sample.action_text)\n    \
                   return {'next_state': None, 'done': True, 'reward': float(sample.sample['target'])}\n\
                   generate = partial(base_generate, env_step_fn=graded)\n";
    let file = folder.write("shipped.py", shipped);
    let turns = run(&folder, &file, &["a"], &["--row", r#"{"prompt": "P", "target": 3}"#]);
    assert_eq!((&turns[1]["reward"], &turns[1]["done"]), (&3.0.into(), &true.into()));
    let turns = run(&folder, &file, &["norm"], &["--row", r#"{"prompt": "P", "target": 3}"#]);
    let lost = turns[1]["lost"]["message"].as_str().unwrap();
    assert!(
        lost.contains("norm is RL2's") && lost.contains("pip install rl-square"),
        "what is called is no stand-in: {lost}"
    );
    let file = folder.write("between.py", "async def env_step(state, action, answer):\n    return {}\n");
    fails_with(
        &["env", "run", &file, "--actions", &actions],
        "",
        2,
        &["needs 3 arguments", "env_step(sample)"],
    );
    fails_with(&["env", "run", "none.py", "--actions", &actions], "", 2, &["no such file"]);
}

#[test]
fn a_class_with_gymnasiums_methods_plays_and_both_flags_are_shown() {
    let folder = Folder::new("env-gym");
    let file = folder.write(
        "count.py",
        "import random\nclass Count:\n    def __init__(self, top=2):\n        self.top = top\n    def reset(self, seed=None, options=None):\n        \
         self.n = 0\n        return f'Count from {random.randrange(10**6)}', {'suffix': ' now'}\n    def step(self, action):\n        \
         self.n += 1\n        over = self.n >= self.top\n        return f'{self.n}', 0.5, over, over, {'score': 1.0}\n",
    );
    let turns = run(&folder, &format!("{file}:Count"), &["a", "b"], &[]);
    assert!(turns[0]["state"].as_str().unwrap().ends_with("\n now\n"));
    assert_eq!(turns[2]["next_state"], format!("{}a\n1\nb\n2\n", turns[0]["state"].as_str().unwrap()));
    let flags = |t: &Value| [t["done"] == true, t["terminated"] == true, t["truncated"] == true];
    assert_eq!((flags(&turns[1]), flags(&turns[2])), ([false; 3], [true; 3]));
    assert_eq!(run(&folder, &format!("{file}:Count"), &["a"], &["--option", "top=1"])[1]["done"], true);
    let actions = folder.path("actions.jsonl");
    fails_with(
        &["env", "run", &format!("{file}:Cuont"), "--actions", &actions],
        "",
        2,
        &["no class 'Cuont'", "Count"],
    );
    let file = folder.write("old.py", "class Two:\n    def reset(self):\n        return 'x'\n    def step(self, action):\n        return 1, 2\n");
    assert!(run(&folder, &file, &["a"], &[])[1]["lost"]["message"].as_str().unwrap().contains("tuple of 2"));
}

/// Doubles of the packages with the interfaces they have: process-wide generators, deltas, a suffix, both flags, noise.
const GEM: &str = "import random\nprint('Wrappers requested: none')\nclass Game:\n    def __init__(self, turns):\n        self.turns = turns\n    \
    def reset(self, seed=None):\n        random.seed(seed)\n        self.n = 0\n        return f'Tile {random.randrange(1000)}.', {'suffix': ' Move.'}\n    \
    def step(self, action):\n        self.n += 1\n        over = self.n >= self.turns\n        \
    return f'Tile {random.randrange(1000)}.', 1.0, over, over, {'suffix': ' Move.'}\n\
    def make(name, turns=3, **kw):\n    if not name.startswith('game:'):\n        raise KeyError(name)\n    return Game(turns)\n";
const REASONING_GYM: &str = "class Data:\n    def __init__(self, seed):\n        self.seed = seed\n    def __getitem__(self, i):\n        \
    return {'question': f'What is {self.seed} + 1?', 'answer': str(self.seed + 1), 'metadata': {}}\n    \
    def score_answer(self, answer, entry):\n        return float(answer == entry['answer'])\n\
    def create_dataset(name, size, seed, **kw):\n    return Data(seed % 100)\n";

#[test]
fn gem_and_reasoning_gym_play_by_their_interfaces() {
    let folder = Folder::new("env-gem");
    folder.write("gem.py", GEM);
    folder.write("reasoning_gym.py", REASONING_GYM);
    let actions = folder.write("actions.jsonl", "\"up\"\n\"up\"\n\"up\"\n");
    let play = |what: &str, seed: &str, actions: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(["env", "run", what, "--actions", actions, "--seed", seed])
            .env("PYTHONPATH", &folder.0)
            .output()
            .unwrap();
        (rows(&String::from_utf8(out.stdout).unwrap()), String::from_utf8(out.stderr).unwrap())
    };
    let (turns, _) = play("gem:game:Tiles-v0", "7", &actions);
    assert!(turns[0]["state"].as_str().unwrap().ends_with("\n Move.\n"));
    assert_eq!(
        (turns.len(), &turns[3]["truncated"], &turns[3]["terminated"]),
        (4, &true.into(), &true.into())
    );
    assert_eq!(turns, play("gem:game:Tiles-v0", "7", &actions).0);
    assert!(play("gem:math:x", "7", &actions).1.contains("gem.make('math:x') failed"));
    let right = folder.write("right.jsonl", "\"so it is <answer>6</answer>\"\n");
    assert_eq!(play("reasoning_gym:sums", "5", &right).0[1]["reward"], 1.0);
    assert_eq!(play("reasoning_gym:sums", "6", &right).0[1]["reward"], 0.0);
}

#[test]
fn a_check_names_the_rule_that_is_broken() {
    let folder = Folder::new("env-check");
    let check = |name: &str, body: &str, rule: Option<&str>| {
        let file = folder.write(name, body);
        let out =
            ferrl(&["env", "check", &file, "--row", r#"{"prompt": "P"}"#, "--timeout", "2", "--json"], "");
        let found: Vec<Value> = serde_json::from_slice(&out.stdout).unwrap();
        let rules: Vec<&str> = found.iter().map(|v| v["rule"].as_str().unwrap()).collect();
        assert_eq!(rules, rule.into_iter().collect::<Vec<_>>(), "{name}");
        assert_eq!(out.status.code(), Some(if rule.is_some() { 3 } else { 0 }), "{name}");
    };
    let step = "def step(state, action, extra_info):\n";
    let turn = "{'next_state': state + action + '.', 'reward': 0.0, 'score': 0.0, 'done': False, 'extra_info': extra_info}";
    check("good.py", &format!("{step}    return {turn}\n"), None);
    check("raises.py", &format!("{step}    return {{}}[action]\n"), Some("raises"));
    check("lacks.py", &format!("{step}    return {{'reward': 1.0}}\n"), Some("schema"));
    check("exits.py", &format!("import os\n{step}    os._exit(1)\n"), Some("process"));
    check("hangs.py", &format!("import time\n{step}    time.sleep(60)\n"), Some("time"));
    check(
        "counts.py",
        &format!("N = 0\n{step}    global N\n    N += 1\n    return {{**{turn}, 'reward': N}}\n"),
        Some("determinism"),
    );
    // Right alone and twice in a row, wrong with two at once: the class holds what belongs to the object.
    let shared = "class Shared:\n    n = 0\n    def reset(self, seed=None):\n        Shared.n = 0\n        return 'begin', {}\n    \
                  def step(self, action):\n        Shared.n += 1\n        return 'more', float(Shared.n), False, False, {}\n";
    check("shared.py", shared, Some("interleaving"));
}

/// What goes wrong in the episode of a row, as the row says.
const FAULTS: &str = r#"
import asyncio, os, sys, time, subprocess
async def step(state, action, extra_info):
    mode = extra_info.get("mode")
    if mode == "exits": os._exit(3)
    if mode == "segfaults":
        import ctypes
        ctypes.string_at(0)
    if mode == "hangs": time.sleep(1000)
    if mode == "waits": await asyncio.sleep(1000)
    if mode == "floods":
        while True: os.write(1, b"x" * 65536)
    if mode == "raises": raise ValueError("boom")
    if mode == "lacks": return {"score": 1.0}
    if mode == "nan": return {"next_state": "x", "reward": float("nan"), "done": False}
    if mode == "huge": return {"next_state": "x" * (20 << 20), "reward": 0.0, "done": False}
    if mode == "eats":
        held = []
        while True: held.append(bytearray(8 << 20))
    if mode == "forks":
        subprocess.Popen(["sleep", "1000"])
        os._exit(0)
    if mode == "prints": print("{\"id\": 1, \"nonce\": \"x\", \"turn\": {}}", flush=True)
    return {"next_state": state + action + ".", "reward": 1.0, "score": 1.0, "done": extra_info.setdefault("turns", []).append(1) or len(extra_info["turns"]) > 1, "extra_info": extra_info}
"#;

const MODES: [&str; 12] = [
    "exits", "segfaults", "hangs", "waits", "floods", "raises", "lacks", "nan", "huge", "eats", "forks",
    "prints",
];

#[test]
fn every_fault_of_a_worker_costs_its_own_episode_and_leaves_an_event() {
    let folder = Folder::new("env-faults");
    folder.write("env.py", FAULTS);
    let good = (0..12).map(|_| "good");
    let row = |mode: &str| format!("{{\"prompt\": \"{mode}\", \"extra_info\": {{\"mode\": \"{mode}\"}}}}\n");
    folder.write("rows.jsonl", MODES.into_iter().chain(good).map(row).collect::<String>());
    folder.write(
        "recipe.toml",
        "algo = \"dr_grpo\"\nmodel.init = { hidden = 16, layers = 1 }\n\
         data = { train = [\"rows.jsonl\"], max_length = 32, shuffle = false }\n\
         rollout = { prompts = 24, samples = 2, max_new_tokens = 2, max_turns = 4, cache_mib = 8 }\n\
         env = { path = \"env.py\", timeout = 1.0, memory_mib = 512 }\ntrain.steps = 1\n",
    );
    let run = |name: &str, workers: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(["train", "recipe.toml", &format!("name={name}"), &format!("env.workers={workers}")])
            .current_dir(&folder.0)
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        folder.read(&format!("runs/{name}/rollouts/step_1.jsonl"))
    };
    let first = run("one", "2");
    let lost: Vec<String> = rows(&first)
        .iter()
        .filter_map(|r| Some(format!("{} {}", r["prompt"].as_str()?, r["lost"]["why"].as_str()?)))
        .collect();
    for (mode, why) in [
        ("exits", "exited"),
        ("segfaults", "exited"),
        ("hangs", "hung"),
        ("waits", "hung"),
        ("raises", "raised"),
        ("lacks", "schema"),
        ("nan", "schema"),
        ("huge", "size"),
        ("eats", "size"),
        ("forks", "exited"),
    ] {
        assert_eq!(lost.iter().filter(|l| **l == format!("{mode} {why}")).count(), 2, "{mode}: {lost:?}");
    }
    assert!(!lost.iter().any(|l| l.starts_with("good") || l.starts_with("prints")), "{lost:?}");
    // Every lost episode is an event, with the environment, the row, the seconds and the last words.
    let log = folder.read("runs/one/log.jsonl");
    let events = log.lines().filter(|l| l.contains("lost episode")).count();
    assert_eq!(events, lost.len());
    assert!(log.contains("ValueError: boom"), "{log}");
    let metrics = folder.read("runs/one/metrics.jsonl");
    assert!(metrics.lines().next().unwrap().contains("\"episodes/lost\""), "{metrics}");
    // Whoever fails beside it and however many workers there are: the same episodes, to the byte.
    let reduced = |text: &str| -> Vec<(String, Value)> {
        rows(text)
            .iter()
            .filter(|r| r["lost"].is_null())
            .map(|r| (r["completion"].to_string(), r["reward"].clone()))
            .collect()
    };
    assert_eq!(reduced(&first), reduced(&run("two", "5")));
}

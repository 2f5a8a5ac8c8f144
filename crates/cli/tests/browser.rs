//! The pages of `ferrl report` in a real browser: Chromium without a window. Skipped, aloud, where there is none.
//!
//! One page is written that loads the reports into frames of several widths and uses them (`browser/harness.js`); what it
//! finds is read from the page that Chromium prints. No driver and no protocol is needed.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::run::{Files, MetricsLog, RolloutRecord, Rollouts, RunFolder, StepRecord};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Chromium under one of its names; `FERRL_CHROMIUM` names another.
fn chromium() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FERRL_CHROMIUM") {
        return Some(path.into());
    }
    let names =
        ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    names.iter().flat_map(|n| folders.iter().map(move |f| f.join(n))).find(|p| p.is_file())
}

struct Temp(PathBuf);

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const STEPS: u64 = 60;
/// Copies of one completion in the last step.
const IDENTICAL: usize = 5;
/// The completion that is an episode.
const EPISODE: usize = 5;

fn reward(step: u64, offset: f64) -> f64 {
    let wave = (step as f64 * 1.7).sin() * 0.05;
    offset + 0.5 * step as f64 / STEPS as f64 + wave
}

fn recipe(algorithm: &str, seed: u64) -> String {
    format!(
        "name = \"r\"\nseed = {seed}\nmodel.path = \"m\"\ndata.train = [\"task:countdown\"]\n\n[[stage]]\nname = \"imitate\"\nalgo = \"sft\"\n\n[[stage]]\nname = \"reinforce from the model's own completions\"\nalgo = \"{algorithm}\"\n"
    )
}

/// A run of SFT and then RL, with chat prompts, identical completions and a warning.
fn run(root: &Path, name: &str, algorithm: &str, seed: u64, offset: f64) -> PathBuf {
    let folder = RunFolder::create(root, name, &recipe(algorithm, seed)).unwrap();
    let mut log = MetricsLog::open(&folder.metrics(), &Files::default()).unwrap();
    let mut rollouts = Rollouts::open(&folder.rollouts(), &Files::default()).unwrap();
    folder.log("warning", "3 of 10 rows are cut").unwrap();
    for step in 1..=STEPS {
        let rl = step > STEPS / 2;
        let mut metrics = vec![
            ("entropy".to_string(), 2.0 / step as f64),
            ("grad_norm".into(), 12345.0 + step as f64),
            ("learning_rate".into(), 1e-4),
            ("loss".into(), if rl { -0.01 } else { 3.0 / step as f64 }),
            ("step_time".into(), 0.25),
        ];
        if rl {
            metrics.push(("reward".into(), reward(step, offset)));
            metrics.push(("completions/total_tokens".into(), 100.0));
            metrics.push(("kl".into(), 0.001 * step as f64));
            rollouts.write(step, &(0..8).map(|i| rollout(step, i)).collect::<Vec<_>>()).unwrap();
        }
        if step == STEPS / 2 + 1 || step == STEPS {
            metrics.push(("eval/pass@1".into(), 0.1 + 0.01 * step as f64));
        }
        metrics.sort_by(|a, b| a.0.cmp(&b.0));
        let stage = if rl { "reinforce from the model's own completions" } else { "imitate" };
        let seconds = step as f64 * 2.0;
        log.append(&StepRecord { step, stage: stage.into(), epoch: 0.0, seconds, metrics }).unwrap();
    }
    folder.path().to_path_buf()
}

fn rollout(step: u64, i: usize) -> RolloutRecord {
    let prompt = json!([
        { "role": "system", "content": "Be brief. ".repeat(40) },
        { "role": "user", "content": format!("Use 3, {}, 25 to make {}.", 4 + step % 6, 70 + step) },
    ]);
    let same = i < IDENTICAL;
    if i == EPISODE {
        return episode();
    }
    RolloutRecord {
        prompt: prompt.to_string(),
        completion: if same { "25 * 3".into() } else { format!("needle{i} {}", "unbreakable".repeat(30)) },
        reward: (i != 7).then_some(if same { 0.25 } else { i as f64 / 10.0 }),
        components: vec![("correct".into(), 0.25)],
        advantage: i as f64 - 4.0,
        tokens: 10 + i,
        truncated: i == 6,
        ..Default::default()
    }
}

/// A game of three turns, with text that a page must escape.
fn episode() -> RolloutRecord {
    let turn = |action: &str, observation: &str, reward: f64, advantage: f64| json!({ "action": action, "observation": observation, "reward": reward, "tokens": 4, "sequence": 0, "advantage": advantage });
    let turns = json!([
        turn("guess5 <b>", "larger & larger", 0.0, -0.5),
        turn("guess8", &"smaller ".repeat(60), 0.25, 0.125),
        turn("guess7", "", 1.0, 1.5),
    ]);
    RolloutRecord {
        prompt: "Guess a number.".into(),
        completion: "guess5 <b>larger & largerguess8smallerguess7".into(),
        reward: Some(1.25),
        tokens: 12,
        turns: serde_json::from_value(turns).unwrap(),
        ..Default::default()
    }
}

fn ferrl(args: &[&str], dir: &Path) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_ferrl")).args(args).current_dir(dir).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Writes the pages and what is to be found in them.
fn pages(dir: &Path) -> Vec<Value> {
    let one = run(dir, "one", "grpo", 0, 0.2);
    run(dir, "grpo-0", "grpo", 0, 0.2);
    run(dir, "grpo-1", "grpo", 1, 0.4);
    run(dir, "rloo", "rloo", 0, 0.1);
    ferrl(&["report", "one"], dir);
    ferrl(&["report", "grpo-0", "grpo-1", "rloo"], dir);
    let last = |name: &str| {
        let history = MetricsLog::history(&one.join("metrics.jsonl")).unwrap();
        history.last().unwrap().get(name).unwrap()
    };
    let html = |path: PathBuf| fs::read_to_string(path).unwrap();
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/compare.html");
    vec![
        json!({ "name": "report.html", "use": "report", "html": html(one.join("report.html")), "expected": {
            "last": { "reward": last("reward"), "eval/pass@1": last("eval/pass@1"), "entropy": last("entropy"),
                "kl": last("kl"), "loss sft": 0.1 },
            "find": "needle6", "identical": IDENTICAL,
            "episode": { "find": "guess7", "total": "1.250", "turns": [
                ["Turn 1: reward 0, advantage -0.5000", "guess5 <b>"], ["Environment", "larger & larger"],
                ["Turn 2: reward 0.2500, advantage 0.1250", "guess8"], ["Environment", "smaller ".repeat(60).trim()],
                ["Turn 3: reward 1, advantage 1.500", "guess7"],
            ] },
        } }),
        json!({ "name": "compare.html", "use": "comparison", "html": html(dir.join("compare.html")), "expected": {
            "groups": ["grpo (2 seeds)", "rloo"], "find": "grpo", "found": 2,
            "key": "reinforce from the model's own completions: algo.name",
            "last": { "grpo": reward(STEPS, 0.3), "rloo": reward(STEPS, 0.1) },
        } }),
        json!({ "name": "docs/compare.html", "html": html(committed) }),
    ]
}

/// What Chromium finds wrong with the pages.
fn browse(chromium: &Path, dir: &Path, pages: &[Value], dark: bool) -> Value {
    let input = json!({ "pages": pages, "dark": dark }).to_string().replace('<', "\\u003c");
    let script = include_str!("browser/harness.js");
    let html = format!(
        "<!DOCTYPE html><meta charset=\"utf-8\"><script id=\"input\" type=\"application/json\">{input}</script><pre id=\"result\"></pre><body><script>{script}</script>"
    );
    let file = dir.join(if dark { "dark.html" } else { "light.html" });
    fs::write(&file, html).unwrap();
    let profile = format!("--user-data-dir={}", dir.join(if dark { "d" } else { "l" }).display());
    let mut command = Command::new(chromium);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ]);
    command.args(["--enable-logging=stderr", "--window-size=1700,1000", "--virtual-time-budget=60000"]);
    let out = command.args([&profile, "--dump-dom"]).arg(&file).output().unwrap();
    let (dom, log) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let said: Vec<&str> = log.lines().filter(|l| l.contains("CONSOLE")).collect();
    assert!(said.is_empty(), "the console: {said:#?}");
    let result = dom.split("<pre id=\"result\">").nth(1).and_then(|d| d.split("</pre>").next());
    let result = result.unwrap_or_default().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&result).unwrap_or_else(|_| panic!("Chromium did not finish:\n{log}"))
}

#[test]
fn reports_work_in_a_browser() {
    let Some(chromium) = chromium() else {
        // Not through a macro, whose output a passing test hides.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED reports_work_in_a_browser: no Chromium in PATH (apt-get install chromium, or FERRL_CHROMIUM=FILE)"
        );
        return;
    };
    let temp = Temp(std::env::temp_dir().join(format!("ferrl-browser-{}", std::process::id())));
    fs::create_dir_all(&temp.0).unwrap();
    let pages = pages(&temp.0);
    for dark in [false, true] {
        let found = browse(&chromium, &temp.0, &pages, dark);
        assert_eq!(found["wrong"], json!([]), "dark: {dark}");
        assert!(found["checks"].as_u64().unwrap() > 1000, "{found}");
    }
}

/// A file that is not a report is not written over; a report is.
#[test]
fn a_report_writes_over_reports_alone() {
    let temp = Temp(std::env::temp_dir().join(format!("ferrl-report-out-{}", std::process::id())));
    fs::create_dir_all(&temp.0).unwrap();
    run(&temp.0, "one", "grpo", 0, 0.2);
    fs::write(temp.0.join("mine.html"), "<p>my own page</p>").unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
        .args(["report", "one", "--out", "mine.html"])
        .current_dir(&temp.0)
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert_eq!(fs::read_to_string(temp.0.join("mine.html")).unwrap(), "<p>my own page</p>");
    for _ in 0..2 {
        assert_eq!(ferrl(&["report", "one", "--out", "other.html"], &temp.0), "other.html\n");
    }
}

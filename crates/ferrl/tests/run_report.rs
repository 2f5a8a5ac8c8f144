//! What a report promises: the run's numbers and texts are in it, and nothing in them becomes markup.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::report::report;
use ferrl::run::{Files, MetricsLog, RolloutRecord, Rollouts, RunFolder, StepRecord};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const HOSTILE: &str = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \" ' \u{2028}\0";

/// A run of two stages whose reward rises; the texts are those of an adversary where asked.
fn run(root: &Path, name: &str, steps: u64, hostile: bool) -> PathBuf {
    let recipe = if hostile { format!("name = '{HOSTILE}'\n") } else { RECIPE.to_string() };
    let run = RunFolder::create(root, name, &recipe).unwrap();
    let mut log = MetricsLog::open(&run.metrics(), &Files::default()).unwrap();
    let mut rollouts = Rollouts::open(&run.rollouts(), &Files::default()).unwrap();
    let mut state = 12345u64;
    let mut noise = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
    };
    for step in 1..=steps {
        let rl = step > steps / 3;
        let t = step as f64 / steps as f64;
        let mut metrics = vec![
            ("entropy".to_string(), 1.6 * (-1.5 * t).exp() + 0.05 * noise()),
            ("grad_norm".into(), 0.8 + 0.4 * noise() + if step % 97 == 0 { 9.0 } else { 0.0 }),
            ("learning_rate".into(), 3e-4 * (1.0 - t)),
            ("loss".into(), if rl { 0.02 * noise() } else { 2.5 * (-6.0 * t).exp() + 0.3 + 0.1 * noise() }),
            ("tokens_per_second".into(), 41000.0 + 3000.0 * noise()),
            ("time/generate".into(), 0.31 + 0.02 * noise()),
        ];
        if rl {
            let reward = 0.15 + 0.7 * ((t - 0.33) * 1.5).min(1.0) + 0.12 * noise();
            metrics.push(("reward".into(), reward));
            metrics.push(("reward_std".into(), 0.4 - 0.2 * t + 0.05 * noise()));
            metrics.push(("completions/mean_length".into(), 60.0 - 25.0 * t + 4.0 * noise()));
            metrics.push(("kl".into(), if step == steps { f64::NAN } else { 0.02 * t + 0.004 * noise() }));
            let sample = |i: u64, u: f64| {
                let right = u + 0.5 < reward;
                let reward = if right { 1.0 } else { f64::from(u < 0.3) * 0.1 };
                RolloutRecord {
                    prompt: if hostile {
                        HOSTILE.into()
                    } else {
                        format!("Use 3, {}, 25 to make {}.\n", 4 + i % 6, 70 + step % 20)
                    },
                    completion: if hostile {
                        HOSTILE.into()
                    } else {
                        format!(
                            "<think>25 * 3 = 75, and {} more\nis the answer.</think>\n<answer>25 * 3 + {}</answer>",
                            i % 9,
                            i % 9
                        )
                    },
                    reward: Some(reward),
                    components: vec![
                        (if hostile { HOSTILE.into() } else { "correct".into() }, f64::from(right)),
                        ("format".into(), reward.min(0.1)),
                    ],
                    advantage: (reward - 0.5) * 2.0 + 0.1 * u,
                    tokens: 30 + (i as usize * 7) % 40,
                    truncated: i == 5,
                    ..Default::default()
                }
            };
            let list: Vec<RolloutRecord> = (0..16).map(|i| sample(i, noise())).collect();
            rollouts.write(step, &list).unwrap();
        }
        if step == 1 || step % (steps / 10).max(1) == 0 {
            metrics.push(("eval/pass@1".into(), 0.1 + 0.6 * t * t));
        }
        metrics.sort_by(|a, b| a.0.cmp(&b.0));
        if hostile {
            metrics.push((format!("x{HOSTILE}"), 1.0));
        }
        let stage = if hostile {
            HOSTILE
        } else if rl {
            "grpo"
        } else {
            "sft"
        };
        let record =
            StepRecord { step, stage: stage.into(), epoch: t * 2.0, seconds: step as f64 * 0.9, metrics };
        log.append(&record).unwrap();
    }
    run.path().to_path_buf()
}

const RECIPE: &str = "model = \"quickstart\"\nseed = 1\n\n[[stage]]\nalgo = \"sft\"\nsteps = 100\n\n[[stage]]\nalgo = \"grpo\"\ngroup_size = 8\nlearning_rate = 3e-4\n";

/// Every element that was opened is closed in its turn; the names of all. Scripts and styles hold no markup.
fn balanced(html: &str) -> Vec<String> {
    let (mut open, mut all, mut rest) = (Vec::new(), Vec::new(), html);
    while let Some(at) = rest.find('<') {
        let end = at + rest[at..].find('>').unwrap();
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let name = tag.split_whitespace().next().unwrap().to_lowercase();
        all.push(name.clone());
        if ["!doctype", "meta", "input"].contains(&name.as_str()) {
            continue;
        }
        if name == "script" || name == "style" {
            let close = rest.find(&format!("</{name}")).unwrap();
            rest = &rest[close..];
        }
        open.push(name);
    }
    assert!(open.is_empty(), "{open:?}");
    all
}

fn data(html: &str) -> Value {
    let start = html.find("type=\"application/json\">").unwrap() + "type=\"application/json\">".len();
    let end = start + html[start..].find("</script>").unwrap();
    serde_json::from_str(&html[start..end]).unwrap()
}

#[test]
fn a_report_holds_the_run_and_needs_no_network() {
    let temp = tempfile::tempdir().unwrap();
    let dir = run(temp.path(), "countdown", 90, false);
    let path = report(&dir, None).unwrap();
    assert_eq!(path, dir.join("report.html"));
    let html = fs::read_to_string(&path).unwrap();
    balanced(&html);
    for part in
        ["<h1>countdown</h1>", "algo = &quot;grpo&quot;", "sft → grpo", "best 0.700 at step 90", "1 min 21 s"]
    {
        assert!(html.contains(part), "{part}");
    }
    for outside in ["http:", "https:", "src=", "@import", "url("] {
        let found = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
    let data = data(&html);
    let run = &data["runs"][0];
    let history = MetricsLog::history(&dir.join("metrics.jsonl")).unwrap();
    assert_eq!(run["steps"].as_array().unwrap().len(), 90);
    for (i, record) in history.iter().enumerate() {
        for (name, value) in record.metrics.iter().filter(|m| m.1.is_finite()) {
            assert_eq!(run["series"][name][i].as_f64(), Some(*value), "{name}");
        }
    }
    assert!(run["series"]["kl"][89].is_null() && run["series"]["reward"][0].is_null());
    assert_eq!(
        run["stages"],
        serde_json::json!([[1, "sft", null], [31, "grpo", null]]),
        "the recipe is not one"
    );
    assert_eq!(data["rollouts"].as_array().unwrap().len(), 60 * 16);
    assert!(data["rollouts"][0]["completion"].as_str().unwrap().contains("</think>"));
}

#[test]
fn html_in_rollouts_is_escaped() {
    let temp = tempfile::tempdir().unwrap();
    let plain = fs::read_to_string(report(&run(temp.path(), "a", 12, false), None).unwrap()).unwrap();
    let html = fs::read_to_string(report(&run(temp.path(), "b", 12, true), None).unwrap()).unwrap();
    assert_eq!(balanced(&html), balanced(&plain), "the same elements, whatever the texts say");
    assert!(!html.contains("<img") && !html.contains("<script>alert") && !html.contains('\0'));
    assert_eq!(data(&html)["rollouts"][0]["prompt"], HOSTILE);
}

#[test]
fn an_empty_run_and_a_long_one_are_shown_too() {
    let temp = tempfile::tempdir().unwrap();
    let dir = RunFolder::create(temp.path(), "new", "").unwrap().path().to_path_buf();
    balanced(&fs::read_to_string(report(&dir, None).unwrap()).unwrap());
    assert!(report(&temp.path().join("none"), None).unwrap_err().to_string().contains("no such run"));
    let dir = RunFolder::create(temp.path(), "long", "").unwrap().path().to_path_buf();
    let line = |step: u64| {
        format!("{{\"step\":{step},\"stage\":\"s\",\"epoch\":0,\"seconds\":{step},\"loss\":0.5}}\n")
    };
    fs::write(dir.join("metrics.jsonl"), (1..=50_000).map(line).collect::<String>()).unwrap();
    let html = fs::read_to_string(report(&dir, None).unwrap()).unwrap();
    assert!(
        html.len() < 1_000_000
            && data(&html)["runs"][0]["steps"].as_array().unwrap().last().unwrap() == 50_000
    );
}

/// Leaves a report to look at where `FERRL_REPORT` says.
#[test]
#[ignore = "for eyes"]
fn show() {
    let Ok(root) = std::env::var("FERRL_REPORT") else { return };
    report(&run(Path::new(&root), "countdown-grpo", 600, false), None).unwrap();
}

#[test]
fn an_evaluation_before_the_first_step_begins_its_curve() {
    let temp = tempfile::tempdir().unwrap();
    let run = RunFolder::create(temp.path(), "run", RECIPE).unwrap();
    let mut log = MetricsLog::open(&run.metrics(), &Files::default()).unwrap();
    for (step, name, value) in [(1, "eval_start/pass@1", 0.125), (2, "eval/pass@1", 0.5)] {
        let metrics = vec![(name.into(), value), ("reward".into(), value)];
        log.append(&StepRecord { step, stage: "grpo".into(), epoch: 0.0, seconds: 1.0, metrics }).unwrap();
    }
    let html = fs::read_to_string(report(run.path(), None).unwrap()).unwrap();
    assert!(html.contains("<span>eval/pass@1</span><b>0.125 → 0.500</b>"), "before and after in one figure");
    assert_eq!(data(&html)["runs"][0]["series"]["eval/pass@1"], serde_json::json!([0.125, 0.5]));
}

#[test]
fn warnings_and_errors_stand_on_top_and_stay_text() {
    let temp = tempfile::tempdir().unwrap();
    let dir = run(temp.path(), "r", 4, false);
    assert!(
        !fs::read_to_string(report(&dir, None).unwrap()).unwrap().contains("<ul class"),
        "nothing to say"
    );
    let folder = RunFolder::open(&dir).unwrap();
    let warning = |message: &str| ferrl::warnings::Warning {
        name: "w",
        message: message.into(),
        fix: "mend it".into(),
    };
    folder.note("info", "nobody needs to see this");
    folder.note_warning(&warning("3 of 10 rows are cut"));
    folder.note_warning(&warning(HOSTILE));
    folder.note("error", "the reward failed");
    folder.note("error", "the reward failed");
    drop(folder);
    let page = fs::read_to_string(report(&dir, None).unwrap()).unwrap();
    let (top, rest) = page.split_once("class=\"figures\"").unwrap();
    for part in ["3 of 10 rows are cut", "mend it", "the reward failed", "&lt;/script&gt;&lt;script&gt;"] {
        assert!(top.contains(part), "no {part:?}");
    }
    assert_eq!(page.matches("the reward failed").count(), 1, "said once");
    assert!(
        !page.contains("nobody needs to see this") && !page.contains(HOSTILE) && !rest.contains("mend it")
    );
}

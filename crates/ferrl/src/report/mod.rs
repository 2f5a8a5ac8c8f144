//! One HTML file that shows a run: figures, curves, rewards, rollouts, recipe. It needs nothing but a browser.
//!
//! The numbers go into the page as JSON and are drawn there; nothing that a model or a recipe wrote becomes markup.

mod collect;

use crate::run::files::error;
use crate::run::{Files, MetricsLog, StepRecord, journal};
use collect::{page_data, thin};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `report.html` into a run's folder; where it is.
pub fn report(run_dir: &Path) -> Result<PathBuf> {
    let recipe_path = run_dir.join("recipe.toml");
    if !recipe_path.is_file() {
        return Err(Error::usage("not a run's folder: recipe.toml is missing")
            .at(run_dir.display())
            .fix("give the folder of a run, such as runs/quickstart"));
    }
    let recipe = fs::read_to_string(&recipe_path).map_err(|e| error("cannot read", &recipe_path, &e))?;
    let metrics = run_dir.join("metrics.jsonl");
    let mut history = if metrics.exists() { MetricsLog::history(&metrics)? } else { Vec::new() };
    history.iter_mut().for_each(join_evaluations);
    let absolute = fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.into());
    let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let data = page_data(&thin(&history), &run_dir.join("rollouts"))?;
    let page = page(&name, &recipe, &history, &data.to_string(), &troubles(&journal::read(run_dir)?));
    let path = run_dir.join("report.html");
    Files::default().write_whole(&path, page.as_bytes())?;
    Ok(path)
}

/// An evaluation before a stage's first step is the first point of the same curve.
fn join_evaluations(record: &mut StepRecord) {
    for i in 0..record.metrics.len() {
        let joined = record.metrics[i].0.strip_prefix("eval_start/").map(|what| format!("eval/{what}"));
        if let Some(joined) = joined.filter(|name| record.get(name).is_none()) {
            record.metrics[i].0 = joined;
        }
    }
}

/// Most warnings and errors that are shown.
const TROUBLES: usize = 50;

/// Warnings and errors of a run's log, each once, as they stand at the top of the page.
fn troubles(log: &[Value]) -> String {
    let mut shown: Vec<String> = Vec::new();
    for line in log.iter().filter(|line| ["warning", "error"].iter().any(|level| line["level"] == *level)) {
        let text = |key: &str| line[key].as_str().unwrap_or_default();
        let fix =
            if text("fix").is_empty() { String::new() } else { format!("<i>{}</i>", escape(text("fix"))) };
        let (level, message) = (escape(text("level")), escape(text("message")));
        let item = format!("<li class=\"{level}\"><b>{level}</b> {message}{fix}</li>\n");
        if !shown.contains(&item) && shown.len() < TROUBLES {
            shown.push(item);
        }
    }
    match shown.is_empty() {
        true => String::new(),
        false => format!("<ul class=\"troubles\">\n{}</ul>\n", shown.concat()),
    }
}

fn page(name: &str, recipe: &str, history: &[StepRecord], data: &str, troubles: &str) -> String {
    let name = escape(name);
    let figures: String = figures(history)
        .iter()
        .map(|(label, value, note)| {
            let (label, value, note) = (escape(label), escape(value), escape(note));
            format!("<div class=\"figure\"><span>{label}</span><b>{value}</b><i>{note}</i></div>\n")
        })
        .collect();
    let recipe = escape(recipe);
    let css = include_str!("page.css");
    let js = concat!(include_str!("page.js"), include_str!("table.js"));
    // Inside a script element only "<" could end it early.
    let data = data.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
    format!(
        r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} · Ferrl</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<nav><a href="#curves">Curves</a><a href="#rewards">Rewards</a><a href="#rollouts">Rollouts</a><a href="#recipe">Recipe</a></nav>
<label class="smooth">Smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0.6"><output id="smooth-value"></output></label>
<button id="theme" type="button" title="Light or dark">◐</button>
</header>
<main>
{troubles}<section class="figures">
{figures}</section>
<section id="curves"><h2>Curves</h2><div id="main-charts" class="charts"></div>
<details id="more"><summary>More metrics</summary><div id="more-charts" class="charts"></div></details></section>
<section id="rewards"><h2>Rewards</h2><div id="histograms" class="charts"></div></section>
<section id="rollouts"><h2>Rollouts</h2><div id="controls"></div><div class="scroll"><table id="table"></table></div><p id="more-rows"></p></section>
<section id="recipe"><h2>Recipe</h2><pre>{recipe}</pre></section>
</main>
<noscript><p>The curves and the table are drawn by a script within this file, which is switched off.</p></noscript>
<div id="tip" hidden></div>
<script id="data" type="application/json">{data}</script>
<script>
{js}</script>
</body>
</html>
"##
    )
}

/// Text that stays text.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && !"\n\t".contains(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Evaluations worth a place at the top of the page, the first ones first.
const EVALUATIONS: [&str; 5] = ["eval/pass@1", "eval/greedy", "eval/accuracy", "eval/margin", "eval/loss"];

/// Label, value and a note for the top of the page.
fn figures(history: &[StepRecord]) -> Vec<(String, String, String)> {
    let Some(last) = history.last() else {
        return vec![("Steps".into(), "0".into(), "nothing has been measured yet".into())];
    };
    let mut stages: Vec<&str> = history.iter().map(|r| r.stage.as_str()).collect();
    stages.dedup();
    let mut out = vec![
        ("Steps".into(), last.step.to_string(), stages.join(" → ")),
        ("Time".into(), duration(last.seconds), format!("{:.2} epochs", last.epoch)),
    ];
    let evaluated = |name: &&str| history.iter().any(|r| r.get(name).is_some());
    let evals = EVALUATIONS.iter().copied().filter(evaluated).take(3);
    // The loss of a policy says little; its reward says what matters.
    let main = if history.iter().any(|r| r.get("reward").is_some()) { "reward" } else { "loss" };
    for name in [main].into_iter().chain(evals) {
        let values: Vec<(u64, f64)> =
            history.iter().filter_map(|r| Some((r.step, r.get(name)?))).filter(|v| v.1.is_finite()).collect();
        if values.is_empty() {
            continue;
        }
        let mean = |part: &[(u64, f64)]| part.iter().map(|v| v.1).sum::<f64>() / part.len() as f64;
        // Single steps are noisy; a tenth of the run is not. Evaluations are few and count as they are.
        let n = if name == main { (values.len() / 10).max(1) } else { 1 };
        let (from, to) = (mean(&values[..n]), mean(&values[values.len() - n..]));
        let low = name.ends_with("loss");
        let best = values.iter().copied().reduce(|a, b| if (b.1 < a.1) == low && b.1 != a.1 { b } else { a });
        let note = match best {
            Some((step, v)) if name != main => format!("best {} at step {step}", short(v)),
            _ => "means of the first and the last tenth".into(),
        };
        let value = if values.len() == 1 { short(to) } else { format!("{} → {}", short(from), short(to)) };
        out.push((name.into(), value, note));
    }
    out
}

fn short(x: f64) -> String {
    let size = x.abs();
    match size {
        _ if size != 0.0 && !(1e-3..1e5).contains(&size) => format!("{x:.2e}"),
        _ if size >= 100.0 => format!("{x:.0}"),
        _ => format!("{x:.3}"),
    }
}

fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    match s {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

//! `ferrl eval --suite`: the settings of a published benchmark, and the tables of its results.

use super::{Args, EvalJob};
use ferrl::data::hub::HubCache;
use ferrl::data::overlap::{WORDS, between};
use ferrl::data::{DataSource, Dataset};
use ferrl::evaluate::{EvaluatedCompletion, Summary};
use ferrl::recipe::{Recipe, RewardSettings};
use ferrl::suite::{self, Entry, SEVERAL, Use};
use ferrl::warnings::Warnings;
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::{Error, Result, counted};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Maximum number of groups in a table; --json has all.
const GROUPS: usize = 60;

/// The suites of `--suite`, each with the recipe that evaluates it.
pub fn recipes(args: &Args, base: &Recipe, dir: &ModelDir) -> Result<Vec<(&'static Entry, Recipe)>> {
    let mut all: Vec<(&'static Entry, Recipe)> = Vec::new();
    for text in &args.suite {
        let (name, path) = text.split_once('=').map_or((text.as_str(), None), |(n, p)| (n, Some(p)));
        let name = name.trim_start_matches(suite::PREFIX);
        let entry = suite::find(name).map_err(|e| e.at("--suite"))?;
        if all.iter().any(|(other, _)| other.name == entry.name) {
            return Err(Error::usage(format!("{} is named twice", entry.name))
                .at("--suite")
                .fix("name it once"));
        }
        all.push((entry, recipe(args, base, dir, entry, path)?));
    }
    Ok(all)
}

fn recipe(args: &Args, base: &Recipe, dir: &ModelDir, entry: &Entry, path: Option<&str>) -> Result<Recipe> {
    if args.likelihood.is_some() && !matches!(entry.rows, Use::Verified { verifier: "choice", .. }) {
        let choice =
            suite::SUITES.iter().filter(|s| matches!(s.rows, Use::Verified { verifier: "choice", .. }));
        let names: Vec<&str> = choice.map(|s| s.name).collect();
        return Err(Error::usage(format!(
            "{} has no options whose log-probabilities could be compared",
            entry.name
        ))
        .at("--likelihood")
        .fix(format!("--suite with one of {}", names.join(", "))));
    }
    let Use::Verified { verifier, .. } = entry.rows else {
        let verified = suite::SUITES.iter().filter(|s| matches!(s.rows, Use::Verified { .. }));
        let names: Vec<&str> = verified.map(|s| s.name).collect();
        return Err(Error::usage(format!(
            "{} has demonstrations to train on and no answers to grade: data.train = [\"suite:{}\"]",
            entry.name, entry.name
        ))
        .at("--suite")
        .fix(format!("one of {}", names.join(", "))));
    };
    let mut r = base.clone();
    let source = path.map_or(String::new(), |p| format!("={p}"));
    (r.eval.data, r.data.train) = (vec![format!("{}{}{source}", suite::PREFIX, entry.name)], Vec::new());
    (r.eval.split, r.data.shuffle) = (0.0, false);
    r.data.weights.clear();
    r.data.task.clear();
    r.data.columns.clear();
    // Of the run's recipe the settings of prompts do not apply to a benchmark; those on the command line do.
    let said = |key: &str| args.changes.iter().any(|c| c.trim_start_matches(['+', '~']).starts_with(key));
    if !said("data.template") {
        r.data.template = None;
    }
    if !said("data.examples") {
        r.data.examples.clear();
    }
    if r.data.apply_chat_template.is_none() && ChatTemplate::find(&dir.path)?.is_some() {
        r.data.apply_chat_template = Some(true);
    }
    r.data.max_length = dir.config.max_context().unwrap_or(r.data.max_length).max(1);
    let truncated = args.score_truncated.then(|| "score".to_string());
    let options = entry.options()?;
    r.reward =
        vec![RewardSettings { verifier: Some(verifier.into()), options, truncated, ..Default::default() }];
    r.eval.samples = args.samples.unwrap_or(1);
    let own = entry.sampling;
    let usual = if own.temperature == 0.0 && r.eval.samples > 1 { SEVERAL } else { own.temperature };
    r.rollout.temperature = args.set.temperature.map_or(usual, f64::from);
    r.rollout.top_p = args.set.top_p.map_or(1.0, f64::from);
    r.rollout.top_k = 0;
    r.rollout.max_new_tokens = args.set.max_new_tokens.unwrap_or(own.max_new_tokens);
    if !said("rollout.stop") {
        r.rollout.stop = own.stop.iter().map(|s| s.to_string()).collect();
    }
    Ok(r)
}

/// Warns of rows of the suites that the run was trained on: accuracy on them measures memorisation.
pub fn warn_overlap(
    own: &Path,
    suites: &[(Option<&'static Entry>, Recipe)],
    warnings: &Warnings,
) -> Result<()> {
    let cache = HubCache::from_env();
    let stages = Recipe::load(own, &[])?.stages;
    let names = stages.iter().flat_map(|s| &s.recipe.data.train).filter(|n| !n.starts_with("task:"));
    // Training files may have been deleted since.
    let read = |name: &String| Dataset::read(&DataSource::parse(name).ok()?, &cache).ok();
    let train: Vec<Dataset> = names.filter_map(read).collect();
    let mut said = Vec::new();
    for recipe in suites.iter().map(|(_, recipe)| recipe) {
        let test = Dataset::read(&DataSource::held_out(&recipe.eval.data[0])?, &cache)?;
        let report = between(&train, &[test], WORDS)?;
        if let Some(first) = report.pairs.first() {
            let name = &recipe.eval.data[0];
            said.push(format!(
                "{} of {} rows of {name} overlap with rows the run was trained on (first: {} and {})",
                report.met, report.test_rows, first.test, first.train
            ));
        }
    }
    if !said.is_empty() {
        let fix = "the accuracy on them measures memorisation; ferrl data overlap shows all rows";
        warnings.raise("overlapping-rows", said.join("; "), fix);
    }
    Ok(())
}

struct SuiteResult<'a> {
    entry: &'static Entry,
    job: &'a EvalJob,
    summary: Summary,
    /// Accuracy by value of each grouping column of the suite.
    groups: Vec<(&'static str, BTreeMap<String, Summary>)>,
    /// Accuracy by log-probability per character, where options were scored by it.
    acc_norm: Option<f64>,
}

impl<'a> SuiteResult<'a> {
    fn new(entry: &'static Entry, job: &'a EvalJob, ks: &[usize]) -> Self {
        let samples = job.recipe.eval.samples;
        let by = |column: &'static str| {
            let mut parts: BTreeMap<String, Vec<EvaluatedCompletion>> = BTreeMap::new();
            for question in job.all.completions.chunks(samples.max(1)) {
                let value = question.first().and_then(|(prompt, ..)| prompt.columns.get(column));
                let Some(value) = value.filter(|v| !v.is_null()) else { continue };
                let name = value.as_str().map_or_else(|| value.to_string(), String::from);
                parts.entry(name).or_default().extend_from_slice(question);
            }
            let parts = parts.into_iter().map(|(name, part)| (name, Summary::of(&part, samples, ks)));
            (column, parts.collect::<BTreeMap<_, _>>())
        };
        let groups = entry.groups.iter().map(|c| by(c)).filter(|(_, parts)| parts.len() > 1).collect();
        let normed = job.all.completions.iter().filter_map(|(_, _, scores)| {
            scores.components.iter().find(|(name, _)| name == "acc_norm").map(|(_, hit)| f64::from(*hit))
        });
        let normed: Vec<f64> = normed.collect();
        let acc_norm = (!normed.is_empty()).then(|| normed.iter().sum::<f64>() / normed.len() as f64);
        SuiteResult { entry, job, summary: Summary::new(&job.all, samples, ks), groups, acc_norm }
    }

    fn json(&self) -> Value {
        let mut line = Map::from_iter([("suite".to_string(), json!(self.entry.name))]);
        line.extend(self.summary.json());
        line.insert("verifier".into(), json!(self.job.recipe.reward[0].verifier));
        line.insert("data".into(), json!(self.job.recipe.eval.data[0]));
        line.insert("temperature".into(), json!(self.job.recipe.rollout.temperature));
        line.insert("max_new_tokens".into(), json!(self.job.recipe.rollout.max_new_tokens));
        line.insert("seconds".into(), json!(self.job.seconds));
        line.insert("tokens".into(), json!(self.job.tokens()));
        if let Some(acc_norm) = self.acc_norm {
            line.insert("acc".into(), json!(self.summary.figure("accuracy")));
            line.insert("acc_norm".into(), json!(acc_norm));
        }
        line.insert("complete".into(), json!(self.job.asked == self.job.prompts));
        let parts = |parts: &BTreeMap<String, Summary>| {
            Map::from_iter(parts.iter().map(|(name, s)| (name.clone(), Value::Object(s.json()))))
        };
        let groups = self.groups.iter().map(|(column, p)| (column.to_string(), Value::Object(parts(p))));
        line.insert("groups".into(), Value::Object(groups.collect()));
        Value::Object(line)
    }
}

/// Mean accuracy over suites, each with the same weight (macro average).
fn macro_average(results: &[SuiteResult<'_>]) -> Option<f64> {
    let all: Vec<f64> = results.iter().filter_map(|r| r.summary.figure("accuracy")).collect();
    (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
}

/// The tables, or one JSON object.
pub fn show(model: &str, jobs: &[EvalJob], ks: &[usize], seed: u64, as_json: bool) -> String {
    let asked = jobs.iter().filter(|job| job.asked > 0);
    let results: Vec<SuiteResult<'_>> =
        asked.filter_map(|job| Some(SuiteResult::new(job.suite?, job, ks))).collect();
    let mean = macro_average(&results);
    if as_json {
        let suites: Vec<Value> = results.iter().map(SuiteResult::json).collect();
        return format!(
            "{}\n",
            json!({ "model": model, "seed": seed, "macro_accuracy": mean, "suites": suites })
        );
    }
    let mut out = format!("{model}\n\n");
    accuracies(&mut out, &results);
    if let Some(mean) = mean.filter(|_| results.len() > 1) {
        let _ = writeln!(out, "{:<24}{:>10.2} %", "mean over suites", 100.0 * mean);
    }
    results.iter().for_each(|r| groups(&mut out, r));
    let (tokens, seconds) =
        (jobs.iter().map(EvalJob::tokens).sum::<usize>(), jobs.iter().map(|j| j.seconds).sum::<f64>());
    let rate = tokens as f64 / seconds.max(1e-9);
    let _ = writeln!(out, "\n{} in {seconds:.1} s ({rate:.0} tokens/s)", counted(tokens, "token"));
    let lost: usize = results.iter().map(|r| r.summary.lost).sum();
    if lost > 0 {
        let _ = writeln!(out, "without reward, neither right nor wrong: {}", counted(lost, "completion"));
    }
    out
}

/// A line for each suite: accuracy with its interval, and the other figures.
fn accuracies(out: &mut String, results: &[SuiteResult<'_>]) {
    let named: Vec<String> = results.first().map_or(Vec::new(), |r| {
        let shown =
            |name: &&str| name.starts_with("pass@") && *name != "pass@1" || name.starts_with("majority@");
        r.summary.figures.iter().map(|f| f.name.as_str()).filter(shown).map(String::from).collect()
    });
    let _ = write!(out, "{:<16}{:>8}{:>12}{:>16}", "suite", "prompts", "accuracy", "95 % interval");
    for name in named.iter().map(String::as_str).chain(["truncated"]) {
        let _ = write!(out, "{name:>14}");
    }
    out.push('\n');
    for r in results {
        line(out, r.entry.name, &r.summary);
        for name in named.iter().map(String::as_str).chain(["truncated"]) {
            let shown = r.summary.figure(name).map_or("-".into(), |v| format!("{:.2} %", 100.0 * v));
            let _ = write!(out, "{shown:>14}");
        }
        out.push('\n');
    }
    for r in results {
        if let Some(acc_norm) = r.acc_norm {
            let _ = writeln!(
                out,
                "{} by log-probability per character (acc_norm): {:.2} %",
                r.entry.name,
                100.0 * acc_norm
            );
        }
    }
}

/// Accuracy by the groups of a suite's rows.
fn groups(out: &mut String, r: &SuiteResult<'_>) {
    for (column, parts) in &r.groups {
        let _ = writeln!(out, "\n{} by {column}", r.entry.name);
        for (name, summary) in parts.iter().take(GROUPS) {
            line(out, &format!("  {}", crate::output::visible(name)), summary);
            out.push('\n');
        }
        let values: Vec<f64> = parts.values().filter_map(|s| s.figure("accuracy")).collect();
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        let _ = writeln!(out, "{:<24}{:>10.2} %", "  mean over groups", 100.0 * mean);
        if parts.len() > GROUPS {
            let _ = writeln!(out, "  and {} more: --json has all", parts.len() - GROUPS);
        }
    }
}

fn line(out: &mut String, name: &str, summary: &Summary) {
    let accuracy = summary.figure("accuracy").map_or("-".into(), |v| format!("{:.2} %", 100.0 * v));
    let interval =
        summary.interval.map_or(String::new(), |(l, h)| format!("{:.1} - {:.1} %", 100.0 * l, 100.0 * h));
    let _ = write!(out, "{name:<16}{:>8}{accuracy:>12}{interval:>16}", summary.prompts);
}

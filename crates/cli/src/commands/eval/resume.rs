//! `ferrl eval --resume`: continues an interrupted evaluation from the rows in `FILE.part`.
//!
//! A completion's random numbers depend only on the seed and its prompt, so resuming changes no completion. `FILE.part.json` holds the
//! model, seed and settings of the rows; others are refused.

use super::EvalJob;
use ferrl::evaluate::EvaluatedCompletion;
use ferrl::reward::CompletionScores;
use ferrl::rollout::RolloutCompletion;
use ferrl::source::{Item, Prompt};
use ferrl_engine::files::write_whole;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn beside(output: &Path, ending: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Everything that determines the completions: the model and, for each job, the rows and the settings of sampling.
pub fn settings(model: &Path, seed: u64, jobs: &[EvalJob], likelihood: Option<&str>) -> Value {
    let job = |job: &EvalJob| {
        let (r, e) = (&job.recipe.rollout, &job.recipe.eval);
        json!({
            "data": e.data, "task": job.recipe.data.train, "prompts": job.prompts, "samples": e.samples,
            "temperature": r.temperature, "top_p": r.top_p, "max_new_tokens": r.max_new_tokens, "stop": r.stop,
            "dtype": job.recipe.model.dtype, "rows": job.recipe.data, "reward": job.recipe.reward,
        })
    };
    let model = model.canonicalize().unwrap_or_else(|_| model.into());
    let jobs: Vec<Value> = jobs.iter().map(job).collect();
    json!({ "model": model.display().to_string(), "seed": seed, "likelihood": likelihood, "jobs": jobs })
}

/// Stores the settings beside the rows to come.
pub fn remember(output: &Path, settings: &Value) -> Result<()> {
    let path = beside(output, ".part.json");
    write_whole(&path, settings.to_string().as_bytes()).map_err(|e| crate::output::unwritable(&path, &e))
}

/// Deletes the settings once nothing is left to resume.
pub fn forget(output: &Path) {
    let _ = std::fs::remove_file(beside(output, ".part.json")); // the rows have their name: it says no more
}

/// A row of the interrupted evaluation, and where its line ends in the part.
pub type StoredRow = (Map<String, Value>, u64);

/// The rows of the interrupted evaluation; empty if there is none.
pub fn rows(output: &Path, settings: &Value) -> Result<Vec<StoredRow>> {
    let part = beside(output, ".part");
    let bytes = std::fs::read(&part).unwrap_or_default();
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let stored = std::fs::read(beside(output, ".part.json")).ok();
    let stored: Option<Value> = stored.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let fix = "use the settings of the interrupted evaluation, or start over without --resume";
    let Some(stored) = stored else {
        return Err(Error::usage("the settings that its rows were sampled with are missing")
            .at(part.display())
            .fix(fix));
    };
    if let Some((name, was, is)) = difference(&stored, settings, "") {
        let what = format!("was begun with {name} = {was}, not {is}");
        return Err(Error::usage(what).at(part.display()).fix(fix));
    }
    // The last line may be incomplete.
    let mut end = 0;
    let row = |line: &[u8]| {
        end += line.len() as u64;
        Some((serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?, end))
    };
    Ok(bytes.split_inclusive(|&b| b == b'\n').map_while(row).collect())
}

/// The first setting that differs.
pub fn difference(was: &Value, is: &Value, name: &str) -> Option<(String, String, String)> {
    let under = |key: &str| if name.is_empty() { key.to_string() } else { format!("{name}.{key}") };
    match (was, is) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            a.iter().find_map(|(key, value)| difference(value, &b[key], &under(key)))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(k, (a, b))| difference(a, b, &under(&k.to_string())))
        }
        _ => (was != is).then(|| (name.to_string(), was.to_string(), is.to_string())),
    }
}

/// Gives the rows of the earlier run to its jobs, in order. Prompts without all their samples are dropped; a prompt whose text has
/// changed is an error. Returns the number of bytes of the rows that are kept.
pub fn restore(jobs: &mut [EvalJob], rows: Vec<StoredRow>) -> Result<u64> {
    let mut rows = rows.into_iter().peekable();
    let mut kept = 0;
    for job in jobs {
        let samples = job.recipe.eval.samples.max(1);
        let own =
            |(row, _): &StoredRow| row.get("suite").and_then(Value::as_str) == job.suite.map(|s| s.name);
        let mut own_rows = Vec::new();
        while own_rows.len() < job.prompts * samples
            && let Some(row) = rows.next_if(own)
        {
            own_rows.push(row);
        }
        own_rows.truncate(own_rows.len() / samples * samples);
        let done = own_rows.len() / samples;
        if done > 0 {
            job.source.next(done)?.iter().zip(own_rows.iter().step_by(samples)).try_for_each(same_prompt)?;
        }
        for (row, end) in own_rows {
            job.all.completions.push(answered(&row)?);
            kept = end;
        }
        job.asked = done;
        // Jobs run in order: only the last started one can be incomplete.
        if done < job.prompts {
            break;
        }
    }
    Ok(kept)
}

/// Whether a row answers the prompt that is in its place now. An environment may have begun with another text.
fn same_prompt((item, (row, _)): (&Item, &StoredRow)) -> Result<()> {
    let Item::Prompt(prompt) = item else { return Ok(()) };
    let was = row.get("prompt").and_then(Value::as_str).filter(|_| !row.contains_key("turns"));
    let was = was.filter(|was| *was != prompt.text && row.get("index") == Some(&json!(prompt.index)));
    let Some(was) = was else { return Ok(()) };
    let what = format!("prompt {} was {was:?} and is {:?}", prompt.index, prompt.text);
    Err(Error::usage(what)
        .at("--resume")
        .fix("the data of the evaluation that was stopped, or no --resume to start over"))
}

/// Parses a written row.
fn answered(row: &Map<String, Value>) -> Result<EvaluatedCompletion> {
    let bad = |e: serde_json::Error| Error::data(format!("a row of the .part file cannot be read: {e}"));
    let get = |name: &str| row.get(name).cloned().unwrap_or_default();
    let prompt: Prompt = serde_json::from_value(json!({
        "index": get("index"), "ids": [], "text": get("prompt"), "messages": [], "columns": get("columns"),
    }))
    .map_err(bad)?;
    let completion: RolloutCompletion = serde_json::from_value(json!({
        "prompt": 0, "text": get("completion"), "tokens": get("tokens"), "truncated": get("truncated"),
    }))
    .map_err(bad)?;
    let components: Map<String, Value> = serde_json::from_value(get("components")).map_err(bad)?;
    let scores = CompletionScores {
        reward: get("reward").as_f64(),
        score: get("score").as_f64(),
        components: components.into_iter().map(|(n, v)| (n, v.as_f64().unwrap_or(f64::NAN) as f32)).collect(),
        ..Default::default()
    };
    Ok((prompt, completion, scores))
}

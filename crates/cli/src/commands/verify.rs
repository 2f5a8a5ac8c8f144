//! `ferrl verify`: scores given completions with a verifier.

use crate::data::{self, PlacedRow};
use crate::options::{key_values, size};
use crate::output::{JsonlOutput, print, visible, warn};
use ferrl::data::hub::model_dir;
use ferrl::recipe::{verifiers_json, verifiers_markdown, verifiers_text};
use ferrl::verify::{self, Hooks, Outcome, Progress, Sample, Truncated, VERIFIERS, Verifier};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result, counted};
use ferrl_kernels::cores;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Score completions with a verifier, or list the verifiers
///
/// Each input row holds a `completion`, and a `prompt` (text or a list of messages) and other columns if the verifier or
/// Python function needs them; `truncated: true` marks a truncated completion. Each output row holds `reward`,
/// `components`, `score`, `extracted` (the extracted answer), `why` (the reason if it is not right) and `micros` (the time in
/// microseconds). A row that cannot be scored has `reward: null` and `error`; the other rows are scored. If none can be, the
/// exit code is that of the first error.
#[derive(clap::Args)]
pub struct Args {
    /// One of `ferrl verify --list`
    #[arg(value_name = "NAME", required_unless_present_any = ["list", "markdown"], requires = "input")]
    name: Option<String>,
    /// JSON lines to score; - is standard input
    #[arg(long, visible_alias = "data", value_name = "FILE", requires = "name")]
    input: Option<PathBuf>,
    /// JSON lines to write, in the order of the input; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Option of the verifier: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "name")]
    option: Vec<String>,
    /// Model directory with the tokenizer, for verifiers and functions that need a completion's number of tokens
    #[arg(long, value_name = "DIR", requires = "name")]
    model: Option<PathBuf>,
    /// Threads that score rows [default: 1; all cores for verifiers that start processes]
    #[arg(long, value_name = "N", value_parser = size::<1024>, requires = "name")]
    threads: Option<usize>,
    /// Score truncated completions by their text; otherwise they count as wrong
    #[arg(long, requires = "name")]
    score_truncated: bool,
    /// List the verifiers with their options
    #[arg(long, conflicts_with = "name")]
    list: bool,
    /// The list as JSON
    #[arg(long, requires = "list")]
    json: bool,
    /// Print the manual's page on verifiers and generated tasks
    #[arg(long, conflicts_with_all = ["name", "list"])]
    markdown: bool,
}

pub fn run(args: &Args) -> Result<()> {
    match (&args.name, &args.input) {
        (Some(name), Some(input)) => grade(args, name, data::rows_or_errors(input)?),
        _ if args.markdown => print(&verifiers_markdown()),
        _ if args.json => print(&format!("{}\n", verifiers_json())),
        _ => print(&verifiers_text()),
    }
}

/// The score of a row or the error, and its microseconds.
type TimedOutcome = (Result<Outcome>, f64);

fn grade(args: &Args, name: &str, rows: Vec<Result<PlacedRow>>) -> Result<()> {
    let hooks = Hooks::default();
    let verifier = verify::build_with(name, &key_values("--option", &args.option)?, &hooks)?;
    let mut output =
        JsonlOutput::beside(&args.output, &args.input.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
    let tokenizer = args.model.as_ref().map(|path| Tokenizer::from_dir(&model_dir(path)?)).transpose()?;
    let samples: Vec<Result<VerifyRow>> =
        rows.into_iter().map(|row| VerifyRow::read(row?, tokenizer.as_ref())).collect();
    let truncated = if args.score_truncated { Truncated::Score } else { Truncated::Wrong };
    let threads = args.threads.unwrap_or_else(|| if verifier.waits() { cores() } else { 1 });
    let graded = all(&*verifier, &samples, truncated, threads);
    warn(&hooks.warnings);
    hooks.warnings.take_printed().iter().for_each(|p| eprintln!("{}: {}", p.source, visible(&p.line)));
    let (mut rewards, mut times, mut first) = (Vec::new(), Vec::new(), None);
    for (asked, (outcome, micros)) in samples.iter().zip(&graded) {
        times.push(*micros);
        let row = match outcome {
            Ok(Outcome::Scored(score)) => {
                rewards.push(score.reward);
                let completion = asked.as_ref().map_or("", |a| a.completion.as_str());
                let extracted = score.extracted.clone();
                let extracted = extracted.unwrap_or_else(|| json!(verifier.extract(completion)));
                let parts: Map<String, Value> =
                    score.components.iter().map(|(n, v)| (n.clone(), json!(v))).collect();
                json!({
                    "reward": score.reward, "components": parts, "score": score.score,
                    "extracted": extracted, "why": why(asked, score), "micros": micros,
                })
            }
            Ok(Outcome::Abstained) => {
                json!({ "reward": null, "why": "no function returned a reward for it", "micros": micros })
            }
            Ok(Outcome::Lost(e)) | Err(e) => {
                first.get_or_insert_with(|| e.clone());
                json!({ "reward": null, "error": e.to_string(), "micros": micros })
            }
        };
        output.row(&row)?;
    }
    output.finish()?;
    if let (true, Some(error)) = (rewards.is_empty(), first) {
        return Err(error.context(format!("none of {} could be scored", counted(graded.len(), "row"))));
    }
    times.sort_by(f64::total_cmp);
    let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
    let summary = verifier.summary().map(|s| format!("; {}", visible(&s))).unwrap_or_default();
    eprintln!(
        "{}, {} scored, mean reward {mean:.4}, {:.0} us at the median, {:.0} us at worst{summary}",
        counted(graded.len(), "row"),
        rewards.len(),
        times.get(times.len() / 2).copied().unwrap_or(0.0),
        times.last().copied().unwrap_or(0.0),
    );
    Ok(())
}

/// Scores all rows: a Python function is called once with all of them, other verifiers row by row.
fn all(
    verifier: &dyn Verifier,
    samples: &[Result<VerifyRow>],
    truncated: Truncated,
    threads: usize,
) -> Vec<TimedOutcome> {
    let ask = |list: &[Sample<'_>]| verify::score_all(verifier, list, Progress::default(), truncated);
    if verifier.name() == "python" {
        let good: Vec<Sample<'_>> = samples.iter().flatten().zip(0..).map(|(a, i)| a.sample(i)).collect();
        let start = Instant::now();
        let outcomes = ask(&good);
        let micros = start.elapsed().as_secs_f64() * 1e6 / good.len().max(1) as f64;
        let mut outcomes = outcomes.map(Vec::into_iter);
        let one = |s: &Result<VerifyRow>| {
            let outcome = match (s, &mut outcomes) {
                (Err(e), _) => Err(e.clone()),
                (Ok(_), Err(e)) => Err(e.clone()),
                (Ok(_), Ok(list)) => list.next().ok_or_else(|| Error::data("got no score")),
            };
            (outcome, micros)
        };
        return samples.iter().map(one).collect();
    }
    let one = |(i, s): (usize, &Result<VerifyRow>)| {
        let start = Instant::now();
        let outcome = s.as_ref().map_err(Clone::clone).and_then(|a| {
            let mut scored = ask(&[a.sample(i as u64)])?;
            scored.pop().ok_or_else(|| Error::data("got no score").at(&a.place))
        });
        (outcome, start.elapsed().as_secs_f64() * 1e6)
    };
    if threads == 1 {
        return samples.iter().enumerate().map(one).collect();
    }
    // Each free thread takes the next chunk of rows; scores are stored by row index.
    let size = if verifier.waits() { 1 } else { 16 };
    let next = AtomicUsize::new(0);
    let slots: Vec<OnceLock<TimedOutcome>> = samples.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let from = next.fetch_add(size, Ordering::Relaxed);
            let Some(portion) = samples.get(from..samples.len().min(from + size)).filter(|p| !p.is_empty())
            else {
                return;
            };
            for (i, sample) in (from..).zip(portion) {
                let _ = slots[i].set(one((i, sample)));
            }
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let unset = || (Err(Error::data("got no score")), 0.0);
    slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(unset)).collect()
}

/// Why a completion does not earn the full reward.
fn why(asked: &Result<VerifyRow>, score: &verify::Score) -> Option<String> {
    let right = score.score.unwrap_or(score.reward) >= 1.0;
    let words = match score.found {
        _ if right => return score.why.clone(),
        _ if asked.as_ref().is_ok_and(|a| a.truncated) => "it was truncated",
        _ if score.why.is_some() => return score.why.clone(),
        Some(false) => "no answer was found in it",
        Some(true) => "the answer is not the expected one",
        None => return None,
    };
    Some(words.to_string())
}

/// A row in the form a verifier takes.
struct VerifyRow {
    place: String,
    prompt: String,
    messages: Vec<Value>,
    completion: String,
    /// Number of tokens, with `--model`.
    ids: Option<Vec<u32>>,
    truncated: bool,
    columns: Map<String, Value>,
}

impl VerifyRow {
    fn read(row: PlacedRow, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let completion = row.text("completion")?.to_string();
        let ids = tokenizer.map(|t| t.encode_text(&completion).map_err(|e| e.at(&row.place))).transpose()?;
        let (prompt, messages) = match row.get("prompt") {
            Some(Value::Array(list)) => (Value::Array(list.clone()).to_string(), list.clone()),
            Some(Value::String(text)) => (text.clone(), Vec::new()),
            Some(_) => return Err(row.error("field \"prompt\" is neither text nor a list of messages")),
            None => (String::new(), Vec::new()),
        };
        let truncated = match row.get("truncated") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(truncated)) => *truncated,
            Some(_) => return Err(row.error("field \"truncated\" is neither true nor false")),
        };
        let mut columns = row.fields;
        columns.retain(|name, _| !["completion", "prompt"].contains(&name.as_str()));
        Ok(VerifyRow { place: row.place, prompt, messages, completion, ids, truncated, columns })
    }

    fn sample(&self, id: u64) -> Sample<'_> {
        Sample {
            id,
            prompt: &self.prompt,
            messages: &self.messages,
            completion: &self.completion,
            ids: self.ids.as_deref().unwrap_or_default(),
            tokens: self.ids.as_ref().map(Vec::len),
            place: &self.place,
            truncated: self.truncated,
            columns: (&self.columns).into(),
        }
    }
}

/// The names, for `--help` and hints.
pub fn names() -> String {
    VERIFIERS.iter().map(|v| v.name).collect::<Vec<_>>().join(", ")
}

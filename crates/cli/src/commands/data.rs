//! `ferrl data`: inspects and prepares data.

mod overlap;
mod steps;
mod suites;
mod unpair;
mod vary;
mod verdicts;

use crate::options::open_model;
use crate::output::{print, visible};
use ferrl::algo::{self, ALGORITHMS};
use ferrl::data::check::{DataReport, MARKS, ReportLimits, RowProblem, check, read};
use ferrl::data::hub::{HubCache, model_dir};
use ferrl::data::prompt::{Apply, PromptSettings};
use ferrl::data::schema::RowKind;
use ferrl::data::{DataSource, Dataset, EncodedRow, Encoder, strings};
use ferrl::recipe::{DataSettings, Recipe, RewardSettings};
use ferrl::reward::Rewards;
use ferrl::source::{encoding, prompt_of};
use ferrl::verify::Hooks;
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::{Tokenizer, train_chars};
use ferrl_engine::{Error, Result, counted, nearest};
use serde_json::{Map, Value, json};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Inspect and prepare data
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(clap::Subcommand)]
enum DataCommand {
    Check(Box<CheckArgs>),
    Steps(steps::Args),
    Overlap(overlap::Args),
    Suites(suites::Args),
    Unpair(unpair::Args),
    Vary(vary::Args),
    Verdicts(verdicts::Args),
}

/// Check data and show what would be trained on
///
/// Reads every row as training does. Prints the first examples with the trained tokens marked, the lengths, the warnings of a
/// run, and every problem (also missing columns that a reward of the recipe needs) with the number of rows and the file and row
/// of the first three. Exit code 3 if there is a problem. Without --model (or a recipe with one) tokens are characters and
/// messages get a plain template.
#[derive(clap::Args)]
struct CheckArgs {
    /// Files, folders, split@path or org/name [default: the recipe's data.train], and overrides such as data.max_length=512
    #[arg(value_name = "PATH|KEY=VALUE", required_unless_present = "recipe")]
    paths: Vec<String>,
    /// Algorithm that the data is for [default: guessed from the columns]
    #[arg(long, value_name = "NAME")]
    algo: Option<String>,
    /// Model directory with the tokenizer and chat template
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Recipe with data settings, model, algorithm and rewards
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// The same as KEY=VALUE
    #[arg(long = "set", value_name = "KEY=VALUE", hide = true)]
    changes: Vec<String>,
    /// Examples to show
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = crate::options::count)]
    examples: usize,
    /// Maximum number of kinds of problems to show; all are counted
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = crate::options::count)]
    problems: usize,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Chat template without a model: ChatML.
const PLAIN: &str = "{%- for message in messages %}\
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        DataCommand::Check(args) => run_check(args),
        DataCommand::Steps(args) => steps::run(args),
        DataCommand::Overlap(args) => overlap::run(args),
        DataCommand::Suites(args) => suites::run(args),
        DataCommand::Unpair(args) => unpair::run(args),
        DataCommand::Vary(args) => vary::run(args),
        DataCommand::Verdicts(args) => verdicts::run(args),
    }
}

fn run_check(args: &CheckArgs) -> Result<()> {
    let (mut changes, paths): (Vec<String>, Vec<String>) =
        args.paths.iter().cloned().partition(|p| is_change(p));
    changes.extend(args.changes.iter().cloned());
    let recipe = match &args.recipe {
        Some(path) => Recipe::load(path, &changes)?,
        None => Recipe::parse("", "the command line", "data", &changes)?,
    };
    let first = |r: &Recipe| r.data.train.iter().any(|t| !t.starts_with("task:"));
    let stage = recipe.stages.iter().find(|s| first(&s.recipe)).or(recipe.stages.first());
    let stage = stage.map(|s| s.recipe.clone()).unwrap_or_default();
    let paths = if paths.is_empty() { stage.data.train.clone() } else { paths };
    let files: Vec<&String> = paths.iter().filter(|p| !p.starts_with("task:")).collect();
    if files.is_empty() {
        return Err(Error::usage("there is no data to check: a generated task has no files")
            .fix("ferrl data check FILE"));
    }
    let sources: Vec<DataSource> = files.into_iter().map(|p| DataSource::parse(p)).collect::<Result<_>>()?;
    let limits = ReportLimits { examples: args.examples, problems: args.problems };
    let (datasets, report) = read(&sources, &HubCache::from_env(), limits)?;
    let guessed = guess(&datasets, &stage.data);
    let said = args.recipe.is_some() || changes.iter().any(|c| c.starts_with("algo"));
    let named = args.algo.clone().or(said.then(|| stage.algorithm_name().to_string()));
    let kind = match &named {
        Some(name) => {
            let near = nearest(name, ALGORITHMS.iter().map(|a| a.name)).unwrap_or(ALGORITHMS[0].name);
            let entry = algo::find(name).map_err(|e| e.fix(format!("--algo {near}")))?;
            entry.feed.row_kind(guessed == RowKind::Group)
        }
        None => guessed,
    };
    let model = args.model.clone().or(stage.model.path.as_ref().map(PathBuf::from));
    let encoder = encoder(model, &datasets, &stage.data)?;
    let hooks = Hooks::default();
    let rewards = rewards(&stage, &hooks)?;
    let rewarded = |sample: &EncodedRow| match kind {
        RowKind::Prompt => rewards.check(&prompt_of(sample, &encoder.0), &sample.place),
        _ => Ok(()), // given completions are not rewarded
    };
    let report = check(&datasets, report, &encoder.0, kind, limits, &rewarded)?;
    hooks.warnings.take_printed().iter().for_each(|p| eprintln!("{}: {}", p.source, visible(&p.line)));
    if args.json {
        print(&format!("{}\n", machine_readable(&report, kind)))?;
    } else {
        let by = named.map_or("as the columns suggest".into(), |n| format!("for {n}"));
        let tokens = if encoder.1 { "" } else { "no model given: tokens are characters\n" };
        print(&format!("read as {kind}, {by}\n{tokens}\n{}", coloured(&report.to_string())))?;
    }
    match report.found {
        0 => Ok(()),
        n => {
            let what = format!("{} found", counted(n, "problem"));
            Err(Error::data(what).fix("correct the rows named above, or leave them out"))
        }
    }
}

/// The rewards, without reward models, which need no column.
fn rewards(stage: &Recipe, hooks: &Hooks) -> Result<Rewards> {
    let plain: Vec<RewardSettings> = stage.reward.iter().filter(|r| r.model.is_none()).cloned().collect();
    Rewards::with_hooks(&plain, hooks).map_err(|e| e.at("reward"))
}

/// Whether an argument is an override (KEY=VALUE) and not an existing file.
fn is_change(text: &str) -> bool {
    let key = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '~');
    let named = text
        .split_once('=')
        .is_some_and(|(k, _)| !k.is_empty() && k.chars().all(key) && !k.contains(".json"));
    (named || text.starts_with('~')) && !std::path::Path::new(text).exists()
}

/// Replaces the marks around trained tokens by colour on a terminal.
fn coloured(text: &str) -> String {
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text: String = if std::io::stdout().is_terminal() {
        text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{FFFD}' } else { c }).collect()
    } else {
        text.to_owned()
    };
    if !colour {
        return text;
    }
    let [open, close] = MARKS.map(|m| m.to_string());
    let legend = format!("(trained tokens are between {open} and {close})");
    let text = text.replace(&legend, &format!("(trained tokens are {open}green{close})"));
    text.replace(&open, "\x1b[32m").replace(&close, "\x1b[0m")
}

fn machine_readable(r: &DataReport, kind: RowKind) -> Value {
    let example = |(place, text): &(String, String)| json!({"place": place, "text": text});
    let problem = |p: &RowProblem| json!({"rows": p.rows, "places": p.places, "text": p.text});
    let warning =
        |(name, message, fix): &(&str, String, String)| json!({"name": name, "message": message, "fix": fix});
    json!({
        "kind": kind.to_string(), "rows": r.rows, "files": r.files, "sequences": r.lengths.len(),
        "tokens": r.lengths.iter().sum::<usize>(), "trained": r.trained,
        "longest": r.lengths.last(), "truncated": r.counts.truncated, "dropped": r.counts.dropped,
        "examples": r.examples.iter().map(example).collect::<Vec<_>>(),
        "warnings": r.warnings.iter().map(warning).collect::<Vec<_>>(),
        "found": r.found, "problems": r.problems.iter().map(problem).collect::<Vec<_>>(),
    })
}

/// The kind whose columns the first row has; kinds with more columns are tried first.
fn guess(datasets: &[Dataset], data: &DataSettings) -> RowKind {
    let first = datasets.iter().find_map(|d| d.row(0).ok());
    let has = |name: &str| {
        data.columns.contains_key(name)
            || first.as_ref().is_some_and(|r| r.get(name).is_some_and(|v| !v.is_null()))
    };
    use RowKind::*;
    let fits = |w: &RowKind| w.schemas().iter().any(|s| s.iter().all(|c| has(c)));
    let order = [StepPreference, Preference, Group, Steps, Unpaired, Target, Sft, Prompt];
    // A row with `chosen` or `rejected` alone is a broken pair, not a prompt.
    if has("chosen") != has("rejected") {
        return Preference;
    }
    order.into_iter().find(fits).unwrap_or(if data.template.is_some() { Prompt } else { Sft })
}

/// An encoder for the model, or for characters where there is none; and which of the two.
fn encoder(model: Option<PathBuf>, datasets: &[Dataset], data: &DataSettings) -> Result<(Encoder, bool)> {
    let settings = encoding(data)?;
    if let Some(path) = model {
        let dir = model_dir(&path)?;
        if !dir.join("tokenizer.json").is_file() {
            open_model(&dir)?;
        }
        return Ok((Encoder::for_model(Tokenizer::from_dir(&dir)?, &dir, settings)?, true));
    }
    let mut texts = vec![data.template.clone(), data.system.clone(), data.prefill.clone()];
    texts.push(Some((' '..='~').chain(['\n']).collect()));
    let rows = datasets.iter().flat_map(|d| (0..d.len()).filter_map(|i| d.row(i).ok()));
    let written = rows.flat_map(|r| strings(Value::Object(r)));
    let texts = texts.into_iter().flatten().chain(written);
    let specials = ["<|im_start|>", "<|im_end|>"].map(String::from);
    let tokenizer = train_chars(texts, &specials)?;
    let chat = ChatTemplate::from_source(PLAIN, Map::new())?;
    // The model has no template, so plain-text prompts raise no warning.
    let settings = PromptSettings {
        apply_chat_template: match settings.apply_chat_template {
            Apply::Auto => Apply::Quiet,
            chosen => chosen,
        },
        ..settings
    };
    Ok((Encoder::new(tokenizer, Some(chat), settings)?, false))
}

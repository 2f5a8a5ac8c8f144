//! `ferrl data`: look at data before training on it.

use crate::options::open_model;
use crate::output::print;
use ferrl::algo::{self, ALGORITHMS};
use ferrl::data::check::{Limits, MARKS, Report, check};
use ferrl::data::hub::{Cache, model_dir};
use ferrl::data::schema::Wants;
use ferrl::data::{Dataset, Encoder, Source};
use ferrl::recipe::{Data, Recipe};
use ferrl::source::{encoding, schema_of};
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::{Tokenizer, train_chars};
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value, json};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Look at data before training on it
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Check(Box<CheckArgs>),
}

/// Show what would be trained on, and every problem
///
/// Reads every row as training would, shows the first examples with the trained tokens marked, the lengths, and every
/// problem with file, row, column, what was found and what was expected. Exit code 3 if there is one. Without --model
/// (or a recipe that names one) tokens are characters and messages get a plain template.
#[derive(clap::Args)]
struct CheckArgs {
    /// Files, folders, split@path or org/name; the recipe's data.train when left out
    #[arg(value_name = "PATH", required_unless_present = "recipe")]
    paths: Vec<String>,
    /// Algorithm the data is for; guessed from the columns when left out
    #[arg(long, value_name = "NAME")]
    algo: Option<String>,
    /// Model directory with the tokenizer and chat template
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Recipe whose data settings (and model, and algorithm) are used
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Settings of the data part of a recipe, such as data.max_length=512; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    changes: Vec<String>,
    /// Examples to show
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = crate::options::count)]
    examples: usize,
    /// Problems to show; all are counted
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = crate::options::count)]
    problems: usize,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What messages look like where no model says: ChatML.
const PLAIN: &str = "{%- for message in messages %}\
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Check(args) => run_check(args),
    }
}

fn run_check(args: &CheckArgs) -> Result<()> {
    let recipe = match &args.recipe {
        Some(path) => Recipe::load(path, &args.changes)?,
        None => Recipe::parse("", "the command line", "data", &args.changes)?,
    };
    let first = |r: &Recipe| !r.data.train.iter().any(|t| t.starts_with("task:"));
    let stage = recipe.stages.iter().find(|s| first(&s.recipe)).or(recipe.stages.first());
    let stage = stage.map(|s| s.recipe.clone()).unwrap_or_default();
    let paths = if args.paths.is_empty() { stage.data.train.clone() } else { args.paths.clone() };
    if paths.is_empty() || paths.iter().any(|p| p.starts_with("task:")) {
        return Err(Error::usage("there is no data to check: a generated task has no files")
            .fix("ferrl data check FILE"));
    }
    let sources: Vec<Source> = paths.iter().map(|p| Source::parse(p)).collect::<Result<_>>()?;
    let cache = Cache::from_env();
    let named = args.algo.clone().or(args.recipe.as_ref().map(|_| stage.algorithm_name().to_string()));
    let wants = match &named {
        Some(name) => {
            let near = nearest(name, ALGORITHMS.iter().map(|a| a.name)).unwrap_or(ALGORITHMS[0].name);
            let wants = algo::find(name).map_err(|e| e.fix(format!("--algo {near}")))?.wants;
            let answers_given = matches!(wants, algo::Wants::Rollouts | algo::Wants::Weighted)
                && guess(&sources, &cache, &stage.data).is_ok_and(|g| g == Wants::Group);
            if answers_given { Wants::Group } else { schema_of(wants, false, &[]) }
        }
        None => guess(&sources, &cache, &stage.data)?,
    };
    let model = args.model.clone().or(stage.model.path.as_ref().map(PathBuf::from));
    let encoder = encoder(model, &sources, &cache, &stage.data)?;
    let limits = Limits { examples: args.examples, problems: args.problems };
    let report = check(&sources, &cache, &encoder.0, wants, limits)?;
    if args.json {
        print(&format!("{}\n", machine_readable(&report, wants)))?;
    } else {
        let by = named.map_or("as the columns suggest".into(), |n| format!("for {n}"));
        let tokens = if encoder.1 { "" } else { "no model given: tokens are characters\n" };
        print(&format!("read as {wants}, {by}\n{tokens}\n{}", coloured(&report.to_string())))?;
    }
    match report.found {
        0 => Ok(()),
        1 => Err(Error::data("1 row cannot be used as it is").fix("mend it, or leave it out")),
        n => Err(Error::data(format!("{n} problems were found")).fix("mend the rows, or leave them out")),
    }
}

/// On a terminal trained tokens are green; elsewhere they stand between marks.
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

fn machine_readable(r: &Report, wants: Wants) -> Value {
    let example = |(place, text): &(String, String)| json!({"place": place, "text": text});
    json!({
        "kind": wants.to_string(), "rows": r.rows, "files": r.files, "sequences": r.lengths.len(),
        "tokens": r.lengths.iter().sum::<usize>(), "trained": r.trained,
        "longest": r.lengths.last(), "truncated": r.counts.truncated, "dropped": r.counts.dropped,
        "examples": r.examples.iter().map(example).collect::<Vec<_>>(),
        "found": r.found, "problems": r.problems.iter().map(|p| p.to_string()).collect::<Vec<_>>(),
    })
}

/// Every row that can be read; the check itself tells of the others.
fn rows(sources: &[Source], cache: &Cache) -> Result<Vec<Map<String, Value>>> {
    let mut rows = Vec::new();
    for source in sources {
        source.files(cache)?;
        if let Ok(dataset) = Dataset::read_with(source, cache, &mut |_| Ok(())) {
            rows.extend((0..dataset.len()).filter_map(|i| dataset.row(i).ok()));
        }
    }
    Ok(rows)
}

/// The kind whose columns the first row has; the most demanding one first.
fn guess(sources: &[Source], cache: &Cache, data: &Data) -> Result<Wants> {
    let rows = rows(sources, cache)?;
    let has = |name: &str| {
        data.columns.contains_key(name)
            || rows.first().is_some_and(|r| r.get(name).is_some_and(|v| !v.is_null()))
    };
    use Wants::*;
    let fits = |w: &Wants| w.schemas().iter().any(|s| s.iter().all(|c| has(c)));
    let order = [Preference, Group, Steps, Unpaired, Target, Sft, Prompt];
    Ok(order.into_iter().find(fits).unwrap_or(if data.template.is_some() { Prompt } else { Sft }))
}

/// An encoder for the model, or for characters where there is none; and which of the two.
fn encoder(
    model: Option<PathBuf>,
    sources: &[Source],
    cache: &Cache,
    data: &Data,
) -> Result<(Encoder, bool)> {
    let settings = encoding(data)?;
    if let Some(path) = model {
        let dir = model_dir(&path)?;
        if !dir.join("tokenizer.json").is_file() {
            open_model(&dir)?;
        }
        let chat = ChatTemplate::from_dir(&dir).ok();
        return Ok((Encoder::new(Tokenizer::from_dir(&dir)?, chat, settings)?, true));
    }
    let mut texts = vec![data.template.clone(), data.system.clone(), data.prefill.clone()];
    texts.push(Some((' '..='~').chain(['\n']).collect()));
    let written = rows(sources, cache)?.into_iter().flat_map(|r| strings(Value::Object(r)));
    let texts = texts.into_iter().flatten().chain(written);
    let specials = ["<|im_start|>", "<|im_end|>"].map(String::from);
    let tokenizer = train_chars(texts, &specials)?;
    let chat = ChatTemplate::from_source(PLAIN, Map::new())?;
    Ok((Encoder::new(tokenizer, Some(chat), settings)?, false))
}

/// Every text inside a value.
fn strings(value: Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(list) => list.into_iter().flat_map(strings).collect(),
        Value::Object(map) => map.into_iter().flat_map(|(_, v)| strings(v)).collect(),
        other => vec![other.to_string()],
    }
}

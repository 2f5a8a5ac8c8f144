//! `ferrl search`: search for answers, and replay saved searches.

mod resume;
mod show;

use super::eval::{find, last_stage, point_at, wanted};
use crate::data::files_read;
use crate::options::{RecipeArgs, at_least_one, key_values, open_model, size};
use crate::output::{JsonlOutput, finish_on_interrupt, print, warn};
use crate::progress::ProgressLine;
use crate::text::ModelText;
use ferrl::algo::Feed;
use ferrl::episode::Environments;
use ferrl::recipe::{Recipe, RewardSettings};
use ferrl::reward::Rewards;
use ferrl::rollout::{self, Actor};
use ferrl::search::paths::Pipeline;
use ferrl::search::{
    self, ChoiceRule, Driver, LogpScorer, Oracle, Record, RewardScorer, SCORERS, Scorer, SearchBudget,
    StepOracle,
};
use ferrl::setup;
use ferrl::source::{Item, Prompt};
use ferrl::verify::{Hooks, VERIFIERS};
use ferrl::{evaluate, interrupt};
use ferrl_engine::chat::{ChatTemplate, Kwargs};
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::Sampler;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result, counted, nearest};
use ferrl_kernels::{Backend, Ranks};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Search for answers: best of n, majority vote, beam search, trees, Monte Carlo tree search
///
/// Prompts come from --task, --data, --prompt or the recipe of a run. --strategy is one of `ferrl search --list`, which also
/// lists the options of each. --verifier scores prefixes and completions for the search: a verifier, a reward model's folder,
/// `logp` (the model's own probabilities), or `oracle` (the verifier that decides accuracy; the default if there is one). --save
/// writes trees as DIR/tree-N.json; --replay reads them and computes the same numbers without a model. Environments with several
/// turns are searched too: a node is a prefix of an episode, and no step spans two turns.
///
/// The tree of a prompt depends only on the model, the options and the seed, not on threads, decode batch or other prompts.
#[derive(clap::Args)]
pub struct Args {
    /// Model directory, run folder, or org/name in the Hugging Face cache
    #[arg(value_name = "MODEL|RUN", required_unless_present_any = ["replay", "list"])]
    model: Option<PathBuf>,
    /// Changes to the recipe's settings, such as data.task.numbers=4
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Prompts: files, folders, split@path, or org/name; may be given several times
    #[arg(long, value_name = "PATH", conflicts_with_all = ["task", "prompt"])]
    data: Vec<String>,
    /// Held-out prompts of a generated task
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    task: Option<String>,
    /// One prompt: a user message if the model has a chat template, otherwise text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Recipe for all other settings
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Strategy; see --list
    #[arg(long, value_name = "NAME", default_value = "cot")]
    strategy: String,
    /// Option of the strategy: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    option: Vec<String>,
    /// Scorer of the search: a verifier, the folder of a reward model, logp or oracle; or a language model's folder with
    /// --verifier-option kind=generative (its verdict) or kind=implicit (its log-ratio)
    #[arg(long, value_name = "NAME|MODEL")]
    verifier: Option<String>,
    /// Option of --verifier: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "verifier")]
    verifier_option: Vec<String>,
    /// Tokens to sample for each prompt; the search ends with the round that reaches them
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    budget: Option<usize>,
    /// Number of prompts [default: all rows of the data, or 200 of a task]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prompts: Option<usize>,
    /// Prompts searched concurrently; results do not depend on it
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = size::<4096>)]
    at_once: usize,
    #[command(flatten)]
    set: RecipeArgs,
    /// Folder to save trees in, as tree-N.json; earlier trees there are replaced
    #[arg(long, value_name = "DIR", conflicts_with = "replay")]
    save: Option<PathBuf>,
    /// Continue an interrupted search: prompts with a tree in --save are not searched again
    #[arg(long, requires = "save")]
    resume: bool,
    /// Recompute the results of saved trees: a folder or one file
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model", "list", "data", "task", "prompt", "recipe", "strategy", "option", "verifier", "budget", "prompts"])]
    replay: Option<PathBuf>,
    /// Rule that selects the result of each saved tree anew: the highest score, the most frequent answer, the answer with the
    /// largest sum of scores, or the most visited path
    #[arg(long, value_name = "RULE", requires = "replay", conflicts_with = "model", value_parser = ["best", "vote", "weighted", "visits"])]
    choose: Option<String>,
    /// Use only the first N completions of each saved tree, which must be independent samples; needs --choose
    #[arg(long, value_name = "N", requires = "choose", value_parser = at_least_one)]
    first: Option<usize>,
    /// JSON lines to write, one for each path of the trees: prompt, completion, steps with score and advantage, weight
    #[arg(long, value_name = "FILE")]
    paths: Option<PathBuf>,
    /// Path filter: which paths to write; see --list
    #[arg(long, value_name = "NAME", default_value = "none", requires = "paths")]
    filter: String,
    /// Path aggregator: which paths of each tree to write, with its parameter N if it has one; see --list
    #[arg(long, value_name = "NAME[=N]", default_value = "none", requires = "paths")]
    aggregate: String,
    /// Post-processors of scores and advantages, separated by commas and applied in this order; see --list
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', requires = "paths")]
    post: Vec<String>,
    /// HTML page of the trees to write
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print tokens sampled, prefix tokens shared and time
    #[arg(long)]
    stats: bool,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// List strategies, expanders, extractors and scorers with their options
    #[arg(long)]
    list: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.list {
        return print(&if args.json { show::list_json() } else { show::list() });
    }
    if let Some(dir) = &args.replay {
        let paths = outputs(args, &search::tree_files(dir).unwrap_or_default())?;
        return results(args, &replayed(args, dir)?, paths, true);
    }
    let Some(model) = &args.model else { return Err(Error::usage("a model or --replay is missing")) };
    pipeline(args)?;
    search::find(&args.strategy)?;
    let found = find(model)?;
    found.print_origin();
    let dir = open_model(&found.model)?;
    let recipe = settings(args, found.recipe.as_ref())?;
    let paths = outputs(args, &files_read(&recipe))?;
    let tokenizer = Arc::new(Tokenizer::from_dir(&dir.path)?);
    let hooks = Hooks::default();
    let backend = args.set.open(&recipe, &dir)?;
    let rewards = truth(args, &recipe, &backend, &hooks)?;
    let mut scorer = scorer(args, &recipe, &backend, rewards.is_some())?;
    let prompts = prompts(args, &recipe, (&dir, &tokenizer), rewards.as_ref(), &hooks)?;
    warn(&hooks.warnings);
    let environments = setup::environments(&recipe, &dir.path, &tokenizer, &hooks)?;
    // Options are checked before the model is read.
    let facts = search::Facts {
        budgeted: args.budget.is_some(),
        judges_steps: scorer.judges_steps(),
        turns: prompts.first().is_some_and(|p| environments.plays(p)),
        ..Default::default()
    };
    search::build(search::find(&args.strategy)?, &key_values("--option", &args.option)?, facts)?;
    let saved = args.save.as_deref();
    let made_by = resume::settings(args, &recipe, &dir.path)?;
    let mut records =
        saved.map_or(Ok(Vec::new()), |dir| resume::open(dir, (&made_by, &prompts), args.resume))?;
    let options =
        Options { dtype: recipe.dtype()?, training: false, context: setup::sampled_context(&recipe) };
    let model = Model::load(backend, &dir, options)?;
    {
        let with = (&recipe, &model, &dir, &tokenizer);
        grow(args, with, (rewards.as_ref(), &mut *scorer, &environments), &prompts, &mut records)?;
    }
    warn(&hooks.warnings);
    let whole = !interrupt::requested() || records.len() == prompts.len();
    let part = paths.as_ref().and_then(JsonlOutput::part).map(Path::to_path_buf);
    if !records.is_empty() {
        results(args, &records, paths, whole)?;
    }
    if show::nothing_left(&records) {
        let why = show::lost(&records).unwrap_or_default();
        return Err(Error::data(format!("every {} was lost: {why}", show::whole(&records))));
    }
    if !whole {
        let part = part.filter(|part| part.exists());
        let rows = part.map_or(String::new(), |part| format!("; the rows so far are in {}", part.display()));
        stopped((records.len(), prompts.len()), &rows, saved.is_some());
    }
    Ok(())
}

fn stopped((done, all): (usize, usize), rows: &str, saved: bool) -> ! {
    let how = if saved { "; the same command with --resume goes on" } else { "" };
    eprintln!("stopped after {done} of {}{rows}{how}", counted(all, "prompt"));
    crate::output::exit(130)
}

/// Searches for every prompt without a record, and saves each tree as it is complete.
fn grow(
    args: &Args,
    (recipe, model, dir, tokenizer): (&Recipe, &Model, &ModelDir, &Arc<Tokenizer>),
    (rewards, scorer, environments): (Option<&Rewards>, &mut dyn Scorer, &Environments),
    prompts: &[Prompt],
    records: &mut Vec<Record>,
) -> Result<()> {
    let done: HashSet<u64> = records.iter().map(|r| r.index).collect();
    let open: Vec<Prompt> = prompts.iter().filter(|p| !done.contains(&p.index)).cloned().collect();
    let stops = rollout::stops(&dir.path, tokenizer, &recipe.rollout);
    let params = rollout::params(&recipe.rollout, &stops, args.set.seed(recipe));
    let template = ChatTemplate::from_dir(&dir.path).ok();
    let with_system =
        |prompt: &Prompt, system: &str| with_system(tokenizer, template.as_ref(), prompt, system);
    let cache = setup::cache_options(&recipe.rollout, &*model.backend);
    let mut sampler = Sampler::new(model, cache)?.with_tokenizer(tokenizer.clone());
    finish_on_interrupt("ending the search; complete trees are kept");
    let actor = Actor {
        generator: &mut sampler,
        policy: model,
        tokenizer,
        stops: &stops,
        environments,
        ranks: Ranks::ALONE,
    };
    let mut driver = Driver {
        actor,
        rewards,
        scorer,
        settings: SearchBudget { params, budget: args.budget.map(|b| b as u64), at_once: args.at_once },
        entry: search::find(&args.strategy)?,
        options: key_values("--option", &args.option)?,
        with_system: Some(&with_system),
    };
    let progress = ProgressLine::new("searching", prompts.len() as u64, "prompts");
    progress.add(done.len() as u64);
    driver.run(&open, &mut |record| {
        if let Some(dir) = &args.save {
            record.save(dir)?;
        }
        records.push(record);
        progress.add(1);
        Ok(())
    })?;
    drop(progress);
    records.sort_by_key(|r| r.index);
    Ok(())
}

/// Saved searches, with results selected by the flags.
fn replayed(args: &Args, dir: &Path) -> Result<Vec<Record>> {
    let records = search::replay(dir)?.records;
    let Some(rule) = &args.choose else { return Ok(records) };
    let rule: ChoiceRule = serde_json::from_value(json!(rule))
        .map_err(|e| Error::usage(format!("--choose: {e}")).at("--choose"))?;
    let again = |record: Record| {
        let record = match args.first {
            Some(count) => record.first(count)?,
            None => record,
        };
        Ok(record.rechosen(rule))
    };
    records.into_iter().map(again).collect()
}

/// Opens the file of --paths, unless it is one of the inputs, and checks that --html can be written, before the search.
fn outputs(args: &Args, read: &[PathBuf]) -> Result<Option<JsonlOutput>> {
    args.html.as_deref().map_or(Ok(()), |path| ferrl::report::writable(path).map_err(|e| e.at("--html")))?;
    args.paths.as_deref().map(|path| JsonlOutput::beside(path, read)).transpose()
}

/// Prints the results and writes the files asked for. Those of a search that was stopped do not replace earlier ones.
fn results(args: &Args, records: &[Record], paths: Option<JsonlOutput>, whole: bool) -> Result<()> {
    if let Some(path) = args.html.as_ref().filter(|_| whole) {
        ferrl::report::trees(records, path)?;
    }
    if let Some(mut output) = paths {
        write_paths(&mut output, &pipeline(args)?, records)?;
        if whole {
            output.finish()?;
        }
    }
    let chosen = args.choose.as_deref().map(|rule| (rule, args.first));
    match args.json {
        true => print(&format!("{}\n", show::json(records, chosen))),
        false => print(&show::table(records, args.stats, chosen)),
    }
}

/// The path filter, aggregator and post-processors of the flags.
fn pipeline(args: &Args) -> Result<Pipeline> {
    let (name, number) = args.aggregate.split_once('=').unwrap_or((&args.aggregate, "10"));
    if args.aggregate.contains('=') && ["none", "unique"].contains(&name) {
        let what = format!("the aggregator {name} has no number, got {number:?}");
        return Err(Error::usage(what).at("--aggregate").fix(format!("--aggregate {name}")));
    }
    let number: f64 = number.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0).ok_or_else(|| {
        Error::usage(format!("{number:?} is not a whole number"))
            .at("--aggregate")
            .fix("--aggregate max_k_paths=4")
    })?;
    let pipeline =
        Pipeline { filter: args.filter.clone(), aggregator: (name.into(), number), post: args.post.clone() };
    pipeline.check()?;
    Ok(pipeline)
}

fn write_paths(output: &mut JsonlOutput, pipeline: &Pipeline, records: &[Record]) -> Result<()> {
    for record in records {
        for path in pipeline.run(&record.nodes)? {
            let advantage = path.steps.iter().map(|s| s.advantage).sum::<f64>() / path.steps.len() as f64;
            output.row(&json!({
                "index": record.index, "prompt": record.prompt, "completion": path.text(), "reward": path.score(),
                "advantage": advantage, "correct": path.correct, "weight": path.weight, "steps": path.steps,
            }))?;
        }
    }
    Ok(())
}

/// The recipe's last stage with the flags applied.
fn settings(args: &Args, own: Option<&PathBuf>) -> Result<Recipe> {
    let mut recipe = last_stage(args.recipe.as_ref().or(own), &args.changes)?;
    if args.prompt.is_none() {
        point_at(&mut recipe, args.task.as_deref(), &args.data)?;
    }
    args.set.sample(&mut recipe);
    args.set.compute(&mut recipe);
    if recipe.rollout.temperature == 0.0 {
        return Err(Error::usage("a search at temperature 0 samples the same completion every time")
            .at("--temperature")
            .fix("--temperature 1, or `ferrl generate` for one greedy completion"));
    }
    // For a recipe without rewards --verifier also decides accuracy.
    if let Some(name) = args.verifier.as_ref().filter(|name| is_verifier(name))
        && recipe.reward.is_empty()
        && (args.prompt.is_some() || setup::task_verifier(&recipe)?.is_none())
    {
        let options = key_values("--verifier-option", &args.verifier_option)?;
        recipe.reward = vec![RewardSettings { verifier: Some(name.clone()), options, ..Default::default() }];
    }
    Ok(recipe)
}

fn is_verifier(name: &str) -> bool {
    VERIFIERS.iter().any(|v| v.name == name)
}

/// The rewards that decide accuracy; none if neither the recipe nor its task has any.
fn truth(args: &Args, recipe: &Recipe, backend: &Arc<dyn Backend>, hooks: &Hooks) -> Result<Option<Rewards>> {
    if args.prompt.is_some() && recipe.reward.is_empty() {
        return Ok(None);
    }
    if recipe.reward.is_empty() && setup::task(recipe)?.is_none() {
        return Ok(None);
    }
    setup::rewards(recipe, Feed::Rollouts, backend, hooks).map(Some)
}

fn scorer(args: &Args, recipe: &Recipe, backend: &Arc<dyn Backend>, known: bool) -> Result<Box<dyn Scorer>> {
    let Some(name) = args.verifier.as_deref() else {
        return Ok(if known { Box::new(Oracle) } else { Box::new(LogpScorer) });
    };
    let options = key_values("--verifier-option", &args.verifier_option)?;
    if let (true, Some(key)) = (SCORERS.iter().any(|s| s.0 == name), options.keys().next()) {
        return Err(Error::usage(format!("{name} has no options, got {key:?}")).at("--verifier-option").fix(
            format!("no --verifier-option, or --verifier with the verifier or the model that {key} is for"),
        ));
    }
    if name == LogpScorer.name() {
        return Ok(Box::new(LogpScorer));
    }
    if name == "step_oracle" {
        let rewards = setup::rewards(recipe, Feed::Rollouts, backend, &Hooks::default())?;
        return Ok(Box::new(StepOracle::new(rewards).map_err(|e| e.at("--verifier"))?));
    }
    let own =
        recipe.reward.first().is_some_and(|r| r.verifier.as_deref() == Some(name) && r.options == options);
    if name == Oracle.name() || own {
        return match known {
            true => Ok(Box::new(Oracle)),
            false => Err(Error::usage("no verifier decides which completions are right")
                .at("--verifier oracle")
                .fix("--task NAME, a recipe with rewards, or --verifier logp")),
        };
    }
    if is_verifier(name) {
        let reward = RewardSettings { verifier: Some(name.into()), options, ..Default::default() };
        return Ok(Box::new(RewardScorer::bounded(name, Rewards::new(&[reward])?)));
    }
    let path = Path::new(name);
    let dir = ferrl::data::hub::model_dir(path).ok().filter(|d| d.join("config.json").is_file());
    if dir.is_none() && (path.is_dir() || name.contains(std::path::MAIN_SEPARATOR)) {
        open_model(path).map_err(|e| e.at("--verifier"))?;
    }
    let Some(dir) = dir else {
        let names: Vec<&str> = SCORERS.iter().map(|s| s.0).chain(VERIFIERS.iter().map(|v| v.name)).collect();
        let what = format!(
            "{name:?} is neither a verifier nor a model's folder, expected one of {}",
            names.join(", ")
        );
        let near = nearest(name, names.iter().copied()).unwrap_or(names[0]);
        return Err(Error::usage(what).at("--verifier").fix(format!("--verifier {near}")));
    };
    let dir = dir.display().to_string();
    let scorer = RewardScorer::of_model(&dir, ("--verifier-option ", &options), recipe, backend)?;
    Ok(Box::new(scorer))
}

/// The prompts, checked to fit the model and the rewards.
fn prompts(
    args: &Args,
    recipe: &Recipe,
    (dir, tokenizer): (&ModelDir, &Arc<Tokenizer>),
    rewards: Option<&Rewards>,
    hooks: &Hooks,
) -> Result<Vec<Prompt>> {
    if let Some(text) = &args.prompt {
        let reader = ModelText::new(dir);
        let chat = reader.template().is_ok();
        let messages: Vec<Value> =
            if chat { vec![json!({ "role": "user", "content": text })] } else { Vec::new() };
        let ids = if chat { reader.chat(&messages, None, true)? } else { reader.prompt(text)? };
        return Ok(vec![Prompt { ids, text: text.clone(), messages, ..Default::default() }]);
    }
    let mut source = setup::source(recipe, &dir.path, tokenizer, Feed::Rollouts, true, &hooks.warnings)?;
    let count = wanted(args.prompts, source.epoch());
    let none = Rewards::default();
    evaluate::check(
        &mut source,
        rewards.unwrap_or(&none),
        &dir.config,
        (count, recipe.rollout.max_new_tokens),
    )?;
    let ask = |item| match item {
        Item::Prompt(prompt) => Some(prompt),
        Item::Group(group) => Some(group.prompt),
        Item::Sequences(_) => None,
    };
    Ok(source.next(count)?.into_iter().filter_map(ask).collect())
}

/// The prompt with a system message: in the chat template, or before the text.
fn with_system(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    prompt: &Prompt,
    system: &str,
) -> Result<Vec<u32>> {
    match template.filter(|_| !prompt.messages.is_empty()) {
        None => tokenizer.encode_prompt(&format!("{system}\n{}", prompt.text)),
        Some(template) => {
            let mut messages = vec![json!({ "role": "system", "content": system })];
            messages.extend(prompt.messages.iter().filter(|m| m["role"] != "system").cloned());
            template.encode_chat(tokenizer, &messages, None, true, &Kwargs::new())
        }
    }
}

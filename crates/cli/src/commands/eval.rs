//! `ferrl eval`: accuracy and pass@k of a model.

mod pairs;
mod resume;
mod suite;

pub use resume::difference;

use crate::data::files_read;
use crate::options::{RecipeArgs, at_least_one, key_values, nearest_path, open_model, size};
use crate::output::{JsonlOutput, finish_on_interrupt, print, visible, warn};
use crate::progress::ProgressLine;
use ferrl::algo::Feed;
use ferrl::evaluate::likelihood::{Continuation, likelihood};
use ferrl::evaluate::{self, EvaluatedCompletion, Evaluation, Summary, calibration, evaluate};
use ferrl::experience::Metrics;
use ferrl::interrupt;
use ferrl::recipe::{Recipe, RewardSettings, in_run};
use ferrl::reward::Rewards;
use ferrl::rollout::{self, Actor};
use ferrl::run::newest_model;
use ferrl::search::Searcher;
use ferrl::setup;
use ferrl::source::Mixture;
use ferrl::suite::Entry;
use ferrl::task::{self, TASKS};
use ferrl::verify::Hooks;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::Sampler;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result, counted, nearest};
use ferrl_kernels::Ranks;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Completions per portion: interrupts are checked and the output is written after each.
const AT_ONCE: usize = 256;
/// Default number of prompts of a generated task, which has no end.
const USUAL: usize = 200;

/// Evaluate a model: accuracy, pass@k and majority vote
///
/// MODEL is a Hugging Face directory, or a run folder whose newest model and recipe are used. Prompts come from
/// --data, --task or the recipe; completions are graded by --verifier, --reward or the recipe, and a task brings its
/// own verifier. pass@k is the unbiased estimate from all samples; a majority vote compares the last <answer>, else the
/// last \boxed{}, else the whole text. Ctrl-C prints the results so far.
///
/// --suite evaluates published benchmarks as `ferrl data suites` lists them, each with its own prompts, verifier and
/// sampling: accuracy with a 95 % interval, pass@k, and tables by subject or level.
///
/// --pairs evaluates a reward model: the fraction of pairs whose chosen completion it scores higher, by subset. A model with
/// a score head needs no more; --judge makes a language model a judge.
#[derive(clap::Args)]
pub struct Args {
    /// Model directory, run folder, or org/name in the Hugging Face cache
    #[arg(value_name = "MODEL|RUN")]
    model: PathBuf,
    /// Changes to the recipe's settings, such as data.task.numbers=4 or data.template='{{ question }}'
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Prompts: files, folders, split@path, or org/name; may be given several times
    #[arg(long, value_name = "PATH", conflicts_with = "task")]
    data: Vec<String>,
    /// Held-out prompts of a generated task
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
    /// Published benchmarks, separated by commas; NAME=PATH reads the rows from a file or folder instead of the
    /// Hugging Face cache
    #[arg(long, value_name = "NAME[=PATH],…", value_delimiter = ',', conflicts_with_all = ["data", "task", "verifier", "reward"])]
    suite: Vec<String>,
    /// Multiple choice by log-probability instead of sampling, as in lm-evaluation-harness: picks the option whose letter, or text,
    /// is most probable after the prompt; accuracy (acc), and normalised by characters (acc_norm)
    #[arg(long, value_name = "letter|text", requires = "suite", conflicts_with_all = ["samples", "temperature"])]
    likelihood: Option<Likelihood>,
    /// Resume an interrupted evaluation with --output, whose rows are in FILE.part
    #[arg(long, requires = "output")]
    resume: bool,
    /// Preference pairs to evaluate a reward model on, with prompt, chosen, rejected and subset, as in RewardBench: files, folders,
    /// split@path, org/name or suite:rewardbench
    #[arg(long, value_name = "PATH", conflicts_with_all = ["data", "task", "suite", "verifier", "reward"])]
    pairs: Option<String>,
    /// Use a language model as the reward model, with the options of a [[reward]]: kind=generative or kind=implicit and their
    /// settings; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "pairs")]
    judge: Vec<String>,
    /// Recipe for all other settings
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Built-in verifier that scores completions
    #[arg(long, value_name = "NAME", conflicts_with = "reward")]
    verifier: Option<String>,
    /// Option of the verifier: key=value; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "verifier")]
    option: Vec<String>,
    /// Python file (FILE or FILE:FUNCTION) that scores completions; 1 or more is right
    #[arg(long, value_name = "FILE")]
    reward: Option<String>,
    /// Score truncated completions by their text; otherwise they count as wrong
    #[arg(long)]
    score_truncated: bool,
    /// Number of prompts [default: all rows of the data, or 200 of a task]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prompts: Option<usize>,
    /// Completions per prompt [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = size::<65536>)]
    samples: Option<usize>,
    /// The k of pass@k, separated by commas [default: 1, 2, 4, … up to the number of samples]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = size::<65536>)]
    k: Vec<usize>,
    #[command(flatten)]
    set: RecipeArgs,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// JSON lines to write: prompt, completion, reward and its parts
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The continuation whose log-probability is compared.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Likelihood {
    /// The option's letter (MMLU)
    Letter,
    /// The option's text (ARC, SciQ)
    Text,
}

impl Likelihood {
    fn continuation(self) -> Continuation {
        match self {
            Likelihood::Letter => Continuation::Letter,
            Likelihood::Text => Continuation::Text,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Likelihood::Letter => "letter",
            Likelihood::Text => "text",
        }
    }
}

/// One set of prompts to evaluate on, and its results.
struct EvalJob {
    /// Its benchmark, with `--suite`.
    suite: Option<&'static Entry>,
    recipe: Recipe,
    source: Mixture,
    rewards: Rewards,
    prompts: usize,
    asked: usize,
    all: Evaluation,
    seconds: f64,
    /// Results of the search, with `search.eval`.
    search: Option<Metrics>,
}

impl EvalJob {
    fn tokens(&self) -> usize {
        self.all.completions.iter().map(|(_, a, _)| a.tokens).sum()
    }
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(source) = &args.pairs {
        return pairs::run(args, source);
    }
    let found = find(&args.model)?;
    found.print_origin();
    let dir = open_model(&found.model)?;
    let recipes = recipes(args, &found, &dir)?;
    let tokenizer = Arc::new(Tokenizer::from_dir(&dir.path)?);
    let hooks = Hooks::default();
    let sources = recipes.iter().map(|(_, recipe)| {
        setup::source(recipe, &dir.path, &tokenizer, Feed::Rollouts, true, &hooks.warnings)
    });
    let sources = sources.collect::<Result<Vec<_>>>()?;
    if let (Some(own), false) = (&found.recipe, args.suite.is_empty()) {
        suite::warn_overlap(own, &recipes, &hooks.warnings)?;
    }
    warn(&hooks.warnings);
    let dtype = recipes[0].1.dtype()?;
    let backend = args.set.open(&recipes[0].1, &dir)?;
    let mut jobs = Vec::new();
    for ((suite, recipe), mut source) in recipes.into_iter().zip(sources) {
        let prompts = wanted(args.prompts, source.epoch());
        let rewards = setup::rewards(&recipe, Feed::Rollouts, &backend, &hooks)?;
        // Every prompt is checked before the first completion is sampled.
        evaluate::check(&mut source, &rewards, &dir.config, (prompts, recipe.rollout.max_new_tokens))?;
        let all = Evaluation { metrics: Metrics::default(), completions: Vec::new() };
        jobs.push(EvalJob {
            suite,
            recipe,
            source,
            rewards,
            prompts,
            asked: 0,
            all,
            seconds: 0.0,
            search: None,
        });
    }
    let mut output = open_output(args, &found.model, &mut jobs)?;
    let context = jobs.iter().map(|job| setup::sampled_context(&job.recipe)).max().unwrap_or(0);
    let model = Model::load(backend, &dir, Options { dtype, training: false, context })?;
    finish_on_interrupt("finishing the completions under way");
    let cache = setup::cache_options(&jobs[0].recipe.rollout, &*model.backend);
    let mut sampler = Sampler::new(&model, cache)?.with_tokenizer(tokenizer.clone());
    for job in &mut jobs {
        sample(args, job, (&mut sampler, &model), (&dir, &tokenizer), &hooks, &mut output)?;
    }
    let (asked, prompts): (usize, usize) = jobs.iter().fold((0, 0), |(a, p), j| (a + j.asked, p + j.prompts));
    if asked < prompts {
        eprintln!("stopped after {asked} of {}{}", counted(prompts, "prompt"), how_to_resume(&output));
        report(args, &jobs, &found.model)?;
        crate::output::exit(130);
    }
    // First: whoever reads the report may close the pipe, which ends the process.
    output.map_or(Ok(()), JsonlOutput::finish)?;
    args.output.as_deref().into_iter().for_each(resume::forget);
    report(args, &jobs, &found.model)
}

/// What is left of an evaluation that was stopped, and how it goes on.
fn how_to_resume(output: &Option<JsonlOutput>) -> String {
    let part = output.as_ref().and_then(JsonlOutput::part);
    part.map_or_else(String::new, |part| {
        format!("; the rows so far are in {}, and the same command with --resume goes on", part.display())
    })
}

/// Opens --output; with --resume, after the rows that an interrupted evaluation wrote.
fn open_output(args: &Args, model: &Path, jobs: &mut [EvalJob]) -> Result<Option<JsonlOutput>> {
    let Some(path) = args.output.as_deref() else { return Ok(None) };
    let seed = args.set.seed(&jobs[0].recipe);
    let settings = resume::settings(model, seed, jobs, args.likelihood.map(Likelihood::name));
    let read: Vec<PathBuf> = jobs.iter().flat_map(|job| files_read(&job.recipe)).collect();
    let output = if args.resume {
        // The rows stay where they are: whatever ends this process, too, can be resumed.
        let mut output = JsonlOutput::continuing(path, &read)?;
        output.keep(resume::restore(jobs, resume::rows(path, &settings)?)?)?;
        output
    } else {
        JsonlOutput::beside(path, &read)?
    };
    if output.part().is_some() {
        resume::remember(path, &settings)?;
    }
    if args.resume {
        let done: usize = jobs.iter().map(|job| job.asked).sum();
        eprintln!("resumed after {}", counted(done, "prompt"));
    }
    Ok(Some(output))
}

/// The recipe, or one for each benchmark.
fn recipes(args: &Args, found: &FoundModel, dir: &ModelDir) -> Result<Vec<(Option<&'static Entry>, Recipe)>> {
    if args.suite.is_empty() {
        return Ok(vec![(None, settings(args, found.recipe.clone())?)]);
    }
    let base = base(args, found.recipe.as_ref())?;
    let own = suite::recipes(args, &base, dir)?.into_iter();
    own.map(|(entry, recipe)| Ok((Some(entry), sampled(args, recipe)?))).collect()
}

/// Prints the results: a table of benchmarks, or the figures of the one set of prompts.
fn report(args: &Args, jobs: &[EvalJob], model: &Path) -> Result<()> {
    let first = &jobs[0];
    if first.suite.is_none() {
        return show(args, &first.recipe, model, first);
    }
    let ks = ks(args, first.recipe.eval.samples);
    print(&suite::show(&model.display().to_string(), jobs, &ks, args.set.seed(&first.recipe), args.json))
}

/// Number of prompts: `asked`, at most all.
pub(super) fn wanted(asked: Option<usize>, all: Option<usize>) -> usize {
    match (asked, all) {
        (Some(asked), Some(all)) if asked > all => {
            eprintln!("note: the data has {}, not {asked}", counted(all, "prompt"));
            all
        }
        (Some(asked), _) => asked,
        (None, all) => all.unwrap_or(USUAL),
    }
}

/// Samples and scores the completions of a job until all are done or the user interrupts.
fn sample(
    args: &Args,
    job: &mut EvalJob,
    (sampler, model): (&mut Sampler, &Model),
    (dir, tokenizer): (&ModelDir, &Arc<Tokenizer>),
    hooks: &Hooks,
    output: &mut Option<JsonlOutput>,
) -> Result<()> {
    let recipe = job.recipe.clone();
    let stops = rollout::stops(&dir.path, tokenizer, &recipe.rollout);
    let environments = setup::environments(&recipe, &dir.path, tokenizer, hooks)?;
    let mut actor = Actor {
        generator: sampler,
        policy: model,
        tokenizer,
        stops: &stops,
        environments: &environments,
        ranks: Ranks::ALONE,
    };
    let (start, begin) = (Instant::now(), job.source.state());
    let progress =
        ProgressLine::new(job.suite.map_or("evaluating", |s| s.name), job.prompts as u64, "prompts");
    progress.add(job.asked as u64);
    while job.asked < job.prompts && !interrupt::requested() {
        let now = (AT_ONCE / recipe.eval.samples).max(1).min(job.prompts - job.asked);
        let part = sample_part(args, job, &mut actor, now);
        warn(&hooks.warnings);
        let printed = hooks.warnings.take_printed();
        printed.iter().for_each(|p| eprintln!("{}: {}", p.source, visible(&p.line)));
        let part = match part {
            Err(e) if interrupt::is_interruption(&e) => break,
            other => other?,
        };
        for completion in &part.completions {
            output.as_mut().map_or(Ok(()), |o| o.row(&written(completion, job.suite)))?;
        }
        output.as_mut().map_or(Ok(()), JsonlOutput::flush)?;
        job.all.metrics.join(part.metrics);
        job.all.completions.extend(part.completions);
        job.asked += now;
        progress.add(now as u64);
    }
    drop(progress);
    job.seconds = start.elapsed().as_secs_f64();
    if recipe.search.eval && !interrupt::requested() {
        job.search = search(args, job, &mut actor, &begin)?;
    }
    Ok(())
}

/// Evaluates the next prompts of a job, by sampling or by log-probability.
fn sample_part(args: &Args, job: &mut EvalJob, actor: &mut Actor<'_>, prompts: usize) -> Result<Evaluation> {
    let EvalJob { recipe, source, rewards, .. } = job;
    match args.likelihood {
        Some(by) => likelihood(actor.policy, actor.tokenizer, source, prompts, by.continuation()),
        None => {
            let counts = (prompts, recipe.eval.samples, args.set.seed(recipe));
            evaluate(actor, source, rewards, &recipe.rollout, counts, Default::default())
        }
    }
}

/// Evaluates the recipe's search, where it has one, on the same prompts: those from state `begin` of the source on.
fn search(args: &Args, job: &mut EvalJob, actor: &mut Actor<'_>, begin: &Value) -> Result<Option<Metrics>> {
    let EvalJob { recipe, source, rewards, prompts, .. } = job;
    let Some(mut searcher) = Searcher::open(recipe, &actor.policy.backend)? else { return Ok(None) };
    source.restore(begin)?;
    let counts = (*prompts, args.set.seed(recipe));
    evaluate::search(actor, source, &mut searcher, (rewards, &recipe.rollout), counts).map(Some)
}

fn show(args: &Args, recipe: &Recipe, model: &Path, job: &EvalJob) -> Result<()> {
    let (all, seconds) = (&job.all, job.seconds);
    let samples = recipe.eval.samples;
    let ks = ks(args, samples);
    let summary = Summary::new(all, samples, &ks);
    let tokens: usize = all.completions.iter().map(|(_, a, _)| a.tokens).sum();
    let t = recipe.rollout.temperature;
    if args.json {
        let mut line = summary.json();
        line.insert("model".into(), json!(model.display().to_string()));
        line.insert("temperature".into(), json!(t));
        line.insert("seed".into(), json!(args.set.seed(recipe)));
        line.insert("seconds".into(), json!(seconds));
        line.insert("tokens".into(), json!(tokens));
        let stated = calibration::metrics(&all.completions);
        for (name, value) in job.search.iter().flat_map(Metrics::means).chain(stated.means()) {
            line.insert(name.trim_start_matches("eval/").into(), json!(value));
        }
        return print(&format!("{}\n", Value::Object(line)));
    }
    let head = format!(
        "{}: {}, {} each at temperature {t}\n",
        model.display(),
        counted(summary.prompts, "prompt"),
        counted(samples, "completion")
    );
    let rate = tokens as f64 / seconds.max(1e-9);
    let tail = format!("{} in {seconds:.1} s ({rate:.0} tokens/s)\n", counted(tokens, "token"));
    let lost = match summary.lost {
        0 => String::new(),
        n => format!(
            "without reward, neither right nor wrong: {n} of {}\n",
            counted(all.completions.len(), "completion")
        ),
    };
    let found = calibration::stated(&all.completions);
    let lost = match found.len() {
        0 => lost,
        n => {
            let m = calibration::metrics(&all.completions);
            let get = |name: &str| m.get(name).unwrap_or(0.0);
            let (ece, brier, mean) = (get("eval/ece"), get("eval/brier"), get("eval/confidence"));
            format!(
                "{lost}confidence of {} {mean:.3}, ECE {ece:.3}, Brier score {brier:.3}\n",
                counted(n, "completion")
            )
        }
    };
    let search = job.search.as_ref().map_or(String::new(), |s| searched(recipe, s));
    print(&format!("{head}{summary}{tail}{lost}{search}"))
}

/// One line on what the recipe's search found.
fn searched(recipe: &Recipe, found: &Metrics) -> String {
    let get = |name: &str| found.get(name).unwrap_or(0.0);
    format!(
        "search by {}, going by {}: {:.1} % right, {:.1} % of its completions, {:.0} tokens a prompt\n",
        recipe.search.strategy.as_deref().unwrap_or_default(),
        recipe.search.scorer,
        100.0 * get("eval/search"),
        100.0 * get("eval/search_mean"),
        get("eval/search_tokens"),
    )
}

/// The k of pass@k.
fn ks(args: &Args, samples: usize) -> Vec<usize> {
    if args.k.is_empty() { usual_ks(samples) } else { args.k.clone() }
}

/// 1, 2, 4, … and the number of samples.
fn usual_ks(samples: usize) -> Vec<usize> {
    let mut ks: Vec<usize> = (0..).map(|i| 1 << i).take_while(|&k| k < samples).collect();
    ks.push(samples);
    ks
}

fn written((prompt, completion, scores): &EvaluatedCompletion, suite: Option<&Entry>) -> Value {
    let parts: Map<String, Value> = scores.components.iter().map(|(n, v)| (n.clone(), json!(v))).collect();
    let mut row = json!({
        "index": prompt.index, "prompt": prompt.text, "completion": completion.text, "reward": scores.reward,
        "score": scores.score, "components": parts, "tokens": completion.tokens, "truncated": completion.truncated,
        "columns": prompt.columns,
    });
    if let Some(suite) = suite {
        row["suite"] = json!(suite.name);
    }
    if let Some(played) = &completion.played {
        row["turns"] = json!(played.turns);
    }
    row
}

/// A model to evaluate.
pub(super) struct FoundModel {
    pub model: PathBuf,
    /// The run's recipe, if the model is a run's.
    pub recipe: Option<PathBuf>,
    /// Which of the run's models it is.
    pub from: Option<String>,
}

impl FoundModel {
    /// Prints which of the run's models is used.
    pub fn print_origin(&self) {
        if let Some(from) = &self.from {
            eprintln!("{}: {from}", self.model.display());
        }
    }
}

/// A model directory, or the newest model of a run: the result of its last finished stage, or the newest checkpoint of the
/// stage after it.
pub(super) fn find(path: &Path) -> Result<FoundModel> {
    let recipe = path.join("recipe.toml");
    if path.join("config.json").is_file() || !recipe.is_file() {
        return Ok(FoundModel { model: path.into(), recipe: None, from: None });
    }
    let newest = newest_model(path)?;
    let from = match newest.step {
        Some(step) => format!("the checkpoint of step {step}, stage {}", newest.stage),
        None => format!("the result of stage {}", newest.stage),
    };
    Ok(FoundModel { model: newest.model, recipe: Some(recipe), from: Some(from) })
}

/// The recipe's last stage with the changes of the command line.
fn base(args: &Args, own: Option<&PathBuf>) -> Result<Recipe> {
    last_stage(args.recipe.as_ref().or(own), &args.changes)
}

/// The last stage of a recipe, or the default settings, with changes.
pub(super) fn last_stage(recipe: Option<&PathBuf>, changes: &[String]) -> Result<Recipe> {
    let resolved = match recipe {
        Some(path) => Recipe::load(path, changes).map_err(|e| match nearest_path(path) {
            Some(near) if !path.exists() => e.fix(format!("the nearest name there is {near}")),
            _ => e,
        })?,
        None => Recipe::parse("", "the command line", "eval", changes)?,
    };
    let stages = &resolved.stages;
    let last = stages.last().map(|s| s.recipe.clone()).unwrap_or_default();
    let run = recipe.and_then(|path| path.parent()).filter(|dir| dir.join("stages").is_dir());
    Ok(run.map_or(last.clone(), |run| in_run(&last, stages, run)))
}

/// Takes the prompts from a generated task or from files, where they are named.
pub(super) fn point_at(recipe: &mut Recipe, task: Option<&str>, data: &[String]) -> Result<()> {
    if let Some(task) = task {
        let task = task.trim_start_matches("task:");
        let near = nearest(task, TASKS.iter().map(|t| t.name)).unwrap_or(TASKS[0].name);
        task::find(task).map_err(|e| e.fix(format!("--task {near}")))?;
        let name = format!("task:{task}");
        if recipe.data.train.first() != Some(&name) {
            recipe.reward.clear();
        }
        (recipe.data.train, recipe.eval.data) = (vec![name], Vec::new());
    }
    if !data.is_empty() {
        (recipe.eval.data, recipe.data.train) = (data.to_vec(), Vec::new());
        recipe.data.weights.clear();
        // `eval.split` is a fraction of the run's own data, not of this file.
        recipe.eval.split = 0.0;
    }
    recipe.data.shuffle = false;
    if recipe.eval.data.is_empty() && recipe.eval.split == 0.0 && setup::task(recipe)?.is_none() {
        return Err(Error::usage("there are no prompts to evaluate on")
            .fix("--data FILE, --task NAME, or a recipe with eval.data"));
    }
    Ok(())
}

/// The recipe with the flags applied.
fn settings(args: &Args, own: Option<PathBuf>) -> Result<Recipe> {
    let mut recipe = base(args, own.as_ref())?;
    if let (Some(path), None, true) = (&own, &args.recipe, args.data.is_empty() && args.task.is_none()) {
        same_split(&recipe, path)?;
    }
    point_at(&mut recipe, args.task.as_deref(), &args.data)?;
    if let Some(reward) = graders(args)? {
        recipe.reward = vec![reward];
    }
    if recipe.reward.is_empty() && setup::task(&recipe)?.is_none() {
        return Err(Error::usage("no verifier or reward is given")
            .fix(format!("--verifier NAME ({}) or --reward FILE.py", super::verify::names())));
    }
    if args.score_truncated {
        recipe.reward.iter_mut().for_each(|r| r.truncated = Some("score".into()));
    }
    args.set.sample(&mut recipe);
    recipe.eval.samples = args.samples.unwrap_or(recipe.eval.samples.max(1));
    sampled(args, recipe)
}

/// Applies the flags of sampling and checks them together.
fn sampled(args: &Args, mut recipe: Recipe) -> Result<Recipe> {
    args.set.compute(&mut recipe);
    let samples = recipe.eval.samples;
    if recipe.rollout.temperature == 0.0 && samples > 1 {
        return Err(Error::usage(format!("{samples} samples at temperature 0 are all the same"))
            .fix("--samples 1, or a --temperature above 0"));
    }
    if recipe.rollout.temperature == 0.0 && recipe.search.eval {
        return Err(Error::usage("a search at temperature 0 finds one completion again and again")
            .fix("a --temperature above 0, or search.eval=false"));
    }
    recipe.check_search()?;
    match args.k.iter().find(|&&k| k > samples) {
        Some(k) => Err(Error::usage(format!("pass@{k} needs {k} completions per prompt, got {samples}"))
            .fix(format!("--samples {k}"))),
        None => Ok(recipe),
    }
}

/// The rewards that the command line names.
fn graders(args: &Args) -> Result<Option<RewardSettings>> {
    if let Some(text) = &args.reward {
        let (file, function) = match text.rsplit_once(':') {
            Some((file, function)) if !function.contains(['/', '\\']) => (file, Some(function.to_string())),
            _ => (text.as_str(), None),
        };
        return Ok(Some(RewardSettings { python: Some(file.into()), function, ..Default::default() }));
    }
    let Some(verifier) = args.verifier.clone() else { return Ok(None) };
    let options = key_values("--option", &args.option)?;
    Ok(Some(RewardSettings { verifier: Some(verifier), options, ..Default::default() }))
}

/// Refuses changes that would evaluate a run on rows it was trained on.
fn same_split(recipe: &Recipe, own: &Path) -> Result<()> {
    let trained = Recipe::load(own, &[])?.stages.into_iter().last().map(|s| s.recipe).unwrap_or_default();
    let other = |key: &'static str, same: bool| (!same).then_some(key);
    let changed = other("seed", trained.seed == recipe.seed)
        .or(other("eval.split", trained.eval.split == recipe.eval.split))
        .or(other("data.train", trained.data.train == recipe.data.train));
    match changed.filter(|_| trained.eval.split > 0.0) {
        Some(key) => {
            Err(Error::usage("would hold out other rows than the run did: it was trained on some of them")
                .at(key)
                .fix("--seed for other samples, --data FILE for other prompts"))
        }
        None => Ok(()),
    }
}

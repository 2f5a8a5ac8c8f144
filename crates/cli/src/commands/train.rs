//! `ferrl train`: runs a recipe, or resumes a run.

use crate::output::{at_terminal, exit, print, visible};
use crate::progress::ProgressLine;
use crate::terminal::{INTERRUPTED, SHOWN, Terminal, figure};
use crate::{exit_code, report};
use clap::Parser;
use ferrl::evaluate::Evaluation;
use ferrl::preflight::{self, Checked, Standing};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{Disk, RunFolder, disk};
use ferrl::runner::{self, Follower, RunOptions, RunOutcome, RunPosition, RunWatch, accept};
use ferrl::verify::VERIFIERS;
use ferrl_engine::{Class, Error, Result, plural};
use ferrl_kernels::comm::Launched;
use ferrl_kernels::{AUTO, Backend, Ranks};
use indicatif::HumanCount;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Train a model from a recipe
///
/// Every stage is checked before the first begins: models, data row by row, rewards, evaluations, disk. Ctrl-C (or SIGTERM)
/// finishes the step, saves, and stops; `--resume` continues from there, or after a crash from the last checkpoint, and ends with
/// the same parameters as a run without interruption.
#[derive(Parser)]
pub struct Args {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides, applied from left to right: `key.path=value`, `+list=value`, `~key`, `@overlay.toml`
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Name of the run folder [default: the recipe's name]
    #[arg(long)]
    name: Option<String>,
    /// Folder that contains the run folders
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Resume the run of that name
    #[arg(long)]
    resume: bool,
    /// Resume even if data, reward files, models or settings of a started stage have changed
    #[arg(long, requires = "resume")]
    allow_changed: bool,
    /// Folder for a last checkpoint if the run folder vanishes or its disk stays full; resume from it with `--runs DIR --resume`
    #[arg(long, value_name = "DIR")]
    rescue: Option<PathBuf>,
    /// Check everything, print the recipe with all defaults and the plan of memory and time, and do not train
    #[arg(long)]
    dry_run: bool,
}

impl Args {
    pub fn folder(&self) -> Result<PathBuf> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => Recipe::load(&self.recipe, &self.changes)?.name,
        };
        Ok(self.runs.join(name))
    }

    fn load(&self) -> Result<Resolved> {
        let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
        let resolved = Recipe::load(&self.recipe, &self.changes)?;
        resolved.check(&verifiers)?;
        Ok(resolved)
    }
}

pub fn run(args: &Args) -> Result<()> {
    let ranks = Ranks::open().unwrap_or_else(|e| exit_unconnected(e));
    if ranks.rank() > 0 {
        let done = follow(args, &ranks);
        ranks.finish();
        // A launcher ends all ranks once one has failed, so a follower that failed first would hide rank 0's error. The run's exit
        // code is rank 0's; a follower has its own only if it has lost the other ranks.
        let lost = done.is_err_and(|e| e.class == Class::Rank);
        exit(if lost { i32::from(exit_code(Class::Rank)) } else { 0 });
    }
    let done = runner::lead(&ranks, || lead(args, &ranks));
    match done {
        // Printed while the others still wait for this rank.
        Err(e) if !ranks.is_alone() => {
            let code = report(e);
            ranks.finish();
            exit(i32::from(code))
        }
        done => {
            // The others wait for this rank while it writes its report, so that its loss would be noticed.
            let concluded = done?.map_or(Ok(0), |outcome| conclude(&outcome));
            ranks.finish();
            match concluded? {
                0 => Ok(()),
                code => exit(code),
            }
        }
    }
}

/// Reports the error of a rank that cannot join the others and exits. Other ranks wait first: if rank 0 fails too, only its error is
/// printed, because the launcher then ends them. `srun` does not: there only one process prints what all have done wrong.
fn exit_unconnected(e: Error) -> ! {
    let launched = Launched::from_env();
    let repeats = match &launched {
        Err(_) => Launched::number() > Some(0),
        Ok(launched) => launched.is_some_and(|l| l.by_slurm && l.local_rank > Some(0)),
    };
    if repeats && e.class == Class::Usage {
        exit(i32::from(exit_code(e.class)));
    }
    if let Some(rank) = launched.ok().flatten().map(|l| l.rank).filter(|&rank| rank > 0) {
        std::thread::sleep(Duration::from_secs(2));
        eprintln!("rank {rank}:");
    }
    exit(i32::from(report(e)))
}

/// Waits for the file that `ferrl launch` creates at Ctrl-C, and for the end of `ferrl launch` itself: if it is killed, nothing else
/// stops the ranks.
fn listen_to_launch() {
    let Some(file) = std::env::var_os(super::launch::STOP_FILE).map(PathBuf::from) else { return };
    let launcher = super::launch::launcher();
    std::thread::spawn(move || {
        let is_gone = || launcher.is_some_and(super::launch::has_ended);
        while !file.exists() && !is_gone() {
            std::thread::sleep(Duration::from_millis(100));
        }
        ferrl::interrupt::request();
        let why = if file.exists() { "" } else { "ferrl launch was killed: " };
        let again = if at_terminal() { "; once more to stop at once" } else { "" };
        eprintln!("\n{why}finishing this step and saving{again}");
    });
}

/// What every rank but the first does.
fn follow(args: &Args, ranks: &Ranks) -> Result<()> {
    runner::follow(ranks, || {
        crate::output::on_interrupt(ferrl::interrupt::request); // rank 0 handles it
        let resolved = args.load()?;
        let backend = open(&resolved, ranks)?;
        let options =
            RunOptions { allow_changed: args.allow_changed, ranks: ranks.clone(), ..Default::default() };
        Ok(Follower { resolved, backend, options })
    })
}

fn open(resolved: &Resolved, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
    let recipe = resolved.stages.first().map(|s| &s.recipe);
    let threads = recipe.map(|r| r.threads).filter(|&t| t > 0);
    let backend = ferrl_kernels::open_for(recipe.map_or(AUTO, |r| r.device.as_str()), threads, ranks)?;
    recipe.map_or(Ok(()), |r| r.limit(&*backend))?;
    Ok(backend)
}

/// The run on rank 0; `None` after `--dry-run`.
fn lead(args: &Args, ranks: &Ranks) -> Result<Option<RunOutcome>> {
    let mut resolved = args.load()?;
    let name = args.name.clone().unwrap_or_else(|| resolved.name.clone());
    let path = args.runs.join(&name);
    if let Some(file) = args.rescue.as_deref().filter(|p| p.exists() && !p.is_dir()) {
        return Err(Error::usage("is not a folder").at(file.display()).fix("--rescue DIR on another disk"));
    }
    let mut watch = Terminal::new();
    listen_to_launch();
    let (mut folder, mut options) =
        (None, RunOptions { rescue: args.rescue.clone(), ranks: ranks.clone(), ..Default::default() });
    let mut position = RunPosition::default();
    if args.resume {
        let opened = RunFolder::open(&path)?;
        position = RunPosition::of(&opened)?;
        let accepted = accept(&opened, resolved, &mut position, args.allow_changed)?;
        resolved = accepted.resolved.clone();
        (folder, options.accepted, options.allow_changed) =
            (Some(opened), Some(accepted), args.allow_changed);
    } else if !args.dry_run {
        RunFolder::free(&args.runs, &name)?;
    }
    if !args.dry_run {
        ferrl::parallel::check_stages(&resolved, ranks.size())?;
    }
    let backend = match args.dry_run {
        true => None,
        false => Some(open(&resolved, ranks)?),
    };
    let checked = check(&resolved, folder.as_ref(), &position)?;
    let disks: Vec<Disk> = checked.iter().map(|c| c.disk).collect();
    disk::ensure(&disks, &path)?;
    let Some(backend) = backend else {
        return dry_run(&resolved, &checked, &args.runs, &mut watch).map(|()| None);
    };
    let folder = match folder {
        Some(folder) => folder,
        None => RunFolder::create(&args.runs, &name, &resolved.toml)?,
    };
    let anew = if args.resume && position.step == 0 { ", from the beginning: no checkpoint yet" } else { "" };
    watch.note(&format!("{} in {}{anew}", backend.describe(), folder.path().display()));
    if !ranks.is_alone() {
        watch.note(&ranks.describe());
    }
    watch.note(&about(&checked, &resolved));
    watch.several = checked.len() > 1;
    let (first, fresh) = (position.next(), !args.resume);
    options.checked = checked.into_iter().enumerate().map(|(i, c)| (first + i, c)).collect();
    options.position = args.resume.then_some(position);
    options.about =
        json!({ "command": command(), "threads": resolved.stages.first().map(|s| s.recipe.threads) });
    let outcome = runner::run_with(&resolved, folder, backend, &mut watch, options).inspect_err(|_| {
        // A run without a step removes its folder: the same command works after the mistake is fixed.
        if fresh {
            RunFolder::discard_unused(&path);
        }
    })?;
    watch.clear();
    Ok(Some(outcome))
}

/// The command line, without what looks like a secret.
fn command() -> String {
    let names = ["token", "secret", "password", "key"];
    let secret = |key: &str| names.iter().any(|name| key.to_lowercase().ends_with(name));
    let shown = |word: String| match word.split_once('=') {
        Some((key, _)) if secret(key) => format!("{key}=***"),
        _ => word,
    };
    std::env::args_os().map(|word| shown(word.to_string_lossy().into_owned())).collect::<Vec<_>>().join(" ")
}

/// Checks the stages that are left, with a progress bar while rows are read.
fn check(resolved: &Resolved, folder: Option<&RunFolder>, position: &RunPosition) -> Result<Vec<Checked>> {
    let at =
        Standing { folder: folder.map(RunFolder::path), stage: position.next(), begun: position.begun() };
    let mut bar: Option<(String, usize, ProgressLine)> = None;
    preflight::check(resolved, at, &mut |stage, done, all| {
        let (_, before, shown) = match &mut bar {
            Some(bar) if bar.0 == stage => bar,
            other => {
                let progress = ProgressLine::new(&format!("{stage}: checking rows"), all as u64, "rows");
                other.insert((stage.into(), 0, progress))
            }
        };
        shown.add(done.saturating_sub(*before) as u64);
        *before = done;
        !ferrl::interrupt::requested()
    })
}

fn dry_run(resolved: &Resolved, checked: &[Checked], runs: &Path, watch: &mut Terminal) -> Result<()> {
    for warning in checked.iter().flat_map(|c| c.warnings.take()) {
        watch.warn(&warning);
    }
    // The rest comes as comments, so that the whole is still a recipe.
    let text = format!("{}\n{}", about(checked, resolved), super::plan::text(resolved, runs)?);
    print(&format!("{}\n# {}\n", resolved.toml, text.trim_end().replace('\n', "\n# ")))
}

/// Model, data and checkpoints of every stage, shown before the first step.
fn about(checked: &[Checked], resolved: &Resolved) -> String {
    let mut out = Vec::new();
    for c in checked {
        out.push(format!("{}: {}, {}", c.name, c.algorithm, counted(c.steps, "step")));
        out.push(format!("  data   {}", data(c)));
        let frozen = if c.trained < c.weights {
            format!(", {} trained", count(c.trained))
        } else {
            ", all trained".into()
        };
        let critic = if c.critic > 0 { format!("; a critic of {}", count(c.critic)) } else { String::new() };
        out.push(format!("  model  {}{frozen}{critic}", counted(c.weights as u64, "parameter")));
        if let Some(stage) = resolved.stages.iter().find(|s| s.name == c.name) {
            out.push(format!("  saved  {}", saved(&stage.recipe, c.disk)));
        }
    }
    out.join("\n")
}

fn data(c: &Checked) -> String {
    let s = &c.summary;
    let Some(rows) = s.rows.filter(|_| !c.endless) else { return "generated, without end".into() };
    let mut text = counted(rows as u64, "row");
    if let Some(tokens) = s.tokens {
        let about = if s.exact { "" } else { "about " };
        text += &format!(", {about}{}", counted(tokens as u64, "token"));
        if s.trained > 0 {
            text += &format!(" ({} trained)", count(s.trained));
        }
        text += &format!(", longest {}", count(s.longest));
        text += &format!(", {} truncated", count(s.truncated));
        if s.dropped > 0 {
            text += &format!(", {} dropped", count(s.dropped));
        }
    }
    text
}

fn saved(recipe: &Recipe, on_disk: Disk) -> String {
    let c = &recipe.checkpoint;
    let mut when = Vec::new();
    if c.every > 0 {
        when.push(match c.every {
            1 => "every step".into(),
            every => format!("every {} steps", count(every as usize)),
        });
    }
    if c.minutes > 0.0 {
        when.push(if c.minutes == 1.0 {
            "every minute".into()
        } else {
            format!("every {} minutes", c.minutes)
        });
    }
    when.push("at the end".into());
    let kept =
        if c.keep_best > 0 { format!("{} and the {} best", c.keep, c.keep_best) } else { c.keep.to_string() };
    format!("{}; {kept} kept, {} each", when.join(", "), disk::size(on_disk.checkpoint))
}

/// A large number with its noun, singular or plural.
fn counted(n: u64, noun: &str) -> String {
    format!("{} {}", HumanCount(n), plural(n as usize, noun))
}

fn count(n: usize) -> String {
    HumanCount(n as u64).to_string()
}

/// Says how the run ended; the exit code.
fn conclude(outcome: &RunOutcome) -> Result<i32> {
    for (stage, first, last) in &outcome.evaluations {
        let Some(last) = last else { continue };
        println!("\n{stage}, on held-out data:");
        // Rewards other than 0 and 1 grade a completion, without a right and a wrong.
        let judged = last.completions.iter().all(|(_, _, g)| g.score.is_none_or(|s| s == 0.0 || s == 1.0));
        let shown = if judged { SHOWN } else { &[("eval/reward", false)] };
        for (name, fraction) in shown {
            let Some(after) = last.metrics.get(name) else { continue };
            let before = first.as_ref().and_then(|f| f.metrics.get(name));
            let before = before.map_or(String::new(), |b| format!("{} before, ", figure(b, *fraction)));
            println!("  {:<12} {before}{} after", name.trim_start_matches("eval/"), figure(after, *fraction));
        }
        samples(last, judged);
    }
    let folder = &outcome.folder;
    let report = ferrl::report::report(folder, None);
    if outcome.interrupted {
        println!("\nstopped in {}; resume it with the same command and --resume", folder.display());
        return Ok(INTERRUPTED);
    }
    if let Some(model) = &outcome.model {
        println!("\nmodel   {}", model.display());
    }
    println!("report  {}", report?.display());
    Ok(0)
}

/// Prints some completions.
fn samples(evaluation: &Evaluation, judged: bool) {
    for (prompt, completion, scores) in evaluation.completions.iter().take(4) {
        let mark = match scores.reward {
            None => "no reward".to_string(),
            Some(reward) if !judged => format!("{reward:.3}"),
            Some(_) if scores.is_right() => "right".into(),
            Some(_) => "wrong".into(),
        };
        let asked =
            prompt.messages.last().and_then(|message| message["content"].as_str()).unwrap_or(&prompt.text);
        println!("  {mark}: {}", visible(&format!("{} {}", asked.trim(), completion.text.trim())));
    }
}

//! `ferrl train`: a recipe from beginning to end, or from where it was stopped.

use crate::output::{print, visible};
use clap::Parser;
use ferrl::evaluate::Evaluation;
use ferrl::interrupt;
use ferrl::recipe::{Recipe, Resolved, difference};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, Outcome, Watch};
use ferrl::train::Waits;
use ferrl::verify::VERIFIERS;
use ferrl_engine::{Error, Result};
use ferrl_kernels::AUTO;
use indicatif::HumanDuration;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Exit code of a run that was interrupted and saved.
const INTERRUPTED: i32 = 130;
/// How long a run waits on a full disk before it gives up.
const DISK_PATIENCE: Duration = Duration::from_secs(600);

/// Train as a recipe says
///
/// Ctrl-C (or SIGTERM) finishes the step, saves, and stops; `--resume` goes on from there, or from the last
/// checkpoint after a crash, and ends with the same weights as a run that was never stopped.
#[derive(Parser)]
pub struct Args {
    /// The recipe, a TOML file
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Changes to it: `key.path=value`, `+list=value`, `~key`, `@overlay.toml`, from left to right
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    /// Name of the run folder; the recipe's when left out
    #[arg(long)]
    name: Option<String>,
    /// Where run folders are made
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Go on with the run of that name
    #[arg(long)]
    resume: bool,
    /// Check the recipe, print it with every default and the plan of memory and time, and stop
    #[arg(long)]
    dry_run: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    let mut resolved = Recipe::load(&args.recipe, &args.changes)?;
    resolved.check(&verifiers)?;
    let name = args.name.clone().unwrap_or_else(|| resolved.name.clone());
    if args.dry_run {
        // The plan comes as comments, so that the whole is still a recipe.
        let plan = super::plan::text(&resolved, &args.runs)?;
        print(&format!("{}\n# {}\n", resolved.toml, plan.trim_end().replace('\n', "\n# ")))?;
        let warnings = ferrl::warnings::Warnings::default();
        resolved.stages.iter().for_each(|s| ferrl::recipe::warn(&s.recipe, &warnings));
        warnings.take().iter().for_each(|w| eprintln!("warning: {w}"));
        return Ok(());
    }
    let threads = resolved.stages.first().map(|s| s.recipe.threads).filter(|&t| t > 0);
    let device = resolved.stages.first().map_or(AUTO, |s| s.recipe.device.as_str());
    let backend = ferrl_kernels::open(device, threads)?;
    let folder = if args.resume {
        let folder = RunFolder::open(&args.runs.join(&name))?;
        resolved = saved_recipe(&folder, resolved)?;
        folder
    } else {
        RunFolder::create(&args.runs, &name, &resolved.toml)?
    };
    let mut watch = Terminal::new()?;
    watch.note(&format!("{} in {}", backend.describe(), folder.path().display()));
    let (path, fresh) = (folder.path().to_path_buf(), !args.resume);
    let outcome = runner::run(&resolved, folder, backend, &mut watch).map_err(|error| {
        // A run that never took a step leaves nothing behind: the same command works once the mistake is mended.
        let steps = std::fs::metadata(path.join("metrics.jsonl")).map_or(0, |m| m.len());
        if fresh && steps == 0 && std::fs::remove_dir_all(&path).is_err() {
            return error.at(format!("{} is left over and can be removed", path.display()));
        }
        error
    })?;
    watch.clear();
    conclude(&outcome)
}

/// A run goes on under the recipe it was started with; only the thread count may differ.
fn saved_recipe(folder: &RunFolder, now: Resolved) -> Result<Resolved> {
    let saved = Recipe::parse(&folder.recipe()?, "recipe.toml", &now.name, &[])?;
    let plain = |s: &ferrl::recipe::Stage| Recipe { threads: 0, name: None, ..s.recipe.clone() };
    let refuse = |what: String| {
        Err(Error::usage(format!("the recipe is not the one the run was started with: {what}"))
            .at(folder.path().join("recipe.toml").display())
            .fix("resume with the same recipe and changes, or start a new run with --name"))
    };
    if saved.stages.len() != now.stages.len() {
        return refuse(format!("it had {} stages and has {}", saved.stages.len(), now.stages.len()));
    }
    for (old, new) in saved.stages.iter().zip(&now.stages) {
        if let Some((key, was, is)) = difference(&plain(old), &plain(new)) {
            return refuse(format!("{key} of stage {} was {was} and is {is}", old.name));
        }
    }
    Ok(now)
}

/// What is shown of an evaluation, and whether it is a share.
const SHOWN: &[(&str, bool)] = &[
    ("eval/pass@1", true),
    ("eval/greedy", true),
    ("eval/reward", false),
    ("eval/loss", false),
    ("eval/accuracy", true),
    ("eval/margin", false),
];

fn conclude(outcome: &Outcome) -> Result<()> {
    for (stage, first, last) in &outcome.evaluations {
        let Some(last) = last else { continue };
        println!("\n{stage}, on held-out data:");
        for (name, share) in SHOWN {
            let Some(after) = last.metrics.get(name) else { continue };
            let number = |x: f64| if *share { format!("{:.1} %", 100.0 * x) } else { format!("{x:.4}") };
            let before = first.as_ref().and_then(|f| f.metrics.get(name));
            let before = before.map_or(String::new(), |b| format!("{} before, ", number(b)));
            println!("  {:<12} {before}{} after", name.trim_start_matches("eval/"), number(after));
        }
        samples(last);
    }
    let folder = &outcome.folder;
    let report = ferrl::report::report(folder)?;
    if outcome.interrupted {
        println!("\nstopped and saved in {}; go on with the same command and --resume", folder.display());
        crate::output::exit(INTERRUPTED);
    }
    if let Some(model) = &outcome.model {
        println!("\nmodel   {}", model.display());
    }
    println!("report  {}", report.display());
    Ok(())
}

/// A phase of a step in words.
fn doing(phase: &str) -> &str {
    match phase {
        "data" => "reading data",
        "rollout" => "sampling answers",
        "reward" => "waiting for rewards",
        "annotate" => "asking reference and critic",
        "train" => "training",
        other => other,
    }
}

/// A few answers, for the eye.
fn samples(evaluation: &Evaluation) {
    for (prompt, answer, graded) in evaluation.answers.iter().take(4) {
        let mark = match graded.is_right() {
            true => "right",
            false if graded.is_lost() => "lost",
            false => "wrong",
        };
        println!("  {mark}: {}", visible(&format!("{} {}", prompt.text.trim(), answer.text.trim())));
    }
}

/// Progress on standard error: one line that moves on a terminal, a line now and then elsewhere.
struct Terminal {
    live: bool,
    /// The line as last shown, for whoever adds to it.
    line: Arc<Mutex<String>>,
    shown: Option<Instant>,
    began: Instant,
    first_step: u64,
    trend: Option<f64>,
    /// Whether it was said that the disk is full.
    waits_for_disk: bool,
}

impl Terminal {
    fn new() -> Result<Self> {
        let handler = || {
            if interrupt::requested() {
                crate::output::exit(INTERRUPTED);
            }
            interrupt::request();
            eprintln!("\nfinishing this step and saving; once more to stop at once");
        };
        ctrlc::set_handler(handler).map_err(|e| Error::usage(format!("cannot listen for Ctrl-C: {e}")))?;
        let live = std::io::stderr().is_terminal();
        let (line, began) = (Arc::default(), Instant::now());
        Ok(Terminal { live, line, shown: None, began, first_step: 0, trend: None, waits_for_disk: false })
    }

    fn clear(&self) {
        if self.live {
            eprint!("\r\x1b[K");
        }
    }
}

impl Watch for Terminal {
    fn stage(&mut self, name: &str, steps: u64) {
        self.note(&format!("{name}: {steps} steps"));
        (self.began, self.first_step, self.trend, self.shown) = (Instant::now(), u64::MAX, None, None);
    }

    fn step(&mut self, stage: &str, step: u64, steps: u64, record: &StepRecord) {
        self.waits_for_disk = false;
        self.first_step = self.first_step.min(step - 1);
        let (name, value) = match (record.get("reward"), record.get("loss")) {
            (Some(reward), _) => ("reward", reward),
            (None, loss) => ("loss", loss.unwrap_or(f64::NAN)),
        };
        let before = *self.trend.get_or_insert(value);
        let trend = 0.9 * before + 0.1 * value;
        self.trend = Some(trend);
        let pause = Duration::from_millis(if self.live { 200 } else { 5000 });
        if step < steps && self.shown.is_some_and(|s| s.elapsed() < pause) {
            return;
        }
        self.shown = Some(Instant::now());
        let arrow = match trend.total_cmp(&before) {
            std::cmp::Ordering::Greater => "up",
            std::cmp::Ordering::Less => "down",
            std::cmp::Ordering::Equal => "level",
        };
        let rate = record.get("timing/tokens_per_second").unwrap_or(0.0);
        let per_step = self.began.elapsed().as_secs_f64() / (step - self.first_step) as f64;
        let left = per_step * (steps - step) as f64;
        let line = format!(
            "{stage} {step}/{steps}  {name} {value:.4} ({trend:.4}, {arrow})  {rate:.0} tokens/s  {} left",
            HumanDuration(Duration::from_secs_f64(left))
        );
        if self.live {
            eprint!("\r\x1b[K{line}");
            let _ = std::io::stderr().flush();
        } else {
            // Where the time went, for who reads the log later.
            let spent = |phase: &str| record.get(&format!("timing/{phase}")).filter(|s| *s >= 0.001);
            let phases = ["rollout", "reward", "annotate", "train"];
            let phases: Vec<String> =
                phases.iter().filter_map(|p| Some(format!("{p} {:.2} s", spent(p)?))).collect();
            eprintln!("{line}  ({})", phases.join(", "));
        }
        if let Ok(mut shown) = self.line.lock() {
            *shown = line;
        }
    }

    fn waits(&self) -> Option<Waits> {
        let line = self.line.clone();
        let show = move |phase: &'static str| {
            if let Ok(line) = line.lock() {
                eprint!("\r\x1b[K{line}  {}", doing(phase));
                let _ = std::io::stderr().flush();
            }
        };
        self.live.then(|| Arc::new(show) as Waits)
    }

    fn note(&mut self, text: &str) {
        self.clear();
        eprintln!("{}", visible(text));
    }

    fn disk_full(&mut self, error: &Error, waited: Duration) -> bool {
        if waited >= DISK_PATIENCE || interrupt::requested() {
            return false;
        }
        if !self.waits_for_disk {
            let minutes = DISK_PATIENCE.as_secs() / 60;
            self.note(&format!(
                "paused: {error}\n  waiting {minutes} minutes for space; Ctrl-C stops the run"
            ));
        }
        self.waits_for_disk = true;
        std::thread::sleep(Duration::from_millis(500));
        true
    }

    fn interrupted(&self) -> bool {
        interrupt::requested()
    }
}

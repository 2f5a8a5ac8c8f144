//! A whole run: its stages in order, with checkpoints, logs and resume.
//!
//! The run folder holds logs, checkpoints, `start/` (a new model, if the recipe initialises one) and `stages/<n>/` (the resulting
//! model of each finished stage). A resumed run builds the stage in the same way and then loads the checkpoint's state.

mod evaluation;
mod follow;
mod guard;
mod log;
mod pending;
mod resume;
mod steps;

pub use follow::{Follower, follow, lead};
pub use guard::guarded;
pub use resume::{Accepted, RunPosition, accept};

use crate::algo::Feed;
use crate::data::hub::model_dir;
use crate::evaluate::Evaluation;
use crate::experience::Metrics;
use crate::preflight::Checked;
use crate::recipe::{Recipe, Resolved};
use crate::run::metrics::number;
use crate::run::{
    Best, CheckpointOptions, Checkpoints, MetricsLog, RunFolder, StepRecord, TrainedModel, frozen, shared,
};
use crate::setup::{self, Draft};
use crate::source::Mixture;
use crate::train::{Stage, Waits};
use crate::warnings::{Warning, Warnings};
use ferrl_engine::checkpoint::{ModelDir, SaveOptions, StorageFormat, save_adapter, save_shared};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, Ranks};
use follow::Order;
use log::{Log, LogLengths};
use pending::PendingWrites;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use steps::{StageEnd, Steps};
use xxhash_rust::xxh3::xxh3_128;

/// Observer of a run.
pub trait RunWatch {
    /// A stage starts.
    fn stage(&mut self, _name: &str, _steps: u64) {}
    /// A step is complete.
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, _record: &StepRecord) {}
    /// An evaluation is complete, after this number of steps of the stage.
    fn evaluated(&mut self, _stage: &str, _step: u64, _evaluation: &Evaluation) {}
    /// A message.
    fn note(&mut self, _text: &str) {}
    /// A warning.
    fn warn(&mut self, warning: &Warning) {
        self.note(&format!("warning: {warning}"));
    }
    /// Listener for the phases of a step.
    fn waits(&self) -> Option<Waits> {
        None
    }
    /// The disk has been full for this time; returns whether to try again, after waiting.
    fn disk_full(&mut self, _error: &Error, _waited: Duration) -> bool {
        false
    }
    /// Whether to finish this step, save and stop.
    fn interrupted(&self) -> bool {
        false
    }
}

pub struct RunOutcome {
    pub folder: PathBuf,
    /// The trained model.
    pub model: Option<PathBuf>,
    /// Whether it was interrupted and can be resumed.
    pub interrupted: bool,
    /// Evaluations of each stage: name, first and last.
    pub evaluations: Vec<(String, Option<Evaluation>, Option<Evaluation>)>,
}

#[derive(Default)]
pub struct RunOptions {
    /// Position of the run, if known already.
    pub position: Option<RunPosition>,
    /// The accepted changes of the recipe, for a resumed run.
    pub accepted: Option<Accepted>,
    /// Resume even if data, rewards or models have changed.
    pub allow_changed: bool,
    /// Checked stages, by number.
    pub checked: BTreeMap<usize, Checked>,
    /// Fallback folder for a checkpoint that the run folder cannot store.
    pub rescue: Option<PathBuf>,
    /// More fields for the first line of the log: the command, its threads.
    pub about: Value,
    /// The ranks of the run; this process alone without several ranks.
    pub ranks: Ranks,
}

/// Runs a recipe in a new folder, or resumes a run.
pub fn run(
    resolved: &Resolved,
    folder: RunFolder,
    backend: Arc<dyn Backend>,
    watch: &mut dyn RunWatch,
) -> Result<RunOutcome> {
    run_with(resolved, folder, backend, watch, RunOptions::default())
}

/// The same with options.
pub fn run_with(
    resolved: &Resolved,
    folder: RunFolder,
    backend: Arc<dyn Backend>,
    watch: &mut dyn RunWatch,
    mut options: RunOptions,
) -> Result<RunOutcome> {
    let at = options.position.take().map_or_else(|| RunPosition::of(&folder), Ok)?;
    begin(&folder, resolved, &*backend, &at, &options);
    let outcome = stages(resolved, &folder, backend, watch, &at, &options);
    match &outcome {
        Ok(outcome) => {
            let how = if outcome.interrupted { "interrupted" } else { "finished" };
            folder.event("end", how, json!({ "interrupted": outcome.interrupted }));
        }
        Err(e) => folder.note("error", &e.to_string()),
    }
    if let (Some(e), Ok(_)) = (folder.take_unlogged(), &outcome) {
        watch.warn(&unlogged(&e));
    }
    outcome
}

fn unlogged(error: &Error) -> Warning {
    let fix = "the run continues; check why the file cannot be written".to_string();
    Warning { name: "log", message: format!("lines of the log are missing: {error}"), fix }
}

/// The first line of the log.
fn begin(
    folder: &RunFolder,
    resolved: &Resolved,
    backend: &dyn Backend,
    at: &RunPosition,
    options: &RunOptions,
) {
    let mut fields = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "device": backend.describe(),
        "recipe_xxh3": format!("{:032x}", xxh3_128(resolved.toml.as_bytes())),
    });
    for (key, value) in options.about.as_object().into_iter().flatten() {
        fields[key] = value.clone();
    }
    match &at.found.path {
        None => folder.event("start", "started", fields),
        Some(path) => {
            (fields["stage"], fields["step"]) = (json!(at.stage), json!(at.step));
            folder.event("resume", &format!("resumed from {}", path.display()), fields);
        }
    }
}

fn stages(
    resolved: &Resolved,
    folder: &RunFolder,
    backend: Arc<dyn Backend>,
    watch: &mut dyn RunWatch,
    at: &RunPosition,
    options: &RunOptions,
) -> Result<RunOutcome> {
    crate::parallel::check_stages(resolved, options.ranks.size())?;
    for (path, problem) in &at.found.skipped {
        let text = format!("skipped {}: {problem}", path.display());
        watch.note(&text);
        folder.note("warning", &text);
    }
    tidy(folder, resolved, at);
    let mut renewed = renewed_recipe(folder, watch, at, options)?;
    for warning in options.checked.values().flat_map(|c| c.warnings.take()) {
        watch.warn(&warning);
        folder.note_warning(&warning);
    }
    let mut log = Log::open(folder, &at.state)?;
    let (mut evaluations, mut done) = (Vec::new(), 0);
    for plan in &resolved.stages {
        if plan.index < at.next() {
            done += finished_steps(plan.index, &plan.name, at, watch);
            continue;
        }
        let recipe = with_directories(&plan.recipe, resolved, folder)?;
        let one = OneStage {
            name: &plan.name,
            index: plan.index,
            dir: &starting_model(folder, plan.index, &recipe)?,
            folder,
            before: done,
            warnings: options.checked.get(&plan.index).map(|c| c.warnings.clone()).unwrap_or_default(),
            options,
            toml: &resolved.toml,
            renewed: Cell::new(renewed.take()),
            opened: RefCell::default(),
        };
        let resumed = if plan.index == at.stage { at.found.path.as_deref() } else { None };
        let resumed = resumed.map(|path| (path, &at.state));
        let (ended, first, last) = one.run(recipe, backend.clone(), resumed, &mut log, watch)?;
        evaluations.push((plan.name.clone(), first, last));
        match ended {
            Some(steps) => done += steps,
            None => {
                let folder = folder.path().into();
                return Ok(RunOutcome { folder, model: None, interrupted: true, evaluations });
            }
        }
    }
    let model = folder.path().join("stages").join((resolved.stages.len() - 1).to_string());
    Ok(RunOutcome { folder: folder.path().into(), model: Some(model), interrupted: false, evaluations })
}

/// An accepted change of the recipe, and the last step of the old one.
fn renewed_recipe(
    folder: &RunFolder,
    watch: &mut dyn RunWatch,
    at: &RunPosition,
    options: &RunOptions,
) -> Result<Option<(String, u64)>> {
    let Some(accepted) = options.accepted.as_ref().filter(|a| !a.changes.is_empty()) else { return Ok(None) };
    renew(folder, accepted, watch)?;
    let before: u64 = at.state["steps"].as_array().into_iter().flatten().filter_map(Value::as_u64).sum();
    Ok(Some((accepted.resolved.toml.clone(), before + at.step)))
}

fn finished_steps(index: usize, name: &str, at: &RunPosition, watch: &mut dyn RunWatch) -> u64 {
    if index != at.stage {
        return at.state["steps"][index].as_u64().unwrap_or(0);
    }
    watch.note(&format!("{name} is finished: all of its {} steps are done", at.step));
    at.step
}

/// Whether a stage has written its resulting model.
fn finished(folder: &RunFolder, stage: usize) -> bool {
    folder.path().join(format!("stages/{stage}/config.json")).exists()
}

/// Removes incomplete files of a killed process. Failures are retried with every checkpoint.
fn tidy(folder: &RunFolder, resolved: &Resolved, at: &RunPosition) {
    if let Some(stage) = resolved.stages.get(at.stage) {
        let c = &stage.recipe.checkpoint;
        let rated = |metric: &String| Best { metric: metric.clone(), value: 0.0, lower: c.lower_is_better };
        let all = checkpoints(folder, &stage.recipe);
        // A damaged one would count among those to keep.
        let tidied =
            if at.found.skipped.is_empty() { all.tidy(c.metric.as_ref().map(rated)) } else { all.clean() };
        if let Err(e) = tidied {
            folder.note("warning", &e.to_string());
        }
    }
    folder.tidy();
}

/// Logs changes of the recipe, and removes models initialised for stages that have changed.
fn renew(folder: &RunFolder, accepted: &Accepted, watch: &mut dyn RunWatch) -> Result<()> {
    for change in &accepted.changes {
        watch.note(&format!("changed: {change}"));
        folder.note("info", &format!("the recipe has changed: {change}"));
    }
    for stage in &accepted.anew {
        let made = folder.path().join(format!("start_{stage}"));
        if made.is_dir() {
            folder.files().remove_dir_all(&made)?;
        }
    }
    Ok(())
}

fn checkpoints(folder: &RunFolder, recipe: &Recipe) -> Checkpoints {
    let c = &recipe.checkpoint;
    let options = CheckpointOptions { keep: c.keep, keep_best: c.keep_best, ..Default::default() };
    Checkpoints::new(&folder.checkpoints(), folder.files(), options)
}

/// The recipe with directories instead of `stage:NAME` and `org/name`.
fn with_directories(recipe: &Recipe, resolved: &Resolved, folder: &RunFolder) -> Result<Recipe> {
    let mut recipe = recipe.clone();
    let rewards = recipe.reward.iter_mut().map(|r| &mut r.model);
    let own = [&mut recipe.model.path, &mut recipe.critic.path, &mut recipe.teacher.path];
    let dir = |path: &str| -> Result<String> {
        let named = path.strip_prefix("stage:").and_then(|n| resolved.stages.iter().find(|s| s.name == n));
        let dir = match named {
            Some(stage) => folder.path().join("stages").join(stage.index.to_string()),
            None => model_dir(Path::new(path))?,
        };
        Ok(dir.to_string_lossy().into_owned())
    };
    for path in own.into_iter().chain(rewards).flatten() {
        *path = dir(path)?;
    }
    for option in recipe.reward.iter_mut().flat_map(crate::recipe::RewardSettings::models_mut) {
        *option = dir(option.as_str().unwrap_or_default())?.into();
    }
    recipe.search.place_models(dir)?;
    Ok(recipe)
}

fn starting_model(folder: &RunFolder, index: usize, recipe: &Recipe) -> Result<PathBuf> {
    let own = recipe.model.path.is_some() || recipe.model.init.is_some();
    if index > 0 && !own {
        return Ok(folder.path().join("stages").join((index - 1).to_string()));
    }
    let fresh = folder.path().join(format!("start_{index}"));
    if fresh.join("config.json").exists() {
        return Ok(fresh);
    }
    // Written under a temporary name: a killed process leaves no model without its tokenizer.
    let aside = folder.path().join(format!("start_{index}.tmp"));
    if aside.is_dir() {
        folder.files().remove_dir_all(&aside)?;
    }
    let dir = setup::starting_model(recipe, &aside)?;
    if dir != aside {
        return Ok(dir);
    }
    folder.files().rename(&aside, &fresh)?;
    folder.files().sync_dir(folder.path())?;
    Ok(fresh)
}

/// A source of held-out rows: its feed, its initial state, and itself.
type EvalSource = (Feed, Value, Mixture);

struct OneStage<'a> {
    name: &'a str,
    index: usize,
    dir: &'a Path,
    folder: &'a RunFolder,
    /// Steps of all stages before.
    before: u64,
    warnings: Warnings,
    options: &'a RunOptions,
    /// The whole recipe.
    toml: &'a str,
    /// A changed recipe, written once it is accepted for good, and the last step of the old one.
    renewed: Cell<Option<(String, u64)>>,
    /// Sources of evaluations: feed, initial state, and current state.
    opened: RefCell<Vec<EvalSource>>,
}

type Ended = (Option<u64>, Option<Evaluation>, Option<Evaluation>);

impl OneStage<'_> {
    fn run(
        &self,
        recipe: Recipe,
        backend: Arc<dyn Backend>,
        resumed: Option<(&Path, &Value)>,
        log: &mut Log,
        watch: &mut dyn RunWatch,
    ) -> Result<Ended> {
        let frozen = frozen::describe(&recipe, self.dir)?;
        if let Some((_, state)) = resumed {
            self.same(&frozen, &state["frozen"], watch)?;
        }
        let mut stage = self.start(&recipe, backend, resumed, &frozen, watch)?;
        self.show_exchange(&stage, watch);
        let total = stage.schedules.0.total_steps;
        let pending =
            PendingWrites::from_json(&resumed.map_or(Value::Null, |(_, state)| state["pending"].clone()))?;
        stage.num_tokens = match &pending {
            Some(taken) => taken.metrics.get("num_tokens").map_or(0, |n| n as u64),
            None => log.num_tokens,
        };
        let over = pending.is_none() && (stage.step == total || self.settled(&recipe)?);
        let mut steps = Steps {
            one: self,
            checkpoints: checkpoints(self.folder, &recipe),
            config_json: ModelDir::open(self.dir)?.config_json,
            frozen,
            total,
            first: None,
            last: None,
            at_start: Metrics::default(),
            pending,
            marks: log.marks(),
            saved: resumed.map(|_| self.before + stage.step),
            saved_at: Instant::now(),
            told: false,
            stage,
            log,
            watch,
        };
        if !over && steps.run()? == StageEnd::Stopped {
            return Ok((None, steps.first, steps.last));
        }
        let Steps { mut stage, checkpoints, first, last, watch, .. } = steps;
        if over && finished(self.folder, self.index) {
            watch.note(&format!("{} is finished: all of its {} steps are done", self.name, stage.step));
        } else {
            if recipe.checkpoint.use_best {
                self.take_best(&mut stage, &checkpoints, watch)?;
            }
            if recipe.optim.ema.is_some() {
                self.take_averages(&mut stage)?;
            }
            self.save_model(&stage)?;
        }
        Ok((Some(stage.step), first, last))
    }

    /// Opens the stage on all ranks together.
    fn start(
        &self,
        recipe: &Recipe,
        backend: Arc<dyn Backend>,
        resumed: Option<(&Path, &Value)>,
        frozen: &Value,
        watch: &mut dyn RunWatch,
    ) -> Result<Stage> {
        let ranks = &self.options.ranks;
        ranks.together(|| {
            self.order(resumed).send(ranks)?;
            self.agree(frozen, &*backend)?;
            let mut stage = self.open(recipe, backend, resumed, watch)?;
            self.join(&mut stage)?;
            Ok(stage)
        })
    }

    /// The order for followers to build the same stage.
    fn order(&self, resumed: Option<(&Path, &Value)>) -> Order {
        let checkpoint = resumed.map(|(path, state)| (path.to_path_buf(), state.clone()));
        let (folder, model) = (self.folder.path().to_path_buf(), self.dir.to_path_buf());
        Order::Begin { folder, stage: self.index, model, checkpoint }
    }

    /// The stage with loaded models and checked data, restored if it is resumed.
    fn open(
        &self,
        recipe: &Recipe,
        backend: Arc<dyn Backend>,
        resumed: Option<(&Path, &Value)>,
        watch: &mut dyn RunWatch,
    ) -> Result<Stage> {
        let checked = self.options.checked.get(&self.index).and_then(|c| c.draft.take());
        let draft = checked.map_or_else(|| Draft::new(recipe, self.dir, &self.warnings), Ok)?;
        let mut stage = setup::from_draft(recipe.clone(), draft, backend, self.dir, &self.options.ranks)?;
        let total = stage.schedules.0.total_steps;
        watch.stage(self.name, total);
        self.log_stage(&stage, total);
        stage.waits = watch.waits().unwrap_or(stage.waits);
        if let Some((path, state)) = resumed {
            self.restore(&mut stage, path, state, watch)?;
            if stage.step > total {
                let what = format!("{} steps are done, and the recipe has {total}", stage.step);
                return Err(Error::usage(what)
                    .at("train.steps")
                    .fix(format!("train.steps = {} or more", stage.step)));
            }
            watch.note(&format!("resumed after step {} of {}", stage.step, self.name));
        }
        // A refused resume does not change the run.
        if let Some((toml, step)) = self.renewed.take() {
            self.folder.replace_recipe(&toml, step)?;
        }
        stage.source.check(&mut |_, _| !watch.interrupted())?;
        self.warn(&stage.warnings, watch);
        Ok(stage)
    }

    /// Replaces the policy's weights by their EMA on all ranks.
    fn take_averages(&self, stage: &mut Stage) -> Result<()> {
        let ranks = &self.options.ranks;
        match stage.is_split() {
            false => stage.use_averages(),
            true => ranks.together(|| {
                Order::UseAverages.send(ranks)?;
                stage.use_averages()
            }),
        }
    }

    /// Writes the stage's model to `stages/`, where the next stage and the user find it.
    fn save_model(&self, stage: &Stage) -> Result<()> {
        let out = self.folder.path().join("stages").join(self.index.to_string());
        let options = SaveOptions {
            dtype: StorageFormat::F32,
            source: Some(self.dir),
            overwrite: true,
            ..Default::default()
        };
        let (model, dir) = (&stage.policy.model, ModelDir::open(self.dir)?);
        let (json, ranks) = (Some(&dir.config_json), &self.options.ranks);
        if stage.is_written_together() {
            return ranks.together(|| {
                save_shared(&out, model, json, &options, |aside| {
                    Order::SaveModel(aside.to_path_buf()).send(ranks)?;
                    shared::write_model(self.folder.files(), aside, model, StorageFormat::F32).map(drop)
                })
            });
        }
        self.saving(stage, Order::Serve, || match model.adapter() {
            Some(_) => save_adapter(&out, model, dir.base(), json, &options),
            None => model.save(&out, json, &options),
        })
    }

    fn log_stage(&self, stage: &Stage, total: u64) {
        let checked = self.options.checked.get(&self.index).map(|c| c.summary);
        let (algorithm, data) = (stage.recipe.algorithm_name(), checked.unwrap_or(stage.source.summary()));
        let weights: usize = stage.policy.model.params.iter().map(|p| p.shape.len()).sum();
        let fields = json!({
            "stage": self.name, "algorithm": algorithm, "steps": total, "weights": weights, "data": data,
            "model": self.dir.display().to_string(),
        });
        self.folder.event("stage", &format!("{} begins: {algorithm}, {total} steps", self.name), fields);
    }

    fn log_evaluation(&self, step: u64, evaluation: &Evaluation) {
        let metrics: Map<String, Value> =
            evaluation.metrics.means().map(|(name, value)| (name.to_string(), number(value))).collect();
        let fields = json!({ "stage": self.name, "step": self.before + step, "metrics": metrics });
        self.folder.event("evaluation", &format!("{} evaluated after step {step}", self.name), fields);
    }

    /// Shows warnings since the last call.
    fn warn(&self, warnings: &Warnings, watch: &mut dyn RunWatch) {
        if let Some(e) = self.folder.take_unlogged() {
            let Warning { name, message, fix } = unlogged(&e);
            warnings.raise(name, message, fix);
        }
        for warning in warnings.take() {
            watch.warn(&warning);
            self.folder.note_warning(&warning);
        }
        for printed in warnings.take_printed() {
            self.folder.note_printed(&printed);
        }
    }

    /// Whether the last `checkpoint.patience` evaluations of this stage had no new best metric. Decided from the log, so that a resumed
    /// run decides the same.
    fn settled(&self, recipe: &Recipe) -> Result<bool> {
        let c = &recipe.checkpoint;
        let (Some(metric), true) = (&c.metric, c.patience > 0) else { return Ok(false) };
        let (mut best, mut since) = (f64::NEG_INFINITY, 0);
        let lines = MetricsLog::history(&self.folder.metrics())?;
        for value in lines.iter().filter(|r| r.step > self.before).filter_map(|r| r.get(metric)) {
            let rank = if c.lower_is_better { -value } else { value };
            since = if rank > best { 0 } else { since + 1 };
            best = best.max(rank);
        }
        Ok(since >= c.patience)
    }

    /// Refuses to resume with changed data, rewards or models, unless allowed.
    fn same(&self, now: &Value, saved: &Value, watch: &mut dyn RunWatch) -> Result<()> {
        let changes = frozen::changed(now, saved);
        if !self.options.allow_changed {
            return frozen::refuse(&changes);
        }
        for change in changes {
            watch.note(&format!("changed: {change}"));
            self.folder.note("warning", &format!("the run is resumed although {change}"));
        }
        Ok(())
    }

    /// State of a checkpoint besides weights and moments.
    fn state(
        &self,
        stage: &Stage,
        marks: LogLengths,
        pending: Option<&PendingWrites>,
        frozen: &Value,
    ) -> Value {
        let mut steps = vec![0; self.index];
        if self.index > 0 {
            steps[self.index - 1] = self.before;
        }
        json!({
            "stage": self.index,
            "steps": steps,
            "step": stage.step,
            "source": stage.source.state(),
            "algorithm": stage.algo.state(),
            "ahead": stage.ahead,
            "unfinished": stage.unfinished,
            "metrics_bytes": marks.metrics,
            "rollouts": marks.rollouts,
            "pending": pending.map(PendingWrites::to_json),
            "frozen": frozen,
        })
    }

    /// Saves a stage with its state.
    fn checkpoint(
        &self,
        checkpoints: &Checkpoints,
        (stage, config_json): (&Stage, &Value),
        state: &Value,
        best: Option<Best>,
    ) -> Result<PathBuf> {
        let policy = (self.dir, config_json);
        let role = |name, trainer, (dir, json)| TrainedModel {
            name,
            trainer,
            config_json: Some(json),
            source: Some(dir),
        };
        let mut roles = vec![role("policy", &stage.policy, policy)];
        // A critic may start from another model than the policy, whose configuration and base are its own.
        let start = setup::critic_start(&stage.recipe, self.dir)?;
        let own = match &stage.critic {
            Some(_) if start != self.dir => Some(ModelDir::open(&start)?.config_json),
            _ => None,
        };
        let critic = own.as_ref().map_or(policy, |json| (start.as_path(), json));
        roles.extend(stage.critic.as_ref().map(|c| role("critic", c, critic)));
        let step = self.before + stage.step;
        let order = Order::Save(checkpoints.aside(step));
        let saved = self.saving(stage, order, || checkpoints.save(step, &roles, state, best))?;
        for problem in saved.problems {
            let what = format!("an old checkpoint cannot be removed: {problem}");
            stage.warnings.raise("old-checkpoints", what, "this is retried with every checkpoint");
        }
        Ok(saved.path)
    }

    /// Saves a stage in another run folder if this run's cannot be written; returns its path. Logs and metrics are not
    /// copied.
    fn rescue(&self, root: &Path, stage: (&Stage, &Value), mut state: Value) -> Result<PathBuf> {
        let folder = RunFolder::create(root, &self.folder.name(), self.toml)?;
        (state["metrics_bytes"], state["rollouts"]) = (json!(0), Value::Null);
        let path = self.checkpoint(&checkpoints(&folder, &stage.0.recipe), stage, &state, None)?;
        let model = path.join("model");
        if !model.join("tokenizer.json").exists() {
            stage.0.tokenizer.save(&model)?; // its source may be gone as well
        }
        Ok(folder.path().into())
    }

    fn restore(&self, stage: &mut Stage, path: &Path, state: &Value, watch: &mut dyn RunWatch) -> Result<()> {
        stage.load(path)?;
        match stage.source.restore(&state["source"]) {
            // The position in the old rows does not apply to other rows.
            Err(e) if self.options.allow_changed => {
                watch.note(&format!("the data start from the beginning: {e}"))
            }
            restored => restored?,
        }
        if !state["algorithm"].is_null() {
            stage.algo.restore(&state["algorithm"])?;
        }
        let broken = |e| Error::data(format!("rollouts in flight cannot be read: {e}")).at(path.display());
        if !state["ahead"].is_null() {
            stage.ahead = serde_json::from_value(state["ahead"].clone()).map_err(broken)?;
        }
        if !state["unfinished"].is_null() {
            stage.unfinished = serde_json::from_value(state["unfinished"].clone()).map_err(broken)?;
        }
        stage.step = state["step"]
            .as_u64()
            .ok_or_else(|| Error::data("the state names no step").at(path.display()))?;
        Ok(())
    }

    /// Loads this stage's best checkpoint, ties going to the first.
    fn take_best(&self, stage: &mut Stage, all: &Checkpoints, watch: &mut dyn RunWatch) -> Result<()> {
        let (metric, lower) =
            (stage.recipe.checkpoint.metric.clone(), stage.recipe.checkpoint.lower_is_better);
        let own = all.list()?.into_iter().filter(|(step, _)| *step > self.before);
        let rated =
            own.filter_map(|(step, b)| Some((b.filter(|b| Some(&b.metric) == metric.as_ref())?.value, step)));
        let worse = |value: f64| if lower { value } else { -value };
        let best = rated.min_by(|a, b| worse(a.0).total_cmp(&worse(b.0)).then(a.1.cmp(&b.1)));
        let Some((value, step)) = best else { return Ok(()) };
        let (path, ranks) = (self.folder.checkpoints().join(format!("step_{step}")), &self.options.ranks);
        match stage.is_split() {
            false => stage.load(&path)?,
            true => ranks.together(|| {
                Order::Load(path.clone()).send(ranks)?;
                stage.load(&path)
            })?,
        }
        let metric = metric.unwrap_or_default();
        watch.note(&format!(
            "{}: the result is step {} with {metric} {value:.4}",
            self.name,
            step - self.before
        ));
        Ok(())
    }
}

fn printed(r: &crate::train::ScoredRollout) -> crate::run::RolloutRecord {
    crate::run::RolloutRecord {
        prompt: r.prompt.text.clone(),
        completion: r.completion.text.clone(),
        reward: r.scores.reward,
        temperature: r.temperature.map(f64::from),
        extra: r.scores.extra.clone(),
        credit: r.credit.clone(),
        turns: r.completion.played.as_ref().map_or_else(Vec::new, |played| played.turns.clone()),
        group: r.completion.prompt,
        lost: r.completion.played.as_ref().and_then(|played| played.lost.as_deref().cloned()),
        components: r.scores.components.iter().map(|(n, v)| (n.clone(), f64::from(*v))).collect(),
        advantage: f64::from(r.advantage),
        tokens: r.completion.tokens,
        truncated: r.completion.truncated,
    }
}

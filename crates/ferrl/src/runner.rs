//! A whole run: stages one after the other, with everything that must survive a crash.
//!
//! The run folder holds, beside the logs and checkpoints, `start/` (a new model, where the recipe makes one) and
//! `stages/<n>/` (the model each finished stage hands on). A resumed run builds the stage as it was built the first
//! time and puts the checkpoint's state into it.

mod guard;
mod log;
mod pending;
mod steps;

pub use guard::guarded;

use crate::algo::Wants;
use crate::data::hub::model_dir;
use crate::evaluate::{Evaluation, evaluate};
use crate::experience::Metrics;
use crate::recipe::{Recipe, Resolved, Rollout};
use crate::run::{
    Best, CheckpointOptions, Checkpoints, MetricsLog, Role, RunFolder, StepRecord, frozen, latest, load,
};
use crate::setup;
use crate::train::{Stage, Waits};
use crate::warnings::{Warning, Warnings};
use ferrl_engine::checkpoint::{Dtype, ModelDir, SaveOptions};
use ferrl_engine::generate::Sampler;
use ferrl_engine::{Error, Result, nearest};
use ferrl_kernels::Backend;
use log::{Log, Marks};
use pending::Pending;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use steps::{End, Steps};

/// Whoever looks on while a run goes on.
pub trait Watch {
    /// A stage begins.
    fn stage(&mut self, name: &str, steps: u64);
    /// A step is done.
    fn step(&mut self, stage: &str, step: u64, steps: u64, record: &StepRecord);
    /// An evaluation is done, after so many steps of the stage.
    fn evaluated(&mut self, _stage: &str, _step: u64, _evaluation: &Evaluation) {}
    /// Something worth a line.
    fn note(&mut self, text: &str);
    /// Something that is probably not meant.
    fn warn(&mut self, warning: &Warning) {
        self.note(&format!("warning: {warning}"));
    }
    /// Who wants to be told what a step is busy with.
    fn waits(&self) -> Option<Waits> {
        None
    }
    /// The disk is full, and has been for a while: whether to try again. Who wants to wait does so before it answers.
    fn disk_full(&mut self, _error: &Error, _waited: Duration) -> bool {
        false
    }
    /// Whether to finish this step, save and stop.
    fn interrupted(&self) -> bool;
}

/// How a run ended.
pub struct Outcome {
    /// The folder.
    pub folder: PathBuf,
    /// The trained model.
    pub model: Option<PathBuf>,
    /// Stopped before its end, to be resumed.
    pub interrupted: bool,
    /// Evaluations of each stage: name, first and last.
    pub evaluations: Vec<(String, Option<Evaluation>, Option<Evaluation>)>,
}

/// Runs a recipe in a new folder, or goes on in one that is there.
pub fn run(
    resolved: &Resolved,
    folder: RunFolder,
    backend: Arc<dyn Backend>,
    watch: &mut dyn Watch,
) -> Result<Outcome> {
    let found = latest(&folder.checkpoints())?;
    for (path, problem) in &found.skipped {
        watch.note(&format!("passed over {}: {problem}", path.display()));
    }
    if let (None, Some((path, problem))) = (&found.path, found.skipped.first()) {
        return Err(Error::data(format!("no checkpoint of this run is whole: {problem}"))
            .at(path.display())
            .fix("remove the damaged checkpoints to start the run from its beginning"));
    }
    let state = match &found.path {
        Some(path) => {
            let text = std::fs::read_to_string(path.join("state/state.json"))
                .map_err(|e| Error::data(format!("cannot read the state: {e}")).at(path.display()))?;
            let broken = |e| Error::data(format!("the state is broken: {e}")).at(path.display());
            serde_json::from_str::<Value>(&text).map_err(broken)?["value"].take()
        }
        None => Value::Null,
    };
    let mut log = Log::open(&folder, &state)?;
    let mut evaluations = Vec::new();
    let mut done = 0;
    for plan in &resolved.stages {
        let at = state["stage"].as_u64().map_or(0, |s| s as usize);
        let recipe = with_directories(&plan.recipe, resolved, &folder)?;
        let dir = starting_model(&folder, plan.index, &recipe)?;
        if plan.index < at {
            done += state["steps"][plan.index].as_u64().unwrap_or(0);
            continue;
        }
        let resumed = if plan.index == at { found.path.as_deref() } else { None };
        let one = OneStage { name: &plan.name, index: plan.index, dir: &dir, folder: &folder, before: done };
        let (ended, first, last) = one.run(recipe, backend.clone(), resumed, &state, &mut log, watch)?;
        evaluations.push((plan.name.clone(), first, last));
        match ended {
            Some(steps) => done += steps,
            None => {
                return Ok(Outcome {
                    folder: folder.path().into(),
                    model: None,
                    interrupted: true,
                    evaluations,
                });
            }
        }
    }
    let model = folder.path().join("stages").join((resolved.stages.len() - 1).to_string());
    Ok(Outcome { folder: folder.path().into(), model: Some(model), interrupted: false, evaluations })
}

/// The recipe with directories instead of `stage:NAME` and `org/name`.
fn with_directories(recipe: &Recipe, resolved: &Resolved, folder: &RunFolder) -> Result<Recipe> {
    let mut recipe = recipe.clone();
    let rewards = recipe.reward.iter_mut().map(|r| &mut r.model);
    let own = [&mut recipe.model.path, &mut recipe.critic.path, &mut recipe.teacher.path];
    for path in own.into_iter().chain(rewards).flatten() {
        let named = path.strip_prefix("stage:").and_then(|n| resolved.stages.iter().find(|s| s.name == n));
        let dir = match named {
            Some(stage) => folder.path().join("stages").join(stage.index.to_string()),
            None => model_dir(Path::new(path))?,
        };
        *path = dir.to_string_lossy().into_owned();
    }
    Ok(recipe)
}

/// The model a stage starts from.
fn starting_model(folder: &RunFolder, index: usize, recipe: &Recipe) -> Result<PathBuf> {
    let own = recipe.model.path.is_some() || recipe.model.init.is_some();
    if index > 0 && !own {
        return Ok(folder.path().join("stages").join((index - 1).to_string()));
    }
    let fresh = folder.path().join(format!("start_{index}"));
    if fresh.join("config.json").exists() {
        return Ok(fresh);
    }
    // Made aside: whoever is killed in between leaves no model without its tokenizer.
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

struct OneStage<'a> {
    name: &'a str,
    index: usize,
    dir: &'a Path,
    folder: &'a RunFolder,
    /// Steps of all stages before.
    before: u64,
}

type Ended = (Option<u64>, Option<Evaluation>, Option<Evaluation>);

impl OneStage<'_> {
    fn run(
        &self,
        recipe: Recipe,
        backend: Arc<dyn Backend>,
        resumed: Option<&Path>,
        state: &Value,
        log: &mut Log,
        watch: &mut dyn Watch,
    ) -> Result<Ended> {
        let mut stage = setup::stage(recipe.clone(), backend, self.dir)?;
        let frozen = self.frozen(&recipe)?;
        if resumed.is_some() {
            frozen::unchanged(&frozen, &state["frozen"])?;
        }
        let total = stage.schedules.0.total_steps;
        watch.stage(self.name, total);
        stage.waits = watch.waits().unwrap_or(stage.waits);
        if let Some(path) = resumed {
            self.restore(&mut stage, path, state)?;
            watch.note(&format!("resumed after step {} of {}", stage.step, self.name));
        }
        self.warn(&stage.warnings, watch);
        let pending = Pending::from_json(&resumed.map_or(Value::Null, |_| state["pending"].clone()))?;
        let over = pending.is_none() && (stage.step == total || self.settled(&recipe)?);
        let mut steps = Steps {
            one: self,
            checkpoints: self.checkpoints(&recipe),
            frozen,
            total,
            first: None,
            last: None,
            at_start: Metrics::default(),
            pending,
            marks: log.marks(),
            saved: resumed.map(|_| self.before + stage.step),
            saved_at: Instant::now(),
            stage,
            log,
            watch,
        };
        if !over && steps.run()? == End::Stopped {
            return Ok((None, steps.first, steps.last));
        }
        let Steps { mut stage, checkpoints, first, last, watch, .. } = steps;
        let out = self.folder.path().join("stages").join(self.index.to_string());
        let steps = stage.step;
        if over && out.join("config.json").exists() {
            watch.note(&format!("{} is finished: all of its {steps} steps are done", self.name));
            return Ok((Some(steps), first, last));
        }
        if recipe.checkpoint.use_best {
            self.take_best(&mut stage, &checkpoints, watch)?;
        }
        let options =
            SaveOptions { dtype: Dtype::F32, source: Some(self.dir), overwrite: true, ..Default::default() };
        stage.policy.model.save(&out, Some(&ModelDir::open(self.dir)?.config_json), &options)?;
        Ok((Some(steps), first, last))
    }

    /// Shows what was raised since the last call.
    fn warn(&self, warnings: &Warnings, watch: &mut dyn Watch) {
        for warning in warnings.take() {
            watch.warn(&warning);
            self.folder.note_warning(&warning);
        }
    }

    /// Whether the last evaluations of this stage, as many as `checkpoint.patience`, brought no new best. What was
    /// written decides, so a resumed run decides the same.
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

    /// What this stage reads and never writes: where it starts, which is also its reference, and where its critic does.
    fn frozen(&self, recipe: &Recipe) -> Result<Value> {
        let critic = recipe.critic.path.as_ref().map(|p| ("critic", Path::new(p)));
        let teacher = recipe.teacher.path.as_ref().map(|p| ("teacher", Path::new(p)));
        let judge =
            recipe.reward.iter().find_map(|r| r.model.as_ref()).map(|p| ("reward model", Path::new(p)));
        frozen::describe([("starting", self.dir)].into_iter().chain(critic).chain(teacher).chain(judge))
    }

    fn checkpoints(&self, recipe: &Recipe) -> Checkpoints {
        let c = &recipe.checkpoint;
        let options = CheckpointOptions { keep: c.keep, keep_best: c.keep_best, ..Default::default() };
        Checkpoints::new(&self.folder.checkpoints(), self.folder.files(), options)
    }

    /// All that a resumed run needs beside the weights and moments.
    fn state(&self, stage: &Stage, marks: Marks, pending: Option<&Pending>, frozen: &Value) -> Value {
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
            "metrics_bytes": marks.metrics,
            "rollouts": marks.rollouts,
            "pending": pending.map(Pending::to_json),
            "frozen": frozen,
        })
    }

    /// Saves a stage with its state.
    fn checkpoint(
        &self,
        checkpoints: &Checkpoints,
        stage: &Stage,
        state: &Value,
        best: Option<Best>,
    ) -> Result<PathBuf> {
        let json = ModelDir::open(self.dir)?.config_json;
        let role = |name, trainer| Role { name, trainer, config_json: Some(&json), source: Some(self.dir) };
        let mut roles = vec![role("policy", &stage.policy)];
        roles.extend(stage.critic.as_ref().map(|c| role("critic", c)));
        let saved = checkpoints.save(self.before + stage.step, &roles, state, best)?;
        for problem in saved.problems {
            let what = format!("an old checkpoint cannot be removed: {problem}");
            stage.warnings.raise("old-checkpoints", what, "it is tried again with every checkpoint");
        }
        Ok(saved.path)
    }

    fn restore(&self, stage: &mut Stage, path: &Path, state: &Value) -> Result<()> {
        let mut roles = vec![("policy", &mut stage.policy)];
        roles.extend(stage.critic.as_mut().map(|c| ("critic", c)));
        load(path, &mut roles)?;
        stage.source.restore(&state["source"])?;
        if !state["algorithm"].is_null() {
            stage.algo.restore(&state["algorithm"])?;
        }
        let broken = |e| Error::data(format!("rollouts in flight cannot be read: {e}")).at(path.display());
        if !state["ahead"].is_null() {
            stage.ahead = serde_json::from_value(state["ahead"].clone()).map_err(broken)?;
        }
        stage.step = state["step"]
            .as_u64()
            .ok_or_else(|| Error::data("the state names no step").at(path.display()))?;
        Ok(())
    }

    /// Goes back to this stage's best checkpoint; the first of equals is the best.
    fn take_best(&self, stage: &mut Stage, all: &Checkpoints, watch: &mut dyn Watch) -> Result<()> {
        let (metric, lower) =
            (stage.recipe.checkpoint.metric.clone(), stage.recipe.checkpoint.lower_is_better);
        let own = all.list()?.into_iter().filter(|(step, _)| *step > self.before);
        let rated =
            own.filter_map(|(step, b)| Some((b.filter(|b| Some(&b.metric) == metric.as_ref())?.value, step)));
        let worse = |value: f64| if lower { value } else { -value };
        let best = rated.min_by(|a, b| worse(a.0).total_cmp(&worse(b.0)).then(a.1.cmp(&b.1)));
        let Some((value, step)) = best else { return Ok(()) };
        let mut roles = vec![("policy", &mut stage.policy)];
        roles.extend(stage.critic.as_mut().map(|c| ("critic", c)));
        load(&self.folder.checkpoints().join(format!("step_{step}")), &mut roles)?;
        let metric = metric.unwrap_or_default();
        watch.note(&format!("{} hands on step {} with {metric} {value:.4}", self.name, step - self.before));
        Ok(())
    }

    /// Held-out examples, and held-out questions where something says what their answers are worth.
    fn evaluate(&self, stage: &mut Stage, watch: &mut dyn Watch) -> Result<Evaluation> {
        watch.note("evaluating");
        let (wants, recipe) = (stage.wants, stage.recipe.clone());
        let mut all = Evaluation::default();
        if wants != Wants::Rollouts {
            let mut source =
                setup::source(&recipe, self.dir, &stage.tokenizer, wants, true, &stage.warnings)?;
            all.metrics = stage.validate(&mut *source, recipe.eval.prompts)?;
        }
        let graded = wants == Wants::Rollouts || setup::task(&recipe)?.is_some() || !recipe.reward.is_empty();
        if graded && !stage.algo.needs().score {
            let asked = self.ask(stage, &recipe)?;
            all.metrics.join(asked.metrics);
            all.answers = asked.answers;
        }
        Ok(all)
    }

    /// Held-out questions, sampled and graded.
    fn ask(&self, stage: &Stage, recipe: &Recipe) -> Result<Evaluation> {
        let mut source =
            setup::source(recipe, self.dir, &stage.tokenizer, Wants::Rollouts, true, &stage.warnings)?;
        let model = &stage.policy.model;
        let cache = setup::cache_options(&recipe.rollout, &*model.backend);
        let sampler = Sampler::new(model, cache).map_err(|e| setup::cache_error(e, &recipe.rollout))?;
        let mut sampler = sampler.with_tokenizer(stage.tokenizer.clone());
        let own;
        let rewards = match &stage.sampler {
            Some(_) => &stage.rewards,
            None => {
                own = setup::rewards(recipe, Wants::Rollouts, &model.backend)?;
                &own
            }
        };
        let temperature = recipe.eval.temperature.unwrap_or(recipe.rollout.temperature);
        let mut settings = Rollout { temperature, ..recipe.rollout.clone() };
        let asked = (recipe.eval.prompts, recipe.eval.samples, recipe.seed ^ 0xe7a1);
        let mut all =
            evaluate(model, &mut sampler, &stage.tokenizer, &mut *source, rewards, &settings, asked)
                .map_err(|e| setup::too_small(e, &recipe.rollout))?;
        if temperature > 0.0 {
            settings.temperature = 0.0;
            let mut source =
                setup::source(recipe, self.dir, &stage.tokenizer, Wants::Rollouts, true, &stage.warnings)?;
            let asked = (recipe.eval.prompts, 1, recipe.seed);
            let greedy =
                evaluate(model, &mut sampler, &stage.tokenizer, &mut *source, rewards, &settings, asked)?;
            all.metrics.add("eval/greedy", greedy.metrics.get("eval/pass@1").unwrap_or(0.0));
        }
        Ok(all)
    }
}

/// Whether an evaluation decides which checkpoints are the best; one that lacks the metric it should is an error.
fn rates(recipe: &Recipe, evaluation: &Evaluation) -> Result<bool> {
    let Some(metric) = recipe.checkpoint.metric.as_ref().filter(|m| m.starts_with("eval/")) else {
        return Ok(false);
    };
    if evaluation.metrics.get(metric).is_some() {
        return Ok(true);
    }
    let names: Vec<&str> = evaluation.metrics.means().map(|(name, _)| name).collect();
    let near = nearest(metric, names.iter().copied()).or(names.first().copied()).unwrap_or("eval/loss");
    Err(Error::usage(format!("the evaluation has no {metric:?}, only {}", names.join(", ")))
        .at("checkpoint.metric")
        .fix(format!("checkpoint.metric = {near:?}")))
}

fn printed(r: &crate::train::Rollout) -> crate::run::Rollout {
    crate::run::Rollout {
        prompt: r.prompt.text.clone(),
        completion: r.answer.text.clone(),
        reward: r.graded.reward,
        components: r.graded.components.iter().map(|(n, v)| (n.clone(), f64::from(*v))).collect(),
        advantage: f64::from(r.advantage),
        tokens: r.answer.tokens,
        truncated: r.answer.truncated,
    }
}

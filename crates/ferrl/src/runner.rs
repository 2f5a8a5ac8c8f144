//! A whole run: stages one after the other, with everything that must survive a crash.
//!
//! The run folder holds, beside the logs and checkpoints, `start/` (a new model, where the recipe makes one) and
//! `stages/<n>/` (the model each finished stage hands on). A resumed run builds the stage as it was built the first
//! time and puts the checkpoint's state into it.

use crate::algo::Wants;
use crate::evaluate::{Evaluation, evaluate};
use crate::experience::Metrics;
use crate::recipe::{self, Recipe, Resolved, Rollout};
use crate::run::{
    Best, CheckpointOptions, Checkpoints, EventWriter, Mark, MetricsLog, Role, Rollouts, RunFolder,
    StepRecord, latest, load,
};
use crate::setup;
use crate::train::{Report, Stage};
use ferrl_engine::checkpoint::{Dtype, ModelDir, SaveOptions};
use ferrl_engine::generate::{CacheOptions, Sampler};
use ferrl_engine::{Error, Result, nearest};
use ferrl_kernels::Backend;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Whoever looks on while a run goes on.
pub trait Watch {
    /// A stage begins.
    fn stage(&mut self, name: &str, steps: u64);
    /// A step is done.
    fn step(&mut self, stage: &str, step: u64, steps: u64, record: &StepRecord);
    /// Something worth a line.
    fn note(&mut self, text: &str);
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
    let mut log = Log::open(&folder)?;
    let found = latest(&folder.checkpoints())?;
    for (path, problem) in &found.skipped {
        watch.note(&format!("passed over {}: {problem}", path.display()));
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
    log.truncate(&state)?;
    let mut evaluations = Vec::new();
    let mut done = 0;
    for plan in &placed(&resolved.stages, &folder)? {
        let at = state["stage"].as_u64().map_or(0, |s| s as usize);
        let dir = starting_model(&folder, plan.index, &plan.recipe)?;
        if plan.index < at {
            done += state["steps"][plan.index].as_u64().unwrap_or(0);
            continue;
        }
        let resumed = if plan.index == at { found.path.as_deref() } else { None };
        let one = OneStage { name: &plan.name, index: plan.index, dir: &dir, folder: &folder, before: done };
        let (ended, first, last) =
            one.run(plan.recipe.clone(), backend.clone(), resumed, &state, &mut log, watch)?;
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

/// The stages with `stage:NAME` replaced by the directory that stage leaves its model in.
fn placed(stages: &[recipe::Stage], folder: &RunFolder) -> Result<Vec<recipe::Stage>> {
    let mut stages = stages.to_vec();
    let names: Vec<String> = stages.iter().map(|s| s.name.clone()).collect();
    for stage in &mut stages {
        let (r, before) = (&mut stage.recipe, &names[..stage.index]);
        let paths = [&mut r.model.path, &mut r.critic.path].into_iter();
        for path in paths.chain(r.reward.iter_mut().map(|r| &mut r.model)).flatten() {
            let Some(name) = path.strip_prefix("stage:") else { continue };
            let Some(index) = before.iter().position(|n| n == name) else {
                let known = if before.is_empty() { "none".into() } else { before.join(", ") };
                let error = Error::usage(format!("{path:?} names no earlier stage; there are: {known}"));
                let near = nearest(name, before.iter().map(String::as_str));
                return Err(match near {
                    Some(near) => error.fix(format!("\"stage:{near}\"")),
                    None => error,
                });
            };
            *path = folder.path().join("stages").join(index.to_string()).to_string_lossy().into_owned();
        }
    }
    Ok(stages)
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
    setup::starting_model(recipe, &fresh)
}

/// Everything that is written step by step.
struct Log {
    metrics: MetricsLog,
    rollouts: Rollouts,
    events: EventWriter,
    start: Instant,
}

impl Log {
    fn open(folder: &RunFolder) -> Result<Self> {
        let metrics = MetricsLog::open(&folder.metrics(), folder.files())?;
        let history = MetricsLog::history(&folder.metrics())?;
        Ok(Log {
            metrics,
            rollouts: Rollouts::open(&folder.rollouts(), folder.files())?,
            events: EventWriter::create(&folder.tensorboard(), folder.files(), &history)?,
            start: Instant::now(),
        })
    }

    /// Back to what was written when the checkpoint was made.
    fn truncate(&mut self, state: &Value) -> Result<()> {
        self.metrics.truncate_to(state["metrics_bytes"].as_u64().unwrap_or(0))?;
        let mark = serde_json::from_value(state["rollouts"].clone()).unwrap_or_else(|_| Mark::default());
        self.rollouts.truncate_to(mark)
    }
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
        let total = stage.schedules.0.total_steps;
        watch.stage(self.name, total);
        if let Some(path) = resumed {
            self.restore(&mut stage, path, state)?;
            watch.note(&format!("resumed after step {} of {}", stage.step, self.name));
        }
        let checkpoints = self.checkpoints(&recipe);
        let mut first = None;
        let mut at_start = Metrics::default();
        if recipe.eval.at_start && stage.step == 0 {
            let evaluation = self.evaluate(&stage, watch)?;
            evaluation
                .metrics
                .means()
                .for_each(|(n, v)| at_start.add(&n.replacen("eval/", "eval_start/", 1), v));
            first = Some(evaluation);
        }
        let mut last = None;
        while stage.step < total {
            let Report { mut metrics, rollouts } = stage.step()?;
            metrics.join(std::mem::take(&mut at_start));
            let ends = stage.step == total;
            let due = |every: u64| every > 0 && stage.step.is_multiple_of(every);
            if due(recipe.eval.every) || (ends && (recipe.eval.every > 0 || recipe.eval.at_start)) {
                let evaluation = self.evaluate(&stage, watch)?;
                metrics.join(evaluation.metrics.clone());
                last = Some(evaluation);
            }
            let step = self.before + stage.step;
            let record = StepRecord::new(step, self.name, 0.0, log.start.elapsed().as_secs_f64(), &metrics);
            log.metrics.append(&record)?;
            log.events.append(&record)?;
            if !rollouts.is_empty() {
                log.rollouts.write(step, &rollouts.iter().map(printed).collect::<Vec<_>>())?;
            }
            watch.step(self.name, stage.step, total, &record);
            let stop = watch.interrupted();
            if due(recipe.checkpoint.every) || ends || stop {
                self.save(&checkpoints, &stage, log, &record)?;
            }
            if stop && !ends {
                return Ok((None, first, last));
            }
        }
        if recipe.checkpoint.use_best {
            self.take_best(&mut stage, &checkpoints, watch)?;
        }
        let out = self.folder.path().join("stages").join(self.index.to_string());
        let options =
            SaveOptions { dtype: Dtype::F32, source: Some(self.dir), overwrite: true, ..Default::default() };
        stage.policy.model.save(&out, Some(&ModelDir::open(self.dir)?.config_json), &options)?;
        Ok((Some(total), first, last))
    }

    fn checkpoints(&self, recipe: &Recipe) -> Checkpoints {
        let c = &recipe.checkpoint;
        let options = CheckpointOptions { keep: c.keep, keep_best: c.keep_best, ..Default::default() };
        Checkpoints::new(&self.folder.checkpoints(), self.folder.files(), options)
    }

    fn save(
        &self,
        checkpoints: &Checkpoints,
        stage: &Stage,
        log: &mut Log,
        record: &StepRecord,
    ) -> Result<()> {
        log.metrics.sync()?;
        let mut steps = vec![0; self.index];
        if self.index > 0 {
            steps[self.index - 1] = self.before;
        }
        let state = json!({
            "stage": self.index,
            "steps": steps,
            "step": stage.step,
            "source": stage.source.state(),
            "algorithm": stage.algo.state(),
            "metrics_bytes": log.metrics.byte_len(),
            "rollouts": log.rollouts.mark(),
        });
        let json = ModelDir::open(self.dir)?.config_json;
        let role = |name, trainer| Role { name, trainer, config_json: Some(&json), source: Some(self.dir) };
        let mut roles = vec![role("policy", &stage.policy)];
        roles.extend(stage.critic.as_ref().map(|c| role("critic", c)));
        let settings = &stage.recipe.checkpoint;
        let best = settings.metric.as_ref().and_then(|m| {
            let value = record.get(m)?;
            Some(Best { metric: m.clone(), value, lower: settings.lower_is_better })
        });
        for problem in checkpoints.save(self.before + stage.step, &roles, &state, best)?.problems {
            self.folder.log("warning", &problem.to_string())?;
        }
        Ok(())
    }

    fn restore(&self, stage: &mut Stage, path: &Path, state: &Value) -> Result<()> {
        let mut roles = vec![("policy", &mut stage.policy)];
        roles.extend(stage.critic.as_mut().map(|c| ("critic", c)));
        load(path, &mut roles)?;
        stage.source.restore(&state["source"])?;
        if !state["algorithm"].is_null() {
            stage.algo.restore(&state["algorithm"])?;
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

    /// Held-out questions, sampled and graded.
    fn evaluate(&self, stage: &Stage, watch: &mut dyn Watch) -> Result<Evaluation> {
        watch.note("evaluating");
        let recipe = &stage.recipe;
        let mut source = setup::source(recipe, self.dir, &stage.tokenizer, Wants::Rollouts, true)?;
        let cache = CacheOptions { bytes: recipe.rollout.cache_mib << 20, ..Default::default() };
        let model = &stage.policy.model;
        let mut sampler = Sampler::new(model, cache)?.with_tokenizer(stage.tokenizer.clone());
        let rewards = setup::rewards(recipe, Wants::Rollouts, &model.backend)?;
        let temperature = recipe.eval.temperature.unwrap_or(recipe.rollout.temperature);
        let mut settings = Rollout { temperature, ..recipe.rollout.clone() };
        let asked = (recipe.eval.prompts, recipe.eval.samples, recipe.seed ^ 0xe7a1);
        let mut all =
            evaluate(model, &mut sampler, &stage.tokenizer, &mut *source, &rewards, &settings, asked)?;
        if temperature > 0.0 {
            settings.temperature = 0.0;
            let mut source = setup::source(recipe, self.dir, &stage.tokenizer, Wants::Rollouts, true)?;
            let asked = (recipe.eval.prompts, 1, recipe.seed);
            let greedy =
                evaluate(model, &mut sampler, &stage.tokenizer, &mut *source, &rewards, &settings, asked)?;
            all.metrics.add("eval/greedy", greedy.metrics.get("eval/pass@1").unwrap_or(0.0));
        }
        Ok(all)
    }
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

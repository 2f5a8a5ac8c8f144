//! The loop over the steps of a stage, and checkpoints after failures.
//!
//! Invariant between any two lines of [`Steps`]: the stage, the lengths of the logs and the pending step are consistent, so that a
//! checkpoint can be written. A failed step is rolled back first.

use super::evaluation::rates;
use super::follow::Order;
use super::guard::{Failed, Guarded, guard};
use super::log::{Log, LogLengths};
use super::pending::PendingWrites;
use super::{OneStage, RunWatch};
use crate::evaluate::Evaluation;
use crate::experience::Metrics;
use crate::interrupt::is_interruption;
use crate::run::{Best, Checkpoints, StepRecord};
use crate::train::Stage;
use ferrl_engine::checkpoint::FILE_LIMIT;
use ferrl_engine::{Class, Error, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// A running stage.
pub(super) struct Steps<'a> {
    pub one: &'a OneStage<'a>,
    pub stage: Stage,
    pub log: &'a mut Log,
    pub watch: &'a mut dyn RunWatch,
    pub checkpoints: Checkpoints,
    /// The `config.json` that its models came with.
    pub config_json: Value,
    /// Fingerprint of data, rewards and models.
    pub frozen: Value,
    pub total: u64,
    /// Of this stage, the first and the last.
    pub first: Option<Evaluation>,
    pub last: Option<Evaluation>,
    /// Evaluation before the first step, written with it.
    pub at_start: Metrics,
    /// A completed step that is not written yet.
    pub pending: Option<PendingWrites>,
    /// Lengths of the logs at the stage's current position.
    pub marks: LogLengths,
    /// The last saved step, over all stages, and its time.
    pub saved: Option<u64>,
    pub saved_at: Instant,
    /// Whether another rank was asked to stop.
    pub told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StageEnd {
    /// All steps are done, or stopped early.
    Over,
    /// Interrupted; everything is saved.
    Stopped,
}

impl Steps<'_> {
    /// Evaluates before the first step, with `eval.at_start`.
    fn start(&mut self) -> Guarded<()> {
        if !self.stage.recipe.eval.at_start || self.stage.step > 0 {
            return Ok(());
        }
        let evaluation = self.evaluate()?;
        self.watch.evaluated(self.one.name, 0, &evaluation);
        self.one.log_evaluation(0, &evaluation);
        let named = |n: &str| n.replacen("eval/", "eval_start/", 1);
        evaluation.metrics.means().for_each(|(n, v)| self.at_start.add(&named(n), v));
        self.first = Some(evaluation);
        Ok(())
    }

    /// Runs the steps to the end. After a failure a checkpoint is saved before the error is returned.
    pub fn run(&mut self) -> Result<StageEnd> {
        self.all().or_else(|failed| self.leave(failed))
    }

    fn all(&mut self) -> Guarded<StageEnd> {
        self.start()?;
        loop {
            if let Some(end) = self.once()? {
                return Ok(end);
            }
        }
    }

    /// One step with evaluation, writes and checkpoint.
    fn once(&mut self) -> Guarded<Option<StageEnd>> {
        if self.pending.is_none() {
            self.step()?;
            self.share_printed()?;
        }
        let ends = self.stage.step == self.total;
        let Some(mut pending) = self.pending.clone() else { return Ok(None) };
        let judged = self.judge(&mut pending.metrics, ends)?;
        let record = self.write(&pending)?;
        let over = ends || (judged && self.one.settled(&self.stage.recipe)?);
        let stop = self.told || self.watch.interrupted();
        let planned = self.due(self.stage.recipe.checkpoint.every) || judged || over;
        if planned || stop || self.time_is_up() {
            // The best checkpoint must not depend on the times of checkpoints.
            let best = if planned { self.best(&record) } else { None };
            self.save(best)?;
        }
        if over && !ends {
            let (name, step) = (self.one.name, self.stage.step);
            self.watch.note(&format!("{name} stops early at step {step}: checkpoint.patience is reached"));
        }
        Ok(if over { Some(StageEnd::Over) } else { stop.then_some(StageEnd::Stopped) })
    }

    fn due(&self, every: u64) -> bool {
        every > 0 && self.stage.step.is_multiple_of(every)
    }

    fn time_is_up(&self) -> bool {
        let minutes = self.stage.recipe.checkpoint.minutes;
        minutes > 0.0 && self.saved_at.elapsed().as_secs_f64() >= 60.0 * minutes
    }

    /// Runs a step; a failed one is rolled back.
    fn step(&mut self) -> Guarded<()> {
        let before = self.stage.before_step();
        match self.together(Order::Step, |_, stage| stage.step()) {
            Ok(report) => {
                let mut pending = PendingWrites::new(report);
                pending.metrics.join(std::mem::take(&mut self.at_start));
                self.pending = Some(pending);
                Ok(())
            }
            Err(failed) => {
                let whole = guard(|| self.stage.go_back(before));
                self.stage.updating = !matches!(whole, Ok(true)); // changed weights are not saved
                Err(failed)
            }
        }
    }

    fn evaluate(&mut self) -> Guarded<Evaluation> {
        let evaluation = self.together(Order::Evaluate, |one, stage| one.evaluate(stage))?;
        self.share_printed()?;
        Ok(evaluation)
    }

    /// What user code has printed on other ranks comes into the log of this one. An interrupt of any rank, which may be all that
    /// a batch system ends, stops the run.
    fn share_printed(&mut self) -> Guarded<()> {
        let asked = self.together(Order::Printed, |_, stage| stage.share_printed())?;
        if let Some(rank) = asked.filter(|_| !self.told && !self.watch.interrupted()) {
            self.watch.note(&format!("rank {rank} was interrupted: finishing this step and saving"));
        }
        self.told |= asked.is_some();
        Ok(())
    }

    /// Runs collective work; a failure or panic of this rank becomes the error of all.
    fn together<T>(
        &mut self,
        order: Order,
        work: impl FnOnce(&OneStage<'_>, &mut Stage) -> Result<T>,
    ) -> Guarded<T> {
        let ranks = self.stage.ranks.clone();
        let done = guard(|| {
            ranks.together(|| {
                order.send(&ranks)?;
                work(self.one, &mut self.stage)
            })
        });
        if let Err(Failed::Panic(_)) = &done {
            ranks.fail(&Error::rank("rank 0 ended by a bug in ferrl"));
        }
        done
    }

    /// Evaluates if due; returns whether the evaluation ranks checkpoints.
    fn judge(&mut self, metrics: &mut Metrics, ends: bool) -> Guarded<bool> {
        let recipe = self.stage.recipe.clone();
        let (e, c) = (&recipe.eval, &recipe.checkpoint);
        if !(self.due(e.every) || (ends && (e.every > 0 || e.at_start))) {
            return Ok(false);
        }
        self.one.folder.still_there()?;
        let evaluation = self.evaluate()?;
        self.watch.evaluated(self.one.name, self.stage.step, &evaluation);
        self.one.log_evaluation(self.stage.step, &evaluation);
        metrics.join(evaluation.metrics.clone());
        let judged = (c.keep_best > 0 || c.patience > 0) && rates(&recipe, &evaluation)?;
        self.last = Some(evaluation);
        Ok(judged)
    }

    fn write(&mut self, pending: &PendingWrites) -> Guarded<StepRecord> {
        let step = self.one.before + self.stage.step;
        let (name, seconds) = (self.one.name, self.log.seconds());
        let record = StepRecord::new(step, name, pending.epoch, seconds, &pending.metrics);
        self.one.folder.still_there()?;
        retry_on_full_disk(self.watch, || self.log.append(&record, &pending.rollouts))?;
        self.marks = self.log.marks();
        self.pending = None;
        if let Some(e) = self.log.append_event(&record) {
            let warnings = &self.stage.warnings;
            warnings.raise("tensorboard", e.to_string(), "the file is rewritten when the run is resumed");
        }
        self.watch.step(name, self.stage.step, self.total, &record);
        self.one.warn(&self.stage.warnings, self.watch);
        Ok(record)
    }

    fn best(&self, record: &StepRecord) -> Option<Best> {
        let c = &self.stage.recipe.checkpoint;
        let metric = c.metric.clone()?;
        Some(Best { value: record.get(&metric)?, metric, lower: c.lower_is_better })
    }

    fn save(&mut self, best: Option<Best>) -> Result<PathBuf> {
        let step = self.one.before + self.stage.step;
        self.log.metrics.sync()?;
        let began = Instant::now();
        let state = self.one.state(&self.stage, self.marks, self.pending.as_ref(), &self.frozen);
        let saved = retry_on_full_disk(self.watch, || {
            self.one.folder.still_there()?;
            self.one.checkpoint(&self.checkpoints, (&self.stage, &self.config_json), &state, best.clone())
        })?;
        (self.saved, self.saved_at) = (Some(step), Instant::now());
        let fields =
            json!({ "stage": self.one.name, "step": step, "seconds": began.elapsed().as_secs_f64() });
        self.one.folder.event("checkpoint", &format!("saved {}", saved.display()), fields);
        self.one.warn(&self.stage.warnings, self.watch);
        Ok(saved)
    }

    /// Saves what can be saved after a failure, reports it, and returns the failure; an interrupt is not a failure.
    fn leave(&mut self, failed: Failed) -> Result<StageEnd> {
        let asked = matches!(&failed, Failed::Error(e) if is_interruption(e));
        if matches!(&failed, Failed::Error(e) if e.class != Class::Rank) {
            let _ = self.share_printed(); // what user code said before it failed; the failure itself is what counts
        }
        let step = self.one.before + self.stage.step;
        let folder = self.one.folder;
        if matches!(failed, Failed::Panic(_)) {
            folder.note("error", &failed.text());
        }
        let kept = if self.stage.updating {
            Err("the failed step had changed weights already".to_string())
        } else if self.stage.step == 0 || (self.saved == Some(step) && self.pending.is_none()) {
            Ok(self
                .saved
                .map_or_else(String::new, |saved| format!("saved: --resume continues after step {saved}")))
        } else {
            match guard(|| self.save(None)) {
                Ok(_) => Ok(format!("saved: --resume continues after step {step}")),
                Err(e) => self.rescue(&e.text()),
            }
        };
        let (kept, told) = match (kept, self.saved) {
            (Ok(told), _) => (true, told),
            (Err(why), Some(saved)) => {
                (false, format!("--resume continues from the last checkpoint, step {saved}: {why}"))
            }
            (Err(why), None) => (false, format!("there is no checkpoint to resume from: {why}")),
        };
        if !told.is_empty() {
            self.watch.note(&told);
            folder.note(if kept { "info" } else { "error" }, &told);
        }
        match failed {
            Failed::Error(_) if asked && kept => Ok(StageEnd::Stopped),
            Failed::Error(e) => Err(e),
            Failed::Panic(payload) => std::panic::resume_unwind(payload),
        }
    }
}

impl Steps<'_> {
    /// Saves a checkpoint to `--rescue` if the run folder cannot store it; returns the message for the user.
    fn rescue(&mut self, why: &str) -> std::result::Result<String, String> {
        let why = format!("the state cannot be saved: {why}");
        let Some(root) = self.one.options.rescue.clone() else { return Err(why) };
        let state = self.one.state(&self.stage, self.marks, self.pending.as_ref(), &self.frozen);
        match guard(|| self.one.rescue(&root, (&self.stage, &self.config_json), state)) {
            Ok(folder) => Ok(format!("{why}\n  saved in {} instead", folder.display())),
            Err(e) => Err(format!("{why}; nor can it be saved in {}: {}", root.display(), e.text())),
        }
    }
}

/// Whether waiting may help: a disk may be emptied, the largest size of a file stays.
fn may_pass(error: &Error) -> bool {
    error.class == Class::Resource && !error.to_string().contains(FILE_LIMIT)
}

/// Retries while the disk is full and the watcher waits.
fn retry_on_full_disk<T>(watch: &mut dyn RunWatch, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match work() {
            Err(e) if may_pass(&e) && watch.disk_full(&e, began.elapsed()) => {}
            done => return done,
        }
    }
}

//! The steps of a stage, one after the other, and what is saved when one of them fails.
//!
//! Between any two lines of [`Steps`] the same holds: the stage, the marks of the logs and the step that is not written yet
//! belong together, so that a checkpoint can be made of them. A step that fails puts itself back first.

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
use ferrl_engine::{Class, Error, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// A stage on its way.
pub(super) struct Steps<'a> {
    pub one: &'a OneStage<'a>,
    pub stage: Stage,
    pub log: &'a mut Log,
    pub watch: &'a mut dyn RunWatch,
    pub checkpoints: Checkpoints,
    /// The `config.json` that its models came with.
    pub config_json: Value,
    /// What the stage reads and never writes.
    pub frozen: Value,
    pub total: u64,
    /// Of this stage, the first and the last.
    pub first: Option<Evaluation>,
    pub last: Option<Evaluation>,
    /// Measured before the first step, written with it.
    pub at_start: Metrics,
    /// A step that was taken and is not written.
    pub pending: Option<PendingWrites>,
    /// How long the logs were when the stage stood where it stands.
    pub marks: LogLengths,
    /// The last step that was saved, over all stages, and when.
    pub saved: Option<u64>,
    pub saved_at: Instant,
}

/// How the steps ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StageEnd {
    /// All are done, or patience is used up.
    Over,
    /// Asked to stop; everything is saved.
    Stopped,
}

impl Steps<'_> {
    /// Evaluates before the first step, where that is wanted.
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

    /// Takes steps to the end. Whatever fails, what was learned is saved before the error is returned.
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

    /// One step: taken, evaluated, written, saved.
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
        let stop = self.watch.interrupted();
        let planned = self.due(self.stage.recipe.checkpoint.every) || judged || over;
        if planned || stop || self.time_is_up() {
            // When a checkpoint is made by the clock must not decide which is the best.
            let best = if planned { self.best(&record) } else { None };
            self.save(best)?;
        }
        if over && !ends {
            let (name, step) = (self.one.name, self.stage.step);
            self.watch.note(&format!("{name} ends at step {step}: its patience is used up"));
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

    /// Takes a step; one that fails leaves the stage as it was.
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
                self.stage.updating = !matches!(whole, Ok(true)); // what cannot be put back is not saved
                Err(failed)
            }
        }
    }

    fn evaluate(&mut self) -> Guarded<Evaluation> {
        let evaluation = self.together(Order::Evaluate, |one, stage| one.evaluate(stage))?;
        self.share_printed()?;
        Ok(evaluation)
    }

    /// What user code has printed on other ranks comes into the log of this one.
    fn share_printed(&mut self) -> Guarded<()> {
        self.together(Order::Printed, |_, stage| stage.share_printed())
    }

    /// Does what all ranks do together; a failure of this one, a panic too, becomes that of all.
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

    /// Evaluates where that is due; whether it decides which checkpoint is the best.
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

    /// Writes the step down.
    fn write(&mut self, pending: &PendingWrites) -> Guarded<StepRecord> {
        let step = self.one.before + self.stage.step;
        let (name, seconds) = (self.one.name, self.log.seconds());
        let record = StepRecord::new(step, name, pending.epoch, seconds, &pending.metrics);
        self.one.folder.still_there()?;
        patiently(self.watch, || self.log.append(&record, &pending.rollouts))?;
        self.marks = self.log.marks();
        self.pending = None;
        if let Some(e) = self.log.append_event(&record) {
            let warnings = &self.stage.warnings;
            warnings.raise("tensorboard", e.to_string(), "the file is written anew when the run is resumed");
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

    /// A checkpoint of where the stage stands.
    fn save(&mut self, best: Option<Best>) -> Result<PathBuf> {
        let step = self.one.before + self.stage.step;
        self.log.metrics.sync()?;
        let began = Instant::now();
        let state = self.one.state(&self.stage, self.marks, self.pending.as_ref(), &self.frozen);
        let saved = patiently(self.watch, || {
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

    /// Saves what can be saved after a failure, says so, and passes the failure on; work that was given up because somebody
    /// asked for it is no failure.
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
            Err("the step that failed had changed weights already".to_string())
        } else if self.stage.step == 0 || (self.saved == Some(step) && self.pending.is_none()) {
            Ok(self
                .saved
                .map_or_else(String::new, |saved| format!("saved: --resume goes on after step {saved}")))
        } else {
            match guard(|| self.save(None)) {
                Ok(_) => Ok(format!("saved: --resume goes on after step {step}")),
                Err(e) => self.rescue(&e.text()),
            }
        };
        let (kept, told) = match (kept, self.saved) {
            (Ok(told), _) => (true, told),
            (Err(why), Some(saved)) => {
                (false, format!("{why}; --resume goes on from the last checkpoint, step {saved}"))
            }
            (Err(why), None) => (false, format!("{why}, and there is no checkpoint yet")),
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
    /// Saves a checkpoint to `--rescue` where the run folder cannot take it; returns the message for the user.
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

/// Tries again as long as the disk is full and the watcher wants to wait.
fn patiently<T>(watch: &mut dyn RunWatch, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match work() {
            Err(e) if e.class == Class::Resource && watch.disk_full(&e, began.elapsed()) => {}
            done => return done,
        }
    }
}

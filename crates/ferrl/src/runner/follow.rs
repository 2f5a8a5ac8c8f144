//! Runs on several ranks: rank 0 leads, and the others follow in everything that needs all ranks.
//!
//! The leader runs the recipe like a single process, writes every file and decides when to evaluate, save and stop. Before
//! collective work it sends an [`Order`], which the followers execute until the run ends. Weights, data and random numbers are
//! the same on all ranks, so that only orders and results of shared work are communicated. An error of any rank becomes the error of
//! that order on all ranks; the leader saves, reports it and ends the run.

use super::{OneStage, RunOptions, RunWatch, with_directories};
use crate::interrupt;
use crate::ranks::SentError;
use crate::recipe::Resolved;
use crate::run::{Files, RunFolder, frozen, shared};
use crate::train::Stage;
use ferrl_engine::checkpoint::StorageFormat;
use ferrl_engine::model::serve::served;
use ferrl_engine::{Class, Error, Result};
use ferrl_kernels::{Backend, Ranks};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use xxhash_rust::xxh3::xxh3_128;

/// An order of the leader.
#[derive(Serialize, Deserialize)]
pub(super) enum Order {
    /// Build a stage, from a model and a checkpoint's state.
    Begin {
        folder: PathBuf,
        stage: usize,
        model: PathBuf,
        checkpoint: Option<(PathBuf, Value)>,
    },
    Step,
    Evaluate,
    /// Give the leader, which writes the log, what user code has printed, and whether this rank was asked to stop.
    Printed,
    /// Send this rank's part to the leader, which saves.
    Serve,
    /// Write a checkpoint's state and models together.
    Save(PathBuf),
    /// Write the policy's model together.
    SaveModel(PathBuf),
    /// Load weights and moments of a checkpoint.
    Load(PathBuf),
    /// Replace the policy's weights by their EMA.
    UseAverages,
    /// The run has ended or failed.
    End(Option<SentError>),
}

impl Order {
    pub(super) fn send(self, ranks: &Ranks) -> Result<()> {
        if ranks.is_alone() {
            return Ok(());
        }
        let bytes =
            serde_json::to_vec(&self).map_err(|e| Error::rank(format!("an order cannot be sent: {e}")))?;
        ranks.broadcast(&bytes).map(drop)
    }

    fn receive(ranks: &Ranks) -> Result<Order> {
        let bytes = ranks.broadcast(&[])?;
        serde_json::from_slice(&bytes).map_err(|e| Error::rank(format!("an order cannot be read: {e}")))
    }
}

/// Runs `work` on rank 0, and ends the followers afterwards, also after an error.
pub fn lead<T>(ranks: &Ranks, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = work();
    let error = done.as_ref().err();
    let mut lost = error.is_some_and(|e| e.class == Class::Rank);
    // A follower that fails at this moment sends its error and does not see the order, so the order is sent again.
    while !lost {
        match Order::End(error.cloned().map(SentError)).send(ranks) {
            Ok(()) => return done,
            Err(e) => lost = e.class == Class::Rank,
        }
    }
    done
}

pub struct Follower {
    pub resolved: Resolved,
    pub backend: Arc<dyn Backend>,
    /// As for the leader.
    pub options: RunOptions,
}

/// Follows rank 0 to the end of the run. The error is the one that ended it; rank 0 has printed it. Whatever fails here, in
/// `prepare` too, is reported to the leader, which ends the run: a follower waits for that.
pub fn follow(ranks: &Ranks, prepare: impl FnOnce() -> Result<Follower>) -> Result<()> {
    let mut end = ranks.together(|| prepare()?.obey(ranks));
    loop {
        match end {
            Ok(Order::End(error)) => return error.map_or(Ok(()), |e| Err(e.0)),
            Err(e) if e.class == Class::Rank => return Err(e),
            _ => end = Order::receive(ranks),
        }
    }
}

impl Follower {
    /// Executes orders to the last.
    fn obey(&self, ranks: &Ranks) -> Result<Order> {
        let mut order = Order::receive(ranks)?;
        while let Order::Begin { folder, stage, model, checkpoint } = order {
            order = StagePosition { folder, stage, model, checkpoint }.follow(self, ranks)?;
        }
        Ok(order)
    }
}

struct StagePosition {
    folder: PathBuf,
    stage: usize,
    model: PathBuf,
    checkpoint: Option<(PathBuf, Value)>,
}

impl StagePosition {
    /// Executes orders until one for another stage.
    fn follow(self, follower: &Follower, ranks: &Ranks) -> Result<Order> {
        let Follower { resolved, backend, options } = follower;
        let folder = RunFolder::guest(&self.folder)?;
        let one = OneStage {
            name: &resolved.stages[self.stage].name,
            index: self.stage,
            dir: &self.model,
            folder: &folder,
            before: 0,
            warnings: Default::default(),
            options,
            toml: &resolved.toml,
            renewed: Cell::new(None),
            opened: RefCell::default(),
        };
        let opened = ranks.together(|| {
            is_shared(&self.folder)?;
            let recipe = with_directories(&resolved.stages[self.stage].recipe, resolved, &folder)?;
            let frozen = frozen::describe(&recipe, &self.model)?;
            let resumed = self.checkpoint.as_ref().map(|(path, state)| (path.as_path(), state));
            one.agree(&frozen, &**backend)?;
            let mut stage = one.open(&recipe, backend.clone(), resumed, &mut Silent)?;
            one.join(&mut stage)?;
            Ok(stage)
        });
        let mut stage = opened.ok();
        loop {
            let order = match Order::receive(ranks) {
                Err(e) if e.class != Class::Rank => continue, // all ranks have the error, and the leader ends the run
                received => received?,
            };
            let Some(stage) = &mut stage else { return Ok(order) };
            let before = stage.before_step();
            let done = match &order {
                Order::Begin { .. } | Order::End(_) => return Ok(order),
                Order::Step => ranks.together(|| stage.step().map(drop)),
                Order::Evaluate => ranks.together(|| one.evaluate(stage).map(drop)),
                Order::Printed => ranks.together(|| stage.share_printed().map(drop)),
                Order::Load(path) => ranks.together(|| stage.load(path)),
                Order::UseAverages => ranks.together(|| stage.use_averages()),
                Order::Serve | Order::Save(_) | Order::SaveModel(_) => {
                    let _ = ranks.together(|| stage.help_to_save(&order)); // the leader reports errors
                    continue;
                }
            };
            if done.is_err() {
                stage.go_back(before)?;
            }
            drop(stage.warnings.take()); // the leader has raised its own
        }
    }
}

impl OneStage<'_> {
    /// Refuses ranks that do not all have the same program, recipe, data, model and arithmetic.
    pub(super) fn agree(&self, frozen: &Value, backend: &dyn Backend) -> Result<()> {
        let ranks = &self.options.ranks;
        if ranks.is_alone() {
            return Ok(());
        }
        let hash = |text: &str| format!("{:032x}", xxh3_128(text.as_bytes()));
        let own = [PROGRAM.clone(), hash(self.toml), hash(&frozen.to_string())];
        let all = crate::ranks::gather(ranks, own)?;
        for (what, fix, i) in [
            ("program", "the same ferrl on every machine", 0),
            ("recipe", "the same recipe and the same changes to it on every rank", 1),
            ("data, reward files or models", "the same files on every machine", 2),
        ] {
            if let Some(rank) = all.iter().position(|other| other[i] != all[0][i]) {
                return Err(Error::usage(format!("rank {rank} does not have the {what} of rank 0")).fix(fix));
            }
        }
        same_arithmetic(&crate::ranks::gather(ranks, arithmetic(backend))?)
    }

    /// Makes a stage one of the run's ranks.
    pub(super) fn join(&self, stage: &mut Stage) -> Result<()> {
        let ranks = &self.options.ranks;
        if ranks.is_alone() { Ok(()) } else { stage.join(ranks) }
    }

    /// Shows the transport between cards; warns if it goes through host memory.
    pub(super) fn show_exchange(&self, stage: &Stage, watch: &mut dyn RunWatch) {
        match self.options.ranks.cards() {
            Some(Ok(mover)) => {
                watch.note(&format!("gradients and weights are exchanged between cards by {mover}"))
            }
            Some(Err(why)) => {
                let what = format!("gradients and weights are exchanged through host memory: {why}");
                stage.warnings.raise("exchange-through-host", what, "see docs/ranks.md, From card to card");
                self.warn(&stage.warnings, watch);
            }
            None => {}
        }
    }

    /// Runs work that reads the whole state of a stage: if it is split over ranks, the others send their parts, or write them with
    /// `order`.
    pub(super) fn saving<T>(
        &self,
        stage: &Stage,
        order: Order,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let ranks = &self.options.ranks;
        if !stage.is_split() {
            return work();
        }
        ranks.together(|| match stage.is_written_together() {
            true => {
                order.send(ranks)?;
                work()
            }
            false => {
                Order::Serve.send(ranks)?;
                served(ranks, work)
            }
        })
    }
}

impl Stage {
    /// Gives the leader what user code has printed on other ranks, and returns a rank other than the leader's that was asked to
    /// stop. All ranks call it together.
    pub(super) fn share_printed(&self) -> Result<Option<usize>> {
        if self.ranks.is_alone() {
            return Ok(None);
        }
        let follows = self.ranks.rank() > 0;
        let own = if follows { self.warnings.take_printed() } else { Vec::new() };
        let all = crate::ranks::gather(&self.ranks, (own, follows && interrupt::requested()))?;
        let asked = all.iter().position(|(_, asked)| *asked);
        let others = all.into_iter().enumerate().filter(|_| !follows);
        for (rank, line) in others.flat_map(|(rank, (lines, _))| lines.into_iter().map(move |l| (rank, l))) {
            self.warnings.print(&format!("{} of rank {rank}", line.source), &line.line);
        }
        Ok(asked)
    }

    /// What a follower does while the leader saves.
    fn help_to_save(&self, order: &Order) -> Result<()> {
        let files = Files::new()?;
        match order {
            Order::Save(dir) => {
                let mut roles = vec![("policy", &self.policy)];
                roles.extend(self.critic.as_ref().map(|critic| ("critic", critic)));
                shared::write(&files, dir, &roles, None).map(drop)
            }
            Order::SaveModel(dir) => {
                shared::write_model(&files, dir, &self.policy.model, StorageFormat::F32).map(drop)
            }
            _ => self.serve(),
        }
    }
}

/// Refuses a rank that does not see the folder that rank 0 has made.
fn is_shared(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    Err(Error::usage("this rank does not see the run folder of rank 0")
        .at(folder.display())
        .fix("start all ranks in the same directory, on a disk that all machines share, or --runs with a path from the root"))
}

/// What a rank computes with, as far as bits depend on it.
fn arithmetic(backend: &dyn Backend) -> String {
    match backend.as_card() {
        Some(_) => "a card".into(),
        None => backend.instruction_set().into(),
    }
}

/// Refuses ranks whose results differ by rounding: each would train other weights.
fn same_arithmetic(all: &[String]) -> Result<()> {
    let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
    let what = format!("rank {rank} computes with {} where rank 0 computes with {}", all[rank], all[0]);
    Err(Error::usage(what).fix(
        "device = \"cuda\" needs a card for every rank; FERRL_SIMD=avx2 on every rank where only CPUs differ",
    ))
}

/// A fingerprint of this program.
static PROGRAM: LazyLock<String> = LazyLock::new(|| {
    let bytes = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
    format!("{:032x}", xxh3_128(&bytes))
});

/// Followers show nothing.
struct Silent;

impl RunWatch for Silent {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bug: ranks with other instruction sets began to train, and one of them said that log-probabilities differ, a bug to report.
    #[test]
    fn ranks_whose_arithmetic_differs_are_refused() {
        let ranks = |all: &[&str]| same_arithmetic(&all.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        assert!(ranks(&["avx2", "avx2"]).is_ok());
        let refused = ranks(&["avx512bf16", "avx512bf16", "avx2"]).expect_err("other bits").to_string();
        assert!(
            refused.contains("rank 2 computes with avx2 where rank 0 computes with avx512bf16"),
            "{refused}"
        );
        assert!(ranks(&["a card", "avx2"]).is_err(), "a rank without a card");
    }

    /// Bug: it was a file of the run folder that could not be read, with no word on what to do.
    #[test]
    fn a_rank_that_does_not_see_the_run_folder_is_told_so() {
        let refused = is_shared(Path::new("no/such/folder")).expect_err("not there").to_string();
        assert!(
            refused.contains("does not see the run folder") && refused.contains("same directory"),
            "{refused}"
        );
    }
}

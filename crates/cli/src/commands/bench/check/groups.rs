//! Checks tensor and context parallelism against one process on the same device.
//!
//! The forward pass has the same bits in any type: the first loss, the first completions, and the log-probabilities in sampling and
//! training. So have the weights in f32. In bf16 gradients may be summed in another order than in one process: there the distance
//! between the weights after the first update is bounded, and two runs must agree in every bit.

use super::super::scratch::ScratchDir;
use super::{CheckTable, largest, outcome};
use ferrl::recipe::Recipe;
use ferrl::setup;
use ferrl::train::Stage;
use ferrl::verify::VERIFIERS;
use ferrl_engine::Result;
use ferrl_kernels::check::CheckOutcome;
use ferrl_kernels::{Backend, DType, Ranks, comm};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum distance of bf16 weights from those of one process after one update, relative to the update. AdamW's first update is the
/// learning rate times the gradient's sign, so the distance is twice the fraction of weights whose gradient changes its sign; a gradient
/// that lacks half of its terms changes a quarter of them.
const DISTANCE: f64 = 0.2;

/// Name of the comparison.
const BITS: &str = "weights with other bits than one process's";

/// A stage of the recipe in one type, on ranks in one layout.
pub struct GroupCase {
    /// Name in the table.
    pub name: String,
    index: usize,
    dtype: DType,
    tp: usize,
    sp: usize,
    rollout_tp: usize,
}

impl GroupCase {
    fn recipe(&self, alone: bool) -> Result<Recipe> {
        let mut recipe = recipes(self.dtype)?.swap_remove(self.index);
        if !alone {
            (recipe.parallel.tp_size, recipe.parallel.sp_size) = (self.tp, self.sp);
            recipe.rollout.tp_size = self.rollout_tp;
        }
        Ok(recipe)
    }
}

fn recipes(dtype: DType) -> Result<Vec<Recipe>> {
    let dtype = format!("model.dtype={}", dtype.name());
    let resolved = Recipe::parse(include_str!("groups.toml"), "groups.toml", "groups", &[dtype])?;
    resolved.check(&VERIFIERS.iter().map(|v| v.name).collect::<Vec<_>>())?;
    Ok(resolved.stages.into_iter().map(|s| s.recipe).collect())
}

/// Layouts of this number of ranks: `tp_size`, `sp_size`, `rollout.tp_size`. `sp_size = 4` is more than the key heads.
fn layouts(ranks: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let all = [(2, 1, 2), (1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 4, 1)];
    all.into_iter()
        .filter(move |(tp, sp, rollout)| ranks.is_multiple_of(tp * sp) && ranks.is_multiple_of(*rollout))
}

/// The selected cases on that many ranks.
pub fn cases(size: usize, table: &CheckTable<'_>) -> Result<Vec<GroupCase>> {
    let mut cases = Vec::new();
    for (index, recipe) in recipes(DType::F32)?.iter().enumerate() {
        for dtype in [DType::F32, DType::Bf16] {
            for (tp, sp, rollout_tp) in layouts(size) {
                let layout = match (tp, sp) {
                    (1, 1) => "rollout tp 2".to_string(),
                    _ => format!("tp {tp} sp {sp}"),
                };
                let name = format!("{size} ranks {layout} {} {}", recipe.algorithm_name(), dtype.name());
                cases.push(GroupCase { name, index, dtype, tp, sp, rollout_tp });
            }
        }
    }
    // SFT samples nothing.
    cases.retain(|c| table.wants(&c.name) && (c.tp * c.sp > 1 || c.index > 0));
    Ok(cases)
}

pub struct GroupStart {
    folder: ScratchDir,
}

impl GroupStart {
    /// Creates nothing yet.
    pub fn new() -> Result<Self> {
        Ok(GroupStart { folder: ScratchDir::new("groups")? })
    }

    pub fn path(&self) -> Result<PathBuf> {
        let dir = self.folder.0.join("start");
        if dir.join("config.json").exists() {
            return Ok(dir);
        }
        setup::starting_model(&recipes(DType::F32)?[0], &dir)
    }
}

/// Results of a run that are compared.
pub struct GroupTrace {
    /// Loss and entropy of the first step, before any update.
    first: Vec<Option<u64>>,
    /// The first completions.
    completions: Vec<(String, usize)>,
    /// The largest difference between log-probabilities in sampling and training.
    gap: f64,
    /// Weights at the start, after the first step and after the last.
    weights: [Vec<f32>; 3],
}

/// Runs a few steps of a case, on ranks that call it together or in one process.
pub fn trace(case: &GroupCase, start: &Path, device: &Arc<dyn Backend>, ranks: &Ranks) -> Result<GroupTrace> {
    let mut stage = setup::stage_on(case.recipe(ranks.is_alone())?, device.clone(), start, ranks)?;
    stage.join(ranks)?;
    let before = weights(&stage)?;
    let first = stage.step()?;
    let after = weights(&stage)?;
    let gap = |metrics: &ferrl::experience::Metrics| {
        metrics.get("sampling/sampling_logp_difference/max").filter(|_| case.index > 0)
    };
    let mut gaps = vec![gap(&first.metrics)];
    for _ in 1..stage.schedules.0.total_steps {
        gaps.push(gap(&stage.step()?.metrics));
    }
    let completions =
        first.rollouts.iter().map(|r| (r.completion.text.clone(), r.completion.tokens)).collect();
    let bits = |name: &str| first.metrics.get(name).map(f64::to_bits);
    let none = if case.index > 0 { f64::NAN } else { 0.0 };
    Ok(GroupTrace {
        first: ["loss", "entropy"].map(bits).to_vec(),
        completions,
        gap: largest(gaps.into_iter().map(|gap| gap.unwrap_or(none))),
        weights: [before, after, weights(&stage)?],
    })
}

fn weights(stage: &Stage) -> Result<Vec<f32>> {
    let split = stage.policy.model.split_over().is_some();
    let whole = split.then(|| stage.policy.model.exact_copy()).transpose()?;
    let model = whole.as_ref().unwrap_or(&stage.policy.model);
    let all = (0..model.params.len()).map(|i| model.read(i)).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().flatten().collect())
}

fn differing(a: &[f32], b: &[f32]) -> f64 {
    let other = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    (other + a.len().abs_diff(b.len())) as f64
}

/// Distance of `a` from `b`, relative to that of `b` from `start`.
fn distance(a: &[f32], b: &[f32], start: &[f32]) -> f64 {
    let far = |x: &[f32], y: &[f32]| -> f64 {
        x.iter().zip(y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs()).sum()
    };
    far(a, b) / far(b, start)
}

/// Compares two runs on ranks with a run of one process.
pub fn outcomes(case: &GroupCase, [own, again]: [&GroupTrace; 2], alone: &GroupTrace) -> Vec<CheckOutcome> {
    let mut all =
        vec![outcome("loss and entropy of the first step, other bits", other(&own.first, &alone.first), 0.0)];
    if case.index > 0 {
        let tokens = other(&own.completions, &alone.completions);
        all.push(outcome("first completions that differ", tokens, 0.0));
        all.push(outcome("sampled and trained logp", own.gap, 0.0));
    }
    let [_, first, last] = &own.weights;
    let [start, first_alone, last_alone] = &alone.weights;
    all.push(outcome("weights at the start, other bits", differing(&own.weights[0], start), 0.0));
    let exact = case.dtype == DType::F32;
    let allowed = if exact { 0.0 } else { f64::INFINITY };
    all.push(outcome(format!("{BITS}, after one step"), differing(first, first_alone), allowed));
    all.push(outcome(format!("{BITS}, after the last"), differing(last, last_alone), allowed));
    let limit = if exact { 0.0 } else { DISTANCE };
    all.push(outcome("distance of weights after one step", distance(first, first_alone, start), limit));
    all.push(outcome("weights of two runs, other bits", differing(last, &again.weights[2]), 0.0));
    all
}

fn other<T: PartialEq>(a: &[T], b: &[T]) -> f64 {
    (a.iter().zip(b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len())) as f64
}

/// The worst of all ranks for each comparison.
pub fn worst(mut all: impl Iterator<Item = Vec<CheckOutcome>>) -> Vec<CheckOutcome> {
    let mut first = all.next().unwrap_or_default();
    for theirs in all {
        for (own, other) in first.iter_mut().zip(theirs) {
            own.worst = largest([own.worst, other.worst]);
        }
    }
    first
}

/// All cases on ranks as threads of this process, each with its own device.
pub fn in_threads(device: &str, size: usize, cases: &[GroupCase], table: &mut CheckTable<'_>) -> Result<()> {
    if cases.is_empty() {
        return Ok(());
    }
    let folder = GroupStart::new()?;
    let start = folder.path()?;
    let cards = (0..size).map(|_| ferrl_kernels::open(device, Some(1))).collect::<Result<Vec<_>>>()?;
    for case in cases {
        table.ask_each(&case.name, |out| {
            let alone = trace(case, &start, &cards[0], Ranks::ALONE)?;
            let (own, again) = (on_threads(case, &start, &cards)?, on_threads(case, &start, &cards)?);
            out.extend(worst(
                own.iter().zip(&again).map(|(own, again)| outcomes(case, [own, again], &alone)),
            ));
            Ok(())
        })?;
    }
    Ok(())
}

fn on_threads(case: &GroupCase, start: &Path, cards: &[Arc<dyn Backend>]) -> Result<Vec<GroupTrace>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = comm::threads(cards.len())
            .into_iter()
            .zip(cards)
            .map(|(ranks, card)| scope.spawn(move || ranks.together(|| trace(case, start, card, &ranks))))
            .collect();
        running
            .into_iter()
            .map(|r| r.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

//! Training: `forward` returns statistics per token, `backward` takes their gradients, `update` changes the weights.
//!
//! [`plan`] cuts an update into micro-batches. Each micro-batch's gradient is summed from zero, then added to the total in
//! micro-batch order, so it does not matter which rank computed it. Most parameters get their gradient in one operation per
//! backward, which adds it to the total directly.

mod accumulate;
mod batch;
mod divergence;
mod moment;
mod optimizer;
mod ranks;
mod schedule;
mod split;
mod start;
mod vector;

pub use batch::{Batch, BatchSequence, StatGrads, Stats, plan};
pub use divergence::{comparable, kl};
pub use moment::{StateKind, is_coded};
pub use optimizer::{Optimizer, OptimizerOptions, Rule, UpdateReport, trained_weights};
pub use schedule::{Decay, Schedule};
pub use vector::ParamVector;

use crate::model::decoder::{self, Activations, Keep, Layers, PastKv, Tokens};
use crate::model::gradient::Gradient;
use crate::model::heads::{RowStats, Scored};
use crate::model::weights::Model;
use crate::model::{ExpertLoad, Slot};
use crate::{Error, Result};
use accumulate::{Accumulated, ExpectedGrads};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::Segments;

/// A model, its gradients and its optimizer.
pub struct ModelTrainer {
    /// The model; sample from it at any time.
    pub model: Model,
    /// Gradient to weight update.
    pub optimizer: Optimizer,
    /// Activation checkpointing: backward recomputes layers, to save memory.
    pub recompute: bool,
    /// Whether ZeRO-3 communication overlaps with computation. The results have the same bits; must be equal on all ranks.
    pub overlap: bool,
    /// Divides the logits: the sampling temperature of the batch, or 1.
    pub temperature: f32,
    grads: Vec<Option<Gradient>>,
    /// State of the accumulated `grads`.
    sum: Accumulated,
    /// This rank's shard of the gradient accumulated over rounds, with data parallelism.
    totals: Option<ranks::Totals>,
    /// Weights that [`ModelTrainer::at_start`] restores.
    start: start::Start,
    pending: Option<PendingBackward>,
    /// Expert load per MoE layer, over the batches since [`ModelTrainer::take_load`].
    load: Vec<ExpertLoad>,
}

struct PendingBackward {
    /// All token ids, to check that backward gets the same batch.
    ids: Vec<u32>,
    tokens: Tokens,
    segments: Segments,
    kept: Activations,
    h: Buffer,
    scored: Option<Scored>,
    rows: Vec<u32>,
    /// Hidden states of the scored rows in the model compared with.
    other: Option<Buffer>,
}

impl ModelTrainer {
    /// `model` must have been loaded for training.
    pub fn new(model: Model, options: OptimizerOptions) -> Result<Self> {
        let optimizer = Optimizer::new(&model, options)?;
        let mut trainer = ModelTrainer {
            model,
            optimizer,
            recompute: false,
            overlap: true,
            temperature: 1.0,
            grads: Vec::new(),
            sum: Accumulated::Nothing,
            totals: None,
            start: Vec::new(),
            pending: None,
            load: Vec::new(),
        };
        let slots = (0..trainer.model.params.len()).map(|i| match trainer.model.split_over() {
            Some(_) => Ok(None), // allocated layer by layer in backward
            None => trainer.slot(i),
        });
        trainer.grads = slots.collect::<Result<_>>()?;
        Ok(trainer)
    }

    /// Statistics per token; stores activations for [`ModelTrainer::backward`].
    pub fn forward(&mut self, batch: &Batch) -> Result<Stats> {
        self.for_update(|t| t.forward_kept(batch))
    }

    fn forward_kept(&mut self, batch: &Batch) -> Result<Stats> {
        let (temperature, keep) = (self.temperature, self.keep());
        let (stats, pending) = self.with_layers(|layers, _| run(layers, batch, temperature, keep))?;
        self.check_finite(batch, &stats, &pending)?;
        self.pending = Some(pending);
        Ok(stats)
    }

    /// Statistics per token, without storing activations.
    pub fn stats(&self, batch: &Batch) -> Result<Stats> {
        stats(&self.model, batch, self.temperature)
    }

    /// Accumulates the batch's gradient. `grads` are with respect to the statistics of the last [`ModelTrainer::forward`].
    /// After an error, the update must be recomputed from its first batch ([`ModelTrainer::zero_grads`]).
    pub fn backward(&mut self, batch: &Batch, grads: &StatGrads) -> Result<()> {
        self.for_update(|t| t.backward_with(batch, grads, None))
    }

    fn backward_with(&mut self, batch: &Batch, grads: &StatGrads, other: Option<&Model>) -> Result<()> {
        let same = |p: &PendingBackward| p.segments == batch.segments() && p.ids == batch.flat().0;
        let p = self.pending.take().filter(same).ok_or_else(|| {
            Error::usage("a backward that does not follow the forward of the same batch")
                .fix("forward, then backward, batch by batch")
        })?;
        self.expected_grads(batch, p.other.is_some() && other.is_some()).check(grads)?;
        let temperature = self.temperature;
        add_load(&mut self.load, &p.kept);
        self.accumulate(|layers, sum| {
            let model = layers.model();
            let mut dh = model.activations(p.h.len())?;
            match &p.scored {
                Some(scored) => {
                    let g = pick_rows(grads, &p.rows, batch.others_per_row);
                    model.score_backward(scored, &g, &mut dh, sum)?;
                }
                None => model.backend.fill(&mut dh, 0.0)?,
            }
            if let (Some(y), Some(other), false) = (&p.other, other, grads.kl.is_empty()) {
                let dkl: Vec<f32> = p.rows.iter().map(|&r| grads.kl[r as usize]).collect();
                model.kl_backward((&p.h, &mut dh), (&p.rows, &dkl), (other, y), temperature, sum)?;
            }
            if !grads.value.is_empty() {
                model.values_backward(&p.h, &grads.value, &mut dh, sum)?;
            }
            decoder::backward(layers, (&p.tokens, &p.segments), p.kept, &dh, sum).map(Some)
        })?;
        Ok(())
    }

    /// [`ModelTrainer::forward`] and [`ModelTrainer::backward`] in one, for precomputed gradients: the same bits. If the
    /// gradients are of logp only, the head computes its logits once instead of twice (one-pass head).
    pub fn forward_backward(&mut self, batch: &Batch, grads: &StatGrads) -> Result<Stats> {
        self.for_update(|t| {
            if let Some(stats) = t.one_pass_head(batch, grads, None)? {
                return Ok(stats);
            }
            let stats = t.forward_kept(batch)?;
            t.backward_with(batch, grads, None)?;
            Ok(stats)
        })
    }

    /// [`ModelTrainer::forward_backward`] for gradients precomputed from the log-probabilities `logp`. `None`, without having
    /// accumulated anything, if forward computes other bits than `logp` or if one pass saves nothing.
    pub fn one_pass(&mut self, batch: &Batch, grads: &StatGrads, logp: &[f32]) -> Result<Option<Stats>> {
        self.for_update(|t| t.one_pass_head(batch, grads, Some(logp)))
    }

    fn one_pass_head(
        &mut self,
        batch: &Batch,
        grads: &StatGrads,
        logp: Option<&[f32]>,
    ) -> Result<Option<Stats>> {
        let usual = self.model.config.head.has_lm() && grads.is_logp_alone() && batch.others_per_row == 0;
        // All ranks of a sharded model must make the same passes; a rank whose gradients turn out unusable would make others.
        if !usual || self.model.split_over().is_some() || self.model.team().is_some() {
            return Ok(None);
        }
        self.expected_grads(batch, false).check(grads)?;
        let (mut stats, p) = hidden(&mut &self.model, batch, self.keep())?;
        // Computed on the host while the device works.
        let (rows, targets, _) = batch.scored_rows();
        if rows.is_empty() {
            return Ok(None);
        }
        let mut dh = self.model.activations(p.h.len())?;
        let g = pick_rows(grads, &rows, 0).logp;
        let (temperature, start) = (self.temperature, self.optimizer.steps == 0);
        let mut load = std::mem::take(&mut self.load);
        let done = self.accumulate(|layers, sum| {
            let model = layers.model();
            let r = model.score_one_pass((&p.h, &mut dh), (&rows, &targets), &g, temperature, sum)?;
            place_rows(&mut stats, &rows, &r, 0);
            check_finite(model, start, batch, &stats, &p)?;
            let same = |logp: &[f32]| stats.logp.iter().zip(logp).all(|(a, b)| a.to_bits() == b.to_bits());
            if !logp.is_none_or(same) {
                // Only the head's separate accumulator was added to.
                model.summed_in_parts().for_each(|i| sum[i].iter_mut().for_each(Gradient::clear));
                return Ok(None);
            }
            add_load(&mut load, &p.kept);
            decoder::backward(layers, (&p.tokens, &p.segments), p.kept, &dh, sum)?;
            Ok(Some(stats))
        });
        self.load = load;
        done
    }

    /// Expert load of the batches since the last call, per MoE layer.
    pub fn take_load(&mut self) -> Vec<ExpertLoad> {
        std::mem::take(&mut self.load)
    }

    fn keep(&self) -> Keep {
        if self.recompute { Keep::Inputs } else { Keep::All }
    }

    /// The shape that gradients of this batch must have.
    fn expected_grads(&self, batch: &Batch, compared: bool) -> ExpectedGrads {
        let value = self.model.config.head.has_value();
        ExpectedGrads { tokens: batch.tokens(), others: batch.others_per_row, value, compared }
    }

    fn check_finite(&self, batch: &Batch, stats: &Stats, p: &PendingBackward) -> Result<()> {
        check_finite(&self.model, self.optimizer.steps == 0, batch, stats, p)
    }

    /// Updates the weights by the accumulated gradient. After an error nothing has changed: weights, version, moments, EMA and
    /// gradient are as before.
    pub fn update(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        self.sum.check(self.pending.is_some())?;
        self.mask_frozen()?;
        let report = self.optimizer.update(&mut self.model, &self.grads, learning_rate)?;
        self.zero_grads();
        Ok(report)
    }

    /// [`ModelTrainer::update`] of the value (or score) head only.
    pub fn update_head(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        let trunk: Vec<bool> = self.model.params.iter().map(|p| p.shape.id.slot != Slot::Value).collect();
        if trunk.iter().all(|&trunk| trunk) {
            return Err(Error::model("there is no value head to train by itself"));
        }
        let mut held = Vec::new();
        for (i, grad) in self.grads.iter_mut().enumerate().filter(|(i, _)| trunk[*i]) {
            held.push((i, grad.take()));
        }
        let report = self.update(learning_rate);
        held.into_iter().for_each(|(i, grad)| self.grads[i] = grad);
        if report.is_ok() {
            self.zero_grads();
        }
        report
    }

    /// Copies the weights of a model of the same shape and resets the optimizer.
    pub fn restart_from(&mut self, start: &Model) -> Result<()> {
        self.model.reserve(self.model.params.iter().map(|p| p.shape.len()), 1)?;
        // An NF4 base never changes.
        let changes: Vec<bool> = (0..start.params.len()).map(|i| !self.model.is_nf4(i)).collect();
        let pairs = self.model.params.iter_mut().zip(&start.params).zip(changes);
        for ((param, own), _) in pairs.filter(|(_, changes)| *changes) {
            let (from, to) = (&own.master, &mut param.master);
            self.model.backend.copy(from, param.own.start - own.own.start, to, 0, param.own.len())?;
        }
        self.optimizer.restart();
        self.model.refresh()
    }

    /// The accumulated gradient of a parameter; `None` if it is frozen.
    pub fn gradient(&self, param: usize) -> Result<Option<Vec<f32>>> {
        let Some(slot) = &self.grads[param] else { return Ok(None) };
        if slot.is_empty() {
            return Ok(Some(vec![0.0; self.model.params[param].shape.len()]));
        }
        self.model.read_f32s(slot.buffer()).map(Some)
    }
}

fn add_load(to: &mut Vec<ExpertLoad>, kept: &Activations) {
    let batch: Vec<&ExpertLoad> = kept.loads().collect();
    to.resize(batch.len(), ExpertLoad::default());
    to.iter_mut().zip(batch).for_each(|(sum, load)| sum.add(load));
}

/// Statistics per token of any model.
pub fn stats(model: &Model, batch: &Batch, temperature: f32) -> Result<Stats> {
    Ok(run(&mut &*model, batch, temperature, Keep::Nothing)?.0)
}

fn run(
    layers: &mut dyn Layers,
    batch: &Batch,
    temperature: f32,
    keep: Keep,
) -> Result<(Stats, PendingBackward)> {
    let (mut stats, mut p) = hidden(layers, batch, keep)?;
    let model = layers.model();
    let (rows, targets, others) = batch.scored_rows();
    if model.config.head.has_lm() && !rows.is_empty() {
        let (scored, r) = model.score(&p.h, &rows, &targets, &others, temperature)?;
        place_rows(&mut stats, &rows, &r, batch.others_per_row);
        p.scored = Some(scored);
    }
    p.rows = rows;
    Ok((stats, p))
}

/// Everything below the language-model head; its statistics are zero so far.
fn hidden(layers: &mut dyn Layers, batch: &Batch, keep: Keep) -> Result<(Stats, PendingBackward)> {
    batch.check(&layers.model().config)?;
    let segments = batch.segments();
    let (ids, positions) = batch.flat();
    let tokens = layers.model().tokens(&ids, &positions)?;
    let (h, kept) = decoder::forward(layers, &tokens, PastKv::Packed(&segments), keep)?;
    let value = layers.model().values(&h)?;
    let (n, j) = (segments.rows(), batch.others_per_row);
    let stats =
        Stats { logp: vec![0.0; n], entropy: vec![0.0; n], value, others: vec![0.0; n * j], kl: Vec::new() };
    Ok((
        stats,
        PendingBackward { ids, tokens, segments, kept, h, scored: None, rows: Vec::new(), other: None },
    ))
}

/// Scatters the statistics of the scored rows.
fn place_rows(stats: &mut Stats, rows: &[u32], r: &RowStats, others: usize) {
    for (i, &row) in rows.iter().enumerate() {
        let row = row as usize;
        stats.logp[row] = r.logp[i];
        stats.entropy[row] = r.entropy[i];
        let listed = &r.others[i * others..(i + 1) * others];
        stats.others[row * others..(row + 1) * others].copy_from_slice(listed);
    }
}

/// Gathers the gradients of the scored rows; the caller must not pass gradients for others.
fn pick_rows(g: &StatGrads, rows: &[u32], others: usize) -> RowStats {
    let pick = |column: &[f32]| -> Vec<f32> {
        rows.iter().map(|&r| column.get(r as usize).copied().unwrap_or(0.0)).collect()
    };
    let mut out = RowStats { logp: pick(&g.logp), entropy: pick(&g.entropy), others: Vec::new() };
    if !g.others.is_empty() {
        let list = rows.iter().flat_map(|&r| &g.others[r as usize * others..(r as usize + 1) * others]);
        out.others = list.copied().collect();
    }
    out
}

/// An error that names the first non-finite statistic, if any; `start` if the weights are still those that were loaded.
fn check_finite(model: &Model, start: bool, batch: &Batch, stats: &Stats, p: &PendingBackward) -> Result<()> {
    let columns = [("logp", &stats.logp), ("entropy", &stats.entropy), ("value", &stats.value)];
    let bad = columns.iter().find_map(|(name, c)| Some((name, c.iter().position(|x| !x.is_finite())?)));
    let Some((name, row)) = bad else { return Ok(()) };
    for param in &model.params {
        if let Some(at) = model.backend.first_non_finite(&param.master)? {
            let name = param.shape.id;
            let fix =
                if start { "a model whose weights are finite" } else { "go back to the last checkpoint" };
            return Err(Error::numerics(format!("the weight {name} is not finite at element {at}")).fix(fix));
        }
    }
    let sequence = p.segments.starts.partition_point(|&s| s <= row) - 1;
    let at = row - p.segments.starts[sequence];
    let first = match model.split_over() {
        Some(_) => "a layer".into(), // finding it takes another pass, which the other ranks do not make
        None => model.first_bad_activation(&p.tokens, &p.segments)?.unwrap_or_else(|| "the head".into()),
    };
    let fix = if start { "compute in f32" } else { "a lower learning rate, or compute in f32" };
    Err(Error::numerics(format!(
        "{name} is not finite at position {at} of sequence {sequence} (of {}); first in {first}",
        batch.sequences.len()
    ))
    .fix(fix))
}

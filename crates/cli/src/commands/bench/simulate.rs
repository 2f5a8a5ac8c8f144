//! The simulated step of `ferrl bench ranks`: computation of one process, and links with latency and bandwidth.
//!
//! ```text
//! step = rounds * micro-batch + formed * forming + (update - forming) / shards + exchanges * latency + sent / bandwidth
//! ```
//!
//! A micro-batch is measured on a model of a rank's size (its heads, features and part of the vocabulary) with the rank's part of the
//! sequences, while all ranks compute theirs. Forming derives the packed compute copies of all weights from the masters. Exchanges and
//! bytes are those of the run; [`crate::commands::plan`] predicts them.

use super::ShapeArgs;
use ferrl_engine::{Error, Result};
use ferrl_kernels::comm::{Block, Outbox, ParcelContents, ParcelPiece, Route, part};
use ferrl_kernels::{Backend, Buffer, DType, Ranks};
use std::sync::Arc;
use std::time::Instant;

/// The layout of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankMesh {
    pub ranks: usize,
    pub tp: usize,
    pub sp: usize,
    /// Copies of the weights; each rank has a whole copy if it equals the number of ranks.
    pub copies: usize,
}

impl RankMesh {
    /// Ranks that compute a micro-batch together.
    pub fn team(self) -> usize {
        self.tp * self.sp
    }

    /// Concurrent micro-batches (data parallelism).
    pub fn data(self) -> usize {
        self.ranks / self.team()
    }

    /// Ranks that split a copy of the weights.
    pub fn shards(self) -> usize {
        self.ranks / self.copies
    }

    /// Whether a layer is gathered at a time (ZeRO-3).
    pub fn layer_by_layer(self) -> bool {
        self.team() == 1 && self.shards() > 1
    }

    /// Whether no rank has the whole model.
    pub fn splits(self) -> bool {
        self.team() > 1 || self.shards() > 1
    }
}

/// A model with the product sizes of a rank's part.
pub(super) fn part_of(shape: &ShapeArgs, mesh: RankMesh) -> Result<ShapeArgs> {
    let tp = mesh.tp;
    if !shape.heads.is_multiple_of(tp) || !shape.kv_heads.is_multiple_of(tp) {
        return Err(Error::usage(format!("{} and {} heads for {tp} ranks", shape.heads, shape.kv_heads))
            .fix("--tp N that divides --heads and --kv-heads"));
    }
    Ok(ShapeArgs {
        head_dim: Some(shape.head_dim.unwrap_or(shape.hidden / shape.heads)),
        heads: shape.heads / tp,
        kv_heads: shape.kv_heads / tp,
        inter: shape.inter.div_ceil(tp),
        vocab: shape.vocab.div_ceil(tp),
        ..shape.clone()
    })
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepParts {
    /// Seconds of a rank's micro-batch, of an update, and of forming the compute copies of all weights.
    pub micro_batch: f64,
    pub update: f64,
    pub forming: f64,
    pub link: Link,
}

/// Latency and bandwidth of the links between ranks, packing and adding included.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Link {
    /// Seconds of an empty exchange.
    pub latency: f64,
    /// Bytes per second that a rank sends while all ranks do.
    pub speed: f64,
}

impl StepParts {
    /// Seconds of a step of `rounds` rounds of micro-batches, in which a rank sends `sent` bytes in `exchanges` exchanges.
    pub fn step(&self, mesh: RankMesh, rounds: usize, (sent, exchanges): (f64, f64)) -> f64 {
        // Layer by layer, forward uses one of the two forms of a weight and backward both; a group forms its part once a step.
        let formed = match (mesh.layer_by_layer(), mesh.team()) {
            (true, _) => 1.5 * rounds as f64,
            (_, 1) => 1.0,
            _ => 1.0 / mesh.tp as f64,
        };
        let optimizer = (self.update - self.forming).max(0.0) / mesh.shards() as f64;
        let exchanging = exchanges * self.link.latency + sent / self.link.speed;
        rounds as f64 * self.micro_batch + formed * self.forming + optimizer + exchanging
    }
}

/// Numbers of the exchange that measures a link.
const PROBE: usize = 4 << 20;
/// Rows of a gathered activation.
const ROWS: usize = 256;
/// Maximum number of activations that measure a link, one after the other.
const GATHERED: usize = 16;

/// What ranks do with the numbers they exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LinkPattern {
    /// Each adds its part of the others' gradients.
    Sums,
    /// Each gathers the columns of an activation; holds the count of numbers that a rank sends.
    Columns(usize),
}

/// Measures the links of these ranks, all of which call it.
pub(super) fn link(ranks: &Ranks, device: &Arc<dyn Backend>, pattern: LinkPattern) -> Result<Link> {
    let (mut latencies, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let began = Instant::now();
        ranks.all_gather(&[0; 64])?;
        latencies.push(began.elapsed().as_secs_f64());
    }
    let own = match pattern {
        LinkPattern::Sums => part(PROBE, ranks.rank(), ranks.size()).len(),
        LinkPattern::Columns(sent) => columns_of(ranks, sent)? * ROWS,
    };
    // Each activation of a step has its own memory, which is not in a cache.
    let times = match pattern {
        LinkPattern::Sums => 1,
        LinkPattern::Columns(_) => (4 * PROBE / own).clamp(1, GATHERED),
    };
    let (mut from, mut total) =
        (device.alloc(DType::F32, PROBE.max(times * own))?, device.alloc(DType::F32, own)?);
    device.fill(&mut from, 1.0)?;
    device.fill(&mut total, 0.0)?;
    for _ in 0..3 {
        ranks.all_gather(&[])?; // all begin together
        let began = Instant::now();
        match pattern {
            LinkPattern::Sums => add_parts(ranks, device, &from, &mut total)?,
            LinkPattern::Columns(_) => {
                let gathered = (0..times).map(|i| gather_columns(ranks, device, (&from, i * own), own));
                gathered.collect::<Result<Vec<Buffer>>>()?;
            }
        }
        device.wait()?;
        seconds.push(began.elapsed().as_secs_f64() / times as f64);
    }
    let sent = match pattern {
        LinkPattern::Sums => PROBE - own,
        LinkPattern::Columns(_) => own * (ranks.size() - 1),
    };
    let latency = super::ranks::median(latencies);
    let speed = 4.0 * sent as f64 / (super::ranks::median(seconds) - latency).max(1e-9);
    Ok(Link { latency, speed })
}

fn contents(len: usize) -> ParcelContents {
    ParcelContents { note: Vec::new(), pieces: vec![ParcelPiece::f32s(len)] }
}

/// Packs, sends and adds gradients.
fn add_parts(ranks: &Ranks, device: &Arc<dyn Backend>, from: &Buffer, total: &mut Buffer) -> Result<()> {
    let size = ranks.size();
    let slots = (0..size).map(|to| contents(part(PROBE, to, size).len())).collect();
    let mut outbox = Outbox::new(ranks, device, Route::Each, slots)?;
    (0..size).try_for_each(|to| outbox.push(to, from, part(PROBE, to, size).start))?;
    let mut inbox = ranks.exchange_parcels(outbox, &vec![vec![ParcelPiece::f32s(total.len())]; size])?;
    (0..size).try_for_each(|rank| inbox.add(rank, total))
}

/// The number of columns in one rank's part of an activation that sends `sent` numbers; the maximum over all ranks.
fn columns_of(ranks: &Ranks, sent: usize) -> Result<usize> {
    let own = (sent / (ranks.size() - 1).max(1)).div_ceil(ROWS).max(1);
    let each = ranks.all_gather(&(own as u64).to_le_bytes())?;
    let each = each.iter().filter_map(|bytes| bytes.as_slice().try_into().ok().map(u64::from_le_bytes));
    Ok(each.max().unwrap_or(1) as usize)
}

/// Packs, sends and gathers the columns of an activation, as groups do.
fn gather_columns(
    ranks: &Ranks,
    device: &Arc<dyn Backend>,
    (from, at): (&Buffer, usize),
    own: usize,
) -> Result<Buffer> {
    let (size, columns) = (ranks.size(), own / ROWS);
    let others = (0..size).filter(|&rank| rank != ranks.rank()).collect();
    let mut outbox = Outbox::new(ranks, device, Route::Same(others), vec![contents(own)])?;
    outbox.push(0, from, at)?;
    let mut expected = vec![vec![ParcelPiece::f32s(own)]; size];
    expected[ranks.rank()].clear();
    let mut inbox = ranks.exchange_parcels(outbox, &expected)?;
    let mut whole = device.alloc(DType::F32, size * own)?;
    for rank in 0..size {
        let columns = std::iter::once(rank * columns..(rank + 1) * columns).collect();
        let block = Block { rows: 0..ROWS, width: own / ROWS * size, columns };
        match rank == ranks.rank() {
            true => block.unpack(&**device, (from, at), &mut whole)?,
            false => inbox.write_block(rank, &mut whole, &block)?,
        }
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_step_is_the_sum_of_its_parts() {
        let link = Link { latency: 0.001, speed: 1e9 };
        let parts = StepParts { micro_batch: 1.0, update: 0.5, forming: 0.1, link };
        let mesh = |ranks, tp, copies| RankMesh { ranks, tp, sp: 1, copies };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(parts.step(mesh(2, 1, 2), 3, (1e9, 10.0)), 3.0 + 0.5 + 0.01 + 1.0);
        near(parts.step(mesh(2, 1, 1), 3, (1e9, 10.0)), 3.0 + 4.5 * 0.1 + 0.2 + 0.01 + 1.0);
        near(parts.step(mesh(4, 2, 2), 3, (1e9, 10.0)), 3.0 + 0.05 + 0.2 + 0.01 + 1.0);
    }
}

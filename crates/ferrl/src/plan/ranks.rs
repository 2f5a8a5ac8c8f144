//! A step on many ranks: memory of a rank, bytes and time of every communication, and the fastest layout.
//!
//! Only layouts that `ferrl train` accepts are planned ([`RankLayout::serves`]). Nodes hold ranks in order, tensor-parallel groups
//! first.

pub use super::exchange::Exchange;
pub use super::rank_memory::{buffers, parts};

use super::cards::{Card, LINK_SHARE};
use super::exchange::{exchanges, rounds};
use super::memory::{self, MemoryPart};
use super::work::{Together, work_of};
use super::{Inputs, Rates, StagePlan};
use crate::parallel::RankLayout;
use crate::recipe::{Parallel, Recipe};
use ferrl_engine::{Error, Result};
use ferrl_kernels::DType;

/// Cards in machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// One rank for each card.
    pub ranks: usize,
    /// Machines.
    pub nodes: usize,
    /// The card of each rank.
    pub card: Card,
    /// Bytes a second between machines, for each card.
    pub network: f64,
}

/// A stage on a cluster, in one layout.
#[derive(Clone, Debug)]
pub struct RankPlan {
    pub layout: RankLayout,
    /// Memory of a rank, part by part.
    pub parts: Vec<MemoryPart>,
    /// Bytes of the machine's memory beside a card's, for a rank.
    pub host: u64,
    pub exchanges: Vec<Exchange>,
    /// Seconds of forward and backward.
    pub train: f64,
    /// Seconds of sampling, and of passes without gradients.
    pub sample: f64,
    /// Fraction of the time of forward and backward in which the mean rank has no micro-batch.
    pub idle: f64,
}

impl Cluster {
    /// Ranks of a machine.
    pub fn per_node(&self) -> usize {
        self.ranks / self.nodes
    }

    /// Refuses machines that do not have the same number of ranks.
    pub fn check(&self) -> Result<()> {
        if self.nodes > 0 && self.ranks > 0 && self.ranks.is_multiple_of(self.nodes) {
            return Ok(());
        }
        Err(Error::usage(format!("{} ranks on {} nodes", self.ranks, self.nodes))
            .fix("--nodes N where N divides --ranks"))
    }

    /// What a card of it can do.
    pub fn rates(&self, i: &Inputs) -> Rates {
        Rates::of(i.device, if i.dtype() == DType::F32 { self.card.f32 } else { self.card.bf16 })
    }

    /// Seconds in which each of `size` ranks with strides of `stride` gets `bytes` that the group has together: within machines by
    /// links, between them by the adapters of all cards at once.
    pub(super) fn gather(&self, bytes: f64, size: usize, stride: usize) -> f64 {
        if size < 2 {
            return 0.0;
        }
        let nodes = (size * stride).div_ceil(self.per_node()).min(self.nodes).max(1) as f64;
        let within = bytes * (size - 1) as f64 / size as f64 / self.card.link;
        let cards = self.per_node().min(size * stride) as f64 / stride as f64;
        let between = bytes * (1.0 - 1.0 / nodes) / (cards.max(1.0) * self.network);
        within.max(between) / LINK_SHARE
    }

    /// Seconds in which each of `size` ranks sends `bytes` to the others, each a part (flat all-to-all).
    pub(super) fn scatter(&self, bytes: f64, size: usize, stride: usize) -> f64 {
        if size < 2 {
            return 0.0;
        }
        let here = (self.per_node() / stride).clamp(1, size) as f64;
        let between = bytes * (1.0 - here / size as f64) / self.network;
        let within = bytes * (here - 1.0) / size as f64 / self.card.link;
        within.max(between) / LINK_SHARE
    }
}

impl RankPlan {
    pub fn new(stage: &StagePlan, l: RankLayout, cluster: &Cluster) -> Self {
        let (i, rates) = (&stage.inputs, cluster.rates(&stage.inputs));
        let (batches, _, rounds) = rounds(i, l);
        let work = work_of(i, Together { tp: l.tp, sp: l.sp, rollout_tp: l.rollout_tp });
        // The last round of an update may leave ranks without a micro-batch.
        let full = (rounds * l.dp()) as f64 / batches as f64;
        let each = |work: f64| work * full / l.ranks as f64;
        let groups = l.ranks / l.rollout_tp;
        let prompts = i.recipe.rollout.prompts.max(1);
        let uneven = (prompts.div_ceil(groups) * groups) as f64 / prompts as f64;
        let sample = work.sample * uneven / l.ranks as f64 / rates.sampling;
        RankPlan {
            layout: l,
            parts: parts(i, l),
            host: memory::host_bytes(i).div_ceil((l.fsdp * l.tp) as u64),
            exchanges: exchanges(i, l, cluster),
            train: each(work.train) / rates.training,
            sample: sample + each(work.annotate) / rates.training,
            idle: 1.0 - 1.0 / full,
        }
    }

    /// Bytes of a rank.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Seconds of all exchanges.
    pub fn exchanging(&self) -> f64 {
        self.exchanges.iter().map(|x| x.seconds).fold(0.0, |all, one| all + one) // an empty sum is -0.0
    }

    /// Seconds of a step with overlap of communication and computation.
    pub fn seconds(&self) -> f64 {
        let meanwhile: f64 = self.exchanges.iter().filter(|x| x.meanwhile).map(|x| x.seconds).sum();
        self.train.max(meanwhile) + self.exchanging() - meanwhile + self.sample
    }

    /// Seconds of a step without overlap.
    pub fn seconds_in_turn(&self) -> f64 {
        self.train + self.exchanging() + self.sample
    }
}

/// The layout of a recipe on the cluster's ranks, with the checks of a run.
fn layout_of(stage: &StagePlan, recipe: &Recipe, ranks: usize) -> Result<RankLayout> {
    let (i, layout) = (&stage.inputs, RankLayout::of(recipe, ranks)?);
    layout.serves(recipe, std::iter::once(&i.config).chain(&i.critic))?;
    Ok(layout)
}

/// Every layout that training accepts: those that fit, fastest first, then the others, smallest first.
pub fn layouts(stage: &StagePlan, cluster: &Cluster) -> Vec<RankPlan> {
    let n = cluster.ranks;
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut recipe = stage.inputs.recipe.clone();
    let mut all = Vec::new();
    for tp_size in divisors(n).filter(|tp| *tp <= cluster.per_node()) {
        for sp_size in divisors(n / tp_size) {
            for ddp_size in divisors(n / tp_size) {
                recipe.parallel = Parallel { ddp_size, tp_size, sp_size };
                if let Ok(layout) = layout_of(stage, &recipe, n) {
                    all.push(RankPlan::new(stage, layout, cluster));
                }
            }
        }
    }
    let fits = |p: &RankPlan| p.bytes() <= cluster.card.memory;
    let key = |p: &RankPlan| if fits(p) { p.seconds() } else { p.bytes() as f64 };
    all.sort_by(|a, b| fits(b).cmp(&fits(a)).then(key(a).total_cmp(&key(b))));
    all
}

/// The layout of the recipe, and the fastest one that fits, if any.
pub fn choose(stage: &StagePlan, cluster: &Cluster) -> Result<(RankPlan, Option<RankPlan>)> {
    cluster.check()?;
    let own = RankPlan::new(stage, layout_of(stage, &stage.inputs.recipe, cluster.ranks)?, cluster);
    let best = layouts(stage, cluster).into_iter().next().filter(|b| b.bytes() <= cluster.card.memory);
    Ok((own, best))
}

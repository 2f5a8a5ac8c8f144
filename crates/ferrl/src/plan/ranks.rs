//! A step on many cards: memory of a rank, bytes and time of every exchange, and the layout that is fastest.
//!
//! `W` weights, `e` bytes of the compute type, `f` ranks that split a copy (ZeRO-3), `t` ranks of tensor parallelism, `s` of context
//! parallelism. Masters, moments and summed gradients are split `f t` ways. Where `f > 1` and no ranks compute together, linear layers
//! read two gathered layers at a time. Ranks that compute together gather before an update what they read in it: `1 / t` of the
//! layers, and all of the tables and heads. Nodes hold ranks in order, tensor-parallel groups first.

use super::cards::{Card, LINK_SHARE};
use super::memory::{self, Part, weights};
use super::{Inputs, Rates, StagePlan};
use crate::parallel::RankLayout;
use ferrl_engine::model::Config;
use ferrl_engine::{Error, Result};
use ferrl_kernels::DType;

/// Bytes of a sampled token between ranks: its id, log-probability, version and mask, as text.
const TOKEN: f64 = 40.0;

/// Cards in machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// One rank for each card.
    pub ranks: usize,
    /// Machines.
    pub nodes: usize,
    /// What each rank has.
    pub card: Card,
    /// Bytes a second between machines, for each card.
    pub network: f64,
}

/// Bytes that ranks exchange in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// What is exchanged.
    pub name: &'static str,
    /// Bytes that a rank receives in a step.
    pub bytes: f64,
    /// Seconds of a step.
    pub seconds: f64,
    /// How often, and what it is made of.
    pub what: String,
}

/// A stage on a cluster, in one layout.
#[derive(Clone, Debug)]
pub struct RankPlan {
    /// The layout.
    pub layout: RankLayout,
    /// Memory of a rank, part by part.
    pub parts: Vec<Part>,
    /// Exchanges of a step.
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
    fn gather(&self, bytes: f64, size: usize, stride: usize) -> f64 {
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
    fn scatter(&self, bytes: f64, size: usize, stride: usize) -> f64 {
        if size < 2 {
            return 0.0;
        }
        let here = (self.per_node() / stride).clamp(1, size) as f64;
        let between = bytes * (1.0 - here / size as f64) / self.network;
        let within = bytes * (here - 1.0) / size as f64 / self.card.link;
        within.max(between) / LINK_SHARE
    }
}

/// Weights of the largest layer.
fn layer(c: &Config) -> usize {
    let of = |l: usize| c.params().iter().filter(|p| p.id.layer == Some(l)).map(|p| p.len()).sum::<usize>();
    (0..c.layers).map(of).max().unwrap_or(0)
}

/// Weights outside layers: tables, head, the last norm.
fn outside(c: &Config) -> usize {
    c.params().iter().filter(|p| p.id.layer.is_none()).map(|p| p.len()).sum()
}

/// Bytes of a rank.
fn parts(i: &Inputs, l: RankLayout) -> Vec<Part> {
    let (e, r) = (i.dtype().size(), &i.recipe);
    let trained: Vec<&Config> = std::iter::once(&i.config).chain(&i.critic).collect();
    let sum = |f: &dyn Fn(&Config) -> usize| trained.iter().map(|c| f(c)).sum::<usize>();
    let (all, shard) = (sum(&weights), (l.fsdp * l.tp) as u64);
    let split = |bytes: usize| (bytes as u64).div_ceil(shard);
    let mut out: Vec<Part> = Vec::new();
    let mut add = |name: &'static str, bytes: u64, what: String| {
        if bytes > 0 {
            out.push(Part { name, bytes, what });
        }
    };
    let over = if shard > 1 { format!("f32, one of {shard} parts") } else { "f32".into() };
    add("masters", split(4 * all), over.clone());
    let moments = sum(&|c| c.params().iter().map(|p| r.optim.moment_bytes(p)).sum());
    add("moments", split(moments), format!("{}, {over}", r.optim.name));
    add("gradients", split(4 * all), over.clone());
    if r.optim.ema.is_some() {
        add("average", split(4 * all), over.clone());
    }
    let frozen: usize = match &i.teacher {
        Some(teacher) => weights(teacher),
        None if i.needs.reference || i.needs.start => weights(&i.config),
        None => 0,
    } + i.judges.iter().map(weights).sum::<usize>();
    let bytes = if e == 2 { i.device.frozen } else { 4 };
    add("frozen", split(bytes * frozen), format!("reference, teacher, reward models, {over}"));
    let own = |c: &Config| memory::packed(c, e, true, i.device.weight);
    let team = l.tp * l.sp;
    if team > 1 {
        let tables = |c: &Config| (own(c) as f64 * outside(c) as f64 / weights(c).max(1) as f64) as usize;
        let read = sum(&|c| (own(c) - tables(c)) / l.tp + tables(c));
        add(
            "weights",
            read as u64,
            format!("for products: one of {} parts of the layers, the tables whole", l.tp),
        );
        let leaving = sum(&|c| 4 * ((weights(c) - outside(c)) / team + outside(c)));
        add("in flight", leaving as u64, "the gradient of a micro-batch, until it is sent".into());
    } else if l.fsdp > 1 {
        // In flight are two layers and the tables, and the gradients of two layers before they leave.
        let (gathered, leaving) = (sum(&|c| e * (2 * layer(c) + outside(c))), sum(&|c| 8 * layer(c)));
        add("gathered", gathered as u64, "two layers and the tables, in the compute type".into());
        add("in flight", leaving as u64, "gradients of two layers on their way".into());
    } else {
        add("weights", sum(&own) as u64, "for products".into());
        if l.ranks > 1 {
            add("in flight", (8 * all) as u64, "the gradient as it is sent and received".into());
        }
    }
    let t = i.micro_tokens().div_ceil(l.sp);
    let recompute = r.model.recompute;
    // The residual stream is whole under tensor parallelism; what is inside a layer is split.
    let stream = |c: &Config| 4 * c.hidden * t * (c.layers + 1);
    let kept = |c: &Config| {
        let whole = memory::activations(c, t, e, recompute);
        stream(c) + whole.saturating_sub(stream(c)) / l.tp
    };
    // Every rank computes the heads of all tokens.
    let heads = |c: &Config| memory::head_work(c, i.micro_tokens(), e, i.device);
    let work = |c: &&Config| (memory::backward_work(c, t, e) / l.tp).max(heads(c));
    let works = trained.iter().map(work).max().unwrap_or(0);
    let training = sum(&kept) + works;
    let sampling = if i.feed.sampled() { memory::sampling_work(i, e, false) / l.rollout_tp } else { 0 };
    let how = if recompute { ", layers recomputed" } else { "" };
    add("activations", training.max(sampling) as u64, format!("{t} tokens at once{how}"));
    if i.feed.sampled() {
        add(
            "cache",
            memory::cache(i, e, false),
            format!("keys and values, rollout.cache_mib = {}", r.rollout.cache_mib),
        );
    }
    let slack = out.iter().map(|p| p.bytes).sum::<u64>() * i.device.slack / 100;
    out.push(Part {
        name: "allocator",
        bytes: slack + i.device.fixed,
        what: format!("{} % of the above, driver", i.device.slack),
    });
    out
}

/// Micro-batches of an update, updates of a step, rounds of an update.
fn rounds(i: &Inputs, l: RankLayout) -> (usize, usize, usize) {
    let batches = i.update_tokens().div_ceil(i.recipe.train.micro_batch_tokens.max(1)).max(1);
    (batches, (i.updates.epochs * i.updates.minibatches).max(1), batches.div_ceil(l.dp()))
}

/// What ranks exchange in a step.
fn exchanges(i: &Inputs, l: RankLayout, cluster: &Cluster) -> Vec<Exchange> {
    let (e, t) = (i.dtype().size() as f64, l.tp);
    let trained: Vec<&Config> = std::iter::once(&i.config).chain(&i.critic).collect();
    let (whole, team) = (trained.iter().map(|c| weights(c)).sum::<usize>() as f64, t * l.sp);
    let all = whole / team as f64;
    let (batches, updates, rounds) = rounds(i, l);
    let times = (rounds * updates) as f64;
    let mut out = Vec::new();
    let mut add = |name: &'static str, bytes: f64, seconds: f64, what: String| {
        if bytes > 0.0 {
            out.push(Exchange { name, bytes, seconds, what });
        }
    };
    let part = |n: usize| (n - 1) as f64 / n as f64;
    if team > 1 {
        let (gathers, shards) = (updates as f64, l.fsdp * t);
        let what = format!("gathered {gathers:.0} times, before updates");
        let seconds = gathers * cluster.gather(whole * e, shards, 1);
        add("weights", gathers * whole * e * part(shards), seconds, what);
    } else if l.fsdp > 1 {
        let passes = 2.0 * times;
        let seconds = passes * cluster.gather(all * e, l.fsdp, t);
        add(
            "weights",
            passes * all * e * part(l.fsdp),
            seconds,
            format!("gathered {passes:.0} times, layer by layer"),
        );
    }
    let q = l.ranks;
    let seconds = times * cluster.scatter(4.0 * all, q, 1);
    add(
        "gradients",
        times * 4.0 * all * part(q),
        seconds,
        format!("all-to-all, {times:.0} rounds of {batches} micro-batches"),
    );
    let copies = if l.fsdp > 1 || team > 1 { l.ddp } else { q };
    let (sums, summed) = (updates as f64, 4.0 * whole / (l.fsdp * t) as f64);
    add(
        "sums",
        sums * summed * part(copies),
        sums * cluster.gather(summed, copies, t * l.fsdp),
        "gathered among copies".into(),
    );
    let tokens = (i.update_tokens() * updates) as f64 / l.dp() as f64;
    let passes = if i.recipe.model.recompute { 2 } else { 1 };
    if t > 1 {
        // What every layer gives, gathered: heads, their projection, the feed-forward network's inside and outside; in backward
        // heads and inside again, and the gradients of both products' outputs and inputs.
        let inside = |c: &Config| c.attention_width() + c.ffn;
        let forward = |c: &Config| passes * (inside(c) + 2 * c.hidden);
        let backward = |c: &Config| inside(c) + c.qkv_width() + c.up_width() + 2 * c.hidden;
        let per_token = |c: &Config| (c.layers * (forward(c) + backward(c))) as f64 * e;
        let bytes = tokens / l.sp as f64 * trained.iter().map(|c| per_token(c)).sum::<f64>();
        add(
            "activations",
            bytes * part(t),
            cluster.gather(bytes, t, 1),
            "of every layer, forward and backward".into(),
        );
    }
    if l.sp > 1 {
        // Rows for heads, forward and back; in backward also the gradients of all products' outputs.
        let outputs = |c: &Config| c.qkv_width() + c.up_width() + 2 * c.hidden;
        let heads = |c: &Config| (passes + 1) * c.qkv_width() + (passes + 2) * c.attention_width();
        let per_token = |c: &Config| (c.layers * (heads(c) + outputs(c)) / t) as f64 * e;
        let bytes = tokens / l.sp as f64 * trained.iter().map(|c| per_token(c)).sum::<f64>();
        let what = "of every layer, forward and backward";
        add("heads", bytes * part(l.sp), cluster.scatter(bytes, l.sp, t), what.into());
        // All rows of all products' inputs, and of the norms' inputs (f32) and gradients.
        let inputs = |c: &Config| (2 * c.hidden + c.attention_width() + c.ffn) as f64 * e;
        let norms = |c: &Config| 2.0 * c.hidden as f64 * (4.0 + 2.0 * e);
        let per_token = |c: &Config| c.layers as f64 * (inputs(c) + norms(c));
        let bytes = tokens * trained.iter().map(|c| per_token(c)).sum::<f64>();
        let what = "all tokens, for the gradients of weights";
        add("rows", bytes * part(l.sp), cluster.gather(bytes, l.sp, t), what.into());
    }
    if i.feed.sampled() && l.ranks > 1 {
        let bytes = TOKEN * i.sampled(false) as f64 * i.lengths.sequence;
        let slowest = if cluster.nodes > 1 { cluster.network } else { cluster.card.link };
        add(
            "rollouts",
            bytes * part(l.ranks),
            bytes / slowest / LINK_SHARE,
            "completions and rewards, to every rank".into(),
        );
    }
    out
}

impl RankPlan {
    /// Of a stage in a layout.
    pub fn new(stage: &StagePlan, l: RankLayout, cluster: &Cluster) -> Self {
        let (i, rates) = (&stage.inputs, cluster.rates(&stage.inputs));
        let (batches, _, rounds) = rounds(i, l);
        // The last round of an update may leave ranks without a micro-batch.
        let full = (rounds * l.dp()) as f64 / batches as f64;
        let each = |work: f64| work * full / l.ranks as f64;
        let groups = l.ranks / l.rollout_tp;
        let prompts = i.recipe.rollout.prompts.max(1);
        let uneven = (prompts.div_ceil(groups) * groups) as f64 / prompts as f64;
        let sample = stage.work.sample * uneven / l.ranks as f64 / rates.sampling;
        RankPlan {
            layout: l,
            parts: parts(i, l),
            exchanges: exchanges(i, l, cluster),
            train: each(stage.work.train) / rates.training,
            sample: sample + each(stage.work.annotate) / rates.training,
            idle: 1.0 - 1.0 / full,
        }
    }

    /// Bytes of a rank.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Seconds of all exchanges.
    pub fn exchanging(&self) -> f64 {
        self.exchanges.iter().map(|x| x.seconds).sum()
    }

    /// Seconds of a step in which exchanges wait for nothing and nothing waits for them.
    pub fn seconds(&self) -> f64 {
        self.train.max(self.exchanging()) + self.sample
    }

    /// Seconds of a step whose exchanges come after what is computed.
    pub fn seconds_in_turn(&self) -> f64 {
        self.train + self.exchanging() + self.sample
    }
}

/// Every layout that the model allows: first those that fit, by time, then those that do not, by memory.
pub fn layouts(stage: &StagePlan, cluster: &Cluster) -> Vec<RankPlan> {
    let (n, kv) = (cluster.ranks, stage.inputs.config.kv_heads);
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut all = Vec::new();
    for tp in divisors(n).filter(|tp| kv.is_multiple_of(*tp) && *tp <= cluster.per_node()) {
        for sp in divisors(n / tp).filter(|sp| kv.is_multiple_of(*sp * tp)) {
            for ddp in divisors(n / tp) {
                let layout = RankLayout { ranks: n, ddp, fsdp: n / tp / ddp, tp, sp, rollout_tp: tp };
                all.push(RankPlan::new(stage, layout, cluster));
            }
        }
    }
    let fits = |p: &RankPlan| p.bytes() <= cluster.card.memory;
    let key = |p: &RankPlan| if fits(p) { p.seconds() } else { p.bytes() as f64 };
    all.sort_by(|a, b| fits(b).cmp(&fits(a)).then(key(a).total_cmp(&key(b))));
    all
}

/// The layout of the recipe itself, and the fastest that fits, where one does.
pub fn choose(stage: &StagePlan, cluster: &Cluster) -> Result<(RankPlan, Option<RankPlan>)> {
    cluster.check()?;
    let own = RankPlan::new(stage, RankLayout::of(&stage.inputs.recipe, cluster.ranks)?, cluster);
    let best = layouts(stage, cluster).into_iter().next().filter(|b| b.bytes() <= cluster.card.memory);
    Ok((own, best))
}

//! A step on many cards: memory of a rank, bytes and time of every exchange, and the layout that is fastest.
//!
//! `W` weights, `e` bytes of the compute type, `f` ranks that split a copy (ZeRO-3), `t` ranks of tensor parallelism, `s` of context
//! parallelism. Masters, moments and summed gradients are split `f t` ways. Where `f > 1` and no ranks compute together, a layer is
//! gathered at a time in training, and all weights in passes without gradients. Ranks that compute together gather before an update
//! what they read in it: `1 / t` of the layers, and `1 / (t s)` of embedding and language-model head. Nodes hold ranks in order,
//! tensor-parallel groups first.

use super::cards::{Card, LINK_SHARE};
use super::memory::{self, Part, weights};
use super::{Inputs, Rates, StagePlan};
use crate::parallel::RankLayout;
use ferrl_engine::model::{Config, ParamShape};
use ferrl_engine::{Error, Result};
use ferrl_kernels::DType;
use ferrl_kernels::backend::VOCAB_TILE;

/// Bytes of a sampled token between ranks: its id, log-probability, version and mask, as text.
const TOKEN: f64 = 40.0;

/// Gradients of logits that ranks which share a vocabulary gather at a time.
const GATHERED: usize = 4 << 20;

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

/// Weights of embedding and language-model head, which ranks that compute together share by tokens of the vocabulary.
fn vocabulary(c: &Config) -> usize {
    c.params().iter().filter(|p| p.id.slot.is_vocabulary()).map(|p| p.len()).sum()
}

/// Bytes of a rank at its peak: what it always has, and the largest phase of a step.
pub fn parts(i: &Inputs, l: RankLayout) -> Vec<Part> {
    let table = Table { i, l, e: i.dtype().size() };
    let phases = match (l.tp * l.sp, l.fsdp) {
        (1, 2..) => table.split_phases(),
        _ => vec![table.whole_phase()],
    };
    let bytes = |parts: &Vec<Part>| parts.iter().map(|p| p.bytes).sum::<u64>();
    let phase = phases.into_iter().max_by_key(bytes).unwrap_or_default();
    let mut out: Vec<Part> = table.always().into_iter().chain(phase).filter(|p| p.bytes > 0).collect();
    out.extend(table.around(&out));
    out
}

/// What a rank holds, while it is listed.
struct Table<'a> {
    i: &'a Inputs,
    l: RankLayout,
    /// Bytes of the compute type.
    e: usize,
}

fn part(name: &'static str, bytes: usize, what: impl Into<String>) -> Part {
    Part { name, bytes: bytes as u64, what: what.into() }
}

impl Table<'_> {
    fn trained(&self) -> Vec<&Config> {
        std::iter::once(&self.i.config).chain(&self.i.critic).collect()
    }

    /// Over the models that are trained.
    fn sum(&self, f: impl Fn(&Config) -> usize) -> usize {
        self.trained().into_iter().map(f).sum()
    }

    /// A rank's part of what the ranks of a copy split.
    fn split(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.l.fsdp * self.l.tp)
    }

    fn over(&self) -> String {
        let shards = self.l.fsdp * self.l.tp;
        if shards > 1 { format!("f32, one of {shards} parts") } else { "f32".into() }
    }

    /// Masters, moments, averages and models that do not learn.
    fn always(&self) -> Vec<Part> {
        let (i, optim) = (self.i, &self.i.recipe.optim);
        let (all, over) = (self.sum(weights), self.over());
        let moments = self.sum(|c| memory::moment_bytes(&i.recipe, c));
        let average = if optim.ema.is_some() { 4 * all } else { 0 };
        let bytes = if self.e == 2 { i.device.frozen } else { 4 };
        let frozen = |c: &Config| bytes * weights(c) + memory::packed(c, self.e, false, i.device.weight);
        let kept = (i.needs.reference || i.needs.start) && i.teacher.is_none();
        // Split as the policy is, unless backward compares with it.
        let reference = match (kept, i.needs.full_kl || self.l.fsdp * self.l.tp == 1) {
            (false, _) => 0,
            (true, true) => frozen(&i.config),
            (true, false) => self.split(4 * weights(&i.config)),
        };
        let judges = i.judges.iter().map(|(c, _)| c);
        let others = i.teacher.iter().chain(judges).map(frozen).sum();
        let cache = if i.feed.sampled() { memory::cache(i, self.e, false) as usize } else { 0 };
        // A cache that is released shares memory with what training takes beyond sampling.
        let shared = self.activations().bytes as usize - self.sampling();
        let cache = if i.recipe.rollout.release_cache { cache.saturating_sub(shared) } else { cache };
        vec![
            part("masters", self.split(4 * all), over.clone()),
            part("moments", self.split(moments), format!("{}, {over}", optim.name)),
            part("average", self.split(average), over.clone()),
            part("reference", reference, if i.needs.full_kl { "whole".into() } else { over }),
            part("frozen", others, "teacher and reward models, whole"),
            part(
                "cache",
                cache,
                format!("keys and values, rollout.cache_mib = {}", i.recipe.rollout.cache_mib),
            ),
        ]
    }

    /// Bytes of a parameter that was gathered: what products read, and f32 where something else reads it too. On a card the first
    /// is half of the second.
    fn gathered(&self, c: &Config, p: &ParamShape, backward: bool) -> usize {
        let (multiplied, len) = (c.is_multiplied(p.id), p.len());
        let read = if !multiplied || p.id.slot.is_table() { 4 * len } else { 0 };
        match self.i.device.own_memory {
            true => read.max(self.e * len),
            false if multiplied => read + (self.i.device.weight)(p.rows, p.cols, self.e, backward),
            false => read,
        }
    }

    /// The same of a layer, or of what is outside of layers.
    fn gathered_of(&self, c: &Config, layer: Option<usize>, backward: bool) -> usize {
        let params = c.params();
        params.iter().filter(|p| p.id.layer == layer).map(|p| self.gathered(c, p, backward)).sum()
    }

    fn largest_layer(&self, c: &Config, backward: bool) -> usize {
        (0..c.layers).map(|l| self.gathered_of(c, Some(l), backward)).max().unwrap_or(0)
    }

    /// Weights split over ranks (ZeRO-3): training, and what samples or scores with all weights.
    fn split_phases(&self) -> Vec<Vec<Part>> {
        let (i, e, p) = (self.i, self.e, self.l.fsdp);
        let all = self.sum(weights);
        // One model at a time goes through its layers.
        let most = |f: &dyn Fn(&Config) -> usize| self.trained().into_iter().map(f).max().unwrap_or(0);
        let layer = most(&layer);
        // A layer's gradient is sent and received while the weights of the next one are, in the machine's memory; numbers of one
        // weight are on their way between buffer and message.
        let numbers = most(&|c| 8 * memory::largest(c)) / p;
        let sent = (8 + e) * layer + e * layer / p + most(&|c| 8 * outside(c)) + numbers;
        let flight = part(
            "in flight",
            if i.device.own_memory { 0 } else { sent },
            "a layer's weights and gradient as they are sent and received, gradients of tables",
        );
        let training = vec![
            part(
                "gathered",
                most(&|c| self.largest_layer(c, true)) + self.sum(|c| self.gathered_of(c, None, true)),
                "a layer and the tables, for products",
            ),
            part("gradients", self.split(4 * all), self.over()),
            part(
                "leaving",
                4 * layer + self.sum(|c| 4 * outside(c)),
                "f32: gradients of a layer and of the tables, until they are sent",
            ),
            flight.clone(),
            self.activations(),
        ];
        let every = |c: &Config| c.params().iter().map(|p| self.gathered(c, p, false)).sum::<usize>();
        let samples = i.feed.sampled() || i.needs.critic;
        let reference = if i.needs.reference && !i.needs.full_kl { every(&i.config) } else { 0 };
        let policy = if samples { self.sum(every) } else { 0 };
        let passes = vec![
            part("gathered", policy.max(reference), "all weights for forward, one model after the other"),
            flight,
            part("activations", self.sampling(), "rollouts, passes without gradients"),
        ];
        vec![training, passes]
    }

    /// Whole weights on every rank, or on ranks that compute together.
    fn whole_phase(&self) -> Vec<Part> {
        let (i, e, l) = (self.i, self.e, self.l);
        let own = |c: &Config| memory::packed(c, e, true, i.device.weight);
        let (all, team) = (self.sum(weights), l.tp * l.sp);
        let gradients = part("gradients", self.split(4 * all), self.over());
        if team == 1 {
            // Each rank sums a part of the gradient beside the whole one.
            let summed = if l.ranks > 1 { 4 * all.div_ceil(l.ranks) } else { 0 };
            let sent =
                if l.ranks > 1 { 8 * all.min(memory::BUCKET.max(self.sum(memory::largest))) } else { 0 };
            return vec![
                part("weights", self.sum(own), "for products"),
                part("gradients", 4 * all + summed, "f32, and the part that this rank sums"),
                part("in flight", sent, "gradients as they are sent and received"),
                self.activations(),
            ];
        }
        // Products read rows and columns of the head; the embedding is read in f32.
        let head = |c: &Config| memory::packed_vocabulary(c, e, i.device.weight);
        let read = self.sum(|c| (own(c) - head(c)) / l.tp + (head(c) + 4 * c.vocab * c.hidden) / team);
        let shared = |c: &Config| weights(c) - outside(c) + vocabulary(c);
        let leaving = self.sum(|c| 4 * (shared(c) / team + weights(c) - shared(c)));
        let what = format!("one of {} parts of the layers, of {team} of the vocabulary", l.tp);
        vec![
            part("weights", read, what),
            gradients,
            part("in flight", leaving, "the gradient of a micro-batch, until it is sent"),
            self.activations(),
        ]
    }

    fn sampling(&self) -> usize {
        let i = self.i;
        if !i.feed.sampled() {
            return memory::forward_work(&i.config, i.micro_tokens(), self.e);
        }
        memory::sampling_work(i, self.e, false) / self.l.rollout_tp
    }

    fn activations(&self) -> Part {
        let (i, e, l) = (self.i, self.e, self.l);
        let (t, recompute) = (i.micro_tokens().div_ceil(l.sp), i.recipe.model.recompute);
        // The residual stream is whole under tensor parallelism; what is inside a layer is split.
        let stream = |c: &Config| 4 * c.hidden * t * (c.layers + 1);
        let kept = |c: &Config| {
            let whole = memory::activations(c, t, e, recompute);
            stream(c) + whole.saturating_sub(stream(c)) / l.tp
        };
        // A rank computes its part of the vocabulary for all tokens, and gathers the gradients of some rows' logits.
        let team = l.tp * l.sp;
        let gathered = |c: &Config| if team > 1 && c.head.has_lm() { GATHERED * (2 * e + 4) } else { 0 };
        let heads = |c: &Config| {
            let own = Config { vocab: c.vocab.div_ceil(team), ..c.clone() };
            memory::head_work(&own, i.micro_tokens(), e, i.device) + gathered(c)
        };
        let work = |c: &Config| (memory::backward_work(c, t, e) / l.tp).max(heads(c));
        let training = self.sum(kept) + self.trained().into_iter().map(work).max().unwrap_or(0);
        let how = if recompute { ", layers recomputed" } else { "" };
        part("activations", training.max(self.sampling()), format!("{t} tokens at once{how}"))
    }

    /// What the allocator keeps, and the program. Masters and moments have sizes that never change; what comes and goes comes in
    /// classes of sizes.
    fn around(&self, parts: &[Part]) -> Vec<Part> {
        let (i, slack) = (self.i, self.i.device.slack);
        let names = ["gathered", "leaving", "activations", "cache"];
        let moving: u64 = parts.iter().filter(|p| names.contains(&p.name)).map(|p| p.bytes).sum();
        let (kept, what) = ((moving * slack / 100) as usize, format!("{slack} % of what comes and goes"));
        if i.device.own_memory {
            return vec![part("allocator", kept + i.device.fixed as usize, format!("{what}, driver"))];
        }
        let ranks = if self.l.ranks > 1 { MPI } else { 0 };
        let program = (memory::program(i) + ranks) as usize;
        vec![part("allocator", kept, what), part("program", program, "code, MPI, tokenizer, data of a step")]
    }
}

/// Memory of an MPI library and of what ranks on one machine share.
const MPI: u64 = 24 << 20;

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
    if team > 1 {
        // Embeddings; of the head three numbers a tile, gradients of logits, and columns of the hidden states' gradient.
        let head = |c: &Config| {
            let tiles = 12.0 * c.vocab.div_ceil(VOCAB_TILE) as f64 / team as f64;
            if c.head.has_lm() { tiles + (c.vocab + c.hidden) as f64 * e } else { 0.0 }
        };
        let per_token = |c: &Config| 4.0 * c.hidden as f64 / l.sp as f64 + head(c);
        let bytes = tokens * trained.iter().map(|c| per_token(c)).sum::<f64>();
        let what = "embeddings, tiles of the head, gradients of logits";
        add("vocabulary", bytes * part(team), cluster.gather(bytes, team, 1), what.into());
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

//! Memory at the peak of a step, part by part.
//!
//! `T` tokens at once, width `H`, feed-forward `F`, `e` bytes of the compute type. A trained model keeps f32 masters,
//! what its device derives of every matrix, a gradient, the optimizer's moments; a frozen one its masters and what is
//! derived for forward. A forward pass keeps for every layer the residual stream in f32 and what the linear layers
//! read, but for norms, which are recomputed in backward; with recompute only the stream, and one layer's interior at a time.

use super::Inputs;
use super::adapted::adapted;
use crate::recipe::Recipe;
use ferrl_engine::model::adapter::{AdapterOptions, BaseHome};
use ferrl_engine::model::{ModelConfig, ParamShape};
use ferrl_kernels::codes::NF4_BLOCK;
use ferrl_kernels::{DType, Footprint, counted};

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
    /// What it is made of, in a few words.
    pub what: String,
}

/// Sequences sampled at once.
const SIDE_BY_SIDE: usize = 256;
/// The program itself, and what a tokenizer takes for every token it knows.
const PROGRAM: u64 = 24 << 20;
/// Per cent more that an allocator keeps where rows of experts change from batch to batch, and with them the sizes of buffers:
/// three steps of SFT of `recipes/experts.toml` took 217 MiB, 193 without it.
const EXPERTS_SLACK: u64 = 15;
const PER_TOKEN_KNOWN: u64 = 600;
/// Unused memory that stays allocated, besides a quarter of the peak.
pub(super) const KEPT: u64 = 32 << 20;

/// Everything that is there at the peak.
pub fn parts(i: &Inputs) -> Vec<MemoryPart> {
    let mut table = MemoryTable { i, e: i.dtype().size(), parts: Vec::new() };
    table.models();
    let busy = table.step();
    table.caches(busy);
    table.around();
    table.parts
}

/// Bytes of activations: the most at any time of a step, and while it samples and rewards.
#[derive(Clone, Copy)]
struct Busy {
    step: u64,
    rollout: u64,
}

/// The table while it is filled.
struct MemoryTable<'a> {
    i: &'a Inputs,
    /// Bytes of the compute type.
    e: usize,
    parts: Vec<MemoryPart>,
}

impl MemoryTable<'_> {
    /// A line, where it takes memory.
    fn add(&mut self, name: &'static str, bytes: u64, what: String) {
        if bytes > 0 {
            self.parts.push(MemoryPart { name, bytes, what });
        }
    }

    /// Sum over the models that are trained.
    fn sum(&self, f: impl Fn(&ModelConfig) -> usize) -> u64 {
        std::iter::once(&self.i.config).chain(&self.i.critic).map(f).sum::<usize>() as u64
    }

    fn total(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Weights, gradients, the optimizer's state, and frozen models.
    fn models(&mut self) {
        let (i, e, o) = (self.i, self.e, &self.i.recipe.optim);
        let (count, all) = (self.sum(|c| i.trained(c)), self.sum(weights));
        let several = i.update_tokens() > i.recipe.train.micro_batch_tokens;
        let what = match &i.recipe.adapter {
            Some(a) => format!("the base ({}), and in {} for products", a.base, i.dtype().name()),
            None => format!("f32 masters, and in {} for products", i.dtype().name()),
        };
        self.add("weights", self.sum(|c| i.masters(c) - i.frozen_saving(c) + i.forms(c, true)), what);
        if count < all && i.recipe.adapter.is_some() {
            // A and B, and what products of backward read of them; one weight while it is merged.
            let low = self.sum(|c| (4 + e) * i.low_rank(c) + i.merge_width() * largest_inside(c));
            self.add(
                "adapter",
                low,
                format!("{} weights in f32, and room to merge", self.sum(|c| i.low_rank(c))),
            );
        }
        let apart = if several { self.sum(|c| i.often(c)) } else { 0 };
        let copies = if apart > 0 { "f32, the head once more for a micro-batch" } else { "f32" };
        let copies = if i.vectors() > 1 { "f32, and vectors of conjugate gradients" } else { copies };
        let vectors = (i.vectors() - 1) * i.trained(&i.config);
        self.add("gradients", 4 * (count + apart + vectors as u64), copies.into());
        let moments = self.sum(|c| i.moments(c));
        if !(o.offloads() && i.device.own_memory) {
            self.add("optimizer", moments, o.stored());
        }
        if o.ema.is_some() {
            self.add("average", 4 * (count + self.sum(largest)), "of the weights, f32".into());
        }
        self.frozen(count);
    }

    /// A teacher or reference, and reward models.
    fn frozen(&mut self, trained: u64) {
        let (i, parked) = (self.i, "frozen, offloaded between uses");
        let what = |offload: bool| if offload { parked } else { "frozen" };
        if let Some(teacher) = &i.teacher {
            let offload = i.recipe.teacher.offload;
            self.add("teacher", i.frozen_bytes(teacher, offload && !i.needs.full_kl), what(offload).into());
        } else if (i.needs.reference || i.needs.start) && i.recipe.adapter.is_some() && !i.needs.full_kl {
            self.add("reference", 4 * trained, "the base, and the adapter's initial values".into());
        } else if i.needs.reference || i.needs.start {
            let offload = i.recipe.reference.offload && !i.needs.full_kl;
            self.add("reference", i.frozen_bytes(&i.config, offload), what(offload).into());
        }
        let judges = i.judges.len();
        let what = format!("{}, frozen", counted(judges, "reward model"));
        let bytes = i.judges.iter().map(|(c, offload)| i.frozen_bytes(c, *offload)).sum();
        self.add("rewards", bytes, what);
    }

    /// Activations of a step, and their bytes.
    fn step(&mut self) -> Busy {
        let (i, e, t) = (self.i, self.e, self.i.micro_tokens());
        let recompute = i.recipe.model.recompute;
        let kept = self.sum(|c| activations(c, t, e, recompute));
        let trained = std::iter::once(&i.config).chain(&i.critic);
        let works = trained.map(|c| backward_work(c, t, e).max(head_work(c, t, e, i.device)));
        // The teacher's forward pass runs while the policy's activations are kept for backward.
        let against = i.teacher.as_ref().map_or(0, |c| forward_work(c, t, e) + 2 * t * c.hidden * e);
        let training = kept + works.max().unwrap_or(0).max(against) as u64;
        let sampling = if i.feed.sampled() { sampling_work(i, e, false, 1) } else { 0 };
        let scoring = i.judges.iter().map(|(c, _)| forward_work(c, t, e)).max().unwrap_or(0);
        let rollout = sampling.max(scoring) as u64;
        let step = training.max(rollout).max(i.visitor(true)).max(i.trust_work() as u64);
        let how = if recompute { ", layers recomputed" } else { "" };
        self.add("activations", step, format!("micro-batch of {}{how}", counted(t, "token")));
        Busy { step, rollout }
    }

    /// What the KV cache takes beyond the activations of a step, which it shares memory with while the policy does not train.
    fn beyond(&self, cache: u64, busy: Busy) -> u64 {
        if !self.i.recipe.rollout.release_cache {
            return cache;
        }
        let rollout = busy.rollout + cache;
        let (more, less) = (rollout.max(busy.step), rollout.min(busy.step));
        let kept = if self.i.device.own_memory { 0 } else { self.kept(less, more) };
        (more + kept - busy.step).min(cache)
    }

    /// Of memory that was freed, what an allocator of the machine's memory does not give back.
    fn kept(&self, freed: u64, peak: u64) -> u64 {
        freed.min(KEPT + (self.total() + peak) / 4)
    }

    /// The KV cache, and what an evaluation takes beyond a step.
    fn caches(&mut self, busy: Busy) {
        let step = busy.step;
        let (i, e, mib) = (self.i, self.e, self.i.recipe.rollout.cache_mib);
        let own = i.feed.sampled();
        let asked = if i.evaluates() { cache(i, e, true, 1) } else { 0 };
        if own {
            // Evaluations use it too.
            let bytes = self.beyond(cache(i, e, false, 1).max(asked), busy);
            let how = if i.recipe.rollout.release_cache { ", beyond activations" } else { "" };
            self.add("cache", bytes, format!("keys and values, rollout.cache_mib = {mib}{how}"));
        }
        let evaluation = if i.evaluates() { sampling_work(i, e, true, 1) as u64 } else { 0 };
        let evaluation = if own { evaluation } else { evaluation + asked };
        if evaluation == 0 {
            return;
        }
        let (more, less) = (step.max(evaluation), step.min(evaluation));
        // What training has freed is kept for its next step while an evaluation takes memory of other sizes.
        let kept = if i.device.own_memory { less } else { less.min(KEPT + (self.total() - step + more) / 4) };
        let what = match own {
            true => "tokens of more concurrent sequences".into(),
            false => format!("separate keys and values, rollout.cache_mib = {mib}"),
        };
        self.parts.push(MemoryPart { name: "evaluation", bytes: more + kept - step, what });
    }

    /// What the allocator keeps, and the program itself.
    fn around(&mut self) {
        let i = self.i;
        let slack = i.device.slack + if i.config.experts.is_some() { EXPERTS_SLACK } else { 0 };
        let (left, also) = match i.before.min(KEPT) {
            0 => (0, ""),
            left => (left, ", and unreleased memory of earlier stages"),
        };
        // On a card what stays takes what it needs; what comes and goes is rounded up and kept for reuse.
        let stays = |p: &&MemoryPart| {
            i.device.own_memory && !["activations", "evaluation", "cache"].contains(&p.name)
        };
        let stays: u64 = self.parts.iter().filter(stays).map(|p| p.bytes).sum();
        let what = match i.device.own_memory {
            true => format!("{slack} % of temporary buffers{also}"),
            false => format!("{slack} % of the above{also}"),
        };
        let experts = stays * (slack - i.device.slack) / 100;
        let bytes = (self.total() - stays) * slack / 100 + experts + left;
        self.parts.push(MemoryPart { name: "allocator", bytes, what });
        if i.device.own_memory {
            let what = "driver, kernels, libraries".into();
            return self.parts.push(MemoryPart { name: "context", bytes: i.device.fixed, what });
        }
        let what = "code, tokenizer, data of a step".into();
        self.parts.push(MemoryPart { name: "program", bytes: program(i), what });
    }
}

/// What the models of a stage take, wherever they lie.
impl Inputs {
    /// Weights that have a gradient: all, or an adapter's.
    pub(super) fn trained(&self, c: &ModelConfig) -> usize {
        self.adapted(c).map_or_else(|| weights(c), |(_, trained)| trained)
    }

    /// Weights of A and B.
    pub(super) fn low_rank(&self, c: &ModelConfig) -> usize {
        self.adapted(c).map_or(0, |(low, _)| low)
    }

    /// Numbers a token that an adapter's `A` gives and its backward reads.
    pub(super) fn between_adapters(&self, c: &ModelConfig) -> usize {
        self.adapter().map_or(0, |o| o.r * adapted(c, &o).modules)
    }

    /// Trained weights whose gradient a backward adds to more than once.
    fn often(&self, c: &ModelConfig) -> usize {
        if self.recipe.adapter.is_some() { 0 } else { met_often(c) }
    }

    fn adapted(&self, c: &ModelConfig) -> Option<(usize, usize)> {
        adapted(c, &self.adapter()?).counts
    }

    fn adapter(&self) -> Option<AdapterOptions> {
        self.recipe.adapter.as_ref()?.options().ok()
    }

    /// Vectors with a number for each trained weight of the policy that lie there while it goes backward: the gradient; in a trust
    /// region also the gradient that is solved for, and three of conjugate gradients.
    pub(super) fn vectors(&self) -> usize {
        if self.updates.trust_region.is_some() { 5 } else { 1 }
    }

    /// Bytes beside them where weights are moved to and fro in a trust region: the weights as they were, and a forward pass.
    pub(super) fn trust_work(&self) -> usize {
        let work = || forward_work(&self.config, self.micro_tokens(), self.dtype().size());
        self.updates.trust_region.map_or(0, |_| 4 * self.trained(&self.config) + work())
    }

    /// Bytes of the optimizer's moments; a trust region moves the policy without.
    pub(super) fn moments(&self, c: &ModelConfig) -> usize {
        let without = self.updates.trust_region.is_some() && std::ptr::eq(c, &self.config);
        if without { 0 } else { moment_bytes(&self.recipe, c) }
    }

    /// Weights under an adapter.
    pub(super) fn bases(&self, c: &ModelConfig) -> Vec<ParamShape> {
        self.adapter().map_or_else(Vec::new, |options| adapted(c, &options).weights.clone())
    }

    /// Bytes of a weight as a base or a frozen table keeps it: f32 where the compute type does not hold it.
    fn kept_width(&self) -> usize {
        if self.fits_bf16 { self.dtype().size() } else { 4 }
    }

    /// Bytes of a weight under an adapter on its way between ranks: as it is kept, or in f32 where it is decoded from NF4.
    pub(super) fn base_width(&self) -> usize {
        let home = self.adapter().map(|options| options.base);
        if home == Some(BaseHome::Nf4) { 4 } else { self.kept_width() }
    }

    /// Bytes per weight of what a merge and the metric `adapter/arrived` work on: a merge on f32 copies, where the device has no kernel
    /// for it; the metric in bf16 on two of f32 and one of bf16, and on what NF4 is decoded to.
    fn merge_width(&self) -> usize {
        let decoded = self.adapter().is_some_and(|o| o.base == BaseHome::Nf4);
        match self.device.own_memory {
            true if self.dtype() == DType::F32 => 4 * usize::from(decoded),
            true => 10 + 8 * usize::from(decoded),
            false => 8,
        }
    }

    /// Bytes less that weights which are neither adapted nor trained beside an adapter take on a card where bf16 holds them.
    pub(super) fn frozen_saving(&self, c: &ModelConfig) -> usize {
        let (Some(options), 2, 2) = (self.adapter(), self.kept_width(), self.device.frozen) else {
            return 0;
        };
        let read = |p: &ParamShape| c.is_multiplied(p.id) || p.id.slot.is_table();
        adapted(c, &options)
            .frozen
            .iter()
            .filter(|p| read(p) && !p.id.slot.is_f32())
            .map(|p| 2 * p.len())
            .sum()
    }

    /// Bytes of the masters of a model that is trained: f32, but for the base of an adapter, which has a home of its own.
    pub(super) fn masters(&self, c: &ModelConfig) -> usize {
        let base: usize = self.bases(c).iter().map(|p| p.len()).sum();
        let homed =
            self.adapter().map_or(0, |o| base_bytes(&o, self.kept_width(), base, self.device.own_memory));
        4 * (weights(c) - base) + homed
    }

    /// Bytes of what products read of a model. On a card that is half of a plain parameter's master, and memory of its own under an
    /// adapter.
    pub(super) fn forms(&self, c: &ModelConfig, backward: bool) -> usize {
        let (e, form) = (self.dtype().size(), self.device.weight);
        let apart = |p: &ParamShape| if form(p.rows, p.cols, e, true) == 0 { e * p.len() } else { 0 };
        packed(c, e, backward, form) + self.bases(c).iter().map(apart).sum::<usize>()
    }

    /// Bytes of a frozen model where training needs the most: beside a card nothing is left of one that is offloaded; in the machine's
    /// memory its weights are.
    pub(super) fn frozen_bytes(&self, c: &ModelConfig, offload: bool) -> u64 {
        match offload {
            true if self.device.own_memory => 0,
            true => 4 * weights(c) as u64,
            false => self.resident(c),
        }
    }

    /// Bytes of a frozen model on its device.
    pub(super) fn resident(&self, c: &ModelConfig) -> u64 {
        let (device, e) = (self.device, self.dtype().size());
        let bytes = if e == 2 { device.frozen } else { 4 };
        (bytes * weights(c) + packed(c, e, false, device.weight)) as u64
    }

    /// The most that an offloaded model and its forward pass take while they are on the device.
    /// `whole` where a reference is not split over ranks.
    pub(super) fn visitor(&self, whole: bool) -> u64 {
        let (i, e, t) = (self, self.dtype().size(), self.micro_tokens());
        let reference =
            (i.needs.reference || i.needs.start) && i.recipe.adapter.is_none() && !i.needs.full_kl;
        let own =
            (whole && reference && i.recipe.reference.offload && i.teacher.is_none()).then_some(&i.config);
        let judges = i.judges.iter().filter(|(_, offload)| *offload).map(|(c, _)| c);
        let visit = |c: &ModelConfig| self.resident(c) + forward_work(c, t, e) as u64;
        own.into_iter().chain(judges).map(visit).max().unwrap_or(0)
    }
}

/// Bytes of the program, its tokenizer and the data of a step.
pub(super) fn program(i: &Inputs) -> u64 {
    let rows = i.update_tokens() as u64 * i.updates.minibatches as u64 * 64;
    PROGRAM + i.config.vocab as u64 * PER_TOKEN_KNOWN + rows
}

/// Weights that ranks exchange at once.
pub(super) const BUCKET: usize = 4 << 20;

/// Bytes of the optimizer's moments of a model: an adapter's are all f32.
pub fn moment_bytes(recipe: &Recipe, c: &ModelConfig) -> usize {
    let adapter = recipe.adapter.as_ref().and_then(|a| a.options().ok());
    match adapter.and_then(|options| adapted(c, &options).counts) {
        Some((_, trained)) => 4 * trained * recipe.optim.moments(),
        None => c.params().iter().map(|p| recipe.optim.moment_bytes(p)).sum(),
    }
}

/// Device memory of `count` adapted weights of `e` bytes; none where they are in host memory.
fn base_bytes(options: &AdapterOptions, e: usize, count: usize, own_memory: bool) -> usize {
    match options.base {
        BaseHome::Host if own_memory => 0,
        BaseHome::Device | BaseHome::Host => e * count,
        BaseHome::Nf4 => count / 2 + count / NF4_BLOCK * 4,
    }
}

/// Bytes of the machine's memory beside a card's: what was moved out of it.
pub fn host_bytes(i: &Inputs) -> u64 {
    if !i.device.own_memory {
        return 0;
    }
    let models = || std::iter::once(&i.config).chain(&i.critic);
    let moments: usize = match i.recipe.optim.offloads() {
        true => models().map(|c| i.moments(c)).sum(),
        false => 0,
    };
    let options = i.recipe.adapter.as_ref().and_then(|a| a.options().ok());
    let base: usize = match options.filter(|o| o.base == BaseHome::Host) {
        Some(o) => models()
            .map(|c| adapted(c, &o).weights.iter().map(|p| i.kept_width() * p.len()).sum::<usize>())
            .sum(),
        None => 0,
    };
    (moments + base) as u64
}

pub fn weights(c: &ModelConfig) -> usize {
    c.params().iter().map(|p| p.len()).sum()
}

/// The largest weight of a layer.
pub(super) fn largest_inside(c: &ModelConfig) -> usize {
    c.params().iter().filter(|p| p.id.layer.is_some()).map(|p| p.len()).max().unwrap_or(0)
}

pub(super) fn largest(c: &ModelConfig) -> usize {
    c.params().iter().map(|p| p.len()).max().unwrap_or(0)
}

/// Bytes of what linear layers read, where a device takes `form` bytes for a matrix.
pub(super) fn packed(
    c: &ModelConfig,
    e: usize,
    trained: bool,
    form: fn(usize, usize, usize, bool) -> usize,
) -> usize {
    let params = c.params().into_iter().filter(|p| c.is_multiplied(p.id));
    params.map(|p| form(p.rows, p.cols, e, trained)).sum()
}

/// Those of the language-model head, where there is one.
pub(super) fn packed_vocabulary(
    c: &ModelConfig,
    e: usize,
    backward: bool,
    form: fn(usize, usize, usize, bool) -> usize,
) -> usize {
    let params = c.params().into_iter().filter(|p| c.is_multiplied(p.id) && p.id.slot.is_vocabulary());
    params.map(|p| form(p.rows, p.cols, e, backward)).sum()
}

/// Bytes a forward pass of `t` tokens keeps for backward.
pub fn activations(c: &ModelConfig, t: usize, e: usize, recompute: bool) -> usize {
    let (h, stream) = (c.hidden, 4 * c.hidden);
    let inside: usize = if recompute { interior(c, e) } else { (0..c.layers).map(|l| inside(c, e, l)).sum() };
    let layers = c.layers * stream + inside;
    // After the last layer: the stream, its norm, and the rows whose tokens are scored.
    t * (layers + stream + 2 * h * e + 12)
}

/// Bytes per token of what the largest layer computes and backward reads.
fn interior(c: &ModelConfig, e: usize) -> usize {
    (0..c.layers).map(|l| inside(c, e, l)).max().unwrap_or(0)
}

/// Those of one layer.
fn inside(c: &ModelConfig, e: usize, layer: usize) -> usize {
    let qkv = c.qkv_width() * if c.qk_norm.is_some() { 2 } else { 1 };
    let post = if c.post_norms { 2 * c.hidden } else { 0 };
    let network = match c.experts_of(layer) {
        Some(experts) => experts.per_token * (c.expert_up_width(experts) + c.hidden),
        None => c.up_width(),
    };
    e * (c.hidden + qkv + c.attention_width() + network + post) + 4 * c.heads
}

/// Elements per token between the projections of the widest network; experts are computed one after the other, and what
/// they give is kept until all have.
fn between(c: &ModelConfig) -> usize {
    let of = |l: usize| c.experts_of(l).map_or(c.ffn, |e| e.width + e.per_token * c.hidden);
    (0..c.layers).map(of).max().unwrap_or(0)
}

/// Weights whose gradient a backward adds to more than once: those of the language-model head.
fn met_often(c: &ModelConfig) -> usize {
    let is_head = |p: &&ParamShape| c.is_multiplied(p.id) && p.id.slot.is_vocabulary();
    c.params().iter().filter(is_head).map(|p| p.len()).sum()
}

/// Bytes of gradients alive while one layer goes backward, with the packed rows of a weight's gradient.
pub(super) fn backward_work(c: &ModelConfig, t: usize, e: usize) -> usize {
    let mlp = between(c) + 2 * c.hidden;
    let attention = c.attention_width() + c.qkv_width() + 2 * c.hidden;
    t * (e * (mlp.max(attention) + between(c)) + 4 * c.hidden + e * c.hidden)
}

/// Bytes that the head takes while it scores rows and goes backward.
pub(super) fn head_work(c: &ModelConfig, t: usize, e: usize, device: &Footprint) -> usize {
    if !c.head.has_lm() {
        return 2 * t * c.hidden * e;
    }
    (device.head)(t, c.hidden, c.vocab, e)
}

/// Bytes alive while one layer goes forward and nothing is kept.
pub(super) fn forward_work(c: &ModelConfig, rows: usize, e: usize) -> usize {
    rows * (interior(c, e) + e * (between(c) + 2 * c.hidden) + 8 * c.hidden)
}

/// Bytes alive while prompts are read or tokens sampled: one layer, and logits of the sequences.
/// `groups` share the prompts.
pub(super) fn sampling_work(i: &Inputs, e: usize, evaluated: bool, groups: usize) -> usize {
    let sequences = i.sampled(evaluated).div_ceil(groups).min(SIDE_BY_SIDE);
    // The completions of a prompt share its keys and values.
    let prompts = if evaluated { i.recipe.eval.prompts } else { i.recipe.rollout.prompts };
    let prompts = prompts.div_ceil(groups).min(sequences);
    let rows = i.device.busy_tokens.min((prompts as f64 * i.lengths.prompt).ceil() as usize + sequences);
    forward_work(&i.config, rows, e) + 4 * sequences * i.config.vocab
}

/// Bytes of keys and values: all the recipe allows; in the machine's memory, what one of `ranks` writes in the whole run where that
/// is less.
pub(super) fn cache(i: &Inputs, e: usize, evaluated: bool, ranks: usize) -> u64 {
    let c = &i.config;
    let per_token = 2 * c.layers * c.kv_heads * c.head_dim * e;
    let longest = i.lengths.prompt + i.recipe.rollout.max_new_tokens as f64;
    let length = if i.feed.sampled() { i.lengths.sequence } else { longest };
    let times = if evaluated { 2.0 } else { i.recipe.train.steps.unwrap_or(u64::MAX) as f64 };
    let run = i.sampled(evaluated) as f64 * length * per_token as f64 * times / ranks as f64;
    let allowed = (i.recipe.rollout.cache_mib as u64) << 20;
    if i.device.own_memory { allowed } else { allowed.min(run as u64) }
}

/// Whether halving the compute type would help.
pub(super) fn is_f32(i: &Inputs) -> bool {
    i.dtype() == DType::F32
}

//! Memory of a rank, part by part: what it always has, and the largest phase of a step.
//!
//! `f` ranks split a copy of the weights (ZeRO-3), `t` share features, `s` share tokens. Masters, moments and summed gradients are
//! split `f t` ways; of an adapter's models the base is too, and gradients and moments are those of the adapter. Where `f > 1` and
//! no ranks compute together, a layer is gathered at a time in training, and all weights in passes without gradients. Ranks that
//! compute together gather before an update what they read in it: `1 / t` of the layers, and `1 / (t s)` of embedding and
//! language-model head.

use super::Inputs;
use super::exchange::rounds;
use super::memory::{self, MemoryPart, weights};
use crate::parallel::RankLayout;
use ferrl_engine::model::{ModelConfig, ParamShape};

/// Gradients of logits that ranks which share a vocabulary gather at a time.
const GATHERED: usize = 4 << 20;

/// Weights of the largest layer.
fn layer(c: &ModelConfig) -> usize {
    let of = |l: usize| c.params().iter().filter(|p| p.id.layer == Some(l)).map(|p| p.len()).sum::<usize>();
    (0..c.layers).map(of).max().unwrap_or(0)
}

/// Weights outside layers: tables, head, the last norm.
fn outside(c: &ModelConfig) -> usize {
    c.params().iter().filter(|p| p.id.layer.is_none()).map(|p| p.len()).sum()
}

/// Weights of embedding and language-model head, which ranks that compute together share by tokens of the vocabulary.
fn vocabulary(c: &ModelConfig) -> usize {
    c.params().iter().filter(|p| p.id.slot.is_vocabulary()).map(|p| p.len()).sum()
}

/// Bytes of a rank at its peak: what it always has, and the largest phase of a step.
pub fn parts(i: &Inputs, l: RankLayout) -> Vec<MemoryPart> {
    let table = RankTable { i, l, e: i.dtype().size(), buffers: false };
    let mut out = table.peak();
    out.extend(table.around(&out));
    out
}

/// Bytes of a rank's buffers when they are most, but for keys and values: what [`parts`] has without messages, the program and what
/// an allocator keeps.
pub fn buffers(i: &Inputs, l: RankLayout) -> u64 {
    let all = RankTable { i, l, e: i.dtype().size(), buffers: true }.peak();
    all.iter().filter(|p| p.name != "cache").map(|p| p.bytes).sum()
}

/// Forward and backward of a micro-batch: its tokens, and how many vectors of the size of the weights exist meanwhile (the gradient, and
/// those of a trust region).
#[derive(Clone, Copy)]
pub(super) struct TrainingPass {
    pub(super) tokens: usize,
    pub(super) vectors: usize,
}

/// What a rank holds, while it is listed.
pub(super) struct RankTable<'a> {
    pub(super) i: &'a Inputs,
    pub(super) l: RankLayout,
    /// Bytes of the compute type.
    pub(super) e: usize,
    /// Whether buffers alone are counted, and not what a process takes.
    buffers: bool,
}

pub(super) fn part(name: &'static str, bytes: usize, what: impl Into<String>) -> MemoryPart {
    MemoryPart { name, bytes: bytes as u64, what: what.into() }
}

impl RankTable<'_> {
    /// What it always has, and the largest phase.
    fn peak(&self) -> Vec<MemoryPart> {
        let phases = match (self.l.tp * self.l.sp, self.l.fsdp) {
            (1, 2..) => self.split_phases(),
            _ => self.whole_phases(),
        };
        let counts = |p: &MemoryPart| p.bytes > 0 && !(self.buffers && p.name == "in flight");
        let bytes =
            |parts: &Vec<MemoryPart>| parts.iter().filter(|p| counts(p)).map(|p| p.bytes).sum::<u64>();
        let phase = phases.into_iter().max_by_key(bytes).unwrap_or_default();
        self.always().into_iter().chain(phase).filter(counts).collect()
    }

    fn trained(&self) -> Vec<&ModelConfig> {
        std::iter::once(&self.i.config).chain(&self.i.critic).collect()
    }

    /// Over the models that are trained.
    fn sum(&self, f: impl Fn(&ModelConfig) -> usize) -> usize {
        self.trained().into_iter().map(f).sum()
    }

    /// A rank's part of what the ranks of a copy split.
    pub(super) fn split(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.l.fsdp * self.l.tp)
    }

    pub(super) fn over(&self) -> String {
        let shards = self.l.fsdp * self.l.tp;
        if shards > 1 { format!("f32, one of {shards} parts") } else { "f32".into() }
    }

    /// Masters, moments, averages, adapters and models that do not learn.
    fn always(&self) -> Vec<MemoryPart> {
        let (i, optim) = (self.i, &self.i.recipe.optim);
        let (trained, over) = (self.sum(|c| i.trained(c)), self.over());
        let low = self.sum(|c| i.low_rank(c));
        // A part of a weight is f32.
        let frozen = if self.l.fsdp * self.l.tp == 1 { self.sum(|c| i.frozen_saving(c)) } else { 0 };
        let masters = self.sum(|c| i.masters(c)) - frozen + 4 * low;
        // What backward multiplies with is whole; one weight at a time is merged: as it came, on the device, and with the adapter.
        // Whole weights are merged after an update, when there are no activations.
        let merging = if self.l.splits() { 12 * self.sum(memory::largest_inside) } else { 0 };
        let adapter = if low > 0 { self.e * low + merging } else { 0 };
        let moments = self.sum(|c| i.moments(c));
        let moments = if optim.offloads() && i.device.own_memory { 0 } else { moments };
        let average = if optim.ema.is_some() { 4 * trained } else { 0 };
        let base = match &i.recipe.adapter {
            Some(a) => format!("the base ({}) and the adapter, {over}", a.base),
            None => over.clone(),
        };
        vec![
            part("masters", self.split(masters), base),
            part("adapter", adapter, format!("{low} weights for backward, and room to merge")),
            part("moments", self.split(moments), format!("{}, {over}", optim.name)),
            part("average", self.split(average), over),
            self.reference(trained),
            part("frozen", self.others(), "teacher and reward models, whole"),
        ]
    }

    /// Split as the policy is, unless backward compares with it.
    fn reference(&self, trained: usize) -> MemoryPart {
        let i = self.i;
        if !(i.needs.reference || i.needs.start) || i.teacher.is_some() {
            return part("reference", 0, "");
        }
        if i.recipe.adapter.is_some() && !i.needs.full_kl {
            return part("reference", self.split(4 * trained), "the base, and the adapter's initial values");
        }
        if self.l.splits() && !i.needs.full_kl {
            return part("reference", self.split(4 * weights(&i.config)), self.over());
        }
        let offload = i.recipe.reference.offload && !i.needs.full_kl;
        part("reference", i.frozen_bytes(&i.config, offload) as usize, "whole")
    }

    fn others(&self) -> usize {
        let i = self.i;
        let teacher = i.teacher.iter().map(|c| (c, i.recipe.teacher.offload && !i.needs.full_kl));
        let judges = i.judges.iter().map(|(c, offload)| (c, *offload));
        teacher.chain(judges).map(|(c, offload)| i.frozen_bytes(c, offload)).sum::<u64>() as usize
    }

    /// Keys and values of a rank's sequences, in rollouts or evaluations.
    fn cache(&self, evaluated: bool) -> MemoryPart {
        let i = self.i;
        let bytes = memory::cache(i, self.e, evaluated, self.l.ranks) as usize;
        part("cache", bytes, format!("keys and values, rollout.cache_mib = {}", i.recipe.rollout.cache_mib))
    }

    /// The cache of rollouts while the policy trains.
    pub(super) fn idle_cache(&self) -> Option<MemoryPart> {
        let i = self.i;
        (i.feed.sampled() && !i.recipe.rollout.release_cache).then(|| self.cache(i.evaluates()))
    }

    /// What a rank takes while it samples, and while it evaluates, beside `weights`.
    fn sampling_phases(&self, weights: &[MemoryPart]) -> Vec<Vec<MemoryPart>> {
        let i = self.i;
        let phase = |evaluated: bool| {
            let bytes = memory::sampling_work(i, self.e, evaluated, self.l.ranks / self.l.rollout_tp);
            let what = if evaluated { "evaluations" } else { "rollouts" };
            let own = [self.cache(evaluated), part("activations", bytes / self.l.rollout_tp, what)];
            weights.iter().cloned().chain(own).collect()
        };
        let kinds = [(false, i.feed.sampled()), (true, i.evaluates())];
        kinds.into_iter().filter(|(_, there)| *there).map(|(evaluated, _)| phase(evaluated)).collect()
    }

    /// Bytes of a parameter that was gathered: what products read, and f32 where something else reads it too. On a card the first
    /// is half of the second.
    fn gathered(&self, c: &ModelConfig, p: &ParamShape, backward: bool) -> usize {
        let (multiplied, len) = (c.is_multiplied(p.id), p.len());
        let read = if !multiplied || p.id.slot.is_table() { 4 * len } else { 0 };
        match self.i.device.own_memory {
            true => read.max(self.e * len),
            false if multiplied => read + (self.i.device.weight)(p.rows, p.cols, self.e, backward),
            false => read,
        }
    }

    /// The same of a layer, or of what is outside of layers.
    fn gathered_of(&self, c: &ModelConfig, layer: Option<usize>, backward: bool) -> usize {
        let params = c.params();
        params.iter().filter(|p| p.id.layer == layer).map(|p| self.gathered(c, p, backward)).sum()
    }

    fn largest_layer(&self, c: &ModelConfig, backward: bool) -> usize {
        (0..c.layers).map(|l| self.gathered_of(c, Some(l), backward)).max().unwrap_or(0)
    }

    /// Trained weights of a layer, and outside of layers.
    fn leaving(&self, c: &ModelConfig) -> (usize, usize) {
        let i = self.i;
        match i.recipe.adapter.is_some() {
            true => (i.low_rank(c).div_ceil(c.layers.max(1)), i.trained(c) - i.low_rank(c)),
            false => (layer(c), outside(c)),
        }
    }

    /// Weights split over ranks (ZeRO-3): training, and what samples or scores with all weights.
    fn split_phases(&self) -> Vec<Vec<MemoryPart>> {
        let (i, e) = (self.i, self.e);
        let (sent, read) = self.messages();
        // Under an adapter both forms are made at once.
        let both = i.recipe.adapter.is_some();
        let every = |c: &ModelConfig| c.params().iter().map(|p| self.gathered(c, p, both)).sum::<usize>();
        let policy = part("gathered", self.sum(every), "all weights for forward");
        let mut all = self.sampling_phases(&[policy.clone(), read.clone()]);
        let reference = if i.needs.reference && !i.needs.full_kl { every(&i.config) } else { 0 };
        let scores = if i.needs.critic { policy.bytes as usize } else { 0 };
        let work = memory::forward_work(&i.config, i.micro_tokens(), e);
        let mut passes = vec![
            part("gathered", reference.max(scores), "all weights for forward, one model after the other"),
            read,
            part("activations", work, "passes without gradients"),
        ];
        passes.extend(self.idle_cache());
        let moved = part("gathered", every(&i.config), "all weights of the policy for forward");
        all.extend(self.trust_phases(&moved, &passes[1], |pass| self.split_training(pass, sent.clone())));
        all.extend([self.split_training(self.pass(), sent.clone()), passes]);
        all
    }

    /// One model at a time goes through its layers.
    fn most(&self, f: impl Fn(&ModelConfig) -> usize) -> usize {
        self.trained().into_iter().map(f).max().unwrap_or(0)
    }

    /// Messages in the machine's memory, while layers are trained and while all weights are gathered to read.
    fn messages(&self) -> (MemoryPart, MemoryPart) {
        let (i, p) = (self.i, self.l.fsdp);
        let bytes = if i.recipe.adapter.is_some() { i.base_width() } else { self.e };
        let (layer, trained) = (self.most(layer), self.most(|c| self.leaving(c).0));
        // A layer's gradient is sent and received while the weights of the next one are; numbers of one weight are on their way
        // between buffer and message.
        let numbers = self.most(|c| 8 * memory::largest(c)) / p;
        let tables = self.most(|c| 8 * self.leaving(c).1);
        let sent = 8 * trained + bytes * layer + bytes * layer / p + tables + numbers;
        // To read them all, some are gathered at a time, in messages of other lengths.
        let some = self.most(|c| weights(c).min(memory::BUCKET + memory::largest(c)));
        let read = sent.max(bytes * some + bytes * some / p + numbers);
        let there = |bytes: usize| if i.device.own_memory { 0 } else { bytes };
        let what = "a layer's weights and gradient as they are sent and received, gradients of tables";
        let sent = part("in flight", there(sent), what);
        (sent, part("in flight", there(read), "weights as they are sent and received"))
    }

    fn split_training(&self, pass: TrainingPass, flight: MemoryPart) -> Vec<MemoryPart> {
        let mut training = vec![
            part(
                "gathered",
                self.most(|c| self.largest_layer(c, true)) + self.sum(|c| self.gathered_of(c, None, true)),
                "a layer and the tables, for products",
            ),
            part(
                "leaving",
                4 * self.most(|c| self.leaving(c).0) + self.sum(|c| 4 * self.leaving(c).1),
                "f32: gradients of a layer and of the tables, until they are sent",
            ),
            self.activations(pass.tokens),
        ];
        training.extend(self.idle_cache());
        let others = self.always().iter().chain(&training).map(|p| p.bytes as usize).sum();
        training.extend([self.summed(pass, others), flight]);
        training
    }

    /// Forward and backward of micro-batches.
    fn pass(&self) -> TrainingPass {
        TrainingPass { tokens: self.i.micro_tokens(), vectors: 1 }
    }

    /// Numbers of gradients, and of the vectors that lie beside the policy's.
    pub(super) fn numbers(&self, vectors: usize) -> usize {
        self.sum(|c| self.i.trained(c)) + (vectors - 1) * self.i.trained(&self.i.config)
    }

    /// The gradient of this rank's part, summed, beside `others` bytes. In an update of one round it grows while activations are given
    /// back, which the machine's allocator keeps up to its limit: only what is given back beyond it makes room.
    fn summed(&self, pass: TrainingPass, others: usize) -> MemoryPart {
        let (i, (_, _, rounds)) = (self.i, rounds(self.i, self.l));
        let bytes = self.split(4 * self.numbers(pass.vectors));
        if rounds > 1 || pass.vectors > 1 || i.device.own_memory {
            return part("gradients", bytes, self.over());
        }
        if self.buffers {
            return part("gradients", 0, "");
        }
        let kept = self.kept(pass.tokens);
        let unused = (kept * i.device.slack as usize) / 100;
        let limit = (others / 4 + memory::KEPT as usize).saturating_sub(unused);
        let grown = (limit as f64 / kept.max(1) as f64).min(1.0);
        part("gradients", (bytes as f64 * grown) as usize, format!("{}, as activations go", self.over()))
    }

    /// Whole weights on every rank, or on ranks that compute together.
    fn whole_phases(&self) -> Vec<Vec<MemoryPart>> {
        let (i, l) = (self.i, self.l);
        let all = self.sum(|c| i.trained(c));
        let bucket = all.min(memory::BUCKET + self.sum(memory::largest));
        if l.tp * l.sp > 1 {
            return self.group_phases(all, bucket);
        }
        // Each rank sums a part of the gradient beside the whole one.
        let summed = if l.ranks > 1 { 4 * all.div_ceil(l.ranks) } else { 0 };
        let sent = if l.ranks > 1 { 8 * bucket } else { 0 };
        let weights = part("weights", self.sum(|c| i.forms(c, true)), "for products");
        let own = |vectors: usize, more: usize| {
            let what = if more > 0 { "f32, and the part that this rank sums" } else { "f32" };
            part("gradients", 4 * self.numbers(vectors) + more, what)
        };
        let flight = part("in flight", sent, "gradients as they are sent and received");
        let training = |pass: TrainingPass| {
            self.computing(pass, [weights.clone(), own(pass.vectors, summed), flight.clone()])
        };
        let sampling = self.sampling_phases(&[weights.clone(), own(1, 0)]);
        let trust = self.trust_phases(&weights, &flight, training);
        sampling.into_iter().chain(trust).chain([training(self.pass())]).collect()
    }

    /// Beside what is held, activations and the cache of rollouts.
    fn computing<const N: usize>(&self, pass: TrainingPass, held: [MemoryPart; N]) -> Vec<MemoryPart> {
        held.into_iter().chain([self.activations(pass.tokens)]).chain(self.idle_cache()).collect()
    }

    /// Ranks that compute together, of `all` trained weights, `bucket` of which are exchanged at a time.
    fn group_phases(&self, all: usize, bucket: usize) -> Vec<Vec<MemoryPart>> {
        let (i, l, team) = (self.i, self.l, self.l.tp * self.l.sp);
        let leaving = match i.recipe.adapter.is_some() {
            true => 4 * all,
            false => {
                let shared = |c: &ModelConfig| weights(c) - outside(c) + vocabulary(c);
                self.sum(|c| 4 * (shared(c) / team + weights(c) - shared(c)))
            }
        };
        let what = format!("one of {} parts of the layers, of {team} of the vocabulary", l.tp);
        let weights = part("weights", self.shared_forms(l.tp, team, true), what);
        let flight = self.group_messages(bucket);
        let summed = |vectors: usize| part("gradients", self.split(4 * self.numbers(vectors)), self.over());
        let training = |pass: TrainingPass| {
            let leaving = part("leaving", leaving, "the gradient of a micro-batch, until it is sent");
            self.computing(pass, [weights.clone(), summed(pass.vectors), leaving, flight.clone()])
        };
        // When a micro-batch's gradient has come, its pieces are assembled beside the sum, a bucket at a time.
        let what = "the gradient of a micro-batch, and a bucket of it as it is summed";
        let assembled = part("leaving", leaving + self.split(4 * bucket), what);
        let summing = [weights.clone(), summed(i.vectors()), assembled, flight.clone()];
        let summing = summing.into_iter().chain(self.idle_cache()).collect();
        let read = self.shared_forms(l.rollout_tp, l.rollout_tp, l.rollout_tp == l.tp && l.sp == 1);
        let sampling = self.sampling_phases(&[part("weights", read, "as rollouts read them")]);
        let trust = self.trust_phases(&weights, &flight, training);
        sampling.into_iter().chain(trust).chain([training(self.pass()), summing]).collect()
    }

    /// Messages of ranks that compute together.
    fn group_messages(&self, bucket: usize) -> MemoryPart {
        let (i, l, team) = (self.i, self.l, self.l.tp * self.l.sp);
        // Gradients travel in buckets: what is sent to every owner, what arrives of every micro-batch, and one assembled bucket.
        let copies = l.ranks / (l.fsdp * l.tp);
        let gradients = self.split(4 * bucket * (l.dp() + 1)) + 4 * bucket * copies / team;
        // Weights do before an update, from all that own them to all. Beside an exchange the messages of another one lie unused.
        let some = self.sum(weights).min(memory::BUCKET + self.sum(memory::largest));
        let width = if i.recipe.adapter.is_some() { i.base_width() } else { 4 };
        let gathered = width * some + self.split(width * some);
        let there = |bytes: usize| if i.device.own_memory { 0 } else { bytes };
        let messages = gradients.max(there(gathered)) + there(width * some);
        part("in flight", messages, "gradients and weights as they are sent and received")
    }

    /// Bytes of what products read where `tp` ranks share features and `team` the vocabulary; the embedding is read in f32.
    fn shared_forms(&self, tp: usize, team: usize, backward: bool) -> usize {
        let (i, e) = (self.i, self.e);
        if i.device.own_memory {
            // No master has them: rows, and columns beside them where features are shared.
            let form = |n: usize, k: usize, size: usize, both: bool| n * k * size * (1 + usize::from(both));
            let head = |c: &ModelConfig, backward: bool| memory::packed_vocabulary(c, e, backward, form);
            let layers = |c: &ModelConfig| {
                let both = backward && tp > 1;
                memory::packed(c, e, both, form) - head(c, both)
            };
            return self.sum(|c| layers(c) / tp + (head(c, backward) + 4 * c.vocab * c.hidden) / team);
        }
        let head = |c: &ModelConfig| memory::packed_vocabulary(c, e, backward, i.device.weight);
        self.sum(|c| (i.forms(c, backward) - head(c)) / tp + (head(c) + 4 * c.vocab * c.hidden) / team)
    }

    /// Bytes that forward leaves for backward.
    fn kept(&self, tokens: usize) -> usize {
        let (i, e, l) = (self.i, self.e, self.l);
        let (t, recompute) = (tokens.div_ceil(l.sp), i.recipe.model.recompute);
        // The residual stream is whole under tensor parallelism; what is inside a layer is split.
        let stream = |c: &ModelConfig| 4 * c.hidden * t * (c.layers + 1);
        self.sum(|c| {
            let whole = memory::activations(c, t, e, recompute);
            stream(c) + whole.saturating_sub(stream(c)) / l.tp + e * t * i.between_adapters(c)
        })
    }

    /// Activations of forward and backward of `tokens` tokens.
    fn activations(&self, tokens: usize) -> MemoryPart {
        let (i, e, l) = (self.i, self.e, self.l);
        let (t, recompute) = (tokens.div_ceil(l.sp), i.recipe.model.recompute);
        // A rank computes its part of the vocabulary for all tokens, and gathers the gradients of some rows' logits.
        let team = l.tp * l.sp;
        let gathered = |c: &ModelConfig| match team > 1 && c.head.has_lm() {
            true => GATHERED.min(tokens * c.vocab) * (2 * e + 4),
            false => 0,
        };
        let heads = |c: &ModelConfig| {
            let own = ModelConfig { vocab: c.vocab.div_ceil(team), ..c.clone() };
            memory::head_work(&own, tokens, e, i.device) + gathered(c)
        };
        let work = |c: &ModelConfig| (self.backward_work(c, t) + self.all_rows(c, tokens)).max(heads(c));
        let work = self.trained().into_iter().map(work).max().unwrap_or(0);
        // The teacher's forward pass runs while the policy's activations are kept for backward.
        let against = i.teacher.as_ref().map_or(0, |c| memory::forward_work(c, t, e) + 2 * t * c.hidden * e);
        let scoring = i.judges.iter().map(|(c, _)| memory::forward_work(c, t, e)).max().unwrap_or(0);
        let visitor = i.visitor(!l.splits()) as usize;
        let bytes = (self.kept(tokens) + work.max(against)).max(scoring).max(visitor);
        let how = if recompute { ", layers recomputed" } else { "" };
        part("activations", bytes, format!("micro-batch of {t} tokens{how}"))
    }

    /// Temporary bytes of one layer's backward on a rank that has `tokens` tokens. Ranks that share features gather the gradient of the widest
    /// product's output. Those of a group compute an adapter's gradients from all features of all tokens.
    fn backward_work(&self, c: &ModelConfig, tokens: usize) -> usize {
        let (e, l, adapted) = (self.e, self.l, self.i.recipe.adapter.is_some());
        let own = memory::backward_work(c, tokens, e) / l.tp;
        match (adapted, l.tp * l.sp) {
            (true, 2..) => {
                // Where features and tokens are shared, all features come first, then all tokens.
                let first = if l.tp > 1 && l.sp > 1 { c.up_width() } else { 0 };
                let inputs = if l.sp > 1 { c.hidden } else { 0 };
                own + e * tokens * (first + l.sp * (c.up_width() + 2 * c.ffn + inputs))
            }
            // A part that has arrived is unpacked beside the whole.
            (false, _) if l.tp > 1 => own + e * tokens * (c.up_width() + c.up_width() / l.tp),
            _ => own,
        }
    }

    /// Bytes of what ranks that share tokens have of all of them at once: the input of the widest product and some features of its
    /// output's gradient; inputs, gradients and their sum around a norm; operands of attention whose query rows they share.
    fn all_rows(&self, c: &ModelConfig, tokens: usize) -> usize {
        let (e, l) = (self.e, self.l);
        if l.sp == 1 {
            return 0;
        }
        let product = e * (c.ffn + c.hidden.max(c.up_width()) / l.sp) / l.tp;
        let norm = c.hidden * (8 + 2 * e);
        let attention = if c.shares_heads(l.tp, l.sp) {
            0
        } else {
            (e * (c.qkv_width() + 2 * c.attention_width()) + 4 * c.heads) / l.tp
        };
        tokens * product.max(norm).max(attention)
    }

    /// What the allocator keeps, and the program. Masters and moments have sizes that never change; what comes and goes comes in
    /// classes of sizes.
    fn around(&self, parts: &[MemoryPart]) -> Vec<MemoryPart> {
        let i = self.i;
        // With whole weights, what forward and backward had goes back to the system before an update; vectors of a trust region do not.
        let returned = !self.l.splits() && i.updates.trust_region.is_none() && !i.device.own_memory;
        let slack = if returned { i.device.slack.min(WHOLE_SLACK) } else { i.device.slack };
        let names = ["gathered", "leaving", "activations", "cache"];
        let moving: u64 = parts.iter().filter(|p| names.contains(&p.name)).map(|p| p.bytes).sum();
        let (kept, what) = ((moving * slack / 100) as usize, format!("{slack} % of temporary buffers"));
        if i.device.own_memory {
            return vec![part("allocator", kept + i.device.fixed as usize, format!("{what}, driver"))];
        }
        let ranks = if self.l.ranks > 1 { MPI } else { 0 };
        let program = (memory::program(i) + ranks) as usize;
        vec![part("allocator", kept, what), part("program", program, "code, MPI, tokenizer, data of a step")]
    }
}

/// Per cent of what comes and goes that the machine's allocator keeps where weights are whole.
const WHOLE_SLACK: u64 = 5;
/// Memory of an MPI library and of what ranks on one machine share.
const MPI: u64 = 24 << 20;

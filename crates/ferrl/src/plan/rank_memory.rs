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
    let table = RankTable { i, l, e: i.dtype().size() };
    let phases = match (l.tp * l.sp, l.fsdp) {
        (1, 2..) => table.split_phases(),
        _ => table.whole_phases(),
    };
    let bytes = |parts: &Vec<MemoryPart>| parts.iter().map(|p| p.bytes).sum::<u64>();
    let phase = phases.into_iter().max_by_key(bytes).unwrap_or_default();
    let mut out: Vec<MemoryPart> = table.always().into_iter().chain(phase).filter(|p| p.bytes > 0).collect();
    out.extend(table.around(&out));
    out
}

/// What a rank holds, while it is listed.
pub(super) struct RankTable<'a> {
    pub(super) i: &'a Inputs,
    pub(super) l: RankLayout,
    /// Bytes of the compute type.
    pub(super) e: usize,
}

pub(super) fn part(name: &'static str, bytes: usize, what: impl Into<String>) -> MemoryPart {
    MemoryPart { name, bytes: bytes as u64, what: what.into() }
}

impl RankTable<'_> {
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
        let adapter = if low > 0 { self.e * low + 12 * self.sum(memory::largest_inside) } else { 0 };
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
            return part("reference", self.split(4 * trained), "the base, and the adapter's first values");
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
        all.extend(self.trust_phases(&moved, &passes[1]));
        all.extend([self.split_training(sent), passes]);
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

    fn split_training(&self, flight: MemoryPart) -> Vec<MemoryPart> {
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
            self.activations(),
        ];
        training.extend(self.idle_cache());
        let others = self.always().iter().chain(&training).map(|p| p.bytes as usize).sum();
        training.extend([self.summed(others), flight]);
        training
    }

    /// Numbers of gradients, and of the vectors that a trust region has beside them.
    pub(super) fn vectors(&self) -> usize {
        let i = self.i;
        self.sum(|c| i.trained(c)) + (i.vectors() - 1) * i.trained(&i.config)
    }

    /// The gradient of this rank's part, summed, beside `others` bytes. In an update of one round it grows while activations are given
    /// back, which the machine's allocator keeps up to its limit: only what is given back beyond it makes room.
    fn summed(&self, others: usize) -> MemoryPart {
        let (i, (_, _, rounds)) = (self.i, rounds(self.i, self.l));
        let bytes = self.split(4 * self.vectors());
        if rounds > 1 || i.vectors() > 1 || i.device.own_memory {
            return part("gradients", bytes, self.over());
        }
        let unused = (self.kept() * i.device.slack as usize) / 100;
        let limit = (others / 4 + memory::KEPT as usize).saturating_sub(unused);
        let grown = (limit as f64 / self.kept().max(1) as f64).min(1.0);
        part("gradients", (bytes as f64 * grown) as usize, format!("{}, as activations go", self.over()))
    }

    /// Whole weights on every rank, or on ranks that compute together.
    fn whole_phases(&self) -> Vec<Vec<MemoryPart>> {
        let (i, l) = (self.i, self.l);
        let (all, team) = (self.sum(|c| i.trained(c)), l.tp * l.sp);
        let bucket = all.min(memory::BUCKET + self.sum(memory::largest));
        if team == 1 {
            // Each rank sums a part of the gradient beside the whole one.
            let summed = if l.ranks > 1 { 4 * all.div_ceil(l.ranks) } else { 0 };
            let sent = if l.ranks > 1 { 8 * bucket } else { 0 };
            let weights = part("weights", self.sum(|c| i.forms(c, true)), "for products");
            let held = 4 * self.vectors();
            let own = |more: usize| part("gradients", held + more, "f32, and the part that this rank sums");
            let sampling = self.sampling_phases(&[weights.clone(), own(0)]);
            let flight = part("in flight", sent, "gradients as they are sent and received");
            let mut training = vec![weights, own(summed), flight, self.activations()];
            training.extend(self.idle_cache());
            return sampling.into_iter().chain([training]).collect();
        }
        let leaving = match i.recipe.adapter.is_some() {
            true => 4 * all,
            false => {
                let shared = |c: &ModelConfig| weights(c) - outside(c) + vocabulary(c);
                self.sum(|c| 4 * (shared(c) / team + weights(c) - shared(c)))
            }
        };
        // Gradients travel in buckets: what is sent to every owner, what arrives of every micro-batch, and one assembled bucket.
        let copies = l.ranks / (l.fsdp * l.tp);
        let messages = self.split(4 * bucket * (l.dp() + 1)) + 4 * bucket * copies / team;
        let what = format!("one of {} parts of the layers, of {team} of the vocabulary", l.tp);
        let mut training = vec![
            part("weights", self.shared_forms(l.tp, team, true), what),
            part("gradients", self.split(4 * self.vectors()), self.over()),
            part("leaving", leaving, "the gradient of a micro-batch, until it is sent"),
            part("in flight", messages, "gradients as they are sent and received"),
            self.activations(),
        ];
        training.extend(self.idle_cache());
        let read = self.shared_forms(l.rollout_tp, l.rollout_tp, l.rollout_tp == l.tp && l.sp == 1);
        let sampling = self.sampling_phases(&[part("weights", read, "as rollouts read them")]);
        let trust = self.trust_phases(&training[0], &training[3]);
        sampling.into_iter().chain(trust).chain([training]).collect()
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
    fn kept(&self) -> usize {
        let (i, e, l) = (self.i, self.e, self.l);
        let (t, recompute) = (i.micro_tokens().div_ceil(l.sp), i.recipe.model.recompute);
        // The residual stream is whole under tensor parallelism; what is inside a layer is split.
        let stream = |c: &ModelConfig| 4 * c.hidden * t * (c.layers + 1);
        self.sum(|c| {
            let whole = memory::activations(c, t, e, recompute);
            stream(c) + whole.saturating_sub(stream(c)) / l.tp
        })
    }

    fn activations(&self) -> MemoryPart {
        let (i, e, l) = (self.i, self.e, self.l);
        let (t, recompute) = (i.micro_tokens().div_ceil(l.sp), i.recipe.model.recompute);
        // A rank computes its part of the vocabulary for all tokens, and gathers the gradients of some rows' logits.
        let team = l.tp * l.sp;
        let gathered = |c: &ModelConfig| if team > 1 && c.head.has_lm() { GATHERED * (2 * e + 4) } else { 0 };
        let heads = |c: &ModelConfig| {
            let own = ModelConfig { vocab: c.vocab.div_ceil(team), ..c.clone() };
            memory::head_work(&own, i.micro_tokens(), e, i.device) + gathered(c)
        };
        let work = |c: &ModelConfig| (memory::backward_work(c, t, e) / l.tp + self.all_rows(c)).max(heads(c));
        let work = self.trained().into_iter().map(work).max().unwrap_or(0);
        // The teacher's forward pass runs while the policy's activations are kept for backward.
        let against = i.teacher.as_ref().map_or(0, |c| memory::forward_work(c, t, e) + 2 * t * c.hidden * e);
        let scoring = i.judges.iter().map(|(c, _)| memory::forward_work(c, t, e)).max().unwrap_or(0);
        let visitor = i.visitor(!l.splits()) as usize;
        let trust = if l.splits() { 0 } else { i.trust_work() };
        let bytes = (self.kept() + work.max(against)).max(scoring).max(visitor).max(trust);
        let how = if recompute { ", layers recomputed" } else { "" };
        part("activations", bytes, format!("{t} tokens at once{how}"))
    }

    /// Bytes of what ranks that share tokens have of all of them at once: the input of the widest product and some features of its
    /// output's gradient; inputs, gradients and their sum around a norm; operands of attention whose query rows they share.
    fn all_rows(&self, c: &ModelConfig) -> usize {
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
        self.i.micro_tokens() * product.max(norm).max(attention)
    }

    /// What the allocator keeps, and the program. Masters and moments have sizes that never change; what comes and goes comes in
    /// classes of sizes.
    fn around(&self, parts: &[MemoryPart]) -> Vec<MemoryPart> {
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

//! Bytes and seconds of every communication of a step.
//!
//! `f` ranks split a copy of the weights (ZeRO-3), `t` share features (tensor parallelism), `s` share tokens (context parallelism).
//! Where `f > 1` and no ranks compute together, layers are gathered one at a time, in forward and again in backward; what is
//! outside of layers once an update; and all weights for rollouts and for passes without gradients. Ranks that compute together
//! gather all weights before an update, and for rollouts where these have another layout. Gradients travel in f32; with an
//! adapter, only its own.

use super::Inputs;
use super::cards::LINK_SHARE;
use super::ranks::Cluster;
use super::work::sampled_tokens;
use crate::parallel::RankLayout;
use ferrl_engine::model::config::QkNorm;
use ferrl_engine::model::{ModelConfig, ParamShape};
use ferrl_kernels::counted;

/// Bytes of a sampled token between ranks: its id, log-probability, version and mask, as text.
const TOKEN: f64 = 40.0;

/// Bytes of a row that is sampled from a shared vocabulary, from rank to rank.
const DRAW: f64 = 20.0;

/// Bytes of a row's log-sum-exp, entropy and target's logit.
const FOLDED: f64 = 12.0;

#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    pub name: &'static str,
    /// Bytes that a rank receives in a step.
    pub bytes: f64,
    /// Seconds of a step.
    pub seconds: f64,
    /// Whether it overlaps with computation.
    pub meanwhile: bool,
    /// Description: how often, and of what.
    pub what: String,
}

/// Micro-batches of an update, updates of a step, rounds of an update.
pub(super) fn rounds(i: &Inputs, l: RankLayout) -> (usize, usize, usize) {
    let batches = i.update_tokens().div_ceil(i.recipe.train.micro_batch_tokens.max(1)).max(1);
    (batches, (i.updates.epochs * i.updates.minibatches).max(1), batches.div_ceil(l.dp()))
}

pub(super) fn exchanges(i: &Inputs, l: RankLayout, cluster: &Cluster) -> Vec<Exchange> {
    // Activations travel as weights do, from card to card; numbers that the host needs are messages between the machines.
    let slow = cluster.card.through_host();
    let host = Cluster { card: slow, network: cluster.network.min(slow.link), ..*cluster };
    let mut all = Traffic { i, l, cluster, host, e: i.dtype().size() as f64, out: Vec::new() };
    match l.tp * l.sp {
        1 => all.layers(),
        _ => all.before_updates(),
    }
    all.for_rollouts();
    all.gradients();
    all.features();
    all.vocabulary();
    all.context();
    all.sampling();
    all.rollouts();
    all.out
}

/// Others' part of what `n` ranks have together.
fn others(n: usize) -> f64 {
    (n - 1) as f64 / n as f64
}

/// Exchanges while they are listed.
struct Traffic<'a> {
    i: &'a Inputs,
    l: RankLayout,
    cluster: &'a Cluster,
    /// The same for messages, which pass through the machines' memory on cards too.
    host: Cluster,
    /// Bytes of the compute type.
    e: f64,
    out: Vec<Exchange>,
}

impl Traffic<'_> {
    fn add(&mut self, name: &'static str, (bytes, seconds): (f64, f64), what: String) {
        if bytes > 0.0 {
            self.out.push(Exchange { name, bytes, seconds, meanwhile: false, what });
        }
    }

    /// These go on while layers are computed.
    fn meanwhile(&mut self, name: &'static str) {
        self.out.iter_mut().filter(|x| x.name == name).for_each(|x| x.meanwhile = true);
    }

    /// Over the models that are trained.
    fn sum(&self, f: impl Fn(&ModelConfig) -> f64) -> f64 {
        std::iter::once(&self.i.config).chain(&self.i.critic).map(f).sum()
    }

    /// Bytes sent and seconds taken when the ranks that split a copy gather `bytes` in all.
    fn gathered(&self, bytes: f64) -> (f64, f64) {
        let shards = self.l.fsdp * self.l.tp;
        (bytes * others(shards), self.cluster.gather(bytes, shards, 1))
    }

    /// Bytes of parameters on their way: rounded where products alone read them, bases as their home has them.
    fn travelling(&self, c: &ModelConfig, chosen: impl Fn(&ParamShape) -> bool) -> f64 {
        let bases: Vec<_> = self.i.bases(c).iter().map(|p| p.id).collect();
        let width = |p: &ParamShape| match (bases.contains(&p.id), c.is_multiplied(p.id)) {
            (true, _) => self.i.base_width() as f64,
            (false, true) if !p.id.slot.is_table() && !p.id.slot.is_f32() => self.e,
            _ => 4.0,
        };
        c.params().iter().filter(|p| chosen(p)).map(|p| width(p) * p.len() as f64).sum()
    }

    /// All weights of the models that are trained, adapters included.
    fn all(&self) -> f64 {
        self.sum(|c| self.travelling(c, |_| true) + 4.0 * self.i.low_rank(c) as f64)
    }

    /// ZeRO-3: layers in forward and in backward, which finds the last one there, as forward of the next round finds the first; the
    /// rest once an update.
    fn layers(&mut self) {
        let (_, updates, rounds) = rounds(self.i, self.l);
        let (updates, rounds) = (updates as f64, rounds as f64);
        let inside =
            |c: &ModelConfig| self.travelling(c, |p| p.id.layer.is_some()) + 4.0 * self.i.low_rank(c) as f64;
        let found = |c: &ModelConfig| (2.0 * rounds - 1.0) * inside(c) / c.layers.max(1) as f64;
        let outside = |c: &ModelConfig| self.travelling(c, |p| p.id.layer.is_none());
        let bytes = updates * self.sum(|c| 2.0 * rounds * inside(c) - found(c) + outside(c));
        let what = format!("gathered {}, layer by layer", counted((2.0 * rounds * updates) as usize, "time"));
        self.add("weights", self.gathered(bytes), what);
        self.meanwhile("weights");
    }

    fn before_updates(&mut self) {
        let (_, updates, _) = rounds(self.i, self.l);
        let bytes = updates as f64 * self.all();
        self.add(
            "weights",
            self.gathered(bytes),
            format!("gathered {}, before updates", counted(updates, "time")),
        );
    }

    /// Weights as rollouts and passes without gradients read them; those of rollouts serve the first update where both have one
    /// layout.
    fn for_rollouts(&mut self) {
        let (i, l) = (self.i, self.l);
        if !l.splits() {
            return;
        }
        let same = l.tp * l.sp > 1 && l.rollout_tp == l.tp && l.sp == 1;
        let whole_reference = i.needs.full_kl || i.teacher.is_some();
        let reference = i.needs.reference && !whole_reference;
        let sampling = usize::from(i.feed.sampled() && !same);
        // The reference has had the place of the policy; an adapter is put back twice.
        let adapted = if reference && i.recipe.adapter.is_some() { 2 } else { 0 };
        let critic = usize::from(i.needs.critic && (reference || !i.feed.sampled()));
        let times = sampling + adapted + critic;
        let frozen = if reference && adapted == 0 { self.travelling(&i.config, |_| true) } else { 0.0 };
        let bytes = times as f64 * self.all() + frozen;
        let passes = times + usize::from(frozen > 0.0);
        self.add(
            "to read",
            self.gathered(bytes),
            format!("all weights, {}, for rollouts and scores", counted(passes, "time")),
        );
    }

    /// Each rank gets its part of every micro-batch's gradient; with whole weights, the sums of all parts after the last round.
    fn gradients(&mut self) {
        let (i, l) = (self.i, self.l);
        let (batches, updates, rounds) = rounds(i, l);
        let trained = 4.0 * self.sum(|c| i.trained(c) as f64);
        // A copy that ranks split, or that ranks compute together with, is summed by each copy's ranks.
        let shards = if l.splits() { l.fsdp * l.tp } else { l.ranks };
        let sent = trained * l.dp() as f64 / shards as f64;
        let times = (rounds * updates) as f64;
        let seconds = times * self.cluster.scatter(sent, l.ranks, 1);
        // Ranks without a micro-batch in the last round send nothing.
        let bytes = (updates * batches) as f64 / l.dp() as f64 * sent * others(l.ranks);
        self.add(
            "gradients",
            (bytes, seconds),
            format!(
                "all-to-all, {}, {} an update",
                counted(rounds * updates, "round"),
                counted(batches, "micro-batch")
            ),
        );
        if l.splits() {
            if l.tp * l.sp == 1 {
                self.meanwhile("gradients");
            }
            return;
        }
        let sums = updates as f64 * trained;
        let seconds = self.cluster.gather(sums, l.ranks, 1);
        self.add("sums", (sums * others(l.ranks), seconds), "of all parts, after the last round".into());
    }

    /// Tokens of a step that a data rank computes with gradients, and forward passes over them.
    fn tokens(&self) -> (f64, usize) {
        let (_, updates, _) = rounds(self.i, self.l);
        let tokens = (self.i.update_tokens() * updates) as f64 / self.l.dp() as f64;
        (tokens, if self.i.recipe.model.recompute { 2 } else { 1 })
    }

    /// What every layer gives, gathered: heads, their projection, the feed-forward network's inside and outside; in backward heads
    /// and inside again, and the gradients of both products' outputs and inputs. Every rank computes all experts.
    fn features(&mut self) {
        let (l, (tokens, passes)) = (self.l, self.tokens());
        // The norms of queries and keys read these before the norm as well.
        let attention = |c: &ModelConfig| {
            c.attention_width() + (1 + usize::from(c.qk_norm.is_some())) * c.qkv_width() + c.hidden
        };
        let network = |c: &ModelConfig| c.ffn + c.up_width() + c.hidden;
        let backward = |c: &ModelConfig| in_layers(c, attention(c), network(c));
        let per_token = |c: &ModelConfig| (passes * forward(c) + backward(c)) as f64 * self.e;
        let bytes = tokens / l.sp as f64 * self.sum(per_token);
        let cost = (bytes * others(l.tp), self.cluster.gather(bytes, l.tp, 1));
        self.add("activations", cost, "of every layer, forward and backward".into());
    }

    /// Embeddings; of the head three numbers a tile, gradients of logits, and columns of the hidden states' gradient. The host reads
    /// what is folded.
    fn vocabulary(&mut self) {
        let (l, (tokens, _)) = (self.l, self.tokens());
        let team = l.tp * l.sp;
        let head = |c: &ModelConfig| {
            let logits = (c.vocab + c.hidden) as f64 * self.e;
            if c.head.has_lm() { tiles(c, self.i.device.vocab_tile) / team as f64 + logits } else { 0.0 }
        };
        let bytes = tokens * self.sum(|c| 4.0 * c.hidden as f64 / l.sp as f64 + head(c));
        let read = tokens * self.sum(|c| if c.head.has_lm() { FOLDED } else { 0.0 });
        let seconds = self.cluster.gather(bytes, team, 1) + self.host.gather(read, team, 1);
        let cost = ((bytes + read) * others(team), seconds);
        self.add("vocabulary", cost, "embeddings, tiles of the head, gradients of logits".into());
    }

    /// What attention exchanges, gradients of all products' outputs included; and all rows of all products' inputs, of the norms'
    /// inputs (f32) and gradients.
    fn context(&mut self) {
        let (l, (tokens, _)) = (self.l, self.tokens());
        let outputs =
            |c: &ModelConfig| in_layers(c, c.qkv_width() + c.hidden, c.up_width() + c.hidden) as f64;
        let inside = |c: &ModelConfig| {
            (c.layers as f64 * self.sent_by_attention(c) + outputs(c) * self.e) / l.tp as f64
        };
        let bytes = tokens / l.sp as f64 * self.sum(inside);
        let cost = (bytes * others(l.sp), self.cluster.scatter(bytes, l.sp, l.tp));
        self.add("heads", cost, "of every layer, forward and backward".into());
        let keys = |c: &ModelConfig| c.layers as f64 / l.tp as f64 * self.gathered_by_attention(c);
        let bytes = tokens * self.sum(keys);
        let cost = (bytes * others(l.sp), self.cluster.gather(bytes, l.sp, l.tp));
        self.add("keys", cost, "and values of all tokens; in backward also queries and outputs".into());
        let inputs =
            |c: &ModelConfig| in_layers(c, c.hidden + c.attention_width(), c.hidden + c.ffn) as f64 * self.e;
        let bytes = tokens * self.sum(|c| inputs(c) + self.rows_of_norms(c) + self.rows_of_experts(c));
        let cost = (bytes * others(l.sp), self.cluster.gather(bytes, l.sp, l.tp));
        self.add("rows", cost, "all tokens, for the gradients of weights".into());
    }

    /// Bytes a token that go to all members for the gradients of norms: inputs of those before a sublayer (f32; attention's output is
    /// still beside the second one's) or behind it, queries and keys, and their gradients; and what is behind the layers: the last
    /// norm, the head's rows and the embedding's gradient.
    fn rows_of_norms(&self, c: &ModelConfig) -> f64 {
        let (h, e) = (c.hidden as f64, self.e);
        let before = if c.pre_norms { h * (8.0 + 3.0 * e) } else { 0.0 };
        let behind = if c.post_norms { 2.0 * h * (4.0 + e) } else { 0.0 };
        let queries = if c.qk_norm.is_some() { 2.0 * c.qkv_width() as f64 * e } else { 0.0 };
        c.layers as f64 * (before + behind + queries) + h * (8.0 + 3.0 * e)
    }

    /// Bytes a token that go to all members for the gradients of experts (inputs and output gradients of both products) and of the
    /// router, in f32: its logits, the gradients of the weights and of the logits, and its inputs.
    fn rows_of_experts(&self, c: &ModelConfig) -> f64 {
        let Some(experts) = &c.experts else { return 0.0 };
        let each = 2 * c.hidden + experts.width + c.expert_up_width(experts);
        let router = 4 * (2 * experts.count + experts.per_token + c.hidden);
        (c.layers - dense(c)) as f64 * ((experts.per_token * each) as f64 * self.e + router as f64)
    }

    /// Bytes a token of a layer that go to one member: rows for heads and back; where members share query rows, queries, outputs and
    /// their log-sum-exp, in backward the gradients.
    fn sent_by_attention(&self, c: &ModelConfig) -> f64 {
        let (_, passes) = self.tokens();
        let (qkv, att) = (c.qkv_width(), c.attention_width());
        match c.shares_heads(self.l.tp, self.l.sp) {
            true => ((passes + 1) * qkv + (passes + 2) * att) as f64 * self.e,
            false => (2 * passes * att + qkv) as f64 * self.e + 4.0 * (passes * c.heads) as f64,
        }
    }

    /// Bytes a token of a layer that go to all members, where they share query rows.
    fn gathered_by_attention(&self, c: &ModelConfig) -> f64 {
        let (_, passes) = self.tokens();
        let (qkv, att) = (c.qkv_width(), c.attention_width());
        match c.shares_heads(self.l.tp, self.l.sp) {
            true => 0.0,
            false => (passes * (qkv - att) + qkv + 2 * att) as f64 * self.e + 4.0 * c.heads as f64,
        }
    }

    /// Forward passes of ranks that sample together. Every token exchanges its embedding and the outputs of every layer; a sampled
    /// token also the tiles of the head and the draw. A critic's values are computed by the same ranks.
    fn sampling(&mut self) {
        let (i, l) = (self.i, self.l);
        let groups = (l.ranks / l.rollout_tp) as f64;
        let per_token = |c: &ModelConfig| forward(c) as f64 * self.e + 4.0 * c.hidden as f64;
        let (prompts, sampled) = if i.feed.sampled() { sampled_tokens(i) } else { (0.0, 0.0) };
        // What a token is drawn by: a message, or all of its logits on the first rank.
        let logits = 4.0 * i.config.vocab as f64 / l.rollout_tp as f64;
        let (drawn, logits) = if i.device.draws_by_parts { (DRAW, 0.0) } else { (0.0, logits) };
        let read = sampled * (FOLDED + drawn) / groups;
        let shown = tiles(&i.config, i.device.vocab_tile) / l.rollout_tp as f64 + logits;
        let scored = (i.update_tokens() * i.updates.minibatches) as f64;
        let scored =
            if i.needs.critic { scored * per_token(i.critic.as_ref().unwrap_or(&i.config)) } else { 0.0 };
        let bytes = ((prompts + sampled) * per_token(&i.config) + sampled * shown + scored) / groups;
        let seconds = self.cluster.gather(bytes, l.rollout_tp, 1) + self.host.gather(read, l.rollout_tp, 1);
        let cost = ((bytes + read) * others(l.rollout_tp), seconds);
        self.add("sampling", cost, "activations of rollouts, tiles of the head, draws".into());
    }

    fn rollouts(&mut self) {
        let (i, n) = (self.i, self.l.ranks);
        if i.feed.sampled() {
            let bytes = TOKEN * i.sampled(false) as f64 * i.lengths.sequence;
            let slowest = if self.cluster.nodes > 1 { self.cluster.network } else { self.cluster.card.link };
            let cost = (bytes * others(n), bytes * others(n) / slowest / LINK_SHARE);
            self.add("rollouts", cost, "completions and rewards, to every rank".into());
        }
    }
}

/// Layers without experts.
fn dense(c: &ModelConfig) -> usize {
    (0..c.layers).filter(|layer| c.experts_of(*layer).is_none()).count()
}

/// Numbers per token over all layers: `attention` in each layer, and `network` in each layer without experts.
fn in_layers(c: &ModelConfig, attention: usize, network: usize) -> usize {
    c.layers * attention + dense(c) * network
}

/// Numbers a token that ranks which share features gather in forward; a norm over all heads reads all queries and keys.
fn forward(c: &ModelConfig) -> usize {
    let qkv = if c.qk_norm == Some(QkNorm::Whole) { c.qkv_width() } else { 0 };
    in_layers(c, qkv + c.attention_width() + c.hidden, c.ffn + c.hidden)
}

/// Bytes of a row's numbers of all tiles of the vocabulary.
fn tiles(c: &ModelConfig, tile: usize) -> f64 {
    12.0 * c.vocab.div_ceil(tile) as f64
}

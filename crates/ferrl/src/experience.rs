//! Training data of a step: sequences with columns of numbers per token.
//!
//! Columns are indexed like the engine's statistics: entry `i` of a sequence is about predicting token `i + 1`. An
//! entry counts only where that token is trained (`acts(i)`); elsewhere columns are 0.

use ferrl_engine::train::{StatGrads, Stats};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One sequence and everything an algorithm may want to know about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether each token is trained on; never the first.
    pub trained: Vec<bool>,
    /// Sequences of one trajectory share its number.
    pub trajectory: usize,
    /// Trajectories of one prompt share its number.
    pub group: usize,
    /// Chosen and rejected of one pair share its number.
    pub pair: Option<usize>,
    /// What kind of evidence it is.
    pub kind: Evidence,
    /// Weight of its data set.
    pub weight: f32,
    pub margin: f32,
    /// Trained tokens of the whole trajectory, all its sequences together.
    pub trajectory_tokens: usize,
    /// Reward given at each position, already placed.
    pub reward: Vec<f32>,
    /// Positions at which a step ends that has a reward of its own, in order; empty where only completions are rewarded.
    #[serde(default)]
    pub steps: Vec<usize>,
    /// Named parts of the trajectory's reward.
    pub components: Vec<(String, f32)>,
    /// Weight and reward of each source of the trajectory's reward, in the recipe's order; a source may have none.
    pub sources: Vec<(f32, Option<f32>)>,
    /// Log-probability under the policy before the update.
    pub old_logp: Vec<f32>,
    /// Log-probability at sampling; differs from `old_logp` only if the policy was updated since.
    pub sampled_logp: Vec<f32>,
    /// Version of the policy (number of updates) that sampled each token; empty without samples.
    pub version: Vec<u64>,
    /// Log-probability under the reference model.
    pub ref_logp: Vec<f32>,
    /// Value under the critic before the update.
    pub old_value: Vec<f32>,
    /// Advantage of the action.
    pub advantage: Vec<f32>,
    /// Monte-Carlo advantage, estimated after sampling from continuations of its steps; may be empty.
    #[serde(default)]
    pub credit: Vec<f32>,
    /// Importance weight of a sequence sampled by a search: its probability under the policy over its frequency in the tree.
    #[serde(default)]
    pub importance: Option<f32>,
    /// Target of the critic.
    pub target_value: Vec<f32>,
    /// Importance weight of the token, 1 when sampled by the current policy.
    pub correction: Vec<f32>,
    /// Whether generation was truncated at its length limit.
    pub truncated: bool,
    /// Whether its episode was truncated: a critic's value of the last state replaces the missing rewards.
    #[serde(default)]
    pub bootstrap: bool,
    /// Sampling temperature; `None`, which counts as 1, if it was not sampled by this run.
    #[serde(default)]
    pub temperature: Option<f32>,
}

/// Kind of training signal of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Evidence {
    /// A demonstration or a sample.
    #[default]
    Plain,
    Chosen,
    Rejected,
    /// Labelled good or bad.
    Labelled(bool),
    /// With a target score.
    Target(f32),
    /// A probe before the update, never trained on.
    Probe,
}

impl Sequence {
    /// Whether position `i` predicts a trained token.
    pub fn acts(&self, i: usize) -> bool {
        self.trained.get(i + 1).copied().unwrap_or(false)
    }
    /// Positions that predict a trained token.
    pub fn actions(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ids.len()).filter(|&i| self.acts(i))
    }
    /// Number of trained tokens.
    pub fn action_count(&self) -> usize {
        self.actions().count()
    }
    /// Divisor of the logits for its log-probabilities: the temperature of sampling.
    pub fn divisor(&self) -> f32 {
        self.temperature.unwrap_or(1.0)
    }
    /// Sum of a column over the actions.
    pub fn sum(&self, column: &[f32]) -> f64 {
        self.actions().map(|i| column[i] as f64).sum()
    }
    /// With a reward for the whole sequence, on its last trained token.
    pub fn rewarded(mut self, reward: f32) -> Self {
        self.reward = vec![0.0; self.ids.len()];
        if let Some(last) = self.actions().last() {
            self.reward[last] = reward;
        }
        self
    }
    /// A probe: the prompt of one sequence with the completion of another.
    fn mismatched(prompt: &Sequence, completion: &Sequence) -> Self {
        let start = |s: &Sequence| s.trained.iter().position(|&t| t).unwrap_or(s.ids.len());
        let (before, from) = (start(prompt), start(completion));
        Sequence {
            ids: [&prompt.ids[..before], &completion.ids[from..]].concat(),
            trained: [&prompt.trained[..before], &completion.trained[from..]].concat(),
            kind: Evidence::Probe,
            ..Default::default()
        }
    }
    pub fn total_reward(&self) -> f64 {
        self.reward.iter().map(|&r| r as f64).sum()
    }
}

/// All sequences of one rollout or one batch of data, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experience {
    /// In the order of prompts and samples, never of arrival.
    pub sequences: Vec<Sequence>,
}

impl Experience {
    /// Indices of the sequences of each trajectory, in order.
    pub fn trajectories(&self) -> Vec<Vec<usize>> {
        let mut map: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, s) in self.sequences.iter().enumerate() {
            map.entry(s.trajectory).or_default().push(i);
        }
        map.into_values().collect()
    }
    /// Appends probes: each prompt with the completion to the previous prompt, the first with the last one's. A lone
    /// example has none.
    pub fn add_mismatched(&mut self) {
        let n = self.sequences.len();
        if n > 1 {
            let probe = |i| Sequence::mismatched(&self.sequences[i], &self.sequences[(i + n - 1) % n]);
            let probes: Vec<Sequence> = (0..n).map(probe).collect();
            self.sequences.extend(probes);
        }
    }
    /// Appends completions sampled after `prompts` prompts and `completions` completions.
    pub fn append(&mut self, round: Experience, prompts: usize, completions: usize) {
        for mut s in round.sequences {
            s.group += prompts;
            s.trajectory += completions;
            self.sequences.push(s);
        }
    }
}

/// What an update's losses are divided by: counted over the whole update and all ranks, never over a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateCounts {
    /// Trained tokens.
    pub tokens: f64,
    pub sequences: f64,
    pub trajectories: f64,
    pub pairs: f64,
    /// Trained tokens of the better completions of pairs.
    pub chosen_tokens: f64,
}

impl UpdateCounts {
    pub fn of<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Self {
        let mut counts = UpdateCounts::default();
        let (mut trajectories, mut pairs) = (Vec::new(), Vec::new());
        for s in sequences {
            let tokens = s.action_count() as f64;
            counts.tokens += tokens;
            counts.chosen_tokens += if s.kind == Evidence::Chosen { tokens } else { 0.0 };
            counts.sequences += 1.0;
            trajectories.push(s.trajectory);
            pairs.extend(s.pair);
        }
        for list in [&mut trajectories, &mut pairs] {
            list.sort_unstable();
            list.dedup();
        }
        counts.trajectories = trajectories.len() as f64;
        counts.pairs = pairs.len() as f64;
        counts
    }
}

/// A part of an update that is computed at once.
pub struct MicroBatch<'a> {
    /// Its sequences, end to end; both sides of a pair are in it, and all were sampled at the same temperature.
    pub sequences: Vec<&'a Sequence>,
    /// Of the whole update.
    pub counts: UpdateCounts,
}

impl MicroBatch<'_> {
    /// Each sequence with the row of its first token in the statistics.
    pub fn rows(&self) -> impl Iterator<Item = (usize, &Sequence)> + '_ {
        self.sequences.iter().scan(0, |row, s| {
            let start = *row;
            *row += s.ids.len();
            Some((start, *s))
        })
    }
    /// What divides the logits of all its sequences.
    pub fn temperature(&self) -> f32 {
        self.sequences.first().map_or(1.0, |s| s.divisor())
    }
    /// Rows in all.
    pub fn len(&self) -> usize {
        self.sequences.iter().map(|s| s.ids.len()).sum()
    }
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
    /// Chosen and rejected of each pair, as (row, sequence).
    pub fn pairs(&self) -> Vec<[(usize, &Sequence); 2]> {
        let mut open: BTreeMap<usize, [Option<(usize, &Sequence)>; 2]> = BTreeMap::new();
        for (row, s) in self.rows() {
            if let Some(pair) = s.pair {
                let side = usize::from(s.kind == Evidence::Rejected);
                open.entry(pair).or_default()[side] = Some((row, s));
            }
        }
        open.into_values().filter_map(|[c, r]| Some([c?, r?])).collect()
    }
}

#[derive(Default)]
pub struct Loss {
    /// This micro-batch's fraction of the update's loss.
    pub value: f64,
    /// d loss / d statistics, for each role that is trained.
    pub grads: ByRole<StatGrads>,
    /// Means over the update.
    pub metrics: Metrics,
}

impl Loss {
    /// Gradients by logp, entropy and value of one role, all zero to begin with.
    pub fn zeros(rows: usize) -> StatGrads {
        Stats { logp: vec![0.0; rows], ..Default::default() }
    }
    /// A loss on the policy alone.
    pub fn policy(value: f64, grads: StatGrads, metrics: Metrics) -> Self {
        let mut by_role = ByRole::default();
        by_role.set(Role::Policy, grads);
        Loss { value, grads: by_role, metrics }
    }
}

/// A mean in the making: for loops over tokens, where finding it by name would cost more than the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    /// One observation of weight 1.
    pub fn add(&mut self, value: f64) {
        self.sum += value;
        self.weight += 1.0;
    }
}

/// Weighted means by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics(BTreeMap<String, (f64, f64)>);

impl Metrics {
    /// One observation of weight 1.
    pub fn add(&mut self, name: &str, value: f64) {
        self.add_weighted(name, value, 1.0);
    }
    /// An observation that counts for `weight`.
    pub fn add_weighted(&mut self, name: &str, value: f64, weight: f64) {
        self.add_all(name, Mean { sum: value * weight, weight });
    }
    /// Observations that were gathered elsewhere; without any, the name is not there.
    pub fn add_all(&mut self, name: &str, mean: Mean) {
        if mean.weight == 0.0 {
            return;
        }
        let slot = match self.0.get_mut(name) {
            Some(slot) => slot,
            None => self.0.entry(name.into()).or_default(),
        };
        slot.0 += mean.sum;
        slot.1 += mean.weight;
    }
    /// The largest observation so far; such names end in `/max`.
    pub fn add_max(&mut self, name: &str, value: f64) {
        let slot = self.0.entry(name.into()).or_insert((value, 1.0));
        slot.0 = slot.0.max(value);
    }
    pub fn join(&mut self, other: Metrics) {
        for (name, (sum, weight)) in other.0 {
            if name.ends_with("/max") {
                self.add_max(&name, sum);
                continue;
            }
            let slot = self.0.entry(name).or_default();
            slot.0 += sum;
            slot.1 += weight;
        }
    }
    /// The mean of a name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).filter(|s| s.1 > 0.0).map(|s| s.0 / s.1)
    }
    pub fn means(&self) -> impl Iterator<Item = (&str, f64)> + '_ {
        self.0.iter().filter(|(_, s)| s.1 > 0.0).map(|(n, s)| (n.as_str(), s.0 / s.1))
    }
}

/// A model of a run that is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Samples and is trained.
    Policy,
    /// Estimates values, on its own weights.
    Critic,
}

/// Statistics or gradients of each role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ByRole<T>([Option<T>; 2]);

impl<T> ByRole<T> {
    pub fn get(&self, role: Role) -> Option<&T> {
        self.0[role as usize].as_ref()
    }
    pub fn set(&mut self, role: Role, value: T) {
        self.0[role as usize] = Some(value);
    }
}

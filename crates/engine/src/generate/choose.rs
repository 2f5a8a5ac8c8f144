//! Sampling a token from the hidden states.

use super::SamplingParams;
use super::sequence::RunningSequence;
use super::shared::sample_in_team;
use crate::model::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Choices, SampleSpec};
use ferrl_kernels::philox::{philox4x32, uniform};
use ferrl_kernels::truncate::Truncation;

pub(super) struct PickedToken {
    pub token: u32,
    pub logp: f32,
    pub sampled_logp: f32,
    pub top: Vec<(u32, f32)>,
}

/// Scratch buffers for rows that are sampled on the host.
#[derive(Default)]
pub(super) struct Chooser {
    row: Vec<f32>,
    counts: Vec<u32>,
    kept: Truncation,
}

/// Tokens being sampled on the device for some sequences.
pub(super) struct Choosing {
    /// One per temperature.
    groups: Vec<TokenGroup>,
    /// Group and row within it of each sequence.
    places: Vec<(usize, u32)>,
}

pub(super) struct TokenGroup {
    /// Logits, if the host needs some rows.
    pub logits: Option<Buffer>,
    pub choices: Choices,
}

/// Sampling of the sequences of one temperature: one pass over the vocabulary.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SampleBatch {
    pub divisor: f32,
    /// Rows of the hidden states.
    pub rows: Vec<u32>,
    /// How each row's token is sampled.
    pub specs: Vec<SampleSpec>,
    /// Whether the host needs a row's logits.
    pub on_host: Vec<bool>,
}

impl SampleBatch {
    /// The tokens, and the logits of rows that the host needs.
    pub(super) fn choose(&self, model: &Model, h: &Buffer) -> Result<TokenGroup> {
        let all = self.rows.len() * model.config.hidden == h.len() && self.rows.is_sorted();
        let selected = if all { None } else { Some(model.select_rows(h, &self.rows)?) };
        let (logits, lse) = model.logits(selected.as_ref().unwrap_or(h), self.divisor)?;
        let choices = model.backend.choose(&logits, &lse, &self.specs)?;
        Ok(TokenGroup { logits: self.on_host.contains(&true).then_some(logits), choices })
    }
}

/// Groups sequences by temperature; returns each sequence's group and row. The last hidden state of `wanted[i]` is row
/// `rows[i]`; `ahead` tokens are in flight before these and not yet among the sequences' ids.
pub(super) fn group_by_temperature(
    rows: &[u32],
    wanted: &[&RunningSequence],
    ahead: usize,
) -> (Vec<SampleBatch>, Vec<(usize, u32)>) {
    let (mut batches, mut places): (Vec<SampleBatch>, Vec<_>) = (Vec::new(), Vec::new());
    for (s, &row) in wanted.iter().zip(rows) {
        let divisor = s.params.divisor();
        let group = batches.iter().position(|o| o.divisor == divisor).unwrap_or_else(|| {
            batches.push(SampleBatch { divisor, ..SampleBatch::default() });
            batches.len() - 1
        });
        let batch = &mut batches[group];
        places.push((group, batch.rows.len() as u32));
        batch.rows.push(row);
        // Where the host samples, the device computes only the log-sum-exp.
        batch.specs.push(if s.params.has_penalties() { SampleSpec::plain(None) } else { spec(s, ahead) });
        batch.on_host.push(!s.params.is_chosen_by_device());
    }
    (batches, places)
}

impl Choosing {
    /// Copies the tokens of these sequences into an index buffer on the device, without waiting for them.
    pub fn feed(&self, model: &Model, sequences: &[usize], ids: &mut Buffer) -> Result<()> {
        let choices: Vec<&Choices> = self.groups.iter().map(|g| &g.choices).collect();
        let from: Vec<(usize, u32)> = sequences.iter().map(|&i| self.places[i]).collect();
        model.backend.feed(&choices, &from, ids)
    }
}

impl Chooser {
    /// Starts sampling a token for each of `wanted` from the hidden states `h`; see [`group_by_temperature`].
    pub fn begin(
        model: &Model,
        h: &Buffer,
        rows: &[u32],
        wanted: &[&RunningSequence],
        ahead: usize,
    ) -> Result<Choosing> {
        let (batches, places) = group_by_temperature(rows, wanted, ahead);
        let groups = batches.iter().map(|batch| match model.team() {
            Some(team) => sample_in_team(model, team, h, batch),
            None => batch.choose(model, h),
        });
        Ok(Choosing { groups: groups.collect::<Result<_>>()?, places })
    }

    /// Waits for the tokens and returns those of sequences that are still running.
    pub fn end(
        &mut self,
        model: &Model,
        choosing: &Choosing,
        wanted: &[Option<&RunningSequence>],
    ) -> Result<Vec<Option<PickedToken>>> {
        let b = &*model.backend;
        let all = choosing.groups.iter().map(|g| b.chosen(&g.choices)).collect::<Result<Vec<_>>>()?;
        let mut picks = Vec::with_capacity(wanted.len());
        for (&(group, row), s) in choosing.places.iter().zip(wanted) {
            let Some(s) = s else {
                picks.push(None);
                continue;
            };
            let choice = all[group][row as usize];
            if !choice.lse.is_finite() {
                return Err(Error::numerics(format!(
                    "the logits after token {} are not finite",
                    s.ids.len() - 1
                ))
                .fix("look at the weights: a checkpoint before this one may still be sound"));
            }
            let mut pick = PickedToken {
                token: choice.token,
                logp: choice.logit - choice.lse,
                sampled_logp: choice.kept,
                top: Vec::new(),
            };
            if let Some(logits) = &choosing.groups[group].logits
                && !s.params.is_chosen_by_device()
            {
                let vocab = logits.len() / all[group].len();
                let start = row as usize * vocab;
                self.row.resize(vocab, 0.0);
                b.read(logits, start, &mut self.row)?;
                if s.params.top_logprobs > 0 {
                    let top = self.kept.top(&self.row, s.params.top_logprobs);
                    pick.top = top.iter().map(|&(id, logit)| (id, logit - choice.lse)).collect();
                }
                if s.params.has_penalties() {
                    self.penalise(&s.params, &s.ids, s.completion());
                    (pick.token, pick.sampled_logp) = self.kept.choose(&self.row, &spec(s, 0));
                    let mut logit = [0.0];
                    b.read(logits, start + pick.token as usize, &mut logit)?;
                    pick.logp = logit[0] - choice.lse;
                }
            }
            picks.push(Some(pick));
        }
        Ok(picks)
    }

    /// Repetition penalty over prompt and completion, presence and frequency penalties over the completion. The row is already
    /// divided by the temperature, so subtracted penalties are divided by it, too.
    fn penalise(&mut self, p: &SamplingParams, ids: &[u32], start: usize) {
        self.counts.resize(self.row.len(), 0);
        let row = &mut self.row;
        if p.repetition_penalty != 1.0 {
            for &id in ids {
                let (seen, logit) = (&mut self.counts[id as usize], &mut row[id as usize]);
                if *seen == 0 {
                    *seen = 1;
                    *logit = if *logit > 0.0 {
                        *logit / p.repetition_penalty
                    } else {
                        *logit * p.repetition_penalty
                    };
                }
            }
            ids.iter().for_each(|&id| self.counts[id as usize] = 0);
        }
        let completion = &ids[start..];
        completion.iter().for_each(|&id| self.counts[id as usize] += 1);
        for &id in completion {
            let times = std::mem::take(&mut self.counts[id as usize]);
            if times > 0 {
                row[id as usize] -= (p.frequency_penalty * times as f32 + p.presence_penalty) / p.divisor();
            }
        }
    }
}

/// How the token after the next `ahead` ones is sampled. Greedy decoding ignores truncation.
fn spec(s: &RunningSequence, ahead: usize) -> SampleSpec {
    let p = &s.params;
    let draw = (!p.is_greedy()).then(|| draw(s, ahead));
    SampleSpec { draw, top_k: p.top_k, top_p: p.top_p, min_p: p.min_p }
}

/// The uniform random number of a token: a function of seed, stream and index only.
fn draw(s: &RunningSequence, ahead: usize) -> f32 {
    let [a, b, c] = s.stream;
    let index = (s.ids.len() - s.completion() + ahead) as u32;
    uniform(philox4x32([a, b, c, index], [s.params.seed as u32, (s.params.seed >> 32) as u32])[0])
}

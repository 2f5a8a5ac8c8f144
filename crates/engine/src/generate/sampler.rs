//! Choosing a token.

use super::SamplingParams;
use super::sequence::Sequence;
use crate::model::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::math::ln;
use ferrl_kernels::philox::{philox4x32, uniform};

/// A chosen token.
pub(super) struct Pick {
    pub token: u32,
    pub logp: f32,
    pub sampled_logp: f32,
    pub top: Vec<(u32, f32)>,
}

/// Room for the rows that are looked at on the host.
#[derive(Default)]
pub(super) struct Chooser {
    row: Vec<f32>,
    counts: Vec<u32>,
    kept: Vec<(u32, f32)>,
}

impl Chooser {
    /// One token for each of `wanted`, whose last hidden state is row `rows[i]` of `h`.
    pub fn choose(
        &mut self,
        model: &Model,
        h: &Buffer,
        rows: &[u32],
        wanted: &[&Sequence],
    ) -> Result<Vec<Pick>> {
        let mut picks: Vec<Option<Pick>> = wanted.iter().map(|_| None).collect();
        while let Some(first) = picks.iter().position(Option::is_none) {
            // One pass over the vocabulary for each temperature.
            let divisor = wanted[first].params.divisor();
            let group: Vec<usize> =
                (first..wanted.len()).filter(|&i| wanted[i].params.divisor() == divisor).collect();
            let rows: Vec<u32> = group.iter().map(|&i| rows[i]).collect();
            let all = rows.len() * model.config.hidden == h.len() && rows.is_sorted();
            let selected = if all { None } else { Some(model.select_rows(h, &rows)?) };
            let (logits, lse) = model.logits(selected.as_ref().unwrap_or(h), divisor)?;
            let group: Vec<&Sequence> = group.iter().map(|&i| wanted[i]).collect();
            let mut found = self.group(model, &logits, &lse, &group)?.into_iter();
            for (pick, s) in picks.iter_mut().zip(wanted) {
                if s.params.divisor() == divisor {
                    *pick = found.next();
                }
            }
        }
        Ok(picks.into_iter().flatten().collect())
    }

    /// Rows of one temperature.
    fn group(
        &mut self,
        model: &Model,
        logits: &Buffer,
        lse: &Buffer,
        wanted: &[&Sequence],
    ) -> Result<Vec<Pick>> {
        let b = &*model.backend;
        let vocab = logits.len() / wanted.len();
        let greedy = |s: &Sequence| s.params.is_greedy();
        let draws: Vec<Option<f32>> = wanted.iter().map(|s| (!greedy(s)).then(|| draw(s))).collect();
        let plain =
            |s: &&Sequence| s.params.is_exact() || (s.params.is_greedy() && !s.params.has_penalties());
        let choices = b.choose(logits, lse, &draws)?;
        let mut picks = Vec::with_capacity(wanted.len());
        for (i, s) in wanted.iter().enumerate() {
            let choice = choices[i];
            if !choice.lse.is_finite() {
                return Err(Error::numerics(format!(
                    "the logits after token {} are not finite",
                    s.ids.len() - 1
                ))
                .fix("look at the weights: a checkpoint before this one may still be sound"));
            }
            if !plain(s) || s.params.top_logprobs > 0 {
                self.row.resize(vocab, 0.0);
                b.read(logits, i * vocab, &mut self.row)?;
            }
            let top = self.top(s.params.top_logprobs, choice.lse);
            let (token, logit, truncated) = if plain(s) {
                (choice.token, choice.logit, greedy(s).then_some(0.0))
            } else {
                let (token, truncated) = self.truncated(s, draws[i].unwrap_or(0.0));
                let mut logit = [0.0];
                b.read(logits, i * vocab + token as usize, &mut logit)?;
                (token, logit[0], truncated)
            };
            let logp = logit - choice.lse;
            picks.push(Pick { token, logp, sampled_logp: truncated.unwrap_or(logp), top });
        }
        Ok(picks)
    }

    /// The likeliest tokens of `row`, likeliest first.
    fn top(&mut self, count: usize, lse: f32) -> Vec<(u32, f32)> {
        if count == 0 {
            return Vec::new();
        }
        self.keep_all();
        let top = keep_top(&mut self.kept, count);
        top.iter().map(|&(id, logit)| (id, logit - lse)).collect()
    }

    /// A token of `row` under penalties and truncation, and its log-probability there.
    fn truncated(&mut self, s: &Sequence, draw: f32) -> (u32, Option<f32>) {
        let p = &s.params;
        self.penalise(p, &s.ids, s.prompt);
        let best = self.row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if p.is_greedy() {
            let token = self.row.iter().position(|&l| l == best).unwrap_or(0);
            return (token as u32, Some(0.0));
        }
        self.keep_all();
        if p.top_k > 0 && p.top_k < self.kept.len() {
            keep_top(&mut self.kept, p.top_k);
            self.kept.truncate(p.top_k);
        }
        // From here on a token's weight, that of the likeliest being 1.
        self.kept.iter_mut().for_each(|(_, l)| *l = exp(*l - best));
        if p.top_p < 1.0 {
            let kept = nucleus(&mut self.kept, p.top_p);
            self.kept.truncate(kept);
        }
        self.kept.retain(|&(_, w)| w >= p.min_p);
        self.kept.sort_unstable_by_key(|&(id, _)| id);
        let total: f32 = self.kept.iter().map(|&(_, w)| w).sum();
        let (mut below, mut chosen) = (0.0, None);
        for &(id, w) in self.kept.iter().filter(|(_, w)| *w > 0.0) {
            below += w;
            chosen = Some(id);
            if below > draw * total {
                break;
            }
        }
        // The likeliest token has weight 1, so there is one.
        let token = chosen.unwrap_or(0);
        (token, Some(self.row[token as usize] - best - ln(f64::from(total)) as f32))
    }

    /// Repetition over prompt and completion, presence and frequency over the completion. The row is divided by
    /// the temperature already: what is subtracted has to be as well.
    fn penalise(&mut self, p: &SamplingParams, ids: &[u32], prompt: usize) {
        if !p.has_penalties() {
            return;
        }
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
        let completion = &ids[prompt..];
        completion.iter().for_each(|&id| self.counts[id as usize] += 1);
        for &id in completion {
            let times = std::mem::take(&mut self.counts[id as usize]);
            if times > 0 {
                row[id as usize] -= (p.frequency_penalty * times as f32 + p.presence_penalty) / p.divisor();
            }
        }
    }

    fn keep_all(&mut self) {
        self.kept.clear();
        self.kept.extend(self.row.iter().enumerate().map(|(id, &l)| (id as u32, l)));
    }
}

/// The number a token is drawn with: a function of seed, stream and index alone.
fn draw(s: &Sequence) -> f32 {
    let [a, b, c] = s.stream;
    let index = (s.ids.len() - s.prompt) as u32;
    uniform(philox4x32([a, b, c, index], [s.params.seed as u32, (s.params.seed >> 32) as u32])[0])
}

/// Larger first, then the lower id.
fn order(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Brings the `count` largest to the front, in order.
fn keep_top(list: &mut [(u32, f32)], count: usize) -> &[(u32, f32)] {
    let count = count.min(list.len());
    if count < list.len() {
        list.select_nth_unstable_by(count, order);
    }
    list[..count].sort_unstable_by(order);
    &list[..count]
}

/// Brings the heaviest to the front that together reach the share `p`, and says how many they are.
fn nucleus(list: &mut [(u32, f32)], p: f32) -> usize {
    // In the order of ids, whatever was done to the list before.
    list.sort_unstable_by_key(|&(id, _)| id);
    let goal = p * list.iter().map(|&(_, w)| w).sum::<f32>();
    let mut looked_at = 64;
    loop {
        let mut before = 0.0;
        for (i, &(_, w)) in keep_top(list, looked_at).iter().enumerate() {
            if before >= goal {
                return i;
            }
            before += w;
        }
        if looked_at >= list.len() {
            return list.len();
        }
        looked_at *= 8;
    }
}

/// `e^x` for x at most 0, without the system's mathematics library.
fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let x = f64::from(x);
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = x - n * std::f64::consts::LN_2;
    let mut sum = 1.0;
    for k in (1..=9).rev() {
        sum = 1.0 + sum * r / f64::from(k);
    }
    (sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_that_of_the_library() {
        for i in 0..8700 {
            let x = -0.01 * i as f32;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= 1e-7 * want, "{x}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    }

    #[test]
    fn the_largest_come_first_and_of_equals_the_lower_id() {
        let mut list = vec![(0, 1.0), (1, 3.0), (2, 3.0), (3, 2.0), (4, 3.0)];
        assert_eq!(keep_top(&mut list, 2), [(1, 3.0), (2, 3.0)]);
        let mut list = vec![(0, 1.0), (1, 1.0), (2, 2.0)];
        assert_eq!(nucleus(&mut list, 0.75), 2);
        assert_eq!(list[..2], [(2, 2.0), (0, 1.0)]);
    }
}

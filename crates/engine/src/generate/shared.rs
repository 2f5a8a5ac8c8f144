//! Sampling under vocabulary parallelism.
//!
//! Logits stay on the ranks that compute them. Unmodified sampling scans the vocabulary in order, so the running sum is passed
//! from rank to rank: twenty bytes per row. For greedy decoding, `top_k` and `min_p`, a rank sends its candidate tokens to the
//! first rank. Only `top_p` without `top_k`, penalties and top logprobs need all logits of a row: those rows are gathered to the
//! first rank. So are all rows of a device that cannot sample from parts of the vocabulary.

use super::choose::{SampleBatch, TokenGroup};
use crate::model::Model;
use crate::model::tensor::Team;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Choices, Draw, SampleSpec, TokenChoice};
use ferrl_kernels::math::ln;
use ferrl_kernels::truncate::Truncation;
use std::ops::Range;

/// What a rank sends of its logits of a row.
enum Candidates {
    Nothing,
    /// The k most probable tokens (top-k).
    Top(usize),
    /// Tokens with at least this fraction of the largest probability (min-p).
    AtLeast(f32),
    All,
}

impl Candidates {
    fn of(spec: &SampleSpec, on_host: bool) -> Candidates {
        match spec {
            _ if on_host => Candidates::All,
            SampleSpec { draw: None, .. } => Candidates::Top(1),
            _ if !spec.truncates() => Candidates::Nothing,
            SampleSpec { top_k: 1.., .. } => Candidates::Top(spec.top_k),
            _ if spec.top_p < 1.0 => Candidates::All,
            _ => Candidates::AtLeast(spec.min_p),
        }
    }

    /// Selects from the logits of a rank's tokens, whose ids start at `first`.
    fn list(&self, kept: &mut Truncation, row: &[f32], first: u32) -> Vec<(u32, f32)> {
        let candidates = |(at, &logit): (usize, &f32)| (first + at as u32, logit);
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        match self {
            Candidates::Nothing => Vec::new(),
            Candidates::All => row.iter().enumerate().map(candidates).collect(),
            // Ties: the first, comparing zeros of either sign as equal.
            Candidates::Top(1) => {
                row.iter().enumerate().find(|(_, l)| **l == best).map(candidates).into_iter().collect()
            }
            Candidates::Top(count) => kept.top(row, *count).iter().map(|&(at, l)| (first + at, l)).collect(),
            // A superset of the tokens that can be sampled; the first rank, which knows the global maximum, selects exactly.
            Candidates::AtLeast(least) => {
                let cut = best + ln(f64::from(*least)) as f32 - 1e-3;
                row.iter().enumerate().map(candidates).filter(|(_, l)| *l >= cut).collect()
            }
        }
    }
}

/// Samples a token for each row. Collective; the first rank's choices are valid for all.
pub(super) fn sample_in_team(
    model: &Model,
    team: &Team,
    h: &Buffer,
    batch: &SampleBatch,
) -> Result<TokenGroup> {
    let (x, op, (member, size)) =
        (model.select_rows(h, &batch.rows)?, model.logp_head(batch.divisor), team.member());
    let (rows, tokens) = (batch.rows.len(), model.vocab_of((member, size)));
    let mut logits = model.f32s(rows * tokens.len())?;
    let folded =
        model.fold_together(team, (op, &x), &[], Some(&mut logits).filter(|_| !tokens.is_empty()))?;
    if !model.backend.draws_by_parts() {
        return sample_gathered(model, team, (&logits, &folded.lse), batch);
    }
    let draws = scan_sample(model, team, (&logits, &folded.lse), &batch.specs)?;
    let here = LocalLogits { rows: model.read_f32s(&logits)?, tokens };
    let lists = candidates(team, &here, batch)?;
    let lse = model.read_f32s(&folded.lse)?;
    if member > 0 {
        return Ok(TokenGroup { logits: None, choices: Choices::new(Box::new(Vec::<TokenChoice>::new())) });
    }
    let (mut kept, mut choices) = (Truncation::default(), Vec::with_capacity(rows));
    let vocab = model.config.vocab;
    let on_host = batch.on_host.contains(&true);
    let mut whole = if on_host { Some(model.f32s(rows * vocab)?) } else { None };
    for (row, (spec, list)) in batch.specs.iter().zip(lists).enumerate() {
        let lse = lse[row];
        let choice = if scans_vocabulary(spec) {
            let (token, logit) = draws[row].token.or(draws[row].last).unwrap_or((0, f32::NAN));
            TokenChoice { token, logit, lse, kept: logit - lse }
        } else {
            let (token, logit, kept) = kept.choose_among(&list, spec);
            TokenChoice { token, logit, lse, kept }
        };
        choices.push(choice);
        if let Some(whole) = whole.as_mut().filter(|_| batch.on_host[row]) {
            let values: Vec<f32> = list.iter().map(|&(_, logit)| logit).collect();
            model.backend.write(whole, row * vocab, &values)?;
        }
    }
    Ok(TokenGroup { logits: whole, choices: Choices::new(Box::new(choices)) })
}

/// The same for devices that sample whole rows only: gathers the rows to the first rank.
fn sample_gathered(
    model: &Model,
    team: &Team,
    (logits, lse): (&Buffer, &Buffer),
    batch: &SampleBatch,
) -> Result<TokenGroup> {
    let Some(whole) = model.logits_on_first(team, logits, batch.rows.len())? else {
        return Ok(TokenGroup { logits: None, choices: Choices::new(Box::new(Vec::<TokenChoice>::new())) });
    };
    let choices = model.backend.choose(&whole, lse, &batch.specs)?;
    Ok(TokenGroup { logits: batch.on_host.contains(&true).then_some(whole), choices })
}

/// Whether the row is sampled from the whole vocabulary.
fn scans_vocabulary(spec: &SampleSpec) -> bool {
    spec.draw.is_some() && !spec.truncates()
}

/// Samples from the whole vocabulary: the running sums pass from rank to rank in vocabulary order and end at the first rank.
fn scan_sample(
    model: &Model,
    team: &Team,
    (logits, lse): (&Buffer, &Buffer),
    specs: &[SampleSpec],
) -> Result<Vec<Draw>> {
    // Rows that are not sampled here count as done.
    let start =
        |spec: &SampleSpec| Draw { token: (!scans_vocabulary(spec)).then_some((0, 0.0)), ..Draw::default() };
    let mut draws: Vec<Draw> = specs.iter().map(start).collect();
    if !specs.iter().any(scans_vocabulary) {
        return Ok(draws);
    }
    let ((member, size), tokens) = (team.member(), |m| model.vocab_of((m, team.member().1)));
    let uniform: Vec<f32> = specs.iter().map(|spec| spec.draw.unwrap_or(0.0)).collect();
    let with_tokens: Vec<usize> = (0..size).filter(|&m| !tokens(m).is_empty()).collect();
    for (i, &from) in with_tokens.iter().enumerate() {
        let to = with_tokens.get(i + 1).copied().unwrap_or(0);
        if member == from {
            model.backend.sample_part((logits, tokens(from).start), lse, &uniform, &mut draws)?;
        }
        let bytes = if member == from { to_bytes(&draws) } else { Vec::new() };
        let parts: Vec<&[u8]> = (0..size).map(|m| if m == to { &bytes[..] } else { &[] }).collect();
        let arrived = team.ranks().all_to_all(&parts)?;
        if member == to {
            draws = of_bytes(&arrived[from], draws.len())?;
        }
    }
    Ok(draws)
}

const NONE: u32 = u32::MAX;

fn to_bytes(draws: &[Draw]) -> Vec<u8> {
    let of = |token: Option<(u32, f32)>| token.map_or([NONE, 0], |(id, logit)| [id, logit.to_bits()]);
    let numbers = draws.iter().flat_map(|d| {
        let ([token, logit], [last, last_logit]) = (of(d.token), of(d.last));
        [d.below.to_bits(), token, logit, last, last_logit]
    });
    numbers.flat_map(u32::to_le_bytes).collect()
}

fn of_bytes(bytes: &[u8], count: usize) -> Result<Vec<Draw>> {
    let (numbers, rest) = bytes.as_chunks::<4>();
    let numbers: Vec<u32> = numbers.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let (rows, []) = numbers.as_chunks::<5>() else { return Err(unread()) };
    if rows.len() != count || !rest.is_empty() {
        return Err(unread());
    }
    let of = |id: u32, logit: u32| (id != NONE).then(|| (id, f32::from_bits(logit)));
    let draw = |&[below, token, logit, last, last_logit]: &[u32; 5]| Draw {
        below: f32::from_bits(below),
        token: of(token, logit),
        last: of(last, last_logit),
    };
    Ok(rows.iter().map(draw).collect())
}

fn unread() -> Error {
    Error::rank("another rank chooses other tokens").fix("report it")
}

/// This rank's logits, `[rows, tokens]`.
struct LocalLogits {
    rows: Vec<f32>,
    tokens: Range<usize>,
}

/// The candidates of each row that the members sent to the first rank; in id order if all were sent.
fn candidates(team: &Team, here: &LocalLogits, batch: &SampleBatch) -> Result<Vec<Vec<(u32, f32)>>> {
    let mut kept = Truncation::default();
    let sent: Vec<Candidates> =
        batch.specs.iter().zip(&batch.on_host).map(|(spec, &l)| Candidates::of(spec, l)).collect();
    if sent.iter().all(|sent| matches!(sent, Candidates::Nothing)) {
        return Ok(vec![Vec::new(); sent.len()]);
    }
    let width = here.tokens.len();
    let mut bytes = Vec::new();
    for (row, sent) in sent.iter().enumerate() {
        let list = sent.list(&mut kept, &here.rows[row * width..(row + 1) * width], here.tokens.start as u32);
        bytes.extend((list.len() as u32).to_le_bytes());
        bytes.extend(list.iter().flat_map(|(id, logit)| [*id, logit.to_bits()]).flat_map(u32::to_le_bytes));
    }
    let size = team.member().1;
    let parts: Vec<&[u8]> = (0..size).map(|to| if to == 0 { &bytes[..] } else { &[] }).collect();
    let mut lists: Vec<Vec<(u32, f32)>> = vec![Vec::new(); sent.len()];
    for bytes in team.ranks().all_to_all(&parts)?.iter().filter(|bytes| !bytes.is_empty()) {
        let mut numbers = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let mut next = || numbers.next().ok_or_else(unread);
        for list in &mut lists {
            for _ in 0..next()? {
                list.push((next()?, f32::from_bits(next()?)));
            }
        }
    }
    Ok(lists)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::checkpoint::InitOptions;
    use crate::model::Options;
    use ferrl_kernels::comm::{device_threads, threads};
    use ferrl_kernels::{DType, Ranks};

    const ROWS: usize = 5;

    fn model(vocab: usize) -> Model {
        let init = InitOptions { vocab, hidden: 16, layers: 1, std: 0.5, ..InitOptions::new("qwen2") };
        let options = Options { dtype: DType::F32, training: false, context: 0 };
        Model::random(ferrl_kernels::open("cpu", Some(1)).unwrap(), &init, options).unwrap()
    }

    /// Tokens with the bits of their log-probabilities, and the bits of the logits that the host needs.
    type ChosenBits = (Vec<(u32, u32, u32)>, Vec<u32>);

    fn chosen(model: &Model, group: &TokenGroup) -> ChosenBits {
        let choices = model.backend.chosen(&group.choices).unwrap();
        let logits = model.read_f32s(group.logits.as_ref().unwrap()).unwrap();
        let bits = |c: &TokenChoice| (c.token, c.logit.to_bits(), c.lse.to_bits());
        (choices.iter().map(bits).collect(), logits.into_iter().map(f32::to_bits).collect())
    }

    fn choices(ranks: &Ranks, vocab: usize, batch: &SampleBatch) -> Option<ChosenBits> {
        let mut m = model(vocab);
        let hidden: Vec<f32> = (0..ROWS * 16).map(|i| ((i * 37 % 23) as f32 - 11.0) / 7.0).collect();
        m.set_team(Team::new(ranks, 1, ranks.size(), false)).unwrap();
        m.gather_to_read().unwrap();
        let h = m.upload(&hidden).unwrap();
        let Some(team) = m.team().cloned() else { return Some(chosen(&m, &batch.choose(&m, &h).unwrap())) };
        let (x, op, tokens) =
            (m.select_rows(&h, &batch.rows).unwrap(), m.logp_head(batch.divisor), m.vocab_of(team.member()));
        let mut logits = m.f32s(ROWS * tokens.len()).unwrap();
        let own = Some(&mut logits).filter(|_| !tokens.is_empty());
        let lse = m.fold_together(&team, (op, &x), &[], own).unwrap().lse;
        let group = sample_gathered(&m, &team, (&logits, &lse), batch).unwrap();
        (team.member().0 == 0).then(|| chosen(&m, &group))
    }

    #[test]
    fn rows_that_are_put_together_give_the_choices_of_one_rank() {
        let specs = vec![
            SampleSpec::plain(None),
            SampleSpec::plain(Some(0.3)),
            SampleSpec { top_k: 9, ..SampleSpec::plain(Some(0.8)) },
            SampleSpec { top_p: 0.7, ..SampleSpec::plain(Some(0.5)) },
            SampleSpec { min_p: 0.05, ..SampleSpec::plain(Some(0.99)) },
        ];
        let batch =
            SampleBatch { divisor: 0.7, rows: (0..ROWS as u32).collect(), specs, on_host: vec![true; ROWS] };
        // Parts of one tile and of several, and a rank with none.
        for (connect, vocab, size) in
            [(threads as fn(usize) -> Vec<Ranks>, 700, 2), (device_threads, 700, 3), (device_threads, 300, 3)]
        {
            let want = choices(Ranks::ALONE, vocab, &batch).unwrap();
            let got: Vec<_> = std::thread::scope(|scope| {
                let batch = &batch;
                let run = |ranks: Ranks| scope.spawn(move || choices(&ranks, vocab, batch));
                let running: Vec<_> = connect(size).into_iter().map(run).collect();
                running.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            assert_eq!(got[0].as_ref(), Some(&want), "{vocab} tokens on {size} ranks");
            assert!(got[1..].iter().all(Option::is_none));
        }
    }
}

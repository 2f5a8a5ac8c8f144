//! Input and output of the trainer: tokens of whole sequences, statistics per token.
//!
//! Indexing: a statistic at input position `i` concerns what follows token `i`. `logp[i]` and `entropy[i]` belong to token
//! `i + 1` (0 at a sequence's last position); `value[i]` is of the state after token `i` and exists at every position.

use crate::model::ModelConfig;
use crate::{Error, Result};
use ferrl_kernels::backend::Segments;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchSequence {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether the token at each position is a scored target; empty means all but the first.
    pub scored: Vec<bool>,
    /// Additional tokens whose logp is computed at each position, `others_per_row` per position; may be empty.
    pub others: Vec<u32>,
}

/// Packed sequences, computed together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Concatenated in this order.
    pub sequences: Vec<BatchSequence>,
    /// Additional scored tokens per position.
    pub others_per_row: usize,
}

/// One number per input position, all sequences concatenated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Log-probability of the next token.
    pub logp: Vec<f32>,
    /// Entropy of the next token's distribution, in nats.
    pub entropy: Vec<f32>,
    /// Value or score; empty for a model without such a head.
    pub value: Vec<f32>,
    /// Log-probabilities of the additional tokens, `others_per_row` per position.
    pub others: Vec<f32>,
    /// KL to another model over the whole vocabulary; empty unless computed.
    pub kl: Vec<f32>,
}

impl Stats {
    /// Whether it holds log-probabilities only.
    pub fn is_logp_alone(&self) -> bool {
        [&self.entropy, &self.value, &self.others, &self.kl].iter().all(|column| column.is_empty())
    }
}

/// d loss / d each element of [`Stats`], in its layout; an empty vector is zero.
pub type StatGrads = Stats;

impl BatchSequence {
    /// All tokens but the first are targets.
    pub fn new(ids: Vec<u32>) -> Self {
        BatchSequence { ids, ..Default::default() }
    }
}

impl Batch {
    /// All tokens but the first of each sequence are targets.
    pub fn of(sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        Batch { sequences: sequences.into_iter().map(BatchSequence::new).collect(), others_per_row: 0 }
    }
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.ids.len()).sum()
    }
    /// Row ranges of the sequences.
    pub fn segments(&self) -> Segments {
        Segments::of(self.sequences.iter().map(|s| s.ids.len()))
    }

    pub(super) fn check(&self, config: &ModelConfig) -> Result<()> {
        if self.sequences.is_empty() {
            return Err(Error::data("a batch without sequences").fix("leave empty batches out"));
        }
        for (i, s) in self.sequences.iter().enumerate() {
            let at = |e: Error| e.at(format!("sequence {i}"));
            if s.ids.is_empty() {
                return Err(at(Error::data("it has no tokens")).fix("leave empty sequences out"));
            }
            config.check_ids(&s.ids).and_then(|()| config.check_ids(&s.others)).map_err(at)?;
            config.check_length(s.ids.len()).map_err(at)?;
            if !s.scored.is_empty() && s.scored.len() != s.ids.len() {
                let (got, want) = (s.scored.len(), s.ids.len());
                return Err(at(Error::data(format!("the mask has {got} entries for {want} tokens"))));
            }
            let want = s.ids.len() * self.others_per_row;
            if !s.others.is_empty() && s.others.len() != want {
                return Err(at(Error::data(format!("{} other tokens, expected {want}", s.others.len()))));
            }
        }
        Ok(())
    }

    /// Rows that predict a target, their targets, and the additional tokens of each.
    pub(super) fn scored_rows(&self) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let (mut rows, mut targets, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for s in &self.sequences {
            for i in 1..s.ids.len() {
                if s.scored.is_empty() || s.scored[i] {
                    rows.push((start + i - 1) as u32);
                    targets.push(s.ids[i]);
                    if !s.others.is_empty() {
                        let j = self.others_per_row;
                        others.extend_from_slice(&s.others[(i - 1) * j..i * j]);
                    } else {
                        others.extend(std::iter::repeat_n(0, self.others_per_row));
                    }
                }
            }
            start += s.ids.len();
        }
        (rows, targets, others)
    }

    pub(super) fn flat(&self) -> (Vec<u32>, Vec<u32>) {
        let ids = self.sequences.iter().flat_map(|s| s.ids.iter().copied()).collect();
        let positions = self.sequences.iter().flat_map(|s| 0..s.ids.len() as u32).collect();
        (ids, positions)
    }
}

/// Cuts sequences into micro-batches of at most `budget` tokens, in order: a function of lengths and budget only, so that the
/// order of summation depends on neither threads nor ranks.
pub fn plan(lengths: &[usize], budget: usize) -> Result<Vec<std::ops::Range<usize>>> {
    let mut cuts = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (i, &len) in lengths.iter().enumerate() {
        if len > budget {
            return Err(Error::usage(format!(
                "sequence {i} has {len} tokens, the micro-batch budget is {budget}"
            ))
            .fix(format!("a budget of at least {len} tokens, or shorter sequences")));
        }
        if tokens + len > budget && i > start {
            cuts.push(start..i);
            (start, tokens) = (i, 0);
        }
        tokens += len;
    }
    if start < lengths.len() {
        cuts.push(start..lengths.len());
    }
    Ok(cuts)
}

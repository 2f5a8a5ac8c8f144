//! From hidden states to log-probabilities and sampled tokens.

use super::{LinearOps, MemoryOps};
use crate::operands::*;
use crate::{Buffer, Error, Result, Weight, composed, shapes};

/// The language-model head: log-probabilities without materialising logits.
pub trait HeadOps: LinearOps {
    /// `others` holds additional tokens per row, `[rows, j]`, and receives their log-probabilities.
    fn logp(
        &self,
        head: HeadInput<'_>,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()> {
        let listed = others.as_ref().map(|(ids, out)| (*ids, &**out));
        shapes::logp(self.as_info(), head, listed, stats)?;
        composed::logp(self, head, others, stats)
    }
    /// Gradients of hidden states and weight from those of the row statistics.
    fn logp_backward(
        &self,
        head: HeadInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_backward(self.as_info(), head, others, stats, grads, &to)?;
        composed::logp_backward(self, head, others, grads, to)
    }
    /// One-pass head: `logp` and `logp_backward` together, for precomputed gradients; the same bits.
    fn logp_one_pass(
        &self,
        head: HeadInput<'_>,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_one_pass(self.as_info(), head, dlogp, stats, &to)?;
        self.logp(head, None, stats)?;
        let grads = LogpGrads { logp: dlogp, entropy: None, others: None };
        self.logp_backward(head, None, stats, &grads, to)
    }
    /// Materialised scaled logits of a few rows, `[rows, vocab]` f32, and their `lse` with the bits that `logp` uses.
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::logits(self.as_info(), x, w, [logits, lse])?;
        composed::logits(self, op, x, w, logits, lse)
    }
}

/// KL divergence between the distributions of two heads over the whole vocabulary.
pub trait DivergenceOps: LinearOps {
    /// KL(p || q) per row over the whole vocabulary; `p` and `q` are (hidden states, head).
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self.as_info(), p, q, kl)?;
        composed::kl(self, op, p, q, kl)
    }
    /// Gradient of `kl` with respect to `p`.
    fn kl_backward(
        &self,
        op: LogpHead,
        p: (&Buffer, &Weight),
        q: (&Buffer, &Weight),
        dkl: &Buffer,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::kl_backward(self.as_info(), p, q, dkl, &to)?;
        composed::kl_backward(self, op, p, q, dkl, to)
    }
}

/// Sampling from logits.
pub trait SampleOps: MemoryOps {
    /// For each row of `logits`, the first token whose cumulative probability exceeds `uniform[row]`.
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        shapes::sample(self.as_info(), logits, lse, uniform)?;
        composed::sample(self, logits, lse, uniform)
    }
    /// For each row of `logits`, the first maximum.
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self.as_info(), logits, rows)?;
        composed::argmax(self, logits, rows)
    }
    /// Starts choosing a token for each row of `logits`: as `sample` or `argmax`, or sampling with truncation.
    /// [`SampleOps::chosen`] returns the tokens; other work may be launched in between.
    fn choose(&self, logits: &Buffer, lse: &Buffer, specs: &[SampleSpec]) -> Result<Choices> {
        shapes::choose(self.as_info(), logits, lse, specs.iter().map(|spec| spec.draw))?;
        Ok(Choices::new(Box::new(composed::choose(self, logits, lse, specs)?)))
    }
    /// Waits for the choices, but not for work launched after them.
    fn chosen(&self, choices: &Choices) -> Result<Vec<TokenChoice>> {
        let made = choices.data().downcast_ref::<Vec<TokenChoice>>();
        made.cloned().ok_or_else(|| Error::usage("operation chosen: choices of another device"))
    }
    /// Copies chosen tokens into an index buffer, without a host round trip where the device can: element `i` becomes the token
    /// of row `from[i].1` of `choices[from[i].0]`. Elements beyond `from.len()` become unspecified valid tokens.
    fn feed(&self, choices: &[&Choices], from: &[(usize, u32)], ids: &mut Buffer) -> Result<()> {
        let chosen = choices.iter().map(|c| self.chosen(c)).collect::<Result<Vec<_>>>()?;
        let of = |&(i, row): &(usize, u32)| chosen.get(i).and_then(|rows| rows.get(row as usize));
        let tokens: Option<Vec<u32>> = from.iter().map(|f| of(f).map(|choice| choice.token)).collect();
        let Some(mut tokens) = tokens.filter(|tokens| tokens.len() <= ids.len()) else {
            return Err(Error::usage(
                "operation feed: more tokens than ids, or a row that nothing was chosen for",
            ));
        };
        tokens.resize(ids.len(), 0);
        self.set_indices(ids, &tokens)
    }
}

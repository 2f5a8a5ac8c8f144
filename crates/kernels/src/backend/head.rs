//! From hidden states to log-probabilities and tokens.

use super::{LinearOps, MemoryOps};
use crate::buffer::{Buffer, Weight};
use crate::composed;
use crate::error::{Error, Result};
use crate::operands::*;
use crate::shapes;

/// The language-model head: log-probabilities without stored logits.
pub trait HeadOps: LinearOps {
    /// `others` names further tokens per row, `[rows, j]`, and takes their log-probabilities.
    fn logp(
        &self,
        head: HeadInput<'_>,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()> {
        let listed = others.as_ref().map(|(ids, out)| (*ids, &**out));
        shapes::logp(self.as_home(), head, listed, stats)?;
        composed::logp(self, head, others, stats)
    }
    /// Gradients of hidden states and weight, from those of the row's numbers.
    fn logp_backward(
        &self,
        head: HeadInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_backward(self.as_home(), head, others, stats, grads, &to)?;
        composed::logp_backward(self, head, others, grads, to)
    }
    /// One-pass head: `logp` and `logp_backward` together, for gradients that are computed before; the same bits.
    fn logp_one_pass(
        &self,
        head: HeadInput<'_>,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_one_pass(self.as_home(), head, dlogp, stats, &to)?;
        self.logp(head, None, stats)?;
        let grads = LogpGrads { logp: dlogp, entropy: None, others: None };
        self.logp_backward(head, None, stats, &grads, to)
    }
    /// For a few rows: the scaled logits themselves, `[rows, vocab]` f32, and their `lse`, the bits `logp` uses.
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::logits(self.as_home(), x, w, [logits, lse])?;
        composed::logits(self, op, x, w, logits, lse)
    }
}

/// KL divergence between two heads over the whole vocabulary.
pub trait DivergenceOps: LinearOps {
    /// KL(p || q) per row over the whole vocabulary; `p` and `q` are (hidden states, head).
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self.as_home(), p, q, kl)?;
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
        shapes::kl_backward(self.as_home(), p, q, dkl, &to)?;
        composed::kl_backward(self, op, p, q, dkl, to)
    }
}

/// Tokens chosen from logits.
pub trait SampleOps: MemoryOps {
    /// For each row of `logits`, the first token whose cumulative probability exceeds `uniform[row]`.
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        shapes::sample(self.as_home(), logits, lse, uniform)?;
        composed::sample(self, logits, lse, uniform)
    }
    /// For each row of `logits`, the first largest.
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self.as_home(), logits, rows)?;
        composed::argmax(self, logits, rows)
    }
    /// Begins to choose a token of each row of `logits`: what `sample` or `argmax` gives, or a draw among the tokens that
    /// truncation leaves. [`SampleOps::chosen`] has the answers; other work may be begun before they are asked for.
    fn choose(&self, logits: &Buffer, lse: &Buffer, asks: &[Ask]) -> Result<Choices> {
        shapes::choose(self.as_home(), logits, lse, asks.iter().map(|ask| ask.draw))?;
        Ok(Choices::new(Box::new(composed::choose(self, logits, lse, asks)?)))
    }
    /// Waits for choices, not for what was begun after them.
    fn chosen(&self, choices: &Choices) -> Result<Vec<TokenChoice>> {
        let made = choices.data().downcast_ref::<Vec<TokenChoice>>();
        made.cloned().ok_or_else(|| Error::usage("operation chosen: choices of another device"))
    }
    /// Puts chosen tokens into an index buffer, on devices that can without asking which they are: element `i` becomes the
    /// token of row `from[i].1` of `choices[from[i].0]`. Elements past those of `from` hold any token.
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

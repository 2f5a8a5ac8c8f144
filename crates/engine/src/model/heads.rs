//! Output heads: log-probabilities, values, and logits for decoding.

use super::gradient::{Gradient, Grads, added_to};
use super::linear::Linear;
use super::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::{HeadGrads, HeadInput, LogpGrads, LogpHead, LogpStats};
use ferrl_kernels::{Buffer, DType, Weight};

/// Rows whose next token is scored.
pub struct Scored {
    pub(super) rows: Buffer,    // row indices into the hidden states
    pub(super) targets: Buffer, // target token of each row
    pub(super) others: Option<Buffer>,
    pub(super) x: Buffer, // the gathered rows
    pub(super) op: LogpHead,
    pub(super) stats: LogpStats,
    pub(super) count: usize,
}

/// Statistics of the scored rows, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowStats {
    /// Log-probability of the target.
    pub logp: Vec<f32>,
    /// Entropy in nats.
    pub entropy: Vec<f32>,
    /// Log-probabilities of the additional tokens, `[rows, others]`.
    pub others: Vec<f32>,
}

impl Model {
    /// The logp head at a temperature; the family's divisor of the logits is folded into it. (No family has both a divisor and a
    /// soft cap, whose order would matter.)
    pub fn logp_head(&self, temperature: f32) -> LogpHead {
        LogpHead { temperature: temperature * self.config.logits_divisor, softcap: self.config.final_softcap }
    }

    pub fn check_lm_head(&self) -> Result<()> {
        self.head_layer().map(drop)
    }

    fn head_layer(&self) -> Result<Linear> {
        self.layout.head.ok_or_else(|| {
            Error::model("this model gives scores, not next-token probabilities")
                .fix("use the causal-LM directory it was made from")
        })
    }

    /// The language-model head, or an error that says the model has none.
    pub fn lm_head(&self) -> Result<&Weight> {
        Ok(self.head_layer()?.operand(self).weight)
    }

    /// Scores `rows` of the hidden states `h`.
    pub fn score(
        &self,
        h: &Buffer,
        rows: &[u32],
        targets: &[u32],
        others: &[u32],
        temperature: f32,
    ) -> Result<(Scored, RowStats)> {
        if let Some(team) = self.team() {
            return self.score_together(team, h, (rows, targets), others, temperature);
        }
        let (b, w, op) = (&*self.backend, self.lm_head()?, self.logp_head(temperature));
        let n = rows.len();
        let mut x = self.activations(n * self.config.hidden)?;
        let rows = b.indices(rows)?;
        b.gather_rows(h, &rows, self.config.hidden, &mut x)?;
        let targets = b.indices(targets)?;
        let mut stats = LogpStats { logp: self.f32s(n)?, entropy: self.f32s(n)?, lse: self.f32s(n)? };
        let ids = if others.is_empty() { None } else { Some(b.indices(others)?) };
        let mut logp_others = self.f32s(others.len())?;
        let head = HeadInput { op, x: &x, w, targets: &targets };
        b.logp(head, ids.as_ref().map(|i| (i, &mut logp_others)), &mut stats)?;
        let result = RowStats {
            logp: self.read_f32s(&stats.logp)?,
            entropy: self.read_f32s(&stats.entropy)?,
            others: self.read_f32s(&logp_others)?,
        };
        Ok((Scored { rows, targets, others: ids, x, op, stats, count: n }, result))
    }

    /// One-pass head: scores `rows` of the hidden states `h` and propagates `dlogp` back to `dh`. The bits of
    /// [`Model::score`] and [`Model::score_backward`], with logits computed once where they fit.
    pub fn score_one_pass(
        &self,
        (h, dh): (&Buffer, &mut Buffer),
        (rows, targets): (&[u32], &[u32]),
        dlogp: &[f32],
        temperature: f32,
        grads: Grads<'_>,
    ) -> Result<RowStats> {
        let (b, w, op) = (&*self.backend, self.lm_head()?, self.logp_head(temperature));
        assert!(targets.len() == rows.len() && dlogp.len() == rows.len());
        let x = self.select_rows(h, rows)?;
        let (rows, targets, dlogp) = (b.indices(rows)?, b.indices(targets)?, self.upload(dlogp)?);
        let n = dlogp.len();
        let mut stats = LogpStats { logp: self.f32s(n)?, entropy: self.f32s(n)?, lse: self.f32s(n)? };
        let mut dx = self.activations(x.len())?;
        let dw = self.layout.head.and_then(|head| grads[head.weight].as_mut());
        let add = dw.as_ref().is_some_and(|slot| !slot.is_empty());
        let head = HeadInput { op, x: &x, w, targets: &targets };
        let to = HeadGrads { dx: &mut dx, dw: dw.map(Gradient::written), add };
        b.logp_one_pass(head, &dlogp, &mut stats, to)?;
        b.scatter_rows(&dx, &rows, self.config.hidden, dh)?;
        let (logp, entropy) = (self.read_f32s(&stats.logp)?, self.read_f32s(&stats.entropy)?);
        Ok(RowStats { logp, entropy, others: Vec::new() })
    }

    /// Maps gradients of the statistics to those of the hidden states (overwrites all of `dh`) and of the head.
    pub fn score_backward(&self, s: &Scored, g: &RowStats, dh: &mut Buffer, grads: Grads<'_>) -> Result<()> {
        let b = &*self.backend;
        assert!(g.logp.len() == s.count && g.entropy.len() == s.count);
        let dlogp = self.upload(&g.logp)?;
        let dentropy =
            if g.entropy.iter().any(|&d| d != 0.0) { Some(self.upload(&g.entropy)?) } else { None };
        let others = s.others.as_ref().filter(|_| !g.others.is_empty());
        let dothers = if others.is_some() { Some(self.upload(&g.others)?) } else { None };
        let flow = LogpGrads { logp: &dlogp, entropy: dentropy.as_ref(), others: dothers.as_ref() };
        if let Some(team) = self.team() {
            return self.score_backward_together(team, (s, others), &flow, dh, grads);
        }
        let mut dx = self.activations(s.x.len())?;
        let head = self.layout.head.expect("scored rows come from a language-model head");
        let (w, dw) = (self.weight(head.weight), grads[head.weight].as_mut());
        let add = dw.as_ref().is_some_and(|slot| !slot.is_empty());
        let dw = dw.map(Gradient::written);
        let scored = HeadInput { op: s.op, x: &s.x, w, targets: &s.targets };
        b.logp_backward(scored, others, &s.stats, &flow, HeadGrads { dx: &mut dx, dw, add })?;
        b.scatter_rows(&dx, &s.rows, self.config.hidden, dh)
    }

    /// KL(this || other) over the whole vocabulary, for rows `x` of this model's hidden states and `y` of the other's.
    pub fn kl(&self, x: &Buffer, (other, y): (&Model, &Buffer), temperature: f32) -> Result<Vec<f32>> {
        if let Some(team) = self.team().or(other.team()) {
            return self.kl_together(team, x, (other, y), temperature);
        }
        let mut kl = self.f32s(x.len() / self.config.hidden)?;
        let (p, q) = ((x, self.lm_head()?), (y, other.lm_head()?));
        self.backend.kl(self.logp_head(temperature), p, q, &mut kl)?;
        self.read_f32s(&kl)
    }

    /// Adds the gradient of [`Model::kl`] to `dh` and the head's gradient, for the `rows` of `h` that were compared.
    pub fn kl_backward(
        &self,
        (h, dh): (&Buffer, &mut Buffer),
        (rows, dkl): (&[u32], &[f32]),
        (other, y): (&Model, &Buffer),
        temperature: f32,
        grads: Grads<'_>,
    ) -> Result<()> {
        let (b, x) = (&*self.backend, self.select_rows(h, rows)?);
        let (mut dx, mut spread) = (self.activations(x.len())?, self.activations(dh.len())?);
        if let Some(team) = self.team() {
            self.kl_backward_together(team, (&x, &mut dx), dkl, (other, y, temperature), grads)?;
        } else {
            let head = self.layout.head.expect("a KL comes from a language-model head");
            let (op, p) = (self.logp_head(temperature), (&x, self.weight(head.weight)));
            let to = HeadGrads { dx: &mut dx, dw: added_to(b, &mut grads[head.weight])?, add: true };
            b.kl_backward(op, p, (y, other.lm_head()?), &self.upload(dkl)?, to)?;
        }
        b.scatter_rows(&dx, &b.indices(rows)?, self.config.hidden, &mut spread)?;
        b.axpy(1.0, &spread, dh)
    }

    /// One scalar per row of the hidden states: the score or value head.
    pub fn values(&self, h: &Buffer) -> Result<Vec<f32>> {
        let Some(head) = self.layout.value else { return Ok(Vec::new()) };
        let mut v = self.f32s(h.len() / self.config.hidden)?;
        head.forward(self, h, &mut v)?;
        self.read_f32s(&v)
    }

    /// Adds the gradient of [`Model::values`] to `dh` and the head's gradient.
    pub fn values_backward(
        &self,
        h: &Buffer,
        dvalue: &[f32],
        dh: &mut Buffer,
        grads: Grads<'_>,
    ) -> Result<()> {
        let Some(head) = self.layout.value else { return Ok(()) };
        let mut dv = self.activations(dvalue.len())?;
        self.backend.write(&mut dv, 0, dvalue)?;
        let mut dx = self.activations(h.len())?;
        head.backward_weight(self, &dv, h, grads)?;
        head.backward_input(self, &dv, &mut dx)?;
        self.backend.axpy(1.0, &dx, dh)
    }

    /// `logits / temperature` of all rows of `h`, and their log-sum-exp. Materialises the logits: only for a few rows.
    pub fn logits(&self, h: &Buffer, temperature: f32) -> Result<(Buffer, Buffer)> {
        let (w, rows) = (self.lm_head()?, h.len() / self.config.hidden);
        let (mut logits, mut lse) = (self.f32s(rows * w.n)?, self.f32s(rows)?);
        self.backend.logits(self.logp_head(temperature), h, w, &mut logits, &mut lse)?;
        Ok((logits, lse))
    }

    pub fn select_rows(&self, h: &Buffer, rows: &[u32]) -> Result<Buffer> {
        let mut x = self.activations(rows.len() * self.config.hidden)?;
        self.backend.gather_rows(h, &self.backend.indices(rows)?, self.config.hidden, &mut x)?;
        Ok(x)
    }

    pub(crate) fn read_f32s(&self, b: &Buffer) -> Result<Vec<f32>> {
        let mut v = vec![0.0; b.len()];
        self.backend.read(b, 0, &mut v)?;
        Ok(v)
    }

    pub(crate) fn upload(&self, values: &[f32]) -> Result<Buffer> {
        let mut b = self.backend.alloc(DType::F32, values.len())?;
        self.backend.write(&mut b, 0, values)?;
        Ok(b)
    }
}

//! Full-vocabulary KL(p || q) between two models at every scored position.

use super::{Batch, ModelTrainer, StatGrads, Stats};
use crate::model::decoder::{Keep, PastKv};
use crate::model::weights::Model;
use crate::{Error, Result};
use ferrl_kernels::Buffer;

/// KL(p || q) per input position; 0 at unscored positions.
pub fn kl(p: &Model, q: &Model, batch: &Batch, temperature: f32) -> Result<Vec<f32>> {
    comparable(p, q)?;
    let rows = batch.scored_rows().0;
    let (x, y) = (scored_states(p, batch, &rows)?, scored_states(q, batch, &rows)?);
    between((p, &x), (q, &y), &rows, batch.tokens(), temperature)
}

/// Refuses models whose distributions cannot be compared token by token.
pub fn comparable(p: &Model, q: &Model) -> Result<()> {
    let (ours, theirs) = (p.config.vocab, q.config.vocab);
    if ours != theirs {
        return Err(Error::model(format!("{ours} tokens in one model, {theirs} in the other"))
            .fix("two models with the same tokenizer"));
    }
    if (p.config.final_softcap, p.config.logits_divisor) != (q.config.final_softcap, q.config.logits_divisor)
    {
        return Err(
            Error::model("the two models do not cap their logits alike").fix("two models of one family")
        );
    }
    if p.dtype != q.dtype {
        return Err(Error::model("one of the two models computes in f32, the other in bf16"));
    }
    Ok(())
}

fn scored_states(model: &Model, batch: &Batch, rows: &[u32]) -> Result<Buffer> {
    batch.check(&model.config)?;
    let (ids, positions) = batch.flat();
    let tokens = model.tokens(&ids, &positions)?;
    let (h, _) = model.forward(&tokens, PastKv::Packed(&batch.segments()), Keep::Nothing)?;
    model.select_rows(&h, rows)
}

fn between(
    (p, x): (&Model, &Buffer),
    (q, y): (&Model, &Buffer),
    rows: &[u32],
    positions: usize,
    temperature: f32,
) -> Result<Vec<f32>> {
    let mut column = vec![0.0; positions];
    if !rows.is_empty() {
        let kl = p.kl(x, (q, y), temperature)?;
        rows.iter().zip(kl).for_each(|(&row, kl)| column[row as usize] = kl);
    }
    Ok(column)
}

impl ModelTrainer {
    /// [`ModelTrainer::forward`], plus `kl`: KL(this model || other).
    pub fn forward_against(&mut self, batch: &Batch, other: &Model) -> Result<Stats> {
        self.for_update(|t| t.compared(batch, other))
    }

    fn compared(&mut self, batch: &Batch, other: &Model) -> Result<Stats> {
        comparable(&self.model, other)?;
        let mut stats = self.forward_kept(batch)?;
        let p = self.pending.as_mut().expect("forward has just left it");
        let x = self.model.select_rows(&p.h, &p.rows)?;
        let y = scored_states(other, batch, &p.rows)?;
        stats.kl = between((&self.model, &x), (other, &y), &p.rows, batch.tokens(), self.temperature)?;
        if let Some(at) = stats.kl.iter().position(|k| !k.is_finite()) {
            return Err(Error::numerics(format!("the KL to the other model is not finite at row {at}"))
                .fix("a lower learning rate, or f32"));
        }
        p.other = Some(y);
        Ok(stats)
    }

    /// [`ModelTrainer::backward`] for the last [`ModelTrainer::forward_against`] with the same other model.
    pub fn backward_against(&mut self, batch: &Batch, grads: &StatGrads, other: &Model) -> Result<()> {
        self.for_update(|t| t.backward_with(batch, grads, Some(other)))
    }
}

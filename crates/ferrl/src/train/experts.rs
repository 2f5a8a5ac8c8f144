//! Mixture of experts in training: the load-balance loss of an update, and the load of the experts.

use super::Stage;
use crate::experience::Metrics;
use ferrl_engine::model::ExpertLoad;
use ferrl_engine::{Error, Result};
use ferrl_kernels::math::ln;

impl Stage {
    /// Sets the weight of the load-balance loss for an update of this number of sequences: a mean over them and over the layers with
    /// experts.
    pub(crate) fn weigh_balance(&mut self, sequences: usize) {
        let Some(experts) = &self.policy.model.config.experts else { return };
        let layers = experts.sparse.iter().filter(|sparse| **sparse).count();
        let terms = (sequences * layers).max(1) as f64;
        self.policy.model.balance = (self.recipe.model.router_aux_loss_coef / terms) as f32;
    }

    /// Metrics of the experts' load over all ranks, after an update. All ranks call it together.
    pub(crate) fn look_at_experts(&mut self, metrics: &mut Metrics) -> Result<()> {
        let own = self.policy.take_load();
        if self.policy.model.config.experts.is_none() {
            return Ok(());
        }
        let mut layers: Vec<ExpertLoad> = Vec::new();
        for bytes in self.ranks.all_gather(&pack(&own))? {
            let loads =
                unpack(&bytes).ok_or_else(|| Error::rank("another rank's model has other experts"))?;
            layers.resize(loads.len().max(layers.len()), ExpertLoad::default());
            layers.iter_mut().zip(&loads).for_each(|(sum, load)| sum.add(load));
        }
        layers.retain(|load| load.tokens.iter().any(|&n| n > 0));
        if layers.is_empty() {
            return Ok(());
        }
        let relative = |load: &ExpertLoad, n: u64| {
            n as f64 * load.tokens.len() as f64 / load.tokens.iter().sum::<u64>() as f64
        };
        let extreme = |of: fn(&[u64]) -> Option<&u64>| {
            layers.iter().map(move |load| relative(load, of(&load.tokens).copied().unwrap_or(0)))
        };
        metrics.add("experts/max_load", extreme(|n| n.iter().max()).fold(0.0, f64::max));
        metrics.add("experts/min_load", extreme(|n| n.iter().min()).fold(f64::INFINITY, f64::min));
        let mean = |of: fn(&ExpertLoad) -> f64| layers.iter().map(of).sum::<f64>() / layers.len() as f64;
        metrics.add("experts/entropy", mean(|load| entropy(&load.tokens)));
        metrics.add("experts/aux_loss", mean(ExpertLoad::mean_balance));
        Ok(())
    }
}

/// Entropy of the fractions over its maximum.
fn entropy(counts: &[u64]) -> f64 {
    let all = counts.iter().sum::<u64>() as f64;
    let terms = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / all);
    if counts.len() < 2 { 1.0 } else { -terms.map(|p| p * ln(p)).sum::<f64>() / ln(counts.len() as f64) }
}

/// For each layer: the number of experts, their tokens, the loss, the sequences.
fn pack(loads: &[ExpertLoad]) -> Vec<u8> {
    let numbers = loads.iter().flat_map(|load| {
        let rest = [load.balance as u64, load.sequences];
        std::iter::once(load.tokens.len() as u64).chain(load.tokens.iter().copied()).chain(rest)
    });
    numbers.flat_map(u64::to_le_bytes).collect()
}

fn unpack(bytes: &[u8]) -> Option<Vec<ExpertLoad>> {
    let (chunks, []) = bytes.as_chunks::<8>() else { return None };
    let numbers: Vec<u64> = chunks.iter().map(|b| u64::from_le_bytes(*b)).collect();
    let (mut rest, mut loads) = (&numbers[..], Vec::new());
    while let Some((&count, after)) = rest.split_first() {
        let (tokens, after) = after.split_at_checked(count as usize)?;
        let (numbers, after) = after.split_at_checked(2)?;
        let (balance, sequences) = (numbers[0] as i64, numbers[1]);
        loads.push(ExpertLoad { tokens: tokens.to_vec(), balance, sequences });
        rest = after;
    }
    Some(loads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_loads_round_trip_between_ranks() {
        let load = |tokens: &[u64], balance| ExpertLoad { tokens: tokens.to_vec(), balance, sequences: 3 };
        let loads = vec![load(&[1, 0, 7], -5), load(&[2, 2, 2], i64::MAX)];
        assert_eq!(unpack(&pack(&loads)), Some(loads));
        assert_eq!(unpack(&[]), Some(Vec::new()));
        assert_eq!(unpack(&7u64.to_le_bytes()), None);
    }

    #[test]
    fn equal_loads_have_entropy_one() {
        assert!((entropy(&[5, 5, 5, 5]) - 1.0).abs() < 1e-12);
        assert_eq!(entropy(&[9, 0, 0]), 0.0);
    }
}

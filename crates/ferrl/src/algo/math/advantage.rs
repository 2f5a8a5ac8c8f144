//! Advantage estimation and normalisation.

use super::mean_std;

/// Generalised advantage estimation (Schulman et al., 2015, arXiv 1506.02438) over the actions of one trajectory:
/// `A_t = d_t + gamma lambda A_(t+1)`, `d_t = r_t + gamma V_(t+1) - V_t`. `after` is the value of the state after the last
/// action: 0 if the trajectory ended, the critic's value if it was truncated.
pub fn gae(rewards: &[f32], values: &[f32], after: f32, gamma: f64, lambda: f64) -> Vec<f32> {
    let mut out = vec![0.0; rewards.len()];
    let (mut next_value, mut next_advantage) = (f64::from(after), 0.0);
    for t in (0..rewards.len()).rev() {
        let delta = rewards[t] as f64 + gamma * next_value - values[t] as f64;
        next_advantage = delta + gamma * lambda * next_advantage;
        next_value = values[t] as f64;
        out[t] = next_advantage as f32;
    }
    out
}

/// Added to the standard deviation of rewards before dividing by it, as in TRL.
pub const EPSILON: f64 = 1e-4;

/// `returns - mean`, optionally divided by `std + eps`, for the returns of one group (or of the batch).
pub fn centre(returns: &[f64], divide_by_std: bool) -> Vec<f64> {
    let (mean, std) = mean_std(returns);
    let scale = if divide_by_std { 1.0 / (std + EPSILON) } else { 1.0 };
    returns.iter().map(|r| (r - mean) * scale).collect()
}

/// How advantages are normalised over the whole rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Normalise {
    /// Mean 0, standard deviation 1 over all action tokens.
    Whiten,
    /// Standard deviation 1 over all action tokens; the mean is not subtracted.
    Scale,
    /// Mean 0, standard deviation 1 over completions, with the same weight for each length.
    Answers,
    /// No normalisation.
    None,
}

impl Normalise {
    /// Normalises values per token in place; [`Normalise::Answers`] is applied elsewhere.
    pub fn apply(self, values: &mut [f64]) {
        if !matches!(self, Normalise::Whiten | Normalise::Scale) || values.len() < 2 {
            return;
        }
        let (mean, std) = mean_std(values);
        let shift = if self == Normalise::Whiten { mean } else { 0.0 };
        values.iter_mut().for_each(|v| *v = (*v - shift) / (std + 1e-8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gae_on_a_constant_critic_is_the_discounted_sum_of_errors() {
        // A critic that says v everywhere and a reward r at the end: all steps but the last have d = (gamma - 1) v.
        let (v, r, gamma, lambda) = (0.5f32, 1.0f32, 0.9, 0.8);
        let got = gae(&[0.0, 0.0, r], &[v, v, v], 0.0, gamma, lambda);
        let inner = (gamma - 1.0) * v as f64;
        let last = (r - v) as f64;
        let want =
            [inner + gamma * lambda * (inner + gamma * lambda * last), inner + gamma * lambda * last, last];
        for (g, w) in got.iter().zip(want) {
            assert!((*g as f64 - w).abs() < 1e-6);
        }
        // With gamma = lambda = 1 an advantage is the return minus the value.
        assert_eq!(gae(&[1.0, 2.0, 4.0], &[0.5, 0.25, 0.125], 0.0, 1.0, 1.0), [6.5, 5.75, 3.875]);
        // A trajectory that was cut off has the critic's value to come.
        assert_eq!(gae(&[1.0, 2.0, 4.0], &[0.5, 0.25, 0.125], 2.0, 1.0, 1.0), [8.5, 7.75, 5.875]);
    }

    #[test]
    fn normalisations_do_what_they_say() {
        let mut v = [1.0, 2.0, 3.0, 6.0];
        Normalise::Whiten.apply(&mut v);
        let (m, s) = mean_std(&v);
        assert!(m.abs() < 1e-12 && (s - 1.0).abs() < 1e-6);
        let mut v = [1.0, 2.0, 3.0, 6.0];
        Normalise::Scale.apply(&mut v);
        assert!(mean_std(&v).0 > 1.0 && (mean_std(&v).1 - 1.0).abs() < 1e-6);
        assert_eq!(centre(&[1.0, 3.0], false), [-1.0, 1.0]);
        assert_eq!(centre(&[2.0, 2.0], true), [0.0, 0.0]);
    }
}

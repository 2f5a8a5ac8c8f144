//! Running mean and variance of rewards over all rollouts so far, batch by batch (Chan et al., 1979).

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    pub count: f64,
    pub mean: f64,
    /// Sum of squared distances from the mean.
    pub square: f64,
}

impl Moments {
    pub fn update(&mut self, values: &[f64]) {
        let n = values.len() as f64;
        if values.is_empty() {
            return;
        }
        let mean = values.iter().sum::<f64>() / n;
        let square: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
        let (delta, total) = (mean - self.mean, self.count + n);
        self.square += square + delta * delta * self.count * n / total;
        self.mean += delta * n / total;
        self.count = total;
    }

    /// Sample standard deviation; 0 for fewer than two values.
    pub fn std(&self) -> f64 {
        if self.count > 1.0 { (self.square / (self.count - 1.0)).sqrt() } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::math::mean_std;

    #[test]
    fn moments_of_batches_are_those_of_all_values() {
        let all: Vec<f64> = (0..20).map(|i| ((i * 37) % 11) as f64 - 4.5).collect();
        let mut moments = Moments::default();
        assert_eq!(moments.std(), 0.0);
        for batch in [&all[..3], &[], &all[3..4], &all[4..]] {
            moments.update(batch);
        }
        let (mean, std) = mean_std(&all);
        assert!((moments.mean - mean).abs() < 1e-12 && (moments.std() - std).abs() < 1e-12);
    }
}

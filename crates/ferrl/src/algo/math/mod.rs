//! Formulas shared by several algorithms, as functions of numbers and slices.

pub mod advantage;
pub mod aggregate;
pub mod correction;
pub mod kl;
pub mod moments;
pub mod surrogate;

use ferrl_engine::math::{exp, ln};

/// `log(1 / (1 + e^-x))`, without overflow.
pub fn log_sigmoid(x: f64) -> f64 {
    if x > 0.0 { -ln(1.0 + exp(-x)) } else { x - ln(1.0 + exp(x)) }
}

/// `1 / (1 + e^-x)`
pub fn sigmoid(x: f64) -> f64 {
    if x > 0.0 {
        1.0 / (1.0 + exp(-x))
    } else {
        let e = exp(x);
        e / (1.0 + e)
    }
}

/// Mean and sample standard deviation (divided by n - 1; 0 for a single number).
pub fn mean_std(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / n;
    let square = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>();
    (mean, if values.len() > 1 { (square / (n - 1.0)).sqrt() } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logistic_functions_are_stable() {
        assert!((log_sigmoid(0.0) + std::f64::consts::LN_2).abs() < 1e-15);
        assert!((log_sigmoid(-800.0) + 800.0).abs() < 1e-9 && log_sigmoid(800.0) == 0.0);
        for x in [-30.0, -1.0, 0.0, 0.3, 40.0] {
            assert!((log_sigmoid(x).exp() - sigmoid(x)).abs() < 1e-12);
        }
    }

    #[test]
    fn deviation_is_the_sample_one() {
        assert_eq!(mean_std(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
        assert_eq!(mean_std(&[5.0]), (5.0, 0.0));
    }
}

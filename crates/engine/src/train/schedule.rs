//! Learning rate schedules.

use crate::{Error, Result, nearest};

/// Decay of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// No decay.
    Constant,
    Linear,
    /// Half a cosine.
    Cosine,
}

impl Decay {
    const ALL: [(&'static str, Decay); 3] =
        [("constant", Decay::Constant), ("linear", Decay::Linear), ("cosine", Decay::Cosine)];

    pub fn named(name: &str) -> Result<Decay> {
        let names = Decay::ALL.map(|(n, _)| n);
        Decay::ALL.iter().find(|(n, _)| *n == name).map(|&(_, d)| d).ok_or_else(|| {
            let hint = nearest(name, names).unwrap_or("constant");
            Error::usage(format!("unknown schedule {name:?}, expected one of {}", names.join(", ")))
                .fix(format!("schedule = \"{hint}\""))
        })
    }
}

/// Linear warm-up to the peak, then decay to `min_ratio` of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub lr: f64,
    pub warmup_steps: u64,
    /// Steps of the whole run, including warm-up.
    pub total_steps: u64,
    pub decay: Decay,
    /// Final learning rate as a fraction of the peak.
    pub min_ratio: f64,
}

impl Schedule {
    /// The learning rate of a step, counting from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * step as f64 / self.warmup_steps as f64;
        }
        let rest = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps) as f64 / rest as f64).min(1.0);
        let left = match self.decay {
            Decay::Constant => return self.lr,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * (1.0 + ferrl_kernels::math::sin_cos(std::f64::consts::PI * done).1),
        };
        self.lr * (self.min_ratio + (1.0 - self.min_ratio) * left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_follow_transformers() {
        // transformers.get_cosine_schedule_with_warmup(10, 100) and get_linear_schedule_with_warmup at lr 1.
        let cosine =
            Schedule { lr: 1.0, warmup_steps: 10, total_steps: 100, decay: Decay::Cosine, min_ratio: 0.0 };
        for (step, want) in [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5), (100, 0.0), (200, 0.0)] {
            assert!((cosine.at(step) - want).abs() < 1e-12, "{step}");
        }
        let linear = Schedule { decay: Decay::Linear, min_ratio: 0.1, ..cosine };
        assert!((linear.at(55) - 0.55).abs() < 1e-12 && (linear.at(100) - 0.1).abs() < 1e-12);
        let constant = Schedule { lr: 3e-4, warmup_steps: 0, decay: Decay::Constant, ..cosine };
        assert_eq!(constant.at(12345), 3e-4);
        assert!(Decay::named("cosin").is_err_and(|e| e.to_string().contains("\"cosine\"")));
    }
}

//! Warns once of numbers that are far from those of runs that learn: a policy that collapses, or that leaves its reference.

use crate::experience::Metrics;
use crate::warnings::Warnings;

/// A metric that stays out of bounds.
struct HealthRule {
    /// Name of the warning.
    name: &'static str,
    metric: &'static str,
    bad: fn(f64) -> bool,
    /// Consecutive steps before the warning.
    steps: u64,
    what: &'static str,
    fix: &'static str,
}

const RULES: [HealthRule; 4] = [
    HealthRule {
        name: "entropy-collapse",
        metric: "entropy",
        bad: |nats| nats < 0.01,
        steps: 10,
        what: "the policy is nearly deterministic: completions of a prompt no longer differ, and nothing more is learned from them",
        fix: "an earlier checkpoint, with a lower optim.lr, algo.clip_high = 0.28 or algo.entropy_coef = 0.001; all is well if the \
              task is solved",
    },
    HealthRule {
        name: "kl-large",
        metric: "kl",
        bad: |nats| nats > 2.0,
        steps: 3,
        what: "the policy is far from its reference",
        fix: "an earlier checkpoint, with a lower optim.lr or a larger algo.kl.coef",
    },
    HealthRule {
        name: "ratio-large",
        metric: "policy/ratio",
        bad: |ratio| !(0.5..=2.0).contains(&ratio),
        steps: 3,
        what: "the updates of one rollout move the policy far from the one that sampled it",
        fix: "fewer algo.minibatches or algo.epochs, a lower optim.lr, or algo.skip_ratio = 2",
    },
    HealthRule {
        name: "gradient-large",
        metric: "grad_norm",
        bad: |norm| norm > 100.0,
        steps: 10,
        what: "gradients are large",
        fix: "a lower optim.lr, more optim.warmup, or optim.max_grad_norm = 1 where it is 0",
    },
];

/// Consecutive steps of each rule.
#[derive(Clone, Debug, Default)]
pub struct Health([u64; RULES.len()]);

impl Health {
    /// Adds the metrics of a step.
    pub fn look(&mut self, number: u64, metrics: &Metrics, warnings: &Warnings) {
        // The `kl` of other algorithms is not one per token.
        let policy_gradient = metrics.get("entropy").is_some();
        for (rule, streak) in RULES.iter().zip(&mut self.0) {
            let read = rule.metric != "kl" || policy_gradient;
            let Some(value) = metrics.get(rule.metric).filter(|_| read) else { continue };
            *streak = if (rule.bad)(value) { *streak + 1 } else { 0 };
            if *streak == rule.steps {
                let (metric, steps) = (rule.metric, rule.steps);
                let what = format!(
                    "{metric} was {value:.3} at step {number}, out of bounds for {steps} steps: {}",
                    rule.what
                );
                warnings.raise(rule.name, what, rule.fix);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The warnings of a run with these values of a metric.
    fn said(values: &[(&str, f64)], steps: u64) -> Vec<&'static str> {
        let (mut health, warnings) = (Health::default(), Warnings::default());
        let mut metrics = Metrics::default();
        values.iter().for_each(|(name, value)| metrics.add(name, *value));
        (1..=steps).for_each(|number| health.look(number, &metrics, &warnings));
        warnings.take().into_iter().map(|w| w.name).collect()
    }

    #[test]
    fn a_collapse_is_told_once_and_a_run_that_learns_is_left_alone() {
        assert_eq!(said(&[("entropy", 0.005)], 9), [""; 0]);
        assert_eq!(said(&[("entropy", 0.005)], 50), ["entropy-collapse"]);
        assert_eq!(said(&[("entropy", 0.3), ("kl", 3.0)], 3), ["kl-large"]);
        assert_eq!(said(&[("kl", 3.0)], 30), [""; 0], "the reference point of KTO");
        assert_eq!(said(&[("policy/ratio", 0.4)], 3), ["ratio-large"]);
        assert_eq!(said(&[("grad_norm", 500.0)], 10), ["gradient-large"]);
        let healthy = [("entropy", 0.3), ("kl", 0.1), ("policy/ratio", 1.02), ("grad_norm", 3.0)];
        assert_eq!(said(&healthy, 1000), [""; 0]);
    }

    #[test]
    fn a_streak_ends_at_a_good_step() {
        let (mut health, warnings) = (Health::default(), Warnings::default());
        for number in 1..100 {
            let mut metrics = Metrics::default();
            metrics.add("grad_norm", if number % 9 == 0 { 1.0 } else { 500.0 });
            health.look(number, &metrics, &warnings);
        }
        assert!(warnings.take().is_empty());
    }
}

//! Samples completions until the confidence interval of their mean score is narrow: openrl's rule. It starts with 10 and adds 4
//! until the 95 % interval `2 · 1.96 √(p (1 - p) / n)` is at most 0.05 wide, or 30 were sampled. Steps count if the scorer scores
//! prefixes.

use super::super::Until;
use super::{ChildDraw, Drawn, Expander, ExpanderOptions, missing};
use ferrl_engine::{Error, Result};

struct Confidence {
    start: usize,
    add: usize,
    most: usize,
    width: f64,
}

pub(super) fn build(options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    let ExpanderOptions { ci_start: start, ci_add: add, ci_max: most, ci_width: width, .. } = *options;
    if start > most {
        let what = format!("ci_start is {start}, above ci_max, which is {most}");
        return Err(Error::usage(what).fix(format!("ci_start={most}, or a larger ci_max")));
    }
    Ok(Box::new(Confidence { start, add, most, width }))
}

/// Width of the 95 % interval of a mean of `n` scores.
pub(super) fn width(p: f64, n: usize) -> f64 {
    2.0 * 1.96 * (p * (1.0 - p) / n as f64).sqrt()
}

impl Expander for Confidence {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        let n = so_far.draws;
        // Steps that nothing scores have no mean to be certain of: as many as the strategy asks for.
        if so_far.asked.until == Until::Step && !so_far.asked.score {
            return vec![ChildDraw::default(); missing(so_far)];
        }
        if n == 0 {
            return vec![ChildDraw::default(); self.start];
        }
        let scores = so_far.accepted.iter().map(|c| (c.samples as f64, c.score.unwrap_or(0.0)));
        let (count, sum) = scores.fold((0.0, 0.0), |(count, sum), (k, score)| (count + k, sum + k * score));
        let p = sum / f64::max(count, 1.0);
        match width(p, n) <= self.width || n >= self.most {
            true => Vec::new(),
            false => vec![ChildDraw::default(); self.add.min(self.most - n)],
        }
    }
}

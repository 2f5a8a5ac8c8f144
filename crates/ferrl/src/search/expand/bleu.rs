//! Rejection of steps that say the same as a sibling, by BLEU (Papineni et al., 2002).

use super::super::Node;
use super::{Draw, Drawn, Expander};
use crate::verify::Options;
use ferrl_engine::Result;
use std::collections::HashMap;

struct BleuRejection {
    most: f64,
    tries: usize,
}

pub(super) fn build(options: &Options<'_>) -> Result<Box<dyn Expander>> {
    Ok(Box::new(BleuRejection {
        most: options.between("max_bleu", 0.6, 0.0..=1.0)?,
        tries: options.size("tries", 4, 1..=4096)? as usize,
    }))
}

impl Expander for BleuRejection {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<Draw> {
        let wanted = so_far.asked.samples;
        let left = (wanted * self.tries).saturating_sub(so_far.draws);
        vec![Draw::default(); wanted.saturating_sub(so_far.accepted.len()).min(left)]
    }
    fn accepts(&self, text: &str, siblings: &[&Node]) -> bool {
        siblings.iter().all(|s| bleu(text, &s.text) <= self.most)
    }
}

/// Sentence BLEU up to 4-grams of words; orders that the candidate is too short for are left out. 1 for equal texts.
pub(super) fn bleu(candidate: &str, reference: &str) -> f64 {
    let (c, r): (Vec<&str>, Vec<&str>) =
        (candidate.split_whitespace().collect(), reference.split_whitespace().collect());
    if c.is_empty() || r.is_empty() {
        return f64::from(c == r);
    }
    let mut logs = Vec::new();
    for n in 1..=4.min(c.len()) {
        let counts = |words: &[&str]| {
            let mut all: HashMap<Vec<String>, usize> = HashMap::new();
            words
                .windows(n)
                .for_each(|w| *all.entry(w.iter().map(|s| s.to_string()).collect()).or_default() += 1);
            all
        };
        let there = counts(&r);
        let matched: usize =
            counts(&c).iter().map(|(gram, &k)| k.min(there.get(gram).copied().unwrap_or(0))).sum();
        if matched == 0 {
            return 0.0;
        }
        logs.push((matched as f64 / (c.len() + 1 - n) as f64).ln());
    }
    let brevity = (1.0 - r.len() as f64 / c.len() as f64).min(0.0);
    (brevity + logs.iter().sum::<f64>() / logs.len() as f64).exp()
}

//! Rejection of steps similar to a sibling, by BLEU (Papineni et al., 2002).

use super::super::Node;
use super::{ChildDraw, Drawn, Expander, ExpanderOptions};
use ferrl_engine::Result;
use std::collections::HashMap;

struct BleuRejection {
    most: f64,
    tries: usize,
}

pub(super) fn build(options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    Ok(Box::new(BleuRejection { most: options.max_bleu, tries: options.tries }))
}

impl Expander for BleuRejection {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        let wanted = so_far.asked.samples;
        let left = (wanted * self.tries).saturating_sub(so_far.draws);
        vec![ChildDraw::default(); wanted.saturating_sub(so_far.accepted.len()).min(left)]
    }
    fn accepts(&self, text: &str, siblings: &[&Node]) -> bool {
        siblings.iter().all(|s| bleu(text, &s.text) <= self.most)
    }
}

/// Sentence BLEU up to 4-grams of words, or to the candidate's length. 1 for equal texts.
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

#[cfg(test)]
mod tests {
    use super::bleu;

    /// Numbers of nltk's `sentence_bleu` without smoothing, and of the definition where the candidate is short.
    #[test]
    fn bleu_is_the_published_measure() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a}, expected {b}");
        close(bleu("the cat sat on the mat", "the cat sat on the mat"), 1.0);
        // 5/6, 3/5, 2/4 and 1/3 of the n-grams match: (5/6 · 3/5 · 2/4 · 1/3)^(1/4).
        close(
            bleu("the cat sat on a mat", "the cat sat on the mat"),
            (5.0f64 / 6.0 * 3.0 / 5.0 * 2.0 / 4.0 / 3.0).powf(0.25),
        );
        // A candidate of half the length: exp(1 - 6/3).
        close(bleu("the cat sat", "the cat sat on the mat"), (-1.0f64).exp());
        close(bleu("a b", "c d"), 0.0);
        close(bleu("", ""), 1.0);
        close(bleu("", "a"), 0.0);
    }
}

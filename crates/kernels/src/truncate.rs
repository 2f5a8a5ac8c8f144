//! Top-k, top-p and min-p sampling of a row on the host: the reference for device kernels, up to the order of sums.

use crate::backend::SampleSpec;
use crate::math::ln;

/// Scratch memory for the remaining tokens.
#[derive(Default)]
pub struct Truncation {
    list: Vec<(u32, f32)>,
}

impl Truncation {
    /// The `count` most probable tokens of a row with their logits, in descending order (ties: lower id).
    pub fn top(&mut self, row: &[f32], count: usize) -> &[(u32, f32)] {
        self.all(row);
        keep_top(&mut self.list, count)
    }

    /// Samples from a row of scaled logits: the token and its log-probability after truncation, 0 if greedy.
    pub fn choose(&mut self, row: &[f32], spec: &SampleSpec) -> (u32, f32) {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let Some(draw) = spec.draw else {
            return (row.iter().position(|&l| l == best).unwrap_or(0) as u32, 0.0);
        };
        self.all(row);
        let (token, total) = self.draw(best, draw, spec);
        (token, row[token as usize] - best - ln(f64::from(total)) as f32)
    }

    /// The same from a list of candidates with their logits, which must include every token that truncation can keep, and the
    /// maximum. Returns the token, its logit, and its log-probability after truncation.
    pub fn choose_among(&mut self, listed: &[(u32, f32)], spec: &SampleSpec) -> (u32, f32, f32) {
        let best = listed.iter().map(|&(_, l)| l).fold(f32::NEG_INFINITY, f32::max);
        let logit = |token: u32| listed.iter().find(|&&(id, _)| id == token).map_or(f32::NAN, |&(_, l)| l);
        let Some(draw) = spec.draw else {
            let first = listed.iter().filter(|&&(_, l)| l == best).map(|&(id, _)| id).min();
            return (first.unwrap_or(0), best, 0.0);
        };
        self.list.clear();
        self.list.extend(listed);
        let (token, total) = self.draw(best, draw, spec);
        (token, logit(token), logit(token) - best - ln(f64::from(total)) as f32)
    }

    /// Truncates the list and samples from it: the token, and the sum of the remaining weights.
    fn draw(&mut self, best: f32, draw: f32, spec: &SampleSpec) -> (u32, f32) {
        if spec.top_k > 0 && spec.top_k < self.list.len() {
            keep_top(&mut self.list, spec.top_k);
            self.list.truncate(spec.top_k);
        }
        // From here on: weights relative to the most probable token.
        self.list.iter_mut().for_each(|(_, l)| *l = exp(*l - best));
        if spec.top_p < 1.0 {
            let kept = nucleus(&mut self.list, spec.top_p);
            self.list.truncate(kept);
        }
        self.list.retain(|&(_, w)| w >= spec.min_p);
        self.list.sort_unstable_by_key(|&(id, _)| id);
        let total: f32 = self.list.iter().map(|&(_, w)| w).sum();
        let (mut below, mut chosen) = (0.0, None);
        for &(id, w) in self.list.iter().filter(|(_, w)| *w > 0.0) {
            below += w;
            chosen = Some(id);
            if below > draw * total {
                break;
            }
        }
        // The most probable token has weight 1, so at least one remains.
        (chosen.unwrap_or(0), total)
    }

    fn all(&mut self, row: &[f32]) {
        self.list.clear();
        self.list.extend(row.iter().enumerate().map(|(id, &l)| (id as u32, l)));
    }
}

/// Descending by value, then ascending by id.
fn order(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Moves the `count` largest to the front, sorted.
fn keep_top(list: &mut [(u32, f32)], count: usize) -> &[(u32, f32)] {
    let count = count.min(list.len());
    if count < list.len() {
        list.select_nth_unstable_by(count, order);
    }
    list[..count].sort_unstable_by(order);
    &list[..count]
}

/// Moves the smallest set of heaviest tokens that reaches the fraction `p` to the front; returns its size.
fn nucleus(list: &mut [(u32, f32)], p: f32) -> usize {
    // Sum in id order, whatever order the list was in.
    list.sort_unstable_by_key(|&(id, _)| id);
    let goal = p * list.iter().map(|&(_, w)| w).sum::<f32>();
    let mut looked_at = 64;
    loop {
        let mut before = 0.0;
        for (i, &(_, w)) in keep_top(list, looked_at).iter().enumerate() {
            if before >= goal {
                return i;
            }
            before += w;
        }
        if looked_at >= list.len() {
            return list.len();
        }
        looked_at *= 8;
    }
}

/// `e^x` for `x <= 0`, without libm.
fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let x = f64::from(x);
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = x - n * std::f64::consts::LN_2;
    let mut sum = 1.0;
    for k in (1..=9).rev() {
        sum = 1.0 + sum * r / f64::from(k);
    }
    (sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_that_of_the_library() {
        for i in 0..8700 {
            let x = -0.01 * i as f32;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= 1e-7 * want, "{x}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    }

    #[test]
    fn listed_tokens_are_chosen_from_as_from_the_whole_row() {
        let row: Vec<f32> = (0..500).map(|i| ((i * 7919) % 101) as f32 * 0.11).collect();
        let (mut whole, mut listed) = (Truncation::default(), Truncation::default());
        for (i, spec) in
            [(3, 1.0, 0.0), (40, 0.6, 0.0), (40, 1.0, 0.2), (0, 1.0, 0.3)].into_iter().enumerate()
        {
            let spec =
                SampleSpec { draw: Some(0.17 * i as f32), top_k: spec.0, top_p: spec.1, min_p: spec.2 };
            // The most probable token of each half, and all above the threshold.
            let likely = |r: std::ops::Range<usize>| {
                let mut all: Vec<(u32, f32)> = r.map(|id| (id as u32, row[id])).collect();
                all.sort_unstable_by(order);
                all.truncate(if spec.top_k > 0 { spec.top_k } else { 250 });
                all
            };
            let some = [likely(250..500), likely(0..250)].concat();
            let (token, kept) = whole.choose(&row, &spec);
            let (same, logit, also) = listed.choose_among(&some, &spec);
            assert_eq!((token, kept.to_bits(), row[token as usize]), (same, also.to_bits(), logit));
        }
        let greedy = listed.choose_among(&[(7, 2.0), (3, 2.0), (1, 1.0)], &SampleSpec::plain(None));
        assert_eq!(greedy, (3, 2.0, 0.0));
    }

    #[test]
    fn the_largest_come_first_and_of_equals_the_lower_id() {
        let mut list = vec![(0, 1.0), (1, 3.0), (2, 3.0), (3, 2.0), (4, 3.0)];
        assert_eq!(keep_top(&mut list, 2), [(1, 3.0), (2, 3.0)]);
        let mut list = vec![(0, 1.0), (1, 1.0), (2, 2.0)];
        assert_eq!(nucleus(&mut list, 0.75), 2);
        assert_eq!(list[..2], [(2, 2.0), (0, 1.0)]);
    }
}

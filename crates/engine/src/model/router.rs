//! The router of a mixture of experts: top-k selection, weights, and the gradient of the logits.
//!
//! `p = softmax(logits)` over all experts; the top `k` are selected (ties: lower index); their weights are their
//! probabilities, divided by their sum under `norm_topk_prob`. The device computes the logits, row by row the same bits in any
//! batch; the rest runs on the host, row by row in f64, rounded once. So sampler and trainer route identically, and no
//! routing replay is needed.

use super::config::Experts;
use ferrl_kernels::backend::Segments;
use ferrl_kernels::cores;
use ferrl_kernels::math::exp;
use std::ops::Range;

/// Routing decisions of a batch.
pub(super) struct Routing {
    experts: usize,
    per_token: usize,
    normalized: bool,
    /// `(T, experts)`
    probabilities: Vec<f32>,
    /// `(T, per_token)`: each token's experts, in ascending order.
    pub chosen: Vec<u32>,
    /// `(T, per_token)`: their weights.
    pub weights: Vec<f32>,
}

/// The tokens of one expert. Groups are laid out in expert order.
pub(super) struct ExpertGroup {
    pub expert: usize,
    pub tokens: Vec<u32>,
    /// First row of the group in the sorted batch.
    pub start: usize,
}

/// Tokens per expert of a layer, and its load-balance loss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertLoad {
    /// Tokens that each expert was chosen for.
    pub tokens: Vec<u64>,
    /// Sum over sequences of the load-balance loss, as an integer in units of 2^-32, so that it does not depend on the order of
    /// summation.
    pub balance: i64,
    pub sequences: u64,
}

impl ExpertLoad {
    pub fn add(&mut self, other: &ExpertLoad) {
        self.tokens.resize(other.tokens.len().max(self.tokens.len()), 0);
        self.tokens.iter_mut().zip(&other.tokens).for_each(|(sum, n)| *sum += n);
        self.balance += other.balance;
        self.sequences += other.sequences;
    }

    /// Mean load-balance loss of a sequence.
    pub fn mean_balance(&self) -> f64 {
        self.balance as f64 / UNIT / self.sequences.max(1) as f64
    }
}

/// Units of [`ExpertLoad::balance`].
const UNIT: f64 = (1u64 << 32) as f64;

impl Routing {
    /// Routes by the router's logits, `(T, experts)`.
    pub fn of(logits: &[f32], experts: &Experts) -> Routing {
        let (count, k) = (experts.count, experts.per_token);
        let rows = logits.len() / count;
        let mut routing = Routing {
            experts: count,
            per_token: k,
            normalized: experts.normalized,
            probabilities: vec![0.0; logits.len()],
            chosen: vec![0; rows * k],
            weights: vec![0.0; rows * k],
        };
        // Rows are independent, so any thread may compute any of them.
        let threads = cores();
        let each = rows.div_ceil(threads).max((1 << 16) / count).max(1);
        let normalized = routing.normalized;
        std::thread::scope(|scope| {
            let parts = logits.chunks(each * count).zip(routing.probabilities.chunks_mut(each * count));
            let parts = parts.zip(routing.chosen.chunks_mut(each * k));
            let mut parts = parts.zip(routing.weights.chunks_mut(each * k)).peekable();
            while let Some((((logits, probabilities), chosen), weights)) = parts.next() {
                let mut work = move || {
                    let rows = logits.chunks(count).zip(probabilities.chunks_mut(count));
                    let rows = rows.zip(chosen.chunks_mut(k)).zip(weights.chunks_mut(k));
                    for (((logits, probabilities), chosen), weights) in rows {
                        softmax(logits, probabilities);
                        choose(probabilities, chosen);
                        weigh(probabilities, chosen, normalized, weights);
                    }
                };
                if parts.peek().is_none() { work() } else { drop(scope.spawn(work)) }
            }
        });
        routing
    }

    /// Whether any token is routed to the expert.
    pub fn is_chosen(&self, expert: usize) -> bool {
        self.chosen.contains(&(expert as u32))
    }

    /// Groups of the experts that have tokens or are `listed`, in expert order, tokens in batch order.
    pub fn groups(&self, listed: impl Fn(usize) -> bool) -> Vec<ExpertGroup> {
        let mut tokens = vec![Vec::new(); self.experts];
        for (i, &expert) in self.chosen.iter().enumerate() {
            tokens[expert as usize].push((i / self.per_token) as u32);
        }
        let mut start = 0;
        let group = |(expert, tokens): (usize, Vec<u32>)| {
            let group = ExpertGroup { expert, start, tokens };
            start += group.tokens.len();
            group
        };
        let there = |(expert, tokens): &(usize, Vec<u32>)| !tokens.is_empty() || listed(*expert);
        tokens.into_iter().enumerate().filter(there).map(group).collect()
    }

    /// `(T, per_token)`: row in the sorted batch of each entry of `chosen`.
    pub fn sorted_rows(&self) -> Vec<u32> {
        let mut next = vec![0u32; self.experts];
        for &expert in &self.chosen {
            next[expert as usize] += 1;
        }
        let mut start = 0;
        for n in &mut next {
            start += std::mem::replace(n, start);
        }
        let place = |&expert: &u32| {
            next[expert as usize] += 1;
            next[expert as usize] - 1
        };
        self.chosen.iter().map(place).collect()
    }

    /// d loss / d logits, from d loss / d weights plus `balance` times the load-balance loss.
    pub fn backward(&self, dweights: &[f32], segments: &Segments, balance: f32) -> Vec<f32> {
        let (e, k) = (self.experts, self.per_token);
        let mut dlogits = vec![0.0; self.probabilities.len()];
        let mut by_probability = vec![0f64; e];
        for rows in sequences(segments) {
            // The load fractions are counts: no gradient flows through them.
            let scale = f64::from(balance) * e as f64 / rows.len() as f64;
            let fractions = if balance == 0.0 { vec![0.0; e] } else { self.fractions(rows.clone()) };
            for t in rows {
                by_probability.iter_mut().zip(&fractions).for_each(|(d, f)| *d = scale * f);
                self.selected_backward(t, &dweights[t * k..][..k], &mut by_probability);
                let p = &self.probabilities[t * e..][..e];
                let mean: f64 = p.iter().zip(&by_probability).map(|(&p, d)| f64::from(p) * d).sum();
                let to = dlogits[t * e..][..e].iter_mut().zip(p).zip(&by_probability);
                to.for_each(|((to, &p), d)| *to = (f64::from(p) * (d - mean)) as f32);
            }
        }
        dlogits
    }

    /// Adds d loss / d probabilities of a token's selected experts.
    fn selected_backward(&self, token: usize, dweights: &[f32], to: &mut [f64]) {
        let at = token * self.per_token..(token + 1) * self.per_token;
        let (chosen, weights) = (&self.chosen[at.clone()], &self.weights[at]);
        let p = &self.probabilities[token * self.experts..][..self.experts];
        let (mean, sum) = if self.normalized {
            let products = dweights.iter().zip(weights).map(|(&d, &w)| f64::from(d) * f64::from(w));
            (products.sum(), chosen.iter().map(|&e| f64::from(p[e as usize])).sum())
        } else {
            (0.0, 1.0)
        };
        for (&expert, &d) in chosen.iter().zip(dweights) {
            to[expert as usize] += (f64::from(d) - mean) / sum;
        }
    }

    /// Load fraction of each expert in these rows: tokens routed to it per row.
    fn fractions(&self, rows: Range<usize>) -> Vec<f64> {
        let mut counts = vec![0f64; self.experts];
        let chosen = &self.chosen[rows.start * self.per_token..rows.end * self.per_token];
        chosen.iter().for_each(|&expert| counts[expert as usize] += 1.0);
        counts.iter().map(|n| n / rows.len() as f64).collect()
    }

    /// Tokens per expert, and the load-balance loss of each sequence: `experts * sum_e f_e P_e`, with `f_e` the fraction of the
    /// sequence's tokens routed to `e` and `P_e` its mean probability. Uniform load gives `per_token`. Per sequence (DeepSeek-V3,
    /// arXiv 2412.19437, equations 17 to 20) rather than per batch, so that it does not depend on micro-batches.
    pub fn load(&self, segments: &Segments) -> ExpertLoad {
        let mut load = ExpertLoad { tokens: vec![0; self.experts], ..Default::default() };
        self.chosen.iter().for_each(|&expert| load.tokens[expert as usize] += 1);
        for rows in sequences(segments) {
            let (fractions, n) = (self.fractions(rows.clone()), rows.len() as f64);
            let mut loss = 0.0;
            for (expert, fraction) in fractions.iter().enumerate() {
                let p = |t: usize| f64::from(self.probabilities[t * self.experts + expert]);
                loss += fraction * rows.clone().map(p).sum::<f64>() / n;
            }
            load.balance += (loss * self.experts as f64 * UNIT).round() as i64;
            load.sequences += 1;
        }
        load
    }
}

/// Row ranges of the non-empty sequences.
fn sequences(segments: &Segments) -> impl Iterator<Item = Range<usize>> + '_ {
    segments.starts.windows(2).map(|s| s[0]..s[1]).filter(|rows| !rows.is_empty())
}

fn softmax(logits: &[f32], probabilities: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&x| exp(f64::from(x) - f64::from(most))).collect();
    let sum: f64 = powers.iter().sum();
    probabilities.iter_mut().zip(powers).for_each(|(p, power)| *p = (power / sum) as f32);
}

/// Top-k (ties: lower index), in ascending order.
fn choose(probabilities: &[f32], chosen: &mut [u32]) {
    let mut order: Vec<u32> = (0..probabilities.len() as u32).collect();
    let p = |i: u32| probabilities[i as usize];
    let by_probability = |&a: &u32, &b: &u32| p(b).total_cmp(&p(a)).then(a.cmp(&b));
    if chosen.len() < order.len() {
        order.select_nth_unstable_by(chosen.len(), by_probability);
    }
    chosen.copy_from_slice(&order[..chosen.len()]);
    chosen.sort_unstable();
}

fn weigh(probabilities: &[f32], chosen: &[u32], normalized: bool, weights: &mut [f32]) {
    let p = |&expert: &u32| f64::from(probabilities[expert as usize]);
    let sum: f64 = if normalized { chosen.iter().map(p).sum() } else { 1.0 };
    weights.iter_mut().zip(chosen).for_each(|(w, expert)| *w = (p(expert) / sum) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(count: usize, per_token: usize, normalized: bool) -> Experts {
        Experts { count, per_token, width: 1, normalized, balance: 0.0, sparse: vec![true] }
    }

    #[test]
    fn the_most_probable_experts_are_chosen_and_ties_go_to_the_lower_index() {
        let routing = Routing::of(&[1.0, 3.0, 3.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0], &experts(5, 2, true));
        assert_eq!(routing.chosen, [1, 2, 0, 1]);
        assert_eq!(routing.weights, [0.5; 4]);
        let groups = routing.groups(|_| false);
        assert_eq!(groups.iter().map(|g| (g.expert, g.start)).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 3)]);
        assert_eq!(groups[1].tokens, [0, 1]);
        assert_eq!(routing.sorted_rows(), [1, 3, 0, 2]);
    }

    #[test]
    fn a_row_is_routed_alone_as_in_a_batch() {
        let logits: Vec<f32> = (0..4000 * 64).map(|i| ((i * 7919) % 1013) as f32 / 300.0).collect();
        let options = experts(64, 8, true);
        let all = Routing::of(&logits, &options);
        for t in [0, 1, 1999, 3999] {
            let alone = Routing::of(&logits[t * 64..][..64], &options);
            assert_eq!(alone.chosen, all.chosen[t * 8..][..8]);
            assert_eq!(alone.weights, all.weights[t * 8..][..8]);
        }
    }

    /// The gradient of `sum of c * weights + 0.3 * balance loss` by finite differences in f64.
    #[test]
    fn the_gradient_of_weights_and_balance_is_right() {
        let logits = [0.3f32, -0.4, 1.1, 0.2, 0.9, 0.1, -1.0, 0.6, -0.2, 0.4, 0.8, -0.7];
        let (c, segments) = ([0.7f32, -1.2, 0.4, 0.9, -0.3, 1.5], Segments::of([2, 1]));
        for normalized in [false, true] {
            let options = experts(4, 2, normalized);
            let value = |logits: &[f32]| {
                let routing = Routing::of(logits, &options);
                let sum: f64 = routing.weights.iter().zip(&c).map(|(&w, &c)| f64::from(w * c)).sum();
                sum + 0.3 * routing.load(&segments).balance as f64 / UNIT
            };
            let got = Routing::of(&logits, &options).backward(&c, &segments, 0.3);
            for i in 0..logits.len() {
                let at = |h: f32| {
                    let mut moved = logits;
                    moved[i] += h;
                    value(&moved)
                };
                let want = (at(1e-2) - at(-1e-2)) / 2e-2;
                assert!((f64::from(got[i]) - want).abs() < 1e-4, "{normalized} {i}: {} {want}", got[i]);
            }
        }
    }

    #[test]
    fn equal_use_of_all_experts_has_the_least_loss() {
        let even = Routing::of(&[9.0, 0.0, 0.0, 9.0], &experts(2, 1, false));
        let load = even.load(&Segments::of([2]));
        assert_eq!((load.tokens.clone(), load.sequences), (vec![1, 1], 1));
        assert!((load.mean_balance() - 1.0).abs() < 1e-6);
        let one = Routing::of(&[9.0, 0.0, 9.0, 0.0], &experts(2, 1, false)).load(&Segments::of([1, 1]));
        assert!(one.mean_balance() > 1.9, "{one:?}");
    }

    /// Non-finite logits are carried through until a check names them.
    #[test]
    fn logits_that_are_not_finite_do_not_panic() {
        let routing = Routing::of(&[f32::NAN, 1.0, f32::INFINITY, 0.0], &experts(4, 2, true));
        assert!(routing.weights.iter().any(|w| w.is_nan()));
    }
}

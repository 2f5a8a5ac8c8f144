//! Balanced packing: packs sequences into the fewest micro-batches within a token budget, all about equally full.
//!
//! Karmarkar and Karp's largest differencing method for `k` bins; `k` starts at the least that could hold all
//! tokens and grows until every bin fits. First-fit decreasing is the fallback, so there are never more bins
//! than it needs. The result is a function of the lengths and the budget alone.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use ferrl_engine::{Error, Result};

/// Token budget of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    pub tokens: usize,
    /// Its setting, for messages.
    pub setting: &'static str,
    /// The number of bins is a multiple of this; additional bins are empty.
    pub multiple: usize,
}

/// Sequences of each micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Indices of sequences, ascending within a bin.
    pub bins: Vec<Vec<usize>>,
}

impl Packing {
    /// Restores the order of the sequences in results by bin.
    pub fn restore<T>(&self, computed: Vec<Vec<T>>) -> Result<Vec<T>> {
        let mut pairs: Vec<(usize, T)> = Vec::new();
        let expected: usize = self.bins.iter().map(Vec::len).sum();
        for (bin, values) in self.bins.iter().zip(computed) {
            pairs.extend(bin.iter().copied().zip(values));
        }
        if pairs.len() != expected {
            return Err(Error::data(format!("{} results for {expected} packed sequences", pairs.len())));
        }
        pairs.sort_by_key(|(index, _)| *index);
        Ok(pairs.into_iter().map(|(_, value)| value).collect())
    }
}

/// Packs sequences by length.
///
/// Sequences with the same key in `together` are in one bin; an empty list means separate keys. `place` returns the source of a
/// sequence that is too long.
pub fn pack(
    lengths: &[usize],
    together: &[usize],
    budget: TokenBudget,
    place: &dyn Fn(usize) -> String,
) -> Result<Packing> {
    if !together.is_empty() && together.len() != lengths.len() {
        return Err(Error::data(format!("{} keys for {} sequences", together.len(), lengths.len())));
    }
    let mut items: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in 0..lengths.len() {
        items.entry(together.get(i).copied().unwrap_or(i)).or_default().push(i);
    }
    let items: Vec<Vec<usize>> = items.into_values().collect();
    let sizes: Vec<usize> = items.iter().map(|item| item.iter().map(|&i| lengths[i]).sum()).collect();
    if let Some(worst) = (0..items.len()).filter(|&i| sizes[i] > budget.tokens).max_by_key(|&i| sizes[i]) {
        return Err(too_long(&items[worst], lengths, sizes[worst], budget, place));
    }
    let bins = bins(&sizes, budget.tokens, budget.multiple.max(1));
    let open = |bin: Vec<usize>| {
        let mut indices: Vec<usize> = bin.into_iter().flat_map(|i| items[i].iter().copied()).collect();
        indices.sort_unstable();
        indices
    };
    let mut bins: Vec<Vec<usize>> = bins.into_iter().map(open).collect();
    bins.sort_by_key(|bin| bin.first().copied().unwrap_or(usize::MAX));
    Ok(Packing { bins })
}

fn too_long(
    item: &[usize],
    lengths: &[usize],
    size: usize,
    budget: TokenBudget,
    place: &dyn Fn(usize) -> String,
) -> Error {
    let what = match item {
        [_] => format!("a sequence of {size} tokens is over the budget of {}", budget.tokens),
        _ => {
            let parts: Vec<String> = item.iter().map(|&i| lengths[i].to_string()).collect();
            format!(
                "{} sequences that stay together have {} = {size} tokens, over the budget of {}",
                item.len(),
                parts.join(" + "),
                budget.tokens
            )
        }
    };
    let at = item.first().map_or(String::new(), |&i| place(i));
    Error::data(what)
        .at(at)
        .fix(format!("raise {} to at least {size}, or lower the maximum length", budget.setting))
}

/// Bins of item indices; every item fits the budget alone.
fn bins(sizes: &[usize], budget: usize, multiple: usize) -> Vec<Vec<usize>> {
    if sizes.is_empty() {
        return Vec::new();
    }
    let total: usize = sizes.iter().sum();
    let first_fit = first_fit_decreasing(sizes, budget);
    let mut count = total.div_ceil(budget.max(1)).max(1).next_multiple_of(multiple);
    while count < first_fit.len() {
        if let Some(bins) = difference(sizes, count, budget) {
            return bins;
        }
        count += multiple;
    }
    let mut bins = difference(sizes, count, budget).unwrap_or(first_fit);
    bins.resize(count, Vec::new());
    bins
}

fn decreasing(sizes: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&i| (Reverse(sizes[i]), i));
    order
}

/// Each item, the longest first, into the first bin with room for it.
pub(crate) fn first_fit_decreasing(sizes: &[usize], budget: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<(usize, Vec<usize>)> = Vec::new();
    for i in decreasing(sizes) {
        match bins.iter_mut().find(|(used, _)| used + sizes[i] <= budget) {
            Some((used, bin)) => {
                *used += sizes[i];
                bin.push(i);
            }
            None => bins.push((sizes[i], vec![i])),
        }
    }
    bins.into_iter().map(|(_, bin)| bin).collect()
}

/// A partial solution: up to `k` bins, the fullest first; bins not listed are empty.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Partial {
    /// Difference between the fullest and the emptiest bin: what the heap orders by.
    spread: usize,
    /// Ties go to the partial solution made first.
    age: Reverse<usize>,
    bins: Vec<(usize, Vec<usize>)>,
}

/// Largest differencing: the two partial solutions with the widest spreads are joined, full bins with empty
/// ones, until one is left. `None` when a bin of it is over the budget.
fn difference(sizes: &[usize], count: usize, budget: usize) -> Option<Vec<Vec<usize>>> {
    let partial = |age: usize, mut bins: Vec<(usize, Vec<usize>)>| {
        bins.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let most = bins.first().map_or(0, |b| b.0);
        let least = if bins.len() < count { 0 } else { bins.last().map_or(0, |b| b.0) };
        Partial { spread: most - least, age: Reverse(age), bins }
    };
    let mut heap: BinaryHeap<Partial> = decreasing(sizes)
        .into_iter()
        .enumerate()
        .map(|(age, i)| partial(age, vec![(sizes[i], vec![i])]))
        .collect();
    let mut age = sizes.len();
    while let Some(wide) = heap.pop() {
        let Some(next) = heap.pop() else {
            return wide.bins.iter().all(|b| b.0 <= budget).then(|| pad(wide.bins, count));
        };
        let (mut bins, mut alone) = (wide.bins, Vec::new());
        for (rank, (size, items)) in next.bins.into_iter().enumerate() {
            // The fullest of the one meets the emptiest of the other; a bin beyond the list is empty.
            match bins.get_mut(count - 1 - rank) {
                Some(bin) => {
                    bin.0 += size;
                    bin.1.extend(items);
                }
                None => alone.push((size, items)),
            }
        }
        bins.extend(alone);
        heap.push(partial(age, bins));
        age += 1;
    }
    None
}

fn pad(bins: Vec<(usize, Vec<usize>)>, count: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = bins.into_iter().map(|(_, bin)| bin).collect();
    bins.resize(count, Vec::new());
    bins
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_kernels::philox::philox4x32;

    fn budget(tokens: usize) -> TokenBudget {
        TokenBudget { tokens, setting: "train.max_tokens", multiple: 1 }
    }
    fn row(i: usize) -> String {
        format!("data.jsonl:{}", i + 1)
    }
    fn load(packing: &Packing, lengths: &[usize]) -> Vec<usize> {
        packing.bins.iter().map(|b| b.iter().map(|&i| lengths[i]).sum()).collect()
    }
    /// Lengths of a random case: how many, how long and how skewed all differ from case to case.
    fn case(seed: u32) -> (Vec<usize>, usize) {
        let [count, longest, skew, slack] = philox4x32([seed, 0, 0, 0], [7, 1]);
        let (count, longest) = (1 + count as usize % 60, 1 + longest as usize % 400);
        let length = |i: usize| {
            let word = philox4x32([seed, 1, i as u32, 0], [7, 1])[0] as usize;
            let length = 1 + word % longest;
            if skew % 3 == 0 { 1 + length * length / longest } else { length }
        };
        let lengths: Vec<usize> = (0..count).map(length).collect();
        let most = lengths.iter().copied().max().unwrap();
        (lengths, most + slack as usize % (2 * longest))
    }

    #[test]
    fn random_cases_fit_hold_everything_once_and_need_no_more_bins_than_first_fit() {
        for seed in 0..3000 {
            let (lengths, tokens) = case(seed);
            let packing = pack(&lengths, &[], budget(tokens), &row).unwrap();
            assert!(load(&packing, &lengths).iter().all(|&l| l <= tokens), "seed {seed}");
            let mut all: Vec<usize> = packing.bins.concat();
            all.sort();
            assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>(), "seed {seed}");
            assert!(packing.bins.iter().all(|b| b.is_sorted() && !b.is_empty()), "seed {seed}");
            assert!(packing.bins.len() <= first_fit_decreasing(&lengths, tokens).len(), "seed {seed}");
            assert_eq!(packing, pack(&lengths, &[], budget(tokens), &row).unwrap());
        }
    }

    #[test]
    fn bins_are_balanced() {
        let lengths: Vec<usize> =
            (0..500).map(|i| 50 + philox4x32([i, 9, 0, 0], [3, 3])[0] as usize % 950).collect();
        let packing = pack(&lengths, &[], budget(8192), &row).unwrap();
        let loads = load(&packing, &lengths);
        let (most, least) = (loads.iter().max().unwrap(), loads.iter().min().unwrap());
        assert_eq!(packing.bins.len(), lengths.iter().sum::<usize>().div_ceil(8192));
        assert!(most - least <= most / 1000, "{least} to {most}");
    }

    #[test]
    fn many_sequences_are_packed_soon() {
        let lengths: Vec<usize> =
            (0..20_000).map(|i| 50 + philox4x32([i, 5, 0, 0], [3, 3])[0] as usize % 2000).collect();
        let packing = pack(&lengths, &[], budget(8192), &row).unwrap();
        let least = lengths.iter().sum::<usize>().div_ceil(8192);
        assert!(packing.bins.len() <= least + least / 500, "{} for {least}", packing.bins.len());
    }

    #[test]
    fn pairs_stay_together() {
        for seed in 0..300 {
            let (lengths, tokens) = case(seed);
            let together: Vec<usize> = (0..lengths.len()).map(|i| i / 2).collect();
            let packing = pack(&lengths, &together, budget(2 * tokens), &row).unwrap();
            for bin in &packing.bins {
                for &i in bin {
                    let other = i ^ 1;
                    assert!(other >= lengths.len() || bin.contains(&other));
                }
            }
        }
    }

    #[test]
    fn packing_restores_the_order_and_keeps_multiples() {
        let lengths = [5, 9, 2, 7, 7, 1, 3];
        let four = TokenBudget { multiple: 4, ..budget(10) };
        let packing = pack(&lengths, &[], four, &row).unwrap();
        assert_eq!(packing.bins.len() % 4, 0);
        let computed: Vec<Vec<usize>> =
            packing.bins.iter().map(|b| b.iter().map(|&i| lengths[i]).collect()).collect();
        assert_eq!(packing.restore(computed).unwrap(), lengths);
        assert_eq!(pack(&[], &[], four, &row).unwrap().bins.len(), 0);
        let few = pack(&[3], &[], four, &row).unwrap();
        assert_eq!(few.bins.iter().filter(|b| b.is_empty()).count(), 3);
    }

    #[test]
    fn what_is_too_long_names_row_length_and_setting() {
        let e = pack(&[3, 12, 4], &[], budget(10), &row).unwrap_err().to_string();
        for part in ["data.jsonl:2", "12 tokens", "budget of 10", "train.max_tokens"] {
            assert!(e.contains(part), "{e}");
        }
        let e = pack(&[3, 1, 6, 5], &[0, 0, 1, 1], budget(10), &row).unwrap_err().to_string();
        assert!(e.contains("6 + 5 = 11") && e.contains("data.jsonl:3"), "{e}");
    }
}

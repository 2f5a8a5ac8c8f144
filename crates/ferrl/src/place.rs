//! Load balancing: distributes work over ranks.
//!
//! Results do not depend on it: random numbers belong to prompts, and every rank gets all results in the same order.

use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of prompts with stored lengths.
const MOST: usize = 1 << 20;

/// The rank of each piece: the costliest first, each to the rank with the least to do so far (LPT). Ties go to the earlier piece
/// and the lower rank.
pub(crate) fn place(costs: &[u64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(costs[i]), i));
    let (mut load, mut place) = (vec![0u64; ranks], vec![0; costs.len()]);
    for i in order {
        let least = (0..ranks).min_by_key(|&r| (load[r], r)).unwrap_or(0);
        load[least] = load[least].saturating_add(costs[i].max(1));
        place[i] = least;
    }
    place
}

/// Cost of decoding a group of completions, in decoded tokens: a prefilled token costs about an eighth of a decoded one.
pub(crate) fn cost(samples: usize, read: usize, decoded: usize) -> u64 {
    (read as u64).div_ceil(8) + (samples as u64).saturating_mul(decoded as u64)
}

/// Last lengths of completions, by a hash of the prompt's tokens.
#[derive(Clone, Debug, Default)]
pub struct CompletionLengths(HashMap<u64, u32>);

impl CompletionLengths {
    /// Stores the mean length of a prompt's completions.
    pub fn note(&mut self, prompt: &[u32], tokens: usize) {
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(hash(prompt), tokens.min(u32::MAX as usize) as u32);
    }

    /// Predicted length of a completion: that of the last time, or the maximum.
    pub fn predict(&self, prompt: &[u32], most: usize) -> usize {
        self.0.get(&hash(prompt)).map_or(most, |&tokens| (tokens as usize).min(most))
    }
}

fn hash(ids: &[u32]) -> u64 {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_about_as_much_to_do() {
        assert_eq!(place(&[5, 9, 1, 5, 4], 2), [1, 0, 1, 1, 0], "9 + 4 and 5 + 5 + 1");
        assert_eq!(place(&[3, 3, 3], 1), [0, 0, 0]);
        assert_eq!(place(&[0, 0, 0, 0], 2), [0, 1, 0, 1], "nothing is not free");
        assert_eq!(place(&[], 4), [0; 0]);
        // No rank has more than the least loaded one and the largest piece together.
        for ranks in 1..6 {
            let costs: Vec<u64> = (0..40u64).map(|i| i * 7919 % 101 + 1).collect();
            let mut load = vec![0; ranks];
            place(&costs, ranks).iter().zip(&costs).for_each(|(&r, c)| load[r] += c);
            let (least, most) = (load.iter().min().unwrap(), load.iter().max().unwrap());
            assert!(most - least <= 101, "{load:?}");
        }
    }

    #[test]
    fn lengths_are_those_of_the_last_time() {
        let mut lengths = CompletionLengths::default();
        assert_eq!(lengths.predict(&[3], 100), 100);
        lengths.note(&[3], 20);
        assert_eq!(
            (lengths.predict(&[3], 100), lengths.predict(&[3], 10), lengths.predict(&[4], 100)),
            (20, 10, 100)
        );
    }
}

//! Blockwise quantisation as in bitsandbytes: a block of numbers shares its absmax, and each number is stored as the index of
//! the nearest entry of a sorted table of values in [-1, 1].
//!
//! `code(x)` is the entry nearest to `x * (1 / absmax)`, the lower one if two are equally near; dequantised,
//! `table[code] * absmax`. All devices do the same arithmetic, so codes have the same bits.

use crate::cores;
use std::sync::LazyLock;

/// Block size of 8-bit moments.
pub const BLOCK: usize = 256;

/// A table of values, with the midpoints between neighbours.
pub struct CodeTable {
    /// The values, ascending.
    pub values: Vec<f32>,
    /// Midpoints, one fewer than values: a code is the number of midpoints below the scaled number.
    pub bounds: Vec<f32>,
}

/// For first moments: dynamic signed map, about seven decades on each side of zero.
pub static SIGNED: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(dynamic(true)));
/// For second moments: unsigned.
pub static UNSIGNED: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(dynamic(false)));

/// Default NF4 block size.
pub const NF4_BLOCK: usize = 64;

/// 4-bit NormalFloat (QLoRA, Dettmers et al., 2023, arXiv 2305.14314): values about equally frequent among normal numbers.
/// bitsandbytes' table.
pub static NF4: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(NF4_VALUES.to_vec()));

const NF4_VALUES: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0,
    0.079_580_3, 0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

/// Quantises to NF4: two codes per byte, the first in the upper half, and the absmax of each block. `block` must be even.
pub fn encode_nf4(values: &[f32], block: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut absmax) =
        (vec![0; values.len().div_ceil(2)], vec![0.0; values.len().div_ceil(block)]);
    // Whole blocks per thread.
    let threads = cores();
    let blocks = absmax.len().div_ceil(threads).max(1024);
    std::thread::scope(|scope| {
        let parts = values.chunks(blocks * block).zip(codes.chunks_mut(blocks * block / 2));
        for ((values, codes), absmax) in parts.zip(absmax.chunks_mut(blocks)) {
            scope.spawn(move || {
                let all = values.chunks(block).zip(codes.chunks_mut(block / 2)).zip(absmax);
                all.for_each(|((values, codes), absmax)| *absmax = encode_nf4_block(values, codes, block));
            });
        }
    });
    (codes, absmax)
}

fn encode_nf4_block(values: &[f32], codes: &mut [u8], block: usize) -> f32 {
    let absmax = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let factor = inverse(absmax);
    // As bitsandbytes, which divides in a partial last block.
    let scaled = |x: f32| if values.len() == block { x * factor } else { x / absmax.max(1e-38) };
    for (pair, byte) in values.chunks(2).zip(codes) {
        let code = |x: f32| NF4.code(scaled(x).clamp(-1.0, 1.0));
        *byte = code(pair[0]) << 4 | pair.get(1).map_or(NF4.code(0.0), |&x| code(x));
    }
    absmax
}

/// Dequantises NF4 from element `at` on, which must be even.
pub fn decode_nf4(codes: &[u8], absmax: &[f32], block: usize, at: usize, out: &mut [f32]) {
    for (i, pair) in out.chunks_mut(2).enumerate() {
        let (i, byte) = (at + 2 * i, codes[at / 2 + i]);
        let nibbles = [byte >> 4, byte & 15].into_iter().enumerate();
        pair.iter_mut()
            .zip(nibbles)
            .for_each(|(x, (k, code))| *x = NF4_VALUES[code as usize] * absmax[(i + k) / block]);
    }
}

impl CodeTable {
    fn new(values: Vec<f32>) -> Self {
        let bounds = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        CodeTable { values, bounds }
    }

    /// The midpoints as a binary search tree in the order of [`CodeTable::code`]: the root at 1, the children of node `k` at `2k`
    /// (`x` not above it) and `2k + 1`; entry 0 is unused. Nodes of one level are contiguous, so that a warp's lookups fall into
    /// different shared-memory banks; in sorted order many would conflict.
    pub fn tree(&self) -> Vec<f32> {
        let (mut tree, half) = (vec![f32::INFINITY], self.values.len() / 2);
        let mut step = half;
        while step > 0 {
            tree.extend((0..half / step).map(|i| self.bounds[(2 * i + 1) * step - 1]));
            step /= 2;
        }
        tree
    }

    /// The code of a scaled number; 0 for NaN. Tables have a power of two of entries.
    #[inline]
    pub fn code(&self, x: f32) -> u8 {
        let (mut low, mut step) = (0, self.values.len() / 2);
        while step > 0 {
            low += if self.bounds[low + step - 1] < x { step } else { 0 };
            step /= 2;
        }
        low as u8
    }
}

/// `1 / absmax`; finite for a block of zeros.
#[inline]
pub fn inverse(absmax: f32) -> f32 {
    1.0 / absmax.max(1e-38)
}

/// bitsandbytes' `create_dynamic_map`: in decade `10^(i - 6)`, `i` from 0 to 6, the means of `2^i` equal intervals of `[0.1, 1]`
/// (`2^(i + 1)` if unsigned), on both sides of zero if signed, and 0 and 1.
fn dynamic(signed: bool) -> Vec<f32> {
    let mut values = vec![0.0, 1.0];
    for i in 0..7 {
        let intervals = if signed { 1 << i } else { 2 << i };
        let bounds = linspace(intervals + 1);
        let decade = 10f64.powi(i - 6) as f32;
        for pair in bounds.windows(2) {
            let mean = decade * ((pair[0] + pair[1]) / 2.0);
            values.push(mean);
            values.extend(signed.then_some(-mean));
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

/// `n` numbers from 0.1 to 1, computed from both ends to the middle and rounded as in PyTorch.
fn linspace(n: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / (n - 1) as f32;
    let from = |end: f32, step: f32, i: usize| step.mul_add(i as f32, end);
    (0..n).map(|i| if i < n / 2 { from(0.1, step, i) } else { from(1.0, -step, n - 1 - i) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_the_nearest_entry_and_the_lower_of_two() {
        for table in [&*SIGNED, &*UNSIGNED] {
            assert_eq!((table.values.len(), table.bounds.len()), (256, 255));
            assert!(table.values.windows(2).all(|pair| pair[0] < pair[1]));
            for (code, &x) in table.values.iter().enumerate() {
                assert_eq!(table.code(x) as usize, code);
            }
            for (code, &x) in table.bounds.iter().enumerate() {
                assert_eq!(table.code(x) as usize, code, "halfway");
                assert_eq!(table.code(x.next_up()) as usize, code + 1, "just above");
            }
            assert_eq!(table.code(f32::NAN), 0);
            assert_eq!((table.code(-9.0), table.code(9.0)), (0, 255));
        }
    }

    /// The search of the GPU's kernel adamw8.
    #[test]
    fn a_walk_down_the_tree_finds_the_same_codes() {
        for table in [&*SIGNED, &*UNSIGNED] {
            let tree = table.tree();
            assert_eq!(tree.len(), 256);
            let walk = |x: f32| (0..8).fold(1, |k, _| 2 * k + usize::from(tree[k] < x)) - 256;
            let random = |i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b1));
            let near = |x: f32| [x.next_down(), x, x.next_up(), -x];
            let all = table.values.iter().chain(&table.bounds).flat_map(|&x| near(x));
            for x in all.chain((0..200_000).map(random)).chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
                assert_eq!(walk(x), table.code(x) as usize, "{x:e}");
            }
        }
    }

    #[test]
    fn a_block_of_zeros_stays_one() {
        assert_eq!(SIGNED.values[SIGNED.code(0.0 * inverse(0.0)) as usize], 0.0);
        assert_eq!(UNSIGNED.code(0.0 * inverse(0.0)), 0);
    }
}

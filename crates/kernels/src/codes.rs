//! Numbers in a few bits: a block of them shares its largest magnitude, and each is stored as the index of the nearest entry
//! of a sorted table of fractions of it (bitsandbytes' blockwise quantisation).
//!
//! A number `x` of a block with largest magnitude `absmax` is looked up as `x * (1 / absmax)`; halfway between two entries
//! the lower one is taken. Reading gives `table[code] * absmax`. Devices do the same arithmetic, so codes are the same bits.

use crate::cores;
use std::sync::LazyLock;

/// Numbers of a block of 8-bit moments.
pub const BLOCK: usize = 256;

/// A table of fractions and the midpoints between its neighbours.
pub struct CodeTable {
    /// The entries, in order.
    pub values: Vec<f32>,
    /// One less: codes are the number of bounds below a fraction.
    pub bounds: Vec<f32>,
}

/// For first moments: dynamic codes with a sign, about seven decades to each side of zero.
pub static SIGNED: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(dynamic(true)));
/// For second moments, which have no sign.
pub static UNSIGNED: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(dynamic(false)));

/// Numbers of a block of NF4, where nothing else is asked for.
pub const NF4_BLOCK: usize = 64;

/// 4-bit NormalFloat (QLoRA, Dettmers et al., 2023, arXiv 2305.14314): entries that are about equally frequent among normal
/// numbers. bitsandbytes' table.
pub static NF4: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::new(NF4_VALUES.to_vec()));

const NF4_VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// NF4 codes of numbers, two a byte with the first in the upper half, and the largest magnitude of each block. `block` is even.
pub fn encode_nf4(values: &[f32], block: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut absmax) =
        (vec![0; values.len().div_ceil(2)], vec![0.0; values.len().div_ceil(block)]);
    // Whole blocks for each thread.
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
    // bitsandbytes divides in a last block that is not full.
    let scaled = |x: f32| if values.len() == block { x * factor } else { x / absmax.max(1e-38) };
    for (pair, byte) in values.chunks(2).zip(codes) {
        let code = |x: f32| NF4.code(scaled(x).clamp(-1.0, 1.0));
        *byte = code(pair[0]) << 4 | pair.get(1).map_or(NF4.code(0.0), |&x| code(x));
    }
    absmax
}

/// The numbers from `at` on behind NF4 codes. `at` is even.
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

    /// The bounds as [`CodeTable::code`] comes to them: the first at 1, those after entry `k` at `2k` (`x` is not above it) and
    /// `2k + 1`; entry 0 is unused. Bounds that are compared in the same step lie side by side, in different banks of a
    /// card's shared memory; in sorted order many of them lie in the same one.
    pub fn tree(&self) -> Vec<f32> {
        let (mut tree, half) = (vec![f32::INFINITY], self.values.len() / 2);
        let mut step = half;
        while step > 0 {
            tree.extend((0..half / step).map(|i| self.bounds[(2 * i + 1) * step - 1]));
            step /= 2;
        }
        tree
    }

    /// The code of a fraction; 0 of what is not a number. Tables have a power of two entries.
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

/// What numbers of a block are multiplied with before they are looked up; finite for blocks of zeros too.
#[inline]
pub fn inverse(absmax: f32) -> f32 {
    1.0 / absmax.max(1e-38)
}

/// bitsandbytes' `create_dynamic_map`: in decade `10^(i - 6)`, `i` from 0 to 6, the means of `2^i` equal intervals of
/// `[0.1, 1]` (of `2^(i + 1)` without a sign), to both sides of zero, and 0 and 1.
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

/// `n` numbers from 0.1 to 1, from both ends to the middle, rounded as PyTorch rounds them.
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

    /// As the kernel adamw8 of a card finds codes.
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

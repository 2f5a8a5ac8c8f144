//! Counter-based random numbers: Philox 4x32 with ten rounds (Salmon et al., 2011).
//!
//! A number is a function of key and counter, so any thread can generate any of them in any order.

use crate::math::{ln, sin_cos};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a counter under a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let even = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let odd = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        c0 = (odd >> 32) as u32 ^ c1 ^ k0;
        c1 = odd as u32;
        c2 = (even >> 32) as u32 ^ c3 ^ k1;
        c3 = even as u32;
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// Maps a word to [0, 1), using the 24 bits that fit an `f32`.
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Maps four words to four independent standard normal numbers (Box-Muller in `f64`).
pub fn normals(words: [u32; 4]) -> [f32; 4] {
    let [a, b] = box_muller(words[0], words[1]);
    let [c, d] = box_muller(words[2], words[3]);
    [a, b, c, d]
}

fn box_muller(radius: u32, angle: u32) -> [f32; 2] {
    const WORD: f64 = 1.0 / 4_294_967_296.0;
    // The offset of one half keeps the argument of ln above zero.
    let length = (-2.0 * ln((f64::from(radius) + 0.5) * WORD)).sqrt();
    let (sin, cos) = sin_cos(std::f64::consts::TAU * f64::from(angle) * WORD);
    [(length * cos) as f32, (length * sin) as f32]
}

/// FNV-1a hash of a name, as the key of its random numbers.
pub fn name_words(name: &str) -> [u32; 2] {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    [hash as u32, (hash >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_authors() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_stays_below_one() {
        assert_eq!(uniform(0), 0.0);
        assert!(uniform(u32::MAX) < 1.0);
    }

    #[test]
    fn normals_have_the_moments_of_a_standard_normal() {
        let (mut sum, mut square, mut fourth) = (0.0, 0.0, 0.0);
        let blocks = 50_000;
        for i in 0..blocks {
            for x in normals(philox4x32([i, 0, 0, 0], [7, 9])) {
                let x = f64::from(x);
                sum += x;
                square += x * x;
                fourth += x * x * x * x;
            }
        }
        let n = f64::from(blocks) * 4.0;
        assert!((sum / n).abs() < 0.01);
        assert!((square / n - 1.0).abs() < 0.02);
        assert!((fourth / n - 3.0).abs() < 0.1);
    }

    #[test]
    fn extreme_words_give_finite_normals() {
        for words in [[0; 4], [u32::MAX; 4]] {
            assert!(normals(words).iter().all(|x| x.is_finite()));
        }
    }
}

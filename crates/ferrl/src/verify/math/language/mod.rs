//! What stands in an answer besides formulas: words, units, times of day, signs of Unicode.

pub mod clock;
pub mod spoken;
pub mod text;
pub mod unicode;
pub mod units;
pub mod words;

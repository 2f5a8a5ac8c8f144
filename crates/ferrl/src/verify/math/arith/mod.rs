//! Exact and certified arithmetic: integers of any size, rationals, and floats that carry their error.

pub mod float;
pub mod nat;
pub mod num;
pub mod rational;
pub mod real;
pub mod transcend;

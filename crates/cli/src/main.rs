//! The `ferrl` command.

fn main() {}

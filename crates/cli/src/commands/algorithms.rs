//! `ferrl algorithms` and `ferrl recipe`: what there is to choose from.

use clap::Parser;
use ferrl::algo::ALGORITHMS;
use ferrl::recipe::keys_markdown;
use ferrl_engine::Result;

/// List the algorithms
#[derive(Parser)]
pub struct Args {}

/// Runs the command.
pub fn run(_: &Args) -> Result<()> {
    for entry in ALGORITHMS {
        let from = entry.wants.words();
        println!("{:<10} {}\n{:10} learns from {from}; {}\n", entry.name, entry.about, "", entry.paper);
    }
    Ok(())
}

/// Explain every key of a recipe, with its default
#[derive(Parser)]
pub struct RecipeArgs {}

/// Runs `ferrl recipe`.
pub fn recipe(_: &RecipeArgs) -> Result<()> {
    print!("{}", keys_markdown());
    Ok(())
}

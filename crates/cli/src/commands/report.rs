//! `ferrl report`: a run as one HTML file.

use crate::output::print;
use clap::Parser;
use ferrl_engine::Result;
use std::path::PathBuf;

/// Write a run's curves, rollouts and recipe as one HTML file
#[derive(Parser)]
pub struct Args {
    /// The run folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    print(&format!("{}\n", ferrl::report::report(&args.run)?.display()))
}

//! `ferrl report`: runs as one HTML file.

use crate::output::print;
use clap::Parser;
use ferrl_engine::Result;
use std::path::PathBuf;

/// Write a run's curves, completions and recipe as one HTML file; several runs share the same charts
///
/// Runs that differ in the seed alone are drawn as one line, their mean, with a band from the lowest to the highest.
#[derive(Parser)]
pub struct Args {
    /// Run folders; several are compared in one page
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// File to write [default: report.html in the run folder; compare.html here for several runs]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let out = args.out.as_deref();
    let path = match args.runs.as_slice() {
        [one] => ferrl::report::report(one, out)?,
        several => ferrl::report::compare(several, out)?,
    };
    print(&format!("{}\n", path.display()))
}

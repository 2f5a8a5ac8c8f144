//! `ferrl data unpair`: pairs as labelled completions.

use crate::data;
use crate::output::JsonlOutput;
use ferrl::data::unpair::unpair;
use ferrl_engine::{Error, Result, counted};
use std::path::PathBuf;

/// Make two labelled completions of each pair
///
/// Rows with `prompt`, `chosen` and `rejected`, as reward models and DPO learn from, become two rows each with `completion`, `label`
/// (for kto and implicit_prm), `target` (for classifier) and `reward` (for `ferrl data verdicts`); other columns stay.
#[derive(clap::Args)]
pub struct Args {
    /// JSON lines to read; - is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// JSON lines to write; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let rows = data::rows(&args.input)?;
    let mut output = JsonlOutput::beside(&args.output, &[&args.input])?;
    for row in &rows {
        for side in unpair(&row.fields).map_err(|e: Error| e.at(&row.place))? {
            output.row(&side)?;
        }
    }
    output.finish()?;
    eprintln!("{} as {}", counted(rows.len(), "pair"), counted(2 * rows.len(), "row"));
    Ok(())
}

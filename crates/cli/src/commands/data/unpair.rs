//! `ferrl data unpair`: splits preference pairs into labelled completions.

use crate::data;
use crate::output::JsonlOutput;
use ferrl::data::unpair::unpair;
use ferrl_engine::{Error, Result, counted};
use std::path::PathBuf;

/// Split preference pairs into labelled completions
///
/// Each row with `prompt`, `chosen` and `rejected` becomes two rows with `completion`, `label` (for kto and implicit_prm), `target`
/// (for classifier) and `reward` (for `ferrl data verdicts`); other columns are kept.
#[derive(clap::Args)]
pub struct Args {
    /// JSON lines to read; - is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// JSON lines to write; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

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

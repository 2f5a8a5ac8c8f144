//! `ferrl data steps`: splits worked solutions into steps.

use crate::data::{self, PlacedRow};
use crate::output::JsonlOutput;
use ferrl::solution::{SolutionKind, steps};
use ferrl_engine::{Error, Result, counted, nearest};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Split worked solutions into steps, as VinePPO does
///
/// Each input row holds a `text`; each output row is the same with `steps`, texts that join to `text` exactly. `gsm8k`: a step
/// on each line, with the answer after `####` in the last. `math`: sentences, lines of formulas, and clauses of long sentences.
/// A row that cannot be split has `steps: null` and `error`; the other rows are split.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the solutions: gsm8k or math
    #[arg(long, value_name = "KIND", value_parser = kind)]
    kind: SolutionKind,
    /// JSON lines to read; - is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// JSON lines to write, in the order of the input; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

fn kind(name: &str) -> std::result::Result<SolutionKind, String> {
    let names = SolutionKind::ALL.map(|(name, _)| name);
    let found = SolutionKind::ALL.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
    found.ok_or_else(|| match nearest(name, names) {
        Some(near) => format!("expected one of {}; did you mean {near:?}?", names.join(", ")),
        None => format!("expected one of {}", names.join(", ")),
    })
}

pub fn run(args: &Args) -> Result<()> {
    let rows = data::rows_or_errors(&args.input)?;
    let mut output = JsonlOutput::beside(&args.output, &[&args.input])?;
    let (all, mut split, mut total, mut first) = (rows.len(), 0usize, 0usize, None);
    for row in rows {
        let (mut fields, result) = match row {
            Ok(row) => {
                let result = texts(args.kind, &row);
                (row.fields, result)
            }
            Err(error) => (Default::default(), Err(error)),
        };
        match result {
            Ok(list) => {
                split += 1;
                total += list.len();
                fields.insert("steps".into(), list.into());
            }
            Err(error) => {
                fields.insert("steps".into(), Value::Null);
                fields.insert("error".into(), json!(error.to_string()));
                first.get_or_insert(error);
            }
        }
        output.row(&fields)?;
    }
    output.finish()?;
    if let (0, Some(error)) = (split, first) {
        return Err(error.context(format!("none of {} could be split", counted(all, "row"))));
    }
    eprintln!(
        "{}, {split} split, {:.2} steps a row",
        counted(all, "row"),
        total as f64 / split.max(1) as f64
    );
    Ok(())
}

fn texts(kind: SolutionKind, row: &PlacedRow) -> Result<Vec<String>> {
    let found = steps(kind, row.text("text")?).map_err(|e: Error| e.at(&row.place))?;
    Ok(found.into_iter().map(String::from).collect())
}

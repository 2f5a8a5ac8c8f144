//! `ferrl analyze`: tables from the files of a run.

use crate::output::print;
use ferrl::analyze::{ANALYSES, Table, find, page};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Analyse a run: advantages, Monte-Carlo values, diversity, KL, distance of weights
///
/// Prints a table for each analysis that the run has data for, and writes them as analysis.html in the run folder. No model
/// is computed. Analyses: advantages, values, ranking, diversity, kl, weights.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Analyses to make [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let wanted = find(&args.names)?;
    if !args.run.join("recipe.toml").is_file() {
        return Err(Error::data("is no run folder: it has no recipe.toml")
            .at(args.run.display())
            .fix("name a folder in runs/"));
    }
    let (mut tables, mut missing) = (Vec::new(), Vec::new());
    for analysis in wanted {
        match (analysis.run)(&args.run)? {
            Some(table) => tables.push((analysis, table)),
            None => missing.push(analysis.name),
        }
    }
    if tables.is_empty() {
        return Err(Error::data(format!("has no data for {}", missing.join(", ")))
            .at(args.run.display())
            .fix(format!(
                "one of {}, after a run that samples",
                ANALYSES.iter().map(|a| a.name).collect::<Vec<_>>().join(", ")
            )));
    }
    let file = args.run.join("analysis.html");
    let name = args.run.file_name().map_or_else(|| "a run".into(), |n| n.to_string_lossy().into_owned());
    std::fs::write(&file, page(&name, &tables))
        .map_err(|e| Error::resource(format!("cannot write: {e}")).at(file.display()))?;
    if args.json {
        let all: Map<String, Value> = tables.iter().map(|(a, t)| (a.name.to_string(), t.to_json())).collect();
        return print(&format!("{}\n", Value::Object(all)));
    }
    let mut text = String::new();
    for (analysis, table) in &tables {
        text += &format!("{}: {}\n{}\n", analysis.name, analysis.about, aligned(table));
    }
    text += &format!("{}\n", file.display());
    print(&text)
}

/// Columns under their headings, right-aligned.
fn aligned(table: &Table) -> String {
    let head: Vec<String> = table.columns.iter().map(|c| c.to_string()).collect();
    let lines: Vec<Vec<String>> = [head].into_iter().chain(table.cells()).collect();
    let width = |i: usize| lines.iter().map(|l| l[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..table.columns.len()).map(width).collect();
    let line = |cells: &Vec<String>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        format!("  {}\n", padded.collect::<Vec<_>>().join("  "))
    };
    lines.iter().map(line).collect()
}

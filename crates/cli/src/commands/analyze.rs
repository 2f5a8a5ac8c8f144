//! `ferrl analyze`: tables from the files of a run.

use crate::options::{at_least_one, size};
use crate::output::{print, unwritable, visible};
use ferrl::analyze::{ANALYSES, COMPUTED, Effort, Table, find, page};
use ferrl::run::ensure_run;
use ferrl_engine::files::write_whole;
use ferrl_engine::{Class, Error, Result};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Analyse a run: advantages, Monte-Carlo values, diversity, KL, distance of weights
///
/// Prints a table for each analysis that the run has data for, and writes them as analysis.html in the run folder. Analyses of
/// the run's files: advantages, values, ranking, diversity, kl, checkpoints, weights. Three load models and sample if they are
/// named: `critic` compares the values of the critic and of Monte-Carlo estimates with many continuations; `gradients` measures
/// the variance of the policy gradient between rollouts; `checkpoints` evaluates the initial model and every checkpoint.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Names of analyses [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Held-out prompts of the analyses that sample
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = at_least_one)]
    prompts: usize,
    /// Continuations of a state that count as its true value, for `critic`
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    truth: usize,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = size::<1024>)]
    threads: Option<usize>,
    /// Device of the analyses that sample: cpu, cuda, cuda:N or auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    device: String,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (computed, named): (Vec<String>, Vec<String>) =
        args.names.iter().cloned().partition(|name| COMPUTED.iter().any(|c| c.name == name));
    let wanted = if named.is_empty() && !computed.is_empty() { Vec::new() } else { find(&named)? };
    ensure_run(&args.run)?;
    let (mut tables, mut missing) = (Vec::new(), Vec::new());
    for analysis in wanted {
        match (analysis.run)(&args.run) {
            Ok(Some(table)) => tables.push((analysis.name, analysis.about, table)),
            Ok(None) => missing.push(analysis.name),
            // A recipe that cannot be read here hides no analysis that needs none.
            Err(e) if named.is_empty() && e.class == Class::Usage => {
                eprintln!("warning: no {}: {}", analysis.name, visible(&e.to_string()));
                missing.push(analysis.name);
            }
            Err(e) => return Err(e),
        }
    }
    for analysis in COMPUTED.iter().filter(|c| computed.iter().any(|name| name == c.name)) {
        let backend = ferrl_kernels::open(&args.device, args.threads)?;
        let effort = Effort { prompts: args.prompts, truth: args.truth, ..Default::default() };
        tables.push((analysis.name, analysis.about, (analysis.run)(&args.run, &backend, effort)?));
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
    write_whole(&file, page(&name, &tables).as_bytes()).map_err(|e| unwritable(&file, &e))?;
    if args.json {
        let all: Map<String, Value> =
            tables.iter().map(|(name, _, t)| (name.to_string(), t.to_json())).collect();
        return print(&format!("{}\n", Value::Object(all)));
    }
    let mut text = String::new();
    for (name, about, table) in &tables {
        text += &format!("{name}: {about}\n{}\n", aligned(table));
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

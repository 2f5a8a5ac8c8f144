//! `ferrl data vary`: data augmentation of worked solutions with other numbers.

use crate::options::seed;
use crate::output::JsonlOutput;
use ferrl::data::hub::HubCache;
use ferrl::data::{DataSource, Dataset};
use ferrl::solution::vary::{Unvaried, variants};
use ferrl_engine::{Error, Result, counted, nearest};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Augment worked solutions: the same exercises with other numbers
///
/// Solutions of GSM8K mark each calculation, `48/2 = <<48/2=24>>24`. Each row becomes up to --copies new ones: the numbers of the
/// question are sampled anew, and all later numbers are recomputed exactly. Values that were whole or positive stay so and keep
/// their order of magnitude. Numbers whose role is unclear are not changed; rows that cannot vary are counted by reason and
/// left out. The same seed gives the same rows.
#[derive(clap::Args)]
pub struct Args {
    /// Rows: a file, folder, split@path or org/name, such as 'train[:-512]@openai/gsm8k/main'
    #[arg(value_name = "DATA")]
    data: String,
    /// JSON lines to write; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Maximum number of variants of each row
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = crate::options::size::<1000>)]
    copies: usize,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    seed: u64,
    /// Column of the question
    #[arg(long, value_name = "NAME", default_value = "question")]
    question: String,
    /// Column of the worked solution
    #[arg(long, value_name = "NAME", default_value = "answer")]
    solution: String,
}

pub fn run(args: &Args) -> Result<()> {
    let rows = Dataset::read(&DataSource::parse(&args.data)?, &HubCache::from_env())?;
    let files: Vec<&Path> = rows.files.iter().map(PathBuf::as_path).collect();
    let mut output = JsonlOutput::beside(&args.output, &files)?;
    let (mut varied, mut made, mut why) = (0, 0, BTreeMap::<Unvaried, usize>::new());
    for index in 0..rows.len() {
        let mut row = rows.row(index)?;
        let text = |name: &str| match row.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(no_text(name, &row).at(rows.place(index))),
        };
        let (question, solution) = (text(&args.question)?, text(&args.solution)?);
        match variants(&question, &solution, args.copies, (args.seed, index as u64)) {
            Err(reason) => *why.entry(reason).or_default() += 1,
            Ok(all) => {
                varied += 1;
                made += all.len();
                for (question, solution) in all {
                    row.insert(args.question.clone(), question.into());
                    row.insert(args.solution.clone(), solution.into());
                    output.row(&row)?;
                }
            }
        }
    }
    output.finish()?;
    let reasons: Vec<String> = why.iter().map(|(reason, n)| format!("{n} {}", reason.text())).collect();
    if varied == 0 {
        let what = format!("none of {} can vary: {}", counted(rows.len(), "row"), reasons.join(", "));
        return Err(Error::data(what)
            .at(&args.data)
            .fix("solutions that mark calculations as GSM8K's do: 48/2 = <<48/2=24>>24"));
    }
    eprintln!("{}, {varied} of them varied: {}", counted(rows.len(), "row"), counted(made, "new row"));
    reasons.iter().for_each(|reason| eprintln!("  {reason}"));
    Ok(())
}

fn no_text(name: &str, row: &ferrl::data::Row) -> Error {
    let names: Vec<&str> = row.keys().map(String::as_str).collect();
    let error =
        Error::data(format!("has no text in a column {name:?}; its columns are {}", names.join(", ")));
    match nearest(name, names.iter().copied()) {
        Some(near) => error.fix(format!("did you mean {near:?}? --question and --solution name the columns")),
        None => error.fix("--question and --solution name the columns"),
    }
}

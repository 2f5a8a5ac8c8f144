//! `ferrl credit`: recomputes advantages of steps from saved continuations.

use crate::data;
use crate::output::JsonlOutput;
use ferrl::credit::rows::{files, recompute};
use ferrl_engine::{Error, Result, counted};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Recompute advantages of steps from saved rollouts
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: CreditCommand,
}

#[derive(clap::Subcommand)]
enum CreditCommand {
    Vine(VineArgs),
}

/// Values and advantages of steps, as VinePPO computes them
///
/// A row holds `steps` (texts, or their number), `score` (the completion's reward), `rollouts` (a list of rewards for each
/// state, the prompt's first; null is a truncated continuation), and optionally `max_steps` (states after the prompt that are
/// estimated; later ones are back-filled) and `unfinished_penalty` (reward of a null; 0). The output row adds `values` (of the
/// steps + 1 states) and `advantages`. A row with `rewards` instead, and `start`, `add`, `max`, `threshold`, gets `used`,
/// `value` and `ci`: the number of continuations until the confidence interval is narrower than the threshold. Rollouts saved
/// by a run of vineppo are such rows.
#[derive(clap::Args)]
struct VineArgs {
    /// JSON lines to read; - is standard input, a run folder means all its rollouts
    #[arg(long, value_name = "FILE|RUN")]
    input: PathBuf,
    /// JSON lines to write, in the order of the input; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        CreditCommand::Vine(args) => vine(args),
    }
}

fn vine(args: &VineArgs) -> Result<()> {
    let files = files(&args.input)?;
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let mut output = JsonlOutput::beside(&args.output, &paths)?;
    let (mut all, mut done, mut first) = (0usize, 0usize, None);
    for path in paths {
        for row in data::rows_or_errors(path)? {
            let (mut fields, computed): (Map<String, Value>, Result<_>) = match row {
                Ok(row) => {
                    let computed = recompute(&row.fields).map_err(|e: Error| e.at(&row.place));
                    (row.fields, computed)
                }
                Err(error) => (Map::default(), Err(error)),
            };
            all += 1;
            match computed {
                Ok(computed) => {
                    done += 1;
                    fields.extend(computed);
                }
                Err(error) => {
                    fields.insert("values".into(), Value::Null);
                    fields.insert("advantages".into(), Value::Null);
                    fields.insert("error".into(), json!(error.to_string()));
                    first.get_or_insert(error);
                }
            }
            output.row(&fields)?;
        }
    }
    output.finish()?;
    if let (0, Some(error)) = (done, first) {
        return Err(error.context(format!("none of {} has credit to recompute", counted(all, "row"))));
    }
    eprintln!("{}, {done} recomputed", counted(all, "row"));
    Ok(())
}

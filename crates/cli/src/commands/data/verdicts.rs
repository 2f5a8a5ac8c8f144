//! `ferrl data verdicts`: training data of generative verifiers.

use crate::data;
use crate::output::JsonlOutput;
use ferrl::credit::rows::files;
use ferrl::reward::verdicts::{VerdictOptions, verdicts};
use ferrl::reward::{Judgement, QUESTION};
use ferrl_engine::{Error, Result, counted};
use std::path::{Path, PathBuf};

/// Make training data of a generative verifier (GenRM) from rollouts
///
/// Rows with `prompt`, `completion` and `reward` (a run folder, its rollouts, or output of `ferrl verify`) become prompts with the
/// verdict Yes or No, the same number of each; duplicates are dropped. Right completions are added as demonstrations with weight
/// LAMBDA, so that `algo = "mle"` with `aggregate = "sequence"` minimises GenRM's joint loss. A row with a `rationale` becomes a row
/// of GenRM-CoT, and is left out if the rationale's verdict contradicts the reward.
#[derive(clap::Args)]
pub struct Args {
    /// JSON lines to read; - is standard input, a run folder means all its rollouts
    #[arg(long, value_name = "FILE|RUN")]
    input: PathBuf,
    /// JSON lines to write; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Weight of right completions in the joint loss; 0 leaves them out
    #[arg(long, value_name = "X", default_value_t = 0.33, value_parser = up_to_1000)]
    lambda: f64,
    /// Minimum reward of a right completion
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = up_to_1000)]
    threshold: f64,
    /// Text between completion and verdict
    #[arg(long, value_name = "TEXT", default_value = QUESTION)]
    question: String,
}

fn up_to_1000(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| (0.0..=1000.0).contains(x));
    number.ok_or_else(|| "expected a number from 0 to 1000".into())
}

pub fn run(args: &Args) -> Result<()> {
    let files = files(&args.input)?;
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let mut rows = Vec::new();
    for path in &paths {
        rows.extend(data::rows(path)?.into_iter().map(|row| (row.place, row.fields)));
    }
    if rows.is_empty() {
        return Err(Error::data("has no rows").at(args.input.display()));
    }
    let judgement = Judgement { question: args.question.clone(), ..Default::default() };
    let options = VerdictOptions { judgement, threshold: args.threshold, lambda: args.lambda };
    let made = verdicts(&rows, &options)?;
    let mut output = JsonlOutput::beside(&args.output, &paths)?;
    made.rows.iter().try_for_each(|row| output.row(row))?;
    output.finish()?;
    eprintln!(
        "{}: {} of each verdict, {}, {} left out (the rationale's verdict contradicts the reward)",
        counted(rows.len(), "row"),
        made.each,
        counted(made.correct, "right completion"),
        counted(made.contradicted, "rationale")
    );
    Ok(())
}

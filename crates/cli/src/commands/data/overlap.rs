//! `ferrl data overlap`: training rows that contain test rows (contamination).

use crate::output::print;
use ferrl::data::hub::HubCache;
use ferrl::data::overlap::{OverlapPair, OverlapReport, WORDS, between};
use ferrl::data::{DataSource, Dataset};
use ferrl_engine::Result;
use serde_json::{Value, json};

/// Find training rows that overlap with test rows (contamination)
///
/// A training row overlaps if its prompt equals that of a test row (ignoring case and white space), or if one of its texts
/// shares 13 consecutive words with a test prompt. Word sequences that many test rows share belong to a template and do not
/// count. A run checks data.train against eval.data in the same way; data.overlap sets what happens then.
#[derive(clap::Args)]
pub struct Args {
    /// Training rows: a file, folder, split@path, org/name or suite:NAME
    #[arg(value_name = "TRAIN")]
    train: String,
    /// Test rows, in the same notation; suite:NAME is a suite's test rows
    #[arg(value_name = "TEST")]
    test: String,
    /// Number of consecutive words that count as an overlap
    #[arg(long, value_name = "N", default_value_t = WORDS, value_parser = crate::options::size::<1000>)]
    words: usize,
    /// Maximum number of rows to show; all are counted
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = crate::options::count)]
    show: usize,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let cache = HubCache::from_env();
    let train = Dataset::read(&DataSource::parse(&args.train)?, &cache)?;
    let test = Dataset::read(&DataSource::held_out(&args.test)?, &cache)?;
    let report = between(&[train], &[test], args.words)?;
    print(&if args.json { format!("{}\n", machine_readable(&report)) } else { text(&report, args) })
}

fn machine_readable(r: &OverlapReport) -> Value {
    let pair = |p: &OverlapPair| json!({"train": p.train, "test": p.test, "exact": p.exact});
    json!({
        "train_rows": r.train_rows, "test_rows": r.test_rows, "overlapping_train_rows": r.pairs.len(),
        "overlapping_test_rows": r.met, "exact": r.pairs.iter().filter(|p| p.exact).count(),
        "pairs": r.pairs.iter().map(pair).collect::<Vec<_>>(),
    })
}

fn text(r: &OverlapReport, args: &Args) -> String {
    let exact = r.pairs.iter().filter(|p| p.exact).count();
    let mut out = format!(
        "{} of {} training rows overlap with {} of {} test rows: {exact} by the same prompt, {} by {} words in a row\n",
        r.pairs.len(),
        r.train_rows,
        r.met,
        r.test_rows,
        r.pairs.len() - exact,
        args.words
    );
    for p in r.pairs.iter().take(args.show) {
        let how = if p.exact { "the prompt of".to_string() } else { format!("{} words of", args.words) };
        out.push_str(&format!("{} has {how} {}\n", p.train, p.test));
    }
    if r.pairs.len() > args.show {
        out.push_str(&format!("and {} more: --show {}\n", r.pairs.len() - args.show, r.pairs.len()));
    }
    out
}

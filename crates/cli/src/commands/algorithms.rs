//! `ferrl algorithms`: lists the algorithms and explains one.

use crate::output::print;
use clap::Parser;
use ferrl::algo::{ALGORITHMS, Entry, find};
use ferrl::recipe::{algorithm_keys, algorithms_markdown, explained, metrics_explained};
use ferrl_engine::{Error, Result, nearest};
use serde_json::Map;
use std::path::PathBuf;

/// List the algorithms
///
/// With NAME: its settings with defaults and meanings, and the metrics of its steps.
#[derive(Parser)]
pub struct Args {
    /// Name of an algorithm
    #[arg(value_name = "NAME", conflicts_with = "markdown")]
    name: Option<String>,
    /// Print the manual's page on algorithms
    #[arg(long)]
    markdown: bool,
    /// JSON file with measured results for that page: name to before, after, metric and command
    #[arg(long, value_name = "FILE", requires = "markdown")]
    figures: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(name) = &args.name {
        return print(&settings(named(name, "ferrl algorithms")?));
    }
    if args.markdown {
        return print(&algorithms_markdown(&figures(args.figures.as_ref())?));
    }
    let width = ALGORITHMS.iter().map(|e| e.name.len()).max().unwrap_or(0);
    for entry in ALGORITHMS {
        print(&described(entry, width))?;
    }
    print("`ferrl algorithms NAME` shows the settings of one; `algo = \"NAME\"` in a recipe uses it.\n")
}

pub(super) fn named(name: &str, command: &str) -> Result<&'static Entry> {
    find(name).map_err(|e| match nearest(name, ALGORITHMS.iter().map(|entry| entry.name)) {
        Some(near) => e.fix(format!("{command} {near}")),
        None => e.fix("`ferrl algorithms` says what each of them is"),
    })
}

fn figures(file: Option<&PathBuf>) -> Result<Map<String, serde_json::Value>> {
    let Some(file) = file else { return Ok(Map::new()) };
    let place = || file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|e| Error::data(e.to_string()).at(place()))?;
    serde_json::from_str(&text).map_err(|e| Error::data(format!("not a JSON object: {e}")).at(place()))
}

fn described(entry: &Entry, width: usize) -> String {
    let (name, space) = (entry.name, "");
    let feed = entry.feed.words();
    format!(
        "{name:<width$}  {}\n{space:width$}  learns from {feed}\n{space:width$}  {}\n\n",
        entry.about, entry.paper
    )
}

/// An algorithm, its own settings and its metrics.
pub(super) fn settings(entry: &Entry) -> String {
    let mut text = described(entry, entry.name.len());
    text += "settings, with their defaults (off if there is none):\n";
    algorithm_keys(entry).iter().for_each(|key| text += &explained(key));
    text += "\nmetrics of each step, besides the common ones:\n";
    text + &metrics_explained(entry)
}

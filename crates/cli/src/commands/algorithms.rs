//! `ferrl algorithms` and `ferrl recipe`: what there is to choose from.

use crate::output::print;
use clap::Parser;
use ferrl::algo::{ALGORITHMS, Entry, find};
use ferrl::recipe::keys_markdown;
use ferrl_engine::Result;
use serde_json::Value;

/// List the algorithms
///
/// With a name: that one, with its settings and their defaults.
#[derive(Parser)]
pub struct Args {
    /// One of them
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if let Some(name) = &args.name {
        let entry = find(name)?;
        let settings = (entry.defaults)();
        print(&format!("{}\nsettings, with their defaults:\n", described(entry, entry.name.len())))?;
        return defaults("", &settings);
    }
    let width = ALGORITHMS.iter().map(|e| e.name.len()).max().unwrap_or(0);
    for entry in ALGORITHMS {
        print(&described(entry, width))?;
    }
    print("`ferrl algorithms NAME` shows the settings of one; `algo = \"NAME\"` in a recipe uses it.\n")
}

fn described(entry: &Entry, width: usize) -> String {
    let (name, space) = (entry.name, "");
    let wants = entry.wants.words();
    format!(
        "{name:<width$}  {}\n{space:width$}  learns from {wants}\n{space:width$}  {}\n\n",
        entry.about, entry.paper
    )
}

/// One line for each setting, tables flattened to dotted keys.
fn defaults(prefix: &str, value: &Value) -> Result<()> {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                defaults(&path, value)?;
            }
            Ok(())
        }
        Value::Null => print(&format!("  algo.{prefix} (off)\n")),
        value => print(&format!("  algo.{prefix} = {value}\n")),
    }
}

/// Explain every key of a recipe, with its default
#[derive(Parser)]
pub struct RecipeArgs {}

/// Runs `ferrl recipe`.
pub fn recipe(_: &RecipeArgs) -> Result<()> {
    print!("{}", keys_markdown());
    Ok(())
}

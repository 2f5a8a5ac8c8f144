//! `ferrl recipe`: keys of recipes, and the recipes that come with the program.

use super::algorithms::{named, settings};
use crate::output::{print, unwritable};
use clap::{Parser, Subcommand};
use ferrl::recipe::{explained, json_schema, keys_markdown, keys_that_matter, names_markdown};
use ferrl_engine::files::undisturbed;
use ferrl_engine::{Error, Result, nearest};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The recipes that come with the program, by name (`build.rs`).
const SHIPPED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// Explain every key of a recipe, with its default; list and copy the recipes that come with Ferrl
#[derive(Parser)]
pub struct Args {
    /// Print the JSON Schema of recipes, for editors
    #[arg(long)]
    json_schema: bool,
    #[command(subcommand)]
    command: Option<RecipeCommand>,
}

#[derive(Subcommand)]
enum RecipeCommand {
    /// Explain the settings of one algorithm and the other keys that it uses
    Show {
        /// One of `ferrl algorithms`
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List the recipes that come with Ferrl
    List,
    /// Write a recipe that comes with Ferrl to a file, to edit it and train with it
    New {
        /// One of `ferrl recipe list`
        #[arg(value_name = "NAME")]
        name: String,
        /// The file to write [default: NAME.toml]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Print the key of each setting of TRL, transformers, PEFT, verl and OpenRLHF
    Names,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        None if args.json_schema => print(&format!("{:#}\n", json_schema())),
        None => print(&keys_markdown()),
        Some(RecipeCommand::Show { name }) => {
            let entry = named(name, "ferrl recipe show").map_err(|e| match shipped(name) {
                Ok(_) => e.fix(format!("`ferrl recipe new {name}` writes the recipe of that name")),
                Err(_) => e,
            })?;
            let mut text = settings(entry);
            text += "\nother keys that it uses:\n";
            keys_that_matter(entry)?.iter().for_each(|key| text += &explained(key));
            print(&text)
        }
        Some(RecipeCommand::List) => list(),
        Some(RecipeCommand::New { name, out }) => new(name, out.as_deref()),
        Some(RecipeCommand::Names) => print(&names_markdown()),
    }
}

fn list() -> Result<()> {
    let width = SHIPPED.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, text) in SHIPPED {
        print(&format!("{name:<width$}  {}\n", title(text)))?;
    }
    print("`ferrl recipe new NAME` writes one to NAME.toml; `ferrl train NAME.toml` runs it.\n")
}

/// What the first line of a recipe says it is.
fn title(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default().strip_prefix('#').unwrap_or_default();
    line.split(": of ").next().unwrap_or_default().trim().trim_end_matches(['.', ':', ','])
}

fn new(name: &str, out: Option<&Path>) -> Result<()> {
    let text = shipped(name)?;
    let path = out.map_or_else(|| PathBuf::from(format!("{name}.toml")), Path::to_path_buf);
    let mut files = vec![(path.clone(), text)];
    // A base recipe is written beside the recipe that names it.
    if let Some(base) = base_of(text) {
        let folder = path.parent().unwrap_or(Path::new(""));
        let beside = folder.join(format!("{base}.toml"));
        let base = shipped(base)?;
        if std::fs::read_to_string(&beside).is_ok_and(|there| there == base) {
            // A base that another recipe has brought already.
        } else {
            files.push((beside, base));
        }
    }
    if let Some((there, _)) = files.iter().find(|(path, _)| path.exists()) {
        return Err(Error::usage("is there already").at(there.display()).fix("--out FILE with another name"));
    }
    {
        let _held = undisturbed();
        for (path, text) in &files {
            let written = File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
            written.map_err(|e| unwritable(path, &e))?;
        }
    }
    files.iter().try_for_each(|(path, _)| print(&format!("{}\n", path.display())))
}

fn shipped(name: &str) -> Result<&'static str> {
    let name = name.trim_end_matches(".toml");
    SHIPPED.iter().find(|(n, _)| *n == name).map(|(_, text)| *text).ok_or_else(|| {
        let error = Error::usage(format!("there is no recipe {name:?}"));
        match nearest(name, SHIPPED.iter().map(|(n, _)| *n)) {
            Some(near) => error.fix(format!("ferrl recipe new {near}")),
            None => error.fix("`ferrl recipe list` shows them"),
        }
    })
}

/// The name of the base recipe.
fn base_of(text: &str) -> Option<&str> {
    let line = text.lines().find_map(|l| l.strip_prefix("base = \""))?;
    line.split('"').next()?.strip_suffix(".toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_says_what_it_is_and_brings_its_base() {
        assert!(SHIPPED.len() > 20);
        for (name, text) in SHIPPED {
            assert!(title(text).len() > 10, "{name}: the first line says what it is");
            assert!(base_of(text).is_none_or(|base| shipped(base).is_ok()), "{name}");
        }
    }
}

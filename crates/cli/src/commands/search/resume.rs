//! The folder of saved trees, and `ferrl search --resume`.
//!
//! A tree depends only on the model, the settings, the seed and its prompt, so resuming changes no tree. `search.json` beside the
//! trees has what they were made with; other settings are refused.

use super::Args;
use crate::commands::eval::difference;
use crate::output::unwritable;
use ferrl::recipe::Recipe;
use ferrl::search::{self, Record};
use ferrl::source::Prompt;
use ferrl_engine::files::write_whole;
use ferrl_engine::{Error, Result, counted};
use serde_json::{Value, json};
use std::path::Path;

/// The settings beside the trees.
const SETTINGS: &str = "search.json";

/// Everything that determines the trees.
pub fn settings(args: &Args, recipe: &Recipe, model: &Path) -> Result<Value> {
    let r = &recipe.rollout;
    let model = model.canonicalize().unwrap_or_else(|_| model.into());
    Ok(json!({
        "model": model.display().to_string(), "seed": args.set.seed(recipe), "strategy": args.strategy,
        "option": args.option, "verifier": args.verifier, "verifier_option": args.verifier_option,
        "budget": args.budget, "temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k,
        "max_new_tokens": r.max_new_tokens, "max_turns": r.max_turns, "stop": r.stop,
        "dtype": recipe.model.dtype, "prompt": args.prompt, "rows": recipe.data, "data": recipe.eval.data,
        "env": recipe.env, "reward": recipe.reward,
    }))
}

/// Prepares the folder of --save: with --resume the trees of these settings and prompts are read, else earlier trees are deleted.
pub fn open(dir: &Path, made: (&Value, &[Prompt]), resume: bool) -> Result<Vec<Record>> {
    std::fs::create_dir_all(dir).map_err(|e| unwritable(dir, &e))?;
    let records = if resume { found(dir, made)? } else { Vec::new() };
    if !resume {
        for tree in search::tree_files(dir)? {
            std::fs::remove_file(&tree).map_err(|e| unwritable(&tree, &e))?;
        }
    }
    let path = dir.join(SETTINGS);
    write_whole(&path, made.0.to_string().as_bytes()).map_err(|e| unwritable(&path, &e))?;
    Ok(records)
}

/// The trees of the interrupted search.
fn found(dir: &Path, (settings, prompts): (&Value, &[Prompt])) -> Result<Vec<Record>> {
    if !search::has_trees(dir) {
        return Ok(Vec::new());
    }
    let fix = "the settings of the interrupted search, or no --resume to start over";
    let stored = std::fs::read(dir.join(SETTINGS)).ok();
    let Some(stored) = stored.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) else {
        let what = format!("{SETTINGS} is missing, the settings that its trees were made with");
        return Err(Error::usage(what).at(dir.display()).fix(fix));
    };
    if let Some((name, was, is)) = difference(&stored, settings, "") {
        let what = format!("its trees were made with {name} = {was}, not {is}");
        return Err(Error::usage(what).at(dir.display()).fix(fix));
    }
    let mut records = search::replay(dir)?.records;
    records.retain(|r| prompts.iter().any(|p| p.index == r.index));
    for record in &records {
        let prompt = prompts.iter().find(|p| p.index == record.index);
        // The first observation of an environment is the prompt of its tree.
        let other = prompt.filter(|p| !record.facts.turns && p.text != record.prompt);
        if let Some(prompt) = other {
            let what = format!("prompt {} was {:?} and is {:?}", record.index, record.prompt, prompt.text);
            return Err(Error::usage(what).at(dir.display()).fix(fix));
        }
    }
    eprintln!("resumed after {}", counted(records.len(), "prompt"));
    Ok(records)
}

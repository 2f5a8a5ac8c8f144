//! Lengths of a recipe's sequences: measured on its first rows, or the maximum of its settings.

use crate::algo::Feed;
use crate::experience::Sequence;
use crate::recipe::Recipe;
use crate::setup;
use crate::source::Item;
use crate::warnings::Warnings;
use ferrl_engine::Result;
use ferrl_engine::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// Number of examples that are measured.
pub(super) const EXAMPLES: usize = 256;

/// Tokens of a stage's sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths {
    /// Mean tokens of a prompt.
    pub prompt: f64,
    /// Mean tokens of a whole sequence; completions count with their maximum length.
    pub sequence: f64,
    /// The longest sequence measured or allowed.
    pub longest: usize,
    /// Rows of an epoch, if the data is finite and could be read.
    pub rows: Option<usize>,
    /// Why lengths are assumed to be the maximum instead of measured; `None` if they are measured.
    pub assumed: Option<String>,
}

/// Measured on the first rows if data, tokenizer and model exist; otherwise the limits of the recipe.
pub fn lengths(recipe: &Recipe, feed: Feed, model: Option<&Path>) -> Lengths {
    let answer = if feed.sampled() { recipe.rollout.max_new_tokens } else { 0 };
    let limit = recipe.data.max_length;
    let limit = recipe.model.init.as_ref().map_or(limit, |init| limit.min(init.max_positions));
    let assumed = match measure(recipe, feed, model, answer) {
        Ok(Some(lengths)) => return lengths,
        Ok(None) => "rows cannot be measured before the run trains its tokenizer".to_string(),
        Err(e) => e.to_string().lines().next().unwrap_or_default().to_string(),
    };
    let (prompt, longest) = (limit as f64, limit + answer);
    Lengths { prompt, sequence: longest as f64, longest, rows: None, assumed: Some(assumed) }
}

fn measure(recipe: &Recipe, feed: Feed, model: Option<&Path>, answer: usize) -> Result<Option<Lengths>> {
    let (mut prompts, mut sequences, mut rows) = (Vec::new(), Vec::new(), None);
    match (setup::task(recipe)?, model) {
        // A new model's tokenizer knows characters; other tokens are longer, so this is the most.
        (Some(task), None) => {
            for i in 0..EXAMPLES as u64 {
                let e = task.example(i, false)?;
                prompts.push(e.prompt.chars().count());
                sequences.push(match feed {
                    Feed::Rollouts => e.prompt.chars().count() + answer,
                    _ => e.prompt.chars().count() + e.answer.chars().count() + 1,
                });
            }
        }
        (_, Some(dir)) => {
            let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
            let mut source = setup::source(recipe, dir, &tokenizer, feed, false, &Warnings::default())?;
            rows = source.epoch();
            for item in source.next(rows.unwrap_or(EXAMPLES).min(EXAMPLES))? {
                match item {
                    Item::Prompt(prompt) => {
                        prompts.push(prompt.ids.len());
                        sequences.push(prompt.ids.len() + answer);
                    }
                    Item::Sequences(all) => {
                        let asked = |s: &Sequence| s.trained.iter().position(|t| *t).unwrap_or(s.ids.len());
                        prompts.extend(all.iter().map(asked));
                        sequences.extend(all.iter().map(|s| s.ids.len()));
                    }
                    Item::Group(group) => {
                        prompts.push(group.prompt.ids.len());
                        sequences.extend(group.completions.iter().map(|s| s.ids.len()));
                    }
                }
            }
        }
        (None, None) => return Ok(None),
    }
    let mean = |all: &[usize]| all.iter().sum::<usize>() as f64 / all.len().max(1) as f64;
    let Some(&longest) = sequences.iter().max() else { return Ok(None) };
    Ok(Some(Lengths { prompt: mean(&prompts), sequence: mean(&sequences), longest, rows, assumed: None }))
}

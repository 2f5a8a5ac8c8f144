//! How long the sequences of a recipe are: measured on its first rows, or the most its settings allow.

use crate::algo::Wants;
use crate::recipe::Recipe;
use crate::setup;
use crate::source::Item;
use crate::warnings::Warnings;
use ferrl_engine::Result;
use ferrl_engine::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// Examples looked at.
pub(super) const EXAMPLES: usize = 256;

/// Tokens of a stage's sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths {
    /// Mean tokens of a prompt that is answered.
    pub prompt: f64,
    /// Mean tokens of a whole sequence; answers count with all the tokens they may have.
    pub sequence: f64,
    /// The longest sequence met or allowed.
    pub longest: usize,
    /// Rows of an epoch, where data has an end and could be read.
    pub rows: Option<usize>,
    /// Whether rows were looked at; otherwise the settings' limits are taken.
    pub measured: bool,
}

/// From the first rows where data, tokenizer and model are there; from the limits of the recipe otherwise.
pub fn lengths(recipe: &Recipe, wants: Wants, model: Option<&Path>) -> Lengths {
    let answer = if wants == Wants::Rollouts { recipe.rollout.max_new_tokens } else { 0 };
    let limit = recipe.data.max_length;
    measure(recipe, wants, model, answer).ok().flatten().unwrap_or(Lengths {
        prompt: limit as f64,
        sequence: (limit + answer) as f64,
        longest: limit + answer,
        rows: None,
        measured: false,
    })
}

fn measure(recipe: &Recipe, wants: Wants, model: Option<&Path>, answer: usize) -> Result<Option<Lengths>> {
    let (mut prompts, mut sequences, mut rows) = (Vec::new(), Vec::new(), None);
    match (setup::task(recipe)?, model) {
        // A new model's tokenizer knows characters; other tokens are longer, so this is the most.
        (Some(task), None) => {
            for i in 0..EXAMPLES as u64 {
                let e = task.example(i, false)?;
                prompts.push(e.prompt.chars().count());
                sequences.push(match wants {
                    Wants::Rollouts => e.prompt.chars().count() + answer,
                    _ => e.prompt.chars().count() + e.answer.chars().count() + 1,
                });
            }
        }
        (_, Some(dir)) => {
            let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
            let mut source = setup::source(recipe, dir, &tokenizer, wants, false, &Warnings::default())?;
            rows = source.epoch();
            for item in source.next(rows.unwrap_or(EXAMPLES).min(EXAMPLES))? {
                match item {
                    Item::Ask(prompt) => {
                        prompts.push(prompt.ids.len());
                        sequences.push(prompt.ids.len() + answer);
                    }
                    Item::Given(all) => sequences.extend(all.iter().map(|s| s.ids.len())),
                    Item::Graded(group) => {
                        prompts.push(group.prompt.ids.len());
                        sequences.extend(group.answers.iter().map(|s| s.ids.len()));
                    }
                }
            }
        }
        (None, None) => return Ok(None),
    }
    let mean = |all: &[usize]| all.iter().sum::<usize>() as f64 / all.len().max(1) as f64;
    let Some(&longest) = sequences.iter().max() else { return Ok(None) };
    Ok(Some(Lengths { prompt: mean(&prompts), sequence: mean(&sequences), longest, rows, measured: true }))
}

//! Multiple choice by log-probability, as lm-evaluation-harness scores it: every option is put behind the prompt, and the one
//! that the model finds most probable is its choice. Nothing is sampled.
//!
//! `acc` goes by the sum of the log-probabilities of an option's tokens, `acc_norm` by that sum over the option's length in
//! characters, so that long options are not at a disadvantage.

use super::{EvaluatedCompletion, Evaluation, question};
use crate::experience::Metrics;
use crate::reward::CompletionScores;
use crate::rollout::RolloutCompletion;
use crate::source::{Mixture, Prompt};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, plan, stats};
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Tokens computed together.
const BATCH_TOKENS: usize = 4096;

/// What stands behind the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// The option's letter, as MMLU is scored.
    Letter,
    /// The option's words, as ARC and SciQ are scored.
    Text,
}

/// A prompt with its options.
struct MultipleChoice {
    prompt: Prompt,
    /// What each option is called in tables of results.
    options: Vec<String>,
    right: usize,
}

/// Scores the options of the next `prompts` prompts.
pub fn likelihood(
    model: &Model,
    tokenizer: &Tokenizer,
    source: &mut Mixture,
    prompts: usize,
    by: Continuation,
) -> Result<Evaluation> {
    let items = source.next(prompts)?.into_iter().filter_map(question);
    let choices = items.map(|prompt| choice(prompt, by)).collect::<Result<Vec<_>>>()?;
    let mut sequences = Vec::new();
    let mut own = Vec::new();
    for choice in &choices {
        for option in &choice.options {
            let more = continuation(tokenizer, &choice.prompt, option)?;
            own.push(more.len());
            sequences.push([choice.prompt.ids.as_slice(), &more].concat());
        }
    }
    let logps = logps(model, &sequences, &own)?;
    let mut metrics = Metrics::default();
    let mut completions: Vec<EvaluatedCompletion> = Vec::with_capacity(choices.len());
    let mut at = 0;
    for (k, choice) in choices.into_iter().enumerate() {
        let range = at..at + choice.options.len();
        at = range.end;
        let tokens = own[range.clone()].iter().sum();
        let (chosen, scores) = choose(&choice, &logps[range]);
        metrics.add("eval/pass@1", scores.reward.unwrap_or(0.0));
        let completion =
            RolloutCompletion { prompt: k, text: chosen, tokens, truncated: false, played: None };
        completions.push((choice.prompt, completion, scores));
    }
    Ok(Evaluation { metrics, completions })
}

/// The options of a row and which is right: columns `choices` and `answer`, a letter.
fn choice(prompt: Prompt, by: Continuation) -> Result<MultipleChoice> {
    let bad = |what: &str| {
        Error::data(what.to_string())
            .at(&prompt.place)
            .fix("a suite of multiple choice: mmlu, gpqa, sciq; or rows with choices (a list) and answer (a letter)")
    };
    let texts = prompt.columns.get("choices").and_then(Value::as_array);
    let texts = texts.ok_or_else(|| bad("column \"choices\" must hold the options"))?;
    let texts: Option<Vec<&str>> = texts.iter().map(Value::as_str).collect();
    let texts = texts.filter(|t| (2..=26).contains(&t.len())).ok_or_else(|| bad("needs 2 to 26 options"))?;
    let letter = |k: usize| (b'A' + k as u8) as char;
    let answer = prompt.columns.get("answer").and_then(Value::as_str).unwrap_or_default();
    let right = (0..texts.len()).find(|k| answer == letter(*k).to_string());
    let right = right.ok_or_else(|| bad("column \"answer\" must hold the letter of an option"))?;
    let options = texts.iter().enumerate().map(|(k, text)| match by {
        Continuation::Letter => letter(k).to_string(),
        Continuation::Text => text.trim().to_string(),
    });
    let options = options.collect();
    Ok(MultipleChoice { prompt, options, right })
}

/// The tokens of an option behind its prompt. They are read off the encoding of both together, as long as it begins with the
/// prompt's.
fn continuation(tokenizer: &Tokenizer, prompt: &Prompt, option: &str) -> Result<Vec<u32>> {
    let more = match prompt.messages.is_empty() {
        // A conversation ends with the header of the response, which the option begins.
        false => tokenizer.encode_text(option)?,
        true => {
            let spaced = !prompt.text.ends_with(char::is_whitespace);
            let option = if spaced { format!(" {option}") } else { option.to_string() };
            let alone = tokenizer.encode_markup(&prompt.text)?;
            let both = tokenizer.encode_markup(&format!("{}{option}", prompt.text))?;
            match both.strip_prefix(alone.as_slice()) {
                Some(more) => more.to_vec(),
                None => tokenizer.encode_text(&option)?,
            }
        }
    };
    match more.is_empty() {
        false => Ok(more),
        true => Err(Error::data(format!("option {option:?} has no tokens")).at(&prompt.place)),
    }
}

/// The log-probability of the last tokens of each sequence, `own` of them.
fn logps(model: &Model, sequences: &[Vec<u32>], own: &[usize]) -> Result<Vec<f64>> {
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut out = Vec::with_capacity(sequences.len());
    for cut in plan(&lengths, BATCH_TOKENS.max(longest))? {
        let batch = Batch::of(sequences[cut.clone()].iter().cloned());
        let stats = stats(model, &batch, 1.0)?;
        for (rows, own) in batch.segments().iter().zip(&own[cut]) {
            // The statistics of a token stand with the one before it.
            let logp = &stats.logp[rows.end - 1 - own..rows.end - 1];
            out.push(logp.iter().map(|x| f64::from(*x)).sum());
        }
    }
    Ok(out)
}

/// What was chosen, and whether it is right.
fn choose(choice: &MultipleChoice, logps: &[f64]) -> (String, CompletionScores) {
    let best = |score: &dyn Fn(usize) -> f64| {
        // The first of equals, as numpy's argmax has it.
        (1..logps.len()).fold(0, |best, k| if score(k) > score(best) { k } else { best })
    };
    let plain = best(&|k| logps[k]);
    let normed = best(&|k| logps[k] / choice.options[k].chars().count().max(1) as f64);
    let hit = |k: usize| f32::from(u8::from(k == choice.right));
    let mut components = vec![("acc".to_string(), hit(plain)), ("acc_norm".to_string(), hit(normed))];
    let letters = (b'A'..=b'Z').map(char::from);
    components.extend(letters.zip(logps).map(|(letter, logp)| (format!("logp_{letter}"), *logp as f32)));
    let right = f64::from(hit(plain));
    let scores = CompletionScores {
        reward: Some(right),
        score: Some(right),
        components,
        found: Some(true),
        extra: Default::default(),
    };
    (choice.options[plain].clone(), scores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(answer: &str) -> Prompt {
        let columns = json!({ "choices": ["no", "a much longer option"], "answer": answer });
        Prompt { columns: columns.as_object().unwrap().clone(), ..Default::default() }
    }

    #[test]
    fn length_normalisation_may_change_the_choice() {
        let choice = choice(row("B"), Continuation::Text).unwrap();
        let (chosen, scores) = choose(&choice, &[-3.0, -9.0]);
        let part = |name: &str| scores.components.iter().find(|(n, _)| n == name).unwrap().1;
        assert_eq!((chosen.as_str(), part("acc"), part("acc_norm")), ("no", 0.0, 1.0));
        assert!(!scores.is_right() && part("logp_B") == -9.0);
    }

    #[test]
    fn rows_without_options_are_refused() {
        assert!(
            choice(Prompt::default(), Continuation::Letter).err().unwrap().to_string().contains("choices")
        );
        assert!(choice(row("C"), Continuation::Letter).err().unwrap().to_string().contains("letter"));
    }
}

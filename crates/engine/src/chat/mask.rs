//! The loss mask of a conversation.

use std::ops::Range;

use serde_json::Value;

use super::marks::Marked;
use super::{ChatTemplate, Input, Turns};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Ids of the whole conversation and its loss mask.
pub(super) fn encode(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    input: Input<'_>,
    which: Turns,
) -> Result<(Vec<u32>, Vec<bool>)> {
    if !input.messages.iter().any(is_assistant) {
        return Err(Error::data("the conversation has nothing to train on: no message is the assistant's")
            .fix("add an assistant message, or drop the row"));
    }
    let blocks = template.generation;
    let whole = template.render_marked(tokenizer, input, blocks)?;
    let some = which == Turns::Last || input.messages.iter().any(|m| is_assistant(m) && !is_trained(m));
    let spans = match (blocks, some) {
        (true, false) => whole.generation.clone(),
        (false, _) => turns(template, tokenizer, input, &whole, which)?,
        (true, true) => {
            let turns = turns(template, tokenizer, input, &whole, which)?;
            let cut = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
            turns.iter().flat_map(|l| whole.generation.iter().map(|g| cut(l, g))).collect()
        }
    };
    let encoded = tokenizer.encode_spans(&whole.text, &whole.plain)?;
    // A token belongs to the span in which it starts, also if a marker swallowed the space before the span's text.
    let inside = |start: usize| spans.iter().any(|s| s.contains(&start));
    let mask: Vec<bool> = encoded.offsets.iter().map(|&(start, _)| inside(start)).collect();
    if !mask.contains(&true) {
        return Err(Error::data("the conversation has nothing to train on: the assistant's turns are empty or left out of the loss")
            .at(&template.place)
            .fix(if blocks {
                "check that the template's {% generation %} blocks surround what the assistant says"
            } else {
                "drop the row"
            }));
    }
    Ok((encoded.ids, mask))
}

/// The assistant's spans, found by rendering the conversation up to each of its turns.
fn turns(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    input: Input<'_>,
    whole: &Marked,
    which: Turns,
) -> Result<Vec<Range<usize>>> {
    let markers = tokenizer.markers(&whole.text, &whole.plain);
    let mut spans: Vec<Range<usize>> = Vec::new();
    let assistant: Vec<usize> =
        (0..input.messages.len()).filter(|&i| is_assistant(&input.messages[i])).collect();
    let first = if which == Turns::Last { assistant.len().saturating_sub(1) } else { 0 };
    for &index in assistant[first..].iter().filter(|&&i| is_trained(&input.messages[i])) {
        let render = |count: usize, add_generation_prompt: bool| {
            let part = Input { messages: &input.messages[..count], add_generation_prompt, ..input };
            template.render_input(part, None).map_err(|e| {
                e.at(format!("rendering the first {count} messages to find the assistant's turn"))
                    .fix("use a chat template with {% generation %} blocks")
            })
        };
        let prompt = render(index, true)?;
        let shared = common(&prompt, &whole.text);
        if shared < prompt.len() {
            return Err(rewritten(template, index, "the text before", &prompt, &whole.text, shared));
        }
        let start = prompt.len();
        let turn = render(index + 1, false)?;
        let shared = common(&turn, &whole.text);
        let within = || markers.iter().filter(|(m, _)| m.start >= start && m.end <= shared);
        let end = within()
            .find(|(_, id)| tokenizer.eos().contains(id))
            .or_else(|| within().next_back())
            .map_or(shared, |(m, _)| m.end);
        // After the turn only closing markers may follow, such as the EOS that some templates append.
        if end < start || (shared < turn.len() && !only_markers(&turn[end..], tokenizer)) {
            return Err(rewritten(template, index, "the turn of", &turn, &whole.text, shared));
        }
        spans.push(start..end);
    }
    Ok(spans)
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Whether a message is trained on: OpenAI's `"weight": 0`, axolotl's `"train": false` and ms-swift's `"loss": false` exclude it from
/// the loss.
fn is_trained(message: &Value) -> bool {
    let zero = message.get("weight").and_then(Value::as_f64) == Some(0.0);
    !zero && !["train", "loss"].iter().any(|flag| message.get(flag) == Some(&Value::Bool(false)))
}

/// Length in bytes of the common prefix, at a character boundary.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum()
}

fn only_markers(text: &str, tokenizer: &Tokenizer) -> bool {
    let mut rest = text.to_owned();
    for name in tokenizer.special_tokens() {
        rest = rest.replace(name.as_str(), "");
    }
    rest.trim().is_empty()
}

fn rewritten(
    template: &ChatTemplate,
    index: usize,
    which: &str,
    alone: &str,
    whole: &str,
    at: usize,
) -> Error {
    let show = |text: &str| -> String {
        let rest: String = text[at..].chars().take(40).collect();
        if rest.is_empty() { "the end".into() } else { format!("{rest:?}") }
    };
    Error::data(format!(
        "the chat template re-renders earlier turns: {which} message {index} (assistant) is not the same once \
         later messages follow; first difference at byte {at}: got {} in the conversation, {} up to there",
        show(whole),
        show(alone),
    ))
    .at(&template.place)
    .fix(
        "train only the last turn of each conversation, or use a chat template with {% generation %} blocks \
         or one that keeps earlier turns as they are",
    )
}

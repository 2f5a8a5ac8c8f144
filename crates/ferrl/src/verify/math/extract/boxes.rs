//! Answers in `\boxed{..}`.

use crate::verify::group_end;

/// Boxes of a completion that are looked at, from its end.
const MOST_BOXES: usize = 16;

/// What the box that starts at `start` holds, and where it ends.
pub(super) fn box_at(text: &str, start: usize) -> Option<(&str, usize)> {
    let name = if text[start..].starts_with("\\fbox") { 5 } else { 6 };
    let after = start + name;
    let rest = &text[after..];
    let skipped = rest.len() - rest.trim_start().len();
    if rest.trim_start().starts_with('{') {
        let open = after + skipped;
        return match group_end(text, open) {
            Some(end) => Some((text[open + 1..end].trim(), end + 1)),
            // A box that was never closed reaches to the end of its line or formula.
            None => {
                let inner = &text[open + 1..];
                let end = inner.find(['\n', '$']).unwrap_or(inner.len());
                Some((inner[..end].trim(), open + 1 + end))
            }
        };
    }
    // \boxed 5
    let word = rest.trim_start().split(['$', ' ', '\n', '.', ',']).next()?;
    (!word.is_empty()).then(|| (word, after + skipped + word.len()))
}

/// The last box, or the last few where only commas and conjunctions stand between them.
pub(super) fn boxed(text: &str) -> Option<String> {
    // The last few are enough, and a box inside another is part of it.
    let mut starts: Vec<usize> =
        text.match_indices("\\boxed").chain(text.match_indices("\\fbox")).map(|(at, _)| at).collect();
    starts.sort_unstable();
    let mut boxes: Vec<(usize, usize, &str)> = Vec::new();
    for start in starts.split_off(starts.len().saturating_sub(MOST_BOXES)) {
        if boxes.last().is_some_and(|(_, end, _)| start < *end) {
            continue;
        }
        if let Some((inner, end)) = box_at(text, start) {
            boxes.push((start, end, inner));
        }
    }
    let &(mut start, end, inner) = boxes.last()?;
    let mut parts = vec![inner];
    for &(before, until, inner) in boxes.iter().rev().skip(1) {
        if !is_separator(&text[until..start]) {
            break;
        }
        parts.insert(0, inner);
        start = before;
    }
    let mut answer = parts.join(", ");
    if percent_follows(&text[end..]) && !answer.contains('%') {
        answer.push_str("\\%");
    }
    Some(answer)
}

/// Whether a text only joins two boxes.
pub(super) fn is_separator(between: &str) -> bool {
    let mut text = between.to_string();
    for mark in ["\\text", "\\quad", "\\qquad", "\\mbox", "\\,", "\\;", "\\ ", "\\(", "\\)", "\\[", "\\]"] {
        text = text.replace(mark, " ");
    }
    let words = text.split(|c: char| c.is_whitespace() || "{}$,;".contains(c)).filter(|w| !w.is_empty());
    let mut joined = text.contains([',', ';']);
    for word in words {
        if !matches!(word, "and" | "or") {
            return false;
        }
        joined = true;
    }
    joined
}

pub(super) fn percent_follows(rest: &str) -> bool {
    let rest = rest.trim_start_matches(['$', ' ', '\\', ')']);
    ["%", "percent", "pct"].iter().any(|mark| rest.starts_with(mark))
}

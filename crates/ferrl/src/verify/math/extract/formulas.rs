//! Answers without a box: announced by a phrase, or the last formula or number.

use super::super::equal::clean;
use super::super::language::{units, words};
use super::boxes::percent_follows;
use super::{TAIL, tail};
use crate::verify::group_end;

/// Phrases that announce the answer, the most certain first.
const ANNOUNCEMENTS: &[&str] = &[
    "final answer is", "final answer:", "the answer is", "answer is", "answer:", "answer =", "answer**:",
    "option is", "choice is",
];

/// Announcements of several answers; they count in the last sentence only.
const LISTS: &[&str] = &[
    "answers are", "solutions are", "roots are", "zeros are", "values are", "numbers are", "integers are",
    "factors are", "primes are", "solution is", "solution set is",
];

/// What follows the last announcement.
pub(super) fn announced(text: &str) -> Option<String> {
    after(text, ANNOUNCEMENTS)
}

/// What follows "the final answer is", if it is a value and not a remark.
pub(super) fn final_answer(text: &str) -> Option<String> {
    let value =
        |found: &String| found.contains(['$', '\\', '=']) || found.bytes().any(|b| b.is_ascii_digit());
    after(text, &ANNOUNCEMENTS[..2]).filter(value)
}

/// What the last sentence lists: `The roots are $1$ and $2$.`
pub(super) fn listed(text: &str) -> Option<String> {
    let text = text.trim_end();
    let lower = text.to_ascii_lowercase();
    let at = LISTS.iter().filter_map(|phrase| lower.rfind(phrase).map(|at| at + phrase.len())).max()?;
    let rest = text[at..].trim_start_matches([':', '*', ' ', '\n', '\t']);
    let found = sentence(rest);
    let last = rest.len() <= found.len() + 2;
    (last && is_bare(found)).then(|| found.to_string())
}

fn after(text: &str, phrases: &[&str]) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    for phrase in phrases {
        let Some(at) = lower.rfind(phrase) else { continue };
        let rest = &text[at + phrase.len()..];
        let rest = rest.split("</answer>").next().unwrap_or(rest);
        let rest = rest.trim_start_matches([':', '*', ' ', '\n', '\t']);
        let sentence = sentence(rest);
        let found = match formula_at_start(rest) {
            Some(formula) => formula,
            None if is_bare(sentence) => sentence,
            None => match last(sentence) {
                Some(found) => found,
                None if sentence.split_whitespace().count() <= 8 => sentence,
                None => continue,
            },
        };
        if !clean(found).is_empty() {
            return Some(found.trim().to_string());
        }
    }
    None
}

/// The first sentence of a text.
pub(super) fn sentence(text: &str) -> &str {
    let stop = text.char_indices().find(|(at, c)| {
        let rest = &text[at + c.len_utf8()..];
        *c == '\n'
            || *c == '.' && (rest.is_empty() || rest.starts_with([' ', '\n', '*'])) && !rest.starts_with("..")
    });
    let text = match stop {
        Some((at, _)) => &text[..at],
        None => text,
    };
    text.trim().trim_end_matches("**")
}

/// A formula in delimiters at the start of a text, with the formulas, units and signs joined to it.
pub(super) fn formula_at_start(text: &str) -> Option<&str> {
    let (start, end) = delimited(text)?;
    if start > 0 {
        return None;
    }
    let sentence = sentence(&text[end..]);
    let whole = &text[..end + text[end..].find(sentence).unwrap_or(0) + sentence.len()];
    Some(if is_bare(whole) { whole } else { &text[..end] })
}

/// The first formula in delimiters.
pub(super) fn delimited(text: &str) -> Option<(usize, usize)> {
    let mut best: Option<(usize, usize)> = None;
    for (open, close) in [("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")] {
        let Some(start) = text.find(open) else { continue };
        if open == "$" && text[start..].starts_with("$$") || best.is_some_and(|(at, _)| at <= start) {
            continue;
        }
        let inner = start + open.len();
        let mut from = inner;
        // A dollar sign behind a backslash is money.
        while let Some(at) = text[from..].find(close) {
            let end = from + at;
            if close == "$" && text[..end].ends_with('\\') {
                from = end + 1;
                continue;
            }
            if !text[inner..end].trim().is_empty() {
                best = Some((start, end + close.len()));
            }
            break;
        }
    }
    best
}

/// Whether a text is an answer by itself and no sentence.
pub fn is_bare(text: &str) -> bool {
    let text = text.trim();
    if text.is_empty() || text.len() > 2_000 || text.contains("\n\n") {
        return false;
    }
    let outside = without_text(text);
    // `Each gets 3.5 oranges.`
    let starts = text.starts_with(|c: char| c.is_ascii_uppercase()) && text.ends_with('.');
    if starts
        && text.bytes().any(|b| b.is_ascii_digit())
        && words_of(&outside).filter(|w| w.len() > 1).count() > 2
    {
        return false;
    }
    // Words that lead to a formula make a sentence: `Solving gives \[x = 2\]`.
    let lead = delimited(text).map_or("", |(start, _)| &text[..start]);
    if lead.split_whitespace().any(|w| words::is_word(w) && !units::is_unit_word(w)) {
        return false;
    }
    let mut unknown = 0;
    for word in outside.split(|c: char| !c.is_alphabetic()).filter(|w| w.len() >= 2) {
        let lower = word.to_ascii_lowercase();
        match lower.as_str() {
            "is" | "are" | "answer" | "so" | "therefore" | "thus" | "hence" | "which" | "it" | "we"
            | "that" | "then" | "because" | "since" | "was" | "were" => return false,
            _ if words::command_whole(word).is_some() || units::is_unit_word(word) => {}
            _ if words::is_word(word) => unknown += 1,
            _ => {}
        }
    }
    let formula = text.contains(['$', '\\', '=']) || text.bytes().any(|b| b.is_ascii_digit());
    unknown <= if formula { 2 } else { 8 }
}

/// A text without what stands in `\text{..}` and the names of commands.
pub(super) fn without_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    while let Some(at) = text[from..].find('\\') {
        let start = from + at;
        out.push_str(&text[from..start]);
        let name_len = text[start + 1..].bytes().take_while(u8::is_ascii_alphabetic).count();
        let end = start + 1 + name_len;
        let name = &text[start + 1..end];
        let group = words::is_text_command(name) || name == "begin" || name == "end";
        from = match text[end..].starts_with('{') && group {
            true => group_end(text, end).map_or(text.len(), |end| end + 1),
            false => end,
        };
        out.push(' ');
    }
    out.push_str(&text[from.min(text.len())..]);
    out
}

/// The last formula in delimiters or the last number with its signs, whichever stands later.
pub(super) fn last(text: &str) -> Option<&str> {
    let text = tail(text, TAIL);
    let mut from = 0;
    let mut formula: Option<(usize, usize)> = None;
    // Where the remarks that end the text begin; the numbers in them are no answers either.
    let mut remarks = None;
    while let Some((start, end)) = delimited(&text[from..]) {
        let (start, end) = (from + start, from + end);
        match formula {
            Some((_, until)) if opens_clause(&text[until..start]) => remarks = remarks.or(Some(start)),
            // `$x \le -1$ or $x \ge 3$` is one answer.
            Some((first, until)) if parts_of_condition(&text[first..until], &text[until..start]) => {
                (formula, remarks) = (Some((first, end)), None);
            }
            _ => (formula, remarks) = (Some((start, end)), None),
        }
        from = end;
    }
    let number = last_number(&text[..remarks.unwrap_or(text.len())]);
    match (formula, number) {
        (Some((start, end)), Some((at, until))) if at >= end => {
            // The unit or percent sign behind a formula belongs to it.
            let joined = &text[start..until];
            Some(if is_bare(joined) { joined } else { &text[at..until] })
        }
        (Some((start, end)), _) => {
            let tail = &text[end..];
            let percent = percent_follows(tail);
            let until = if percent { end + tail.find(['%', 'p']).map_or(0, |at| at + 1) } else { end };
            Some(if percent && tail[..until - end].ends_with('%') {
                &text[start..until]
            } else {
                &text[start..end]
            })
        }
        (None, Some((at, until))) => Some(&text[at..until]),
        (None, None) => None,
    }
}

/// Whether a formula is an inequality that the next one continues.
fn parts_of_condition(formula: &str, between: &str) -> bool {
    let order =
        ["<", ">", "\\le", "\\ge", "\\lt", "\\gt", "≤", "≥"].iter().any(|sign| formula.contains(sign));
    order && between.trim_matches([' ', ',']) == "or"
}

/// Whether the words between two formulas make the second a remark on the first: `$a_n = n$ for all $n \ge 1$`.
fn opens_clause(between: &str) -> bool {
    let end = between.trim_end();
    let stop = end.ends_with(['.', ':', '\n']) || between.contains(". ") || between.contains('\n');
    let remark =
        |word: &str| matches!(word, "for" | "where" | "since" | "because" | "when" | "whenever" | "if");
    !stop && words_of(end).any(|word| remark(&word))
}

fn words_of(text: &str) -> impl Iterator<Item = String> {
    text.split(|c: char| !c.is_alphabetic()).filter(|w| !w.is_empty()).map(str::to_lowercase)
}

/// The last run of digits and the signs that make it an expression: `2/3`, `-1,000.99`, `3*(4+5)`, `50%`.
pub(super) fn last_number(text: &str) -> Option<(usize, usize)> {
    let bytes = text.as_bytes();
    let last = bytes.iter().rposition(u8::is_ascii_digit)?;
    let in_run = |b: u8| b.is_ascii_digit() || b".,/^*+-()".contains(&b);
    let mut start = last;
    while start > 0 && last - start < 200 && in_run(bytes[start - 1]) {
        start -= 1;
    }
    if last - start == 200 {
        // No answer is that long: the last number of it.
        start = bytes[..last].iter().rposition(|b| !b.is_ascii_digit()).map_or(0, |at| at + 1);
    }
    let mut end = last + 1;
    while end < bytes.len() && end - last < 200 && in_run(bytes[end]) {
        end += 1;
    }
    // A letter right before is part of a name, unless it is a currency.
    let mut run = &text[start..end];
    run = run.trim_end_matches(['.', ',', '-', '+', '*', '/', '^']);
    while run.matches(')').count() > run.matches('(').count() && run.ends_with(')') {
        run = run[..run.len() - 1].trim_end_matches(['.', ',']);
    }
    while run.matches('(').count() > run.matches(')').count() && run.starts_with('(') {
        run = &run[1..];
        start += 1;
    }
    let trimmed = run.trim_start_matches([',', '*', '/', ')', '+', '^']);
    start += run.len() - trimmed.len();
    let mut end = start + trimmed.len();
    if text[..start].ends_with('−') {
        start -= '−'.len_utf8();
    }
    if bytes.get(end) == Some(&b'%') {
        end += 1;
    } else if text[end..].starts_with("\\%") {
        end += 2;
    }
    if end == start {
        return None;
    }
    let word = word_around(text, start, end);
    Some(word.unwrap_or((start, end + scale_behind(&text[end..]))))
}

/// The word that a number is part of, where it is a formula that nothing marks as one: `\frac{5}{8}`, `12π`.
fn word_around(text: &str, start: usize, end: usize) -> Option<(usize, usize)> {
    let from = text[..start]
        .rfind(char::is_whitespace)
        .map_or(0, |at| at + text[at..].chars().next().map_or(1, char::len_utf8));
    let to = text[end..].find(char::is_whitespace).map_or(text.len(), |at| end + at);
    let word = text[from..to].trim_end_matches(['.', ',', ';', ':', '!', '?']);
    let formula = word.contains(['π', '√'])
        || word.contains("\\frac{")
        || word.contains("\\sqrt{")
        || word.contains("\\pi");
    let closed = word.matches('{').count() == word.matches('}').count() && !word.contains(['$', '<']);
    (formula && closed && word.len() < 200).then(|| (from, from + word.len()))
}

/// Bytes of a word behind a number that multiplies it: `1 million`.
fn scale_behind(rest: &str) -> usize {
    let scales = [" million", " billion", " trillion", " thousand", " hundred", " dozen"];
    let ends = |scale: &&&str| !rest[scale.len()..].starts_with(char::is_alphanumeric);
    scales.iter().filter(|scale| rest.starts_with(**scale)).find(ends).map_or(0, |scale| scale.len())
}

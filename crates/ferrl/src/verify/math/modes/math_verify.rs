//! Math-Verify 0.9: our own reading of the answers, with what its LaTeX reader cannot read left unread.

use super::super::compare::CompareRules;
use super::super::language::spoken;
use super::super::{Budget, equal};

const RULES: CompareRules =
    CompareRules { rounded: true, one_way: true, strict_kinds: true, lists_are_sets: true };

/// Letters that it takes for units where they follow a number.
const UNIT_LETTERS: &str = "acdghlmstv";

pub fn equal(gold: &str, answer: &str, budget: &Budget) -> bool {
    let tight = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    if !answer.trim().is_empty() && tight(gold) == tight(answer) {
        return true;
    }
    if is_unread(gold) || is_unread(answer) || is_clock(gold) && is_clock(answer) {
        return false;
    }
    equal::equal_by(RULES, &without_letters(gold), &without_letters(answer), budget)
}

/// Whether an answer is beyond its grammar, so that it only equals itself.
fn is_unread(text: &str) -> bool {
    let text = text.trim();
    let apart = text.trim_start_matches('-').split_once(' ').is_some_and(|(whole, rest)| {
        let digit = |c: char| c.is_ascii_digit();
        whole.chars().all(digit) && rest.starts_with(digit) && rest.chars().all(|c| digit(c) || c == '/')
    });
    text.contains(['∞', '∪', '°'])
        || text.ends_with('\\')
        || text.ends_with('.') && text[..text.len() - 1].ends_with(|c: char| c.is_ascii_digit())
        || apart
        || has_bare_function(text)
        || has_index_without_braces(text)
        || has_bare_unit(text)
        || bare_words(text).any(|(word, _)| spoken::word(word).is_some())
        || is_complex_product(text)
        || text.contains("^{\\circ}") && text.contains("\\sin")
}

/// Runs of letters that no backslash makes a command.
fn bare_words(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let letter = |c: char| c.is_ascii_alphabetic();
    let mut rest = text;
    let mut last = ' ';
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(letter)?;
            let command = if start == 0 { last } else { rest[..start].chars().last().unwrap_or(' ') } == '\\';
            let tail = &rest[start..];
            let len = tail.find(|c| !letter(c)).unwrap_or(tail.len());
            let (word, after) = tail.split_at(len);
            last = word.chars().last().unwrap_or(' ');
            rest = after;
            if !command {
                return Some((word, after));
            }
        }
    })
}

/// `sin`, `pi` and their like are products of letters to it; `sqrt` and `infinity` it knows.
fn has_bare_function(text: &str) -> bool {
    bare_words(text).any(|(word, _)| matches!(word, "sin" | "cos" | "tan" | "ln" | "exp" | "pi"))
}

/// `\sqrt[3]2`.
fn has_index_without_braces(text: &str) -> bool {
    text.split("\\sqrt[")
        .skip(1)
        .any(|part| part.split_once(']').is_some_and(|(_, rest)| !rest.starts_with('{')))
}

/// Units outside its list, or with a power.
fn has_bare_unit(text: &str) -> bool {
    bare_words(text)
        .any(|(word, after)| matches!(word, "week" | "weeks") || word == "cm" && after.starts_with('^'))
}

/// The imaginary unit counts only in `a + bi`.
fn is_complex_product(text: &str) -> bool {
    text.contains("i(") || text.contains(")i")
}

fn is_clock(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    parts.len() > 1
        && parts.iter().all(|part| part.len() >= 2)
        && text.bytes().next().is_some_and(|b| b.is_ascii_digit())
}

/// An answer without the letters that it takes for units.
fn without_letters(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    for (at, c) in chars.iter().enumerate() {
        let before = chars[..at].iter().rev().find(|c| **c != ' ');
        let after = chars.get(at + 1).copied().unwrap_or(' ');
        let unit = UNIT_LETTERS.contains(*c)
            && before.is_some_and(|c| c.is_ascii_digit() || *c == '}')
            && !after.is_alphanumeric()
            && !"^_({\\'".contains(after);
        if !unit {
            out.push(*c);
        }
    }
    out
}

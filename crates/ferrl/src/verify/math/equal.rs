//! Mode `equal`: mathematical equality.

use super::compare::{Compare, CompareRules};
use super::language::{clock, text};
use super::{Budget, Commas, Expr, ellipsis, notation, parser};

/// Whether an answer equals the expected one.
pub fn equal(gold: &str, answer: &str, budget: &Budget) -> bool {
    equal_by(CompareRules::EQUAL, gold, answer, budget)
}

pub fn equal_by(rules: CompareRules, gold: &str, answer: &str, budget: &Budget) -> bool {
    let (gold, answer) = (clean(gold), clean(answer));
    if gold.is_empty() || answer.is_empty() {
        return false;
    }
    if squeeze(gold) == squeeze(answer) {
        return true;
    }
    if let Some(verdict) = choices(gold, answer).or_else(|| clock::compare(gold, answer)) {
        return verdict;
    }
    let all = |text: &str, other: &str| {
        let mut all = readings(text, budget);
        if !rules.strict_kinds {
            all.extend(notation::alternatives(text, other).iter().flat_map(|text| readings(text, budget)));
        }
        all
    };
    let (golds, answers) = (all(gold, answer), all(answer, gold));
    let compare = Compare::new(rules, budget);
    if golds.iter().any(|g| answers.iter().any(|a| compare.same(g, a))) {
        return true;
    }
    // What is no formula on either side is compared as words.
    let formula = |readings: &[Expr]| readings.iter().any(|e| !e.any(&|e| matches!(e, Expr::Text(_))));
    !(formula(&golds) && formula(&answers)) && text::same_words(gold, answer)
}

/// An answer without the delimiters and the punctuation around it.
pub fn clean(text: &str) -> &str {
    let mut text = text.trim();
    loop {
        let before = text;
        if !text.ends_with("...") {
            text = text.trim_end_matches(['.', ',', ';', ':', '\n', ' ']).trim();
        }
        text = text.strip_suffix('\\').unwrap_or(text).trim();
        for (open, close) in [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")] {
            let inner = text.strip_prefix(open).and_then(|t| t.strip_suffix(close));
            // `$1$ and $2$` is not one formula.
            if let Some(inner) = inner.filter(|t| !t.contains(open) && !t.ends_with('\\')) {
                text = inner.trim();
            }
        }
        if text == before {
            return text;
        }
    }
}

/// A text without spaces and the commands that only place things.
fn squeeze(text: &str) -> String {
    let text = text.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("\\,", "");
    let text = text
        .replace("dfrac", "frac")
        .replace("tfrac", "frac")
        .replace("\\$", "")
        .replace("^{\\circ}", "^\\circ");
    let mut out = String::with_capacity(text.len());
    for word in text.split(|c: char| c.is_whitespace() || c == '$') {
        // 1 2 is not 12.
        let digits =
            out.ends_with(|c: char| c.is_ascii_digit()) && word.starts_with(|c: char| c.is_ascii_digit());
        if digits {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// Whether both are choices, or one is a choice and the other the same with what it stands for.
fn choices(gold: &str, answer: &str) -> Option<bool> {
    let ((a, marked, more), (b, also, longer)) = (text::choice(gold)?, text::choice(answer)?);
    if more && longer {
        return None;
    }
    // Bare letters may be variables, in which case matters.
    let bare = !marked && !also;
    if bare && gold.chars().any(|c| c.is_ascii_lowercase()) != answer.chars().any(|c| c.is_ascii_lowercase())
    {
        return None;
    }
    Some(a == b)
}

/// The ways in which an answer may be meant: `1,234` is a number or two of them.
fn readings(text: &str, budget: &Budget) -> Vec<Expr> {
    let tight = text
        .as_bytes()
        .windows(5)
        .any(|w| w[0].is_ascii_digit() && w[1] == b',' && w[2..].iter().all(u8::is_ascii_digit));
    if !tight {
        return parse(text, Commas::Separate, budget).into_iter().collect();
    }
    // In brackets a comma parts items, unless others show that they do by a space.
    let brackets = text.contains(['(', '[']) || text.contains("\\{") || text.starts_with('{');
    let bracketed = brackets && !text.contains(", ");
    let orders: &[Commas] =
        if bracketed { &[Commas::Separate] } else { &[Commas::Thousands, Commas::Separate] };
    orders.iter().filter_map(|commas| parse(text, *commas, budget)).collect()
}

fn parse(text: &str, commas: Commas, budget: &Budget) -> Option<Expr> {
    parser::parse(text, commas, budget).map(|expr| ellipsis::written_out(&expr, budget))
}

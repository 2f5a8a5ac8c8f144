//! The grader published with PRM800K.

use super::super::Budget;
use super::{hendrycks, plain};
use regex::Regex;
use std::sync::LazyLock;

static UNITS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    // One after the other there, at once here: none of the names holds another that comes before it.
    let names = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard";
    Regex::new(&format!("(?:{names})(?:es)?s? *(?:\\^[0-9]+)?")).ok()
});
static DEGREES: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\^ *\\circ").ok());
static THIN_COMMA: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r",\\! *").ok());
static MINUS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new("- *").ok());
static COMMA: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"([0-9]),([0-9]{3})($|[^0-9])").ok());
static FRACTION: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$").ok());
static TOWER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\^[0-9]+\^|\^[0-9][0-9]+").ok());

/// `text` with every match replaced; patterns are fixed, so that they compile is a test's business.
fn replace(pattern: &LazyLock<Option<Regex>>, text: &str, with: &str) -> String {
    match &**pattern {
        Some(pattern) => pattern.replace_all(text, with).into_owned(),
        None => text.to_string(),
    }
}

fn found(pattern: &LazyLock<Option<Regex>>, text: &str) -> bool {
    pattern.as_ref().is_some_and(|pattern| pattern.is_match(text))
}

pub fn equal(gold: &str, answer: &str, budget: &Budget) -> bool {
    let (a, b) = (outer_text(gold.trim()), outer_text(answer.trim()));
    match (hendrycks::normal(a), hendrycks::normal(b)) {
        (Some(x), Some(y)) if x == y => return true,
        (None, None) | (None, _) | (_, None) if a == b => return true,
        _ => {}
    }
    let (gold, answer) = (normal(gold), normal(answer));
    if gold == answer {
        return true;
    }
    if answer.is_empty() {
        return false;
    }
    let (golds, answers) = (elements(&gold), elements(&answer));
    let ends = |text: &str| (text.chars().next(), text.chars().last());
    if golds.len() > 1 && ends(&gold) != ends(&answer) || golds.len() != answers.len() || golds.is_empty() {
        return false;
    }
    golds.iter().zip(&answers).all(|(gold, answer)| {
        if found(&FRACTION, gold) && found(&FRACTION, answer) {
            // Fractions must be reduced.
            gold == answer
        } else if is_integer(gold) != is_integer(answer) {
            false
        } else {
            same_formula(gold, answer, budget)
        }
    })
}

/// What `\text{..}` around the whole answer holds.
fn outer_text(text: &str) -> &str {
    text.strip_prefix("\\text{").and_then(|t| t.strip_suffix('}')).filter(|t| !t.is_empty()).unwrap_or(text)
}

fn is_integer(text: &str) -> bool {
    plain::float(&without_commas(text)).is_some_and(|x| x.is_finite() && (x - x.round()).abs() <= 1e-7)
}

/// Without commas between groups of three digits.
fn without_commas(text: &str) -> String {
    let mut text = text.to_string();
    for _ in 0..64 {
        let next = replace(&COMMA, &text, "$1$2$3");
        if next == text {
            break;
        }
        text = next;
    }
    text
}

fn normal(text: &str) -> String {
    let mut text = outer_text(text).replace("\\%", "%").replace("\\$", "$").replace(['$', '%'], "");
    text = text.replace(" or ", " , ").replace(" and ", " , ");
    text = text.replace("million", "*10^6").replace("billion", "*10^9").replace("trillion", "*10^12");
    text = replace(&DEGREES, &replace(&UNITS, &text, ""), "");
    if let Some(inner) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
        text = inner.to_string();
    }
    text = replace(&THIN_COMMA, &text, "");
    if let Some(x) = plain::float(&text).filter(|x| x.is_finite() && (x - x.round()).abs() <= 1e-7) {
        text = format!("{}", x.round());
    }
    if text.contains('\\') {
        text = plain::parse_latex(&text);
    }
    text = plain::mixed_numbers(&replace(&MINUS, &text, "-"));
    text = text.replace([' ', '{', '}'], "").to_lowercase();
    if is_integer(&text)
        && let Some(x) = plain::float(&text.replace(',', ""))
    {
        text = format!("{}", x.trunc());
    }
    text
}

/// The elements of a tuple or interval, or the whole.
fn elements(text: &str) -> Vec<String> {
    let text = without_commas(text);
    let bracket = |c: char| "()[]".contains(c);
    let chars: Vec<char> = text.chars().collect();
    if let [first, inner @ .., last] = &chars[..]
        && !inner.is_empty()
        && bracket(*first)
        && bracket(*last)
        && !inner.iter().any(|c| bracket(*c))
    {
        let inner: String = inner.iter().collect();
        return inner.split(',').map(|e| e.trim().to_string()).collect();
    }
    if text.is_empty() { Vec::new() } else { vec![text] }
}

/// Whether computer algebra finds no difference; formulas that it might not finish are not tried.
fn same_formula(gold: &str, answer: &str, budget: &Budget) -> bool {
    let both = format!("({gold})-({answer})");
    let mut letters: Vec<char> =
        both.replace("sqrt", "").replace("frac", "").chars().filter(|c| c.is_alphabetic()).collect();
    letters.sort_unstable();
    letters.dedup();
    let hard = both.contains("^{") || both.contains("^(") || found(&TOWER, &both);
    letters.len() <= 2 && !hard && plain::difference_is_zero(gold, answer, budget)
}

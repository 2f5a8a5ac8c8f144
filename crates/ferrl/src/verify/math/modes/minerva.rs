//! The Minerva-style grader of DeepSeekMath in the form that VinePPO uses: numbers within 1e-3, also times or over
//! a hundred; intervals without regard to their brackets.

use super::super::Budget;
use super::{hendrycks, plain};
use regex::Regex;
use std::sync::LazyLock;

static RULES: LazyLock<Vec<(Regex, &'static str)>> = LazyLock::new(|| {
    let rules = [(r"\{(c|m)?m\}(\^(2|3))?", ""), (r"p\.m\.$", ""), (r"([0-9])\s*t$", "$1")];
    rules.iter().filter_map(|(pattern, with)| Some((Regex::new(pattern).ok()?, *with))).collect()
});
static LATER_RULES: LazyLock<Vec<(Regex, &'static str)>> = LazyLock::new(|| {
    let rules = [
        (r"\\mbox\{.*?\}", ""),
        (r"([0-9]+)\.0+([^0-9])", "$1$2"),
        (r"([0-9]+)\.0+$", "$1"),
        (r"\\sqrt(-?[0-9.a-zA-Z]+)", "\\sqrt{$1}"),
        (r"\\sqrt\s+(\w+)$", "\\sqrt{$1}"),
        (r"\\tan(-?[0-9.a-zA-Z]+)", "\\tan{$1}"),
        (r"\\tan\s+(\w+)$", "\\tan{$1}"),
    ];
    rules.iter().filter_map(|(pattern, with)| Some((Regex::new(pattern).ok()?, *with))).collect()
});
static HARD: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"\^\{|\^\(|\^[0-9]+\^|\^-?[0-9][0-9]+|\*\*[0-9]+\*\*|\*\*-?[0-9][0-9]+|[0-9][0-9][0-9]+!")
        .ok()
});

pub fn equal(gold: &str, answer: &str, problem: &str, budget: &Budget) -> bool {
    let golds = unique(parts(&normal(gold), problem));
    let answers = unique(parts(&normal(answer), problem));
    // Some completions box what is no answer: the last ones count.
    let answers = &answers[answers.len().saturating_sub(golds.len())..];
    answers.iter().all(|a| golds.iter().any(|g| same_union(g, a, budget)))
        && golds.iter().all(|g| answers.iter().any(|a| same_union(g, a, budget)))
}

fn unique(items: Vec<String>) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for item in items {
        if !out.contains(&item) {
            out.push(item);
        }
    }
    out
}

/// Several answers in one: at commas where the problem asks for them, at "and".
fn parts(text: &str, problem: &str) -> Vec<String> {
    if problem.contains("separated by commas") && !text.contains(['(', ')', '[', ']']) {
        return text.split(',').map(|part| part.trim().to_string()).collect();
    }
    text.split("\\text{and}").map(|part| part.trim().to_string()).collect()
}

/// The rewrites.
fn normal(text: &str) -> String {
    let mut text = text.trim().replace('\n', "").trim_end_matches('.').replace("\\!", "");
    if let Some(inner) = text.strip_prefix("\\text{").and_then(|t| t.strip_suffix('}')) {
        text = inner.to_string();
    }
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("cfrac", "frac");
    text = text.replace("\\left", "").replace("\\right", "");
    // A unit at the end.
    if text.ends_with('}')
        && let Some(at) = text.find("\\text{")
        && !text[..at].trim().is_empty()
    {
        text = text[..at].trim().to_string();
    }
    text = text.replace("^{\\circ}", "").trim().replace("^\\circ", "").trim().to_string();
    for (pattern, with) in RULES.iter() {
        text = pattern.replace_all(&text, *with).trim().to_string();
    }
    text = text.replace("\\$", "").replace('$', "").replace("x\\in", "").replace("\\%", "%");
    text =
        text.replace(" .", " 0.").replace("{.", "{0.").replace("\\cdot", "").replace("infinity", "\\infty");
    if !text.contains("\\infty") {
        text = text.replace("inf", "\\infty");
    }
    text = text.replace("\\mathbf", "").replace("\\mathrm", "");
    if text.contains('j') && !text.contains('i') {
        text = text.replace('j', "i");
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    for (pattern, with) in LATER_RULES.iter() {
        text = pattern.replace_all(&text, *with).into_owned();
    }
    text = text.replace(' ', "");
    text = hendrycks::fractions(&text).unwrap_or(text);
    slash(text).trim_end_matches(['\\', ',', '.']).to_string()
}

/// `a/b` as a fraction where each part is an integer or has a root.
fn slash(text: String) -> String {
    let sides: Vec<&str> = text.split('/').collect();
    let fits =
        |part: &str| part.contains("sqrt") || part.parse::<i128>().is_ok_and(|n| n.to_string() == part);
    match sides[..] {
        [top, bottom] if fits(top) && fits(bottom) => format!("\\frac{{{top}}}{{{bottom}}}"),
        _ => text,
    }
}

/// Unions part by part, without regard to order.
fn same_union(gold: &str, answer: &str, budget: &Budget) -> bool {
    if gold.contains("\\cup") && answer.contains("\\cup") {
        let (golds, answers): (Vec<&str>, Vec<&str>) =
            (gold.split("\\cup").collect(), answer.split("\\cup").collect());
        return answers.iter().all(|a| golds.iter().any(|g| same_number(g, a, budget)))
            && golds.iter().all(|g| answers.iter().any(|a| same_number(g, a, budget)));
    }
    same_number(gold, answer, budget)
}

fn same_number(gold: &str, answer: &str, budget: &Budget) -> bool {
    let number = |text: &str| plain::float(&text.replace(',', ""));
    if let (Some(g), Some(a)) = (number(gold), number(answer))
        && (g - a).abs() < 1e-3
    {
        return true;
    }
    !gold.is_empty() && gold == answer || same(answer, gold, 0, budget)
}

/// A number, or a percentage as its hundredth.
fn digits(text: &str) -> Option<f64> {
    let text = text.replace(',', "");
    plain::float(&text).or_else(|| {
        let number = text.strip_suffix('%')?;
        plain::float(number.strip_suffix('\\').unwrap_or(number)).map(|x| x / 100.0)
    })
}

fn same(answer: &str, gold: &str, depth: usize, budget: &Budget) -> bool {
    if answer == gold {
        return true;
    }
    if let (Some(a), Some(g)) = (digits(answer), digits(gold)) {
        return [g / 100.0, g, g * 100.0].iter().any(|g| plain::close(*g, a, 1e-3));
    }
    let (answer, gold) = (answer.trim(), gold.trim());
    if answer.is_empty() || depth > 8 || budget.spend(20).is_err() {
        return false;
    }
    if let (Some(a), Some(g)) = (bracketed(answer), bracketed(gold))
        && same_parts(a, g, ",", depth, budget)
    {
        return true;
    }
    if let (Some(a), Some(g)) = (matrix(answer), matrix(gold)) {
        let rows = |text: &str| {
            text.split("\\\\").map(str::trim).filter(|r| !r.is_empty()).map(String::from).collect()
        };
        let (a, g): (Vec<String>, Vec<String>) = (rows(a), rows(g));
        if a.len() == g.len() && a.iter().zip(&g).all(|(a, g)| same_parts(a, g, "&", depth, budget)) {
            return true;
        }
    }
    let split = |text: &str| text.split_once('=').map(|(l, r)| (l.trim().to_string(), r.trim().to_string()));
    match (answer.matches('=').count(), gold.matches('=').count()) {
        (1, 1) => {
            if let (Some((al, ar)), Some((gl, gr))) = (split(answer), split(gold)) {
                let (a, g) = (format!("{al} - ({ar})"), format!("{gl} - ({gr})"));
                if symbolic(&a, &g, budget) || symbolic(&format!("-({a})"), &g, budget) {
                    return true;
                }
            }
        }
        (1, 0) => {
            if let Some((name, value)) = split(answer)
                && name.chars().count() <= 2
                && same(&value, gold, depth + 1, budget)
            {
                return true;
            }
        }
        (0, 1) => {
            if let Some((name, value)) = split(gold)
                && name.chars().count() <= 2
                && same(answer, &value, depth + 1, budget)
            {
                return true;
            }
        }
        _ => {}
    }
    symbolic(answer, gold, budget)
}

fn same_parts(answer: &str, gold: &str, mark: &str, depth: usize, budget: &Budget) -> bool {
    let (a, g): (Vec<&str>, Vec<&str>) = (answer.split(mark).collect(), gold.split(mark).collect());
    a.len() == g.len() && a.iter().zip(&g).all(|(a, g)| same(a, g, depth + 1, budget))
}

/// What stands between the first and the last character, where brackets open and close somewhere.
fn bracketed(text: &str) -> Option<&str> {
    let closes = text.rfind([')', ']']).is_some_and(|at| at > 1);
    let mut chars = text.chars();
    chars.next().filter(|c| "([".contains(*c) && closes)?;
    chars.next_back()?;
    Some(chars.as_str())
}

fn matrix(text: &str) -> Option<&str> {
    let open = ["\\begin{pmatrix}", "\\begin{bmatrix}"];
    let close = ["\\end{pmatrix}", "\\end{bmatrix}"];
    let inner = open.iter().find_map(|mark| text.strip_prefix(mark))?;
    close.iter().find_map(|mark| inner.strip_suffix(mark))
}

/// Letters other than those of known functions.
fn unknown_letters(text: &str) -> usize {
    let mut text = text.to_string();
    for known in [
        "sqrt", "frac", "pi", "inf", "cos", "sin", "tan", "cot", "arccos", "arcsin", "arctan", "arccot",
        "log", "ln", "exp",
    ] {
        text = text.replace(known, "");
    }
    let mut letters: Vec<char> = text.chars().filter(|c| c.is_alphabetic()).collect();
    letters.sort_unstable();
    letters.dedup();
    letters.len()
}

fn symbolic(answer: &str, gold: &str, budget: &Budget) -> bool {
    let (a, g) = (plain::parse_latex(answer), plain::parse_latex(gold));
    let allowed =
        |text: &str| unknown_letters(text) <= 2 && !HARD.as_ref().is_some_and(|hard| hard.is_match(text));
    if !allowed(&a) || !allowed(&g) {
        return false;
    }
    let tight = |text: &str| plain::mixed_numbers(text).replace(' ', "");
    if plain::difference_is_zero(&tight(&g), &tight(&a), budget) {
        return true;
    }
    match (plain::value(&a, budget), plain::value(&g, budget)) {
        (Some(a), Some(g)) => plain::close(a, g, 1e-3),
        _ => false,
    }
}

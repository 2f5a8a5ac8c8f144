//! Notations that have a second meaning: what stands in brackets behind an answer, and numbers of choices that look
//! like points or indexed names. Each is one more reading of the answer, beside the plain one.

use regex::{Captures, Regex};
use std::sync::LazyLock;

/// `C(8,3)`, `\binom`'s other forms, and the same for permutations: the kind, `n` and `r`.
static CHOICES: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    let n = r"\{?([0-9]{1,4})\}?";
    let kind = r"(?:\\(?:mathrm|text|operatorname)\{)?(?<kind>[CPA])\}?";
    let patterns = [
        format!(r"(?:^|[^A-Za-z\\]){kind}\(\s*{n}\s*,\s*{n}\s*\)"),
        format!(r"(?:\{{\s*\}})?[_^]{n}\s*{kind}_{n}"),
        format!(r"(?:^|[^A-Za-z\\]){kind}_{n}\^{n}"),
        format!(r"\b{n}(?<kind>[CP]){n}\b"),
    ];
    patterns.iter().filter_map(|p| Regex::new(p).ok()).collect()
});

/// What follows an answer in brackets: its condition, or itself in words.
static TRAILER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"(?s)^(?<head>.*[^\s,])[\s,~]*(?:\\quad|\\ )*\s*(?:\\left)?\((?<inner>[^()]*)\)(?:\$|\\\))?$")
        .ok()
});

/// A number as much of the world writes it: `1.234,56`.
static POINTS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"^[-+]?[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]{1,2}$").ok());

/// Other texts that an answer may mean.
pub fn alternatives(text: &str) -> Vec<String> {
    let mut out: Vec<String> = choices(text).into_iter().collect();
    if POINTS.as_ref().is_some_and(|points| points.is_match(text)) {
        out.push(text.replace('.', "").replace(',', "."));
    }
    out.extend(without_trailer(text));
    out
}

/// Numbers of combinations and permutations as binomials and quotients of factorials.
fn choices(text: &str) -> Option<String> {
    if !text.contains(['C', 'P', 'A']) {
        return None;
    }
    CHOICES.iter().find_map(|pattern| {
        let value = |m: &Captures<'_>| {
            // The kind stands first or in the middle; the numbers are the other two groups.
            let numbers: Vec<&str> = m.iter().skip(1).flatten().map(|g| g.as_str()).collect();
            let kind = m.name("kind").map_or("C", |g| g.as_str());
            let pair: Vec<&str> =
                numbers.into_iter().filter(|g| g.bytes().all(|b| b.is_ascii_digit())).collect();
            let lead = m.get(0).map_or("", |g| g.as_str()).chars().next().filter(|c| " (+-*/=".contains(*c));
            let lead = lead.map(String::from).unwrap_or_default();
            match (kind, &pair[..]) {
                ("C", [n, r]) => format!("{lead}\\binom{{{n}}}{{{r}}}"),
                (_, [n, r]) => format!("{lead}\\frac{{{n}!}}{{({n}-{r})!}}"),
                _ => String::new(),
            }
        };
        pattern.is_match(text).then(|| pattern.replace_all(text, value).into_owned())
    })
}

/// `x = k\pi (k \in Z)` with a comma before the condition, `7 (seven)` without the words.
fn without_trailer(text: &str) -> Option<String> {
    if !text.ends_with([')', '$']) {
        return None;
    }
    let found = TRAILER.as_ref()?.captures(text)?;
    let (head, inner) = (found["head"].trim_end_matches(['\\', ' ']), found["inner"].trim());
    let inner = inner.strip_suffix("\\right").unwrap_or(inner);
    if inner.contains("\\in") || inner.contains('∈') {
        return Some(format!("{head}, {inner}"));
    }
    let spoken = inner.len() > 2
        && inner.chars().all(|c| c.is_ascii_alphabetic() || " -".contains(c))
        && head.ends_with(|c: char| c.is_ascii_digit() || c == '$' || c == '}')
        && text[head.len()..].starts_with(char::is_whitespace);
    spoken.then(|| head.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_choices_have_many_notations() {
        for text in ["C(8,3)", "{}_8C_3", "_{8}C_{3}", "{}^8C_3", "C_{8}^{3}", "8C3", "\\mathrm{C}_8^3"] {
            let found = alternatives(text);
            assert_eq!(found, ["\\binom{8}{3}"], "{text}");
        }
        assert_eq!(alternatives("P(5, 2)"), ["\\frac{5!}{(5-2)!}"]);
        assert_eq!(alternatives("7 (seven)"), ["7"]);
        assert_eq!(alternatives("x=k\\pi (k\\in Z)"), ["x=k\\pi, k\\in Z"]);
        for plain in ["f(x)", "2 (mod 5)", "(1, 2)", "AC(8,3)", "x(x+1)", "C_n"] {
            assert!(alternatives(plain).is_empty(), "{plain}: {:?}", alternatives(plain));
        }
    }
}

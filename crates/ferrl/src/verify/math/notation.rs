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

/// Ways of saying sets and remainders, and the notation of programs: what is found, and what it is written as.
static PHRASES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let reals = r"(?i)^(?:x is )?(?:any|all|every)? ?(?:the )?(?:real numbers?|reals|values(?: of x)?)";
    let number = r"(?:x ?(?:=|\\neq?) ?)?(?<a>.+)$";
    let variable = r"^(?<x>[a-z])(?: is| must be)?";
    let rows = [
        (
            format!(r"{reals} (?:except|but|excluding|other than)(?: for)? {number}"),
            "\\mathbb{R}\\setminus\\{$a\\}",
        ),
        (format!(r"{reals} (?:greater|more|larger) than or equal to {number}"), "[$a,\\infty)"),
        (format!(r"{reals} (?:less|smaller) than or equal to {number}"), "(-\\infty,$a]"),
        (format!(r"{reals} (?:greater|more|larger) than {number}"), "($a,\\infty)"),
        (format!(r"{reals} (?:less|smaller) than {number}"), "(-\\infty,$a)"),
        (
            r"^(?:\\text(?:bf|rm)?\{)?\([A-J]\)\}?(?:\\[ ,;]|\\q?quad|~|\s)*(?<a>(?:\\[A-Za-z]|[^\s~\\]).*)$"
                .into(),
            "$a",
        ),
        (format!(r"{variable} (?:at least|no less than|greater than or equal to) {number}"), "$x \\ge $a"),
        (format!(r"{variable} (?:at most|no more than|less than or equal to) {number}"), "$x \\le $a"),
        (format!(r"{variable} (?:greater|more|larger) than {number}"), "$x > $a"),
        (format!(r"{variable} (?:less|smaller) than {number}"), "$x < $a"),
        (r"^(?<a>[a-z0-9-]+) and (?:a|one)[ -]half$".into(), "$a + \\frac{1}{2}"),
        (r"^(?<a>\d+) ?(?:R|r|rem\.?| ?remainder) *(?<b>\d+)$".into(), "($a;$b)"),
        (r"^(?:Matrix|Point|Tuple|Vector|np\.array)\((?<a>[\[(].*[\])])\)$".into(), "$a"),
        (r"^Rational\((?<a>[^,()]+),(?<b>[^,()]+)\)$".into(), "($a)/($b)"),
        (r"^Interval\((?<a>[^,()]+),(?<b>[^,()]+)\)$".into(), "[$a,$b]"),
    ];
    rows.into_iter().filter_map(|(pattern, as_text)| Some((Regex::new(&pattern).ok()?, as_text))).collect()
});

/// A letter and the digits right behind it.
static INDEX: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?<lead>^|[^A-Za-z\\])(?<name>[A-Za-z])(?<digits>[0-9]{1,2})").ok());

/// A logarithm without a backslash and without a base.
static BARE_LOG: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"(?<lead>^|[^A-Za-z\\])log\(").ok());

/// Compiles the expressions, which would otherwise be in the time of the first answer.
pub fn prepare() {
    LazyLock::force(&CHOICES);
    LazyLock::force(&TRAILER);
    LazyLock::force(&POINTS);
    LazyLock::force(&PHRASES);
    LazyLock::force(&INDEX);
    LazyLock::force(&BARE_LOG);
}

/// Other texts that an answer may mean beside the one that it is compared with.
pub fn alternatives(text: &str, other: &str) -> Vec<String> {
    let mut out: Vec<String> = choices(text).into_iter().collect();
    out.extend(indexed(text, other));
    out.extend(phrases(text));
    out.extend(natural_log(text, other));
    if POINTS.as_ref().is_some_and(|points| points.is_match(text)) {
        out.push(text.replace('.', "").replace(',', "."));
    }
    out.extend(without_trailer(text));
    out
}

/// What a phrase, or a constructor of a program, is in mathematical notation.
fn phrases(text: &str) -> Option<String> {
    // Most answers have neither a word nor a constructor.
    if text.len() > 200
        || !text.as_bytes().windows(3).any(|w| w.iter().all(u8::is_ascii_alphabetic))
            && !text.contains(['R', 'r'])
    {
        return None;
    }
    let words = match text.contains("\\text{") {
        true => text.replace("\\text{", "").replace('}', ""),
        false => text.to_string(),
    };
    let found = |text: &str| {
        let row = PHRASES.iter().find(|(phrase, _)| phrase.is_match(text));
        row.map(|(phrase, to)| phrase.replace(text, *to).into_owned())
    };
    found(&words).or_else(|| found(text))
}

/// `x1 + x2` with the indices of `x_1 + x_2`.
fn indexed(text: &str, other: &str) -> Option<String> {
    let index = INDEX.as_ref()?;
    if !other.contains('_') || text.contains('_') || !index.is_match(text) {
        return None;
    }
    let named = |m: &Captures<'_>| {
        let (name, digits) = (&m["name"], &m["digits"]);
        let there =
            other.contains(&format!("{name}_{digits}")) || other.contains(&format!("{name}_{{{digits}}}"));
        if there { format!("{}{name}_{{{digits}}}", &m["lead"]) } else { m[0].to_string() }
    };
    Some(index.replace_all(text, named).into_owned())
}

/// `log(3)` as programs write the natural logarithm, where the other answer has one.
fn natural_log(text: &str, other: &str) -> Option<String> {
    let log = BARE_LOG.as_ref()?;
    let natural = other.contains("ln") && !other.contains("log");
    (natural && log.is_match(text)).then(|| log.replace_all(text, "${lead}ln(").into_owned())
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
            let found = alternatives(text, "");
            assert_eq!(found, ["\\binom{8}{3}"], "{text}");
        }
        assert_eq!(alternatives("P(5, 2)", ""), ["\\frac{5!}{(5-2)!}"]);
        assert_eq!(alternatives("7 (seven)", ""), ["7"]);
        assert_eq!(alternatives("x=k\\pi (k\\in Z)", ""), ["x=k\\pi, k\\in Z"]);
        for plain in ["f(x)", "2 (mod 5)", "(1, 2)", "AC(8,3)", "x(x+1)", "C_n"] {
            assert!(alternatives(plain, "").is_empty(), "{plain}: {:?}", alternatives(plain, ""));
        }
    }
}

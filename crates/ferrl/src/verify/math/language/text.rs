//! Answers in words: names, choices, phrases that stand for a set.

/// Phrases that stand for a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phrase {
    /// There is no such thing.
    Nothing,
    /// All real numbers.
    Everything,
    /// Those above 0.
    Positive,
    /// Those from 0 up.
    NonNegative,
    /// Those below 0.
    Negative,
    /// All integers.
    Integers,
    /// Those from 1 up.
    PositiveIntegers,
}

/// What a phrase stands for.
pub fn phrase(words: &str) -> Option<Phrase> {
    let lower = words.to_lowercase();
    Some(match lower.as_str() {
        "no solution"
        | "no solutions"
        | "no real solution"
        | "no real solutions"
        | "no roots"
        | "no real root"
        | "no real roots"
        | "no such number"
        | "no such numbers"
        | "none"
        | "empty set"
        | "the empty set"
        | "there is no solution"
        | "there are no solutions"
        | "null set" => Phrase::Nothing,
        "all real numbers" | "all reals" | "all real" | "the real numbers" | "real numbers"
        | "any real number" | "all real values" => Phrase::Everything,
        "positive real numbers" | "all positive real numbers" | "positive reals" | "positive numbers" => {
            Phrase::Positive
        }
        "nonnegative real numbers" | "non negative real numbers" | "all nonnegative real numbers" => {
            Phrase::NonNegative
        }
        "negative real numbers" | "all negative real numbers" | "negative reals" => Phrase::Negative,
        "integers" | "all integers" | "any integer" | "every integer" => Phrase::Integers,
        "positive integers" | "all positive integers" | "any positive integer" | "every positive integer" => {
            Phrase::PositiveIntegers
        }
        _ => return None,
    })
}

/// The words and signs of an answer without commands, punctuation and case.
fn letters(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\\' {
            // Commands that set text say nothing; others are kept by name.
            let mut name = String::new();
            while let Some(letter) = chars.next_if(char::is_ascii_alphabetic) {
                name.push(letter);
            }
            if name.is_empty() {
                chars.next_if(|c| !c.is_alphanumeric());
                out.push(' ');
            } else if !super::words::is_text_command(&name)
                && !super::words::is_font_command(&name)
                && !super::words::is_skipped(&name)
                && name != "boxed"
            {
                out.push(' ');
                out.push_str(&name);
                out.push(' ');
            }
        } else if c.is_alphanumeric() {
            out.extend(c.to_lowercase());
        } else if matches!(
            c,
            '+' | '-' | '*' | '/' | '^' | '=' | '<' | '>' | '.' | '(' | ')' | '[' | ']' | '|' | '!'
        ) {
            // Signs count where the text is a formula that could not be read; the stop of a sentence does not.
            let stop = c == '.' && !chars.peek().is_some_and(char::is_ascii_digit);
            out.push(if stop { ' ' } else { c });
        } else if !matches!(c, '\'' | '’') {
            out.push(' ');
        }
    }
    out
}

/// [`letters`] without articles and the `on` of `on Monday`.
pub fn plain(text: &str) -> String {
    let text = letters(text);
    let words: Vec<&str> =
        text.split_whitespace().filter(|w| !matches!(*w, "the" | "a" | "an" | "on")).map(ordinal).collect();
    let words = words.join(" ");
    match words.as_str() {
        "dne" => "does not exist".to_string(),
        "infinite" | "infinite solutions" | "infinitely many solutions" | "infinite number of solutions" => {
            "infinitely many".to_string()
        }
        _ => words,
    }
}

/// An ordinal in digits.
fn ordinal(word: &str) -> &str {
    const SPELT: [&str; 10] =
        ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
    const SHORT: [&str; 10] = ["1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "10th"];
    SPELT.iter().position(|spelt| *spelt == word).map_or(word, |at| SHORT[at])
}

pub fn same_words(a: &str, b: &str) -> bool {
    let (a, b) = (plain(a), plain(b));
    let digits = a.bytes().any(|b| b.is_ascii_digit());
    !a.is_empty() && (a == b || !digits && a.replace([' ', '-'], "") == b.replace([' ', '-'], ""))
}

/// The letter of a multiple-choice answer: `B`, `(B)`, `\textbf{(B)}`, `B.`, and with what it stands for:
/// `(B) 12`. The flag says whether the letter is marked as a choice.
pub fn choice(text: &str) -> Option<(char, bool, bool)> {
    let words = letters(text).split_whitespace().collect::<Vec<_>>().join(" ");
    let named = ["option ", "choice ", "answer "].iter().find_map(|lead| words.strip_prefix(lead));
    let mut chars = named.unwrap_or(&words).chars();
    let (letter, marked, rest) = match chars.next()? {
        '(' => {
            let letter = chars.next()?;
            (chars.next()? == ')').then_some(())?;
            (letter, true, chars.as_str().trim())
        }
        letter => match chars.next() {
            None if named.is_some() => (letter, true, ""),
            None => (letter, text.contains("\\text") || text.contains("\\mathrm"), ""),
            Some(')') => (letter, true, chars.as_str().trim()),
            // What follows is another thing and not the rest of a formula.
            Some(' ') if has_mark(text, letter) && chars.as_str().starts_with(char::is_alphanumeric) => {
                (letter, true, chars.as_str().trim())
            }
            _ => return None,
        },
    };
    // (A), (D) are two choices.
    let another = rest.strip_prefix('(').is_some_and(|r| r.chars().nth(1) == Some(')'));
    (('a'..='j').contains(&letter) && !another).then_some((letter, marked, !rest.is_empty()))
}

/// Whether a text starts with a letter and a full stop or colon, as choices do.
fn has_mark(text: &str, letter: char) -> bool {
    // A:B is a ratio; a choice has a space behind its colon.
    if text.split_once(':').is_some_and(|(_, rest)| rest.starts_with(|c: char| !c.is_whitespace())) {
        return false;
    }
    let head: String = text.chars().filter(|c| !c.is_whitespace()).take(24).collect();
    let upper = letter.to_ascii_uppercase();
    ['.', ':', '}']
        .iter()
        .any(|mark| head.starts_with(&format!("{upper}{mark}")) || head.contains(&format!("{{{upper}{mark}")))
}

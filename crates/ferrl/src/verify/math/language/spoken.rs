//! Numbers in words: `twenty-five`, `one hundred and twenty`, `two thirds`.

use super::super::Rational;

/// The number a single word stands for.
pub fn word(word: &str) -> Option<i64> {
    const SMALL: &str = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen \
                         fifteen sixteen seventeen eighteen nineteen";
    const TENS: &str = "twenty thirty forty fifty sixty seventy eighty ninety";
    let word = word.to_lowercase();
    let place = |list: &str| list.split_whitespace().position(|w| w == word).map(|at| at as i64);
    place(SMALL).or_else(|| place(TENS).map(|at| 20 + 10 * at)).or(match word.as_str() {
        "dozen" => Some(12),
        other => scale(other),
    })
}

/// What a word multiplies the number before it by.
fn scale(word: &str) -> Option<i64> {
    Some(match word {
        "hundred" => 100,
        "thousand" => 1_000,
        "million" => 1_000_000,
        "billion" => 1_000_000_000,
        "trillion" => 1_000_000_000_000,
        _ => return None,
    })
}

/// The denominator that a word stands for: `thirds`, `quarter`.
fn denominator(word: &str) -> Option<i64> {
    const ORDINALS: &str = "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth";
    let single = word.strip_suffix('s').unwrap_or(word);
    match word {
        "half" | "halves" => Some(2),
        "quarter" | "quarters" => Some(4),
        "hundredth" | "hundredths" => Some(100),
        _ => ORDINALS.split(' ').position(|w| w == single).map(|at| at as i64 + 3),
    }
}

/// Whether a sign or conjunction between two words joins them to one number: `twenty-five`, `hundred and five`.
pub fn joins(before: &str, hyphen: bool, after: &str) -> bool {
    let (before, after) = (before.to_lowercase(), after.to_lowercase());
    match (word(&before), word(&after)) {
        (Some(_), None) => hyphen && denominator(&after).is_some(),
        (Some(tens), Some(units)) if hyphen => (20..100).contains(&tens) && (1..10).contains(&units),
        (Some(_), Some(_)) => scale(&before).is_some() && scale(&after).is_none(),
        _ => false,
    }
}

/// The number that several words stand for; none where any of them is no number.
pub fn number(words: &[&str]) -> Option<Rational> {
    let words: Vec<String> = words.iter().map(|w| w.to_lowercase()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).filter(|w| *w != "and").collect();
    match words[..] {
        [] => None,
        ["half"] => Rational::new(1, 2),
        ["quarter"] => Rational::new(1, 4),
        [ref top @ .., bottom] if !top.is_empty() && denominator(bottom).is_some() => {
            Rational::new(whole(top)?.into(), denominator(bottom)?.into())
        }
        ref all => whole(all).map(Rational::from),
    }
}

/// An integer: units behind tens, both behind hundreds, in groups of ever smaller scales.
fn whole(words: &[&str]) -> Option<i64> {
    // `group` is what stands before the next scale, `room` the bound of what may still be added to it.
    let (mut total, mut group, mut room, mut last) = (0i64, 0i64, 100i64, i64::MAX);
    for spoken in words {
        let value = word(spoken)?;
        match scale(spoken) {
            Some(100) if group < 100 => (group, room) = (group.max(1) * 100, 100),
            Some(scale) if (101..last).contains(&scale) && (group > 0 || total == 0) => {
                total += group.max(1).checked_mul(scale)?;
                (group, room, last) = (0, 100, scale);
            }
            Some(_) => return None,
            None if *spoken == "dozen" => (group, room) = (group.max(1) * 12, 0),
            None if value < room => {
                group += value;
                room = if value >= 20 { 10 } else { 0 };
            }
            None => return None,
        }
    }
    total.checked_add(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_words() {
        for (text, top, bottom) in [
            ("seven", 7, 1),
            ("twenty five", 25, 1),
            ("one hundred and twenty", 120, 1),
            ("fifteen hundred", 1_500, 1),
            ("two thousand three hundred five", 2_305, 1),
            ("three million", 3_000_000, 1),
            ("two dozen", 24, 1),
            ("one half", 1, 2),
            ("half", 1, 2),
            ("three fourths", 3, 4),
            ("one quarter", 1, 4),
            ("hundred", 100, 1),
        ] {
            let words: Vec<&str> = text.split(' ').collect();
            assert_eq!(number(&words), Rational::new(top, bottom), "{text}");
        }
        for text in [
            "five twenty", "one two", "two apples", "thousand million", "and", "third", "ten five",
            "six hundred hundred",
        ] {
            let words: Vec<&str> = text.split(' ').collect();
            assert_eq!(number(&words), None, "{text}");
        }
    }
}

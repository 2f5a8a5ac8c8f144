//! Dates and times of day, which are no formulas: `8:30 p.m.`, `March 3rd, 2020`.

const MONTHS: [&str; 12] = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
    "november", "december",
];

/// A point in a day, in seconds, and whether it is known which half of the day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Time {
    seconds: u32,
    certain: bool,
}

/// Month, day and, where given, year.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    month: usize,
    day: u32,
    year: Option<u32>,
}

/// Whether both are the same date or time of day; none where either is neither.
pub fn compare(gold: &str, answer: &str) -> Option<bool> {
    if !gold.contains(':') && !has_letters(gold) && !has_letters(answer) {
        return None;
    }
    let hour = |text: &str| text.replace(" o'clock", ":00");
    let (g, a) = (words(&hour(gold)), words(&hour(answer)));
    if let (Some(g), Some(a)) = (time(&g), time(&a)) {
        // Without a.m. or p.m. the digits decide.
        let half = 12 * 3_600;
        let same = g.seconds == a.seconds || g.certain != a.certain && g.seconds % half == a.seconds % half;
        // 9:16 and 18:32 are different times, but the same ratio.
        let perhaps_ratios = !has_letters(gold) && !has_letters(answer);
        return if perhaps_ratios && !same { None } else { Some(same) };
    }
    if let (Some(g), Some(a)) = (numeric_date(gold).or(date(&g)), numeric_date(answer).or(date(&a))) {
        let years = g.year.is_none() || a.year.is_none() || g.year == a.year;
        return Some((g.month, g.day) == (a.month, a.day) && years);
    }
    None
}

fn has_letters(text: &str) -> bool {
    text.bytes().filter(u8::is_ascii_alphabetic).count() >= 2
}

/// Lower-case words and numbers; the dots of `p.m.` and the commands around text are left out.
fn words(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let mut out: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut last = ' ';
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let letter = c.is_ascii_alphabetic();
        if c == '.' && last.is_ascii_alphabetic() {
            continue;
        }
        if c == '\\' {
            while chars.next_if(char::is_ascii_alphabetic).is_some() {}
        }
        let joins = c.is_ascii_digit() && (last.is_ascii_digit() || last == ':')
            || c == ':' && last.is_ascii_digit()
            || letter && last.is_ascii_alphabetic();
        if !joins && !word.is_empty() {
            out.push(std::mem::take(&mut word));
        }
        if letter || c.is_ascii_digit() || c == ':' {
            word.push(c);
        } else if !c.is_whitespace() && !matches!(c, '{' | '}' | ',' | '.' | '\\' | '$' | '~') {
            // Anything else is no date.
            out.push("?".into());
        }
        last = c;
    }
    if !word.is_empty() {
        out.push(word);
    }
    out
}

fn time(words: &[String]) -> Option<Time> {
    let (clock, half) = match words {
        [word] if word == "noon" => return Some(Time { seconds: 12 * 3_600, certain: true }),
        [word] if word == "midnight" => return Some(Time { seconds: 0, certain: true }),
        [clock] if clock.contains(':') => (clock, None),
        [clock, half] if half == "am" || half == "pm" => (clock, Some(half.as_str())),
        [clock, a, m] if m == "m" && (a == "a" || a == "p") => {
            (clock, Some(if a == "a" { "am" } else { "pm" }))
        }
        _ => return None,
    };
    let mut parts = clock.split(':');
    let hours: u32 = parts.next()?.parse().ok().filter(|h| *h < 25)?;
    let mut rest = [0u32; 2];
    for (slot, part) in rest.iter_mut().zip(&mut parts) {
        // Minutes and seconds have two digits: 3:4 is a ratio.
        *slot = part.parse().ok().filter(|m| part.len() == 2 && *m < 60)?;
    }
    if parts.next().is_some() {
        return None;
    }
    let hours = match half {
        Some("pm") if hours < 12 => hours + 12,
        Some("am") if hours == 12 => 0,
        _ => hours,
    };
    let certain = half.is_some() || hours > 12 || hours == 0;
    Some(Time { seconds: hours * 3_600 + rest[0] * 60 + rest[1], certain })
}

/// `12/25/2020` (the month first, unless it cannot be one) and `2020-12-25`.
fn numeric_date(text: &str) -> Option<Date> {
    let sign = ['/', '-'].into_iter().find(|sign| text.matches(*sign).count() == 2)?;
    let numbers: Vec<u32> = text.split(sign).map(|part| part.trim().parse().ok()).collect::<Option<_>>()?;
    let (month, day, year) = match (sign, &numbers[..]) {
        ('-', &[year @ 1000..=9999, month, day]) => (month, day, year),
        ('/', &[day @ 13..=31, month, year @ 1000..=9999]) => (month, day, year),
        ('/', &[month, day, year @ 1000..=9999]) => (month, day, year),
        _ => return None,
    };
    let fits = (1..=12).contains(&month) && (1..=31).contains(&day);
    fits.then(|| Date { month: month as usize - 1, day, year: Some(year) })
}

fn date(words: &[String]) -> Option<Date> {
    let mut month = None;
    let mut numbers = Vec::new();
    for word in words {
        if let Ok(number) = word.parse::<u32>() {
            numbers.push(number);
        } else if let Some(at) = MONTHS.iter().position(|month| {
            word == month || month.starts_with(word.as_str()) && (word.len() == 3 || word == "sept")
        }) {
            if month.replace(at).is_some() {
                return None;
            }
        } else if !matches!(word.as_str(), "th" | "st" | "nd" | "rd" | "of" | "the") {
            return None;
        }
    }
    match numbers[..] {
        [day] if (1..=31).contains(&day) => Some(Date { month: month?, day, year: None }),
        [day, year] if (1..=31).contains(&day) => Some(Date { month: month?, day, year: Some(year) }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_dates() {
        for (a, b, want) in [
            ("20:34", "08:34 \\text{P.M.}", Some(true)),
            ("12:00 p.m.", "1:00", Some(false)),
            ("9:16", "9:16", Some(true)),
            // Perhaps ratios: the comparison of formulas decides.
            ("12:00", "1:00", None),
            ("3:00 PM", "3 p.m.", Some(true)),
            ("12:15 a.m.", "0:15", Some(true)),
            ("3:4", "6:8", None),
            ("March 3", "3rd of March", Some(true)),
            ("\\text{March 3, 2020}", "March 3 2021", Some(false)),
            ("May 5", "May 6", Some(false)),
            ("July 4", "4 July 1776", Some(true)),
            ("12/25/2020", "December 25, 2020", Some(true)),
            ("25/12/2020", "2020-12-25", None),
            ("Dec 24, 2020", "2020-12-25", Some(false)),
            ("noon", "12:00 p.m.", Some(true)),
            ("midnight", "12:00 PM", Some(false)),
            ("12 o'clock", "12:00", Some(true)),
            ("maybe 5", "maybe 5", None),
            ("5", "6", None),
        ] {
            assert_eq!(compare(a, b), want, "{a} / {b}");
        }
    }
}

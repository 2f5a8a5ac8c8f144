//! Literals: integers, decimals, repeating decimals, thousands separators, scientific notation.

use super::super::{Commas, Nat, Rational};

/// How precisely a decimal is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digits {
    /// Significant digits.
    pub significant: u32,
    /// Digits behind the point; negative where the last written digit stands before it.
    pub decimals: i64,
}

/// A number as it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Literal {
    pub value: Rational,
    /// The precision of a decimal.
    pub digits: Option<Digits>,
    /// The digits of an integer, which may be in another base.
    pub raw: Option<String>,
}

/// More digits than any answer needs.
const MOST_DIGITS: usize = 2_000;

struct Scan<'a> {
    chars: &'a [char],
    at: usize,
}

impl Scan<'_> {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn starts(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.peek(i) == c)
    }

    fn digits(&mut self, out: &mut String) {
        while self.peek(0).is_ascii_digit() {
            out.push(self.peek(0));
            self.at += 1;
        }
    }

    /// Whether exactly three digits follow at `ahead`.
    fn three_digits(&self, ahead: usize) -> bool {
        (0..3).all(|i| self.peek(ahead + i).is_ascii_digit()) && !self.peek(ahead + 3).is_ascii_digit()
    }

    fn spaces(&self, mut ahead: usize) -> usize {
        while self.peek(ahead) == ' ' {
            ahead += 1;
        }
        ahead
    }

    /// Length of a separator of thousands that stands here before three digits.
    fn separator(&self, commas: Commas) -> Option<usize> {
        // One point before three digits is a decimal's; two or more part thousands: 12.345.678.
        if self.peek(0) == '.' && self.three_digits(1) {
            let points =
                (1..).take_while(|n| self.peek(4 * n) == '.' && self.three_digits(4 * n + 1)).count();
            let inside = self.chars[..self.at].iter().rev().take(5).any(|c| *c == '.');
            return (points > 0 || inside).then_some(1);
        }
        for mark in [",\\!", "{,}\\!", "{,}", "\\,", "{\\,}", "{}"] {
            if self.starts(mark) {
                let end = self.spaces(mark.len());
                return self.three_digits(end).then_some(end);
            }
        }
        match self.peek(0) {
            ',' if commas == Commas::Thousands && self.three_digits(1) => Some(1),
            ' ' if self.three_digits(1) && !matches!(self.peek(4), '/' | '^' | '.' | '_') => Some(1),
            _ => None,
        }
    }
}

/// The literal that starts at `start`, and where it ends. `free` allows separators of thousands: they do not
/// occur in exponents and indices.
pub fn literal(chars: &[char], start: usize, commas: Commas, free: bool) -> Option<(Literal, usize)> {
    if let Some(prefixed) = prefixed(chars, start) {
        return Some(prefixed);
    }
    let mut scan = Scan { chars, at: start };
    let mut whole = String::new();
    scan.digits(&mut whole);
    if free && (1..=3).contains(&whole.len()) && !whole.starts_with('0') {
        while let Some(len) = scan.separator(commas) {
            scan.at += len;
            scan.digits(&mut whole);
        }
    }
    let mut part = String::new();
    let mut repeat = String::new();
    let point = scan.peek(0) == '.'
        && (scan.peek(1).is_ascii_digit()
            || scan.peek(1) == '\\'
            || scan.peek(1) == '(' && !whole.is_empty());
    if point {
        let back = scan.at;
        scan.at += 1;
        scan.digits(&mut part);
        repeat = overline(&mut scan);
        if repeat.is_empty() {
            repeat = bracketed(&mut scan);
        }
        if part.is_empty() && repeat.is_empty() {
            scan.at = back;
        } else if repeat.is_empty() {
            repeat = dots(&mut scan, &part);
        }
    }
    if whole.len() + part.len() + repeat.len() > MOST_DIGITS {
        return None;
    }
    let exponent = scientific(&mut scan, &whole, point);
    let is_integer = part.is_empty() && repeat.is_empty() && exponent.is_none();
    let mut value = decimal(&whole, &part, &repeat)?;
    if let Some(exponent) = exponent {
        value = value.mul(&Rational::from(10).pow(exponent)?);
    }
    let digits = (!is_integer && repeat.is_empty()).then(|| {
        let all = format!("{whole}{part}");
        let significant = all.trim_start_matches('0').len() as u32;
        Digits { significant, decimals: part.len() as i64 - exponent.unwrap_or(0) }
    });
    Some((Literal { value, digits, raw: is_integer.then_some(whole) }, scan.at))
}

fn decimal(whole: &str, part: &str, repeat: &str) -> Option<Rational> {
    if repeat.is_empty() && whole.len() + part.len() <= 18 {
        let digits = whole.bytes().chain(part.bytes());
        let value = digits.fold(0i128, |value, digit| value * 10 + i128::from(digit - b'0'));
        return Rational::new(value, 10i128.pow(part.len() as u32));
    }
    let nat = |text: &str| Nat::parse(text.as_bytes(), 10);
    let ten = |n: usize| Nat::from(10).pow(n as u32);
    let fixed = nat(&format!("{whole}{part}"))?;
    if repeat.is_empty() {
        return Rational::from_parts(false, fixed, ten(part.len()));
    }
    // 0.a(b) = (ab - a) / (10^|a| (10^|b| - 1)).
    let all = nat(&format!("{whole}{part}{repeat}"))?;
    let nines = ten(repeat.len()).saturating_sub(&Nat::from(1));
    Rational::from_parts(false, all.saturating_sub(&fixed), ten(part.len()).mul(&nines))
}

/// `0xFF`, `0b101`, `0o17`.
fn prefixed(chars: &[char], start: usize) -> Option<(Literal, usize)> {
    let base = match chars.get(start..start + 3)? {
        ['0', 'x' | 'X', digit] if digit.is_ascii_hexdigit() => 16,
        ['0', 'b' | 'B', '0' | '1'] => 2,
        ['0', 'o' | 'O', '0'..='7'] => 8,
        _ => return None,
    };
    // 10x2 is a product.
    if start > 0 && chars[start - 1].is_ascii_digit() {
        return None;
    }
    let digits: String = chars[start + 2..].iter().take_while(|c| c.is_ascii_alphanumeric()).collect();
    if digits.len() > 64 || !digits.chars().all(|c| c.is_digit(base)) {
        return None;
    }
    let value = Nat::parse(digits.to_ascii_uppercase().as_bytes(), base)?;
    let value = Rational::from_parts(false, value, Nat::from(1))?;
    Some((Literal { value, digits: None, raw: None }, start + 2 + digits.len()))
}

/// The digits in brackets that end a decimal and repeat: `0.1(6)`. What follows must not be more of a formula:
/// `0.5(3)x` is a product.
fn bracketed(scan: &mut Scan<'_>) -> String {
    let mut end = 1;
    while scan.peek(end).is_ascii_digit() {
        end += 1;
    }
    let after = scan.peek(end + 1);
    if scan.peek(0) != '(' || end == 1 || scan.peek(end) != ')' || after.is_alphanumeric() || after == '(' {
        return String::new();
    }
    let digits = scan.chars[scan.at + 1..scan.at + end].iter().collect();
    scan.at += end + 1;
    digits
}

/// The digits under `\overline{..}` or `\bar{..}`, which repeat.
fn overline(scan: &mut Scan<'_>) -> String {
    for mark in ["\\overline{", "\\bar{", "\\overline ", "\\dot{", "\\bar ", "\\overline", "\\bar"] {
        if !scan.starts(mark) {
            continue;
        }
        let back = scan.at;
        scan.at += mark.len();
        let mut digits = String::new();
        if mark.ends_with('{') {
            scan.digits(&mut digits);
            if scan.peek(0) == '}' && !digits.is_empty() {
                scan.at += 1;
                return digits;
            }
        } else if scan.peek(0).is_ascii_digit() {
            digits.push(scan.peek(0));
            scan.at += 1;
            return digits;
        }
        scan.at = back;
        break;
    }
    String::new()
}

/// The period of a decimal that ends in dots, if its digits show one: `0.1666...` repeats `6`.
fn dots(scan: &mut Scan<'_>, part: &str) -> String {
    let mark = ["\\ldots", "\\dots", "\\cdots", "..."].into_iter().find(|mark| scan.starts(mark));
    let Some(mark) = mark else { return String::new() };
    scan.at += mark.len();
    (1..=part.len() / 2)
        .find(|period| {
            let last = &part[part.len() - period..];
            let times = if *period == 1 { 3 } else { 2 };
            part.len() >= period * times && part.ends_with(&last.repeat(times))
        })
        .map_or_else(String::new, |period| part[part.len() - period..].to_string())
}

/// The exponent of `1.5e-3`. `2e-1` is `2e - 1`, as in most answers that look so.
fn scientific(scan: &mut Scan<'_>, whole: &str, point: bool) -> Option<i64> {
    let e = scan.peek(0);
    if e != 'e' && e != 'E' {
        return None;
    }
    let signed = matches!(scan.peek(1), '+' | '-');
    let first = 1 + usize::from(signed);
    let mut end = first;
    while scan.peek(end).is_ascii_digit() {
        end += 1;
    }
    let count = end - first;
    if !(1..=5).contains(&count)
        || scan.peek(end).is_ascii_alphabetic()
        || matches!(scan.peek(end), '^' | '.')
    {
        return None;
    }
    if signed && count < 2 && !point && e == 'e' && whole != "1" {
        return None;
    }
    let text: String = scan.chars[scan.at + first..scan.at + end].iter().collect();
    let value: i64 = text.parse().ok()?;
    let exponent = if scan.peek(1) == '-' { -value } else { value };
    scan.at += end;
    Some(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, commas: Commas) -> Option<(String, usize)> {
        let chars: Vec<char> = text.chars().collect();
        let (literal, end) = literal(&chars, 0, commas, true)?;
        Some(match literal.value {
            Rational::Small(n, d) => (format!("{n}/{d}"), end),
            _ => ("big".into(), end),
        })
    }

    #[test]
    fn literals_have_their_exact_value() {
        for (text, value, end) in [
            ("12", "12/1", 2),
            ("0.125", "1/8", 5),
            (".5x", "1/2", 2),
            ("1,234,567", "1234567/1", 9),
            ("12,34", "12/1", 2),
            ("1,2345", "1/1", 1),
            ("01,234", "1/1", 2),
            ("14{,}916", "14916/1", 8),
            ("32,\\! 349", "32349/1", 9),
            ("10 000", "10000/1", 6),
            ("0.\\overline{3}", "1/3", 14),
            ("0.1\\overline{6}", "1/6", 15),
            ("0.333...", "1/3", 8),
            ("0.121212\\ldots", "4/33", 14),
            ("1.5e3", "1500/1", 5),
            ("1e-2", "1/100", 4),
            ("2e-1", "2/1", 1),
            ("3E5", "300000/1", 3),
            ("2ex", "2/1", 1),
            ("42.", "42/1", 2),
            ("0.(3)", "1/3", 5),
            (".\\overline{8}", "8/9", 13),
            ("0.1(6)", "1/6", 6),
            ("0.5(x)", "1/2", 3),
            ("12.345.678", "12345678/1", 10),
            ("12.345", "2469/200", 6),
            ("0xFF", "255/1", 4),
            ("0x", "0/1", 1),
            ("0b101", "5/1", 5),
            ("0o17", "15/1", 4),
            ("0b2", "0/1", 1),
        ] {
            assert_eq!(read(text, Commas::Thousands), Some((value.into(), end)), "{text}");
        }
        assert_eq!(read("1,234", Commas::Separate), Some(("1/1".into(), 1)));
        assert_eq!(read("1e99999", Commas::Separate), None);
    }
}

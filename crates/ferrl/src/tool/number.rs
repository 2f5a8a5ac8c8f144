//! Exact rational arithmetic on a text, for tools: a parser that never runs code, with bounds on length, depth and size.

use crate::verify::math::{Nat, Rational};

/// Maximum length of an expression in bytes.
const MAX_BYTES: usize = 1024;
/// Maximum nesting depth.
const MAX_DEPTH: usize = 64;
/// Maximum size of numerator and denominator in bits: about 1,200 digits.
const MAX_BITS: u64 = 4096;
/// Decimals of a non-terminating result.
const DIGITS: u64 = 12;

/// The value of an expression, or an error message. Expressions have `+ - * / // % ^ **`, parentheses, decimals, and
/// `sqrt abs floor ceil round min max`.
pub(crate) fn evaluate(text: &str) -> Result<ExactNumber, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the expression has {} bytes, at most {MAX_BYTES} are read", text.len()));
    }
    let text: Vec<char> = text.chars().map(plain).collect();
    let mut parser = NumberParser { text: &text, at: 0, depth: 0, arguments: false };
    let value = parser.sum()?;
    match parser.peek() {
        None => Ok(value),
        Some(c) => Err(format!("unexpected {c:?} at character {}", parser.at + 1)),
    }
}

/// The ASCII form of an operator.
fn plain(c: char) -> char {
    match c {
        '×' | '·' | '⋅' => '*',
        '÷' | '∕' => '/',
        '−' | '–' => '-',
        '[' => '(',
        ']' => ')',
        c => c,
    }
}

/// A number with a flag: not exact after an irrational root.
#[derive(Clone, Debug)]
pub(crate) struct ExactNumber {
    number: Rational,
    exact: bool,
}

impl ExactNumber {
    pub(crate) fn exact(number: Rational) -> Self {
        ExactNumber { number, exact: true }
    }

    /// Its value, if exact.
    pub(crate) fn exact_value(self) -> Option<Rational> {
        self.exact.then_some(self.number)
    }

    /// Readable form: a whole number, a terminating decimal, or a fraction with its decimals.
    pub(crate) fn text(&self) -> String {
        let number = self.number.reduced();
        if number.is_integer() && self.exact {
            return decimal(&number, 0);
        }
        let ends = number
            .is_terminating()
            .then(|| (1..=DIGITS).find(|&d| scaled(&number, d).is_integer()))
            .flatten();
        match (ends, self.exact) {
            (Some(digits), true) => decimal(&number, digits),
            (_, false) => format!("about {}", decimal(&number, DIGITS)),
            (None, true) => {
                let (negative, top, bottom) = number.parts();
                let sign = if negative { "-" } else { "" };
                format!("{sign}{top}/{bottom} (about {})", decimal(&number, DIGITS))
            }
        }
    }
}

fn scaled(number: &Rational, digits: u64) -> Rational {
    Rational::from(10).pow(digits as i64).map_or(Rational::ZERO, |ten| number.mul(&ten))
}

/// Rounded half away from zero to `digits` decimals, without trailing zeros.
fn decimal(number: &Rational, digits: u64) -> String {
    let half = Rational::new(1, 2).unwrap_or(Rational::ZERO);
    let (negative, ..) = number.parts();
    let magnitude = if negative { number.neg() } else { number.clone() };
    let whole = scaled(&magnitude, digits).add(&half).floor();
    let (_, top, bottom) = whole.parts();
    let units = top.div_rem(&bottom).map_or_else(Nat::default, |(units, _)| units);
    let text = format!("{:0>width$}", units, width = digits as usize + 1);
    let (before, after) = text.split_at(text.len() - digits as usize);
    let after = after.trim_end_matches('0');
    let sign = if negative && !units.is_zero() { "-" } else { "" };
    if after.is_empty() { format!("{sign}{before}") } else { format!("{sign}{before}.{after}") }
}

struct NumberParser<'a> {
    text: &'a [char],
    at: usize,
    depth: usize,
    /// Whether a comma separates the arguments of a function.
    arguments: bool,
}

impl NumberParser<'_> {
    fn peek(&mut self) -> Option<char> {
        while self.text.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, sign: &str) -> bool {
        self.peek();
        let found = sign.chars().enumerate().all(|(i, c)| self.text.get(self.at + i) == Some(&c));
        self.at += if found { sign.len() } else { 0 };
        found
    }

    fn sum(&mut self) -> Result<ExactNumber, String> {
        let mut left = self.product()?;
        loop {
            if self.take("+") {
                left = join(left, self.product()?, |a, b| Some(a.add(b)))?;
            } else if self.take("-") {
                left = join(left, self.product()?, |a, b| Some(a.sub(b)))?;
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self) -> Result<ExactNumber, String> {
        let mut left = self.signed()?;
        loop {
            if self.peek() == Some('*') && self.text.get(self.at + 1) != Some(&'*') && self.take("*") {
                left = join(left, self.signed()?, |a, b| Some(a.mul(b)))?;
            } else if self.take("//") {
                left = join(left, self.signed()?, |a, b| Some(a.div(b)?.floor()))?;
            } else if self.take("/") {
                left = join(left, self.signed()?, Rational::div)?;
            } else if self.take("%") {
                left = join(left, self.signed()?, |a, b| Some(a.sub(&a.div(b)?.floor().mul(b))))?;
            } else {
                return Ok(left);
            }
        }
    }

    fn signed(&mut self) -> Result<ExactNumber, String> {
        self.deeper(|parser| {
            if parser.take("-") {
                let value = parser.signed()?;
                return Ok(ExactNumber { number: value.number.neg(), ..value });
            }
            if parser.take("+") { parser.signed() } else { parser.power() }
        })
    }

    fn power(&mut self) -> Result<ExactNumber, String> {
        let base = self.atom()?;
        if !self.take("**") && !self.take("^") {
            return Ok(base);
        }
        let power = self.signed()?;
        let n = power.number.to_i64().filter(|_| power.exact).ok_or("an exponent must be a whole number")?;
        let bits = base.number.reduced().bits().max(2) - 1;
        let small = base.number.to_i64().is_some_and(|b| b.abs() <= 1);
        // The exact size in bits, since a power multiplies it.
        let bits = base.number.to_i64().map_or(bits, |b| u64::from(64 - b.unsigned_abs().leading_zeros()));
        if !small && n.unsigned_abs().saturating_mul(bits) > 2 * MAX_BITS {
            return Err("the result is too large".into());
        }
        let number = base.number.pow(n).ok_or("the power is not defined")?;
        bounded(ExactNumber { number, exact: base.exact })
    }

    fn atom(&mut self) -> Result<ExactNumber, String> {
        match self.peek() {
            None => Err("the expression ends too early".into()),
            Some('(') => {
                self.at += 1;
                let value = self.deeper(NumberParser::sum)?;
                if self.take(")") { Ok(value) } else { Err("a closing parenthesis is missing".into()) }
            }
            Some(c) if c.is_ascii_digit() || c == '.' => self.number(),
            Some(c) if c.is_alphabetic() || c == '_' => self.function(),
            Some(c) => Err(format!("unexpected {c:?} at character {}", self.at + 1)),
        }
    }

    /// Digits with a point; a comma before exactly three digits groups thousands.
    fn number(&mut self) -> Result<ExactNumber, String> {
        let (mut digits, mut after) = (Vec::new(), None);
        while let Some(&c) = self.text.get(self.at) {
            match c {
                '0'..='9' => {
                    digits.push(c as u8);
                    after = after.map(|n: i64| n + 1);
                }
                '.' if after.is_none() => after = Some(0),
                ',' if after.is_none() && self.thousands() => {}
                _ => break,
            }
            self.at += 1;
        }
        if digits.is_empty() {
            return Err("a point without digits".into());
        }
        let nat = Nat::parse(&digits, 10).ok_or("a number that cannot be read")?;
        let ten = Rational::from(10).pow(after.unwrap_or(0)).ok_or("too many digits")?;
        let whole = Rational::from_parts(false, nat, Nat::from(1)).unwrap_or(Rational::ZERO);
        bounded(ExactNumber::exact(whole.div(&ten).unwrap_or(Rational::ZERO)))
    }

    fn thousands(&self) -> bool {
        let digit = |i: usize| self.text.get(self.at + i).is_some_and(char::is_ascii_digit);
        !self.arguments && digit(1) && digit(2) && digit(3) && !digit(4)
    }

    fn function(&mut self) -> Result<ExactNumber, String> {
        let from = self.at;
        while self.text.get(self.at).is_some_and(|c| c.is_alphanumeric() || *c == '_') {
            self.at += 1;
        }
        let name: String = self.text[from..self.at].iter().collect();
        if !FUNCTIONS.contains(&name.as_str()) {
            return Err(format!("unknown name {name:?}; known are {}", FUNCTIONS.join(", ")));
        }
        if !self.take("(") {
            return Err(format!("{name} needs its arguments in parentheses"));
        }
        let outside = std::mem::replace(&mut self.arguments, true);
        let mut arguments = vec![self.deeper(NumberParser::sum)?];
        while self.take(",") {
            arguments.push(self.deeper(NumberParser::sum)?);
        }
        self.arguments = outside;
        if !self.take(")") {
            return Err("a closing parenthesis is missing".into());
        }
        apply(&name, arguments)
    }

    fn deeper<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        if self.depth >= MAX_DEPTH {
            return Err("the expression is nested too deeply".into());
        }
        self.depth += 1;
        let value = read(self);
        self.depth -= 1;
        value
    }
}

const FUNCTIONS: [&str; 7] = ["sqrt", "abs", "floor", "ceil", "round", "min", "max"];

fn apply(name: &str, mut arguments: Vec<ExactNumber>) -> Result<ExactNumber, String> {
    let better = |a: &ExactNumber, b: &ExactNumber| match name {
        "max" => a.number.compare(&b.number).is_ge(),
        _ => a.number.compare(&b.number).is_le(),
    };
    if matches!(name, "min" | "max") {
        let best = arguments.into_iter().reduce(|a, b| if better(&a, &b) { a } else { b });
        return best.ok_or_else(|| format!("{name} needs an argument"));
    }
    let (Some(ExactNumber { number: x, exact }), true) = (arguments.pop(), arguments.is_empty()) else {
        return Err(format!("{name} takes one argument"));
    };
    let half = Rational::new(1, 2).unwrap_or(Rational::ZERO);
    let number = match name {
        "abs" if x.sign() < 0 => x.neg(),
        "abs" => x,
        "floor" => x.floor(),
        "ceil" => x.neg().floor().neg(),
        "round" if x.sign() < 0 => x.neg().add(&half).floor().neg(),
        "round" => x.add(&half).floor(),
        _ => return sqrt(&x, exact),
    };
    Ok(ExactNumber { number, exact })
}

/// The square root: exact where it is a fraction, else to 20 digits after the point.
fn sqrt(x: &Rational, exact: bool) -> Result<ExactNumber, String> {
    if x.sign() < 0 {
        return Err("the square root of a negative number".into());
    }
    if let Some(root) = x.root(2) {
        return Ok(ExactNumber { number: root, exact });
    }
    let (_, top, bottom) = scaled(x, 40).parts();
    let units = top.div_rem(&bottom).map_or_else(Nat::default, |(units, _)| units);
    let scale = Nat::from(10).pow(20);
    let number = Rational::from_parts(false, units.root(2), scale).unwrap_or(Rational::ZERO);
    bounded(ExactNumber { number, exact: false })
}

fn join(
    a: ExactNumber,
    b: ExactNumber,
    op: impl FnOnce(&Rational, &Rational) -> Option<Rational>,
) -> Result<ExactNumber, String> {
    let number = op(&a.number, &b.number).ok_or("division by zero")?;
    bounded(ExactNumber { number, exact: a.exact && b.exact })
}

fn bounded(value: ExactNumber) -> Result<ExactNumber, String> {
    let number = value.number.reduced();
    if number.bits() > MAX_BITS {
        Err("the result is too large".into())
    } else {
        Ok(ExactNumber { number, ..value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> String {
        match evaluate(text) {
            Ok(value) => value.text(),
            Err(why) => format!("error: {why}"),
        }
    }

    #[test]
    fn results_are_exact() {
        for (text, want) in [
            ("2+3*4", "14"),
            ("(2+3)*4", "20"),
            ("2^3^2", "512"),
            ("-2^2", "-4"),
            ("2**-1", "0.5"),
            ("0.1+0.2", "0.3"),
            ("1/3", "1/3 (about 0.333333333333)"),
            ("-2/3", "-2/3 (about -0.666666666667)"),
            ("10/4", "2.5"),
            ("7//2", "3"),
            ("-7 // 2", "-4"),
            ("-7 % 3", "2"),
            ("123456789 × 987654321", "121932631112635269"),
            ("2^200", "1606938044258990275541962092341162602522202993782792835301376"),
            ("1,234,567 + 1", "1234568"),
            ("max(1,234)", "234"),
            ("sqrt(9/4)", "1.5"),
            ("sqrt(2)", "about 1.414213562373"),
            ("sqrt(2)*sqrt(2)-2", "about 0"),
            ("round(2.5)+round(-2.5)+floor(-0.1)+ceil(0.1)+abs(-3)", "3"),
            ("min(3, 1/2, 2)", "0.5"),
            ("1/1024", "0.0009765625"),
            ("[1+2]*3", "9"),
            ("10^20/10^19", "10"),
        ] {
            assert_eq!(of(text), want, "{text}");
        }
    }

    #[test]
    fn errors_are_named_and_evaluation_is_bounded() {
        for (text, part) in [
            ("1/0", "division by zero"),
            ("5 % 0", "division by zero"),
            ("0^-1", "not defined"),
            ("2^10000000", "too large"),
            ("9^9^9^9", "too large"),
            ("2^0.5", "whole number"),
            ("", "ends too early"),
            ("2+", "ends too early"),
            ("(2", "parenthesis"),
            ("2)", "unexpected ')'"),
            ("__import__('os')", "unknown name"),
            ("system(1)", "unknown name"),
            ("2 3", "unexpected '3'"),
            ("sqrt(-1)", "negative"),
            ("é", "unknown name"),
        ] {
            let got = of(text);
            assert!(got.starts_with("error: ") && got.contains(part), "{text} gave {got}");
        }
        assert!(of(&"(".repeat(1000)).contains("nested too deeply"));
        assert!(of(&"-".repeat(1000)).contains("nested too deeply"));
        assert!(of(&"1".repeat(2000)).contains("at most"));
        assert!(of(&vec!["1/3"; 250].join("+")).contains("250/3"));
        let product = vec!["99999999999999999999"; 48].join("*");
        assert!(of(&product).len() > 900);
    }

    #[test]
    fn random_texts_never_panic() {
        let signs: Vec<char> = "0123456789.,+-*/%^() sqrtmax".chars().collect();
        let mut draw = crate::verify::countdown::TaskDraw::new("calculator fuzz", 1, 0);
        for _ in 0..20_000 {
            let text: String = (0..draw.below(24)).map(|_| signs[draw.below(signs.len())]).collect();
            of(&text);
        }
    }
}

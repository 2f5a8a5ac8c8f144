//! Arithmetic expressions on exact fractions: parser, value and printer.

use ferrl_engine::{Error, Result};
use num_integer::gcd;
use std::fmt;

/// Maximum length of an expression.
pub const MAX_BYTES: usize = 1024;
/// Maximum nesting depth.
const MAX_DEPTH: usize = 50;

/// An exact fraction in lowest terms with a positive denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fraction {
    top: i128,
    bottom: i128,
}

impl Fraction {
    pub fn whole(number: i64) -> Self {
        Fraction { top: i128::from(number), bottom: 1 }
    }

    /// The number, if it is a whole one.
    pub fn as_whole(self) -> Option<i64> {
        if self.bottom == 1 { i64::try_from(self.top).ok() } else { None }
    }

    fn reduced(top: i128, bottom: i128) -> Option<Self> {
        if bottom == 0 {
            return None;
        }
        let divisor = i128::try_from(gcd(top.unsigned_abs(), bottom.unsigned_abs())).ok()?;
        let sign = bottom.signum();
        Some(Fraction {
            top: (top / divisor).checked_mul(sign)?,
            bottom: (bottom / divisor).checked_mul(sign)?,
        })
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bottom {
            1 => write!(f, "{}", self.top),
            bottom => write!(f, "({}/{bottom})", self.top),
        }
    }
}

/// An operation on two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CountdownOp {
    Add,
    Sub,
    Mul,
    Div,
}

impl CountdownOp {
    pub const ALL: [CountdownOp; 4] =
        [CountdownOp::Add, CountdownOp::Sub, CountdownOp::Mul, CountdownOp::Div];

    /// The operations of a text of signs such as `+-*`; spaces do not count.
    pub fn listed(signs: &str) -> Result<Vec<CountdownOp>> {
        let signs = signs.chars().filter(|c| !c.is_whitespace());
        signs
            .map(|c| {
                let found = CountdownOp::ALL.into_iter().find(|op| op.sign() == c);
                found
                    .ok_or_else(|| Error::usage(format!("unknown operation {c:?}, expected some of + - * /")))
            })
            .collect()
    }

    pub fn sign(self) -> char {
        match self {
            CountdownOp::Add => '+',
            CountdownOp::Sub => '-',
            CountdownOp::Mul => '*',
            CountdownOp::Div => '/',
        }
    }

    /// The exact result; `None` for a division by zero or an overflow.
    pub fn apply(self, a: Fraction, b: Fraction) -> Option<Fraction> {
        let cross = |x: Fraction, y: Fraction| x.top.checked_mul(y.bottom);
        match self {
            CountdownOp::Add => {
                Fraction::reduced(cross(a, b)?.checked_add(cross(b, a)?)?, a.bottom.checked_mul(b.bottom)?)
            }
            CountdownOp::Sub => {
                Fraction::reduced(cross(a, b)?.checked_sub(cross(b, a)?)?, a.bottom.checked_mul(b.bottom)?)
            }
            CountdownOp::Mul => Fraction::reduced(a.top.checked_mul(b.top)?, a.bottom.checked_mul(b.bottom)?),
            CountdownOp::Div => Fraction::reduced(cross(a, b)?, a.bottom.checked_mul(b.top)?),
        }
    }

    fn is_sum(self) -> bool {
        matches!(self, CountdownOp::Add | CountdownOp::Sub)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CountdownExpr {
    Number(i64),
    Binary(CountdownOp, Box<CountdownExpr>, Box<CountdownExpr>),
}

impl CountdownExpr {
    /// `left op right`.
    pub fn join(op: CountdownOp, left: CountdownExpr, right: CountdownExpr) -> CountdownExpr {
        CountdownExpr::Binary(op, Box::new(left), Box::new(right))
    }

    /// The exact value; `None` for a division by zero or an overflow.
    pub fn value(&self) -> Option<Fraction> {
        match self {
            CountdownExpr::Number(number) => Some(Fraction::whole(*number)),
            CountdownExpr::Binary(op, left, right) => op.apply(left.value()?, right.value()?),
        }
    }

    /// Its operations with their results in the order of evaluation, such as `7-5=2`, `2*12=24`; `None` without a value.
    pub fn steps(&self) -> Option<Vec<String>> {
        let mut lines = Vec::new();
        self.work_out(&mut lines)?;
        Some(lines)
    }

    fn work_out(&self, lines: &mut Vec<String>) -> Option<Fraction> {
        let CountdownExpr::Binary(op, left, right) = self else { return self.value() };
        let (a, b) = (left.work_out(lines)?, right.work_out(lines)?);
        let result = op.apply(a, b)?;
        lines.push(format!("{a}{}{b}={result}", op.sign()));
        Some(result)
    }

    /// The numbers in it, from left to right.
    pub fn numbers(&self) -> Vec<i64> {
        let mut found = Vec::new();
        self.collect(&mut found);
        found
    }

    fn collect(&self, found: &mut Vec<i64>) {
        match self {
            CountdownExpr::Number(number) => found.push(*number),
            CountdownExpr::Binary(_, left, right) => {
                left.collect(found);
                right.collect(found);
            }
        }
    }

    /// Parses whole numbers without signs, `+ - * /` (also `× ÷ −`) and parentheses; `None` for anything else.
    pub fn parse(text: &str) -> Option<CountdownExpr> {
        if text.len() > MAX_BYTES {
            return None;
        }
        let mut parser = ExpressionParser { rest: text, depth: 0 };
        let expr = parser.sum()?;
        parser.skip();
        parser.rest.is_empty().then_some(expr)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, parent: Option<(CountdownOp, bool)>) -> fmt::Result {
        match self {
            CountdownExpr::Number(number) => write!(f, "{number}"),
            CountdownExpr::Binary(op, left, right) => {
                let wrap = parent.is_some_and(|(outer, right)| match (outer.is_sum(), op.is_sum()) {
                    (false, true) => true,
                    (true, true) => right && outer == CountdownOp::Sub,
                    (false, false) => right && (outer == CountdownOp::Div || *op == CountdownOp::Div),
                    (true, false) => false,
                });
                if wrap {
                    f.write_str("(")?;
                }
                left.write(f, Some((*op, false)))?;
                write!(f, "{}", op.sign())?;
                right.write(f, Some((*op, true)))?;
                if wrap { f.write_str(")") } else { Ok(()) }
            }
        }
    }
}

impl fmt::Display for CountdownExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, None)
    }
}

struct ExpressionParser<'a> {
    rest: &'a str,
    depth: usize,
}

impl ExpressionParser<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, choices: &[(char, CountdownOp)]) -> Option<CountdownOp> {
        self.skip();
        let first = self.rest.chars().next()?;
        let &(_, op) = choices.iter().find(|(c, _)| *c == first)?;
        self.rest = &self.rest[first.len_utf8()..];
        Some(op)
    }

    fn sum(&mut self) -> Option<CountdownExpr> {
        let mut left = self.product()?;
        while let Some(op) =
            self.take(&[('+', CountdownOp::Add), ('-', CountdownOp::Sub), ('−', CountdownOp::Sub)])
        {
            left = CountdownExpr::join(op, left, self.product()?);
        }
        Some(left)
    }

    fn product(&mut self) -> Option<CountdownExpr> {
        let mut left = self.operand()?;
        while let Some(op) = self.take(&[
            ('*', CountdownOp::Mul),
            ('×', CountdownOp::Mul),
            ('/', CountdownOp::Div),
            ('÷', CountdownOp::Div),
        ]) {
            left = CountdownExpr::join(op, left, self.operand()?);
        }
        Some(left)
    }

    fn operand(&mut self) -> Option<CountdownExpr> {
        self.skip();
        if let Some(inner) = self.rest.strip_prefix('(') {
            self.rest = inner;
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return None;
            }
            let expr = self.sum()?;
            self.skip();
            self.rest = self.rest.strip_prefix(')')?;
            self.depth -= 1;
            return Some(expr);
        }
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        if digits.len() > 1 && digits.starts_with('0') {
            return None;
        }
        self.rest = rest;
        digits.parse().ok().map(CountdownExpr::Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Option<Fraction> {
        CountdownExpr::parse(text)?.value()
    }

    #[test]
    fn fractions_are_exact() {
        assert_eq!(value("8/(3-8/3)"), Some(Fraction::whole(24)));
        assert_eq!(value("1/3+1/3+1/3"), Some(Fraction::whole(1)));
        assert_eq!(value("2-3*4"), Some(Fraction::whole(-10)));
        assert_eq!(value("1/0"), None);
        assert_eq!(value("1/(2-2)"), None);
        let large = ["9223372036854775807"; 3].join("*");
        assert_eq!(value(&large), None, "larger than can be held");
    }

    #[test]
    fn steps_are_in_the_order_of_evaluation() {
        let steps = |text: &str| CountdownExpr::parse(text).expect("an expression").steps();
        assert_eq!(steps("(7-5)*12"), Some(vec!["7-5=2".into(), "2*12=24".into()]));
        assert_eq!(steps("8/(3-8/3)").expect("steps").join(" "), "8/3=(8/3) 3-(8/3)=(1/3) 8/(1/3)=24");
        assert_eq!(steps("4/(2-2)"), None);
    }

    #[test]
    fn printing_keeps_the_tree_s_value() {
        for text in
            ["(7-5)*12", "8/(3-8/3)", "1-(2-3)", "1-(2+3)", "1+2-3", "2*(6/3)", "8/(4*2)", "8/4/2", "8*4/2"]
        {
            let expr = CountdownExpr::parse(text).expect("an expression");
            assert_eq!(expr.to_string(), text);
        }
        let again = CountdownExpr::parse("((1)+(2*3))").expect("an expression").to_string();
        assert_eq!(again, "1+2*3");
    }

    #[test]
    fn depth_and_length_are_bounded() {
        let nested = |n: usize| format!("{}1{}", "(".repeat(n), ")".repeat(n));
        assert!(CountdownExpr::parse(&nested(50)).is_some());
        assert!(CountdownExpr::parse(&nested(51)).is_none());
        assert!(CountdownExpr::parse(&nested(2_000_000)).is_none());
        assert!(CountdownExpr::parse(&"1+".repeat(1_000_000)).is_none());
    }
}

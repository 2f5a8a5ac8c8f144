//! Powers and atoms: numbers, names, brackets, tables.

use super::super::language::spoken;
use super::super::lexer::number::Literal;
use super::super::{Const, Expr, Nat, Rational, Tok, Unit};
use super::Parser;
use super::quantities::is_lead;

impl Parser<'_> {
    /// An atom with its exponents, factorials, primes and signs of degree.
    pub(super) fn power(&mut self) -> Option<Expr> {
        let mut base = self.atom()?;
        loop {
            if matches!(self.sym(), '^' | '!' | '\'') {
                self.chain()?;
            }
            match self.tok(0) {
                Some(Tok::Sym('^')) => {
                    if let Some(degree) = self.degree_mark() {
                        self.at += degree;
                        base = Expr::Degree(base.boxed());
                        continue;
                    }
                    self.at += 1;
                    if let (Expr::Const(Const::Numbers(set)), Some((above, used))) = (&base, self.half_line())
                    {
                        base = half(*set, above)?;
                        self.at += used;
                        continue;
                    }
                    let exponent = self.exponent()?;
                    // `2^3^2` is `2^(3^2)`.
                    let exponent = if self.sym() == '^' && self.degree_mark().is_none() {
                        self.at += 1;
                        let top = self.exponent()?;
                        Expr::Pow(exponent.boxed(), top.boxed())
                    } else {
                        exponent
                    };
                    base = Expr::Pow(base.boxed(), exponent.boxed());
                }
                Some(Tok::Sym('!')) => {
                    self.at += 1;
                    base = if self.take('!') {
                        Expr::DoubleFact(base.boxed())
                    } else {
                        Expr::Fact(base.boxed())
                    };
                }
                Some(Tok::Sym('\'')) => {
                    self.at += 1;
                    base = match base {
                        Expr::Var(name) => Expr::Var(format!("{name}'")),
                        Expr::Call(name, args) => Expr::Call(format!("{name}'"), args),
                        _ => return None,
                    };
                }
                Some(Tok::Cmd("degree" | "circ")) => {
                    self.at += 1;
                    base = Expr::Degree(base.boxed());
                }
                _ => return Some(base),
            }
        }
    }

    /// The sign that stands alone in an exponent, whether it is a plus, and how many tokens it takes.
    fn half_line(&self) -> Option<(bool, usize)> {
        let (sign, used) = if self.sym() == '{' { (self.sym_at(1), 3) } else { (self.sym(), 1) };
        let alone = used == 1 || self.sym_at(2) == '}';
        (alone && matches!(sign, '+' | '-')).then_some((sign == '+', used))
    }

    /// Tokens of `^\circ` or `^{\circ}`.
    pub(super) fn degree_mark(&self) -> Option<usize> {
        let circle = |i| {
            matches!(self.tok(i), Some(Tok::Cmd("circ" | "degree")) | Some(Tok::Name(_)))
                && match self.tok(i) {
                    Some(Tok::Name(name)) => {
                        name == "o" && self.tokens.get(self.at + i).is_some_and(|t| t.text)
                    }
                    _ => true,
                }
        };
        if circle(1) {
            return Some(2);
        }
        (self.sym_at(1) == '{' && circle(2) && self.sym_at(3) == '}').then_some(4)
    }

    /// What stands behind `^`.
    pub(super) fn exponent(&mut self) -> Option<Expr> {
        self.deeper(|p| match p.sym() {
            '-' => {
                p.at += 1;
                Some(p.exponent()?.negated())
            }
            '+' => {
                p.at += 1;
                p.exponent()
            }
            '\'' => {
                p.at += 1;
                Some(Expr::Var("'".into()))
            }
            _ => p.atom(),
        })
    }

    pub(super) fn atom(&mut self) -> Option<Expr> {
        self.budget.spend(1).ok()?;
        if let Some(number) = self.digits_and_letters() {
            return Some(number);
        }
        let token = self.tokens.get(self.at)?.clone();
        match token.tok {
            Tok::Num(literal) => {
                self.at += 1;
                if self.sym() == '_'
                    && let Some(raw) = &literal.raw
                {
                    self.at += 1;
                    return self.base(raw);
                }
                Some(Expr::Num(literal.value, literal.digits))
            }
            Tok::Name(name) => {
                self.at += 1;
                self.name(name)
            }
            Tok::Word(_) => self.words(),
            Tok::Cmd(name) => {
                self.at += 1;
                self.deeper(|p| p.command(name))
            }
            Tok::Begin(kind) => {
                self.at += 1;
                self.deeper(|p| p.table(&kind))
            }
            Tok::End => None,
            Tok::Sym('(') if self.sym_at(2) == ')' && self.sym_at(3) == '_' => {
                let Some(Tok::Num(Literal { raw: Some(raw), .. })) = self.tok(1) else {
                    return self.deeper(|p| p.bracket('('));
                };
                let raw = raw.clone();
                self.at += 4;
                self.base(&raw)
            }
            Tok::Sym(c) => self.deeper(|p| p.bracket(c)),
        }
    }

    /// A number in a base above ten, whose digits may be letters: `2B_{16}`, `a3_{16}`.
    fn digits_and_letters(&mut self) -> Option<Expr> {
        let mut raw = String::new();
        let mut end = self.at;
        while let Some(token) = self.tokens.get(end).filter(|t| end == self.at || !t.space) {
            match &token.tok {
                Tok::Num(Literal { raw: Some(digits), .. }) => raw.push_str(digits),
                Tok::Name(letters) if letters.len() < 8 => raw.push_str(letters),
                _ => break,
            }
            end += 1;
        }
        let is_digit = |b: u8| b.is_ascii_digit();
        let marked = matches!(self.tokens.get(end).map(|t| &t.tok), Some(Tok::Sym('_')));
        // FF_{16} has no decimal digit and is known by its base alone.
        let letters = raw.bytes().all(|b| b.is_ascii_uppercase() && b.is_ascii_hexdigit()) && raw.len() > 1;
        let sixteen = |ahead: usize| matches!(self.tokens.get(end + ahead).map(|t| &t.tok), Some(Tok::Num(n)) if n.value.to_i64() == Some(16));
        let hexadecimal = letters && (sixteen(1) || sixteen(2));
        let mixed = end - self.at >= 2 && raw.bytes().any(is_digit);
        if !marked || raw.len() > 64 || !(mixed || hexadecimal) {
            return None;
        }
        let back = std::mem::replace(&mut self.at, end + 1);
        let number = self.base(&raw.to_ascii_uppercase());
        if number.is_none() {
            self.at = back;
        }
        number
    }

    /// A number in another base: `101_2`.
    pub(super) fn base(&mut self, raw: &str) -> Option<Expr> {
        let base = match self.argument()? {
            Expr::Num(base, _) => base.to_i64()?,
            Expr::Text(word) => spoken::word(&word)?,
            _ => return None,
        };
        let base = u32::try_from(base).ok().filter(|b| (2..=36).contains(b))?;
        let value = Nat::parse(raw.as_bytes(), base)?;
        Some(Expr::Num(Rational::from_parts(false, value, Nat::from(1))?, None))
    }

    pub(super) fn name(&mut self, name: String) -> Option<Expr> {
        let mut name = name;
        while self.take('\'') {
            name.push('\'');
        }
        if matches!(name.as_str(), "f" | "g" | "h") && self.is_inverse() {
            self.at += 5;
            name.push_str("^-1");
        }
        if self.sym() == '_' {
            self.at += 1;
            let index = self.argument()?;
            return Some(match index {
                Expr::Num(n, _) => Expr::Var(format!("{name}_{}", n.to_i64()?)),
                Expr::Text(word) => Expr::Var(format!("{name}_{word}")),
                // An index of several capitals names points: S_{ABC}.
                Expr::Var(index) if index.len() > 1 => Expr::Var(format!("{name}_{index}")),
                other => Expr::Call(format!("{name}_"), vec![other]),
            });
        }
        if self.sym() == '(' && self.is_call(&name) {
            let Some(Expr::Tuple(_, args, _)) = self.bracketed('(').map(as_tuple) else { return None };
            return Some(Expr::Call(name, args));
        }
        Some(match name.as_str() {
            "e" => Expr::Const(Const::E),
            "i" => Expr::Const(Const::I),
            _ => Expr::Var(name),
        })
    }

    /// Whether `^{-1}(` follows.
    pub(super) fn is_inverse(&self) -> bool {
        let one = matches!(self.tok(3), Some(Tok::Num(n)) if n.value.to_i64() == Some(1));
        let signs = [0, 1, 2, 4, 5].map(|ahead| self.sym_at(ahead));
        one && signs == ['^', '{', '-', '}', '(']
    }

    /// Whether a letter before a bracket is a function rather than a factor.
    pub(super) fn is_call(&self, name: &str) -> bool {
        let one_token = self.sym_at(2) == ')' && matches!(self.tok(1), Some(Tok::Name(_) | Tok::Num(_)));
        match name.trim_end_matches('\'').trim_end_matches("^-1") {
            "f" | "g" | "h" | "F" | "G" | "H" => true,
            "P" | "Q" | "R" | "S" | "T" | "p" | "q" | "y" | "u" | "v" | "phi" => one_token,
            _ => name.ends_with('\'') && one_token,
        }
    }

    /// Words before or instead of a value.
    pub(super) fn words(&mut self) -> Option<Expr> {
        while self.word().is_some_and(is_lead) && self.at + 1 < self.tokens.len() {
            self.at += 1;
            self.take(':');
        }
        if self.word().is_some_and(|word| matches!(word, "minus" | "negative"))
            && self.at + 1 < self.tokens.len()
        {
            let back = self.at;
            self.at += 1;
            if let Some(value @ (Expr::Num(..) | Expr::Div(..))) = self.deeper(Self::power) {
                return Some(value.negated());
            }
            self.at = back;
        }
        if let Some(value) = self.spoken_number() {
            return Some(Expr::Num(value, None));
        }
        let mut words: Vec<String> = Vec::new();
        while let Some(word) = self.word() {
            if matches!(word, "and" | "or" | "is" | "are" | "equals") {
                break;
            }
            words.push(word.to_string());
            self.at += 1;
        }
        // `the point (4, 0)`
        if matches!(&words[..], [name] if name.eq_ignore_ascii_case("point")) && self.sym() == '(' {
            return self.deeper(Self::power);
        }
        let [word] = &words[..] else {
            return if words.is_empty() {
                self.deeper(Self::power)
            } else {
                Some(Expr::Text(words.join(" ")))
            };
        };
        // A currency before its amount.
        if matches!(word.to_lowercase().as_str(), "usd" | "rs" | "eur" | "rmb" | "cny" | "inr")
            && matches!(self.tok(0), Some(Tok::Num(_)))
        {
            let unit = Unit::named(word);
            return Some(Expr::Unit(self.deeper(Self::product)?.boxed(), unit));
        }
        Some(Expr::Text(words.join(" ")))
    }

    /// The longest number in words that stands here; what it counts is left to be read as its unit.
    fn spoken_number(&mut self) -> Option<Rational> {
        let mut words: Vec<&str> = Vec::new();
        let (mut end, mut best) = (self.at, None);
        while let Some(Tok::Word(word)) = self.tokens.get(end).map(|t| &t.tok)
            && words.len() < 16
        {
            words.push(word);
            end += 1;
            if let Some(value) = spoken::number(&words) {
                best = Some((value, end));
            }
            let between = self.tokens.get(end).map(|t| &t.tok);
            let hyphen = between == Some(&Tok::Sym('-'));
            let conjunction = matches!(between, Some(Tok::Word(and)) if and == "and");
            if let Some(Tok::Word(after)) = self.tokens.get(end + 1).map(|t| &t.tok)
                && (hyphen || conjunction)
                && spoken::joins(word, hyphen, after)
            {
                end += 1;
            } else if conjunction {
                break;
            }
        }
        let (value, end) = best?;
        self.at = end;
        Some(value)
    }

    /// The argument of a command: a group, or one token.
    pub(super) fn argument(&mut self) -> Option<Expr> {
        // `\frac12` and `x_10`: a bare number gives its first digit only where another must follow.
        self.deeper(|p| match p.sym() {
            '-' => {
                p.at += 1;
                Some(p.atom()?.negated())
            }
            _ => p.atom(),
        })
    }
}

/// The positive or negative numbers of a set.
fn half(set: char, above: bool) -> Option<Expr> {
    let infinity = Expr::Const(Const::Infinity);
    Some(match (set, above) {
        ('R', true) => Expr::Tuple('(', vec![Expr::int(0), infinity], ')'),
        ('R', false) => Expr::Tuple('(', vec![infinity.negated(), Expr::int(0)], ')'),
        ('Z' | 'N', true) => Expr::Const(Const::Numbers('P')),
        _ => return None,
    })
}

fn as_tuple(expr: Expr) -> Expr {
    match expr {
        Expr::Tuple('(', items, ')') => Expr::Tuple('(', items, ')'),
        other => Expr::Tuple('(', vec![other], ')'),
    }
}

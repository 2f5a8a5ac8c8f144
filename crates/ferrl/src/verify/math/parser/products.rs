//! Sums and products, with and without signs of multiplication.

use super::super::{Expr, Func, Tok, Unit};
use super::Parser;
use super::lists::is_setlike;

impl Parser<'_> {
    pub(super) fn sum(&mut self) -> Option<Expr> {
        self.deeper(|p| {
            let mut terms = Vec::new();
            loop {
                let sign = p.sym();
                if matches!(sign, '+' | '-' | '±' | '∓') {
                    p.at += 1;
                } else if !terms.is_empty() {
                    break;
                }
                // `+-2` and `--2`.
                let flip = matches!(sign, '+' | '-') && p.take('-');
                if sign == '+' && matches!(p.sym(), '/') {
                    // `+/-2` is plus-minus.
                    if p.sym_at(1) == '-' {
                        p.at += 2;
                        terms.push(Expr::PlusMinus(false, p.product()?.boxed()));
                        continue;
                    }
                }
                let term = p.product()?;
                let term = if flip { term.negated() } else { term };
                // -7 mod 3 is the remainder of -7.
                let (sign, term) = match term {
                    Expr::Func(Func::Mod, mut args) if sign == '-' && terms.is_empty() && args.len() == 2 => {
                        args[0] = args[0].clone().negated();
                        ('+', Expr::Func(Func::Mod, args))
                    }
                    term => (sign, term),
                };
                terms.push(match sign {
                    '-' => term.negated(),
                    '±' => Expr::PlusMinus(false, term.boxed()),
                    '∓' => Expr::PlusMinus(true, term.boxed()),
                    _ => term,
                });
                if terms.len() > 3_000 {
                    return None;
                }
            }
            Some(if terms.len() == 1 { terms.pop()? } else { Expr::Add(terms) })
        })
    }

    pub(super) fn product(&mut self) -> Option<Expr> {
        let mut left = self.unary()?;
        let mut count = 0;
        loop {
            count += 1;
            if count > 1_000 {
                return None;
            }
            match self.tok(0) {
                Some(Tok::Sym('*')) => {
                    self.at += 1;
                    let right = self.unary()?;
                    left = times(left, right);
                }
                Some(Tok::Sym('/')) => {
                    self.at += 1;
                    self.chain()?;
                    let right = self.unary()?;
                    left = Expr::Div(left.boxed(), right.boxed());
                }
                Some(Tok::Cmd("mod" | "bmod")) => {
                    self.at += 1;
                    self.chain()?;
                    let right = self.unary()?;
                    left = Expr::Func(Func::Mod, vec![left, right]);
                }
                Some(Tok::Sym('%')) => {
                    self.at += 1;
                    self.chain()?;
                    left = Expr::Percent(left.boxed());
                }
                Some(Tok::Sym('€' | '£' | '¥' | '₹' | '¢' | '$')) if self.sym_at(1) == '\0' => {
                    let unit = Unit::named(&self.sym().to_string());
                    self.at += 1;
                    self.chain()?;
                    left = Expr::Unit(left.boxed(), unit);
                }
                Some(Tok::Word(word)) if self.to_here() || word == "in" && self.is_member() => {
                    return Some(left);
                }
                Some(Tok::Word(word)) if !matches!(word.as_str(), "and" | "or" | "is" | "are" | "equals") => {
                    self.chain()?;
                    left = self.quantity(left)?;
                }
                _ => match self.implicit(left)? {
                    (expr, true) => left = expr,
                    (expr, false) => return Some(expr),
                },
            }
        }
    }

    /// A factor without a sign of multiplication; false where none follows.
    pub(super) fn implicit(&mut self, left: Expr) -> Option<(Expr, bool)> {
        if let Some(mixed) = self.mixed(&left) {
            return Some((mixed, true));
        }
        if let (Expr::Degree(value), Some(Tok::Name(scale))) = (&left, self.tok(0))
            && matches!(scale.as_str(), "C" | "F")
        {
            let unit = Unit::named(if scale == "C" { "celsius" } else { "fahrenheit" });
            self.at += 1;
            return Some((Expr::Unit(value.clone(), unit), true));
        }
        if let Some(unit) = self.unit_fraction(&left) {
            return Some((Expr::Unit(left.boxed(), unit), true));
        }
        if let Some(unit) = self.unit_letter(&left) {
            return Some((Expr::Unit(left.boxed(), unit), true));
        }
        let starts = match self.tok(0) {
            // Two numbers in a row are no product.
            Some(Tok::Num(_)) => match left {
                Expr::Num(..) => return None,
                Expr::Unit(..) => {
                    let next = self.deeper(Self::product)?;
                    return Some((Expr::Add(vec![left, next]), true));
                }
                _ => true,
            },
            Some(Tok::Name(name)) => !(name == "U" && is_setlike(&left)),
            Some(Tok::Begin(_)) => true,
            Some(Tok::Sym('(')) => !matches!(self.tok(1), Some(Tok::Cmd("mod" | "bmod"))),
            Some(Tok::Sym('[')) if self.closes_outward() => false,
            Some(Tok::Sym('[' | '{' | '⌊' | '⌈' | '…' | '⦃')) => true,
            Some(Tok::Sym('|' | '‖')) => !self.context.bars && !self.context.builder,
            Some(Tok::Cmd(name)) => {
                !matches!(*name, "choose" | "over" | "pmod" | "not" | "perp" | "parallel" | "degree")
            }
            _ => false,
        };
        if !starts {
            return Some((left, false));
        }
        let right = self.power()?;
        Some((times(left, right), true))
    }

    /// Whether the bracket that stands here ends an interval that leaves out its end: `[0, 1[`.
    fn closes_outward(&self) -> bool {
        matches!(self.tok(1), None | Some(Tok::Sym('∪' | '∩' | '∖' | ',' | ';' | ')' | '⦄' | '=')))
    }

    /// `1 1/2` and `1\frac{1}{2}`: an integer and a proper fraction.
    pub(super) fn mixed(&mut self, left: &Expr) -> Option<Expr> {
        let Expr::Num(whole, None) = left else { return None };
        let previous = self.tokens.get(self.at.checked_sub(1)?)?;
        if !whole.is_integer() || !matches!(previous.tok, Tok::Num(_)) {
            return None;
        }
        let back = self.at;
        let fraction = match self.tok(0)? {
            Tok::Cmd("frac" | "dfrac" | "tfrac" | "cfrac") => self.power(),
            Tok::Num(_) if self.spaced() && self.sym_at(1) == '/' && !self.tokens.get(self.at + 1)?.space => {
                let top = self.atom()?;
                self.at += 1;
                self.atom().map(|bottom| Expr::Div(top.boxed(), bottom.boxed()))
            }
            _ => return None,
        };
        if let Some(Expr::Div(top, bottom)) = &fraction
            && let (Expr::Num(p, None), Expr::Num(q, None)) = (&**top, &**bottom)
            && p.is_integer()
            && q.is_integer()
            && p.sign() > 0
            && p.compare(q).is_lt()
        {
            return Some(Expr::Num(whole.add(&p.div(q)?), None));
        }
        self.at = back;
        None
    }

    pub(super) fn unary(&mut self) -> Option<Expr> {
        match self.sym() {
            '-' => {
                self.at += 1;
                Some(self.deeper(Self::unary)?.negated())
            }
            '+' => {
                self.at += 1;
                self.deeper(Self::unary)
            }
            _ => self.power(),
        }
    }
}

/// The product of two, flat.
pub fn times(left: Expr, right: Expr) -> Expr {
    match left {
        Expr::Mul(mut factors) => {
            factors.push(right);
            Expr::Mul(factors)
        }
        left => Expr::Mul(vec![left, right]),
    }
}

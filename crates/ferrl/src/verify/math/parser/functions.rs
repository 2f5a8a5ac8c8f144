//! Commands: fractions, roots, named functions, sums and integrals.

use super::super::ast::Big;
use super::super::lexer::number::Literal;
use super::super::{Const, Expr, Func, Rational, Rel, Tok};
use super::Parser;
use super::products::times;

fn named(name: &str) -> Option<Func> {
    use Func::*;
    Some(match name {
        "sin" => Sin,
        "cos" => Cos,
        "tan" | "tg" => Tan,
        "cot" | "ctg" => Cot,
        "sec" => Sec,
        "csc" | "cosec" => Csc,
        "arcsin" | "asin" => Asin,
        "arccos" | "acos" => Acos,
        "arctan" | "atan" | "arctg" => Atan,
        "arccot" => Acot,
        "arcsec" => Asec,
        "arccsc" => Acsc,
        "sinh" => Sinh,
        "cosh" => Cosh,
        "tanh" => Tanh,
        "coth" => Coth,
        "sech" => Sech,
        "csch" => Csch,
        "asinh" | "arsinh" | "arcsinh" => Asinh,
        "acosh" | "arcosh" | "arccosh" => Acosh,
        "atanh" | "artanh" | "arctanh" => Atanh,
        "ln" => Ln,
        "log" | "lg" => Log,
        "exp" => Exp,
        "cis" => Cis,
        "floor" => Floor,
        "ceil" => Ceil,
        "round" => Round,
        "gcd" => Gcd,
        "lcm" => Lcm,
        "min" => Min,
        "max" => Max,
        "sgn" | "sign" => Sign,
        "Re" => Re,
        "Im" => Im,
        "arg" | "Arg" => Arg,
        "conj" => Conj,
        "det" => Det,
        _ => return None,
    })
}

/// The function that undoes another, for `\sin^{-1}`.
fn inverse(func: Func) -> Option<Func> {
    Some(match func {
        Func::Sin => Func::Asin,
        Func::Cos => Func::Acos,
        Func::Tan => Func::Atan,
        Func::Cot => Func::Acot,
        Func::Sec => Func::Asec,
        Func::Csc => Func::Acsc,
        Func::Sinh => Func::Asinh,
        Func::Cosh => Func::Acosh,
        Func::Tanh => Func::Atanh,
        _ => return None,
    })
}

/// Whether `\f x/2` rather means `f(x/2)` where all is numbers.
fn takes_quotient(func: Func) -> bool {
    use Func::*;
    matches!(func, Sin | Cos | Tan | Cot | Sec | Csc | Cis)
}

/// What stands behind the `d` of `dy` or `d`: a derivative is no quotient.
fn differential(expr: &Expr) -> Option<Expr> {
    let is_d = |e: &Expr| matches!(e, Expr::Var(name) if name == "d");
    match expr {
        Expr::Mul(factors) if is_d(factors.first()?) => Some(Expr::Mul(factors[1..].to_vec())),
        expr => is_d(expr).then(|| Expr::int(1)),
    }
}

impl Parser<'_> {
    /// A command whose name has been read.
    pub(super) fn command(&mut self, name: &'static str) -> Option<Expr> {
        match name {
            "frac" | "dfrac" | "tfrac" | "cfrac" => {
                let (top, bottom) = self.two_arguments()?;
                if let (Some(of), Some(by)) = (differential(&top), differential(&bottom)) {
                    return Some(Expr::Call("derivative".into(), vec![of, by]));
                }
                Some(Expr::Div(top.boxed(), bottom.boxed()))
            }
            "binom" | "dbinom" | "tbinom" => {
                let (top, bottom) = self.two_arguments()?;
                Some(Expr::Binom(top.boxed(), bottom.boxed()))
            }
            "sqrt" => self.root(),
            "cbrt" => {
                let inner = self.argument()?;
                Some(Expr::Root(Expr::int(3).boxed(), inner.boxed()))
            }
            "pi" => Some(Expr::Const(Const::Pi)),
            "e" => Some(Expr::Const(Const::E)),
            "infty" | "inf" => Some(Expr::Const(Const::Infinity)),
            "emptyset" => Some(Expr::Const(Const::Empty)),
            "setR" | "setZ" | "setN" | "setQ" | "setC" => {
                let letter = name.chars().last()?;
                Some(Expr::Const(Const::Numbers(letter)))
            }
            "abs" => {
                let inner = self.argument()?;
                Some(Expr::Abs(inner.boxed()))
            }
            // 2∠30°
            "angle" if matches!(self.tok(0), Some(Tok::Num(_))) => {
                let turn = self.deeper(Self::power)?;
                Some(Expr::Func(Func::Cis, vec![turn]))
            }
            "overline" | "bar" | "overarc" | "widehat" | "angle" | "measuredangle" | "triangle" | "odot"
            | "nabla" | "partial" => {
                let inner = self.argument()?;
                // A segment goes by the names of its ends.
                if name == "overline" && matches!(&inner, Expr::Var(ends) if ends.len() > 1) {
                    return Some(inner);
                }
                if matches!(name, "overline" | "bar") && inner.any(&|e| matches!(e, Expr::Const(Const::I))) {
                    return Some(Expr::Func(Func::Conj, vec![inner]));
                }
                Some(Expr::Call(name.to_string(), vec![inner]))
            }
            "sum" => self.big(Big::Sum),
            "prod" => self.big(Big::Product),
            "int" | "iint" | "iiint" | "oint" => self.big(Big::Integral),
            "lim" | "sup" => self.big(Big::Limit),
            _ => self.function(named(name)?),
        }
    }

    /// Two groups, or tokens; a number of several digits gives one digit to each, as in `\frac12`.
    fn two_arguments(&mut self) -> Option<(Expr, Expr)> {
        let top = self.digit_or_argument()?;
        let bottom = self.digit_or_argument()?;
        Some((top, bottom))
    }

    fn digit_or_argument(&mut self) -> Option<Expr> {
        let Some(Tok::Num(Literal { raw: Some(raw), .. })) = self.tok(0) else { return self.argument() };
        let raw = raw.clone();
        let (first, rest) = raw.split_at_checked(1)?;
        if rest.is_empty() {
            return self.argument();
        }
        let digit = |text: &str| -> Option<Rational> {
            let value = super::super::arith::nat::Nat::parse(text.as_bytes(), 10)?;
            Rational::from_parts(false, value, 1.into())
        };
        let left = Literal { value: digit(rest)?, digits: None, raw: Some(rest.to_string()) };
        self.tokens.get_mut(self.at)?.tok = Tok::Num(left);
        Some(Expr::Num(digit(first)?, None))
    }

    fn root(&mut self) -> Option<Expr> {
        let mut index = Expr::int(2);
        if self.sym() == '[' {
            self.at += 1;
            index = self.sum()?;
            if !self.take(']') {
                return None;
            }
        }
        let inner = self.argument()?;
        // `\sqrt\frac12` is read by `argument`; `sqrt(x)` may be a call with one argument.
        Some(Expr::Root(index.boxed(), inner.boxed()))
    }

    /// A function with its exponent, base and argument.
    fn function(&mut self, func: Func) -> Option<Expr> {
        let (mut func, mut exponent, mut base) = (func, None, None);
        for _ in 0..2 {
            if self.take('^') {
                let power = self.exponent()?;
                match inverse(func) {
                    Some(arc) if matches!(&power, Expr::Num(n, _) if n.to_i64() == Some(-1)) => func = arc,
                    _ => exponent = Some(power),
                }
            }
            if matches!(func, Func::Log | Func::Ln | Func::Max | Func::Min) && self.take('_') {
                base = Some(self.argument()?);
            }
        }
        let mut args = self.arguments(func)?;
        if func == Func::Log {
            let base = match (base, args.len()) {
                (Some(base), 1) => base,
                // log(x, b), as computer algebra writes it.
                (None, 2) => args.pop()?,
                (None, 1) => Expr::int(10),
                _ => return None,
            };
            args.insert(0, base);
        }
        let value = Expr::Func(func, args);
        Some(match exponent {
            Some(exponent) => Expr::Pow(value.boxed(), exponent.boxed()),
            None => value,
        })
    }

    fn arguments(&mut self, func: Func) -> Option<Vec<Expr>> {
        match self.sym() {
            '(' | '[' => {
                let open = self.sym();
                return Some(match self.bracketed(open)? {
                    Expr::Tuple('(', items, ')') => items,
                    other => vec![other],
                });
            }
            '{' | '⦃' => {
                return Some(match self.argument()? {
                    Expr::Set(items) => items,
                    other => vec![other],
                });
            }
            '-' => {
                self.at += 1;
                return Some(vec![self.power()?.negated()]);
            }
            _ => {}
        }
        // Without brackets: factors up to the next function, sign or bracket that closes.
        let mut inner = self.power()?;
        loop {
            let next = match self.tok(0) {
                Some(Tok::Num(_) | Tok::Name(_)) => true,
                Some(Tok::Cmd(name)) => matches!(*name, "pi" | "frac" | "dfrac" | "tfrac" | "sqrt" | "e"),
                Some(Tok::Sym('(')) => true,
                Some(Tok::Sym('/')) => {
                    let numbers = !inner.any(&|e| matches!(e, Expr::Var(_) | Expr::Call(..)));
                    if !(numbers && takes_quotient(func)) {
                        break;
                    }
                    self.at += 1;
                    self.chain()?;
                    let bottom = self.power()?;
                    inner = Expr::Div(inner.boxed(), bottom.boxed());
                    continue;
                }
                Some(Tok::Sym('*')) => {
                    let numbers = !inner.any(&|e| matches!(e, Expr::Var(_) | Expr::Call(..)));
                    let constant = matches!(self.tok(1), Some(Tok::Cmd("pi" | "frac")));
                    if !(numbers && constant && takes_quotient(func)) {
                        break;
                    }
                    self.at += 1;
                    true
                }
                _ => false,
            };
            if !next {
                break;
            }
            let factor = self.power()?;
            inner = times(inner, factor);
        }
        Some(vec![inner])
    }

    /// A sum, product, integral or limit with its bounds.
    fn big(&mut self, kind: Big) -> Option<Expr> {
        let (mut low, mut high, mut variable) = (None, None, String::new());
        for _ in 0..2 {
            if self.take('_') {
                low = match self.argument()? {
                    Expr::Chain(name, mut rest) if rest.len() == 1 => {
                        if let (Expr::Var(name), Some((Rel::Eq | Rel::To, _))) = (&*name, rest.first()) {
                            variable = name.clone();
                        }
                        if let Expr::Const(Const::I) = *name {
                            variable = "i".into();
                        }
                        rest.pop().map(|(_, value)| value)
                    }
                    other => Some(other),
                };
            }
            if self.take('^') {
                high = Some(self.exponent()?);
            }
        }
        let body = self.product()?;
        let body = if variable == "i" { bound_i(&body) } else { body };
        Some(Expr::Big(kind, variable, low.map(Expr::boxed), high.map(Expr::boxed), body.boxed()))
    }
}

/// The letter i where it is an index and not the imaginary unit.
fn bound_i(expr: &Expr) -> Expr {
    match expr {
        Expr::Const(Const::I) => Expr::Var("i".into()),
        other => other.map(&mut bound_i),
    }
}

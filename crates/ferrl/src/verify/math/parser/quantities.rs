//! Numbers with units and other words behind them.

use super::super::language::{spoken, units};
use super::super::{Expr, Tok, Unit};
use super::Parser;
use super::products::times;

impl Parser<'_> {
    /// A letter that is a unit where a space parts it from the number before it and nothing but a power follows.
    pub(super) fn unit_letter(&mut self, left: &Expr) -> Option<Unit> {
        let Some(Tok::Name(name)) = self.tok(0) else { return None };
        let letter = name.chars().next()?;
        let ohm = name == "Omega";
        let fits = name.len() == 1 && "msghLlNJWVAK".contains(letter) && self.spaced() || ohm;
        if !fits || left.any(&|e| matches!(e, Expr::Var(_) | Expr::Call(..))) {
            return None;
        }
        let mut unit = Unit::named(name);
        let mut used = 1;
        if self.sym_at(1) == '^'
            && let Some(Tok::Num(power)) = self.tok(2)
            && let Some(power @ 2..=3) = power.value.to_i64()
        {
            unit = Unit::none().times(&unit, power as i8);
            used = 3;
        }
        if self.sym_at(used) == '/'
            && let Some(Tok::Name(below)) = self.tok(used + 1)
            && matches!(below.as_str(), "s" | "h" | "m" | "L" | "g")
        {
            let (mut power, mut more) = (1, 2);
            if self.sym_at(used + 2) == '^'
                && let Some(Tok::Num(n)) = self.tok(used + 3)
                && let Some(n @ 2..=3) = n.value.to_i64()
            {
                (power, more) = (n as i8, 4);
            }
            unit = unit.times(&Unit::named(below), -power);
            used += more;
        }
        // m s^{-2}
        while let Some(Tok::Name(name)) = self.tok(used)
            && units::is_known(name)
            && let Some((power, more)) = self.negative_power(used + 1)
        {
            unit = unit.times(&Unit::named(name), power);
            used += 1 + more;
        }
        // 2 m 50 cm
        let more = matches!(self.tok(used), Some(Tok::Num(_)))
            && matches!(self.tok(used + 1), Some(Tok::Word(unit)) if units::is_known(unit));
        let ends =
            more || matches!(self.tok(used), None | Some(Tok::Sym(',' | ';' | ')')) | Some(Tok::Word(_)));
        if !ends {
            return None;
        }
        self.at += used;
        unit.letter = (!ohm).then_some(letter);
        Some(unit)
    }

    /// The power `^{-2}` or `^-2` that many tokens ahead, and how many it takes.
    fn negative_power(&self, at: usize) -> Option<(i8, usize)> {
        let braced = usize::from(self.sym_at(at + 1) == '{');
        let Some(Tok::Num(power)) = self.tok(at + 2 + braced) else { return None };
        let power = power.value.to_i64().filter(|power| (1..=3).contains(power))?;
        let closed = braced == 0 || self.sym_at(at + 4) == '}';
        let found = self.sym_at(at) == '^' && self.sym_at(at + 1 + braced) == '-' && closed;
        found.then_some((-power as i8, 3 + 2 * braced))
    }

    /// A fraction of units behind a number: `12 \frac{m}{s}`.
    pub(super) fn unit_fraction(&mut self, left: &Expr) -> Option<Unit> {
        if !matches!(self.tok(0), Some(Tok::Cmd("frac" | "dfrac" | "tfrac")))
            || left.any(&|e| matches!(e, Expr::Var(_) | Expr::Call(..)))
        {
            return None;
        }
        let mut at = 1;
        let mut unit = Unit::none();
        for sign in [1i8, -1] {
            let (Some(Tok::Name(name) | Tok::Word(name)), '{') = (self.tok(at + 1), self.sym_at(at)) else {
                return None;
            };
            let (mut power, mut used) = (1i8, 2);
            if self.sym_at(at + 2) == '^'
                && let Some(Tok::Num(n)) = self.tok(at + 3)
                && let Some(n @ 2..=3) = n.value.to_i64()
            {
                (power, used) = (n as i8, 4);
            }
            if !units::is_known(name) || self.sym_at(at + used) != '}' {
                return None;
            }
            unit = unit.times(&Unit::named(name), sign * power);
            at += used + 1;
        }
        if !matches!(self.tok(at), None | Some(Tok::Sym(',' | ';' | ')'))) {
            return None;
        }
        self.at += at;
        Some(unit)
    }

    /// The unit, or other words, behind a number.
    pub(super) fn quantity(&mut self, left: Expr) -> Option<Expr> {
        let mut unit = Unit::none();
        let (mut prefix, mut sign) = (1i8, 1i8);
        let mut value = left;
        while let Some(word) = self.unit_word(sign < 0) {
            let mut next = Unit::none();
            match word.as_str() {
                "and" | "or" | "is" | "are" | "equals" => break,
                "square" | "sq" => prefix = 2,
                "cubic" | "cu" => prefix = 3,
                "per" => sign = -1,
                // miles an hour
                "a" | "an" if !unit.is_none() => sign = -1,
                "hundred" | "thousand" | "million" | "billion" | "trillion" | "dozen" => {
                    let factor = spoken::word(&word)?;
                    value = times(value, Expr::int(factor));
                }
                _ => next = Unit::named(&word),
            }
            self.at += 1;
            let mut power = if next.is_none() { 1 } else { std::mem::replace(&mut prefix, 1) };
            if self.take('^') {
                let Expr::Num(n, _) = self.exponent()? else { return None };
                power = n.to_i64().and_then(|n| i8::try_from(n).ok())?;
            } else {
                match self.word() {
                    Some("squared") => power = 2,
                    Some("cubed") => power = 3,
                    _ => {}
                }
                self.at += usize::from(matches!(self.word(), Some("squared" | "cubed")));
            }
            unit = unit.times(&next, power.saturating_mul(sign));
            if matches!(self.sym(), '/' | '*') && self.unit_ahead() {
                sign = if self.sym() == '/' { -1 } else { sign };
                self.at += 1;
            }
        }
        Some(if unit.is_none() { value } else { Expr::Unit(value.boxed(), unit) })
    }

    /// A word, or behind a stroke the letter of a unit.
    pub(super) fn unit_word(&self, letters: bool) -> Option<String> {
        match self.tok(0)? {
            Tok::Word(word) => Some(word.clone()),
            Tok::Name(name) if letters && units::is_known(name) => Some(name.clone()),
            _ => None,
        }
    }

    /// Whether a unit follows the stroke that stands here.
    pub(super) fn unit_ahead(&self) -> bool {
        match self.tok(1) {
            Some(Tok::Word(_)) => true,
            Some(Tok::Name(name)) => units::is_known(name),
            _ => false,
        }
    }
}

/// Whether a word may stand before a value without a meaning of its own.
pub(super) fn is_lead(word: &str) -> bool {
    units::is_filler(word) && word != "a"
}

//! Whether two answers say the same.

use super::language::text;
use super::solutions::real_set;
use super::{
    Budget, Const, Expr, Func, Join, Unit, VariableNames, conventions, integers, pointwise, relations,
    scalar, shape,
};
use std::cell::Cell;
use std::collections::BTreeSet;

/// What counts as the same where opinions differ.
#[derive(Clone, Copy, Debug)]
pub struct CompareRules {
    /// Decimals are compared to six places, other constants to fifteen.
    pub rounded: bool,
    /// An interval may be answered by an interval only, while a condition may be answered by either.
    pub one_way: bool,
    /// A vector is no tuple, `y` is no `f(x)`.
    pub strict_kinds: bool,
    /// Lists are sets: repeated items count once, and a set may answer a tuple in its order.
    pub lists_are_sets: bool,
}

impl CompareRules {
    /// Mathematical equality.
    pub const EQUAL: CompareRules =
        CompareRules { rounded: false, one_way: false, strict_kinds: false, lists_are_sets: false };
}

/// Compares trees within a budget.
pub struct Compare<'a> {
    pub budget: &'a Budget,
    pub rules: CompareRules,
    /// How deep the comparison has gone.
    depth: Cell<usize>,
}

/// Deeper nesting of lists in lists is no answer.
const MOST_DEPTH: usize = 24;

impl<'a> Compare<'a> {
    pub fn new(rules: CompareRules, budget: &'a Budget) -> Self {
        Compare { budget, rules, depth: Cell::new(0) }
    }

    /// Whether two answers say the same.
    pub fn same(&self, gold: &Expr, answer: &Expr) -> bool {
        if self.budget.spend(4).is_err() || self.depth.get() >= MOST_DEPTH {
            return false;
        }
        self.depth.set(self.depth.get() + 1);
        let same = self.same_here(gold, answer);
        self.depth.set(self.depth.get() - 1);
        same
    }

    fn same_here(&self, gold: &Expr, answer: &Expr) -> bool {
        let tidy = |e: &Expr| {
            let tidy = shape::tidy(e);
            integers::listed(&tidy, self.budget).unwrap_or(tidy)
        };
        let (gold, answer) = (&tidy(gold), &tidy(answer));
        let (gold, answer) = &conventions::alike(gold, answer);
        if let (Expr::Text(a), Expr::Text(b)) = (gold, answer) {
            return text::same_words(a, b);
        }
        if let Some(verdict) = relations::compare(self, gold, answer) {
            return verdict;
        }
        if !self.rules.strict_kinds && self.same_unit_vectors(gold, answer) {
            return true;
        }
        if shape::is_plural(gold) || shape::is_plural(answer) {
            return self.plural(gold, answer);
        }
        if shape::is_set(gold) || shape::is_set(answer) {
            return self.same_sets(gold, answer);
        }
        self.single(gold, answer)
    }

    /// Answers of one item each.
    fn single(&self, gold: &Expr, answer: &Expr) -> bool {
        match (gold, answer) {
            (Expr::Tuple(a, gold, b), Expr::Tuple(c, answer, d)) => {
                let square = |open: &char, close: &char| (*open == '[', *close == ']');
                let angle = *a == '<' || *c == '<';
                let brackets = gold.len() != 2 || angle || square(a, b) == square(c, d);
                brackets && self.in_order(gold, answer)
            }
            (Expr::Matrix(gold), Expr::Matrix(answer)) => self.same_matrices(gold, answer),
            (Expr::Matrix(rows), Expr::Tuple(_, items, _)) => self.same_matrix_and_tuple(rows, items, false),
            (Expr::Tuple(_, items, _), Expr::Matrix(rows)) => self.same_matrix_and_tuple(rows, items, true),
            // A class of residues may be answered by the number that stands for it.
            (Expr::Call(class, args), number @ Expr::Num(..))
            | (number @ Expr::Num(..), Expr::Call(class, args))
                if class == "pmod" =>
            {
                args.first().is_some_and(|residue| self.same(residue, number))
            }
            // 3 mod 8 answers x ≡ 3 (mod 8).
            (Expr::Call(class, args), Expr::Func(Func::Mod, other))
            | (Expr::Func(Func::Mod, other), Expr::Call(class, args))
                if class == "pmod" =>
            {
                scalar::same(
                    &Expr::Call(class.clone(), args.clone()),
                    &Expr::Call(class.clone(), other.clone()),
                    self.budget,
                )
            }
            // Two numbers one above the other may be a vector.
            (Expr::Binom(top, bottom), Expr::Matrix(rows))
            | (Expr::Matrix(rows), Expr::Binom(top, bottom)) => {
                matches!(&rows[..], [a, b] if self.in_order(std::slice::from_ref(top), a) && self.in_order(std::slice::from_ref(bottom), b))
            }
            (Expr::Ratio(gold), Expr::Ratio(answer)) => self.same_ratios(gold, answer),
            (Expr::Tuple(..) | Expr::Ratio(_), Expr::Text(_)) | (Expr::Text(_), _) | (_, Expr::Text(_)) => {
                false
            }
            _ => self.quantities(gold, answer),
        }
    }

    /// A matrix and a tuple of its rows, or a vector and the tuple of its entries; `swapped` where the tuple is the gold answer.
    fn same_matrix_and_tuple(&self, rows: &[Vec<Expr>], items: &[Expr], swapped: bool) -> bool {
        if items.iter().all(|item| matches!(item, Expr::Tuple(..))) {
            return rows.len() == items.len()
                && rows.iter().zip(items).all(|(row, item)| match item {
                    Expr::Tuple(_, cells, _) if swapped => self.in_order(cells, row),
                    Expr::Tuple(_, cells, _) => self.in_order(row, cells),
                    _ => false,
                });
        }
        let vector = rows.len() == 1 || rows.iter().all(|row| row.len() == 1);
        let entries: Vec<&Expr> = rows.iter().flatten().collect();
        vector
            && !self.rules.strict_kinds
            && entries.len() == items.len()
            && entries.iter().zip(items).all(|(a, b)| if swapped { self.same(b, a) } else { self.same(a, b) })
    }

    /// A vector of numbers and the same as a sum of unit vectors.
    fn same_unit_vectors(&self, gold: &Expr, answer: &Expr) -> bool {
        // A half-open interval is no vector.
        let vector = |e: &Expr| shape::vector(e).filter(|_| !shape::is_set(e));
        let sides = match (vector(gold), vector(answer)) {
            (Some(components), None) => conventions::as_unit_vectors(answer).map(|sum| (components, sum)),
            (None, Some(components)) => conventions::as_unit_vectors(gold).map(|sum| (components, sum)),
            _ => None,
        };
        sides.is_some_and(|(components, sum)| {
            conventions::unit_vectors(&components).is_some_and(|v| scalar::same(&v, &sum, self.budget))
        })
    }

    fn same_matrices(&self, gold: &[Vec<Expr>], answer: &[Vec<Expr>]) -> bool {
        gold.len() == answer.len() && gold.iter().zip(answer).all(|(a, b)| self.in_order(a, b))
    }

    /// Whether the items of two sequences are the same one by one.
    pub fn in_order(&self, gold: &[Expr], answer: &[Expr]) -> bool {
        gold.len() == answer.len() && gold.iter().zip(answer).all(|(a, b)| self.same(a, b))
    }

    /// Ratios are the same where one is a multiple of the other.
    fn same_ratios(&self, gold: &[Expr], answer: &[Expr]) -> bool {
        if gold.len() != answer.len() {
            return false;
        }
        if self.in_order(gold, answer) {
            return true;
        }
        let (Some(a), Some(b)) = (gold.first(), answer.first()) else { return false };
        let zero = |e: &Expr| scalar::same(e, &Expr::int(0), self.budget);
        if gold.iter().chain(answer).any(zero) {
            return false;
        }
        let times = |x: &Expr, y: &Expr| Expr::Mul(vec![x.clone(), y.clone()]);
        gold.iter().zip(answer).all(|(x, y)| scalar::same(&times(x, b), &times(y, a), self.budget))
    }

    /// Lists, sets and whatever stands for several values.
    fn plural(&self, gold: &Expr, answer: &Expr) -> bool {
        // Conditions on one variable: what counts is who satisfies them.
        if shape::is_condition(gold) || shape::is_condition(answer) {
            if self.rules.one_way && !matches!(gold, Expr::Chain(..) | Expr::List(..)) {
                return false;
            }
            return self.same_sets(gold, answer) || self.same_items(gold, answer);
        }
        if self.same_items(gold, answer) {
            return true;
        }
        // 2 hours and 30 minutes.
        match (shape::total(gold), shape::total(answer)) {
            (Some(gold), Some(answer)) => self.quantities(&gold, &answer),
            _ => false,
        }
    }

    fn same_items(&self, gold: &Expr, answer: &Expr) -> bool {
        // A set of sets is not its only member.
        let nested = |e: &Expr| matches!(e, Expr::Set(items) if items.iter().any(|i| matches!(i, Expr::Set(_)) || shape::is_set(i)));
        if nested(gold) != nested(answer) {
            return false;
        }
        let (mut left, mut right) = (shape::items(gold), shape::items(answer));
        let (named, renamed) = (shape::names(&left), shape::names(&right));
        if named.len() > 1 && renamed.len() > 1 {
            return left.len() == right.len()
                && left.iter().all(|(name, value)| {
                    right.iter().any(|(other, found)| name == other && self.same(value, found))
                });
        }
        let ordered =
            named.len() > 1 || renamed.len() > 1 || shape::is_tuple(gold) || shape::is_tuple(answer);
        if ordered {
            // An interval that is open at one end is no list of its ends.
            if shape::is_set(gold) || shape::is_set(answer) {
                return false;
            }
            // Nor is one that is closed at both, unless it is a list that someone put into brackets.
            if matches!((gold, answer), (Expr::Tuple('[', ends, ']'), Expr::List(..)) if ends.len() == 2) {
                return false;
            }
            let set = |e: &Expr| matches!(e, Expr::Set(_)) && !self.rules.lists_are_sets;
            let flat = |items: Vec<(Option<String>, Expr)>| -> Vec<Expr> {
                items.into_iter().map(|(_, value)| value).collect()
            };
            return !set(gold)
                && !set(answer)
                && shape::vector(gold).is_none_or(|v| v.len() > 1)
                && self.in_order(
                    &shape::vector(gold).unwrap_or_else(|| flat(left)),
                    &shape::vector(answer).unwrap_or_else(|| flat(right)),
                );
        }
        if named.len() == 1 && renamed.len() == 1 && named != renamed {
            return false;
        }
        // `9/4 or 2.25` names one value twice.
        let repeats = |e: &Expr| matches!(e, Expr::Set(_) | Expr::List(Join::Or, _));
        if self.rules.lists_are_sets || repeats(gold) || repeats(answer) {
            self.without_repeats(&mut left);
            self.without_repeats(&mut right);
        }
        self.matching(&left, &right)
    }

    fn without_repeats(&self, items: &mut Vec<(Option<String>, Expr)>) {
        let mut kept: Vec<(Option<String>, Expr)> = Vec::new();
        for item in items.drain(..) {
            if !kept.iter().any(|(_, known)| self.same(known, &item.1)) {
                kept.push(item);
            }
        }
        *items = kept;
    }

    /// Whether each item of one list has its own equal in the other.
    fn matching(&self, gold: &[(Option<String>, Expr)], answer: &[(Option<String>, Expr)]) -> bool {
        if gold.len() != answer.len() {
            return false;
        }
        let mut free: Vec<&Expr> = answer.iter().map(|(_, value)| value).collect();
        gold.iter().all(|(_, value)| match free.iter().position(|other| self.same(value, other)) {
            Some(at) => {
                free.remove(at);
                true
            }
            None => false,
        })
    }

    /// Sets of real numbers, or unions whose parts are the same.
    pub fn same_sets(&self, gold: &Expr, answer: &Expr) -> bool {
        // a > 0 says nothing about x; the variable of {x | x > 0} is nobody's.
        let named = |e: &Expr| match e {
            Expr::Chain(..) | Expr::List(..) => VariableNames::of(&[e]).all,
            _ => Default::default(),
        };
        let (mine, theirs) = (named(gold), named(answer));
        let bare = |names: &BTreeSet<String>| names.is_empty() || names.contains("·");
        if !bare(&mine) && !bare(&theirs) && mine != theirs {
            return false;
        }
        match (real_set(gold, self.budget), real_set(answer, self.budget)) {
            (Some(a), Some(b)) => return a.same(&b),
            (Some(set), None) => return pointwise::holds_on(&set, answer, self.budget).unwrap_or(false),
            (None, Some(set)) => return pointwise::holds_on(&set, gold, self.budget).unwrap_or(false),
            (None, None) => {}
        }
        let (left, right) = (shape::parts(gold), shape::parts(answer));
        if left.len() < 2 && right.len() < 2 {
            return match (gold, answer) {
                (Expr::Builder(a, p), Expr::Builder(b, q)) => self.same(a, b) && self.same(p, q),
                (Expr::Const(a), Expr::Const(b)) => a == b,
                (Expr::Tuple(..), Expr::Tuple(..)) => self.single(gold, answer),
                _ => false,
            };
        }
        let pairs = |parts: Vec<&Expr>| parts.into_iter().map(|e| (None, e.clone())).collect::<Vec<_>>();
        shape::same_operation(gold, answer) && self.matching(&pairs(left), &pairs(right))
    }

    /// Numbers with their units, percent and degree signs.
    fn quantities(&self, gold: &Expr, answer: &Expr) -> bool {
        let (g, a) = (shape::peel(gold), shape::peel(answer));
        let both = |x: &Expr, y: &Expr| {
            if self.rules.rounded {
                scalar::rounded(x, y, self.budget)
            } else {
                scalar::same(x, y, self.budget)
            }
        };
        if let Some((x, y)) = letters_again(gold, answer, &g, &a) {
            return both(&x, &y);
        }
        if g.unit.pounds(&a.unit) {
            return both(&g.core, &a.core);
        }
        // Degrees, percents and units are different things; a bare number may leave out any of them.
        // (A degree Fahrenheit is a unit.)
        let kinds = |p: &shape::Peeled| [p.degree && p.unit.is_none(), p.percent, !p.unit.is_none()];
        let apart = |x: [bool; 3], y: [bool; 3]| x != y && x.contains(&true) && y.contains(&true);
        if !g.unit.compatible(&a.unit) || apart(kinds(&g), kinds(&a)) {
            return false;
        }
        if infinite(&g.core) != 0 || infinite(&a.core) != 0 {
            return infinite(&g.core) == infinite(&a.core);
        }
        let scaled = |core: &Expr, unit: &Unit| {
            super::parser::times(Expr::Num(unit.factor.clone(), None), core.clone())
        };
        let differ = !g.unit.is_none() && !a.unit.is_none() && g.unit.factor != a.unit.factor;
        if differ {
            return both(&scaled(&g.core, &g.unit), &scaled(&a.core, &a.unit));
        }
        if both(&g.core, &a.core) {
            return true;
        }
        // 25% may be written as 0.25 or, where the question asks for percent, as 25.
        if g.percent != a.percent {
            let share = |e: &Expr| Expr::Div(e.clone().boxed(), Expr::int(100).boxed());
            return if g.percent { both(&share(&g.core), &a.core) } else { both(&g.core, &share(&a.core)) };
        }
        // 90 - x and 90° - x.
        if !g.degree && !a.degree && has_degrees(&g.core) != has_degrees(&a.core) {
            return both(&without_degrees(&g.core), &without_degrees(&a.core));
        }
        // 90 degrees are pi/2.
        if g.degree != a.degree {
            let turn = |e: &Expr| Expr::Degree(e.clone().boxed());
            let (angle, other) = if g.degree { (turn(&g.core), &a.core) } else { (turn(&a.core), &g.core) };
            let is_angle = other.any(&|e| match e {
                Expr::Const(Const::Pi) => true,
                Expr::Func(func, _) => matches!(func, Func::Asin | Func::Acos | Func::Atan | Func::Acot),
                _ => false,
            });
            return is_angle && both(&angle, other);
        }
        false
    }
}

/// Whether a sum has terms in degrees beside variables, outside of functions.
fn has_degrees(expr: &Expr) -> bool {
    let degree = |e: &Expr| matches!(e, Expr::Degree(_));
    let variable = |e: &Expr| matches!(e, Expr::Var(_));
    let other = |e: &Expr| matches!(e, Expr::Func(..) | Expr::Const(Const::Pi));
    matches!(expr, Expr::Add(_)) && expr.any(&degree) && expr.any(&variable) && !expr.any(&other)
}

fn without_degrees(expr: &Expr) -> Expr {
    match expr {
        Expr::Degree(inner) => (**inner).clone(),
        other => other.map(&mut without_degrees),
    }
}

/// Where a letter was read as a unit and the other side has it as a variable: both with the variable.
fn letters_again(gold: &Expr, answer: &Expr, g: &shape::Peeled, a: &shape::Peeled) -> Option<(Expr, Expr)> {
    let as_variable = |p: &shape::Peeled, other: &Expr| {
        let letter = p.unit.letter?.to_string();
        other.any(&|e| matches!(e, Expr::Var(name) if *name == letter)).then(|| {
            let power = p.unit.dims.iter().copied().find(|d| *d != 0).unwrap_or(1);
            let variable = Expr::Pow(Expr::Var(letter.clone()).boxed(), Expr::int(power.into()).boxed());
            super::parser::times(p.core.clone(), variable)
        })
    };
    if let Some(expr) = as_variable(g, answer) {
        return Some((expr, answer.clone()));
    }
    as_variable(a, gold).map(|expr| (gold.clone(), expr))
}

/// The sign of an infinity; zero for anything else.
fn infinite(expr: &Expr) -> i32 {
    match expr {
        Expr::Const(Const::Infinity) => 1,
        Expr::Neg(inner) => -infinite(inner),
        _ => 0,
    }
}

//! Dots written out: `1, 3, 5, \ldots, 99` as the list that it abbreviates, `1 + 2 + \cdots + n` as its sum.
//!
//! The terms before the dots say whether the steps are equal (arithmetic) or the quotients are (geometric). A list
//! without an end keeps its dots behind its first three terms, so that `2, 4, \ldots` and `2, 4, 6, 8, \ldots` agree.

use super::{Budget, Const, Expr, Rational, VariableNames, scalar};

/// Longer lists are left as they are written.
const MOST_ITEMS: usize = 10_000;
/// Longer lists have dots between their first three items and the last.
const MOST_WRITTEN: usize = 40;

/// How a progression goes on.
#[derive(Clone, Debug, PartialEq)]
enum Progression {
    /// A number is added.
    Plus(Rational),
    /// A number is multiplied.
    Times(Rational),
}

impl Progression {
    fn next(&self, value: &Rational) -> Rational {
        match self {
            Progression::Plus(step) => value.add(step),
            Progression::Times(ratio) => value.mul(ratio),
        }
    }
}

/// An answer with its dots written out, wherever what they leave out is clear.
pub fn written_out(expr: &Expr, budget: &Budget) -> Expr {
    if !expr.any(&is_dots) {
        return expr.clone();
    }
    let inner = expr.map(&mut |part| written_out(part, budget));
    let out = match &inner {
        Expr::List(join, items) => list(items, budget).map(|items| whole(items, |i| Expr::List(*join, i))),
        Expr::Set(items) => list(items, budget).map(|items| whole(items, Expr::Set)),
        Expr::Tuple(open, items, close) => list(items, budget).map(|items| Expr::Tuple(*open, items, *close)),
        Expr::Add(items) => sum(items, budget),
        _ => None,
    };
    out.unwrap_or(inner)
}

fn is_dots(expr: &Expr) -> bool {
    matches!(expr, Expr::Var(name) if name == "…")
}

fn dots() -> Expr {
    Expr::Var("…".into())
}

/// All integers where nothing but the set of them is listed.
fn whole(items: Vec<Expr>, list: impl FnOnce(Vec<Expr>) -> Expr) -> Expr {
    match &items[..] {
        [only @ Expr::Const(Const::Numbers(_))] => only.clone(),
        _ => list(items),
    }
}

/// The items of a progression, with dots in place of most of them where they are many.
pub fn short(mut items: Vec<Expr>) -> Vec<Expr> {
    if items.len() > MOST_WRITTEN {
        items.splice(3..items.len() - 1, [dots()]);
    }
    items
}

fn value(expr: &Expr, budget: &Budget) -> Option<Rational> {
    let names = VariableNames::of(&[expr]);
    if !names.all.is_empty() {
        return None;
    }
    names.at(0, budget).num(expr).ok()?.real().ok()?.rational().cloned()
}

/// How given terms go on; one alone goes on by 1 where `counts` says so.
fn step(terms: &[Rational], counts: bool) -> Option<Progression> {
    let [first, second, ..] = terms else {
        return counts.then_some(Progression::Plus(Rational::ONE));
    };
    let follows = |step: &Progression| terms.windows(2).all(|w| step.next(&w[0]) == w[1]);
    let plus = Progression::Plus(second.sub(first));
    if follows(&plus) {
        return (first != second).then_some(plus);
    }
    let times = Progression::Times(second.div(first)?);
    (terms.len() > 2 && follows(&times)).then_some(times)
}

/// The items of a list with dots.
fn list(items: &[Expr], budget: &Budget) -> Option<Vec<Expr>> {
    let at = items.iter().position(is_dots)?;
    let (before, after) = (&items[..at], &items[at + 1..]);
    if before.is_empty() {
        // ..., -1, 0, 1, ...
        let (Some(last), inner) = (after.last(), &after[..after.len().saturating_sub(1)]) else {
            return None;
        };
        let inner: Vec<Rational> = inner.iter().map(|e| value(e, budget)).collect::<Option<_>>()?;
        let integers = inner.len() > 1 && inner.iter().all(Rational::is_integer);
        let all = is_dots(last) && integers && step(&inner, false)? == Progression::Plus(Rational::ONE);
        return all.then(|| vec![Expr::Const(Const::Numbers('Z'))]);
    }
    // n = 1, 2, ..., 9
    let (name, first) = match &before[0] {
        Expr::Chain(name, rest) => match &rest[..] {
            [(rel, first)] => (Some((name.clone(), *rel)), first),
            _ => return None,
        },
        first => (None, first),
    };
    let known: Vec<Rational> =
        std::iter::once(first).chain(&before[1..]).map(|e| value(e, budget)).collect::<Option<_>>()?;
    let ends: Vec<Rational> = after.iter().map(|e| value(e, budget)).collect::<Option<_>>()?;
    let counts = known[0].is_integer() && ends.iter().all(Rational::is_integer) && !ends.is_empty();
    let step = step(&known, counts)?;
    let mut out = vec![known[0].clone()];
    while out.last() != ends.last() {
        if out.len() > MOST_ITEMS || ends.is_empty() && out.len() == 3 || budget.spend(2).is_err() {
            break;
        }
        out.push(step.next(out.last()?));
    }
    let continues = out.ends_with(&ends) && out.starts_with(&known);
    if !(ends.is_empty() || continues) {
        return None;
    }
    let mut items = short(out.iter().map(|v| Expr::Num(v.clone(), None)).collect());
    items.extend(ends.is_empty().then(dots));
    if let Some((name, rel)) = name {
        items[0] = Expr::Chain(name, vec![(rel, items[0].clone())]);
    }
    Some(items)
}

/// The closed form of a sum with dots: the mean of its ends for equal steps, `(last r - first) / (r - 1)` for equal
/// quotients, `first / (1 - r)` where it has no end. Terms may have variables.
fn sum(items: &[Expr], budget: &Budget) -> Option<Expr> {
    // The sign before the dots is that of the term they begin with.
    let at = items.iter().position(|e| is_dots(e) || matches!(e, Expr::Neg(inner) if is_dots(inner)))?;
    let (known, after) = (&items[..at], &items[at + 1..]);
    let [first, second, ..] = known else { return None };
    let plus = |a: &Expr, b: &Expr| Expr::Add(vec![a.clone(), b.clone()]);
    let less = |a: &Expr, b: &Expr| Expr::Add(vec![a.clone(), b.clone().negated()]);
    let times = |a: &Expr, b: &Expr| Expr::Mul(vec![a.clone(), b.clone()]);
    let over = |a: Expr, b: Expr| Expr::Div(a.boxed(), b.boxed());
    let same = |a: &Expr, b: &Expr| scalar::same(a, b, budget);
    let step = less(second, first);
    if known.windows(3).all(|w| same(&plus(&w[0], &w[2]), &plus(&w[1], &w[1]))) {
        let [last] = after else { return None };
        let count = plus(&over(less(last, first), step), &Expr::int(1));
        let whole = value(&count, budget).is_none_or(|n| n.is_integer() && n.sign() > 0);
        return whole.then(|| over(times(&count, &plus(first, last)), Expr::int(2)));
    }
    if !known.windows(3).all(|w| same(&times(&w[0], &w[2]), &times(&w[1], &w[1]))) {
        return None;
    }
    match after {
        [last] => Some(over(less(&times(last, second), &times(first, first)), step)),
        [] => {
            let ratio = value(&over(second.clone(), first.clone()), budget)?;
            let small = ratio.mul(&ratio).compare(&Rational::ONE).is_lt();
            small.then(|| over(times(first, first), step.negated()))
        }
        _ => None,
    }
}

//! Integers that satisfy a condition, as the list of them: `1 \le n \le 3, n \in \mathbb{Z}` is `{1, 2, 3}`.

use super::solutions::real_set;
use super::{Budget, Const, Expr, Join, Rational, Real, Rel, ellipsis};

/// Longer lists are left as conditions.
const MOST_MEMBERS: i64 = 5_000;

/// The integers of a bounded condition on a variable that is said to be one; none where it is no such condition.
pub fn listed(expr: &Expr, budget: &Budget) -> Option<Expr> {
    let conditions: Vec<&Expr> = match expr {
        Expr::Builder(what, condition) => {
            let mut all = parts(condition);
            all.extend(matches!(**what, Expr::Chain(..)).then_some(&**what));
            all
        }
        Expr::List(Join::Comma | Join::And | Join::Semicolon, _) => parts(expr),
        _ => return None,
    };
    let at = conditions.iter().position(|condition| membership(condition).is_some())?;
    let (name, natural) = membership(conditions[at])?;
    let mut rest: Vec<Expr> = conditions.iter().map(|&condition| condition.clone()).collect();
    rest.remove(at);
    // A value with a parameter, as `x = k\pi, k \in \mathbb{Z}`, is no condition on the parameter.
    if rest.is_empty() || !rest.iter().all(|e| matches!(e, Expr::Chain(..)) && e.mentions(name)) {
        return None;
    }
    let set = match rest.len() {
        1 => real_set(&rest[0], budget)?,
        _ => real_set(&Expr::List(Join::And, rest), budget)?,
    };
    let ends = set.ends();
    let (low, high) = (ends.first()?, ends.last()?);
    let (low, high) = (integer(&low.floor().ok()?)?, integer(&high.floor().ok()?)?);
    if high.checked_sub(low)? > MOST_MEMBERS || !bounded(&set)? {
        return None;
    }
    let mut out = Vec::new();
    for n in low..=high {
        budget.spend(4).ok()?;
        if set.contains(&n.into())? {
            // Whether 0 is a natural number is a matter of taste.
            (!natural || n != 0).then_some(())?;
            out.extend((!natural || n > 0).then(|| Expr::int(n)));
        }
    }
    // Only integers in a row are a progression.
    let whole = out.len() as i64 == high - low + 1;
    Some(Expr::Set(if whole { ellipsis::short(out) } else { out }))
}

fn parts(condition: &Expr) -> Vec<&Expr> {
    match condition {
        Expr::List(Join::Or, _) => vec![condition],
        Expr::List(_, items) => items.iter().collect(),
        single => vec![single],
    }
}

/// The variable of `n \in \mathbb{Z}`, and whether it is a natural number.
fn membership(condition: &Expr) -> Option<(&str, bool)> {
    let Expr::Chain(name, rest) = condition else { return None };
    match (&**name, &rest[..]) {
        (Expr::Var(name), [(Rel::In, Expr::Const(Const::Numbers(kind @ ('Z' | 'N'))))]) => {
            Some((name, *kind == 'N'))
        }
        _ => None,
    }
}

fn integer(value: &Real) -> Option<i64> {
    value.rational().and_then(Rational::to_i64)
}

/// Whether a set has a least and a greatest end.
fn bounded(set: &super::sets::RealSet) -> Option<bool> {
    let far = Real::from(1i64 << 40);
    Some(!set.contains(&far)? && !set.contains(&far.neg())?)
}

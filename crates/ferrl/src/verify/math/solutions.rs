//! The real numbers that satisfy a condition: equations and inequalities in one variable, memberships, lists of them.
//!
//! Linear conditions are solved exactly, polynomial and rational ones by their roots, and those with an absolute
//! value on one side case by case. Whatever else there is has no set here; `pointwise` compares it with one.

use super::sets::{End, OPEN};
use super::{Budget, Const, Expr, Join, Num, Real, RealSet, Rel, SetOp, VariableNames, polynomial};
use std::cmp::Ordering;

/// The set that an expression describes; none where it describes none, or its ends are not constant.
pub fn real_set(expr: &Expr, budget: &Budget) -> Option<RealSet> {
    budget.spend(1).ok()?;
    match expr {
        Expr::Tuple(open @ ('(' | '['), items, close @ (')' | ']')) => {
            let [low, high] = &items[..] else { return None };
            let (low, high) =
                (end(low, *open == '[', false, budget)?, end(high, *close == ']', true, budget)?);
            // (0, 0) and (5, 2) are points.
            RealSet::interval(low, high).filter(|set| !set.is_empty())
        }
        Expr::Set(items) => items
            .iter()
            .try_fold(RealSet::empty(), |set, item| set.union(RealSet::point(constant(item, budget)?))),
        Expr::Const(Const::Empty) => Some(RealSet::empty()),
        Expr::Const(Const::Numbers('R')) => Some(RealSet::all()),
        Expr::SetOp(op, a, b) => {
            let (a, b) = (real_set(a, budget)?, real_set(b, budget)?);
            match op {
                SetOp::Union => a.union(b),
                SetOp::Intersection => a.intersection(b),
                SetOp::Difference => a.intersection(b.complement()),
            }
        }
        // All reals but some, with a minus sign.
        Expr::Add(items) => {
            let [whole @ Expr::Const(Const::Numbers('R')), Expr::Neg(out)] = &items[..] else { return None };
            real_set(whole, budget)?.intersection(real_set(out, budget)?.complement())
        }
        Expr::Builder(what, condition) => {
            let condition = real_set(condition, budget)?;
            match real_set(what, budget) {
                Some(within) => within.intersection(condition),
                None => Some(condition),
            }
        }
        Expr::Chain(first, rest) => chain(first, rest, budget),
        Expr::List(join, items) => {
            // Conditions on several variables are no set of numbers.
            if VariableNames::of(&[expr]).all.iter().filter(|name| *name != "·").count() > 1 {
                return None;
            }
            let conditions = items.iter().any(|item| matches!(item, Expr::Chain(..)));
            let mut sets = items.iter().map(|item| real_set(item, budget));
            let first = sets.next()??;
            sets.try_fold(first, |all, set| {
                let set = set?;
                let both = all.clone().intersection(set.clone())?;
                // A comma between conditions that exclude each other can only mean "or".
                let or = *join == Join::Or || !conditions || *join != Join::And && both.is_empty();
                if or { all.union(set) } else { Some(both) }
            })
        }
        _ => None,
    }
}

fn constant(expr: &Expr, budget: &Budget) -> Option<Real> {
    let names = VariableNames::of(&[expr]);
    if !names.all.is_empty() || expr.any(&|e| matches!(e, Expr::Text(_) | Expr::Call(..))) {
        return None;
    }
    names.at(0, budget).num(expr).ok()?.real().ok().cloned()
}

/// An end of an interval: a constant or the infinity of its side.
fn end(expr: &Expr, closed: bool, upper: bool, budget: &Budget) -> Option<End> {
    match expr {
        Expr::Const(Const::Infinity) => upper.then_some(OPEN),
        Expr::Neg(inner) if matches!(**inner, Expr::Const(Const::Infinity)) => (!upper).then_some(OPEN),
        _ => Some(End { value: Some(constant(expr, budget)?), closed }),
    }
}

/// The numbers that satisfy a chain of relations in one variable.
fn chain(first: &Expr, rest: &[(Rel, Expr)], budget: &Budget) -> Option<RealSet> {
    let mut left = first;
    let mut out = RealSet::all();
    for (rel, right) in rest {
        let set = match rel {
            Rel::In => real_set(right, budget)?,
            Rel::NotIn => real_set(right, budget)?.complement(),
            Rel::To | Rel::Approx | Rel::Other(_) => return None,
            Rel::Eq | Rel::Ne => {
                let mut sets =
                    super::shape::signs(right).into_iter().map(|side| solve(left, *rel, &side, budget));
                let first = sets.next()??;
                sets.try_fold(
                    first,
                    |all, set| if *rel == Rel::Eq { all.union(set?) } else { all.intersection(set?) },
                )?
            }
            _ => solve(left, *rel, right, budget)?,
        };
        out = out.intersection(set)?;
        left = right;
    }
    Some(out)
}

/// The numbers for which `left rel right` holds, where the difference is a rational function of one variable.
fn solve(left: &Expr, rel: Rel, right: &Expr, budget: &Budget) -> Option<RealSet> {
    // A bound at infinity says nothing.
    for (side, rel) in [(left, rel.flipped()), (right, rel)] {
        match side {
            Expr::Const(Const::Infinity) => return matches!(rel, Rel::Lt | Rel::Le).then(RealSet::all),
            Expr::Neg(e) if matches!(**e, Expr::Const(Const::Infinity)) => {
                return matches!(rel, Rel::Gt | Rel::Ge).then(RealSet::all);
            }
            _ => {}
        }
    }
    if let (Expr::Abs(inner), _) | (_, Expr::Abs(inner)) = (left, right) {
        let (rel, bound) = if matches!(left, Expr::Abs(_)) { (rel, right) } else { (rel.flipped(), left) };
        return absolute(inner, rel, bound, budget);
    }
    let names = VariableNames::of(&[left, right]);
    let mut all = names.all.iter();
    let (name, None) = (subject(left, right).or(all.next().cloned())?, all.next()) else { return None };
    let at = |x: i64| -> Option<Real> {
        let value = |e: &Expr| names.at(0, budget).with(&name, Num::from(x)).num(&stand_in(e, &name)).ok();
        value(left)?.sub(&value(right)?).ok()?.real().ok().cloned()
    };
    linear(&at, rel).or_else(|| polynomial::solve(left, rel, right, &names, budget))
}

/// The solutions where the difference of the sides is linear.
fn linear(at: &dyn Fn(i64) -> Option<Real>, rel: Rel) -> Option<RealSet> {
    let (zero, one) = (at(0)?, at(1)?);
    let slope = one.sub(&zero).ok()?;
    for x in [3i64, -7] {
        let expected = slope.mul(&x.into()).ok()?.add(&zero).ok()?;
        if at(x)?.compare(&expected) != Some(Ordering::Equal) {
            return None;
        }
    }
    let root = zero.neg().div(&slope).ok()?;
    RealSet::ray(if slope.sign() < 0 { rel.flipped() } else { rel }, root)
}

/// The name of an unknown call such as `f(x)` that stands alone on a side.
fn subject(left: &Expr, right: &Expr) -> Option<String> {
    [left, right].into_iter().find_map(|e| match e {
        Expr::Call(name, _) => Some(format!("{name}()")),
        _ => None,
    })
}

fn stand_in(expr: &Expr, name: &str) -> Expr {
    match expr {
        Expr::Call(..) if name.ends_with("()") => Expr::Var(name.to_string()),
        other => other.clone(),
    }
}

/// `|inner| rel bound` as two relations.
fn absolute(inner: &Expr, rel: Rel, bound: &Expr, budget: &Budget) -> Option<RealSet> {
    let above = solve(inner, rel, bound, budget)?;
    let below = solve(inner, rel.flipped(), &bound.clone().negated(), budget)?;
    match rel {
        Rel::Lt | Rel::Le => above.intersection(below),
        Rel::Gt | Rel::Ge | Rel::Eq => above.union(below),
        Rel::Ne => above.intersection(below),
        _ => None,
    }
}

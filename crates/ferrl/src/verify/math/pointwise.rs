//! A condition that nothing solves (`\ln x > 1`, `|x - 1| + |x + 2| < 5`) against a set of numbers: it holds at the
//! members and nowhere else.
//!
//! The condition is tried at the ends of the set, close to either side of them, between them, and at points spread
//! over the line; one that differs from the set at none of them is taken for it.

use super::solutions::real_set;
use super::{Budget, Expr, Join, Num, Rational, Real, RealSet, Rel, Stop, VariableNames};
use std::cmp::Ordering;

/// Thousandths at which every condition is tried.
const GRID: [i64; 22] = [
    -1_003_007, -97_301, -31_013, -12_107, -7_219, -4_391, -2_777, -1_913, -1_129, -613, -217, 109, 389, 719,
    1_327, 2_221, 3_463, 5_639, 9_103, 20_411, 61_703, 1_009_001,
];

/// Whether a condition on one variable holds exactly for the members of a set; none where it cannot be told.
pub fn holds_on(set: &RealSet, condition: &Expr, budget: &Budget) -> Option<bool> {
    let names = VariableNames::of(&[condition]);
    let mut all = names.all.iter();
    let (Some(name), None) = (all.next(), all.next()) else { return None };
    let mut met = false;
    for point in points(set)? {
        let here = truth(condition, name, &point, budget).ok()?;
        met |= here;
        if here != set.contains(&point)? {
            return Some(false);
        }
    }
    // A condition that held nowhere was perhaps never defined.
    Some(met)
}

/// Where a condition is tried.
fn points(set: &RealSet) -> Option<Vec<Real>> {
    let beside = Rational::new(1, 4_096)?;
    let mut out: Vec<Real> = Vec::new();
    let ends = set.ends();
    for (k, end) in ends.iter().enumerate() {
        let near = Real::from(beside.clone());
        out.extend([end.clone(), end.sub(&near).ok()?, end.add(&near).ok()?]);
        if let Some(next) = ends.get(k + 1) {
            out.push(end.add(next).ok()?.div(&2.into()).ok()?);
        }
    }
    for thousandths in GRID {
        out.push(Rational::new(thousandths.into(), 1_000)?.into());
    }
    Some(out)
}

/// Whether a condition holds where its variable has a value; one without a value there does not.
fn truth(condition: &Expr, name: &str, at: &Real, budget: &Budget) -> Result<bool, Stop> {
    match condition {
        Expr::Chain(first, rest) => {
            let mut left = &**first;
            for (rel, right) in rest {
                if !related(left, *rel, right, (name, at), budget)? {
                    return Ok(false);
                }
                left = right;
            }
            Ok(true)
        }
        Expr::List(Join::Or, items) => any(items, name, at, budget),
        Expr::List(_, items) => {
            for item in items {
                if !truth(item, name, at, budget)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        _ => Err(Stop::Undefined),
    }
}

fn any(items: &[Expr], name: &str, at: &Real, budget: &Budget) -> Result<bool, Stop> {
    for item in items {
        if truth(item, name, at, budget)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn related(left: &Expr, rel: Rel, right: &Expr, at: (&str, &Real), budget: &Budget) -> Result<bool, Stop> {
    let member = |set: &Expr, value: &Expr| -> Result<bool, Stop> {
        let set = real_set(set, budget).ok_or(Stop::Undefined)?;
        let Some(value) = value_at(value, at, budget)? else { return Ok(false) };
        set.contains(&value).ok_or(Stop::Undefined)
    };
    match rel {
        Rel::In => return member(right, left),
        Rel::NotIn => return member(right, left).map(|inside| !inside),
        Rel::To | Rel::Approx | Rel::Other(_) => return Err(Stop::Undefined),
        _ => {}
    }
    let (Some(a), Some(b)) = (value_at(left, at, budget)?, value_at(right, at, budget)?) else {
        return Ok(false);
    };
    let order = a.compare(&b).ok_or(Stop::Undefined)?;
    Ok(match rel {
        Rel::Eq => order == Ordering::Equal,
        Rel::Ne => order != Ordering::Equal,
        Rel::Lt => order == Ordering::Less,
        Rel::Le => order != Ordering::Greater,
        Rel::Gt => order == Ordering::Greater,
        _ => order != Ordering::Less,
    })
}

/// A side's value; none where it has none among the reals.
fn value_at(side: &Expr, (name, at): (&str, &Real), budget: &Budget) -> Result<Option<Real>, Stop> {
    let names = VariableNames::of(&[side]);
    let mut env = names.at(0, budget).with(name, Num::from(at.clone()));
    match env.num(side) {
        Ok(value) if !env.outside => Ok(value.real().ok().cloned()),
        Err(Stop::Budget) => Err(Stop::Budget),
        _ => Ok(None),
    }
}

//! Whether two expressions have the same value.

use super::eval::{POINTS, Value};
use super::form::form;
use super::lexer::number::Digits;
use super::parser::times;
use super::{Budget, Expr, Num, Rational, Real, Stop, VariableNames, names};
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Significant digits from which a decimal stands for the exact value that it rounds.
const EXACT_DIGITS: u32 = 10;

/// Whether two expressions have the same value, decimals taken as they stand.
pub fn identical(gold: &Expr, answer: &Expr, budget: &Budget) -> bool {
    let names = VariableNames::of(&[gold, answer]);
    if names.all.is_empty() {
        let value = |expr: &Expr| names.at(0, budget).num(expr).ok();
        return matches!((value(gold), value(answer)), (Some(a), Some(b)) if a.same(&b));
    }
    same(gold, answer, budget)
}

/// Whether two expressions have the same value to the precision of Math-Verify: six decimals where one is a
/// decimal, fifteen where neither is a plain number.
pub fn rounded(gold: &Expr, answer: &Expr, budget: &Budget) -> bool {
    let names = VariableNames::of(&[gold, answer]);
    let value = |expr: &Expr| names.at(0, budget).num(expr).ok();
    let (true, Some(a), Some(b)) = (names.all.is_empty(), value(gold), value(answer)) else {
        return same(gold, answer, budget);
    };
    let plain = |e: &Expr| matches!(e, Expr::Num(..));
    let decimal = |e: &Expr| matches!(e, Expr::Num(_, Some(_)));
    let Ok(off) = a.sub(&b).and_then(|off| off.abs()) else { return false };
    let within = |places: i64| {
        let unit = Rational::from(10).pow(-places).unwrap_or(Rational::ZERO);
        off.re.compare(&Real::from(unit)) == Some(Ordering::Less)
    };
    match (decimal(gold) || decimal(answer), plain(gold) || plain(answer)) {
        (true, _) => within(6),
        (_, true) => a.same(&b),
        _ => within(15),
    }
}

/// Whether two expressions have the same value wherever both have one.
pub fn same(gold: &Expr, answer: &Expr, budget: &Budget) -> bool {
    let (gold, answer) = (&letters(gold, answer), &letters(answer, gold));
    let names = VariableNames::of(&[gold, answer]);
    if names.all.is_empty() {
        return constants(gold, answer, &names, budget);
    }
    let wanted = if names.all.len() > 1 { 4 } else { 3 };
    let (mut agree, mut complex) = (0, 0);
    for point in 0..POINTS {
        match at_point(gold, answer, &names, point, budget) {
            Ok(Some(Agreement::Real)) => agree += 1,
            Ok(Some(Agreement::Complex)) => complex += 1,
            Ok(Some(Agreement::None)) | Err(Stop::Budget) => return false,
            Ok(None) | Err(Stop::Undefined) => {}
        }
        if agree >= wanted {
            return true;
        }
    }
    agree >= 2 || agree + complex >= 3
}

enum Agreement {
    Real,
    Complex,
    None,
}

fn at_point(
    gold: &Expr,
    answer: &Expr,
    names: &VariableNames,
    point: usize,
    budget: &Budget,
) -> Result<Option<Agreement>, Stop> {
    let (mut here, mut there) = (names.at(point, budget), names.at(point, budget));
    let (a, b) = (here.value(gold)?, there.value(answer)?);
    let outside = here.outside || there.outside;
    Ok(match (&a, &b) {
        (Value::Num(a), Value::Num(b)) if outside => a.same(b).then_some(Agreement::Complex),
        (Value::Num(a), Value::Num(b)) => numbers(a, b),
        (Value::Mat(m, a), Value::Mat(n, b)) => {
            let shape = m == n || *m == 1 && b.len() == *n || *n == 1 && a.len() == *m;
            if !shape || a.len() != b.len() {
                return Ok(Some(Agreement::None));
            }
            let mut out = Some(Agreement::Real);
            for (a, b) in a.iter().zip(b) {
                match numbers(a, b) {
                    Some(Agreement::None) => return Ok(Some(Agreement::None)),
                    Some(Agreement::Real) => {}
                    other => out = other,
                }
            }
            out
        }
        _ => Some(Agreement::None),
    })
}

/// None where one of the two lies outside the reals and the other does not, or where the precision does not suffice.
fn numbers(a: &Num, b: &Num) -> Option<Agreement> {
    match (a.is_real(), b.is_real()) {
        (true, true) if a.same(b) => Some(Agreement::Real),
        (true, true) if a.differs(b) => Some(Agreement::None),
        (false, false) if a.same(b) => Some(Agreement::Complex),
        // Roots of negative numbers may lie on different branches: no evidence.
        _ => None,
    }
}

fn constants(gold: &Expr, answer: &Expr, names: &VariableNames, budget: &Budget) -> bool {
    if let (Some(a), Some(b)) = (form(gold, budget), form(answer, budget))
        && a == b
    {
        return true;
    }
    let value = |expr: &Expr| names.at(0, budget).value(expr);
    match (value(gold), value(answer)) {
        (Ok(Value::Num(a)), Ok(Value::Num(b))) => {
            a.same(&b)
                || decimal(answer).is_some_and(|d| rounds(&a, gold, &d))
                || decimal(gold).is_some_and(|d| rounds(&b, answer, &d))
        }
        (Ok(Value::Mat(m, a)), Ok(Value::Mat(n, b))) => {
            let shape = m == n || m == 1 && b.len() == n || n == 1 && a.len() == m;
            shape && a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.same(b))
        }
        _ => false,
    }
}

/// A decimal literal, perhaps times a power of ten.
fn decimal(expr: &Expr) -> Option<(Rational, Digits)> {
    match expr {
        Expr::Num(value, Some(digits)) => Some((value.clone(), *digits)),
        Expr::Mul(factors) => {
            let [head, Expr::Pow(base, power)] = &factors[..] else { return None };
            let (Expr::Num(base, _), Expr::Num(power, _)) = (&**base, &**power) else { return None };
            let power = power.to_i64().filter(|n| n.abs() < 100)?;
            let (value, digits) = decimal(head).filter(|_| base.to_i64() == Some(10))?;
            let value = value.mul(&base.pow(power)?);
            Some((value, Digits { decimals: digits.decimals - power, ..digits }))
        }
        _ => None,
    }
}

/// Whether a long decimal is a value rounded or cut off at its last digit. A value that some decimal gives
/// exactly must be given exactly.
fn rounds(value: &Num, expr: &Expr, (written, digits): &(Rational, Digits)) -> bool {
    if digits.significant < EXACT_DIGITS || decimal(expr).is_some() || !value.is_real() {
        return false;
    }
    if value.re.rational().is_some_and(Rational::is_terminating) {
        return false;
    }
    let Some(unit) = Rational::from(10).pow(-digits.decimals) else { return false };
    let Ok(off) = value.re.sub(&Real::from(written.clone())) else { return false };
    off.abs().compare(&Real::from(unit)) == Some(Ordering::Less)
}

/// Names of several capitals as products where their letters occur alone in either expression.
fn letters(expr: &Expr, other: &Expr) -> Expr {
    let long = |e: &Expr| matches!(e, Expr::Var(name) if name.len() > 1 && name.bytes().all(|b| b.is_ascii_uppercase()));
    if !expr.any(&long) {
        return expr.clone();
    }
    let mut names = BTreeSet::new();
    names::variables(expr, &mut names);
    names::variables(other, &mut names);
    split(expr, &names)
}

fn split(expr: &Expr, names: &BTreeSet<String>) -> Expr {
    match expr {
        Expr::Var(name) if name.len() > 1 && name.bytes().all(|b| b.is_ascii_uppercase()) => {
            if !name.chars().any(|c| names.contains(&c.to_string())) {
                return expr.clone();
            }
            let factors = name.chars().map(|c| Expr::Var(c.to_string()));
            factors.reduce(times).unwrap_or_else(|| expr.clone())
        }
        other => other.map(&mut |part| split(part, names)),
    }
}

/// Whether `left = 0` and `right = 0` say the same: one is a constant times the other. With `signed`, the sign of
/// that constant: an inequality turns around where it is negative.
pub fn proportional(left: &Expr, right: &Expr, budget: &Budget) -> Option<i32> {
    let names = VariableNames::of(&[left, right]);
    if names.all.is_empty() {
        // Any two constants are proportional: f(2) = 5 and f(2) = 7 would be one equation.
        let value = |expr: &Expr| names.at(0, budget).num(expr).ok();
        return value(left)?.same(&value(right)?).then_some(1);
    }
    let mut first: Option<(Num, Num)> = None;
    let mut agree = 0;
    for point in 0..POINTS {
        let (a, b) = match (names.at(point, budget).num(left), names.at(point, budget).num(right)) {
            (Err(Stop::Budget), _) | (_, Err(Stop::Budget)) => return None,
            (Ok(a), Ok(b)) => (a, b),
            _ => continue,
        };
        match &first {
            None if a.maybe_zero() && b.maybe_zero() => {}
            None if a.maybe_zero() || b.maybe_zero() => return None,
            None => first = Some((a, b)),
            Some((a0, b0)) => {
                let (x, y) = (a.mul(b0).ok()?, b.mul(a0).ok()?);
                if x.differs(&y) {
                    return None;
                }
                agree += i32::from(x.same(&y));
            }
        }
    }
    let (a, b) = first?;
    let ratio = a.div(&b).ok()?;
    let sign = ratio.real().ok()?.sign();
    (agree >= 3 && sign != 0).then_some(sign)
}

/// The numerator of an expression whose fractions are brought together; the expression itself where that would
/// be long.
pub fn numerator(expr: &Expr) -> Expr {
    fn size(expr: &Expr) -> (usize, usize) {
        let (mut nodes, mut depth) = (1, 0);
        for (n, d) in expr.children().into_iter().map(size) {
            (nodes, depth) = (nodes + n, depth.max(d));
        }
        (nodes, depth + usize::from(matches!(expr, Expr::Div(..) | Expr::Pow(..))))
    }
    let (nodes, depth) = size(expr);
    if nodes > 200 || depth > 4 { expr.clone() } else { together(expr).0 }
}

/// Numerator and denominator of an expression, brought together over sums, products and powers.
fn together(expr: &Expr) -> (Expr, Expr) {
    let one = || Expr::int(1);
    match expr {
        Expr::Div(a, b) => {
            let ((an, ad), (bn, bd)) = (together(a), together(b));
            (product(an, bd), product(ad, bn))
        }
        Expr::Neg(a) => {
            let (n, d) = together(a);
            (n.negated(), d)
        }
        Expr::Mul(items) => items.iter().fold((one(), one()), |(n, d), item| {
            let (a, b) = together(item);
            (product(n, a), product(d, b))
        }),
        Expr::Add(items) => {
            let mut parts = items.iter().map(together);
            let Some(first) = parts.next() else { return (expr.clone(), one()) };
            parts.fold(first, |(n, d), (a, b)| {
                if is_one(&d) && is_one(&b) {
                    return (plus(n, a), d);
                }
                (plus(product(n, b.clone()), product(a, d.clone())), product(d, b))
            })
        }
        Expr::Pow(a, b) if matches!(&**b, Expr::Num(n, _) if n.is_integer() && n.sign() < 0) => {
            let Expr::Num(n, _) = &**b else { return (expr.clone(), one()) };
            let (top, bottom) = together(a);
            let power = |e: Expr| Expr::Pow(e.boxed(), Expr::Num(n.neg(), None).boxed());
            (power(bottom), power(top))
        }
        other => (other.clone(), one()),
    }
}

fn is_one(expr: &Expr) -> bool {
    matches!(expr, Expr::Num(n, _) if *n == Rational::ONE)
}

fn product(a: Expr, b: Expr) -> Expr {
    match (is_one(&a), is_one(&b)) {
        (true, _) => b,
        (_, true) => a,
        _ => Expr::Mul(vec![a, b]),
    }
}

fn plus(a: Expr, b: Expr) -> Expr {
    match a {
        Expr::Add(mut items) => {
            items.push(b);
            Expr::Add(items)
        }
        a => Expr::Add(vec![a, b]),
    }
}

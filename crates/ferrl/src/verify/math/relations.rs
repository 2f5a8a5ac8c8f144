//! Equations, inequalities and memberships.

use super::compare::Compare;
use super::solutions::real_set;
use super::{Expr, Rel, VariableNames, pointwise, scalar, shape};

/// The sides of a relation and how they are related.
type Sides<'a> = (&'a Expr, &'a [(Rel, Expr)]);

fn sides(expr: &Expr) -> Option<Sides<'_>> {
    match expr {
        Expr::Chain(first, rest) => Some((first, rest)),
        _ => None,
    }
}

/// Whether two answers say the same, where at least one is a relation; none where neither is.
pub fn compare(with: &Compare<'_>, gold: &Expr, answer: &Expr) -> Option<bool> {
    match (sides(gold), sides(answer)) {
        (None, None) => None,
        (Some(_), Some(_)) => Some(both(with, gold, answer)),
        (Some(relation), None) => Some(one(with, gold, relation, answer, true)),
        (None, Some(relation)) => Some(one(with, answer, relation, gold, false)),
    }
}

/// A relation against a bare value. `of_gold`: the relation is the expected answer.
fn one(with: &Compare<'_>, expr: &Expr, (left, rest): Sides<'_>, value: &Expr, of_gold: bool) -> bool {
    let same = |side: &Expr| if of_gold { with.same(side, value) } else { with.same(value, side) };
    match rest {
        [(Rel::Eq, right)] => {
            if shape::is_name(left) {
                return same(right);
            }
            if shape::is_name(right) && !matches!(right, Expr::Text(_)) {
                return same(left);
            }
            // x + y = 7 answers 7 where the question asks for x + y; 7 does not answer x + y = 7.
            // With 0 on its right it is an equation in its normal form.
            !of_gold && shape::is_combination(left) && !shape::is_zero(right) && same(right)
        }
        [(Rel::In, right)] => shape::is_name(left) && same(right),
        [(Rel::Other("equiv"), right)] => shape::is_name(left) && same(right),
        // x = 1, 2 is read as a list; a list of conditions against one condition.
        _ if with.rules.one_way && !of_gold => false,
        _ if matches!(value, Expr::List(..)) || shape::is_condition(expr) => with.same_sets(expr, value),
        _ => false,
    }
}

/// The name of a function's value rather than of a quantity: `f(x)`, `y`, or words.
fn names_result(expr: &Expr) -> bool {
    matches!(expr, Expr::Call(..) | Expr::Text(_)) || matches!(expr, Expr::Var(name) if name == "y")
}

fn both(with: &Compare<'_>, gold: &Expr, answer: &Expr) -> bool {
    let (Some((gl, g)), Some((al, a))) = (sides(gold), sides(answer)) else { return false };
    // Signs on either side: each of the equations that one stands for is one of the other's.
    let (golds, answers) = (shape::signs(gold), shape::signs(answer));
    if golds.len() > 1 && golds.len() == answers.len() {
        let found = |x: &Expr, list: &[Expr]| list.iter().any(|y| both(with, x, y));
        return golds.iter().all(|g| found(g, &answers)) && answers.iter().all(|a| found(a, &golds));
    }
    match (g, a) {
        ([(Rel::Eq, gr)], [(Rel::Eq, ar)]) => {
            if let Some((al, ar)) = with_argument_of(gl, al, ar) {
                return with.same(gl, &al) && with.same(gr, &ar);
            }
            if shape::is_name(gl) && shape::is_name(al) {
                let results = !with.rules.strict_kinds && names_result(gl) && names_result(al);
                let alike = same_name(with, gl, al) || results;
                let spoken = matches!(gl, Expr::Text(_)) || matches!(al, Expr::Text(_));
                if (alike || spoken) && with.same(gr, ar) {
                    return true;
                }
            }
            same_equation(with, (gl, gr), (al, ar))
        }
        ([(Rel::Other("equiv"), class)], [(Rel::Eq, value)])
        | ([(Rel::Eq, value)], [(Rel::Other("equiv"), class)]) => {
            same_name(with, gl, al) && is_class(with, class, value)
        }
        ([(Rel::In | Rel::Eq, gr)], [(Rel::In | Rel::Eq, ar)]) => {
            same_name(with, gl, al) && with.same(gr, ar)
        }
        ([(Rel::Other(p), gr)], [(Rel::Other(q), ar)]) => {
            let straight = with.same(gl, al) && with.same(gr, ar);
            p == q && (straight || *p != "subset" && with.same(gl, ar) && with.same(gr, al))
        }
        _ => conditions(with, gold, answer),
    }
}

/// Whether `5k + 2` runs through the residue class of 2 modulo 5.
fn is_class(with: &Compare<'_>, class: &Expr, value: &Expr) -> bool {
    let Expr::Call(name, args) = class else { return false };
    let names = VariableNames::of(&[value]).all;
    let (Some(parameter), 1, [rest, modulus]) = (names.first(), names.len(), &args[..]) else { return false };
    if name != "pmod" || !["k", "n", "m", "t", "l"].contains(&parameter.as_str()) {
        return false;
    }
    // The steps from one integer to the next are the modulus, up or down.
    let at = |k: i64| names_at(value, parameter, k);
    let step = |k: i64| difference(&at(k + 1), &at(k));
    let same = |a: &Expr, b: &Expr| scalar::same(a, b, with.budget);
    let up = [0, 1, 5].iter().all(|k| same(&step(*k), modulus));
    let down = [0, 1, 5].iter().all(|k| same(&step(*k), &modulus.clone().negated()));
    let residue = |e: &Expr| Expr::Call("pmod".into(), vec![e.clone(), modulus.clone()]);
    (up || down) && same(&residue(&at(0)), &residue(rest))
}

/// An expression with a number in a variable's place.
fn names_at(expr: &Expr, name: &str, value: i64) -> Expr {
    match expr {
        Expr::Var(found) if found == name => Expr::int(value),
        other => other.map(&mut |part| names_at(part, name, value)),
    }
}

/// `f(t) = t^2` with the argument of `f(x)`, where both define the same function.
fn with_argument_of(gold: &Expr, left: &Expr, right: &Expr) -> Option<(Expr, Expr)> {
    let (Expr::Call(f, x), Expr::Call(g, t)) = (gold, left) else { return None };
    let ([Expr::Var(x)], [Expr::Var(t)]) = (&x[..], &t[..]) else { return None };
    (f == g && x != t && !right.mentions(x)).then(|| (left.renamed(t, x), right.renamed(t, x)))
}

fn same_name(with: &Compare<'_>, a: &Expr, b: &Expr) -> bool {
    format!("{a:?}") == format!("{b:?}") || !shape::is_plural(a) && !shape::is_plural(b) && with.same(a, b)
}

fn difference(left: &Expr, right: &Expr) -> Expr {
    Expr::Add(vec![left.clone(), right.clone().negated()])
}

/// Whether one equation is a multiple of the other, denominators cleared.
fn same_equation(with: &Compare<'_>, gold: (&Expr, &Expr), answer: (&Expr, &Expr)) -> bool {
    let (f, g) = (difference(gold.0, gold.1), difference(answer.0, answer.1));
    scalar::proportional(&f, &g, with.budget).is_some()
        || scalar::proportional(&scalar::numerator(&f), &scalar::numerator(&g), with.budget).is_some()
}

/// Conditions: the same solutions where there is one variable, otherwise the same inequalities up to a factor.
fn conditions(with: &Compare<'_>, gold: &Expr, answer: &Expr) -> bool {
    let (p, q) = (VariableNames::of(&[gold]).all, VariableNames::of(&[answer]).all);
    let bare = |names: &std::collections::BTreeSet<String>| names.contains("·");
    if p != q && !bare(&p) && !bare(&q) {
        return false;
    }
    match (real_set(gold, with.budget), real_set(answer, with.budget)) {
        (Some(a), Some(b)) => return a.same(&b),
        (Some(set), None) => return pointwise::holds_on(&set, answer, with.budget).unwrap_or(false),
        (None, Some(set)) => return pointwise::holds_on(&set, gold, with.budget).unwrap_or(false),
        (None, None) => {}
    }
    let (left, mut right) = (constraints(gold), constraints(answer));
    if left.len() != right.len() || left.is_empty() {
        return false;
    }
    left.iter().all(|(f, rel)| {
        let found = right.iter().position(|(g, other)| {
            let sign = if rel == other { scalar::proportional(f, g, with.budget) } else { None };
            sign.is_some_and(|sign| sign > 0 || matches!(rel, Rel::Eq | Rel::Ne))
        });
        found.map(|at| right.remove(at)).is_some()
    })
}

/// A chain as conditions `f = 0`, `f != 0`, `f < 0`, `f <= 0`.
fn constraints(expr: &Expr) -> Vec<(Expr, Rel)> {
    let Some((first, rest)) = sides(expr) else { return Vec::new() };
    let mut left = first;
    let mut out = Vec::new();
    for (rel, right) in rest {
        out.push(match rel {
            Rel::Gt | Rel::Ge => (difference(right, left), rel.flipped()),
            _ => (difference(left, right), *rel),
        });
        left = right;
    }
    if out.iter().any(|(_, rel)| !matches!(rel, Rel::Eq | Rel::Ne | Rel::Lt | Rel::Le)) {
        return Vec::new();
    }
    out
}

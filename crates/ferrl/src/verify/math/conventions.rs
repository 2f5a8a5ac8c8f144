//! Letters by convention: the constant of integration, the imaginary unit of engineers, an integer parameter, unit
//! vectors. What is only a matter of spelling is spelt alike before two answers are compared.

use super::ast::{Const, Expr, Rel};

/// Two answers with the letters that mean the same by convention made equal.
pub fn alike(gold: &Expr, answer: &Expr) -> (Expr, Expr) {
    let (gold, answer) = (with_parameter(gold), with_parameter(answer));
    let answer = constant_like(&gold, &answer);
    let is_i = |e: &Expr| matches!(e, Expr::Const(Const::I));
    let j_only = |e: &Expr| e.mentions("j") && !e.mentions("k") && !e.any(&is_i);
    match (gold.any(&is_i), answer.any(&is_i)) {
        (true, false) if j_only(&answer) => (gold, with_i(&answer)),
        (false, true) if j_only(&gold) => (with_i(&gold), answer),
        _ => (gold, answer),
    }
}

/// The constant of integration in the case in which the expected answer has it.
fn constant_like(gold: &Expr, answer: &Expr) -> Expr {
    for (mine, theirs) in [("C", "c"), ("c", "C")] {
        let spelt = gold.mentions(mine) && !gold.mentions(theirs);
        if spelt && answer.mentions(theirs) && !answer.mentions(mine) {
            return answer.renamed(theirs, mine);
        }
    }
    answer.clone()
}

/// The letter j as the imaginary unit.
fn with_i(expr: &Expr) -> Expr {
    match expr {
        Expr::Var(name) if name == "j" => Expr::Const(Const::I),
        other => other.map(&mut with_i),
    }
}

/// `x = 2n\pi, n \in \mathbb{Z}` as `x = 2k\pi`: the parameter has one name, and what it ranges over goes without
/// saying.
fn with_parameter(expr: &Expr) -> Expr {
    let Expr::List(join, items) = expr else { return expr.clone() };
    let Some((condition, values)) = items.split_last().filter(|(_, values)| !values.is_empty()) else {
        return expr.clone();
    };
    let Some(name) = integer(condition).filter(|name| values.iter().all(|v| uses(v, name))) else {
        return expr.clone();
    };
    let values: Vec<Expr> = values.iter().map(|v| v.renamed(name, "k")).collect();
    match &values[..] {
        [one] => one.clone(),
        _ => Expr::List(*join, values),
    }
}

/// Whether a value depends on the parameter and on no other integer that may be meant by it.
fn uses(value: &Expr, name: &str) -> bool {
    value.mentions(name) && (name == "k" || !value.mentions("k"))
}

/// The variable of `n \in \mathbb{Z}`.
fn integer(condition: &Expr) -> Option<&str> {
    let Expr::Chain(name, rest) = condition else { return None };
    match (&**name, &rest[..]) {
        (Expr::Var(name), [(Rel::In, Expr::Const(Const::Numbers('Z')))]) => Some(name),
        (Expr::Var(name), [(Rel::In, Expr::Var(set))]) if set == "Z" => Some(name),
        _ => None,
    }
}

/// A vector of two or three components as a sum of unit vectors, for comparison with `2i - j + 3k`.
pub fn unit_vectors(components: &[Expr]) -> Option<Expr> {
    if !(2..=3).contains(&components.len()) {
        return None;
    }
    let terms = components.iter().zip(["i", "j", "k"]);
    Some(Expr::Add(terms.map(|(c, e)| Expr::Mul(vec![c.clone(), Expr::Var(e.into())])).collect()))
}

/// A sum of multiples of i, j and k, in which i is no imaginary unit; none where it has no j or k.
pub fn as_unit_vectors(expr: &Expr) -> Option<Expr> {
    fn letters(expr: &Expr) -> Expr {
        match expr {
            Expr::Const(Const::I) => Expr::Var("i".into()),
            other => other.map(&mut letters),
        }
    }
    let sum = matches!(expr, Expr::Add(_) | Expr::Mul(_) | Expr::Neg(_));
    (sum && (expr.mentions("j") || expr.mentions("k"))).then(|| letters(expr))
}

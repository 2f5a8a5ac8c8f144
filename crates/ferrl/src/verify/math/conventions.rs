//! Letters by convention: the constant of integration, the imaginary unit of engineers, an integer parameter, unit
//! vectors. What is only a matter of spelling is spelt alike before two answers are compared.

use super::{Const, Expr, Join, Rel};

/// Two answers with the letters that mean the same by convention made equal.
pub fn alike(gold: &Expr, answer: &Expr) -> (Expr, Expr) {
    let (gold, answer) = same_parameter(&primed(gold), &primed(answer));
    let (gold, answer) = without_exclusions(gold, answer);
    let answer = constant_like(&gold, &answer);
    let is_i = |e: &Expr| matches!(e, Expr::Const(Const::I));
    let j_only = |e: &Expr| e.mentions("j") && !e.mentions("k") && !e.any(&is_i);
    match (gold.any(&is_i), answer.any(&is_i)) {
        (true, false) if j_only(&answer) => (gold, with_i(&answer)),
        (false, true) if j_only(&gold) => (with_i(&gold), answer),
        _ => (gold, answer),
    }
}

/// `dy/dx` as `y'`.
fn primed(expr: &Expr) -> Expr {
    fn name(expr: &Expr) -> Option<&str> {
        match expr {
            Expr::Var(name) => Some(name),
            Expr::Mul(factors) if factors.len() == 1 => name(&factors[0]),
            _ => None,
        }
    }
    match expr {
        Expr::Call(call, args) if call == "derivative" => match &args[..] {
            [of, by] if name(by).is_some_and(|by| by.len() == 1) => {
                name(of).map_or_else(|| expr.clone(), |of| Expr::Var(format!("{of}'")))
            }
            _ => expr.clone(),
        },
        other if other.any(&|e| matches!(e, Expr::Call(call, _) if call == "derivative")) => {
            other.map(&mut primed)
        }
        other => other.clone(),
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
/// saying. Where one answer says it, the usual letter of the other is a parameter too.
fn same_parameter(gold: &Expr, answer: &Expr) -> (Expr, Expr) {
    let bare = |e: &Expr| {
        let used: Vec<&str> = PARAMETERS.into_iter().filter(|name| e.mentions(name)).collect();
        match used[..] {
            [name] => e.renamed(name, "k"),
            _ => e.clone(),
        }
    };
    match (with_parameter(gold), with_parameter(answer)) {
        (Some(gold), Some(answer)) => (gold, answer),
        (Some(gold), None) => (gold, bare(answer)),
        (None, Some(answer)) => (bare(gold), answer),
        (None, None) => (gold.clone(), answer.clone()),
    }
}

/// Letters for integers.
const PARAMETERS: [&str; 4] = ["k", "n", "m", "l"];

/// Values of a parameter that is said to be an integer, under the name k.
fn with_parameter(expr: &Expr) -> Option<Expr> {
    let (join, values, condition) = match expr {
        Expr::List(join, items) => {
            let (condition, values) = items.split_last()?;
            (*join, values, condition)
        }
        // { k\pi : k \in \mathbb{Z} }
        Expr::Builder(value, condition) => (Join::Comma, std::slice::from_ref(&**value), &**condition),
        _ => return None,
    };
    let name = integer(condition).filter(|name| values.iter().all(|v| uses(v, name)))?;
    let itself = |value: &Expr| matches!(value, Expr::Var(_));
    let values: Vec<Expr> = values.iter().map(|v| v.renamed(name, "k")).collect();
    match &values[..] {
        [] => None,
        [one] => (!itself(one)).then(|| one.clone()),
        _ => Some(Expr::List(join, values)),
    }
}

/// `(x + 1)/(x - 1), x \ne 1` without what it is not defined for, where the other answer does not say it.
fn without_exclusions(gold: Expr, answer: Expr) -> (Expr, Expr) {
    let value = |e: &Expr| match e {
        Expr::List(Join::Comma | Join::Semicolon | Join::And, items) => match &items[..] {
            [value, exclusions @ ..] if !exclusions.is_empty() => {
                let of_value = |e: &Expr| excluded(e).is_some_and(|name| value.mentions(name));
                let formula =
                    !matches!(value, Expr::Chain(_, rest) if rest.iter().any(|(rel, _)| *rel != Rel::Eq));
                let is_name = matches!(value, Expr::Var(_));
                (formula && !is_name && exclusions.iter().all(of_value)).then(|| value.clone())
            }
            _ => None,
        },
        _ => None,
    };
    match (value(&gold), value(&answer)) {
        (Some(value), None) if !matches!(answer, Expr::List(..)) => (value, answer),
        (None, Some(value)) if !matches!(gold, Expr::List(..)) => (gold, value),
        _ => (gold, answer),
    }
}

/// The variable of `x \ne 1`.
fn excluded(condition: &Expr) -> Option<&str> {
    match condition {
        Expr::Chain(name, rest) if matches!(&rest[..], [(Rel::Ne, _)]) => match &**name {
            Expr::Var(name) => Some(name),
            _ => None,
        },
        _ => None,
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

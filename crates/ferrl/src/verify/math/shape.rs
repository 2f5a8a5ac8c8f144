//! What kind of answer a tree is, and the parts that count.

use super::language::text;
use super::{Const, Expr, Join, Rel, SetOp, Unit};
use std::collections::BTreeSet;

/// A value without its unit, percent and degree signs.
pub struct Peeled {
    /// The value.
    pub core: Expr,
    pub unit: Unit,
    pub percent: bool,
    /// Whether it is an angle in degrees.
    pub degree: bool,
}

/// An answer without what says nothing: approximations behind an exact value, all but the last of several equal
/// values, phrases in place of sets.
pub fn tidy(expr: &Expr) -> Expr {
    match expr {
        Expr::Chain(first, rest) => tidy_chain(first, rest),
        Expr::Text(words) => match text::phrase(words) {
            Some(text::Phrase::Nothing) => Expr::Const(Const::Empty),
            Some(text::Phrase::Everything) => Expr::Const(Const::Numbers('R')),
            Some(text::Phrase::Positive) => ray('(', true),
            Some(text::Phrase::NonNegative) => ray('[', true),
            Some(text::Phrase::Negative) => ray(')', false),
            Some(text::Phrase::Integers) => Expr::Const(Const::Numbers('Z')),
            Some(text::Phrase::PositiveIntegers) => Expr::Const(Const::Numbers('P')),
            None => expr.clone(),
        },
        // A(1, 2) is the point (1, 2).
        Expr::Mul(factors) => match &factors[..] {
            [Expr::Var(name), point @ Expr::Tuple('(', _, ')')]
                if name.len() == 1 && name.as_bytes()[0].is_ascii_uppercase() =>
            {
                point.clone()
            }
            [Expr::Set(left), Expr::Set(right)] => pairs(left, right),
            _ => expr.clone(),
        },
        Expr::Pow(base, mark) => match (&**base, &**mark) {
            (Expr::Matrix(rows), Expr::Var(t)) if t == "T" || t == "top" => transposed(rows),
            _ => expr.clone(),
        },
        Expr::Set(items) if items.is_empty() => Expr::Const(Const::Empty),
        // {a} ∪ {b} is {a, b}.
        Expr::SetOp(SetOp::Union, a, b) => match (&**a, &**b) {
            (Expr::Set(left), Expr::Set(right)) => Expr::Set(left.iter().chain(right).cloned().collect()),
            _ => expr.clone(),
        },
        // { k : k \in \mathbb{Z} } is \mathbb{Z}.
        Expr::Builder(what, condition) => match (&**what, &**condition) {
            (Expr::Var(name), Expr::Chain(member, rest)) => match (&**member, &rest[..]) {
                (Expr::Var(same), [(Rel::In, set)]) if name == same => set.clone(),
                _ => expr.clone(),
            },
            _ => expr.clone(),
        },
        other => other.clone(),
    }
}

/// The numbers on one side of 0, whose bracket is `end`.
fn ray(end: char, above: bool) -> Expr {
    let (zero, infinity) = (Expr::int(0), Expr::Const(Const::Infinity));
    match above {
        true => Expr::Tuple(end, vec![zero, infinity], ')'),
        false => Expr::Tuple('(', vec![infinity.negated(), zero], end),
    }
}

/// The Cartesian product of two finite sets.
fn pairs(left: &[Expr], right: &[Expr]) -> Expr {
    let pair = |a: &Expr, b: &Expr| Expr::Tuple('(', vec![a.clone(), b.clone()], ')');
    Expr::Set(left.iter().flat_map(|a| right.iter().map(move |b| pair(a, b))).collect())
}

/// The columns of a matrix as its rows.
fn transposed(rows: &[Vec<Expr>]) -> Expr {
    let width = rows.first().map_or(0, Vec::len);
    let column = |at: usize| rows.iter().filter_map(|row| row.get(at).cloned()).collect();
    Expr::Matrix((0..width).map(column).collect())
}

fn tidy_chain(first: &Expr, rest: &[(Rel, Expr)]) -> Expr {
    let mut kept: Vec<(Rel, Expr)> = Vec::new();
    // The length of a segment goes by the name of the segment.
    let mut head = match first {
        Expr::Abs(inner) if matches!(&**inner, Expr::Var(ends) if ends.len() == 2) => (**inner).clone(),
        other => other.clone(),
    };
    for (rel, side) in rest {
        match rel {
            Rel::Approx if kept.is_empty() && is_name(&head) => kept.push((Rel::Eq, side.clone())),
            Rel::Approx => break,
            Rel::To => {
                head = side.clone();
                kept.clear();
            }
            _ => kept.push((*rel, side.clone())),
        }
    }
    if kept.len() > 1 && kept.iter().all(|(rel, _)| *rel == Rel::Eq) {
        kept.drain(..kept.len() - 1);
    }
    match &kept[..] {
        [] => head,
        // 2 + 3 = 5 is the value 5.
        [(Rel::Eq, side)] if !head.any(&is_symbol) && !side.any(&is_symbol) => side.clone(),
        _ => Expr::Chain(head.boxed(), kept),
    }
}

fn is_symbol(expr: &Expr) -> bool {
    matches!(expr, Expr::Var(_) | Expr::Call(..) | Expr::Text(_))
}

/// Whether an expression only names something: `x`, `f(2)`, `|AB|`, `(x, y)`, `NO/BO`, `sin A`.
pub fn is_name(expr: &Expr) -> bool {
    match expr {
        Expr::Var(_) | Expr::Call(..) | Expr::Text(_) => true,
        Expr::Abs(inner) | Expr::Degree(inner) => is_name(inner),
        Expr::Func(_, args) => args.iter().all(is_name),
        Expr::Div(a, b) => is_name(a) && is_name(b),
        Expr::Tuple(_, items, _) | Expr::Ratio(items) | Expr::Mul(items) => items.iter().all(is_name),
        Expr::Unit(inner, _) => is_name(inner),
        Expr::Matrix(rows) => rows.iter().flatten().all(is_name),
        // A \cap B = {1, 2}
        Expr::SetOp(_, a, b) => is_name(a) && is_name(b),
        // An integral, a limit or a sum and what it is.
        Expr::Big(..) => true,
        _ => false,
    }
}

/// Whether an expression combines several names without numbers of its own: `x + y`, `a^2 + b^2`, `f(1) + f(2)`.
pub fn is_combination(expr: &Expr) -> bool {
    fn plain(expr: &Expr, names: &mut BTreeSet<String>) -> bool {
        match expr {
            Expr::Var(_) | Expr::Call(..) => {
                names.insert(format!("{expr:?}"));
                true
            }
            Expr::Neg(a) | Expr::Abs(a) => plain(a, names),
            Expr::Add(items) | Expr::Mul(items) => items.iter().all(|item| plain(item, names)),
            Expr::Div(a, b) => plain(a, names) && plain(b, names),
            Expr::Pow(a, b) => matches!(**b, Expr::Num(..)) && plain(a, names),
            _ => false,
        }
    }
    let mut names = BTreeSet::new();
    plain(expr, &mut names) && names.len() > 1
}

pub fn is_zero(expr: &Expr) -> bool {
    matches!(expr, Expr::Num(value, _) if value.sign() == 0)
}

fn is_plus_minus(expr: &Expr) -> bool {
    matches!(expr, Expr::PlusMinus(..))
}

/// Whether an answer stands for several values.
pub fn is_plural(expr: &Expr) -> bool {
    matches!(expr, Expr::List(..) | Expr::Set(_)) || expr.any(&is_plus_minus)
}

/// Whether an answer is a tuple of single values.
pub fn is_tuple(expr: &Expr) -> bool {
    vector(expr).is_some() && !expr.any(&is_plus_minus)
}

/// Whether an answer is a set of real numbers beyond a mere list.
pub fn is_set(expr: &Expr) -> bool {
    let infinite = |e: &Expr| matches!(e, Expr::Const(Const::Infinity));
    match expr {
        Expr::SetOp(..) | Expr::Builder(..) | Expr::Const(Const::Empty | Const::Numbers(_)) => true,
        Expr::Add(items) => matches!(items.first(), Some(Expr::Const(Const::Numbers(_)))),
        Expr::Tuple(open, items, close) if items.len() == 2 => {
            (*open == '[') != (*close == ']') || items.iter().any(|item| item.any(&infinite))
        }
        _ => false,
    }
}

/// Whether an answer is, or holds, a condition on a variable.
pub fn is_condition(expr: &Expr) -> bool {
    match expr {
        Expr::Chain(_, rest) => {
            rest.iter().any(|(rel, _)| rel.is_order() || matches!(rel, Rel::Ne | Rel::In | Rel::NotIn))
        }
        Expr::List(_, items) => items.iter().any(is_condition),
        Expr::SetOp(..) => true,
        _ => is_set(expr),
    }
}

/// The values an answer lists, each with the name it is given to.
pub fn items(expr: &Expr) -> Vec<(Option<String>, Expr)> {
    let list = match expr {
        Expr::List(_, items) | Expr::Set(items) => &items[..],
        single => std::slice::from_ref(single),
    };
    let mut out = Vec::new();
    let mut last: Option<String> = None;
    for item in list {
        let item = tidy(item);
        let (name, value) = match &item {
            Expr::Chain(name, rest) => match &rest[..] {
                [(Rel::Eq, value)] if is_name(name) => (Some(format!("{name:?}")), value.clone()),
                [(Rel::Eq, name)] if is_name(name) => (Some(format!("{name:?}")), *item_head(&item)),
                _ => (None, item.clone()),
            },
            // n = 1, 2, 3
            _ => (last.clone(), item.clone()),
        };
        last.clone_from(&name);
        out.extend(signs(&value).into_iter().map(|value| (name.clone(), value)));
    }
    out
}

fn item_head(expr: &Expr) -> Box<Expr> {
    match expr {
        Expr::Chain(first, _) => first.clone(),
        other => other.clone().boxed(),
    }
}

/// The different names of listed values.
pub fn names(items: &[(Option<String>, Expr)]) -> BTreeSet<&String> {
    items.iter().filter_map(|(name, _)| name.as_ref()).collect()
}

/// The components of a tuple, or of a matrix of one row or column.
pub fn vector(expr: &Expr) -> Option<Vec<Expr>> {
    match expr {
        Expr::Tuple(_, items, _) => Some(items.clone()),
        Expr::Matrix(rows) if rows.len() == 1 || rows.iter().all(|row| row.len() == 1) => {
            Some(rows.iter().flatten().cloned().collect())
        }
        _ => None,
    }
}

/// An expression for every choice of its signs `±`: all combinations, or two where `∓` ties them together.
pub fn signs(expr: &Expr) -> Vec<Expr> {
    fn count(expr: &Expr) -> (usize, bool) {
        let (mut total, mut tied) = match expr {
            Expr::PlusMinus(minus_first, _) => (1, *minus_first),
            _ => (0, false),
        };
        for (n, t) in expr.children().into_iter().map(count) {
            (total, tied) = (total + n, tied || t);
        }
        (total, tied)
    }
    let (total, tied) = count(expr);
    if total == 0 {
        return vec![expr.clone()];
    }
    if tied || total > 3 {
        return [0, usize::MAX].iter().map(|choice| choose(expr, *choice, &mut 0)).collect();
    }
    (0..1usize << total).map(|choice| choose(expr, choice, &mut 0)).collect()
}

/// An expression with its signs chosen by the bits of `choice`.
fn choose(expr: &Expr, choice: usize, next: &mut u32) -> Expr {
    let Expr::PlusMinus(minus_first, inner) = expr else {
        return expr.map(&mut |part| choose(part, choice, next));
    };
    let minus = choice >> (*next % usize::BITS) & 1 == 1;
    *next += 1;
    let inner = choose(inner, choice, next);
    if minus != *minus_first { inner.negated() } else { inner }
}

/// The parts of a union, intersection or difference.
pub fn parts(expr: &Expr) -> Vec<&Expr> {
    match expr {
        Expr::SetOp(op, a, b) => {
            let mut out = Vec::new();
            for side in [&**a, &**b] {
                match side {
                    Expr::SetOp(other, ..) if other != op => out.push(side),
                    side => out.extend(parts(side)),
                }
            }
            out
        }
        other => vec![other],
    }
}

/// Whether two sets are put together in the same way, without regard to order.
pub fn same_operation(a: &Expr, b: &Expr) -> bool {
    let op = |e: &Expr| match e {
        Expr::SetOp(op @ (SetOp::Union | SetOp::Intersection), ..) => Some(*op),
        _ => None,
    };
    op(a).is_some() && op(a) == op(b)
}

/// A sum of quantities of one kind, such as 2 hours and 30 minutes, in base units.
pub fn total(expr: &Expr) -> Option<Expr> {
    let items = match expr {
        Expr::List(Join::And | Join::Comma, items) | Expr::Add(items) => items,
        Expr::Unit(..) => std::slice::from_ref(expr),
        _ => return None,
    };
    let mut base: Option<Unit> = None;
    let mut terms = Vec::new();
    for item in items {
        let Expr::Unit(value, unit) = item else { return None };
        let dims = base.get_or_insert_with(|| Unit { dims: unit.dims, ..Unit::none() });
        if dims.dims != unit.dims || !unit.words.is_empty() {
            return None;
        }
        terms.push(Expr::Mul(vec![Expr::Num(unit.factor.clone(), None), (**value).clone()]));
    }
    Some(Expr::Unit(Expr::Add(terms).boxed(), base?))
}

/// A value without its unit and signs.
pub fn peel(expr: &Expr) -> Peeled {
    let bare = |core: &Expr| Peeled { core: core.clone(), unit: Unit::none(), percent: false, degree: false };
    match expr {
        Expr::Unit(inner, unit) => {
            let inner = peel(inner);
            let mut both = inner.unit.clone().times(unit, 1);
            both.letter = unit.letter.or(inner.unit.letter);
            Peeled { unit: both, ..inner }
        }
        Expr::Percent(inner) => Peeled { percent: true, ..peel(inner) },
        Expr::Degree(inner) => Peeled { degree: true, ..peel(inner) },
        Expr::Neg(inner) => {
            let inner = peel(inner);
            Peeled { core: inner.core.negated(), ..inner }
        }
        Expr::Add(_) => match total(expr) {
            Some(Expr::Unit(sum, unit)) => Peeled { unit, ..bare(&sum) },
            _ => bare(expr),
        },
        _ => bare(expr),
    }
}

//! Lists, relations, ratios and sets: what stands at the top of an answer and inside brackets.

use super::super::{Expr, Func, Join, Rel, SetOp, Tok};
use super::Parser;

impl Parser<'_> {
    /// The separator that stands here.
    pub(super) fn separator(&mut self) -> Option<Join> {
        let join = match self.tok(0)? {
            Tok::Sym(',') => Join::Comma,
            Tok::Sym(';') => Join::Semicolon,
            Tok::Sym('\n') if !self.context.table => Join::Comma,
            Tok::Word(word) if word == "and" => Join::And,
            Tok::Word(word) if word == "or" => Join::Or,
            _ => return None,
        };
        self.at += 1;
        Some(join)
    }

    /// Items with the separator before each; several in a row count as the strongest of them.
    pub(super) fn items(&mut self) -> Option<Vec<(Join, Expr)>> {
        let mut items: Vec<(Join, Expr)> = Vec::new();
        loop {
            let mut join = if items.is_empty() { Some(Join::Comma) } else { None };
            while let Some(next) = self.separator() {
                join = match (join, next) {
                    (Some(Join::Or | Join::And | Join::Semicolon), Join::Comma) => join,
                    _ => Some(next),
                };
            }
            // ]0, 1[ opens with the bracket that closes others.
            let outward = items.is_empty() && self.sym() == ']';
            let closed = matches!(self.sym(), ')' | ']' | '}' | '⦄' | '⟩' | '⌋' | '⌉') && !outward;
            let Some(join) = join.filter(|_| !self.done() && !closed) else { break };
            if items.len() > 256 {
                return None;
            }
            items.push((join, self.relation()?));
        }
        (!items.is_empty()).then_some(items)
    }

    /// A list, or its only item.
    pub(super) fn list(&mut self) -> Option<Expr> {
        let items = self.deeper(Self::items)?;
        Some(grouped(items))
    }

    pub(super) fn relation_here(&self) -> Option<Rel> {
        Some(match self.tok(0)? {
            Tok::Sym('=') => Rel::Eq,
            Tok::Sym('≠') => Rel::Ne,
            Tok::Sym('<') => Rel::Lt,
            Tok::Sym('>') if self.context.angle => return None,
            Tok::Sym('>') => Rel::Gt,
            Tok::Sym('≤') => Rel::Le,
            Tok::Sym('≥') => Rel::Ge,
            Tok::Sym('∈') => Rel::In,
            Tok::Sym('∉') => Rel::NotIn,
            Tok::Sym('≈') => Rel::Approx,
            Tok::Sym('→') => Rel::To,
            Tok::Sym('≡') => Rel::Other("equiv"),
            Tok::Sym('~') => Rel::Other("sim"),
            Tok::Sym('≅') => Rel::Other("cong"),
            Tok::Sym('∝') => Rel::Other("propto"),
            Tok::Sym('⊂') => Rel::Other("subset"),
            Tok::Cmd("perp") => Rel::Other("perp"),
            Tok::Cmd("parallel") => Rel::Other("parallel"),
            // x in (0, 1)
            Tok::Word(word) if word == "in" && self.is_member() => Rel::In,
            Tok::Word(word) if matches!(word.as_str(), "is" | "are" | "equals") && !self.done() => Rel::Eq,
            _ => return None,
        })
    }

    /// Whether the word that stands here puts a variable into a set.
    pub(super) fn is_member(&self) -> bool {
        let before = self.at.checked_sub(1).and_then(|at| self.tokens.get(at)).map(|t| &t.tok);
        let set = matches!(self.sym_at(1), '(' | '[' | '⦃')
            || matches!(self.tok(1), Some(Tok::Cmd("setR" | "setZ" | "setN" | "setQ" | "setC")));
        set && matches!(before, Some(Tok::Name(_)))
    }

    /// The relation that stands here, or at the start of the next line of an aligned calculation.
    fn next_relation(&mut self) -> Option<Rel> {
        if self.sym() == '\n'
            && !self.context.table
            && matches!(self.sym_at(1), '=' | '≈' | '≤' | '≥' | '<' | '>')
        {
            self.at += 1;
        }
        self.relation_here()
    }

    pub(super) fn relation(&mut self) -> Option<Expr> {
        // A relation without a left side: `= 5`, `\approx 5`, `< 5`.
        if let Some(rel) = self.relation_here()
            && !(rel == Rel::Lt && self.tuple_ahead())
        {
            self.at += 1;
            // `\implies x = 12`, `= \sqrt{20} = 2\sqrt5`
            if matches!(rel, Rel::To | Rel::Eq) && !self.done() {
                return self.deeper(Self::relation);
            }
            let side = self.ratio()?;
            return Some(match rel {
                Rel::Approx | Rel::In => side,
                _ => Expr::Chain(Expr::Var("·".into()).boxed(), vec![(rel, side)]),
            });
        }
        let first = self.ratio()?;
        let mut rest = Vec::new();
        while let Some(rel) = self.next_relation() {
            self.at += 1;
            let negated = matches!(self.tok(0), Some(Tok::Cmd("not")));
            self.at += usize::from(negated);
            // `<=` may be written as two signs.
            let plain = rel;
            let rel = match (rel, self.sym()) {
                (Rel::Lt, '=') => Rel::Le,
                (Rel::Gt, '=') => Rel::Ge,
                _ => rel,
            };
            self.at += usize::from(rel != plain);
            rest.push((rel, self.ratio().map(|side| residue(rel, side))?));
        }
        if matches!(self.tok(0), Some(Tok::Cmd("not"))) && self.sym_at(1) == '=' {
            self.at += 2;
            rest.push((Rel::Ne, self.ratio()?));
        }
        let expr = if rest.is_empty() { first } else { Expr::Chain(first.boxed(), rest) };
        self.congruence(expr)
    }

    /// `(mod m)` after a congruence.
    pub(super) fn congruence(&mut self, expr: Expr) -> Option<Expr> {
        let bracketed = self.sym() == '(' && matches!(self.tok(1), Some(Tok::Cmd("mod" | "bmod")));
        if !bracketed && !matches!(self.tok(0), Some(Tok::Cmd("pmod"))) {
            return Some(expr);
        }
        self.at += 1 + usize::from(bracketed);
        let modulus = if bracketed { self.sum()? } else { self.argument()? };
        if bracketed && !self.take(')') {
            return None;
        }
        let class = |e: Expr| Expr::Call("pmod".into(), vec![e, modulus.clone()]);
        Some(match expr {
            Expr::Chain(first, rest) => {
                Expr::Chain(first, rest.into_iter().map(|(rel, e)| (rel, class(e))).collect())
            }
            other => class(other),
        })
    }

    pub(super) fn ratio(&mut self) -> Option<Expr> {
        let first = self.set_expression()?;
        if self.context.builder || self.sym() != ':' && !self.to_here() {
            return Some(first);
        }
        // `Area: 5` names a value; `3:4` is a ratio.
        if let Expr::Text(_) = first {
            self.at += 1;
            let value = self.set_expression()?;
            return Some(Expr::Chain(first.boxed(), vec![(Rel::Eq, value)]));
        }
        let mut parts = vec![first];
        while matches!(self.sym(), ':') || self.to_here() {
            self.at += 1;
            parts.push(self.set_expression()?);
        }
        Some(Expr::Ratio(parts))
    }

    /// Whether `to` stands here before a number: `5 to 3`.
    pub(super) fn to_here(&self) -> bool {
        self.word() == Some("to") && matches!(self.tok(1), Some(Tok::Num(_)))
    }

    pub(super) fn set_expression(&mut self) -> Option<Expr> {
        let mut left = self.sum()?;
        loop {
            let op = match self.tok(0) {
                Some(Tok::Sym('∪')) => SetOp::Union,
                Some(Tok::Sym('∩')) => SetOp::Intersection,
                Some(Tok::Sym('∖')) => SetOp::Difference,
                // A capital U between brackets is the union sign of those who have none.
                Some(Tok::Name(name)) if name == "U" && is_setlike(&left) => SetOp::Union,
                _ => return Some(left),
            };
            self.at += 1;
            self.chain()?;
            let right = self.sum()?;
            left = Expr::SetOp(op, as_set(left).boxed(), as_set(right).boxed());
        }
    }
}

pub(super) fn is_setlike(expr: &Expr) -> bool {
    matches!(expr, Expr::Tuple(..) | Expr::Set(_) | Expr::SetOp(..))
}

/// `2 \mod 5` behind `\equiv` is a class of residues and not the number 2.
fn residue(rel: Rel, side: Expr) -> Expr {
    match side {
        Expr::Func(Func::Mod, args) if rel == Rel::Other("equiv") => Expr::Call("pmod".into(), args),
        side => side,
    }
}

/// A number beside a set operation is the set of it: `{1, 2} ∪ {3}` without backslashes.
fn as_set(expr: Expr) -> Expr {
    let named = |e: &Expr| {
        matches!(e, Expr::Var(_) | Expr::Call(..) | Expr::Text(_) | Expr::Builder(..) | Expr::Matrix(_))
    };
    if is_setlike(&expr) || expr.any(&named) || expr.any(&|e| matches!(e, Expr::Const(_) | Expr::List(..))) {
        return expr;
    }
    Expr::Set(vec![expr])
}

pub(super) fn is_assignment(expr: &Expr) -> bool {
    matches!(expr, Expr::Chain(_, rest) if rest.iter().all(|(rel, _)| *rel == Rel::Eq))
}

/// `x \ne 0, 1` excludes both.
fn excluded(items: &mut [(Join, Expr)]) {
    let Some((_, Expr::Chain(name, rest))) = items.first() else { return };
    let (name, bare) = (name.clone(), items.iter().skip(1).all(|(_, e)| !matches!(e, Expr::Chain(..))));
    if bare && matches!(&rest[..], [(Rel::Ne, _)]) {
        for (_, item) in items.iter_mut().skip(1) {
            *item = Expr::Chain(name.clone(), vec![(Rel::Ne, item.clone())]);
        }
    }
}

/// Items as one list, or as a list of groups where semicolons or "or" part lists of assignments.
pub(super) fn grouped(mut items: Vec<(Join, Expr)>) -> Expr {
    if items.len() == 1
        && let Some((_, item)) = items.pop()
    {
        return item;
    }
    excluded(&mut items);
    let joins: Vec<Join> = items.iter().skip(1).map(|(join, _)| *join).collect();
    let outer = if joins.contains(&Join::Semicolon) { Join::Semicolon } else { Join::Or };
    let mixed = joins.contains(&outer) && joins.iter().any(|j| *j != outer);
    let assignments = items.iter().all(|(_, e)| is_assignment(e));
    if mixed && (outer == Join::Semicolon || assignments) {
        let mut groups: Vec<Vec<(Join, Expr)>> = Vec::new();
        for (join, item) in items {
            match groups.last_mut() {
                Some(group) if join != outer => group.push((join, item)),
                _ => groups.push(vec![(Join::Comma, item)]),
            }
        }
        return Expr::List(outer, groups.into_iter().map(grouped).collect());
    }
    let join =
        [Join::Or, Join::And, Join::Semicolon].into_iter().find(|j| joins.contains(j)).unwrap_or(Join::Comma);
    Expr::List(join, items.into_iter().map(|(_, item)| item).collect())
}

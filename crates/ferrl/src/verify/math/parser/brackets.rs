//! Brackets of all kinds and tables.

use super::super::{Expr, Func, Join, Tok, Unit};
use super::lists::grouped;
use super::{Context, Parser};

impl Parser<'_> {
    /// Whether `<` here opens a vector.
    pub(super) fn tuple_ahead(&self) -> bool {
        let rest = &self.tokens[self.at..self.tokens.len().min(self.at + 64)];
        let close = rest.iter().position(|t| t.tok == Tok::Sym('>'));
        close.is_some_and(|end| rest[..end].iter().any(|t| t.tok == Tok::Sym(',')))
    }

    pub(super) fn bracket(&mut self, open: char) -> Option<Expr> {
        match open {
            '(' | '[' => self.bracketed(open),
            // ]0, 1[ is the open interval.
            ']' => self.bracketed(open),
            '⟨' => self.bracketed(open),
            '<' if self.tuple_ahead() => {
                self.at += 1;
                let items = self.inside(Context { angle: true, ..Context::default() }, Self::items)?;
                if !self.take('>') {
                    return None;
                }
                Some(Expr::Tuple('<', items.into_iter().map(|(_, e)| e).collect(), '>'))
            }
            '{' | '⦃' => self.braces(open),
            '|' | '‖' => {
                self.at += 1;
                let table = self.context.table;
                let inner = self.inside(Context { bars: true, table, ..Context::default() }, Self::sum)?;
                self.take(open).then(|| Expr::Abs(inner.boxed()))
            }
            '⌊' | '⌈' => {
                self.at += 1;
                let inner = self.sum()?;
                let (close, func) = if open == '⌊' { ('⌋', Func::Floor) } else { ('⌉', Func::Ceil) };
                self.take(close).then(|| Expr::Func(func, vec![inner]))
            }
            '$' | '€' | '£' | '¥' | '₹' => {
                self.at += 1;
                let unit = Unit::named(&open.to_string());
                let value = self.power()?;
                Some(Expr::Unit(value.boxed(), unit))
            }
            '…' => {
                self.at += 1;
                Some(Expr::Var("…".into()))
            }
            '±' | '∓' => {
                self.at += 1;
                Some(Expr::PlusMinus(open == '∓', self.deeper(Self::power)?.boxed()))
            }
            _ => None,
        }
    }

    /// `(..)`, `[..]`, `⟨..⟩` and half-open mixtures: one item in like brackets is grouping, more are a tuple.
    pub(super) fn bracketed(&mut self, open: char) -> Option<Expr> {
        self.at += 1;
        let items = self.inside(Context::default(), Self::items)?;
        let close = self.sym();
        let fits = match open {
            '⟨' => close == '⟩',
            '(' => close == ')' || close == ']',
            _ => matches!(close, ')' | ']' | '['),
        };
        if !fits {
            return None;
        }
        self.at += 1;
        let outward = open == ']' || close == '[';
        let (open, close) = (if open == ']' { '(' } else { open }, if close == '[' { ')' } else { close });
        if outward && items.len() != 2 {
            return None;
        }
        let spoken = items.iter().skip(1).any(|(join, _)| matches!(join, Join::And | Join::Or));
        let mut items: Vec<Expr> = items.into_iter().map(|(_, e)| e).collect();
        match (open, close) {
            _ if spoken => Some(Expr::List(Join::Or, items)),
            ('⟨', _) => Some(Expr::Tuple('<', items, '>')),
            ('(', ')') | ('[', ']') if items.len() == 1 => items.pop(),
            _ if items.len() == 1 => None,
            _ => Some(Expr::Tuple(open, items, close)),
        }
    }

    /// A group, a set or `{what | condition}`.
    pub(super) fn braces(&mut self, open: char) -> Option<Expr> {
        self.at += 1;
        let close = |c: char| c == '⦄' || open == '{' && c == '}';
        if close(self.sym()) {
            self.at += 1;
            return (open == '⦃').then(|| Expr::Set(Vec::new()));
        }
        let within = Context { builder: open == '⦃', ..Context::default() };
        let items = self.inside(within, Self::items)?;
        if matches!(self.tok(0), Some(Tok::Cmd("choose" | "over"))) {
            let whole = self.infix(grouped(items))?;
            return self.take('}').then_some(whole);
        }
        let condition = if open == '⦃' && matches!(self.sym(), '|' | ':') {
            self.at += 1;
            Some(self.inside(Context::default(), Self::list)?)
        } else {
            None
        };
        if !close(self.sym()) {
            return None;
        }
        self.at += 1;
        if let Some(condition) = condition {
            return Some(Expr::Builder(grouped(items).boxed(), condition.boxed()));
        }
        if open == '⦃' || items.len() > 1 && items.iter().all(|(join, _)| matches!(join, Join::Comma)) {
            return Some(Expr::Set(items.into_iter().map(|(_, e)| e).collect()));
        }
        Some(grouped(items))
    }

    /// `a \over b` and `n \choose k`, which part all that stands in a group.
    pub(super) fn infix(&mut self, top: Expr) -> Option<Expr> {
        let Some(Tok::Cmd(infix @ ("choose" | "over"))) = self.tok(0) else { return Some(top) };
        let infix = *infix;
        self.at += 1;
        let bottom = self.inside(Context::default(), Self::list)?;
        Some(match infix {
            "choose" => Expr::Binom(top.boxed(), bottom.boxed()),
            _ => Expr::Div(top.boxed(), bottom.boxed()),
        })
    }

    /// The rows of a table.
    pub(super) fn table(&mut self, kind: &str) -> Option<Expr> {
        let mut rows = self.inside(Context { table: true, ..Context::default() }, Self::rows)?;
        rows.retain(|row| !row.is_empty());
        let width = rows.first()?.len();
        if kind == "cases" {
            return Some(Expr::List(Join::And, rows.into_iter().map(cases_row).collect()));
        }
        if rows.iter().any(|row| row.len() != width) {
            return None;
        }
        let matrix = Expr::Matrix(rows);
        Some(if kind == "vmatrix" { Expr::Func(Func::Det, vec![matrix]) } else { matrix })
    }

    /// Cells up to the end of a table.
    pub(super) fn rows(&mut self) -> Option<Vec<Vec<Expr>>> {
        let mut rows = vec![Vec::new()];
        loop {
            match self.tok(0)? {
                Tok::End => break,
                Tok::Sym('&') => self.at += 1,
                Tok::Sym('\n') => {
                    self.at += 1;
                    rows.push(Vec::new());
                }
                _ => {
                    let cell = self.list()?;
                    rows.last_mut()?.push(cell);
                }
            }
        }
        self.at += 1;
        Some(rows)
    }
}

fn cases_row(mut row: Vec<Expr>) -> Expr {
    if row.len() == 1
        && let Some(cell) = row.pop()
    {
        return cell;
    }
    Expr::Tuple('(', row, ')')
}

//! Tokens to a tree, by recursive descent.
//!
//! From loose to tight: lists, relations, ratios, set operations, sums, products, powers, atoms. Whatever does
//! not fit the grammar is no formula: the caller then compares texts.

mod atoms;
mod brackets;
mod functions;
mod lists;
mod products;
mod quantities;

pub use products::times;

use super::lexer::Token;
use super::{Budget, Commas, Expr, Tok, lexer};

/// Brackets deeper than this are no answer.
const MOST_DEPTH: usize = 40;
/// Operators that nest to the left without brackets, such as `a/b/c` and `a!!`. With [`MOST_DEPTH`] they bound the
/// depth of a tree, and so the stack of a recursive function over it.
const MOST_CHAINED: usize = 80;

/// The tree of a text; none where it is no formula.
pub fn parse(text: &str, commas: Commas, budget: &Budget) -> Option<Expr> {
    let mut tokens = lexer::tokens(text, commas)?;
    while matches!(tokens.last().map(|t| &t.tok), Some(Tok::Sym(',' | ';' | ':' | '\n' | '*'))) {
        tokens.pop();
    }
    let mut parser = Parser { tokens, at: 0, depth: 0, chained: 0, context: Context::default(), budget };
    let expr = parser.list()?;
    let expr = parser.infix(expr)?;
    parser.done().then_some(expr)
}

/// The brackets around what is being read.
#[derive(Clone, Copy, Default)]
struct Context {
    /// Inside `|..|`, where `|` closes.
    bars: bool,
    /// Inside a table, in which `&` and line breaks end a cell.
    table: bool,
    /// Inside set braces, where `|` and `:` begin the condition.
    builder: bool,
    /// Inside `<..>`, where `>` closes.
    angle: bool,
}

struct Parser<'a> {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    chained: usize,
    context: Context,
    budget: &'a Budget,
}

impl Parser<'_> {
    pub(super) fn done(&self) -> bool {
        self.at >= self.tokens.len()
    }

    pub(super) fn tok(&self, ahead: usize) -> Option<&Tok> {
        self.tokens.get(self.at + ahead).map(|t| &t.tok)
    }

    pub(super) fn sym(&self) -> char {
        self.sym_at(0)
    }

    pub(super) fn sym_at(&self, ahead: usize) -> char {
        match self.tok(ahead) {
            Some(Tok::Sym(c)) => *c,
            _ => '\0',
        }
    }

    pub(super) fn take(&mut self, c: char) -> bool {
        let hit = self.sym() == c;
        self.at += usize::from(hit);
        hit
    }

    pub(super) fn spaced(&self) -> bool {
        self.tokens.get(self.at).is_some_and(|t| t.space)
    }

    pub(super) fn word(&self) -> Option<&str> {
        match self.tok(0) {
            Some(Tok::Word(word)) => Some(word),
            _ => None,
        }
    }

    /// Counts a level of nesting; none where there are too many.
    pub(super) fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth >= MOST_DEPTH || self.budget.spend(1).is_err() {
            return None;
        }
        self.depth += 1;
        let out = inner(self);
        self.depth -= 1;
        out
    }

    /// Reads the inside of brackets, where bars and colons outside do not count.
    pub(super) fn inside<T>(
        &mut self,
        context: Context,
        inner: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<T> {
        let outer = std::mem::replace(&mut self.context, context);
        let out = inner(self);
        self.context = outer;
        out
    }

    /// Counts an operator that nests to the left; none where there are too many.
    pub(super) fn chain(&mut self) -> Option<()> {
        self.chained += 1;
        (self.chained <= MOST_CHAINED && self.budget.spend(1).is_ok()).then_some(())
    }
}

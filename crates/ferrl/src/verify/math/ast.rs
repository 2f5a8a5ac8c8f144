//! What an answer says, as a tree.

use super::lexer::number::Digits;
use super::{Rational, Unit};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Const {
    /// The ratio of a circle's circumference to its diameter.
    Pi,
    /// Euler's number.
    E,
    /// The imaginary unit.
    I,
    /// Positive infinity.
    Infinity,
    /// The empty set.
    Empty,
    /// A set of numbers by its letter: R, Z, N, Q, C, or P for the positive integers.
    Numbers(char),
}

/// Functions with a meaning of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Func {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Asin,
    Acos,
    Atan,
    Acot,
    Asec,
    Acsc,
    Sinh,
    Cosh,
    Tanh,
    Coth,
    Sech,
    Csch,
    Asinh,
    Acosh,
    Atanh,
    Ln,
    /// Base first, argument second.
    Log,
    Exp,
    Cis,
    Floor,
    Ceil,
    Round,
    Gcd,
    Lcm,
    Min,
    Max,
    Sign,
    Re,
    Im,
    Arg,
    Conj,
    Det,
    Mod,
}

/// How two sides are related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rel {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
    Approx,
    /// An arrow: what stands after it follows from, or is the value of, what stands before.
    To,
    /// Congruent, similar, parallel, subset and whatever else is only compared by name.
    Other(&'static str),
}

impl Rel {
    /// The relation with its sides exchanged.
    pub fn flipped(self) -> Rel {
        match self {
            Rel::Lt => Rel::Gt,
            Rel::Le => Rel::Ge,
            Rel::Gt => Rel::Lt,
            Rel::Ge => Rel::Le,
            same => same,
        }
    }

    pub fn is_order(self) -> bool {
        matches!(self, Rel::Lt | Rel::Le | Rel::Gt | Rel::Ge)
    }
}

/// How the items of a list hang together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    Comma,
    Semicolon,
    And,
    Or,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetOp {
    Union,
    Intersection,
    Difference,
}

/// Operators with bounds, whose value is not computed unless the bounds are small integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Big {
    Sum,
    Product,
    Integral,
    Limit,
}

/// An answer or a part of one.
#[derive(Clone, Debug)]
pub enum Expr {
    /// A number; a decimal with its precision.
    Num(Rational, Option<Digits>),
    Const(Const),
    /// A variable by its whole name, such as `x`, `x_1`, `alpha`, `AB`.
    Var(String),
    Add(Vec<Expr>),
    Neg(Box<Expr>),
    Mul(Vec<Expr>),
    Div(Box<Expr>, Box<Expr>),
    Pow(Box<Expr>, Box<Expr>),
    /// Index and radicand.
    Root(Box<Expr>, Box<Expr>),
    Fact(Box<Expr>),
    DoubleFact(Box<Expr>),
    Binom(Box<Expr>, Box<Expr>),
    Abs(Box<Expr>),
    Func(Func, Vec<Expr>),
    /// An unknown function, or a name with a subscript that varies.
    Call(String, Vec<Expr>),
    /// `±x`, or `∓x` where the flag is set.
    PlusMinus(bool, Box<Expr>),
    Percent(Box<Expr>),
    Degree(Box<Expr>),
    Unit(Box<Expr>, Unit),
    /// Opening bracket, items, closing bracket; `<` stands for an angle bracket.
    Tuple(char, Vec<Expr>, char),
    Set(Vec<Expr>),
    /// `{ what | condition }`.
    Builder(Box<Expr>, Box<Expr>),
    SetOp(SetOp, Box<Expr>, Box<Expr>),
    Matrix(Vec<Vec<Expr>>),
    Chain(Box<Expr>, Vec<(Rel, Expr)>),
    List(Join, Vec<Expr>),
    Ratio(Vec<Expr>),
    Text(String),
    /// Operator, bound variable, lower and upper bound, body.
    Big(Big, String, Option<Box<Expr>>, Option<Box<Expr>>, Box<Expr>),
}

impl Expr {
    pub fn int(value: i64) -> Expr {
        Expr::Num(value.into(), None)
    }

    pub fn boxed(self) -> Box<Expr> {
        Box::new(self)
    }

    /// Minus this; literals stay literals.
    pub fn negated(self) -> Expr {
        match self {
            Expr::Num(value, digits) => Expr::Num(value.neg(), digits),
            Expr::Neg(inner) => *inner,
            other => Expr::Neg(other.boxed()),
        }
    }

    /// The parts, in the order in which they are written.
    pub fn children(&self) -> Vec<&Expr> {
        use Expr::*;
        match self {
            Num(..) | Const(_) | Var(_) | Text(_) => Vec::new(),
            Neg(a)
            | Fact(a)
            | DoubleFact(a)
            | Abs(a)
            | PlusMinus(_, a)
            | Percent(a)
            | Degree(a)
            | Unit(a, _) => vec![a],
            Div(a, b) | Pow(a, b) | Root(a, b) | Binom(a, b) | Builder(a, b) | SetOp(_, a, b) => vec![a, b],
            Add(items)
            | Mul(items)
            | Func(_, items)
            | Call(_, items)
            | Tuple(_, items, _)
            | Set(items)
            | List(_, items)
            | Ratio(items) => items.iter().collect(),
            Matrix(rows) => rows.iter().flatten().collect(),
            Chain(first, rest) => std::iter::once(&**first).chain(rest.iter().map(|(_, e)| e)).collect(),
            Big(_, _, low, high, body) => low.iter().chain(high).map(|e| &**e).chain([&**body]).collect(),
        }
    }

    /// The same with every part replaced by what `change` makes of it, in the order in which they are written.
    pub fn map(&self, change: &mut dyn FnMut(&Expr) -> Expr) -> Expr {
        use Expr::*;
        let mut one = |e: &Expr| Box::new(change(e));
        match self {
            Num(..) | Const(_) | Var(_) | Text(_) => self.clone(),
            Neg(a) => Neg(one(a)),
            Fact(a) => Fact(one(a)),
            DoubleFact(a) => DoubleFact(one(a)),
            Abs(a) => Abs(one(a)),
            PlusMinus(flag, a) => PlusMinus(*flag, one(a)),
            Percent(a) => Percent(one(a)),
            Degree(a) => Degree(one(a)),
            Unit(a, unit) => Unit(one(a), unit.clone()),
            // Arguments are evaluated from left to right.
            Div(a, b) => Div(one(a), one(b)),
            Pow(a, b) => Pow(one(a), one(b)),
            Root(a, b) => Root(one(a), one(b)),
            Binom(a, b) => Binom(one(a), one(b)),
            Builder(a, b) => Builder(one(a), one(b)),
            SetOp(op, a, b) => SetOp(*op, one(a), one(b)),
            Add(items) => Add(items.iter().map(change).collect()),
            Mul(items) => Mul(items.iter().map(change).collect()),
            Func(func, items) => Func(*func, items.iter().map(change).collect()),
            Call(name, items) => Call(name.clone(), items.iter().map(change).collect()),
            Tuple(open, items, close) => Tuple(*open, items.iter().map(change).collect(), *close),
            Set(items) => Set(items.iter().map(change).collect()),
            List(join, items) => List(*join, items.iter().map(change).collect()),
            Ratio(items) => Ratio(items.iter().map(change).collect()),
            Matrix(rows) => Matrix(rows.iter().map(|row| row.iter().map(&mut *change).collect()).collect()),
            Chain(first, rest) => {
                let first = one(first);
                Chain(first, rest.iter().map(|(rel, e)| (*rel, change(e))).collect())
            }
            Big(kind, name, low, high, body) => {
                let low = low.as_deref().map(&mut one);
                let high = high.as_deref().map(&mut one);
                Big(*kind, name.clone(), low, high, one(body))
            }
        }
    }

    /// The same with another name for a variable.
    pub fn renamed(&self, from: &str, to: &str) -> Expr {
        match self {
            Expr::Var(name) if name == from => Expr::Var(to.to_string()),
            other => other.map(&mut |part| part.renamed(from, to)),
        }
    }

    pub fn mentions(&self, name: &str) -> bool {
        self.any(&|e| matches!(e, Expr::Var(found) if found == name))
    }

    /// Whether some part, or this itself, satisfies `test`.
    pub fn any(&self, test: &dyn Fn(&Expr) -> bool) -> bool {
        test(self) || self.children().into_iter().any(|child| child.any(test))
    }
}

//! The variables of expressions, and what they stand for.

use super::ast::Big;
use super::{Budget, Env, Expr, Func};
use std::collections::BTreeSet;

/// The variables of some expressions.
pub struct VariableNames {
    /// All of them.
    pub all: BTreeSet<String>,
    /// Those that are integers.
    pub integers: BTreeSet<String>,
}

impl VariableNames {
    pub fn of(exprs: &[&Expr]) -> VariableNames {
        let (mut all, mut integers) = (BTreeSet::new(), BTreeSet::new());
        for expr in exprs {
            variables(expr, &mut all);
            integer_variables(expr, &mut integers);
        }
        VariableNames { all, integers }
    }

    /// The variables at a point.
    pub fn at<'a>(&'a self, point: usize, budget: &'a Budget) -> Env<'a> {
        Env::new(point, &self.all, &self.integers, budget)
    }
}

/// Every variable of an expression, without indices of sums.
pub fn variables(expr: &Expr, out: &mut BTreeSet<String>) {
    match expr {
        Expr::Var(name) => {
            out.insert(name.clone());
        }
        Expr::Big(_, variable, ..) => {
            let mut inner = BTreeSet::new();
            expr.children().into_iter().for_each(|child| variables(child, &mut inner));
            inner.remove(variable);
            out.extend(inner);
        }
        _ => expr.children().into_iter().for_each(|child| variables(child, out)),
    }
}

/// The variables that must be integers for an expression to have a value: under factorials, binomials and gcd, in
/// bounds of sums, in exponents of negative numbers.
pub fn integer_variables(expr: &Expr, out: &mut BTreeSet<String>) {
    match expr {
        Expr::Fact(_) | Expr::DoubleFact(_) | Expr::Binom(..) | Expr::Func(Func::Gcd | Func::Lcm, _) => {
            variables(expr, out);
        }
        Expr::Big(Big::Sum | Big::Product, _, low, high, _) => {
            low.iter().chain(high).for_each(|bound| variables(bound, out));
        }
        Expr::Pow(base, power) if matches!(&**base, Expr::Num(n, _) if n.sign() < 0) => variables(power, out),
        Expr::Pow(base, power) if matches!(&**base, Expr::Neg(_)) => variables(power, out),
        Expr::Call(name, args) if name.ends_with('_') => args.iter().for_each(|arg| variables(arg, out)),
        _ => {}
    }
    expr.children().into_iter().for_each(|child| integer_variables(child, out));
}

//! Solves Countdown by exhaustive search.

use super::expression::{CountdownExpr, CountdownOp, Fraction};
use std::collections::HashSet;

/// An expression that makes `target` from all the numbers, if there is one. Meant for up to six numbers.
pub fn solve(numbers: &[i64], target: i64) -> Option<String> {
    solve_with(numbers, target, &CountdownOp::ALL)
}

/// The same with these operations only.
pub fn solve_with(numbers: &[i64], target: i64, ops: &[CountdownOp]) -> Option<String> {
    let parts = numbers.iter().map(|&n| (Fraction::whole(n), CountdownExpr::Number(n))).collect();
    let mut search = CountdownSearch { target: Fraction::whole(target), ops, seen: HashSet::new() };
    search.run(parts).map(|expr| expr.to_string())
}

struct CountdownSearch<'a> {
    target: Fraction,
    ops: &'a [CountdownOp],
    /// Sorted values without a solution.
    seen: HashSet<Vec<Fraction>>,
}

impl CountdownSearch<'_> {
    fn run(&mut self, parts: Vec<(Fraction, CountdownExpr)>) -> Option<CountdownExpr> {
        if parts.len() <= 1 {
            return parts.into_iter().find(|(value, _)| *value == self.target).map(|(_, expr)| expr);
        }
        if parts.len() > 2 {
            let mut values: Vec<Fraction> = parts.iter().map(|p| p.0).collect();
            values.sort_unstable_by_key(|v| v.parts());
            if !self.seen.insert(values) {
                return None;
            }
        }
        for i in 0..parts.len() {
            for j in 0..parts.len() {
                for &op in self.ops {
                    let mirrored = matches!(op, CountdownOp::Add | CountdownOp::Mul) && j < i;
                    if i == j || mirrored {
                        continue;
                    }
                    let Some(joined) = combine(op, &parts[i], &parts[j]) else { continue };
                    if parts.len() == 2 && joined.0 != self.target {
                        continue;
                    }
                    let mut rest: Vec<(Fraction, CountdownExpr)> =
                        (0..parts.len()).filter(|&k| k != i && k != j).map(|k| parts[k].clone()).collect();
                    rest.push(joined);
                    if let Some(found) = self.run(rest) {
                        return Some(found);
                    }
                }
            }
        }
        None
    }
}

/// `a op b` with its value.
pub(super) fn combine(
    op: CountdownOp,
    a: &(Fraction, CountdownExpr),
    b: &(Fraction, CountdownExpr),
) -> Option<(Fraction, CountdownExpr)> {
    let value = op.apply(a.0, b.0)?;
    Some((value, CountdownExpr::join(op, a.1.clone(), b.1.clone())))
}

//! The step budget: the same pair always takes the same steps, so no clock decides a verdict.

use super::arith::nat;
use std::cell::Cell;

/// Steps for one pair, each worth about 20 ns.
pub const STEPS: u64 = 120_000;

/// Why an evaluation ended without a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// No value here: division by zero, a pole, a number out of range, something that is no number.
    Undefined,
    /// The steps are used up.
    Budget,
}

/// Products of limbs that make a step.
const WORK_PER_STEP: u64 = 16;

/// What is left of the steps.
#[derive(Debug)]
pub struct Budget {
    left: Cell<u64>,
    /// The work of big numbers that has been paid.
    paid: Cell<u64>,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { left: Cell::new(STEPS), paid: Cell::new(nat::work()) }
    }
}

impl Budget {
    /// Takes steps, and those that big numbers were worth since the last time, or says that they do not suffice.
    pub fn spend(&self, steps: u64) -> Result<(), Stop> {
        let work = nat::work().wrapping_sub(self.paid.get());
        self.paid.set(self.paid.get().wrapping_add(work / WORK_PER_STEP * WORK_PER_STEP));
        let left = self.left.get().checked_sub(steps.saturating_add(work / WORK_PER_STEP));
        self.left.set(left.unwrap_or(0));
        left.map(|_| ()).ok_or(Stop::Budget)
    }

    #[cfg(test)]
    pub fn used(&self) -> u64 {
        STEPS - self.left.get()
    }
}

#[cfg(test)]
mod tests {
    use super::super::equal::equal;
    use super::*;

    #[test]
    fn costly_pairs_end_by_the_same_step() {
        for (gold, answer) in [
            ("\\sum_{k=1}^{100000000}\\sin k", "1"),
            ("\\prod_{k=1}^{99999}(x^k+\\ln k)", "\\prod_{k=1}^{99999}(x^k-\\ln k)"),
            ("9^{9^{9}}", "9^{9^{9}}+1"),
            ("(x+y+z)^{999}(a+b)^{999}", "(x+y+z)^{998}(a+b)^{999}"),
        ] {
            let used = [(); 2].map(|()| {
                let budget = Budget::default();
                assert!(!equal(gold, answer, &budget), "{gold}");
                budget.used()
            });
            assert!(used[0] == used[1] && used[0] <= STEPS, "{gold}: {used:?}");
        }
        let budget = Budget::default();
        assert_eq!(budget.spend(STEPS + 1), Err(Stop::Budget));
        assert_eq!(budget.spend(1), Err(Stop::Budget), "what is used up stays so");
    }
}

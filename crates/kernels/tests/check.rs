//! The cases that judge a card, run on the CPU: what passes must pass, and what is wrong must be found.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_kernels::check::{CASES, Check, CheckOutcome};
use ferrl_kernels::cpu::{Cpu, Level};

#[test]
fn another_level_of_the_cpu_passes_every_case() {
    let best = Cpu::with_level(2, Level::available().pop().unwrap()).unwrap();
    let other = Cpu::with_level(2, Level::available()[Level::available().len().saturating_sub(2)]).unwrap();
    let mut count = 0;
    let mut each = |o: &CheckOutcome| {
        count += 1;
        assert!(o.is_right(), "{}: {} of {}", o.name, o.worst, o.limit);
    };
    let mut check = Check::new(&best, &other, &mut each);
    CASES.iter().for_each(|(name, case)| case(&mut check).unwrap_or_else(|e| panic!("{name}: {e}")));
    assert!(check.is_right() && count > 200);
}

#[test]
fn wrong_results_are_found() {
    let cpu = Cpu::with_level(1, Level::available().pop().unwrap()).unwrap();
    let mut found = Vec::new();
    let mut each = |o: &CheckOutcome| found.push(o.is_right());
    let mut check = Check::new(&cpu, &cpu, &mut each);
    check.close("near", &[1.0, 2.0], &[1.0, 2.0001], 1e-3);
    check.close("far", &[1.0, 2.0], &[1.0, 2.1], 1e-3);
    check.close("nothing", &[f32::NAN], &[1.0], 1e-3);
    check.same("zeros", &[0.0], &[-0.0]);
    check.same("nothing", &[f32::NAN], &[f32::NAN]);
    assert!(!check.is_right());
    assert_eq!(found, [true, false, false, false, false]);
}

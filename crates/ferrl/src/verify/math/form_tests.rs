//! Two ways to the same verdict: forms and numbers must agree on random constants.

use super::form::form;
use super::parser::parse;
use super::{Budget, Commas, Expr, VariableNames};

fn read(text: &str) -> Expr {
    parse(text, Commas::Separate, &Budget::default()).unwrap_or_else(|| panic!("{text}"))
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// A constant of some depth.
    fn constant(&mut self, depth: u64) -> String {
        if depth == 0 {
            let n = 1 + self.below(12);
            return match self.below(9) {
                0..=3 => format!("{n}"),
                4 => format!("\\frac{{{n}}}{{{}}}", 1 + self.below(9)),
                5 => format!("\\sqrt{{{n}}}"),
                6 => ["\\pi", "e", "i", "\\ln 6", "\\sqrt[3]{4}"][self.below(5) as usize].into(),
                7 => format!("\\cos\\frac{{{n}\\pi}}{{12}}"),
                _ => format!("\\log_2 {}", 1 << self.below(5)),
            };
        }
        let (a, b) = (self.constant(depth - 1), self.constant(depth - 1));
        match self.below(6) {
            0 => format!("({a}+{b})"),
            1 => format!("({a}-{b})"),
            2 | 3 => format!("({a})\\cdot({b})"),
            4 => format!("\\frac{{{a}}}{{{b}}}"),
            _ => format!("({a})^{}", 1 + self.below(3)),
        }
    }
}

#[test]
fn forms_and_numbers_agree() {
    let mut random = Random(7);
    let (mut formed, mut equal) = (0, 0);
    let none = VariableNames::of(&[]);
    for _ in 0..20_000 {
        let (depth, other) = (random.below(3), random.below(3));
        let (x, y) = (random.constant(depth), random.constant(other));
        // The same constant in another dress half of the time.
        let y = match random.below(4) {
            0 => format!("({y})+({x})-({y})"),
            1 => format!("\\frac{{2({x})}}{{\\sqrt{{4}}}}"),
            _ => y,
        };
        let budget = Budget::default();
        let (x, y) = (read(&x), read(&y));
        let (Some(a), Some(b)) = (form(&x, &budget), form(&y, &budget)) else { continue };
        let (Ok(p), Ok(q)) = (none.at(0, &budget).num(&x), none.at(0, &budget).num(&y)) else { continue };
        formed += 1;
        equal += u32::from(a == b);
        assert_eq!(a == b, p.same(&q), "{x:?}\n{y:?}\n{a:?}\n{b:?}");
    }
    assert!(formed > 10_000 && equal > 3_000, "{formed} {equal}");
}

#[test]
fn forms_decide_what_256_bits_cannot() {
    let budget = Budget::default();
    let same = |a: &str, b: &str| form(&read(a), &budget) == form(&read(b), &budget);
    assert!(same("\\sqrt{2}+10^{-100}", "10^{-100}+\\frac{2}{\\sqrt{2}}"));
    assert!(!same("\\sqrt{2}+10^{-100}", "\\sqrt{2}"));
    assert!(same("e^{\\ln 3+2}", "3e^2"));
    assert!(same("\\sqrt[6]{8}", "\\sqrt{2}"));
    assert!(same("\\ln\\frac{8}{9}", "3\\ln 2-2\\ln 3"));
    assert!(same("\\frac{1}{\\sqrt{2}+\\sqrt{3}+i}", "\\frac{1}{i+\\sqrt3+\\sqrt2}"));
}

//! Steps of a worked solution, as VinePPO splits them (Kazemnejad et al., 2024, arXiv 2410.01679).
//!
//! Text in, the texts of its steps out, which join to the text exactly. GSM8K's solutions have a step on each line; those of
//! MATH are prose with formulas, and are split by `math`.

mod gsm8k;
mod hidden;
mod math;
pub mod vary;

use ferrl_engine::{Error, Result};

/// Whose solutions they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SolutionKind {
    /// A step on each line, the answer behind `####`.
    Gsm8k,
    /// Prose with formulas.
    Math,
}

impl SolutionKind {
    /// Their names.
    pub const ALL: [(&'static str, SolutionKind); 2] =
        [("gsm8k", SolutionKind::Gsm8k), ("math", SolutionKind::Math)];
}

/// The steps of a solution, in order; they join to `text`. An error where the text is no solution of that kind.
pub fn steps(kind: SolutionKind, text: &str) -> Result<Vec<&str>> {
    let cuts = match kind {
        SolutionKind::Gsm8k => gsm8k::cuts(text).map_err(|found| {
            Error::data(format!("has {found} answers behind \"\\n#### \", expected one at most"))
                .fix("a GSM8K solution ends with its only answer")
        })?,
        SolutionKind::Math => math::cuts(text),
    };
    let ends = cuts.iter().skip(1).copied().chain([text.len()]);
    Ok(cuts.iter().zip(ends).map(|(start, end)| &text[*start..end]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) % n as u64) as usize
        }
    }

    const PIECES: &[&str] = &[
        "$",
        "$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "\\begin{align*}",
        "\\end{align*}",
        "\\begin{tabular}",
        "\\end{tabular}",
        "[asy]",
        "[/asy]",
        "\n",
        "\n",
        " ",
        ".",
        ". ",
        "The ",
        "so ",
        ",",
        ", ",
        " and ",
        ":",
        " to ",
        "=",
        "+",
        "\\equiv ",
        "\\cancelto",
        "x",
        "12",
        "é",
        "\u{1f600}",
        "\u{a0}",
        "a. B",
        ".$",
        ",$",
        "\n#### ",
        "#### 5",
        "\\$",
        "\r\n",
        "\\",
        "We have that the number of ways is",
        "x^2+2x+1",
    ];

    #[test]
    fn steps_of_any_text_join_to_it() {
        let mut random = Random(7);
        for _ in 0..4_000 {
            let len = random.below(60);
            let text: String = (0..len).map(|_| PIECES[random.below(PIECES.len())]).collect();
            for (name, kind) in SolutionKind::ALL {
                let Ok(steps) = steps(kind, &text) else {
                    assert!(
                        kind == SolutionKind::Gsm8k && text.matches("\n#### ").count() > 1,
                        "{name}: {text:?}"
                    );
                    continue;
                };
                assert_eq!(steps.concat(), text, "{name}");
                assert!(steps.iter().all(|step| !step.is_empty()), "{name}: {text:?}");
                assert_eq!(steps.is_empty(), text.is_empty(), "{name}: {text:?}");
            }
        }
    }

    /// Was the fear: patterns that start again at every character take hours for such texts.
    #[test]
    fn hostile_texts_take_no_longer_than_others() {
        let start = Instant::now();
        for piece in PIECES.iter().chain(&["\\begin{a}", "a,", "$x$ ", "$x=1,$", "\\begin{", "= ", "$\n"]) {
            let text = piece.repeat(100_000 / piece.len());
            for (_, kind) in SolutionKind::ALL {
                if let Ok(steps) = steps(kind, &text) {
                    assert_eq!(steps.concat(), text);
                }
            }
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }
}

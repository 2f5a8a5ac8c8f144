//! GSM8K: a step on each line, with the answer in the last one.
//!
//! The line's end stands at the start of each step but the first. Blank lines are steps; those before the first line that is
//! not blank are part of it, and the answer behind `\n#### ` is part of the last.

/// Where steps start, in bytes; or how many answers there are, where there are several.
pub fn cuts(text: &str) -> Result<Vec<usize>, usize> {
    const ANSWER: &str = "\n#### ";
    let answers = text.matches(ANSWER).count();
    if answers > 1 {
        return Err(answers);
    }
    let reasoning = &text[..text.find(ANSWER).unwrap_or(text.len())];
    // Start of each line, its line end included, and whether the line is blank.
    let mut lines: Vec<(usize, bool)> = Vec::new();
    let mut start = 0;
    for (number, line) in reasoning.split('\n').enumerate() {
        let from = if number == 0 { 0 } else { start - 1 };
        lines.push((from, line.trim().is_empty()));
        start += line.len() + 1;
    }
    let first = lines.iter().position(|(_, blank)| !blank).unwrap_or(0);
    let last = lines.iter().rposition(|(_, blank)| !blank).unwrap_or(0);
    let kept = lines.iter().enumerate().filter(|(at, _)| *at > first && (answers == 0 || *at <= last));
    let mut cuts = vec![0];
    // The line before a first line's end is empty, and no step.
    cuts.extend(kept.map(|(_, (from, _))| *from).filter(|from| *from > 0));
    if text.is_empty() {
        cuts.clear();
    }
    Ok(cuts)
}

#[cfg(test)]
mod tests {
    use super::super::{SolutionKind, steps};

    #[test]
    fn lines_are_steps_and_the_answer_is_part_of_the_last() {
        for (text, want) in [
            ("a\nb\n#### 5", vec!["a", "\nb\n#### 5"]),
            ("a\nb", vec!["a", "\nb"]),
            ("a", vec!["a"]),
            ("a\n\nb\n#### 5", vec!["a", "\n", "\nb\n#### 5"]),
            ("a\nb\n\n#### 5", vec!["a", "\nb\n\n#### 5"]),
            ("\n\na\nb", vec!["\n\na", "\nb"]),
            ("a\nb\n", vec!["a", "\nb", "\n"]),
            ("\n#### 5", vec!["\n#### 5"]),
            ("#### 5", vec!["#### 5"]),
            ("a\n####5", vec!["a", "\n####5"]),
            ("a\n#### 5\nb", vec!["a\n#### 5\nb"]),
            ("", vec![]),
        ] {
            assert_eq!(steps(SolutionKind::Gsm8k, text).expect("steps"), want, "{text:?}");
        }
        let error = steps(SolutionKind::Gsm8k, "a\n#### 5\n#### 6").expect_err("two answers").to_string();
        assert!(error.contains("2 answers"), "{error}");
    }
}

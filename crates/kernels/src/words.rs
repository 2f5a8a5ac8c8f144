//! Plurals in messages and reports.

/// A count with its noun in singular or plural: `1 row`, `2 rows`, `3 reward models`, `2 entries`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {}", plural(count, noun))
}

/// The noun alone in singular or plural.
pub fn plural(count: usize, noun: &str) -> String {
    let vowel = |stem: &str| stem.ends_with(['a', 'e', 'i', 'o', 'u']);
    match noun.strip_suffix('y') {
        _ if count == 1 => noun.into(),
        Some(stem) if !vowel(stem) => format!("{stem}ies"),
        _ if ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end)) => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_are_singular_for_one_only() {
        assert_eq!(counted(1, "prompt"), "1 prompt");
        assert_eq!(counted(0, "prompt"), "0 prompts");
        assert_eq!(counted(21, "reward model"), "21 reward models");
        assert_eq!(counted(2, "entry") + &plural(2, "batch"), "2 entriesbatches");
        assert_eq!(counted(2, "day") + &plural(1, "loss") + &plural(3, "loss"), "2 dayslosslosses");
    }
}

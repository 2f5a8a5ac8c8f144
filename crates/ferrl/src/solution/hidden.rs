//! What no sentence may be split in: formulas, pictures and tables.

use std::collections::HashMap;
use std::ops::Range;

/// A stretch of a text, in characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Where it stands, delimiters included.
    pub at: Range<usize>,
    /// Characters of its opening delimiter; none where it is no formula.
    pub opening: Option<usize>,
}

/// Formulas, pictures (`[asy]`) and tables of a text, in order. One that nothing closes is text.
pub fn hidden(chars: &[char]) -> Vec<Hidden> {
    let ends = Ends::of(chars);
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        match ends.region(chars, at) {
            Some(region) => {
                at = region.at.end;
                found.push(region);
            }
            // `\$` is money, `\\[` a line's end.
            None => at += if chars[at] == '\\' { 2 } else { 1 },
        }
    }
    found
}

/// Where closing delimiters stand, so that each is looked up and not searched for.
struct Ends {
    /// By the text of the delimiter, in order.
    at: HashMap<String, Vec<usize>>,
}

fn starts(chars: &[char], at: usize, text: &str) -> bool {
    text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c))
}

/// The name in `\begin{name}` or `\end{name}` at `at`, and where it ends.
fn environment(chars: &[char], at: usize, command: &str) -> Option<(String, usize)> {
    if !starts(chars, at, command) {
        return None;
    }
    let open = at + command.len();
    // No environment has a longer name.
    let len = chars[open..].iter().take(40).position(|c| *c == '}')?;
    Some((chars[open..open + len].iter().collect(), open + len + 1))
}

impl Ends {
    fn of(chars: &[char]) -> Ends {
        let mut at: HashMap<String, Vec<usize>> = HashMap::new();
        let mut i = 0;
        while i < chars.len() {
            let close = match chars[i] {
                '$' if starts(chars, i, "$$") => {
                    at.entry("$".into()).or_default().push(i);
                    Some("$$".to_string())
                }
                '$' => Some("$".to_string()),
                '[' if starts(chars, i, "[/asy]") => Some("[/asy]".to_string()),
                '\\' => match chars.get(i + 1) {
                    Some(')') => Some("\\)".to_string()),
                    Some(']') => Some("\\]".to_string()),
                    _ => environment(chars, i, "\\end{").map(|(name, _)| format!("\\end{{{name}}}")),
                },
                _ => None,
            };
            if let Some(close) = close {
                at.entry(close).or_default().push(i);
            }
            i += if chars[i] == '\\' { 2 } else { 1 };
        }
        Ends { at }
    }

    /// Where the first such delimiter from `from` on ends.
    fn after(&self, close: &str, from: usize) -> Option<usize> {
        let list = self.at.get(close)?;
        list.get(list.partition_point(|at| *at < from)).map(|at| at + close.chars().count())
    }

    fn region(&self, chars: &[char], at: usize) -> Option<Hidden> {
        let hide = |close: &str, opening: usize, formula: bool| {
            let end = self.after(close, at + opening)?;
            Some(Hidden { at: at..end, opening: formula.then_some(opening) })
        };
        match chars[at] {
            '[' if starts(chars, at, "[asy]") => hide("[/asy]", 5, false),
            '$' if starts(chars, at, "$$") => hide("$$", 2, true),
            '$' => hide("$", 1, true),
            '\\' if starts(chars, at, "\\(") => hide("\\)", 2, true),
            '\\' if starts(chars, at, "\\[") => hide("\\]", 2, true),
            '\\' => {
                let (name, end) = environment(chars, at, "\\begin{")?;
                let table = name.starts_with("tabular");
                hide(&format!("\\end{{{name}}}"), end - at, !table)
            }
            _ => None,
        }
    }
}

//! MATH: prose with formulas, split into sentences, and those into clauses where they are long.
//!
//! Formulas, pictures and tables count as 60 characters each and are not looked into until step 4:
//!
//! 1. Split before white space that stands between a full stop and a capital, unless a word of one or two letters ends
//!    there; and before every line's end.
//! 2. A lone line's end, and a part under 20 characters that no full stop ends, joins the next.
//! 3. Split behind a formula that ends in a full stop; a part under 20 characters joins the next.
//! 4. Inside formulas, split before line ends; an opening alone, and a part under 3 characters, joins the next.
//! 5. A part over 100 characters is split in two at a comma, else before "and", behind a colon, before "to", if both halves
//!    have 40; otherwise, in its formulas, behind a comma that ends one, or before `=`, `\equiv`, `+`, `\cancelto`, if both
//!    have 20. The most balanced place counts. Halves are split again.

use super::hidden::{Hidden, hidden};
use std::ops::Range;

/// What a formula counts for.
const PLACEHOLDER: usize = 60;
/// Shorter parts join the next.
const SHORT: usize = 20;
/// Longer parts are split.
const LONG: usize = 100;

struct Splitter {
    chars: Vec<char>,
    regions: Vec<Hidden>,
    /// Characters up to a position, a hidden stretch counted as [`PLACEHOLDER`].
    weight: Vec<usize>,
    /// Places where a long part may be split outside formulas, by what stands there.
    clauses: [Vec<usize>; 4],
    /// The same inside formulas.
    terms: [Vec<usize>; 7],
}

/// Where steps start, in bytes.
pub fn cuts(text: &str) -> Vec<usize> {
    let splitter = Splitter::new(text);
    let mut parts = splitter.sentences();
    parts = splitter.after_formulas(parts);
    parts = splitter.formula_lines(parts);
    parts = parts.into_iter().flat_map(|part| splitter.halves(part)).collect();
    let bytes: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    parts.into_iter().filter_map(|part| bytes.get(part.start).copied()).collect()
}

/// Stretches between cuts.
fn between(whole: Range<usize>, cuts: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let mut start = whole.start;
    for cut in cuts.into_iter().filter(|cut| *cut > whole.start && *cut < whole.end) {
        if cut > start {
            parts.push(start..cut);
            start = cut;
        }
    }
    if start < whole.end {
        parts.push(start..whole.end);
    }
    parts
}

/// Joins each part for which `joins` is true to the next one, and the last one to the one before it.
fn joined(parts: Vec<Range<usize>>, joins: impl Fn(&Range<usize>) -> bool) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    let mut open: Option<Range<usize>> = None;
    for part in parts {
        let whole = open.take().map_or(part.start, |open| open.start)..part.end;
        if joins(&whole) { open = Some(whole) } else { out.push(whole) }
    }
    match (open, out.last_mut()) {
        (Some(rest), Some(last)) => last.end = rest.end,
        (Some(rest), None) => out.push(rest),
        _ => {}
    }
    out
}

impl Splitter {
    fn new(text: &str) -> Splitter {
        let chars: Vec<char> = text.chars().collect();
        let regions = hidden(&chars);
        let mut weight = Vec::with_capacity(chars.len() + 1);
        let mut inside = vec![false; chars.len()];
        let (mut total, mut next) = (0, regions.iter().peekable());
        for at in 0..chars.len() {
            weight.push(total);
            if next.peek().is_some_and(|region| at >= region.at.end) {
                next.next();
            }
            total += match next.peek() {
                Some(region) if at == region.at.start => PLACEHOLDER,
                Some(region) if region.at.contains(&at) => 0,
                _ => 1,
            };
            inside[at] = next.peek().is_some_and(|region| region.at.contains(&at));
        }
        weight.push(total);
        let mut splitter =
            Splitter { chars, regions, weight, clauses: Default::default(), terms: Default::default() };
        splitter.clauses = splitter.clause_places(&inside);
        splitter.terms = splitter.term_places();
        splitter
    }

    fn starts(&self, at: usize, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.chars.get(at + i) == Some(&c))
    }

    fn weight(&self, part: &Range<usize>) -> usize {
        self.weight[part.end] - self.weight[part.start]
    }

    fn trimmed(&self, part: &Range<usize>) -> Range<usize> {
        let visible = |at: &usize| !self.chars[*at].is_whitespace();
        let start = part.clone().find(visible).unwrap_or(part.end);
        let end = part.clone().rfind(visible).map_or(part.end, |at| at + 1);
        start..end.max(start)
    }

    /// The regions that lie within a part.
    fn within(&self, part: &Range<usize>) -> &[Hidden] {
        let first = self.regions.partition_point(|region| region.at.start < part.start);
        let last = self.regions.partition_point(|region| region.at.start < part.end);
        &self.regions[first..last.max(first)]
    }

    /// Rules 1 and 2.
    fn sentences(&self) -> Vec<Range<usize>> {
        let mut cuts = Vec::new();
        let mut regions = self.regions.iter().peekable();
        let mut at = 0;
        while at < self.chars.len() {
            if let Some(region) = regions.next_if(|region| region.at.start == at) {
                at = region.at.end;
                continue;
            }
            if self.chars[at] == '\n' || self.ends_sentence(at) {
                cuts.push(at);
            }
            at += 1;
        }
        let parts = between(0..self.chars.len(), cuts);
        joined(parts, |part| {
            let text = &self.chars[part.clone()];
            let stop = self.chars[self.trimmed(part)].last() == Some(&'.');
            text == ['\n'] || self.weight(part) < SHORT && !stop
        })
    }

    /// Whether white space starts here that parts two sentences.
    fn ends_sentence(&self, at: usize) -> bool {
        let white = |i: usize| self.chars.get(i).is_some_and(|c| c.is_whitespace());
        if !white(at) || at == 0 || self.chars[at - 1] != '.' {
            return false;
        }
        let next = self.chars[at..].iter().find(|c| !c.is_whitespace());
        if !next.is_some_and(|c| c.is_uppercase()) {
            return false;
        }
        let letters = self.chars[..at - 1].iter().rev().take(3).take_while(|c| c.is_alphabetic()).count();
        letters == 0 || letters > 2
    }

    /// Rule 3.
    fn after_formulas(&self, parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let stop = |region: &&Hidden| {
            region.opening.is_some()
                && [".$", ".\\)", ".\\]"]
                    .iter()
                    .any(|end| self.starts(region.at.end.saturating_sub(end.len()), end))
                || self.starts(region.at.end.saturating_sub(3), ".$$")
        };
        parts
            .into_iter()
            .flat_map(|part| {
                let cuts: Vec<usize> =
                    self.within(&part).iter().filter(stop).map(|region| region.at.end).collect();
                if cuts.is_empty() {
                    return vec![part];
                }
                joined(between(part, cuts), |part| self.weight(part) < SHORT)
            })
            .collect()
    }

    /// Rule 4.
    fn formula_lines(&self, parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        for part in parts {
            let formulas = self.within(&part).iter().filter(|region| region.opening.is_some());
            let lines =
                |region: &Hidden| region.at.clone().filter(|at| self.chars[*at] == '\n').collect::<Vec<_>>();
            let cuts: Vec<usize> = formulas.flat_map(lines).collect();
            if cuts.is_empty() {
                out.push(part);
                continue;
            }
            out.extend(joined(between(part, cuts), |part| {
                let text = self.trimmed(part);
                text.len() < 3 || self.is_opening(&text)
            }));
        }
        out
    }

    /// Whether a stretch is nothing but the delimiter that opens a formula.
    fn is_opening(&self, text: &Range<usize>) -> bool {
        let found = self.regions.binary_search_by_key(&text.start, |region| region.at.start);
        found.is_ok_and(|at| self.regions[at].opening == Some(text.len()))
    }

    /// Behind a comma, before "and", behind a colon, before "to".
    fn clause_places(&self, inside: &[bool]) -> [Vec<usize>; 4] {
        let mut places: [Vec<usize>; 4] = Default::default();
        for at in (0..self.chars.len()).filter(|at| !inside[*at]) {
            let word_ends = |len: usize| !self.chars.get(at + len).is_some_and(|c| c.is_alphanumeric());
            match self.chars[at] {
                ',' => places[0].push(at + 1),
                ':' => places[2].push(at + 1),
                ' ' if self.starts(at, " and") && word_ends(4) => places[1].push(at),
                ' ' if self.starts(at, " to") && word_ends(3) => places[3].push(at),
                _ => {}
            }
        }
        places
    }

    /// Behind a comma that ends a formula, before `=`, `\equiv`, `+`, `\cancelto`.
    fn term_places(&self) -> [Vec<usize>; 7] {
        let mut places: [Vec<usize>; 7] = Default::default();
        for region in self.regions.iter().filter(|region| region.opening.is_some()) {
            for (kind, end) in [",$", ",\\)", ",\\]"].iter().enumerate() {
                if self.starts(region.at.end.saturating_sub(end.len()), end) {
                    places[kind].push(region.at.end);
                }
            }
            for at in region.at.clone() {
                match self.chars[at] {
                    '=' => places[3].push(at),
                    '+' => places[5].push(at),
                    '\\' if self.starts(at, "\\equiv") => places[4].push(at),
                    '\\' if self.starts(at, "\\cancelto") => places[6].push(at),
                    _ => {}
                }
            }
        }
        places
    }

    /// Rule 5.
    fn halves(&self, part: Range<usize>) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        let mut waiting = vec![part];
        while let Some(part) = waiting.pop() {
            match self.best_cut(&part) {
                // The first half is split before the second, so that steps come out in order.
                Some(cut) => waiting.extend([cut..part.end, part.start..cut]),
                None => out.push(part),
            }
        }
        out
    }

    fn best_cut(&self, part: &Range<usize>) -> Option<usize> {
        if part.len() <= LONG {
            return None;
        }
        let clause = self.clauses.iter().find_map(|places| nearest(places, part, 40, |at| self.weight[at]));
        clause.or_else(|| self.terms.iter().find_map(|places| nearest(places, part, 20, |at| at)))
    }
}

/// The most balanced of the places that are at least `least` characters from both ends of a part.
fn nearest(
    places: &[usize],
    part: &Range<usize>,
    least: usize,
    size: impl Fn(usize) -> usize,
) -> Option<usize> {
    let from = places.partition_point(|at| *at < part.start + least);
    let to = places.partition_point(|at| *at + least <= part.end);
    let places = places.get(from..to)?;
    let twice = size(part.start) + size(part.end);
    let behind = places.partition_point(|at| 2 * size(*at) < twice);
    let around = [behind.checked_sub(1), Some(behind)].into_iter().flatten();
    around.filter_map(|i| places.get(i).copied()).min_by_key(|at| (2 * size(*at)).abs_diff(twice))
}

#[cfg(test)]
mod tests {
    use super::super::{SolutionKind, steps};

    fn check(want: &[&str]) {
        let text = want.concat();
        assert_eq!(steps(SolutionKind::Math, &text).expect("steps"), want);
    }

    #[test]
    fn sentences_and_lines_are_steps() {
        check(&["The first one is here.", " The second one is here.", "\nThe third one is here."]);
        check(&["By the theorem of St. Petersburg it holds.", " We are done here."]);
        check(&["It is 5 cm. long and that is all there is.", "\n\nNext comes a paragraph of its own."]);
        check(&["We have the short\nline joined to the next.", " And another one that stays."]);
        check(&["So it goes.", " The rest of the text follows here."]);
        check(&["short"]);
        check(&["A line that is long enough for a step\n"]);
    }

    #[test]
    fn formulas_are_never_split() {
        check(&["We find $a. B$ and $x. Y$ in the text.", " That is all that there is."]);
        check(&["See [asy] draw. A\n(0,0); [/asy] for a picture.", " The rest is clear from it."]);
    }

    #[test]
    fn a_formula_may_end_a_sentence() {
        check(&["Therefore we know that $x = 2.$", " Then we also know that $y = 3.$"]);
        check(&["Therefore we know that \\[x = 2.\\]", "Then we also know that \\(y = 3.\\)"]);
        check(&["It is $x.$ So"]);
    }

    #[test]
    fn lines_of_a_formula_are_steps() {
        check(&["\\[\nx = 1", "\n+ 2 + 3\n\\]"]);
        check(&["\\begin{align*}\na &= b \\\\", "\n&= c", "\n\\end{align*}"]);
    }

    #[test]
    fn long_parts_are_split_where_it_is_most_balanced() {
        check(&[
            "We know that the number of apples is divisible by seven,",
            " which means that it cannot be a prime number at all here.",
        ]);
        check(&[
            "We know that the number of apples is divisible by seven",
            " and that it cannot be a prime number at all, so there.",
        ]);
        let terms = "1234567890".repeat(5);
        check(&[&format!("$x{terms}"), &format!("=y{terms}"), &format!("=z{terms}$")]);
        // A formula counts as 60 characters, so the second comma is the more balanced one.
        check(&[
            "We see now that the product, for all the positive integers,",
            " is the number $x^{123456789} + y^{123456789}$ as it was said.",
        ]);
    }
}

//! Dynamic sampling: more prompts in place of those whose answers teach nothing.
//!
//! What a step learns from is a function of the prompts' order alone: whole groups are taken in that order until there are
//! enough that teach, and what was asked beyond the last of them is left out.

use crate::algo::Algorithm;
use crate::experience::{Experience, Sequence};
use std::collections::BTreeMap;

/// For each group in order, whether it teaches.
fn teaching(e: &Experience, algo: &dyn Algorithm) -> Vec<(usize, bool)> {
    let mut groups: BTreeMap<usize, Vec<&Sequence>> = BTreeMap::new();
    for s in &e.sequences {
        groups.entry(s.group).or_default().push(s);
    }
    groups.into_iter().map(|(group, members)| (group, algo.teaches(&members))).collect()
}

/// How many more prompts to ask for so that `wanted` groups teach; `None` where they do. As many as are missing, over the
/// share that taught so far.
pub fn missing(e: &Experience, algo: &dyn Algorithm, wanted: usize) -> Option<usize> {
    let groups = teaching(e, algo);
    let taught = groups.iter().filter(|g| g.1).count();
    let share = taught.max(1) as f64 / groups.len().max(1) as f64;
    (taught < wanted).then(|| (((wanted - taught) as f64 / share).ceil() as usize).clamp(1, wanted))
}

/// Adds a round's answers behind those of the rounds before, which were `answers` to `prompts`.
pub fn append(e: &mut Experience, round: Experience, prompts: usize, answers: usize) {
    for mut s in round.sequences {
        s.group += prompts;
        s.trajectory += answers;
        e.sequences.push(s);
    }
}

/// Leaves out everything behind the group that makes `wanted` teach.
pub fn cut(e: &mut Experience, algo: &dyn Algorithm, wanted: usize) {
    let last = teaching(e, algo).into_iter().filter(|g| g.1).nth(wanted.saturating_sub(1));
    if let Some((last, _)) = last {
        e.sequences.retain(|s| s.group <= last);
    }
}

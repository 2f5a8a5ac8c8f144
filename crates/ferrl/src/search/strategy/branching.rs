//! A tree of steps with a schedule of branching factors by depth, as openrl grows them: a constant number, or a list that says
//! how many children the nodes of each depth have. Depths after the end of the list have one child, which goes to the end.
//!
//! The score of a leaf is its completion's; that of an inner node is the mean of its children's, so that `advantage` is the
//! child's score minus the parent's.

use super::super::{Backup, ChoiceRule, Expansion, Round, Strategy, Tree, Until};
use super::sampling::evaluate_terminals;
use super::{Common, Entry, schedule};
use crate::verify::{Options, Setting};
use ferrl_engine::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "tree",
    about: "a tree of steps with a branching factor for each depth",
    settings: &[
        Setting {
            name: "branch",
            default: "[3, 2, 1]",
            about: "children by depth: 3,2,1, or one number for all depths",
        },
        Setting { name: "answer", default: "\"weighted\"", about: "best, vote, weighted or visits" },
    ],
    build,
};

struct Branching {
    branch: Vec<usize>,
    max_depth: usize,
    choice: ChoiceRule,
    started: bool,
}

fn build(options: &Options<'_>, common: &Common) -> Result<Box<dyn Strategy>> {
    let branch = schedule(options, "branch", &[3, 2, 1])?;
    // One number is for all depths, which `max_depth` ends; a tree of 64 levels of two has no end in practice.
    let max_depth = match branch.len() {
        1 if !options.has("max_depth") => 3,
        _ => common.max_depth,
    };
    let choice = options.choice("answer", ChoiceRule::Weighted, ChoiceRule::ALL)?;
    Ok(Box::new(Branching { branch, max_depth, choice, started: false }))
}

impl Branching {
    /// Children of a node at a depth, and how far they go.
    fn at(&self, depth: usize) -> (usize, Until) {
        let last = depth + 1 >= self.max_depth;
        match self.branch.as_slice() {
            [constant] => (*constant, if last { Until::End } else { Until::Step }),
            list if depth + 1 < list.len() && !last => (list[depth], Until::Step),
            list => (list.get(depth).copied().unwrap_or(1), Until::End),
        }
    }
}

impl Strategy for Branching {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        evaluate_terminals(round);
        let root = if self.started { None } else { Some(0) };
        self.started = true;
        let open: Vec<usize> = round.grown.iter().flatten().copied().chain(root).collect();
        let open = open.into_iter().filter(|&id| !round.tree.node(id).terminal);
        Ok(open
            .map(|id| {
                let (samples, until) = self.at(round.tree.node(id).depth);
                Expansion { until, ..Expansion::steps(id, samples) }
            })
            .collect())
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.choice.of(tree)
    }
    fn backup(&self) -> Backup {
        Backup::Children
    }
}

//! A running search: its tree, and the samples that its next round waits for.

use super::expand::{ChildDraw, Drawn};
use super::scorer::Judged;
use super::strategy::Built;
use super::turns;
use super::{DrawnTokens, Expansion, Node, Round, Tree, Until};
use crate::episode::{Episode, Prefix, Reach};
use crate::rollout::cut_at_stop;
use crate::source::Prompt;
use ferrl_engine::Result;
use ferrl_engine::generate::{Completion, SamplingParams, StopReason, Stops};
use ferrl_engine::tokenizer::Tokenizer;

/// Sampling parameters, and conversion of completions to text.
#[derive(Clone, Copy)]
pub(super) struct Sampling<'a> {
    /// Of a whole completion.
    pub params: &'a SamplingParams,
    pub tokenizer: &'a Tokenizer,
    pub stops: &'a Stops,
}

/// A running expansion.
struct Growing {
    asked: Expansion,
    /// Samples of this round, with the keys of their random numbers.
    draws: Vec<(ChildDraw, u64)>,
    slots: Vec<Option<Box<Episode>>>,
    drawn: usize,
    accepted: Vec<usize>,
}

/// A running search of one prompt.
pub(super) struct Live {
    /// Index of the prompt.
    pub place: usize,
    /// Its number, which determines its random numbers.
    pub number: u64,
    /// Its prompt, with the environment's first observation if there is one.
    pub prompt: Prompt,
    pub tree: Tree,
    pub built: Built,
    /// Whether it is an episode of several turns.
    plays: bool,
    /// Token ids of the prompt, and of the prompt with each of the expander's system messages.
    prompts: Vec<Vec<u32>>,
    growing: Vec<Growing>,
    /// Samples that are not complete.
    pub outstanding: usize,
    /// New nodes without scores.
    pub fresh: Vec<usize>,
    pub generated: u64,
    pub shared: u64,
    pub seconds: f64,
    /// Whether the search has ended, but for its result.
    finishing: bool,
}

/// Purpose of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BranchSlot {
    /// The environment's first observation.
    Opening,
    /// A sample: its expansion and its index there.
    ChildDraw(usize, usize),
}

/// A branch to start.
pub(super) struct BranchDraft {
    pub prefix: Prefix,
    pub reach: Reach,
    /// Sampling parameters of the action at the end of the prefix.
    pub first: Option<SamplingParams>,
    /// First tokens of the episode, if they are not the prompt's.
    pub opening: Option<Vec<u32>>,
    /// Sampling parameters of all later actions.
    pub params: SamplingParams,
    pub stream: [u32; 3],
}

pub(super) struct BranchTexts {
    /// The completion, or the last action of an episode.
    completion: String,
    /// The completion, or the whole text of an episode.
    transcript: String,
    /// Tokens of prompt and prefix.
    context: Vec<u32>,
}

impl Live {
    pub fn new((place, number): (usize, u64), prompt: &Prompt, built: Built, plays: bool) -> Self {
        Live {
            place,
            number,
            prompt: prompt.clone(),
            tree: Tree::new(number),
            built,
            plays,
            prompts: Vec::new(),
            growing: Vec::new(),
            outstanding: 0,
            fresh: Vec::new(),
            generated: 0,
            shared: 0,
            seconds: 0.0,
            finishing: false,
        }
    }

    /// Sets the tokens of the prompt.
    pub fn open(&mut self, systems: Vec<Vec<u32>>) {
        self.prompts = vec![self.prompt.ids.clone()];
        self.prompts.extend(systems);
    }

    /// Adds a completed branch; returns whether it was the first observation.
    pub fn fill(&mut self, slot: BranchSlot, mut episode: Episode) -> bool {
        self.outstanding -= 1;
        match slot {
            BranchSlot::Opening => {
                self.prompt = episode.begun.take().unwrap_or_else(|| self.prompt.clone());
                let lost = episode.played.and_then(|p| p.lost);
                self.tree.node_mut(0).lost = lost.map(|l| l.message);
                true
            }
            BranchSlot::ChildDraw(expansion, draw) => {
                let (sampled, shared) = episode.branch.as_ref().map_or((0, 0), |b| b.sampled);
                self.generated += sampled;
                self.shared += shared;
                self.growing[expansion].slots[draw] = Some(Box::new(episode));
                false
            }
        }
    }

    pub fn texts(&self, id: usize, sampling: Sampling<'_>) -> Result<BranchTexts> {
        let Some(reached) = &self.tree.node(id).drawn.reached else {
            let text = completion_text(&self.tree, id, sampling)?;
            let context =
                [self.prompts[opening(self.tree.system(id))].clone(), self.tree.tokens(id)].concat();
            return Ok(BranchTexts { transcript: text.clone(), completion: text, context });
        };
        let completion = reached.played.turns.last().map_or_else(String::new, |t| t.action.clone());
        let acting = reached.prefix.acting.iter().flat_map(|c| c.ids.iter().copied());
        let context = reached.prefix.context.iter().copied().chain(acting).collect();
        Ok(BranchTexts { completion, transcript: self.tree.text(id), context })
    }

    /// A node as scorers get it.
    pub fn judged<'l>(&'l self, id: usize, texts: &'l BranchTexts) -> Judged<'l> {
        let node = self.tree.node(id);
        Judged {
            prompt: &self.prompt,
            text: &texts.completion,
            transcript: &texts.transcript,
            context: &texts.context,
            played: node.drawn.reached.as_ref().map(|r| &r.played),
            sampled: self.tree.sampled(id),
            terminal: node.terminal,
            truncated: node.truncated,
            graded: None,
        }
    }

    /// Converts samples to nodes, in the order of expansions and samples.
    pub fn take_in(&mut self, sampling: Sampling<'_>) -> Result<()> {
        for growing in &mut self.growing {
            let draws = std::mem::take(&mut growing.draws);
            for ((draw, key), episode) in draws.into_iter().zip(std::mem::take(&mut growing.slots)) {
                let Some(mut episode) = episode else { continue };
                growing.drawn += 1;
                let mut node = match episode.completion.take() {
                    Some(completion) => node(&self.tree, growing.asked.node, completion, sampling)?,
                    None => turns::node(&self.tree, growing.asked.node, *episode, sampling)?,
                };
                node.drawn.tempered = draw.temperature.is_some_and(|t| t != sampling.params.temperature);
                let node = Node { rollout: growing.asked.rollout, system: draw.system, ..node };
                // An equal step of this or an earlier expansion: merged.
                let same = self.tree.steps(growing.asked.node).find(|&a| alike(self.tree.node(a), &node));
                if let Some(same) = same.filter(|_| growing.asked.merge) {
                    self.tree.node_mut(same).samples += 1;
                    continue;
                }
                let siblings: Vec<&Node> =
                    self.tree.steps(growing.asked.node).map(|a| self.tree.node(a)).collect();
                if growing.asked.rollout || self.built.expander.accepts(&node.text, &siblings) {
                    let id = self.tree.add_drawn(growing.asked.node, node, key);
                    growing.accepted.push(id);
                    let node = self.tree.node(id);
                    if (node.terminal || growing.asked.score) && node.lost.is_none() {
                        self.fresh.push(id);
                    }
                } else {
                    self.tree.reject(growing.asked.node);
                }
            }
        }
        Ok(())
    }

    /// What to sample next: more samples of running expansions, else the strategy's next round. Empty: the search has ended.
    pub fn advance(
        &mut self,
        sampling: Sampling<'_>,
        budget: Option<u64>,
    ) -> Result<Option<Vec<(BranchSlot, BranchDraft)>>> {
        if self.tree.node(0).lost.is_some() {
            return Ok(None);
        }
        loop {
            let wanted = self.draw(sampling);
            if !wanted.is_empty() {
                self.outstanding = wanted.len();
                return Ok(Some(wanted));
            }
            let grown: Vec<Vec<usize>> =
                std::mem::take(&mut self.growing).into_iter().map(|g| g.accepted).collect();
            if self.finishing {
                // A fallback: the strategy did not request this evaluation.
                let none = self.tree.node(0).visits == 0;
                for id in grown.into_iter().flatten().filter(|_| none) {
                    let score = self.tree.node(id).score.unwrap_or(0.0);
                    self.tree.evaluate(id, score);
                }
                return Ok(None);
            }
            let left = budget.map(|b| b.saturating_sub(self.generated));
            let mut round = Round { tree: &mut self.tree, grown: &grown, spent: self.generated, left };
            let mut asked = self.built.strategy.next(&mut round)?;
            if left == Some(0) {
                asked.clear();
            }
            if asked.is_empty() {
                if self.tree.terminals().next().is_some() {
                    return Ok(None);
                }
                // Every search has a result: the most promising prefix is completed.
                self.finishing = true;
                asked.push(Expansion::completions(self.most_promising(), 1));
            }
            self.growing = asked.into_iter().map(Growing::new).collect();
        }
    }

    /// The next samples of the expanders.
    fn draw(&mut self, sampling: Sampling<'_>) -> Vec<(BranchSlot, BranchDraft)> {
        let mut wanted = Vec::new();
        for (e, growing) in self.growing.iter_mut().enumerate() {
            let accepted: Vec<&Node> = growing.accepted.iter().map(|&a| self.tree.node(a)).collect();
            let so_far = Drawn {
                asked: &growing.asked,
                depth: self.tree.node(growing.asked.node).depth,
                draws: growing.drawn,
                accepted: &accepted,
            };
            // Rollouts are sampled with the policy's parameters, not the expander's.
            let draws = match growing.asked.rollout {
                true => vec![ChildDraw::default(); growing.asked.samples - growing.drawn],
                false => self.built.expander.draws(&so_far),
            };
            growing.slots = std::iter::repeat_with(|| None).take(draws.len()).collect();
            for (slot, draw) in draws.into_iter().enumerate() {
                let key = self.tree.draw_key(growing.asked.node);
                let until = if draw.to_the_end { Until::End } else { growing.asked.until };
                let system = self.tree.system(growing.asked.node).or(draw.system);
                let opening = &self.prompts[opening(system)];
                let prefix = prefix(&self.tree, growing.asked.node, opening, self.plays);
                let used = match self.plays {
                    true => prefix.acting.as_ref().map_or(0, |c| c.ids.len()),
                    false => self.tree.sampled(growing.asked.node).0,
                };
                let first = params(sampling.params, &self.built.common, &draw, (until, used));
                // The root's key is the prompt's number: together they are the stream's three words.
                let stream = [self.tree.question() as u32, (key >> 32) as u32, key as u32];
                let reach = if until == Until::Step { Reach::Step } else { Reach::End };
                let params = SamplingParams { temperature: first.temperature, ..sampling.params.clone() };
                let opening = system.map(|_| opening.clone());
                let draft = BranchDraft { prefix, reach, first: Some(first), opening, params, stream };
                wanted.push((BranchSlot::ChildDraw(e, slot), draft));
                growing.draws.push((draw, key));
            }
        }
        wanted
    }

    /// The prefix with the most visits; ties go to the most probable.
    fn most_promising(&self) -> usize {
        let key = |n: &Node| (n.visits, n.mean_logprob());
        let leaves = self.tree.nodes().iter().filter(|n| self.tree.children(n.id).is_empty());
        let better = |a: &&Node, b: &&Node| {
            let ((va, la), (vb, lb)) = (key(a), key(b));
            va.cmp(&vb).then(la.total_cmp(&lb)).then(b.id.cmp(&a.id))
        };
        leaves.max_by(better).map_or(0, |n| n.id)
    }
}

impl Growing {
    fn new(asked: Expansion) -> Self {
        Growing { asked, draws: Vec::new(), slots: Vec::new(), drawn: 0, accepted: Vec::new() }
    }
}

/// The prefix that a child of a node continues.
fn prefix(tree: &Tree, node: usize, opening: &[u32], plays: bool) -> Prefix {
    match &tree.node(node).drawn.reached {
        Some(reached) => reached.prefix.clone(),
        None if plays => Prefix { context: opening.to_vec(), ..Default::default() },
        None => Prefix { context: [opening, &tree.tokens(node)].concat(), ..Default::default() },
    }
}

/// Whether two steps are the same.
fn alike(a: &Node, b: &Node) -> bool {
    a.tokens == b.tokens && a.terminal == b.terminal && a.system == b.system
}

/// Index of the prompt's tokens with a system message, or without one.
fn opening(system: Option<usize>) -> usize {
    system.map_or(0, |s| s + 1)
}

/// Sampling parameters of a child: a step ends at its separator or its maximum number of tokens.
fn params(
    whole: &SamplingParams,
    common: &super::Common,
    draw: &ChildDraw,
    (until, used): (Until, usize),
) -> SamplingParams {
    let left = whole.max_new_tokens.saturating_sub(used).max(1);
    let mut params = SamplingParams { max_new_tokens: left, ..whole.clone() };
    params.temperature = draw.temperature.unwrap_or(whole.temperature);
    if until == Until::Step {
        if common.step_tokens > 0 {
            params.max_new_tokens = left.min(common.step_tokens);
        }
        if !common.separator.is_empty() {
            params.stop_strings.push(common.separator.clone());
        }
    }
    params
}

fn node(tree: &Tree, parent: usize, mut c: Completion, sampling: Sampling<'_>) -> Result<Node> {
    cut_at_stop(&tree.tokens(parent), &mut c, &sampling.params.stop_strings, sampling.tokenizer)?;
    let (used, _) = tree.sampled(parent);
    let full = used + c.ids.len() >= sampling.params.max_new_tokens;
    let ended = match c.stop {
        StopReason::Token(_) => true,
        StopReason::String(i) => i < sampling.params.stop_strings.len(),
        StopReason::Length | StopReason::Cancelled => false,
    };
    let version = c.versions.first().copied().unwrap_or_default();
    Ok(Node {
        text: text(tree, parent, (&c.ids, ended || full), sampling)?,
        logprob: c.logp.iter().map(|&l| f64::from(l)).sum(),
        terminal: ended || full,
        truncated: full && !ended,
        samples: 1,
        tokens: c.ids,
        drawn: DrawnTokens { version, logp: c.logp, ..Default::default() },
        ..Default::default()
    })
}

/// The text that tokens add below a node, so that the texts of a path join to the text of its tokens. A character may span two
/// nodes: it belongs to the node in which it ends, or to the last one of the path if it never does.
pub(super) fn text(
    tree: &Tree,
    parent: usize,
    (ids, terminal): (&[u32], bool),
    sampling: Sampling<'_>,
) -> Result<String> {
    let before = tree.tokens(parent);
    let decode = |ids: &[u32]| sampling.tokenizer.decode(ids, true);
    // Replacement characters at the end may be the start of a character.
    let settled = |text: &str| text.trim_end_matches('\u{FFFD}').len();
    let (earlier, all) = (decode(&before)?, decode(&[&before, ids].concat())?);
    let end = if terminal { all.len() } else { settled(&all) };
    match all.strip_prefix(&earlier[..settled(&earlier)]) {
        Some(own) => Ok(own[..own.len() - (all.len() - end)].to_string()),
        None => decode(ids),
    }
}

/// The text of a whole completion for verifiers (without stop strings), or of a prefix unchanged.
fn completion_text(tree: &Tree, id: usize, sampling: Sampling<'_>) -> Result<String> {
    let ids = tree.tokens(id);
    let stop = stop_of(tree, id, &ids, sampling)?;
    let (logp, sampled_logp, top, versions) = Default::default();
    sampling
        .stops
        .text(sampling.tokenizer, &Completion { ids, logp, sampled_logp, top, versions, shared: 0, stop })
}

/// Why a whole completion of these tokens ended; a limit for one that is not whole.
pub(super) fn stop_of(tree: &Tree, id: usize, ids: &[u32], sampling: Sampling<'_>) -> Result<StopReason> {
    let node = tree.node(id);
    let ends = node.terminal && !node.truncated;
    Ok(match ids.last() {
        Some(&last) if ends && sampling.params.stop_ids.contains(&last) => StopReason::Token(last),
        _ if ends && !sampling.params.stop_strings.is_empty() => {
            let text = sampling.tokenizer.decode(ids, true)?;
            let strings = sampling.params.stop_strings.iter();
            let found = strings.enumerate().filter_map(|(i, s)| Some((text.rfind(s.as_str())?, i))).max();
            found.map_or(StopReason::Length, |(_, i)| StopReason::String(i))
        }
        _ => StopReason::Length,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::tokenizer::train_chars;

    /// Was: in training the first stop string for every path that ended with one, so that the others stayed in the text that is
    /// rewarded.
    #[test]
    fn a_path_ends_with_the_stop_string_that_it_has() {
        let specials = ["<pad>", "<eos>"].map(String::from);
        let tokenizer = train_chars(["ab;#".to_string()].into_iter(), &specials).unwrap();
        let strings = ["#", ";"].map(String::from);
        let stops = Stops::default().with_strings(&strings, false);
        let params = SamplingParams { stop_strings: strings.to_vec(), ..Default::default() };
        let sampling = Sampling { params: &params, tokenizer: &tokenizer, stops: &stops };
        let mut tree = Tree::new(0);
        let tokens = |text: &str| tokenizer.encode_text(text).unwrap();
        let end = |text: &str| Node { tokens: tokens(text), terminal: true, ..Default::default() };
        for (text, stop, said) in [("ab;", 1, "ab"), ("b#", 0, "b")] {
            let id = tree.add(0, end(text));
            assert_eq!(stop_of(&tree, id, &tree.tokens(id), sampling).unwrap(), StopReason::String(stop));
            assert_eq!(completion_text(&tree, id, sampling).unwrap(), said);
        }
        let cut = tree.add(0, Node { truncated: true, ..end("a") });
        assert_eq!(stop_of(&tree, cut, &tree.tokens(cut), sampling).unwrap(), StopReason::Length);
    }
}

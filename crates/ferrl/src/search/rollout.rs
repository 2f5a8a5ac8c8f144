//! Trees as rollouts: every path of a tree is a training completion, and every step has the advantage of its node.
//!
//! A node's advantage is its value minus its parent's. Children are samples of the policy at their parent, but the search selects
//! the prefixes that are continued, so the frequency of paths is not their probability under the policy. The importance weight of a
//! path corrects this: the product over its nodes of `samples of the node / samples of it and its siblings`, times the number of
//! paths of the tree. Independent completions have weight 1; a path that ended early in a full tree weighs `b^(D - d)` times as much
//! as the others. Samples without a path keep their fraction and contribute nothing, since their value is unknown. Tokens sampled at
//! another temperature keep the log-probability of their sampling, and `algo.correction` weights them.

use super::grow::{Sampling, stop_of};
use super::strategy::Entry;
use super::tree::Reached;
use super::{
    Driver, Facts, LogpScorer, Node, Oracle, Record, RewardScorer, Scorer, SearchBudget, StepOracle, Tree,
    build, find,
};
use crate::algo::Feed;
use crate::experience::Sequence;
use crate::ranks::Teams;
use crate::recipe::{Recipe, SearchSettings};
use crate::reward::Rewards;
use crate::rollout::{Actor, RolloutCompletion, Sampled, gathered, texts};
use crate::setup;
use crate::source::Prompt;
use crate::verify::Hooks;
use ferrl_engine::generate::{Completion, SamplingParams};
use ferrl_engine::{Error, Result};
use ferrl_kernels::Backend;
use ferrl_kernels::philox::philox4x32;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Prompts that are searched concurrently.
const AT_ONCE: usize = 64;

/// A recipe's search with its scorer loaded.
pub struct Searcher {
    entry: &'static Entry,
    options: Map<String, Value>,
    budget: Option<u64>,
    scorer: Box<dyn Scorer>,
}

impl Searcher {
    /// The search of a recipe; `None` without a strategy.
    pub fn open(recipe: &Recipe, backend: &Arc<dyn Backend>) -> Result<Option<Self>> {
        let s = &recipe.search;
        let Some(name) = &s.strategy else { return Ok(None) };
        let entry = find(name).map_err(|e| e.at("search.strategy"))?;
        let scorer: Box<dyn Scorer> = match s.scorer.as_str() {
            "reward" => Box::new(Oracle),
            "step_oracle" => {
                let rewards = setup::rewards(recipe, Feed::Rollouts, backend, &Hooks::default())?;
                Box::new(StepOracle::new(rewards).map_err(|e| e.at("search.scorer"))?)
            }
            "logp" => Box::new(LogpScorer),
            dir => {
                let options = ("search.scorer_options.", &s.scorer_options);
                let scorer = RewardScorer::of_model(dir, options, recipe, backend);
                Box::new(scorer.map_err(|e| s.not_opened(e))?)
            }
        };
        let searcher = Searcher { entry, options: s.options.clone(), budget: s.budget, scorer };
        build(entry, &searcher.options, any_task(s)).map_err(|e| e.at("search.options"))?;
        Ok(Some(searcher))
    }

    /// Searches for every prompt. Returns records in the order of the prompts, each with its prompt, to which an environment may have
    /// added its first observation. Random numbers depend on the index from `first` on: a repeated prompt gets other ones.
    pub fn run(
        &mut self,
        actor: &mut Actor<'_>,
        prompts: &[Prompt],
        (first, params): (usize, SamplingParams),
        rewards: &Rewards,
    ) -> Result<Vec<(Record, Prompt)>> {
        let Actor { generator, policy, tokenizer, stops, environments, ranks } = actor;
        let actor = Actor { generator: &mut **generator, policy, tokenizer, stops, environments, ranks };
        let mut driver = Driver {
            actor,
            rewards: Some(rewards).filter(|r| !r.is_empty()),
            scorer: &mut *self.scorer,
            settings: SearchBudget { params, budget: self.budget, at_once: AT_ONCE },
            entry: self.entry,
            options: self.options.clone(),
            with_system: None,
        };
        let mut found = Vec::with_capacity(prompts.len());
        driver.run_numbered(prompts, &|_, place| (first + place) as u64, &mut |record, prompt| {
            found.push((record, prompt));
            Ok(())
        })?;
        if found.len() < prompts.len() {
            return Err(crate::interrupt::interrupted("searching"));
        }
        found.sort_by_key(|(record, _)| record.index);
        Ok(found)
    }

    /// The paths of a tree for each prompt, as completions with advantages and weights. Random numbers depend on the seed, the step
    /// and the prompt's index in the step; each rank searches for its part of the prompts.
    pub(crate) fn sample(
        &mut self,
        actor: &mut Actor<'_>,
        prompts: &mut [Prompt],
        params: &SamplingParams,
        rewards: &Rewards,
        step: u64,
    ) -> Result<Sampled> {
        let (ranks, own) = (actor.ranks, Teams::of(actor.ranks, actor.policy).share(prompts.len()));
        let (mut all, asked) = (Sampled::default(), &prompts[own.clone()]);
        let params = SamplingParams { seed: seed(params.seed, step), ..params.clone() };
        let found = actor.led(|actor| self.run(actor, asked, (own.start, params.clone()), rewards))?;
        for (place, (record, prompt)) in found.into_iter().enumerate() {
            take(&mut all, actor, (place, &prompt), (&record, &params))?;
            prompts[own.start + place] = prompt; // with the first observation of an environment
        }
        gathered(ranks, prompts, own, all)
    }
}

/// A seed for the trees of a step.
fn seed(seed: u64, step: u64) -> u64 {
    const TREE: [u32; 2] = [0x7472_6565, 1];
    let counter = [step as u32, (step >> 32) as u32, TREE[0], TREE[1]];
    let [a, b, _, _] = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(a) | u64::from(b) << 32
}

/// Adds the paths of a tree.
fn take(
    all: &mut Sampled,
    actor: &Actor<'_>,
    (place, prompt): (usize, &Prompt),
    (record, params): (&Record, &SamplingParams),
) -> Result<()> {
    let tree = &record.nodes;
    let ends: Vec<usize> = tree.terminals().map(|n| n.id).collect();
    for &end in &ends {
        if tree.path(end).iter().any(|&id| tree.node(id).system.is_some()) {
            return Err(Error::usage("completions with other system messages cannot be trained on")
                .at("search.options.expander")
                .fix("search.options.expander = \"iid\""));
        }
        if let Some(reached) = &tree.node(end).drawn.reached {
            take_episode(all, (place, prompt), (tree, end, ends.len()), (reached, params));
            continue;
        }
        let ids = tree.tokens(end);
        let sampling = Sampling { params, tokenizer: actor.tokenizer, stops: actor.stops };
        let stop = stop_of(tree, end, &ids, sampling)?;
        let (logp, sampled_logp, top, versions) = Default::default();
        let completion = Completion { ids, logp, sampled_logp, top, versions, shared: 0, stop };
        let text = texts(actor.tokenizer, actor.stops, std::slice::from_ref(&completion))?.remove(0);
        let (tokens, truncated) = (completion.ids.len(), tree.node(end).truncated);
        let (trajectory, temperature) = (all.completions.len(), Some(params.divisor()));
        let path = sequence(tree, end, prompt, ends.len());
        all.metrics.add("search/weight", f64::from(path.importance.unwrap_or(1.0)));
        all.experience.sequences.push(Sequence { group: place, trajectory, temperature, truncated, ..path });
        all.completions.push(RolloutCompletion { prompt: place, text, tokens, truncated, played: None });
    }
    all.metrics.add("search/paths", ends.len() as f64);
    all.metrics.add("search/nodes", tree.nodes().len() as f64);
    all.metrics.add("search/tokens", record.generated_tokens as f64);
    all.metrics.add("search/value", tree.node(0).value);
    Ok(())
}

/// Adds the episode that ends in a node: its sequences, with the advantage of each node on its sampled tokens.
fn take_episode(
    all: &mut Sampled,
    (place, prompt): (usize, &Prompt),
    (tree, end, paths): (&Tree, usize, usize),
    (reached, params): (&Reached, &SamplingParams),
) {
    let nodes: Vec<&Node> = tree.path(end).into_iter().skip(1).map(|id| tree.node(id)).collect();
    let mut advantages = nodes.iter().flat_map(|n| n.tokens.iter().map(|_| n.advantage as f32));
    let own = nodes.iter().all(|n| !n.drawn.tempered);
    let (tokens, truncated) = (tree.sampled(end).0, tree.node(end).truncated);
    let importance = (path_frequency(tree, end) * paths as f64) as f32;
    let trajectory = all.completions.len();
    for (n, s) in reached.sequences.iter().enumerate() {
        let mut s = s.clone();
        s.credit = vec![0.0; s.ids.len()];
        for i in if n == 0 { prompt.ids.len() } else { 0 }..s.ids.len() {
            let advantage = advantages.next().unwrap_or(0.0);
            if s.trained.get(i).copied().unwrap_or(false) {
                s.credit[i - 1] = advantage;
            }
        }
        s.version = if own { s.version } else { Vec::new() };
        all.experience.sequences.push(Sequence {
            group: place,
            trajectory,
            trajectory_tokens: tokens,
            truncated,
            bootstrap: truncated,
            temperature: Some(params.divisor()),
            importance: Some(importance),
            ..s
        });
    }
    all.metrics.add("search/weight", f64::from(importance));
    let played = reached.played.clone();
    all.completions.push(RolloutCompletion {
        prompt: place,
        text: played.text(),
        tokens,
        truncated,
        played: Some(played),
    });
}

/// The training sequence of a path, with the advantage of each node on its tokens and the path's weight.
fn sequence(tree: &Tree, end: usize, prompt: &Prompt, paths: usize) -> Sequence {
    let from = prompt.ids.len();
    let ids = [&prompt.ids[..], &tree.tokens(end)].concat();
    let n = ids.len();
    let (mut credit, mut sampled_logp, mut version) = (vec![0.0; n], vec![0.0; n], vec![0; n]);
    let (mut at, mut own) = (from, true);
    for node in tree.path(end).into_iter().skip(1).map(|id| tree.node(id)) {
        for (i, position) in (at - 1..at - 1 + node.tokens.len()).enumerate() {
            credit[position] = node.advantage as f32;
            sampled_logp[position] = node.drawn.logp.get(i).copied().unwrap_or(0.0);
            version[position] = node.drawn.version;
        }
        at += node.tokens.len();
        own &= !node.drawn.tempered && node.drawn.logp.len() == node.tokens.len();
    }
    Sequence {
        trained: (0..n).map(|i| i >= from).collect(),
        ids,
        reward: vec![0.0; n],
        weight: 1.0,
        trajectory_tokens: n - from,
        credit,
        // Without a version, log-probabilities at the rollout's temperature are computed before the update.
        version: if own { version } else { Vec::new() },
        sampled_logp,
        importance: Some((path_frequency(tree, end) * paths as f64) as f32),
        ..Default::default()
    }
}

/// Frequency of a path in the tree: the product of its nodes' fractions of the samples at their parents.
pub fn path_frequency(tree: &Tree, end: usize) -> f64 {
    let share = |id: usize| {
        let node = tree.node(id);
        let parent = node.parent?;
        let all: u64 = tree.children(parent).iter().map(|&c| tree.node(c).samples).sum();
        Some(node.samples as f64 / all.max(1) as f64)
    };
    tree.path(end).into_iter().filter_map(share).product()
}

pub(crate) fn check(s: &SearchSettings) -> Result<()> {
    let Some(name) = &s.strategy else { return Ok(()) };
    let entry = find(name).map_err(|e| e.at("search.strategy"))?;
    let built = build(entry, &s.options, any_task(s))?;
    match built.expander.systems().is_empty() {
        true => Ok(()),
        false => Err(Error::usage("completions with other system messages cannot be trained on")
            .fix("search.options.expander = \"iid\"; `ferrl search` tries system messages")),
    }
}

/// Facts assumed before the first prompt; the driver checks the options again for each prompt.
fn any_task(s: &SearchSettings) -> Facts {
    Facts { turns: true, judges_steps: s.judges_steps(), budgeted: s.budget.is_some(), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::super::{Backup, DrawnTokens, Prior};
    use super::*;

    fn node(tokens: &[u32], terminal: bool) -> Node {
        let logp = tokens.iter().map(|&t| -(t as f32)).collect();
        let drawn = DrawnTokens { logp, version: 7, ..Default::default() };
        Node { tokens: tokens.to_vec(), terminal, drawn, ..Default::default() }
    }

    /// Two steps off the prompt: the first ends at once, the second has three ends, of which two draws are one node.
    fn tree() -> (Tree, Vec<usize>) {
        let mut tree = Tree::new(0);
        let early = tree.add(0, node(&[1], true));
        let step = tree.add(0, node(&[2, 3], false));
        let good = tree.add(step, Node { samples: 2, ..node(&[4], true) });
        let bad = tree.add(step, node(&[5], true));
        for (id, value) in [(early, 0.0), (good, 1.0), (bad, 0.0)] {
            tree.evaluate(id, value);
        }
        tree.recompute(Backup::Children, Prior::Logp);
        (tree, vec![early, good, bad])
    }

    #[test]
    fn a_path_has_the_advantages_of_its_nodes_and_the_weight_of_its_draws() {
        let (tree, ends) = tree();
        let shares: Vec<f64> = ends.iter().map(|&end| path_frequency(&tree, end)).collect();
        assert_eq!(shares, [0.5, 0.5 * 2.0 / 3.0, 0.5 / 3.0]);
        let prompt = Prompt { ids: vec![8, 9], ..Default::default() };
        let s = sequence(&tree, ends[1], &prompt, 3);
        assert_eq!((s.ids.as_slice(), s.trajectory_tokens), (&[8, 9, 2, 3, 4][..], 3));
        assert_eq!(s.trained, [false, false, true, true, true]);
        // Values 0.25 (the root), 0.5 and 1: the first step has two tokens.
        assert_eq!(s.credit, [0.0, 0.25, 0.25, 0.5, 0.0]);
        assert_eq!(s.sampled_logp, [0.0, -2.0, -3.0, -4.0, 0.0]);
        assert_eq!((s.version[1], s.importance), (7, Some(1.0)), "a third of the draws, of three paths");
        let mut hot = tree.clone();
        hot.node_mut(ends[1]).drawn.tempered = true;
        assert!(sequence(&hot, ends[1], &prompt, 3).version.is_empty(), "its old logp is computed");
    }

    /// A search that continues the better of two prefixes four times as often: weighted by their shares, paths are as frequent
    /// as under the policy, which takes the first step A with probability 0.3 and from there ends well with 0.9, else 0.2.
    #[test]
    fn weights_make_paths_as_frequent_as_under_the_policy() {
        let mut state = 1u64;
        let mut chance = move |p: f64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as f64 / (1u64 << 31) as f64) < p
        };
        let (mut right, mut plain, mut paths, trees) = (0.0, 0.0, 0.0, 20_000);
        for _ in 0..trees {
            let mut tree = Tree::new(0);
            let mut ends = Vec::new();
            for _ in 0..2 {
                let first = chance(0.3);
                let step = tree.add(0, node(&[1], false));
                for _ in 0..if first { 4 } else { 1 } {
                    ends.push((tree.add(step, node(&[2], true)), chance(if first { 0.9 } else { 0.2 })));
                }
            }
            for &(end, good) in &ends {
                right += path_frequency(&tree, end) * f64::from(u8::from(good));
                plain += f64::from(u8::from(good));
                paths += 1.0;
            }
        }
        let exact = 0.3 * 0.9 + 0.7 * 0.2;
        let found = right / f64::from(trees);
        assert!((found - exact).abs() < 0.01, "{found} against {exact}");
        assert!(plain / paths > exact + 0.1, "without weights the better prefix counts too often");
    }
}

//! The driver: searches for many prompts concurrently on one generator.
//!
//! Each search advances as soon as its own samples are complete, so that all share the decode batches; a tree depends on its own
//! samples alone. A sample is a branch of an episode (of one turn without an environment) whose prompt is the prefix: a generator
//! with a prefix cache does not recompute it, and `shared` counts the cached tokens.

use super::extract::{AnswerReader, Extractor};
use super::grow::{BranchDraft, BranchSlot, Live, Sampling};
use super::record::Record;
use super::scorer::{Judged, Oracle, grade_whole, unit, warn_of_bounds};
use super::strategy::{self, Entry};
use super::{Facts, Scorer};
use crate::episode::{Branch, Episode, EpisodeLoop, Prefix, Reach};
use crate::interrupt;
use crate::reward::{CompletionScores, Rewards};
use crate::rollout::Actor;
use crate::source::Prompt;
use ferrl_engine::generate::SamplingParams;
use ferrl_engine::{Error, Result, counted};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

#[derive(Clone, Debug)]
pub struct SearchBudget {
    /// Of a whole completion, or of an action of an episode: its length, temperature, stops and seed.
    pub params: SamplingParams,
    /// Token budget per prompt: the search ends after the round that reaches it.
    pub budget: Option<u64>,
    /// Maximum number of concurrent searches.
    pub at_once: usize,
}

/// A prompt's token ids with another system message.
pub type WithSystem<'a> = &'a dyn Fn(&Prompt, &str) -> Result<Vec<u32>>;

/// Searches for many prompts.
pub struct Driver<'a> {
    pub actor: Actor<'a>,
    /// The rewards that decide whether a completion is right, if any.
    pub rewards: Option<&'a Rewards>,
    /// Scores prefixes and completions for the search.
    pub scorer: &'a mut dyn Scorer,
    /// Sampling parameters and budget.
    pub settings: SearchBudget,
    /// The strategy.
    pub entry: &'static Entry,
    pub options: Map<String, Value>,
    /// For expanders that try several system messages.
    pub with_system: Option<WithSystem<'a>>,
}

impl Driver<'_> {
    /// Searches for every prompt; calls `done` with each result. Ctrl-C ends it early, without an error.
    pub fn run(&mut self, prompts: &[Prompt], done: &mut dyn FnMut(Record) -> Result<()>) -> Result<()> {
        self.run_numbered(prompts, &|prompt, _| prompt.index, &mut |record, _| done(record))
    }

    /// The same with the numbers that determine the random numbers; `done` also gets the prompt, with its environment's first
    /// observation.
    pub(super) fn run_numbered(
        &mut self,
        prompts: &[Prompt],
        number: &dyn Fn(&Prompt, usize) -> u64,
        done: &mut dyn FnMut(Record, Prompt) -> Result<()>,
    ) -> Result<()> {
        let facts = self.facts();
        let mut search = ActiveSearch {
            episodes: EpisodeLoop::new(&mut self.actor, prompts),
            prompts,
            rewards: self.rewards,
            scorer: self.scorer,
            settings: &self.settings,
            entry: self.entry,
            options: &self.options,
            with_system: self.with_system,
            facts,
            under_way: HashMap::new(),
            scored: 0,
            lost: 0,
        };
        let result = search.run(number, done);
        search.episodes.end();
        result
    }

    /// Facts that determine defaults of options.
    pub fn facts(&self) -> Facts {
        Facts {
            budgeted: self.settings.budget.is_some(),
            judges_steps: self.scorer.judges_steps(),
            informed: self.scorer.name() != super::LogpScorer.name(),
            ..Default::default()
        }
    }
}

struct ActiveSearch<'s, 'a> {
    episodes: EpisodeLoop<'s, 'a>,
    prompts: &'s [Prompt],
    rewards: Option<&'s Rewards>,
    scorer: &'s mut dyn Scorer,
    settings: &'s SearchBudget,
    entry: &'static Entry,
    options: &'s Map<String, Value>,
    with_system: Option<WithSystem<'s>>,
    facts: Facts,
    /// Running branches: their search and purpose.
    under_way: HashMap<usize, (usize, BranchSlot)>,
    /// Nodes with a score so far.
    scored: usize,
    /// Nodes so far whose verifier or scorer failed.
    lost: usize,
}

/// Failures of verifier or scorer after which a search without any score ends.
const HOPELESS: usize = 16;

/// Running searches by index.
type LiveQuestions = BTreeMap<usize, Live>;

/// Divides the time since the last call among the running searches.
fn spend(live: &mut LiveQuestions, since: &mut Instant) {
    let share = since.elapsed().as_secs_f64() / live.len().max(1) as f64;
    *since = Instant::now();
    live.values_mut().for_each(|l| l.seconds += share);
}

impl ActiveSearch<'_, '_> {
    fn run(
        &mut self,
        number: &dyn Fn(&Prompt, usize) -> u64,
        done: &mut dyn FnMut(Record, Prompt) -> Result<()>,
    ) -> Result<()> {
        let (mut live, mut next) = (LiveQuestions::new(), 0);
        let mut since = Instant::now();
        loop {
            while live.len() < self.settings.at_once.max(1) && next < self.prompts.len() {
                let question = self.begin(next, number(&self.prompts[next], next))?;
                live.insert(next, question);
                next += 1;
            }
            loop {
                let ready: Vec<usize> =
                    live.values().filter(|l| l.outstanding == 0).map(|l| l.place).collect();
                if ready.is_empty() {
                    break;
                }
                spend(&mut live, &mut since);
                for (record, prompt) in self.settle(&mut live, &ready)? {
                    done(record, prompt)?;
                }
            }
            if live.is_empty() && next < self.prompts.len() {
                continue;
            }
            if live.is_empty() || interrupt::requested() {
                return Ok(());
            }
            let over = self.episodes.step()?;
            spend(&mut live, &mut since);
            for (id, episode) in over {
                let Some((place, slot)) = self.under_way.remove(&id) else { continue };
                let Some(question) = live.get_mut(&place) else { continue };
                if question.fill(slot, episode) {
                    self.open(question)?;
                }
            }
        }
    }

    /// Starts a search; an environment, if any, first returns its initial observation.
    fn begin(&mut self, place: usize, number: u64) -> Result<Live> {
        let prompt = &self.prompts[place];
        let turns = self.episodes.actor.environments.plays(prompt);
        let facts = Facts { turns, ..self.facts };
        let built = strategy::build(self.entry, self.options, facts)?;
        let mut question = Live::new((place, number), prompt, built, turns);
        match turns {
            true => {
                question.outstanding = 1;
                let draft = BranchDraft::opening(&self.settings.params);
                self.submit(place, BranchSlot::Opening, draft)?;
            }
            false => self.open(&mut question)?,
        }
        Ok(question)
    }

    /// Sets the tokens of the prompt, and of the prompt with each of the expander's system messages.
    fn open(&self, question: &mut Live) -> Result<()> {
        let with = |system: &String| match self.with_system {
            Some(with) => with(&question.prompt, system),
            None => Err(Error::usage("expanders with system messages work in `ferrl search` only")
                .at("search.options.expander")
                .fix("search.options.expander = \"iid\"")),
        };
        let systems = question.built.expander.systems().iter().map(with).collect::<Result<Vec<_>>>()?;
        question.open(systems);
        Ok(())
    }

    /// Starts a branch of an episode.
    fn submit(&mut self, place: usize, slot: BranchSlot, draft: BranchDraft) -> Result<()> {
        let prompt = &self.prompts[place];
        let environment = self.episodes.actor.environments.open(prompt)?;
        let BranchDraft { prefix, reach, first, opening, params, stream } = draft;
        let episode = Episode::new(place, prompt, environment, (&Arc::new(params), stream));
        let mut branch = Branch::new(prefix, reach);
        (branch.first, branch.opening) = (first, opening);
        let id = self.episodes.begin(episode.branching(branch))?;
        self.under_way.insert(id, (place, slot));
        Ok(())
    }

    /// Adds the samples of searches whose round is complete to their trees, scores the new nodes, and submits the next round.
    fn settle(&mut self, live: &mut LiveQuestions, ready: &[usize]) -> Result<Vec<(Record, Prompt)>> {
        let params = self.settings.params.clone();
        let (tokenizer, stops) = (self.episodes.actor.tokenizer, self.episodes.actor.stops);
        let sampling = Sampling { params: &params, tokenizer, stops };
        for place in ready {
            if let Some(l) = live.get_mut(place) {
                l.take_in(sampling)?;
            }
        }
        self.judge(live, ready, sampling)?;
        let mut records = Vec::new();
        for place in ready {
            let Some(l) = live.get_mut(place) else { continue };
            match l.advance(sampling, self.settings.budget)? {
                Some(wanted) => {
                    for (slot, draft) in wanted {
                        self.submit(*place, slot, draft)?;
                    }
                }
                None => {
                    if let Some(l) = live.remove(place) {
                        records.push(self.record(l));
                    }
                }
            }
        }
        Ok(records)
    }

    /// Grades and scores the new nodes of some searches in one batch.
    fn judge(&mut self, live: &mut LiveQuestions, ready: &[usize], sampling: Sampling<'_>) -> Result<()> {
        let mut fresh = Vec::new();
        for place in ready {
            let Some(l) = live.get_mut(place) else { continue };
            for id in std::mem::take(&mut l.fresh) {
                fresh.push((*place, id, l.texts(id, sampling)?));
            }
        }
        if fresh.is_empty() {
            return Ok(());
        }
        let mut all: Vec<Judged<'_>> =
            fresh.iter().map(|(place, id, texts)| live[place].judged(*id, texts)).collect();
        let whole: Vec<usize> = (0..all.len()).filter(|&i| all[i].terminal).collect();
        let graded = match self.rewards {
            Some(rewards) => {
                let judged: Vec<Judged<'_>> = whole.iter().map(|&i| all[i]).collect();
                let graded = grade_whole(rewards, &judged)?;
                if self.scorer.name() == Oracle.name() {
                    warn_of_bounds(rewards, &graded);
                }
                graded
            }
            None => Vec::new(),
        };
        let mut failures: Vec<Option<Error>> = vec![None; all.len()];
        for (&i, (g, failure)) in whole.iter().zip(&graded) {
            all[i].graded = Some(g);
            failures[i].clone_from(failure);
        }
        let scores = self.scorer.score(&all)?;
        let answers = self.answers(&all, live.values().next().map(|l| l.built.extractor.as_str()))?;
        let graded: Vec<Option<CompletionScores>> = all.iter().map(|j| j.graded.cloned()).collect();
        let verdicts = scores.into_iter().zip(failures).zip(answers).zip(graded);
        for ((place, id, ..), (((score, failure), (answer, asked)), graded)) in fresh.iter().zip(verdicts) {
            let Some(l) = live.get_mut(place) else { continue };
            l.generated += asked as u64;
            let node = l.tree.node_mut(*id);
            node.score = score.as_ref().ok().map(|score| score.clamp(0.0, 1.0));
            if node.terminal {
                node.answer = answer;
                let scored = node.score.filter(|_| self.rewards.is_none());
                node.reward = graded.as_ref().and_then(|g| g.reward).or(scored);
                node.correct =
                    graded.as_ref().filter(|g| !g.is_lost()).map(|g| g.is_right() || unit(g) >= 1.0);
            }
            // A lost one says nothing of the others; a function that fails every time does.
            let failure = failure.or(score.err());
            node.lost = failure.as_ref().map(Error::to_string);
            match failure {
                None => self.scored += 1,
                Some(_) => self.lost += 1,
            }
            if let Some(failure) = failure.filter(|_| self.scored == 0 && self.lost >= HOPELESS) {
                let what = format!("none of the first {} got a reward", counted(self.lost, "completion"));
                return Err(failure.context(what));
            }
        }
        Ok(())
    }

    /// The answers in whole completions, and the tokens sampled for each.
    fn answers(
        &mut self,
        all: &[Judged<'_>],
        extractor: Option<&str>,
    ) -> Result<Vec<(Option<String>, usize)>> {
        let Some(name) = extractor else { return Ok(vec![(None, 0); all.len()]) };
        let extractor = Extractor::find(name)?;
        let params = &self.settings.params;
        let mut reader = AnswerReader { actor: &mut *self.episodes.actor, rewards: self.rewards, params };
        extractor.answers(all, &mut reader)
    }

    fn record(&self, mut live: Live) -> (Record, Prompt) {
        live.tree.recompute(live.built.strategy.backup(), live.built.strategy.prior());
        live.tree.finish();
        let answer = live.built.strategy.answer(&live.tree);
        let node = answer.map(|id| live.tree.node(id));
        let record = Record {
            index: live.number,
            prompt: live.prompt.text.clone(),
            strategy: self.entry.name.into(),
            options: strategy::resolved(self.entry, self.options),
            scorer: self.scorer.name().into(),
            facts: live.built.common.facts,
            seed: self.settings.params.seed,
            answer: node.and_then(|n| n.answer.clone()).unwrap_or_default(),
            answer_node: answer,
            reward: node.and_then(|n| n.reward),
            correct: node.and_then(|n| n.correct),
            generated_tokens: live.generated,
            shared_tokens: live.shared,
            seconds: live.seconds,
            nodes: live.tree,
        };
        (record, live.prompt)
    }
}

impl BranchDraft {
    /// A branch that only starts its environment.
    fn opening(params: &SamplingParams) -> Self {
        let (first, opening, stream) = (None, None, [0; 3]);
        BranchDraft {
            prefix: Prefix::default(),
            reach: Reach::Start,
            first,
            opening,
            params: params.clone(),
            stream,
        }
    }
}

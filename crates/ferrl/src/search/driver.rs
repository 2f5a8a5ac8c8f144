//! The driver: many questions at once over one generator.
//!
//! Each question advances as soon as its own draws are there, so that all of them share the decode batches; what a question's
//! tree becomes depends on its own draws alone. A child is a request whose prompt is the prefix: a generator with a prefix
//! cache computes none of it again, and `shared` counts what it found.

use super::Scorer;
use super::extract::{AnswerReader, Extractor};
use super::grow::{Live, Sampling, completion_text};
use super::record::Record;
use super::scorer::{Judged, grade, unit};
use super::strategy::{self, Common, Entry};
use crate::interrupt;
use crate::reward::{Graded, Rewards};
use crate::rollout::Actor;
use crate::source::Prompt;
use ferrl_engine::generate::{Event, Id, SamplingParams};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// How a search samples, and how much.
#[derive(Clone, Debug)]
pub struct SearchBudget {
    /// Of a whole completion: its length, temperature, stops and seed.
    pub params: SamplingParams,
    /// Tokens to sample for a question at most, up to the end of the round under way.
    pub budget: Option<u64>,
    /// Questions under way at once.
    pub at_once: usize,
}

/// A prompt's token ids with another system message.
pub type WithSystem<'a> = &'a dyn Fn(&Prompt, &str) -> Result<Vec<u32>>;

/// Searches for many questions.
pub struct Driver<'a> {
    /// The policy.
    pub actor: Actor<'a>,
    /// What says whether a completion is right, where something does.
    pub rewards: Option<&'a Rewards>,
    /// Scores prefixes and completions for the search.
    pub scorer: &'a mut dyn Scorer,
    /// How much to sample.
    pub settings: SearchBudget,
    /// The strategy.
    pub entry: &'static Entry,
    /// Its options.
    pub options: Map<String, Value>,
    /// For expanders that try several system messages.
    pub with_system: Option<WithSystem<'a>>,
}

/// The requests under way: question, and expansion and slot there.
type Requests = HashMap<Id, (usize, (usize, usize))>;

/// Shares the time since the last call among the questions under way.
fn spend(live: &mut BTreeMap<usize, Live>, since: &mut Instant) {
    let share = since.elapsed().as_secs_f64() / live.len().max(1) as f64;
    *since = Instant::now();
    live.values_mut().for_each(|l| l.seconds += share);
}

impl Driver<'_> {
    /// Searches for every prompt; `done` gets each result as it is there. Ctrl-C ends it early, without an error.
    pub fn run(&mut self, prompts: &[Prompt], done: &mut dyn FnMut(Record) -> Result<()>) -> Result<()> {
        let mut requests = Requests::new();
        let result = self.search(prompts, &mut requests, done);
        requests.keys().for_each(|&id| drop(self.actor.generator.cancel(id)));
        result
    }

    /// What decides that the options do not.
    pub fn facts(&self) -> Common {
        Common {
            budgeted: self.settings.budget.is_some(),
            judges_steps: self.scorer.judges_steps(),
            informed: self.scorer.name() != super::LogpScorer.name(),
            ..Default::default()
        }
    }

    fn search(
        &mut self,
        prompts: &[Prompt],
        requests: &mut Requests,
        done: &mut dyn FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        let (mut live, mut next, mut others) = (BTreeMap::<usize, Live>::new(), 0, Vec::new());
        let mut since = Instant::now();
        loop {
            let mut ready = Vec::new();
            while live.len() < self.settings.at_once.max(1) && next < prompts.len() {
                live.insert(next, self.begin(next, &prompts[next])?);
                ready.push(next);
                next += 1;
            }
            loop {
                ready.extend(live.values().filter(|l| l.outstanding == 0).map(|l| l.place));
                ready.sort_unstable();
                ready.dedup();
                if ready.is_empty() {
                    break;
                }
                spend(&mut live, &mut since);
                for record in self.settle(prompts, &mut live, &ready, requests)? {
                    done(record)?;
                }
                ready.clear();
            }
            if live.is_empty() && next < prompts.len() {
                continue;
            }
            if live.is_empty() || interrupt::requested() {
                self.actor.generator.put_back(others);
                return Ok(());
            }
            let events = self.actor.generator.step(self.actor.policy)?;
            spend(&mut live, &mut since);
            for event in events {
                match event {
                    Event::Done { id, completion } if requests.contains_key(&id) => {
                        let (place, slot) = requests.remove(&id).unwrap_or_default();
                        if let Some(live) = live.get_mut(&place) {
                            live.fill(slot, completion);
                        }
                    }
                    Event::Token { id, .. } if requests.contains_key(&id) => {}
                    other => others.push(other),
                }
            }
        }
    }

    fn begin(&self, place: usize, prompt: &Prompt) -> Result<Live> {
        if self.actor.environments.plays(prompt) {
            return Err(Error::usage("plays episodes of several turns, which a search does not branch")
                .at(prompt.episode.as_ref().map_or("env".into(), |e| format!("task:{}", e.task)))
                .fix("a task whose prompts have one completion, or `ferrl eval` for episodes"));
        }
        let built = strategy::build(self.entry, &self.options, &self.facts())?;
        let with = |system: &String| match self.with_system {
            Some(with) => with(prompt, system),
            None => Err(Error::usage("system messages need a model with a chat template")),
        };
        let systems = built.expander.systems().iter().map(with).collect::<Result<_>>()?;
        Ok(Live::new(place, prompt, systems, built))
    }

    /// Takes in the draws of questions that wait for none, scores what is new, and submits what they want next.
    fn settle(
        &mut self,
        prompts: &[Prompt],
        live: &mut BTreeMap<usize, Live>,
        ready: &[usize],
        requests: &mut Requests,
    ) -> Result<Vec<Record>> {
        let params = self.settings.params.clone();
        let (tokenizer, stops) = (self.actor.tokenizer, self.actor.stops);
        let sampling = Sampling { params: &params, tokenizer, stops };
        for place in ready {
            if let Some(l) = live.get_mut(place) {
                l.take_in(sampling)?;
            }
        }
        self.judge(prompts, live, ready, sampling)?;
        let mut records = Vec::new();
        for place in ready {
            let Some(l) = live.get_mut(place) else { continue };
            match l.advance(sampling, self.settings.budget)? {
                Some(wanted) => {
                    for (slot, request) in wanted {
                        let at = |e: Error| match prompts[*place].place.as_str() {
                            "" => e.at(format!("question {}", prompts[*place].index)),
                            place => e.at(place),
                        };
                        requests.insert(self.actor.generator.submit(request).map_err(at)?, (*place, slot));
                    }
                }
                None => {
                    if let Some(l) = live.remove(place) {
                        records.push(self.record(&prompts[*place], l));
                    }
                }
            }
        }
        Ok(records)
    }

    /// Grades and scores the new nodes of some questions together.
    fn judge(
        &mut self,
        prompts: &[Prompt],
        live: &mut BTreeMap<usize, Live>,
        ready: &[usize],
        sampling: Sampling<'_>,
    ) -> Result<()> {
        let mut fresh = Vec::new();
        for place in ready {
            let Some(l) = live.get_mut(place) else { continue };
            for id in std::mem::take(&mut l.fresh) {
                fresh.push((*place, id, completion_text(&l.tree, id, sampling)?, l.tree.tokens(id)));
            }
        }
        let judged = |&(place, id, ref text, ref ids): &'_ (usize, usize, String, Vec<u32>)| {
            let tree = &live[&place].tree;
            let (terminal, truncated) = (tree.node(id).terminal, tree.node(id).truncated);
            (place, text.clone(), ids.clone(), tree.sampled(id), terminal, truncated)
        };
        let texts: Vec<_> = fresh.iter().map(judged).collect();
        let mut all: Vec<Judged<'_>> = texts
            .iter()
            .map(|(place, text, ids, sampled, terminal, truncated)| Judged {
                prompt: &prompts[*place],
                text,
                ids,
                sampled: *sampled,
                terminal: *terminal,
                truncated: *truncated,
                graded: None,
            })
            .collect();
        let whole: Vec<usize> = (0..all.len()).filter(|&i| all[i].terminal).collect();
        let graded = match self.rewards {
            Some(rewards) => {
                let judged: Vec<Judged<'_>> = whole.iter().map(|&i| all[i]).collect();
                grade(rewards, &judged)?
            }
            None => Vec::new(),
        };
        for (&i, g) in whole.iter().zip(&graded) {
            all[i].graded = Some(g);
        }
        let scores = if all.is_empty() { Vec::new() } else { self.scorer.score(&all)? };
        let answers = self.answers(&all, live.values().next().map(|l| l.built.extractor.as_str()))?;
        let graded: Vec<Option<Graded>> = all.iter().map(|j| j.graded.cloned()).collect();
        for ((((place, id, ..), score), answer), graded) in fresh.iter().zip(scores).zip(answers).zip(graded)
        {
            let Some(l) = live.get_mut(place) else { continue };
            let node = l.tree.node_mut(*id);
            node.score = Some(score.clamp(0.0, 1.0));
            if node.terminal {
                node.answer = answer;
                node.reward =
                    graded.as_ref().and_then(|g| g.reward).or(self.rewards.is_none().then_some(score));
                node.correct =
                    graded.as_ref().filter(|g| !g.is_lost()).map(|g| g.is_right() || unit(g) >= 1.0);
            }
        }
        Ok(())
    }

    /// The answers in whole completions.
    fn answers(&mut self, all: &[Judged<'_>], extractor: Option<&str>) -> Result<Vec<Option<String>>> {
        let Some(name) = extractor else { return Ok(vec![None; all.len()]) };
        let extractor = Extractor::find(name)?;
        let params = &self.settings.params;
        let mut reader = AnswerReader { actor: &mut self.actor, rewards: self.rewards, params };
        extractor.answers(all, &mut reader)
    }

    fn record(&self, prompt: &Prompt, mut live: Live) -> Record {
        live.tree.recompute(live.built.strategy.backup(), live.built.strategy.prior());
        live.tree.finish();
        let answer = live.built.strategy.answer(&live.tree);
        let node = answer.map(|id| live.tree.node(id));
        Record {
            index: prompt.index,
            prompt: prompt.text.clone(),
            strategy: self.entry.name.into(),
            options: strategy::resolved(self.entry, &self.options),
            scorer: self.scorer.name().into(),
            facts: self.facts().into(),
            seed: self.settings.params.seed,
            answer: node.and_then(|n| n.answer.clone()).unwrap_or_default(),
            answer_node: answer,
            reward: node.and_then(|n| n.reward),
            correct: node.and_then(|n| n.correct),
            generated_tokens: live.generated,
            shared_tokens: live.shared,
            seconds: live.seconds,
            nodes: live.tree,
        }
    }
}

//! The loop over all episodes of a step.

use super::threads::{EnvReply, EnvironmentCall, Threads};
use super::tokens::EncodedTexts;
use super::{Episode, TimeShares, TurnRecord};
use crate::env::{self, EpisodeEnd, Fault, Lost, Next, Turn, Why};
use crate::interrupt;
use crate::rollout::{Actor, RolloutRequest};
use crate::source::Prompt;
use ferrl_engine::generate::{Completion, Event, Id};
use ferrl_engine::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of interrupt checks during waits for environments.
const LOOK: Duration = Duration::from_millis(100);

/// All episodes, in the order of prompts and samples, and the fractions of time.
pub(crate) struct Plays {
    pub episodes: Vec<Episode>,
    pub time: TimeShares,
}

#[derive(Default)]
struct Spent {
    /// In decode batches.
    decoding: Duration,
    /// In environments of this process, and in waits for others with nothing to decode.
    environments: Duration,
}

impl Spent {
    fn shares(&self, whole: Duration) -> TimeShares {
        let share = |part: Duration| part.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let (decoding, environments) = (share(self.decoding), share(self.environments));
        TimeShares { decoding, overhead: (1.0 - decoding - environments).max(0.0) }
    }
}

/// Plays every prompt `samples` times. Prompts that start with an environment's observation get its text and tokens.
pub(crate) fn play(
    actor: &mut Actor<'_>,
    prompts: &mut [Prompt],
    wanted: RolloutRequest<'_>,
) -> Result<Plays> {
    let RolloutRequest { params, samples, step } = wanted;
    let (began, shared) = (Instant::now(), Arc::new(params.clone()));
    let mut play = EpisodeLoop::new(actor, prompts);
    let played = play.all(prompts, |play, group, prompt| {
        for sample in 0..samples {
            let stream = [step as u32, prompt.index as u32, sample as u32];
            let environment = play.actor.environments.open(prompt)?;
            let episode = Episode::new(group, prompt, environment, (&shared, stream));
            play.begin(episode.numbered(group * samples + sample))?;
        }
        Ok(())
    });
    let time = play.spent.shares(began.elapsed());
    play.end();
    let mut episodes = played?;
    for episode in episodes.iter_mut().rev() {
        if let Some(begun) = episode.begun.take() {
            prompts[episode.prompt] = begun; // that of the first sample is kept
        }
    }
    Ok(Plays { episodes, time })
}

/// Running episodes.
pub(crate) struct EpisodeLoop<'p, 'a> {
    pub actor: &'p mut Actor<'a>,
    prompts: &'p [Prompt],
    /// By the number that [`EpisodeLoop::begin`] gave.
    episodes: BTreeMap<usize, Episode>,
    begun: usize,
    /// Episodes whose action is being sampled.
    generating: HashMap<Id, usize>,
    /// Running environments.
    threads: Threads,
    /// Episodes whose next action can be replayed or sampled.
    ready: Vec<usize>,
    /// Finished episodes.
    over: Vec<usize>,
    /// Events of other requests.
    others: Vec<Event>,
    /// Cached tokens of observations.
    observed: EncodedTexts,
    spent: Spent,
}

impl<'p, 'a> EpisodeLoop<'p, 'a> {
    /// Without episodes.
    pub fn new(actor: &'p mut Actor<'a>, prompts: &'p [Prompt]) -> Self {
        let threads = Threads::new(actor.environments.concurrency);
        EpisodeLoop {
            actor,
            prompts,
            episodes: BTreeMap::new(),
            begun: 0,
            generating: HashMap::new(),
            threads,
            ready: Vec::new(),
            over: Vec::new(),
            others: Vec::new(),
            observed: EncodedTexts::default(),
            spent: Spent::default(),
        }
    }

    /// Starts episodes and plays all to their ends; returns them in the order of their start.
    pub fn all(
        &mut self,
        prompts: &[Prompt],
        mut begin: impl FnMut(&mut Self, usize, &Prompt) -> Result<()>,
    ) -> Result<Vec<Episode>> {
        prompts.iter().enumerate().try_for_each(|(group, prompt)| begin(self, group, prompt))?;
        self.rest()
    }

    /// Plays all active episodes to their ends; returns them in the order of their start.
    pub fn rest(&mut self) -> Result<Vec<Episode>> {
        let mut over = BTreeMap::new();
        while !self.is_idle() {
            over.extend(self.step()?);
        }
        Ok(over.into_values().collect())
    }

    /// Starts an episode; returns its number.
    pub fn begin(&mut self, episode: Episode) -> Result<usize> {
        let number = self.begun;
        self.begun += 1;
        let plays = episode.environment.is_some();
        self.episodes.insert(number, episode);
        match plays {
            true => self.ask(number, EnvironmentCall::Start)?,
            false => self.submit(number)?,
        }
        self.settle()?;
        Ok(number)
    }

    /// Whether no episode is running.
    pub fn is_idle(&self) -> bool {
        self.episodes.is_empty()
    }

    /// Continues until an episode has ended or a decode batch is done; returns the finished episodes.
    pub fn step(&mut self) -> Result<Vec<(usize, Episode)>> {
        self.hear()?;
        if self.over.is_empty() && !self.generating.is_empty() {
            let began = Instant::now();
            let events = self.actor.generator.step(self.actor.policy)?;
            self.spent.decoding += began.elapsed();
            for event in events {
                match event {
                    Event::Done { id, completion } if self.generating.contains_key(&id) => {
                        let i = self.generating.remove(&id).unwrap_or_default();
                        self.acted(i, completion)?;
                    }
                    Event::Token { id, .. } if self.generating.contains_key(&id) => {}
                    other => self.others.push(other),
                }
            }
            self.settle()?;
        }
        let over = std::mem::take(&mut self.over);
        Ok(over.into_iter().filter_map(|i| Some((i, self.episodes.remove(&i)?))).collect())
    }

    /// Cancels all requests, so that the generator runs no episode after an error.
    pub fn end(self) {
        self.generating.keys().for_each(|&id| drop(self.actor.generator.cancel(id)));
        self.actor.generator.put_back(self.others);
    }

    fn episode(&mut self, i: usize) -> Result<&mut Episode> {
        self.episodes.get_mut(&i).ok_or_else(|| Error::device(format!("episode {i} is over already")))
    }

    /// Processes environments that have returned; waits for one if there is nothing to decode.
    fn hear(&mut self) -> Result<()> {
        while self.threads.waiting > 0 {
            let wait = (self.generating.is_empty() && self.over.is_empty()).then_some(LOOK);
            let began = Instant::now();
            let back = self.threads.back(wait);
            self.spent.environments += began.elapsed();
            let Some(back) = back else {
                if wait.is_some() && interrupt::requested() {
                    return Err(interrupt::interrupted("waiting for environments"));
                }
                if wait.is_none() {
                    return Ok(());
                }
                continue;
            };
            self.episode(back.episode)?.environment = Some(back.environment);
            self.answered(back.episode, back.reply)?;
            self.settle()?;
        }
        Ok(())
    }

    /// Calls an episode's environment: directly, or on a thread if it may wait.
    fn ask(&mut self, i: usize, ask: EnvironmentCall) -> Result<()> {
        match self.episode(i)?.environment.take() {
            None => Ok(()),
            Some(environment) if environment.waits() => self.threads.ask(i, environment, ask),
            Some(mut environment) => {
                let began = Instant::now();
                let reply = ask.of(&mut *environment);
                self.spent.environments += began.elapsed();
                self.episode(i)?.environment = Some(environment);
                self.answered(i, reply)
            }
        }
    }

    /// Continues every episode whose observation was encoded. A loop, not recursion: a prefix may have thousands of turns.
    fn settle(&mut self) -> Result<()> {
        while let Some(i) = self.ready.pop() {
            let episode = self.episode(i)?;
            match episode.replay()? {
                Some((action, text)) => {
                    episode.act(&action);
                    episode.action_tokens = action.ids.len();
                    self.ask(i, EnvironmentCall::Step(text))?;
                }
                None => self.submit(i)?,
            }
        }
        Ok(())
    }

    /// Submits an episode's next action to the generator.
    fn submit(&mut self, i: usize) -> Result<()> {
        let episode = self.episode(i)?;
        episode.replay()?; // without an environment there is nothing to replay
        let request = episode.request();
        if let Err(error) = self.actor.generator.check(&request) {
            return self.no_room(i, error);
        }
        self.generating.insert(self.actor.generator.submit(request)?, i);
        Ok(())
    }

    /// Handles an episode that exceeds the model's context or the cache: it is truncated. If its prompt does not fit, it is an error,
    /// or lost if the environment wrote the prompt.
    fn no_room(&mut self, i: usize, error: Error) -> Result<()> {
        self.over.push(i);
        let e = self.episode(i)?;
        e.over = true;
        match &mut e.played {
            Some(played) if !played.turns.is_empty() => {
                (played.truncated, played.outgrown) = (true, true);
                Ok(())
            }
            Some(_) if e.begun.is_some() => {
                let what = format!("the first state has {} tokens: {error}", e.sequences[0].ids.len());
                e.lose(Lost::new(Why::Size, what));
                Ok(())
            }
            _ => {
                let (branches, prompt) = (e.branch.is_some(), e.prompt);
                Err(error.at(match self.prompts.get(prompt).filter(|_| branches) {
                    Some(prompt) if prompt.place.is_empty() => format!("question {}", prompt.index),
                    Some(prompt) => prompt.place.clone(),
                    None => format!("request {i}"),
                }))
            }
        }
    }

    /// Handles a complete action.
    fn acted(&mut self, i: usize, c: Completion) -> Result<()> {
        let (tokenizer, stops) = (self.actor.tokenizer, self.actor.stops);
        let e = self.episode(i)?;
        let sampled = c.ids.len() as u64;
        let c = e.cut(c, tokenizer)?;
        e.act(&c);
        if let Some(branch) = &mut e.branch {
            branch.sampled.0 += sampled;
            branch.sampled.1 += c.shared as u64;
        }
        if e.environment.is_none() {
            e.completion = Some(c);
            self.over.push(i);
            return Ok(());
        }
        let Some(action) = e.action(c) else {
            self.over.push(i); // of this branch: a step within an action
            return Ok(());
        };
        e.action_tokens = action.ids.len();
        let text = stops.text(tokenizer, &action)?;
        if let Some(branch) = &mut e.branch {
            branch.prefix.actions.push((action, text.clone()));
        }
        self.ask(i, EnvironmentCall::Step(text))
    }

    /// Handles an environment's reply: the policy continues, or the episode ends.
    fn answered(&mut self, i: usize, reply: env::Result<EnvReply>) -> Result<()> {
        match reply {
            Err(Fault::Fatal(error)) => Err(error),
            Err(Fault::Busy) => self.ask(i, EnvironmentCall::Start),
            Err(Fault::Lost(lost)) => {
                self.over.push(i);
                self.episode(i)?.lose(*lost);
                Ok(())
            }
            Ok(EnvReply::Started(text)) => {
                let prompts = self.prompts;
                let Some(e) = self.episodes.get_mut(&i) else { return Ok(()) };
                let begun = e.begin(self.actor, &prompts[e.prompt], text);
                e.open_branch();
                self.read(i, begun)
            }
            Ok(EnvReply::Stepped(action, turn)) => {
                let limit = self.actor.environments.max_turns;
                let Some(e) = self.episodes.get_mut(&i) else { return Ok(()) };
                let replaying = e.branch.as_ref().is_some_and(|b| b.is_replaying());
                let Some((action, turn)) = e.reward(action, turn, limit) else {
                    self.over.push(i);
                    let lost = e.played.as_ref().is_some_and(|p| p.lost.is_some());
                    return if replaying && !lost { Err(e.plays_otherwise()) } else { Ok(()) };
                };
                let read = e.observe(self.actor, &mut self.observed, &action, turn);
                self.read(i, read)
            }
        }
    }

    /// Continues the episode if the observation could be encoded.
    fn read(&mut self, i: usize, encoded: Result<()>) -> Result<()> {
        let e = self.episode(i)?;
        match encoded {
            Ok(()) if e.has_nothing_to_read() => {
                let what = "the state has no tokens, and the episode goes on, expected the text that the policy continues";
                e.lose(Lost::new(Why::Schema, what));
                self.over.push(i);
            }
            Ok(()) if e.has_reached() => self.over.push(i),
            Ok(()) => self.ready.push(i),
            Err(error) => {
                let error = error.to_string().replace("\n  fix:", ";");
                e.lose(Lost::new(Why::Schema, format!("its text cannot be encoded: {error}")));
                self.over.push(i);
            }
        }
        Ok(())
    }
}

impl Episode {
    /// Records a turn and places its reward on the action's last token; returns action and turn if the episode
    /// continues.
    fn reward(&mut self, action: String, turn: Turn, max_turns: usize) -> Option<(String, Turn)> {
        let Turn { next, reward, score, end, .. } = &turn;
        let (reward, score, end) = (*reward, *score, *end);
        if !(reward as f32).is_finite() {
            self.lose(Lost::new(
                Why::Schema,
                format!("a reward of {reward:e}, expected a number of 32 bits, {:e} at most", f32::MAX),
            ));
            return None;
        }
        let shown = match next {
            Next::Observation(text) => text.as_str(),
            Next::State(state) => self.continues(state, &action).unwrap_or(state),
        }
        .to_string();
        let (sequence, played) = (self.sequences.len() - 1, self.played.get_or_insert_default());
        let last = self.sequences[sequence].ids.len() - 2;
        self.sequences[sequence].reward[last] += reward as f32;
        played.score = score.or(played.score);
        let counted = |name: &str| turn.extra.get(name)?.as_u64();
        played.tool_calls = counted("tool_calls").zip(counted("tool_errors")).or(played.tool_calls);
        played.turns.push(TurnRecord {
            action: action.clone(),
            observation: shown,
            reward,
            tokens: self.action_tokens,
            sequence,
            ..Default::default()
        });
        match end.or_else(|| (played.turns.len() >= max_turns).then_some(EpisodeEnd::Truncated)) {
            Some(end) => {
                played.truncated = end == EpisodeEnd::Truncated;
                self.over = true;
                None
            }
            None => Some((action, turn)),
        }
    }

    /// Whether the policy would have to continue nothing at all.
    fn has_nothing_to_read(&self) -> bool {
        self.sequences.last().is_none_or(|s| s.ids.is_empty())
    }

    fn lose(&mut self, lost: Lost) {
        let label = self.environment.as_ref().map_or_else(String::new, |e| format!("{}: ", e.label()));
        let turn = self.played.as_ref().map_or(0, |p| p.turns.len()) + 1;
        let message = format!("{label}turn {turn}: {}", lost.message);
        self.over = true;
        self.played.get_or_insert_default().lost = Some(Box::new(Lost { message, ..lost }));
    }
}

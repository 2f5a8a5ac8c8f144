//! The loop over all episodes of a step.

use super::threads::{EnvironmentCall, Reply, Threads};
use super::tokens::EncodedTexts;
use super::{Episode, TimeShares, TurnRecord};
use crate::env::{self, EpisodeEnd, Fault, Lost, Next, Turn, Why};
use crate::interrupt;
use crate::rollout::Actor;
use crate::source::Prompt;
use ferrl_engine::generate::{Completion, Event, Id, SamplingParams};
use ferrl_engine::{Error, Result};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often a wait for environments looks whether the process was asked to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Every episode, in the order of prompts and samples, and how the time went.
pub(crate) struct Plays {
    pub episodes: Vec<Episode>,
    pub time: TimeShares,
}

/// Time spent so far.
#[derive(Default)]
struct Spent {
    /// In decode batches.
    decoding: Duration,
    /// In environments that play here, and in waiting for others with nothing to decode.
    environments: Duration,
}

impl Spent {
    fn shares(&self, whole: Duration) -> TimeShares {
        let share = |part: Duration| part.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let (decoding, environments) = (share(self.decoding), share(self.environments));
        TimeShares { decoding, overhead: (1.0 - decoding - environments).max(0.0) }
    }
}

/// Plays every prompt `samples` times. A prompt that its environment begins gets its text and tokens.
pub(crate) fn play(
    actor: &mut Actor<'_>,
    prompts: &mut [Prompt],
    params: &SamplingParams,
    samples: usize,
    step: u64,
) -> Result<Plays> {
    let mut episodes = Vec::with_capacity(prompts.len() * samples);
    for (group, prompt) in prompts.iter().enumerate() {
        for sample in 0..samples {
            let stream = [step as u32, prompt.index as u32, sample as u32];
            let environment = actor.environments.open(prompt)?;
            episodes.push(Episode::new(episodes.len(), group, stream, prompt, environment));
        }
    }
    let threads = Threads::new(actor.environments.concurrency);
    let mut play = Play {
        actor,
        prompts,
        params,
        episodes,
        generating: HashMap::new(),
        threads,
        observed: EncodedTexts::default(),
        spent: Spent::default(),
    };
    let began = Instant::now();
    let played = play.run();
    // Where one episode fails, no other goes on behind the caller's back.
    play.generating.keys().for_each(|&id| drop(play.actor.generator.cancel(id)));
    played?;
    let (time, mut episodes) = (play.spent.shares(began.elapsed()), play.episodes);
    for episode in episodes.iter_mut().rev() {
        if let Some(begun) = episode.begun.take() {
            prompts[episode.prompt] = begun; // that of the first sample stays
        }
    }
    Ok(Plays { episodes, time })
}

struct Play<'p, 'a> {
    actor: &'p mut Actor<'a>,
    prompts: &'p [Prompt],
    params: &'p SamplingParams,
    episodes: Vec<Episode>,
    /// Episodes whose action is being sampled.
    generating: HashMap<Id, usize>,
    /// Environments at work.
    threads: Threads,
    /// Tokens of what environments have said.
    observed: EncodedTexts,
    spent: Spent,
}

impl Play<'_, '_> {
    /// Until every episode is over.
    fn run(&mut self) -> Result<()> {
        for i in 0..self.episodes.len() {
            match self.episodes[i].environment {
                Some(_) => self.ask(i, EnvironmentCall::Start)?,
                None => self.submit(i)?,
            }
        }
        let mut others = Vec::new(); // events of requests that are not ours
        while !self.generating.is_empty() || self.threads.waiting > 0 {
            self.hear()?;
            if self.generating.is_empty() {
                continue;
            }
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
                    other => others.push(other),
                }
            }
        }
        self.actor.generator.put_back(others);
        Ok(())
    }

    /// Takes in every environment that is back; waits for one where there is nothing to decode.
    fn hear(&mut self) -> Result<()> {
        while self.threads.waiting > 0 {
            let wait = self.generating.is_empty().then_some(LOOK);
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
            self.episodes[back.episode].environment = Some(back.environment);
            self.answered(back.episode, back.reply)?;
        }
        Ok(())
    }

    /// Asks an episode's environment: here, or on a thread where it may have to wait.
    fn ask(&mut self, i: usize, ask: EnvironmentCall) -> Result<()> {
        match self.episodes[i].environment.take() {
            None => Ok(()),
            Some(environment) if environment.waits() => self.threads.ask(i, environment, ask),
            Some(mut environment) => {
                let began = Instant::now();
                let reply = ask.of(&mut *environment);
                self.spent.environments += began.elapsed();
                self.episodes[i].environment = Some(environment);
                self.answered(i, reply)
            }
        }
    }

    /// Gives an episode's next action to the generator.
    fn submit(&mut self, i: usize) -> Result<()> {
        let request = self.episodes[i].request(self.params);
        if let Err(error) = self.actor.generator.check(&request) {
            return self.no_room(i, error);
        }
        self.generating.insert(self.actor.generator.submit(request)?, i);
        Ok(())
    }

    /// An episode that has outgrown the model's context, or the cache, is cut off; one that never fitted is an error, or lost
    /// where its environment wrote the prompt.
    fn no_room(&mut self, i: usize, error: Error) -> Result<()> {
        let e = &mut self.episodes[i];
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
            _ => Err(error.at(format!("request {i}"))),
        }
    }

    /// An action is complete.
    fn acted(&mut self, i: usize, c: Completion) -> Result<()> {
        let e = &mut self.episodes[i];
        e.act(&c);
        if e.environment.is_none() {
            e.completion = Some(c);
            return Ok(());
        }
        e.action_tokens = c.ids.len();
        let action = self.actor.stops.text(self.actor.tokenizer, &c)?;
        self.ask(i, EnvironmentCall::Step(action))
    }

    /// An environment has answered: the policy goes on, or the episode is over.
    fn answered(&mut self, i: usize, reply: env::Result<Reply>) -> Result<()> {
        match reply {
            Err(Fault::Fatal(error)) => Err(error),
            Err(Fault::Busy) => self.ask(i, EnvironmentCall::Start),
            Err(Fault::Lost(lost)) => {
                self.episodes[i].lose(*lost);
                Ok(())
            }
            Ok(Reply::Started(text)) => {
                let prompt = &self.prompts[self.episodes[i].prompt];
                let begun = self.episodes[i].begin(self.actor, prompt, text);
                self.read(i, begun)
            }
            Ok(Reply::Stepped(action, turn)) => {
                let limit = self.actor.environments.max_turns;
                let Some((action, turn)) = self.episodes[i].reward(action, turn, limit) else {
                    return Ok(());
                };
                let read = self.episodes[i].observe(self.actor, &mut self.observed, &action, turn);
                self.read(i, read)
            }
        }
    }

    /// The policy goes on, where what it is to read has tokens.
    fn read(&mut self, i: usize, encoded: Result<()>) -> Result<()> {
        match encoded {
            Ok(()) => self.submit(i),
            Err(error) => {
                self.episodes[i].lose(Lost::new(Why::Schema, format!("its text cannot be encoded: {error}")));
                Ok(())
            }
        }
    }
}

impl Episode {
    /// Records a turn and places its reward on the action's last token; the action and what is read next, where the episode
    /// goes on.
    fn reward(&mut self, action: String, turn: Turn, max_turns: usize) -> Option<(String, Turn)> {
        let Turn { next, reward, score, end, .. } = &turn;
        let (reward, score, end) = (*reward, *score, *end);
        if !(reward as f32).is_finite() {
            self.lose(Lost::new(
                Why::Schema,
                format!("a reward of {reward}, expected a finite number of 32 bits"),
            ));
            return None;
        }
        let (sequence, played) = (self.sequences.len() - 1, self.played.get_or_insert_default());
        let last = self.sequences[sequence].ids.len() - 2;
        self.sequences[sequence].reward[last] += reward as f32;
        played.score = score.or(played.score);
        let counted = |name: &str| turn.extra.get(name)?.as_u64();
        played.tool_calls = counted("tool_calls").zip(counted("tool_errors")).or(played.tool_calls);
        let (Next::Observation(shown) | Next::State(shown)) = next;
        played.turns.push(TurnRecord {
            action: action.clone(),
            observation: shown.clone(),
            reward,
            tokens: self.action_tokens,
            sequence,
            ..Default::default()
        });
        match end.or_else(|| (played.turns.len() >= max_turns).then_some(EpisodeEnd::Truncated)) {
            Some(end) => {
                played.truncated = end == EpisodeEnd::Truncated;
                None
            }
            None => Some((action, turn)),
        }
    }

    /// Gives it up: its environment failed.
    fn lose(&mut self, lost: Lost) {
        let label = self.environment.as_ref().map_or_else(String::new, |e| format!("{}: ", e.label()));
        let turn = self.played.as_ref().map_or(0, |p| p.turns.len()) + 1;
        let message = format!("{label}turn {turn}: {}", lost.message);
        self.played.get_or_insert_default().lost = Some(Box::new(Lost { message, ..lost }));
    }
}

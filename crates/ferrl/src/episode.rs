//! Episodes: the policy acts and its environment answers, until every episode is over.
//!
//! One loop over all episodes of a step: the generator decodes whatever is ready, and an episode whose environment is at work
//! holds up no other. A prompt without an environment is an episode of one turn. The random numbers of a token depend on the
//! seed, the step, the prompt, the sample, the turn and the token's index in it, never on the order in which completions and
//! environments come back.

use crate::env::{End, Environment, Next, Turn};
use crate::experience::Sequence;
use crate::rollout::Actor;
use crate::source::Prompt;
use crate::task::Task;
use ferrl_engine::generate::{Completion, Event, Id, Request, SamplingParams, Stop};
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// The episode that a prompt begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpisodeKey {
    /// The task that plays it.
    pub task: String,
    /// Its number there.
    pub index: u64,
    /// Whether it is one that evaluations play.
    pub held_out: bool,
}

/// The environments of a stage.
#[derive(Clone, Default)]
pub struct Environments {
    tasks: Vec<(String, Arc<dyn Task>)>,
    /// Actions of an episode at most.
    max_turns: usize,
}

impl Environments {
    /// Of the tasks a stage names; episodes are cut off after `max_turns` actions.
    pub fn new(tasks: Vec<(String, Arc<dyn Task>)>, max_turns: usize) -> Self {
        Environments { tasks, max_turns }
    }

    /// A fresh episode of a prompt, where it begins one.
    fn open(&self, prompt: &Prompt) -> Result<Option<Box<dyn Environment>>> {
        let Some(EpisodeKey { task, index, held_out }) = &prompt.episode else { return Ok(None) };
        let found = self.tasks.iter().find(|(name, _)| name == task);
        let episode = found.and_then(|(_, task)| task.episode(*index, *held_out));
        let missing = || Error::data(format!("task:{task} plays no episodes")).at(prompt.place.clone());
        let mut episode = episode.ok_or_else(missing)?;
        episode.start()?; // its first observation is the prompt
        Ok(Some(episode))
    }
}

/// One turn of an episode, for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnRecord {
    /// What the policy wrote.
    pub action: String,
    /// What the environment answered; empty after the last turn.
    pub observation: String,
    /// What the action earned.
    pub reward: f64,
    /// Tokens of the action.
    pub tokens: usize,
    /// Which training sequence of the trajectory the action is in.
    pub sequence: usize,
    /// Advantage of the action's first token; 0 before it is known.
    #[serde(default)]
    pub advantage: f32,
    /// Whether that is known.
    #[serde(skip)]
    pub(crate) credited: bool,
}

/// What an environment said of an episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Played {
    /// In order.
    pub turns: Vec<TurnRecord>,
    /// How well it went, where the environment says so.
    pub score: Option<f64>,
    /// Whether it was cut off: by the limit of turns, by its length, or by the environment.
    pub truncated: bool,
    /// Whether that was because its next turn had no room in the model's context or in the cache.
    #[serde(default)]
    pub outgrown: bool,
}

impl Played {
    /// Everything after the prompt.
    pub fn text(&self) -> String {
        let last = self.turns.len().saturating_sub(1);
        let turn = |(i, t): (usize, &TurnRecord)| match i == last {
            true => t.action.clone(),
            false => format!("{}{}", t.action, t.observation),
        };
        self.turns.iter().enumerate().map(turn).collect()
    }

    /// Sum of the rewards of all turns.
    pub fn total_reward(&self) -> f64 {
        self.turns.iter().map(|t| t.reward).sum()
    }
}

/// A finished episode.
pub(crate) struct Episode {
    /// Its prompt and sample, which give the order.
    pub prompt: usize,
    stream: [u32; 3],
    environment: Option<Box<dyn Environment>>,
    /// Training sequences: one, unless a state did not continue the one before.
    pub sequences: Vec<Sequence>,
    /// Text of the last sequence, as environments see it.
    state: String,
    /// Tokens sampled so far.
    pub tokens: usize,
    /// Why the last completion ended.
    pub stop: Stop,
    /// The last completion, for those who decode its text at the end.
    pub completion: Option<Completion>,
    pub played: Option<Played>,
}

impl Episode {
    fn new(
        number: usize,
        group: usize,
        stream: [u32; 3],
        prompt: &Prompt,
        environment: Option<Box<dyn Environment>>,
    ) -> Self {
        let first = Sequence {
            ids: prompt.ids.clone(),
            trajectory: number,
            group,
            weight: 1.0,
            ..Default::default()
        };
        Episode {
            prompt: group,
            stream,
            played: environment.is_some().then(Played::default),
            environment,
            sequences: vec![first],
            state: prompt.text.clone(),
            tokens: 0,
            stop: Stop::Length,
            completion: None,
        }
    }

    /// What the policy is to complete next.
    fn request(&self, params: &SamplingParams) -> Request {
        let prompt = self.sequences.last().map_or_else(Vec::new, |s| s.ids.clone());
        // Samples of a prompt are fewer than 2^16, and so are turns: every turn has random numbers of its own.
        let turn = self.played.as_ref().map_or(0, |p| p.turns.len()) as u32;
        let [step, prompt_number, sample] = self.stream;
        Request { prompt, params: params.clone(), stream: [step, prompt_number, sample | turn << 16] }
    }

    /// Adds the tokens of an action to the last sequence, with the log-probabilities they were sampled with.
    fn act(&mut self, c: &Completion) {
        let s = self.sequences.last_mut().expect("an episode has a sequence");
        let from = s.ids.len();
        s.grow(from);
        s.ids.extend_from_slice(&c.ids);
        s.grow(s.ids.len());
        for (i, (logp, version)) in c.logp.iter().zip(&c.versions).enumerate() {
            (s.trained[from + i], s.sampled_logp[from + i - 1], s.version[from + i - 1]) =
                (true, *logp, *version);
        }
        self.tokens += c.ids.len();
        self.stop = c.stop;
    }
}

impl Sequence {
    /// Columns as long as the tokens; what is new is neither trained nor rewarded.
    fn grow(&mut self, len: usize) {
        self.trained.resize(len, false);
        self.reward.resize(len, 0.0);
        self.sampled_logp.resize(len, 0.0);
        self.version.resize(len, 0);
    }
}

/// Plays every prompt `samples` times; episodes come in the order of prompts and samples.
pub(crate) fn play(
    actor: &mut Actor<'_>,
    prompts: &[Prompt],
    params: &SamplingParams,
    samples: usize,
    step: u64,
) -> Result<Vec<Episode>> {
    let mut episodes = Vec::with_capacity(prompts.len() * samples);
    for (group, prompt) in prompts.iter().enumerate() {
        for sample in 0..samples {
            let stream = [step as u32, prompt.index as u32, sample as u32];
            let environment = actor.environments.open(prompt)?;
            episodes.push(Episode::new(episodes.len(), group, stream, prompt, environment));
        }
    }
    let mut running = HashMap::new();
    let done = drive(actor, params, &mut episodes, &mut running);
    // Where one episode fails, no other goes on behind the caller's back.
    running.keys().for_each(|&id| drop(actor.generator.cancel(id)));
    done.map(|()| episodes)
}

/// Decodes until every episode is over.
fn drive(
    actor: &mut Actor<'_>,
    params: &SamplingParams,
    episodes: &mut [Episode],
    running: &mut HashMap<Id, usize>,
) -> Result<()> {
    for (i, episode) in episodes.iter().enumerate() {
        let request = episode.request(params);
        actor.generator.check(&request).map_err(|e| e.at(format!("request {i}")))?;
        running.insert(actor.generator.submit(request)?, i);
    }
    let mut others = Vec::new(); // events of requests that are not ours
    while !running.is_empty() {
        for event in actor.generator.step(actor.policy)? {
            match event {
                Event::Done { id, completion } if running.contains_key(&id) => {
                    let i = running.remove(&id).unwrap_or_default();
                    if let Some(request) = turn(actor, params, &mut episodes[i], completion)? {
                        running.insert(actor.generator.submit(request)?, i);
                    }
                }
                Event::Token { id, .. } if running.contains_key(&id) => {}
                other => others.push(other),
            }
        }
    }
    actor.generator.put_back(others);
    Ok(())
}

/// Takes in an action; what is to be completed next, or nothing where the episode is over.
fn turn(
    actor: &Actor<'_>,
    params: &SamplingParams,
    e: &mut Episode,
    c: Completion,
) -> Result<Option<Request>> {
    e.act(&c);
    let Some(environment) = &mut e.environment else {
        e.completion = Some(c);
        return Ok(None);
    };
    let action = actor.stops.text(actor.tokenizer, &c)?;
    let Turn { next, reward, score, end, .. } = environment.step(&action)?;
    if !(reward as f32).is_finite() {
        return Err(Error::numerics(format!("an environment gave a reward of {reward}")).at("env"));
    }
    let (sequence, played) = (e.sequences.len() - 1, e.played.get_or_insert_default());
    let mut record = TurnRecord { action, reward, tokens: c.ids.len(), sequence, ..Default::default() };
    let last = e.sequences[sequence].ids.len() - 2;
    e.sequences[sequence].reward[last] += reward as f32;
    played.score = score.or(played.score);
    let ended =
        end.or_else(|| (played.turns.len() + 1 >= actor.environments.max_turns).then_some(End::Truncated));
    let shown = match &next {
        Next::Observation(text) | Next::State(text) => text,
    };
    record.observation = shown.clone();
    if let Some(end) = ended {
        played.truncated = end == End::Truncated;
        played.turns.push(record);
        return Ok(None);
    }
    let action = record.action.clone();
    played.turns.push(record);
    e.observe(actor, &action, next)?;
    let request = e.request(params);
    // An episode that has outgrown the model's context, or the cache, is cut off.
    if actor.generator.check(&request).is_err() {
        let played = e.played.get_or_insert_default();
        (played.truncated, played.outgrown) = (true, true);
        return Ok(None);
    }
    Ok(Some(request))
}

impl Episode {
    /// Adds what the policy reads next: to the sequence it continues, or as a new one. Sampled tokens are kept as they are.
    fn observe(&mut self, actor: &Actor<'_>, action: &str, next: Next) -> Result<()> {
        let before = format!("{}{action}", self.state);
        // An observation is text; in a whole state the environment means the special tokens it writes.
        let (state, new) = match next {
            Next::Observation(text) => (format!("{before}{text}"), Some(actor.tokenizer.encode_text(&text)?)),
            Next::State(state) => {
                let new = state
                    .strip_prefix(&before)
                    .map(|text| actor.tokenizer.encode_markup(text))
                    .transpose()?;
                (state, new)
            }
        };
        match new {
            Some(ids) => {
                let s = self.sequences.last_mut().expect("an episode has a sequence");
                s.ids.extend(ids);
                s.grow(s.ids.len());
            }
            None => {
                let ids = actor.tokenizer.encode_prompt(&state)?;
                let Sequence { trajectory, group, .. } = self.sequences[0];
                self.sequences.push(Sequence { ids, trajectory, group, weight: 1.0, ..Default::default() });
            }
        }
        self.state = state;
        Ok(())
    }
}

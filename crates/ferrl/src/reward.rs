//! Rewards: every source scores every completion; the weighted sum is placed on the completion's last token.

mod decision;
mod generative;
mod implicit;
mod model;
mod reading;
mod source;
mod steps;
pub mod verdicts;

pub use decision::{DecisionOptions, DecisionReward};
pub use generative::{GenerativeVerifier, Judgement, QUESTION, RATIONALE};
pub use implicit::{Implicit, ImplicitReward, Reduce};
pub use model::RewardModel;
pub(crate) use reading::prompt_value;
pub use source::{Reward, Verified};

use crate::algo::metrics::is_own;
use crate::credit::StepSplit;
use crate::episode::Played;
use crate::experience::{Experience, Metrics};
use crate::fixes::unknown;
use crate::interrupt::{interrupted, is_interruption};
use crate::ranks::{SentError, gather as gather_all};
use crate::recipe::{self, Recipe};
use crate::rollout::RolloutCompletion;
use crate::source::Prompt;
use crate::verify::{self, Hooks, Outcome, Progress, RowColumns, Sample, Truncated};
use crate::warnings::Warnings;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, DType, Ranks};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use steps::CompletionSteps;

/// The rewards of a run, each with its weight.
#[derive(Default)]
pub struct Rewards {
    sources: Vec<(f64, Box<dyn Reward>)>,
    /// How each source with process rewards splits completions; `None` for all others.
    steps: Vec<Option<steps::StepRule>>,
    /// The policy's tokenizer, to find the last token of a step.
    tokenizer: Option<Arc<Tokenizer>>,
    hooks: Hooks,
    /// Whether the rewards are those of generated tasks; then only environments reward episodes.
    of_tasks: bool,
    /// The ranks that share the completions.
    ranks: Ranks,
}

/// Rewards of one completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionScores {
    /// The reward for training; `None` if it was lost, which differs from 0.
    pub reward: Option<f64>,
    /// Named components.
    pub components: Vec<(String, f32)>,
    /// Logged only: the score of the first verifier, usually 1 if it is right.
    pub score: Option<f64>,
    /// Whether an answer was found in it, if a verifier extracts one.
    #[serde(default)]
    pub found: Option<bool>,
    /// Columns that a Python function logged with `log_extra`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

impl CompletionScores {
    /// Whether no source could score it.
    pub fn is_lost(&self) -> bool {
        self.reward.is_none()
    }

    /// Whether it counts as right: a score of 1 or more.
    pub fn is_right(&self) -> bool {
        self.score.is_some_and(|score| score >= 1.0)
    }
}

/// Rewards of one completion of a part, and the failure if it is lost.
pub type ScoredPart = (CompletionScores, Option<Error>);

#[derive(Clone, Copy)]
pub struct CompletionBatch<'a> {
    pub prompts: &'a [Prompt],
    /// In the order of the experience's sequences.
    pub completions: &'a [RolloutCompletion],
    pub at: Progress,
}

/// Opens the model of a source, the `n`-th source that has one.
type OpenModel<'a> = dyn FnMut(&recipe::RewardSettings, usize) -> Result<Box<dyn Reward>> + 'a;

impl Rewards {
    /// Builds rewards from sources without models.
    pub fn new(sources: &[recipe::RewardSettings]) -> Result<Self> {
        Self::with_hooks(sources, &Hooks::default())
    }

    /// The same with the hooks of a run.
    pub fn with_hooks(sources: &[recipe::RewardSettings], hooks: &Hooks) -> Result<Self> {
        Self::build(sources, hooks, &mut |source, _| {
            let dir = source.model.as_deref().unwrap_or_default();
            Err(Error::usage("a reward model needs a device to run on")
                .at(format!("reward: model = {dir:?}")))
        })
    }

    /// A single reward with weight 1.
    pub fn of(reward: impl Reward + 'static) -> Self {
        Self::default().with(1.0, reward)
    }

    /// Adds a reward: a verifier, a model, a closure.
    pub fn with(mut self, weight: f64, reward: impl Reward + 'static) -> Self {
        self.sources.push((weight, Box::new(reward)));
        self
    }

    /// Distributes scoring over these ranks: each scores the completions of its part of the prompts.
    pub fn shared_by(self, ranks: &Ranks) -> Self {
        Rewards { ranks: ranks.clone(), ..self }
    }

    /// Sets the policy's tokenizer, with which rewards of steps are placed on the steps' last tokens.
    pub fn reading(self, tokenizer: &Arc<Tokenizer>) -> Self {
        Rewards { tokenizer: Some(tokenizer.clone()), ..self }
    }

    /// Makes the last source reward steps.
    pub fn by_steps(mut self, rule: (StepSplit, usize)) -> Result<Self> {
        if let Some((_, last)) = self.sources.last().filter(|(_, last)| !last.scores_steps()) {
            return Err(Error::usage(format!("{} rewards whole completions, not steps", last.name()))
                .at("reward.steps")
                .fix("no reward.0.steps; steps are rewarded by a Python function, the verifier \"chain\", or a model"));
        }
        self.steps.resize(self.sources.len(), None);
        if let Some(last) = self.steps.last_mut() {
            *last = Some(rule);
        }
        Ok(self)
    }

    /// Leaves the rewards of episodes to their environments.
    pub(crate) fn without_episodes(self) -> Self {
        Rewards { of_tasks: true, ..self }
    }

    pub(crate) fn warnings(&self) -> &Warnings {
        &self.hooks.warnings
    }

    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// The rewards of a recipe, with models loaded.
    pub fn load(recipe: &Recipe, dtype: DType, backend: &Arc<dyn Backend>, hooks: &Hooks) -> Result<Self> {
        let mut open = |source: &recipe::RewardSettings, number: usize| -> Result<Box<dyn Reward>> {
            let dir = Path::new(source.model.as_deref().unwrap_or_default());
            let named = |name: &str| if number == 1 { name.into() } else { format!("{name}_{number}") };
            Ok(match source.model_kind() {
                Some("generative") => {
                    let mut judge = GenerativeVerifier::open(dir, source, recipe, dtype, backend)?;
                    judge.name = named("verdict");
                    Box::new(judge)
                }
                Some("decision") => {
                    let mut reward = DecisionReward::open(dir, source, recipe, dtype, backend)?;
                    reward.name = named("decision");
                    Box::new(reward)
                }
                Some(_) => {
                    let mut reward = ImplicitReward::open(dir, source, recipe, dtype, backend)?;
                    reward.name = named("implicit");
                    Box::new(reward)
                }
                None => {
                    let mut reward = RewardModel::open(dir, recipe, dtype, backend, source.offload)?;
                    reward.name = named("model");
                    Box::new(reward)
                }
            })
        };
        Self::build(&recipe.reward, hooks, &mut open)
    }

    fn build(sources: &[recipe::RewardSettings], hooks: &Hooks, open: &mut OpenModel<'_>) -> Result<Self> {
        let (mut rewards, mut models) =
            (Rewards { sources: Vec::new(), hooks: hooks.clone(), ..Default::default() }, 0);
        for source in sources {
            let weight = source.weight.unwrap_or(1.0);
            let truncated = truncated(source.truncated.as_deref())?;
            let verifier = match (&source.verifier, &source.python, &source.model) {
                (Some(name), None, None) => verify::build_with(name, &source.options, hooks)?,
                (None, Some(file), None) => {
                    let mut options = source.options.clone();
                    options.insert("file".into(), file.to_string_lossy().into());
                    if let Some(function) = &source.function {
                        options.insert("function".into(), function.as_str().into());
                    }
                    verify::build_with("python", &options, hooks)?
                }
                (None, None, Some(_)) => {
                    models += 1;
                    rewards.sources.push((weight, open(source, models)?));
                    if let Some(rule) = source.steps() {
                        rewards = rewards.by_steps(rule)?;
                    }
                    continue;
                }
                _ => {
                    return Err(Error::usage("a reward names one of verifier, python or model")
                        .at("reward")
                        .fix("verifier = \"countdown\""));
                }
            };
            rewards = rewards.with(weight, Verified { verifier, truncated });
            if let Some(rule) = source.steps() {
                rewards = rewards.by_steps(rule)?;
            }
        }
        Ok(rewards)
    }

    /// Refuses stop strings that remove text that a verifier needs, because no completion could be right.
    pub fn check_stops(&self, strings: &[String], include: bool) -> Result<()> {
        if include {
            return Ok(());
        }
        for verifier in self.sources.iter().filter_map(|(_, reward)| reward.verifier()) {
            let reads = verifier.reads().iter();
            let cut = reads.flat_map(|read| strings.iter().map(move |s| (read, s)));
            if let Some((read, stop)) = cut.into_iter().find(|(read, stop)| read.contains(stop.as_str())) {
                let what = format!(
                    "the verifier {} needs {read:?}, but the stop string {stop:?} is removed from completions",
                    verifier.name()
                );
                return Err(Error::usage(what).at("rollout.stop").fix("rollout.include_stop = true"));
            }
            let closing = |s: &&String| s.starts_with("</") && s.ends_with('>');
            if let Some(stop) = strings.iter().find(closing).filter(|_| verifier.name() == "python") {
                let what = format!(
                    "rollout.stop = {stop:?} is removed from the completions that the Python reward gets"
                );
                self.hooks.warnings.raise("stop-text-cut", what, "rollout.include_stop = true to keep it");
            }
        }
        Ok(())
    }

    /// The answer extracted by the first verifier that extracts one.
    pub fn extract(&self, completion: &str) -> Option<String> {
        self.sources.iter().find_map(|(_, reward)| reward.verifier()?.extract(completion))
    }

    /// Whether a verifier finds the first wrong step.
    pub fn judges_steps(&self) -> bool {
        self.step_verifier().is_some()
    }

    fn step_verifier(&self) -> Option<&dyn verify::Verifier> {
        self.sources.iter().filter_map(|(_, reward)| reward.verifier()).find(|v| v.scores_steps())
    }

    /// Whether no step of a prefix is wrong, by the first verifier that finds wrong steps.
    pub fn right_so_far(&self, prompt: &Prompt, prefix: &str) -> Result<bool> {
        let none = || Error::usage("no verifier finds wrong steps").fix("a verifier such as chain");
        let wrong =
            self.step_verifier().ok_or_else(none)?.wrong_step(&sample(prompt, prefix, &prompt.place))?;
        // Missing steps at the end of a prefix are not wrong.
        Ok(wrong.is_none_or(|range| range.start >= prefix.len()))
    }

    /// Checks that the row of a prompt has the columns that all sources need.
    pub fn check(&self, prompt: &Prompt, place: &str) -> Result<()> {
        if self.of_tasks && prompt.episode.is_some() {
            return Ok(());
        }
        let sample = sample(prompt, "", place);
        self.sources.iter().try_for_each(|(_, reward)| reward.check(&sample))
    }

    /// Scores completions and places each reward on its completion's last token. Completions that no source could score are
    /// removed from the experience and counted; if all are, the first failure is the error.
    pub fn score(
        &self,
        batch: CompletionBatch<'_>,
        experience: &mut Experience,
        metrics: &mut Metrics,
    ) -> Result<Vec<CompletionScores>> {
        let (sums, scores) = self.score_among(&self.ranks, batch, experience, metrics)?;
        self.account_for_lost(&sums, &scores, batch.at)?;
        Ok(scores)
    }

    /// Scores completions that are a part of a larger set, such as a round of a search or continuations of a few states. Lost ones
    /// come with the failure, and it is no error if all of this part are lost: whoever knows the whole set decides that.
    pub fn score_part(
        &self,
        batch: CompletionBatch<'_>,
        experience: &mut Experience,
    ) -> Result<Vec<ScoredPart>> {
        self.score_part_among(&self.ranks, batch, experience)
    }

    /// The same on this rank alone, without communication.
    pub fn score_part_alone(&self, batch: CompletionBatch<'_>) -> Result<Vec<ScoredPart>> {
        self.score_part_among(Ranks::ALONE, batch, &mut Experience::default())
    }

    fn score_part_among(
        &self,
        ranks: &Ranks,
        batch: CompletionBatch<'_>,
        experience: &mut Experience,
    ) -> Result<Vec<ScoredPart>> {
        let (sums, scores) = self.score_among(ranks, batch, experience, &mut Metrics::default())?;
        let part = |(sum, scores): (RewardSum, CompletionScores)| {
            let failure = scores.is_lost().then(|| self.failure(&[sum]));
            if let Some(failure) = &failure {
                let message = format!("a completion got no reward: {failure}");
                let fix = "it counts neither as right nor as wrong; correct the function";
                self.hooks.warnings.raise("lost-rewards", message, fix);
            }
            (scores, failure)
        };
        Ok(sums.into_iter().zip(scores).map(part).collect())
    }

    fn score_among(
        &self,
        ranks: &Ranks,
        batch: CompletionBatch<'_>,
        experience: &mut Experience,
        metrics: &mut Metrics,
    ) -> Result<(Vec<RewardSum>, Vec<CompletionScores>)> {
        let completions = batch.completions;
        let mut sums: Vec<RewardSum> = completions.iter().map(RewardSum::of).collect();
        let unscored = |played: &Played| self.of_tasks || played.lost.is_some();
        let share = ranks.share(batch.prompts.len());
        let own = |i: &usize| share.contains(&completions[*i].prompt);
        let scored: Vec<usize> = (0..completions.len())
            .filter(|&i| !completions[i].played.as_ref().is_some_and(unscored))
            .filter(own)
            .collect();
        let mut ids: Vec<Vec<u32>> = vec![Vec::new(); completions.len()];
        for s in &experience.sequences {
            ids[s.trajectory].extend(s.actions().map(|i| s.ids[i + 1]));
        }
        let said: Vec<Cow<'_, str>> = completions.iter().map(RolloutCompletion::scored_text).collect();
        let all = batch.samples(&ids, &said);
        let samples: Vec<Sample<'_>> = scored.iter().map(|&i| all[i]).collect();
        // The first verifier decides whether a completion is right; without one, the first source.
        let first = self.sources.iter().position(|(_, r)| r.verifier().is_some()).unwrap_or(0);
        let mut logged = Vec::new();
        let idle = samples.is_empty() && !ranks.is_alone();
        for (i, (weight, reward)) in self.sources.iter().enumerate().filter(|_| !idle) {
            let rule = self.steps.get(i).copied().flatten();
            let steps = match rule {
                Some(rule) => {
                    let of = |&i: &usize| {
                        CompletionSteps::of(rule, &completions[i], &ids[i], self.tokenizer.as_deref())
                    };
                    scored.iter().map(of).collect::<Result<Vec<CompletionSteps>>>()?
                }
                None => Vec::new(),
            };
            let ends: Vec<Vec<usize>> = steps.iter().map(|s| s.ends.clone()).collect();
            let ends = rule.map(|_| &ends[..]);
            let outcomes = outcomes(&**reward, &samples, ends, batch.at, &mut logged)?;
            for (n, (&row, outcome)) in scored.iter().zip(outcomes).enumerate() {
                if let (Some(steps), Outcome::Scored(score)) = (steps.get(n), &outcome) {
                    sums[row].place(*weight, &steps.tokens, &score.steps);
                }
                sums[row].add(*weight, outcome, i == first)?;
            }
        }
        gather(ranks, &mut sums, scored, &mut logged)?;
        logged.iter().for_each(|(name, value)| self.log(name, *value, metrics));
        let scores: Vec<CompletionScores> = sums.iter().map(|s| s.scores(self.sources.is_empty())).collect();
        place(experience, &sums, &scores, metrics);
        scores.iter().filter_map(|g| g.score).for_each(|score| metrics.add("score", score));
        Ok((sums, scores))
    }

    /// Writes what a function logged. Under a name of the run's own it would be averaged with what the run measures.
    fn log(&self, name: &str, value: f64, metrics: &mut Metrics) {
        if !is_own(name) {
            return metrics.add(name, value);
        }
        let other = format!("logged/{name}");
        let message =
            format!("log_metric({name:?}): the run has a metric of that name itself; written as {other:?}");
        self.hooks.warnings.raise("logged-metric", message, "log it under another name");
        metrics.add(&other, value);
    }

    /// The first failure among completions without a reward.
    fn failure(&self, sums: &[RewardSum]) -> Error {
        sums.iter().find_map(|s| s.failure.clone()).map(|f| f.0).unwrap_or_else(|| {
            let mut verifiers = self.sources.iter().filter_map(|(_, reward)| reward.verifier());
            let files = verifiers.find_map(|v| v.file().map(|f| f.display().to_string()));
            Error::usage("no reward function returned a number: all returned None")
                .at(files.unwrap_or("reward".into()))
                .fix("let at least one function return a number for every completion")
        })
    }

    /// Warns once why completions have no reward; an error if none has.
    fn account_for_lost(&self, sums: &[RewardSum], scores: &[CompletionScores], at: Progress) -> Result<()> {
        let (lost, all) = (scores.iter().filter(|g| g.is_lost()).count(), scores.len());
        if lost == 0 {
            return Ok(());
        }
        let failure = self.failure(sums);
        let of_step = if at.steps > 0 { format!(" of step {}", at.step + 1) } else { String::new() };
        if lost == all {
            let what = format!("no completion{of_step} got a reward ({all} lost)");
            return Err(failure.context(what));
        }
        let counted = match at.steps {
            0 => "count neither as right nor as wrong",
            _ => "are left out of the update, as later ones will be (metric rollouts/lost)",
        };
        let text = failure.to_string();
        let (failure, fix) = text.split_once("\n  fix: ").unwrap_or((&text, "correct the function"));
        let message = format!("{lost} of {all} completions{of_step} got no reward and {counted}: {failure}");
        self.hooks.warnings.raise("lost-rewards", message, fix);
        Ok(())
    }
}

/// Gathers the scores and metrics of the other ranks.
fn gather(
    ranks: &Ranks,
    sums: &mut [RewardSum],
    scored: Vec<usize>,
    logged: &mut Vec<(String, f64)>,
) -> Result<()> {
    if ranks.is_alone() {
        return Ok(());
    }
    let own: Vec<(usize, RewardSum)> =
        scored.into_iter().map(|i| (i, std::mem::take(&mut sums[i]))).collect();
    let all = gather_all(ranks, (own, std::mem::take(logged)))?;
    for (theirs, lines) in all {
        theirs.into_iter().for_each(|(i, sum)| sums[i] = sum);
        logged.extend(lines);
    }
    Ok(())
}

/// One finite score, abstention or failure per completion.
fn outcomes(
    reward: &dyn Reward,
    samples: &[Sample<'_>],
    ends: Option<&[Vec<usize>]>,
    at: Progress,
    logged: &mut Vec<(String, f64)>,
) -> Result<Vec<Outcome>> {
    let outcomes = match ends {
        Some(ends) => reward.score_steps(samples, ends, at)?,
        None => reward.score(samples, at)?,
    };
    let name = reward.name();
    if let Some(verifier) = reward.verifier() {
        logged.extend(verifier.take_metrics());
    }
    if outcomes.len() != samples.len() {
        return Err(verify::miscounted(name, outcomes.len(), samples.len()));
    }
    for (i, outcome) in outcomes.iter().enumerate() {
        if let Outcome::Scored(score) = outcome
            && !(score.reward.is_finite() && score.steps.iter().all(|r| r.is_finite()))
        {
            return Err(Error::numerics(format!("{name} returned a reward of {}", score.reward))
                .at(format!("completion {i}")));
        }
    }
    Ok(outcomes)
}

impl<'a> CompletionBatch<'a> {
    fn samples(&self, ids: &'a [Vec<u32>], said: &'a [Cow<'a, str>]) -> Vec<Sample<'a>> {
        let sample = |(i, a): (usize, &'a RolloutCompletion)| {
            let prompt = &self.prompts[a.prompt];
            Sample {
                id: i as u64,
                prompt: &prompt.text,
                messages: &prompt.messages,
                completion: &said[i],
                ids: ids.get(i).map_or(&[], Vec::as_slice),
                tokens: Some(a.tokens),
                truncated: a.truncated,
                columns: RowColumns { row: Some(&prompt.columns), renamed: &prompt.renamed },
                place: &prompt.place,
            }
        };
        self.completions.iter().enumerate().map(sample).collect()
    }
}

/// Places the rewards on tokens of their completions; removes completions without one.
fn place(
    experience: &mut Experience,
    sums: &[RewardSum],
    scores: &[CompletionScores],
    metrics: &mut Metrics,
) {
    let last: HashMap<usize, usize> =
        experience.sequences.iter().enumerate().map(|(i, s)| (s.trajectory, i)).collect();
    for (i, s) in experience.sequences.iter_mut().enumerate() {
        let (g, sum) = (&scores[s.trajectory], &sums[s.trajectory]);
        // Rewards of environments have been placed on their turns.
        if last[&s.trajectory] == i
            && let (Some(last), Some(reward)) = (s.actions().last(), g.reward)
        {
            let placed = steps::place(s, &sum.placed);
            s.reward[last] += (reward - sum.played - placed) as f32;
            if !s.steps.is_empty() {
                metrics.add("rewards/steps", s.steps.len() as f64);
            }
        }
        s.components = g.components.clone();
        s.sources = sum.sources.clone();
    }
    experience.sequences.retain(|s| !scores[s.trajectory].is_lost());
}

/// A completion of which only the text is known.
fn sample<'a>(prompt: &'a Prompt, completion: &'a str, place: &'a str) -> Sample<'a> {
    Sample {
        id: prompt.index,
        prompt: &prompt.text,
        messages: &prompt.messages,
        completion,
        ids: &[],
        tokens: Some(0),
        truncated: false,
        columns: RowColumns { row: Some(&prompt.columns), renamed: &prompt.renamed },
        place,
    }
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct RewardSum {
    reward: f64,
    /// The environment's part of it, placed turn by turn.
    played: f64,
    /// Number of sources with a reward.
    count: usize,
    components: Vec<(String, f32)>,
    sources: Vec<(f32, Option<f32>)>,
    score: Option<f64>,
    found: Option<bool>,
    extra: Map<String, Value>,
    failure: Option<SentError>,
    /// Weighted rewards of steps, with the number of tokens up to each one's end.
    placed: Vec<(usize, f64)>,
}

impl RewardSum {
    /// The environment's reward; 0 without one.
    fn of(completion: &RolloutCompletion) -> Self {
        let Some(played) = &completion.played else { return RewardSum::default() };
        if let Some(lost) = &played.lost {
            return RewardSum { failure: Some(SentError((**lost).clone().into())), ..Default::default() };
        }
        let reward = played.total_reward();
        RewardSum {
            reward,
            played: reward,
            count: 1,
            components: vec![("env".into(), reward as f32)],
            sources: vec![(1.0, Some(reward as f32))],
            score: played.score,
            ..Default::default()
        }
    }

    /// Adds rewards of steps that end after these numbers of tokens.
    fn place(&mut self, weight: f64, tokens: &[usize], rewards: &[f64]) {
        self.placed.extend(tokens.iter().zip(rewards).map(|(&end, reward)| (end, weight * reward)));
    }

    fn add(&mut self, weight: f64, outcome: Outcome, says_right: bool) -> Result<()> {
        match outcome {
            Outcome::Scored(score) => {
                self.reward += weight * score.reward;
                if !(self.reward as f32).is_finite() && self.failure.is_none() {
                    let what = format!(
                        "a reward of {:e} times its weight {weight} overflows f32, whose maximum is {:e}",
                        score.reward,
                        f32::MAX
                    );
                    let error = Error::usage(what).at("reward").fix("smaller rewards or weights");
                    self.failure = Some(SentError(error));
                }
                self.count += 1;
                self.sources.push((weight as f32, Some(score.reward as f32)));
                if says_right && self.score.is_none() {
                    self.score = Some(score.score.unwrap_or(score.reward));
                }
                self.found = self.found.or(score.found);
                for (name, value) in score.components {
                    let name = unused(name, &self.components);
                    self.components.push((name, value as f32));
                }
                self.extra.extend(score.extra);
            }
            // A source that abstains adds no reward, but keeps its index.
            Outcome::Abstained => self.sources.push((weight as f32, None)),
            Outcome::Lost(error) if is_interruption(&error) => {
                return Err(interrupted("waiting for rewards"));
            }
            Outcome::Lost(error) => self.failure = self.failure.take().or(Some(SentError(error))),
        }
        Ok(())
    }

    /// The result; lost if a source failed or all sources abstained.
    fn scores(&self, without_sources: bool) -> CompletionScores {
        let known = self.failure.is_none() && (self.count > 0 || without_sources);
        CompletionScores {
            reward: known.then_some(self.reward),
            components: if known { self.components.clone() } else { Vec::new() },
            score: self.score.or(without_sources.then_some(0.0)).filter(|_| known),
            found: self.found,
            extra: self.extra.clone(),
        }
    }
}

/// A component's name, with a number if it is taken by another source: `correct`, `correct_2`.
fn unused(name: String, components: &[(String, f32)]) -> String {
    let taken = |name: &str| components.iter().any(|(other, _)| other == name);
    if !taken(&name) {
        return name;
    }
    (2..).map(|n| format!("{name}_{n}")).find(|name| !taken(name)).unwrap_or(name)
}

fn truncated(word: Option<&str>) -> Result<Truncated> {
    match word {
        None | Some("wrong") => Ok(Truncated::Wrong),
        Some("score") => Ok(Truncated::Score),
        Some(other) => {
            let fix = |near: &str| format!("truncated = {near:?}");
            Err(unknown("name", other, TRUNCATED.iter().copied(), fix).at("reward.truncated"))
        }
    }
}

/// Values of `truncated`.
pub const TRUNCATED: &[&str] = &["wrong", "score"];

#[cfg(test)]
mod tests;

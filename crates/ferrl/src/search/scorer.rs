//! Scorers: estimated values of prefixes or completions, from 0 to 1.
//!
//! The oracle is the verifier that also decides accuracy; all other scorers are estimates. A learned verifier is a type that
//! implements [`Scorer`], with its own model and sampler if needed.

use crate::episode::Played;
use crate::recipe::{Recipe, RewardSettings as Source};
use crate::reward::{CompletionBatch, CompletionScores, Rewards, ScoredPart};
use crate::rollout::RolloutCompletion;
use crate::source::Prompt;
use crate::verify::Hooks;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::Head;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Backend;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// A prefix or completion to score.
#[derive(Clone, Copy, Debug)]
pub struct Judged<'a> {
    pub prompt: &'a Prompt,
    /// Text after the prompt, or the last action of an episode.
    pub text: &'a str,
    /// Text after the prompt, in episodes with observations.
    pub transcript: &'a str,
    /// Tokens of prompt and prefix.
    pub context: &'a [u32],
    /// The turns of an episode so far.
    pub played: Option<&'a Played>,
    /// Sampled tokens among them, and their log-probability.
    pub sampled: (usize, f64),
    /// Whether it is a whole completion.
    pub terminal: bool,
    pub truncated: bool,
    /// Score of a whole completion by the task's verifier, if there is one.
    pub graded: Option<&'a CompletionScores>,
}

/// Scores prefixes and completions.
pub trait Scorer: Send {
    /// Its name, for tables.
    fn name(&self) -> &str;
    /// A value from 0 to 1 for each, in order, or why one has none. Values do not depend on the batch.
    fn score(&mut self, judged: &[Judged<'_>]) -> Result<Vec<Result<f64>>>;
    /// Whether it can score prefixes.
    fn judges_steps(&self) -> bool {
        false
    }
}

/// Scorers without models or options, by name.
pub const SCORERS: &[(&str, &str)] = &[
    (
        "oracle",
        "the verifier that decides accuracy: an upper bound, never available where answers are unknown",
    ),
    (
        "step_oracle",
        "the same verifier after every step: 1 while no step is wrong; for verifiers that find wrong steps",
    ),
    ("logp", "probability per token, exp(mean logp), under the model itself"),
];

/// The verifier of the task.
pub struct Oracle;

impl Scorer for Oracle {
    fn name(&self) -> &str {
        "oracle"
    }
    fn score(&mut self, judged: &[Judged<'_>]) -> Result<Vec<Result<f64>>> {
        judged.iter().map(|j| judged_whole(j, "oracle").map(|()| of_verifier(j))).collect()
    }
}

/// The verifier of the task, after every step.
pub struct StepOracle(Rewards);

impl StepOracle {
    /// Of rewards with a verifier that finds the first wrong step.
    pub fn new(rewards: Rewards) -> Result<Self> {
        if rewards.judges_steps() {
            return Ok(StepOracle(rewards));
        }
        Err(Error::usage(
            "step_oracle needs a verifier that finds wrong steps, and this one scores whole completions",
        )
        .fix("oracle, or a verifier such as chain"))
    }
}

impl Scorer for StepOracle {
    fn name(&self) -> &str {
        "step_oracle"
    }
    fn score(&mut self, judged: &[Judged<'_>]) -> Result<Vec<Result<f64>>> {
        let one = |j: &Judged<'_>| match j.terminal {
            true => Ok(of_verifier(j)),
            false => Ok(Ok(f64::from(u8::from(self.0.right_so_far(j.prompt, j.transcript)?)))),
        };
        judged.iter().map(one).collect()
    }
    fn judges_steps(&self) -> bool {
        true
    }
}

/// The verifier's score of a whole completion.
fn of_verifier(judged: &Judged<'_>) -> Result<f64> {
    match judged.graded {
        Some(graded) if graded.is_lost() => Err(Error::data("the verifier gave no reward")),
        graded => Ok(graded.map_or(0.0, unit)),
    }
}

fn judged_whole(judged: &Judged<'_>, name: &str) -> Result<()> {
    if judged.terminal {
        return Ok(());
    }
    Err(Error::usage(format!("{name} scores whole completions, not steps"))
        .at("evaluate")
        .fix("--option evaluate=rollout, or a scorer of steps (--verifier logp)"))
}

/// The score of a completion, else its reward, clipped to 0 and 1.
pub(super) fn unit(graded: &CompletionScores) -> f64 {
    worth(graded).clamp(0.0, 1.0)
}

fn worth(graded: &CompletionScores) -> f64 {
    graded.score.or(graded.reward).unwrap_or(0.0)
}

/// Warns of rewards outside of 0 to 1 in a search: clipping makes different completions equal.
pub(super) fn warn_of_bounds(rewards: &Rewards, graded: &[ScoredPart]) {
    if let Some(far) = graded.iter().map(|(g, _)| worth(g)).find(|w| !(0.0..=1.0).contains(w)) {
        let what =
            format!("a completion got a reward of {far}, but search clips rewards to the range from 0 to 1");
        let fix = "a reward from 0 to 1; or name a reward model as scorer, whose scores go through a sigmoid";
        rewards.warnings().raise("search-bounds", what, fix);
    }
}

/// Probability per token.
pub struct LogpScorer;

impl Scorer for LogpScorer {
    fn name(&self) -> &str {
        "logp"
    }
    fn score(&mut self, judged: &[Judged<'_>]) -> Result<Vec<Result<f64>>> {
        let per_token = |(tokens, logprob): (usize, f64)| (logprob / tokens.max(1) as f64).exp().min(1.0);
        Ok(judged.iter().map(|j| Ok(per_token(j.sampled))).collect())
    }
    fn judges_steps(&self) -> bool {
        true
    }
}

/// Any rewards of a recipe: a verifier by its name, a Python file, a reward model.
pub struct RewardScorer {
    name: String,
    rewards: Rewards,
    /// Whether rewards are unbounded, as a reward model's, and go through a sigmoid.
    unbounded: bool,
    /// Whether it can score prefixes.
    steps: bool,
}

impl RewardScorer {
    /// Rewards between 0 and 1, such as a verifier's.
    pub fn bounded(name: impl Into<String>, rewards: Rewards) -> Self {
        RewardScorer { name: name.into(), rewards, unbounded: false, steps: false }
    }
    /// The model of a folder: a score head through a sigmoid, or with options a language model's verdict (`kind =
    /// "generative"`, from 0 to 1) or its log-ratio through a sigmoid (`kind = "implicit"`).
    /// `option` is the prefix of options in messages.
    pub fn of_model(
        dir: &str,
        (option, options): (&str, &Map<String, Value>),
        recipe: &Recipe,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let source = Source { model: Some(dir.into()), options: options.clone(), ..Default::default() };
        let scores = ModelDir::open(Path::new(dir))?.config.head == Head::Score;
        source.check_model(scores, option).map_err(|e| e.at(dir))?;
        let bounded = source.model_kind() == Some("generative");
        let own = Recipe { reward: vec![source], ..recipe.clone() };
        let rewards = Rewards::load(&own, recipe.dtype()?, backend, &Hooks::default())?;
        Ok(RewardScorer { name: dir.into(), rewards, unbounded: !bounded, steps: true })
    }
}

impl Scorer for RewardScorer {
    fn name(&self) -> &str {
        &self.name
    }
    fn score(&mut self, judged: &[Judged<'_>]) -> Result<Vec<Result<f64>>> {
        if !self.steps {
            judged.iter().try_for_each(|j| judged_whole(j, &self.name))?;
        }
        let graded = grade(&self.rewards, judged, |j| (j.transcript.to_string(), None));
        let value = |(g, failure): ScoredPart| match (failure, g.reward) {
            (Some(failure), _) => Err(failure),
            (None, Some(reward)) if self.unbounded => Ok(1.0 / (1.0 + (-reward).exp())),
            _ => Ok(unit(&g)),
        };
        Ok(graded.map_err(|e| e.at(&self.name))?.into_iter().map(value).collect())
    }
    /// A reward model is trained on whole completions, but can score any prefix.
    fn judges_steps(&self) -> bool {
        self.steps
    }
}

/// Rewards of whole completions and episodes, the latter with the environment's reward.
pub(super) fn grade_whole(rewards: &Rewards, judged: &[Judged<'_>]) -> Result<Vec<ScoredPart>> {
    grade(rewards, judged, |j| match j.played {
        Some(played) => (played.text(), Some(played.clone())),
        None => (j.text.to_string(), None),
    })
}

/// Rewards of completions, each with its own prompt.
fn grade(
    rewards: &Rewards,
    judged: &[Judged<'_>],
    read: impl Fn(&Judged<'_>) -> (String, Option<Played>),
) -> Result<Vec<ScoredPart>> {
    if judged.is_empty() {
        return Ok(Vec::new());
    }
    let prompts: Vec<Prompt> = judged.iter().map(|j| j.prompt.clone()).collect();
    // A prefix has no end, like a truncated completion.
    let answer = |(prompt, j): (usize, &Judged<'_>)| {
        let (text, played) = read(j);
        let truncated = j.truncated || !j.terminal;
        RolloutCompletion { prompt, text, tokens: j.sampled.0, truncated, played }
    };
    let completions: Vec<RolloutCompletion> = judged.iter().enumerate().map(answer).collect();
    let batch = CompletionBatch { prompts: &prompts, completions: &completions, at: Default::default() };
    rewards.score_part_alone(batch)
}

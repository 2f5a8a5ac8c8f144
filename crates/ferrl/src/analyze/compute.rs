//! Analyses that load models of a run and sample; they run only if named.

use super::Table;
use super::rollouts::correlation;
use crate::algo::Feed;
use crate::credit::{Continuations, StepCredit, StepSplit, Vine, credit, mean, split};
use crate::evaluate::{calibration, evaluate};
use crate::experience::{Experience, Metrics, Sequence};
use crate::recipe::{Recipe, Rollout, in_run};
use crate::reward::CompletionBatch;
use crate::rollout::{self, Actor, RolloutCompletion, Sampled};
use crate::setup;
use crate::source::{Item, Prompt};
use crate::verify::Hooks;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::Sampler;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Backend, Ranks};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Amounts of computation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Held-out prompts.
    pub prompts: usize,
    /// Completions per prompt, whose states are evaluated.
    pub samples: usize,
    /// Continuations of each state that are the ground truth.
    pub truth: usize,
    /// Continuations of the Monte-Carlo estimate (VinePPO's K).
    pub estimate: usize,
    pub step_tokens: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Effort { prompts: 50, samples: 4, truth: 64, estimate: 9, step_tokens: 4 }
    }
}

/// An analysis that computes.
pub struct Computed {
    /// Its name on the command line.
    pub name: &'static str,
    pub about: &'static str,
    /// The table of a run, computed on a device.
    pub run: fn(&Path, &Arc<dyn Backend>, Effort) -> Result<Table>,
}

/// Every analysis that computes.
pub const COMPUTED: &[Computed] = &[
    Computed {
        name: "critic",
        about: "values of states by the critic (if any) and Monte-Carlo estimates, against many continuations; ranking of steps",
        run: critic,
    },
    Computed {
        name: "gradients",
        about: "variance of the policy gradient between independent rollouts of the newest checkpoint",
        run: gradients,
    },
    Computed {
        name: "checkpoints",
        about: "accuracy of each stage's initial model, of every checkpoint and of every stage's final model",
        run: checkpoints,
    },
];

/// The last stage that samples; otherwise the last stage with rewards.
fn sampling_stage(run: &Path) -> Result<Recipe> {
    let file = run.join("recipe.toml");
    let stages = Recipe::load(&file, &[])?.stages;
    let sampled = |r: &Recipe| crate::algo::find(r.algorithm_name()).is_ok_and(|e| e.feed.sampled());
    let last = |wanted: &dyn Fn(&Recipe) -> bool| stages.iter().map(|s| &s.recipe).rfind(|r| wanted(r));
    // SFT stages with rewards are evaluated too.
    let rewarded = |r: &Recipe| setup::rewarded(r).unwrap_or(false);
    let Some(recipe) = last(&sampled).or_else(|| last(&rewarded)).cloned() else {
        return Err(Error::usage("no stage of the run samples completions or has rewards")
            .at(file.display())
            .fix("a run with a [[reward]], or on a task"));
    };
    Ok(in_run(&recipe, &stages, run))
}

/// Checkpoints of a run, the earliest first: step and folder.
fn saved(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let dir = run.join("checkpoints");
    if !dir.is_dir() {
        return Ok(Vec::new()); // a run that was not to save any
    }
    let unread = |e: std::io::Error| Error::data(format!("cannot read: {e}")).at(dir.display());
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.extend(name.strip_prefix("step_").and_then(|n| n.parse().ok()).map(|step| (step, path)));
    }
    all.sort();
    Ok(all)
}

/// A model of the run with what samples from it.
struct LoadedModel {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    dir: PathBuf,
}

impl LoadedModel {
    fn open(dir: &Path, recipe: &Recipe, backend: &Arc<dyn Backend>) -> Result<Self> {
        let options =
            Options { dtype: recipe.dtype()?, training: false, context: setup::sampled_context(recipe) };
        let model = Model::load(backend.clone(), &ModelDir::open(dir)?, options)?;
        Ok(LoadedModel { model, tokenizer: Arc::new(Tokenizer::from_dir(dir)?), dir: dir.into() })
    }
}

/// Accuracy of the initial models and of every checkpoint.
fn checkpoints(run: &Path, backend: &Arc<dyn Backend>, effort: Effort) -> Result<Table> {
    let recipe = sampling_stage(run)?;
    let mut models: Vec<(String, PathBuf)> = Vec::new();
    for i in 0.. {
        let (start, end) = (run.join(format!("start_{i}")), run.join("stages").join(i.to_string()));
        if !start.is_dir() && !end.is_dir() {
            break;
        }
        models.push((format!("stage {i}, initial"), start));
        models.push((format!("stage {i}, final"), end));
    }
    models.extend(saved(run)?.into_iter().map(|(step, dir)| (format!("step {step}"), dir.join("model"))));
    if let Some(path) = &recipe.model.path {
        models.insert(0, ("baseline".into(), PathBuf::from(path)));
    }
    models.retain(|(_, dir)| dir.join("config.json").is_file());
    let mut table = Table::of(&["model", "accuracy", "greedy", "reward", "tokens", "ece"]);
    for (name, dir) in models {
        if !ModelDir::open(&dir)?.config.head.has_lm() {
            continue;
        }
        let loaded = LoadedModel::open(&dir, &recipe, backend)?;
        let sampled = measure(&loaded, &recipe, backend, (recipe.rollout.temperature, effort.prompts))?;
        let greedy = measure(&loaded, &recipe, backend, (0.0, effort.prompts))?;
        let get = |m: &Metrics, name: &str| m.get(name).map_or(serde_json::Value::Null, |v| v.into());
        table.rows.push(vec![
            name.into(),
            get(&sampled, "eval/pass@1"),
            get(&greedy, "eval/pass@1"),
            get(&sampled, "eval/reward"),
            get(&sampled, "eval/mean_length"),
            get(&sampled, "eval/ece"),
        ]);
    }
    Ok(table)
}

/// Figures of a model on held-out prompts.
fn measure(
    loaded: &LoadedModel,
    recipe: &Recipe,
    backend: &Arc<dyn Backend>,
    (temperature, prompts): (f64, usize),
) -> Result<Metrics> {
    let hooks = Hooks::default();
    let rewards = setup::rewards(recipe, Feed::Rollouts, backend, &hooks)?;
    let stops = rollout::stops(&loaded.dir, &loaded.tokenizer, &recipe.rollout);
    let environments = setup::environments(recipe, &loaded.dir, &loaded.tokenizer, &hooks)?;
    let mut source =
        setup::source(recipe, &loaded.dir, &loaded.tokenizer, Feed::Rollouts, true, &hooks.warnings)?;
    let cache = setup::cache_options(&recipe.rollout, &**backend);
    let mut sampler = Sampler::new(&loaded.model, cache)?.with_tokenizer(loaded.tokenizer.clone());
    let mut actor = Actor {
        generator: &mut sampler,
        policy: &loaded.model,
        tokenizer: &loaded.tokenizer,
        stops: &stops,
        environments: &environments,
        ranks: Ranks::ALONE,
    };
    let settings = Rollout { temperature, ..recipe.rollout.clone() };
    let counts = (prompts, 1, recipe.seed ^ 0xe7a1);
    let all = evaluate(&mut actor, &mut source, &rewards, &settings, counts, Default::default())?;
    let mut metrics = all.metrics;
    if metrics.get("eval/ece").is_none() {
        metrics.join(calibration::metrics(&all.completions));
    }
    Ok(metrics)
}

/// Independent rollouts whose gradients are compared.
const ROLLOUTS: usize = 8;

/// Signal and noise of the policy gradient, from independent rollouts.
fn gradients(run: &Path, backend: &Arc<dyn Backend>, effort: Effort) -> Result<Table> {
    let mut recipe = sampling_stage(run)?;
    if !crate::algo::find(recipe.algorithm_name())?.feed.sampled() {
        return Err(Error::usage(format!(
            "{} learns from given rows: there is no policy gradient",
            recipe.algorithm_name()
        ))
        .at(run.display())
        .fix("a run with an algorithm that samples, such as grpo or ppo"));
    }
    let Some((_, dir)) = saved(run)?.pop() else {
        return Err(Error::data("has no checkpoint").at(run.display()));
    };
    let critic = dir.join("model_critic");
    if critic.is_dir() {
        recipe.critic.path = Some(critic.display().to_string());
    }
    recipe.rollout.prompts = recipe.rollout.prompts.min(effort.prompts);
    recipe.model.init = None;
    let model = dir.join("model");
    recipe.model.path = Some(model.display().to_string());
    let mut stage = setup::stage(recipe.clone(), backend.clone(), &model)?;
    let all = (0..ROLLOUTS).map(|_| stage.sample_gradient()).collect::<Result<Vec<_>>>()?;
    let spread = Spread::of(&all);
    let mut table = Table::of(&["rollouts", "completions", "norm", "norm of mean", "deviation", "cosine"]);
    table.rows.push(vec![
        ROLLOUTS.into(),
        (recipe.rollout.prompts * recipe.rollout.samples).into(),
        spread.norm.into(),
        spread.mean_norm.into(),
        spread.deviation.into(),
        spread.cosine.into(),
    ]);
    Ok(table)
}

/// Statistics of vectors of one distribution.
struct Spread {
    /// Mean of their norms.
    norm: f64,
    /// Norm of their mean.
    mean_norm: f64,
    /// Root of the summed variance of their entries.
    deviation: f64,
    /// Mean cosine of two of them.
    cosine: f64,
}

impl Spread {
    fn of(all: &[Vec<f32>]) -> Self {
        let (n, len) = (all.len() as f64, all.first().map_or(0, Vec::len));
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let mean: Vec<f32> =
            (0..len).map(|i| (all.iter().map(|g| f64::from(g[i])).sum::<f64>() / n) as f32).collect();
        let norms: Vec<f64> = all.iter().map(|g| dot(g, g).sqrt()).collect();
        let around = norms.iter().map(|norm| norm * norm).sum::<f64>() - n * dot(&mean, &mean);
        let mut cosines = Vec::new();
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate().skip(i + 1) {
                cosines.push(dot(a, b) / (norms[i] * norms[j]).max(f64::MIN_POSITIVE));
            }
        }
        Spread {
            norm: norms.iter().sum::<f64>() / n,
            mean_norm: dot(&mean, &mean).sqrt(),
            deviation: (around / (n - 1.0)).max(0.0).sqrt(),
            cosine: cosines.iter().sum::<f64>() / cosines.len().max(1) as f64,
        }
    }
}

/// States of completions with their true and estimated values.
struct StateValues {
    /// Prompt and place of the state among those of its completion.
    of: (usize, usize),
    truth: f64,
    monte_carlo: f64,
    critic: Option<f64>,
}

/// The newest checkpoint that generates, of those with a critic where there is one.
fn newest(run: &Path) -> Result<PathBuf> {
    let all = saved(run)?;
    let critic = all.iter().rfind(|(_, dir)| dir.join("model_critic/config.json").is_file());
    let generates = |dir: &Path| ModelDir::open(&dir.join("model")).is_ok_and(|m| m.config.head.has_lm());
    let found = critic.or_else(|| all.iter().rfind(|(_, dir)| generates(dir)));
    found.map(|(_, dir)| dir.clone()).ok_or_else(|| Error::data("has no checkpoint").at(run.display()))
}

/// The critic of the newest checkpoint, where it has one, and Monte-Carlo estimates against the ground truth.
fn critic(run: &Path, backend: &Arc<dyn Backend>, effort: Effort) -> Result<Table> {
    let (recipe, dir) = (sampling_stage(run)?, newest(run)?);
    let policy = LoadedModel::open(&dir.join("model"), &recipe, backend)?;
    let own = dir.join("model_critic");
    let own = own.is_dir().then(|| LoadedModel::open(&own, &recipe, backend)).transpose()?;
    // A critic on the policy's trunk is a head of the policy.
    let critic = own.as_ref().or(Some(&policy)).map(|m| &m.model).filter(|m| m.config.head.has_value());
    let states = states(&policy, critic, &recipe, backend, effort)?;
    let mut table = Table::of(&["estimate", "states", "error", "correlation", "pairs", "ranked right"]);
    for (name, of) in [
        ("critic", (|s: &StateValues| s.critic.unwrap_or(0.0)) as fn(&StateValues) -> f64),
        ("Monte Carlo", |s: &StateValues| s.monte_carlo),
    ] {
        if name == "critic" && critic.is_none() {
            continue;
        }
        let error = states.iter().map(|s| (of(s) - s.truth).abs()).sum::<f64>() / states.len().max(1) as f64;
        let (pairs, right) = ranking(&states, of);
        let pair: Vec<(f64, f64)> = states.iter().map(|s| (of(s), s.truth)).collect();
        table.rows.push(vec![
            name.into(),
            states.len().into(),
            error.into(),
            correlation(&pair).into(),
            pairs.into(),
            right.into(),
        ]);
    }
    Ok(table)
}

/// How often an estimate ranks the states after the first steps of two completions of a prompt like the true values, where these
/// differ; equal estimates count half.
fn ranking(states: &[StateValues], of: fn(&StateValues) -> f64) -> (usize, Option<f64>) {
    let (mut pairs, mut right) = (0, 0.0);
    for (i, a) in states.iter().enumerate() {
        for b in states[i + 1..].iter().filter(|b| a.of == b.of && a.of.1 == 1 && a.truth != b.truth) {
            pairs += 1;
            let (estimated, truth) = (of(a) - of(b), a.truth - b.truth);
            right +=
                if estimated == 0.0 { 0.5 } else { f64::from(u8::from((estimated > 0.0) == (truth > 0.0))) };
        }
    }
    (pairs, (pairs > 0).then(|| right / pairs as f64))
}

/// Samples completions and continues them from every step's end.
fn states(
    policy: &LoadedModel,
    critic: Option<&Model>,
    recipe: &Recipe,
    backend: &Arc<dyn Backend>,
    effort: Effort,
) -> Result<Vec<StateValues>> {
    let hooks = Hooks::default();
    let rewards = setup::rewards(recipe, Feed::Rollouts, backend, &hooks)?;
    let (dir, tokenizer) = (&policy.dir, &policy.tokenizer);
    let mut source = setup::source(recipe, dir, tokenizer, Feed::Rollouts, true, &hooks.warnings)?;
    let count = effort.prompts.min(source.epoch().unwrap_or(usize::MAX));
    let ask = |item| if let Item::Prompt(prompt) = item { Some(prompt) } else { None };
    let mut prompts: Vec<Prompt> = source.next(count)?.into_iter().filter_map(ask).collect();
    let stops = rollout::stops(dir, tokenizer, &recipe.rollout);
    let environments = setup::environments(recipe, dir, tokenizer, &hooks)?;
    let cache = setup::cache_options(&recipe.rollout, &**backend);
    let mut sampler = Sampler::new(&policy.model, cache)?.with_tokenizer(tokenizer.clone());
    let mut actor = Actor {
        generator: &mut sampler,
        policy: &policy.model,
        tokenizer,
        stops: &stops,
        environments: &environments,
        ranks: Ranks::ALONE,
    };
    let params = rollout::params(&recipe.rollout, &stops, recipe.seed);
    let Sampled { mut experience, completions, .. } =
        rollout::sample(&mut actor, &mut prompts, &params, effort.samples, 0)?;
    let batch = CompletionBatch { prompts: &prompts, completions: &completions, at: Default::default() };
    let scores = rewards.score(batch, &mut experience, &mut Metrics::default())?;
    let vine = Vine {
        samples: effort.estimate + effort.truth,
        split: StepSplit::Tokens,
        step_tokens: effort.step_tokens,
        ..Default::default()
    };
    let mut continuations = Continuations { actor, params, rewards: &rewards, vine: &vine };
    let credits = credit(&mut continuations, batch, &scores, &mut experience, &mut Metrics::default())?;
    judge(critic, (&continuations, tokenizer, effort), &experience, &credits, &completions)
}

/// Adds the critic's values to those of the continuations.
fn judge(
    critic: Option<&Model>,
    (continuations, tokenizer, effort): (&Continuations<'_>, &Tokenizer, Effort),
    experience: &Experience,
    credits: &[Option<StepCredit>],
    completions: &[RolloutCompletion],
) -> Result<Vec<StateValues>> {
    let mut out = Vec::new();
    for members in experience.trajectories() {
        let sequences: Vec<&Sequence> = members.iter().map(|&s| &experience.sequences[s]).collect();
        let number = sequences[0].trajectory;
        let (Some(credit), completion) = (&credits[number], &completions[number]) else { continue };
        let firsts = match &completion.played {
            // Of an episode every turn is a step.
            Some(played) => continuations.turn_starts(&sequences, played)?,
            None => step_starts(sequences[0], &completion.text, (tokenizer, effort))?,
        };
        let of = |s: &&Sequence| match critic {
            Some(model) => Ok(stats(model, &Batch::of([s.ids.clone()]), 1.0)?.value),
            None => Ok(Vec::new()),
        };
        let values: Vec<Vec<f32>> = sequences.iter().map(of).collect::<Result<_>>()?;
        for (place, ((s, first), rewards)) in firsts.into_iter().zip(&credit.rollouts).enumerate() {
            let (estimate, truth) = rewards.split_at(effort.estimate.min(rewards.len()));
            out.push(StateValues {
                of: (completion.prompt, place),
                truth: mean(truth),
                monte_carlo: mean(estimate),
                // The value of a state stands where its next token is predicted.
                critic: values.get(s).and_then(|v| v.get(first - 1)).copied().map(f64::from),
            });
        }
    }
    Ok(out)
}

/// Where the steps of a completion begin: its only sequence, and the first token of the step there.
fn step_starts(
    s: &Sequence,
    text: &str,
    (tokenizer, effort): (&Tokenizer, Effort),
) -> Result<Vec<(usize, usize)>> {
    let from = s.trained.iter().position(|t| *t).unwrap_or(s.ids.len());
    let rule = (StepSplit::Tokens, effort.step_tokens);
    let steps = split::steps(rule, &s.ids[from..], text, tokenizer)?.unwrap_or_default();
    let ends = [0].into_iter().chain(steps.iter().map(|step| step.end));
    Ok(ends.map(|end| (0, from + end)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_of_gradients_by_hand() {
        let s = Spread::of(&[vec![1.0, 0.0], vec![0.0, 1.0]]);
        // Mean (0.5, 0.5); variance of each entry 0.5, in all 1.
        assert!((s.mean_norm - 0.5f64.sqrt()).abs() < 1e-6 && (s.deviation - 1.0).abs() < 1e-6);
        assert_eq!((s.norm, s.cosine), (1.0, 0.0));
        let same = Spread::of(&[vec![3.0, 4.0], vec![3.0, 4.0]]);
        assert_eq!((same.norm, same.mean_norm, same.deviation, same.cosine), (5.0, 5.0, 0.0, 1.0));
    }

    #[test]
    fn ranking_by_hand() {
        let state = |of, truth, critic| StateValues { of, truth, critic: Some(critic), monte_carlo: truth };
        let states = [
            state((0, 1), 0.1, 0.5),
            state((0, 1), 0.9, 0.4),
            state((0, 1), 0.9, 0.5),
            state((1, 1), 0.2, 0.0),
        ];
        // Pairs with different truth: the first against the second and the third; the critic has one wrong, one equal.
        assert_eq!(ranking(&states, |s| s.critic.unwrap()), (2, Some(0.25)));
        assert_eq!(ranking(&states, |s| s.monte_carlo), (2, Some(1.0)));
        assert_eq!(ranking(&states[1..3], |s| s.critic.unwrap()), (0, None), "equal truths rank nothing");
    }
}

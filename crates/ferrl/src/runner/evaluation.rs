//! Evaluations during a run, on held-out examples and prompts.

use super::OneStage;
use crate::algo::Feed;
use crate::evaluate::{Evaluation, evaluate, search};
use crate::recipe::{Recipe, Rollout};
use crate::reward::Rewards;
use crate::rollout::Actor;
use crate::search::Searcher;
use crate::setup;
use crate::source::Mixture;
use crate::train::Stage;
use crate::verify::Progress;
use ferrl_engine::generate::{Generator, Sampler};
use ferrl_engine::{Error, Result, nearest};
use std::cell::RefMut;

impl OneStage<'_> {
    /// Evaluates on held-out examples, and on held-out prompts if there are rewards.
    pub(super) fn evaluate(&self, stage: &mut Stage) -> Result<Evaluation> {
        (stage.waits)("evaluate");
        stage.gather_weights()?;
        let (feed, recipe) = (stage.feed, stage.recipe.clone());
        let mut all = Evaluation::default();
        if !feed.sampled() {
            let mut source = self.held_out(stage, feed)?;
            all.metrics = stage.validate(&mut source, recipe.eval.prompts)?;
        }
        let scores = feed.sampled() || setup::rewarded(&recipe)?;
        if scores && !stage.algo.needs().score {
            let asked = self.ask(stage, &recipe)?;
            all.metrics.join(asked.metrics);
            all.completions = asked.completions;
        }
        Ok(all)
    }

    /// Held-out examples from the first on. They are opened once, so that later changes of the file do not change the
    /// evaluation.
    fn held_out(&self, stage: &Stage, feed: Feed) -> Result<RefMut<'_, Mixture>> {
        let mut opened = self.opened.borrow_mut();
        let at = match opened.iter().position(|o| o.0 == feed) {
            Some(at) => at,
            None => {
                let (recipe, tokenizer) = (&stage.recipe, &stage.tokenizer);
                let source = setup::source(recipe, self.dir, tokenizer, feed, true, &stage.warnings)?;
                opened.push((feed, source.state(), source));
                opened.len() - 1
            }
        };
        let (_, start, source) = &mut opened[at];
        source.restore(start)?;
        Ok(RefMut::map(opened, |opened| &mut opened[at].2))
    }

    /// Samples and scores completions of held-out prompts.
    fn ask(&self, stage: &mut Stage, recipe: &Recipe) -> Result<Evaluation> {
        // There is one KV cache: that of the rollouts, or one that is freed after the evaluation.
        let mut searcher = stage.searcher.take();
        let asked = self.ask_once(stage, searcher.as_mut(), recipe);
        stage.searcher = searcher;
        asked
    }

    fn ask_once(
        &self,
        stage: &mut Stage,
        searcher: Option<&mut Searcher>,
        recipe: &Recipe,
    ) -> Result<Evaluation> {
        match stage.generator.take() {
            Some(mut generator) => {
                let asked = self.ask_with(&mut *generator, searcher, stage, &stage.rewards, recipe);
                stage.generator = Some(generator);
                asked
            }
            None => {
                let model = &stage.policy.model;
                let cache = setup::cache_options(&recipe.rollout, &*model.backend);
                let sampler =
                    Sampler::new(model, cache).map_err(|e| setup::cache_error(e, &recipe.rollout))?;
                let mut sampler = sampler.with_tokenizer(stage.tokenizer.clone());
                let rewards = setup::rewards(recipe, Feed::Rollouts, &model.backend, &stage.hooks())?;
                let rewards = rewards.shared_by(&stage.ranks);
                self.ask_with(&mut sampler, searcher, stage, &rewards, recipe)
            }
        }
    }

    /// The same with a generator: at the evaluation's temperature, and greedy.
    fn ask_with(
        &self,
        generator: &mut dyn Generator,
        searcher: Option<&mut Searcher>,
        stage: &Stage,
        rewards: &Rewards,
        recipe: &Recipe,
    ) -> Result<Evaluation> {
        let (policy, tokenizer, stops) = (&stage.policy.model, &*stage.tokenizer, &stage.stops);
        let (environments, ranks) = (&stage.environments, &stage.ranks);
        let mut actor = Actor { generator, policy, tokenizer, stops, environments, ranks };
        let at =
            Progress { step: stage.step, steps: stage.schedules.0.total_steps, epoch: stage.source.epochs() };
        let mut asked = |temperature: f64, samples: usize, seed: u64| {
            let settings = Rollout { temperature, ..recipe.rollout.clone() };
            let mut source = self.held_out(stage, Feed::Rollouts)?;
            let counts = (recipe.eval.prompts, samples, seed);
            evaluate(&mut actor, &mut source, rewards, &settings, counts, at)
                .map_err(|e| setup::too_small(e, &recipe.rollout))
        };
        let temperature = recipe.eval.temperature.unwrap_or(recipe.rollout.temperature);
        let mut all = asked(temperature, recipe.eval.samples, recipe.seed ^ 0xe7a1)?;
        if temperature > 0.0 {
            let greedy = asked(0.0, 1, recipe.seed)?;
            let right = greedy.metrics.get("eval/pass@1");
            right.into_iter().for_each(|right| all.metrics.add("eval/greedy", right));
        }
        if let Some(searcher) = searcher.filter(|_| recipe.search.eval) {
            let settings = Rollout { temperature, ..recipe.rollout.clone() };
            let mut source = self.held_out(stage, Feed::Rollouts)?;
            let counts = (recipe.eval.prompts, recipe.seed ^ 0xe7a1);
            let found = search(&mut actor, &mut source, searcher, (rewards, &settings), counts)
                .map_err(|e| setup::too_small(e, &recipe.rollout))?;
            all.metrics.join(found);
        }
        Ok(all)
    }
}

/// Whether an evaluation ranks checkpoints; an error if it lacks their metric.
pub(super) fn rates(recipe: &Recipe, evaluation: &Evaluation) -> Result<bool> {
    let Some(metric) = recipe.checkpoint.metric.as_ref().filter(|m| m.starts_with("eval/")) else {
        return Ok(false);
    };
    if evaluation.metrics.get(metric).is_some() {
        return Ok(true);
    }
    let names: Vec<&str> = evaluation.metrics.means().map(|(name, _)| name).collect();
    let near = nearest(metric, names.iter().copied()).or(names.first().copied()).unwrap_or("eval/loss");
    Err(Error::usage(format!("the evaluation has no {metric:?}, only {}", names.join(", ")))
        .at("checkpoint.metric")
        .fix(format!("checkpoint.metric = {near:?}")))
}

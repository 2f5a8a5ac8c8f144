//! Warnings about settings that are valid but probably mistakes.

use super::Recipe;
use crate::algo;
use crate::warnings::Warnings;

/// Maximum weight decay per step, as a fraction, without a warning.
const DECAY: f64 = 0.1;
/// AdamW changes a weight by about the learning rate per step, and weights are about 0.02.
const LARGE_LR: f64 = 0.05;
/// The spacing of f32 at 0.02 is about twice this: rounding drops smaller updates.
const SMALL_LR: f64 = 1e-9;
/// Sampling is close to greedy below, and close to uniform above.
const TEMPERATURES: std::ops::RangeInclusive<f64> = 0.1..=2.0;

pub fn warn(recipe: &Recipe, warnings: &Warnings) {
    let o = &recipe.optim;
    let critic = recipe.algorithm().is_ok_and(|a| a.needs().critic) && !recipe.critic.shared;
    let rates = [("optim.lr", Some(o.lr)), ("critic.lr", recipe.critic.lr.filter(|_| critic))];
    for (key, lr) in rates.into_iter().filter_map(|(key, lr)| Some((key, lr?))) {
        let decay = lr * o.weight_decay;
        if decay > DECAY {
            let does = match decay {
                d if d >= 2.0 => "makes every matrix diverge",
                d if d > 1.0 => "flips the sign of every matrix",
                _ => "shrinks every matrix by that fraction",
            };
            warnings.raise(
                "decay-too-large",
                format!(
                    "{key} = {lr} times optim.weight_decay = {} is {decay}: each step {does}",
                    o.weight_decay
                ),
                format!("optim.weight_decay = 0.01, or a smaller {key}"),
            );
        }
        let adam = o.is_adam();
        if adam && lr > LARGE_LR {
            let what = format!("{key} = {lr}: AdamW changes every weight by about that much at each step");
            warnings.raise(
                "lr-too-large",
                what,
                format!("{key} = 1e-5 for a trained model, 1e-3 for a new one"),
            );
        }
        if adam && lr < SMALL_LR {
            let what = format!("{key} = {lr}: updates are smaller than the rounding of the weights");
            warnings.raise("lr-too-small", what, format!("{key} = 1e-6"));
        }
    }
    let samples = algo::find(recipe.algorithm_name()).is_ok_and(|e| e.feed.sampled());
    let t = recipe.rollout.temperature;
    if samples && !TEMPERATURES.contains(&t) {
        let nearly = if t < 1.0 {
            "greedy: all completions of a prompt are the same"
        } else {
            "uniform over all tokens"
        };
        let what = format!("rollout.temperature = {t}: sampling is nearly {nearly}");
        warnings.raise("temperature-extreme", what, "rollout.temperature = 1.0");
    }
}

/// Keys with a value other than the default that the algorithm never reads, each with the reason.
pub(super) fn unused(recipe: &Recipe) -> Vec<(&'static str, &'static str)> {
    let Ok(entry) = algo::find(recipe.algorithm_name()) else { return Vec::new() };
    let (samples, usual) = (entry.feed.sampled(), Recipe::default());
    let asks = (recipe.eval.every > 0 || recipe.eval.at_start) && recipe.eval.prompts > 0;
    let (t, r) = (&recipe.train, &recipe.rollout);
    let critic = recipe.algorithm().is_ok_and(|a| a.needs().critic);
    let rules = [
        (recipe.critic.path.is_some() && !critic, "critic.path", "the algorithm has no critic: leave it out"),
        (
            samples && t.batch != usual.train.batch,
            "train.batch",
            "the batch of a step is rollout.prompts x rollout.samples",
        ),
        (t.steps.is_some() && t.epochs != usual.train.epochs, "train.epochs", "train.steps overrides it"),
        (
            !samples && r.prompts != usual.rollout.prompts,
            "rollout.prompts",
            "train.batch is the number of rows per step",
        ),
        (!samples && r.samples != usual.rollout.samples, "rollout.samples", "the algorithm does not sample"),
        (
            samples && r.partial_tokens >= r.max_new_tokens,
            "rollout.partial_tokens",
            "it is not smaller than rollout.max_new_tokens",
        ),
        (
            !samples && !asks && r.max_new_tokens != usual.rollout.max_new_tokens,
            "rollout.max_new_tokens",
            "the algorithm does not sample",
        ),
    ];
    rules.into_iter().filter(|rule| rule.0).map(|(_, key, fix)| (key, fix)).collect()
}

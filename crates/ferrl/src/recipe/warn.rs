//! Settings that may be meant and probably are not: the run goes on, and says so.

use super::Recipe;
use crate::algo;
use crate::warnings::Warnings;

/// Fraction of a weight that one step may decay without a warning.
const DECAY: f64 = 0.1;
/// AdamW moves a weight by about the learning rate, and weights are about 0.02.
const LARGE_LR: f64 = 0.05;
/// The spacing of f32 at 0.02 is about twice this: smaller updates are lost in rounding.
const SMALL_LR: f64 = 1e-9;
/// Sampling is close to greedy below, and close to uniform above.
const TEMPERATURES: std::ops::RangeInclusive<f64> = 0.1..=2.0;

/// Raises what is odd about a stage's settings.
pub fn warn(recipe: &Recipe, warnings: &Warnings) {
    let o = &recipe.optim;
    let critic = recipe.algorithm().is_ok_and(|a| a.needs().critic) && !recipe.critic.shared;
    let rates = [("optim.lr", Some(o.lr)), ("critic.lr", recipe.critic.lr.filter(|_| critic))];
    for (key, lr) in rates.into_iter().filter_map(|(key, lr)| Some((key, lr?))) {
        let decay = lr * o.weight_decay;
        if decay > DECAY {
            let does = match decay {
                d if d >= 2.0 => "makes every matrix grow without end",
                d if d > 1.0 => "turns the sign of every matrix",
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
            let what = format!("{key} = {lr}: AdamW moves every weight by about that much at each step");
            warnings.raise(
                "lr-too-large",
                what,
                format!("{key} = 1e-5 for a trained model, 1e-3 for a new one"),
            );
        }
        if adam && lr < SMALL_LR {
            let what = format!("{key} = {lr}: such updates are lost in the rounding of the weights");
            warnings.raise("lr-too-small", what, format!("{key} = 1e-6"));
        }
    }
    let samples = algo::find(recipe.algorithm_name()).is_ok_and(|e| e.feed.sampled());
    let t = recipe.rollout.temperature;
    if samples && !TEMPERATURES.contains(&t) {
        let nearly =
            if t < 1.0 { "greedy: all completions of a prompt are alike" } else { "uniform over all tokens" };
        let what = format!("rollout.temperature = {t}: sampling is nearly {nearly}");
        warnings.raise("temperature-extreme", what, "rollout.temperature = 1.0");
    }
}

/// Keys whose value is not the default and that the algorithm never reads, each with what is meant instead.
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
            "rollout.prompts and rollout.samples say how many completions a step has",
        ),
        (
            t.steps.is_some() && t.epochs != usual.train.epochs,
            "train.epochs",
            "train.steps decides; leave it out to count epochs",
        ),
        (
            !samples && r.prompts != usual.rollout.prompts,
            "rollout.prompts",
            "train.batch says how many rows a step has",
        ),
        (
            !samples && r.samples != usual.rollout.samples,
            "rollout.samples",
            "nothing is sampled: the rows bring their responses",
        ),
        (
            samples && r.partial_tokens >= r.max_new_tokens,
            "rollout.partial_tokens",
            "fewer than rollout.max_new_tokens: completions get those in one step",
        ),
        (
            !samples && !asks && r.max_new_tokens != usual.rollout.max_new_tokens,
            "rollout.max_new_tokens",
            "nothing is sampled: the rows bring their responses",
        ),
    ];
    rules.into_iter().filter(|rule| rule.0).map(|(_, key, fix)| (key, fix)).collect()
}

//! How good the policy is on held-out prompts: accuracy, pass@k, majority vote, length.

pub mod estimate;
mod summary;

pub use summary::{Figure, Summary};

use crate::experience::Metrics;
use crate::recipe::Rollout;
use crate::reward::{Graded, Rewards};
use crate::rollout::{self, Answer};
use crate::source::{Item, Prompt, Source};
use ferrl_engine::Result;
use ferrl_engine::generate::Sampler;
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;

/// What was asked, answered and given.
pub struct Evaluation {
    /// Means by name, under `eval/`.
    pub metrics: Metrics,
    /// Every answer with its grade.
    pub answers: Vec<Answered>,
}

/// A question, an answer to it, and what the answer got.
pub type Answered = (Prompt, Answer, Graded);

/// An answer counts as right from this score on.
const RIGHT: f64 = 1.0;

/// Asks `prompts` held-out questions, `samples` times each, at a temperature; 0 is greedy.
pub fn evaluate(
    model: &Model,
    sampler: &mut Sampler,
    tokenizer: &Tokenizer,
    source: &mut dyn Source,
    rewards: &Rewards,
    settings: &Rollout,
    (prompts, samples, seed): (usize, usize, u64),
) -> Result<Evaluation> {
    let ask = |item: Item| match item {
        Item::Ask(prompt) => Some(prompt),
        Item::Given(_) => None,
    };
    let prompts: Vec<Prompt> = source.next(prompts)?.into_iter().filter_map(ask).collect();
    let params = rollout::params(settings, tokenizer, seed);
    let (mut experience, answers) =
        rollout::collect(sampler, model, tokenizer, &prompts, &params, samples, u32::MAX as u64)?;
    let mut scratch = Metrics::default();
    let graded = rewards.score(&prompts, &answers, &mut experience, &mut scratch)?;
    let mut metrics = Metrics::default();
    let lost = scratch.get("rollouts/lost").filter(|&lost| lost > 0.0);
    lost.into_iter().for_each(|lost| metrics.add("eval/lost", lost));
    for (question, graded) in graded.chunks(samples).enumerate() {
        let right = graded.iter().filter(|g| g.score >= RIGHT).count();
        metrics.add("eval/pass@1", right as f64 / samples as f64);
        metrics.add("eval/reward", graded.iter().map(|g| g.reward).sum::<f64>() / samples as f64);
        if samples > 1 {
            metrics.add(&format!("eval/pass@{samples}"), f64::from(right > 0));
            let own = &answers[question * samples..(question + 1) * samples];
            metrics.add(&format!("eval/majority@{samples}"), f64::from(majority_is_right(own, graded)));
        }
    }
    for a in &answers {
        metrics.add("eval/mean_length", a.tokens as f64);
        metrics.add("eval/clipped_ratio", f64::from(a.truncated));
    }
    let answers = answers.into_iter().zip(graded).map(|(a, g)| (prompts[a.prompt].clone(), a, g)).collect();
    Ok(Evaluation { metrics, answers })
}

/// Whether the most frequent answer is right; the first of equals wins.
fn majority_is_right(answers: &[Answer], graded: &[Graded]) -> bool {
    let winner = estimate::majority(answers.iter().map(|a| estimate::vote(&a.text)));
    winner.is_some_and(|first| graded[first].score >= RIGHT)
}

//! Evaluation by search: the accuracy of what a strategy chooses, and what it costs.

use super::question;
use crate::experience::Metrics;
use crate::ranks::{Teams, gather};
use crate::recipe::Rollout;
use crate::reward::Rewards;
use crate::rollout::{self, Actor};
use crate::search::Searcher;
use crate::source::{Mixture, Prompt};
use ferrl_engine::Result;

/// What a search says of one prompt: whether its result is right, its reward, the tokens sampled, and the fraction of whole
/// completions of its tree that are right.
type SearchOutcome = (Option<bool>, Option<f64>, u64, Option<f64>);

/// Searches for `prompts` held-out prompts: `eval/search`, the accuracy of the results, with the mean of a tree's completions
/// (`eval/search_mean`) and the tokens sampled for a prompt (`eval/search_tokens`). Every rank searches for its share.
pub fn search(
    actor: &mut Actor<'_>,
    source: &mut Mixture,
    searcher: &mut Searcher,
    (rewards, settings): (&Rewards, &Rollout),
    (prompts, seed): (usize, u64),
) -> Result<Metrics> {
    let prompts = prompts.min(source.epoch().unwrap_or(usize::MAX));
    let prompts: Vec<Prompt> = source.next(prompts)?.into_iter().filter_map(question).collect();
    let (ranks, own) = (actor.ranks, Teams::of(actor.ranks, actor.policy).share(prompts.len()));
    let params = rollout::params(settings, actor.stops, seed);
    let asked = &prompts[own.clone()];
    let records = actor.led(|actor| searcher.run(actor, asked, (own.start, params), rewards))?;
    let found = |r: &crate::search::Record| -> SearchOutcome {
        let known: Vec<f64> =
            r.nodes.terminals().filter_map(|n| n.correct).map(|c| f64::from(u8::from(c))).collect();
        let mean = (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64);
        (r.correct, r.reward, r.generated_tokens, mean)
    };
    let own: Vec<SearchOutcome> = records.iter().map(|(record, _)| found(record)).collect();
    let all = if ranks.is_alone() { vec![own] } else { gather(ranks, own)? };
    let mut metrics = Metrics::default();
    for (correct, reward, tokens, mean) in all.into_iter().flatten() {
        metrics.add("eval/search_tokens", tokens as f64);
        correct.into_iter().for_each(|c| metrics.add("eval/search", f64::from(u8::from(c))));
        reward.into_iter().for_each(|r| metrics.add("eval/search_reward", r));
        mean.into_iter().for_each(|m| metrics.add("eval/search_mean", m));
    }
    Ok(metrics)
}

//! Settings of `[search]` that cannot work, or that nothing reads.

use super::super::SearchSettings;
use super::{Problems, Recipe};
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

impl Recipe {
    /// Checks `[search]` for an evaluation alone, in which trees to train on are not sampled.
    pub fn check_search(&self) -> Result<()> {
        if self.search.train && !self.search.eval {
            return Ok(());
        }
        let mut own = self.clone();
        own.search.train = false;
        let mut problems = Problems::default();
        check(&own, true, &mut problems);
        match problems.0.into_iter().next() {
            Some(p) => Err(Error::usage(p.what).at(p.key).fix(p.fix)),
            None => Ok(()),
        }
    }
}

/// A search needs a strategy and a use: rollouts or evaluations.
pub(super) fn check(r: &Recipe, sampled: bool, p: &mut Problems) {
    let s = &r.search;
    strategy(s, p);
    scorer(s, p);
    p.when(
        s.eval && r.eval.temperature == Some(0.0),
        "eval.temperature",
        "a search at temperature 0 samples one completion over and over",
        "eval.temperature = 1.0, or search.eval = false",
    );
    p.when(
        s.train && !sampled,
        "search.train",
        format!("{} samples no completions", r.algorithm_name()),
        "search.train = false",
    );
    p.when(
        s.train && (r.rollout.top_k > 0 || r.rollout.top_p < 1.0),
        "search.train",
        "trees are sampled from the whole distribution of the policy, without top-k and top-p",
        "rollout.top_k = 0 and rollout.top_p = 1",
    );
}

fn strategy(s: &SearchSettings, p: &mut Problems) {
    let names: Vec<&str> = crate::search::STRATEGIES.iter().map(|e| e.name).collect();
    match &s.strategy {
        Some(name) if !names.contains(&name.as_str()) => p.word("search.strategy", name, &names),
        _ => {
            if let Err(e) = crate::search::rollout::check(s) {
                let text = e.to_string();
                let (what, fix) =
                    text.split_once("\n  fix: ").unwrap_or((&text, "see `ferrl search --list`"));
                p.when(true, "search.options", what, fix);
            }
        }
    }
    let (searches, used) = (s.strategy.is_some(), s.train || s.eval);
    p.when(used && !searches, "search.strategy", "a search without a strategy", "search.strategy = \"mcts\"");
    if let Some(key) = changed(s).filter(|_| !searches && !used) {
        let fix = "search.strategy = \"mcts\" with search.train or search.eval";
        p.when(true, format!("search.{key}"), "has no effect without search.strategy", fix);
    }
    p.when(
        searches && !used,
        "search.strategy",
        "the search is used neither in rollouts nor in evaluations",
        "search.train = true, or search.eval = true",
    );
}

fn scorer(s: &SearchSettings, p: &mut Problems) {
    p.when(
        s.strategy.is_some() && s.model().is_none() && !s.scorer_options.is_empty(),
        "search.scorer_options",
        format!("are options of a model, and the scorer is {:?}", s.scorer),
        "search.scorer = the folder of a model, or no search.scorer_options",
    );
}

/// The first key whose value is not the default.
fn changed(s: &SearchSettings) -> Option<String> {
    let (own, default) = (json!(s), json!(SearchSettings::default()));
    let keys = own.as_object()?.iter().find(|(key, value)| default.get(key.as_str()) != Some(value));
    keys.map(|(key, _): (&String, &Value)| key.clone())
}

//! Checks of every example of a stage: rewards need its columns, models need positions for it.

use super::StartingModel;
use crate::algo::Feed;
use crate::data::hub::model_dir;
use crate::data::prompt::PromptSettings;
use crate::data::{Encoder, Example, Row, RowCounts, schema};
use crate::recipe::Recipe;
use crate::reward::{Rewards, prompt_value};
use crate::setup::{self, Draft};
use crate::source::{Item, Prompt, SurveyedExample};
use crate::verify::Hooks;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::ModelConfig;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use std::path::{Path, PathBuf};

/// Checks of the examples of one stage.
pub(super) struct Look {
    /// Rewards of evaluations, if they differ from those of rollouts.
    evaluated: Option<Rewards>,
    limits: Vec<Limit>,
    new_tokens: usize,
}

/// A model other than the policy with a maximum position.
struct Limit {
    key: String,
    who: &'static str,
    most: usize,
    /// Its encoder, if it differs from the policy's.
    own: Option<Box<Encoder>>,
}

impl Look {
    /// The checks of a draft; `named` returns models of earlier stages.
    pub fn new<'b>(
        draft: &Draft,
        recipe: &Recipe,
        named: &dyn Fn(&str) -> Option<&'b StartingModel>,
    ) -> Result<Self> {
        let sampled = draft.feed.sampled() && !draft.source.has_rewards();
        let evaluates = recipe.eval.every > 0 || recipe.eval.at_start;
        let asks = draft.feed.sampled() || setup::rewarded(recipe)?;
        let evaluated = match evaluates && !sampled && asks && !draft.needs.score {
            true => {
                let hooks = Hooks { warnings: draft.warnings.clone(), ..Default::default() };
                Some(setup::plain_rewards(recipe, Feed::Rollouts, &hooks)?)
            }
            false => None,
        };
        let limits = limits(draft, recipe, named)?;
        Ok(Look { evaluated, limits, new_tokens: recipe.rollout.max_new_tokens })
    }

    /// Refuses an example whose completions cannot be rewarded, or that exceeds the positions of a model.
    pub fn at(&self, rewards: &Rewards, seen: SurveyedExample<'_>) -> Result<()> {
        let asked = match seen.item {
            Item::Prompt(prompt) => Some(prompt),
            // Its completions have rewards; evaluations sample others.
            Item::Group(group) if seen.held_out => Some(&group.prompt),
            _ => None,
        };
        if let Some(prompt) = asked {
            let rewards = self.evaluated.as_ref().filter(|_| seen.held_out).unwrap_or(rewards);
            rewards.check(prompt, seen.place)?;
        }
        self.limits.iter().try_for_each(|limit| limit.takes(seen, asked, self.new_tokens))
    }
}

impl Limit {
    fn takes(&self, seen: SurveyedExample<'_>, asked: Option<&Prompt>, new: usize) -> Result<()> {
        let (length, new) = match (asked, &self.own) {
            (Some(prompt), Some(encoder)) => (length(encoder, prompt, seen.place)?, new),
            (None, Some(_)) => return Ok(()),
            // An evaluation samples from the policy alone.
            (Some(_), None) if seen.held_out => return Ok(()),
            (Some(prompt), None) => (prompt.ids.len(), new),
            (None, None) => {
                let sequences = match seen.item {
                    Item::Sequences(sequences) => sequences,
                    Item::Group(group) => &group.completions,
                    Item::Prompt(_) => return Ok(()),
                };
                (sequences.iter().map(|s| s.ids.len()).max().unwrap_or(0), 0)
            }
        };
        if length + new <= self.most {
            return Ok(());
        }
        let what = match new {
            0 => format!("{length} tokens"),
            _ => format!("a prompt of {length} tokens and rollout.max_new_tokens = {new}"),
        };
        let shorter = if new == 0 { "a smaller data.max_length" } else { "a smaller rollout.max_new_tokens" };
        let what = format!("{what}, but the {} has learned positions for {}", self.who, self.most);
        Err(Error::data(what)
            .at(&self.key)
            .at(seen.place)
            .fix(format!("a {} with more positions, shorter rows, or {shorter}", self.who)))
    }
}

/// Number of tokens of a prompt for another model.
fn length(encoder: &Encoder, prompt: &Prompt, place: &str) -> Result<usize> {
    let row = Row::from_iter([("prompt".to_string(), prompt_value(&prompt.text, &prompt.messages))]);
    let sample = encoder.encode(&row, schema::RowKind::Prompt, place, &mut RowCounts::default())?;
    Ok(sample.map_or(0, |s| if let Example::Prompt { ids } = s.example { ids.len() } else { 0 }))
}

/// All models of the stage with a maximum position, without the policy.
fn limits<'b>(
    draft: &Draft,
    recipe: &Recipe,
    named: &dyn Fn(&str) -> Option<&'b StartingModel>,
) -> Result<Vec<Limit>> {
    let mut limits = Vec::new();
    let open = |path: &str| -> Result<(PathBuf, ModelConfig)> {
        if let Some(start) = named(path) {
            return Ok((start.dir.clone(), start.config.clone()));
        }
        let dir = model_dir(Path::new(path))?;
        let config = ModelDir::open(&dir)?.config;
        Ok((dir, config))
    };
    let mut add = |key: String, who, path: &str, reads: bool| -> Result<()> {
        let (dir, config) = open(path)?;
        let Some(most) = config.max_positions_hard() else { return Ok(()) };
        let own = match reads {
            true => {
                let encoder =
                    Encoder::for_model(Tokenizer::from_dir(&dir)?, &dir, PromptSettings::default())?;
                Some(Box::new(encoder))
            }
            false => None,
        };
        limits.push(Limit { key, who, most, own });
        Ok(())
    };
    if let Some(path) = recipe.teacher.path.as_deref().filter(|_| draft.needs.teacher) {
        add("teacher.path".into(), "teacher", path, false)?;
    }
    if let Some(path) = recipe.critic.path.as_deref().filter(|_| draft.needs.critic && !recipe.critic.shared)
    {
        let (tokens, vocab) = (draft.tokenizer.vocab_size(), open(path)?.1.vocab);
        if vocab < tokens {
            return Err(Error::model(format!(
                "the policy's tokenizer has {tokens} tokens, the critic's model {vocab}"
            ))
            .at("critic.path")
            .fix("a critic with the policy's tokenizer"));
        }
        add("critic.path".into(), "critic", path, false)?;
    }
    for (i, path) in recipe.reward.iter().enumerate().filter_map(|(i, r)| Some((i, r.model.as_deref()?))) {
        add(format!("reward.{i}.model"), "reward model", path, true)?;
    }
    Ok(limits)
}

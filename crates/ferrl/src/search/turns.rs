//! Nodes of episodes: the step that a branch added to its parent's prefix.

use super::grow::{Sampling, text};
use super::tree::Reached;
use super::{DrawnTokens, Node, NodeTurn, Tree};
use crate::episode::{Episode, TurnRecord};
use ferrl_engine::Result;
use std::sync::Arc;

/// The node of a branch.
pub(super) fn node(tree: &Tree, parent: usize, mut episode: Episode, sampling: Sampling<'_>) -> Result<Node> {
    let (new, prefix) = (episode.new_tokens(), episode.prefix());
    let tokens: Vec<u32> = new.iter().map(|t| t.id).collect();
    let mut played = episode.played.take().unwrap_or_default();
    let known = tree.path(parent).iter().map(|&id| tree.node(id).turns.len()).sum();
    let turn = |t: &TurnRecord| NodeTurn {
        action: t.action.clone(),
        observation: t.observation.clone(),
        reward: t.reward,
    };
    let turns = played.turns.iter().skip(known).map(turn).collect();
    let lost = played.lost.as_ref().map(|l| l.message.clone());
    let (terminal, truncated) = (episode.over, played.truncated);
    if let Some(acting) = &prefix.acting {
        let action = sampling.tokenizer.decode(&acting.ids, true)?;
        played.turns.push(TurnRecord { action, tokens: acting.ids.len(), ..Default::default() });
    }
    let sequences = if terminal { episode.sequences } else { Vec::new() };
    Ok(Node {
        text: text(tree, parent, (&tokens, terminal), sampling)?,
        logprob: new.iter().filter_map(|t| t.logp).map(f64::from).sum(),
        observed: new.iter().filter(|t| t.logp.is_none()).count(),
        tokens,
        turns,
        lost,
        terminal,
        truncated,
        samples: 1,
        drawn: DrawnTokens {
            logp: new.iter().map(|t| t.logp.unwrap_or(0.0)).collect(),
            version: new.iter().find(|t| t.logp.is_some()).map_or(0, |t| t.version),
            tempered: false,
            reached: Some(Arc::new(Reached { prefix, played, sequences })),
        },
        ..Default::default()
    })
}

//! Process rewards: where the steps of a completion end, and which token gets the reward of each.
//!
//! A step's reward is placed on the step's last token, the rest of the completion's reward on its last token. The sum is the
//! completion's reward, so that methods on whole returns are not affected.

use crate::credit::{StepSplit, split};
use crate::experience::Sequence;
use crate::rollout::RolloutCompletion;
use ferrl_engine::Result;
use ferrl_engine::tokenizer::Tokenizer;

/// How a source's completions are split into steps: the rule, and the tokens per step of the rule `tokens`.
pub(super) type StepRule = (StepSplit, usize);

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CompletionSteps {
    /// Where each ends, in bytes of the text.
    pub ends: Vec<usize>,
    /// Where each ends, in tokens of the completion; empty if the tokens are unknown.
    pub tokens: Vec<usize>,
}

impl CompletionSteps {
    /// Of a completion of these tokens. One that cannot be split is one step.
    pub fn of(
        rule: StepRule,
        completion: &RolloutCompletion,
        ids: &[u32],
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self> {
        let text = completion.scored_text();
        let one = CompletionSteps { ends: vec![text.len()], tokens: Vec::new() };
        let Some(tokenizer) = tokenizer.filter(|_| completion.played.is_none() && !ids.is_empty()) else {
            let found = split::texts(rule.0, &text).filter(|parts| !parts.is_empty());
            return Ok(found.map_or(one, |parts| CompletionSteps { ends: ends(parts), tokens: Vec::new() }));
        };
        let Some(found) = split::steps(rule, ids, &text, tokenizer)? else {
            return Ok(CompletionSteps { tokens: vec![ids.len()], ..one });
        };
        let mut all = ends(found.iter().map(|s| s.text.as_str()));
        // The text of special tokens belongs to no step.
        if let Some(last) = all.last_mut() {
            *last = text.len();
        }
        all.iter_mut().for_each(|end| *end = (*end).min(text.len()));
        Ok(CompletionSteps { ends: all, tokens: found.iter().map(|s| s.end).collect() })
    }
}

fn ends<'a>(parts: impl IntoIterator<Item = &'a str>) -> Vec<usize> {
    let add = |from: &mut usize, part: &str| {
        *from += part.len();
        Some(*from)
    };
    parts.into_iter().scan(0, add).collect()
}

/// Adds rewards to the last tokens of steps and marks these tokens; `placed` are pairs of a number of tokens and a reward.
/// Returns the sum of the rewards.
pub(super) fn place(s: &mut Sequence, placed: &[(usize, f64)]) -> f64 {
    let at: Vec<usize> = s.actions().collect();
    let mut sum = 0.0;
    for &(end, reward) in placed {
        if let Some(&i) = end.checked_sub(1).and_then(|last| at.get(last)) {
            s.reward[i] += reward as f32;
            s.steps.push(i);
            sum += reward;
        }
    }
    s.steps.sort_unstable();
    s.steps.dedup();
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::tokenizer::train_chars;

    fn tokenizer() -> Tokenizer {
        let text: String = (' '..='~').chain(['\n']).collect();
        train_chars([text].into_iter(), &["<pad>", "<eos>"].map(String::from)).unwrap()
    }

    #[test]
    fn a_steps_reward_stands_on_its_last_token() {
        let tokenizer = tokenizer();
        let said = "1+2=3\n3-1=2\n";
        let mut ids = tokenizer.encode_text(said).unwrap();
        ids.push(tokenizer.eos()[0]);
        let completion = RolloutCompletion { text: said.into(), tokens: ids.len(), ..Default::default() };
        let steps = CompletionSteps::of((StepSplit::Lines, 1), &completion, &ids, Some(&tokenizer)).unwrap();
        assert_eq!(steps, CompletionSteps { ends: vec![6, 12], tokens: vec![6, 13] });
        let unread = CompletionSteps::of((StepSplit::Lines, 1), &completion, &[], None).unwrap();
        assert_eq!(unread, CompletionSteps { ends: vec![6, 12], tokens: vec![] }, "by the text alone");
        // Behind a prompt of two tokens: position i predicts token i + 1.
        let all = [vec![0, 0], ids].concat();
        let trained = (0..all.len()).map(|i| i >= 2).collect();
        let reward = vec![0.0; all.len()];
        let mut s = Sequence { ids: all, trained, reward, ..Default::default() };
        assert_eq!(place(&mut s, &[(6, 0.25), (13, -1.0), (6, 0.5)]), -0.25);
        assert_eq!((s.reward[6], s.reward[13]), (0.75, -1.0), "the newline, and the end token");
        assert_eq!((s.total_reward(), s.steps), (-0.25, vec![6, 13]));
    }
}

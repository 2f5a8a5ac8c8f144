//! Which completions of a run a report shows, identical ones folded into one row.

use crate::run::Rollouts;
use crate::run::rollouts::steps;
use ferrl_engine::Result;
use serde_json::{Value, json};
use std::path::Path;

/// Maximum number of steps whose rewards are counted.
const REWARD_STEPS: usize = 200;
/// Maximum number of steps whose completions are shown, and of different completions of each.
const SHOWN_STEPS: usize = 60;
const SHOWN_OF_STEP: usize = 24;
/// Maximum number of characters of a text.
const TEXT: usize = 6000;

/// Adds rewards by step and the rows of the table to a page's data.
pub(super) fn add(data: &mut Value, dir: &Path) -> Result<()> {
    let all = steps(dir)?;
    let counted = spread(&all, REWARD_STEPS);
    let shown = spread(&counted, SHOWN_STEPS);
    let (mut rewards, mut rows) = (Vec::new(), Vec::new());
    for &step in &counted {
        let list = Rollouts::read(dir, step)?;
        let values: Vec<&Value> = list.iter().map(|r| &r["reward"]).filter(|v| v.is_number()).collect();
        rewards.push(json!([step, values]));
        if shown.contains(&step) {
            rows.extend(fold(&list).into_iter().take(SHOWN_OF_STEP).map(|(r, count)| row(step, r, count)));
        }
    }
    data["rewards"] = json!(rewards);
    data["rollouts"] = json!(rows);
    data["rollout_steps"] = json!(all.len());
    data["shown_steps"] = json!(shown.len());
    Ok(())
}

/// Completions with their counts, in the order of their first occurrence. Identical are those of the same prompt with the
/// same text and reward.
fn fold(list: &[Value]) -> Vec<(&Value, usize)> {
    let mut out: Vec<(&Value, usize)> = Vec::new();
    let same = |a: &Value, b: &Value| ["prompt", "completion", "reward"].iter().all(|key| a[*key] == b[*key]);
    for rollout in list {
        match out.iter_mut().find(|(first, _)| same(first, rollout)) {
            Some((_, count)) => *count += 1,
            None => out.push((rollout, 1)),
        }
    }
    out
}

fn row(step: u64, rollout: &Value, count: usize) -> Value {
    let prompt = rollout["prompt"].as_str().unwrap_or("");
    json!({
        "step": step,
        "count": count,
        "prompt": cut(prompt),
        "turns": turns(prompt),
        "completion": cut(rollout["completion"].as_str().unwrap_or("")),
        "reward": rollout["reward"],
        "episode": episode(&rollout["turns"]),
        "lost": rollout["lost"]["message"],
        "failed": rollout["lost"] == true || rollout["lost"].is_object(),
        "components": rollout["components"],
        "advantage": rollout["advantage"],
        "tokens": rollout["tokens"],
        "truncated": rollout["truncated"],
    })
}

/// Role and text of each message, where a prompt is a conversation: such a prompt is stored as a JSON list of messages.
fn turns(prompt: &str) -> Option<Vec<[String; 2]>> {
    let messages: Vec<Value> = serde_json::from_str(prompt).ok()?;
    let turn = |m: &Value| {
        let content = match &m["content"] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            parts => ferrl_engine::chat::text_of(parts).unwrap_or_else(|_| parts.to_string()),
        };
        let calls = m.get("tool_calls").map(|calls| format!("{content}\n{calls}"));
        Some([m["role"].as_str()?.to_string(), cut(calls.as_deref().unwrap_or(&content).trim())])
    };
    messages.iter().map(turn).collect::<Option<Vec<_>>>().filter(|t| !t.is_empty())
}

/// Each turn of an episode: action, observation, reward and advantage.
fn episode(turns: &Value) -> Option<Vec<Value>> {
    let text = |turn: &Value, key: &str| cut(turn[key].as_str().unwrap_or("").trim());
    let turn = |t: &Value| json!([text(t, "action"), text(t, "observation"), t["reward"], t["advantage"]]);
    turns.as_array().map(|turns| turns.iter().map(turn).collect())
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(TEXT) {
        None => text.to_string(),
        Some((at, _)) => format!("{}… ({} more bytes)", &text[..at], text.len() - at),
    }
}

/// At most `n` of a list, evenly chosen, with the first and the last.
fn spread(list: &[u64], n: usize) -> Vec<u64> {
    if list.len() <= n {
        return list.to_vec();
    }
    (0..n).map(|i| list[i * (list.len() - 1) / (n - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_selection_includes_first_and_last() {
        let list: Vec<u64> = (0..1000).collect();
        let some = spread(&list, 60);
        assert_eq!((some.len(), some[0], some[59]), (60, 0, 999));
        assert_eq!(spread(&list[..7], 60).len(), 7);
    }

    #[test]
    fn only_the_same_text_with_the_same_reward_is_folded() {
        let of = |prompt: &str, text: &str, reward: f64| json!({ "prompt": prompt, "completion": text, "reward": reward });
        let list =
            [of("p", "a", 1.0), of("p", "b", 0.0), of("p", "a", 1.0), of("q", "a", 1.0), of("p", "a", 0.0)];
        let counts: Vec<usize> = fold(&list).iter().map(|f| f.1).collect();
        assert_eq!(counts, [2, 1, 1, 1]);
    }

    #[test]
    fn a_conversation_is_shown_as_turns_and_text_is_not() {
        let chat = r#"[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"2+2?"}]}]"#;
        let own = |a: &str, b: &str| [a.to_string(), b.to_string()];
        assert_eq!(turns(chat), Some(vec![own("system", "Be brief."), own("user", "2+2?")]));
        assert_eq!(turns("[1, 2, 3]"), None);
        assert_eq!(turns("Use 3, 4 to make 7."), None);
    }
}

//! Differences between two recipes, as text.

use super::Recipe;
use serde_json::Value;

/// A setting that differs: its key and both values.
pub type Difference = (String, String, String);

/// Settings of parallelism and memory, which change no bit of the trained weights. (`adapter.base` is one unless it is `nf4`.)
pub const SAME_BITS: [&str; 9] = [
    "parallel", "device_memory", "model.recompute", "optim.offload", "reference.offload",
    "rollout.cache_mib", "rollout.release_cache", "rollout.tp_size", "teacher.offload",
];

/// Whether a change of a setting leaves every bit of the trained weights the same.
pub fn changes_no_bit((key, was, is): (&str, &str, &str)) -> bool {
    let within =
        |free: &&str| key.strip_prefix(*free).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let base = key == "adapter.base" && ![was, is].iter().any(|home| home.contains("nf4"));
    base || SAME_BITS.iter().any(within)
}

pub fn differences(before: &Recipe, now: &Recipe) -> Vec<Difference> {
    let value = |r: &Recipe| serde_json::to_value(r).unwrap_or(Value::Null);
    let mut out = Vec::new();
    walk(&value(before), &value(now), "", &mut out);
    out
}

fn walk(before: &Value, now: &Value, path: &str, out: &mut Vec<Difference>) {
    if before == now {
        return;
    }
    let (Some(a), Some(b)) = (before.as_object(), now.as_object()) else {
        return out.push((path.to_string(), shown(before), shown(now)));
    };
    for key in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
        let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        walk(a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), &inner, out);
    }
}

fn shown(value: &Value) -> String {
    if value.is_null() { "nothing".into() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_and_both_values_are_named() {
        let mut before = Recipe::default();
        before.optim.lr = 0.25;
        assert_eq!(differences(&before, &before.clone()), []);
        let mut now = before.clone();
        now.optim.lr = 0.5;
        assert_eq!(differences(&before, &now), [("optim.lr".into(), "0.25".into(), "0.5".into())]);
        now.seed = 3;
        let all: Vec<String> = differences(&before, &now).into_iter().map(|d| d.0).collect();
        assert_eq!(all, ["seed", "optim.lr"]);
        let mut now = before.clone();
        now.algo.insert("clip_low".into(), 0.1.into());
        assert_eq!(differences(&before, &now), [("algo.clip_low".into(), "nothing".into(), "0.1".into())]);
    }
}

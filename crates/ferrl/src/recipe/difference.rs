//! Where two recipes differ, in words.

use super::Recipe;
use serde_json::Value;

/// The first setting in which they differ: its key and both values; `None` where they say the same.
pub fn difference(before: &Recipe, now: &Recipe) -> Option<(String, String, String)> {
    let value = |r: &Recipe| serde_json::to_value(r).unwrap_or(Value::Null);
    walk(&value(before), &value(now), "")
}

fn walk(before: &Value, now: &Value, path: &str) -> Option<(String, String, String)> {
    if before == now {
        return None;
    }
    let (Some(a), Some(b)) = (before.as_object(), now.as_object()) else {
        return Some((path.to_string(), shown(before), shown(now)));
    };
    a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))).find_map(|key| {
        let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        walk(a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), &inner)
    })
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
        assert_eq!(difference(&before, &before.clone()), None);
        let mut now = before.clone();
        now.optim.lr = 0.5;
        let found = difference(&before, &now).unwrap();
        assert_eq!(found, ("optim.lr".into(), "0.25".into(), "0.5".into()));
        let mut now = before.clone();
        now.algo.insert("clip_low".into(), 0.1.into());
        assert_eq!(
            difference(&before, &now).unwrap(),
            ("algo.clip_low".into(), "nothing".into(), "0.1".into())
        );
    }
}

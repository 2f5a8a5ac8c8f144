//! Pairs as labelled completions: what classifiers, `kto` and `implicit_prm` learn from, and what verdicts are made of.

use super::Row;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

/// The chosen and the rejected completion of a pair, each as a row with `label`, `target` and `reward`; other columns stay.
pub fn unpair(row: &Row) -> Result<[Row; 2]> {
    let begins = ["prompt", "messages"].iter().find_map(|name| row.get(*name).map(|value| (*name, value)));
    let side = |name: &str, good: bool| {
        let has: Vec<&str> = row.keys().map(String::as_str).collect();
        let value = row.get(name).ok_or_else(|| {
            Error::data(format!("a pair needs column {name:?}; the row has {}", has.join(", ")))
                .fix("rows with prompt, chosen and rejected")
        })?;
        let mut out = row.clone();
        ["chosen", "rejected"].iter().for_each(|pair| drop(out.shift_remove(*pair)));
        match (begins, value) {
            (Some((column, begins)), _) => {
                if column != "prompt" {
                    out.shift_remove(column);
                }
                out.insert("prompt".into(), begins.clone());
                out.insert("completion".into(), behind(begins, value));
            }
            (None, Value::Array(_)) => drop(out.insert("messages".into(), value.clone())),
            (None, _) => {
                return Err(Error::data(format!(
                    "a pair of texts needs column \"prompt\"; the row has {}",
                    has.join(", ")
                ))
                .fix("rows with prompt, chosen and rejected"));
            }
        }
        let number = f64::from(u8::from(good));
        out.extend(
            [("label", json!(good)), ("target", json!(number)), ("reward", json!(number))]
                .map(|(k, v)| (k.to_string(), v)),
        );
        Ok(out)
    };
    Ok([side("chosen", true)?, side("rejected", false)?])
}

/// A completion without the messages of its prompt, which some data sets repeat.
fn behind(prompt: &Value, completion: &Value) -> Value {
    match (prompt, completion) {
        (Value::Array(before), Value::Array(all)) if all.len() > before.len() && all.starts_with(before) => {
            all[before.len()..].into()
        }
        _ => completion.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(pair: Value) -> Result<[Value; 2]> {
        unpair(pair.as_object().unwrap()).map(|rows| rows.map(Value::Object))
    }

    #[test]
    fn a_pair_becomes_a_good_and_a_bad_completion() {
        let [good, bad] =
            rows(json!({"prompt": "1+1=", "chosen": "2", "rejected": "3", "subset": "sums"})).unwrap();
        let want = |completion: &str, label: bool, number: f64| json!({"prompt": "1+1=", "subset": "sums", "completion": completion, "label": label, "target": number, "reward": number});
        assert_eq!((good, bad), (want("2", true, 1.0), want("3", false, 0.0)));
    }

    #[test]
    fn messages_of_the_prompt_are_not_repeated() {
        let says = |role: &str, text: &str| json!({"role": role, "content": text});
        let (ask, right, wrong) = (says("user", "1+1?"), says("assistant", "2"), says("assistant", "3"));
        let pair = json!({"prompt": [ask], "chosen": [ask, right], "rejected": [wrong]});
        let [good, bad] = rows(pair).unwrap();
        assert_eq!((&good["completion"], &bad["completion"]), (&json!([right]), &json!([wrong])));
        let [good, _] = rows(json!({"chosen": [ask, right], "rejected": [ask, wrong]})).unwrap();
        assert_eq!((&good["messages"], good.get("prompt")), (&json!([ask, right]), None));
    }

    #[test]
    fn rows_that_are_no_pairs_are_refused() {
        let said = |row: Value| rows(row).unwrap_err().to_string();
        assert!(
            said(json!({"prompt": "a", "chosen": "b"}))
                .contains("needs column \"rejected\"; the row has prompt, chosen")
        );
        assert!(said(json!({"chosen": "a", "rejected": "b"})).contains("needs column \"prompt\""));
    }
}

//! Pairs as labelled completions: what classifiers, `kto` and `implicit_prm` learn from, and what verdicts are made of.
//!
//! A pair is read as `dpo` and `rm` read it, whatever columns say what comes before the answers.

use super::Row;
use super::schema::{Content, RowFields, RowKind, parse};
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};

/// The chosen and the rejected completion of a pair, each as a row with `label`, `target` and `reward`; other columns stay.
pub fn unpair(row: &Row) -> Result<[Row; 2]> {
    let has = |name: &str| row.get(name).is_some_and(|value| !value.is_null());
    let needs = |what: &str, name: &str| {
        let there: Vec<&str> = row.keys().map(String::as_str).filter(|name| has(name)).collect();
        Error::data(format!("{what} needs column {name:?}; the row has {}", there.join(", ")))
            .fix("rows with prompt, chosen and rejected")
    };
    if let Some(missing) = ["chosen", "rejected"].into_iter().find(|name| !has(name)) {
        return Err(needs("a pair", missing));
    }
    let (fields, others) = parse(&unrepeated(row), RowKind::Preference, None)?;
    let RowFields::Pair { prompt, chosen, rejected } = fields else { return Err(needs("a pair", "prompt")) };
    if prompt == Content::Text(String::new()) && !has("prompt") {
        return Err(needs("a pair of texts", "prompt"));
    }
    let side = |completion: &Content, good: bool| {
        let number = f64::from(u8::from(good));
        let own = [("label", json!(good)), ("target", json!(number)), ("reward", json!(number))];
        let mut out = Row::new();
        out.insert("prompt".into(), prompt.value());
        let column = |name: &String| name != "prompt" && !own.iter().any(|(own, _)| name == own);
        out.extend(others.clone().into_iter().filter(|(name, _)| column(name)));
        out.insert("completion".into(), completion.value());
        out.extend(own.map(|(name, value)| (name.to_string(), value)));
        out
    };
    Ok([side(&chosen, true), side(&rejected, false)])
}

/// Where one answer repeats the messages of the prompt and the other does not: without them.
fn unrepeated(row: &Row) -> Row {
    let mut out = row.clone();
    let Some(Value::Array(prompt)) = row.get("prompt") else { return out };
    let repeats = |name: &str| match row.get(name) {
        Some(Value::Array(all)) => all.len() > prompt.len() && all.starts_with(prompt),
        _ => false,
    };
    let (chosen, rejected) = (repeats("chosen"), repeats("rejected"));
    if chosen != rejected {
        let name = if chosen { "chosen" } else { "rejected" };
        if let Some(Value::Array(all)) = out.get_mut(name) {
            all.drain(..prompt.len());
        }
    }
    out
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
        let [good, bad] = rows(json!({"chosen": [ask, right], "rejected": [ask, wrong]})).unwrap();
        assert_eq!((&good["prompt"], &good["completion"]), (&json!([ask]), &json!([right])));
        assert_eq!((&bad["prompt"], &bad["completion"]), (&json!([ask]), &json!([wrong])));
    }

    /// Was: a text prompt beside conversations (UltraFeedback's columns) gave answers that begin with the question; of conversations
    /// that differ in several turns only the last one was the answer; texts without a prompt of their own were refused.
    #[test]
    fn pairs_are_read_as_dpo_reads_them() {
        let says = |role: &str, text: &str| json!({"role": role, "content": text});
        let talk = |first: &str, last: &str| {
            json!([
                says("user", "1+1?"),
                says("assistant", first),
                says("user", "so?"),
                says("assistant", last)
            ])
        };
        let ultra = json!({"prompt": "1+1?", "chosen": [says("user", "1+1?"), says("assistant", "2")],
            "rejected": [says("user", "1+1?"), says("assistant", "3")], "score": 8.0});
        let [good, bad] = rows(ultra).unwrap();
        let want = |answer: &str, label: bool| {
            let number = f64::from(u8::from(label));
            json!({"prompt": [says("user", "1+1?")], "score": 8.0, "completion": [says("assistant", answer)],
                "label": label, "target": number, "reward": number})
        };
        assert_eq!((good, bad), (want("2", true), want("3", false)));
        let [good, _] = rows(json!({"chosen": talk("1", "2"), "rejected": talk("no", "3")})).unwrap();
        assert_eq!(good["completion"].as_array().unwrap().len(), 3, "{good}");
        let [good, bad] =
            rows(json!({"chosen": "H: a A: b", "rejected": "H: a A: c", "prompt": null})).unwrap();
        assert_eq!(
            (&good["prompt"], &good["completion"], &bad["completion"]),
            (&json!("H: a A:"), &json!(" b"), &json!(" c"))
        );
    }

    #[test]
    fn rows_that_are_no_pairs_are_refused() {
        let said = |row: Value| rows(row).unwrap_err().to_string();
        assert!(
            said(json!({"prompt": "a", "chosen": "b"}))
                .contains("needs column \"rejected\"; the row has prompt, chosen")
        );
        assert!(said(json!({"chosen": "a", "rejected": "b"})).contains("needs column \"prompt\""));
        // Was: a row with a null, of which nothing can be learned.
        assert!(
            said(json!({"prompt": "a", "chosen": "b", "rejected": null}))
                .contains("needs column \"rejected\"")
        );
        assert!(
            said(json!({"prompt": null, "chosen": "b", "rejected": "c"})).contains("needs column \"prompt\"")
        );
        let mixed =
            json!({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]});
        assert!(said(mixed).contains("column rejected"));
    }
}

//! Accuracy of a reward model on pairs, by subset, as RewardBench measures it: how often the chosen completion scores higher
//! than the rejected one. Equal scores count as half.

use super::estimate::interval;
use crate::data::{Dataset, Row};
use crate::experience::{Experience, Metrics};
use crate::reward::{CompletionBatch, Rewards};
use crate::rollout::RolloutCompletion;
use crate::source::Prompt;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Pairs that are scored together.
const AT_ONCE: usize = 64;

/// RewardBench's sections and their subsets.
const SECTIONS: &[(&str, &[&str])] = &[
    ("Chat", &["alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy", "mt-bench-med"]),
    (
        "Chat Hard",
        &[
            "mt-bench-hard", "llmbar-natural", "llmbar-adver-neighbor", "llmbar-adver-GPTInst",
            "llmbar-adver-GPTOut", "llmbar-adver-manual",
        ],
    ),
    (
        "Safety",
        &[
            "refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond",
            "donotanswer",
        ],
    ),
    ("Reasoning", &["math-prm", "hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"]),
];
/// The subset that counts as much as all the others of its section together.
const MATH: &str = "math-prm";

/// Two completions to a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalPair {
    /// The prompt, with its messages where it is a conversation.
    pub prompt: Prompt,
    pub chosen: String,
    pub rejected: String,
    /// Where it counts in tables.
    pub subset: String,
}

/// The pairs of a data set with `prompt`, `chosen`, `rejected` and, where there are several, `subset`.
pub fn read(data: &Dataset) -> Result<Vec<EvalPair>> {
    (0..data.len()).map(|i| one(&data.row(i)?, i as u64).map_err(|e| e.at(data.place(i)))).collect()
}

fn one(row: &Row, index: u64) -> Result<EvalPair> {
    let missing = |name: &str| {
        let there = row.keys().cloned().collect::<Vec<_>>().join(", ");
        Error::data(format!("a pair needs column {name:?}; the row has {there}"))
            .fix("rows with prompt, chosen and rejected")
    };
    let side = |name: &str| match row.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        // A conversation whose last message is the completion.
        Some(Value::Array(messages)) => {
            let last = messages.last().and_then(|m| m.get("content")).and_then(Value::as_str);
            last.map(String::from).ok_or_else(|| missing(name))
        }
        _ => Err(missing(name)),
    };
    let mut prompt = Prompt { index, columns: row.clone(), ..Default::default() };
    match row.get("prompt") {
        Some(Value::String(text)) => prompt.text = text.clone(),
        Some(Value::Array(messages)) => prompt.messages = messages.clone(),
        _ => return Err(missing("prompt")),
    }
    let subset = row.get("subset").and_then(Value::as_str).unwrap_or_default().to_string();
    Ok(EvalPair { prompt, chosen: side("chosen")?, rejected: side("rejected")?, subset })
}

/// 1 where the chosen completion of a pair scores higher, 0 where the rejected one does, a half where they are equal.
pub fn compare(rewards: &Rewards, pairs: &[EvalPair], seen: &mut dyn FnMut(usize)) -> Result<Vec<f64>> {
    let mut out = Vec::with_capacity(pairs.len());
    for part in pairs.chunks(AT_ONCE) {
        let prompts: Vec<Prompt> = part.iter().map(|p| p.prompt.clone()).collect();
        let completion =
            |prompt: usize, text: &str| RolloutCompletion { prompt, text: text.into(), ..Default::default() };
        let both = |(i, p): (usize, &EvalPair)| [completion(i, &p.chosen), completion(i, &p.rejected)];
        let completions: Vec<RolloutCompletion> = part.iter().enumerate().flat_map(both).collect();
        let batch = CompletionBatch { prompts: &prompts, completions: &completions, at: Default::default() };
        let scores = rewards.score(batch, &mut Experience::default(), &mut Metrics::default())?;
        for pair in scores.chunks(2) {
            let scores: Vec<f64> = pair.iter().filter_map(|g| g.reward).collect();
            let [chosen, rejected] = scores[..] else {
                return Err(Error::data("a pair could not be scored").at("--pairs"));
            };
            out.push(if chosen == rejected { 0.5 } else { f64::from(u8::from(chosen > rejected)) });
        }
        seen(part.len());
    }
    Ok(out)
}

#[derive(Clone, Debug, PartialEq)]
pub struct Accuracy {
    pub name: String,
    pub pairs: usize,
    /// Fraction that is ordered right.
    pub accuracy: f64,
}

/// Accuracy of a reward model on a set of pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairTable {
    pub subsets: Vec<Accuracy>,
    /// RewardBench's sections, where the subsets are its own.
    pub sections: Vec<Accuracy>,
    /// Of all pairs, with its 95 % interval.
    pub all: f64,
    /// 95 % confidence interval of it.
    pub interval: Option<(f64, f64)>,
}

impl PairTable {
    /// From the comparison of each pair.
    pub fn new(pairs: &[EvalPair], right: &[f64]) -> Self {
        let mut by: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (pair, right) in pairs.iter().zip(right) {
            by.entry(&pair.subset).or_default().push(*right);
        }
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len().max(1) as f64;
        let subset = |(name, v): (&&str, &Vec<f64>)| Accuracy {
            name: name.to_string(),
            pairs: v.len(),
            accuracy: mean(v),
        };
        let named = by.keys().any(|name| !name.is_empty());
        PairTable {
            subsets: by.iter().filter(|_| named).map(subset).collect(),
            sections: SECTIONS.iter().filter_map(|(name, own)| section(name, own, &by)).collect(),
            all: mean(right),
            interval: interval(right),
        }
    }

    /// RewardBench's score: the mean over sections; none where no subset is one of its own.
    pub fn score(&self) -> Option<f64> {
        let n = self.sections.len();
        (n > 0).then(|| self.sections.iter().map(|s| s.accuracy).sum::<f64>() / n as f64)
    }

    pub fn json(&self) -> Map<String, Value> {
        let list = |all: &[Accuracy]| -> Map<String, Value> {
            all.iter()
                .map(|a| (a.name.clone(), json!({ "pairs": a.pairs, "accuracy": a.accuracy })))
                .collect()
        };
        let all = json!({
            "accuracy": self.all,
            "accuracy_ci95": self.interval.map(|(low, high)| [low, high]),
            "subsets": list(&self.subsets),
            "sections": list(&self.sections),
            "rewardbench": self.score(),
        });
        all.as_object().cloned().unwrap_or_default()
    }
}

/// Over all pairs of a section; in Reasoning mathematics counts as much as all programs together.
fn section(name: &str, own: &[&str], by: &BTreeMap<&str, Vec<f64>>) -> Option<Accuracy> {
    let mean = |v: &[f64]| (!v.is_empty()).then(|| v.iter().sum::<f64>() / v.len() as f64);
    let of = |pick: &dyn Fn(&str) -> bool| -> Vec<f64> {
        own.iter().filter(|s| pick(s)).filter_map(|s| by.get(*s)).flatten().copied().collect()
    };
    let (math, rest) = (of(&|s| s == MATH), of(&|s| s != MATH));
    let accuracy = match (mean(&math), mean(&rest)) {
        (Some(math), Some(rest)) => (math + rest) / 2.0,
        (math, rest) => math.or(rest)?,
    };
    Some(Accuracy { name: name.into(), pairs: math.len() + rest.len(), accuracy })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::Sample;

    fn pair(subset: &str, chosen: &str, rejected: &str) -> EvalPair {
        EvalPair {
            subset: subset.into(),
            chosen: chosen.into(),
            rejected: rejected.into(),
            ..Default::default()
        }
    }

    #[test]
    fn accuracy_by_subset_and_section_by_hand() {
        let pairs = [
            pair("math-prm", "aaa", "a"),
            pair("hep-go", "a", "aa"),
            pair("hep-go", "aa", "a"),
            pair("hep-js", "aa", "bb"),
            pair("donotanswer", "a", "aaaa"),
            pair("mine", "aa", "a"),
        ];
        // The longer one is the better one; equal lengths are half right.
        let rewards = Rewards::of(|s: &Sample<'_>| s.completion.len() as f64);
        let right = compare(&rewards, &pairs, &mut |_| ()).unwrap();
        assert_eq!(right, [1.0, 0.0, 1.0, 0.5, 0.0, 1.0]);
        let table = PairTable::new(&pairs, &right);
        let get = |list: &[Accuracy], name: &str| list.iter().find(|a| a.name == name).map(|a| a.accuracy);
        assert_eq!(get(&table.subsets, "hep-go"), Some(0.5));
        assert_eq!(get(&table.subsets, "mine"), Some(1.0));
        assert_eq!(get(&table.sections, "Reasoning"), Some((1.0 + 0.5) / 2.0), "mathematics is half of it");
        assert_eq!((get(&table.sections, "Safety"), table.sections.len()), (Some(0.0), 2));
        assert_eq!((table.score(), table.all), (Some(0.375), 3.5 / 6.0));
    }

    #[test]
    fn rows_are_read_as_text_and_as_messages() {
        let row = |value: Value| value.as_object().cloned().unwrap();
        let text =
            one(&row(json!({"prompt": "q", "chosen": "a", "rejected": "b", "subset": "s"})), 0).unwrap();
        assert_eq!((text.prompt.text.as_str(), text.chosen.as_str(), text.subset.as_str()), ("q", "a", "s"));
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let both = json!({ "prompt": [message("user", "q")], "chosen": [message("user", "q"), message("assistant", "a")],
                           "rejected": [message("assistant", "b")] });
        let chat = one(&row(both), 0).unwrap();
        assert_eq!((chat.prompt.messages.len(), chat.chosen.as_str(), chat.rejected.as_str()), (1, "a", "b"));
        let error = one(&row(json!({"prompt": "q", "chosen": "a"})), 3).unwrap_err().to_string();
        assert!(error.contains("rejected"), "{error}");
    }
}

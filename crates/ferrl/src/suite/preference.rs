//! Pairs and demonstrations: dialogues, summaries, film reviews, and the test set of reward models.

use super::{Converted, Entry, Published, SuiteSampling, Use};
use ferrl_engine::Result;
use serde_json::{Value, json};

const NONE: [&str; 2] = ["", ""];
const SHORT: SuiteSampling = SuiteSampling { temperature: 0.0, max_new_tokens: 128, stop: &[] };

/// Dialogues of which people preferred one end.
pub const HH_RLHF: Entry = Entry {
    name: "hh_rlhf",
    about: "HH-RLHF: dialogues with a helpful or harmless response and a worse one",
    repo: "Anthropic/hh-rlhf",
    parts: &["harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"],
    train: Some("train"),
    test: Some("test"),
    license: "MIT",
    cite: "Bai et al., Training a Helpful and Harmless Assistant with RLHF, 2022, arXiv 2204.05862",
    rows: Use::Pairs,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"chosen": "\n\nHuman: How do I boil an egg?\n\nAssistant: Put it in boiling water for eight minutes.",
                "rejected": "\n\nHuman: How do I boil an egg?\n\nAssistant: I do not know."}"#,
    completions: NONE,
    usable: None,
    convert: dialogue,
};

const ASSISTANT: &str = "\n\nAssistant:";

/// Both dialogues end with a response of the assistant; what stands before it is the prompt.
fn dialogue(row: &Published<'_>) -> Result<Converted> {
    let (chosen, rejected) = (row.text(&["chosen"])?, row.text(&["rejected"])?);
    let split = |text: &str| text.rfind(ASSISTANT).map(|at| at + ASSISTANT.len());
    let (Some(end), Some(other)) = (split(&chosen), split(&rejected)) else {
        return Err(row.wrong("chosen", &json!(chosen), "a dialogue that ends with \"\\n\\nAssistant: …\""));
    };
    // The dialogues may part before the last turn: then what they share is the prompt.
    let end = match chosen[..end] == rejected[..other] {
        true => end,
        false => shared_turns(&chosen, &rejected),
    };
    let (prompt, chosen, rejected) = (&chosen[..end], &chosen[end..], &rejected[end..]);
    Ok(vec![
        ("prompt", json!(prompt)),
        ("chosen", json!(chosen)),
        ("rejected", json!(rejected)),
        ("response", json!(chosen)),
    ])
}

/// Where the last turn of the assistant begins that both dialogues still share the beginning of.
fn shared_turns(a: &str, b: &str) -> usize {
    let same = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    let ends = a.match_indices(ASSISTANT).map(|(at, _)| at + ASSISTANT.len());
    ends.take_while(|&end| end <= same).last().unwrap_or(0)
}

/// Posts with summaries.
pub const TLDR: Entry = Entry {
    name: "tldr",
    about: "TL;DR: Reddit posts with a preferred and a worse summary (trl-lib/tldr has demonstrations instead)",
    repo: "trl-lib/tldr-preference",
    parts: &[],
    train: Some("train"),
    test: Some("validation"),
    license: "CC BY 4.0 (the posts); MIT (the comparisons)",
    cite: "Stiennon et al., Learning to Summarize from Human Feedback, 2020, arXiv 2009.01325",
    rows: Use::Pairs,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"info": {"id": "t3_0", "post": "My neighbour's cat visits me every day and now sleeps on my sofa.",
                "title": "A cat moved in", "subreddit": "r/cats", "site": null, "article": null},
                "summaries": [{"text": " Cats exist.", "policy": "a", "note": null},
                {"text": " The neighbour's cat moved in with me.", "policy": "b", "note": null}],
                "choice": 1, "worker": "w", "batch": "batch0", "split": "train", "extra": {"confidence": 7}}"#,
    completions: NONE,
    usable: None,
    convert: summary,
};

/// Comparisons as OpenAI published them, or the flat columns of the copies made for training.
fn summary(row: &Published<'_>) -> Result<Converted> {
    let Some(summaries) = row.find(&["summaries"]) else {
        let prompt = row.text(&["prompt"])?;
        if row.find(&["chosen"]).is_some() {
            let (chosen, rejected) = (row.text(&["chosen"])?, row.text(&["rejected"])?);
            return Ok(pair(prompt, chosen, rejected));
        }
        return Ok(vec![("prompt", json!(prompt)), ("response", json!(row.text(&["completion", "label"])?))]);
    };
    let info = row.value(&["info"])?;
    let field = |name: &str| info.get(name).and_then(Value::as_str).unwrap_or_default();
    let prompt = format!(
        "SUBREDDIT: {}\n\nTITLE: {}\n\nPOST: {}\n\nTL;DR:",
        field("subreddit"),
        field("title"),
        field("post")
    );
    let text = |i: usize| summaries.get(i).and_then(|s| s.get("text")).and_then(Value::as_str);
    let choice = row.find(&["choice"]).and_then(Value::as_u64).filter(|c| *c < 2);
    let (Some(first), Some(second), Some(choice)) = (text(0), text(1), choice) else {
        return Err(row.wrong("summaries", summaries, "two summaries, and choice 0 or 1"));
    };
    let (chosen, rejected) = if choice == 0 { (first, second) } else { (second, first) };
    Ok(pair(prompt, chosen.into(), rejected.into()))
}

fn pair(prompt: String, chosen: String, rejected: String) -> Converted {
    vec![
        ("prompt", json!(prompt)),
        ("response", json!(chosen)),
        ("chosen", json!(chosen)),
        ("rejected", json!(rejected)),
    ]
}

/// Film reviews with a sentiment.
pub const IMDB: Entry = Entry {
    name: "imdb",
    about: "IMDB: film reviews; the first words are the prompt, the sentiment is a label and a target",
    repo: "stanfordnlp/imdb",
    parts: &["plain_text"],
    train: Some("train"),
    test: Some("test"),
    license: "not stated",
    cite: "Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011",
    rows: Use::Demonstrations,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"text": "We went to see it on a rainy day and left the cinema smiling all the way home.", "label": 1}"#,
    completions: NONE,
    usable: None,
    convert: review,
};

/// Words of a review that are its prompt.
const OPENING: usize = 8;

/// The opening of a review and the rest; `target` trains a classifier of sentiment, whose score then rewards completions.
fn review(row: &Published<'_>) -> Result<Converted> {
    let text = row.text(&["text"])?.replace("<br />", "\n");
    let label = row.value(&["label"])?;
    let Some(positive) = label.as_u64().filter(|l| *l < 2) else {
        return Err(row.wrong("label", label, "0 (negative) or 1 (positive)"));
    };
    let ends = text.split_inclusive(char::is_whitespace).scan(0, |end, word| {
        *end += word.len();
        Some(*end)
    });
    let end = ends.take(OPENING).last().unwrap_or(0);
    let end = text[..end].trim_end().len();
    Ok(vec![
        ("prompt", json!(text[..end])),
        ("response", json!(text[end..])),
        ("target", json!(positive as f64)),
        ("label", json!(positive == 1)),
    ])
}

/// The test set of reward models.
pub const REWARDBENCH: Entry = Entry {
    name: "rewardbench",
    about: "RewardBench: 2,985 pairs that a reward model should order; a test set, not to be trained on",
    repo: "allenai/reward-bench",
    parts: &[],
    train: None,
    test: Some("filtered"),
    license: "ODC-BY 1.0",
    cite: "Lambert et al., RewardBench: Evaluating Reward Models for Language Modeling, 2024, arXiv 2403.13787",
    rows: Use::Pairs,
    groups: &["subset"],
    sampling: SHORT,
    sample: r#"{"prompt": "Name a prime number.", "chosen": "7 is prime.", "chosen_model": "a", "rejected": "8 is prime.",
                "rejected_model": "b", "subset": "math-example", "id": 0}"#,
    completions: NONE,
    usable: None,
    convert: |row| Ok(pair(row.text(&["prompt"])?, row.text(&["chosen"])?, row.text(&["rejected"])?)),
};

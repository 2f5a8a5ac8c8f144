//! Questions with a short answer that has several right wordings.

use super::{Converted, Entry, Published, SuiteSampling, Use};
use ferrl_engine::Result;
use serde_json::{Value, json};

const WORDS: Use = Use::Verified { verifier: "f1", options: r#"{"column": "answers"}"# };
const SHORT: SuiteSampling = SuiteSampling { temperature: 0.0, max_new_tokens: 48, stop: &["\n"] };

/// Trivia questions with aliases of the answer.
pub const TRIVIAQA: Entry = Entry {
    name: "triviaqa",
    about: "TriviaQA without documents: trivia questions with all aliases of the answer",
    repo: "mandarjoshi/trivia_qa",
    parts: &["rc.nocontext"],
    train: Some("train"),
    test: Some("validation"),
    license: "not stated; Apache-2.0 for the code",
    cite: "Joshi et al., TriviaQA, 2017, arXiv 1705.03551",
    rows: WORDS,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"question": "Which river flows through Vienna and Budapest?", "question_id": "q_1",
                "question_source": "https://example.org/", "answer": {"aliases": ["Donau", "River Danube", "The Danube"],
                "normalized_aliases": ["danube", "donau", "river danube"], "matched_wiki_entity_name": "",
                "normalized_matched_wiki_entity_name": "", "normalized_value": "danube", "type": "WikipediaEntity",
                "value": "Danube"}}"#,
    completions: [" the Danube", " the Rhine"],
    usable: None,
    convert: trivia,
};

fn trivia(row: &Published<'_>) -> Result<Converted> {
    let answer = row.value(&["answer"])?;
    let texts = |name: &str| {
        let list = answer.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
        list.into_iter().filter_map(|v| v.as_str().map(String::from)).collect::<Vec<_>>()
    };
    let value = answer.get("value").and_then(Value::as_str);
    let value = value.ok_or_else(|| row.wrong("answer", answer, "an object with value and aliases"))?;
    let mut answers = vec![value.to_string()];
    answers.extend(texts("aliases"));
    answers.extend(texts("normalized_aliases"));
    Ok(asked(&row.text(&["question"])?, answers))
}

/// A question, the wordings of its answer, and the first of them as the response.
fn asked(question: &str, answers: Vec<String>) -> Converted {
    let first = answers.first().cloned().unwrap_or_default();
    vec![
        ("prompt", json!(format!("Question: {}\nAnswer with a few words.\nAnswer:", question.trim()))),
        ("response", json!(format!(" {first}"))),
        ("answer", json!(first)),
        ("answers", json!(answers)),
    ]
}

/// Questions people asked a search engine.
pub const NQ: Entry = Entry {
    name: "nq",
    about: "Natural Questions, open: questions of a search engine with short answers",
    repo: "google-research-datasets/nq_open",
    parts: &["nq_open"],
    train: Some("train"),
    test: Some("validation"),
    license: "CC BY-SA 3.0",
    cite: "Kwiatkowski et al., Natural Questions, TACL 2019; Lee et al., 2019, arXiv 1906.00300",
    rows: WORDS,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"question": "when does winter begin in the north", "answer": ["December", "in December"]}"#,
    completions: [" december", " june"],
    usable: None,
    convert: |row| Ok(asked(&row.text(&["question"])?, row.texts(&["answer", "golden_answers"])?)),
};

/// Questions whose answer needs two documents.
pub const HOTPOTQA: Entry = Entry {
    name: "hotpotqa",
    about: "HotpotQA, closed book: questions that need two facts; accuracy by type and level",
    repo: "hotpotqa/hotpot_qa",
    parts: &["distractor"],
    train: Some("train"),
    test: Some("validation"),
    license: "CC BY-SA 4.0",
    cite: "Yang et al., HotpotQA, 2018, arXiv 1809.09600",
    rows: WORDS,
    groups: &["type", "level"],
    sampling: SHORT,
    sample: r#"{"id": "h1", "question": "Which is larger, the capital of France or the capital of Malta?", "answer": "Paris",
                "type": "comparison", "level": "medium", "supporting_facts": {"title": ["Paris"], "sent_id": [0]},
                "context": {"title": ["Paris"], "sentences": [["Paris is the capital of France."]]}}"#,
    completions: [" Paris.", " Valletta"],
    usable: None,
    convert: |row| Ok(asked(&row.text(&["question"])?, row.texts(&["answer", "golden_answers"])?)),
};

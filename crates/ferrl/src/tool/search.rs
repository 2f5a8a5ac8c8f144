//! Document retrieval by BM25 over the user's documents, or from a retrieval service with Search-R1's `POST /retrieve`.

use super::{Entry, Tool, one_text, schema_for, text_argument};
use crate::data::{columns_of, each_row};
use crate::http::Url;
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) const ENTRY: Entry = Entry {
    name: "search",
    about: "the documents that fit a query best: BM25 over a file, or a retrieval service",
    schema: || schema_for!(Options),
    build: |values| {
        let options: Options = read_settings(PLACE, values)?;
        Ok(Arc::new(SearchTool::new(&options)?))
    },
};

const PLACE: &str = "env.tool.search";
const ARGUMENT: &str = "query";
/// BM25's constants, with Pyserini's values.
const K1: f64 = 0.9;
const B: f64 = 0.4;
/// Maximum length of a query in bytes; the rest is ignored.
const MAX_QUERY: usize = 4096;

with_defaults! {
pub(crate) struct Options {
    /// File of documents: rows with `text` or `contents`, optionally `title` and `id`.
    pub documents: Option<String> = None,
    /// Address of a retrieval service, such as `http://127.0.0.1:8000/retrieve`.
    pub url: Option<String> = None,
    /// Documents of a result. [1, 100]
    pub topk: usize = 3,
    /// Maximum characters of a document in a result. [1, 1000000]
    pub max_chars: usize = 2000,
    /// Maximum seconds of a request to the service. (0, 3600]
    pub timeout: f64 = 10.0,
}
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    pub title: String,
    pub text: String,
}

impl Document {
    /// From a row with `text` or `contents`. Without `title` the first line of `contents` is the title, as in Search-R1's
    /// corpus.
    fn from_row(row: &Map<String, Value>) -> Option<Document> {
        let of = |name: &str| row.get(name).and_then(Value::as_str);
        let title = of("title").map(|title| title.trim().to_string());
        if let Some(text) = of("text") {
            return Some(Document { title: title.unwrap_or_default(), text: text.trim().into() });
        }
        let contents = of("contents")?.trim();
        Some(match (title, contents.split_once('\n')) {
            (Some(title), _) => Document { title, text: contents.into() },
            (None, Some((title, text))) => {
                Document { title: title.trim().trim_matches('"').into(), text: text.trim().into() }
            }
            (None, None) => Document { title: String::new(), text: contents.into() },
        })
    }
}

/// Words of a text: runs of letters and digits, in lower case.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase)
}

/// An inverted index of documents.
pub struct SearchIndex {
    documents: Vec<Document>,
    /// Number of words of each document.
    lengths: Vec<u32>,
    mean_length: f64,
    /// Documents with a word, in order, with the number of occurrences.
    postings: HashMap<String, Vec<(u32, u32)>>,
}

impl SearchIndex {
    pub fn new(documents: Vec<Document>) -> Self {
        let (mut postings, mut lengths) = (HashMap::<String, Vec<(u32, u32)>>::new(), Vec::new());
        for (number, document) in documents.iter().enumerate() {
            let mut length = 0;
            for word in words(&document.title).chain(words(&document.text)) {
                length += 1;
                let places = postings.entry(word).or_default();
                match places.last_mut() {
                    Some((last, count)) if *last == number as u32 => *count += 1,
                    _ => places.push((number as u32, 1)),
                }
            }
            lengths.push(length);
        }
        let total: f64 = lengths.iter().map(|&length| f64::from(length)).sum();
        let mean_length = (total / lengths.len().max(1) as f64).max(1.0);
        SearchIndex { documents, lengths, mean_length, postings }
    }

    /// Of the rows of a file.
    pub fn read(path: &Path) -> Result<Self> {
        let mut documents = Vec::new();
        each_row(path, |place, row| {
            let none = || {
                let there = columns_of(&row);
                Error::data(format!("a document needs `text` or `contents`; the row has {there}")).at(place)
            };
            documents.push(Document::from_row(&row).ok_or_else(none)?);
            Ok(())
        })?;
        match documents.is_empty() {
            true => Err(Error::data("no documents").at(path.display())),
            false => Ok(SearchIndex::new(documents)),
        }
    }

    /// The best documents of a query in descending order; ties go to the first. Documents without any of its words are left
    /// out.
    pub fn top(&self, query: &str, k: usize) -> Vec<(&Document, f64)> {
        let mut scores = HashMap::<u32, f64>::new();
        for word in words(query) {
            let Some(places) = self.postings.get(&word) else { continue };
            let (n, with) = (self.documents.len() as f64, places.len() as f64);
            let idf = (1.0 + (n - with + 0.5) / (with + 0.5)).ln();
            for &(document, count) in places {
                let length = f64::from(self.lengths[document as usize]) / self.mean_length;
                let count = f64::from(count);
                let weight = count * (K1 + 1.0) / (count + K1 * (1.0 - B + B * length));
                *scores.entry(document).or_default() += idf * weight;
            }
        }
        let mut found: Vec<(u32, f64)> = scores.into_iter().collect();
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        found.truncate(k);
        found.into_iter().map(|(document, score)| (&self.documents[document as usize], score)).collect()
    }
}

enum SearchBackend {
    Local(Arc<SearchIndex>),
    Service { url: Url, timeout: Duration },
}

pub(crate) struct SearchTool {
    backend: SearchBackend,
    topk: usize,
    max_chars: usize,
}

impl SearchTool {
    /// Over documents in memory.
    pub(crate) fn over(index: Arc<SearchIndex>, topk: usize) -> Self {
        let max_chars = Options::default().max_chars;
        SearchTool { backend: SearchBackend::Local(index), topk, max_chars }
    }

    pub(crate) fn new(o: &Options) -> Result<Self> {
        let backend = match (&o.documents, &o.url) {
            (Some(file), None) => SearchBackend::Local(Arc::new(SearchIndex::read(Path::new(file))?)),
            (None, Some(url)) => {
                let url = Url::parse(url).map_err(|why| {
                    Error::usage(why).at(format!("{PLACE}.url")).fix("http://127.0.0.1:8000/retrieve")
                })?;
                SearchBackend::Service { url, timeout: Duration::from_secs_f64(o.timeout) }
            }
            (documents, _) => {
                let both = if documents.is_some() {
                    "both `documents` and `url`"
                } else {
                    "neither `documents` nor `url`"
                };
                return Err(Error::usage(format!("search has {both}, expected one"))
                    .at(PLACE)
                    .fix("env.options.search.documents = \"docs.jsonl\""));
            }
        };
        let max_chars = o.max_chars;
        Ok(SearchTool { backend, topk: o.topk, max_chars })
    }

    fn find(&self, query: &str) -> std::result::Result<Vec<Document>, String> {
        match &self.backend {
            SearchBackend::Local(index) => {
                Ok(index.top(query, self.topk).into_iter().map(|(d, _)| d.clone()).collect())
            }
            SearchBackend::Service { url, timeout } => {
                let body = json!({ "queries": [query], "topk": self.topk, "return_scores": true });
                documents(&url.post(&body, *timeout)?).ok_or_else(|| "an answer of another form".to_string())
            }
        }
    }

    /// Documents in Search-R1's format.
    fn text(&self, documents: &[Document]) -> String {
        let shown = documents.iter().take(self.topk).enumerate().map(|(i, Document { title, text })| {
            let text: String = text.chars().take(self.max_chars).collect();
            let title = if title.is_empty() { String::new() } else { format!("(Title: {title})") };
            format!("Doc {}{title} {text}", i + 1)
        });
        shown.collect::<Vec<_>>().join("\n")
    }
}

/// The documents of a service's reply: `{"result": [[{"document": {...}, "score": ...}, ...]]}`, or without scores.
fn documents(answer: &Value) -> Option<Vec<Document>> {
    let found = answer.get("result")?.get(0)?.as_array()?;
    found
        .iter()
        .map(|item| match item.get("document").unwrap_or(item) {
            Value::Object(row) => Document::from_row(row),
            Value::String(text) => Some(Document { title: String::new(), text: text.clone() }),
            _ => None,
        })
        .collect()
}

impl Tool for SearchTool {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn about(&self) -> &str {
        "Finds the documents that fit a query best."
    }
    fn parameters(&self) -> Value {
        one_text(ARGUMENT, "what to look for, in words")
    }
    fn call(&self, arguments: &Map<String, Value>) -> Result<String> {
        let query = match text_argument(arguments, ARGUMENT) {
            Ok(text) => &text[..text.floor_char_boundary(MAX_QUERY)],
            Err(why) => return Ok(why),
        };
        Ok(match self.find(query) {
            Ok(found) if found.is_empty() => "nothing found".into(),
            Ok(found) => self.text(&found),
            Err(why) => {
                format!("error: the search failed: {why}")
            }
        })
    }
    fn waits(&self) -> bool {
        matches!(self.backend, SearchBackend::Service { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::tests::{ok, serve};

    fn index() -> SearchIndex {
        let of = |title: &str, text: &str| Document { title: title.into(), text: text.into() };
        SearchIndex::new(vec![
            of("Paris", "Paris is the capital of France."),
            of("Rome", "Rome is the capital of Italy. Rome, Rome!"),
            of("Cat", "A cat is an animal."),
            of("Cat again", "A cat is an animal."),
        ])
    }

    #[test]
    fn the_rarest_words_decide_and_ties_keep_the_order() {
        let index = index();
        let top = |query: &str| index.top(query, 2).iter().map(|(d, _)| d.title.clone()).collect::<Vec<_>>();
        assert_eq!(top("capital of ITALY?"), ["Rome", "Paris"]);
        assert_eq!(top("is cat"), ["Cat", "Cat again"]);
        assert!(top("zebra").is_empty() && top("").is_empty());
    }

    /// By hand: the word is in 2 of 4 documents, whose mean length is 3 words.
    #[test]
    fn scores_are_bm25() {
        let documents = ["a b", "a a a c d e", "x", "y y y"];
        let index = SearchIndex::new(
            documents.iter().map(|t| Document { title: String::new(), text: t.to_string() }).collect(),
        );
        let found = index.top("a", 9);
        let idf = (1.0f64 + 2.5 / 2.5).ln();
        let score = |count: f64, length: f64| idf * count * 1.9 / (count + 0.9 * (0.6 + 0.4 * length / 3.0));
        assert_eq!(found[0].0.text, "a a a c d e");
        assert!((found[0].1 - score(3.0, 6.0)).abs() < 1e-12 && (found[1].1 - score(1.0, 2.0)).abs() < 1e-12);
    }

    #[test]
    fn documents_are_read_in_the_forms_of_other_corpora() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("docs.jsonl");
        let rows = r#"{"id": "0", "contents": "\"Paris\"\nThe capital of France."}
{"title": "Rome", "text": "The capital of Italy."}
"#;
        std::fs::write(&path, rows).unwrap();
        let options = json!({ "documents": path, "topk": 1 });
        let tool = (ENTRY.build)(options.as_object().unwrap()).unwrap();
        let call = |query: &str| tool.call(json!({ "query": query }).as_object().unwrap()).unwrap();
        assert_eq!(call("capital france"), "Doc 1(Title: Paris) The capital of France.");
        assert_eq!(call("italy"), "Doc 1(Title: Rome) The capital of Italy.");
        assert_eq!(call("zebra"), "nothing found");
        std::fs::write(&path, "{\"body\": 1}\n").unwrap();
        let error = (ENTRY.build)(options.as_object().unwrap()).err().unwrap().to_string();
        assert!(error.contains("docs.jsonl:1") && error.contains("the row has body"), "{error}");
    }

    #[test]
    fn a_service_speaks_as_search_r1_does_and_its_failures_are_said() {
        let body = r#"{"result": [[{"document": {"id": "7", "contents": "\"Rome\"\nThe capital."}, "score": 3.5}]]}"#;
        let (url, served) = serve(vec![ok(body), ok("{}"), "HTTP/1.1 503 Busy\r\n\r\n".into()]);
        let options = json!({ "url": url, "topk": 3, "timeout": 5 });
        let tool = (ENTRY.build)(options.as_object().unwrap()).unwrap();
        let call = || tool.call(json!({ "query": "rome" }).as_object().unwrap()).unwrap();
        assert_eq!(call(), "Doc 1(Title: Rome) The capital.");
        assert_eq!(call(), "error: the search failed: an answer of another form");
        assert!(call().contains("status 503"));
        let requests = served.join().unwrap();
        assert!(
            requests[0].ends_with(r#"{"queries":["rome"],"topk":3,"return_scores":true}"#),
            "{}",
            requests[0]
        );
    }

    #[test]
    fn a_search_without_a_source_or_with_a_wrong_one_is_refused() {
        for (options, part) in [
            (json!({}), "neither"),
            (json!({ "documents": "a", "url": "http://b" }), "both"),
            (json!({ "url": "https://b" }), "http://"),
            (json!({ "documents": "/no/such/file.jsonl" }), "no/such/file"),
            (json!({ "topk": 0, "url": "http://b" }), "topk"),
            (json!({ "top_k": 1 }), "topk"),
        ] {
            let error = (ENTRY.build)(options.as_object().unwrap()).err().unwrap().to_string();
            assert!(error.contains(part), "{options}: {error}");
        }
    }
}

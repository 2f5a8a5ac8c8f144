//! Multiple choice: options by letter, the letter is the answer.

use super::{Converted, Entry, Published, SuiteSampling, Use};
use ferrl_engine::Result;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

const LETTER: Use = Use::Verified { verifier: "choice", options: r#"{"column": "answer"}"# };
const SHORT: SuiteSampling = SuiteSampling { temperature: 0.0, max_new_tokens: 32, stop: &["\n"] };

/// 57 subjects from elementary mathematics to law.
pub const MMLU: Entry = Entry {
    name: "mmlu",
    about: "MMLU: four options in 57 subjects; accuracy by subject",
    repo: "cais/mmlu",
    parts: &["all"],
    train: Some("auxiliary_train"),
    test: Some("test"),
    license: "MIT",
    cite: "Hendrycks et al., Measuring Massive Multitask Language Understanding, 2020, arXiv 2009.03300",
    rows: LETTER,
    groups: &["subject"],
    sampling: SHORT,
    sample: r#"{"question": "Which of these is a prime number?", "subject": "elementary_mathematics",
                "choices": ["9", "15", "17", "21"], "answer": 2}"#,
    completions: [" C", " A"],
    usable: None,
    convert: mmlu,
};

fn mmlu(row: &Published<'_>) -> Result<Converted> {
    let options = row.texts(&["choices", "options"])?;
    let answer = row.value(&["answer"])?;
    let right = match answer {
        Value::Number(n) => n.as_u64().map(|n| n as usize),
        Value::String(letter) => letter_index(letter),
        _ => None,
    };
    let right = right.filter(|r| *r < options.len());
    let right = right.ok_or_else(|| row.wrong("answer", answer, "the number of an option, or its letter"))?;
    Ok(asked(&row.text(&["question"])?, &options, right))
}

fn letter_index(letter: &str) -> Option<usize> {
    let mut chars = letter.trim().chars();
    let (first, rest) = (chars.next()?.to_ascii_uppercase(), chars.next());
    (first.is_ascii_uppercase() && rest.is_none()).then(|| (first as u8 - b'A') as usize)
}

/// Question and options by letter; the letter of the right one is the answer.
fn asked(question: &str, options: &[String], right: usize) -> Converted {
    let letter = |i: usize| (b'A' + i as u8) as char;
    let listed: String =
        options.iter().enumerate().map(|(i, o)| format!("{}. {}\n", letter(i), o.trim())).collect();
    let own = letter(right).to_string();
    let prompt = format!("{}\n{listed}Answer with the letter of the right option.\nAnswer:", question.trim());
    vec![
        ("prompt", json!(prompt)),
        ("response", json!(format!(" {own}"))),
        ("answer", json!(own)),
        ("choices", json!(options)),
    ]
}

/// Options in an order that the question alone decides, and where the right one went.
fn mixed(question: &str, right: String, wrong: Vec<String>) -> (Vec<String>, usize) {
    let mut options = wrong;
    let at = (xxh3_64(question.as_bytes()) % (options.len() as u64 + 1)) as usize;
    options.insert(at, right);
    (options, at)
}

/// Questions of biology, physics and chemistry that a search does not answer.
pub const GPQA: Entry = Entry {
    name: "gpqa",
    about: "GPQA Diamond: 198 graduate-level questions with four options, in an order that the question decides",
    repo: "Idavidrein/gpqa",
    parts: &["gpqa_diamond.csv"],
    train: None,
    test: Some("*"),
    license: "CC BY 4.0; access on request, and examples are not to be shown in plain text on the web",
    cite: "Rein et al., GPQA: A Graduate-Level Google-Proof Q&A Benchmark, 2023, arXiv 2311.12022",
    rows: LETTER,
    groups: &["High-level domain"],
    sampling: SHORT,
    sample: r#"{"Question": "Which particle carries the electromagnetic force?", "Correct Answer": "the photon",
                "Incorrect Answer 1": "the gluon", "Incorrect Answer 2": "the Z boson", "Incorrect Answer 3": "the pion",
                "Subdomain": "Quantum Mechanics", "High-level domain": "Physics"}"#,
    completions: [" the photon", " the gluon"],
    usable: None,
    convert: gpqa,
};

fn gpqa(row: &Published<'_>) -> Result<Converted> {
    let question = row.text(&["Question", "question"])?;
    let wrong = ["Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"];
    let wrong = wrong.iter().map(|name| row.text(&[name])).collect::<Result<Vec<_>>>()?;
    let (options, right) = mixed(&question, row.text(&["Correct Answer"])?, wrong);
    Ok(asked(&question, &options, right))
}

/// Science questions of school exams.
pub const SCIQ: Entry = Entry {
    name: "sciq",
    about: "SciQ: science questions with four options, in an order that the question decides",
    repo: "allenai/sciq",
    parts: &[],
    train: Some("train"),
    test: Some("test"),
    license: "CC BY-NC 3.0",
    cite: "Welbl et al., Crowdsourcing Multiple Choice Science Questions, 2017, arXiv 1707.06209",
    rows: LETTER,
    groups: &[],
    sampling: SHORT,
    sample: r#"{"question": "What do plants take from the air to make sugar?", "distractor3": "helium",
                "distractor1": "oxygen", "distractor2": "nitrogen", "correct_answer": "carbon dioxide",
                "support": "Plants make sugar from water and carbon dioxide."}"#,
    completions: [" Carbon dioxide", " Oxygen"],
    usable: None,
    convert: sciq,
};

fn sciq(row: &Published<'_>) -> Result<Converted> {
    let question = row.text(&["question"])?;
    let wrong = ["distractor1", "distractor2", "distractor3"].iter().map(|name| row.text(&[name]));
    let wrong = wrong.collect::<Result<Vec<_>>>()?;
    let (options, right) = mixed(&question, row.text(&["correct_answer"])?, wrong);
    Ok(asked(&question, &options, right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_option_is_anywhere_and_its_letter_says_where() {
        let wrong = || vec!["x".to_string(), "y".into(), "z".into()];
        let mut places = [0; 4];
        for i in 0..400 {
            let (options, at) = mixed(&format!("question {i}"), "right".into(), wrong());
            assert_eq!((options.len(), options[at].as_str()), (4, "right"));
            places[at] += 1;
        }
        assert!(places.iter().all(|n| *n > 60), "{places:?}");
        let again = mixed("question 7", "right".into(), wrong());
        assert_eq!(again, mixed("question 7", "right".into(), wrong()));
    }

    #[test]
    fn letters_are_options() {
        assert_eq!(
            [letter_index("A"), letter_index(" d "), letter_index("AB"), letter_index("1")],
            [Some(0), Some(3), None, None]
        );
    }
}

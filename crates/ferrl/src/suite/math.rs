//! Mathematics with a final answer: GSM8K, MATH, competitions, textbooks.

use super::{Converted, Entry, Published, SuiteSampling, Use};
use crate::verify::last_boxed;
use ferrl_engine::{Error, Result};
use serde_json::json;

const MATH_VERIFIER: Use = Use::Verified { verifier: "math", options: r#"{"column": "answer"}"# };
const LONG: SuiteSampling = SuiteSampling { temperature: 0.0, max_new_tokens: 2048, stop: &[] };
const RIGHT_7: [&str; 2] =
    ["Adding both gives 7, so the answer is \\boxed{7}.", "So the answer is \\boxed{8}."];

/// Grade-school word problems.
pub const GSM8K: Entry = Entry {
    name: "gsm8k",
    about: "grade-school word problems with a number as the answer",
    repo: "openai/gsm8k",
    parts: &["main"],
    train: Some("train"),
    test: Some("test"),
    license: "MIT",
    cite: "Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021, arXiv 2110.14168",
    rows: Use::Verified { verifier: "numeric", options: r#"{"column": "answer"}"# },
    groups: &[],
    sampling: SuiteSampling { temperature: 0.0, max_new_tokens: 512, stop: &[] },
    sample: r#"{"question": "Mia has 3 boxes of 12 pencils and gives 6 pencils away. How many pencils has she left?",
                "answer": "Mia starts with 3 * 12 = <<3*12=36>>36 pencils.\nShe has 36 - 6 = <<36-6=30>>30 left.\n#### 30"}"#,
    completions: ["3 * 12 = 36 and 36 - 6 = 30.\n#### 30", "3 * 12 = 36.\n#### 36"],
    usable: None,
    convert: gsm8k,
};

fn gsm8k(row: &Published<'_>) -> Result<Converted> {
    let (question, solution) = (row.text(&["question", "problem"])?, row.text(&["answer", "solution"])?);
    let (steps, answer) = solution.rsplit_once("####").ok_or_else(|| {
        row.wrong("answer", &json!(solution), "a solution whose last line is #### and the number")
    })?;
    let answer = answer.trim().replace(',', "");
    let steps = without_calculator(steps.trim_end());
    Ok(vec![
        (
            "prompt",
            json!(format!(
                "{}\nReason step by step and write the final number after ####.\n",
                question.trim_end()
            )),
        ),
        ("response", json!(format!("{steps}\n#### {answer}"))),
        ("answer", json!(answer)),
    ])
}

/// The steps of a solution without GSM8K's annotations for a calculator, `<<3*12=36>>`.
fn without_calculator(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<<") {
        out.push_str(before);
        match after.split_once(">>") {
            Some((_, tail)) => rest = tail,
            None => {
                out.push_str("<<");
                rest = after;
            }
        }
    }
    out + rest
}

/// Competition mathematics of seven subjects and five levels.
pub const MATH: Entry = Entry {
    name: "math",
    about: "competition mathematics (Hendrycks et al.): 7,500 training and 5,000 test problems",
    repo: "EleutherAI/hendrycks_math",
    parts: &[
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    ],
    train: Some("train"),
    test: Some("test"),
    license: "MIT",
    cite: "Hendrycks et al., Measuring Mathematical Problem Solving With the MATH Dataset, 2021, arXiv 2103.03874",
    rows: MATH_VERIFIER,
    groups: &["type", "level"],
    sampling: LONG,
    sample: r#"{"problem": "What is $3 + 4$?", "level": "Level 1", "type": "Prealgebra",
                "solution": "We add: $3 + 4 = \\boxed{7}$."}"#,
    completions: RIGHT_7,
    usable: None,
    convert: solved,
};

/// A problem whose answer is in a column, or in the box of its solution.
fn solved(row: &Published<'_>) -> Result<Converted> {
    let problem = row.text(&["problem", "question"])?;
    let solution = row.find(&["solution"]).and_then(|s| s.as_str());
    let answer = match row.find(&["answer", "final_answer"]) {
        Some(_) => row.text(&["answer", "final_answer"])?,
        None => {
            let text = row.text(&["solution"])?;
            last_boxed(&text).map(String::from).ok_or_else(|| {
                row.wrong("solution", &json!(text), "a solution with the answer in \\boxed{}")
            })?
        }
    };
    let mut out = vec![("prompt", asked(&problem)), ("answer", json!(answer))];
    out.extend(solution.map(|s| ("response", json!(s))));
    Ok(out)
}

fn asked(problem: &str) -> serde_json::Value {
    json!(format!("{}\n\nReason step by step and put the final answer in \\boxed{{}}.\n", problem.trim_end()))
}

/// The 500 problems of MATH's test split that PRM800K keeps for tests.
pub const MATH500: Entry = Entry {
    name: "math500",
    about: "MATH-500: the 500 test problems of MATH that PRM800K kept for tests",
    repo: "HuggingFaceH4/MATH-500",
    parts: &["test.jsonl"],
    train: None,
    test: Some("*"),
    license: "not stated; the problems are MATH's (MIT)",
    cite: "Lightman et al., Let's Verify Step by Step, 2023, arXiv 2305.20050",
    rows: MATH_VERIFIER,
    groups: &["subject", "level"],
    sampling: LONG,
    sample: r#"{"problem": "Find $x$ if $x - 3 = 4$.", "solution": "Adding 3 gives $x = \\boxed{7}$.", "answer": "7",
                "subject": "Algebra", "level": 1, "unique_id": "test/algebra/0.json"}"#,
    completions: RIGHT_7,
    usable: None,
    convert: solved,
};

/// AMC 12 of 2022 and 2023.
pub const AMC: Entry = Entry {
    name: "amc",
    about: "AMC 12 of 2022 and 2023, 83 problems with a number as the answer",
    repo: "AI-MO/aimo-validation-amc",
    parts: &[],
    train: None,
    test: Some("*"),
    license: "Apache-2.0; the problems belong to the Mathematical Association of America",
    cite: "AI-MO validation set of AMC 12 problems, Hugging Face, 2024",
    rows: MATH_VERIFIER,
    groups: &[],
    sampling: SuiteSampling { max_new_tokens: 4096, ..LONG },
    sample: r#"{"id": 0, "problem": "What is $14 / 2$?", "answer": 7.0, "url": "https://example.org/amc/1"}"#,
    completions: RIGHT_7,
    usable: None,
    convert: solved,
};

/// AIME.
pub const AIME: Entry = Entry {
    name: "aime",
    about: "AIME 2024, 30 problems with a whole number from 0 to 999 as the answer; other years by their files",
    repo: "HuggingFaceH4/aime_2024",
    parts: &[],
    train: None,
    test: Some("*"),
    license: "Apache-2.0; the problems belong to the Mathematical Association of America",
    cite: "American Invitational Mathematics Examination 2024, Mathematical Association of America",
    rows: MATH_VERIFIER,
    groups: &["year"],
    sampling: SuiteSampling { max_new_tokens: 8192, ..LONG },
    sample: r#"{"id": 60, "problem": "Find the remainder of $107$ divided by $100$.", "answer": "007", "year": "2024",
                "solution": "It is $107 - 100 = 7$.", "url": "https://example.org/aime/1"}"#,
    completions: RIGHT_7,
    usable: None,
    convert: solved,
};

/// Olympiad problems with a final answer, in English and without images.
pub const OLYMPIADBENCH: Entry = Entry {
    name: "olympiadbench",
    about: "OlympiadBench: competition mathematics in English, text only, with a final answer",
    repo: "Hothan/OlympiadBench",
    parts: &["OlympiadBench/OE_TO_maths_en_COMP"],
    train: None,
    test: Some("*"),
    license: "Apache-2.0",
    cite: "He et al., OlympiadBench, 2024, arXiv 2402.14008",
    rows: MATH_VERIFIER,
    groups: &["subfield"],
    sampling: SuiteSampling { max_new_tokens: 4096, ..LONG },
    sample: r#"{"id": 1, "question": "Find all real $x$ with $(x-1)(x-7)=0$.", "solution": ["The roots are $1$ and $7$."],
                "final_answer": ["$1,7$"], "context": null, "modality": "Text-only", "difficulty": "Competition",
                "is_multiple_answer": true, "unit": null, "answer_type": "Numerical", "error": null,
                "question_type": "Open-ended", "subfield": "Algebra", "subject": "Maths", "language": "English"}"#,
    completions: ["The roots are \\boxed{1, 7}.", "The only root is \\boxed{7}."],
    usable: None,
    convert: olympiad,
};

fn olympiad(row: &Published<'_>) -> Result<Converted> {
    let mut problem = row.text(&["question", "problem"])?;
    if let Some(context) = row.find(&["context"]).and_then(|c| c.as_str()).filter(|c| !c.is_empty()) {
        problem = format!("{context}\n{problem}");
    }
    let answers = row.texts(&["final_answer", "answer"])?;
    if answers.is_empty() {
        return Err(Error::data("the row has no final answer: it is a proof")
            .at(row.suite)
            .fix("the folders OE_* of the repository have final answers, the folders TP_* ask for proofs"));
    }
    let solution = row.find(&["solution"]).and_then(|s| s.as_array()?.first()?.as_str());
    let mut out = vec![("prompt", asked(&problem)), ("answer", json!(answers.join(", ")))];
    out.extend(solution.map(|s| ("response", json!(s))));
    Ok(out)
}

/// Undergraduate science and mathematics from MIT's open courses.
pub const MINERVA: Entry = Entry {
    name: "minerva",
    about: "Minerva Math: 272 undergraduate problems of MIT's open courses",
    repo: "math-ai/minervamath",
    parts: &["test.jsonl"],
    train: None,
    test: Some("*"),
    license: "not stated; the problems are of MIT OpenCourseWare (CC BY-NC-SA 4.0)",
    cite: "Lewkowycz et al., Solving Quantitative Reasoning Problems with Language Models, 2022, arXiv 2206.14858",
    rows: MATH_VERIFIER,
    groups: &["type"],
    sampling: LONG,
    sample: r#"{"question": "A force of 14 N acts on a mass of 2 kg. What is the acceleration in m/s^2?", "answer": "7"}"#,
    completions: RIGHT_7,
    usable: None,
    convert: solved,
};

/// Exercises of college textbooks.
pub const COLLEGE_MATH: Entry = Entry {
    name: "college_math",
    about: "CollegeMath of MWPBench: 2,818 exercises of nine college textbooks",
    repo: "di-zhang-fdu/College_Math_Test",
    parts: &[],
    train: None,
    test: Some("*"),
    license: "Apache-2.0 as stated; the textbooks have licences of their own (column license)",
    cite: "Tang et al., MathScale: Scaling Instruction Tuning for Mathematical Reasoning, 2024, arXiv 2403.02884",
    rows: MATH_VERIFIER,
    groups: &["data_topic"],
    sampling: LONG,
    sample: r#"{"data_source": "college_math.example", "question_number": "exercise.1.1", "question": "Simplify $3x + 4x$.",
                "answer": "$7 x$", "license": "Creative Commons", "data_topic": "college_math.algebra"}"#,
    completions: ["Both terms have the factor $x$: \\boxed{7x}.", "It is \\boxed{12x}."],
    usable: None,
    convert: solved,
};

/// The training questions of Open-Reasoner-Zero.
pub const ORZ: Entry = Entry {
    name: "orz",
    about: "Open-Reasoner-Zero: 57,000 questions with a final answer, to train on",
    repo: "Open-Reasoner-Zero/orz_math_57k_collection",
    parts: &[],
    train: Some("*"),
    test: None,
    license: "MIT",
    cite: "Hu et al., Open-Reasoner-Zero, 2025, arXiv 2503.24290",
    rows: MATH_VERIFIER,
    groups: &[],
    sampling: LONG,
    sample: r#"{"conversations": [{"from": "human", "value": "What is $2 + 5$?"},
                {"from": "assistant", "ground_truth": {"value": "7"}}]}"#,
    completions: RIGHT_7,
    usable: None,
    convert: orz,
};

/// A row of the file is a list of two turns; the answer is in the second.
fn orz(row: &Published<'_>) -> Result<Converted> {
    let turns = match row.find(&["conversations", "messages"]) {
        Some(turns) => turns.as_array().map(|t| t.iter().collect()).unwrap_or_default(),
        // As a table: each turn is a column.
        None => ["0", "1"].iter().filter_map(|name| row.find(&[name])).collect::<Vec<_>>(),
    };
    let text = |v: Option<&serde_json::Value>| v.and_then(|v| v.as_str()).map(String::from);
    let question = turns.first().and_then(|t| text(t.get("value")));
    let answer = turns.get(1).and_then(|t| text(t.get("ground_truth")?.get("value")));
    let (Some(question), Some(answer)) = (question, answer) else {
        let shown = json!(turns);
        return Err(row.wrong("conversations", &shown, "a question and a turn with a ground_truth"));
    };
    Ok(vec![("prompt", asked(&question)), ("answer", json!(answer))])
}

#[cfg(test)]
mod tests {
    use super::without_calculator;

    #[test]
    fn calculator_annotations_are_removed() {
        assert_eq!(without_calculator("a <<1+1=2>>2 b <<2*2=4>>4"), "a 2 b 4");
        assert_eq!(without_calculator("x << 3 and y"), "x << 3 and y");
    }
}

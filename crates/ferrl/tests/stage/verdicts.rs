//! Generative verifiers: trained on verdicts, asked for a probability, used as a reward.

use crate::help::{backend, fails, metrics, model, run, write};
use ferrl::recipe::Recipe;
use ferrl::reward::verdicts::{VerdictOptions, verdicts};
use ferrl::reward::{GenerativeVerifier, Judgement};
use ferrl::verify::Sample;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_kernels::DType;
use serde_json::{Value, json};
use std::path::Path;

const QUESTION: &str = " ok? ";

/// Single letters: those from a to m are right.
fn letters() -> Vec<(String, serde_json::Map<String, Value>)> {
    let row = |c: char| {
        let reward = u8::from(('a'..='m').contains(&c));
        let row = json!({ "prompt": "say: ", "completion": c.to_string(), "reward": reward });
        (format!("row {c}"), row.as_object().cloned().unwrap())
    };
    ('a'..='z').map(row).collect()
}

/// A verifier that learns verdicts, and a policy that learns from it.
fn pipeline(dir: &Path, options: &str) -> String {
    let judgement = Judgement { question: QUESTION.into(), ..Default::default() };
    let made = verdicts(&letters(), &VerdictOptions { judgement, threshold: 1.0, lambda: 0.1 }).unwrap();
    assert_eq!((made.each, made.correct), (13, 13));
    let rows: String = made.rows.iter().map(|r| format!("{r}\n")).collect();
    let (data, model) = (write(dir, "verdicts.jsonl", &rows), model(dir));
    let prompts = write(dir, "prompts.jsonl", "{\"prompt\": \"say: \"}\n");
    format!(
        "model.path = {model:?}\ndata.max_length = 32\ntrain.micro_batch_tokens = 1024\n\
         [[stage]]\nname = \"judge\"\nalgo = {{ name = \"mle\", aggregate = \"sequence\" }}\ndata.train = {data:?}\n\
         train = {{ steps = 60, batch = 39 }}\noptim = {{ lr = 5e-3, weight_decay = 0.0 }}\n\
         [[stage]]\nname = \"tune\"\nalgo = \"grpo\"\nmodel.path = {model:?}\ndata.train = {prompts:?}\n\
         reward = [{{ model = \"stage:judge\", options = {{ kind = \"generative\", question = {QUESTION:?}{options} }} }}]\n\
         train.steps = 2\noptim.lr = 1e-3\nrollout = {{ prompts = 2, samples = 4, max_new_tokens = 2 }}\n"
    )
}

#[test]
fn a_verifier_learns_verdicts_and_rewards_with_the_probability_of_yes() {
    let dir = tempfile::tempdir().unwrap();
    let text = pipeline(dir.path(), "");
    let runs = dir.path().join("runs");
    run(&runs, &text, false, 1000).unwrap();
    let tuned: Vec<_> = metrics(&runs).into_iter().filter(|r| r.stage == "tune").collect();
    assert_eq!(tuned.len(), 2);
    for record in &tuned {
        let part = record.get("rewards/verdict/mean").unwrap();
        assert!((0.0..=1.0).contains(&part) && record.get("reward").unwrap() == part);
    }
    let recipe = Recipe::parse(&text, "r.toml", "r", &[]).unwrap().stages[1].recipe.clone();
    let judge = runs.join("test/stages/0");
    let open = |more: Value| {
        let mut source = recipe.reward[0].clone();
        source.options.extend(more.as_object().cloned().unwrap());
        GenerativeVerifier::open(&judge, &source, &recipe, DType::F32, &backend()).unwrap()
    };
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let sample =
        |c: &'_ String| Sample { prompt: "say: ", completion: c.clone().leak(), ..Default::default() };
    let samples: Vec<Sample<'_>> = letters.iter().map(sample).collect();
    let direct = open(json!({})).verdicts(&samples, 0).unwrap();
    // By hand: the log-probabilities of the three tokens of "Yes".
    let tokenizer = Tokenizer::from_dir(&judge).unwrap();
    let engine = Model::load(backend(), &ModelDir::open(&judge).unwrap(), Options::default()).unwrap();
    let mut right = 0;
    for (letter, got) in letters.iter().zip(&direct) {
        let mut ids = tokenizer.encode_prompt(&format!("say: {letter}{QUESTION}")).unwrap();
        let from = ids.len();
        ids.extend(tokenizer.encode_text("Yes").unwrap());
        let n = ids.len();
        let logp = stats(&engine, &Batch::of([ids]), 1.0).unwrap().logp;
        let want: f64 = logp[from - 1..n - 1].iter().map(|l| *l as f64).sum();
        assert!((got - want.exp()).abs() < 1e-9, "{letter}: {got} against {}", want.exp());
        right += usize::from((*got > 0.5) == (letter.as_str() <= "m"));
    }
    assert!(right >= 22, "{right} of 26 verdicts: {direct:?}");
    // Both verdicts together have nearly all the probability after training.
    let normalised = open(json!({ "normalise": true })).verdicts(&samples, 0).unwrap();
    assert!(normalised.iter().zip(&direct).all(|(n, d)| n >= d && n - d < 0.2), "{normalised:?}");
    // With rationales: the mean over votes, the same for the same step, whatever else is asked.
    let votes = json!({ "votes": 3, "rationale": " ", "max_new_tokens": 3, "temperature": 1.0 });
    let judge = open(votes);
    let (all, first) = (judge.verdicts(&samples, 5).unwrap(), judge.verdicts(&samples[..2], 5).unwrap());
    assert_eq!(all[..2], first[..]);
    assert!(all.iter().all(|p| (0.0..=1.0).contains(p)) && all != judge.verdicts(&samples, 6).unwrap());
}

#[test]
fn questions_that_cannot_be_asked_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let prompts = write(dir.path(), "prompts.jsonl", "{\"prompt\": \"say: \"}\n");
    let recipe = |options: &str| {
        format!(
            "algo = \"grpo\"\ndata.train = {prompts:?}\ndata.max_length = 32\ntrain.steps = 1\n\
             reward = [{{ model = {model:?}, options = {{ {options} }} }}]\n"
        )
    };
    for (options, words) in [
        ("votes = 3", "a reward model has no options"),
        ("kind = \"generative\", voices = 3", "voices"),
        ("kind = \"generative\", yes = \"\"", "has no tokens"),
        ("kind = \"generative\", no = \"\u{1F600}\"", "reward.options.no"),
        ("kind = \"generative\", chat = true", "chat"),
    ] {
        let error = fails(&model, &recipe(options));
        assert!(error.contains(words), "{options}: {error}");
    }
}

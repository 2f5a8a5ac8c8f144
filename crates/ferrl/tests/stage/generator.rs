//! The pipeline asks a generator, not the local sampler: here one that completes prompts from a script.

use crate::help::{model, stage, weights, write};
use ferrl_engine::generate::{Completion, Event, GenerationRequest, Generator, Id, StopReason};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;

/// Completes sample `i` of a prompt with entry `i` of the script, one request a step, the youngest first.
struct Scripted {
    script: Vec<&'static str>,
    tokenizer: Arc<Tokenizer>,
    exact: bool,
    queued: Vec<(Id, GenerationRequest)>,
    events: VecDeque<Event>,
    submitted: u64,
}

impl Scripted {
    fn complete(&self, request: &GenerationRequest, version: u64) -> Completion {
        let text = self.script[request.stream[2] as usize];
        let mut ids = self.tokenizer.encode_text(text).unwrap();
        ids.push(self.tokenizer.eos()[0]);
        let n = ids.len();
        Completion {
            logp: vec![-1.0; n],
            sampled_logp: vec![-1.0; n],
            top: Vec::new(),
            versions: vec![version; n],
            shared: 0,
            stop: StopReason::Token(ids[n - 1]),
            ids,
        }
    }
}

impl Generator for Scripted {
    fn check(&self, request: &GenerationRequest) -> Result<()> {
        let known = (request.stream[2] as usize) < self.script.len();
        if known { Ok(()) } else { Err(Error::usage("the script is too short")) }
    }
    fn submit(&mut self, request: GenerationRequest) -> Result<Id> {
        self.check(&request)?;
        self.submitted += 1;
        self.queued.push((Id(self.submitted), request));
        Ok(Id(self.submitted))
    }
    fn step(&mut self, policy: &Model) -> Result<Vec<Event>> {
        if let Some((id, request)) = self.queued.pop() {
            let completion = self.complete(&request, policy.version);
            self.events.push_back(Event::Done { id, completion });
        }
        Ok(self.events.drain(..).collect())
    }
    fn cancel(&mut self, id: Id) -> Option<Completion> {
        let at = self.queued.iter().position(|(queued, _)| *queued == id)?;
        let (_, request) = self.queued.remove(at);
        Some(Completion { stop: StopReason::Cancelled, ..self.complete(&request, 0) })
    }
    fn is_exact(&self) -> bool {
        self.exact
    }
    fn put_back(&mut self, events: Vec<Event>) {
        events.into_iter().rev().for_each(|e| self.events.push_front(e));
    }
}

const RECIPE: &str = "algo = \"grpo\"\noptim.lr = 1e-2\ntrain = { steps = 2, micro_batch_tokens = 256 }\n\
     rollout = { prompts = 2, samples = 3, max_new_tokens = 8, cache_mib = 8 }\nreward = \"exact\"\n";

#[test]
fn a_step_of_grpo_learns_from_any_generator() {
    let dir = tempfile::tempdir().unwrap();
    let rows: String =
        ["1+1=", "4-2="].map(|q| format!("{{\"prompt\": {q:?}, \"answer\": \"2\"}}\n")).concat();
    let (model, data) = (model(dir.path()), write(dir.path(), "rows.jsonl", &rows));
    let with = |exact: bool| {
        let mut stage =
            stage(&model, &format!("{RECIPE}data = {{ train = {data:?}, max_length = 32 }}")).unwrap();
        let (script, tokenizer) = (vec!["2", "3", "17"], stage.tokenizer.clone());
        let (queued, events) = (Vec::new(), VecDeque::new());
        stage.generator = Some(Box::new(Scripted { script, tokenizer, exact, queued, events, submitted: 0 }));
        stage
    };
    let mut stage = with(false);
    let before = weights(&stage);
    let report = stage.step().unwrap();
    let texts: Vec<&str> = report.rollouts.iter().map(|r| r.completion.text.as_str()).collect();
    assert_eq!(texts, ["2", "3", "17", "2", "3", "17"], "in the order of prompts and samples");
    let rewards: Vec<Option<f64>> = report.rollouts.iter().map(|r| r.scores.reward).collect();
    assert_eq!(rewards[..3], [Some(1.0), Some(0.0), Some(0.0)]);
    assert!(report.rollouts[0].advantage > 0.0 && report.rollouts[1].advantage < 0.0);
    assert!(weights(&stage) != before, "learned");
    // Log-probabilities that differ from the trainer's are measured where they may, and refused where they may not.
    assert!(report.metrics.get("sampling/sampling_logp_difference/max").unwrap() > 0.1);
    let error = with(true).step().err().expect("the script's log-probabilities are made up").to_string();
    assert!(error.contains("log-probabilities differ"), "{error}");
}

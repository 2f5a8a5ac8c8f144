//! Generation programs: a Jinja template in which the model writes some of the text.
//!
//! `gen(name, stop, max_tokens)` completes everything rendered before it, `select(options)` takes the most probable of some
//! texts there. Both return the text, so a program may print it, assign it, branch and loop on it. A template is rendered
//! repeatedly, up to the first call without a result; all rows advance together, so that their calls share decode batches. Sampled
//! tokens are kept as long as the program prints them where they were sampled.

use crate::data::prompt::{columns, strict_environment};
use crate::rollout::Actor;
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, Stops};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};

const NAME: &str = "program";
/// Maximum number of calls per row, against endless loops.
const CALLS: usize = 1000;
/// Syntax of calls, for fixes.
const CALLED: &str = "text, and between {{ and }} columns, gen(\"name\", stop=\"\\n\", max_tokens=64) or select([\"yes\", \"no\"], \"name\")";

pub struct Program {
    environment: Environment<'static>,
    calls: Arc<Mutex<Calls>>,
}

/// Result of a program for one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// All of it, rendered.
    pub text: String,
    /// The text of each name; the last one for a repeated name.
    pub variables: Map<String, Value>,
    pub generated_tokens: usize,
    /// Prefix tokens found in the KV cache.
    pub shared_tokens: usize,
}

/// The calls of the row that is being rendered.
#[derive(Default)]
struct Calls {
    known: Vec<String>,
    at: usize,
    wanted: Option<ProgramCall>,
}

#[derive(Clone, Debug, PartialEq)]
struct ProgramCall {
    name: Option<String>,
    what: CallKind,
}

#[derive(Clone, Debug, PartialEq)]
enum CallKind {
    Gen { stop: Vec<String>, max_tokens: Option<usize>, temperature: Option<f32> },
    Select { options: Vec<String>, normalise: bool },
}

/// A row in progress.
struct ProgramRow<'r> {
    row: &'r Map<String, Value>,
    known: Vec<String>,
    variables: Map<String, Value>,
    /// The text that `ids` stand for.
    text: String,
    ids: Vec<u32>,
    generated: usize,
    shared: usize,
}

type Jinja<T> = std::result::Result<T, minijinja::Error>;

impl Program {
    /// Compiles a program.
    pub fn new(source: &str) -> Result<Self> {
        let calls: Arc<Mutex<Calls>> = Arc::default();
        let mut environment = strict_environment()?;
        let state = calls.clone();
        environment.add_function(
            "gen",
            move |name: Option<String>, stop: Option<minijinja::Value>, max: Option<usize>, more: Kwargs| {
                let call = gen_call(name, stop, max, &more)?;
                answer(&state, call)
            },
        );
        let state = calls.clone();
        environment.add_function(
            "select",
            move |options: Vec<String>, name: Option<String>, more: Kwargs| {
                let call = select_call(options, name, &more)?;
                answer(&state, call)
            },
        );
        ferrl_engine::chat::bounded(source)
            .map_err(|e| Error::usage(format!("cannot be used: {e}")).at(NAME))?;
        environment
            .add_template_owned(NAME, source.to_string())
            .map_err(|e| Error::usage(format!("does not compile: {e}")).at(NAME).fix(CALLED))?;
        Ok(Program { environment, calls })
    }

    /// Runs it for every row, whose columns are its variables. `params` are those of `gen` where it says nothing else.
    pub fn run(
        &self,
        actor: &mut Actor<'_>,
        rows: &[Map<String, Value>],
        params: &SamplingParams,
    ) -> Result<Vec<Finished>> {
        let mut running: Vec<ProgramRow<'_>> = rows.iter().map(ProgramRow::new).collect();
        let mut done: Vec<Option<Finished>> = rows.iter().map(|_| None).collect();
        while done.iter().any(Option::is_none) {
            let mut asked = Vec::new();
            for (i, row) in running.iter_mut().enumerate() {
                if done[i].is_some() {
                    continue;
                }
                let (text, call) = self.render(row).map_err(|e| e.at(format!("row {}", i + 1)))?;
                match call {
                    None => done[i] = Some(row.finished(text)),
                    Some(call) => {
                        row.reach(text, actor.tokenizer)?;
                        asked.push((i, call));
                    }
                }
            }
            complete(actor, &mut running, asked, params)?;
        }
        Ok(done.into_iter().flatten().collect())
    }

    /// The text up to the first call whose result is not known, and that call; none at the end.
    fn render(&self, row: &ProgramRow<'_>) -> Result<(String, Option<ProgramCall>)> {
        *lock(&self.calls) = Calls { known: row.known.clone(), ..Default::default() };
        let template = self.environment.get_template(NAME).map_err(|e| Error::usage(e.to_string()))?;
        let mut context = row.row.clone();
        context.extend(row.variables.clone());
        let mut out = Vec::new();
        let rendered = template.render_captured_to(columns(&context), &mut out).map(|_| ());
        let call = lock(&self.calls).wanted.take();
        let text = String::from_utf8_lossy(&out).into_owned();
        match (rendered, call) {
            (Ok(()), None) => Ok((text, None)),
            (_, Some(_)) if row.known.len() >= CALLS => {
                Err(Error::usage(format!("calls gen or select more than {CALLS} times")).at(NAME))
            }
            (_, Some(call)) => Ok((text, Some(call))),
            (Err(e), None) => {
                let fix = match e.kind() {
                    ErrorKind::UndefinedError => {
                        "every variable is a column of the row, or the name of an earlier gen or select"
                    }
                    _ => CALLED,
                };
                Err(Error::usage(format!("cannot be rendered: {e:#}{}", missing(&template, &context)))
                    .at(NAME)
                    .fix(fix))
            }
        }
    }
}

/// The variables of a program that are no columns of the row, for messages.
fn missing(template: &minijinja::Template<'_, '_>, context: &Map<String, Value>) -> String {
    let functions = ["gen", "select", "range", "dict", "namespace", "debug", "lipsum"];
    let all = template.undeclared_variables(false);
    let mut names: Vec<String> = all
        .into_iter()
        .filter(|name| !context.contains_key(name) && !functions.contains(&name.as_str()))
        .collect();
    names.sort();
    if names.is_empty() { String::new() } else { format!("; the row has no {}", names.join(", ")) }
}

/// The result of a call, where it is known; else the rendering ends here.
fn answer(calls: &Mutex<Calls>, call: ProgramCall) -> Jinja<String> {
    let mut calls = lock(calls);
    let at = calls.at;
    calls.at += 1;
    match calls.known.get(at).cloned() {
        Some(text) => Ok(text),
        None => {
            calls.wanted.get_or_insert(call);
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, "the model is asked"))
        }
    }
}

fn invalid(what: impl Into<String>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, what.into())
}

fn gen_call(
    name: Option<String>,
    stop: Option<minijinja::Value>,
    max: Option<usize>,
    more: &Kwargs,
) -> Jinja<ProgramCall> {
    let name = name.or(more.get("name")?);
    let stop = stop.or(more.get("stop")?).filter(|s| !s.is_undefined() && !s.is_none());
    let stop = match stop {
        None => Vec::new(),
        Some(one) if one.as_str().is_some() => vec![one.to_string()],
        Some(list) => list.try_iter()?.map(|s| s.to_string()).collect(),
    };
    let max_tokens: Option<usize> = max.or(more.get("max_tokens")?);
    let temperature: Option<f64> = more.get("temperature")?;
    more.assert_all_used()?;
    if max_tokens == Some(0) || stop.iter().any(String::is_empty) {
        return Err(invalid("gen: max_tokens is at least 1, and a stop is not empty"));
    }
    let temperature = temperature.map(|t| t as f32);
    Ok(ProgramCall { name, what: CallKind::Gen { stop, max_tokens, temperature } })
}

fn select_call(options: Vec<String>, name: Option<String>, more: &Kwargs) -> Jinja<ProgramCall> {
    let name = name.or(more.get("name")?);
    let normalise: Option<bool> = more.get("normalise")?;
    more.assert_all_used()?;
    if options.is_empty() || options.iter().any(String::is_empty) {
        return Err(invalid("select: one option at least, and none is empty"));
    }
    Ok(ProgramCall { name, what: CallKind::Select { options, normalise: normalise.unwrap_or(false) } })
}

/// Carries out the calls of some rows: samples all that are to be sampled in one batch.
fn complete(
    actor: &mut Actor<'_>,
    running: &mut [ProgramRow<'_>],
    asked: Vec<(usize, ProgramCall)>,
    params: &SamplingParams,
) -> Result<()> {
    let (mut requests, mut sampled) = (Vec::new(), Vec::new());
    for (i, call) in asked {
        let row = &mut running[i];
        match &call.what {
            CallKind::Select { options, normalise } => {
                let (text, ids) = select(actor.policy, actor.tokenizer, &row.ids, options, *normalise)?;
                row.wrote(call.name, text, ids);
            }
            CallKind::Gen { stop, max_tokens, temperature } => {
                let params = SamplingParams {
                    max_new_tokens: max_tokens.unwrap_or(params.max_new_tokens),
                    temperature: temperature.unwrap_or(params.temperature),
                    stop_strings: [stop.as_slice(), &params.stop_strings].concat(),
                    ..params.clone()
                };
                let stops = actor.stops.clone().with_strings(&params.stop_strings, false);
                let stream = [0x7072_6f67, i as u32, row.known.len() as u32];
                requests.push(GenerationRequest { prompt: row.ids.clone(), params, stream });
                sampled.push((i, call.name, stops));
            }
        }
    }
    let completions = actor.generator.generate(actor.policy, requests)?;
    for ((i, name, stops), completion) in sampled.into_iter().zip(completions) {
        running[i].generated += completion.ids.len();
        running[i].shared += completion.shared;
        let (text, ids) = written(actor.tokenizer, &stops, &completion)?;
        running[i].wrote(name, text, ids);
    }
    Ok(())
}

/// The text of a completion without its stop, and the sampled tokens that are this text; it is encoded where a token holds
/// both text and a part of the stop.
fn written(tokenizer: &Tokenizer, stops: &Stops, completion: &Completion) -> Result<(String, Vec<u32>)> {
    let text = stops.text(tokenizer, completion)?;
    for end in (0..=completion.ids.len()).rev() {
        let so_far = tokenizer.decode(&completion.ids[..end], true)?;
        if so_far == text && completion.ids[..end].iter().all(|&id| !tokenizer.is_special(id)) {
            return Ok((text, completion.ids[..end].to_vec()));
        }
        if so_far.len() < text.len() {
            break;
        }
    }
    let ids = if text.is_empty() { Vec::new() } else { tokenizer.encode_text(&text)? };
    Ok((text, ids))
}

/// The option with the largest log-probability behind a prefix, or the largest per token; of equal ones the first.
fn select(
    model: &Model,
    tokenizer: &Tokenizer,
    prefix: &[u32],
    options: &[String],
    normalise: bool,
) -> Result<(String, Vec<u32>)> {
    if prefix.is_empty() {
        return Err(Error::usage("select needs text before it").at(NAME));
    }
    let ids = options.iter().map(|o| tokenizer.encode_text(o)).collect::<Result<Vec<_>>>()?;
    let mut best: Option<(usize, f64)> = None;
    for (i, option) in ids.iter().enumerate() {
        let batch = Batch::of([[prefix, option.as_slice()].concat()]);
        // Entry `t` is the log-probability of token `t + 1`.
        let logp = stats(model, &batch, 1.0)?.logp;
        let own = &logp[prefix.len() - 1..prefix.len() - 1 + option.len()];
        let sum: f64 = own.iter().map(|&l| f64::from(l)).sum();
        let value = if normalise { sum / option.len() as f64 } else { sum };
        if best.is_none_or(|(_, top)| value > top) {
            best = Some((i, value));
        }
    }
    let chosen = best.map_or(0, |(i, _)| i);
    Ok((options[chosen].clone(), ids[chosen].clone()))
}

impl<'r> ProgramRow<'r> {
    fn new(row: &'r Map<String, Value>) -> Self {
        let (known, variables, text, ids) = Default::default();
        ProgramRow { row, known, variables, text, ids, generated: 0, shared: 0 }
    }

    /// The text has come so far: what is new is encoded behind the tokens there are.
    fn reach(&mut self, text: String, tokenizer: &Tokenizer) -> Result<()> {
        match text.strip_prefix(self.text.as_str()).filter(|_| !self.ids.is_empty()) {
            Some("") => {}
            Some(new) => self.ids.extend(tokenizer.encode_markup(new)?),
            None if text.is_empty() => {
                return Err(Error::usage("begins with a call of gen or select")
                    .at(NAME)
                    .fix("text before the first call: it is what the model completes"));
            }
            None => self.ids = tokenizer.encode_prompt(&text)?,
        }
        self.text = text;
        Ok(())
    }

    /// The model has written a text behind what there was.
    fn wrote(&mut self, name: Option<String>, text: String, ids: Vec<u32>) {
        self.ids.extend(ids);
        self.text += &text;
        if let Some(name) = name {
            self.variables.insert(name, json!(text));
        }
        self.known.push(text);
    }

    fn finished(&mut self, text: String) -> Finished {
        Finished {
            text,
            variables: std::mem::take(&mut self.variables),
            generated_tokens: self.generated,
            shared_tokens: self.shared,
        }
    }
}

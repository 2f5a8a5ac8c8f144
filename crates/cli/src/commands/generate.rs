//! `ferrl generate`: samples completions of prompts.

mod program;

use crate::data::{self, PlacedRow};
use crate::options::{ModelArgs, size};
use crate::output::{JsonlOutput, print_generated};
use crate::progress::ProgressLine;
use crate::sampling::SamplingArgs;
use crate::text::ModelText;
use ferrl_engine::Result;
use ferrl_engine::generate::{Completion, Event, GenerationRequest, Generator, Sampler, StopReason, Stops};
use ferrl_engine::model::Model;
use serde::Serialize;
use serde_json::{Map, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Generate completions
///
/// Each input row holds `ids`, `prompt` (text, or a list of messages), or `messages`, which go through the model's
/// chat template. --prompt is one user's message where the model has a chat template, and text to continue with
/// --raw or without one. Each output row holds `prompt_ids` and `completions`, a list of {ids, text, logprobs, stop}.
/// With --prompt alone the text is streamed.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt: a user message if the model has a chat template, otherwise text to continue
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["input", "program"], conflicts_with = "input")]
    prompt: Option<String>,
    /// Do not apply the chat template to --prompt
    #[arg(long, conflicts_with = "input")]
    raw: bool,
    /// JSON lines to continue; - is standard input
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Generation program: a Jinja template over the columns of --input, with gen(name, stop, max_tokens) and
    /// select(options, name); rows written hold `text` and `variables`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "raw", "logprobs", "n"])]
    program: Option<PathBuf>,
    /// JSON lines to write, in the order of the input; - is standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Completions per prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = size::<65536>)]
    n: usize,
    /// Write the log-probability of every token (before penalties and truncation)
    #[arg(long)]
    logprobs: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Serialize)]
struct PromptCompletions<'a> {
    prompt_ids: &'a [u32],
    completions: Vec<WrittenRow>,
}

#[derive(Serialize)]
struct WrittenRow {
    ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<f32>>,
    stop: &'static str,
}

pub fn run(args: &Args) -> Result<()> {
    let dir = args.model.open_lm()?;
    let text = ModelText::new(&dir);
    if let Some(path) = &args.program {
        return program::run(args, path, (&dir, &text), &args.sampling.stops(&text)?);
    }
    let rows = match (&args.prompt, &args.input) {
        (Some(prompt), _) => {
            let chat = !args.raw && text.has_tokenizer() && text.template().is_ok();
            let messages = || json!([{ "role": "user", "content": prompt }]);
            let prompt = if chat { messages() } else { json!(prompt) };
            let fields = Map::from_iter([("prompt".to_string(), prompt)]);
            vec![PlacedRow { place: "--prompt".into(), fields }]
        }
        (None, Some(path)) => data::rows(path)?,
        (None, None) => unreachable!("clap asks for one of them"),
    };
    if !args.sampling.stop.is_empty() {
        text.tokenizer()?;
    }
    let stops = args.sampling.stops(&text)?;
    let mut requests = Vec::with_capacity(rows.len());
    for (index, row) in rows.into_iter().enumerate() {
        let prompt = text.prompted(&row)?;
        let params = args.sampling.params(&text, &stops, prompt.len())?;
        text.fits(&row.place, &prompt, params.max_new_tokens)?;
        requests.push(GenerationRequest { prompt, params, stream: [0, index as u32, 0] });
    }
    let plain = args.prompt.is_some() && args.output.is_none() && !args.logprobs;
    let output = args.output.as_deref().unwrap_or(Path::new("-"));
    let output = if plain {
        None
    } else {
        Some(JsonlOutput::beside(output, &args.input.iter().map(PathBuf::as_path).collect::<Vec<_>>())?)
    };
    let length = |r: &GenerationRequest| r.prompt.len() + r.params.max_new_tokens;
    let lengths: Vec<usize> = requests.iter().flat_map(|r| std::iter::repeat_n(length(r), args.n)).collect();
    let model = args.model.load(&dir, lengths.iter().copied().max().unwrap_or(0))?;
    let sampler = args.sampling.sampler(&model, &text, &lengths)?;
    let job = GenerateJob { args, text: &text, stops: &stops, model: &model, requests: &requests };
    match output {
        Some(output) => job.write(sampler, output),
        None if args.n == 1 => job.stream(sampler),
        None => job.list(sampler),
    }
}

struct GenerateJob<'a> {
    args: &'a Args,
    text: &'a ModelText,
    stops: &'a Stops,
    model: &'a Model,
    requests: &'a [GenerationRequest],
}

impl GenerateJob<'_> {
    /// Samples all completions; each row is passed on, in order, as soon as it is complete.
    fn complete(
        &self,
        mut sampler: Sampler,
        mut row: impl FnMut(usize, Vec<Completion>) -> Result<()>,
    ) -> Result<()> {
        let n = self.args.n;
        let most: usize = self.requests.iter().map(|r| r.params.max_new_tokens * n).sum();
        let progress = ProgressLine::new("generating", most as u64, "tokens");
        let mut place = HashMap::new();
        for (i, request) in self.requests.iter().enumerate() {
            for sample in 0..n {
                let stream = [0, i as u32, sample as u32];
                let id = sampler.submit(GenerationRequest { stream, ..request.clone() })?;
                place.insert(id, (i, sample));
            }
        }
        let mut waiting: HashMap<usize, Vec<Option<Completion>>> = HashMap::new();
        let mut next = 0;
        while next < self.requests.len() {
            for event in sampler.step(self.model)? {
                let (id, completion) = match event {
                    Event::Token { .. } => {
                        progress.add(1);
                        continue;
                    }
                    Event::Done { id, completion } => (id, completion),
                };
                if let Some((i, sample)) = place.remove(&id) {
                    // A completion that ends early advances the bar by its unused tokens.
                    progress.add((self.requests[i].params.max_new_tokens - completion.ids.len()) as u64);
                    waiting.entry(i).or_insert_with(|| vec![None; n])[sample] = Some(completion);
                }
            }
            while waiting.get(&next).is_some_and(|row| row.iter().all(Option::is_some)) {
                let done = waiting.remove(&next).unwrap_or_default();
                row(next, done.into_iter().flatten().collect())?;
                next += 1;
            }
        }
        Ok(())
    }

    fn write(&self, sampler: Sampler, mut output: JsonlOutput) -> Result<()> {
        self.complete(sampler, |i, completions| {
            let completions: Result<Vec<WrittenRow>> =
                completions.into_iter().map(|c| self.written(c)).collect();
            output.row(&PromptCompletions { prompt_ids: &self.requests[i].prompt, completions: completions? })
        })?;
        output.finish()
    }

    fn list(&self, sampler: Sampler) -> Result<()> {
        self.complete(sampler, |_, completions| {
            for (k, c) in completions.into_iter().enumerate() {
                let text = self.written(c)?.text.unwrap_or_default();
                print_generated(&format!("[{}] {text}\n", k + 1))?;
            }
            Ok(())
        })
    }

    /// Streams one completion, holding back text that may become a stop string.
    fn stream(&self, mut sampler: Sampler) -> Result<()> {
        let mut reader = self.stops.stream(self.text.tokenizer()?);
        let mut stop = None;
        sampler.submit(self.requests[0].clone())?;
        while stop.is_none() {
            for event in sampler.step(self.model)? {
                match event {
                    Event::Token { token, .. } => print_generated(&reader.push(token)?)?,
                    Event::Done { completion, .. } => stop = Some(completion.stop),
                }
            }
        }
        print_generated(&format!("{}\n", reader.finish(stop.unwrap_or(StopReason::Cancelled))?))
    }

    fn written(&self, c: Completion) -> Result<WrittenRow> {
        let stop = match c.stop {
            StopReason::Token(_) => "eos",
            StopReason::String(_) => "string",
            StopReason::Length => "length",
            StopReason::Cancelled => "cancelled",
        };
        let text = match self.text.has_tokenizer() {
            true => Some(self.stops.text(self.text.tokenizer()?, &c)?),
            false => None,
        };
        Ok(WrittenRow { text, logprobs: self.args.logprobs.then_some(c.logp), ids: c.ids, stop })
    }
}

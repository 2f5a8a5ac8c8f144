//! `ferrl chat`: talk with a model in the terminal.

use crate::options::{ModelArgs, at_least_one};
use crate::output::{on_interrupt, print, print_generated, visible};
use crate::sampling::SamplingArgs;
use crate::text::ModelText;
use ferrl_engine::generate::{Event, GenerationRequest, Generator, Sampler, StopReason};
use ferrl_engine::model::Model;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const COMMANDS: [&str; 4] = ["/reset", "/quit", "/exit", "/help"];
const HELP: &str = "/reset starts a new conversation; /quit or Ctrl-D exits; Ctrl-C stops a reply\n";

/// Talk with a model in the terminal
///
/// Ctrl-C stops a reply; a second one, Ctrl-D or /quit exits. /reset starts a new conversation.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum length of the conversation in tokens [default: the model's context, up to 4096]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    context: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// What an interrupt means.
const IDLE: u8 = 0;
const REPLYING: u8 = 1;
const STOPPED: u8 = 2;

pub fn run(args: &Args) -> Result<()> {
    let dir = args.model.open_lm()?;
    let text = ModelText::new(&dir);
    text.tokenizer()?;
    text.template().map_err(|e| match e.to_string().contains("has no chat template") {
        true => e.fix("ferrl generate --model DIR --prompt TEXT continues plain text; a chat needs an instruction-tuned model"),
        false => e,
    })?;
    let context = args.context.unwrap_or(dir.config.max_positions.min(4096));
    let model = args.model.load(&dir, context)?;
    let sampler = args.sampling.sampler(&model, &text, &[context])?;
    let state = Arc::new(AtomicU8::new(IDLE));
    let seen = state.clone();
    on_interrupt(move || {
        // Between replies, or while one is already being stopped, an interrupt exits.
        if seen.compare_exchange(REPLYING, STOPPED, Ordering::AcqRel, Ordering::Acquire).is_err() {
            eprintln!();
            crate::output::exit(0);
        }
    });
    let mut chat = ChatSession {
        args,
        text: &text,
        model: &model,
        sampler,
        context,
        turn: 0,
        state,
        messages: Vec::new(),
    };
    chat.reset();
    chat.converse()
}

struct ChatSession<'a> {
    args: &'a Args,
    text: &'a ModelText,
    model: &'a Model,
    sampler: Sampler,
    context: usize,
    turn: u32,
    state: Arc<AtomicU8>,
    messages: Vec<Value>,
}

impl ChatSession<'_> {
    fn reset(&mut self) {
        self.messages = self.args.system.iter().map(|s| json!({"role": "system", "content": s})).collect();
    }

    fn converse(&mut self) -> Result<()> {
        let terminal = std::io::stdin().is_terminal();
        if terminal {
            print(HELP)?;
        }
        loop {
            if terminal {
                print("> ")?;
            }
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            match read.map_err(|e| Error::data(format!("cannot read: {e}")).at("standard input"))? {
                0 => break,
                _ => line.truncate(line.trim_end().len()),
            }
            match line.trim() {
                "" => {}
                "/quit" | "/exit" => break,
                "/reset" => self.reset(),
                "/help" => print(HELP)?,
                other if other.starts_with('/') => {
                    let near = nearest(other, COMMANDS).unwrap_or("/help");
                    eprintln!("no command {}; did you mean {near}?", visible(other));
                }
                _ => self.answer(line)?,
            }
        }
        if terminal { print("\n") } else { Ok(()) }
    }

    /// One turn; an error is printed, and the conversation continues.
    fn answer(&mut self, line: String) -> Result<()> {
        let before = self.messages.len();
        self.messages.push(json!({"role": "user", "content": line}));
        self.state.store(REPLYING, Ordering::Release);
        let reply = self.reply();
        self.state.store(IDLE, Ordering::Release);
        match reply {
            Ok(reply) => self.messages.push(json!({"role": "assistant", "content": reply})),
            Err(e) if std::io::stdin().is_terminal() => {
                self.messages.truncate(before);
                eprintln!("error: {}", visible(&e.to_string()));
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn reply(&mut self) -> Result<String> {
        let prompt = self.text.chat(&self.messages, None, true)?;
        let room = (self.context + 1).saturating_sub(prompt.len());
        if room == 0 {
            return Err(Error::usage(format!(
                "the conversation has {} tokens, the context has room for {}",
                prompt.len(),
                self.context
            ))
            .fix("/reset starts a new one; --context N enlarges the context"));
        }
        let stops = self.args.sampling.stops(self.text)?;
        let mut params = self.args.sampling.params(self.text, &stops, prompt.len())?;
        params.max_new_tokens = params.max_new_tokens.min(room);
        self.turn += 1;
        let mut reader = stops.stream(self.text.tokenizer()?);
        let id = self.sampler.submit(GenerationRequest { prompt, params, stream: [self.turn, 0, 0] })?;
        let (mut reply, mut stop) = (String::new(), None);
        while stop.is_none() {
            for event in self.sampler.step(self.model)? {
                match event {
                    Event::Token { token, .. } => {
                        let piece = reader.push(token)?;
                        print_generated(&piece)?;
                        reply += &piece;
                    }
                    Event::Done { completion, .. } => stop = Some(completion.stop),
                }
            }
            if self.state.load(Ordering::Acquire) == STOPPED {
                self.sampler.cancel(id);
                stop = Some(StopReason::Cancelled);
            }
        }
        let rest = reader.finish(stop.unwrap_or(StopReason::Cancelled))?;
        print_generated(&format!("{rest}\n"))?;
        Ok(reply + &rest)
    }
}

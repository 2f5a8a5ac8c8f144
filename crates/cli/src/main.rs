//! The `ferrl` command: parses flags, runs a command, reports an error with its fix and exit code.

#![forbid(unsafe_code)]

#[macro_use]
mod console;

mod commands;
mod data;
mod local_ranks;
mod machine;
mod options;
mod output;
mod progress;
mod sampling;
mod terminal;
mod text;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use ferrl_engine::{Class, Error};
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes a file at its size limit (`ulimit -f`) an error of the write, like a full disk, instead of a fatal signal, and keeps a
/// hangup ignored that `nohup` ignores.
#[cfg(unix)]
fn block_signals() {
    use nix::sys::signal::{SigSet, Signal};
    let mut set = SigSet::empty();
    set.add(Signal::SIGXFSZ);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    if ignored >> (Signal::SIGHUP as u32 - 1) & 1 == 1 {
        set.add(Signal::SIGHUP);
    }
    let _ = set.thread_block(); // inherited by all threads
}

#[cfg(not(unix))]
fn block_signals() {}

/// Exit code of a panic.
const BUG: i32 = 101;

/// Post-training and reinforcement learning for language models.
#[derive(Parser)]
#[command(name = "ferrl", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(commands::train::Args),
    Launch(commands::launch::Args),
    Eval(Box<commands::eval::Args>),
    Plan(commands::plan::Args),
    Data(commands::data::Args),
    Report(commands::report::Args),
    Analyze(commands::analyze::Args),
    Export(commands::export::Args),
    Sync(commands::sync::Args),
    Algorithms(commands::algorithms::Args),
    Recipe(commands::recipe::Args),
    Generate(Box<commands::generate::Args>),
    Chat(commands::chat::Args),
    Score(commands::score::Args),
    Search(Box<commands::search::Args>),
    Verify(commands::verify::Args),
    Env(commands::env::Args),
    Steps(Box<commands::steps::Args>),
    Credit(commands::credit::Args),
    Init(Box<commands::init::Args>),
    Tokenizer(commands::tokenizer::Args),
    Bench(Box<commands::bench::Args>),
    Doctor(commands::doctor::Args),
    Completions(commands::shell::CompletionsArgs),
    Man(commands::shell::ManArgs),
}

fn main() -> ExitCode {
    ferrl::sandbox::init(); // first: this process may be a helper of the sandbox
    LazyLock::force(&machine::START);
    install_panic_hook();
    block_signals();
    let command = negative_numbers_are_values(Cli::command());
    let matches = command.try_get_matches().unwrap_or_else(|e| misread(e));
    let parsed = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    // A panic of a run arrives here after the run is saved; the hook has reported it.
    let run = || output::listen().and_then(|()| dispatch(parsed.command));
    let result = std::panic::catch_unwind(AssertUnwindSafe(run));
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(e)) => ExitCode::from(report(e)),
        Err(_) => output::exit(BUG),
    }
}

/// Some commands take the model or the input as a word of its own, others by a flag: these name it.
fn with_flag_tip(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let flag = [("--model <DIR>", "--model"), ("--input <FILE>", "--input")];
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && !word.starts_with('-')
        && let Some((_, flag)) = flag.into_iter().find(|(shown, _)| usage.contains(shown))
    {
        let tip = format!("it is given by a flag: {flag} {word}");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Prints an error with its fix; its exit code.
pub(crate) fn report(e: Error) -> u8 {
    let e = ferrl::fixes::worded(e);
    eprintln!("error: {}", output::visible(&ferrl::secrets::redact(&e.to_string())));
    exit_code(e.class)
}

pub(crate) fn exit_code(class: Class) -> u8 {
    match class {
        Class::Usage => 2,
        Class::Data => 3,
        Class::Model => 4,
        Class::Resource => 5,
        Class::Device => 6,
        Class::Rank => 7,
        Class::Numerics => 8,
        Class::Interrupted => 130,
    }
}

fn dispatch(command: Command) -> ferrl_engine::Result<()> {
    match command {
        Command::Train(args) => commands::train::run(&args),
        Command::Launch(args) => commands::launch::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Analyze(args) => commands::analyze::run(&args),
        Command::Export(args) => commands::export::run(&args),
        Command::Sync(args) => commands::sync::run(&args),
        Command::Algorithms(args) => commands::algorithms::run(&args),
        Command::Recipe(args) => commands::recipe::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        Command::Score(args) => commands::score::run(&args),
        Command::Search(args) => commands::search::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Env(args) => commands::env::run(&args),
        Command::Steps(args) => commands::steps::run(&args),
        Command::Credit(args) => commands::credit::run(&args),
        Command::Init(args) => commands::init::run(&args),
        Command::Tokenizer(args) => commands::tokenizer::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Completions(args) => commands::shell::completions(&args, Cli::command()),
        Command::Man(args) => commands::shell::man(&args, Cli::command()),
    }
}

/// Reports words that are no command line of Ferrl's, but mean something: a setting as a flag, an algorithm as a command.
fn misread(error: clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let changes = ["train", "plan"].contains(&words.get(1).map_or("", String::as_str));
    let said = match (error.kind(), text(ContextKind::InvalidArg), text(ContextKind::InvalidSubcommand)) {
        (ErrorKind::UnknownArgument, Some(flag), _)
            if changes && text(ContextKind::SuggestedArg).is_none() =>
        {
            let at = words.iter().position(|w| w.split('=').next() == Some(flag));
            let next = at
                .and_then(|i| words[i].split_once('=').map(|w| w.1).or(words.get(i + 1).map(String::as_str)));
            let value =
                next.filter(|value| !value.starts_with('-') && !value.contains('=')).unwrap_or("VALUE");
            let fix = ferrl::recipe::flag(flag.trim_start_matches('-'), value);
            Error::usage(format!("unexpected argument {flag}")).fix(fix)
        }
        (ErrorKind::InvalidSubcommand, _, Some(name)) if ferrl::algo::find(name).is_ok() => {
            let fix = format!(
                "`ferrl recipe new {name}` writes a recipe, `ferrl train {name}.toml` trains with it"
            );
            Error::usage(format!("{name} is an algorithm, not a command")).fix(fix)
        }
        _ => with_flag_tip(error).exit(),
    };
    std::process::exit(report(said).into())
}

/// Makes `--temperature -1` a wrong number, not an unknown flag, for all subcommands.
fn negative_numbers_are_values(command: clap::Command) -> clap::Command {
    command.mut_args(|a| a.allow_negative_numbers(true)).mut_subcommands(negative_numbers_are_values)
}

/// A panic is a bug of Ferrl: reports it in two lines and exits, whatever the thread. A panic in a run unwinds instead, to the code
/// that saves the run.
fn install_panic_hook() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let backtrace = std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0");
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if backtrace {
            usual(info);
        }
        let payload = info.payload();
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic");
        let place = info.location().map_or(String::new(), |l| format!(" ({}:{})", l.file(), l.line()));
        // Joining a thread that panicked panics in turn.
        if !TOLD.swap(true, Ordering::SeqCst) {
            let words = output::visible(words);
            eprintln!("error: this is a bug in ferrl, not a mistake of yours: {words}{place}");
            eprintln!("  fix: please report it with the command you ran; RUST_BACKTRACE=1 shows more");
        }
        if !ferrl::runner::guarded() {
            std::process::exit(BUG);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::any::TypeId;

    /// Every flag of every command that takes a number, as `command sub --flag`.
    fn numeric(command: &clap::Command, at: &[String], found: &mut Vec<Vec<String>>) {
        let numbers = [TypeId::of::<usize>(), TypeId::of::<u64>(), TypeId::of::<f32>(), TypeId::of::<f64>()];
        for arg in
            command.get_arguments().filter(|a| numbers.iter().any(|n| a.get_value_parser().type_id() == *n))
        {
            let flag = format!("--{}", arg.get_long().expect("numbers are flags"));
            found.push([at, &[flag]].concat());
        }
        for sub in command.get_subcommands() {
            numeric(sub, &[at, &[sub.get_name().to_string()]].concat(), found);
        }
    }

    #[test]
    fn every_number_on_the_command_line_is_bounded() {
        let mut flags = Vec::new();
        numeric(&Cli::command(), &["ferrl".to_string()], &mut flags);
        assert!(flags.len() > 50, "{}", flags.len());
        for words in flags {
            let seed = words.last().is_some_and(|w| w == "--seed"); // any number is one
            for value in ["9223372036854775807", "1000000000000000000", "1e300", "nan", "inf", "-1", "x"] {
                let given = words.iter().map(String::as_str).chain([value]);
                let error = match negative_numbers_are_values(Cli::command()).try_get_matches_from(given) {
                    Ok(_) if seed => continue,
                    Ok(_) => panic!("{words:?} {value} is accepted"),
                    Err(e) => e,
                };
                if !seed || value == "x" {
                    use clap::error::ErrorKind::{InvalidValue, ValueValidation};
                    let kind = error.kind();
                    assert!(matches!(kind, ValueValidation | InvalidValue), "{words:?} {value}: {kind:?}");
                    let said = error.to_string();
                    let flag = words.last().map_or("", String::as_str);
                    assert!(said.contains(flag) && said.contains(value), "{words:?} {value}: {said}");
                }
            }
        }
    }
}

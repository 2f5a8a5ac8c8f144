//! `ferrl completions` and `ferrl man`: shell completions and manual pages.

use crate::output::{print, unwritable};
use clap::{Arg, Command, Parser};
use clap_complete::Shell;
use ferrl_engine::Result;
use ferrl_engine::files::undisturbed;
use std::fmt::Write;
use std::path::PathBuf;

/// Print the completion script of a shell
///
/// For example `ferrl completions bash > ~/.local/share/bash-completion/completions/ferrl`.
#[derive(Parser)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Write the manual pages of all commands
///
/// `man DIR/ferrl-train.1` reads one.
#[derive(Parser)]
pub struct ManArgs {
    /// The folder to write them to
    #[arg(long, value_name = "DIR", required_unless_present = "markdown")]
    out: Option<PathBuf>,
    /// Print the manual's page on all commands instead
    #[arg(long, conflicts_with = "out")]
    markdown: bool,
}

pub fn completions(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "ferrl", &mut text);
    print(&String::from_utf8_lossy(&text))
}

pub fn man(args: &ManArgs, command: Command) -> Result<()> {
    let Some(folder) = &args.out else { return print(&markdown(command)) };
    let _held = undisturbed();
    std::fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
    clap_mangen::generate_to(command, folder).map_err(|e| unwritable(folder, &e))
}

/// Every command with its arguments, as a page of the manual.
fn markdown(mut command: Command) -> String {
    command.build();
    let mut page = String::from("# Every command\n\nThe same as `ferrl COMMAND --help`.\n");
    describe(&command, "ferrl", &mut page);
    page
}

fn describe(command: &Command, name: &str, page: &mut String) {
    for sub in command.get_subcommands().filter(|s| s.get_name() != "help") {
        let name = format!("{name} {}", sub.get_name());
        let about = sub.get_long_about().or(sub.get_about()).map(ToString::to_string).unwrap_or_default();
        let usage = sub.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let _ = write!(page, "\n## `{name}`\n\n{about}\n\n```text\n{usage}\n```\n");
        let shown = |a: &&Arg| !a.is_hide_set() && !["help", "version"].contains(&a.get_id().as_str());
        let arguments: Vec<String> = sub.get_arguments().filter(shown).map(row).collect();
        if !arguments.is_empty() {
            let _ = write!(page, "\n| argument | meaning |\n|---|---|\n{}", arguments.concat());
        }
        describe(sub, &name, page);
    }
}

fn row(arg: &Arg) -> String {
    let value = arg.get_value_names().map(|names| names.join(" ")).unwrap_or_default();
    let value = if arg.get_action().takes_values() { value } else { String::new() };
    let name = match arg.get_long() {
        Some(long) => format!("--{long} {value}"),
        None => value,
    };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let usual: Vec<String> =
        arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let usual = match arg.is_hide_default_value_set() || usual.is_empty() || !arg.get_action().takes_values()
    {
        true => String::new(),
        false => format!(" [{}]", usual.join(", ")),
    };
    format!(
        "| `{}` | {}{usual} |\n",
        name.trim().replace('|', "\\|"),
        help.replace('\n', " ").replace('|', "\\|")
    )
}

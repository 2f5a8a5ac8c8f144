//! `ferrl env`: what can be learned from without a file.

use crate::output::print;
use clap::Subcommand;
use ferrl::recipe::{tasks_json, tasks_text};
use ferrl_engine::Result;

/// List the generated tasks
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the generated tasks with their settings (`data.task`) and defaults
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match args.command {
        Command::List { json: true } => print(&format!("{}\n", tasks_json())),
        Command::List { json: false } => print(&tasks_text()),
    }
}

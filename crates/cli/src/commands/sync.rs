//! `ferrl sync`: writes a run in the format of an experiment tracker.

use crate::output::print;
use clap::{Parser, ValueEnum};
use ferrl::run::wandb::{Destination, write};
use ferrl_engine::Result;
use std::path::PathBuf;

/// Write a run in the format of an experiment tracker
///
/// `--to wandb` writes an offline run of Weights & Biases into RUN/wandb and prints its path; `wandb sync PATH` uploads it.
/// Ferrl sends nothing. A second call replaces the files of the first and keeps the run's id.
#[derive(Parser)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Experiment tracker
    #[arg(long, value_enum)]
    to: Tracker,
    /// Project that the run belongs to
    #[arg(long, default_value = "ferrl")]
    project: String,
    /// User or team [default: the account's own]
    #[arg(long)]
    entity: Option<String>,
    /// Name of the run [default: name of the run folder]
    #[arg(long)]
    name: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Tracker {
    /// Weights & Biases
    Wandb,
}

pub fn run(args: &Args) -> Result<()> {
    let to =
        Destination { project: args.project.clone(), entity: args.entity.clone(), name: args.name.clone() };
    let dir = match args.to {
        Tracker::Wandb => write(&args.run, &to)?,
    };
    print(&format!("{}\n", dir.display()))
}

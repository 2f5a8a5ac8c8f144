//! `ferrl bench decode`: many sequences at once.
use ferrl_engine::{Error, Result};
/// stub
#[derive(clap::Args)]
pub struct Args {}
/// stub
pub fn run(_args: &Args) -> Result<()> {
    Err(Error::usage("not there yet"))
}

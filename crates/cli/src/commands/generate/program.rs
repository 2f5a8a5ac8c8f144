//! `ferrl generate --program`: a template in which the model writes some of the text.

use super::Args;
use crate::data::{self, PlacedRow};
use crate::output::{JsonlOutput, print_generated};
use crate::text::ModelText;
use ferrl::episode::Environments;
use ferrl::program::{Finished, Program};
use ferrl::rollout::Actor;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::Stops;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Maximum tokens of a program's text that the cache is sized for, unless the model has no more positions.
const ROOM: usize = 4096;

/// Runs a program for every input row, or once.
pub fn run(args: &Args, path: &Path, (dir, text): (&ModelDir, &ModelText), stops: &Stops) -> Result<()> {
    let failed = |e: std::io::Error| Error::usage(format!("cannot read: {e}")).at(path.display());
    let source = std::fs::read_to_string(path).map_err(failed)?;
    let program = Program::new(&source).map_err(|e| e.at(path.display()))?;
    let rows: Vec<PlacedRow> = args.input.as_deref().map(data::rows).transpose()?.unwrap_or_default();
    let rows: Vec<Map<String, Value>> = match args.input {
        Some(_) => rows.into_iter().map(|r| r.fields).collect(),
        None => vec![Map::new()],
    };
    let params = args.sampling.params(text, stops, 1)?;
    let inputs: Vec<&Path> = args.input.iter().map(PathBuf::as_path).chain([path]).collect();
    let output = match (&args.output, &args.input) {
        (None, None) => None,
        (out, _) => Some(JsonlOutput::beside(out.as_deref().unwrap_or(Path::new("-")), &inputs)?),
    };
    // As without a program, a text may be longer than the model was made for where positions are not learned.
    let context = dir.config.max_positions_hard().map_or(ROOM, |most| ROOM.min(most));
    let model = args.model.load(dir, context)?;
    let sampler = args.sampling.sampler(&model, text, &vec![context; rows.len()])?;
    let mut sampler = sampler.with_tokenizer(text.tokenizer()?.clone().into());
    let mut actor = Actor {
        generator: &mut sampler,
        policy: &model,
        tokenizer: text.tokenizer()?,
        stops,
        environments: &Environments::default(),
        ranks: Ranks::ALONE,
    };
    let finished = program.run(&mut actor, &rows, &params).map_err(|e| e.at(path.display()))?;
    let Some(mut output) = output else {
        let texts: String = finished.into_iter().map(|f| f.text).collect();
        return print_generated(&format!("{}\n", texts.trim_end_matches('\n')));
    };
    for Finished { text, variables, generated_tokens, shared_tokens } in finished {
        output.row(&json!({
            "text": text, "variables": variables, "generated_tokens": generated_tokens, "shared_tokens": shared_tokens,
        }))?;
    }
    output.finish()
}

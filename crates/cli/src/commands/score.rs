//! `ferrl score`: log-probabilities and scores of given tokens.

use crate::data;
use crate::machine::ensure_memory_of;
use crate::options::{ModelArgs, at_least_one, scale};
use crate::output::JsonlOutput;
use crate::progress::ProgressLine;
use crate::text::ModelText;
use ferrl_engine::model::Model;
use ferrl_engine::train::{Batch, plan, stats};
use ferrl_engine::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// Log-probabilities and entropies of given tokens, or a reward model's scores
///
/// Each input row holds `ids` (taken as they are), `text`, `prompt` and `completion`, or `messages`.
/// Each output row holds its `ids`, and for every token but the first its log-probability (`logprobs`) and the
/// entropy of its distribution (`entropy`), both in nats. A reward model writes `score`, its value at the last token,
/// which for `completion` and `messages` is the stop token.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON lines to score; - is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// JSON lines to write, in the order of the input; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Maximum number of tokens of a batch; changes memory and speed, not the results
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    batch_tokens: usize,
    /// Temperature: the logits are divided by it
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = scale)]
    temperature: f32,
}

#[derive(Serialize)]
struct ScoredRow<'a> {
    ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [f32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entropy: Option<&'a [f32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
}

pub fn run(args: &Args) -> Result<()> {
    let dir = args.model.open()?;
    let text = ModelText::new(&dir);
    // All rows are read before the first is scored, so that a mistake in the last one is reported at once.
    let rows = data::rows(&args.input)?;
    let mut places = Vec::with_capacity(rows.len());
    let mut sequences = Vec::with_capacity(rows.len());
    for row in rows {
        sequences.push(text.scored(&row, !dir.config.head.has_lm())?);
        places.push(row.place);
    }
    let mut output = JsonlOutput::beside(&args.output, &[&args.input])?;
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let model = args.model.load(&dir, longest)?;
    let progress = ProgressLine::new("scoring", lengths.iter().sum::<usize>() as u64, "tokens");
    let cuts = plan(&lengths, args.batch_tokens.max(longest))?;
    let most = cuts.iter().map(|c| lengths[c.clone()].iter().sum::<usize>()).max().unwrap_or(0);
    let c = &model.config;
    let experts = c.experts.as_ref().map_or(0, |e| e.per_token * (c.expert_up_width(e) + c.hidden));
    let network = (c.up_width() + c.ffn).max(experts);
    let row = 4 * (4 * c.hidden + c.qkv_width() + c.attention_width() + network);
    let fix = "a smaller --batch-tokens, or shorter rows";
    ensure_memory_of(&*model.backend, "a batch", (most * row) as u64, fix)?;
    for cut in cuts {
        let batch = Batch::of(sequences[cut.clone()].iter().cloned());
        score(&model, &batch, args.temperature, &places[cut], &mut output)?;
        progress.add(batch.tokens() as u64);
    }
    output.finish()
}

fn score(
    model: &Model,
    batch: &Batch,
    temperature: f32,
    places: &[String],
    out: &mut JsonlOutput,
) -> Result<()> {
    let stats = stats(model, batch, temperature)?;
    let head = model.config.head;
    for ((sequence, rows), place) in batch.sequences.iter().zip(batch.segments().iter()).zip(places) {
        let targets = rows.start..rows.end - 1;
        let row = ScoredRow {
            ids: &sequence.ids,
            logprobs: head.has_lm().then(|| &stats.logp[targets.clone()]),
            entropy: head.has_lm().then(|| &stats.entropy[targets.clone()]),
            score: head.has_value().then(|| stats.value[rows.end - 1]),
        };
        let columns = [row.logprobs, row.entropy].into_iter().flatten().flatten();
        if columns.chain(&row.score).any(|x| !x.is_finite()) {
            return Err(Error::numerics("the model's output is not finite")
                .at(place)
                .fix("the parameters contain NaN or infinity, or overflow: use an earlier checkpoint"));
        }
        out.row(&row)?;
    }
    Ok(())
}

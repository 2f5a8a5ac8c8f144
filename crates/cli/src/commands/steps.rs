//! `ferrl steps`: samples pairs of a right and a wrong step for Step-DPO.

use crate::data::files_read;
use crate::options::{ModelArgs, at_least_one, size};
use crate::output::JsonlOutput;
use crate::progress::ProgressLine;
use clap::Parser;
use ferrl::algo::Feed;
use ferrl::episode::Environments;
use ferrl::recipe::Recipe;
use ferrl::rollout::{self, Actor};
use ferrl::setup;
use ferrl::steps::{StepPairs, StepSettings, judge};
use ferrl::warnings::Warnings;
use ferrl_engine::generate::Sampler;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result, counted};
use ferrl_kernels::Ranks;
use std::path::PathBuf;
use std::sync::Arc;

/// Sample pairs of a right and a wrong step, the data of Step-DPO
///
/// Samples completions for the prompts of a recipe's last stage, finds the first wrong step of each with the recipe's verifier, and
/// resamples that step until it is right. Each row written has `prompt`, `initial_reason_steps`, `chosen` and `rejected`: the
/// data of `algo = "step_dpo"`.
#[derive(Parser)]
pub struct Args {
    /// The recipe, a TOML file: its data, rollout and reward are used
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides, as for `ferrl train`
    #[arg(value_name = "CHANGE")]
    changes: Vec<String>,
    #[command(flatten)]
    model: ModelArgs,
    /// JSON lines to write; - is standard output
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Number of prompts
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    prompts: usize,
    /// Completions per prompt
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = size::<65536>)]
    samples: usize,
    /// Maximum number of samples in place of a wrong step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = size::<65536>)]
    tries: usize,
    /// Text that ends a step [default: a line break]
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    separator: String,
}

pub fn run(args: &Args) -> Result<()> {
    if args.separator.is_empty() {
        return Err(Error::usage("is empty")
            .at("--separator")
            .fix("leave it out: steps then end with a line break"));
    }
    let resolved = Recipe::load(&args.recipe, &args.changes)?;
    let Some(stage) = resolved.stages.last() else { return Err(Error::usage("the recipe has no stage")) };
    let recipe = &stage.recipe;
    let verifier = judge(recipe)?;
    let dir = args.model.open_lm()?;
    let path = dir.path.clone();
    let tokenizer = Arc::new(Tokenizer::from_dir(&path)?);
    let model = args.model.load(&dir, 0)?;
    let cache = setup::cache_options(&recipe.rollout, &*model.backend);
    let mut sampler = Sampler::new(&model, cache)?.with_tokenizer(tokenizer.clone());
    let stops = rollout::stops(&path, &tokenizer, &recipe.rollout);
    let warnings = Warnings::default();
    let mut source = setup::source(recipe, &path, &tokenizer, Feed::Rollouts, false, &warnings)?;
    crate::output::warn(&warnings);
    let mut output = JsonlOutput::beside(&args.output, &files_read(recipe))?;
    let progress = ProgressLine::new("sampling", args.prompts as u64, "prompts");
    let mut done = 0;
    let mut pairs = StepPairs {
        actor: Actor {
            generator: &mut sampler,
            policy: &model,
            tokenizer: &tokenizer,
            stops: &stops,
            environments: &Environments::default(),
            ranks: Ranks::ALONE,
        },
        verifier: &*verifier,
        recipe,
        settings: StepSettings {
            prompts: args.prompts,
            samples: args.samples,
            tries: args.tries,
            separator: args.separator.clone(),
        },
    };
    let found = pairs.run(&mut source, &mut |row| output.row(&row), &mut |asked, _| {
        progress.add((asked - done) as u64);
        done = asked;
    })?;
    drop(progress);
    output.finish()?;
    eprintln!(
        "{}, {} with a wrong step, {} (each wrong step once, and only if a right one was sampled)",
        counted(found.completions, "completion"),
        found.wrong,
        counted(found.pairs, "pair")
    );
    if found.pairs == 0 {
        return Err(Error::data("no pair was found")
            .fix("a model that is sometimes right, more --prompts, or more --tries"));
    }
    Ok(())
}

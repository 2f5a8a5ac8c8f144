//! `ferrl export`: writes a model, or an adapter alone or merged, as a directory.

use crate::machine;
use crate::options::{StorageArg, open_model, weights};
use crate::output::{print, stop_of_save};
use ferrl_engine::checkpoint::{SaveOptions, StorageFormat, save_adapter, tokenizer_dir};
use ferrl_engine::model::{Model, Options};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{AUTO, DType};
use serde_json::Value;
use std::path::PathBuf;

/// Write the model of a run as a Hugging Face directory, an adapter merged into its base or alone
///
/// `--merge` merges the adapter into its base and writes the whole model, which transformers, vLLM and llama.cpp load. Without it
/// an adapter is written in PEFT's format: adapter_config.json and adapter_model.safetensors. A model without an adapter is
/// written whole.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder, model directory or adapter directory
    #[arg(value_name = "RUN|MODEL")]
    model: PathBuf,
    /// Merge the adapter into the weights
    #[arg(long)]
    merge: bool,
    /// Directory to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number format of the weights [default: that of the base]; an adapter is written in f32
    #[arg(long, value_enum)]
    dtype: Option<StorageArg>,
    /// Overwrite an existing model
    #[arg(long)]
    overwrite: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let dir = open_model(&args.model)?;
    if std::fs::canonicalize(&args.out).is_ok_and(|out| {
        [dir.base(), dir.path.as_path()].iter().any(|p| std::fs::canonicalize(p).is_ok_and(|p| p == out))
    }) {
        return Err(Error::usage("would overwrite the model that is read")
            .at("--out")
            .fix("another directory"));
    }
    let bytes = 8 * weights(&dir.config) as u64;
    machine::ensure_memory(
        "the model",
        bytes,
        "a machine with more memory; a merge holds base and sum in f32",
    )?;
    let backend = ferrl_kernels::open(AUTO, None)?;
    let options = Options { dtype: DType::F32, training: false, context: 0 };
    let source = tokenizer_dir(&dir.path);
    let dtype = args.dtype.map_or_else(|| stored(&dir.config_json), StorageArg::dtype);
    let json = Some(&dir.config_json);
    let adapter = dir.adapter().filter(|_| !args.merge);
    let model = match adapter {
        Some(adapter) => Model::load_adapted(backend, &dir, options, &adapter.options, 0)?,
        None => Model::load(backend, &dir, options)?,
    };
    // While the model is read, Ctrl-C ends the process as ever.
    let stop = stop_of_save();
    let save = SaveOptions {
        dtype,
        source: Some(&source),
        overwrite: args.overwrite,
        stop: Some(&stop),
        ..Default::default()
    };
    let what = match adapter {
        Some(_) => {
            save_adapter(&args.out, &model, dir.base(), json, &save)?;
            format!("adapter of {}", dir.base().display())
        }
        None => {
            model.save(&args.out, json, &save)?;
            let merged = if dir.adapter().is_some() { ", adapter merged" } else { "" };
            format!("{} model, {} parameters{merged}", dir.config.family, weights(&dir.config))
        }
    };
    print(&format!("{}: {what}\n", args.out.display()))
}

fn stored(config: &Value) -> StorageFormat {
    let name = config["dtype"].as_str().or(config["torch_dtype"].as_str()).unwrap_or_default();
    match name {
        "bfloat16" => StorageFormat::Bf16,
        "float16" => StorageFormat::F16,
        _ => StorageFormat::F32,
    }
}

//! The model of `ferrl bench train` and `ferrl bench decode`: a random one, or one on disk.

use super::{ModelUse, ShapeArgs};
use crate::machine::ensure_memory_of;
use crate::options::{open_model, weights};
use ferrl_engine::Result;
use ferrl_engine::model::adapter::AdapterOptions;
use ferrl_engine::model::{Model, Options};
use ferrl_kernels::Backend;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(clap::Args)]
pub struct MeasuredModel {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Model directory to measure instead of a random model; reading a large model is faster than initialising one
    #[arg(long, value_name = "DIR", conflicts_with_all = [
        "hidden", "layers", "heads", "kv_heads", "head_dim", "family", "inter", "experts", "experts_per_token", "expert_inter",
        "vocab", "untied",
    ])]
    model: Option<PathBuf>,
}

impl MeasuredModel {
    /// Initialises or reads the model; an error if the device has no memory for its weights.
    pub fn load(
        &self,
        device: Arc<dyn Backend>,
        options: Options,
        adapter: Option<AdapterOptions>,
    ) -> Result<Model> {
        let Some(path) = &self.model else { return self.shape.model(device, options, adapter) };
        let dir = open_model(path)?;
        let use_of = ModelUse::of(options.training, adapter.is_some());
        let bytes = weights(&dir.config) * use_of.bytes(&*device, options.dtype);
        ensure_memory_of(&*device, "the model", bytes as u64, "a smaller model")?;
        match adapter {
            Some(adapter) => Model::load_adapted(device, &dir, options, &adapter, 0),
            None => Model::load(device, &dir, options),
        }
    }

    /// For a title.
    pub fn describe(&self) -> String {
        self.model.as_ref().map_or_else(|| self.shape.describe(), |path| path.display().to_string())
    }
}

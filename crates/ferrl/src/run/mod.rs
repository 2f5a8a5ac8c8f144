//! What a run leaves on disk: its folder, its numbers step by step, its rollouts, its checkpoints.
//!
//! Everything is written through [`files::Files`], so that tests can break any single file operation.

pub mod checkpoint;
pub mod disk;
pub mod files;
pub mod folder;
pub mod frozen;
pub mod journal;
mod manifest;
pub mod metrics;
pub mod newest;
mod protobuf;
pub mod resume;
pub mod rollouts;
pub(crate) mod shared;
mod tensor_file;
pub mod tensorboard;
pub mod wandb;

pub use checkpoint::{Best, CheckpointOptions, Checkpoints, Saved, TrainedModel};
pub use disk::Disk;
pub use files::{FaultKind, FileFault, Files};
pub use folder::{RunFolder, check_name, ensure_run};
pub use metrics::{MetricsLog, StepRecord};
pub use newest::{Newest, newest_model};
pub use resume::{ResumePoint, latest, load};
pub use rollouts::{Mark, RolloutRecord, Rollouts};
pub use tensorboard::EventWriter;

//! Models on disk: Hugging Face directories in and out, never pickle.

mod foreign;
mod format;
mod init;
mod load;
mod nf4;
mod peft;
mod peft_config;
mod peft_stacks;
mod save;
mod share;
mod store;
mod write;

pub use foreign::foreign;
pub use format::StorageFormat;
pub use init::{InitOptions, init_model, init_param};
pub use load::ModelDir;
pub(crate) use load::ParamValues;
pub(crate) use nf4::Nf4Param;
pub use peft::{AdapterDir, base_of, save_adapter, tokenizer_dir};
pub use save::{SaveOptions, save_model};
pub use share::{FileHead, FileLayout, StoredTensor, save_shared, write_without_tensors};

use std::path::Path;

use crate::{Class, Error};

/// What to do where a file may not grow any more. Waiting does not help, as it may where a disk is full.
pub const FILE_LIMIT: &str =
    "allow larger files (ulimit -f unlimited), or choose a file system that takes them";

/// An I/O error with its file and a fix.
fn io_error(what: &str, path: &Path, e: &std::io::Error) -> Error {
    use std::io::ErrorKind::{FileTooLarge, PermissionDenied, QuotaExceeded, StorageFull};
    let class = if matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge) {
        Class::Resource
    } else {
        Class::Model
    };
    let error = Error::new(class, format!("{what}: {e}")).at(path.display());
    match e.kind() {
        FileTooLarge => error.fix(FILE_LIMIT),
        StorageFull | QuotaExceeded => error.fix("free some disk space or choose another disk"),
        PermissionDenied => error.fix("check who owns the file and its permissions"),
        _ => error,
    }
}

//! A directory that disappears.

use ferrl_engine::{Error, Result};
use std::path::PathBuf;

/// Removed, with all that is in it, when it goes out of scope.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A new one; `name` tells those of one process apart.
    pub fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("ferrl-bench-{name}-{}", std::process::id()));
        let made = std::fs::create_dir_all(&path);
        made.map_err(|e| Error::data(format!("cannot create: {e}")).at(path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

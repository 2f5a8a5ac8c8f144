//! A temporary directory.

use ferrl_engine::{Error, Result};
use std::path::PathBuf;

/// Removed, with all that is in it, when it goes out of scope or the program is interrupted.
pub struct ScratchDir(pub PathBuf);

impl ScratchDir {
    /// A new directory; `name` distinguishes those of one process.
    pub fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("ferrl-bench-{name}-{}", std::process::id()));
        let made = std::fs::create_dir_all(&path);
        made.map_err(|e| Error::data(format!("cannot create: {e}")).at(path.display()))?;
        crate::output::scratch(&path);
        Ok(ScratchDir(path))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        crate::output::discard(&self.0);
    }
}

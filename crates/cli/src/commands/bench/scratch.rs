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
        let gone = path.clone();
        let interrupted = move || {
            // The bench goes on writing beside this: a removal that meets a new file is tried again.
            let _ = (0..100).find(|_| std::fs::remove_dir_all(&gone).is_ok() || !gone.exists());
            crate::output::exit(130);
        };
        // A process has one handler: if another is set, an interrupt leaves the folder.
        let _ = crate::output::on_interrupt(interrupted);
        Ok(ScratchDir(path))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

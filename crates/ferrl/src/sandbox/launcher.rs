//! Which executable confines programs: one that answers to the hidden arguments below.
//!
//! Ferrl's crates have no unsafe code, so nothing runs between fork and exec: instead an executable starts itself again,
//! confines itself and becomes the program. The command `ferrl` can do that, and so can any program that calls [`init`].

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// First argument of a supervisor.
pub(super) const SUPERVISOR: &str = "--ferrl-sandbox-supervisor";
/// First argument of a stage.
#[cfg(target_os = "linux")]
pub(super) const STAGE: &str = "--ferrl-sandbox-stage";
/// Names an executable that can be a supervisor.
pub const VARIABLE: &str = "FERRL_LAUNCHER";

static ANSWERS: AtomicBool = AtomicBool::new(false);

/// To be called first in `main` of a program that confines others: where this process was started as a part of the sandbox,
/// it becomes that part and does not return.
pub fn init() {
    #[cfg(target_os = "linux")]
    {
        let mut arguments = std::env::args_os().skip(1);
        match arguments.next() {
            Some(first) if first == SUPERVISOR => super::supervisor::main(),
            Some(first) if first == STAGE => {
                let config = arguments.next().unwrap_or_default();
                super::stage::main(&config.to_string_lossy());
            }
            _ => {}
        }
    }
    ANSWERS.store(true, Ordering::SeqCst);
}

/// The executable: this one if it called [`init`], else the one that [`VARIABLE`] names, else `ferrl` on the path.
pub(super) fn find() -> Result<PathBuf, String> {
    if !cfg!(target_os = "linux") {
        return Err("not on Linux".into());
    }
    if ANSWERS.load(Ordering::SeqCst) {
        return Ok("/proc/self/exe".into());
    }
    if let Some(named) = std::env::var_os(VARIABLE).map(PathBuf::from) {
        return match named.is_file() {
            true => Ok(named),
            false => Err(format!("{VARIABLE} names {}, which is not there", named.display())),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("ferrl")).find(|file| file.is_file());
    found.ok_or_else(|| {
        format!(
            "no launcher: main does not call ferrl::sandbox::init(), {VARIABLE} is not set, no ferrl on PATH"
        )
    })
}

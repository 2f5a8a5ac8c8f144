//! Kernels that are compiled before they are asked for.
//!
//! One after another, the sources take a dozen seconds at the first start on a machine. So when one is asked for that is
//! not in the cache folder, all others that are not are begun as well, side by side. (Those with definitions wait until
//! somebody says which.)

use super::compile::{SOURCES, is_kept, machine_code};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::thread::JoinHandle;

/// Machine code under way, by source.
#[derive(Default)]
pub(super) struct Ahead {
    begun: bool,
    under_way: HashMap<&'static str, JoinHandle<Result<Vec<u8>>>>,
}

impl Ahead {
    /// Begins everything that is not kept and has no variants.
    pub(super) fn begin(&mut self, architecture: &str) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let missing = |s: &&super::compile::Source| s.variants == [""] && !is_kept(s, "", architecture);
        for source in SOURCES.iter().filter(missing) {
            let architecture = architecture.to_string();
            let work = move || machine_code(source, "", &architecture);
            // A machine that has no thread to give compiles it when it is needed.
            if let Ok(handle) = std::thread::Builder::new().name(source.name.into()).spawn(work) {
                self.under_way.insert(source.name, handle);
            }
        }
    }

    /// The machine code of a source that was begun.
    pub(super) fn take(&mut self, name: &str) -> Option<Result<Vec<u8>>> {
        let handle = self.under_way.remove(name)?;
        Some(handle.join().unwrap_or_else(|_| Err(Error::device(format!("compiling {name}.cu failed")))))
    }
}

impl Drop for Ahead {
    /// Waits: a program that ends must not pull the compiler away from under its threads.
    fn drop(&mut self) {
        for (_, handle) in self.under_way.drain() {
            let _ = handle.join();
        }
    }
}

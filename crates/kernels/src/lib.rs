//! What hardware does: coarse, exact, deterministic operations. Knows nothing of models.

pub mod backend;
pub mod buffer;
pub mod cpu;
pub mod error;
pub mod math;
pub mod mmap;
pub mod philox;

pub use backend::Backend;
pub use buffer::{Buffer, DType, Weight};
pub use error::{Class, Error, Result, nearest};

use std::sync::Arc;

/// A kind of device.
pub struct Device {
    /// The name used in recipes and flags.
    pub name: &'static str,
    /// Opens it with that many threads, or as many as there are cores.
    pub open: fn(threads: Option<usize>) -> Result<Arc<dyn Backend>>,
}

/// Every kind of device Ferrl knows.
pub const BACKENDS: &[Device] =
    &[Device { name: "cpu", open: |threads| Ok(Arc::new(cpu::Cpu::new(threads)?)) }];

/// Opens the device of that name.
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    let Some(device) = BACKENDS.iter().find(|d| d.name == name) else {
        let names: Vec<&str> = BACKENDS.iter().map(|d| d.name).collect();
        let hint = nearest(name, names.iter().copied()).unwrap_or(names[0]);
        return Err(Error::usage(format!("unknown device {name:?}, expected one of {}", names.join(", ")))
            .fix(format!("--device {hint}")));
    };
    if threads == Some(0) {
        return Err(Error::usage("0 threads cannot compute anything").fix("--threads 1 or more"));
    }
    (device.open)(threads)
}

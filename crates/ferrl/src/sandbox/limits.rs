//! Resource limits of a program.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Limits of one program and of everything it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Seconds on the clock.
    pub wall_s: f64,
    /// Memory in MiB: address space of each process, and resident size of all together.
    pub memory_mib: u64,
    /// Processes and threads at a time.
    pub processes: u64,
    /// Size of the scratch folder in MiB, and of each file in it.
    pub scratch_mib: u64,
    /// Bytes of stdout and stderr together, in KiB.
    pub output_kib: u64,
    /// Open files of each process.
    pub files: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { wall_s: 10.0, memory_mib: 512, processes: 16, scratch_mib: 64, output_kib: 1024, files: 128 }
    }
}

impl Limits {
    /// Time on the clock.
    pub fn wall(&self) -> Duration {
        Duration::try_from_secs_f64(self.wall_s).unwrap_or(Duration::MAX)
    }

    /// CPU seconds of one process: one that uses a core all the time reaches the wall clock's limit first.
    pub fn cpu_s(&self) -> u64 {
        self.wall_s.ceil().clamp(1.0, 1e9) as u64 + 1
    }

    /// Memory in bytes.
    pub fn memory(&self) -> u64 {
        self.memory_mib << 20
    }

    /// Size of the scratch folder in bytes.
    pub fn scratch(&self) -> u64 {
        self.scratch_mib << 20
    }

    /// Output in bytes.
    pub fn output(&self) -> usize {
        (self.output_kib << 10) as usize
    }
}

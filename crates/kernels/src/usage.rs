//! Memory accounting: a purpose label on every allocation, and reports by purpose.

use crate::backend::Backend;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Master weights and the weights derived from them.
    Weights,
    /// Gradients of the weights.
    Gradients,
    /// Optimizer moments.
    Optimizer,
    /// KV cache.
    Cache,
    /// Activations and other temporary buffers.
    #[default]
    Activations,
    /// Workspaces requested by libraries.
    Workspace,
}

/// Number of purposes.
const COUNT: usize = 6;

impl Purpose {
    pub const ALL: [Purpose; COUNT] = [
        Purpose::Weights,
        Purpose::Gradients,
        Purpose::Optimizer,
        Purpose::Cache,
        Purpose::Activations,
        Purpose::Workspace,
    ];

    /// Display name.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "optimizer",
            Purpose::Cache => "keys and values",
            Purpose::Activations => "activations",
            Purpose::Workspace => "workspace",
        }
    }

    /// Labels later allocations of the device with this purpose until the guard is dropped.
    pub fn on(self, device: &Arc<dyn Backend>) -> Labelled {
        Labelled { before: device.set_purpose(self), device: device.clone() }
    }
}

/// Restores the previous label when dropped.
#[must_use]
pub struct Labelled {
    device: Arc<dyn Backend>,
    before: Purpose,
}

impl Drop for Labelled {
    fn drop(&mut self) {
        self.device.set_purpose(self.before);
    }
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes([usize; COUNT]);

impl Bytes {
    pub fn of(&self, purpose: Purpose) -> usize {
        self.0[purpose as usize]
    }
    /// Bytes of all purposes.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
    /// `weights 2.77 GiB, gradients 1.84 GiB`: non-zero purposes, largest first.
    pub fn words(&self) -> String {
        let mut there: Vec<Purpose> = Purpose::ALL.into_iter().filter(|&p| self.of(p) > 0).collect();
        there.sort_by_key(|&p| std::cmp::Reverse(self.of(p)));
        let each = |p: Purpose| format!("{} {}", p.name(), size(self.of(p)));
        there.into_iter().map(each).collect::<Vec<_>>().join(", ")
    }
}

/// Formats bytes for users.
pub fn size(bytes: usize) -> String {
    let mib = bytes as f64 / 1048576.0;
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

/// Bytes in use now and at the peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Label of new allocations.
    pub purpose: Purpose,
    /// In use now.
    pub now: Bytes,
    /// In use when the total was highest.
    pub at_peak: Bytes,
}

impl MemoryUsage {
    /// Counts an allocation; returns its label.
    pub fn add(&mut self, bytes: usize) -> Purpose {
        self.now.0[self.purpose as usize] += bytes;
        if self.now.total() > self.at_peak.total() {
            self.at_peak = self.now;
        }
        self.purpose
    }
    /// Counts an allocation with this label as freed.
    pub fn remove(&mut self, purpose: Purpose, bytes: usize) {
        self.now.0[purpose as usize] -= bytes;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Buffers by purpose.
    pub books: MemoryUsage,
    /// Number of allocations from the system.
    pub asked: u64,
    /// Device bytes in use according to the driver: including context, libraries, cached free blocks, other programs.
    pub used: usize,
    /// The same at the peak of buffers and cached blocks.
    pub most: usize,
    /// Total device memory.
    pub total: usize,
}

impl MemoryReport {
    /// Two lines for users.
    pub fn lines(&self) -> [String; 2] {
        let peak = self.books.at_peak;
        [
            format!("{} when most was in use: {}", size(peak.total()), peak.words()),
            format!(
                "{} of {} at most, with context, libraries and blocks kept for reuse",
                size(self.most),
                size(self.total)
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_keeps_what_it_was_made_of() {
        let mut books = MemoryUsage { purpose: Purpose::Weights, ..Default::default() };
        let weights = books.add(300 << 20);
        books.purpose = Purpose::Activations;
        let activations = books.add(2 << 30);
        books.remove(activations, 2 << 30);
        books.purpose = Purpose::Cache;
        books.add(1 << 20);
        assert_eq!(weights, Purpose::Weights);
        assert_eq!(books.at_peak.words(), "activations 2.00 GiB, weights 300.0 MiB");
        assert_eq!(books.now.words(), "weights 300.0 MiB, keys and values 1.0 MiB");
        assert_eq!(books.now.total(), 301 << 20);
    }
}

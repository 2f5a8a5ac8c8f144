//! Gradients of parameters while they are summed.

use crate::Result;
use ferrl_kernels::{Backend, Buffer, DType};

/// Where gradients of parameters go; `None` is frozen.
pub type Grads<'a> = &'a mut [Option<Slot>];

/// The gradient of one parameter. As long as nothing was added it holds anything and counts as zero: what comes first is
/// written, not added, and nobody need clear it.
pub struct Slot {
    buffer: Buffer,
    empty: bool,
}

impl Slot {
    /// Room for a gradient of that many weights.
    pub fn new(backend: &dyn Backend, len: usize) -> Result<Self> {
        Ok(Slot { buffer: backend.alloc(DType::F32, len)?, empty: true })
    }

    /// Holds these numbers.
    pub fn of(buffer: Buffer) -> Self {
        Slot { buffer, empty: false }
    }

    /// Whether nothing was added yet.
    pub fn is_empty(&self) -> bool {
        self.empty
    }

    /// Forgets what was added.
    pub fn clear(&mut self) {
        self.empty = true;
    }

    /// To be written, all of it.
    pub fn written(&mut self) -> &mut Buffer {
        self.empty = false;
        &mut self.buffer
    }

    /// To be added to.
    pub fn added_to(&mut self, backend: &dyn Backend) -> Result<&mut Buffer> {
        if self.empty {
            backend.fill(&mut self.buffer, 0.0)?;
        }
        Ok(self.written())
    }

    /// What was added, of a slot that was added to.
    pub fn buffer(&self) -> &Buffer {
        assert!(!self.empty, "a gradient is read after something was added");
        &self.buffer
    }

    /// The sum, taken out; zeros where nothing was added.
    pub fn into_sum(mut self, backend: &dyn Backend) -> Result<Buffer> {
        self.added_to(backend)?;
        Ok(self.buffer)
    }
}

/// A slot that may be absent, to be added to.
pub fn added_to<'a>(backend: &dyn Backend, slot: &'a mut Option<Slot>) -> Result<Option<&'a mut Buffer>> {
    slot.as_mut().map(|slot| slot.added_to(backend)).transpose()
}

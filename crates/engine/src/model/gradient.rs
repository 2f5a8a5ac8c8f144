//! Accumulators of parameter gradients.

use crate::Result;
use ferrl_kernels::backend::NormGrads;
use ferrl_kernels::{Backend, Buffer, DType};

/// Gradient accumulators by parameter; `None` is frozen.
pub type Grads<'a> = &'a mut [Option<Gradient>];

/// The gradient of one parameter. Until the first write the buffer is uninitialised and counts as zero: the first contribution
/// overwrites instead of adding, which saves clearing it.
pub struct Gradient {
    buffer: Buffer,
    empty: bool,
}

impl Gradient {
    /// Allocates a gradient of `len` weights.
    pub fn new(backend: &dyn Backend, len: usize) -> Result<Self> {
        Ok(Gradient { buffer: backend.alloc(DType::F32, len)?, empty: true })
    }

    pub fn of(buffer: Buffer) -> Self {
        Gradient { buffer, empty: false }
    }

    /// Whether nothing has been accumulated yet.
    pub fn is_empty(&self) -> bool {
        self.empty
    }

    pub fn clear(&mut self) {
        self.empty = true;
    }

    /// The buffer, for a caller that overwrites all of it.
    pub fn written(&mut self) -> &mut Buffer {
        self.empty = false;
        &mut self.buffer
    }

    /// The buffer, for a caller that adds to it; zeroed if it was empty.
    pub fn added_to(&mut self, backend: &dyn Backend) -> Result<&mut Buffer> {
        if self.empty {
            backend.fill(&mut self.buffer, 0.0)?;
        }
        Ok(self.written())
    }

    /// The accumulated gradient; it must not be empty.
    pub fn buffer(&self) -> &Buffer {
        assert!(!self.empty, "a gradient is read after something was added");
        &self.buffer
    }

    /// The accumulated gradient by value; zeros if empty.
    pub fn into_sum(mut self, backend: &dyn Backend) -> Result<Buffer> {
        self.added_to(backend)?;
        Ok(self.buffer)
    }
}

/// [`Gradient::added_to`] of a gradient that may be frozen.
pub fn added_to<'a>(backend: &dyn Backend, slot: &'a mut Option<Gradient>) -> Result<Option<&'a mut Buffer>> {
    slot.as_mut().map(|slot| slot.added_to(backend)).transpose()
}

/// The gradients of a weight and its bias, borrowed from the list of all.
pub(super) struct Taken {
    weight: Option<Gradient>,
    bias: Option<Gradient>,
}

impl Taken {
    /// Moves them out of the list, calls `f`, and moves them back, also after an error.
    pub(super) fn with<T>(
        weight: usize,
        bias: Option<usize>,
        grads: Grads<'_>,
        f: impl FnOnce(&mut Taken) -> Result<T>,
    ) -> Result<T> {
        let mut taken = Taken { weight: grads[weight].take(), bias: bias.and_then(|i| grads[i].take()) };
        let done = f(&mut taken);
        grads[weight] = taken.weight;
        if let Some(i) = bias {
            grads[i] = taken.bias;
        }
        done
    }

    /// The two buffers, and whether to add to them rather than overwrite.
    pub(super) fn sums(&mut self, b: &dyn Backend) -> Result<(bool, [Option<&mut Buffer>; 2])> {
        let add = [&self.weight, &self.bias].into_iter().flatten().any(|slot| !slot.is_empty());
        let sums = match add {
            true => [added_to(b, &mut self.weight)?, added_to(b, &mut self.bias)?],
            false => [&mut self.weight, &mut self.bias].map(|slot| slot.as_mut().map(Gradient::written)),
        };
        Ok((add, sums))
    }

    /// The same for a norm; always adds.
    pub(super) fn norm_grads(&mut self, b: &dyn Backend) -> Result<NormGrads<'_>> {
        let (add, [weight, bias]) = self.sums(b)?;
        Ok(NormGrads { weight, bias, add })
    }
}

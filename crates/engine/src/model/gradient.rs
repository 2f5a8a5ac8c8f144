//! Gradients of parameters while they are summed.

use crate::Result;
use ferrl_kernels::backend::NormGrads;
use ferrl_kernels::{Backend, Buffer, DType};

/// Where gradients of parameters go; `None` is frozen.
pub type Grads<'a> = &'a mut [Option<Gradient>];

/// The gradient of one parameter. As long as nothing was added it holds anything and counts as zero: what comes first is
/// written, not added, so that it need not be cleared.
pub struct Gradient {
    buffer: Buffer,
    empty: bool,
}

impl Gradient {
    /// Room for a gradient of that many weights.
    pub fn new(backend: &dyn Backend, len: usize) -> Result<Self> {
        Ok(Gradient { buffer: backend.alloc(DType::F32, len)?, empty: true })
    }

    /// Holds these numbers.
    pub fn of(buffer: Buffer) -> Self {
        Gradient { buffer, empty: false }
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
pub fn added_to<'a>(backend: &dyn Backend, slot: &'a mut Option<Gradient>) -> Result<Option<&'a mut Buffer>> {
    slot.as_mut().map(|slot| slot.added_to(backend)).transpose()
}

/// The gradients of a weight and its bias, taken out of the list of all for one operation.
pub(super) struct Taken {
    weight: Option<Gradient>,
    bias: Option<Gradient>,
}

impl Taken {
    /// Calls `f` with them out of the list, and puts them back whatever happens.
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

    /// Where the sums go, and whether they are added to it.
    pub(super) fn sums(&mut self, b: &dyn Backend) -> Result<(bool, [Option<&mut Buffer>; 2])> {
        let add = [&self.weight, &self.bias].into_iter().flatten().any(|slot| !slot.is_empty());
        let sums = match add {
            true => [added_to(b, &mut self.weight)?, added_to(b, &mut self.bias)?],
            false => [&mut self.weight, &mut self.bias].map(|slot| slot.as_mut().map(Gradient::written)),
        };
        Ok((add, sums))
    }

    /// The same for a norm.
    pub(super) fn norm_grads(&mut self, b: &dyn Backend) -> Result<NormGrads<'_>> {
        let (add, [weight, bias]) = self.sums(b)?;
        Ok(NormGrads { weight, bias, add })
    }
}

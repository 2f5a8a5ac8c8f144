//! Device memory, opaque to all but the backend that allocated it.

use std::any::Any;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// Token ids, positions, row indices.
    U32,
    /// Quantised codes: indices into a table of values ([`codes`](crate::codes)).
    U8,
}

impl DType {
    /// The compute types.
    pub const COMPUTE: [DType; 2] = [DType::F32, DType::Bf16];

    /// The compute type with this name.
    pub fn compute(name: &str) -> Option<DType> {
        DType::COMPUTE.into_iter().find(|dtype| dtype.name() == name)
    }
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }
    /// Whether it is a compute type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16)
    }
    /// The name for users.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
            DType::U8 => "u8",
        }
    }
}

/// A one-dimensional array on a device. Shapes are known to callers only; operations check that lengths fit.
pub struct Buffer {
    dtype: DType,
    len: usize,
    data: Box<dyn Any + Send + Sync>,
}

impl Buffer {
    /// For backends: wraps an allocation.
    pub fn new(dtype: DType, len: usize, data: Box<dyn Any + Send + Sync>) -> Self {
        Buffer { dtype, len, data }
    }
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// For backends: the allocation.
    pub fn data(&self) -> &dyn Any {
        &*self.data
    }
    /// For backends: the allocation.
    pub fn data_mut(&mut self) -> &mut dyn Any {
        &mut *self.data
    }
}

/// A GEMM weight, derived from an f32 master. Its storage format is private to the device, behind [`Weight::data`]; users see
/// only the type of the rows that it multiplies.
pub struct Weight {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Compute type of the rows that it multiplies.
    pub compute: DType,
    /// Output features of the full weight that this is a shard of (or its own): a shard's GEMMs have the bits of the full
    /// weight's.
    pub whole: usize,
    data: Box<dyn Any + Send + Sync>,
}

impl Weight {
    /// For backends: wraps an allocation.
    pub fn new(n: usize, k: usize, compute: DType, data: Box<dyn Any + Send + Sync>) -> Self {
        Weight { n, k, compute, whole: n, data }
    }
    /// For backends: the allocation.
    pub fn data(&self) -> &dyn Any {
        &*self.data
    }
    /// For backends: the allocation.
    pub fn data_mut(&mut self) -> &mut dyn Any {
        &mut *self.data
    }
}

//! Device memory, opaque to everyone but the backend that made it.

use std::any::Any;

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// The upper half of a 32-bit float.
    Bf16,
    /// Token ids, positions, row numbers.
    U32,
    /// Codes: indices into a table of numbers ([`codes`](crate::codes)).
    U8,
}

impl DType {
    /// The compute types, by the names that users give.
    pub const COMPUTE: [DType; 2] = [DType::F32, DType::Bf16];

    /// The compute type of that name.
    pub fn compute(name: &str) -> Option<DType> {
        DType::COMPUTE.into_iter().find(|dtype| dtype.name() == name)
    }
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }
    /// Whether elements are numbers that operations compute with.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16)
    }
    /// The name that users give.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
            DType::U8 => "u8",
        }
    }
}

/// A flat array on a device. Shapes are the caller's affair; operations assert that they fit.
pub struct Buffer {
    dtype: DType,
    len: usize,
    data: Box<dyn Any + Send + Sync>,
}

impl Buffer {
    /// For backends: wraps what they allocated.
    pub fn new(dtype: DType, len: usize, data: Box<dyn Any + Send + Sync>) -> Self {
        Buffer { dtype, len, data }
    }
    /// How elements are stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// For backends: what they allocated.
    pub fn data(&self) -> &dyn Any {
        &*self.data
    }
    /// For backends: what they allocated.
    pub fn data_mut(&mut self) -> &mut dyn Any {
        &mut *self.data
    }
}

/// A linear layer's weights as the device multiplies with them, derived from the f32 master. How they are stored is the
/// device's own affair, behind [`Weight::data`]; everyone else sees the type of the rows that they multiply.
pub struct Weight {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Compute type: of the rows that they multiply.
    pub compute: DType,
    /// Output features of the weight that this one is a part of, or its own: products of a part have the bits of the whole's.
    pub whole: usize,
    data: Box<dyn Any + Send + Sync>,
}

impl Weight {
    /// For backends: wraps what they allocated.
    pub fn new(n: usize, k: usize, compute: DType, data: Box<dyn Any + Send + Sync>) -> Self {
        Weight { n, k, compute, whole: n, data }
    }
    /// For backends: what they allocated.
    pub fn data(&self) -> &dyn Any {
        &*self.data
    }
    /// For backends: what they allocated.
    pub fn data_mut(&mut self) -> &mut dyn Any {
        &mut *self.data
    }
}

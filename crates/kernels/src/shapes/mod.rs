//! Operand checks of every operation: the one place where lengths, types and indices are validated before unsafe code or a GPU
//! uses them as addresses.
//!
//! Each function has the name of its operation of [`Backend`](crate::Backend), and every backend calls it first. An operand that
//! does not fit is an error that names the operation and the operand, before anything is computed.

mod attention;
mod experts;
mod heads;
mod layers;
mod low_rank;
mod updates;
mod vectors;
mod vocab;

pub(crate) use attention::*;
pub(crate) use experts::*;
pub(crate) use heads::*;
pub(crate) use layers::*;
pub(crate) use low_rank::*;
pub(crate) use updates::*;
pub(crate) use vectors::*;
pub(crate) use vocab::*;

use crate::backend::{Affine, Attention, DeviceInfo, Heads, Normed};
use crate::{Buffer, DType, Error, Result, Weight};

/// The device that checks its operands.
pub(crate) type Dev<'a> = &'a dyn DeviceInfo;

/// An operation whose operands are being checked.
#[derive(Clone, Copy)]
pub(crate) struct Op<'a> {
    name: &'static str,
    dev: Dev<'a>,
}

impl<'a> Op<'a> {
    pub(crate) fn new(dev: Dev<'a>, name: &'static str) -> Self {
        Op { name, dev }
    }

    #[cold]
    fn error(&self, what: String) -> Error {
        Error::usage(format!("operation {}: {what}", self.name))
    }

    /// Errors with `what()` unless `so`.
    fn expect(&self, so: bool, what: impl FnOnce() -> String) -> Result<()> {
        if so { Ok(()) } else { Err(self.error(what())) }
    }

    /// `a * b`, if that many elements can exist.
    fn times(&self, a: usize, b: usize) -> Result<usize> {
        a.checked_mul(b)
            .filter(|&n| n <= MOST)
            .ok_or_else(|| self.error(format!("{a} x {b} elements cannot exist")))
    }

    /// Requires a buffer of this device with `len` elements.
    fn sized(&self, operand: &str, b: &Buffer, len: usize) -> Result<()> {
        self.expect(self.dev.holds(b), || format!("{operand} is not memory of this device"))?;
        self.expect(b.len() == len, || format!("{operand} has {} elements, expected {len}", b.len()))
    }

    /// Requires `len` elements of this type.
    fn typed(&self, operand: &str, b: &Buffer, dtype: DType, len: usize) -> Result<()> {
        let (is, want) = (b.dtype(), dtype.name());
        self.expect(is == dtype, || format!("{operand} is {}, expected {want}", is.name()))?;
        self.sized(operand, b, len)
    }

    /// Requires `len` f32 elements.
    fn f32s(&self, operand: &str, b: &Buffer, len: usize) -> Result<()> {
        self.typed(operand, b, DType::F32, len)
    }

    /// The same if the operand is present.
    fn some_f32s(&self, operand: &str, b: Option<&Buffer>, len: usize) -> Result<()> {
        b.map_or(Ok(()), |b| self.f32s(operand, b, len))
    }

    /// Requires `len` elements of either compute type.
    fn floats(&self, operand: &str, b: &Buffer, len: usize) -> Result<()> {
        let is = b.dtype();
        self.expect(is.is_float(), || format!("{operand} is {}, expected f32 or bf16", is.name()))?;
        self.sized(operand, b, len)
    }

    /// Number of rows of a float buffer.
    fn rows(&self, operand: &str, b: &Buffer, width: usize) -> Result<usize> {
        self.expect(width > 0, || format!("rows of {operand} have no elements"))?;
        self.floats(operand, b, b.len())?;
        let whole = b.len().is_multiple_of(width);
        self.expect(whole, || format!("{operand} has {} elements, expected rows of {width}", b.len()))?;
        Ok(b.len() / width)
    }

    /// Requires `len` indices, all below a bound.
    fn below(&self, operand: &str, b: &Buffer, len: usize, bound: usize) -> Result<()> {
        self.typed(operand, b, DType::U32, len)?;
        match self.dev.ids(b).iter().find(|&&id| id as usize >= bound) {
            None => Ok(()),
            Some(id) => Err(self.error(format!("{operand} holds {id}, expected numbers below {bound}"))),
        }
    }

    fn weight(&self, operand: &str, w: &Weight, backward: bool) -> Result<()> {
        self.expect(w.n > 0 && w.k > 0, || format!("{operand} is {} x {}", w.n, w.k))?;
        self.times(w.n, w.k)?;
        let what =
            if backward { "a weight of this device made for training" } else { "a weight of this device" };
        self.expect(self.dev.holds_weight(w, backward), || format!("{operand} is not {what}"))
    }

    /// Checks rows for a GEMM with a weight; returns their number.
    fn factor(&self, operand: &str, x: &Buffer, width: usize, w: &Weight) -> Result<usize> {
        let (is, want) = (x.dtype().name(), w.compute.name());
        self.expect(x.dtype() == w.compute, || format!("{operand} is {is}, the weight {want}"))?;
        self.rows(operand, x, width)
    }

    /// Checks rows for a linear layer; returns their number.
    fn affine(&self, x: &Buffer, layer: Affine<'_>) -> Result<usize> {
        self.weight("the weight", layer.weight, false)?;
        self.some_f32s("bias", layer.bias, layer.weight.n)?;
        self.factor("x", x, layer.weight.k, layer.weight)
    }

    fn heads(&self, heads: Heads) -> Result<()> {
        let Heads { heads: all, kv_heads, head_dim } = heads;
        let sane = [all, kv_heads, head_dim].iter().all(|n| (1..=1 << 16).contains(n));
        self.expect(sane, || format!("{all} heads, {kv_heads} key heads of {head_dim}"))
    }

    /// Checks head counts, grouping and window.
    fn groups(&self, of: &Attention) -> Result<()> {
        self.heads(of.heads)?;
        let Heads { heads, kv_heads, .. } = of.heads;
        self.expect(heads.is_multiple_of(kv_heads), || format!("{heads} heads share {kv_heads} key heads"))?;
        self.expect(of.window != Some(0), || "a window without keys".into())
    }

    fn norm(&self, norm: Normed<'_>) -> Result<()> {
        let width = norm.op.width;
        self.expect(width > 0, || "rows without elements".into())?;
        self.f32s("weight", norm.weight, width)?;
        self.some_f32s("bias", norm.bias, width)
    }

    /// Requires elements `at..at + len` of a float buffer.
    fn float_range(&self, operand: &str, b: &Buffer, at: usize, len: usize) -> Result<()> {
        self.floats(operand, b, b.len())?;
        self.inside(operand, b, at, len)
    }

    /// The same, of a float buffer or a buffer of codes.
    fn numbers(&self, operand: &str, b: &Buffer, at: usize, len: usize) -> Result<()> {
        if b.dtype() != DType::U8 {
            return self.float_range(operand, b, at, len);
        }
        self.sized(operand, b, b.len())?;
        self.inside(operand, b, at, len)
    }

    fn inside(&self, operand: &str, b: &Buffer, at: usize, len: usize) -> Result<()> {
        let inside = at.checked_add(len).is_some_and(|end| end <= b.len());
        self.expect(inside, || format!("{operand} has {} elements, not {len} from {at} on", b.len()))
    }
}

/// More elements than any memory holds, yet sums and products of checked sizes do not overflow.
const MOST: usize = 1 << 48;

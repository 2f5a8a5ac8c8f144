//! How numbers are stored in a checkpoint.

use half::{bf16, f16};
use safetensors::Dtype as Stored;

use crate::{Error, Result};

/// The number formats Ferrl writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits: what the optimizer holds.
    F32,
    /// 16 bits with the range of `F32`.
    Bf16,
    /// 16 bits with more precision and a range of 65504.
    F16,
}

impl Dtype {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        if self == Dtype::F32 { 4 } else { 2 }
    }
    /// The name in `config.json`.
    pub fn torch_name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        }
    }
    /// The name in the header of a safetensors file.
    pub(super) fn stored_name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
        }
    }
    /// The format of a stored tensor, if Ferrl reads it.
    pub(super) fn of(stored: Stored) -> Option<Dtype> {
        match stored {
            Stored::F32 => Some(Dtype::F32),
            Stored::BF16 => Some(Dtype::Bf16),
            Stored::F16 => Some(Dtype::F16),
            _ => None,
        }
    }

    /// Appends stored numbers to `out`.
    pub(super) fn decode(self, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            Dtype::F32 => {
                out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            }
            Dtype::Bf16 => out.extend(
                bytes
                    .chunks_exact(2)
                    .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)),
            ),
            Dtype::F16 => {
                out.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()))
            }
        }
    }

    /// Appends numbers to `out` as they are stored, rounded to nearest even.
    pub(super) fn encode(self, numbers: &[f32], out: &mut Vec<u8>) -> Result<()> {
        match self {
            Dtype::F32 => out.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            Dtype::Bf16 => out.extend(numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            Dtype::F16 => {
                for &x in numbers {
                    let small = f16::from_f32(x);
                    if small.is_infinite() && x.is_finite() {
                        return Err(Error::numerics(format!("{x} is too large for float16"))
                            .fix("save as bfloat16 or float32"));
                    }
                    out.extend(small.to_le_bytes());
                }
            }
        }
        Ok(())
    }
}

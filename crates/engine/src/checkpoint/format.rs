//! Number formats of checkpoints.

use half::{bf16, f16};
use safetensors::Dtype as Stored;

use crate::{Error, Result};
use ferrl_kernels::{DType, cores};

/// Minimum count of numbers per thread.
const PART: usize = 1 << 20;
/// Numbers checked for NaN and infinity at a time, while they are in the L1 cache.
const LOOK: usize = 2048;

/// Index of the first NaN or infinity in stored bf16 numbers. Multi-threaded, because it is the first access to the mapped
/// file.
pub(super) fn first_non_finite(bytes: &[u8]) -> Option<usize> {
    const ONES: u16 = 0x7f80;
    let is_bad = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]) & ONES == ONES;
    let look = |bytes: &[u8]| {
        // Branch-free per number.
        let any = |piece: &[u8]| piece.chunks_exact(2).fold(false, |bad, b| bad | is_bad(b));
        let (i, piece) = bytes.chunks(2 * LOOK).enumerate().find(|(_, piece)| any(piece))?;
        Some(i * LOOK + piece.chunks_exact(2).position(is_bad)?)
    };
    let threads = cores();
    let part = (bytes.len() / 2).div_ceil(threads).max(PART);
    if bytes.len() <= 2 * part {
        return look(bytes);
    }
    std::thread::scope(|scope| {
        let all: Vec<_> = bytes.chunks(2 * part).map(|bytes| scope.spawn(move || look(bytes))).collect();
        let found = all.into_iter().enumerate().map(|(i, thread)| match thread.join() {
            Ok(at) => at.map(|at| i * part + at),
            Err(panic) => std::panic::resume_unwind(panic),
        });
        found.collect::<Vec<_>>().into_iter().flatten().next()
    })
}

/// A number format. A quantised format would be a variant here, with `encode` and `decode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageFormat {
    F32,
    Bf16,
    /// float16, with a range of 65504.
    F16,
}

impl From<DType> for StorageFormat {
    fn from(compute: DType) -> Self {
        if compute == DType::Bf16 { StorageFormat::Bf16 } else { StorageFormat::F32 }
    }
}

impl StorageFormat {
    /// Bytes per number.
    pub fn size(self) -> usize {
        if self == StorageFormat::F32 { 4 } else { 2 }
    }
    /// Its name in `config.json`.
    pub fn torch_name(self) -> &'static str {
        match self {
            StorageFormat::F32 => "float32",
            StorageFormat::Bf16 => "bfloat16",
            StorageFormat::F16 => "float16",
        }
    }
    /// Its name in a safetensors header.
    pub(super) fn stored_name(self) -> &'static str {
        match self {
            StorageFormat::F32 => "F32",
            StorageFormat::Bf16 => "BF16",
            StorageFormat::F16 => "F16",
        }
    }
    /// The format of a stored tensor, if Ferrl supports it.
    pub(super) fn of(stored: Stored) -> Option<StorageFormat> {
        match stored {
            Stored::F32 => Some(StorageFormat::F32),
            Stored::BF16 => Some(StorageFormat::Bf16),
            Stored::F16 => Some(StorageFormat::F16),
            _ => None,
        }
    }

    /// Decodes stored numbers to `f32`; returns the index of the first NaN or infinity, if any. Large tensors are decoded by
    /// several threads: page faults of source and destination cost more than the conversion.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) -> Option<usize> {
        let threads = cores();
        let part = out.len().div_ceil(threads).max(PART);
        std::thread::scope(|scope| {
            let mut parts = bytes.chunks(part * self.size()).zip(out.chunks_mut(part)).enumerate();
            let first = parts.next();
            let others: Vec<_> = parts
                .map(|(i, (bytes, out))| (i, scope.spawn(move || self.decode_part(bytes, out))))
                .collect();
            let bad = first.and_then(|(_, (bytes, out))| self.decode_part(bytes, out));
            let joined = others.into_iter().filter_map(|(i, thread)| match thread.join() {
                Ok(bad) => bad.map(|at| i * part + at),
                Err(panic) => std::panic::resume_unwind(panic),
            });
            bad.into_iter().chain(joined).min()
        })
    }

    pub(super) fn decode_part(self, bytes: &[u8], out: &mut [f32]) -> Option<usize> {
        let pieces = out.chunks_mut(LOOK).zip(bytes.chunks(LOOK * self.size()));
        let mut bad = None;
        for (i, (out, bytes)) in pieces.enumerate() {
            let numbers = out.iter_mut().zip(bytes.chunks_exact(self.size()));
            match self {
                StorageFormat::F32 => {
                    numbers.for_each(|(x, b)| *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                }
                StorageFormat::Bf16 => numbers.for_each(|(x, b)| {
                    *x = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                }),
                StorageFormat::F16 => {
                    numbers.for_each(|(x, b)| *x = f16::from_le_bytes([b[0], b[1]]).to_f32())
                }
            }
            // Branch-free per number; the numbers are still in the L1 cache.
            if bad.is_none() && out.iter().fold(false, |bad, x| bad | !x.is_finite()) {
                bad = out.iter().position(|x| !x.is_finite()).map(|at| i * LOOK + at);
            }
        }
        bad
    }

    pub(crate) fn round(self, numbers: &mut [f32]) {
        match self {
            StorageFormat::F32 => {}
            StorageFormat::Bf16 => numbers.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            StorageFormat::F16 => numbers.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        }
    }

    /// Appends numbers in this format, rounded to nearest even.
    pub(super) fn encode(self, numbers: &[f32], out: &mut Vec<u8>) -> Result<()> {
        match self {
            StorageFormat::F32 => out.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            StorageFormat::Bf16 => out.extend(numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            StorageFormat::F16 => {
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

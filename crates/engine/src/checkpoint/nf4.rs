//! bitsandbytes NF4 weights.
//!
//! A tensor `x.weight` (two codes per byte, the first in the upper half) is stored with `x.weight.absmax`,
//! `x.weight.quant_map` and `x.weight.quant_state.bitsandbytes__nf4` (JSON). With double quantisation:
//! `absmax = nested_quant_map[code] * nested_absmax + nested_offset`. Dequantised numbers are rounded to the type the model had
//! before, mostly bf16.

use super::format::StorageFormat;
use super::load::ModelDir;
use super::store::Store;
use crate::model::{ParamShape, StoredPart, Tensor};
use crate::{Error, Result};
use ferrl_kernels::codes::{NF4, decode_nf4, encode_nf4};
use safetensors::Dtype;
use serde_json::Value;

/// Suffixes of the auxiliary tensors.
const PARTS: [&str; 5] =
    [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"];

pub(super) struct Nf4Tensor<'a> {
    codes: &'a [u8],
    absmax: Vec<f32>,
    /// Numbers per block.
    pub block: usize,
    /// The unquantised shape.
    pub shape: Vec<usize>,
    /// The type that dequantised numbers are rounded to.
    rounds: StorageFormat,
}

/// A parameter in NF4, in the decoder's order.
pub(crate) struct Nf4Param {
    pub codes: Vec<u8>,
    pub absmax: Vec<f32>,
    /// Numbers per block.
    pub block: usize,
    /// Whether dequantised numbers are rounded to bf16.
    pub rounds: bool,
}

/// Whether the configuration says that the model is NF4-quantised; an error for other bitsandbytes quantisations.
pub(super) fn is_quantised(config: &Value) -> Result<bool> {
    let Some(q) = config.get("quantization_config").filter(|q| q.is_object()) else { return Ok(false) };
    if q.get("quant_method").and_then(Value::as_str) != Some("bitsandbytes") {
        return Ok(false); // refused with the other fields that change the computation
    }
    let kind = q.get("bnb_4bit_quant_type").and_then(Value::as_str).unwrap_or("fp4");
    let four = q.get("load_in_4bit").and_then(Value::as_bool).unwrap_or(false);
    let storage = q.get("bnb_4bit_quant_storage").and_then(Value::as_str).unwrap_or("uint8");
    if four && kind == "nf4" && storage == "uint8" {
        return Ok(true);
    }
    let what = match four {
        true => format!(
            "the weights are quantised to {kind} in {storage}; of bitsandbytes' formats NF4 in uint8 is read"
        ),
        false => "the weights are quantised to 8 bits; of bitsandbytes' formats NF4 is read".to_string(),
    };
    Err(Error::model(what).fix("a model in bf16 or NF4 (bnb_4bit_quant_type = \"nf4\")"))
}

/// Whether a tensor is auxiliary to a quantised one.
pub(super) fn is_part(name: &str) -> bool {
    PARTS.iter().any(|part| name.ends_with(part))
}

impl Store {
    /// The quantised tensor of this name; `None` if it is not quantised.
    pub(super) fn nf4(&self, stored: &str) -> Result<Option<Nf4Tensor<'_>>> {
        let Some((file, info, codes)) = self.get(stored).filter(|(_, info, _)| info.dtype == Dtype::U8)
        else {
            return Ok(None);
        };
        let fail = |what: &str| {
            Error::model(format!("tensor {stored:?} is quantised, and {what}"))
                .at(file)
                .fix("save it again with bitsandbytes' NF4 and safe_serialization, or use the model in bf16")
        };
        let bytes = |part: &str| {
            let found = self.get(&format!("{stored}{part}"));
            found
                .map(|(_, info, bytes)| (info.dtype, bytes))
                .ok_or_else(|| fail(&format!("{part} is missing")))
        };
        let floats = |part: &str| match bytes(part)? {
            (Dtype::F32, bytes) => Ok(read_f32s(bytes)),
            (other, _) => Err(fail(&format!("{part} is stored as {other:?}, expected F32"))),
        };
        let (_, state) = bytes(".quant_state.bitsandbytes__nf4")?;
        let state: Value = serde_json::from_slice(state).map_err(|_| fail("its quant_state is no JSON"))?;
        let size = |key: &str| state.get(key).and_then(Value::as_u64).map(|n| n as usize).filter(|n| *n > 0);
        let block =
            size("blocksize").filter(|b| b.is_multiple_of(2)).ok_or_else(|| fail("has no blocksize"))?;
        let shape = state.get("shape").and_then(Value::as_array).ok_or_else(|| fail("has no shape"))?;
        let shape: Option<Vec<usize>> = shape.iter().map(|n| n.as_u64().map(|n| n as usize)).collect();
        let shape = shape.ok_or_else(|| fail("its shape is not of whole numbers"))?;
        let rounds = match state.get("dtype").and_then(Value::as_str) {
            None | Some("float32") => StorageFormat::F32,
            Some("bfloat16") => StorageFormat::Bf16,
            Some("float16") => StorageFormat::F16,
            Some(other) => return Err(fail(&format!("its dtype is {other:?}"))),
        };
        if floats(".quant_map")?.iter().map(|x| x.to_bits()).ne(NF4.values.iter().map(|x| x.to_bits())) {
            return Err(fail("its quant_map is not that of NF4"));
        }
        let absmax = match bytes(".absmax")? {
            (Dtype::F32, bytes) => read_f32s(bytes),
            (Dtype::U8, codes) => {
                let (of_blocks, map) = (floats(".nested_absmax")?, floats(".nested_quant_map")?);
                let nested = size("nested_blocksize").ok_or_else(|| fail("has no nested_blocksize"))?;
                let offset = state.get("nested_offset").and_then(Value::as_f64);
                let offset = offset.ok_or_else(|| fail("has no nested_offset"))? as f32;
                if map.len() != 256 || of_blocks.len() != codes.len().div_ceil(nested) {
                    return Err(fail("its nested magnitudes do not fit"));
                }
                let one = |(i, &code): (usize, &u8)| map[code as usize] * of_blocks[i / nested] + offset;
                codes.iter().enumerate().map(one).collect()
            }
            (other, _) => return Err(fail(&format!(".absmax is stored as {other:?}"))),
        };
        let len = shape.iter().try_fold(1usize, |n, &m| n.checked_mul(m)).unwrap_or(usize::MAX);
        if info.shape.iter().product::<usize>() != len.div_ceil(2) || absmax.len() != len.div_ceil(block) {
            return Err(fail("its codes or magnitudes are not as many as its shape asks for"));
        }
        Ok(Some(Nf4Tensor { codes, absmax, block, shape, rounds }))
    }
}

impl Nf4Tensor<'_> {
    /// Dequantises it, as bitsandbytes does.
    pub(super) fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        decode_nf4(self.codes, &self.absmax, self.block, 0, &mut out);
        self.rounds.round(&mut out);
        out
    }
}

/// The layout of a quantised part: what transformers holds as `[in, out]`, bitsandbytes stores as `[out, in]`.
pub(super) fn layout(part: &StoredPart) -> StoredPart {
    let shape = part.shape.iter().copied();
    let shape = if part.transposed { shape.rev().collect() } else { shape.collect() };
    StoredPart { name: part.name.clone(), shape, transposed: false, order: part.order }
}

impl ModelDir {
    /// A parameter in NF4 if any of its parts is stored so: blocks keep their codes and magnitudes; other parts are quantised.
    pub(crate) fn nf4(&self, tensor: &Tensor) -> Result<Option<Nf4Param>> {
        let stored: Vec<_> = tensor.parts.iter().map(|part| self.quantised(part)).collect::<Result<_>>()?;
        let Some(first) = stored.iter().flatten().next() else { return Ok(None) };
        let (block, rounds, shape) = (first.block, first.rounds, &tensor.param);
        if stored.iter().flatten().any(|q| (q.block, q.rounds) != (block, rounds)) {
            return Err(not_nf4(shape, "has parts of different block sizes or types"));
        }
        if rounds == StorageFormat::F16 {
            return Err(not_nf4(shape, "is dequantised to float16, which the device does not hold"));
        }
        let (mut codes, mut absmax) =
            (vec![0; shape.len().div_ceil(2)], vec![0.0; shape.len().div_ceil(block)]);
        let mut start = 0usize;
        for (part, stored) in tensor.parts.iter().zip(&stored) {
            if !start.is_multiple_of(block) {
                return Err(displaced(shape));
            }
            let Some(stored) = stored else {
                let mut values = vec![0.0; part.len()];
                self.read_part(part, shape, &mut values)?;
                let (own, magnitudes) = encode_nf4(&values, block);
                codes[start / 2..start / 2 + own.len()].copy_from_slice(&own);
                absmax[start / block..start / block + magnitudes.len()].copy_from_slice(&magnitudes);
                start += part.len();
                continue;
            };
            let layout = layout(part);
            for (i, magnitude) in stored.absmax.iter().enumerate() {
                let (at, len) = (i * block, block.min(part.len() - i * block));
                let to = layout.decoder_index(at);
                if layout.decoder_index(at + len - 1) != to + len - 1 || !to.is_multiple_of(block) {
                    return Err(displaced(shape));
                }
                let (from, to, bytes) = (at / 2, (start + to) / 2, len.div_ceil(2));
                codes[to..to + bytes].copy_from_slice(&stored.codes[from..from + bytes]);
                absmax[2 * to / block] = *magnitude;
            }
            start += part.len();
        }
        Ok(Some(Nf4Param { codes, absmax, block, rounds: rounds == StorageFormat::Bf16 }))
    }
}

fn displaced(shape: &ParamShape) -> Error {
    not_nf4(shape, "has blocks that lie otherwise in the files than the decoder holds the weight")
}

fn not_nf4(shape: &ParamShape, what: &str) -> Error {
    Error::model(format!("the NF4 weight {} {what}", shape.id)).fix("adapter.base = \"device\" or \"host\"")
}

fn read_f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

//! Tensor maps: descriptors of matrices for Hopper's TMA.

use super::context::check;
use crate::error::Result;
use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType_enum as DataType, CUtensorMapFloatOOBfill_enum as Outside,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle,
};
use std::ffi::c_void;

/// Columns per box: 128 bytes, the width of the swizzle.
pub(super) const BOX_COLUMNS: usize = 64;

/// A dense row-major bf16 matrix, copied in boxes of [`BOX_COLUMNS`] columns with 128-byte swizzle; zero-filled out of bounds.
pub(super) struct TensorMap(CUtensorMap);

impl TensorMap {
    /// For `[rows, columns]` at an address that is a multiple of 16, with `box_rows` rows per box; `columns` is a multiple of 8.
    pub(super) fn of(at: u64, [rows, columns]: [usize; 2], box_rows: usize) -> Result<Self> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        let (sizes, pitch) = ([columns as u64, rows as u64], [(columns * 2) as u64]);
        let (boxes, steps) = ([BOX_COLUMNS as u32, box_rows as u32], [1u32; 2]);
        // SAFETY: live arrays of the matrix's rank (one pitch fewer); the address is only recorded.
        let done = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                at as *mut c_void,
                sizes.as_ptr(),
                pitch.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Outside::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(done, || format!("describing a matrix {rows}x{columns} in boxes of {box_rows} rows"))?;
        Ok(TensorMap(map))
    }

    /// Address of the kernel parameter.
    pub(super) fn parameter(&self) -> *mut c_void {
        (&raw const self.0).cast_mut().cast()
    }
}

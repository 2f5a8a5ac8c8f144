//! Embedding lookup, and its gradient.

use crate::backend::EmbeddingOps;
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::row_count;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel, split_parts, u32s};
use crate::{Buffer, Result, shapes};

impl EmbeddingOps for Cuda {
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        shapes::embed(self, ids, table, out)?;
        if ids.is_empty() {
            return Ok(());
        }
        let width = row_count(out.len(), ids.len());
        let (name, [first, second]) = match split_parts(table, 0) {
            Some(parts) => ("embed_split", parts),
            None => ("embed_whole", [f32_ptr(table), 0]),
        };
        let args = args![ids, first, second, scale, add, width as u32, f32_ptr(out)];
        self.launch("embed", name, Grid::new(ids.len(), 256), &args)
    }
    // The host sorts the rows by id, so that each id's sum has a fixed order, without atomics.
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        shapes::embed_backward(self, ids, dout, dtable)?;
        if ids.is_empty() {
            return Ok(());
        }
        let width = row_count(dout.len(), ids.len());
        let ids = u32s(ids);
        let mut order: Vec<u64> =
            ids.iter().enumerate().map(|(row, &id)| u64::from(id) << 32 | row as u64).collect();
        order.sort_unstable();
        let (mut groups, mut starts) = (Vec::new(), Vec::new());
        for (i, &pair) in order.iter().enumerate() {
            let id = (pair >> 32) as u32;
            if groups.last() != Some(&id) {
                groups.push(id);
                starts.push(i as u32);
            }
        }
        let count = groups.len();
        starts.push(order.len() as u32);
        // One transfer: the groups' ids, their starts, the rows.
        groups.extend(&starts);
        groups.extend(order.iter().map(|&pair| pair as u32));
        let lists = self.uploaded(&groups)?;
        let (starts, rows) = (lists.ptr() + 4 * count as u64, lists.ptr() + 4 * (2 * count + 1) as u64);
        let args = args![&lists, starts, rows, dout, scale, width as u32, f32_ptr(dtable)];
        let grid = Grid::plane(count, width.div_ceil(128), 128);
        self.launch("embed", &kernel("embed_backward", &[dout]), grid, &args)
    }
}

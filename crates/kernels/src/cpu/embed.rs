//! Embedding lookup, and its gradient.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::{f32s, f32s_mut, u32s};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{PIECE, row_count, rows_of_task, typed};
use crate::backend::EmbeddingOps;
use crate::{Buffer, Result, shapes};
use std::ops::Range;

impl EmbeddingOps for Cpu {
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()> {
        shapes::embed(self, ids, table, out)?;
        let (ids, table, out) = (u32s(ids), f32s(table), f32s_mut(out));
        if ids.is_empty() {
            return Ok(());
        }
        let width = row_count(out.len(), ids.len());
        let out = Disjoint::new(out);
        self.pool.ranges(ids.len(), rows_of_task(width), |r| {
            // SAFETY: tasks have disjoint rows.
            let out = unsafe { out.part(r.start * width, r.len() * width) };
            embed_rows(self.level, &ids[r], table, scale, add, out);
        });
        Ok(())
    }
    // An id's sum over this call's rows starts from zero and is then added to `dtable` once, like gradients of matrices; rows
    // of ids that do not occur are not touched.
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()> {
        shapes::embed_backward(self, ids, dout, dtable)?;
        let (ids, dtable) = (u32s(ids), f32s_mut(dtable));
        if ids.is_empty() {
            return Ok(());
        }
        let width = row_count(dout.len(), ids.len());
        // Sort rows by id (stable): each id's rows become contiguous.
        let mut order: Vec<(u32, u32)> = ids.iter().enumerate().map(|(row, &id)| (id, row as u32)).collect();
        order.sort_unstable();
        typed!([ref dout] scatter_add(self, &order, dout, width, scale, dtable));
        Ok(())
    }
}

multiversion! {
    fn embed_rows<S>(s, ids: &[u32], table: &[f32], scale: f32, add: bool, out: &mut [f32]) {
        let (width, scale) = (out.len() / ids.len(), s.splat(scale));
        for i in 0..ids.len() {
            let row = &table[ids[i] as usize * width..][..width];
            let out = &mut out[i * width..][..width];
            for j in (0..width).step_by(LANES) {
                let v = get(s, row, j);
                let v = if add { s.fma(scale, v, get(s, out, j)) } else { s.mul(scale, v) };
                put(s, out, j, v);
            }
        }
    }
}

/// Columns per task, so that the rows of a frequent id are also split between threads.
const COLUMNS: usize = 8 * BLOCK;
/// Columns accumulated in registers over an id's rows.
const BLOCK: usize = 4 * LANES;

fn scatter_add<T: Stored>(
    cpu: &Cpu,
    order: &[(u32, u32)],
    dout: &[T],
    width: usize,
    scale: f32,
    dtable: &mut [f32],
) {
    let mut tasks = Vec::new();
    let mut from = 0;
    for i in 1..=order.len() {
        let whole = i == order.len() || order[i].0 != order[i - 1].0;
        if whole && (i == order.len() || i - from >= PIECE / COLUMNS) {
            tasks.push(from..i);
            from = i;
        }
    }
    let dtable = Disjoint::new(dtable);
    let columns = width.div_ceil(COLUMNS);
    cpu.pool.run(tasks.len() * columns, |i| {
        let from = i % columns * COLUMNS;
        let range = from..(from + COLUMNS).min(width);
        add_groups(cpu.level, &order[tasks[i / columns].clone()], (dout, width), range, scale, dtable);
    });
}

multiversion! {
    fn add_groups<S, type T: Stored>(s, order: &[(u32, u32)], rows: (&[T], usize), columns: Range<usize>, scale: f32, dtable: Disjoint<'_, f32>) {
        let (dout, width) = rows;
        let scale = s.splat(scale);
        let mut from = 0;
        while from < order.len() {
            let id = order[from].0;
            let mut to = from + 1;
            while to < order.len() && order[to].0 == id {
                to += 1;
            }
            // SAFETY: one task has all the rows of an id, and these columns.
            let table = unsafe { dtable.part(id as usize * width + columns.start, columns.len()) };
            for at in (0..columns.len()).step_by(BLOCK) {
                let n = BLOCK.min(columns.len() - at);
                let mut sums = [s.splat(0.0); BLOCK / LANES];
                for i in from..to {
                    let row = &dout[order[i].1 as usize * width + columns.start + at..][..n];
                    for v in 0..BLOCK / LANES {
                        if v * LANES < n {
                            sums[v] = s.fma(scale, get(s, row, v * LANES), sums[v]);
                        }
                    }
                }
                let table = &mut table[at..at + n];
                for v in 0..BLOCK / LANES {
                    if v * LANES < n {
                        let sum = s.add(get(s, table, v * LANES), sums[v]);
                        put(s, table, v * LANES, sum);
                    }
                }
            }
            from = to;
        }
    }
}

//! A sub-matrix of a buffer, serialised row by row.

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::error::Result;
use std::ops::Range;

/// Rows and columns of a row-major buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Row range.
    pub rows: Range<usize>,
    /// Row width of the buffer.
    pub width: usize,
    /// Column ranges, in serialisation order.
    pub columns: Vec<Range<usize>>,
}

impl Block {
    /// Full rows of a buffer.
    pub fn rows(rows: Range<usize>, width: usize) -> Self {
        Block { rows, width, columns: std::iter::once(0..width).collect() }
    }

    pub fn len(&self) -> usize {
        self.rows.len() * self.columns()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its rows in groups of at most `most` elements, but one row at least.
    pub(super) fn in_parts(&self, most: usize) -> impl Iterator<Item = Block> {
        let (rows, each) = (self.rows.clone(), (most / self.columns().max(1)).max(1));
        let part =
            move |first: usize| Block { rows: first..(first + each).min(self.rows.end), ..self.clone() };
        rows.step_by(each).map(part)
    }

    fn columns(&self) -> usize {
        self.columns.iter().map(Range::len).sum()
    }

    /// Its first element, if it is contiguous in the buffer.
    pub(super) fn in_a_row(&self) -> Option<usize> {
        match &self.columns[..] {
            [columns] if columns.len() == self.width => Some(self.rows.start * self.width),
            _ => self.is_empty().then_some(0),
        }
    }

    /// Copies it contiguously to another buffer, from element `at` on.
    pub fn pack(&self, b: &dyn Backend, from: &Buffer, to: &mut Buffer, at: usize) -> Result<()> {
        self.parts().try_for_each(|(start, before, count)| {
            let sizes = [self.rows.len(), count];
            b.copy_block((from, start, self.width), (to, at + before, self.columns()), sizes)
        })
    }

    /// The inverse.
    pub fn unpack(&self, b: &dyn Backend, (from, at): (&Buffer, usize), to: &mut Buffer) -> Result<()> {
        self.parts().try_for_each(|(start, before, count)| {
            let sizes = [self.rows.len(), count];
            b.copy_block((from, at + before, self.columns()), (to, start, self.width), sizes)
        })
    }

    /// Per column range: first element, columns serialised before it, number of columns.
    fn parts(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let first = self.rows.start * self.width;
        // An empty block has no valid offsets.
        let some = if self.is_empty() { &[][..] } else { &self.columns };
        some.iter().scan(0, move |before, columns| {
            let part = (first + columns.start, *before, columns.len());
            *before += columns.len();
            Some(part)
        })
    }
}

//! Some columns of some rows of a buffer, which travel one row behind the other.

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::error::Result;
use std::ops::Range;

/// Rows of a buffer, and of each of them some columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Which rows.
    pub rows: Range<usize>,
    /// Elements of a row of the buffer.
    pub width: usize,
    /// Which of them, in the order in which they travel.
    pub columns: Vec<Range<usize>>,
}

impl Block {
    /// Whole rows of a buffer.
    pub fn rows(rows: Range<usize>, width: usize) -> Self {
        Block { rows, width, columns: std::iter::once(0..width).collect() }
    }

    /// Elements of it.
    pub fn len(&self) -> usize {
        self.rows.len() * self.columns()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn columns(&self) -> usize {
        self.columns.iter().map(Range::len).sum()
    }

    /// Its first element, where all of them lie one behind the other in the buffer.
    pub(super) fn in_a_row(&self) -> Option<usize> {
        match &self.columns[..] {
            [columns] if columns.len() == self.width => Some(self.rows.start * self.width),
            _ => self.is_empty().then_some(0),
        }
    }

    /// From a buffer to another one, where it lies in a row from element `at` on.
    pub fn pack(&self, b: &dyn Backend, from: &Buffer, to: &mut Buffer, at: usize) -> Result<()> {
        self.parts().try_for_each(|(start, before, count)| {
            let sizes = [self.rows.len(), count];
            b.copy_block((from, start, self.width), (to, at + before, self.columns()), sizes)
        })
    }

    /// The way back.
    pub(super) fn unpack(
        &self,
        b: &dyn Backend,
        (from, at): (&Buffer, usize),
        to: &mut Buffer,
    ) -> Result<()> {
        self.parts().try_for_each(|(start, before, count)| {
            let sizes = [self.rows.len(), count];
            b.copy_block((from, at + before, self.columns()), (to, start, self.width), sizes)
        })
    }

    /// Of each range of columns its first element, the columns that travel before it, and how many it has.
    fn parts(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let first = self.rows.start * self.width;
        // A buffer without rows has no place where columns begin.
        let some = if self.is_empty() { &[][..] } else { &self.columns };
        some.iter().scan(0, move |before, columns| {
            let part = (first + columns.start, *before, columns.len());
            *before += columns.len();
            Some(part)
        })
    }
}

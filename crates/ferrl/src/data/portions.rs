//! Work on many rows with all cores, its results in the order of the rows.

use ferrl_kernels::cores;
use std::ops::Range;
use std::thread;

use ferrl_engine::{Error, Result};

/// Rows that one thread works on at a time.
pub const PORTION: usize = 128;

/// Works on the rows `0..count` in portions. `take` gets each result in the order of the rows and, after every round of all
/// cores, how many rows are done; it returns whether to go on.
pub fn portions<T: Send>(
    count: usize,
    work: &(dyn Fn(Range<usize>) -> Result<T> + Sync),
    take: &mut dyn FnMut(T, usize) -> Result<bool>,
) -> Result<bool> {
    let threads = cores();
    let mut start = 0;
    while start < count {
        let end = (start + PORTION * threads).min(count);
        let ranges = (start..end).step_by(PORTION).map(|from| from..(from + PORTION).min(end));
        let results: Vec<(usize, Result<T>)> = thread::scope(|scope| {
            let running: Vec<_> = ranges.map(|range| (range.end, scope.spawn(move || work(range)))).collect();
            let died = |_| Err(Error::data("a thread that read the data ended early"));
            running.into_iter().map(|(done, t)| (done, t.join().unwrap_or_else(died))).collect()
        });
        let mut goes_on = true;
        // The first fault in the order of the rows is reported.
        for (done, result) in results {
            goes_on &= take(result?, done)?;
        }
        if !goes_on {
            return Ok(false);
        }
        start = end;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_and_the_first_fault_is_told() {
        let mut rows = Vec::new();
        let whole = portions(1000, &|range| Ok(range.collect::<Vec<_>>()), &mut |part, done| {
            rows.extend(part);
            assert_eq!(rows.len(), done);
            Ok(true)
        });
        assert!(whole.unwrap() && rows.into_iter().eq(0..1000));
        let fails = |range: Range<usize>| match range.start {
            0 => Ok(()),
            n => Err(Error::data(format!("row {n}"))),
        };
        let error = portions(1000, &fails, &mut |(), _| Ok(true)).unwrap_err().to_string();
        assert!(error.contains("row 128"), "{error}");
        assert!(!portions(1000, &|_| Ok(()), &mut |(), _| Ok(false)).unwrap());
    }
}

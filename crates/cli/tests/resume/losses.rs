//! What must not cost a run anything: readers that go away, disks that are full, faults in the middle.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use crate::common::{Folder, Left, STAGES};
use std::fs::OpenOptions;
use std::process::Stdio;

#[test]
fn a_reader_that_goes_away_does_not_end_a_run() {
    let whole = Folder::new("reader-whole", STAGES);
    whole.succeed(2);
    let want = Left::by(&whole);
    let folder = Folder::new("reader", STAGES);
    let mut child = folder.command(2).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take())); // as `2>&1 | head -0` does
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
    Left::by(&folder).assert_equals(&want, "nobody read what it said");
    assert!(folder.run().join("report.html").exists());
}

#[test]
#[cfg(target_os = "linux")]
fn output_that_cannot_be_written_does_not_end_a_run() {
    let folder = Folder::of("full-output", "grpo");
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = folder.command(1).stdout(full()).stderr(full()).status().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(Left::by(&folder).metrics.len(), 14);
}

//! Coarse, exact, deterministic operations on hardware. Knows nothing of models.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))] // both panic when the pipe is closed

pub mod backend;
pub mod buffer;
pub mod check;
pub mod codes;
pub mod comm;
pub mod composed;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod footprint;
mod heap;
pub mod math;
pub mod mmap;
mod operands;
pub mod philox;
mod plain;
mod shapes;
mod sync;
pub mod truncate;
pub mod usage;
mod words;

pub use backend::Backend;
pub use buffer::{Buffer, DType, Weight};
pub use comm::Ranks;
pub use cpu::{narrow, widen};
pub use error::{Class, Error, Result, nearest};
pub use footprint::Footprint;
pub use sync::{cores, lock};
pub use usage::{MemoryUsage, Purpose};
pub use words::{counted, plural};

use std::sync::Arc;

/// The GPU type, and what communication between ranks needs of it.
pub(crate) mod card {
    pub(crate) use crate::cuda::{CardId, CardStaging, ExchangeStream, StreamEvent, element, libraries};
}
pub use cuda::Cuda as Card;

/// A kind of device.
pub struct Device {
    /// Name for users.
    pub name: &'static str,
    /// Opens the device with this index; `threads` is the number of CPU threads (default: one per core).
    pub open: fn(index: usize, threads: Option<usize>) -> Result<Arc<dyn Backend>>,
    /// Its memory and speed constants.
    pub footprint: &'static Footprint,
    /// Stops background work; called before the program exits.
    pub settle: fn(),
}

/// Every supported kind of device; `auto` uses the last one that opens.
pub const BACKENDS: &[Device] = &[
    Device {
        name: "cpu",
        open: |index, threads| cpu::open(index, threads),
        footprint: &cpu::FOOTPRINT,
        settle: || (),
    },
    Device {
        name: "cuda",
        open: |index, _| cuda::open(index),
        footprint: &cuda::FOOTPRINT,
        settle: cuda::settle,
    },
];

/// Selects the best device available.
pub const AUTO: &str = "auto";

/// Kind and index of a device name: `cpu`, `cuda`, `cuda:1`; `None` for `auto`.
fn parse(name: &str) -> Result<Option<(&'static Device, usize)>> {
    if name == AUTO {
        return Ok(None);
    }
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    if let (Some(device), Ok(index)) = (BACKENDS.iter().find(|d| d.name == kind), index.parse()) {
        return Ok(Some((device, index)));
    }
    let names: Vec<&str> = BACKENDS.iter().map(|d| d.name).chain([AUTO]).collect();
    let hint = nearest(kind, names.iter().copied()).unwrap_or(names[0]);
    Err(Error::usage(format!(
        "unknown device {name:?}, expected one of {}, or a kind with a number such as {}:0",
        names.join(", "),
        names[BACKENDS.len() - 1]
    ))
    .fix(format!("use the device {hint}")))
}

/// Refuses an invalid device name, without opening a device.
pub fn check_name(name: &str) -> Result<()> {
    parse(name).map(|_| ())
}

/// Constants of the named device, which need not be present.
pub fn footprint(name: &str) -> Result<&'static Footprint> {
    let opens = |d: &&Device| (d.open)(0, None).is_ok();
    let found = || BACKENDS[1..].iter().rev().find(opens).unwrap_or(&BACKENDS[0]);
    Ok(parse(name)?.map_or_else(found, |(device, _)| device).footprint)
}

/// Opens the named device for one of several ranks: ranks of one machine divide its cores, and use one GPU each.
pub fn open_for(name: &str, threads: Option<usize>, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
    let (here, number) = ranks.local();
    if here == 1 {
        return open(name, threads);
    }
    let threads = threads.or_else(|| Some(ranks.threads()));
    let card = comm::card_of(number);
    let numbered = |kind: &Device| open(&format!("{}:{card}", kind.name), threads);
    match BACKENDS[1..]
        .iter()
        .rev()
        .find(|kind| kind.name == name || name == AUTO && (kind.open)(0, threads).is_ok())
    {
        Some(kind) => numbered(kind),
        None => open(name, threads),
    }
}

/// Opens the named device.
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    let chosen = parse(name)?;
    if threads == Some(0) {
        return Err(Error::usage("0 threads cannot compute anything").fix("1 thread or more"));
    }
    match chosen {
        Some((device, index)) => (device.open)(index, threads),
        None => {
            let opened = BACKENDS[1..].iter().rev().find_map(|d| (d.open)(0, threads).ok());
            opened.map_or_else(|| (BACKENDS[0].open)(0, threads), Ok)
        }
    }
}
